//! What the clients of a run asked, when, and what they were answered.
//!
//! Invariant: events stand in the order in which they happened: one thread runs the world, so two events of the same
//! nanosecond still have an order.
//! Invariant: an operation that was never answered may have been carried out at any moment since, or never: that is
//! what a client leaves that dies, until it is certain that nobody acts for it any more.
//! Invariant: [`History::digest`] depends on what was recorded and on nothing else, whatever the build.

pub mod lines;

use std::fmt;

use crc_fast::{CrcAlgorithm, Digest};

/// A value as tests write them: known by a number, for whoever wrote it can prove it from its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value {
    /// Which value it is.
    pub tag: u64,
    /// Its bytes.
    pub len: u32,
}

/// Which install of a key's value a client has seen. Opaque: equal versions of one key mean the same install.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

/// What was asked for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ask {
    /// Its value.
    Get,
    /// To have this value, whether it had one or not.
    Put(Value),
    /// To have no value.
    Delete,
    /// To have this value if it has none.
    PutIfAbsent(Value),
    /// To have this value if it still has that version.
    CompareAndPut {
        /// What an earlier answer said.
        expected: Version,
        /// What to put.
        value: Value,
    },
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// The key had this value, and this version where the system tells it. Of a `Get`.
    Found(Value, Option<Version>),
    /// The key had no value: nothing was found, taken away, or compared. Of `Get`, `Delete` and `CompareAndPut`.
    Absent,
    /// It was stored or taken away; the version that it has now, where the system tells it. Of all but `Get`.
    Done(Option<Version>),
    /// Nothing was stored. Of `PutIfAbsent`: the key had a value, of this version where the system tells it. Of
    /// `CompareAndPut`: it had this other version; where none is told, it had another or no value.
    Conflict(Option<Version>),
    /// It was certainly not carried out, and never will be.
    Failed,
    /// It may have been carried out, or never. Until it returned, that is: as long as it has not, it may be carried out
    /// at any later time.
    Unknown,
}

impl Outcome {
    /// Whether an operation that asked this can come to this.
    pub fn answers(&self, ask: &Ask) -> bool {
        match self {
            Outcome::Found(..) => matches!(ask, Ask::Get),
            Outcome::Absent => matches!(ask, Ask::Get | Ask::Delete | Ask::CompareAndPut { .. }),
            Outcome::Done(version) => match ask {
                Ask::Get => false,
                Ask::Delete => version.is_none(),
                Ask::Put(_) | Ask::PutIfAbsent(_) | Ask::CompareAndPut { .. } => true,
            },
            Outcome::Conflict(version) => match ask {
                Ask::PutIfAbsent(_) => true,
                Ask::CompareAndPut { expected, .. } => *version != Some(*expected),
                Ask::Get | Ask::Put(_) | Ask::Delete => false,
            },
            Outcome::Failed | Outcome::Unknown => true,
        }
    }
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
pub struct Operation {
    /// Who asked.
    pub client: u32,
    /// Of which key.
    pub key: u64,
    /// What was asked.
    pub ask: Ask,
    /// When it was asked.
    pub called: Moment,
    /// When the answer came, or when it was certain that nothing more would come of it; nothing if neither was.
    pub returned: Option<Moment>,
    /// What the answer was. [`Outcome::Unknown`] as long as there is none.
    pub outcome: Outcome,
}

/// Names an operation of one history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationId(usize);

/// All operations of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    operations: Vec<Operation>,
    events: u64,
    ns: u64,
}

impl History {
    /// Nothing asked yet.
    pub fn new() -> History {
        History::default()
    }

    /// Records that `client` asks for something at `ns`.
    ///
    /// # Panics
    /// If time went back.
    pub fn call(&mut self, client: u32, key: u64, ask: Ask, ns: u64) -> OperationId {
        let called = self.event(ns);
        let id = OperationId(self.operations.len());
        self.operations.push(Operation {
            client,
            key,
            ask,
            called,
            returned: None,
            outcome: Outcome::Unknown,
        });
        id
    }

