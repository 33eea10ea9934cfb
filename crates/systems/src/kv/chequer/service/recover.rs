//! The state of a partition in memory that an earlier node has served: its allocator and its stamps.

use super::super::layout::{Bucket, REDO_OFFSET, Redo, Stamp};
use super::super::mutants;
use super::{At, of_pool};
use farside_remote::Memory;
use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

impl<M: Memory> At<'_, M> {
    /// Rebuilds the partition's state from some buckets, from `bucket` on, in memory that an earlier node has served.
    /// Returns the bucket after them.
    pub(super) fn recover(&mut self, bucket: u64) -> Result<u64, M::Wait> {
        if bucket == 0 {
            let mut head = [U64::ZERO; 2];
            self.memory.read(self.table.head_at(self.index), head.as_mut_bytes())?;
            // A client that holds the store's key may have written any numbers.
            let [epoch, counter] = head.map(U64::get);
            let counter = if mutants::LAST_COUNTER_FORGOTTEN.is_on() { 0 } else { counter };
            let last = Stamp::after(epoch, counter);
            self.write_head(last)?;
            self.state.last = last;
        }
        let (mut held, count) = self.block(bucket)?;
        for (bucket, record) in (bucket..).zip(&mut held[..count]) {
            if record.decode() != Bucket::Torn {
                continue;
            }
            let mut redo = Redo::new_zeroed();
            self.memory.read(self.table.head_at(self.index) + REDO_OFFSET, redo.as_mut_bytes())?;
            if let Some(meant) = redo.record_of(bucket) {
                *record = meant;
                self.memory.write(self.table.bucket_at(self.index, bucket), meant.as_bytes())?;
            }
        }
        for record in &held[..count] {
            let stamp = match record.decode() {
                Bucket::Used(used) => {
                    // A record that names a block of another was written by a client. Its CRC shows that to readers.
                    let _ = self.state.pool.claim(of_pool(used.block));
                    used.stamp
                }
                Bucket::Deleted => Stamp(record.stamp.get()),
                _ => continue,
            };
            let counter = self.state.last.counter().max(stamp.counter());
            self.state.last = Stamp::new(self.state.last.epoch(), counter);
        }
        if mutants::STAMPS_RESTART_WITH_SERVER.is_on() {
            self.state.last = Stamp(0);
        }
        Ok(bucket + count as u64)
    }
}
