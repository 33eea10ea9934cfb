//! Transactions that read and write several records: YCSB-T, as PRISM evaluates it (section 8.4).
//!
//! Each transaction reads its records, adds one to the count of each, and writes them. If another transaction is in the
//! way, it is tried again after a pause. All words of a record follow from its number and its count.
//!
//! Invariant: all bytes of every record that is read are checked. After the run, the counts of all records together
//! must be the number of updates that were done, so no update was lost, and none was done twice.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{Txn, TxnError};

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::kv::{self, Records};
use crate::latched::{counted, fill};
use crate::workload::{Random, Workload, key};

/// Largest number of records of a transaction.
pub const KEYS_MAX: usize = 4;
/// Attempts of a transaction. A failure of the last one is an error.
pub(crate) const ATTEMPTS: u32 = 10_000;

/// A run on a transactional store.
pub type Run = driver::Run<TxnWork>;

/// Transactions on the records of a store.
pub struct TxnWork {
    workload: Workload,
    len: usize,
    keys: usize,
    seed: u64,
    records: Arc<Records>,
    counts: Arc<Counts>,
}

/// Numbers of updates and attempts, of all tasks that have ended.
#[derive(Debug, Default)]
struct Counts {
    /// Number of updates of records that were done.
    done: AtomicU64,
    /// Number of updates with an unknown outcome: they may have been done, or not.
    unknown: AtomicU64,
    /// Number of attempts, and of those that met another transaction, without those that load records.
    attempts: AtomicU64,
    conflicts: AtomicU64,
}

/// Numbers of attempts of transactions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    /// Number of attempts.
    pub attempts: u64,
    /// Number of those that met another transaction.
    pub conflicts: u64,
}

impl Tries {
    /// Counts the attempts of a transaction that has ended: all but the last one met another transaction, and the last
    /// one did if the transaction was given up for that.
    pub(crate) fn count<O>(&mut self, attempts: u64, ended: &Result<O, TxnError>) {
        self.attempts += attempts;
        self.conflicts += attempts - u64::from(!matches!(ended, Err(TxnError::Conflict)));
    }

    pub(crate) fn add(&mut self, other: Tries) {
        self.attempts += other.attempts;
        self.conflicts += other.conflicts;
    }

    /// Fraction of the attempts that met another transaction; 0 if there are none.
    pub fn abort_rate(&self) -> f64 {
        if self.attempts == 0 { 0.0 } else { self.conflicts as f64 / self.attempts as f64 }
    }
}

/// Parameters of a run on a transactional store.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workload from which the records are drawn. Each of its operations is a transaction.
    pub workload: Workload,
    /// Length of a value in bytes, a multiple of 8.
    pub len: usize,
    /// Number of records of a transaction, 1 to [`KEYS_MAX`].
    pub keys: usize,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Number of operations for each sampled latency, at least 1.
    pub sampled: u64,
    /// Seed of all random draws.
    pub seed: u64,
}

impl Plan {
    /// Creates the run of this plan.
    ///
    /// # Errors
    /// The number of tasks is 0, or there are fewer records than a transaction has.
    ///
    /// # Panics
    /// If the number of records of a transaction is not possible.
    pub fn run(self) -> Result<Run, String> {
        let Plan { workload, len, keys, tasks, sampled, seed } = self;
        assert!((1..=KEYS_MAX).contains(&keys), "a transaction has 1 to {KEYS_MAX} records");
        if workload.records < keys as u64 {
            return Err(format!(
                "a transaction of {keys} keys needs as many records, and there are {}: give more --records",
                workload.records
            ));
        }
        let records = Arc::new(Records::new(workload.records));
        Run::new(TxnWork { workload, len, keys, seed, records, counts: Arc::default() }, tasks, sampled, seed)
    }
}

