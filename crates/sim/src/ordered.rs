//! Checker of ordered maps: every key behaves as one register, and a scan looks up each key of its range.
//!
//! A scan is not a snapshot. Each of its lookups takes effect at an instant of its own between the scan's call and its
//! return. So a scan whose items ascend within its range is correct if and only if each item is a read of its key, and
//! each other key that the scan has covered was absent at some instant within the scan. A scan covers its range up to
//! its last item if it has returned as many items as it may, and otherwise up to the end. So the checker of registers,
//! [`crate::linearizable`], judges the operations of a key together with the lookups of the key by scans.
//!
//! Most lookups tell nothing that another one does not. `telling` drops these, so the search of a key is about as
//! long as the list of the key's changes and of the reads at the same time. Before that, the check takes a step for
//! each lookup.
//!
//! Invariant: a history without the dropped lookups is correct if and only if the whole history is.
//!
//! Invariant: an undecided history is never called good.

use std::collections::{BTreeMap, BTreeSet};

use crate::checker::{Checked, Checker, Violation};
use crate::history::map::{Ask, History, Item, Operation, Outcome};
use crate::history::register::{self, Value};
use crate::linearizable::{self, Limits, Verdict, check_key, end_of, explain_key};

/// Checker of ordered maps. All keys of a history may belong to one map, or to several with separate ranges of keys.
pub struct Maps(pub Limits);

impl Checker for Maps {
    type Ask = Ask;

    const PROPERTY: &'static str =
        "every key was linearizable, and every scan returned the keys of its range once and in order";

    fn check(&self, history: &History) -> Checked<Ask> {
        let mut checked = Checked::default();
        let of = history.operations().len();
        for scan in history.operations() {
            let Some(what) = misordered(scan) else { continue };
            checked
                .violated
                .push(format!("a scan of client {} from key {} returned {what}", scan.client, scan.key));
            checked.window.get_or_insert_with(|| {
                let what = format!("a scan returned {what}");
                Violation { what, operations: vec![scan.clone()], offender: 0, instead: Vec::new(), of }
            });
        }
        let mut wrong = Vec::new();
        for (key, operations) in by_key(history) {
            match check_key(&operations, self.0).0 {
                Verdict::Linearizable => {}
                Verdict::Violated => wrong.push((key, operations)),
                Verdict::Undecided(why) => {
                    checked.undecided.push(format!("key {key} is undecided: {why}"));
                }
            }
        }
        if let [(first, operations), others @ ..] = &wrong[..] {
            checked.violated.push(match others.len() {
                0 => format!("key {first} is not linearizable"),
                more => format!("{} keys are not linearizable; the first is {first}", more + 1),
            });
            if checked.window.is_none() {
                let found = explain_key(*first, operations.clone(), self.0);
                checked.window = found.map(|found| of_map(history, *first, &found));
            }
        }
        checked
    }
}

/// Items and arguments of a scan that has an outcome.
fn scanned(operation: &Operation) -> Option<(&[Item], u64, u32)> {
    match (&operation.outcome, operation.ask) {
        (Outcome::Scanned(items), Ask::Scan { keys, limit }) => Some((items, keys, limit)),
        _ => None,
    }
}

/// Returns what is wrong with the keys of a scan's items, whatever the keys' values are.
fn misordered(operation: &Operation) -> Option<&'static str> {
    let (items, keys, limit) = scanned(operation)?;
    let is_outside = |item: &Item| item.distance < 0 || item.distance as u64 >= keys;
    if items.iter().any(is_outside) {
        return Some("a key outside its range");
    }
    if items.len() > limit as usize {
        return Some("more items than its limit");
    }
    let distances: BTreeSet<i64> = items.iter().map(|item| item.distance).collect();
    if distances.len() < items.len() {
        return Some("a key twice");
    }
    (!items.is_sorted_by_key(|item| item.distance)).then_some("keys that do not ascend")
}

/// Returns for each key its operations and its lookups by scans, as operations on a register, in the order of their
/// calls. Lookups that tell nothing are missing, and so are scans with misordered items.
fn by_key(history: &History) -> BTreeMap<u64, Vec<register::Operation>> {
    let mut keys: BTreeMap<u64, (Vec<register::Operation>, Vec<register::Operation>)> = BTreeMap::new();
    let all = history.operations();
    for operation in all {
        if let Some(own) = on_register(operation) {
            keys.entry(operation.key).or_default().0.push(own);
        }
    }
    let scans = all.iter().filter(|scan| misordered(scan).is_none());
    for (scan, (items, range, limit)) in scans.filter_map(|scan| scanned(scan).map(|of| (scan, of))) {
        let lookup = |outcome| register::Operation {
            client: scan.client,
            key: scan.key,
            ask: register::Ask::Get,
            called: scan.called,
            returned: scan.returned,
            outcome,
        };
        let found: BTreeMap<u64, Value> =
            items.iter().map(|item| (scan.key.saturating_add(item.distance as u64), item.value)).collect();
        for (&key, &value) in &found {
            let outcome = register::Outcome::Found(value, None);
            keys.entry(key).or_default().1.push(register::Operation { key, ..lookup(outcome) });
        }
        let end = match found.last_key_value() {
            Some((last, _)) if items.len() == limit as usize => *last,
            None if limit == 0 => scan.key,
            _ => scan.key.saturating_add(range),
        };
        // A key that only scans have seen needs no more lookups.
        for (&key, (_, lookups)) in keys.range_mut(scan.key..end).filter(|(key, _)| !found.contains_key(*key))
        {
            lookups.push(register::Operation { key, ..lookup(register::Outcome::Absent) });
        }
    }
    let merged = |(key, (own, lookups)): (u64, (Vec<register::Operation>, Vec<register::Operation>))| {
        let mut operations = telling(&own, lookups);
        operations.extend(own);
        operations.sort_by_key(|operation| operation.called.index);
        (key, operations)
    };
    keys.into_iter().map(merged).collect()
}

