//! The few transactions that show an anomaly.

use super::{Anomaly, Transactions, violation};
use crate::checker::Violation;
use crate::history::transaction::{Ask, Operation, Outcome, Seen, Step};
use std::collections::BTreeSet;

/// Largest number of transactions that are shown besides those of the cycle.
const WITNESSES_MAX: usize = 24;

/// Returns the gravest anomaly of the first wrong part of a history, and the transactions that show it.
///
/// First, the function cuts the history after the first outcome that makes it wrong. Then it keeps the transactions of
/// the anomaly with the steps on the anomaly's keys, and the writers of what they read there. Last, it removes
/// transactions while the rest stays wrong in the same way.
pub(super) fn window(checker: &Transactions, operations: &[Operation]) -> (Anomaly, Violation<Ask>) {
    let cut = shortest_prefix(checker, operations);
    let anomaly = gravest(checker, &cut).expect("the prefix is wrong");
    let mut shown = projected(&cut, &anomaly);
    if let Some(mut told) = gravest(checker, &shown).filter(|of| is_alike(of, &anomaly)) {
        for at in (0..shown.len()).rev() {
            let mut fewer = shown.clone();
            fewer.remove(at);
            if let Some(of_fewer) = gravest(checker, &fewer).filter(|of| is_alike(of, &anomaly)) {
                (shown, told) = (fewer, of_fewer);
            }
        }
        let offender = last_returned(&shown, &told.operations);
        let window = violation(&told, shown, offender, operations.len());
        return (anomaly, window);
    }
    // The projection is too small to show the anomaly: show all steps.
    let whole: BTreeSet<usize> = anomaly.operations.iter().chain(&anomaly.witnesses).copied().collect();
    let last = last_returned(&cut, &anomaly.operations);
    let offender = whole.iter().position(|at| *at == last).unwrap_or(0);
    let shown = whole.iter().map(|at| cut[*at].clone()).collect();
    let window = violation(&anomaly, shown, offender, operations.len());
    (anomaly, window)
}

fn gravest(checker: &Transactions, operations: &[Operation]) -> Option<Anomaly> {
    checker.report(operations).anomalies.into_iter().next()
}

fn is_alike(one: &Anomaly, other: &Anomaly) -> bool {
    (one.kind, one.in_real_time) == (other.kind, other.in_real_time)
}

/// Returns the index of the one of these transactions that returned last.
fn last_returned(operations: &[Operation], of: &[usize]) -> usize {
    let returned = |at: &usize| operations[*at].returned.map(|returned| returned.index);
    of.iter().copied().max_by_key(returned).unwrap_or(0)
}

/// Cuts the history after the first outcome that makes it wrong. A transaction without its outcome may still be
/// committed, so a wrong history stays wrong when outcomes are added: bisection finds the first one.
fn shortest_prefix(checker: &Transactions, operations: &[Operation]) -> Vec<Operation> {
    let until = |index: u64| -> Vec<Operation> {
        let cut = |operation: &Operation| match operation.returned {
            Some(returned) if returned.index <= index => operation.clone(),
            _ => Operation { returned: None, outcome: Outcome::Unknown, ..operation.clone() },
        };
        operations.iter().map(cut).collect()
    };
    let mut returns: Vec<u64> = operations.iter().filter_map(|of| Some(of.returned?.index)).collect();
    returns.sort_unstable();
    let is_right = |index: &u64| gravest(checker, &until(*index)).is_none();
    let first = returns.partition_point(is_right);
    returns.get(first).map_or_else(|| operations.to_vec(), |index| until(*index))
}

