//! A history as JSON lines, as other checkers read them: one event a line, in the manner of Jepsen's histories.
//!
//! The format is `docs/sim-histories.md`. Invariant: what was written is read back as the same history.
//! Invariant: a line's event is told by that line and its call's alone.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

use super::{Ask, History, Operation, OperationId, Outcome, Value, Version};

/// The longest line that is read. Those that are written have less than 300 bytes.
const LINE_BYTES_MAX: usize = 1 << 16;

/// One event. What is not said is left out.
#[derive(Serialize, Deserialize)]
struct Line {
    index: u64,
    #[serde(rename = "type")]
    kind: Kind,
    process: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    client: Option<u32>,
    f: Function,
    key: u64,
    value: Content,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    len: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expected: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<Refusal>,
    time: u64,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Invoke,
    Ok,
    Fail,
    Info,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Function {
    Read,
    Write,
    Delete,
    WriteIfAbsent,
    Cas,
}

/// A value's tag, whether a delete found anything, or nothing.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Content {
    Tag(u64),
    Had(bool),
    Nothing(()),
}

/// Why something answered that it did nothing.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Refusal {
    Absent,
    Conflict,
}

/// Writes a history, an event a line.
///
/// # Errors
/// Those of `out`.
pub fn write(history: &History, out: &mut impl Write) -> io::Result<()> {
    let operations = history.operations();
    let clients = operations.iter().map(|operation| u64::from(operation.client) + 1).max().unwrap_or(0);
    // A process asks one thing at a time, and nothing after what may still be carried out: a client is as many
    // processes as it takes.
    let mut busy: BTreeMap<u32, Vec<bool>> = BTreeMap::new();
    let mut open: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
    let process = |client: u32, lane: usize| u64::from(client) + lane as u64 * clients;
    let mut called = 0;
    for index in 0..history.events() {
        let is_call = operations.get(called).is_some_and(|operation| operation.called.index == index);
        let line = if is_call {
            let operation = &operations[called];
            let lanes = busy.entry(operation.client).or_default();
            let lane = lanes.iter().position(|is_busy| !is_busy).unwrap_or(lanes.len());
            lanes.resize(lanes.len().max(lane + 1), false);
            lanes[lane] = true;
            if let Some(returned) = operation.returned {
                open.insert(returned.index, (called, lane));
            }
            called += 1;
            call_line(operation, process(operation.client, lane))
        } else {
            let (at, lane) =
                open.remove(&index).expect("every event is a call, or the return of an earlier one");
            let operation = &operations[at];
            if let Some(lanes) = busy.get_mut(&operation.client) {
                lanes[lane] = operation.outcome == Outcome::Unknown;
            }
            return_line(operation, process(operation.client, lane))
        };
        serde_json::to_writer(&mut *out, &line)?;
        out.write_all(b"\n")?;
    }
    Ok(())
}

fn call_line(operation: &Operation, process: u64) -> Line {
    let (f, value, expected) = match operation.ask {
        Ask::Get => (Function::Read, None, None),
        Ask::Put(value) => (Function::Write, Some(value), None),
        Ask::Delete => (Function::Delete, None, None),
        Ask::PutIfAbsent(value) => (Function::WriteIfAbsent, Some(value), None),
        Ask::CompareAndPut { expected, value } => (Function::Cas, Some(value), Some(expected.0)),
    };
    Line {
        index: operation.called.index,
        kind: Kind::Invoke,
        process,
        client: Some(operation.client),
        f,
        key: operation.key,
        value: value.map_or(Content::Nothing(()), |value| Content::Tag(value.tag)),
        len: value.map(|value| value.len),
        expected,
        version: None,
        error: None,
        time: operation.called.ns,
    }
}

fn return_line(operation: &Operation, process: u64) -> Line {
    let returned = operation.returned.expect("only what returned has such a line");
    let line = Line { index: returned.index, time: returned.ns, ..call_line(operation, process) };
    let told = |version: Option<Version>| version.map(|version| version.0);
    let is_delete = operation.ask == Ask::Delete;
    match operation.outcome {
        Outcome::Found(value, version) => Line {
            kind: Kind::Ok,
            value: Content::Tag(value.tag),
            len: Some(value.len),
            version: told(version),
            ..line
        },
        Outcome::Absent if is_delete => Line { kind: Kind::Ok, value: Content::Had(false), ..line },
        Outcome::Absent if operation.ask == Ask::Get => Line { kind: Kind::Ok, ..line },
        Outcome::Absent => Line { kind: Kind::Fail, error: Some(Refusal::Absent), ..line },
        Outcome::Done(_) if is_delete => Line { kind: Kind::Ok, value: Content::Had(true), ..line },
        Outcome::Done(version) => Line { kind: Kind::Ok, version: told(version), ..line },
        Outcome::Conflict(version) => {
            Line { kind: Kind::Fail, version: told(version), error: Some(Refusal::Conflict), ..line }
        }
        Outcome::Failed => Line { kind: Kind::Fail, ..line },
        Outcome::Unknown => Line { kind: Kind::Info, ..line },
    }
}

/// Why lines are no history.
#[derive(Debug)]
pub struct LineError {
    /// Counted from 1.
    pub line: u64,
    what: String,
    remedy: &'static str,
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}: {}", self.line, self.what, self.remedy)
    }
}

impl std::error::Error for LineError {}

