//! Benchmarks of transactions with tables and procedures, with which FaSST is evaluated (Kalia et al., OSDI 2016):
//! TATP, SmallBank and an object store.
//!
//! ```text
//! Benchmark   its units and their rows, its kinds of transactions, and what each of them does
//! Oltp        draws transactions, repeats one that met another, and counts what they have done
//! Totals      what the rows of each unit must add up to
//! ```
//! A transaction that does not find its rows, or whose condition does not hold, has failed by itself: it writes
//! nothing, and is not repeated. It is validated nevertheless, so its outcome is that of a serial order.
//!
//! Invariant: a transaction draws its arguments from a seed of its own, so each of its attempts has the same.
//! Invariant: every row that is read is checked, and a transaction writes after all its reads were checked.
//! Invariant: each unit has a total, such as the balance of an account, which each transaction that writes one of its
//! rows changes. A transaction knows what it adds. After a verified run, each total must be what all committed
//! transactions have added to it, so no write was lost or done twice.

pub mod any;
pub mod objects;
pub mod smallbank;
pub mod tatp;
mod totals;

use std::sync::{Arc, Mutex};

use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{Txn, TxnError};

use crate::driver::{self, Kinds, Work};
use crate::txn::{ATTEMPTS, Client, Transactional, Tries, TxnTrouble};
use crate::workload::{self, Random, UniformLong};
pub use totals::Added;
use totals::Totals;

/// A benchmark: its tables as keys and values, and its procedures.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub trait Benchmark: Clone {
    /// Names of the kinds of transactions, as reports print them.
    const KINDS: Kinds;

    /// Number of units that are loaded, each with rows of its own, such as an account.
    fn units(&self) -> u64;

    /// Largest number of rows of a unit, with those that may be inserted or read in vain.
    fn rows_of_unit(&self) -> u64;

    /// Largest number of rows that a transaction writes, also one that loads a unit.
    fn writes_max(&self) -> u64 {
        self.rows_of_unit()
    }

    /// Length of the longest value in bytes.
    fn value_len(&self) -> usize;

    /// Draws the kind of a transaction.
    fn kind(&self, random: &mut Random) -> usize;

    /// Writes the rows of a unit. Returns its total.
    ///
    /// # Errors
    /// [`Stop`]; nothing was changed.
    async fn load<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop>;

    /// Draws a transaction, beginning with its [kind](Benchmark::kind), and carries it out up to its commit. Appends
    /// what it adds to the totals of units to `added`, which is empty.
    ///
    /// # Errors
    /// [`Stop`]; nothing was changed.
    async fn run<T: Txn>(&self, txn: &mut T, random: &mut Random, added: &mut Added)
    -> Result<Outcome, Stop>;

    /// Reads and checks all rows of a unit. Returns its total.
    ///
    /// # Errors
    /// [`Stop`]: a row cannot be read, or is wrong.
    async fn audit<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop>;
}

/// Outcome of a transaction, if it commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has found its rows, and its conditions hold.
    Done,
    /// It has failed by itself, and has written nothing.
    Failed,
}

/// Reason why a transaction does not end.
#[derive(Debug)]
pub enum Stop {
    /// An error of the store.
    Txn(TxnError),
    /// A row is missing, or is not what any transaction writes.
    Wrong(String),
}

impl From<TxnError> for Stop {
    fn from(error: TxnError) -> Stop {
        Stop::Txn(error)
    }
}

/// A run of a benchmark on a transactional store.
pub type Run<B> = driver::Run<Oltp<B>>;

/// A benchmark, and what its transactions have done.
pub struct Oltp<B> {
    benchmark: B,
    seed: u64,
    /// Numbers of each kind's transactions, of all tasks that have ended.
    counts: Arc<Mutex<Vec<Kind>>>,
    /// What each unit must add up to; only if the run is verified.
    totals: Option<Totals>,
}

/// Numbers of a kind's transactions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Numbers of attempts.
    pub tries: Tries,
    /// Number of transactions that have committed.
    pub commits: u64,
    /// Number of those that have not failed by themselves.
    pub succeeded: u64,
    /// Number of transactions that ended with an error.
    pub errors: u64,
}

