//! Checks that counters behaved like counters: each addition found the value that the addition before it left, and each
//! read found a value at a moment when the counter had it.
//!
//! Additions return the value that they found, so a history names the position of each addition that returned. The
//! checker puts the operations of a counter in the order of these positions, and compares this order with the order in
//! time. This takes n log n steps, and every history is decided.
//!
//! An addition of unknown outcome may take any one position from its call on, or none. If a later value shows the
//! addition's tag, its position is known. The other such additions fill the positions for which no addition is known.
//!
//! Invariant: an addition of unknown outcome counts as if it never returned. It may be carried out at any later time,
//! for example by a client that recovers its client.

use crate::checker::{Checked, Checker, Violation};
use crate::history::counter::{Ask, History, Operation, Outcome, Value};
use std::collections::BTreeMap;

/// Checker of counters. Each key of a history is a counter, checked separately.
pub struct Counters;

impl Checker for Counters {
    type Ask = Ask;

    const PROPERTY: &'static str =
        "every counter returned the values that its additions left, in their order";

    fn check(&self, history: &History) -> Checked<Ask> {
        let mut counters: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
        for operation in history.operations() {
            counters.entry(operation.key).or_default().push(*operation);
        }
        let mut checked = Checked::default();
        for (key, operations) in counters {
            let Some((what, mut shown)) = finding(&operations) else { continue };
            checked.violated.push(format!("counter {key}: {what}"));
            let offender = shown[0];
            shown.sort_by_key(|operation| operation.called.index);
            shown.dedup();
            let offender = shown.iter().position(|operation| *operation == offender).unwrap_or(0);
            checked.window.get_or_insert(Violation {
                what: format!("counter {key} is not a counter: {what}"),
                operations: shown,
                offender,
                instead: Vec::new(),
                of: operations.len(),
            });
        }
        checked
    }
}

/// A description of a violation, and the operations that show the violation. The first operation is the one with the
/// wrong outcome.
type Finding = (&'static str, Vec<Operation>);

/// Returns the index of the event after which an operation has no more effect.
fn end_of(operation: &Operation) -> u64 {
    let returned = operation.returned.filter(|_| operation.outcome != Outcome::Unknown);
    returned.map_or(u64::MAX, |returned| returned.index)
}

/// An addition whose position is known, and the operation that shows the position.
#[derive(Clone, Copy)]
struct Placed<'a> {
    add: &'a Operation,
    shown_by: &'a Operation,
}

/// Finds a violation in the operations on one counter.
fn finding(operations: &[Operation]) -> Option<Finding> {
    let adds: BTreeMap<u64, &Operation> = operations
        .iter()
        .filter_map(|operation| if let Ask::Add(tag) = operation.ask { Some((tag, operation)) } else { None })
        .collect();
    // The additions by the count that they left, the counts by additions, and the reads by the count that they found.
    let mut placed: BTreeMap<u64, Placed<'_>> = BTreeMap::new();
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    let mut reads: BTreeMap<u64, Vec<&Operation>> = BTreeMap::new();
    for shown_by in operations {
        let Outcome::Found(found) = shown_by.outcome else { continue };
        let own = match shown_by.ask {
            Ask::Add(tag) => Some(Value { count: found.count + 1, tag }),
            Ask::Read => {
                reads.entry(found.count).or_default().push(shown_by);
                None
            }
        };
        for Value { count, tag } in [Some(found), own].into_iter().flatten() {
            if count == 0 || tag == 0 {
                if (count, tag) != (0, 0) {
                    return Some((
                        "a value has a tag without a count, or a count without a tag",
                        vec![*shown_by],
                    ));
                }
                continue;
            }
            let Some(add) = adds.get(&tag).filter(|add| add.outcome != Outcome::Failed) else {
                return Some(("a value was found that no addition has left", vec![*shown_by]));
            };
            let first = placed.entry(count).or_insert(Placed { add, shown_by });
            if first.add != *add {
                let shown = vec![*shown_by, *first.shown_by, **add, *first.add];
                return Some(("two additions left the same count, so one of them was lost", shown));
            }
            if *counts.entry(tag).or_insert(count) != count {
                return Some(("an addition was carried out twice", vec![*shown_by, **add]));
            }
        }
    }
    order_violation(operations, &placed, &counts, &reads)
}

/// Finds a violation of the order in time, or a position that no addition can have.
fn order_violation(
    operations: &[Operation],
    placed: &BTreeMap<u64, Placed<'_>>,
    counts: &BTreeMap<u64, u64>,
    reads: &BTreeMap<u64, Vec<&Operation>>,
) -> Option<Finding> {
    let last = placed.keys().next_back().copied().unwrap_or(0);
    // For each count from 0: the addition that left it, and then the reads that found it.
    let steps: Vec<(Option<&Operation>, &[&Operation])> = (0..=last)
        .map(|count| {
            (placed.get(&count).map(|placed| placed.add), reads.get(&count).map_or(&[][..], |of| of))
        })
        .collect();
    // Of all operations in earlier steps, the one that was called last.
    let mut latest: Option<&Operation> = None;
    for (add, reads) in &steps {
        for group in [add.as_slice(), reads] {
            if let Some(latest) = latest
                && let Some(early) = group.iter().find(|operation| end_of(operation) < latest.called.index)
            {
                return Some(("a value was found or left after it was replaced", vec![*latest, **early]));
            }
            let called = |operation: &&&Operation| operation.called.index;
            latest = group
                .iter()
                .max_by_key(called)
                .copied()
                .into_iter()
                .chain(latest)
                .max_by_key(|of| of.called.index);
        }
    }
    // Additions of unknown outcome fill the gaps. Each must be called before any operation of a later step has ended.
    // The first gap has the earliest of these bounds, so it gets the addition that was called first.
    let is_spare = |operation: &&Operation| match operation.ask {
        Ask::Add(tag) => operation.outcome == Outcome::Unknown && !counts.contains_key(&tag),
        Ask::Read => false,
    };
    let mut spare: Vec<&Operation> = operations.iter().filter(is_spare).collect();
    spare.sort_by_key(|operation| operation.called.index);
    let mut spare = spare.into_iter();
    let mut earliest: Option<&Operation> = None;
    let mut bounds = Vec::new();
    for (count, (add, reads)) in steps.iter().enumerate().rev() {
        earliest = reads.iter().copied().chain(earliest).min_by_key(|operation| end_of(operation));
        if count > 0 && add.is_none() {
            bounds.push(earliest.expect("the last step has an addition"));
        }
        earliest = add.iter().copied().chain(earliest).min_by_key(|operation| end_of(operation));
    }
    bounds.into_iter().rev().find_map(|bound| match spare.next() {
        Some(add) if add.called.index < end_of(bound) => None,
        Some(add) => Some(("a count was left before any addition that can have left it", vec![*bound, *add])),
        None => Some(("a count was found that is higher than the number of additions", vec![*bound])),
    })
}

#[cfg(test)]
mod tests;
