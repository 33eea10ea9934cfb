//! Operations and outcomes of a key-value store: every key is a register.

use super::lines::{Fault, Kind, Readable, Written};
use super::record_word;
use serde::{Deserialize, Serialize};
use std::fmt;

/// History of operations on registers.
pub type History = super::History<Ask>;
/// Operation on a register, with its client, times and outcome.
pub type Operation = super::Operation<Ask>;

/// A value that tests store. Its bytes follow from its tag and length, so that a test detects a torn or foreign value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Value {
    /// Tag that identifies the value.
    pub tag: u64,
    /// Length of the value in bytes.
    pub len: u32,
}

/// Version of a key, which identifies an install of a value. Versions can only be compared for equality: two equal
/// versions of one key name the same install.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

/// Operation that a client asks of a key's register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ask {
    /// Reads the key's value.
    Get,
    /// Reads whether the key has a value.
    Contains,
    /// Stores this value, whether or not the key has one.
    Put(Value),
    /// Deletes the key's value.
    Delete,
    /// Stores this value if the key has none.
    PutIfAbsent(Value),
    /// Stores this value if the key still has the expected version.
    CompareAndPut {
        /// Version that the key must have. An earlier operation returned it.
        expected: Version,
        /// Value to store.
        value: Value,
    },
}

/// Outcome of an operation on a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Outcome of a `Get`: the key had this value, and this version if the system returns versions.
    Found(Value, Option<Version>),
    /// Outcome of a `Contains`: the key had a value.
    Present,
    /// Outcome of a `Get`, `Contains`, `Delete` or `CompareAndPut`: the key had no value.
    Absent,
    /// Outcome of every operation except `Get` and `Contains`: the value was stored or deleted. Has the key's new
    /// version if the system returns versions.
    Done(Option<Version>),
    /// Nothing was stored. After a `PutIfAbsent`: the key had a value, with this version if the system returns
    /// versions. After a `CompareAndPut`: the key had this version, which is not the expected one; without a version,
    /// it had another version or no value.
    Conflict(Option<Version>),
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
            Outcome::Found(..) => matches!(self, Ask::Get),
            Outcome::Present => matches!(self, Ask::Contains),
            Outcome::Absent => {
                matches!(self, Ask::Get | Ask::Contains | Ask::Delete | Ask::CompareAndPut { .. })
            }
            Outcome::Done(version) => match self {
                Ask::Get | Ask::Contains => false,
                Ask::Delete => version.is_none(),
                Ask::Put(_) | Ask::PutIfAbsent(_) | Ask::CompareAndPut { .. } => true,
            },
            Outcome::Conflict(version) => match self {
                Ask::PutIfAbsent(_) => true,
                Ask::CompareAndPut { expected, .. } => *version != Some(*expected),
                Ask::Get | Ask::Contains | Ask::Put(_) | Ask::Delete => false,
            },
            Outcome::Failed | Outcome::Unknown => true,
        }
    }

    fn is_read(&self) -> bool {
        matches!(self, Ask::Get | Ask::Contains)
    }

    fn record(&self, out: &mut Vec<u8>) {
        let (kind, value, expected) = match *self {
            Ask::Get => (0, None, None),
            Ask::Put(value) => (1, Some(value), None),
            Ask::Delete => (2, None, None),
            Ask::PutIfAbsent(value) => (3, Some(value), None),
            Ask::CompareAndPut { expected, value } => (4, Some(value), Some(expected)),
            Ask::Contains => (5, None, None),
        };
        out.push(kind);
        record_value(value, out);
        record_word(expected.map(|version| version.0), out);
    }
}

impl super::Outcome for Outcome {
    const UNKNOWN: Outcome = Outcome::Unknown;
    const FAILED: Outcome = Outcome::Failed;

    fn record(&self, out: &mut Vec<u8>) {
        let (kind, value, version) = match *self {
            Outcome::Found(value, version) => (0, Some(value), version),
            Outcome::Absent => (1, None, None),
            Outcome::Done(version) => (2, None, version),
            Outcome::Conflict(version) => (3, None, version),
            Outcome::Failed => (4, None, None),
            Outcome::Unknown => (5, None, None),
            Outcome::Present => (6, None, None),
        };
        out.push(kind);
        record_value(value, out);
        record_word(version.map(|version| version.0), out);
    }
}

/// Appends an optional value to `out`. An absent value takes the same number of bytes as a present one.
fn record_value(value: Option<Value>, out: &mut Vec<u8>) {
    let Value { tag, len } = value.unwrap_or(Value { tag: 0, len: 0 });
    record_word(value.map(|_| tag), out);
    out.extend_from_slice(&len.to_le_bytes());
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
            Ask::Contains => f.write_str("contains"),
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
            Outcome::Present => f.write_str("present"),
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

/// Kinds of operations on a register, as named on lines.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Function {
    /// Name of [`Ask::Get`] on a line.
    Read,
    /// Name of [`Ask::Put`] on a line.
    Write,
    /// Name of [`Ask::Delete`] on a line.
    Delete,
    /// Name of [`Ask::PutIfAbsent`] on a line.
    WriteIfAbsent,
    /// Name of [`Ask::CompareAndPut`] on a line.
    Cas,
    /// Name of [`Ask::Contains`] on a line.
    Contains,
}

