//! The phases of a transaction after its reads: each is one batch of requests, or several if they are many.
//!
//! ```text
//! lock            to each primary: locks on the buckets of all written keys, or none
//! validate        to each primary: versions of the buckets that were only read
//! log             to the client's f + 1 logs: one record of all writes. It decides.
//! commit-backup   to each backup of each primary: values
//! commit-primary  to each primary: values, versions, free locks
//! close           later, unless the lane's next record overwrites this one
//! ```
//!
//! Invariant: a phase begins once all requests of the phase before have been answered.
//! Invariant: the next transaction of a lane begins once the one before holds no lock, and all its values are
//! installed. So its record may be overwritten.
//! Invariant: a client that may have stored a record never aborts the transaction.

use super::layout::{ANY_VERSION, Place, RecordHeader, SLOTS, TxnId, Write};
use super::request::{GET, LOCK, Status, VALIDATE, put_key, words};
use super::site::{Ask, Asked, Missed, Site, Told};
use super::{Client, Done, Job, PATIENCE, mutants};
use crate::rpc::fasst::Batch;
use crate::store::StoreError;
use crate::txn::{Committed, TxnError, Version};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::IntoBytes;

/// What was found of a key.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Version of the key's bucket.
    version: u64,
    /// Stamp of the transaction that has written the value, or deleted it; 0 if the key has never had one.
    pub(super) stamp: u64,
    pub(super) value: Option<Vec<u8>>,
}

/// A transaction whose keys were read.
pub(super) struct Transaction {
    pub(super) reads: BTreeMap<Vec<u8>, Seen>,
    /// The written keys, with their new values; `None` for a key that is deleted.
    pub(super) writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

/// Index of a member, and a bucket there.
type BucketId = (usize, u64);

/// The keys of a transaction in one bucket.
#[derive(Default)]
struct Part<'t> {
    /// Version of the bucket that was read, if a key was.
    version: Option<u64>,
    writes: Vec<(&'t [u8], Option<&'t [u8]>)>,
}

/// State of a lane, which carries out one transaction at a time.
pub(super) struct Lane {
    number: u16,
    /// Count of the lane's last transaction.
    count: u64,
    batch: Batch,
    /// Transaction whose record lies in the logs and is not needed any more.
    behind: TxnId,
}

