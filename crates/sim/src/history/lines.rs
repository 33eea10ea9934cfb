//! A history as JSON lines for other checkers: one event per line, in the style of Jepsen's histories.
//!
//! The format is `docs/sim-histories.md`.
//!
//! Invariant: a written history is read back as the same history.
//!
//! Invariant: to decode a line, a reader needs only this line and the line of the same operation's call.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Ask, History, Moment, Operation, OperationId, Outcome};

/// Maximum length in bytes of a line that is read. Written lines have less than 300 bytes.
const LINE_BYTES_MAX: usize = 1 << 16;

/// Operations of a family that can be written as lines.
pub trait Written: Ask {
    /// Type of the operation's kind, as named on a line.
    type Function: Serialize;
    /// Type of the family-specific fields of a line.
    type Fields: Serialize;

    /// Returns the kind of this operation.
    fn function(&self) -> Self::Function;

    /// Returns the family-specific fields of the line that records the operation's call.
    fn asked(&self) -> Self::Fields;

    /// Returns the kind and the family-specific fields of the line that records the operation's return.
    fn answered(&self, outcome: &Self::Outcome) -> (Kind, Self::Fields);
}

/// Operations of a family that can be read from lines.
pub trait Readable:
    Written<Function: PartialEq + fmt::Debug + DeserializeOwned, Fields: DeserializeOwned>
{
    /// Decodes an operation from the line that records its call.
    ///
    /// # Errors
    /// Returns a description of what is wrong with the line, and the remedy.
    fn read(function: Self::Function, fields: &Self::Fields) -> Result<Self, Fault>;

    /// Decodes this operation's outcome from the line that records its return.
    ///
    /// # Errors
    /// Returns a description of what is wrong with the line, and the remedy.
    fn read_answer(&self, kind: Kind, fields: &Self::Fields) -> Result<Self::Outcome, Fault>;
}

/// Description of what is wrong with a line, and the remedy.
pub type Fault = (String, &'static str);

/// Kinds of lines: a call, or a return with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The line records the call of an operation.
    Invoke,
    /// The line records the return of an operation that was carried out.
    Ok,
    /// The line records the return of an operation that was not carried out.
    Fail,
    /// The line records the return of an operation that may have been carried out.
    Info,
}

/// One line of the file. It records one event.
#[derive(Serialize, Deserialize)]
struct Line<F, R> {
    index: u64,
    #[serde(rename = "type")]
    kind: Kind,
    process: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    client: Option<u32>,
    f: F,
    key: u64,
    #[serde(flatten)]
    fields: R,
    time: u64,
}

type LineOf<A> = Line<<A as Written>::Function, <A as Written>::Fields>;

/// An event of a history: the call of an operation, or its return.
pub struct Event<'a, A: Ask> {
    /// The operation.
    pub operation: &'a Operation<A>,
    /// Number of the process that called it. A process has one operation in flight at a time, and none after an
    /// operation of unknown outcome.
    pub process: u64,
    /// Moment of the event.
    pub moment: Moment,
    /// Whether the event is the return.
    pub is_return: bool,
}