    /// Records that it was answered at `ns`.
    ///
    /// # Panics
    /// If time went back, if it was answered before, or if nobody who asked that can be answered so.
    pub fn returned(&mut self, id: OperationId, outcome: Outcome, ns: u64) {
        let moment = self.event(ns);
        let operation = &mut self.operations[id.0];
        assert!(operation.returned.is_none(), "an operation returns once: {operation:?}");
        assert!(outcome.answers(&operation.ask), "no {:?} is answered by {outcome:?}", operation.ask);
        (operation.returned, operation.outcome) = (Some(moment), outcome);
    }

    fn event(&mut self, ns: u64) -> Moment {
        assert!(ns >= self.ns, "time went back, from {} to {ns} ns", self.ns);
        self.ns = ns;
        self.events += 1;
        Moment { index: self.events - 1, ns }
    }

    /// All operations, in the order in which they were called.
    pub fn operations(&self) -> &[Operation] {
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
        let mut bytes = Vec::with_capacity(RECORD_SIZE);
        for operation in &self.operations {
            bytes.clear();
            record(operation, &mut bytes);
            digest.update(&bytes);
        }
        digest.finalize()
    }
}

/// Bytes that one operation gives to the digest.
const RECORD_SIZE: usize = 92;

/// Little-endian, every field at its own place, with a byte before whatever may be missing.
fn record(operation: &Operation, out: &mut Vec<u8>) {
    let Operation { client, key, ask, called, returned, outcome } = operation;
    out.extend_from_slice(&client.to_le_bytes());
    out.extend_from_slice(&key.to_le_bytes());
    let (kind, value, expected) = match *ask {
        Ask::Get => (0, None, None),
        Ask::Put(value) => (1, Some(value), None),
        Ask::Delete => (2, None, None),
        Ask::PutIfAbsent(value) => (3, Some(value), None),
        Ask::CompareAndPut { expected, value } => (4, Some(value), Some(expected)),
    };
    out.push(kind);
    record_value(value, out);
    record_word(expected.map(|version| version.0), out);
    record_moment(Some(*called), out);
    record_moment(*returned, out);
    let (kind, value, version) = match *outcome {
        Outcome::Found(value, version) => (0, Some(value), version),
        Outcome::Absent => (1, None, None),
        Outcome::Done(version) => (2, None, version),
        Outcome::Conflict(version) => (3, None, version),
        Outcome::Failed => (4, None, None),
        Outcome::Unknown => (5, None, None),
    };
    out.push(kind);
    record_value(value, out);
    record_word(version.map(|version| version.0), out);
    debug_assert!(out.len() == RECORD_SIZE, "a record has {} bytes", out.len());
}

fn record_value(value: Option<Value>, out: &mut Vec<u8>) {
    let Value { tag, len } = value.unwrap_or(Value { tag: 0, len: 0 });
    record_word(value.map(|_| tag), out);
    out.extend_from_slice(&len.to_le_bytes());
}

fn record_moment(moment: Option<Moment>, out: &mut Vec<u8>) {
    out.push(u8::from(moment.is_some()));
    let Moment { index, ns } = moment.unwrap_or(Moment { index: 0, ns: 0 });
    out.extend_from_slice(&index.to_le_bytes());
    out.extend_from_slice(&ns.to_le_bytes());
}

fn record_word(word: Option<u64>, out: &mut Vec<u8>) {
    out.push(u8::from(word.is_some()));
    out.extend_from_slice(&word.unwrap_or(0).to_le_bytes());
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.tag)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Get => f.write_str("get"),
            Ask::Put(value) => write!(f, "put {value}"),
            Ask::Delete => f.write_str("delete"),
            Ask::PutIfAbsent(value) => write!(f, "put {value} if absent"),
            Ask::CompareAndPut { expected, value } => write!(f, "put {value} if {expected}"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Found(value, None) => write!(f, "{value}"),
            Outcome::Found(value, Some(version)) => write!(f, "{value} {version}"),
            Outcome::Absent => f.write_str("absent"),
            Outcome::Done(None) => f.write_str("done"),
            Outcome::Done(Some(version)) => write!(f, "done {version}"),
            Outcome::Conflict(None) => f.write_str("conflict"),
            Outcome::Conflict(Some(version)) => write!(f, "conflict {version}"),
            Outcome::Failed => f.write_str("failed"),
            Outcome::Unknown => f.write_str("unknown"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.ask, self.outcome)
    }
}
