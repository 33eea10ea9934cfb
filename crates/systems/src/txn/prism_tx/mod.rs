//! PRISM-TX: transactions by chains alone, in the order of their timestamps (PRISM, section 8). The rules are those of
//! `docs/papers/prism-tx.md`; the model that has explored them is `crates/model/src/prism_tx`.
//!
//! - `layout`: the bytes. `session`: the lease and the timestamps of a client.
//! - `execute`: reads. `prepare`: intents and checks. `commit`: installs. `abort`: settles keys without a value.
//! - `transaction`: the phases, one after the other. `recover`: what dead clients have left.
//! - `site`: the members of a store, as clients and recoverers reach them.
//! - `service`, `system`: the node's side, and the entry in the registry. `stat`: what must not be left
//!   behind. [`mutants`]: broken variants.
//!
//! | transaction | round trips |
//! | --- | --- |
//! | a read of one key | 1; with commit-wait 2: read, prepare |
//! | reads and writes of keys with values, at any number of members | 3: reads, prepare, commit |
//! | the same with the prepare of the paper | 4: reads, read checks, write checks, commit |
//! | a write of a key that was not read | one more, for its slot |
//! | a read or write of a key that never had a value | two more, to claim a slot |
//!
//! Commits are jobs of the client ([`crate::owned`]): if the caller's future is dropped, the client's task commits or
//! aborts the transaction.
//!
//! Invariant: a client decides once all chains of its prepare have been answered, or can run no more.
//! Invariant: a transaction that has prepared is committed or aborted by its client, or the client gives up its lease.

mod abort;
mod commit;
mod execute;
pub mod layout;
pub mod mutants;
mod prepare;
mod recover;
pub mod service;
mod session;
mod site;
mod stat;
mod system;
mod transaction;

pub use stat::Stat;

use crate::counters::counters;
use crate::txn::handle::{Desk, Writes, check_key, missing};
use crate::txn::session::Recovery;
use crate::txn::{Committed, Left, Read, Txn, TxnError, Version};
use execute::{Seen, Wanted};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use layout::HEADER_SIZE;
use session::Session;
use site::{Buffers, Site};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;
use transaction::{Lane, Transaction};

/// Kind of the store in the catalog.
pub const KIND: &str = "prism-tx";

counters! {
    /// Transactions that were committed, and that were aborted.
    commits: "commits";
    aborts: "aborts";
    /// Pauses of reads and aborts that have waited for another transaction.
    waits: "waits";
    /// Attempts to claim a slot for a new key.
    claims: "claims";
    /// Dead clients that were recovered, and their transactions that were committed and aborted.
    recovered: "recovered clients";
    redone: "redone transactions";
    backed_out: "backed out transactions";
    /// Recoveries that ended with an error. The client is recovered again if it is in the way again.
    recoveries_failed: "recoveries failed";
}

/// Time for which a commit or an abort repeats a chain at a member that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Handle of a client of one store. It runs one transaction at a time: give each task its own, by [`PrismTx::another`].
pub struct PrismTx<F: Fabric + Clock> {
    client: Rc<Client<F>>,
    reads: BTreeMap<Vec<u8>, Box<Seen>>,
    writes: Writes,
    /// Whether a read has failed.
    is_doomed: bool,
    /// Time in microseconds above which the next timestamp lies, so that the attempt after a conflict is not refused
    /// for the same reason.
    above: u64,
}

/// Client of one store, which its handles and its task share.
pub(crate) struct Client<F: Fabric + Clock> {
    site: Rc<Site<F>>,
    session: Session<F>,
    desk: Desk<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    counters: Counters,
    /// Buffers of reads that are not in use.
    spare: RefCell<Vec<Buffers>>,
}

/// Work of a lane.
enum Job {
    /// Commits or aborts a transaction.
    Commit(Transaction),
    /// Frees the lane's entries.
    Clear,
}

/// Outcome of a job: a committed transaction, or an error, with the time above which the next attempt should lie.
type Done = (Result<Committed, TxnError>, u64);

impl<F: Fabric + Clock> PrismTx<F> {
    fn of(client: &Rc<Client<F>>) -> PrismTx<F> {
        client.desk.open();
        PrismTx {
            client: Rc::clone(client),
            reads: BTreeMap::new(),
            writes: BTreeMap::new(),
            is_doomed: false,
            above: 0,
        }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> PrismTx<F> {
        PrismTx::of(&self.client)
    }

    /// Id of the client.
    pub fn id(&self) -> u16 {
        self.client.session.id().number()
    }

    /// Reads the keys that the transaction has neither read nor written.
    async fn read_missing(&mut self, keys: &[&[u8]]) -> Result<(), TxnError> {
        let missing = missing(keys, &self.reads, &self.writes)?;
        if missing.is_empty() {
            return Ok(());
        }
        match self.client.look_up(&missing, Wanted::Settled).await {
            Ok(seen) => {
                self.reads.extend(missing.iter().map(|key| key.to_vec()).zip(seen.into_iter().map(Box::new)));
                Ok(())
            }
            Err(error) => {
                self.is_doomed = true;
                Err(error)
            }
        }
    }
}

impl<F: Fabric + Clock> Txn for PrismTx<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn value_max(&self) -> usize {
        self.client.value_max()
    }

    fn lease(&self) -> Duration {
        self.client.session.lease()
    }

