//! The phases of a transaction: each is one batch of requests, or several if they are many.
//!
//! ```text
//! execute         to each primary: locks on the buckets of keys that are read to be written, and values of all keys.
//!                 As often as the program reads. Without keys to write, the handle reads by itself.
//! lock            to each primary: locks on the buckets of written keys that are not locked yet
//! validate        to each primary: versions of the buckets that were read and are not locked
//! log             to the client's f + 1 logs: one record of all writes. It decides.
//! commit-backup   to each backup of each primary: values
//! commit-primary  to each primary: values, versions, free locks
//! close           later, unless the lane's next record overwrites this one
//! ```
//!
//! A transaction has one lane from its first lock to its end. It takes no lock that another one has, and waits for
//! nothing but responses and its program. A handle that waits for a lane has neither a lane nor a lock. So transactions
//! do not wait for each other in a circle, with any number of lanes.
//!
//! Invariant: a phase begins once all requests of the phase before have been answered.
//! Invariant: the next transaction of a lane begins once the one before holds no lock, and all its values are
//! installed. So its record may be overwritten.
//! Invariant: a client that may have stored a record never aborts the transaction.
//! Invariant: a locked bucket has the version of all reads of its keys, those before the lock and those under it.

use super::layout::{ANY_VERSION, EntryId, Place, RecordHeader, SLOTS, TxnId, Write};
use super::request::{GET, LOCK, LOCK_GET, NO_PLACE, Status, VALIDATE, put_key, put_places, words};
use super::site::{Ask, Asked, BucketId, Missed, Site, Told};
use super::{Client, Done, Ended, Job, PATIENCE, mutants};
use crate::rpc::fasst::{Batch, ENTRIES_MAX};
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
    /// Whether the request that has read the key has locked its bucket.
    pub(super) is_locked: bool,
}

/// Keys that a transaction reads at the same time, of which it will write some.
pub(super) struct Wanted {
    pub(super) to_write: Vec<Vec<u8>>,
    pub(super) to_read: Vec<Vec<u8>>,
    /// Versions of the buckets from which the transaction has read before.
    pub(super) versions: BTreeMap<BucketId, u64>,
}

/// A transaction whose keys were read.
pub(super) struct Transaction {
    pub(super) reads: BTreeMap<Vec<u8>, Seen>,
    /// The written keys, with their new values; `None` for a key that is deleted.
    pub(super) writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

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
    /// The transaction that has the lane, from its first lock to its end.
    open: Option<Open>,
}

/// A transaction that has locks, or takes them.
struct Open {
    txn: TxnId,
    /// Members where it may have locks.
    holds: BTreeSet<usize>,
    locked: BTreeMap<BucketId, Locked>,
}

/// A bucket that a transaction has locked.
#[derive(Default)]
struct Locked {
    /// The highest stamp of the keys below.
    stamp: u64,
    /// Places of keys that the transaction may write; `None` if a key has no place yet.
    places: BTreeMap<Vec<u8>, Option<Place>>,
}

impl Lane {
    pub(super) fn new(client: u16, number: u16, count: u64) -> Lane {
        Lane { number, count, batch: Batch::new(client, number), behind: TxnId::NONE, open: None }
    }

    /// Has a transaction take the lane, unless one has it.
    ///
    /// # Errors
    /// There are no more numbers.
    fn open(&mut self, entry: EntryId) -> Result<(), TxnError> {
        if self.open.is_none() {
            let txn = TxnId::new(entry, self.count + 1).ok_or(TxnError::TooOld)?;
            self.count += 1;
            self.open = Some(Open { txn, holds: BTreeSet::new(), locked: BTreeMap::new() });
        }
        Ok(())
    }

