//! Drives clients of one family of systems through a [`Work`], in a closed loop or by a schedule. Each thread has a
//! fixed number of tasks, and each task has one operation in flight.
//!
//! Invariant: the driver knows no family. What an operation is, how it is performed and whether its answer is right is
//! the work's; loops, pacing, counting and histograms are the driver's.
//! Invariant: operations are drawn before the clock runs, unless what is drawn depends on what has been done; and the
//! answer to every operation is judged.
//! Invariant: which operation a task performs next depends on whether the last answer was right, so that no processor
//! can overlap two operations that a program could not.
//! Invariant: by a schedule, an operation's latency begins when it was due, however late it was begun: what waited
//! because the store stood still is counted (Tene's "coordinated omission").
//! Invariant: nothing is allocated per operation.

mod tally;

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::report::Latencies;
use crate::workload::{self, Random};
use tally::Intervals;
pub use tally::{ByKind, Interval, Kinds, Tally};

/// The operations of a family of systems: one implementation a family.
pub trait Work {
    /// Names of the kinds of operations, as reports print them.
    const KINDS: Kinds;
    /// An operation, drawn and not performed yet.
    type Drawn: Copy;
    /// Source of one thread's operations.
    type Source;
    /// State of one task, such as its buffers.
    type Task;
    /// Error or violation of an operation.
    type Trouble: Trouble;

    /// A source for one thread.
    fn source(&self, random: Random) -> Self::Source;

    /// Whether an operation must be drawn when it begins, since it depends on those that have ended.
    fn is_drawn_live(&self) -> bool {
        false
    }

    /// The next operation.
    fn draw(source: &mut Self::Source) -> Self::Drawn;

    /// The operation's kind: an index of [`Work::KINDS`].
    fn kind(drawn: Self::Drawn) -> usize;

    /// The state of task `number`. Tasks are numbered from 0; one number above all of them is the loader's.
    fn task(&self, number: u32) -> Self::Task;

    /// Number of records to load before the run.
    fn records(&self) -> u64;
}

/// Work that clients of type `C` can perform.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub trait Perform<C>: Work {
    /// Loads record number `record`.
    ///
    /// # Errors
    /// It was not loaded.
    async fn load(&self, client: &mut C, record: u64, task: &mut Self::Task) -> Result<(), Self::Trouble>;

    /// Performs one operation and judges its answer.
    ///
    /// # Errors
    /// It failed, or its answer is wrong.
    async fn perform(
        &self,
        client: &mut C,
        drawn: Self::Drawn,
        task: &mut Self::Task,
    ) -> Result<(), Self::Trouble>;
}

/// Error or violation of an operation. Its text is for the user.
pub trait Trouble: Display {
    /// Its consequence for the run.
    fn fault(&self) -> Fault;
}

/// Consequence of trouble for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation failed; the next one may succeed.
    Failed,
    /// The operation failed, and every later one on this connection will.
    Disconnected,
    /// The answer is one that no client may ever see.
    Violated,
}

/// What all clients of a run share.
pub struct Run<W> {
    work: W,
    /// Tasks of all threads.
    tasks: u32,
    stop: AtomicBool,
    seed: u64,
    sampled: u64,
}

/// What one thread's tasks share: the operations that they are to do.
pub struct Thread<W: Work> {
    draws: Draws<W>,
    /// How many more are to be counted.
    left: Cell<u64>,
    /// How many have begun and not ended.
    under_way: Cell<u64>,
    tally: RefCell<Tally>,
    intervals: RefCell<Option<Intervals>>,
}

enum Draws<W: Work> {
    /// Drawn in advance; they are gone through again and again.
    Ahead { drawn: Vec<W::Drawn>, next: Cell<usize> },
    /// Drawn one by one, since they depend on what has been done.
    Live(RefCell<W::Source>),
}

/// When a task's operations are due: one, and then the next after so long, each at its time however late the last was.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// When the first is due.
    pub first: Instant,
    /// From each to the next.
    pub every: Duration,
}

/// Operations drawn for each thread. Fewer in a debug build, whose rates nobody quotes: tests start many short runs.
const DRAWN: usize = if cfg!(debug_assertions) { 1 << 14 } else { 1 << 20 };
const _: () = assert!(DRAWN.is_power_of_two());

impl<W: Work> Run<W> {
    /// A run of `tasks` tasks that times one operation in `sampled`, at least 1. Everything that is drawn follows from
    /// `seed`.
    ///
    /// # Errors
    /// There are no tasks.
    pub fn new(work: W, tasks: u32, sampled: u64, seed: u64) -> Result<Run<W>, String> {
        if tasks == 0 {
            return Err("no task would do anything: give one at least".into());
        }
        Ok(Run { work, tasks, stop: AtomicBool::new(false), seed, sampled: sampled.max(1) })
    }

