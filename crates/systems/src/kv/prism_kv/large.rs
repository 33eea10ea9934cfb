//! Values that do not fit into one buffer: a head item with a list of parts, installed by one CAS.
//!
//! A PUT writes the parts first, while no client can reach them. Then it installs the head like any other item.
//!
//! A GET reads the head, then the parts in the head's list. The GET reads the parts by plain addresses, which no grace
//! period protects. So it reads the slot again at the end: if the slot is unchanged, no part was freed while the GET
//! read it.

use super::layout::{HEADER_SIZE, ITEM_MAX, ItemView, PART_MAX, Part, Slot, UNCONDITIONAL};
use super::{Kind, NewItem, PrismKv, READ_MAX, TMP};
use crate::kv::{Conflict, KvError, Version};
use crate::ready::run_until_ready;
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::{Addr, BoundedPtr, Fabric, Status, allocate, read, read_as};
use std::cell::Cell;

/// Outcome of reading a large value.
pub(super) enum Read {
    /// The whole value was read.
    Whole(Version),
    /// The value changed during the read, so the caller must look for the key again.
    Changed,
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Reads the value of the large item in the slot at `slot_at` into `self.value`.
    pub(super) async fn read_large(&mut self, key: &[u8], slot_at: Addr) -> Result<Read, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        chain.also(read(slot_at, size_of::<BoundedPtr>() as u32).redirect(TMP));
        let slot = chain.then(read_as::<BoundedPtr>(TMP));
        let head = chain.then(read(TMP, READ_MAX).indirect().bounded());
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        if self.reply.verdict() == Status::Access {
            return Ok(Read::Changed); // If the store's key has changed, the next look-up fetches the new one.
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
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        let now = match self.reply.get(now) {
            Ok(now) => *now,
            Err(Status::Access) => return Ok(Read::Changed),
            Err(refused) => return Err(KvError::Refused(refused)),
        };
        match (now == slot, whole) {
            (true, true) => Ok(Read::Whole(version)),
            (true, false) => Err(KvError::Damaged("a large item with a part outside the store")),
            (false, _) => Ok(Read::Changed),
        }
    }

    /// Appends one part to `self.value`. Returns false if the part no longer exists.
    async fn read_part(&mut self, part: &Part) -> Result<bool, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let bytes = chain.also(read(Addr::new(part.at.get()), part.len.get()));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        match self.reply.get(bytes) {
            Ok(bytes) => {
                self.value.extend_from_slice(bytes);
                Ok(true)
            }
            Err(Status::Access) => Ok(false), // Its segment now holds buffers of another class.
            Err(refused) => Err(KvError::Refused(refused)),
        }
    }

    /// Stores a value of several parts, as `put` does for a small value.
    pub(super) async fn put_large(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let unlisted = self.write_parts(value).await?;
        let item = NewItem::large(key, &unlisted.parts, value.len(), UNCONDITIONAL);
        let is_stored = unlisted.kv.install_blindly(&item).await?;
        unlisted.end(is_stored);
        Ok(())
    }

    /// Stores a value of several parts on a condition, as `put_if` does for a small value.
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

    /// Writes each part of a value into its own buffer. This session owns the buffers until a head lists them.
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
            if !ready.map_err(KvError::of_read)? {
                return Err(KvError::OutOfMemory);
            }
            match self.reply.get(at) {
                Ok(&at) => return Ok(at),
                Err(Status::Access) => self.fetch_key().await?,
                Err(refused) => return Err(KvError::Refused(refused)),
            }
        }
    }

    /// Reads the part addresses of the large item that an install is about to replace. The installing chain must
    /// retire these parts. A later chain could not do so, because the parts' buffers may then already hold other
    /// items.
    ///
    /// The result is empty if the slot has changed, because the install then fails, too.
    pub(super) async fn parts_of(&mut self, slot: Slot) -> Result<Vec<Addr>, KvError> {
        let bound = (slot.0.bound.get() as usize).clamp(HEADER_SIZE, ITEM_MAX);
        let mut chain = self.chain.begin(self.table.extent.key);
        let head = chain.also(read(slot.0.ptr, bound as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        // The READ uses a plain address, so the bytes may be another item or none. Then the CAS that follows fails.
        let Ok(bytes) = self.reply.get(head) else { return Ok(Vec::new()) };
        let item = ItemView::decode(bytes).ok().filter(|item| item.kind == Kind::Large);
        let parts = item.and_then(|item| item.parts().ok()).unwrap_or_default();
        Ok(parts.iter().map(|part| Addr::new(part.at.get())).collect())
    }
}

/// Parts of a value: the list for the head item, and the addresses alone.
pub(super) struct Parts {
    pub(super) list: Vec<Part>,
    pub(super) at: Vec<Addr>,
    /// Whether the chain that makes the parts reachable was sent. That chain may run; if it does not, the fabric frees
    /// the parts.
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

/// Written parts of a value that no head lists yet.
///
/// If the put fails or its future is dropped, dropping this value retires the parts. The parts are not retired if the
/// chain that installs the head was sent, because the head may have been installed.
struct Unlisted<'kv, F: Fabric> {
    kv: &'kv mut PrismKv<F>,
    parts: Parts,
}

impl<F: Fabric> Unlisted<'_, F> {
    /// Ends the put. `is_listed` means that an installed head lists the parts, so they must not be retired.
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
