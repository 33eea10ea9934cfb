//! Polling for a short while before sleeping, because a wake-up takes tens of microseconds and most responses take
//! less.
//!
//! Invariant: a polling thread regularly yields its core, because the thread that prepares the response may need that
//! core.

use crate::timer;
use std::time::Duration;

/// How long a thread polls before it sleeps: about the cost of a wake-up.
pub const SPIN: Duration = Duration::from_micros(60);
/// How long a thread polls before it yields to other threads.
pub const YIELD_INTERVAL: Duration = Duration::from_micros(5);
/// Way in which a thread waits for a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// Polls for [`SPIN`], then sleeps.
    #[default]
    Briefly,
    /// Polls once, then sleeps: uses the least CPU time, and needs a wake-up for each wait.
    Asleep,
    /// Polls all the time, on a core of its own: needs no wake-up.
    Awake,
}

/// Number of polls between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// Calls `poll` until it returns a value, and returns that value. Returns `None` if no call within [`SPIN`] returns
/// one.
#[inline]
pub fn spin<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let mut since = None;
    let mut yields_at = YIELD_INTERVAL;
    loop {
        for _ in 0..POLLS_PER_CLOCK_READ {
            if let Some(found) = poll() {
                return Some(found);
            }
            std::hint::spin_loop();
        }
        let now = timer::now();
        let spun = now.saturating_sub(*since.get_or_insert(now));
        if spun >= SPIN {
            return None;
        }
        if spun >= yields_at {
            std::thread::yield_now();
            yields_at = spun + YIELD_INTERVAL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_polls_until_a_result_or_the_time_limit() {
        let mut polls = 0;
        let found = spin(|| {
            polls += 1;
            (polls == 100).then_some(polls)
        });
        assert_eq!(found, Some(100));
        let began = timer::now();
        assert_eq!(spin(|| None::<()>), None);
        assert!(timer::now() - began >= SPIN);
    }
}
