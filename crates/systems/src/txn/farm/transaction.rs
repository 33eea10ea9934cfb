//! The phases of a transaction after its execution: objects for all keys, locks, validation, records at the backups,
//! and installation at the primaries.
//!
//! ```text
//! lock            call to each primary: record, locks on all written objects, or none
//! validate        READ of the headers of the objects that were only read; a call if a primary has more than 4 of them
//! commit-backup   WRITE of the record to each backup of each primary
//! commit-primary  call to each primary: values and versions, free locks
//! truncate        later: with the lane's next lock call, or a call of the client's task
//! ```
//!
//! Invariant: a phase begins once all requests of the phase before have been answered.
//! Invariant: the next transaction of a lane begins once the one before holds no lock. A record is overwritten once the
//! backup has applied it, and once no WRITE of it can arrive any more.
//! Invariant: a client that may have sent a record, or a commit call, never aborts the transaction.

use super::execute::{Place, Seen, Wanted};
use super::log::{ANY_VERSION, EntryId, RECORD_SIZE, RecordHeader, TxnId, Write};
use super::object::Header;
use super::request::{Check, Outcome, Request};
use super::site::Buffers;
use super::{Client, Done, Job, PATIENCE, mutants};
use crate::members::all;
use crate::txn::{Committed, TxnError, Version};
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{ChainBuf, Fabric, Out, Reply, Status, read_as, write};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Largest number of objects of one primary that are validated by READs (FaRM, SOSP'15, section 4).
const READS_MAX: usize = 4;
/// Largest number of objects that one call validates.
const CHECKS_PER_CALL: usize = 1024;

/// A transaction that has been executed.
pub(super) struct Transaction {
    pub(super) reads: BTreeMap<Vec<u8>, Seen>,
    /// The written keys, with their new values; `None` for a key that is deleted.
    pub(super) writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

/// The part of a transaction at one primary.
#[derive(Default)]
struct Part {
    /// Index of the member.
    shard: usize,
    /// Versions of the objects that were read and are not written.
    checks: Vec<Check>,
    /// The writes, encoded.
    writes: Vec<u8>,
}

/// What a lane keeps for a member.
#[derive(Default)]
pub(super) struct LaneShard {
    /// Transaction whose records at this member are yet to be truncated. It is settled at all primaries.
    behind: TxnId,
    /// If a WRITE of a record may yet arrive, the number of its session, and when the client learned that.
    stray: Option<(u64, Duration)>,
    buffers: Buffers,
}

/// State of a lane, which carries out one transaction at a time.
#[derive(Default)]
pub(super) struct Lane {
    number: u16,
    /// Count of the lane's last transaction.
    count: u64,
    /// By member. Empty while a transaction has them.
    shards: Vec<LaneShard>,
}

impl Lane {
    pub(super) fn new(number: u16, count: u64, members: usize) -> Lane {
        Lane { number, count, shards: (0..members).map(|_| LaneShard::default()).collect() }
    }

    /// Whether a record is yet to be truncated.
    pub(super) fn is_behind(&self) -> bool {
        self.shards.iter().any(|own| own.behind != TxnId::NONE)
    }
}

/// Outcome of a phase at one member: the error, and whether a request has run or may run.
type Phase = Result<(), (bool, TxnError)>;

impl<F: Fabric + Clock> Client<F> {
    /// Carries out a job on a lane.
    pub(super) async fn perform(&self, lane: usize, job: Job) -> Done {
        let mut own = self.lanes[lane].take();
        let done = match job {
            Job::Commit(transaction) => {
                let done = self.run(&mut own, transaction).await;
                match &done {
                    Ok(_) => self.counters.commits.add(),
                    Err(_) => self.counters.aborts.add(),
                }
                done
            }
            Job::Truncate => {
                self.truncate_lane(&mut own).await;
                Ok(Committed { version: None })
            }
        };
        self.lanes[lane].replace(own);
        done
    }

    async fn run(&self, lane: &mut Lane, transaction: Transaction) -> Result<Committed, TxnError> {
        if self.session.is_given_up() {
            return Err(TxnError::Lost);
        }
        self.site.fetch_keys().await?;
        let places = self.places(&transaction).await?;
        let parts = self.parts(&transaction, &places);
        if transaction.writes.is_empty() {
            if !mutants::DOOMED_RETURNED.is_on() {
                self.validate(lane, &parts).await?;
            }
            return Ok(Committed { version: None });
        }
        let txn = TxnId::new(self.session.entry(lane.number), lane.count + 1).ok_or(TxnError::TooOld)?;
        lane.count += 1;
        if mutants::VALIDATED_EARLY.is_on() {
            self.validate(lane, &parts).await?;
        }
        let stamp = 1 + self.lock(lane, &parts, txn).await?;
        if !mutants::VALIDATED_EARLY.is_on()
            && let Err(error) = self.validate(lane, &parts).await
        {
            let holds: Vec<usize> =
                parts.iter().filter(|part| !part.writes.is_empty()).map(|part| part.shard).collect();
            self.abort(lane, &holds, txn).await;
            return Err(error);
        }
        if mutants::PRIMARY_BEFORE_BACKUPS.is_on() {
            self.commit_primaries(lane, &parts, txn, stamp).await?;
            self.commit_backups(lane, &parts, txn, stamp).await?;
        } else {
            self.commit_backups(lane, &parts, txn, stamp).await?;
            self.commit_primaries(lane, &parts, txn, stamp).await?;
        }
        Ok(Committed { version: Some(Version(stamp)) })
    }

    /// Returns an object for each key of a transaction. Claims objects for keys that have none.
    async fn places(&self, transaction: &Transaction) -> Result<BTreeMap<Vec<u8>, Place>, TxnError> {
        let unread = transaction.writes.keys().filter(|key| !transaction.reads.contains_key(*key));
        let unread: Vec<&[u8]> = unread.map(Vec::as_slice).collect();
        let found = match unread.is_empty() {
            true => Vec::new(),
            false => self.look_up(&unread, Wanted::Place).await?,
        };
        let read = transaction.reads.iter().map(|(key, seen)| (key.as_slice(), seen.place));
        let found = unread.into_iter().zip(found.into_iter().map(|seen| seen.place));
        let (mut places, mut unclaimed) = (BTreeMap::new(), Vec::new());
        for (key, place) in read.chain(found) {
            match place {
                Some(place) => _ = places.insert(key.to_vec(), place),
                None => unclaimed.push(key),
            }
        }
        for (key, claimed) in unclaimed.iter().zip(all(unclaimed.iter().map(|key| self.claim(key))).await) {
            places.insert(key.to_vec(), claimed?);
        }
        Ok(places)
    }

    /// Divides a transaction among the primaries.
    fn parts(&self, transaction: &Transaction, places: &BTreeMap<Vec<u8>, Place>) -> Vec<Part> {
        let members = 0..self.site.shards.len();
        let mut parts: Vec<Part> = members.map(|shard| Part { shard, ..Part::default() }).collect();
        for (key, value) in &transaction.writes {
            let Place { shard, object } = places[key];
            let expected = transaction.reads.get(key).map_or(ANY_VERSION, |seen| seen.version);
            let write = Write { object, expected, key, value: value.as_deref() };
            write.encode(&mut parts[shard].writes);
        }
        for (key, seen) in transaction.reads.iter().filter(|(key, _)| !transaction.writes.contains_key(*key))
        {
            let Place { shard, object } = places[key];
            let check = Check { object: U64::new(object), version: U64::new(seen.version) };
            parts[shard].checks.push(check);
        }
        parts.retain(|part| !part.writes.is_empty() || !part.checks.is_empty());
        parts
    }

    /// Members that have backups of a part, with the backup's part of their records.
    fn backups(&self, part: &Part) -> impl Iterator<Item = (usize, u8)> {
        let (shard, backups) = (part.shard, self.site.shards[part.shard].spec().backups);
        (1..=backups).map(move |number| (self.site.backup_of(shard, number), number))
    }

    /// Locks all objects that a transaction writes. Meanwhile, makes place for its records at the backups. Returns the
    /// highest stamp of these objects.
    ///
    /// # Errors
    /// [`TxnError`]; no lock is left, or the client has given up.
    async fn lock(&self, lane: &mut Lane, parts: &[Part], txn: TxnId) -> Result<u64, TxnError> {
        let mut is_backup = vec![false; lane.shards.len()];
        let written = || parts.iter().filter(|part| !part.writes.is_empty());
        written().flat_map(|part| self.backups(part)).for_each(|(member, _)| is_backup[member] = true);
        let requests = lane.shards.iter_mut().enumerate().filter_map(|(shard, own)| {
            let part = written().find(|part| part.shard == shard);
            let needs_place = is_backup[shard] && (own.behind != TxnId::NONE || own.stray.is_some());
            (part.is_some() || needs_place)
                .then_some(async move { (shard, self.lock_at(shard, own, part, txn).await) })
        });
        let (mut stamp, mut holds, mut failure) = (0, Vec::new(), None);
        for (shard, outcome) in all(requests).await {
            let may_hold = match outcome {
                Ok(of_member) => {
                    stamp = stamp.max(of_member);
                    true
                }
                Err((may_hold, error)) => {
                    failure.get_or_insert(error);
                    may_hold
                }
            };
            if may_hold && written().any(|part| part.shard == shard) {
                holds.push(shard);
            }
        }
        let Some(error) = failure else { return Ok(stamp) };
        self.abort(lane, &holds, txn).await;
        Err(error)
    }

    /// Locks the objects of a part, if there is one, and truncates the lane's records at this member. The error is that
    /// of the call, and the flag says whether the transaction may have locks there.
    async fn lock_at(
        &self,
        shard: usize,
        own: &mut LaneShard,
        part: Option<&Part>,
        txn: TxnId,
    ) -> Result<u64, (bool, TxnError)> {
        if let Some(stray) = own.stray {
            let patience = PATIENCE.max(2 * self.session.joined.silence);
            let goes_on = || !self.session.is_given_up();
            let ended =
                self.site.end_session(shard, stray, self.session.joined.silence, (patience, goes_on)).await;
            ended.map_err(|error| (false, error))?;
            own.stray = None;
        }
        let behind = if mutants::RECORD_OVERWRITTEN.is_on() { TxnId::NONE } else { own.behind };
        let request = match part {
            Some(part) => Request::Lock { txn, truncate: behind, writes: &part.writes },
            None => Request::Truncate { txn: behind },
        };
        let answer = self.site.call(shard, &mut own.buffers, &request).await;
        let answer = answer.map_err(|error| (error.ran() != Ran::No, TxnError::of_read(error)))?;
        match answer.outcome {
            Outcome::Done => {
                own.behind = TxnId::NONE;
                Ok(if part.is_some() { answer.number } else { 0 })
            }
            Outcome::Conflict => {
                let owner = TxnId::of_bits(answer.number);
                own.behind = TxnId::NONE;
                self.session.suspect(owner.client());
                Err((false, TxnError::Conflict))
            }
            _ => Err((false, TxnError::Damaged("the log of a lane was changed by another client"))),
        }
    }

    /// Checks that the objects that were read and are not written have the versions that were read, and no locks.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not commit.
    async fn validate(&self, lane: &mut Lane, parts: &[Part]) -> Result<(), TxnError> {
        let read = || parts.iter().filter(|part| !part.checks.is_empty());
        let of = of_parts(&mut lane.shards, read().map(|part| part.shard));
        let validations = of.into_iter().zip(read()).map(|(own, part)| self.validate_at(own, part));
        all(validations).await.into_iter().collect()
    }

    async fn validate_at(&self, own: &mut LaneShard, part: &Part) -> Result<(), TxnError> {
        let shard = &self.site.shards[part.shard];
        if part.checks.len() > READS_MAX {
            for checks in part.checks.chunks(CHECKS_PER_CALL) {
                let request = Request::Validate { checks };
                let answer = self.site.call(part.shard, &mut own.buffers, &request).await;
                let answer = answer.map_err(TxnError::of_read)?;
                if answer.outcome != Outcome::Done {
                    self.session.suspect(TxnId::of_bits(answer.number).client());
                    return Err(TxnError::Conflict);
                }
            }
            return Ok(());
        }
        let Buffers { chain: buffer, reply, .. } = &mut own.buffers;
        let mut chain = buffer.begin(shard.key());
        let header = |check: &Check| chain.also(read_as::<Header>(shard.table.object(0, check.object.get())));
        let outs: Vec<Out<Header>> = part.checks.iter().map(header).collect();
        self.site.fabric.run(shard.node, &chain, reply).await.map_err(TxnError::of_read)?;
        for (check, out) in part.checks.iter().zip(outs) {
            let header = reply.get(out).map_err(TxnError::Refused)?;
            let is_locked = header.is_locked() && !mutants::LOCK_IGNORED.is_on();
            if is_locked || header.version() != check.version.get() {
                if header.is_locked() {
                    self.session.suspect(header.owner.client());
                }
                return Err(TxnError::Conflict);
            }
        }
        Ok(())
    }

    /// Frees the locks of a transaction that does not commit, at these members. If this fails, the client gives up:
    /// others free them.
    async fn abort(&self, lane: &mut Lane, holds: &[usize], txn: TxnId) {
        let of = of_parts(&mut lane.shards, holds.iter().copied());
        let aborts = of.into_iter().zip(holds).map(|(own, shard)| async move {
            let goes_on = || !self.session.is_given_up();
            let abort = async || self.site.settle(*shard, &mut own.buffers, &Request::Abort { txn }).await;
            self.site.persist(PATIENCE, goes_on, abort).await
        });
        if all(aborts).await.iter().any(Result::is_err) {
            self.session.give_up();
        }
    }

    /// Writes the record of a transaction at all backups of all primaries.
    ///
    /// # Errors
    /// [`TxnError`]; if no record may have been written, the transaction is aborted. Else the client has given up.
    async fn commit_backups(
        &self,
        lane: &mut Lane,
        parts: &[Part],
        txn: TxnId,
        stamp: u64,
    ) -> Result<(), TxnError> {
        let entry = self.session.entry(lane.number);
        let written = || parts.iter().filter(|part| !part.writes.is_empty());
        let records: Vec<Record<'_>> = written()
            .flat_map(|part| {
                let header = RecordHeader::new(txn, stamp, &part.writes);
                self.backups(part).map(move |(shard, number)| Record {
                    shard,
                    number,
                    header,
                    writes: &part.writes,
                })
            })
            .collect();
        if records.is_empty() {
            return Ok(());
        }
        records.iter().for_each(|record| lane.shards[record.shard].behind = txn);
        let strays = RefCell::new(Vec::new());
        let write_all = async || {
            let outcomes: Vec<Phase> =
                all(records.iter().map(|record| self.write_record(entry, record))).await;
            let unknown =
                records.iter().zip(&outcomes).filter(|(_, outcome)| matches!(outcome, Err((true, _))));
            strays.borrow_mut().extend(unknown.map(|(record, _)| {
                let session = self.site.fabric.session_number(self.site.shards[record.shard].node);
                (record.shard, (session, self.site.fabric.now()))
            }));
            outcomes
        };
        let outcomes = write_all().await;
        if outcomes.iter().all(|outcome| matches!(outcome, Err((false, _)))) {
            records.iter().for_each(|record| lane.shards[record.shard].behind = TxnId::NONE);
            let holds: Vec<usize> = written().map(|part| part.shard).collect();
            self.abort(lane, &holds, txn).await;
            return Err(first_error(outcomes).unwrap_or(TxnError::Conflict));
        }
        let written = match first_error(outcomes) {
            None => Ok(()),
            Some(_) => {
                let goes_on = || !self.session.is_given_up();
                let again = async || first_error(write_all().await).map_or(Ok(()), Err);
                self.site.persist(PATIENCE, goes_on, again).await
            }
        };
        for (shard, stray) in strays.take() {
            lane.shards[shard].stray = Some(stray);
        }
        written.map_err(|error| self.left(error))
    }

    async fn write_record(&self, entry: EntryId, record: &Record<'_>) -> Phase {
        let shard = &self.site.shards[record.shard];
        let number = shard.table.number(entry).ok_or((false, TxnError::Lost))?;
        let at = shard.table.record(number, record.number);
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(shard.key());
        chain.also(write(at, record.header.as_bytes()));
        chain.also(write(at.plus(RECORD_SIZE as u64), record.writes));
        match self.site.fabric.run(shard.node, &chain, &mut reply).await {
            Ok(()) if reply.verdict() == Status::Ok => Ok(()),
            Ok(()) => Err((true, TxnError::Refused(reply.verdict()))),
            Err(error) => Err((error.ran() != Ran::No, TxnError::of_read(error))),
        }
    }

    /// Installs the values of a transaction at its primaries.
    ///
    /// # Errors
    /// [`TxnError`]; if no primary may have installed a value, and there are no backups, the transaction is aborted.
    /// Else the client has given up.
    async fn commit_primaries(
        &self,
        lane: &mut Lane,
        parts: &[Part],
        txn: TxnId,
        stamp: u64,
    ) -> Result<(), TxnError> {
        let holds: Vec<usize> =
            parts.iter().filter(|part| !part.writes.is_empty()).map(|part| part.shard).collect();
        let request = Request::Commit { txn, stamp };
        let outcomes = self.install_all(lane, &holds, &request).await;
        let has_backups = self.site.shards[0].spec().backups > 0;
        if !has_backups && outcomes.iter().all(|outcome| matches!(outcome, Err((false, _)))) {
            self.abort(lane, &holds, txn).await;
            return Err(first_error(outcomes).unwrap_or(TxnError::Conflict));
        }
        if first_error(outcomes).is_none() {
            return Ok(());
        }
        let goes_on = || !self.session.is_given_up();
        let again = async || first_error(self.install_all(lane, &holds, &request).await).map_or(Ok(()), Err);
        self.site.persist(PATIENCE, goes_on, again).await.map_err(|error| self.left(error))
    }

    async fn install_all(&self, lane: &mut Lane, holds: &[usize], request: &Request<'_>) -> Vec<Phase> {
        let of = of_parts(&mut lane.shards, holds.iter().copied());
        let installs = of.into_iter().zip(holds).map(|(own, shard)| async move {
            match self.site.settle(*shard, &mut own.buffers, request).await {
                Ok(Outcome::Done) => Ok(()),
                Ok(_) => Err((true, TxnError::Damaged("the log of a lane was changed by another client"))),
                Err(error) => Err((error.ran() != Ran::No, error)),
            }
        });
        all(installs).await
    }

    /// Leaves a transaction that may be committed to the recoverers of this client.
    fn left(&self, error: TxnError) -> TxnError {
        self.session.give_up();
        TxnError::Unknown(Box::new(error))
    }

    /// Has the backups apply the records of a lane. Returns whether all have done so.
    async fn truncate_lane(&self, lane: &mut Lane) -> bool {
        if self.session.is_given_up() || self.site.fetch_keys().await.is_err() {
            return false;
        }
        let truncations = lane.shards.iter_mut().enumerate().map(|(shard, own)| async move {
            if own.behind != TxnId::NONE {
                let request = Request::Truncate { txn: own.behind };
                self.site.settle(shard, &mut own.buffers, &request).await?;
                own.behind = TxnId::NONE;
            }
            Ok::<(), TxnError>(())
        });
        all(truncations).await.iter().all(Result::is_ok)
    }

    /// Truncates the records of lanes without a job from time to time.
    pub(super) async fn keep_truncating(&self) {
        loop {
            self.site.fabric.sleep(self.site.lease() / 4).await;
            for (number, lane) in self.lanes.iter().enumerate() {
                let is_behind = lane.borrow().is_behind();
                if is_behind {
                    let _else_the_lane_is_used = self.desk.jobs.carry_out_on(number, Job::Truncate).await;
                }
            }
        }
    }

    /// Truncates the records of all lanes. The client has no job. If a backup does not answer, or a record may yet
    /// arrive there, the client gives up: a recoverer does the rest once the lease has expired.
    pub(super) async fn truncate_all(&self) {
        for lane in &self.lanes {
            let mut own = lane.take();
            let is_stray = own.shards.iter().any(|own| own.stray.is_some());
            if !self.truncate_lane(&mut own).await || is_stray {
                self.session.give_up();
            }
            lane.replace(own);
        }
    }
}

/// A record for a backup.
struct Record<'p> {
    /// Index of the backup.
    shard: usize,
    /// Number of the backup's part.
    number: u8,
    header: RecordHeader,
    writes: &'p [u8],
}

fn first_error(outcomes: Vec<Phase>) -> Option<TxnError> {
    outcomes.into_iter().find_map(Result::err).map(|(_, error)| error)
}

/// Returns what a lane keeps for these members, which are in ascending order.
fn of_parts(shards: &mut [LaneShard], members: impl Iterator<Item = usize>) -> Vec<&mut LaneShard> {
    let mut members = members.peekable();
    let of = shards.iter_mut().enumerate();
    of.filter_map(|(shard, own)| members.next_if_eq(&shard).map(|_| own)).collect()
}
