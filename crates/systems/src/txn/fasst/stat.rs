//! Numbers of a store, and what transactions must not leave behind.

use super::layout::{BucketHead, Place, SlotHead, SlotKind};
use super::request::LaneState;
use super::site::Site;
use super::{Client, Fasst};
use crate::lease::ClientId;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::{Addr, ChainBuf, Fabric, Reply, read, read_as};
use zerocopy::{FromBytes, IntoBytes};

/// Numbers of a store. If other clients change it meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of slots of all members, without those of extra buckets.
    pub slots: u64,
    /// Number of slots that keys have.
    pub keys: u64,
    /// Number of keys with a value.
    pub values: u64,
    /// Number of buckets that are locked.
    pub locked: u64,
    /// Number of lanes with a transaction that is not settled, by member.
    pub open: u64,
    /// Number of copies whose content differs from that of their slot.
    pub outdated: u64,
}

impl<F: Fabric + Clock> Fasst<F> {
    /// Reads the numbers of the store. Reads all buckets and their copies, by chains.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub async fn stat(&self) -> Result<Stat, TxnError> {
        let Client { site, .. } = &*self.client;
        site.fetch_keys().await?;
        let mut stat = Stat::default();
        for client in (1..=site.shards[0].spec().ids).filter_map(ClientId::new) {
            let states = site.look_at_all(client, 0).await?;
            stat.open += states.iter().flatten().filter(|state: &&LaneState| state.is_open()).count() as u64;
        }
        for shard in 0..site.shards.len() {
            site.add_shard(shard, &mut stat).await?;
        }
        Ok(stat)
    }
}

impl<F: Fabric + Clock> Site<F> {
    async fn add_shard(&self, shard: usize, stat: &mut Stat) -> Result<(), TxnError> {
        let of = &self.shards[shard];
        stat.slots += of.spec().buckets * super::layout::SLOTS as u64;
        for bucket in 0..of.spec().all_buckets() {
            let head: BucketHead = self.read_of(shard, of.table.bucket(0, bucket)).await?;
            stat.locked += u64::from(head.lock.is_locked());
            for (slot, of_slot) in head.slots.iter().enumerate() {
                let place = Place { bucket, slot };
                stat.keys += u64::from(of_slot.kind() != SlotKind::Free);
                stat.values += u64::from(of_slot.kind() == SlotKind::Value);
                for part in 1..=of.spec().backups {
                    let backup = (shard + usize::from(part)) % self.shards.len();
                    let copy_at = self.shards[backup].table.slot(part, place);
                    let copy: SlotHead = self.read_of(backup, copy_at).await?;
                    let is_same = copy.is_like(*of_slot)
                        && (copy.kind() == SlotKind::Free
                            || self.pair(shard, 0, place, of_slot).await?
                                == self.pair(backup, part, place, &copy).await?);
                    stat.outdated += u64::from(!is_same);
                }
            }
        }
        Ok(())
    }

    /// Reads the key and the value of a slot, or of a copy.
    async fn pair(
        &self,
        member: usize,
        part: u8,
        place: Place,
        slot: &SlotHead,
    ) -> Result<Vec<u8>, TxnError> {
        let shard = &self.shards[member];
        let len =
            u32::from(slot.key_len.get()).saturating_add(slot.value_len.get()).min(shard.spec().pair_max);
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(shard.key());
        let pair = chain.also(read(shard.table.pair(part, place), len));
        self.fabric.run(shard.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
        Ok(reply.get(pair).map_err(TxnError::Refused)?.to_vec())
    }

    async fn read_of<
        T: FromBytes + IntoBytes + Copy + zerocopy::Immutable + zerocopy::KnownLayout + zerocopy::Unaligned,
    >(
        &self,
        member: usize,
        at: Addr,
    ) -> Result<T, TxnError> {
        let shard = &self.shards[member];
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(shard.key());
        let out = chain.also(read_as::<T>(at));
        self.fabric.run(shard.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
        Ok(*reply.get(out).map_err(TxnError::Refused)?)
    }
}
