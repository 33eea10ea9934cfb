//! Drives clients of one family of systems through a [`Work`], in a closed loop or by a schedule. Each thread has a
//! fixed number of tasks, and each task has one operation in flight.
//!
//! Invariant: the driver depends on no family. The work defines operations, performs them and judges their results. The
//! driver owns loops, pacing, counters and histograms.
//! Invariant: operations are drawn before the clock starts, unless they depend on earlier operations. Every result is
//! judged.
//! Invariant: a task's next operation depends on whether the last result was right. So no processor can overlap two
//! operations that a program could not overlap.
//! Invariant: with a schedule, an operation's latency starts when the operation was due, even if it starts later. So
//! the time that it waited for a stalled store counts (Tene's "coordinated omission").
//! Invariant: an operation allocates no memory.

mod tally;

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use farside_remote::FabricError;

use crate::report::Latencies;
use crate::workload::{self, Random};
use tally::Intervals;
pub use tally::{ByKind, Interval, Kinds, Tally};

/// Operations of a family of systems, as the driver runs them. Each family has one implementation.
pub trait Work {
    /// Names of the kinds of operations, as reports print them.
    const KINDS: Kinds;
    /// Whether the longest stall is measured, which reads the clock after each operation.
    const TIMES_STALLS: bool = false;
    /// Type of an operation that is drawn and not performed yet.
    type Drawn: Copy;
    /// Type of the source of one thread's operations.
    type Source;
    /// Type of the state of one task, such as its buffers.
    type Task;
    /// Type of an error or violation of an operation.
    type Trouble: Trouble;

    /// Creates the source of one thread's operations, which uses `random` for all draws.
    fn source(&self, random: Random) -> Self::Source;

    /// Whether operations must be drawn when they start, because they depend on earlier operations.
    fn is_drawn_live(&self) -> bool {
        false
    }

    /// Draws the next operation from a source.
    fn draw(source: &mut Self::Source) -> Self::Drawn;

    /// Returns the kind of the operation: an index of [`Work::KINDS`].
    fn kind(drawn: Self::Drawn) -> usize;

    /// Creates the state of the task with this number. Tasks are numbered from 0. The loader has the number after the
    /// last task's.
    fn task(&self, number: u32) -> Self::Task;

    /// Number of records to load before the run.
    fn records(&self) -> u64;

    /// Learns that an operation of a task has ended. Does nothing unless the family counts operations by task.
    #[inline]
    fn ended(&self, _task: &mut Self::Task, _has_succeeded: bool) {}
}

/// Work that clients of the type `C` can perform.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub trait Perform<C>: Work {
    /// Loads record number `record`.
    ///
    /// # Errors
    /// The record was not loaded.
    async fn load(&self, client: &mut C, record: u64, task: &mut Self::Task) -> Result<(), Self::Trouble>;

    /// Performs one operation and judges its result.
    ///
    /// # Errors
    /// The operation failed, or its result is wrong.
    async fn perform(
        &self,
        client: &mut C,
        drawn: Self::Drawn,
        task: &mut Self::Task,
    ) -> Result<(), Self::Trouble>;
}

/// Error or violation of an operation. Its text is shown to the user.
pub trait Trouble: Display {
    /// Returns the consequence of this trouble for the run.
    fn fault(&self) -> Fault;
}

/// Consequence of an error or violation for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation failed; the next one may succeed.
    Failed,
    /// The operation failed, and every later operation on this connection will fail.
    Disconnected,
    /// The result of the operation is one that no client may see.
    Violated,
}

impl Fault {
    /// Returns the consequence of an operation to which the fabric returned no response.
    pub(crate) fn of(error: &FabricError) -> Fault {
        match error {
            // The next request may succeed.
            FabricError::Deadline { .. } | FabricError::Refused(_) => Fault::Failed,
            _ => Fault::Disconnected,
        }
    }
}

/// State that all clients of a run share: its work and its options.
pub struct Run<W> {
    work: W,
    /// Number of tasks of all threads together.
    tasks: u32,
    stop: AtomicBool,
    seed: u64,
    sampled: u64,
}

/// State that the tasks of one thread share: operations, counters and latencies.
pub struct Thread<W: Work> {
    draws: Draws<W>,
    /// Number of operations that the thread may still count before it reaches its limit.
    left: Cell<u64>,
    /// Number of the thread's operations in flight.
    in_flight: Cell<u64>,
    tally: RefCell<Tally>,
    intervals: RefCell<Option<Intervals>>,
}

enum Draws<W: Work> {
    /// Operations are drawn in advance and repeated in a cycle.
    Ahead { drawn: Vec<W::Drawn>, next: Cell<usize> },
    /// Operations are drawn one by one, because they depend on earlier operations.
    Live(RefCell<W::Source>),
}

