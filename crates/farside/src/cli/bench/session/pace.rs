//! Starts the operations of a measurement's tasks: each after the previous one (a closed loop), or by a schedule (an
//! open loop).
//!
//! Invariant: a schedule starts an operation when it is due, whether or not the previous one has ended. A slow store
//! therefore cannot influence which latencies are sampled (coordinated omission).

use super::SessionConfig;
use farside_bench::driver::{Perform, Run, Schedule, Thread};
use farside_fabrics::{executor, timer};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Progress of a thread's tasks through their warm-up.
pub(super) struct Start {
    pub(super) began: Instant,
    /// Number of tasks that are still warming up.
    pub(super) cold: Cell<u32>,
    /// Time at which the last of these tasks finished its warm-up.
    pub(super) warm: Cell<Option<Instant>>,
}

/// Pace of a task's operations: a closed loop or a schedule.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Operations per second of all tasks together, which start them in turn; `None` for a closed loop.
    target: Option<f64>,
    /// Pause before each operation of a closed loop.
    idle: Option<Duration>,
    warm_up: Duration,
    /// Number of tasks of all threads.
    tasks: u32,
}

impl Pace {
    pub(super) fn of(config: &SessionConfig) -> Pace {
        let SessionConfig { target, idle, warm_up, threads, tasks, .. } = *config;
        Pace { target, idle, warm_up, tasks: threads * tasks }
    }

    /// Body of a task: performs operations until the run is over. One task of each thread is given `warmed_up`: it
    /// times the thread's warm-up and calls the function at its end.
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
            // `warmed_up` discards what was counted before.
            let mut step = Step::default();
            while is_connected && start.began.elapsed() < self.warm_up && !run.is_stopped() {
                is_connected = run.task(client, drawn, number, step.next()).await;
            }
            warmed_up();
        }
        let Some(idle) = self.idle else {
            if is_connected {
                run.task(client, drawn, number, u64::MAX).await;
            }
            return;
        };
        while is_connected && !run.is_stopped() && drawn.is_open() {
            timer::sleep(idle).await;
            is_connected = run.task(client, drawn, number, 1).await;
        }
    }

    /// Like [`Pace::task`], but starts operations by a schedule. The schedule restarts after the warm-up. It skips
    /// operations that were late at that moment.
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
            // Wait until no operation of the warm-up is in flight.
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

/// Returns at `due`, or earlier if `is_over`. Sleeps first, then polls the clock, to be exact.
async fn until(due: Instant, is_over: impl Fn() -> bool) {
    /// Maximum delay of the system's timer.
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

/// Number of operations to do before the clock is read again: as many as take about [`Step::TIME`], so that a run of
/// slow operations does not exceed its time by much.
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

    /// Returns the next number of operations; called when the previous step is done.
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
