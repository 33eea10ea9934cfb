//! FaSST: transactions by remote procedure calls alone, optimistic, with two-phase commit and primary-backup
//! replication (Kalia et al., OSDI'16, section 5), over the batches of [`crate::rpc::fasst`]. `docs/papers/fasst.md`
//! has more.
//!
//! - A *bucket* has keys with their values, one lock and one version. A transaction locks the buckets of the keys that
//!   it writes, and validates the versions of the buckets that it has read. So a key that was absent is validated, too.
//! - A *record* has all writes of a transaction. The client's f + 1 logs get it, once all locks are held and all reads
//!   are validated. *It decides*: a record in any log means that the transaction is committed, and no record that it is
//!   aborted.
//! - A *stamp* is 1 above the highest stamp of the keys that the transaction writes. It is the version that all these
//!   keys have for the family's interface, and orders the writes of a key at all its copies.
//! - An *epoch* of a client is in all its packets. A recoverer has all members admit a later one, and so ends the
//!   client without a request to its process or its sessions.
//! - *What a request may assume.* Locks and records name their transaction, and those of a lane ascend. So a request
//!   that is repeated, or late, changes nothing.
//!
//! Modules: `layout`: the bytes. `request`: payloads. `service`: the handlers. `transaction`: reads and phases.
//! `recover`: what dead clients have left. `configuration`: members that have lost their memory. `session`, `site`:
//! lease, epoch, members and keys. `stat`: what must not be left behind. `system`: the entry in the registry.
//! [`mutants`]: broken variants.
//!
//! | transaction | round trips |
//! | --- | --- |
//! | reads of keys of one bucket | 1 |
//! | reads of several keys | 2: get, validate |
//! | writes of keys that were not read | 3: lock, log, commit; one more with backups |
//! | reads of keys to write, and their writes | 3: lock+get, log, commit; one more with backups |
//! | the same if it only reads some buckets | one more, for the validation |
//! | plain reads, and writes of the same keys | one more, for the lock |
//!
//! A transaction locks the keys that it reads to write ([`Txn::fetch_to_write`]) by the requests that read them. It has
//! a lane of the client from then on, which names it at all members: so a recoverer knows its locks.
//!
//! Commits, and reads that lock, are jobs of the client ([`crate::owned`]): if the caller's future is dropped, the
//! client's task carries them out. A transaction that its program abandons is aborted by such a job, too.
//!
//! Invariant: a transaction that holds locks is committed or aborted by its client, or the client gives up its lease.

mod configuration;
pub mod layout;
pub mod mutants;
mod recover;
pub mod request;
pub mod service;
mod session;
mod site;
mod stat;
mod system;
mod transaction;

pub use stat::Stat;

use crate::counters::counters;
use crate::rpc::fasst::Batch;
use crate::txn::handle::{Desk, Writes, check_pair, missing};
use crate::txn::session::Recovery;
use crate::txn::{Committed, Left, Read, Txn, TxnError, Version};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use layout::{TxnId, Write};
use session::Session;
use site::Site;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;
use transaction::{Lane, Seen, Transaction, Wanted};

/// Kind of the store in the catalog.
pub const KIND: &str = "fasst";

counters! {
    /// Transactions that were committed, and that were aborted.
    commits: "commits";
    aborts: "aborts";
    /// Dead clients that were recovered, and their transactions that were committed and aborted.
    recovered: "recovered clients";
    redone: "redone transactions";
    backed_out: "backed out transactions";
}

/// Time for which a commit or an abort repeats a request at a member that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Handle of a client of one store. It runs one transaction at a time: give each task its own, by [`Fasst::another`].
pub struct Fasst<F: Fabric + Clock> {
    client: Rc<Client<F>>,
    /// Batch of the reads.
    batch: Batch,
    reads: BTreeMap<Vec<u8>, Seen>,
    writes: Writes,
    /// Lane of the transaction, if it may have locks.
    lane: Option<usize>,
    /// Number of the transaction, if it has locks.
    txn: TxnId,
    /// Whether a read has failed, or was dropped while it took locks.
    is_doomed: bool,
}

/// Client of one store, which its handles and its task share.
pub(crate) struct Client<F: Fabric + Clock> {
    site: Rc<Site<F>>,
    session: Session<F>,
    desk: Desk<Job, Done>,
    /// By number. `None` while a job has the lane.
    lanes: Vec<RefCell<Option<Lane>>>,
    /// Number of tasks so far: lanes and handles.
    tasks: Cell<u16>,
    counters: Counters,
}

/// Work of a lane.
enum Job {
    /// Locks keys of a transaction, and reads them and others.
    Execute(Wanted),
    /// Commits or aborts a transaction.
    Commit(Transaction),
    /// Aborts the lane's transaction, unless it has ended.
    Free,
    /// Closes the lane's record.
    Close,
}

/// Outcome of a job.
type Done = Result<Ended, TxnError>;