impl Kind {
    /// Fraction of the committed transactions that have not failed by themselves; 0 if there are none.
    pub fn success_rate(&self) -> f64 {
        if self.commits == 0 { 0.0 } else { self.succeeded as f64 / self.commits as f64 }
    }
}

/// A transaction that is drawn and not performed yet.
#[derive(Clone, Copy)]
pub struct Drawn {
    seed: u64,
    kind: u8,
}

/// Source of one thread's transactions.
pub struct Source<B> {
    benchmark: B,
    random: Random,
}

/// State of a task: its counts, the source of its pauses, and what its transaction adds.
pub struct Task {
    draws: Draws,
    added: Added,
    own: Vec<Kind>,
    all: Arc<Mutex<Vec<Kind>>>,
}

impl Drop for Task {
    fn drop(&mut self) {
        let mut all = self.all.lock().expect("no thread panicked with the lock");
        for (all, own) in all.iter_mut().zip(&self.own) {
            all.tries.add(own.tries);
            all.commits += own.commits;
            all.succeeded += own.succeeded;
            all.errors += own.errors;
        }
    }
}

impl<B: Benchmark> Oltp<B> {
    /// Creates the run of a benchmark. `tasks` is the number of tasks of all threads together, and one operation in
    /// `sampled` is timed. `seed` determines all random draws. `verifies` states whether the run is audited at its end:
    /// otherwise, [`Transactional::audit`] panics.
    ///
    /// # Errors
    /// The number of tasks is 0.
    pub fn run(benchmark: B, tasks: u32, sampled: u64, seed: u64, verifies: bool) -> Result<Run<B>, String> {
        let counts = Arc::new(Mutex::new(vec![Kind::default(); B::KINDS.len()]));
        let totals = verifies.then(|| Totals::of(benchmark.units()));
        Run::new(Oltp { benchmark, seed, counts, totals }, tasks, sampled, seed)
    }
}

impl<B: Benchmark> Work for Oltp<B> {
    const KINDS: Kinds = B::KINDS;
    const TIMES_STALLS: bool = true;
    type Drawn = Drawn;
    type Source = Source<B>;
    type Task = Task;
    type Trouble = TxnTrouble;

    fn source(&self, random: Random) -> Source<B> {
        Source { benchmark: self.benchmark.clone(), random }
    }

    /// A cycle of draws would insert rows again that it has inserted before, which fails.
    fn is_drawn_live(&self) -> bool {
        true
    }

    fn draw(source: &mut Source<B>) -> Drawn {
        let seed = below(u64::MAX, &mut source.random);
        let kind = source.benchmark.kind(&mut workload::random(seed));
        Drawn { seed, kind: kind as u8 }
    }

    fn kind(drawn: Drawn) -> usize {
        drawn.kind.into()
    }

    fn task(&self, number: u32) -> Task {
        let draws = Draws(self.seed ^ (u64::from(number) + 1) << 32);
        let own = vec![Kind::default(); B::KINDS.len()];
        Task { draws, added: Added::new(), own, all: Arc::clone(&self.counts) }
    }

    fn records(&self) -> u64 {
        self.benchmark.units()
    }
}

