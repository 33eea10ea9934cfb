//! Work of the memory node's CPU for a Pilaf store: all puts and deletes, and the gets of clients that read torn bytes
//! too often.
//!
//! Only the service writes entries and items, one call at a time. A put:
//! 1. writes the item into a buffer that no entry reaches,
//! 2. writes the entry, with the entry's CRC last,
//! 3. frees the replaced buffer *immediately*, without a grace period.
//!
//! A client that still reads the freed buffer finds that the item's CRC is not the CRC in the item's entry, and starts
//! again from the entry (Pilaf, section 3.3).
//!
//! Collisions are resolved by linear probing (the PRISM paper, section 6.1, leaves the choice):
//! * A key that is present stays in its slot, and a put replaces the item there. So a probing client finds the key,
//!   whatever else is put and deleted meanwhile. With cuckoo hashing, a client can miss a moving key in both places.
//! * A deleted entry is marked and never becomes zeros, so clients still find the keys behind it. Any key may take its
//!   slot. If a client probes past such a slot and misses a key that is put there afterwards, that key was absent at an
//!   instant during the client's GET.
//!
//! A node that fails while it writes an entry leaves the entry torn. The table's head holds the entry that was being
//! written. The first call to the next node's service writes that entry again, before it changes the head.

use super::KIND;
use super::layout::{
    Entry, EntryState, HEADER_SIZE, Head, ITEM_COUNT_MAX, ItemHeader, ItemView, Outcome, Table, TableSpec,
    crc, put_item, slots_for, table_len,
};
use crate::hash_slots;
use crate::kv::Version;
use crate::kv::called::{Carried, OneByOne, Operations, version_of};
use farside_remote::Memory;
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::state::owner;
use farside_remote::service::{Extent, Kind, Plan, Service};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Node-side half of Pilaf.
pub struct PilafKind;

impl<M: Memory> Kind<M> for PilafKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let request = hash_slots::Request::parse(parameters, KIND)?;
        let items = request.items(quota);
        let too_many = || format!("{items} items are too many for one store: give at most {ITEM_COUNT_MAX}");
        let slots = slots_for(items).ok_or_else(too_many)?;
        let table_len = table_len(slots).ok_or_else(too_many)?;
        let spec = TableSpec { slots, seed: entropy, placement: request.placement };
        let parameters = serde_json::to_string(&spec).map_err(|error| error.to_string())?;
        Ok(Plan { table_len, parameters, wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(OneByOne::new(PilafService { table: Table::new(parameters, table)? })))
    }
}

/// The service: calls write entries in place.
struct PilafService {
    table: Table,
}

/// Number of entries that one memory access reads.
const ENTRIES_AT_ONCE: usize = 8;

/// Entries of neighbouring slots, read by one memory access.
struct Entries {
    first: u64,
    all: [Entry; ENTRIES_AT_ONCE],
    count: usize,
}

impl Entries {
    /// Returns the entry of `slot`, if it was read.
    fn get(&self, slot: u64) -> Option<Entry> {
        let place = usize::try_from(slot.checked_sub(self.first)?).ok()?;
        self.all[..self.count].get(place).copied()
    }
}

/// Result of a search for a key.
#[derive(Default)]
struct Found {
    /// The key's slot and the key's item, if the key was found.
    at: Option<(u64, Located)>,
    /// First slot on the path without a key, if any.
    vacant: Option<u64>,
    /// Whether a slot on the searched path is damaged. The slot's content is lost, so the slot counts as vacant.
    is_damaged: bool,
}

/// An item that lies within a buffer of the store.
#[derive(Clone, Copy)]
struct Located {
    entry: Entry,
    at: u64,
    len: u32,
}

impl Operations for PilafService {
    const KIND: &'static str = KIND;