/// Transactions on records that have a total, which is known after a run.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub trait Transactional: Work<Trouble = TxnTrouble> {
    /// As [`Perform::load`].
    async fn load<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        record: u64,
        task: &mut Self::Task,
    ) -> Result<(), TxnTrouble>;

    /// As [`Perform::perform`].
    async fn perform<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        drawn: Self::Drawn,
        task: &mut Self::Task,
    ) -> Result<(), TxnTrouble>;

    /// Reads and checks the records `first`, `first + step`, `first + 2 * step`, … once. All tasks have ended. Returns
    /// their part of the total; 0 if the run knows what each of them must be, and has compared them.
    ///
    /// # Errors
    /// A record cannot be read, or is wrong, or not what transactions have made of it.
    async fn audit<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        first: u64,
        step: usize,
    ) -> Result<i128, TxnTrouble>;

    /// Compares the total of all records with what transactions have done. All tasks have ended.
    ///
    /// # Errors
    /// They differ by more than what transactions of unknown outcome may have done.
    fn check_total(&self, total: i128) -> Result<(), TxnTrouble>;

    /// Fraction of the attempts of the transactions so far that met another transaction, of tasks that have ended; 0 if
    /// there were none.
    fn abort_rate(&self) -> f64;
}

impl<W: Transactional, T: Txn, C: Clock> Perform<Client<T, C>> for W {
    async fn load(
        &self,
        client: &mut Client<T, C>,
        record: u64,
        task: &mut W::Task,
    ) -> Result<(), TxnTrouble> {
        Transactional::load(self, client, record, task).await
    }

    async fn perform(
        &self,
        client: &mut Client<T, C>,
        drawn: W::Drawn,
        task: &mut W::Task,
    ) -> Result<(), TxnTrouble> {
        Transactional::perform(self, client, drawn, task).await
    }
}

/// A handle of a transactional store, with what its retries need.
pub struct Client<T, C> {
    /// The handle.
    pub txn: T,
    /// Clock of the pauses between attempts.
    pub clock: C,
}

/// The records of a transaction. They differ.
#[derive(Clone, Copy)]
pub struct Drawn {
    records: [u32; KEYS_MAX],
    count: u8,
}

impl Drawn {
    /// Numbers of the records.
    pub(crate) fn records(&self) -> impl Iterator<Item = u64> {
        self.records.iter().take(self.count.into()).map(|record| u64::from(*record))
    }
}

/// Source of one thread's transactions.
pub struct Source {
    inner: kv::Source,
    keys: usize,
}

/// State of a task: a buffer for a value, and the numbers of its updates.
pub struct Task {
    value: Vec<u8>,
    draws: Draws,
    done: u64,
    unknown: u64,
    tries: Tries,
    all: Arc<Counts>,
}

impl Drop for Task {
    fn drop(&mut self) {
        let Counts { done, unknown, attempts, conflicts } = &*self.all;
        let own = [self.done, self.unknown, self.tries.attempts, self.tries.conflicts];
        for (all, own) in [done, unknown, attempts, conflicts].into_iter().zip(own) {
            all.fetch_add(own, Ordering::Relaxed);
        }
    }
}

impl Work for TxnWork {
    const KINDS: &'static [&'static str] = &["transaction"];
    const TIMES_STALLS: bool = true;
    type Drawn = Drawn;
    type Source = Source;
    type Task = Task;
    type Trouble = TxnTrouble;

    fn source(&self, random: Random) -> Source {
        let inner = kv::Source::new(&self.workload, random, Arc::clone(&self.records));
        Source { inner, keys: self.keys }
    }

    fn draw(source: &mut Source) -> Drawn {
        let mut drawn = Drawn { records: [0; KEYS_MAX], count: 0 };
        while usize::from(drawn.count) < source.keys {
            let record = source.inner.draw().key;
            if drawn.records().all(|other| other != record) {
                // A store has at most 2^30 records.
                drawn.records[usize::from(drawn.count)] = record as u32;
                drawn.count += 1;
            }
        }
        drawn
    }

    fn kind(_drawn: Drawn) -> usize {
        0
    }

    fn task(&self, number: u32) -> Task {
        let draws = Draws(self.seed ^ (u64::from(number) + 1) << 32);
        let value = vec![0; self.len];
        let all = Arc::clone(&self.counts);
        Task { value, draws, done: 0, unknown: 0, tries: Tries::default(), all }
    }

    fn records(&self) -> u64 {
        self.workload.records
    }
}