/// Register-specific fields of a line. Absent fields are omitted.
#[derive(Serialize, Deserialize)]
pub struct Fields {
    value: Content,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    len: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expected: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<Refusal>,
}

/// Content of a line's `value` field: a value's tag, whether a delete or a contains found a value, or null.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Content {
    Tag(u64),
    Had(bool),
    Nothing(()),
}

/// Reason why an operation had no effect.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Refusal {
    Absent,
    Conflict,
}

impl Written for Ask {
    type Function = Function;
    type Fields = Fields;

    fn function(&self) -> Function {
        match self {
            Ask::Get => Function::Read,
            Ask::Put(_) => Function::Write,
            Ask::Delete => Function::Delete,
            Ask::PutIfAbsent(_) => Function::WriteIfAbsent,
            Ask::CompareAndPut { .. } => Function::Cas,
            Ask::Contains => Function::Contains,
        }
    }

    fn asked(&self) -> Fields {
        let (value, expected) = match *self {
            Ask::Get | Ask::Contains | Ask::Delete => (None, None),
            Ask::Put(value) | Ask::PutIfAbsent(value) => (Some(value), None),
            Ask::CompareAndPut { expected, value } => (Some(value), Some(expected.0)),
        };
        Fields {
            value: value.map_or(Content::Nothing(()), |value| Content::Tag(value.tag)),
            len: value.map(|value| value.len),
            expected,
            version: None,
            error: None,
        }
    }

    fn answered(&self, outcome: &Outcome) -> (Kind, Fields) {
        let asked = self.asked();
        let reported = |version: Option<Version>| version.map(|version| version.0);
        let is_delete = *self == Ask::Delete;
        let is_of_presence = matches!(self, Ask::Delete | Ask::Contains);
        match *outcome {
            Outcome::Found(value, version) => {
                let (len, version) = (Some(value.len), reported(version));
                (Kind::Ok, Fields { value: Content::Tag(value.tag), len, version, ..asked })
            }
            Outcome::Present => (Kind::Ok, Fields { value: Content::Had(true), ..asked }),
            Outcome::Absent if is_of_presence => (Kind::Ok, Fields { value: Content::Had(false), ..asked }),
            Outcome::Absent if *self == Ask::Get => (Kind::Ok, asked),
            Outcome::Absent => (Kind::Fail, Fields { error: Some(Refusal::Absent), ..asked }),
            Outcome::Done(_) if is_delete => (Kind::Ok, Fields { value: Content::Had(true), ..asked }),
            Outcome::Done(version) => (Kind::Ok, Fields { version: reported(version), ..asked }),
            Outcome::Conflict(version) => {
                (Kind::Fail, Fields { version: reported(version), error: Some(Refusal::Conflict), ..asked })
            }
            Outcome::Failed => (Kind::Fail, asked),
            Outcome::Unknown => (Kind::Info, asked),
        }
    }
}

impl Readable for Ask {
    fn read(function: Function, fields: &Fields) -> Result<Ask, Fault> {
        Ok(match function {
            Function::Read => Ask::Get,
            Function::Write => Ask::Put(fields.value()?),
            Function::Delete => Ask::Delete,
            Function::Contains => Ask::Contains,
            Function::WriteIfAbsent => Ask::PutIfAbsent(fields.value()?),
            Function::Cas => {
                let expected = fields.expected.ok_or_else(|| {
                    ("a cas without an expected version".to_owned(), "add \"expected\", a number below 2^64")
                })?;
                Ask::CompareAndPut { expected: Version(expected), value: fields.value()? }
            }
        })
    }

    fn read_answer(&self, kind: Kind, fields: &Fields) -> Result<Outcome, Fault> {
        let version = fields.version.map(Version);
        Ok(match (kind, fields.error, self) {
            (Kind::Ok, None, Ask::Get) if fields.value == Content::Nothing(()) => Outcome::Absent,
            (Kind::Ok, None, Ask::Get) => Outcome::Found(fields.value()?, version),
            (Kind::Ok, None, Ask::Delete | Ask::Contains) => match fields.value {
                Content::Had(true) if *self == Ask::Contains => Outcome::Present,
                Content::Had(true) => Outcome::Done(version),
                Content::Had(false) => Outcome::Absent,
                _ => {
                    let name = if *self == Ask::Contains { "contains" } else { "delete" };
                    let what = format!("the value of a {name}'s return is neither true nor false");
                    return Err((what, "give \"value\": true if the key had a value, else false"));
                }
            },
            (Kind::Ok, None, _) => Outcome::Done(version),
            (Kind::Fail, None, _) => Outcome::Failed,
            (Kind::Fail, Some(Refusal::Absent), _) => Outcome::Absent,
            (Kind::Fail, Some(Refusal::Conflict), _) => Outcome::Conflict(version),
            (Kind::Info, None, _) => Outcome::Unknown,
            (Kind::Ok | Kind::Info, Some(_), _) => {
                return Err((
                    "an error on a line whose type is not fail".into(),
                    "remove \"error\", or set the type to fail",
                ));
            }
            (Kind::Invoke, ..) => panic!("an invoke line is not a return"),
        })
    }
}

impl Fields {
    fn value(&self) -> Result<Value, Fault> {
        match (self.value, self.len) {
            (Content::Tag(tag), len) => Ok(Value { tag, len: len.unwrap_or(0) }),
            _ => Err(("its value is not a number".into(), "set \"value\" to a number below 2^64")),
        }
    }
}
