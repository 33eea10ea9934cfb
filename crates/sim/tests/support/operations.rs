//! Hand-written histories. Each row has a client, a call, a return, an operation and an outcome.

#![allow(dead_code, reason = "each test uses a part of it")]

use farside_sim::history::register::{Ask, History, Outcome, Value, Version};

/// One operation: `(client, time of the call, time of the return, ask, outcome)`. All times are different. If the time
/// of the return is [`NEVER`], the operation has no return.
pub(crate) type Row = (u32, u64, u64, Ask, Outcome);

pub(crate) const NEVER: u64 = u64::MAX;

pub(crate) fn value(tag: u64) -> Value {
    Value { tag, len: 8 }
}

pub(crate) fn put(tag: u64) -> Ask {
    Ask::Put(value(tag))
}

pub(crate) fn cas(expected: u64, tag: u64) -> Ask {
    Ask::CompareAndPut { expected: Version(expected), value: value(tag) }
}

pub(crate) fn found(tag: u64) -> Outcome {
    Outcome::Found(value(tag), None)
}

pub(crate) fn found_at(tag: u64, version: u64) -> Outcome {
    Outcome::Found(value(tag), Some(Version(version)))
}

pub(crate) const DONE: Outcome = Outcome::Done(None);

/// Builds the history of operations on one key.
pub(crate) fn history(rows: &[Row]) -> History {
    let mut events = Vec::new();
    for (at, &(_, from, to, ..)) in rows.iter().enumerate() {
        events.push((from, at, false));
        if to != NEVER {
            events.push((to, at, true));
        }
    }
    events.sort_unstable();
    let mut history = History::new();
    let mut ids = vec![None; rows.len()];
    for (ns, at, is_return) in events {
        let (client, _, _, ask, outcome) = rows[at];
        match ids[at] {
            Some(id) if is_return => history.returned(id, outcome, ns),
            _ => ids[at] = Some(history.call(client, 0, ask, ns)),
        }
    }
    history
}
