//! A store on its way from its former table to the next: what the node's CPU does, and nobody else (decision 0017).
//!
//! First the former table's end slot and every empty slot of it are CLOSED, so that no key can come into it any more.
//! Then every slot that has a key is MOVED: frozen, so that no client writes it; its word written into the next table;
//! and left. A tombstone that is not above the next table's floor is dropped instead.
//!
//! Invariant: how far it has come lies in the slots alone, so whoever begins again at the first does no harm.
//! Invariant: a slot is frozen only while its item's place in the next table is being taken.

use super::layout::{HEADER_SIZE, ItemHeader, Kind, Slot, Table, above};
use super::service::{live_of, points_to_item, read_slots};
use crate::kv::KEY_MAX;
use farside_remote::arena::Arena;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Service, Tick};
use farside_remote::{Memory, Width};
use zerocopy::{FromBytes, IntoBytes};

/// A store with two tables.
pub(super) struct Moving {
    former: Table,
    next: Table,
    at: Stage,
    /// Keys that have no place in the next table, in this round.
    without_place: u64,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The items MOVED and CLOSED are to be written, and the end slot closed.
    Begin,
    /// The next slot to be closed, if it is empty.
    Close(u64),
    /// The next slot to be moved, and how many slots of its key's path in the next table are known to be others'.
    Move(u64, usize),
    Done,
}

/// Slots looked at in one step.
const SLOTS_PER_STEP: usize = 8;
/// Slots of the next table looked at in one step.
const PROBES_PER_STEP: usize = 6;

impl Moving {
    pub(super) fn new(former: Table, next: Table) -> Moving {
        Moving { former, next, at: Stage::Begin, without_place: 0 }
    }

    fn begin<M: Memory>(&mut self, memory: &M) -> Result<(), M::Wait> {
        let (at, items) = self.next.left_items();
        memory.write(at, items.as_bytes())?;
        self.close(memory, self.former.end(), Slot::default())?;
        self.at = Stage::Close(0);
        Ok(())
    }

    fn close_some<M: Memory>(&mut self, memory: &M, first: u64) -> Result<(), M::Wait> {
        let mut slots = [Slot::default(); SLOTS_PER_STEP];
        let count = read_slots(memory, &self.former, first, &mut slots)?;
        for (index, &slot) in (first..).zip(&slots[..count]).filter(|(_, slot)| slot.is_empty()) {
            self.close(memory, index, slot)?;
        }
        let next = first + count as u64;
        self.at = if next < self.former.spec.slots { Stage::Close(next) } else { Stage::Move(0, 0) };
        Ok(())
    }

    /// If a client has taken it by now, it is moved later.
    fn close<M: Memory>(&self, memory: &M, index: u64, slot: Slot) -> Result<bool, M::Wait> {
        if Mutant::EmptySlotsStay.is_on() {
            return Ok(false);
        }
        self.exchange(memory, &self.former, index, slot, self.next.left(slot))
    }

    fn move_some<M: Memory>(
        &mut self,
        memory: &M,
        (first, others): (u64, usize),
        dropped: &mut Vec<u64>,
    ) -> Result<Tick, M::Wait> {
        let mut slots = [Slot::default(); SLOTS_PER_STEP];
        let count = read_slots(memory, &self.former, first, &mut slots)?;
        let is_there = |slot: &Slot| !slot.is_empty() && self.next.is_left(*slot).is_none();
        let Some(offset) = slots[..count].iter().position(is_there) else {
            return Ok(self.pass(first + count as u64));
        };
        let (index, slot) = (first + offset as u64, slots[offset]);
        let others = if offset == 0 { others } else { 0 };
        let moved = self.move_slot(memory, index, slot, others, dropped)?;
        if let Moved::NoPlace = moved {
            self.without_place += 1;
        }
        Ok(match moved {
            Moved::Yes | Moved::NoPlace => self.pass(index + 1),
            Moved::NotYet { others } => {
                self.at = Stage::Move(index, others);
                Tick::Made
            }
        })
    }

    /// All slots before `index` are left, or have keys without a place.
    fn pass(&mut self, index: u64) -> Tick {
        if index < self.former.spec.slots {
            self.at = Stage::Move(index, 0);
            return Tick::Made;
        }
        if self.without_place == 0 {
            self.at = Stage::Done;
            return Tick::Made;
        }
        (self.at, self.without_place) = (Stage::Move(0, 0), 0);
        Tick::Idle
    }

