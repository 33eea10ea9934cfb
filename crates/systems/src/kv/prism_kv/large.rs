//! Values that do not fit one buffer: a head item with a list of parts, installed by one CAS.
//!
//! Parts are written first, while nobody can see them, then the head is installed like any item. A reader follows
//! the head's list by plain addresses, which no grace period protects, so it ends by looking at the slot again: if
//! that is unchanged, no part was given back while it was read.

use super::layout::{HEADER_SIZE, ITEM_MAX, ItemView, PART_MAX, Part, Slot, UNCONDITIONAL};
use super::{Buffer, Found, Kind, NewItem, PrismKv, READ_MAX, TMP, won_without_looking};
use crate::kv::{KvError, Version};
use crate::ready::run_until_ready;
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::{Addr, BoundedPtr, Fabric, FabricError, Status, allocate, read, read_as};

/// What came of reading a large value.
pub(super) enum Read {
    /// It was read whole.
    Whole(Version),
    /// It changed meanwhile: look for the key again.
    Changed,
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Reads the value of the large item in slot `index` into `self.value`.
    pub(super) async fn read_large(&mut self, key: &[u8], index: u64) -> Result<Read, KvError> {
        let slot_at = self.table.slot_at(index);
        let mut chain = self.chain.begin(self.table.extent.key);
        chain.also(read(slot_at, size_of::<BoundedPtr>() as u32).redirect(TMP));
        let slot = chain.then(read_as::<BoundedPtr>(TMP));
        let head = chain.then(read(TMP, READ_MAX).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        let slot = *self.reply.get(slot).map_err(KvError::Refused)?;
        let item = ItemView::decode(self.reply.get(head).map_err(KvError::Refused)?)?;
        if !item.is_of(key) || item.kind != Kind::Large {
            return Ok(Read::Changed);
        }
        let (version, parts) = (item.version(), item.parts()?.to_vec());
        self.value.clear();
        let mut whole = true;
        for part in &parts {
            whole = whole && self.read_part(part).await?;
        }
        let mut chain = self.chain.begin(self.table.extent.key);
        let now = chain.also(read_as::<BoundedPtr>(slot_at));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        let now = *self.reply.get(now).map_err(KvError::Refused)?;
        match (now == slot, whole) {
            (true, true) => Ok(Read::Whole(version)),
            (true, false) => Err(KvError::Damaged("a large item with a part that is not the store's")),
            (false, _) => Ok(Read::Changed),
        }
    }

    /// Appends one part to `self.value`; false if it is no longer there.
    async fn read_part(&mut self, part: &Part) -> Result<bool, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let bytes = chain.also(read(Addr::new(part.at.get()), part.len.get()));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        match self.reply.get(bytes) {
            Ok(bytes) => {
                self.value.extend_from_slice(bytes);
                Ok(true)
            }
            Err(Status::Access) => Ok(false), // Its segment serves another class by now.
            Err(refused) => Err(KvError::Refused(refused)),
        }
    }

    /// As `put`, for a value of several parts.
    pub(super) async fn put_large(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let parts = self.write_parts(value).await?;
        let result = self.put_head(key, &parts, value.len()).await;
        self.abandon_parts(Some(&parts), &result.clone().map(|stored| if stored { Ok(()) } else { Err(()) }));
        result.map(drop)
    }

    /// False if the put counts as done although another one's item is in the slot: the parts are garbage then.
    async fn put_head(&mut self, key: &[u8], parts: &[Part], value_len: usize) -> Result<bool, KvError> {
        let item = NewItem::large(key, parts, value_len, UNCONDITIONAL);
        let mut lost_to: Option<Found> = None;
        loop {
            let found = self.find(key).await?;
            if lost_to.take().is_some_and(|before| won_without_looking(&before, &found)) {
                return Ok(false);
            }
            if self.install(&found, &item, Buffer::for_put(&item)?).await? {
                return Ok(true);
            }
            lost_to = Some(found);
        }
    }

    /// Writes the parts of a value into buffers of their own. They are this session's until a head lists them: if
    /// it ends before, a scan finds them.
    pub(super) async fn write_parts(&mut self, value: &[u8]) -> Result<Vec<Part>, KvError> {
        let mut parts = Vec::with_capacity(value.len().div_ceil(PART_MAX));
        for bytes in value.chunks(PART_MAX) {
            match self.write_part(bytes).await {
                Ok(part) => parts.push(part),
                Err(error) => {
                    self.retire_parts(&parts);
                    return Err(error);
                }
            }
        }
        Ok(parts)
    }

    async fn write_part(&mut self, bytes: &[u8]) -> Result<Part, KvError> {
        let class = Class::for_len(bytes.len()).ok_or(KvError::ValueLength(bytes.len()))?;
        let mut chain = self.chain.begin(self.table.extent.key);
        let at = chain.also(allocate(class.list(), [bytes, &[], &[]]));
        if !run_until_ready(&self.fabric, self.node, &chain, &mut self.reply).await? {
            return Err(KvError::OutOfMemory);
        }
        let at = self.reply.get(at).map_err(KvError::Refused)?.raw();
        Ok(Part { at: at.into(), len: (bytes.len() as u32).into(), reserved: 0.into() })
    }

    fn retire_parts(&self, parts: &[Part]) {
        for part in parts {
            self.retire(Addr::new(part.at.get()));
        }
    }

    /// Gives parts back that certainly no head lists: the put was refused, or never began to be carried out.
    pub(super) fn abandon_parts<T, E>(&self, parts: Option<&[Part]>, result: &Result<Result<T, E>, KvError>) {
        let unused = match result {
            Ok(Ok(_)) => false,
            Ok(Err(_)) => true,
            Err(KvError::Fabric(FabricError::NodeDied(_))) => false,
            Err(error) => error.ran() == farside_remote::fabric::Ran::No,
        };
        if unused && let Some(parts) = parts {
            self.retire_parts(parts);
        }
    }

    /// The parts of the large item in a slot that is about to be replaced, so that whoever replaces it can give
    /// them back at once. Nothing if the slot has changed: then the install will fail as well.
    pub(super) async fn parts_of(&mut self, slot: Slot) -> Result<Option<Vec<Part>>, KvError> {
        let bound = (slot.0.bound.get() as usize).clamp(HEADER_SIZE, ITEM_MAX);
        let mut chain = self.chain.begin(self.table.extent.key);
        let head = chain.also(read(slot.0.ptr, bound as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        // Read by its address, so it may be another item by now, or none; the CAS that follows will tell.
        let Ok(bytes) = self.reply.get(head) else { return Ok(None) };
        let Ok(item) = ItemView::decode(bytes) else { return Ok(None) };
        Ok(if item.kind == Kind::Large { item.parts().ok().map(<[Part]>::to_vec) } else { None })
    }
}