impl Lane {
    pub(super) fn new(client: u16, number: u16, count: u64) -> Lane {
        Lane { number, count, batch: Batch::new(client, number), behind: TxnId::NONE }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Reads keys, all at the same time.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn look_up(&self, batch: &mut Batch, keys: &[&[u8]]) -> Result<Vec<Seen>, TxnError> {
        self.site.fetch_keys().await?;
        let get = |key: &&[u8]| {
            let (member, bucket) = self.bucket_of(key);
            let mut ask = Ask { response_max: 16 + self.value_max(), ..Ask::new(member, GET, &[bucket]) };
            ask.payload.extend_from_slice(key);
            ask
        };
        let asks: Vec<Ask> = keys.iter().map(get).collect();
        let outcomes = self.site.ask_all(batch, self.session.epoch(), &asks, false).await;
        outcomes.into_iter().map(|outcome| self.seen(outcome)).collect()
    }

    /// Returns what the response to the read of a key has.
    fn seen(&self, outcome: Asked) -> Result<Seen, TxnError> {
        let damaged = TxnError::Damaged("a value that no node sends");
        let Told { status, payload } = outcome.map_err(|missed| self.missed(&missed))?;
        if status == Status::Locked {
            return Err(self.locked(&payload));
        }
        let Some(([version, stamp], value)) = words(&payload) else { return Err(damaged) };
        match status {
            Status::Done => Ok(Seen { version, stamp, value: Some(value.to_vec()) }),
            Status::Absent => Ok(Seen { version, stamp, value: None }),
            _ => Err(damaged),
        }
    }

    /// Member and bucket of a key.
    fn bucket_of(&self, key: &[u8]) -> BucketId {
        let member = self.site.places.place_of(key);
        (member, self.site.shards[member].table.bucket_of(key))
    }

    /// The error of a request that was not answered. The client gives up if it has been recovered, or if the store has
    /// another configuration.
    fn missed(&self, missed: &Missed) -> TxnError {
        if matches!(missed, Missed::Stale | Missed::Store(StoreError::Replaced { .. })) {
            self.session.give_up();
        }
        missed.error()
    }

    /// The error of a request for a bucket that another transaction has locked.
    fn locked(&self, payload: &[u8]) -> TxnError {
        if let Some(([owner], _)) = words(payload) {
            self.session.suspect(TxnId::of_bits(owner).client());
        }
        TxnError::Conflict
    }

    /// Carries out a job on a lane.
    pub(super) async fn perform(&self, lane: usize, job: Job) -> Done {
        let mut own = self.lanes[lane].take().expect("a lane has one job at a time");
        let done = match job {
            Job::Commit(transaction) => {
                let done = self.run(&mut own, transaction).await;
                match &done {
                    Ok(_) => self.counters.commits.add(),
                    Err(_) => self.counters.aborts.add(),
                }
                done
            }
            Job::Close => {
                self.close_lane(&mut own).await;
                Ok(Committed { version: None })
            }
        };
        self.lanes[lane].replace(Some(own));
        done
    }

    async fn run(&self, lane: &mut Lane, transaction: Transaction) -> Result<Committed, TxnError> {
        if self.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        self.site.fetch_keys().await?;
        let parts = self.parts(&transaction)?;
        if transaction.writes.is_empty() {
            // A single bucket had one version for all reads.
            if parts.len() > 1 {
                self.validate(lane, &parts, TxnId::NONE).await?;
            }
            return Ok(Committed { version: None });
        }
        let txn = TxnId::new(self.session.entry(lane.number), lane.count + 1).ok_or(TxnError::TooOld)?;
        lane.count += 1;
        let (stamp, writes) = self.lock(lane, &parts, txn).await?;
        let stamp = stamp + 1;
        if let Err(error) = self.validate(lane, &parts, txn).await {
            self.abort(lane, members_of(&writes), txn).await;
            return Err(error);
        }
        if mutants::LOGGED_LATE.is_on() {
            self.install(lane, txn, stamp, &writes).await;
            self.log(lane, txn, stamp, &writes).await?;
        } else {
            self.log(lane, txn, stamp, &writes).await?;
            self.install(lane, txn, stamp, &writes).await;
        }
        Ok(Committed { version: Some(Version(stamp)) })
    }

    /// Divides a transaction among buckets.
    ///
    /// # Errors
    /// [`TxnError::Conflict`]: keys of one bucket were read at different versions.
    fn parts<'t>(&self, transaction: &'t Transaction) -> Result<BTreeMap<BucketId, Part<'t>>, TxnError> {
        let mut parts: BTreeMap<BucketId, Part<'t>> = BTreeMap::new();
        for (key, seen) in &transaction.reads {
            if seen.value.is_none() && mutants::PHANTOM_ACCEPTED.is_on() {
                continue;
            }
            let part = parts.entry(self.bucket_of(key)).or_default();
            if *part.version.get_or_insert(seen.version) != seen.version {
                return Err(TxnError::Conflict);
            }
        }
        for (key, value) in &transaction.writes {
            parts.entry(self.bucket_of(key)).or_default().writes.push((key, value.as_deref()));
        }
        Ok(parts)
    }

    /// Locks the buckets of all keys that a transaction writes. Returns the highest stamp of these keys, and the writes
    /// with their places.
    ///
    /// # Errors
    /// [`TxnError`]; no lock is left, or the client has given up.
    async fn lock<'t>(
        &self,
        lane: &mut Lane,
        parts: &BTreeMap<BucketId, Part<'t>>,
        txn: TxnId,
    ) -> Result<(u64, Vec<Write<'t>>), TxnError> {
        let written: Vec<_> = parts.iter().filter(|(_, part)| !part.writes.is_empty()).collect();
        let request = |((member, bucket), part): &(&BucketId, &Part<'t>)| {
            let expected = part.version.unwrap_or(ANY_VERSION);
            let mut ask = Ask::new(*member, LOCK, &[txn.bits(), *bucket, expected]);
            part.writes.iter().for_each(|(key, _)| put_key(&mut ask.payload, key));
            ask.response_max += 8 * part.writes.len();
            ask
        };
        let asks: Vec<Ask> = written.iter().map(request).collect();
        let outcomes = self.site.ask_all(&mut lane.batch, self.session.epoch(), &asks, true).await;
        let (mut stamp, mut writes, mut holds, mut failure) = (0, Vec::new(), BTreeSet::new(), None);
        for (((member, bucket), part), outcome) in written.iter().zip(outcomes) {
            let told = match outcome {
                Ok(told) => told,
                Err(missed) => {
                    if missed.may_run() {
                        holds.insert(*member);
                    }
                    // A request is unsent since one before it has failed.
                    failure.get_or_insert_with(|| self.missed(&missed));
                    continue;
                }
            };
            let error = match told.status {
                Status::Done => {
                    holds.insert(*member);
                    match self.places(&told.payload, part.writes.len()) {
                        Some((of_keys, places)) => {
                            stamp = stamp.max(of_keys);
                            let write = |(place, (key, value)): (Place, &(&'t [u8], Option<&'t [u8]>))| {
                                Write { place, bucket: *bucket, member: *member as u8, key, value: *value }
                            };
                            writes.extend(places.into_iter().zip(&part.writes).map(write));
                            continue;
                        }
                        None => TxnError::Damaged("a place that no node finds"),
                    }
                }
                Status::Locked => self.locked(&told.payload),
                Status::Changed => TxnError::Conflict,
                Status::Full => TxnError::TableFull,
                Status::Ended | Status::Absent => {
                    TxnError::Damaged("the lane of this client was changed by another client")
                }
            };
            failure.get_or_insert(error);
        }
        let Some(error) = failure else { return Ok((stamp, writes)) };
        self.abort(lane, holds, txn).await;
        Err(error)
    }

    /// Decodes the response to a lock request: the highest stamp, and a place for each key. `None` if a node does not
    /// answer so, or if no stamp is higher.
    fn places(&self, payload: &[u8], keys: usize) -> Option<(u64, Vec<Place>)> {
        let ([stamp], mut rest) = words(payload)?;
        let mut places = Vec::with_capacity(keys);
        while let Some(([place], after)) = words(rest) {
            let place = Place::of_bits(place);
            let is_possible = place.slot < SLOTS && place.bucket < self.site.shards[0].spec().all_buckets();
            places.push(Some(place).filter(|_| is_possible)?);
            rest = after;
        }
        (places.len() == keys && stamp < u64::MAX).then_some((stamp, places))
    }

    /// Checks that the buckets that were read and are not locked by this transaction have the versions that were read,
    /// and no locks.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not commit.
    async fn validate(
        &self,
        lane: &mut Lane,
        parts: &BTreeMap<BucketId, Part<'_>>,
        txn: TxnId,
    ) -> Result<(), TxnError> {
        let read = parts.iter().filter(|(_, part)| part.writes.is_empty());
        let request = |((member, bucket), part): (&BucketId, &Part<'_>)| {
            let version = part.version.expect("a bucket without writes was read");
            Ask::new(*member, VALIDATE, &[txn.bits(), *bucket, version])
        };
        let asks: Vec<Ask> = read.map(request).collect();
        let outcomes = self.site.ask_all(&mut lane.batch, self.session.epoch(), &asks, true).await;
        outcomes.into_iter().try_for_each(|outcome| {
            let told = outcome.map_err(|missed| self.missed(&missed))?;
            match told.status {
                Status::Done => Ok(()),
                Status::Locked => Err(self.locked(&told.payload)),
                _ => Err(TxnError::Conflict),
            }
        })
    }

    /// Frees the locks of a transaction that does not commit, at these members. If this fails, the client gives up:
    /// others free them.
    async fn abort(&self, lane: &mut Lane, holds: BTreeSet<usize>, txn: TxnId) {
        let asks = Site::<F>::abort_asks(txn, holds);
        let goes_on = || !self.session.is_given_up();
        let abort = async || self.site.settle(&mut lane.batch, self.session.epoch(), &asks).await;
        if self.site.persist(PATIENCE, goes_on, abort).await.is_err() {
            self.session.give_up();
        }
    }

    /// Stores the record of a transaction in all logs of the client. Then it is committed.
    ///
    /// # Errors
    /// [`TxnError`]; if no record may have been stored, the transaction is aborted. Else the client has given up.
    async fn log(
        &self,
        lane: &mut Lane,
        txn: TxnId,
        stamp: u64,
        writes: &[Write<'_>],
    ) -> Result<(), TxnError> {
        let mut encoded = Vec::new();
        for write in writes {
            let garbage =
                write.value.map(|value| vec![0; value.len()]).filter(|_| mutants::LOG_GARBAGE.is_on());
            let logged = Write { value: garbage.as_deref().or(write.value), ..*write };
            if write.value.is_some() || !mutants::DELETE_UNLOGGED.is_on() {
                logged.encode(&mut encoded);
            }
        }
        let mut record = RecordHeader::new(txn, stamp, &encoded).as_bytes().to_vec();
        record.extend_from_slice(&encoded);
        let asks = self.site.log_asks(self.session.id(), &record);
        // A log that does not get this record keeps the one before.
        let before = std::mem::replace(&mut lane.behind, txn);
        let outcomes = self.site.ask_all(&mut lane.batch, self.session.epoch(), &asks, false).await;
        let is_stored = |outcome: &Asked| matches!(outcome, Ok(Told { status: Status::Done, .. }));
        if outcomes.iter().all(is_stored) {
            return Ok(());
        }
        let may_run = |outcome: &Asked| outcome.as_ref().map_or_else(Missed::may_run, |_| true);
        if !outcomes.iter().any(may_run) {
            lane.behind = before;
            let missed = outcomes.into_iter().find_map(Result::err).unwrap_or(Missed::Unknown);
            let error = self.missed(&missed);
            self.abort(lane, members_of(writes), txn).await;
            return Err(error);
        }
        let goes_on = || !self.session.is_given_up();
        let again = async || self.site.settle(&mut lane.batch, self.session.epoch(), &asks).await;
        self.site.persist(PATIENCE, goes_on, again).await.map_err(|error| {
            self.session.give_up();
            TxnError::Unknown(Box::new(error))
        })
    }

    /// Installs the values of a committed transaction at its backups, and then at its primaries. If this fails, the
    /// client gives up, and others install them: the transaction is committed.
    async fn install(&self, lane: &mut Lane, txn: TxnId, stamp: u64, writes: &[Write<'_>]) {
        let [backups, primaries] =
            [self.site.backup_asks(txn, stamp, writes), self.site.commit_asks(txn, stamp, writes)];
        let phases = match mutants::BACKUP_NOT_AWAITED.is_on() {
            true => [primaries, backups],
            false => [backups, primaries],
        };
        for asks in phases {
            let goes_on = || !self.session.is_given_up();
            let install = async || self.site.settle(&mut lane.batch, self.session.epoch(), &asks).await;
            if self.site.persist(PATIENCE, goes_on, install).await.is_err() {
                self.session.give_up();
                return;
            }
        }
    }

    /// Closes the record of a lane. Returns whether all logs have done so.
    async fn close_lane(&self, lane: &mut Lane) -> bool {
        if lane.behind == TxnId::NONE {
            return true;
        }
        if self.session.is_given_up() || self.site.fetch_keys().await.is_err() {
            return false;
        }
        let asks = self.site.close_asks(self.session.id(), lane.behind);
        let is_closed = self.site.settle(&mut lane.batch, self.session.epoch(), &asks).await.is_ok();
        if is_closed {
            lane.behind = TxnId::NONE;
        }
        is_closed
    }

    /// Closes the records of lanes without a job from time to time.
    pub(super) async fn keep_closing(&self) {
        loop {
            self.site.fabric.sleep(self.site.lease() / 4).await;
            for (number, lane) in self.lanes.iter().enumerate() {
                let is_behind = lane.borrow().as_ref().is_some_and(|lane| lane.behind != TxnId::NONE);
                if is_behind {
                    let _else_the_lane_is_used = self.desk.jobs.carry_out_on(number, Job::Close).await;
                }
            }
        }
    }

    /// Closes the records of all lanes. The client has no job. If a log does not answer, the client gives up: a
    /// recoverer does the rest once the lease has expired.
    pub(super) async fn close_all(&self) {
        for lane in &self.lanes {
            let Some(mut own) = lane.take() else { continue };
            if !self.close_lane(&mut own).await {
                self.session.give_up();
            }
            lane.replace(Some(own));
        }
    }
}

fn members_of(writes: &[Write<'_>]) -> BTreeSet<usize> {
    writes.iter().map(|write| write.member.into()).collect()
}
