//! Operations and outcomes of an ordered map. Each key is a register, and a scan reads the next keys in order.
//!
//! The numbers of keys are in the order of the keys. A scan names its items by their distance from its first key, so
//! that several maps can have separate ranges of one history's keys.

use super::lines::{Kind, Written};
use super::record_word;
use super::register::Value;
use serde::Serialize;
use std::fmt;

/// History of operations on ordered maps.
pub type History = super::History<Ask>;
/// Operation on an ordered map, with its client, times and outcome.
pub type Operation = super::Operation<Ask>;

/// Operation that a client asks of an ordered map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Reads the key's value.
    Get,
    /// Stores this value, whether or not the key has one.
    Put(Value),
    /// Stores this value if the key has none.
    PutIfAbsent(Value),
    /// Deletes the key's value.
    Delete,
    /// Reads the first keys that have values, from the operation's key on, in order.
    Scan {
        /// Number of keys in the range of the scan, with and without values: the rest of the map.
        keys: u64,
        /// Largest number of items that the scan may return.
        limit: u32,
    },
}

/// Item that a scan has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// Number of the item's key, minus that of the scan's first key. Negative if the key is before the scan's range.
    pub distance: i64,
    /// Value of the key.
    pub value: Value,
}

/// Outcome of an operation on an ordered map.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Outcome of a `Get`: the key had this value.
    Found(Value),
    /// Outcome of a `Get` or a `Delete`: the key had no value.
    Absent,
    /// Outcome of a `Put`, `PutIfAbsent` or `Delete`: the value was stored or deleted.
    Done,
    /// Outcome of a `PutIfAbsent`: the key had a value, and nothing was stored.
    Present,
    /// Outcome of a `Scan`: these items, in this order.
    Scanned(Vec<Item>),
    /// The operation was not carried out, and never will be.
    Failed,
    /// The operation may or may not have been carried out before its return. Without a return, it may be carried out at
    /// any later time.
    Unknown,
}

impl super::Ask for Ask {
    type Outcome = Outcome;

    fn can_have(&self, outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Found(_) => *self == Ask::Get,
            Outcome::Absent => matches!(self, Ask::Get | Ask::Delete),
            Outcome::Done => matches!(self, Ask::Put(_) | Ask::PutIfAbsent(_) | Ask::Delete),
            Outcome::Present => matches!(self, Ask::PutIfAbsent(_)),
            Outcome::Scanned(_) => matches!(self, Ask::Scan { .. }),
            Outcome::Failed | Outcome::Unknown => true,
        }
    }

    fn is_read(&self) -> bool {
        matches!(self, Ask::Get | Ask::Scan { .. })
    }

    fn record(&self, out: &mut Vec<u8>) {
        let (kind, words) = match *self {
            Ask::Get => (0, [0, 0]),
            Ask::Put(Value { tag, len }) => (1, [tag, len.into()]),
            Ask::PutIfAbsent(Value { tag, len }) => (2, [tag, len.into()]),
            Ask::Delete => (3, [0, 0]),
            Ask::Scan { keys, limit } => (4, [keys, limit.into()]),
        };
        out.push(kind);
        words.into_iter().for_each(|word| record_word(Some(word), out));
    }
}

impl super::Outcome for Outcome {
    const UNKNOWN: Outcome = Outcome::Unknown;
    const FAILED: Outcome = Outcome::Failed;

    fn record(&self, out: &mut Vec<u8>) {
        let record = |value: Value, out: &mut Vec<u8>| {
            record_word(Some(value.tag), out);
            record_word(Some(value.len.into()), out);
        };
        match self {
            Outcome::Found(value) => {
                out.push(0);
                record(*value, out);
            }
            Outcome::Absent => out.push(1),
            Outcome::Done => out.push(2),
            Outcome::Present => out.push(3),
            Outcome::Scanned(items) => {
                out.push(4);
                record_word(Some(items.len() as u64), out);
                for item in items {
                    record_word(Some(item.distance as u64), out);
                    record(item.value, out);
                }
            }
            Outcome::Failed => out.push(5),
            Outcome::Unknown => out.push(6),
        }
    }
}

