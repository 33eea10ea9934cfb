//! Checker of queues. Each value is taken at most once, after it was put, and in the order of the puts. A queue is
//! reported empty or full only at a time when it may have been so. It never holds more values than its capacity.
//!
//! Values are unique, so the history of an unbounded queue is correct if and only if it contains none of a few patterns
//! (Henzinger, Sezgin and Vafeiadis, "Aspect-oriented linearizability proofs", CONCUR 2013). Finding these patterns
//! takes no search.
//!
//! Invariant: a reported violation is a violation in every order of the operations. A take of unknown fate is never
//! blamed: it may have taken any one value that was present.

use crate::checker::{Checked, Checker, Violation};
use crate::history::queue::{Ask, History, Operation, Outcome};
use crate::history::register::Value;
use std::collections::BTreeMap;

/// Checker of queues. Each key of a history is a queue, checked separately.
pub struct Fifo {
    /// Capacity of each queue, in values.
    pub capacity: u64,
}

impl Checker for Fifo {
    type Ask = Ask;

    const PROPERTY: &'static str = "every queue returned each value once, in the order of the puts, and was \
                                    empty or full when reported so";

    fn check(&self, history: &History) -> Checked<Ask> {
        let mut queues: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
        for operation in history.operations().iter().filter(|operation| operation.outcome != Outcome::Failed)
        {
            queues.entry(operation.key).or_default().push(*operation);
        }
        let mut checked = Checked::default();
        for (key, operations) in queues {
            let of = operations.len();
            let Some((what, mut shown)) = Queue::of(self.capacity, &operations).finding() else { continue };
            checked.violated.push(format!("queue {key}: {what}"));
            let offender = shown[0];
            shown.sort_by_key(|operation| operation.called.index);
            shown.dedup();
            let offender = shown.iter().position(|operation| *operation == offender).unwrap_or(0);
            checked.window.get_or_insert(Violation {
                what: format!("queue {key} is not a queue: {what}"),
                operations: shown,
                offender,
                instead: Vec::new(),
                of,
            });
        }
        checked
    }
}

/// A description of a violation, and the operations that show the violation. The first operation is the one with the
/// wrong outcome.
type Finding = (&'static str, Vec<Operation>);

/// Operations on one queue.
struct Queue<'a> {
    capacity: u64,
    /// For each value: its put, if it may have been carried out, and its takes.
    values: BTreeMap<Value, (Option<&'a Operation>, Vec<&'a Operation>)>,
    empties: Vec<&'a Operation>,
    fulls: Vec<&'a Operation>,
    /// Takes whose outcome is unknown.
    unknown: Vec<&'a Operation>,
}

/// Returns the index of the event after which an operation has no more effect.
fn end_of(operation: &Operation) -> u64 {
    operation.returned.map_or(u64::MAX, |returned| returned.index)
}

