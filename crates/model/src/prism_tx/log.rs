//! An entry of a shard's log: what a client is about to do at this shard.
//!
//! Invariant: the body is written while the word is free, so a word and its body are of one transaction.

use super::slot::Timestamp;
use zerocopy::{Immutable, IntoBytes};

/// State of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(u8)]
pub enum State {
    /// No transaction.
    #[default]
    Free,
    /// The transaction may have prepared at this shard.
    Active,
    /// The transaction commits.
    Decided,
    /// The transaction was committed by a recoverer. Kept as long as another recoverer may ask for the verdict.
    Done,
}

/// Entry of a client at a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct Entry {
    /// Timestamp and state: one atomic word.
    pub ts: Timestamp,
    /// The other part of the word.
    pub state: State,
    /// Number of the transaction whose writes are the body.
    pub body: u8,
}

impl Entry {
    /// Whether the transaction of this entry may still change its keys.
    pub fn is_unsettled(&self) -> bool {
        matches!(self.state, State::Active | State::Decided)
    }

    /// Replaces the word. The body stays.
    pub fn set(&mut self, ts: Timestamp, state: State) {
        (self.ts, self.state) = (ts, state);
    }

    /// Frees the entry. Keeps the body: a client frees the word only.
    pub fn free(&mut self) {
        self.set(Timestamp::default(), State::Free);
    }

    /// Closes the entry of a transaction that a recoverer has settled: by CAS, if the word still is the transaction's.
    /// DECIDED becomes DONE, ACTIVE becomes free.
    pub fn close(&mut self, ts: Timestamp) {
        match self.state {
            _ if self.ts != ts => {}
            State::Decided => self.state = State::Done,
            State::Active => self.free(),
            State::Done | State::Free => {}
        }
    }
}