/// Visits all events of a history, in their order.
///
/// # Errors
/// Returns the first error of `visit`.
pub fn each_event<A: Ask>(
    history: &History<A>,
    mut visit: impl FnMut(Event<'_, A>) -> io::Result<()>,
) -> io::Result<()> {
    let operations = history.operations();
    let clients = operations.iter().map(|operation| u64::from(operation.client) + 1).max().unwrap_or(0);
    // A client with several operations in flight takes several processes.
    let mut busy: BTreeMap<u32, Vec<bool>> = BTreeMap::new();
    let mut open: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
    let process = |client: u32, lane: usize| u64::from(client) + lane as u64 * clients;
    let mut called = 0;
    for index in 0..history.events() {
        let is_call = operations.get(called).is_some_and(|operation| operation.called.index == index);
        if is_call {
            let operation = &operations[called];
            let lanes = busy.entry(operation.client).or_default();
            let lane = lanes.iter().position(|is_busy| !is_busy).unwrap_or(lanes.len());
            lanes.resize(lanes.len().max(lane + 1), false);
            lanes[lane] = true;
            if let Some(returned) = operation.returned {
                open.insert(returned.index, (called, lane));
            }
            called += 1;
            let process = process(operation.client, lane);
            visit(Event { operation, process, moment: operation.called, is_return: false })?;
        } else {
            let (at, lane) =
                open.remove(&index).expect("every event is a call, or the return of an earlier one");
            let operation = &operations[at];
            if let Some(lanes) = busy.get_mut(&operation.client) {
                lanes[lane] = operation.outcome == A::Outcome::UNKNOWN;
            }
            let process = process(operation.client, lane);
            let moment = operation.returned.expect("this event is its return");
            visit(Event { operation, process, moment, is_return: true })?;
        }
    }
    Ok(())
}

/// Writes a history to `out`, one event per line.
///
/// # Errors
/// Returns the errors of `out`.
pub fn write<A: Written>(history: &History<A>, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
    each_event(history, |Event { operation, process, is_return, .. }| {
        let line = if is_return { return_line(operation, process) } else { call_line(operation, process) };
        serde_json::to_writer(&mut *out, &line)?;
        out.write_all(b"\n")
    })
}

fn call_line<A: Written>(operation: &Operation<A>, process: u64) -> LineOf<A> {
    Line {
        index: operation.called.index,
        kind: Kind::Invoke,
        process,
        client: Some(operation.client),
        f: operation.ask.function(),
        key: operation.key,
        fields: operation.ask.asked(),
        time: operation.called.ns,
    }
}

fn return_line<A: Written>(operation: &Operation<A>, process: u64) -> LineOf<A> {
    let returned = operation.returned.expect("only an operation with a return has this line");
    let (kind, fields) = operation.ask.answered(&operation.outcome);
    Line { index: returned.index, time: returned.ns, kind, fields, ..call_line(operation, process) }
}

/// Error: a line cannot be part of a history.
#[derive(Debug)]
pub struct LineError {
    /// Number of the invalid line, counted from 1.
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

/// Reads a history from lines, one event per line.
///
/// # Errors
/// Returns a [`LineError`] with the first invalid line, and the remedy.
pub fn read<A: Readable>(mut from: impl BufRead) -> Result<History<A>, LineError> {
    let mut history = History::new();
    let mut open: BTreeMap<u64, OperationId> = BTreeMap::new();
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let fail = |(what, remedy): (String, &'static str)| LineError { line, what, remedy };
        let mut limited = io::Read::take(&mut from, LINE_BYTES_MAX as u64 + 1);
        let len = limited
            .read_until(b'\n', &mut text)
            .map_err(|error| fail((error.to_string(), "check that the file can be read to its end")))?;
        if len == 0 {
            break;
        }
        if len > LINE_BYTES_MAX {
            let what = format!("the line is longer than {LINE_BYTES_MAX} bytes");
            return Err(fail((what, "write one event per line, without free text")));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        event(&text, &mut history, &mut open).map_err(fail)?;
    }
    Ok(history)
}

/// Adds the event of one line to the history.
fn event<A: Readable>(
    text: &[u8],
    history: &mut History<A>,
    open: &mut BTreeMap<u64, OperationId>,
) -> Result<(), Fault> {
    let line: LineOf<A> = serde_json::from_slice(text)
        .map_err(|error| (error.to_string(), "write the fields that docs/sim-histories.md lists"))?;
    if line.index != history.events {
        let what = format!("its index is {}, but the next index is {}", line.index, history.events);
        return Err((what, "keep all events of a run in order, and number them from 0"));
    }
    if line.time < history.ns {
        let what = format!("its time is {} ns, after an event of {} ns", line.time, history.ns);
        return Err((what, "keep the events in the order in which they happened"));
    }
    if line.kind == Kind::Invoke {
        let client = line.client.or_else(|| u32::try_from(line.process).ok());
        let client = client.ok_or_else(|| {
            (
                format!("process {} is too large for a client's number", line.process),
                "add \"client\", a number below 2^32",
            )
        })?;
        let ask = A::read(line.f, &line.fields)?;
        if let Some(earlier) = open.get(&line.process) {
            let earlier = &history.operations[earlier.0];
            let what = format!(
                "process {} makes a call, but its call of index {} has no return",
                line.process, earlier.called.index
            );
            return Err((what, "use another process number for the client, or write the return first"));
        }
        let id = history.call(client, line.key, ask, line.time);
        open.insert(line.process, id);
        return Ok(());
    }
    let id = *open.get(&line.process).ok_or_else(|| {
        (format!("process {} returns, but has no call", line.process), "write the line of its call first")
    })?;
    let operation = &history.operations[id.0];
    if operation.returned.is_some() {
        let what = format!("process {} returns twice", line.process);
        return Err((what, "remove the lines of this process after its info"));
    }
    if operation.key != line.key || operation.ask.function() != line.f {
        let what = format!(
            "a return for key {}, {:?}, but the call of process {} is different",
            line.key, line.f, line.process
        );
        return Err((what, "repeat f and key of the call in the return"));
    }
    let outcome = operation.ask.read_answer(line.kind, &line.fields)?;
    if !operation.ask.can_have(&outcome) {
        let what = format!("'{}' cannot have the outcome '{outcome}'", operation.ask);
        return Err((what, "see docs/sim-histories.md for the outcomes of each f"));
    }
    // After an unknown outcome the process stays in `open`, since it makes no further call.
    if outcome != A::Outcome::UNKNOWN {
        open.remove(&line.process);
    }
    history.returned(id, outcome, line.time);
    Ok(())
}
