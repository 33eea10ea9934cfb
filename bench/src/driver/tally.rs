//! What came of a run's operations.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::report::Latencies;
use crate::workload::Operation;

/// What came of them.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Operations done, in the order of [`Operation::ALL`].
    pub done: [u64; Operation::ALL.len()],
    /// Operations that failed.
    pub errors: u64,
    /// Values that nobody may ever read.
    pub violations: u64,
    /// The first few of either, in words.
    pub told: Vec<String>,
    /// How long they took, of those that were looked at: since they were due, if there was a schedule.
    pub latencies: ByOperation,
    /// How long they took since they were begun, where there was a schedule.
    pub service: ByOperation,
}

impl Tally {
    /// Operations done, of all kinds.
    pub fn operations(&self) -> u64 {
        self.done.iter().sum()
    }

    /// Adds those of another thread.
    pub fn merge(&mut self, other: Tally) {
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
pub struct ByOperation([Option<Latencies>; Operation::ALL.len()]);

impl ByOperation {
    /// Adds one.
    #[inline]
    pub fn record(&mut self, operation: Operation, latency: Duration) {
        self.0[operation as usize].get_or_insert_default().record(latency);
    }

    /// Adds all of `other`'s.
    pub fn merge(&mut self, other: &ByOperation) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            if let Some(theirs) = theirs {
                mine.get_or_insert_default().merge(theirs);
            }
        }
    }

    /// Those of one kind, if there are any.
    pub fn of(&self, operation: Operation) -> Option<&Latencies> {
        self.0[operation as usize].as_ref()
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
    pub latencies: ByOperation,
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
        Intervals { since, every, current: Interval { number: 0, latencies: ByOperation::default() }, to }
    }

    /// One that ended at `now`.
    #[inline]
    pub(super) fn record(&mut self, operation: Operation, latency: Duration, now: Instant) {
        let number = (now.saturating_duration_since(self.since).as_nanos() / self.every.as_nanos()) as u32;
        if number > self.current.number {
            self.send(number);
        }
        self.current.latencies.record(operation, latency);
    }

    #[cold]
    fn send(&mut self, next: u32) {
        let next = Interval { number: next, latencies: ByOperation::default() };
        // Nobody writes them down any more once the writer has failed, which says so itself.
        self.to.send(std::mem::replace(&mut self.current, next)).unwrap_or(());
    }
}

impl Drop for Intervals {
    fn drop(&mut self) {
        self.send(0);
    }
}
