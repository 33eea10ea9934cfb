//! Gets and puts of several keys, and iteration over all keys.

use super::layout::{ItemView, Kind, SLOT_SIZE, Slot, Table, UNCONDITIONAL};
use super::{
    Buffer, Found, NewItem, PrismKv, Probed, READ_MAX, Swing, Waits, add_probe, add_swing, check_put,
    decode_probe,
};
use crate::kv::{Cursor, Item, Kv, KvError, check_key};
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::wire::{ALLOCATES_MAX, OPS_MAX};
use farside_remote::{BoundedPtr, Fabric, Status, read};
use std::collections::BTreeSet;
use std::time::Duration;
use zerocopy::FromBytes;

/// Number of bytes that a put adds to its key and value in the probe's reply and in the installing chain.
const PUT_OVERHEAD: usize = 256;
/// Largest number of bytes in one group. Chains and replies are limited to 64 KiB.
const GROUP_BYTES_MAX: usize = 56 * 1024;

/// Longest time that a new iteration waits for a rebuild to end.
const ONE_TABLE_WAIT: Duration = Duration::from_secs(30);
/// Pause between two checks whether the rebuild has ended.
const ONE_TABLE_PAUSE: Duration = Duration::from_millis(1);

/// Number of slots that an iteration reads in one round trip.
const SLOTS_PER_READ: u64 = 2048;