/// What a job has done.
enum Ended {
    /// The transaction has locks, and has read this.
    Executed(TxnId, Vec<Seen>),
    Committed(Committed),
    Free,
}

impl<F: Fabric + Clock> Fasst<F> {
    fn of(client: &Rc<Client<F>>) -> Fasst<F> {
        client.desk.open();
        let task = client.tasks.get();
        client.tasks.set(task.wrapping_add(1));
        Fasst {
            batch: Batch::new(client.session.id().number(), task),
            client: Rc::clone(client),
            reads: BTreeMap::new(),
            writes: BTreeMap::new(),
            lane: None,
            txn: TxnId::NONE,
            is_doomed: false,
        }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Fasst<F> {
        Fasst::of(&self.client)
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
        if self.client.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        match self.client.look_up(&mut self.batch, self.txn, &missing).await {
            Ok(seen) => {
                self.reads.extend(missing.iter().map(|key| key.to_vec()).zip(seen));
                Ok(())
            }
            Err(error) => {
                self.is_doomed = true;
                self.leave_lane();
                Err(error)
            }
        }
    }

    /// Returns those of the keys that the transaction has neither locked nor written, each once.
    ///
    /// # Errors
    /// One of them is empty or too long.
    fn to_lock<'k>(&self, keys: &[&'k [u8]]) -> Result<Vec<&'k [u8]>, TxnError> {
        let is_locked = |key: &[u8]| self.reads.get(key).is_some_and(|seen| seen.is_locked);
        let keys: Vec<&[u8]> = keys.iter().filter(|key| !is_locked(key)).copied().collect();
        let keys = missing(&keys, &BTreeMap::<_, Seen>::new(), &self.writes)?;
        keys.iter().try_for_each(|key| self.client.check_pair(key, &[]))?;
        Ok(keys)
    }

    /// Locks keys of the transaction, and reads these and others. Keeps a lane from then on.
    async fn lock_and_read(
        &mut self,
        to_lock: &[&[u8]],
        to_read: &[&[u8]],
    ) -> Result<(TxnId, Vec<Seen>), TxnError> {
        let Client { desk, session, .. } = &*self.client;
        let versions = self.client.versions_of(&self.reads)?;
        let lane = match self.lane {
            Some(lane) => lane,
            None => *self.lane.insert(desk.keep(session).await?),
        };
        let owned = |keys: &[&[u8]]| keys.iter().map(|key| key.to_vec()).collect();
        let wanted = Wanted { to_write: owned(to_lock), to_read: owned(to_read), versions };
        match desk.carry_out_in(session, lane, Job::Execute(wanted)).await?? {
            Ended::Executed(txn, seen) => Ok((txn, seen)),
            Ended::Committed(_) | Ended::Free => unreachable!("it was executed"),
        }
    }

    /// Leaves the lane of a transaction that does not commit. The client's task frees its locks.
    fn leave_lane(&mut self) {
        self.txn = TxnId::NONE;
        if let Some(lane) = self.lane.take() {
            self.client.desk.jobs.leave(lane, Job::Free);
        }
    }
}

impl<F: Fabric + Clock> Txn for Fasst<F> {
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
        self.leave_lane();
        self.reads.clear();
        self.writes.clear();
        self.is_doomed = false;
    }

    async fn fetch(&mut self, keys: &[&[u8]]) -> Result<(), TxnError> {
        self.read_missing(keys).await
    }

    async fn fetch_to_write(&mut self, to_write: &[&[u8]], to_read: &[&[u8]]) -> Result<(), TxnError> {
        let to_lock = self.to_lock(to_write)?;
        if to_lock.is_empty() {
            return self.read_missing(to_read).await;
        }
        let to_read = missing(to_read, &self.reads, &self.writes)?;
        let to_read: Vec<&[u8]> = to_read.into_iter().filter(|key| !to_lock.contains(key)).collect();
        if self.is_doomed {
            return Err(TxnError::Doomed);
        }
        // If this future is dropped, nobody knows what the transaction has locked.
        self.is_doomed = true;
        match self.lock_and_read(&to_lock, &to_read).await {
            Ok((txn, seen)) => {
                let keys = to_lock.iter().chain(&to_read).map(|key| key.to_vec());
                self.reads.extend(keys.zip(seen));
                (self.txn, self.is_doomed) = (txn, false);
                Ok(())
            }
            Err(error) => {
                self.leave_lane();
                Err(error)
            }
        }
    }

    async fn read(&mut self, key: &[u8]) -> Result<Read<'_>, TxnError> {
        self.read_missing(&[key]).await?;
        if let Some(value) = self.writes.get(key) {
            return Ok(Read { value: value.as_deref(), version: None });
        }
        let seen = &self.reads[key];
        Ok(Read { value: seen.value.as_deref(), version: Some(Version(seen.stamp)) })
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        self.client.check_pair(key, value)?;
        self.writes.insert(key.to_vec(), Some(value.to_vec()));
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), TxnError> {
        self.client.check_pair(key, &[])?;
        self.writes.insert(key.to_vec(), None);
        Ok(())
    }

    async fn commit(&mut self) -> Result<Committed, TxnError> {
        let (reads, writes) = (std::mem::take(&mut self.reads), std::mem::take(&mut self.writes));
        if std::mem::take(&mut self.is_doomed) {
            self.leave_lane();
            return Err(TxnError::Doomed);
        }
        if writes.is_empty() && reads.len() <= 1 && self.lane.is_none() {
            // The read has found the bucket without a lock.
            self.client.counters.commits.add();
            return Ok(Committed { version: None });
        }
        if let Err(too_long) = self.client.check_writes(&reads, &writes) {
            self.leave_lane();
            return Err(too_long);
        }
        let (Client { desk, session, .. }, job) = (&*self.client, Job::Commit(Transaction { reads, writes }));
        self.txn = TxnId::NONE;
        let done = match self.lane.take() {
            Some(lane) => desk.carry_out_last(session, lane, job).await?,
            None => desk.carry_out(session, job).await?,
        };
        match done? {
            Ended::Committed(committed) => Ok(committed),
            Ended::Executed(..) | Ended::Free => unreachable!("it was committed or aborted"),
        }
    }

    async fn roll_back(&mut self) {
        // The client's task frees the locks of a doomed transaction, whose last job may still run.
        let lane = if self.is_doomed { None } else { self.lane.take() };
        self.begin();
        if let Some(lane) = lane {
            let _else_it_has_ended =
                self.client.desk.carry_out_last(&self.client.session, lane, Job::Free).await;
        }
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
        let Stat { locked, open, outdated, .. } = self.stat().await?;
        Ok(Left { unsettled: locked, open, outdated })
    }
}