/// Kinds of operations on an ordered map, as named on lines.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// Name of [`Ask::Get`] on a line.
    Read,
    /// Name of [`Ask::Put`] on a line.
    Write,
    /// Name of [`Ask::PutIfAbsent`] on a line.
    WriteIfAbsent,
    /// Name of [`Ask::Delete`] on a line.
    Delete,
    /// Name of [`Ask::Scan`] on a line.
    Scan,
}

/// Map-specific fields of a line.
#[derive(Serialize)]
pub struct Fields {
    value: Content,
    #[serde(skip_serializing_if = "Option::is_none")]
    len: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
}

/// Content of a line's `value` field: a value's tag, whether a delete found a value, a scan's items, or null. An item
/// is its distance and its value's tag.
#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Tag(u64),
    Had(bool),
    Items(Vec<(i64, u64)>),
    Nothing(()),
}

impl Written for Ask {
    type Function = Function;
    type Fields = Fields;

    fn function(&self) -> Function {
        match self {
            Ask::Get => Function::Read,
            Ask::Put(_) => Function::Write,
            Ask::PutIfAbsent(_) => Function::WriteIfAbsent,
            Ask::Delete => Function::Delete,
            Ask::Scan { .. } => Function::Scan,
        }
    }

    fn asked(&self) -> Fields {
        let mut fields =
            Fields { value: Content::Nothing(()), len: None, keys: None, limit: None, error: None };
        match *self {
            Ask::Get | Ask::Delete => {}
            Ask::Put(Value { tag, len }) | Ask::PutIfAbsent(Value { tag, len }) => {
                (fields.value, fields.len) = (Content::Tag(tag), Some(len));
            }
            Ask::Scan { keys, limit } => (fields.keys, fields.limit) = (Some(keys), Some(limit)),
        }
        fields
    }

    fn answered(&self, outcome: &Outcome) -> (Kind, Fields) {
        let asked = self.asked();
        match outcome {
            Outcome::Found(value) => {
                (Kind::Ok, Fields { value: Content::Tag(value.tag), len: Some(value.len), ..asked })
            }
            Outcome::Absent if *self == Ask::Delete => {
                (Kind::Ok, Fields { value: Content::Had(false), ..asked })
            }
            Outcome::Done if *self == Ask::Delete => {
                (Kind::Ok, Fields { value: Content::Had(true), ..asked })
            }
            Outcome::Absent | Outcome::Done => (Kind::Ok, asked),
            Outcome::Present => (Kind::Fail, Fields { error: Some("conflict"), ..asked }),
            Outcome::Scanned(items) => {
                let items = items.iter().map(|item| (item.distance, item.value.tag)).collect();
                (Kind::Ok, Fields { value: Content::Items(items), ..asked })
            }
            Outcome::Failed => (Kind::Fail, asked),
            Outcome::Unknown => (Kind::Info, asked),
        }
    }
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ask::Get => f.write_str("get"),
            Ask::Put(value) => write!(f, "put {value}"),
            Ask::PutIfAbsent(value) => write!(f, "put {value} if absent"),
            Ask::Delete => f.write_str("delete"),
            Ask::Scan { keys, limit } => write!(f, "scan at most {limit} of {keys}"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Found(value) => write!(f, "{value}"),
            Outcome::Absent => f.write_str("absent"),
            Outcome::Done => f.write_str("done"),
            Outcome::Present => f.write_str("present"),
            Outcome::Scanned(items) => {
                f.write_str("[")?;
                for (at, item) in items.iter().enumerate() {
                    let before = if at == 0 { "" } else { ", " };
                    write!(f, "{before}{:+} {}", item.distance, item.value)?;
                }
                f.write_str("]")
            }
            Outcome::Failed => f.write_str("failed"),
            Outcome::Unknown => f.write_str("unknown"),
        }
    }
}