/// Returns the transactions of an anomaly with their steps on its keys, and the writers of what they read there. A
/// transaction of unknown outcome comes with a reader of one of its writes, which shows that it was committed.
fn projected(operations: &[Operation], anomaly: &Anomaly) -> Vec<Operation> {
    let mut of_cycle: BTreeSet<usize> =
        anomaly.operations.iter().chain(&anomaly.witnesses).copied().collect();
    let mut keys: BTreeSet<u64> = anomaly.keys.iter().copied().collect();
    let unknown: Vec<usize> =
        of_cycle.iter().copied().filter(|at| operations[*at].outcome == Outcome::Unknown).collect();
    for at in unknown {
        let shown: BTreeSet<(u64, u64)> = operations[at].ask.0.iter().filter_map(tag_of).collect();
        let readers = operations.iter().enumerate();
        let readers = readers
            .flat_map(|(reader, of)| tags_read(of).into_iter().map(move |(key, tag)| (reader, key, tag)));
        let shows = readers.filter(|(_, key, tag)| shown.contains(&(*key, *tag)));
        let is_shown =
            |(reader, key, _): &(usize, u64, u64)| (!of_cycle.contains(reader), !keys.contains(key));
        if let Some((reader, key, _)) = shows.min_by_key(is_shown) {
            of_cycle.insert(reader);
            keys.insert(key);
        }
    }
    let mut tags: BTreeSet<(u64, u64)> = BTreeSet::new();
    let mut deleted: BTreeSet<u64> = BTreeSet::new();
    for operation in of_cycle.iter().map(|at| &operations[*at]) {
        tags.extend(tags_read(operation).into_iter().filter(|(key, _)| keys.contains(key)));
        let Outcome::Committed(seen) = &operation.outcome else { continue };
        let absent = operation
            .ask
            .0
            .iter()
            .zip(seen)
            .filter(|(_, seen)| matches!(seen, Seen::Absent { version: 1.. }));
        deleted.extend(absent.map(|(step, _)| step.key()).filter(|key| keys.contains(key)));
    }
    let is_witness = |step: &Step| match *step {
        Step::Delete(key) => deleted.contains(&key),
        _ => tag_of(step).is_some_and(|tag| tags.contains(&tag)),
    };
    let mut witnesses = 0;
    let mut shown = Vec::new();
    for (at, operation) in operations.iter().enumerate() {
        if of_cycle.contains(&at) {
            shown.push(only(operation, |step| keys.contains(&step.key())));
        } else if witnesses < WITNESSES_MAX && operation.ask.0.iter().any(is_witness) {
            witnesses += 1;
            shown.push(only(operation, |step| keys.contains(&step.key()) && !matches!(step, Step::Read(_))));
        }
    }
    shown
}

/// Returns the key and the tag of a write or an append.
fn tag_of(step: &Step) -> Option<(u64, u64)> {
    match *step {
        Step::Write { key, tag } | Step::Append { key, tag } => Some((key, tag)),
        Step::Read(_) | Step::Delete(_) => None,
    }
}

/// Returns the keys and tags that a committed transaction has read.
fn tags_read(operation: &Operation) -> Vec<(u64, u64)> {
    let Outcome::Committed(seen) = &operation.outcome else { return Vec::new() };
    let tags = |(step, seen): (&Step, &Seen)| -> Vec<(u64, u64)> {
        match seen {
            Seen::Value { tag, .. } => vec![(step.key(), *tag)],
            Seen::List(tags) => tags.iter().map(|tag| (step.key(), *tag)).collect(),
            Seen::Absent { .. } | Seen::Wrote { .. } | Seen::Appended => Vec::new(),
        }
    };
    operation.ask.0.iter().zip(seen).flat_map(tags).collect()
}

/// Returns a transaction with some of its steps.
fn only(operation: &Operation, is_kept: impl Fn(&Step) -> bool) -> Operation {
    let kept: Vec<usize> = (0..operation.ask.0.len()).filter(|at| is_kept(&operation.ask.0[*at])).collect();
    let outcome = match &operation.outcome {
        Outcome::Committed(seen) => Outcome::Committed(kept.iter().map(|at| seen[*at].clone()).collect()),
        other => other.clone(),
    };
    Operation { ask: Ask(kept.iter().map(|at| operation.ask.0[*at]).collect()), outcome, ..operation.clone() }
}