impl<F: Fabric + Clock> Drop for Fasst<F> {
    fn drop(&mut self) {
        self.leave_lane();
        self.client.desk.close();
    }
}

impl<F: Fabric + Clock> Client<F> {
    fn new(session: Session<F>) -> Client<F> {
        let lanes = session.site.shards[0].spec().lanes;
        let lane = |lane: u16| {
            let count = session.joined.counts[usize::from(lane)];
            RefCell::new(Some(Lane::new(session.id().number(), lane, count)))
        };
        Client {
            lanes: (0..lanes).map(lane).collect(),
            desk: Desk::new(lanes),
            tasks: Cell::new(lanes),
            counters: Counters::default(),
            site: Rc::clone(&session.site),
            session,
        }
    }

    fn value_max(&self) -> usize {
        self.site.shards[0].spec().value_max as usize
    }

    /// Number of bytes that a transaction can write, with keys and headers. Also its locked keys have room there.
    fn writes_max(&self) -> usize {
        self.site.shards[0].spec().writes_max as usize
    }

    /// # Errors
    /// The key, the value, or both together are too long.
    fn check_pair(&self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        check_pair(key, value, self.value_max(), self.site.shards[0].spec().pair_max as usize)
    }

    /// # Errors
    /// The writes do not fit into a record, together with the keys that were locked and not written.
    fn check_writes(&self, reads: &BTreeMap<Vec<u8>, Seen>, writes: &Writes) -> Result<(), TxnError> {
        let max = self.writes_max();
        let vain = reads.iter().filter(|(key, seen)| seen.is_locked && !writes.contains_key(*key));
        let vain: usize = vain.map(|(key, _)| Write::len(key, None)).sum();
        let written: usize = writes.iter().map(|(key, value)| Write::len(key, value.as_deref())).sum();
        let len = vain + written;
        if len > max { Err(TxnError::WritesLength { len, max }) } else { Ok(()) }
    }

    /// Runs the client's task: carries out its transactions and renews its lease, until the last handle was dropped.
    /// Then gives the lease back.
    async fn keep(&self) {
        let work = async {
            self.serve().await;
            self.close_all().await;
        };
        self.session.renewing(work, || self.desk.jobs.close()).await;
        self.session.release().await;
    }

    /// Carries out jobs until they are closed, and meanwhile closes records and recovers dead clients. Then drops the
    /// requests of the latter: a request that nobody polls may hold up others.
    async fn serve(&self) {
        let mut jobs = pin!(self.desk.jobs.serve(|lane, job| self.perform(lane, job)));
        let mut closing = pin!(self.keep_closing());
        let mut recovering = pin!(self.session.keep_recovering(|ended| self.note(ended)));
        poll_fn(|cx| {
            let _never_end = (recovering.as_mut().poll(cx), closing.as_mut().poll(cx));
            jobs.as_mut().poll(cx)
        })
        .await;
    }

    fn note(&self, ended: Result<Recovery, TxnError>) {
        let Ok(Recovery { clients, committed, aborted }) = ended else { return };
        (0..clients).for_each(|_| self.counters.recovered.add());
        (0..committed).for_each(|_| self.counters.redone.add());
        (0..aborted).for_each(|_| self.counters.backed_out.add());
    }
}
