//! History of a run: the clients' operations, their times and their outcomes, generic over a family of systems.
//!
//! [`register`] has the operations of a key-value store, [`map`] those of an ordered map, [`queue`] those of a queue,
//! [`counter`] those of a counter, and [`transaction`] those of transactions. To add a family, implement [`Ask`] and
//! [`Outcome`].
//!
//! Invariant: events are in the order in which they happened. One thread runs the world, so even events of the same
//! nanosecond are ordered.
//!
//! Invariant: an operation without a return may have been carried out at any moment since its call, or never. If a
//! client dies, its operations have no return until it is certain that nothing acts on the client's behalf any more.
//!
//! Invariant: [`History::digest`] depends only on what was recorded, in every build.

pub mod counter;
pub mod lines;
pub mod map;
pub mod queue;
pub mod register;
pub mod transaction;

use crc_fast::{CrcAlgorithm, Digest};
use std::fmt;

/// Operation of a system, as recorded in histories.
pub trait Ask: Clone + Eq + fmt::Debug + fmt::Display {
    /// Type of the operation's outcome.
    type Outcome: Outcome;

    /// Whether this operation can have the given outcome.
    fn can_have(&self, outcome: &Self::Outcome) -> bool;

    /// Whether the operation only reads.
    fn is_read(&self) -> bool;

    /// Appends to `out` all fields that distinguish this operation from others. Used for digests.
    fn record(&self, out: &mut Vec<u8>);
}

/// Outcome of an operation, as recorded in histories.
pub trait Outcome: Clone + Eq + fmt::Debug + fmt::Display {
    /// The operation may or may not have been carried out. Until its return, it may still be carried out later.
    const UNKNOWN: Self;
    /// The operation was not carried out, and never will be.
    const FAILED: Self;

    /// Appends to `out` all fields that distinguish this outcome from others. Used for digests.
    fn record(&self, out: &mut Vec<u8>);
}

/// Position of an event in a history, and its virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment {
    /// Index of the event in the history.
    pub index: u64,
    /// Virtual time, in nanoseconds since the start of the world.
    pub ns: u64,
}

/// Operation that a client has called, with its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operation<A: Ask> {
    /// Number of the client that called the operation.
    pub client: u32,
    /// Object of the operation, such as a key or a queue. Each family defines its objects.
    pub key: u64,
    /// The operation's kind and arguments.
    pub ask: A,
    /// Moment of the operation's call.
    pub called: Moment,
    /// Moment of the operation's return. If the client has died: moment from which the operation certainly has no
    /// later effect. `None` if neither has happened.
    pub returned: Option<Moment>,
    /// Outcome of the operation; [`Outcome::UNKNOWN`] until the return.
    pub outcome: A::Outcome,
}

/// Identifier of an operation in a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationId(usize);

/// History of a run: operations with their calls, returns and outcomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History<A: Ask> {
    operations: Vec<Operation<A>>,
    events: u64,
    ns: u64,
}

impl<A: Ask> Default for History<A> {
    fn default() -> History<A> {
        History { operations: Vec::new(), events: 0, ns: 0 }
    }
}

impl<A: Ask> History<A> {
    /// Creates an empty history.
    pub fn new() -> History<A> {
        History::default()
    }

    /// Records that `client` called an operation on `key` at the virtual time `ns`.
    ///
    /// # Panics
    /// If `ns` is before the last event.
    pub fn call(&mut self, client: u32, key: u64, ask: A, ns: u64) -> OperationId {
        let called = self.event(ns);
        let id = OperationId(self.operations.len());
        self.operations.push(Operation {
            client,
            key,
            ask,
            called,
            returned: None,
            outcome: A::Outcome::UNKNOWN,
        });
        id
    }

    /// Returns an operation of this history.
    pub fn operation(&self, id: OperationId) -> &Operation<A> {
        &self.operations[id.0]
    }

    /// Records that an operation returned at the virtual time `ns`.
    ///
    /// # Panics
    /// If `ns` is before the last event, if the operation has already returned, or if it cannot have this outcome.
    pub fn returned(&mut self, id: OperationId, outcome: A::Outcome, ns: u64) {
        let moment = self.event(ns);
        let operation = &mut self.operations[id.0];
        assert!(operation.returned.is_none(), "an operation returns once: {operation:?}");
        assert!(operation.ask.can_have(&outcome), "{:?} cannot have the outcome {outcome:?}", operation.ask);
        (operation.returned, operation.outcome) = (Some(moment), outcome);
    }

    fn event(&mut self, ns: u64) -> Moment {
        assert!(ns >= self.ns, "time went back, from {} to {ns} ns", self.ns);
        self.ns = ns;
        self.events += 1;
        Moment { index: self.events - 1, ns }
    }

    /// All operations, in the order in which they were called.
    pub fn operations(&self) -> &[Operation<A>] {
        &self.operations
    }

    /// Number of events: calls and returns.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Digest of the history: CRC-64/NVME of all fields of all operations, in a fixed layout. Different histories have
    /// the same digest with a probability of 2^-64.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut bytes = Vec::new();
        for operation in &self.operations {
            bytes.clear();
            operation.record(&mut bytes);
            digest.update(&bytes);
        }
        digest.finalize()
    }
}

impl<A: Ask> Operation<A> {
    /// Appends the operation's fields in little-endian order, with a presence byte before each optional field.
    fn record(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.client.to_le_bytes());
        out.extend_from_slice(&self.key.to_le_bytes());
        self.ask.record(out);
        record_moment(Some(self.called), out);
        record_moment(self.returned, out);
        self.outcome.record(out);
    }
}

impl<A: Ask> fmt::Display for Operation<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.ask, self.outcome)
    }
}

fn record_moment(moment: Option<Moment>, out: &mut Vec<u8>) {
    out.push(u8::from(moment.is_some()));
    let Moment { index, ns } = moment.unwrap_or(Moment { index: 0, ns: 0 });
    out.extend_from_slice(&index.to_le_bytes());
    out.extend_from_slice(&ns.to_le_bytes());
}

/// Appends an optional word to `out`, from which a digest is computed.
pub fn record_word(word: Option<u64>, out: &mut Vec<u8>) {
    out.push(u8::from(word.is_some()));
    out.extend_from_slice(&word.unwrap_or(0).to_le_bytes());
}
