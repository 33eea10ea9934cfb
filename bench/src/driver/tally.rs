//! What came of a run's operations.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::report::Latencies;

/// Names of kinds of operations. A kind is its place among them.
pub type Kinds = &'static [&'static str];

/// What came of them.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The kinds that are counted.
    pub kinds: Kinds,
    /// Operations done, of each kind.
    pub done: Vec<u64>,
    /// Operations that failed.
    pub errors: u64,
    /// Values that nobody may ever read.
    pub violations: u64,
    /// The first few of either, in words.
    pub told: Vec<String>,
    /// How long they took, of those that were looked at: since they were due, if there was a schedule.
    pub latencies: ByKind,
    /// How long they took since they were begun, where there was a schedule.
    pub service: ByKind,
}

impl Tally {
    /// None yet, of these kinds.
    pub fn of(kinds: Kinds) -> Tally {
        Tally { kinds, done: vec![0; kinds.len()], ..Tally::default() }
    }

    /// Operations done, of all kinds.
    pub fn operations(&self) -> u64 {
        self.done.iter().sum()
    }

    /// Adds those of another thread, which performs the same work.
    pub fn merge(&mut self, other: Tally) {
        if self.kinds.is_empty() {
            *self = Tally { done: vec![0; other.kinds.len()], kinds: other.kinds, ..std::mem::take(self) };
        }
        self.done.iter_mut().zip(other.done).for_each(|(done, more)| *done += more);
        self.errors += other.errors;
        self.violations += other.violations;
        self.latencies.merge(&other.latencies);
        self.service.merge(&other.service);
        self.told.extend(other.told);
        self.told.truncate(TOLD_MAX);
    }

    #[cold]
    pub(super) fn tell(&mut self, words: impl FnOnce() -> String) {
        if self.told.len() < TOLD_MAX {
            self.told.push(words());
        }
    }
}

/// So much of what went wrong is told: a session that ends tells it for each of its tasks.
const TOLD_MAX: usize = 64;

/// Latencies of each kind of operation that there was. They take memory with the first of a kind.
#[derive(Clone, Debug, Default)]
pub struct ByKind(Vec<Option<Latencies>>);

impl ByKind {
    /// Adds one of that kind.
    #[inline]
    pub fn record(&mut self, kind: usize, latency: Duration) {
        self.place(kind).record(latency);
    }

    #[inline]
    fn place(&mut self, kind: usize) -> &mut Latencies {
        if kind >= self.0.len() {
            self.0.resize(kind + 1, None);
        }
        self.0[kind].get_or_insert_default()
    }

    /// Adds all of `other`'s.
    pub fn merge(&mut self, other: &ByKind) {
        for (kind, latencies) in other.0.iter().enumerate() {
            if let Some(latencies) = latencies {
                self.place(kind).merge(latencies);
            }
        }
    }

    /// Those of one kind, if there are any.
    pub fn of(&self, kind: usize) -> Option<&Latencies> {
        self.0.get(kind)?.as_ref()
    }

    /// Those of all kinds.
    pub fn all(&self) -> Latencies {
        self.0.iter().flatten().fold(Latencies::new(), |mut all, some| {
            all.merge(some);
            all
        })
    }
}

/// What a thread saw in one interval of time.
#[derive(Debug)]
pub struct Interval {
    /// Which one, from 0.
    pub number: u32,
    /// How long operations took that ended in it.
    pub latencies: ByKind,
}

/// Cuts a thread's latencies into intervals.
pub(super) struct Intervals {
    since: Instant,
    every: Duration,
    current: Interval,
    to: mpsc::Sender<Interval>,
}

impl Intervals {
    pub(super) fn new(since: Instant, every: Duration, to: mpsc::Sender<Interval>) -> Intervals {
        Intervals { since, every, current: Interval { number: 0, latencies: ByKind::default() }, to }
    }

    /// One that ended at `now`.
    #[inline]
    pub(super) fn record(&mut self, kind: usize, latency: Duration, now: Instant) {
        let number = (now.saturating_duration_since(self.since).as_nanos() / self.every.as_nanos()) as u32;
        if number > self.current.number {
            self.send(number);
        }
        self.current.latencies.record(kind, latency);
    }

    #[cold]
    fn send(&mut self, next: u32) {
        let next = Interval { number: next, latencies: ByKind::default() };
        // Nobody writes them down any more once the writer has failed, which says so itself.
        self.to.send(std::mem::replace(&mut self.current, next)).unwrap_or(());
    }
}

impl Drop for Intervals {
    fn drop(&mut self) {
        self.send(0);
    }
}
