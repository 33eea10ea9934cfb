//! Numbers of a store, and what transactions must not leave behind.

use super::layout::{HEADER_SIZE, Item, Slot, State};
use super::site::Site;
use super::{Client, PrismTx};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::{Addr, ChainBuf, Fabric, Out, Reply, Status, read, read_as};

/// Number of slots that one chain reads.
const SLOTS_PER_CHAIN: u64 = 20;
/// Scratch addresses of a slot, and of the address in it.
const TMP: Addr = Addr::scratch(0);
const TMP_ADDRESS: Addr = Addr::scratch(24);

/// Numbers of a store. If other clients change it meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Number of slots.
    pub slots: u64,
    /// Number of slots that keys have.
    pub keys: u64,
    /// Number of keys with a value.
    pub values: u64,
    /// Number of keys with PW != C: a transaction is between its prepare and its end there.
    pub unsettled: u64,
    /// Number of log entries that are ACTIVE or DECIDED.
    pub open: u64,
    /// Number of log entries that are DONE.
    pub done: u64,
}

impl<F: Fabric + Clock> PrismTx<F> {
    /// Reads the numbers of the store. Reads the whole table.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub async fn stat(&self) -> Result<Stat, TxnError> {
        let Client { site, .. } = &*self.client;
        site.fetch_keys().await?;
        let mut stat = Stat::default();
        for shard in 0..site.shards.len() {
            site.add_shard(shard, &mut stat).await?;
        }
        Ok(stat)
    }
}

impl<F: Fabric + Clock> Site<F> {
    async fn add_shard(&self, shard: usize, stat: &mut Stat) -> Result<(), TxnError> {
        let table = &self.shards[shard];
        for word in self.words(shard, 0, table.spec().entries()).await? {
            stat.open += u64::from(word.is_unsettled());
            stat.done += u64::from(word.state() == Some(State::Done));
        }
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let slots = table.spec().slots;
        for first in (0..slots).step_by(SLOTS_PER_CHAIN as usize) {
            let mut chain = buffer.begin(table.key());
            let mut outs: Vec<(Out<Slot>, Out<[u8]>)> = Vec::new();
            for slot in first..slots.min(first + SLOTS_PER_CHAIN) {
                chain.also(read_as::<Slot>(table.slot(slot)).redirect(TMP));
                let of = chain.also(read_as::<Slot>(TMP));
                outs.push((of, chain.then(read(TMP_ADDRESS, HEADER_SIZE as u32).indirect())));
            }
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
            for (slot, item) in outs {
                let slot = reply.get(slot).map_err(TxnError::Refused)?;
                stat.slots += 1;
                stat.unsettled += u64::from(!slot.is_settled());
                match reply.status(item) {
                    Status::NullPointer => {}
                    Status::Ok => {
                        let bytes = reply.get(item).map_err(TxnError::Refused)?;
                        let has_value =
                            Item::has_value(bytes).ok_or(TxnError::Damaged("a slot without an item"))?;
                        stat.keys += 1;
                        stat.values += u64::from(has_value);
                    }
                    status => return Err(TxnError::Refused(status)),
                }
            }
        }
        Ok(())
    }
}
