//! Several keys at a time, and all of them in turn.

use super::layout::{ItemView, Kind, SLOT_SIZE, Slot};
use super::{PrismKv, READ_MAX};
use crate::kv::{Item, KvError, check_key};
use farside_remote::clock::Clock;
use farside_remote::wire::OPS_MAX;
use farside_remote::{BoundedPtr, Fabric, Status, read};
use zerocopy::FromBytes;

/// Slots read in one round trip of an iteration.
const SLOTS_PER_READ: u64 = 2048;

/// Where an iteration is. Survives the loss of the client that made it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    next_slot: u64,
    /// Of the slots that were read last, those that are not empty and not yet visited, in descending order.
    occupied: Vec<u64>,
    table_epoch: Option<u64>,
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// The values of several keys, each at some instant of this call. One round trip for as many of them as have
    /// their first slot and fit into one reply (64 KiB); the rest are asked for one by one.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub async fn get_many(
        &mut self,
        keys: &[&[u8]],
        mut visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        for key in keys {
            check_key(key)?;
        }
        let mut behind = Vec::new();
        for (batch, group) in keys.chunks(OPS_MAX).enumerate() {
            let mut chain = self.chain.begin(self.table.extent.key);
            let mut items = Vec::with_capacity(group.len());
            for key in group {
                let index = self.table.probe(key).next().expect("a table has a slot");
                items.push(chain.also(read(self.table.slot_at(index), READ_MAX).indirect().bounded()));
            }
            self.fabric.run(self.node, &chain, &mut self.reply).await?;
            for (place, (key, item)) in group.iter().zip(items).enumerate() {
                let index = batch * OPS_MAX + place;
                let bytes = match self.reply.get(item) {
                    Ok(bytes) => bytes,
                    Err(Status::TooLong) => {
                        behind.push(index);
                        continue;
                    }
                    Err(refused) => return Err(KvError::Refused(refused)),
                };
                if bytes.is_empty() {
                    visit(index, None);
                    continue;
                }
                let item = ItemView::decode(bytes)?;
                match item.kind {
                    Kind::Value if item.is_of(key) => {
                        visit(index, Some(Item { value: item.value()?, version: item.version() }));
                    }
                    Kind::Tombstone if item.is_of(key) => visit(index, None),
                    _ => behind.push(index),
                }
            }
        }
        for index in behind {
            let item = self.get(keys[index]).await?;
            visit(index, item);
        }
        Ok(())
    }

    /// Visits the next key with its value; false at the end. No snapshot: a key that is present all the while is
    /// visited exactly once; one that comes or goes meanwhile, once or never.
    ///
    /// # Errors
    /// [`KvError`]; the cursor stays where it was.
    pub async fn next(
        &mut self,
        cursor: &mut Cursor,
        mut visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        let epoch = *cursor.table_epoch.get_or_insert(self.table.spec.epoch);
        loop {
            if epoch != self.table.spec.epoch {
                return Err(KvError::Gone(
                    "the table was rebuilt during the iteration: begin it again".into(),
                ));
            }
            let Some(&index) = cursor.occupied.last() else {
                if !self.read_slots(cursor).await? {
                    return Ok(false);
                }
                continue;
            };
            let found = self.visit_slot(index, &mut visit).await?;
            cursor.occupied.pop();
            if found {
                return Ok(true);
            }
        }
    }

    /// Reads the next stretch of the table; false at its end.
    async fn read_slots(&mut self, cursor: &mut Cursor) -> Result<bool, KvError> {
        let (first, slots) = (cursor.next_slot, self.table.spec.slots);
        let count = SLOTS_PER_READ.min(slots.saturating_sub(first));
        if count == 0 {
            return Ok(false);
        }
        let mut chain = self.chain.begin(self.table.extent.key);
        let bytes = chain.also(read(self.table.slot_at(first), (count * SLOT_SIZE) as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        let bytes = self.reply.get(bytes).map_err(KvError::Refused)?;
        let occupied = bytes
            .chunks_exact(SLOT_SIZE as usize)
            .zip(first..)
            .filter(|(slot, _)| !Slot(BoundedPtr::read_from_bytes(slot).expect("a slot's size")).is_empty());
        cursor.occupied.extend(occupied.map(|(_, index)| index));
        cursor.occupied.reverse();
        cursor.next_slot = first + count;
        Ok(true)
    }

    /// Visits the key in a slot, if that has a value now.
    async fn visit_slot(
        &mut self,
        index: u64,
        visit: &mut impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let item = chain.also(read(self.table.slot_at(index), READ_MAX).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        let item = ItemView::decode(self.reply.get(item).map_err(KvError::Refused)?)?;
        match item.kind {
            Kind::Value => {
                visit(item.key, Item { value: item.value()?, version: item.version() });
                Ok(true)
            }
            Kind::Large => {
                let key = item.key.to_vec();
                match self.get(&key).await? {
                    Some(item) => visit(&key, item),
                    None => return Ok(false),
                }
                Ok(true)
            }
            Kind::Tombstone => Ok(false),
            Kind::Moved => {
                self.refetch().await?;
                Ok(false)
            }
        }
    }
}
