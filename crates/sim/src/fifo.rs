//! Whether every queue of a history behaved as one: each value taken at most once, after it was put, in the order of
//! the puts, and a queue found empty only when it may have been.
//!
//! Values are unique, so a history is a queue's if and only if none of a few patterns occurs in it (Henzinger, Sezgin
//! and Vafeiadis, "Aspect-oriented linearizability proofs", CONCUR 2013). That takes no search.
//!
//! Invariant: what is reported is wrong in every order of the operations. A take of unknown fate is given the benefit
//! of the doubt: it may have taken any one value that was there, or, where a queue was found empty, several.

use crate::checker::{Checked, Checker, Violation};
use crate::history::queue::{Ask, History, Operation, Outcome};
use crate::history::register::Value;
use std::collections::BTreeMap;

/// The checker of queues: every key by itself.
pub struct Fifo;

impl Checker for Fifo {
    type Ask = Ask;

    const PROPERTY: &'static str = "every value was taken at most once, in the order of the puts";

    fn check(&self, history: &History) -> Checked<Ask> {
        let mut queues: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
        for operation in history.operations().iter().filter(|operation| operation.outcome != Outcome::Failed)
        {
            queues.entry(operation.key).or_default().push(*operation);
        }
        let mut checked = Checked::default();
        for (key, operations) in queues {
            let of = operations.len();
            let Some((what, mut shown)) = Queue::of(&operations).finding() else { continue };
            checked.violated.push(format!("queue {key}: {what}"));
            let offender = shown[0];
            shown.sort_by_key(|operation| operation.called.index);
            shown.dedup();
            let offender = shown.iter().position(|operation| *operation == offender).unwrap_or(0);
            checked.window.get_or_insert(Violation {
                what: format!("queue {key} is no queue: {what}"),
                operations: shown,
                offender,
                instead: Vec::new(),
                of,
            });
        }
        checked
    }
}

/// What is wrong, and the operations that show it, the one with the wrong answer first.
type Finding = (&'static str, Vec<Operation>);

/// The operations of one queue.
struct Queue<'a> {
    /// Of each value: its put, if it may have been carried out, and its takes.
    values: BTreeMap<Value, (Option<&'a Operation>, Vec<&'a Operation>)>,
    empties: Vec<&'a Operation>,
    /// Takes of unknown fate.
    unknown: Vec<&'a Operation>,
}

/// The index of the event after which an operation has no more effect.
fn end_of(operation: &Operation) -> u64 {
    operation.returned.map_or(u64::MAX, |returned| returned.index)
}

impl<'a> Queue<'a> {
    fn of(operations: &'a [Operation]) -> Queue<'a> {
        let mut queue = Queue { values: BTreeMap::new(), empties: Vec::new(), unknown: Vec::new() };
        for operation in operations {
            match (operation.ask, operation.outcome) {
                (Ask::Put(value), Outcome::Done | Outcome::Unknown) => {
                    queue.values.entry(value).or_default().0 = Some(operation);
                }
                (Ask::Take, Outcome::Taken(value)) => {
                    queue.values.entry(value).or_default().1.push(operation);
                }
                (Ask::Take, Outcome::Empty) => queue.empties.push(operation),
                (Ask::Take, Outcome::Unknown) => queue.unknown.push(operation),
                _ => {}
            }
        }
        queue
    }

    fn finding(&self) -> Option<Finding> {
        self.of_single_values().or_else(|| self.of_order()).or_else(|| self.of_empties())
    }

    fn of_single_values(&self) -> Option<Finding> {
        self.values.values().find_map(|(put, takes)| match (put, &takes[..]) {
            (None, [take, ..]) => Some(("a value was taken that nobody has put", vec![**take])),
            (Some(put), [take, ..]) if end_of(take) < put.called.index => {
                Some(("a value was taken before it was put", vec![**take, **put]))
            }
            (Some(put), [first, second, ..]) => {
                Some(("a value was taken twice", vec![**second, **first, **put]))
            }
            _ => None,
        })
    }

    /// Values that were taken before others that were put earlier.
    fn of_order(&self) -> Option<Finding> {
        let whole =
            || self.values.values().filter_map(|(put, takes)| Some(((*put)?, takes.first().copied())));
        // Values that only a take of unknown fate can have taken, and by when it must have.
        let mut missing: Vec<(&Operation, &Operation)> = Vec::new();
        for (put, take) in whole() {
            let overtaken = whole().filter_map(|(later, taken)| Some((later, taken?)));
            let overtaken = overtaken.filter(|(later, _)| end_of(put) < later.called.index);
            let Some((later, taken)) = overtaken.min_by_key(|(_, taken)| end_of(taken)) else { continue };
            match take {
                Some(take) if end_of(taken) < take.called.index => {
                    let shown = vec![*taken, *take, *put, *later];
                    return Some(("a value was taken before one that was put earlier", shown));
                }
                // A put of unknown fate may never have been carried out.
                None if put.outcome == Outcome::Done => missing.push((put, taken)),
                _ => {}
            }
        }
        // Each by another take: none may be left without.
        let mut takers: Vec<Option<usize>> = vec![None; self.unknown.len()];
        let unexplained = (0..missing.len()).find(|&value| {
            !self.explains(&missing, value, &mut takers, &mut vec![false; self.unknown.len()])
        })?;
        let (put, taken) = missing[unexplained];
        Some(("a value was taken, and one that was put earlier is still there", vec![*taken, *put]))
    }

    /// Finds a take of unknown fate for a missing value, if need be by finding others for other values.
    fn explains(
        &self,
        missing: &[(&Operation, &Operation)],
        value: usize,
        takers: &mut [Option<usize>],
        seen: &mut [bool],
    ) -> bool {
        let (put, taken) = missing[value];
        for (at, take) in self.unknown.iter().enumerate() {
            let can = take.called.index < end_of(taken) && end_of(take) > put.called.index;
            if can && !std::mem::replace(&mut seen[at], true) {
                let other = takers[at];
                if other.is_none_or(|other| self.explains(missing, other, takers, seen)) {
                    takers[at] = Some(value);
                    return true;
                }
            }
        }
        false
    }

    /// Takes that found nothing, although all the while something was there.
    fn of_empties(&self) -> Option<Finding> {
        let mut present: Vec<(u64, u64, &Operation)> = Vec::new();
        for (put, takes) in self.values.values() {
            let Some(put) = put.filter(|put| put.outcome == Outcome::Done) else { continue };
            let unknown = self.unknown.iter().filter(|take| end_of(take) > put.called.index);
            let taken = takes.first().map(|take| take.called.index);
            let until = taken.or(unknown.map(|take| take.called.index).min()).unwrap_or(u64::MAX);
            present.push((end_of(put), until, put));
        }
        present.sort_unstable_by_key(|(from, until, _)| (*from, *until));
        self.empties.iter().find_map(|empty| {
            let (mut covered, mut shown) = (empty.called.index, vec![**empty]);
            for (from, until, put) in &present {
                if *from <= covered && *until > covered {
                    covered = *until;
                    shown.push(**put);
                }
            }
            (covered >= end_of(empty))
                .then_some(("a queue was found empty that had a value all the while", shown))
        })
    }
}