    fn txn(&self) -> TxnId {
        self.open.as_ref().map_or(TxnId::NONE, |open| open.txn)
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Reads keys, all at the same time. `txn` is the client's transaction if it has locks.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn look_up(
        &self,
        batch: &mut Batch,
        txn: TxnId,
        keys: &[&[u8]],
    ) -> Result<Vec<Seen>, TxnError> {
        self.site.fetch_keys().await?;
        let asks: Vec<Ask> = keys.iter().map(|key| self.get_ask(txn, key)).collect();
        let outcomes = self.site.ask_all(batch, self.session.epoch(), &asks, false).await;
        outcomes.into_iter().map(|outcome| self.seen(outcome)).collect()
    }

    fn get_ask(&self, txn: TxnId, key: &[u8]) -> Ask {
        let (member, bucket) = self.bucket_of(key);
        let mut ask =
            Ask { response_max: 16 + self.value_max(), ..Ask::new(member, GET, &[txn.bits(), bucket]) };
        ask.payload.extend_from_slice(key);
        ask
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
            Status::Done => Ok(Seen { version, stamp, value: Some(value.to_vec()), is_locked: false }),
            Status::Absent => Ok(Seen { version, stamp, value: None, is_locked: false }),
            _ => Err(damaged),
        }
    }

    /// Versions of the buckets of keys that were read.
    ///
    /// # Errors
    /// [`TxnError::Conflict`]: keys of one bucket were read at different versions. A read that locks would replace what
    /// was read of its keys, and only a version that is compared now says that this has not changed.
    pub(super) fn versions_of(
        &self,
        reads: &BTreeMap<Vec<u8>, Seen>,
    ) -> Result<BTreeMap<BucketId, u64>, TxnError> {
        let mut versions = BTreeMap::new();
        for (key, seen) in reads {
            let version = *versions.entry(self.bucket_of(key)).or_insert(seen.version);
            if version != seen.version && !mutants::VERSIONS_MIXED.is_on() {
                self.counters.aborts.add();
                return Err(TxnError::Conflict);
            }
        }
        Ok(versions)
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
            Job::Execute(wanted) => {
                let done = self.execute(&mut own, wanted).await;
                if done.is_err() {
                    self.counters.aborts.add();
                }
                done.map(|(txn, seen)| Ended::Executed(txn, seen))
            }
            Job::Commit(transaction) => {
                let done = self.run(&mut own, transaction).await;
                match &done {
                    Ok(_) => self.counters.commits.add(),
                    Err(_) => self.counters.aborts.add(),
                }
                done.map(Ended::Committed)
            }
            Job::Free => {
                if own.open.is_some() && !mutants::ABANDONED_LOCK_LEFT.is_on() {
                    self.counters.aborts.add();
                    self.abort(&mut own).await;
                }
                Ok(Ended::Free)
            }
            Job::Close => {
                self.close_lane(&mut own).await;
                Ok(Ended::Free)
            }
        };
        self.lanes[lane].replace(Some(own));
        done
    }

    /// Locks the buckets of the keys to write, and reads all keys. Returns the transaction, and what was read: of the
    /// keys to write first.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction was aborted and has no lock, or the client has given up.
    async fn execute(&self, lane: &mut Lane, wanted: Wanted) -> Result<(TxnId, Vec<Seen>), TxnError> {
        let done = self.lock_and_get(lane, &wanted).await;
        if done.is_err() {
            self.abort(lane).await;
        }
        done
    }

    async fn lock_and_get(&self, lane: &mut Lane, wanted: &Wanted) -> Result<(TxnId, Vec<Seen>), TxnError> {
        if self.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        self.site.fetch_keys().await?;
        lane.open(self.session.entry(lane.number))?;
        let (mut seen, mut chunks) = (Vec::new(), wanted.to_write.chunks(ENTRIES_MAX).peekable());
        while let Some(keys) = chunks.next() {
            let open = lane.open.as_mut().expect("it was opened");
            self.check_locks(open, keys)?;
            let txn = open.txn;
            let ids: Vec<BucketId> = keys.iter().map(|key| self.bucket_of(key)).collect();
            let ask = |place: usize| self.lock_get_ask(open, wanted, &keys[..=place], &ids[..=place]);
            let mut asks: Vec<Ask> = (0..keys.len()).map(ask).collect();
            if chunks.peek().is_none() {
                asks.extend(wanted.to_read.iter().map(|key| self.get_ask(txn, key)));
            }
            let outcomes = self.site.ask_all(&mut lane.batch, self.session.epoch(), &asks, true).await;
            let mut failure = None;
            for (place, outcome) in outcomes.into_iter().enumerate() {
                let done = match keys.get(place) {
                    Some(key) => self.locked_and_got(open, ids[place], key, outcome),
                    None => self.seen(outcome),
                };
                // A request is unsent since one before it has failed.
                match done {
                    Ok(found) => seen.push(found),
                    Err(error) => _ = failure.get_or_insert(error),
                }
            }
            failure.map_or(Ok(()), Err)?;
        }
        Ok((lane.txn(), seen))
    }

    /// # Errors
    /// The store has no room for the locks of these keys beside those that the transaction has.
    fn check_locks(&self, open: &Open, keys: &[Vec<u8>]) -> Result<(), TxnError> {
        let locked = open.locked.values().flat_map(|locked| locked.places.keys());
        let (len, max) = (locked.chain(keys).map(|key| Write::len(key, None)).sum(), self.writes_max());
        if len > max { Err(TxnError::WritesLength { len, max }) } else { Ok(()) }
    }

    /// The request that locks and reads the last one of these keys, which are in these buckets.
    fn lock_get_ask(&self, open: &Open, wanted: &Wanted, keys: &[Vec<u8>], ids: &[BucketId]) -> Ask {
        let id = *ids.last().expect("a key to lock");
        let expected = wanted.versions.get(&id).copied().filter(|_| !mutants::LOCK_UNCHECKED.is_on());
        let beside = keys.iter().zip(ids).filter(|(_, of)| **of == id).map(|(key, _)| key.as_slice());
        let ask = self.lock_ask(open, LOCK_GET, (id, expected), beside);
        Ask { response_max: 24 + self.value_max(), ..ask }
    }

    /// A request that locks a bucket for keys.
    fn lock_ask<'k>(
        &self,
        open: &Open,
        kind: u8,
        ((member, bucket), expected): (BucketId, Option<u64>),
        keys: impl Iterator<Item = &'k [u8]>,
    ) -> Ask {
        let expected = expected.unwrap_or(ANY_VERSION);
        let mut ask = Ask::new(member, kind, &[open.txn.bits(), bucket, expected]);
        let taken = open.locked.get(&(member, bucket)).map(|locked| &locked.places);
        let taken: Vec<Place> = taken.into_iter().flat_map(BTreeMap::values).copied().flatten().collect();
        put_places(&mut ask.payload, taken.into_iter());
        keys.for_each(|key| put_key(&mut ask.payload, key));
        ask
    }

    /// Notes the lock that a response grants. Returns what the response has of the key.
    fn locked_and_got(
        &self,
        open: &mut Open,
        id: BucketId,
        key: &[u8],
        outcome: Asked,
    ) -> Result<Seen, TxnError> {
        let told = self.granted(open, id.0, outcome)?;
        let damaged = TxnError::Damaged("a value that no node sends");
        let Some(([version, stamp, place], value)) = words(&told.payload) else { return Err(damaged) };
        let place = match place {
            NO_PLACE if told.status == Status::Absent && stamp == 0 => None,
            place => Some(self.place(place).filter(|_| stamp < u64::MAX).ok_or(damaged)?),
        };
        let locked = open.locked.entry(id).or_default();
        locked.stamp = locked.stamp.max(stamp);
        locked.places.insert(key.to_vec(), place);
        let value = (told.status == Status::Done).then(|| value.to_vec());
        Ok(Seen { version, stamp, value, is_locked: true })
    }

    /// Returns the response to a lock request that has got the lock, and notes that the member may hold it.
    ///
    /// # Errors
    /// [`TxnError`]: the transaction must not commit.
    fn granted(&self, open: &mut Open, member: usize, outcome: Asked) -> Result<Told, TxnError> {
        let told = match outcome {
            Ok(told) => told,
            Err(missed) => {
                if missed.may_run() {
                    open.holds.insert(member);
                }
                return Err(self.missed(&missed));
            }
        };
        Err(match told.status {
            Status::Done | Status::Absent => {
                open.holds.insert(member);
                return Ok(told);
            }
            Status::Locked => self.locked(&told.payload),
            Status::Changed => TxnError::Conflict,
            Status::Full => TxnError::TableFull,
            Status::Ended => TxnError::Damaged("the lane of this client was changed by another client"),
        })
    }

    async fn run(&self, lane: &mut Lane, transaction: Transaction) -> Result<Committed, TxnError> {
        if self.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        let (stamp, writes) = match self.prepare(lane, &transaction).await {
            Ok((_, writes)) if writes.is_empty() => {
                self.abort(lane).await;
                return Ok(Committed { version: None });
            }
            Ok(prepared) => prepared,
            Err(error) => {
                self.abort(lane).await;
                return Err(error);
            }
        };
        if mutants::LOGGED_LATE.is_on() {
            self.install(lane, stamp, &writes).await;
        }
        let logged = self.log(lane, stamp, &writes).await;
        if logged.is_ok() && !mutants::LOGGED_LATE.is_on() {
            self.install(lane, stamp, &writes).await;
        }
        // It has no lock any more, or the client has given up, and others settle it.
        lane.open = None;
        logged.map(|()| Committed { version: Some(Version(stamp)) })
    }

    /// Locks all buckets that a transaction writes, and validates the others. Returns its stamp, and its writes with
    /// their places.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not commit.
    async fn prepare<'t>(
        &self,
        lane: &mut Lane,
        transaction: &'t Transaction,
    ) -> Result<(u64, Vec<Write<'t>>), TxnError> {
        self.site.fetch_keys().await?;
        let parts = self.parts(transaction)?;
        if transaction.writes.is_empty() {
            // A single bucket had one version for all reads.
            if parts.len() > 1 {
                self.validate(lane, &parts).await?;
            }
            return Ok((0, Vec::new()));
        }
        let (stamp, writes) = self.lock(lane, &parts).await?;
        self.validate(lane, &parts).await?;
        Ok((stamp + 1, writes))
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

    /// Locks the buckets of all keys that a transaction writes, where it has no places for them yet. Returns the
    /// highest stamp of the keys that are locked in these buckets, and the writes with their places.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction may have some of the locks.
    async fn lock<'t>(
        &self,
        lane: &mut Lane,
        parts: &BTreeMap<BucketId, Part<'t>>,
    ) -> Result<(u64, Vec<Write<'t>>), TxnError> {
        lane.open(self.session.entry(lane.number))?;
        let Lane { open: Some(open), batch, .. } = lane else { unreachable!("it was opened") };
        let (mut asks, mut asked) = (Vec::new(), Vec::new());
        for (id, part) in parts {
            let places = open.locked.get(id).map(|locked| &locked.places);
            let is_new = |key: &&[u8]| places.and_then(|places| *places.get(*key)?).is_none();
            let keys: Vec<&[u8]> = part.writes.iter().map(|(key, _)| *key).filter(is_new).collect();
            if !keys.is_empty() {
                let ask = self.lock_ask(open, LOCK, (*id, part.version), keys.iter().copied());
                asks.push(Ask { response_max: 8 + 8 * keys.len(), ..ask });
                asked.push((*id, keys));
            }
        }
        let outcomes = self.site.ask_all(batch, self.session.epoch(), &asks, true).await;
        let mut failure = None;
        for ((id, keys), outcome) in asked.into_iter().zip(outcomes) {
            let granted = self.granted(open, id.0, outcome).and_then(|told| {
                let places = self.places(&told.payload, keys.len());
                places.ok_or(TxnError::Damaged("a place that no node finds"))
            });
            // A request is unsent since one before it has failed.
            match granted {
                Ok((stamp, places)) => {
                    let locked = open.locked.entry(id).or_default();
                    locked.stamp = locked.stamp.max(stamp);
                    locked
                        .places
                        .extend(keys.into_iter().map(<[u8]>::to_vec).zip(places.into_iter().map(Some)));
                }
                Err(error) => _ = failure.get_or_insert(error),
            }
        }
        failure.map_or(Ok(()), Err)?;
        let (mut stamp, mut writes) = (0, Vec::new());
        for ((member, bucket), part) in parts.iter().filter(|(_, part)| !part.writes.is_empty()) {
            let locked = &open.locked[&(*member, *bucket)];
            stamp = stamp.max(locked.stamp);
            writes.extend(part.writes.iter().map(|(key, value)| Write {
                place: locked.places[*key].expect("each written key was given one"),
                bucket: *bucket,
                member: *member as u8,
                key,
                value: *value,
            }));
        }
        Ok((stamp, writes))
    }

    /// Decodes the response to a lock request: the highest stamp, and a place for each key. `None` if a node does not
    /// answer so, or if no stamp is higher.
    fn places(&self, payload: &[u8], keys: usize) -> Option<(u64, Vec<Place>)> {
        let ([stamp], mut rest) = words(payload)?;
        let mut places = Vec::with_capacity(keys);
        while let Some(([place], after)) = words(rest) {
            places.push(self.place(place)?);
            rest = after;
        }
        (places.len() == keys && stamp < u64::MAX).then_some((stamp, places))
    }

    /// Decodes a place; `None` if the store does not have it.
    fn place(&self, bits: u64) -> Option<Place> {
        let place = Place::of_bits(bits);
        let is_possible = place.slot < SLOTS && place.bucket < self.site.shards[0].spec().all_buckets();
        is_possible.then_some(place)
    }

    /// Checks that the buckets that were read and are not locked by this transaction have the versions that were read,
    /// and no locks.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not commit.
    async fn validate(&self, lane: &mut Lane, parts: &BTreeMap<BucketId, Part<'_>>) -> Result<(), TxnError> {
        let txn = lane.txn();
        let is_locked = |id: &BucketId| lane.open.as_ref().is_some_and(|open| open.locked.contains_key(id));
        let read = parts.iter().filter(|(id, _)| !is_locked(id));
        let request = |((member, bucket), part): (&BucketId, &Part<'_>)| {
            let version = part.version.expect("a bucket without a lock was read");
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

    /// Ends the lane's transaction, which does not commit, and frees its locks. If this fails, the client gives up:
    /// others free them.
    async fn abort(&self, lane: &mut Lane) {
        let Some(Open { txn, holds, .. }) = lane.open.take() else { return };
        if holds.is_empty() {
            return;
        }
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
    async fn log(&self, lane: &mut Lane, stamp: u64, writes: &[Write<'_>]) -> Result<(), TxnError> {
        let (txn, mut encoded) = (lane.txn(), Vec::new());
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
            self.abort(lane).await;
            return Err(error);
        }
        let goes_on = || !self.session.is_given_up();
        let again = async || self.site.settle(&mut lane.batch, self.session.epoch(), &asks).await;
        self.site.persist(PATIENCE, goes_on, again).await.map_err(|error| {
            self.session.give_up();
            TxnError::Unknown(Box::new(error))
        })
    }

    /// Installs the values of a committed transaction at its backups, and then at its primaries, which free its locks.
    /// If this fails, the client gives up, and others install them: the transaction is committed.
    async fn install(&self, lane: &mut Lane, stamp: u64, writes: &[Write<'_>]) {
        let txn = lane.txn();
        let locked = lane.open.iter().flat_map(|open| open.locked.keys().copied());
        let [backups, primaries] =
            [self.site.backup_asks(txn, stamp, writes), self.site.commit_asks(txn, stamp, writes, locked)];
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
