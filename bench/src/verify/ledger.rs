//! Online check that every key behaves as one linearizable register.
//!
//! Each value is written once, so a read identifies the write whose value it returned. For each value, the ledger
//! keeps two times: the time when the first operation on the value ended, and the time when the last operation on the
//! value started.
//!
//! Two values of a key are in conflict if each has an operation that ended before an operation of the other started. A
//! history is linearizable if and only if
//! * no read returns a value whose write had not started, and
//! * no two values are in conflict.
//!
//! See Gibbons and Korach, "Testing shared memories", SIAM J. Comput. 1997, section 4.1. In the paper, a conflict has
//! one of two forms: two forward zones overlap, or a backward zone lies within a forward zone.
//!
//! Invariant: a key's time counts the starts and ends of its own operations, under a lock, so the check depends on no
//! clock. An operation with an earlier end time has ended before an operation with a later start time started.
//! Invariant: the ledger forgets a value only under two conditions: no read in flight may return the value, and every
//! value that comes into conflict with it later is also in conflict with another value that is kept. So the ledger is
//! small and misses no violation.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Stamp, Violation, check};

/// State of all keys, shared by all readers and writers.
#[derive(Debug)]
pub struct Ledger {
    shards: Box<[Mutex<Shard>]>,
    /// Last sequence number that each writer has used.
    issued: Box<[AtomicU64]>,
}

/// An operation in flight. The caller must end the operation.
#[derive(Debug)]
#[must_use = "an operation that never ends keeps its key's values in memory"]
pub struct Begun {
    key: u64,
    at: u64,
}

/// Outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The write took effect between its start and now.
    Yes,
    /// The write did not take effect and never will.
    No,
    /// The write may have taken effect, or may still do so.
    Unknown,
}

/// Number of shards of the ledger. With many shards, threads rarely wait for each other.
const SHARDS: u64 = 256;

#[derive(Debug, Default)]
struct Shard {
    /// Stamp of the value of each quiescent key (a key without operations in flight). Key `k` lies at `k / SHARDS`.
    quiescent: Vec<Stamp>,
    active: HashMap<u64, Key>,
}

/// State of a key with operations in flight, or with several values that may be the newest.
#[derive(Debug, Default)]
struct Key {
    time: u64,
    /// Start time of each read in flight.
    reads: Vec<u64>,
    /// Number of writes in flight.
    writes: u32,
    values: Vec<Value>,
}

/// One value of a key, and the times of the operations on the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    stamp: Stamp,
    /// End time of the first operation (its write or a read) with this value.
    first_end: u64,
    /// Start time of the last operation with this value.
    last_begin: u64,
}

/// Stamp of a key without a value, which is the initial state.
const ABSENT: Stamp = Stamp { writer: 0, sequence: 0 };
/// A time that is later than all others.
const NEVER: u64 = u64::MAX;

