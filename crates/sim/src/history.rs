//! What the clients of a run asked, when, and what they were answered, in whatever words their family of systems has.
//!
//! [`register`] has the words of a key-value store, and [`queue`] those of a queue. Another family implements [`Ask`]
//! and [`Outcome`] for its own.
//!
//! Invariant: events stand in the order in which they happened: one thread runs the world, so two events of the same
//! nanosecond still have an order.
//! Invariant: an operation that was never answered may have been carried out at any moment since, or never: that is
//! what a client leaves that dies, until it is certain that nobody acts for it any more.
//! Invariant: [`History::digest`] depends on what was recorded and on nothing else, whatever the build.

pub mod lines;
pub mod queue;
pub mod register;

use crc_fast::{CrcAlgorithm, Digest};
use std::fmt;

/// A request to a system, as histories record it.
pub trait Ask: Clone + Eq + fmt::Debug + fmt::Display {
    /// The answer to it.
    type Outcome: Outcome;

    /// Whether an operation that asked this can have that outcome.
    fn can_have(&self, outcome: &Self::Outcome) -> bool;

    /// Whether it changes nothing.
    fn is_read(&self) -> bool;

    /// Appends all that distinguishes it from others, for a digest.
    fn record(&self, out: &mut Vec<u8>);
}

/// An answer, as histories record it.
pub trait Outcome: Clone + Eq + fmt::Debug + fmt::Display {
    /// The operation may have been carried out, or never. As long as it has not returned, it may be carried out at any
    /// later time.
    const UNKNOWN: Self;
    /// The operation was certainly not carried out, and never will be.
    const FAILED: Self;

    /// Appends all that distinguishes it from others, for a digest.
    fn record(&self, out: &mut Vec<u8>);
}

/// When something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment {
    /// Its place among all events of the history.
    pub index: u64,
    /// Virtual time, in nanoseconds since the world began.
    pub ns: u64,
}

/// One operation of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operation<A: Ask> {
    /// The client that asked.
    pub client: u32,
    /// The object that it asked of: a key, a queue. Families decide what their objects are.
    pub key: u64,
    /// The request.
    pub ask: A,
    /// When it was asked.
    pub called: Moment,
    /// When the answer came, or when it was certain that nothing more would come of it; nothing if neither was.
    pub returned: Option<Moment>,
    /// The answer. [`Outcome::UNKNOWN`] as long as there is none.
    pub outcome: A::Outcome,
}

/// Names an operation of one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationId(usize);

/// All operations of a run.
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
    /// Nothing asked yet.
    pub fn new() -> History<A> {
        History::default()
    }

    /// Records that `client` asks for something at `ns`.
    ///
    /// # Panics
    /// If time went back.
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

    /// Records that it was answered at `ns`.
    ///
    /// # Panics
    /// If time went back, if it was answered before, or if nobody who asked that can be answered so.
    pub fn returned(&mut self, id: OperationId, outcome: A::Outcome, ns: u64) {
        let moment = self.event(ns);
        let operation = &mut self.operations[id.0];
        assert!(operation.returned.is_none(), "an operation returns once: {operation:?}");
        assert!(operation.ask.can_have(&outcome), "no {:?} is answered by {outcome:?}", operation.ask);
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

    /// How many calls and returns there were.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// A number that two histories share only if they are the same, but for one chance in 2^64: CRC-64/NVME of every
    /// operation's fields, in a layout of their own.
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
    /// Little-endian, with a byte before whatever may be missing.
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

/// Appends a word that may be missing, for a digest.
pub fn record_word(word: Option<u64>, out: &mut Vec<u8>) {
    out.push(u8::from(word.is_some()));
    out.extend_from_slice(&word.unwrap_or(0).to_le_bytes());
}
