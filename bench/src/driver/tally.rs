//! Counts, latencies and errors of a run's operations.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::report::Latencies;

/// Names of the kinds of operations. A kind is an index into this list.
pub type Kinds = &'static [&'static str];

/// Numbers, latencies and errors of a run's operations.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Names of the kinds of operations.
    pub kinds: Kinds,
    /// Number of operations done, for each kind.
    pub done: Vec<u64>,
    /// Number of failed operations.
    pub errors: u64,
    /// Number of violations: operations that read a wrong value.
    pub violations: u64,
    /// Texts of the first errors and violations.
    pub failures: Vec<String>,
    /// Latencies of sampled operations. With a schedule, a latency starts when the operation was due.
    pub latencies: ByKind,
    /// Service times of operations, from start to end. They are recorded only with a schedule.
    pub service: ByKind,
    /// Longest time in which a task that was not paused ended no operation. Zero unless the work times stalls.
    pub longest_stall: Duration,
}

impl Tally {
    /// Creates an empty tally for these kinds.
    pub fn of(kinds: Kinds) -> Tally {
        Tally { kinds, done: vec![0; kinds.len()], ..Tally::default() }
    }

    /// Returns the number of operations done, of all kinds together.
    pub fn operations(&self) -> u64 {
        self.done.iter().sum()
    }

    /// Adds the tally of another thread with the same work.
    pub fn merge(&mut self, other: Tally) {
        if self.kinds.is_empty() {
            *self = Tally { done: vec![0; other.kinds.len()], kinds: other.kinds, ..std::mem::take(self) };
        }
        self.done.iter_mut().zip(other.done).for_each(|(done, more)| *done += more);
        self.errors += other.errors;
        self.violations += other.violations;
        self.latencies.merge(&other.latencies);
        self.service.merge(&other.service);
        self.longest_stall = self.longest_stall.max(other.longest_stall);
        self.failures.extend(other.failures);
        self.failures.truncate(FAILURES_MAX);
    }

    #[cold]
    pub(super) fn tell(&mut self, words: impl FnOnce() -> String) {
        if self.failures.len() < FAILURES_MAX {
            self.failures.push(words());
        }
    }
}

/// Maximum number of texts that a tally keeps. A lost session yields one text for each of its tasks.
const FAILURES_MAX: usize = 64;

/// Latencies by kind of operation. The histogram of a kind is allocated when its first latency is recorded.
#[derive(Clone, Debug, Default)]
pub struct ByKind(Vec<Option<Latencies>>);

impl ByKind {
    /// Adds a latency of an operation of this kind.
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

    /// Adds all latencies of `other` to this value.
    pub fn merge(&mut self, other: &ByKind) {
        for (kind, latencies) in other.0.iter().enumerate() {
            if let Some(latencies) = latencies {
                self.place(kind).merge(latencies);
            }
        }
    }

    /// Returns the latencies of one kind, if any were recorded.
    pub fn of(&self, kind: usize) -> Option<&Latencies> {
        self.0.get(kind)?.as_ref()
    }

    /// Returns the latencies of all kinds together.
    pub fn all(&self) -> Latencies {
        self.0.iter().flatten().fold(Latencies::new(), |mut all, some| {
            all.merge(some);
            all
        })
    }
}

/// Latencies of a thread's operations in one interval of time.
#[derive(Debug)]
pub struct Interval {
    /// Number of the interval, counted from 0.
    pub number: u32,
    /// Latencies of operations that ended in the interval.
    pub latencies: ByKind,
}

/// Groups a thread's latencies by interval, and sends each interval when it is over.
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

    /// Adds the latency of an operation that ended at `now`.
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
        // The receiver is gone if the writer of the log failed, which reports its own error.
        self.to.send(std::mem::replace(&mut self.current, next)).unwrap_or(());
    }
}

impl Drop for Intervals {
    fn drop(&mut self) {
        self.send(0);
    }
}
