//! Determines when the tasks of a measurement start their operations: in a closed loop, or by a schedule (an open
//! loop).
//!
//! Invariant: a schedule starts an operation when it is due, whether or not the previous operation has ended. So a slow
//! store cannot influence which latencies are sampled (coordinated omission).

use super::SessionConfig;
use farside_bench::driver::{Perform, Run, Schedule, Thread};
use farside_fabrics::{executor, timer};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Progress of a thread's tasks through their warm-up.
pub(in crate::cli) struct Start {
    pub(super) began: Instant,
    /// Number of the thread's tasks that are still warming up.
    pub(super) cold: Cell<u32>,
    /// Time at which the last task finished its warm-up; `None` before that.
    pub(super) warm: Cell<Option<Instant>>,
}

/// Rule by which a task starts its operations: a closed loop, a closed loop with pauses, or an open loop.
#[derive(Clone, Copy)]
pub(in crate::cli) struct Pace {
    /// Rate of an open loop, in operations a second of all tasks together, which start operations alternately; `None`
    /// for a closed loop.
    target: Option<f64>,
    /// Pause before each operation of a closed loop, if there is one.
    idle: Option<Duration>,
    warm_up: Duration,
    /// Number of tasks of all threads together.
    tasks: u32,
    /// Whether the pool has several nodes, whose sessions are opened again by themselves. Then a task goes on after a
    /// lost connection.
    has_several: bool,
}

/// Pause of a task after a lost connection to one of several nodes, so that it does not take the core from others.
const LOST_PAUSE: Duration = Duration::from_millis(1);

impl Pace {
    pub(super) fn of(config: &SessionConfig, nodes: usize) -> Pace {
        let SessionConfig { target, idle, warm_up, threads, tasks, .. } = *config;
        Pace { target, idle, warm_up, tasks: threads * tasks, has_several: nodes > 1 }
    }

    /// Performs up to `limit` operations of a closed loop. Returns whether the task may go on.
    async fn go_on<C, W: Perform<C>>(
        self,
        run: &Run<W>,
        client: &mut C,
        drawn: &Thread<W>,
        number: u32,
        limit: u64,
    ) -> bool {
        let is_connected = run.task(client, drawn, number, limit).await;
        if !is_connected && self.has_several {
            timer::sleep(LOST_PAUSE).await;
        }
        is_connected || self.has_several
    }

    /// Runs a task: performs operations until the run is over. Only one task of each thread has `warmed_up`. That task
    /// times the warm-up, and calls `warmed_up` at the end of the warm-up.
    pub(super) async fn task<C, W: Perform<C>>(
        self,
        run: &Run<W>,
        client: &mut C,
        drawn: &Thread<W>,
        number: u32,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        if let Some(target) = self.target {
            return self.scheduled(run, client, drawn, number, target, start, warmed_up).await;
        }
        let mut is_connected = true;
        if let Some(warmed_up) = warmed_up {
            // `warmed_up` discards the operations counted before it.
            let mut step = Step::default();
            while is_connected && start.began.elapsed() < self.warm_up && !run.is_stopped() {
                is_connected = self.go_on(run, client, drawn, number, step.next()).await;
            }
            warmed_up();
        }
        let Some(idle) = self.idle else {
            // A task ends only at its limit, when the run is over, or when its connection is lost.
            while is_connected && !run.task(client, drawn, number, u64::MAX).await {
                is_connected = self.has_several && !run.is_stopped();
                timer::sleep(LOST_PAUSE).await;
            }
            return;
        };
        while is_connected && !run.is_stopped() && drawn.is_open() {
            timer::sleep(idle).await;
            is_connected = self.go_on(run, client, drawn, number, 1).await;
        }
    }

    /// Runs a task like [`Pace::task`], but by a schedule. The schedule starts again after the warm-up. Operations of
    /// the warm-up that have not started when it ends are skipped.
    #[allow(clippy::too_many_arguments, reason = "the arguments of `task`, and the rate")]
    async fn scheduled<C, W: Perform<C>>(
        self,
        run: &Run<W>,
        client: &mut C,
        drawn: &Thread<W>,
        number: u32,
        target: f64,
        start: &Start,
        warmed_up: Option<impl FnOnce()>,
    ) {
        let after = |operations: u32| Duration::from_secs_f64(f64::from(operations) / target);
        let from = |since: Instant| Schedule { first: since + after(number), every: after(self.tasks) };
        let is_over = || run.is_stopped();
        let warm_at = start.began + self.warm_up;
        let until_warm = async |due: Instant| {
            until(due.min(warm_at), is_over).await;
            due < warm_at && Instant::now() < warm_at // Operations that have not started by then are skipped.
        };
        run.scheduled(client, drawn, number, from(start.began), until_warm).await;
        start.cold.set(start.cold.get() - 1);
        if let Some(warmed_up) = warmed_up {
            // This task waits until no operation of the warm-up is in flight.
            while start.cold.get() > 0 {
                executor::yield_now().await;
            }
            warmed_up();
            start.warm.set(Some(Instant::now()));
        }
        let since = loop {
            match start.warm.get() {
                Some(since) => break since,
                None => executor::yield_now().await,
            }
        };
        let wait = async |due: Instant| {
            until(due, is_over).await;
            true
        };
        run.scheduled(client, drawn, number, from(since), wait).await;
    }
}

/// Waits until `due`, or less if `is_over` returns true. To return exactly at `due`, sleeps first, then polls the
/// clock.
async fn until(due: Instant, is_over: impl Fn() -> bool) {
    /// Maximum time by which a timer fires too late.
    const LATE: Duration = Duration::from_micros(300);
    /// Interval at which `is_over` is polled.
    const LOOK: Duration = Duration::from_millis(50);
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() || is_over() {
            return;
        }
        match left.checked_sub(LATE) {
            Some(long) if !long.is_zero() => timer::sleep(long.min(LOOK)).await,
            _ => executor::yield_now().await,
        }
    }
}

/// Number of operations to do before the clock is read again. They take about [`Step::TIME`], so that a run of slow
/// operations does not exceed its time by much.
pub(super) struct Step {
    operations: u64,
    since: Option<Instant>,
}

impl Default for Step {
    fn default() -> Step {
        Step { operations: 1, since: None }
    }
}

impl Step {
    const TIME: Duration = Duration::from_millis(5);
    pub(super) const MAX: u64 = 1000;

    /// Returns the number of operations for the next step. The caller has done those of the previous step.
    pub(super) fn next(&mut self) -> u64 {
        let since = self.since.replace(Instant::now());
        self.operations = match since.map(|since| since.elapsed() < Step::TIME) {
            None => 1,
            Some(true) => (self.operations * 2).min(Step::MAX),
            Some(false) => (self.operations / 2).max(1),
        };
        self.operations
    }
}