impl Transactional for TxnWork {
    async fn load<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        record: u64,
        task: &mut Task,
    ) -> Result<(), TxnTrouble> {
        let Client { txn, clock } = client;
        let Task { value, draws, done, unknown, .. } = task;
        fill(record, 1, value);
        let put = async |txn: &mut T| txn.put(&key(record), value);
        let loaded =
            retry::run(txn, clock, draws, Attempts { most: ATTEMPTS, ..Attempts::UNLIMITED }, put).await;
        match loaded {
            Ok(_) => {
                *done += 1;
                Ok(())
            }
            Err(error) => {
                *unknown += u64::from(error.ran() != Ran::No);
                Err(error.into())
            }
        }
    }

    async fn perform<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        drawn: Drawn,
        task: &mut Task,
    ) -> Result<(), TxnTrouble> {
        let Client { txn, clock } = client;
        let Task { value, draws, done, unknown, tries, .. } = task;
        let mut keys = [[0; 8]; KEYS_MAX];
        keys.iter_mut().zip(drawn.records()).for_each(|(name, record)| *name = key(record));
        let keys: [&[u8]; KEYS_MAX] = std::array::from_fn(|place| &keys[place][..]);
        let keys = &keys[..drawn.count.into()];
        let mut attempts = 0;
        let body = async |txn: &mut T| {
            attempts += 1;
            txn.fetch_to_write(keys, &[]).await?;
            for (key, record) in keys.iter().zip(drawn.records()) {
                let found = txn.get(key).await?.unwrap_or_default();
                let count = counted(record, found).filter(|_| found.len() == value.len());
                let Some(count) = count else { return Ok(Err(TxnTrouble::Torn(record))) };
                fill(record, count + 1, value);
                txn.put(key, value)?;
            }
            Ok::<_, TxnError>(Ok(()))
        };
        let limit = Attempts { most: ATTEMPTS, ..Attempts::UNLIMITED };
        let updates = u64::from(drawn.count);
        let ended = retry::run(txn, clock, draws, limit, body).await;
        tries.count(attempts, &ended);
        match ended {
            Ok((Ok(()), _)) => {
                *done += updates;
                Ok(())
            }
            // What was put before the wrong record was committed.
            Ok((Err(trouble), _)) => {
                *unknown += updates;
                Err(trouble)
            }
            Err(error) => {
                *unknown += if error.ran() == Ran::No { 0 } else { updates };
                Err(error.into())
            }
        }
    }

    /// The total is the sum of the counts of all records.
    async fn audit<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        first: u64,
        step: usize,
    ) -> Result<i128, TxnTrouble> {
        let Client { txn, clock } = client;
        let (mut sum, mut draws) = (0, Draws(first));
        for record in (first..self.records()).step_by(step) {
            let read = async |txn: &mut T| {
                let found = txn.get(&key(record)).await?;
                Ok::<_, TxnError>(found.and_then(|found| counted(record, found)))
            };
            let limit = Attempts { most: ATTEMPTS, ..Attempts::UNLIMITED };
            let (count, _) = retry::run(txn, clock, &mut draws, limit, read).await?;
            sum += i128::from(count.ok_or(TxnTrouble::Torn(record))?);
        }
        Ok(sum)
    }

    /// Each update adds 1 to the sum.
    fn check_total(&self, sum: i128) -> Result<(), TxnTrouble> {
        let Counts { done, unknown, .. } = &*self.counts;
        let (done, unknown) = (done.load(Ordering::Relaxed), unknown.load(Ordering::Relaxed));
        let sum = u64::try_from(sum).unwrap_or(u64::MAX);
        match (done..=done + unknown).contains(&sum) {
            true => Ok(()),
            false => Err(TxnTrouble::Sum { sum, done, unknown }),
        }
    }

    fn abort_rate(&self) -> f64 {
        let Counts { attempts, conflicts, .. } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Tries { attempts: of(attempts), conflicts: of(conflicts) }.abort_rate()
    }
}

