//! Operations and outcomes of counters that remember the tag of their last addition.

use super::lines::{Kind, Written};
use super::record_word;
use serde::Serialize;
use std::fmt;

/// History of operations on counters.
pub type History = super::History<Ask>;
/// Operation on a counter, with its client, times and outcome.
pub type Operation = super::Operation<Ask>;

/// Operation that a client asks of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Adds one, stores this tag, and returns the value before. No two additions of a history have the same tag.
    Add(u64),
    /// Returns the value.
    Read,
}

/// State of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Value {
    /// Number of additions so far.
    pub count: u64,
    /// Tag of the last addition; 0 if there was none.
    pub tag: u64,
}

/// Outcome of an operation on a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The operation was carried out, and found this value: the value before the addition, for an `Add`.
    Found(Value),
    /// The operation was not carried out, and never will be.
    Failed,
    /// The operation may or may not have been carried out.
    Unknown,
}

impl super::Ask for Ask {
    type Outcome = Outcome;

    fn can_have(&self, _outcome: &Outcome) -> bool {
        true
    }

    fn is_read(&self) -> bool {
        *self == Ask::Read
    }

    fn record(&self, out: &mut Vec<u8>) {
        record_word(if let Ask::Add(tag) = self { Some(*tag) } else { None }, out);
    }
}

impl super::Outcome for Outcome {
    const UNKNOWN: Outcome = Outcome::Unknown;
    const FAILED: Outcome = Outcome::Failed;

    fn record(&self, out: &mut Vec<u8>) {
        let (kind, value) = match *self {
            Outcome::Found(value) => (0, Some(value)),
            Outcome::Failed => (1, None),
            Outcome::Unknown => (2, None),
        };
        out.push(kind);
        record_word(value.map(|value| value.count), out);
        record_word(value.map(|value| value.tag), out);
    }
}

/// Kinds of operations on a counter, as named on lines.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// Name of [`Ask::Add`] on a line.
    Add,
    /// Name of [`Ask::Read`] on a line.
    Read,
}

/// Counter-specific fields of a line.
#[derive(Serialize)]
pub struct Fields {
    /// Tag of an addition.
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<u64>,
    /// Count and tag that the operation has found.
    value: Option<[u64; 2]>,
}

impl Written for Ask {
    type Function = Function;
    type Fields = Fields;

    fn function(&self) -> Function {
        if *self == Ask::Read { Function::Read } else { Function::Add }
    }

    fn asked(&self) -> Fields {
        Fields { tag: if let Ask::Add(tag) = self { Some(*tag) } else { None }, value: None }
    }

    fn answered(&self, outcome: &Outcome) -> (Kind, Fields) {
        let asked = self.asked();
        match outcome {
            Outcome::Found(Value { count, tag }) => {
                (Kind::Ok, Fields { value: Some([*count, *tag]), ..asked })
            }
            Outcome::Failed => (Kind::Fail, asked),
            Outcome::Unknown => (Kind::Info, asked),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Add(tag) => write!(f, "add #{tag}"),
            Ask::Read => f.write_str("read"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.count, self.tag)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Found(value) => value.fmt(f),
            Outcome::Failed => f.write_str("failed"),
            Outcome::Unknown => f.write_str("unknown"),
        }
    }
}
