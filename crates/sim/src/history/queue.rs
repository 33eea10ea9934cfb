//! Operations and outcomes of a queue. Values are put into the queue, and taken in the order in which they were put.

use super::lines::{Kind, Written};
use super::record_word;
use super::register::Value;
use serde::Serialize;
use std::fmt;

/// History of operations on queues.
pub type History = super::History<Ask>;
/// Operation on a queue, with its client, times and outcome.
pub type Operation = super::Operation<Ask>;

/// Operation that a client asks of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Appends this value to the queue.
    Put(Value),
    /// Removes and returns the first value of the queue.
    Take,
}

/// Outcome of an operation on a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Outcome of a `Put`: the value was appended.
    Done,
    /// Outcome of a `Put`: the queue was full, and nothing was appended.
    Full,
    /// Outcome of a `Take`: this value was taken.
    Taken(Value),
    /// Outcome of a `Take`: the queue was empty.
    Empty,
    /// The operation was not carried out, and never will be.
    Failed,
    /// The operation may or may not have been carried out.
    Unknown,
}

impl super::Ask for Ask {
    type Outcome = Outcome;

    fn can_have(&self, outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Done | Outcome::Full => matches!(self, Ask::Put(_)),
            Outcome::Taken(_) | Outcome::Empty => *self == Ask::Take,
            Outcome::Failed | Outcome::Unknown => true,
        }
    }

    fn is_read(&self) -> bool {
        false
    }

    fn record(&self, out: &mut Vec<u8>) {
        record(if let Ask::Put(value) = self { (0, Some(*value)) } else { (1, None) }, out);
    }
}

impl super::Outcome for Outcome {
    const UNKNOWN: Outcome = Outcome::Unknown;
    const FAILED: Outcome = Outcome::Failed;

    fn record(&self, out: &mut Vec<u8>) {
        let fields = match *self {
            Outcome::Done => (0, None),
            Outcome::Full => (1, None),
            Outcome::Taken(value) => (2, Some(value)),
            Outcome::Empty => (3, None),
            Outcome::Failed => (4, None),
            Outcome::Unknown => (5, None),
        };
        record(fields, out);
    }
}

fn record((kind, value): (u8, Option<Value>), out: &mut Vec<u8>) {
    out.push(kind);
    record_word(value.map(|value| value.tag), out);
    record_word(value.map(|value| value.len.into()), out);
}

/// Kinds of operations on a queue, as named on lines.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// Name of [`Ask::Put`] on a line.
    Enqueue,
    /// Name of [`Ask::Take`] on a line.
    Dequeue,
}

/// Queue-specific fields of a line.
#[derive(Serialize)]
pub struct Fields {
    value: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
}

impl Written for Ask {
    type Function = Function;
    type Fields = Fields;

    fn function(&self) -> Function {
        if *self == Ask::Take { Function::Dequeue } else { Function::Enqueue }
    }

    fn asked(&self) -> Fields {
        Fields { value: if let Ask::Put(value) = self { Some(value.tag) } else { None }, error: None }
    }

    fn answered(&self, outcome: &Outcome) -> (Kind, Fields) {
        let asked = self.asked();
        match outcome {
            Outcome::Done => (Kind::Ok, asked),
            Outcome::Full => (Kind::Fail, Fields { error: Some("full"), ..asked }),
            Outcome::Taken(value) => (Kind::Ok, Fields { value: Some(value.tag), ..asked }),
            Outcome::Empty => (Kind::Fail, Fields { error: Some("empty"), ..asked }),
            Outcome::Failed => (Kind::Fail, asked),
            Outcome::Unknown => (Kind::Info, asked),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Put(value) => write!(f, "put {value}"),
            Ask::Take => f.write_str("take"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::Full => f.write_str("full"),
            Outcome::Taken(value) => write!(f, "{value}"),
            Outcome::Empty => f.write_str("empty"),
            Outcome::Failed => f.write_str("failed"),
            Outcome::Unknown => f.write_str("unknown"),
        }
    }
}