/// Times at which a task's operations are due. These times do not depend on when earlier operations end.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Time at which the first operation is due.
    pub first: Instant,
    /// Interval between the due times of two operations.
    pub every: Duration,
}

/// Number of operations drawn in advance for each thread. It is smaller in a debug build, because tests start many
/// short runs.
const DRAWN: usize = if cfg!(debug_assertions) { 1 << 14 } else { 1 << 20 };
const _: () = assert!(DRAWN.is_power_of_two());

impl<W: Work> Run<W> {
    /// Creates a run of `tasks` tasks that records the latency of one operation in `sampled`. `sampled` is at least 1.
    /// `seed` determines all random draws.
    ///
    /// # Errors
    /// `tasks` is 0.
    pub fn new(work: W, tasks: u32, sampled: u64, seed: u64) -> Result<Run<W>, String> {
        if tasks == 0 {
            return Err("a run needs at least 1 task, not 0".into());
        }
        Ok(Run { work, tasks, stop: AtomicBool::new(false), seed, sampled: sampled.max(1) })
    }

    /// Returns the work of this run.
    pub fn work(&self) -> &W {
        &self.work
    }

    /// Stops every task after its current operation.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether [`Run::stop`] was called, so that tasks must stop.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Lets tasks run again after [`Run::stop`].
    pub fn resume(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Creates the state of the thread with this number and draws its operations.
    pub fn thread(&self, thread: u32) -> Thread<W> {
        let random =
            workload::random(self.seed ^ (u64::from(thread) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut source = self.work.source(random);
        let draws = if self.work.is_drawn_live() {
            Draws::Live(RefCell::new(source))
        } else {
            let drawn = (0..DRAWN).map(|_| W::draw(&mut source)).collect();
            Draws::Ahead { drawn, next: Cell::new(0) }
        };
        Thread {
            draws,
            left: Cell::new(u64::MAX),
            in_flight: Cell::new(0),
            tally: RefCell::new(Tally::of(W::KINDS)),
            intervals: RefCell::default(),
        }
    }

    /// Loads the records `task`, `task + tasks`, `task + 2 * tasks`, … Calls `progress` after every 1000 records.
    ///
    /// # Errors
    /// Returns the error of the first record that was not loaded.
    pub async fn load<C>(
        &self,
        client: &mut C,
        task: u64,
        tasks: u64,
        mut progress: impl FnMut(u64, &Latencies),
    ) -> Result<(), String>
    where
        W: Perform<C>,
    {
        const STEP: u64 = 1000;
        let mut loader = self.work.task(self.tasks);
        let mut latencies = Latencies::new();
        let mut done = 0;
        for record in (task..self.work.records()).step_by(tasks as usize) {
            let since = Instant::now();
            let loaded = self.work.load(client, record, &mut loader).await;
            loaded.map_err(|trouble| trouble.to_string())?;
            latencies.record(since.elapsed());
            done += 1;
            if done % STEP == 0 {
                progress(STEP, &latencies);
                latencies.clear();
            }
        }
        progress(done % STEP, &latencies);
        Ok(())
    }

    /// Performs operations until [`Run::stop`] is called, `limit` operations are done, or the thread reaches its own
    /// limit. Returns false if the connection was lost before that.
    pub async fn task<C>(&self, client: &mut C, thread: &Thread<W>, number: u32, limit: u64) -> bool
    where
        W: Perform<C>,
    {
        let mut task = self.work.task(number);
        let mut done = 0;
        let mut doubt = 0;
        let mut ended = W::TIMES_STALLS.then(Instant::now);
        while done < limit && !self.stop.load(Ordering::Relaxed) && thread.may_begin() {
            let drawn = thread.draw(doubt);
            let since = (done % self.sampled == 0).then(Instant::now);
            let result = self.work.perform(client, drawn, &mut task).await;
            self.work.ended(&mut task, result.is_ok());
            let fault = thread.judge(result);
            thread.count(drawn, since);
            if let Some(before) = &mut ended {
                let now = Instant::now();
                thread.note_stall(now.saturating_duration_since(std::mem::replace(before, now)));
            }
            if fault == Some(Fault::Disconnected) {
                return false;
            }
            doubt = usize::from(fault == Some(Fault::Violated));
            done += 1;
        }
        true
    }

    /// Performs operations as [`task`](Run::task) does, but starts each operation when it is due. `wait` gets the time
    /// when the operation is due and returns when this time has come. If `wait` returns false, the task ends.
    pub async fn scheduled<C>(
        &self,
        client: &mut C,
        thread: &Thread<W>,
        number: u32,
        schedule: Schedule,
        wait: impl AsyncFn(Instant) -> bool,
    ) where
        W: Perform<C>,
    {
        let mut task = self.work.task(number);
        let mut due = schedule.first;
        while !self.stop.load(Ordering::Relaxed) && thread.may_begin() {
            if !wait(due).await || self.stop.load(Ordering::Relaxed) {
                thread.in_flight.set(thread.in_flight.get() - 1);
                break;
            }
            let drawn = thread.draw(0);
            let begun = Instant::now();
            let result = self.work.perform(client, drawn, &mut task).await;
            self.work.ended(&mut task, result.is_ok());
            let fault = thread.judge(result);
            // A failed operation counts, too: its caller has waited for the outcome.
            thread.count(drawn, Some(due));
            let lasted = begun.elapsed();
            thread.tally.borrow_mut().service.record(W::kind(drawn), lasted);
            if W::TIMES_STALLS {
                thread.note_stall(lasted);
            }
            if fault == Some(Fault::Disconnected) {
                break;
            }
            due += schedule.every;
        }
    }
}

impl<W: Work> Thread<W> {
    /// Limits the thread to this number of further operations, including those in flight.
    pub fn limit(&self, operations: u64) {
        self.left.set(operations);
    }

    /// Whether the thread has not reached its limit.
    pub fn is_open(&self) -> bool {
        self.left.get() > 0
    }

    /// Returns the tally of the thread's tasks and resets it.
    pub fn take_tally(&self) -> Tally {
        drop(self.intervals.take()); // Sends the last interval.
        self.tally.replace(Tally::of(W::KINDS))
    }

    /// Ends the warm-up: resets counts and latencies, but keeps errors and violations.
    pub fn end_warm_up(&self) {
        let mut tally = self.tally.borrow_mut();
        let Tally { errors, violations, failures, .. } = std::mem::take(&mut *tally);
        *tally = Tally { errors, violations, failures, ..Tally::of(W::KINDS) };
    }

    /// Makes the thread send the latencies of each interval of length `every` from `since` on to `to`, when the
    /// interval is over.
    pub fn cut(&self, since: Instant, every: Duration, to: mpsc::Sender<Interval>) {
        *self.intervals.borrow_mut() = Some(Intervals::new(since, every, to));
    }

    /// Returns the next operation. `doubt` is 1 if the last result was wrong, and 0 otherwise.
    #[inline]
    pub(crate) fn draw(&self, doubt: usize) -> W::Drawn {
        match &self.draws {
            Draws::Ahead { drawn, next } => {
                let place = (next.get() + doubt) & (DRAWN - 1);
                next.set(place + 1);
                drawn[place]
            }
            Draws::Live(source) => W::draw(&mut source.borrow_mut()),
        }
    }

    /// Returns whether another operation may start. If so, this function counts the operation as in flight.
    #[inline]
    pub(crate) fn may_begin(&self) -> bool {
        let in_flight = self.in_flight.get();
        let may = in_flight < self.left.get();
        self.in_flight.set(in_flight + u64::from(may));
        may
    }

    #[inline]
    fn judge(&self, result: Result<(), W::Trouble>) -> Option<Fault> {
        result.err().map(|trouble| self.count_trouble(&trouble))
    }

    /// Counts an operation as done. Records the operation's latency if its start `since` is given.
    #[inline]
    pub(crate) fn count(&self, drawn: W::Drawn, since: Option<Instant>) {
        self.in_flight.set(self.in_flight.get() - 1);
        let left = self.left.get();
        if left == 0 {
            return; // The operation started before the limit was set.
        }
        self.left.set(left - 1);
        let kind = W::kind(drawn);
        let mut tally = self.tally.borrow_mut();
        tally.done[kind] += 1;
        if let Some(since) = since {
            let now = Instant::now();
            let latency = now.saturating_duration_since(since);
            tally.latencies.record(kind, latency);
            if let Some(intervals) = &mut *self.intervals.borrow_mut() {
                intervals.record(kind, latency, now);
            }
        }
    }

    /// Takes note that a task has ended no operation for this time.
    #[inline]
    fn note_stall(&self, stall: Duration) {
        let mut tally = self.tally.borrow_mut();
        tally.longest_stall = tally.longest_stall.max(stall);
    }

    /// Counts an error or violation, and returns its consequence. Keeps the texts of the first errors and violations.
    #[cold]
    pub fn count_trouble(&self, trouble: &W::Trouble) -> Fault {
        let fault = trouble.fault();
        let mut tally = self.tally.borrow_mut();
        match fault {
            Fault::Failed | Fault::Disconnected => tally.errors += 1,
            Fault::Violated => tally.violations += 1,
        }
        tally.tell(|| trouble.to_string());
        fault
    }
}

#[cfg(test)]
mod tests;