    /// Rewrites the entry that an earlier node left torn, if there is such an entry.
    fn repair<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        let head = self.head(memory)?;
        let slot = head.slot.get();
        if slot >= self.table.spec.slots {
            return Ok(());
        }
        let Some(meant) = head.entry_of(slot) else { return Ok(()) };
        let entry = self.entries(memory, slot)?.all[0];
        if entry.decode() == EntryState::Torn { self.write_entry(memory, slot, &meant) } else { Ok(()) }
    }

    /// Reads the item of `key` into `item`, and leaves its value there.
    fn get<M: Memory>(&self, memory: &M, key: &[u8], item: &mut Vec<u8>) -> Carried<M> {
        let found = self.find(memory, item, key)?;
        let Some((_, located)) = found.at else { return Ok((found.missing_outcome(), Version(0))) };
        item.clear();
        item.resize(located.len as usize, 0);
        memory.read(located.at, item)?;
        let version = match ItemView::decode(item) {
            Ok(view) if crc(item) == located.entry.crc_item.get() && view.key == key => view.version,
            _ => return Ok((Outcome::Damaged, Version(0))),
        };
        item.drain(..HEADER_SIZE + key.len());
        Ok((Outcome::Done, version))
    }

    /// Writes the item, then the entry, then frees the replaced item.
    fn put<M: Memory>(&self, memory: &M, key: &[u8], value: &[u8], item: &mut Vec<u8>) -> Carried<M> {
        let found = self.find(memory, item, key)?;
        let slot = found.at.map(|(slot, _)| slot).or(found.vacant);
        let Some(slot) = slot else { return Ok((Outcome::TableFull, Version(0))) };
        let installs = self.head(memory)?.installs.get().wrapping_add(1);
        put_item(item, installs, key, value);
        let class = Class::for_len(item.len()).expect("a request is no longer than the longest item");
        let region = self.table.extent.key.region();
        let Ok(at) = Arena::of(memory).take(region, class, Supply::Quota, owner::SERVICE)? else {
            return Ok((Outcome::OutOfMemory, Version(0)));
        };
        memory.write(at, item)?;
        self.install(memory, installs, slot, Entry::of_item(at, item))?;
        self.release(memory, &found)?;
        Ok((Outcome::Done, version_of(installs)))
    }

    /// Marks the entry as deleted, then frees the item.
    fn delete<M: Memory>(&self, memory: &M, key: &[u8], item: &mut Vec<u8>) -> Carried<M> {
        let found = self.find(memory, item, key)?;
        let Some((slot, _)) = found.at else { return Ok((found.missing_outcome(), Version(0))) };
        let installs = self.head(memory)?.installs.get().wrapping_add(1);
        self.install(memory, installs, slot, Entry::deleted())?;
        self.release(memory, &found)?;
        Ok((Outcome::Done, version_of(installs)))
    }

    fn live<M: Memory>(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let entries = self.entries(memory, cursor)?;
        for (slot, &entry) in (cursor..).zip(&entries.all[..entries.count]) {
            let entry = match entry.decode() {
                EntryState::Torn => self.head(memory)?.entry_of(slot).unwrap_or(entry),
                _ => entry,
            };
            // A damaged entry reaches at most one buffer, so it costs a step no more than other entries.
            if let EntryState::Item { at, .. } = entry.decode() {
                found.push(at);
            }
        }
        let next = cursor + entries.count as u64;
        Ok((next < self.table.spec.slots).then_some(next))
    }
}

impl PilafService {
    /// Searches for `key` along its probe path. Overwrites `item`.
    fn find<M: Memory>(&self, memory: &M, item: &mut Vec<u8>, key: &[u8]) -> Result<Found, M::Wait> {
        let mut found = Found::default();
        let mut entries = Entries { first: 0, all: [Entry::new_zeroed(); ENTRIES_AT_ONCE], count: 0 };
        for slot in self.table.probe(key) {
            let entry = match entries.get(slot) {
                Some(entry) => entry,
                None => {
                    entries = self.entries(memory, slot)?;
                    entries.all[0]
                }
            };
            match self.locate(memory, entry)? {
                Ok(Some(located)) => {
                    if self.is_of(memory, item, located, key)? {
                        found.at = Some((slot, located));
                        return Ok(found);
                    }
                    continue;
                }
                Ok(None) => {}
                Err(Damaged) => found.is_damaged = true,
            }
            found.vacant.get_or_insert(slot);
            if entry.decode() == EntryState::Never {
                break;
            }
        }
        Ok(found)
    }

