//! The replay of a store's log into memory without contents.
//!
//! The log has the puts and deletes of the memory that is lost, with the bucket of each key and the place of each
//! value. If each record was synced before its answer, the result is what that memory had. Each record then follows
//! those that freed its place, as the service took the place after them. Of a put that was never answered, either no
//! record follows, or the next node has taken it back before all others (`take_back`). So nothing that was answered is
//! dropped.
//!
//! A checkpoint contains values that were read at different times, so a place may be in use until the records that
//! follow are replayed. If records were not synced before their answers, the log may lack some for good: see
//! `replayed`.
//!
//! Invariant: a key has one record at most, and one put at most that waits for its place.
//! Invariant: no two records have blocks that overlap.

use super::super::layout::{BLOCK_ALIGN, Block, Bucket, Record, Stamp, Table, Used, crc, value_in};
use super::super::log::Logged;
use super::super::mutants;
use super::super::pool::{self, ClaimError, Pool, QUARANTINE};
use super::{At, Operation, of_pool, record_of};
use farside_remote::Memory;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Reasons why a log cannot be replayed.
pub(super) const NO_BUCKET: &str = "a record names a bucket in which no search for its key looks, so the log is of \
                                    another store, or of another release";
const NO_PLACE: &str = "a record names a place at which no value can lie, so the log is of another store, or of \
                        another release";

/// The puts of the log whose places were in use during its replay. Values that are replaced or deleted later in the log
/// have them: a checkpoint contains values that were read at different times. Each bucket has one at most, and so has
/// each key.
#[derive(Default)]
pub(super) struct Lates {
    by_bucket: BTreeMap<u64, Late>,
    bucket_of: BTreeMap<Vec<u8>, u64>,
}

impl Lates {
    fn add(&mut self, bucket: u64, late: Late) {
        self.remove(bucket);
        self.bucket_of.insert(late.key.clone(), bucket);
        self.by_bucket.insert(bucket, late);
    }

    fn remove(&mut self, bucket: u64) {
        if let Some(late) = self.by_bucket.remove(&bucket) {
            self.bucket_of.remove(&late.key);
        }
    }

    fn stamp(&self, bucket: u64) -> Option<Stamp> {
        self.by_bucket.get(&bucket).map(|late| late.stamp)
    }
}

/// A put of the log that could not be carried out yet.
struct Late {
    stamp: Stamp,
    key: Vec<u8>,
    place: u64,
    bytes: Vec<u8>,
}

/// Checks that a replay would accept a record: its bucket is on the path of its key, and a value can lie at its place.
pub(super) fn check(table: &Table, pool: &Pool, logged: &Logged<'_>) -> Result<(), String> {
    let home = table.home(logged.key);
    if table.step_of(home, logged.bucket).is_none() {
        return Err(NO_BUCKET.to_owned());
    }
    let at = table.area(home.partition).start + logged.place * BLOCK_ALIGN;
    match logged.block {
        Some(block) if !pool.has_place(pool::Block { at, len: block.len() as u64 }) => {
            Err(NO_PLACE.to_owned())
        }
        _ => Ok(()),
    }
}