impl<B: Benchmark> Transactional for Oltp<B> {
    async fn load<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        unit: u64,
        task: &mut Task,
    ) -> Result<(), TxnTrouble> {
        let Client { txn, clock } = client;
        let load = async |txn: &mut T| judged(self.benchmark.load(txn, unit).await);
        let (total, _) = retry::run(txn, clock, &mut task.draws, LIMIT, load).await?;
        let total = total.map_err(TxnTrouble::Row)?;
        self.totals.iter().for_each(|totals| totals.add(&[(unit, total)]));
        Ok(())
    }

    async fn perform<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        drawn: Drawn,
        task: &mut Task,
    ) -> Result<(), TxnTrouble> {
        let Client { txn, clock } = client;
        let Task { draws, added, own, .. } = task;
        let mut attempts = 0;
        let body = async |txn: &mut T| {
            attempts += 1;
            added.clear();
            let done = self.benchmark.run(txn, &mut workload::random(drawn.seed), added).await;
            if done.is_err() {
                added.clear(); // Nothing is committed.
            }
            judged(done)
        };
        let ended = retry::run(txn, clock, draws, LIMIT, body).await;
        let counted = &mut own[usize::from(drawn.kind)];
        counted.tries.count(attempts, &ended);
        counted.errors += u64::from(!matches!(ended, Ok((Ok(_), _))));
        match ended {
            Ok((Ok(outcome), _)) => {
                counted.commits += 1;
                counted.succeeded += u64::from(outcome == Outcome::Done);
                self.totals.iter().for_each(|totals| totals.add(added));
                Ok(())
            }
            // A transaction that has read a wrong row has written nothing.
            Ok((Err(wrong), _)) => Err(TxnTrouble::Row(wrong)),
            Err(error) => {
                if error.ran() != Ran::No {
                    self.totals.iter().for_each(|totals| totals.may_add(added));
                }
                Err(error.into())
            }
        }
    }

    async fn audit<T: Txn, C: Clock>(
        &self,
        client: &mut Client<T, C>,
        first: u64,
        step: usize,
    ) -> Result<i128, TxnTrouble> {
        let totals = self.totals.as_ref().expect("the run is verified");
        let (Client { txn, clock }, mut draws) = (client, Draws(first));
        for unit in (first..self.benchmark.units()).step_by(step) {
            let read = async |txn: &mut T| judged(self.benchmark.audit(txn, unit).await);
            let (total, _) = retry::run(txn, clock, &mut draws, LIMIT, read).await?;
            totals.check(unit, total.map_err(TxnTrouble::Row)?)?;
        }
        Ok(0)
    }

    fn check_total(&self, _total: i128) -> Result<(), TxnTrouble> {
        Ok(()) // The audit has compared each unit.
    }

    fn abort_rate(&self) -> f64 {
        let counts = self.counts.lock().expect("no thread panicked with the lock");
        let mut all = Tries::default();
        counts.iter().for_each(|kind| all.add(kind.tries));
        all.abort_rate()
    }
}

const LIMIT: Attempts = Attempts { most: ATTEMPTS, ..Attempts::UNLIMITED };

/// Separates a wrong row from errors of the store. What was read is validated by the commit, so a wrong row was not
/// read by an inconsistent transaction.
fn judged<O>(done: Result<O, Stop>) -> Result<Result<O, String>, TxnError> {
    match done {
        Ok(outcome) => Ok(Ok(outcome)),
        Err(Stop::Wrong(text)) => Ok(Err(text)),
        Err(Stop::Txn(error)) => Err(error),
    }
}

impl<B: Benchmark> Run<B> {
    /// The benchmark.
    pub fn benchmark(&self) -> &B {
        &self.work().benchmark
    }

    /// Numbers of transactions so far of each kind that was tried, of tasks that have ended.
    pub fn kinds(&self) -> Vec<(&'static str, Kind)> {
        let counts = self.work().counts.lock().expect("no thread panicked with the lock");
        let kinds = B::KINDS.iter().copied().zip(counts.iter().copied());
        kinds.filter(|(_, kind)| kind.tries.attempts > 0).collect()
    }
}

/// Draws a number below `count`, which is not 0.
fn below(count: u64, random: &mut Random) -> u64 {
    UniformLong::new(0, count - 1).next(random)
}

/// Draws an index of this list, whose weights add up to 100.
fn of_mix(mix: &[u64], random: &mut Random) -> usize {
    let mut drawn = below(100, random);
    for (kind, &share) in mix.iter().enumerate() {
        if drawn < share {
            return kind;
        }
        drawn -= share;
    }
    unreachable!("the shares add up to 100 %")
}

/// Reads a row, which has a fixed length.
async fn row<const N: usize>(txn: &mut impl Txn, key: &[u8; 8]) -> Result<Option<[u8; N]>, Stop> {
    let Some(value) = txn.get(key).await? else { return Ok(None) };
    let len = value.len();
    let whole =
        value.try_into().map_err(|_| Stop::Wrong(format!("row {key:02x?} has {len} bytes, not {N}")))?;
    Ok(Some(whole))
}

/// Returns a row that every run has.
fn present<T>(row: Option<T>, key: &[u8; 8]) -> Result<T, Stop> {
    row.ok_or_else(|| Stop::Wrong(format!("row {key:02x?} is missing")))
}

#[cfg(test)]
mod tests;