    fn move_slot<M: Memory>(
        &self,
        memory: &M,
        index: u64,
        slot: Slot,
        others: usize,
        dropped: &mut Vec<u64>,
    ) -> Result<Moved, M::Wait> {
        let left = self.next.left(slot);
        let Some((kind, key)) = self.item_of(memory, slot)? else {
            self.exchange(memory, &self.former, index, slot, left)?; // Spoilt: no client finds a key there.
            return Ok(Moved::NotYet { others });
        };
        if kind == Kind::Tombstone as u8 && above(slot.generation(), self.next.spec.floor).is_none() {
            let at = slot.0.ptr.raw();
            if self.exchange(memory, &self.former, index, slot, left)?
                && Arena::of(memory).condemn(self.former.extent.key.region(), at)?
            {
                dropped.push(at);
            }
            return Ok(Moved::NotYet { others });
        }
        let mut others = others;
        for place in self.next.probe(&key).skip(others).take(PROBES_PER_STEP) {
            let at = Slot::of(memory.load(self.next.slot_at(place).raw(), Width::W16)?);
            let is_done = at.0.ptr == slot.0.ptr; // By one who has died since.
            if place == self.next.end() {
                // As it was, so that it can be used where it is.
                self.exchange(memory, &self.former, index, slot, slot.thawed())?;
                return Ok(Moved::NoPlace);
            }
            if !is_done && !at.is_empty() {
                others += 1;
                continue;
            }
            let (frozen, word) = (slot.frozen(), slot.thawed());
            let is_frozen = slot == frozen || self.exchange(memory, &self.former, index, slot, frozen)?;
            if !is_frozen || !is_done && !self.exchange(memory, &self.next, place, at, word)? {
                return Ok(Moved::NotYet { others });
            }
            self.exchange(memory, &self.former, index, frozen, left)?;
            return Ok(Moved::Yes);
        }
        Ok(Moved::NotYet { others })
    }

    /// The kind and the key of the item that a slot points to, which nobody reuses while the node is in a step.
    fn item_of<M: Memory>(&self, memory: &M, slot: Slot) -> Result<Option<(u8, Vec<u8>)>, M::Wait> {
        if !points_to_item(memory, &self.former, slot)? {
            return Ok(None);
        }
        let at = slot.0.ptr.raw();
        let mut header = [0; HEADER_SIZE];
        memory.read(at, &mut header)?;
        let header = ItemHeader::read_from_bytes(&header).expect("a header's size");
        let key_len = usize::from(header.key_len.get());
        if key_len > KEY_MAX || HEADER_SIZE + key_len > slot.0.bound.get() as usize {
            return Ok(None);
        }
        let mut key = vec![0; key_len];
        memory.read(at + HEADER_SIZE as u64, &mut key)?;
        Ok(Some((header.kind, key)))
    }

    fn exchange<M: Memory>(
        &self,
        memory: &M,
        table: &Table,
        index: u64,
        old: Slot,
        new: Slot,
    ) -> Result<bool, M::Wait> {
        let at = table.slot_at(index).raw();
        Ok(memory.exchange(at, Width::W16, old.word(), new.word())?.is_ok())
    }
}

/// What a step came to for one slot.
enum Moved {
    Yes,
    /// It changed meanwhile, or its path in the next table is long: so many slots of that are others'.
    NotYet {
        others: usize,
    },
    NoPlace,
}

impl<M: Memory> Service<M> for Moving {
    /// The former table first: what moves meanwhile is seen in one or the other.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let (former, all) = (self.former.spec.slots, self.former.spec.slots + self.next.spec.slots);
        let next = match cursor.checked_sub(former) {
            None => live_of(&self.former, memory, cursor, found)?,
            Some(index) => former + live_of(&self.next, memory, index, found)?,
        };
        Ok((next < all).then_some(next))
    }

    fn tick(&mut self, memory: &M, dropped: &mut Vec<u64>) -> Result<Tick, M::Wait> {
        match self.at {
            Stage::Begin => self.begin(memory)?,
            Stage::Close(first) => self.close_some(memory, first)?,
            Stage::Move(first, others) => return self.move_some(memory, (first, others), dropped),
            Stage::Done => return Ok(Tick::Moved),
        }
        Ok(Tick::Made)
    }

    fn moved_percent(&self) -> u8 {
        let share = |next: u64| (next * 50 / self.former.spec.slots) as u8;
        match self.at {
            Stage::Begin => 0,
            Stage::Close(next) => share(next),
            Stage::Move(next, _) => 50 + share(next),
            Stage::Done => 100,
        }
    }
}