impl<'a> Queue<'a> {
    fn of(capacity: u64, operations: &'a [Operation]) -> Queue<'a> {
        let (values, empties, fulls, unknown) = (BTreeMap::new(), Vec::new(), Vec::new(), Vec::new());
        let mut queue = Queue { capacity, values, empties, fulls, unknown };
        for operation in operations {
            match (operation.ask, operation.outcome) {
                (Ask::Put(value), Outcome::Done | Outcome::Unknown) => {
                    queue.values.entry(value).or_default().0 = Some(operation);
                }
                (Ask::Take, Outcome::Taken(value)) => {
                    queue.values.entry(value).or_default().1.push(operation);
                }
                (Ask::Put(_), Outcome::Full) => queue.fulls.push(operation),
                (Ask::Take, Outcome::Empty) => queue.empties.push(operation),
                (Ask::Take, Outcome::Unknown) => queue.unknown.push(operation),
                _ => {}
            }
        }
        queue
    }

    fn finding(&self) -> Option<Finding> {
        let others = || {
            self.order_violation().or_else(|| self.empty_violation()).or_else(|| self.capacity_violation())
        };
        self.value_violation().or_else(others)
    }

    fn value_violation(&self) -> Option<Finding> {
        self.values.values().find_map(|(put, takes)| match (put, &takes[..]) {
            (None, [take, ..]) => Some(("a value was taken that no client has put", vec![**take])),
            (Some(put), [take, ..]) if end_of(take) < put.called.index => {
                Some(("a value was taken before it was put", vec![**take, **put]))
            }
            (Some(put), [first, second, ..]) => {
                Some(("a value was taken twice", vec![**second, **first, **put]))
            }
            _ => None,
        })
    }

    /// Returns each put that was, or may have been, carried out, with the take of its value if that take is known.
    fn whole(&self) -> impl Iterator<Item = (&'a Operation, Option<&'a Operation>)> {
        self.values.values().filter_map(|(put, takes)| Some(((*put)?, takes.first().copied())))
    }

    /// Finds a value that was taken before another value that was put earlier.
    fn order_violation(&self) -> Option<Finding> {
        for (put, take) in self.whole() {
            let Some((later, taken)) = self.overtaker(put) else { continue };
            if let Some(take) = take.filter(|take| end_of(taken) < take.called.index) {
                let shown = vec![*taken, *take, *put, *later];
                return Some(("a value was taken before one that was put earlier", shown));
            }
        }
        let unexplained = self.unexplained(&self.missing(u64::MAX))?;
        let (_, taken) = self.overtaker(unexplained)?;
        Some(("a value was taken, and one that was put earlier is still there", vec![*taken, *unexplained]))
    }

    /// Returns the put and the take of a value that was put after this put. Of several such values, returns the one
    /// taken first.
    fn overtaker(&self, put: &Operation) -> Option<(&'a Operation, &'a Operation)> {
        let overtaken = self.whole().filter_map(|(later, taken)| Some((later, taken?)));
        let overtaken = overtaken.filter(|(later, _)| end_of(put) < later.called.index);
        overtaken.min_by_key(|(_, taken)| end_of(taken))
    }

    /// Returns the puts of values that only takes of unknown fate can have taken. Returns with each put the index of
    /// the event before which such a take must have happened. If the queue was empty at the event `empty`, the result
    /// includes all values put before this event.
    fn missing(&self, empty: u64) -> Vec<(&'a Operation, u64)> {
        // Only puts known to be done count: a put of unknown fate may never have been carried out.
        let lost = self.whole().filter(|(put, take)| take.is_none() && put.outcome == Outcome::Done);
        let by = lost.filter_map(|(put, _)| {
            let overtaken = self.overtaker(put).map(|(_, taken)| end_of(taken));
            let emptied = (end_of(put) < empty && empty != u64::MAX).then_some(empty);
            Some((put, overtaken.into_iter().chain(emptied).min()?))
        });
        by.collect()
    }

    /// Returns a missing value that no take of unknown fate explains: each such take explains at most one value.
    fn unexplained(&self, missing: &[(&'a Operation, u64)]) -> Option<&'a Operation> {
        let mut takers: Vec<Option<usize>> = vec![None; self.unknown.len()];
        let unexplained = (0..missing.len()).find(|&value| {
            !self.explains(missing, value, &mut takers, &mut vec![false; self.unknown.len()])
        })?;
        Some(missing[unexplained].0)
    }

    /// Assigns a take of unknown fate to a missing value. If necessary, assigns other takes to the values that had
    /// these takes. Returns whether this succeeded.
    fn explains(
        &self,
        missing: &[(&Operation, u64)],
        value: usize,
        takers: &mut [Option<usize>],
        seen: &mut [bool],
    ) -> bool {
        let (put, by) = missing[value];
        for (at, take) in self.unknown.iter().enumerate() {
            let can = take.called.index < by && end_of(take) > put.called.index;
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

    /// Finds a take that found the queue empty although the queue had a value throughout.
    fn empty_violation(&self) -> Option<Finding> {
        self.empties.iter().find_map(|empty| {
            let mut shown = vec![**empty];
            // Between each two successive events, a different value may have been present.
            for at in empty.called.index + 1..=end_of(empty) {
                let present = self
                    .whole()
                    .find(|(put, take)| end_of(put) < at && take.is_some_and(|take| take.called.index >= at));
                let present = present.map(|(put, _)| put);
                shown.push(*present.or_else(|| self.unexplained(&self.missing(at)))?);
            }
            shown.dedup();
            Some(("a queue was found empty although it had a value throughout", shown))
        })
    }

    /// Finds a put that found the queue full although the queue had space throughout, or values beyond the queue's
    /// capacity.
    fn capacity_violation(&self) -> Option<Finding> {
        let too_few = self.fulls.iter().find(|full| {
            let mut ats = full.called.index + 1..=end_of(full);
            let may_be_there = |at| {
                let there = self.whole().filter(|(put, take)| {
                    put.called.index < at && take.is_none_or(|take| end_of(take) >= at)
                });
                there.count() as u64
            };
            ats.all(|at| may_be_there(at) < self.capacity)
        });
        if let Some(full) = too_few {
            return Some(("a queue was found full although it had space throughout", vec![**full]));
        }
        let too_many = self.whole().map(|(last, _)| last).find(|last| {
            let at = end_of(last).saturating_add(1);
            let there = self.whole().filter(|(put, take)| {
                let is_put = put.outcome == Outcome::Done || take.is_some();
                is_put && end_of(put) < at && take.is_none_or(|take| take.called.index >= at)
            });
            let gone = self.unknown.iter().filter(|take| take.called.index < at).count() as u64;
            there.count() as u64 > self.capacity.saturating_add(gone)
        })?;
        Some(("a queue had more values than its capacity", vec![*too_many]))
    }
}

#[cfg(test)]
mod tests;
