//! Whether every key behaves as one register while it is read and written: linearizable, by whomever, decided on line.
//!
//! Every value is written once, so that a read tells whose write it saw. All that is known of a value is then when the
//! first of its operations ended and when the last began. Two values of a key are in conflict if each has an operation
//! that ended before one of the other began; a history has an order that explains it if and only if no read brings what
//! was not being written yet, and no two values are in conflict (Gibbons and Korach, "Testing shared memories", SIAM
//! J. Comput. 1997, section 4.1, where the two cases are overlapping forward zones and a backward zone in a forward
//! one).
//!
//! Invariant: a key's time counts the beginnings and ends of its own operations, under a lock, so that no clock need be
//! trusted: what ended at an earlier time had ended before the other began.
//! Invariant: a value is forgotten only once no read that has yet to end may bring it, and once another value stands in
//! for it in every conflict to come: so little is remembered, and nothing is missed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Stamp, Violation, check};

/// What is known of all keys, shared by all readers and writers.
#[derive(Debug)]
pub struct Ledger {
    shards: Box<[Mutex<Shard>]>,
    /// The last sequence of each writer.
    issued: Box<[AtomicU64]>,
}

/// An operation that has begun and must be ended.
#[derive(Debug)]
#[must_use = "an operation that never ends keeps its key's values remembered"]
pub struct Begun {
    key: u64,
    at: u64,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It took effect between its beginning and now.
    Yes,
    /// It took no effect and never will.
    No,
    /// It may have, or may yet.
    Unknown,
}

/// So many, lest threads wait for one another.
const SHARDS: u64 = 256;

#[derive(Debug, Default)]
struct Shard {
    /// The value of each key that is still: key `k` lies at `k / SHARDS`.
    still: Vec<Stamp>,
    active: HashMap<u64, Key>,
}

/// A key that is being read or written, or of whose values more than one may be the newest.
#[derive(Debug, Default)]
struct Key {
    time: u64,
    /// When each read began that has not ended.
    reads: Vec<u64>,
    /// How many writes have not ended.
    writes: u32,
    values: Vec<Value>,
}

/// One value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    stamp: Stamp,
    /// When the first operation that had it ended: its write, or a read.
    first_end: u64,
    /// When the last one began.
    last_begin: u64,
}

/// Of no value that was written: a key begins without one.
const ABSENT: Stamp = Stamp { writer: 0, sequence: 0 };
/// Later than all.
const NEVER: u64 = u64::MAX;

impl Ledger {
    /// For so many writers; all keys are absent.
    pub fn new(writers: u32) -> Ledger {
        Ledger {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            issued: (0..writers).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A read of `key` begins.
    pub fn begin_read(&self, key: u64) -> Begun {
        self.with(key, |known| {
            let at = known.tick();
            known.reads.push(at);
            Begun { key, at }
        })
    }

    /// A write of `key` by `writer` begins; the value is to be told from all others by the stamp.
    ///
    /// # Panics
    /// There is no such writer.
    pub fn begin_write(&self, key: u64, writer: u32) -> (Begun, Stamp) {
        // Relaxed: whoever reads the value has it from a write that begins after this.
        let sequence = self.issued[writer as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let stamp = Stamp { writer, sequence };
        self.with(key, |known| {
            let at = known.tick();
            known.writes += 1;
            known.values.push(Value { stamp, first_end: NEVER, last_begin: at });
            (Begun { key, at }, stamp)
        })
    }

    /// The read ended, and brought this; `None` for no value.
    ///
    /// # Errors
    /// What it brought could not be there at any instant of the read. It is not remembered.
    pub fn end_read(&self, begun: Begun, value: Option<&[u8]>) -> Result<(), Violation> {
        let key = begun.key;
        let read = self.stamp_of(key, value);
        self.with(key, |known| {
            let now = known.tick();
            known.end_read(begun.at);
            let judged = read.and_then(|read| {
                known.saw(read, begun.at, now).map_err(|newer| match read {
                    ABSENT => Violation::Missing { key },
                    _ => Violation::WentBack { key, read, newer },
                })
            });
            known.forget();
            judged
        })
    }

    /// The read failed, and brought nothing.
    pub fn fail_read(&self, begun: Begun) {
        self.with(begun.key, |known| {
            known.end_read(begun.at);
            known.forget();
        });
    }

    /// The write ended so.
    ///
    /// # Errors
    /// Its value was read, and it is said that it did not run.
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
                // It was read and replaced before it ended; or it is remembered until somebody reads it.
                (Written::Yes, None) | (Written::Unknown, _) => Ok(()),
            };
            known.forget();
            judged
        })
    }

    /// Does that with what is known of the key.
    fn with<T>(&self, key: u64, work: impl FnOnce(&mut Key) -> T) -> T {
        let mut shard = self.shard(key);
        let place = (key / SHARDS) as usize;
        let still = shard.still.get(place).copied().unwrap_or(ABSENT);
        let known = shard.active.entry(key).or_insert_with(|| Key::still_at(still));
        let done = work(known);
        if let Some(stamp) = known.is_still() {
            shard.active.remove(&key);
            if shard.still.len() <= place {
                shard.still.resize(place + 1, ABSENT);
            }
            shard.still[place] = stamp;
        }
        done
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, Shard> {
        self.shards[(key % SHARDS) as usize].lock().expect("whoever held it did not panic")
    }

    /// Whose value it is, as far as it was ever written.
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
    fn still_at(stamp: Stamp) -> Key {
        Key { values: vec![Value { stamp, first_end: 0, last_begin: 0 }], ..Key::default() }
    }

    fn tick(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    fn end_read(&mut self, began: u64) {
        let place = self.reads.iter().position(|&at| at == began);
        self.reads.swap_remove(place.expect("whoever has begun is listed, until it ends"));
    }

    /// A read from `began` to `now` brought this value. If it could not: one that was newer.
    fn saw(&mut self, stamp: Stamp, began: u64, now: u64) -> Result<(), Option<Stamp>> {
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

    /// Forgets values that no read may bring any more.
    fn forget(&mut self) {
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        let mut place = 0;
        while place < self.values.len() {
            let value = self.values[place];
            // With the last condition, whatever would come to be in conflict with `value` is with `other` too.
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

    /// The key's value, if there is no doubt about it.
    fn is_still(&self) -> Option<Stamp> {
        match &self.values[..] {
            [value] if self.reads.is_empty() && self.writes == 0 => Some(value.stamp),
            _ => None,
        }
    }
}

impl Value {
    /// Whether either came before the other.
    fn conflicts_with(&self, other: &Value) -> bool {
        self.first_end < other.last_begin && other.first_end < self.last_begin
    }
}
