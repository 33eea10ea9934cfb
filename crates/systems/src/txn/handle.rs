//! What the handles of all transactional systems have in common: the way of a transaction to the client's own task, and
//! the checks of its keys.

use crate::owned::Jobs;
use crate::txn::session::{Session, Shards};
use crate::txn::{KEY_MAX, TxnError};
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time for which a commit waits for the client's task to begin.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two looks at whether the client's task has begun.
const KEEPER_PAUSE: Duration = Duration::from_micros(50);

/// What a transaction writes: keys with their new values, and `None` for a key that is deleted.
pub(super) type Writes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// The jobs of a client, and the number of its handles. `J` describes a job, and `O` is its output.
pub(super) struct Desk<J, O> {
    pub(super) jobs: Jobs<J, O>,
    handles: Cell<usize>,
}

impl<J, O> Desk<J, O> {
    /// Creates the desk of a client with this number of lanes, and without handles.
    pub(super) fn new(lanes: u16) -> Desk<J, O> {
        Desk { jobs: Jobs::new(lanes.into()), handles: Cell::new(0) }
    }

    /// Notes another handle.
    pub(super) fn open(&self) {
        self.handles.set(self.handles.get() + 1);
    }

    /// Notes that a handle was dropped. After the last one, the client's task ends.
    pub(super) fn close(&self) {
        self.handles.set(self.handles.get() - 1);
        if self.handles.get() == 0 {
            self.jobs.close();
        }
    }

    /// Lets the client's task carry out a job.
    ///
    /// # Errors
    /// The task does not run, or has ended.
    pub(super) async fn carry_out<S: Shards>(&self, session: &Session<S>, job: J) -> Result<O, TxnError> {
        if !self.jobs.is_served() {
            self.await_keeper(session).await?;
        }
        self.jobs.carry_out(job).await.map_err(|_| TxnError::NotKept { ran: Ran::Unknown })
    }

    /// Keeps a lane for a transaction, until it ends.
    ///
    /// # Errors
    /// The task does not run, or has ended.
    pub(super) async fn keep<S: Shards>(&self, session: &Session<S>) -> Result<usize, TxnError> {
        if !self.jobs.is_served() {
            self.await_keeper(session).await?;
        }
        self.jobs.keep().await.map_err(|_| self.ended(session))
    }

    /// Lets the client's task carry out a job of a transaction that keeps a lane and goes on.
    ///
    /// # Errors
    /// The task has ended. The transaction will not commit.
    pub(super) async fn carry_out_in<S: Shards>(
        &self,
        session: &Session<S>,
        lane: usize,
        job: J,
    ) -> Result<O, TxnError> {
        self.jobs.carry_out_in(lane, job).await.map_err(|_| self.ended(session))
    }

    /// Lets the client's task carry out the last job of a transaction that has kept a lane.
    ///
    /// # Errors
    /// The task has ended.
    pub(super) async fn carry_out_last<S: Shards>(
        &self,
        session: &Session<S>,
        lane: usize,
        job: J,
    ) -> Result<O, TxnError> {
        if !self.jobs.is_served() {
            return Err(self.ended(session));
        }
        self.jobs.carry_out_last(lane, job).await.map_err(|_| TxnError::NotKept { ran: Ran::Unknown })
    }

    /// The error of a transaction that has not begun its commit when the client's task ended.
    fn ended<S: Shards>(&self, session: &Session<S>) -> TxnError {
        if session.is_given_up() { TxnError::Lost } else { TxnError::NotKept { ran: Ran::No } }
    }

    /// Waits until the client's task has begun: the program may have spawned it, but not polled it yet.
    ///
    /// # Errors
    /// The task has ended, or does not begin.
    #[cold]
    async fn await_keeper<S: Shards>(&self, session: &Session<S>) -> Result<(), TxnError> {
        let clock = session.site.fabric();
        let until = clock.now() + PATIENCE;
        while !self.jobs.is_served() {
            if self.jobs.is_closed() || clock.now() >= until {
                return Err(self.ended(session));
            }
            clock.sleep(KEEPER_PAUSE).await;
        }
        Ok(())
    }
}

/// Returns those of the keys that a transaction has neither read nor written, each once.
///
/// # Errors
/// One of them is empty or too long.
pub(super) fn missing<'k, R>(
    keys: &[&'k [u8]],
    reads: &BTreeMap<Vec<u8>, R>,
    writes: &Writes,
) -> Result<Vec<&'k [u8]>, TxnError> {
    let is_missing = |key: &&&[u8]| !reads.contains_key(**key) && !writes.contains_key(**key);
    let mut missing: Vec<&[u8]> = keys.iter().filter(is_missing).copied().collect();
    missing.sort_unstable();
    missing.dedup();
    missing.iter().try_for_each(|key| check_key(key))?;
    Ok(missing)
}

/// # Errors
/// The key is empty or too long.
pub(super) fn check_key(key: &[u8]) -> Result<(), TxnError> {
    if (1..=KEY_MAX).contains(&key.len()) { Ok(()) } else { Err(TxnError::KeyLength(key.len())) }
}

/// # Errors
/// The key, the value, or both together are too long.
pub(super) fn check_pair(
    key: &[u8],
    value: &[u8],
    value_max: usize,
    pair_max: usize,
) -> Result<(), TxnError> {
    check_key(key)?;
    if value.len() > value_max {
        return Err(TxnError::ValueLength { len: value.len(), max: value_max });
    }
    let len = key.len() + value.len();
    if len > pair_max { Err(TxnError::PairLength { len, max: pair_max }) } else { Ok(()) }
}