/// Returns an operation on one key as the operation on a register.
fn on_register(operation: &Operation) -> Option<register::Operation> {
    let ask = match operation.ask {
        Ask::Get => register::Ask::Get,
        Ask::Put(value) => register::Ask::Put(value),
        Ask::PutIfAbsent(value) => register::Ask::PutIfAbsent(value),
        Ask::Delete => register::Ask::Delete,
        Ask::Scan { .. } => return None,
    };
    let outcome = match operation.outcome {
        Outcome::Found(value) => register::Outcome::Found(value, None),
        Outcome::Absent => register::Outcome::Absent,
        Outcome::Done => register::Outcome::Done(None),
        Outcome::Present => register::Outcome::Conflict(None),
        Outcome::Failed => register::Outcome::Failed,
        Outcome::Unknown | Outcome::Scanned(_) => register::Outcome::Unknown,
    };
    let &Operation { client, key, called, returned, .. } = operation;
    Some(register::Operation { client, key, ask, called, returned, outcome })
}

/// Drops lookups of one key that follow from others; `own` has the key's operations:
/// - A lookup with the outcome of a shorter one within it may take effect together with that one.
/// - While no change can take effect, the key keeps its state, so one of several lookups with the same outcome is
///   enough.
fn telling(own: &[register::Operation], mut lookups: Vec<register::Operation>) -> Vec<register::Operation> {
    lookups.sort_by_key(|lookup| (lookup.outcome, std::cmp::Reverse(lookup.called.index)));
    let mut last: Option<(register::Outcome, u64)> = None;
    lookups.retain(|lookup| {
        let end = end_of(lookup);
        let is_implied = last.is_some_and(|(outcome, within)| outcome == lookup.outcome && within < end);
        if !is_implied {
            last = Some((lookup.outcome, end));
        }
        !is_implied
    });
    let changes = periods_of_change(own, &lookups);
    let mut kept = BTreeSet::new();
    lookups.retain(|lookup| {
        let before = changes.partition_point(|[begin, _]| *begin < end_of(lookup));
        let is_calm = before == 0 || changes[before - 1][1] < lookup.called.index;
        !is_calm || kept.insert((before, lookup.outcome))
    });
    lookups
}

/// Returns the periods in which a key may change, in order and without overlaps, as the indices of their first and
/// their last events.
fn periods_of_change(own: &[register::Operation], lookups: &[register::Operation]) -> Vec<[u64; 2]> {
    let mut writers: BTreeMap<Value, u32> = BTreeMap::new();
    let mut seen: BTreeMap<Value, u64> = BTreeMap::new();
    for operation in own.iter().chain(lookups) {
        if let Some(value) = linearizable::written_by(&operation.ask) {
            *writers.entry(value).or_default() += 1;
        }
        if let register::Outcome::Found(value, _) = operation.outcome {
            let first = seen.entry(value).or_insert(u64::MAX);
            *first = (*first).min(end_of(operation));
        }
    }
    let period = |operation: &register::Operation| {
        let is_change = match operation.outcome {
            register::Outcome::Done(_) => true,
            register::Outcome::Unknown => operation.ask != register::Ask::Get,
            _ => false,
        };
        // A value that a read has returned was stored before, and by its only writer.
        let value = linearizable::written_by(&operation.ask).filter(|value| writers[value] == 1);
        let first_seen = value.and_then(|value| seen.get(&value)).copied().unwrap_or(u64::MAX);
        is_change.then(|| [operation.called.index, end_of(operation).min(first_seen)])
    };
    let mut periods: Vec<[u64; 2]> = own.iter().filter_map(period).collect();
    periods.sort_unstable();
    periods.dedup_by(|next, before| {
        let overlap = next[0] <= before[1];
        if overlap {
            before[1] = before[1].max(next[1]);
        }
        overlap
    });
    periods
}

/// Returns a violation of a key's register as one of the map: each lookup is shown as its scan.
fn of_map(history: &History, key: u64, found: &linearizable::Violation) -> Violation<Ask> {
    let all = history.operations();
    let original = |shown: &register::Operation| {
        let at = all.binary_search_by_key(&shown.called.index, |operation| operation.called.index);
        let operation = all[at.expect("each operation comes from the history")].clone();
        match shown.returned {
            Some(_) => operation,
            None => Operation { returned: None, outcome: Outcome::Unknown, ..operation },
        }
    };
    let operations: Vec<Operation> = found.operations.iter().map(original).collect();
    let offender = &operations[found.offender];
    let what = match offender.ask {
        Ask::Scan { .. } => format!("key {key}, {} keys after the first of a scan,", key - offender.key),
        _ => format!("key {key}"),
    };
    let instead = found.instead.iter().filter_map(|outcome| match outcome {
        register::Outcome::Found(value, _) => Some(Outcome::Found(*value)),
        register::Outcome::Absent => Some(Outcome::Absent),
        register::Outcome::Done(_) => Some(Outcome::Done),
        register::Outcome::Conflict(_) => Some(Outcome::Present),
        _ => None,
    });
    Violation {
        what: format!("{what} is not linearizable"),
        instead: instead.filter(|outcome| crate::history::Ask::can_have(&offender.ask, outcome)).collect(),
        operations,
        offender: found.offender,
        of: all.len(),
    }
}

#[cfg(test)]
mod tests;
