//! Checkers: whether a history is one that its family's specification allows.
//!
//! [`crate::linearizable`] is the checker of registers, [`crate::fifo`] that of queues. Whatever a family must keep, it
//! says by a [`Checker`] of its own: an order of transactions without a cycle, one holder of a lock at a time, an
//! ordered map.
//!
//! Invariant: what was not decided is never called good.

use crate::history::{Ask, History, Operation};

/// Judges histories of one family.
pub trait Checker {
    /// What the family's clients ask.
    type Ask: Ask;

    /// What a good history keeps, in a sentence: `every key was linearizable`.
    const PROPERTY: &'static str;

    /// Judges a whole history.
    fn check(&self, history: &History<Self::Ask>) -> Checked<Self::Ask>;
}

/// What a checker says of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<A: Ask> {
    /// What is wrong, a sentence each.
    pub violated: Vec<String>,
    /// What nobody knows, and why, a sentence each.
    pub undecided: Vec<String>,
    /// A few operations that show what is wrong.
    pub window: Option<Violation<A>>,
}

impl<A: Ask> Default for Checked<A> {
    fn default() -> Checked<A> {
        Checked { violated: Vec::new(), undecided: Vec::new(), window: None }
    }
}

/// A few operations that the specification does not allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation<A: Ask> {
    /// What is wrong, in brief: `key 7 is not linearizable`.
    pub what: String,
    /// The operations, in the order in which they were called. Those that are not answered here were answered after
    /// the last one that is, if ever.
    pub operations: Vec<Operation<A>>,
    /// Which of them has the answer that cannot be.
    pub offender: usize,
    /// What could have been answered in its place, where the checker knows.
    pub instead: Vec<A::Outcome>,
    /// How many operations these were taken from.
    pub of: usize,
}