    fn member_of(&self, key: &[u8]) -> usize {
        self.client.site.places.place_of(key)
    }

    fn begin(&mut self) {
        self.reads.clear();
        self.writes.clear();
        self.is_doomed = false;
    }

    async fn fetch(&mut self, keys: &[&[u8]]) -> Result<(), TxnError> {
        self.read_missing(keys).await
    }

    async fn read(&mut self, key: &[u8]) -> Result<Read<'_>, TxnError> {
        self.read_missing(&[key]).await?;
        if let Some(value) = self.writes.get(key) {
            return Ok(Read { value: value.as_deref(), version: None });
        }
        let seen = &self.reads[key];
        Ok(Read { value: seen.value.as_deref(), version: Some(Version(seen.written.bits())) })
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        check_key(key)?;
        let (len, max) = (value.len(), self.value_max());
        if len > max {
            return Err(TxnError::ValueLength { len, max });
        }
        self.writes.insert(key.to_vec(), Some(value.to_vec()));
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), TxnError> {
        check_key(key)?;
        self.writes.insert(key.to_vec(), None);
        Ok(())
    }

    async fn commit(&mut self) -> Result<Committed, TxnError> {
        let (reads, writes) = (std::mem::take(&mut self.reads), std::mem::take(&mut self.writes));
        if std::mem::take(&mut self.is_doomed) {
            return Err(TxnError::Doomed);
        }
        // A single read has waited until no transaction was between its prepare and its end on the key. With
        // commit-wait, it also raises PR, so that no transaction that comes before it in time order writes the key
        // afterwards.
        let is_dated = self.client.site.has_commit_wait() && !mutants::READ_UNPREPARED.is_on();
        let is_prepared = reads.len() > 1 || is_dated && !reads.is_empty();
        if writes.is_empty() && !is_prepared {
            self.client.counters.commits.add();
            return Ok(Committed { version: None });
        }
        self.client.check_writes(&writes)?;
        let job = Job::Commit(Transaction { reads, writes, above: self.above });
        let (committed, above) = self.client.desk.carry_out(&self.client.session, job).await?;
        self.above = above;
        committed
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        let client = Rc::clone(&self.client);
        Box::pin(async move { client.keep().await })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.client.counters.all()
    }

    async fn left(&self) -> Result<Left, TxnError> {
        let Stat { unsettled, open, .. } = self.stat().await?;
        Ok(Left { unsettled, open, outdated: 0 })
    }
}

impl<F: Fabric + Clock> Drop for PrismTx<F> {
    fn drop(&mut self) {
        self.client.desk.close();
    }
}

impl<F: Fabric + Clock> Client<F> {
    fn new(session: Session<F>) -> Client<F> {
        let lanes = session.site.shards[0].spec().lanes;
        let lane = |lane: u16| {
            RefCell::new(Lane::new(lane, session.joined.words.iter().map(|of| of[usize::from(lane)])))
        };
        Client {
            lanes: (0..lanes).map(lane).collect(),
            desk: Desk::new(lanes),
            counters: Counters::default(),
            spare: RefCell::default(),
            site: Rc::clone(&session.site),
            session,
        }
    }

    fn value_max(&self) -> usize {
        self.site.shards[0].spec().value_max as usize
    }

    /// # Errors
    /// The writes at a member do not fit into a log entry.
    fn check_writes(&self, writes: &Writes) -> Result<(), TxnError> {
        let max = self.site.shards[0].spec().writes_max as usize;
        let mut lens = vec![0; self.site.shards.len()];
        for (key, value) in writes {
            lens[self.site.places.place_of(key)] +=
                HEADER_SIZE + key.len() + value.as_ref().map_or(0, Vec::len);
        }
        match lens.into_iter().find(|len| *len > max) {
            Some(len) => Err(TxnError::WritesLength { len, max }),
            None => Ok(()),
        }
    }

    /// Runs the client's task: carries out its transactions and renews its lease, until the last handle was dropped.
    /// Then gives the lease back.
    async fn keep(&self) {
        let work = async {
            self.work().await;
            self.clear_all().await;
        };
        self.session.renewing(work, || self.desk.jobs.close()).await;
        self.session.release().await;
    }

    /// Carries out the client's transactions and recovers other clients, until the last handle was dropped. When it
    /// returns, no request of it is in flight: one that nobody polls would stop those of the client's own CPU.
    async fn work(&self) {
        let mut jobs = pin!(self.desk.jobs.serve(|lane, job| self.perform(lane, job)));
        let mut clocks = pin!(self.session.joined.stamps.keep());
        let mut sweeping = pin!(self.keep_sweeping());
        let mut recovering = pin!(self.session.keep_recovering(|ended| self.note(ended)));
        poll_fn(|cx| {
            let _never_end =
                (clocks.as_mut().poll(cx), recovering.as_mut().poll(cx), sweeping.as_mut().poll(cx));
            jobs.as_mut().poll(cx)
        })
        .await;
    }

    fn note(&self, ended: Result<Recovery, TxnError>) {
        let Ok(Recovery { clients, committed, aborted }) = ended else {
            self.counters.recoveries_failed.add();
            return;
        };
        (0..clients).for_each(|_| self.counters.recovered.add());
        (0..committed).for_each(|_| self.counters.redone.add());
        (0..aborted).for_each(|_| self.counters.backed_out.add());
    }
}