impl<F: Fabric + Clock> PrismKv<F> {
    /// Reads the values of several keys, each at a different instant during this call.
    ///
    /// One chain reads the first slot of each key. Keys that are not in their first slot, or whose items do not fit
    /// into the reply (64 KiB), are then read one by one.
    pub(super) async fn get_group(
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
                let table = table_of(&self.formers, &self.table);
                let index = table.probe(key).next().expect("a table has a slot");
                items.push(chain.also(read(table.slot_at(index), READ_MAX).indirect().bounded()));
            }
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
            for (place, (key, item)) in group.iter().zip(items).enumerate() {
                let index = batch * OPS_MAX + place;
                let bytes = match self.reply.get(item) {
                    Ok(bytes) => bytes,
                    // The item did not fit into the reply, or the store's key has changed.
                    Err(Status::TooLong | Status::Access | Status::Aborted) => {
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

    /// Stores values for several keys. Each put takes effect on its own. If a key occurs twice, the later value wins.
    ///
    /// A group of keys that fits into one chain takes two round trips. Keys whose first slot belongs to another key
    /// are then put one by one. If there are not enough free buffers for a group, all keys of the group are put one by
    /// one.
    pub(super) async fn put_groups(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        for (key, value) in items {
            check_put(key, value)?;
        }
        let (mut rest, mut is_any_stored) = (items, false);
        while !rest.is_empty() {
            let count = group_len(rest);
            let (group, after) = rest.split_at(count);
            rest = after;
            let stored = match group {
                [(key, value)] => self.put(key, value).await,
                group => self.put_group(group, &mut is_any_stored).await,
            };
            stored.map_err(|error| if is_any_stored { error.of_several() } else { error })?;
            is_any_stored = true;
        }
        Ok(())
    }

    /// Puts one group. Sets `is_any_stored` as soon as one of the group's values may be stored, even if a later put
    /// fails.
    async fn put_group(&mut self, group: &[(&[u8], &[u8])], is_any_stored: &mut bool) -> Result<(), KvError> {
        let found = self.find_group(group).await?;
        let new: Vec<_> = group
            .iter()
            .zip(&found)
            .map(|(&(key, value), found)| {
                let item = NewItem::small(Kind::Value, UNCONDITIONAL, key, value);
                let found = found.as_ref()?;
                let generation = found.next_generation;
                let swing = Swing {
                    at: found.at,
                    expected: &found.slot.0,
                    is_tag_alone: false,
                    generation,
                    old_parts: &[],
                };
                Some((item.header(generation), item.bound_and_tag(generation), item, swing))
            })
            .collect();
        let mut chain = self.chain.begin(self.table.extent.key);
        let mut outs = Vec::with_capacity(group.len());
        for entry in &new {
            let Some((header, bound_and_tag, item, swing)) = entry else {
                outs.push(None);
                continue;
            };
            let list = Buffer::for_put(item)?.list;
            outs.push(Some(add_swing(&mut chain, swing, item, header, bound_and_tag, list, false)));
        }
        let mut behind = Vec::new();
        if outs.iter().any(Option::is_some) {
            let ran = self.fabric.run(self.node, &chain, &mut self.reply).await;
            *is_any_stored |= match &ran {
                Ok(()) => outs.iter().flatten().any(|swung| self.reply.status(*swung) == Status::Ok),
                Err(error) => error.ran() != Ran::No,
            };
            ran?;
            if self.reply.last_status() == Status::NotReady {
                // No op ran. The keys are put one by one instead, because a put of one key needs only one buffer. When
                // memory is short, two clients that need many buffers at once could starve each other again and again.
                outs.fill(None);
            }
        }
        for (index, out) in outs.into_iter().enumerate() {
            let Some(swung) = out else {
                behind.push(index);
                continue;
            };
            match self.reply.status(swung) {
                Status::Ok => {}
                Status::CasFailed => behind.push(index),
                // No op ran. The store's key may have changed; if so, the put of the single key fetches the new one.
                Status::Aborted if self.reply.verdict() == Status::Access => behind.push(index),
                _ => return Err(KvError::Refused(self.reply.verdict())),
            }
        }
        for index in behind {
            let (key, value) = group[index];
            self.put(key, value).await?;
            *is_any_stored = true;
        }
        Ok(())
    }

    /// Probes the first slot of each key. Returns for each key its first slot if that slot is empty or belongs to the
    /// key.
    async fn find_group(&mut self, group: &[(&[u8], &[u8])]) -> Result<Vec<Option<Found>>, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let mut outs = Vec::with_capacity(group.len());
        let table = table_of(&self.formers, &self.table);
        for (key, _) in group {
            let index = table.probe(key).next().expect("a table has a slot");
            let at = table.slot_at(index);
            outs.push((at, add_probe(&mut chain, at, key)));
        }
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        if self.reply.verdict() == Status::Access {
            return Ok(vec![None; group.len()]);
        }
        let mut all = Vec::with_capacity(group.len());
        for ((key, _), (at, probe)) in group.iter().zip(outs) {
            all.push(match decode_probe(&self.reply, table, at, probe, key)? {
                Probed::Empty(found) => Some(found),
                Probed::Own(found) if found.kind != Some(Kind::Large) => Some(found),
                _ => None,
            });
        }
        Ok(all)
    }

    /// Visits the next key with its value. Returns false at the end.
    ///
    /// The iteration is no snapshot. It visits a key exactly once if the key is present from start to end, and at most
    /// once if the key is added or deleted meanwhile.
    ///
    /// A new iteration waits until the store has a single table. If that table is rebuilt, the iteration must start
    /// again.
    pub(super) async fn visit_next(
        &mut self,
        cursor: &mut Cursor,
        mut visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        self.waits = Waits::default();
        if cursor.table_epoch.is_none() {
            self.wait_for_one_table().await?;
        }
        let epoch = *cursor.table_epoch.get_or_insert(self.table.spec.epoch);
        loop {
            if epoch != self.table.spec.epoch {
                return Err(KvError::Rebuilt);
            }
            let stepped = match cursor.occupied.last() {
                None => {
                    self.read_slots(cursor).await.map(|has_more| if has_more { None } else { Some(false) })
                }
                Some(&index) => {
                    let visited = self.visit_slot(index, &mut visit).await;
                    visited.map(|visited| {
                        // A deleted or moved key was not visited.
                        cursor.occupied.pop().filter(|_| visited).map(|_| true)
                    })
                }
            };
            match stepped {
                Ok(None) => {}
                Ok(Some(found)) => return Ok(found),
                Err(KvError::Refused(Status::Access)) => self.fetch_key().await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the store has a single table, because an iteration covers one table.
    async fn wait_for_one_table(&mut self) -> Result<(), KvError> {
        let since = self.fabric.now();
        while !self.formers.is_empty() {
            if self.fabric.now().saturating_sub(since) >= ONE_TABLE_WAIT {
                return Err(KvError::NotMoved);
            }
            self.fabric.sleep(ONE_TABLE_PAUSE).await;
            self.waits = Waits::default();
            self.fetch_catalog().await?;
        }
        Ok(())
    }

    /// Reads the next slots of the table. Returns false at the table's end.
    async fn read_slots(&mut self, cursor: &mut Cursor) -> Result<bool, KvError> {
        let (first, slots) = (cursor.next_slot, self.table.spec.slots);
        let count = SLOTS_PER_READ.min(slots.saturating_sub(first));
        if count == 0 {
            return Ok(false);
        }
        let mut chain = self.chain.begin(self.table.extent.key);
        let bytes = chain.also(read(self.table.slot_at(first), (count * SLOT_SIZE) as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
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

    /// Visits the key in a slot, if the key has a value now. Returns whether the key was visited.
    async fn visit_slot(
        &mut self,
        index: u64,
        visit: &mut impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let item = chain.also(read(self.table.slot_at(index), READ_MAX).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
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
            Kind::Moved | Kind::Closed => {
                self.refetch().await?;
                Ok(false)
            }
        }
    }
}

/// Returns the store's oldest table, in which a client looks for a key first.
fn table_of<'a>(formers: &'a [Table], current: &'a Table) -> &'a Table {
    formers.first().unwrap_or(current)
}

/// Returns the number of items in the next group, at least one.
///
/// A key that occurs again starts another group, because within one group the client could not tell which of the key's
/// two puts lost.
fn group_len(items: &[(&[u8], &[u8])]) -> usize {
    let mut bytes = 0;
    let mut seen = BTreeSet::new();
    for (index, &(key, value)) in items.iter().enumerate() {
        bytes += 2 * key.len() + value.len() + PUT_OVERHEAD;
        if index > 0 && (index == ALLOCATES_MAX || bytes > GROUP_BYTES_MAX || seen.contains(key)) {
            return index;
        }
        seen.insert(key);
    }
    items.len()
}
