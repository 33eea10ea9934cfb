//! Puts and deletes that a log has, and a memory that was kept never had.
//!
//! A put takes a place for its value, and its record is in the log before it is installed. If the node dies in between,
//! or the sync of the log fails, the put is never answered. The next node believes the memory: the key still has the
//! value before, and the place is free. Replayed as it is, the log would give the place to the put. So a later value
//! that was answered could lose its place, and the value before as well.
//!
//! So the node takes such records back when it starts: it logs again what the memory has in their buckets, with its
//! stamps, before any other record.
//!
//! Invariant: behind these records, a replay has each key and each value where the memory has it, as far as the log
//! has all contents.

use super::super::layout::{Bucket, Stamp};
use super::super::log::{self, Logged};
use super::super::mutants;
use super::At;
use super::checkpoint::CHECKPOINT_STEP_BYTES;
use farside_remote::Memory;
use farside_remote::service::Records;
use std::collections::BTreeMap;

/// The newest record of each bucket that the memory lacks: the key and the stamp, by bucket.
pub(super) type Unanswered = BTreeMap<u64, (Vec<u8>, Stamp)>;

impl<M: Memory> At<'_, M> {
    /// Remembers a record of the log if its bucket has neither it nor a later one, until it is taken back.
    pub(super) fn compare(&mut self, logged: &Logged<'_>) -> Result<(), M::Wait> {
        let &Logged { stamp, key, bucket, takes_back, .. } = logged;
        if self.table.step_of(self.table.home(key), bucket).is_none() {
            return Ok(()); // No put of this store.
        }
        if takes_back {
            self.state.unanswered.remove(&bucket);
        } else if self.record(bucket)?.written() < Some(stamp) && !mutants::UNANSWERED_LEFT_IN_LOG.is_on() {
            self.state.unanswered.insert(bucket, (key.to_vec(), stamp));
        }
        Ok(())
    }

    /// Adds records that take back those which were remembered. Returns whether it has ended early, because it has
    /// added enough for a step.
    pub(super) fn take_back(&mut self, records: &mut Records) -> Result<bool, M::Wait> {
        while let Some((bucket, (key, stamp))) = self.state.unanswered.pop_first() {
            let mut of_bucket = Records::default();
            if let Bucket::Used(used) = self.record(bucket)?.decode() {
                self.add(bucket, used.stamp, (used.block, used.crc_value), &used.key, &mut of_bucket)?;
            }
            if of_bucket.is_empty() {
                log::put_delete(self.scratch, stamp, &key, bucket);
                of_bucket.append(self.scratch);
            }
            for record in of_bucket.iter() {
                let mut record = record.to_vec();
                log::set_takes_back(&mut record);
                records.append(&record);
            }
            if records.size() >= CHECKPOINT_STEP_BYTES {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
