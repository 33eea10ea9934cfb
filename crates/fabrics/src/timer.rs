//! A timer that works under any executor: one thread of the process wakes the tasks whose deadline has passed.
//!
//! Protocols sleep only in their slow paths (no free buffer, a deadline), so one thread is enough for the whole
//! process. The thread starts at the first call of [`sleep`].

use farside_remote::clock::{self, Clock};
use rustix::event::Timespec;
use rustix::time::{ClockId, clock_gettime};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::pin::Pin;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

static TIMER: LazyLock<&'static Timer> = LazyLock::new(|| {
    let timer: &'static Timer = Box::leak(Box::default());
    std::thread::Builder::new()
        .name("farside-timer".into())
        .spawn(move || timer.run())
        .expect("the system can start one more thread");
    timer
});

/// Returns the time since an arbitrary fixed moment in the past.
#[inline]
pub fn now() -> Duration {
    read_clock(ClockId::Monotonic)
}

/// Returns the time since the Unix epoch by the system's real-time clock, which may jump. Before the epoch, returns 0.
#[inline]
pub fn wall() -> Duration {
    let time = clock_gettime(ClockId::Realtime);
    u64::try_from(time.tv_sec).map_or(Duration::ZERO, |seconds| Duration::new(seconds, time.tv_nsec as u32))
}

/// Returns the time like [`now`], but reads the system's last clock tick. The result is at most a few milliseconds old,
/// and the call is faster than reading the CPU's clock.
#[inline]
pub fn coarse_now() -> Duration {
    read_clock(ClockId::MonotonicCoarse)
}

#[inline]
fn read_clock(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// Converts a duration to the type that system calls take. A duration beyond that type's range becomes its maximum.
pub fn timespec(duration: Duration) -> Timespec {
    let tv_sec = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: duration.subsec_nanos().into() }
}

/// Returns a future that completes no earlier than `duration` from now.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { at: Instant::now() + duration, set_for: None }
}

/// The future that [`sleep`] returns.
#[derive(Debug)]
pub struct Sleep {
    at: Instant,
    set_for: Option<Waker>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.at {
            return Poll::Ready(());
        }
        if self.set_for.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            self.set_for = Some(cx.waker().clone());
            TIMER.add(self.at, cx.waker().clone());
        }
        Poll::Pending
    }
}

/// The system's clocks, and this timer.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Clock for System {
    #[inline]
    fn now(&self) -> Duration {
        now()
    }

    fn wall(&self) -> Duration {
        wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        sleep(duration)
    }
}

/// Returns the output of `future`, or `None` if the future takes longer than `duration`.
pub async fn within<O>(duration: Duration, future: impl Future<Output = O>) -> Option<O> {
    clock::within(&System, duration, future).await
}

#[derive(Default)]
struct Timer {
    entries: Mutex<BinaryHeap<Reverse<Entry>>>,
    changed: Condvar,
}

struct Entry {
    at: Instant,
    waker: Waker,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Timer {
    fn entries(&self) -> MutexGuard<'_, BinaryHeap<Reverse<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, at: Instant, waker: Waker) {
        let mut entries = self.entries();
        let is_first = entries.peek().is_none_or(|Reverse(first)| at < first.at);
        entries.push(Reverse(Entry { at, waker }));
        drop(entries);
        // For an entry behind another one, the thread already wakes earlier.
        if is_first {
            self.changed.notify_one();
        }
    }

    fn run(&self) {
        let mut entries = self.entries();
        loop {
            let now = Instant::now();
            match entries.peek() {
                Some(Reverse(entry)) if entry.at <= now => {
                    if let Some(Reverse(entry)) = entries.pop() {
                        // The lock is released first, because a waker may run any code, including another sleep.
                        drop(entries);
                        entry.waker.wake();
                        entries = self.entries();
                    }
                }
                Some(Reverse(entry)) => {
                    let left = entry.at - now;
                    let waited = self.changed.wait_timeout(entries, left);
                    entries = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