/// Reads a history.
///
/// # Errors
/// [`LineError`] names the first line that is none of a history, and what to do.
pub fn read(mut from: impl BufRead) -> Result<History, LineError> {
    let mut history = History::new();
    let mut open: BTreeMap<u64, OperationId> = BTreeMap::new();
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let fail = |(what, remedy): (String, &'static str)| LineError { line, what, remedy };
        let mut limited = io::Read::take(&mut from, LINE_BYTES_MAX as u64 + 1);
        let len = limited
            .read_until(b'\n', &mut text)
            .map_err(|error| fail((error.to_string(), "see whether the file can be read to its end")))?;
        if len == 0 {
            break;
        }
        if len > LINE_BYTES_MAX {
            let what = format!("more than {LINE_BYTES_MAX} bytes without an end of line");
            return Err(fail((what, "write one event a line, without free text")));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        event(&text, &mut history, &mut open).map_err(fail)?;
    }
    Ok(history)
}

/// What is wrong, and what to do.
type Fault = (String, &'static str);

/// Adds the event of one line to the history.
fn event(text: &[u8], history: &mut History, open: &mut BTreeMap<u64, OperationId>) -> Result<(), Fault> {
    let line: Line = serde_json::from_slice(text)
        .map_err(|error| (error.to_string(), "give it the fields that docs/sim-histories.md lists"))?;
    if line.index != history.events {
        let what = format!("its index is {}, where {} is next", line.index, history.events);
        return Err((what, "keep all events of a run, in their order, and number them from 0"));
    }
    if line.time < history.ns {
        let what = format!("its time is {} ns, after an event of {} ns", line.time, history.ns);
        return Err((what, "keep the events in the order in which they happened"));
    }
    if line.kind == Kind::Invoke {
        let client = line.client.or_else(|| u32::try_from(line.process).ok());
        let client = client.ok_or_else(|| {
            (
                format!("process {} is too great for a client's number", line.process),
                "name the client, below 2^32",
            )
        })?;
        let ask = asked(&line)?;
        if let Some(earlier) = open.get(&line.process) {
            let earlier = &history.operations[earlier.0];
            let what = format!(
                "process {} asks, and its call of index {} has no answer",
                line.process, earlier.called.index
            );
            return Err((what, "let a client go on under another process number, or write the answer first"));
        }
        let id = history.call(client, line.key, ask, line.time);
        open.insert(line.process, id);
        return Ok(());
    }
    let id = *open.get(&line.process).ok_or_else(|| {
        (
            format!("process {} is answered, and has asked nothing", line.process),
            "write its call's line first",
        )
    })?;
    let operation = history.operations[id.0];
    if operation.returned.is_some() {
        let what = format!("process {} is answered twice", line.process);
        return Err((what, "leave out whatever comes after its info"));
    }
    if operation.key != line.key || call_line(&operation, 0).f != line.f {
        let what = format!(
            "an answer for key {}, {:?}, where process {} asked otherwise",
            line.key, line.f, line.process
        );
        return Err((what, "repeat f and key of the call in the answer"));
    }
    let outcome = answered(&line, &operation.ask)?;
    if !outcome.answers(&operation.ask) {
        let what = format!("'{}' cannot be answered by '{outcome}'", operation.ask);
        return Err((what, "see docs/sim-histories.md for the answers of each f"));
    }
    history.returned(id, outcome, line.time);
    // A process that does not know what became of its operation asks nothing more.
    if outcome != Outcome::Unknown {
        open.remove(&line.process);
    }
    Ok(())
}

fn value_of(line: &Line) -> Result<Value, Fault> {
    match (line.value, line.len) {
        (Content::Tag(tag), len) => Ok(Value { tag, len: len.unwrap_or(0) }),
        _ => Err(("its value is no number".into(), "name the value by a number below 2^64")),
    }
}

fn asked(line: &Line) -> Result<Ask, Fault> {
    Ok(match line.f {
        Function::Read => Ask::Get,
        Function::Write => Ask::Put(value_of(line)?),
        Function::Delete => Ask::Delete,
        Function::WriteIfAbsent => Ask::PutIfAbsent(value_of(line)?),
        Function::Cas => {
            let expected = line.expected.ok_or_else(|| {
                (
                    "a cas without the version that it expects".to_owned(),
                    "add \"expected\", a number below 2^64",
                )
            })?;
            Ask::CompareAndPut { expected: Version(expected), value: value_of(line)? }
        }
    })
}

fn answered(line: &Line, ask: &Ask) -> Result<Outcome, Fault> {
    let version = line.version.map(Version);
    Ok(match (line.kind, line.error, ask) {
        (Kind::Ok, None, Ask::Get) if line.value == Content::Nothing(()) => Outcome::Absent,
        (Kind::Ok, None, Ask::Get) => Outcome::Found(value_of(line)?, version),
        (Kind::Ok, None, Ask::Delete) => match line.value {
            Content::Had(true) => Outcome::Done(version),
            Content::Had(false) => Outcome::Absent,
            _ => {
                let what = "a delete's answer is neither true nor false".to_owned();
                return Err((what, "give \"value\": true if the key had a value, else false"));
            }
        },
        (Kind::Ok, None, _) => Outcome::Done(version),
        (Kind::Fail, None, _) => Outcome::Failed,
        (Kind::Fail, Some(Refusal::Absent), _) => Outcome::Absent,
        (Kind::Fail, Some(Refusal::Conflict), _) => Outcome::Conflict(version),
        (Kind::Info, None, _) => Outcome::Unknown,
        (Kind::Ok | Kind::Info, Some(_), _) => {
            return Err(("an error on what did not fail".into(), "leave \"error\" to lines of type fail"));
        }
        (Kind::Invoke, ..) => panic!("a call is no answer"),
    })
}
