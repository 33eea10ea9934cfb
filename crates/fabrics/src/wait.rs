//! How a client core waits for the responses of its endpoints, one or many: it polls for a short while, then sleeps.
//!
//! Invariant: the core does not sleep if an endpoint has received something, or will not notice its arrival.

use crate::executor::{Idle, Turns};
use crate::spin::{Waiting, spin};
use crate::timer;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Why the tasks continue after a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakeup {
    /// An endpoint has received something.
    Received,
    /// A task was woken by something else.
    Woken,
    /// Time has passed: retransmissions may be due.
    Time,
}

/// An endpoint whose responses a core waits for, alone or together with those of other endpoints.
pub trait Waits: Turns {
    /// Called when a wait begins.
    fn begin_wait(&self) {}

    /// Whether responses are outstanding that [`Waits::poll`] finds.
    fn is_waiting(&self) -> bool;

    /// Handles what has arrived, and wakes the tasks that wait for it. Returns false if nothing had arrived.
    fn poll(&self) -> bool;

    /// Called when the wait ends, before the tasks run. Sends what is due.
    fn end_wait(&self, wakeup: Wakeup);

    /// Prepares for sleep. Returns false if something has arrived, so that the core must not sleep.
    fn may_sleep(&self) -> bool;

    /// Returns the descriptor that becomes readable when something arrives; `None` if arrivals wake the tasks directly.
    fn fd(&self) -> Option<BorrowedFd<'_>>;

    /// Maximum time to sleep if nothing arrives.
    fn sleep_max(&self, now: Duration) -> Option<Duration>;
}

/// Waits until a task of `core` may be ready, in the way that `waiting` says. `endpoints` are those of the core. Sleeps
/// at most `at_most`, if given.
#[inline]
pub fn wait<'a, W: Waits + 'a>(
    endpoints: impl Iterator<Item = &'a W> + Clone,
    waiting: Waiting,
    at_most: Option<Duration>,
    core: &Idle<'_>,
) {
    let all = || endpoints.clone();
    let end = |wakeup| all().for_each(|endpoint| endpoint.end_wait(wakeup));
    all().for_each(W::begin_wait);
    if all().any(W::is_waiting) {
        // Polling may be a system call, so only the endpoints with outstanding responses are polled.
        let poll_waiting = || {
            let waiting = all().filter(|endpoint| endpoint.is_waiting());
            waiting.fold(false, |received, endpoint| endpoint.poll() | received)
        };
        let look = || match poll_waiting() {
            true => Some(Wakeup::Received),
            false => core.is_woken().then_some(Wakeup::Woken),
        };
        let found = if waiting == Waiting::Asleep { look() } else { spin(look) };
        match found {
            Some(wakeup) => return end(wakeup),
            None if waiting == Waiting::Awake => return end(Wakeup::Time),
            None => {}
        }
    }
    if all().all(W::may_sleep) {
        let now = timer::now();
        let timeout = all().filter_map(|endpoint| endpoint.sleep_max(now)).chain(at_most).min();
        let mut fds = all().filter_map(W::fd).peekable();
        if fds.peek().is_none() && timeout.is_none() {
            core.sleep();
        } else {
            core.sleep_on(fds, timeout);
        }
    }
    for endpoint in all() {
        endpoint.poll();
    }
    end(Wakeup::Time);
}