    /// Returns the item to which an entry points, if it points to one.
    fn locate<M: Memory>(
        &self,
        memory: &M,
        entry: Entry,
    ) -> Result<Result<Option<Located>, Damaged>, M::Wait> {
        let (at, len) = match entry.decode() {
            EntryState::Never | EntryState::Deleted => return Ok(Ok(None)),
            EntryState::Torn | EntryState::Nonsense => return Ok(Err(Damaged)),
            EntryState::Item { at, len } => (at, len),
        };
        let buffer = Arena::of(memory).buffer_at(at)?;
        let is_in_one = buffer.is_some_and(|(region, buffer)| {
            region == self.table.extent.key.region() && len <= buffer.class.size
        });
        Ok(if is_in_one { Ok(Some(Located { entry, at, len })) } else { Err(Damaged) })
    }

    /// Whether an item belongs to `key`. Overwrites `item`.
    fn is_of<M: Memory>(
        &self,
        memory: &M,
        item: &mut Vec<u8>,
        located: Located,
        key: &[u8],
    ) -> Result<bool, M::Wait> {
        let len = HEADER_SIZE + key.len();
        if (located.len as usize) < len {
            return Ok(false);
        }
        item.clear();
        item.resize(len, 0);
        memory.read(located.at, item)?;
        let (header, its_key) = ItemHeader::ref_from_prefix(&item[..]).expect("the header was read");
        Ok(usize::from(header.key_len.get()) == key.len() && its_key == key)
    }

    /// Writes the entry of `slot`, after recording the entry in the table's head.
    fn install<M: Memory>(&self, memory: &M, installs: u64, slot: u64, entry: Entry) -> Result<(), M::Wait> {
        memory.write(self.table.head_at(), Head::new(installs, slot, entry).as_bytes())?;
        self.write_entry(memory, slot, &entry)
    }

    fn write_entry<M: Memory>(&self, memory: &M, slot: u64, entry: &Entry) -> Result<(), M::Wait> {
        let at = self.table.entry_at(slot);
        entry.pieces().try_for_each(|(offset, piece)| memory.write(at + offset, piece))
    }

    /// Frees the item that a search found, after the entry no longer points to the item.
    fn release<M: Memory>(&self, memory: &M, found: &Found) -> Result<(), M::Wait> {
        if let Some((_, located)) = found.at {
            Arena::of(memory).release(self.table.extent.key.region(), located.at)?;
        }
        Ok(())
    }

    fn head<M: Memory>(&self, memory: &M) -> Result<Head, M::Wait> {
        let mut head = Head::new_zeroed();
        memory.read(self.table.head_at(), head.as_mut_bytes())?;
        Ok(head)
    }

    /// Reads up to [`ENTRIES_AT_ONCE`] entries from the slot `first` on, at least one entry.
    fn entries<M: Memory>(&self, memory: &M, first: u64) -> Result<Entries, M::Wait> {
        let left = usize::try_from(self.table.spec.slots - first).unwrap_or(ENTRIES_AT_ONCE);
        let mut entries =
            Entries { first, all: [Entry::new_zeroed(); ENTRIES_AT_ONCE], count: ENTRIES_AT_ONCE.min(left) };
        memory.read(self.table.entry_at(first), entries.all[..entries.count].as_mut_bytes())?;
        Ok(entries)
    }
}

/// Error: the slot's entry is torn or was not written by a service.
struct Damaged;

impl Found {
    /// Returns the outcome for a key that was not found.
    fn missing_outcome(&self) -> Outcome {
        if self.is_damaged { Outcome::Damaged } else { Outcome::Absent }
    }
}