impl<M: Memory> At<'_, M> {
    /// Carries out a record of the log. No client reads meanwhile.
    ///
    /// The record of a bucket with the greatest stamp stays, unless a later one takes it back. The bucket had no two
    /// keys at once: it got another key only after the delete of the key before it was logged, with a smaller stamp.
    /// The log may lack that delete, and so that of a key which is in another bucket later. The newer record stays
    /// there, too.
    pub(super) fn replay(&mut self, logged: Logged<'_>) -> Result<Result<(), String>, M::Wait> {
        let Logged { stamp, key, bucket, block: bytes, place, takes_back } = logged;
        let found = if mutants::REPLAYED_IN_ANOTHER_BUCKET.is_on() {
            let found = self.find(key)?;
            found.bucket.or(found.vacant)
        } else {
            self.table.step_of(self.table.home(key), bucket).map(|_| bucket)
        };
        let Some(bucket) = found else { return Ok(Err(NO_BUCKET.to_owned())) };
        let before = self.record(bucket)?;
        let now = before.written().max(self.state.late.stamp(bucket));
        let is_old =
            if mutants::REPLAYED_OUT_OF_ORDER.is_on() { now > Some(Stamp(0)) } else { now >= Some(stamp) };
        self.state.pass(stamp);
        if !is_old || takes_back {
            // The memory had the key in this bucket alone. That another one has no value says nothing of the key.
            let than = if takes_back { Stamp(u64::MAX) } else { stamp };
            let is_newest = takes_back && bytes.is_none()
                || self.leave_other_bucket(key, bucket, than)? && self.leave_late(key, bucket, than)?;
            let bytes = bytes.filter(|_| is_newest);
            let value = bytes.map(|bytes| (Some(place), bytes));
            match self.restore(stamp, key, bucket, value, before.used_block())? {
                Ok(()) => self.state.late.remove(bucket),
                Err(ClaimError::Overlaps) => {
                    let bytes = bytes.unwrap_or_default().to_vec();
                    self.state.late.add(bucket, Late { stamp, key: key.to_vec(), place, bytes });
                }
                Err(_) => return Ok(Err(NO_PLACE.to_owned())),
            }
        }
        Ok(Ok(()))
    }

    /// Installs a put or delete of the log in its bucket: `value` has the place of the value's block, unless any place
    /// will do, and the block. `before` is the block of the value that the bucket has. Returns the inner error and
    /// changes nothing if the value cannot lie there.
    ///
    /// In the order of the log the place is free. When the service took the block, it had logged and installed the put
    /// or delete that replaced the value which lay there before.
    fn restore(
        &mut self,
        stamp: Stamp,
        key: &[u8],
        bucket: u64,
        value: Option<(Option<u64>, &[u8])>,
        before: Option<Block>,
    ) -> Result<Result<(), ClaimError>, M::Wait> {
        let mut placed = None;
        if let Some((place, bytes)) = value {
            let claimed = match place.filter(|_| !mutants::REPLAYED_ELSEWHERE.is_on()) {
                Some(place) => self.state.claim(self.block_at(place, bytes.len())),
                None => self.state.take(bytes.len(), QUARANTINE).ok_or(ClaimError::Overlaps),
            };
            let block = match claimed {
                Ok(block) => block,
                Err(error) => return Ok(Err(error)),
            };
            self.memory.write(block.at, bytes)?;
            placed = Some((block, crc(bytes)));
            self.mark_path(key, bucket)?;
        }
        let change = self.change(bucket, key, Operation { stamp, value: placed }, true);
        self.install(bucket, record_of(self.table, &change))?;
        self.state.begun.block = None;
        if let Some(block) = before {
            // No client reads, so the next record may have the place.
            let _ = self.state.pool.vacate(of_pool(block));
        }
        Ok(Ok(()))
    }

    /// Marks the buckets before that of `key` on its path as deleted, if they look as if they never had a record: a
    /// search ends there. They had records whose deletes were before the log, or whose puts failed.
    fn mark_path(&mut self, key: &[u8], bucket: u64) -> Result<(), M::Wait> {
        let (home, field) = (self.table.home(key), self.table.key_field(key));
        for step in 0..self.table.probes() {
            let first = self.table.bucket_of(home, step);
            let (records, count) = self.block(first)?;
            for (before, record) in (first..).zip(&records[..count]) {
                if before == bucket {
                    return Ok(());
                }
                if record.decode() == Bucket::Never {
                    self.install(before, Record::deleted(field, Stamp(0)))?;
                }
            }
        }
        Ok(())
    }

    /// Ends the replay of the log: writes the last stamp to the head, since no record may have it, and carries out the
    /// puts whose places were in use before. Returns the number of values that were dropped.
    ///
    /// Each of these puts is the last of its bucket, and so are those in the table. So no two have the same place,
    /// unless the log lacks what replaced a value, or a client has forged records. Such a value gets another place. If
    /// none is free, the newer one stays, whose place was free when it was put; of the other one's key, the value
    /// before stays, if nothing lies in its place yet.
    pub(super) fn replayed(&mut self) -> Result<u64, M::Wait> {
        self.write_head(self.state.last)?;
        let mut late = Vec::new();
        for (bucket, put) in std::mem::take(&mut self.state.late).by_bucket {
            // One late put may have the place of the value that another one replaces.
            let before = match self.record(bucket)?.decode() {
                Bucket::Used(used) => Some(used),
                _ => None,
            };
            if let Some(used) = before {
                self.remove(bucket, used)?;
            }
            late.push((bucket, put, before));
        }
        late.sort_unstable_by_key(|(_, put, _)| Reverse(put.stamp));
        let (mut homeless, mut dropped) = (Vec::new(), 0);
        for (bucket, put, before) in late {
            let Late { stamp, ref key, place, ref bytes } = put;
            if !self.leave_other_bucket(key, bucket, stamp)? {
                self.install(bucket, Record::deleted(self.table.key_field(key), stamp))?;
            } else if self.restore(stamp, key, bucket, Some((Some(place), bytes)), None)?.is_err() {
                homeless.push((bucket, put, before));
            }
        }
        for (bucket, Late { stamp, key, place, bytes }, before) in homeless {
            if self.restore(stamp, &key, bucket, Some((None, &bytes)), None)?.is_ok() {
                continue;
            }
            if let Some(removed) = self.make_room(stamp, self.block_at(place, bytes.len()))? {
                dropped += removed;
                if self.restore(stamp, &key, bucket, Some((Some(place), &bytes)), None)?.is_ok() {
                    continue;
                }
            }
            dropped += 1;
            if !self.bring_back(bucket, &key, before)? {
                self.install(bucket, Record::deleted(self.table.key_field(&key), stamp))?;
            }
        }
        Ok(dropped)
    }

    /// Installs the value that a bucket had before a late put of the same key, unless its bytes are gone. Returns
    /// whether it did.
    fn bring_back(&mut self, bucket: u64, key: &[u8], before: Option<Used>) -> Result<bool, M::Wait> {
        let Some(used) = before.filter(|used| used.key == self.table.key_field(key)) else {
            return Ok(false);
        };
        if self.state.claim(used.block).is_err() {
            return Ok(false);
        }
        self.state.begun.block = None;
        let mut bytes = vec![0; used.block.len as usize];
        self.memory.read(used.block.at, &mut bytes)?;
        if crc(&bytes) != used.crc_value || value_in(&bytes, key).is_none() {
            let _ = self.state.pool.vacate(of_pool(used.block));
            return Ok(false);
        }
        self.install(bucket, Record::used(used))?;
        Ok(true)
    }

    /// Drops the put of `key` that waits for its place in another bucket. Returns false and changes nothing if it is
    /// newer than `stamp`.
    fn leave_late(&mut self, key: &[u8], bucket: u64, stamp: Stamp) -> Result<bool, M::Wait> {
        let other = self.state.late.bucket_of.get(key).copied().filter(|other| *other != bucket);
        let Some((other, late)) = other.and_then(|other| Some((other, self.state.late.stamp(other)?))) else {
            return Ok(true);
        };
        if late > stamp {
            return Ok(false);
        }
        self.state.late.remove(other);
        if let Bucket::Used(before) = self.record(other)?.decode() {
            self.remove(other, before)?;
        }
        self.install(other, Record::deleted(self.table.key_field(key), late))?;
        Ok(true)
    }

    /// Removes the value that `key` has in another bucket. Returns false and changes nothing if it is newer than
    /// `stamp`.
    fn leave_other_bucket(&mut self, key: &[u8], bucket: u64, stamp: Stamp) -> Result<bool, M::Wait> {
        let found = self.find(key)?;
        let Some((other, used)) = found.bucket.zip(found.used).filter(|(other, _)| *other != bucket) else {
            return Ok(true);
        };
        if used.stamp > stamp {
            return Ok(false);
        }
        self.remove(other, used)?;
        Ok(true)
    }

    /// Removes the values that lie where a value with this stamp lay, if they are all older. Returns their number, or
    /// `None` if one is newer.
    fn make_room(&mut self, stamp: Stamp, block: Block) -> Result<Option<u64>, M::Wait> {
        let mut older = Vec::new();
        for bucket in 0..self.table.spec().buckets() {
            let record = self.record(bucket)?;
            if let Bucket::Used(used) = record.decode()
                && self.state.pool.overlap(of_pool(used.block), of_pool(block))
            {
                if used.stamp >= stamp {
                    return Ok(None);
                }
                older.push((bucket, used));
            }
        }
        let removed = older.len() as u64;
        older.into_iter().try_for_each(|(bucket, used)| self.remove(bucket, used))?;
        Ok(Some(removed))
    }

    /// Removes a value during the replay of a log. No client reads.
    fn remove(&mut self, bucket: u64, used: Used) -> Result<(), M::Wait> {
        self.install(bucket, Record::deleted(used.key, used.stamp))?;
        let _ = self.state.pool.vacate(of_pool(used.block));
        Ok(())
    }
}