impl Ledger {
    /// Creates a ledger for this number of writers. All keys are absent.
    pub fn new(writers: u32) -> Ledger {
        Ledger {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            issued: (0..writers).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Starts a read of `key`. Returns the read, which the caller must end.
    pub fn begin_read(&self, key: u64) -> Begun {
        self.with(key, |known| {
            let at = known.tick();
            known.reads.push(at);
            Begun { key, at }
        })
    }

    /// Starts a write of `key` by `writer`. Returns the stamp that the value must carry.
    ///
    /// # Panics
    /// If `writer` is not below the number of writers.
    pub fn begin_write(&self, key: u64, writer: u32) -> (Begun, Stamp) {
        // Relaxed: a client that reads the value got it from a write that starts after this.
        let sequence = self.issued[writer as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let stamp = Stamp { writer, sequence };
        self.with(key, |known| {
            let at = known.tick();
            known.writes += 1;
            known.values.push(Value { stamp, first_end: NEVER, last_begin: at });
            (Begun { key, at }, stamp)
        })
    }

    /// Ends a read that returned `value`; `None` for no value.
    ///
    /// # Errors
    /// The value was not present at any instant of the read. The ledger ignores it.
    pub fn end_read(&self, begun: Begun, value: Option<&[u8]>) -> Result<(), Violation> {
        let key = begun.key;
        let read = self.stamp_of(key, value);
        self.with(key, |known| {
            let now = known.tick();
            known.end_read(begun.at);
            let judged = read.and_then(|read| {
                known.record_read(read, begun.at, now).map_err(|newer| match read {
                    ABSENT => Violation::Missing { key },
                    _ => Violation::WentBack { key, read, newer },
                })
            });
            known.forget();
            judged
        })
    }

    /// Ends a read that failed.
    pub fn fail_read(&self, begun: Begun) {
        self.with(begun.key, |known| {
            known.end_read(begun.at);
            known.forget();
        });
    }

    /// Ends a write with this outcome.
    ///
    /// # Errors
    /// The outcome is [`Written::No`], but the value was read.
    pub fn end_write(&self, begun: Begun, stamp: Stamp, written: Written) -> Result<(), Violation> {
        self.with(begun.key, |known| {
            let now = known.tick();
            known.writes -= 1;
            let place = known.values.iter().position(|value| value.stamp == stamp);
            let judged = match (written, place) {
                (Written::Yes, Some(place)) => {
                    let value = &mut known.values[place];
                    value.first_end = value.first_end.min(now);
                    Ok(())
                }
                (Written::No, Some(place)) if known.values[place].first_end == NEVER => {
                    known.values.swap_remove(place);
                    Ok(())
                }
                (Written::No, _) => Err(Violation::NotRun { key: begun.key, read: stamp }),
                // `Yes`: the value was read and replaced before the write ended. `Unknown`: the value stays until it is
                // read.
                (Written::Yes, None) | (Written::Unknown, _) => Ok(()),
            };
            known.forget();
            judged
        })
    }

    /// Runs `work` on the state of `key`.
    fn with<T>(&self, key: u64, work: impl FnOnce(&mut Key) -> T) -> T {
        let mut shard = self.shard(key);
        let place = (key / SHARDS) as usize;
        let still = shard.quiescent.get(place).copied().unwrap_or(ABSENT);
        let known = shard.active.entry(key).or_insert_with(|| Key::quiescent_at(still));
        let done = work(known);
        if let Some(stamp) = known.quiescent_value() {
            shard.active.remove(&key);
            if shard.quiescent.len() <= place {
                shard.quiescent.resize(place + 1, ABSENT);
            }
            shard.quiescent[place] = stamp;
        }
        done
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        self.shards[(key % SHARDS) as usize].lock().expect("no thread panicked with the lock")
    }

    /// Returns the stamp of a value, after checking that its writer has issued it.
    fn stamp_of(&self, key: u64, value: Option<&[u8]>) -> Result<Stamp, Violation> {
        let Some(value) = value else { return Ok(ABSENT) };
        let read = check(key, value)?;
        // Relaxed: see `begin_write`.
        let issued = self.issued.get(read.writer as usize).map_or(0, |issued| issued.load(Ordering::Relaxed));
        if (1..=issued).contains(&read.sequence) {
            Ok(read)
        } else {
            Err(Violation::NeverWritten { key, read, issued })
        }
    }
}

impl Key {
    fn quiescent_at(stamp: Stamp) -> Key {
        Key { values: vec![Value { stamp, first_end: 0, last_begin: 0 }], ..Key::default() }
    }

    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    fn end_read(&mut self, began: u64) {
        let place = self.reads.iter().position(|&at| at == began);
        self.reads.swap_remove(place.expect("a read in flight is listed"));
    }

    /// Records that a read from `began` to `now` returned this value.
    ///
    /// # Errors
    /// The value was not present during the read. Returns a newer value, if one is known.
    fn record_read(&mut self, stamp: Stamp, began: u64, now: u64) -> Result<(), Option<Stamp>> {
        let Some(place) = self.values.iter().position(|value| value.stamp == stamp) else {
            let were_there = self.values.iter().filter(|value| value.first_end < began);
            return Err(were_there.max_by_key(|value| value.last_begin).map(|value| value.stamp));
        };
        let read = &self.values[place];
        let read =
            Value { first_end: read.first_end.min(now), last_begin: read.last_begin.max(began), ..*read };
        if let Some(newer) =
            self.values.iter().find(|other| other.stamp != stamp && other.conflicts_with(&read))
        {
            return Err(Some(newer.stamp));
        }
        self.values[place] = read;
        Ok(())
    }

    /// Forgets values that no read may return any more.
    fn forget(&mut self) {
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        let mut place = 0;
        while place < self.values.len() {
            let value = self.values[place];
            // The last condition ensures that every value in conflict with `value` is also in conflict with `other`.
            let stands_in = |other: &Value| {
                other.stamp != value.stamp
                    && value.first_end < other.last_begin
                    && other.first_end < oldest_read
                    && value.last_begin <= other.last_begin
            };
            if self.values.iter().any(stands_in) {
                self.values.swap_remove(place);
                place = 0;
            } else {
                place += 1;
            }
        }
    }

    /// Returns the key's value if the key is quiescent and has a single value.
    fn quiescent_value(&self) -> Option<Stamp> {
        match &self.values[..] {
            [value] if self.reads.is_empty() && self.writes == 0 => Some(value.stamp),
            _ => None,
        }
    }
}

impl Value {
    /// Whether the two values are in conflict: each value must come before the other.
    fn conflicts_with(&self, other: &Value) -> bool {
        self.first_end < other.last_begin && other.first_end < self.last_begin
    }
}
