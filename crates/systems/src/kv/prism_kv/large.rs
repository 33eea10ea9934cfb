//! Values that do not fit one buffer: a head item with a list of parts, installed by one CAS.
//!
//! Parts are written first, while nobody can see them, then the head is installed like any item. A reader follows
//! the head's list by plain addresses, which no grace period protects, so it ends by looking at the slot again: if
//! that is unchanged, no part was given back while it was read.

use super::layout::{HEADER_SIZE, ITEM_MAX, ItemView, PART_MAX, Part, Slot, UNCONDITIONAL};
use super::{Kind, NewItem, PrismKv, READ_MAX, TMP};
use crate::kv::{Conflict, KvError, Version};
use crate::ready::run_until_ready;
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::{Addr, BoundedPtr, Fabric, Status, allocate, read, read_as};
use std::cell::Cell;

/// What came of reading a large value.
pub(super) enum Read {
    /// It was read whole.
    Whole(Version),
    /// It changed meanwhile: look for the key again.
    Changed,
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Reads the value of the large item in the slot at `slot_at` into `self.value`.
    pub(super) async fn read_large(&mut self, key: &[u8], slot_at: Addr) -> Result<Read, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        chain.also(read(slot_at, size_of::<BoundedPtr>() as u32).redirect(TMP));
        let slot = chain.then(read_as::<BoundedPtr>(TMP));
        let head = chain.then(read(TMP, READ_MAX).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
        if self.reply.verdict() == Status::Access {
            return Ok(Read::Changed); // Whether the store has another key is seen when its own is looked for.
        }
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
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
        let now = match self.reply.get(now) {
            Ok(now) => *now,
            Err(Status::Access) => return Ok(Read::Changed),
            Err(refused) => return Err(KvError::Refused(refused)),
        };
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
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
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
        let unlisted = self.write_parts(value).await?;
        let item = NewItem::large(key, &unlisted.parts, value.len(), UNCONDITIONAL);
        let is_stored = unlisted.kv.install_blindly(&item).await?;
        unlisted.end(is_stored);
        Ok(())
    }

    /// As `put_if`, for a value of several parts.
    pub(super) async fn put_large_if(
        &mut self,
        key: &[u8],
        value: &[u8],
        expected: Option<Version>,
    ) -> Result<Result<Version, Conflict>, KvError> {
        let unlisted = self.write_parts(value).await?;
        let item = NewItem::large(key, &unlisted.parts, value.len(), 0);
        let result = unlisted.kv.install_if(&item, expected).await?;
        unlisted.end(result.is_ok());
        Ok(result)
    }

    /// Writes the parts of a value into buffers of their own. They are this session's until a head lists them.
    async fn write_parts(&mut self, value: &[u8]) -> Result<Unlisted<'_, F>, KvError> {
        let mut unlisted = Unlisted { kv: self, parts: Parts::with_capacity(value.len().div_ceil(PART_MAX)) };
        for bytes in value.chunks(PART_MAX) {
            let at = unlisted.kv.write_part(bytes).await?;
            unlisted.parts.push(at, bytes.len());
        }
        Ok(unlisted)
    }

    async fn write_part(&mut self, bytes: &[u8]) -> Result<Addr, KvError> {
        let class = Class::for_len(bytes.len()).ok_or(KvError::ValueLength(bytes.len()))?;
        loop {
            let mut chain = self.chain.begin(self.table.extent.key);
            let at = chain.also(allocate(class.list(), [bytes, &[], &[]]));
            let ready = run_until_ready(&self.fabric, self.node, &chain, &mut self.reply).await;
            if !ready.map_err(KvError::of_look)? {
                return Err(KvError::OutOfMemory);
            }
            match self.reply.get(at) {
                Ok(&at) => return Ok(at),
                Err(Status::Access) => self.fetch_key().await?,
                Err(refused) => return Err(KvError::Refused(refused)),
            }
        }
    }

    /// The parts of the large item in a slot that is about to be replaced, to be retired by the chain that replaces
    /// it: later they may be others' already. Nothing if the slot has changed: then the install will fail as well.
    pub(super) async fn parts_of(&mut self, slot: Slot) -> Result<Vec<Addr>, KvError> {
        let bound = (slot.0.bound.get() as usize).clamp(HEADER_SIZE, ITEM_MAX);
        let mut chain = self.chain.begin(self.table.extent.key);
        let head = chain.also(read(slot.0.ptr, bound as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
        // Read by its address, so it may be another item by now, or none; the CAS that follows will tell.
        let Ok(bytes) = self.reply.get(head) else { return Ok(Vec::new()) };
        let item = ItemView::decode(bytes).ok().filter(|item| item.kind == Kind::Large);
        let parts = item.and_then(|item| item.parts().ok()).unwrap_or_default();
        Ok(parts.iter().map(|part| Addr::new(part.at.get())).collect())
    }
}

/// The parts of a value, as the head lists them and by their addresses alone.
pub(super) struct Parts {
    pub(super) list: Vec<Part>,
    pub(super) at: Vec<Addr>,
    /// A chain that shows them may run, and the fabric looks after them if it does not.
    pub(super) is_posted: Cell<bool>,
}

impl Parts {
    fn with_capacity(count: usize) -> Parts {
        Parts { list: Vec::with_capacity(count), at: Vec::with_capacity(count), is_posted: Cell::new(false) }
    }

    fn push(&mut self, at: Addr, len: usize) {
        self.list.push(Part { at: at.raw().into(), len: (len as u32).into(), reserved: 0.into() });
        self.at.push(at);
    }
}

/// Parts that no head lists. Whatever ends the put that wrote them, an error or that its future is dropped, they are
/// given back; but for a head that may have been installed, of which nobody knows.
struct Unlisted<'kv, F: Fabric> {
    kv: &'kv mut PrismKv<F>,
    parts: Parts,
}

impl<F: Fabric> Unlisted<'_, F> {
    /// Its put has ended, and a head lists them or none does.
    fn end(mut self, is_listed: bool) {
        if is_listed {
            self.parts.at.clear();
        }
    }
}

impl<F: Fabric> Drop for Unlisted<'_, F> {
    fn drop(&mut self) {
        if self.parts.is_posted.get() {
            return;
        }
        for &at in &self.parts.at {
            self.kv.fabric.retire(self.kv.node, self.kv.table.extent.key, at);
        }
    }
}
