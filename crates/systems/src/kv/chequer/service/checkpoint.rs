//! The records of a checkpoint of a store's log: they recreate what the table has, and what is about to be installed.

use super::super::layout::{Block, Bucket, KeyField, Stamp, crc, value_in};
use super::super::{log, mutants};
use super::{At, Operation};
use farside_remote::Memory;
use farside_remote::service::Records;

/// A step of a checkpoint ends with the value with which its records have at least this many bytes.
pub(super) const CHECKPOINT_STEP_BYTES: usize = 256 << 10;

impl<M: Memory> At<'_, M> {
    /// Adds records that recreate some buckets, from `bucket` on. Returns the bucket after them. The partition is
    /// locked meanwhile, so the step is short: it ends once it has copied [`CHECKPOINT_STEP_BYTES`].
    pub(super) fn checkpoint(&mut self, bucket: u64, records: &mut Records) -> Result<u64, M::Wait> {
        let first = bucket - bucket % self.table.spec().block_buckets;
        let (held, count) = self.block(first)?;
        let mut made = Records::default();
        let mut next = bucket;
        for (at, record) in (first..).zip(&held[..count]).skip((bucket - first) as usize) {
            next = at + 1;
            if let Bucket::Used(used) = record.decode()
                && self.table.contains(self.index, used.block)
            {
                self.add(at, used.stamp, (used.block, used.crc_value), &used.key, &mut made)?;
            }
            // Their records may be in a file that the checkpoint replaces, and they are installed after this step.
            if let Some(pending) = self.state.pending.get(&at) {
                // One that was replaced before it was installed has no effect, and the log may not say so any more.
                let is_effective = |operation: &&Operation| operation.stamp > pending.installed;
                let operations: Vec<Operation> =
                    pending.operations.iter().filter(is_effective).copied().collect();
                let key = pending.key.clone();
                for Operation { stamp, value } in operations {
                    match value {
                        Some(value) => self.add(at, stamp, value, &self.table.key_field(&key), &mut made)?,
                        None => {
                            log::put_delete(self.scratch, stamp, &key, at);
                            made.append(self.scratch);
                        }
                    }
                }
            }
            if made.size() >= CHECKPOINT_STEP_BYTES && !mutants::CHECKPOINT_STEP_UNBOUNDED.is_on() {
                break;
            }
        }
        // The newest stamp may be that of a delete, or of a put that has failed.
        let is_end = next == self.table.spec().buckets();
        if is_end && self.state.last > Stamp(0) && !mutants::CHECKPOINT_WITHOUT_STAMP.is_on() {
            log::put_last(self.scratch, self.state.last, self.index);
            made.append(self.scratch);
        }
        made.iter().for_each(|record| records.append(record));
        Ok(next)
    }

    /// Adds the record of a put with this value in a bucket, unless a client has overwritten the value or the record.
    pub(super) fn add(
        &mut self,
        bucket: u64,
        stamp: Stamp,
        (block, crc_value): (Block, u64),
        key: &KeyField,
        records: &mut Records,
    ) -> Result<(), M::Wait> {
        let mut bytes = vec![0; block.len as usize];
        self.memory.read(block.at, &mut bytes)?;
        let Some(key) = key.in_record().or_else(|| key.in_block(&bytes)) else { return Ok(()) };
        let home = self.table.home(key);
        let is_sound = crc(&bytes) == crc_value
            && value_in(&bytes, key).is_some()
            && stamp <= self.state.last
            && home.partition == self.index
            && self.table.step_of(home, bucket).is_some();
        if !is_sound {
            return Ok(());
        }
        log::begin_put(self.scratch, stamp, key, bucket, self.place_of(block));
        self.scratch.extend_from_slice(&bytes);
        records.append(self.scratch);
        Ok(())
    }
}
