//! FaRM: transactions by one-sided READs, calls, locks in the objects, and records at backups (Dragojevic et al.,
//! NSDI'14 and SOSP'15), as the PRISM paper compares itself with it (section 8). `docs/papers/farm.md` has more.
//!
//! - A *record* holds a transaction's writes at one primary: objects, expected versions, keys and values. The primary
//!   stores it when it locks. Each backup gets the same record, with the transaction's stamp and a checksum.
//! - *Versions* count the writes of an object. A *stamp* is 1 above the highest stamp of the objects that the
//!   transaction locks. It is the version that all keys of the transaction have for the family's interface.
//! - *What decides.* Without backups, the first primary that has changed the transaction's state to DECIDED. With
//!   backups, the first backup that has the whole record. Before that, the client has all locks, and its reads are
//!   validated. So a record in any log decides, and no record means that the transaction was aborted.
//! - *Who recovers.* Each client that meets locks of an expired lease, and `heal`. They fence the client, look at its
//!   lanes at all members, copy a found record to the backups that lack it, have the primaries install it and the
//!   backups apply it, or else free the locks. They release the client's id last.
//! - *What a request may assume.* Each request names its transaction, and those of a lane ascend. A member ignores a
//!   request for a transaction that has ended there, so a late, repeated or foreign request does nothing. A record is
//!   overwritten once it was truncated, that is applied to the copies.
//! - *Log space* is the lane's: one record at each member for each part that the member has. A lane takes its next
//!   transaction once it holds no lock, and truncates before it writes a record. So a commit finds space.
//!
//! Modules: `layout`, `log`, `object`: the bytes. `request`: calls. `service`: the node's side. `execute`: reads.
//! `transaction`: the phases. `recover`: what dead clients have left. `session`, `site`: lease, members and keys.
//! `stat`: what must not be left behind. `system`: the entry in the registry. [`mutants`]: broken variants.
//!
//! | transaction | round trips |
//! | --- | --- |
//! | reads of one key | 2 |
//! | reads of several keys | 3: index, objects, validation |
//! | reads and writes of keys with values, at any number of members | 4: index, objects, lock, commit |
//! | the same with backups | 5: index, objects, lock, records, commit |
//! | the same if it only reads some keys | one more, for the validation |
//! | a write of a key that was not read | two more, for its object |
//! | a read or write of a key that never had a value | one more, to claim an object |
//!
//! Commits are jobs of the client ([`crate::owned`]): if the caller's future is dropped, the client's task commits or
//! aborts the transaction.
//!
//! Invariant: a transaction that holds locks is committed or aborted by its client, or the client gives up its lease.

mod execute;
pub mod layout;
mod log;
pub mod mutants;
mod object;
mod recover;
mod request;
pub mod service;
mod session;
mod site;
mod stat;
mod system;
mod transaction;

pub use stat::Stat;

use crate::counters::counters;
use crate::txn::handle::{Desk, Writes, check_pair, missing};
use crate::txn::session::Recovery;
use crate::txn::{Committed, Left, Read, Txn, TxnError, Version};
use execute::{Seen, Wanted};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use log::Write;
use session::Session;
use site::Site;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;
use transaction::{Lane, Transaction};

/// Kind of the store in the catalog.
pub const KIND: &str = "farm";

counters! {
    /// Transactions that were committed, and that were aborted.
    commits: "commits";
    aborts: "aborts";
    /// Pauses of reads that have waited for another transaction.
    waits: "waits";
    /// READs of objects that have returned several versions.
    torn: "torn reads";
    /// Objects that were claimed for new keys.
    claims: "claims";
    /// Dead clients that were recovered, and their transactions that were committed and aborted.
    recovered: "recovered clients";
    redone: "redone transactions";
    backed_out: "backed out transactions";
}