    /// The work of this run.
    pub fn work(&self) -> &W {
        &self.work
    }

    /// Every task ends after the operation that it is at.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether tasks are to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The tasks may begin anew.
    pub fn resume(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Draws what thread number `thread` is to do.
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
            under_way: Cell::new(0),
            tally: RefCell::new(Tally::of(W::KINDS)),
            intervals: RefCell::default(),
        }
    }

    /// Loads the records `task`, `task + tasks`, `task + 2 * tasks`, … and tells how many after every thousand.
    ///
    /// # Errors
    /// A record's, in words.
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

    /// Does operations until [`Run::stop`], or `limit` of them, or until the thread has done all that it may. False if
    /// it ended before that, because nothing more will come of this connection.
    pub async fn task<C>(&self, client: &mut C, thread: &Thread<W>, number: u32, limit: u64) -> bool
    where
        W: Perform<C>,
    {
        let mut task = self.work.task(number);
        let mut done = 0;
        let mut doubt = 0;
        while done < limit && !self.stop.load(Ordering::Relaxed) && thread.may_begin() {
            let drawn = thread.draw(doubt);
            let since = (done % self.sampled == 0).then(Instant::now);
            let result = self.work.perform(client, drawn, &mut task).await;
            let fault = thread.judge(result);
            thread.count(drawn, since);
            if fault == Some(Fault::Disconnected) {
                return false;
            }
            doubt = usize::from(fault == Some(Fault::Violated));
            done += 1;
        }
        true
    }

    /// As [`task`](Run::task), one operation after the other as they are due; `wait` returns at that time, and says
    /// whether it goes on.
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
                thread.under_way.set(thread.under_way.get() - 1);
                break;
            }
            let drawn = thread.draw(0);
            let begun = Instant::now();
            let result = self.work.perform(client, drawn, &mut task).await;
            let fault = thread.judge(result);
            // Also one that failed: its caller has waited for it.
            thread.count(drawn, Some(due));
            thread.tally.borrow_mut().service.record(W::kind(drawn), begun.elapsed());
            if fault == Some(Fault::Disconnected) {
                break;
            }
            due += schedule.every;
        }
    }
}

impl<W: Work> Thread<W> {
    /// Only so many more operations are done, those that are under way among them.
    pub fn limit(&self, operations: u64) {
        self.left.set(operations);
    }

    /// Whether one more may begin.
    pub fn is_open(&self) -> bool {
        self.left.get() > 0
    }

    /// What the thread's tasks came to, and begins to count anew.
    pub fn take_tally(&self) -> Tally {
        drop(self.intervals.take()); // The last one is over.
        self.tally.replace(Tally::of(W::KINDS))
    }

    /// Forgets how much was done and how fast, but nothing that went wrong: what a warm-up ends with.
    pub fn forget_warm_up(&self) {
        let mut tally = self.tally.borrow_mut();
        let Tally { errors, violations, told, .. } = std::mem::take(&mut *tally);
        *tally = Tally { errors, violations, told, ..Tally::of(W::KINDS) };
    }

    /// Sends the latencies of each interval from `since` on, once it is over.
    pub fn cut(&self, since: Instant, every: Duration, to: mpsc::Sender<Interval>) {
        *self.intervals.borrow_mut() = Some(Intervals::new(since, every, to));
    }

    /// The next operation. `doubt` is 1 if the last answer was wrong, else 0.
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

    /// Whether one more may begin; it counts as begun.
    #[inline]
    pub(crate) fn may_begin(&self) -> bool {
        let under_way = self.under_way.get();
        let may = under_way < self.left.get();
        self.under_way.set(under_way + u64::from(may));
        may
    }

    #[inline]
    fn judge(&self, result: Result<(), W::Trouble>) -> Option<Fault> {
        result.err().map(|trouble| self.blame(&trouble))
    }

    /// One is done; it is to be remembered how long it took if it is known since when.
    #[inline]
    pub(crate) fn count(&self, drawn: W::Drawn, since: Option<Instant>) {
        self.under_way.set(self.under_way.get() - 1);
        let left = self.left.get();
        if left == 0 {
            return; // It had begun before it was said how many there are to be.
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

    /// Counts what went wrong, and keeps its text if it is among the first.
    #[cold]
    pub(crate) fn blame(&self, trouble: &W::Trouble) -> Fault {
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
