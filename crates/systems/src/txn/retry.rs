//! Retries of transactions that other transactions were in the way of.
//!
//! A number of attempts is no good limit: pauses are random and short, so a hundred attempts end before the lease of a
//! dead client does, and the keys that it has locked stay locked until then.

use super::{Committed, Txn, TxnError};
use crate::system::Backoff;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use std::time::Duration;

/// Pauses between attempts, unless the caller has others.
pub const BACKOFF: Backoff = Backoff { first: Duration::from_micros(20), longest: Duration::from_millis(5) };
/// Parts of [`patience`]. A client looks at the lease of another one that is in its way eight times as often as it
/// expires, so that it takes that client for dead within two leases. Four more leases are for a recoverer that dies as
/// well, and for the lease of a client for which the recovery waits. The rest is for the fence and the recovery: these
/// are a few round trips, which may wait for a node that is busy.
const LEASES: u32 = 6;
const RECOVERY: Duration = Duration::from_secs(2);

/// Time for which a transaction is tried again, unless the caller has another, in a store with leases of this length.
/// It is longer than the keys of a dead client stay locked: for its lease, the fence and the recovery.
pub fn patience(lease: Duration) -> Duration {
    lease.saturating_mul(LEASES).saturating_add(RECOVERY)
}

/// How often and for how long a transaction is tried, and how long the pauses are.
#[derive(Clone, Copy, Debug)]
pub struct Attempts {
    /// Largest number of attempts; at least one is made.
    pub most: u32,
    /// Time after which no further attempt begins.
    pub within: Duration,
    /// Pauses between them.
    pub backoff: Backoff,
}

impl Attempts {
    /// As many attempts as it takes.
    pub const UNLIMITED: Attempts = Attempts { most: u32::MAX, within: Duration::MAX, backoff: BACKOFF };

    /// Attempts for [`patience`], in a store with leases of this length.
    pub fn outlasting(lease: Duration) -> Attempts {
        Attempts { within: patience(lease), ..Attempts::UNLIMITED }
    }
}

/// The attempts of one transaction.
#[derive(Debug)]
pub struct Retry {
    attempts: Attempts,
    until: Duration,
    made: u32,
    /// Longest duration of the next pause.
    limit: Duration,
}

impl Retry {
    /// Begins the first attempt. `now` is the time by the caller's clock.
    pub fn new(attempts: Attempts, now: Duration) -> Retry {
        let until = now.saturating_add(attempts.within);
        Retry { attempts, until, made: 1, limit: attempts.backoff.first }
    }

    /// Number of attempts so far.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Returns the random pause before the next attempt; `None` if there is none.
    pub fn pause(&mut self, now: Duration, draws: &mut Draws) -> Option<Duration> {
        if self.made >= self.attempts.most || now >= self.until {
            return None;
        }
        self.made = self.made.saturating_add(1);
        let nanos = u64::try_from(self.limit.as_nanos()).unwrap_or(u64::MAX);
        self.limit = (self.limit * 2).min(self.attempts.backoff.longest);
        Some(Duration::from_nanos(if nanos > 0 { draws.below(nanos) + 1 } else { 0 }))
    }
}

/// Runs a transaction until it commits: begins it, runs `body`, and commits. If another transaction was in the way,
/// pauses for a random time and tries again. Returns the output of the `body` that was committed.
///
/// # Errors
/// [`TxnError::Conflict`] of the last attempt, or the first other error.
pub async fn run<T: Txn, O>(
    txn: &mut T,
    clock: &impl Clock,
    draws: &mut Draws,
    attempts: Attempts,
    mut body: impl AsyncFnMut(&mut T) -> Result<O, TxnError>,
) -> Result<(O, Committed), TxnError> {
    let mut retry = Retry::new(attempts, clock.now());
    loop {
        txn.begin();
        let done = match body(txn).await {
            Ok(output) => txn.commit().await.map(|committed| (output, committed)),
            Err(error) => {
                txn.roll_back().await;
                Err(error)
            }
        };
        let pause = match done {
            Err(TxnError::Conflict) => retry.pause(clock.now(), draws).ok_or(TxnError::Conflict)?,
            done => return done,
        };
        if pause > Duration::ZERO {
            clock.sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_end_with_their_number_or_their_time() {
        let (mut draws, second) = (Draws(1), Duration::from_secs(1));
        let mut two = Retry::new(Attempts { most: 2, ..Attempts::UNLIMITED }, Duration::ZERO);
        assert!(two.pause(100 * second, &mut draws).is_some());
        assert_eq!((two.pause(100 * second, &mut draws), two.made()), (None, 2));
        let mut timed = Retry::new(Attempts::outlasting(second), 10 * second);
        assert!(
            (0..1000)
                .all(|_| timed.pause(10 * second, &mut draws).is_some_and(|pause| pause <= BACKOFF.longest))
        );
        assert!(timed.pause(10 * second + patience(second) - Duration::from_nanos(1), &mut draws).is_some());
        assert_eq!((timed.pause(10 * second + patience(second), &mut draws), timed.made()), (None, 1002));
        assert!(patience(second) > 2 * second && patience(Duration::MAX) == Duration::MAX);
    }
}