/// Error or violation of a transaction.
#[derive(Debug)]
pub enum TxnTrouble {
    /// The transaction failed with this error.
    Failed(TxnError),
    /// The record with this number has no value, or a wrong one.
    Torn(u64),
    /// The counts of all records differ from the number of updates.
    Sum {
        /// Sum of the counts of all records.
        sum: u64,
        /// Number of updates that were done.
        done: u64,
        /// Number of updates with an unknown outcome: they may have been done, or not.
        unknown: u64,
    },
    /// A row of a benchmark is missing, or no transaction writes it; the text says which.
    Row(String),
    /// The total of a unit of a benchmark is not what its transactions have added.
    Total {
        /// Number of the unit, such as a subscriber or an account.
        unit: u64,
        /// Total of its rows.
        total: i64,
        /// The least that transactions have added.
        least: i64,
        /// The most that transactions have added, with those of unknown outcome.
        most: i64,
    },
}

impl Trouble for TxnTrouble {
    fn fault(&self) -> Fault {
        match self {
            TxnTrouble::Failed(TxnError::Fabric(error)) => Fault::of(error),
            TxnTrouble::Failed(TxnError::Lost | TxnError::Unknown(_) | TxnError::NotKept { .. }) => {
                Fault::Disconnected
            }
            TxnTrouble::Failed(_) => Fault::Failed,
            TxnTrouble::Torn(_) | TxnTrouble::Row(_) => Fault::Violated,
            TxnTrouble::Sum { .. } | TxnTrouble::Total { .. } => Fault::Violated,
        }
    }
}

impl fmt::Display for TxnTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TxnTrouble::Failed(error) => error.fmt(f),
            TxnTrouble::Torn(record) => write!(f, "record {record} has no value, or a wrong one"),
            TxnTrouble::Sum { sum, done, unknown } => write!(
                f,
                "the records have counted {sum} updates, and {done} were done, with {unknown} more of unknown outcome"
            ),
            TxnTrouble::Row(text) => f.write_str(text),
            TxnTrouble::Total { unit, total, least, most } => write!(
                f,
                "the rows of record {unit} add up to {total}, and committed transactions have added {least} to {most}"
            ),
        }
    }
}

impl From<TxnError> for TxnTrouble {
    fn from(error: TxnError) -> TxnTrouble {
        TxnTrouble::Failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(keys: usize, records: u64) -> Result<Run, String> {
        let workload =
            Workload { records, ..Workload::resolve_with("a", &[]).map_err(|error| error.to_string())? };
        Plan { workload, len: 64, keys, tasks: 1, sampled: 1, seed: 1 }.run()
    }

    #[test]
    fn a_transaction_has_different_records() {
        for keys in 1..=KEYS_MAX {
            let run = run(keys, 4).expect("a run");
            let mut source = run.work().source(crate::workload::random(7));
            for _ in 0..100 {
                let mut records: Vec<u64> = TxnWork::draw(&mut source).records().collect();
                records.sort_unstable();
                records.dedup();
                assert_eq!(records.len(), keys);
                assert!(records.iter().all(|record| *record < 4));
            }
        }
        assert!(run(4, 3).err().is_some_and(|refused| refused.contains("give more --records")));
    }

    #[test]
    fn a_lost_update_is_found_by_the_sum() {
        let run = run(2, 10).expect("a run");
        for (done, unknown, attempts, conflicts) in [(5, 0, 3, 1), (2, 1, 1, 0)] {
            let mut task = run.work().task(0);
            (task.done, task.unknown, task.tries) = (done, unknown, Tries { attempts, conflicts });
        }
        let judged = [6, 7, 8, 9].map(|sum| run.work().check_total(sum).is_ok());
        assert_eq!(judged, [false, true, true, false]);
        assert_eq!(run.work().abort_rate(), 0.25);
    }

    #[test]
    fn only_attempts_that_met_another_transaction_are_conflicts() {
        let mut tries = Tries::default();
        tries.count(3, &Ok(()));
        assert_eq!(tries, Tries { attempts: 3, conflicts: 2 });
        tries.count(4, &Err::<(), _>(TxnError::Conflict));
        assert_eq!(tries, Tries { attempts: 7, conflicts: 6 });
        tries.count(1, &Err::<(), _>(TxnError::Lost));
        assert_eq!(tries, Tries { attempts: 8, conflicts: 6 });
        assert_eq!((tries.abort_rate(), Tries::default().abort_rate()), (0.75, 0.0));
    }
}
