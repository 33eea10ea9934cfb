//! Checkers decide whether a history satisfies its family's specification.
//!
//! [`crate::linearizable`] is the checker of registers, [`crate::ordered`] that of ordered maps, [`crate::fifo`] that
//! of queues, [`crate::counter`] that of counters, [`crate::serializable`] that of transactions. A new family
//! implements [`Checker`] for its own property, such as a lock with one holder at a time.
//!
//! Invariant: an undecided history is never called good.

use crate::history::{Ask, History, Operation};

/// Decides whether a history of one family satisfies the family's specification.
pub trait Checker {
    /// Type of the family's operations.
    type Ask: Ask;

    /// Property of a good history, as a sentence: `every key was linearizable`.
    const PROPERTY: &'static str;

    /// Checks a whole history.
    fn check(&self, history: &History<Self::Ask>) -> Checked<Self::Ask>;
}

/// Result of checking a history: the violations, and the parts that could not be decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<A: Ask> {
    /// The violations of the specification, one sentence for each.
    pub violated: Vec<String>,
    /// One sentence for each part of the history that could not be decided, with the reason.
    pub undecided: Vec<String>,
    /// A few operations that show a violation.
    pub window: Option<Violation<A>>,
}

impl<A: Ask> Default for Checked<A> {
    fn default() -> Checked<A> {
        Checked { violated: Vec::new(), undecided: Vec::new(), window: None }
    }
}

/// A few operations whose outcomes the specification does not allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation<A: Ask> {
    /// The violation, in brief: `key 7 is not linearizable`.
    pub what: String,
    /// The operations, in the order of their calls. An operation without a return in this list returned after all
    /// returns in the list, or never.
    pub operations: Vec<Operation<A>>,
    /// Index of the operation whose outcome is not allowed.
    pub offender: usize,
    /// Outcomes that the specification would have allowed for the offender, if the checker knows them.
    pub instead: Vec<A::Outcome>,
    /// Number of operations of the whole history, from which the shown operations are taken.
    pub of: usize,
}
