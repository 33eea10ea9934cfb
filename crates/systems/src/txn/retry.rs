//! Retries of transactions that other transactions were in the way of.

use super::{Committed, Txn, TxnError};
use crate::system::Backoff;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use std::time::Duration;

/// Pauses between attempts, unless the caller has others.
pub const BACKOFF: Backoff = Backoff { first: Duration::from_micros(20), longest: Duration::from_millis(5) };

/// How often a transaction is tried, and how long the pauses are.
#[derive(Clone, Copy, Debug)]
pub struct Attempts {
    /// Largest number of attempts; at least one is made.
    pub most: u32,
    /// Pauses between them.
    pub backoff: Backoff,
}

impl Default for Attempts {
    fn default() -> Attempts {
        Attempts { most: 100, backoff: BACKOFF }
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
    let mut limit = attempts.backoff.first;
    for attempt in 1.. {
        txn.begin();
        let done = match body(txn).await {
            Ok(output) => txn.commit().await.map(|committed| (output, committed)),
            Err(error) => Err(error),
        };
        match done {
            Err(TxnError::Conflict) if attempt < attempts.most => {}
            done => return done,
        }
        let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        if nanos > 0 {
            clock.sleep(Duration::from_nanos(draws.below(nanos) + 1)).await;
        }
        limit = (limit * 2).min(attempts.backoff.longest);
    }
    Err(TxnError::Conflict)
}