/// Time for which a commit or an abort repeats a request at a member that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Handle of a client of one store. It runs one transaction at a time: give each task its own, by [`Farm::another`].
pub struct Farm<F: Fabric + Clock> {
    client: Rc<Client<F>>,
    reads: BTreeMap<Vec<u8>, Seen>,
    writes: Writes,
    /// Whether a read has failed.
    is_doomed: bool,
}

/// Client of one store, which its handles and its task share.
pub(crate) struct Client<F: Fabric + Clock> {
    site: Rc<Site<F>>,
    session: Session<F>,
    desk: Desk<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    counters: Counters,
}

/// Work of a lane.
enum Job {
    /// Commits or aborts a transaction.
    Commit(Transaction),
    /// Has the backups apply the lane's records.
    Truncate,
}

/// Outcome of a job.
type Done = Result<Committed, TxnError>;

impl<F: Fabric + Clock> Farm<F> {
    fn of(client: &Rc<Client<F>>) -> Farm<F> {
        client.desk.open();
        Farm { client: Rc::clone(client), reads: BTreeMap::new(), writes: BTreeMap::new(), is_doomed: false }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Farm<F> {
        Farm::of(&self.client)
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
        match self.client.look_up(&missing, Wanted::Content).await {
            Ok(seen) => {
                self.reads.extend(missing.iter().map(|key| key.to_vec()).zip(seen));
                Ok(())
            }
            Err(error) => {
                self.is_doomed = true;
                Err(error)
            }
        }
    }
}

impl<F: Fabric + Clock> Txn for Farm<F> {
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
            return Err(TxnError::Doomed);
        }
        if writes.is_empty() && reads.len() <= 1 {
            // The read has found the object without a lock.
            self.client.counters.commits.add();
            return Ok(Committed { version: None });
        }
        self.client.check_writes(&writes)?;
        let job = Job::Commit(Transaction { reads, writes });
        self.client.desk.carry_out(&self.client.session, job).await?
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

impl<F: Fabric + Clock> Drop for Farm<F> {
    fn drop(&mut self) {
        self.client.desk.close();
    }
}

impl<F: Fabric + Clock> Client<F> {
    fn new(session: Session<F>) -> Client<F> {
        let (lanes, members) = (session.site.shards[0].spec().lanes, session.site.shards.len());
        let lane =
            |lane: u16| RefCell::new(Lane::new(lane, session.joined.counts[usize::from(lane)], members));
        Client {
            lanes: (0..lanes).map(lane).collect(),
            desk: Desk::new(lanes),
            counters: Counters::default(),
            site: Rc::clone(&session.site),
            session,
        }
    }

    fn value_max(&self) -> usize {
        self.site.shards[0].spec().value_max as usize
    }

    /// # Errors
    /// The key, the value, or both together are too long.
    fn check_pair(&self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        check_pair(key, value, self.value_max(), self.site.shards[0].spec().pair_max as usize)
    }

    /// # Errors
    /// The writes at a member do not fit into a record.
    fn check_writes(&self, writes: &Writes) -> Result<(), TxnError> {
        let max = self.site.shards[0].spec().writes_max as usize;
        let mut lens = vec![0; self.site.shards.len()];
        for (key, value) in writes {
            lens[self.site.places.place_of(key)] += Write::len(key, value.as_deref());
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
            self.serve().await;
            self.truncate_all().await;
        };
        self.session.renewing(work, || self.desk.jobs.close()).await;
        self.session.release().await;
    }

    /// Carries out jobs until they are closed, and meanwhile truncates records and recovers dead clients. Then drops
    /// the requests of the latter: a request that nobody polls may hold up others.
    async fn serve(&self) {
        let mut jobs = pin!(self.desk.jobs.serve(|lane, job| self.perform(lane, job)));
        let mut truncating = pin!(self.keep_truncating());
        let mut recovering = pin!(self.session.keep_recovering(|ended| self.note(ended)));
        poll_fn(|cx| {
            let _never_end = (recovering.as_mut().poll(cx), truncating.as_mut().poll(cx));
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
