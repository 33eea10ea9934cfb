//! Rebuild of a store: the node's CPU moves all keys from the former table to the next one (decision 0017).
//!
//! 1. Close: the end slot and every empty slot of the former table become CLOSED, so no new key can enter that table.
//! 2. Move every slot that has a key:
//!    1. Freeze the slot, so that no client writes it.
//!    2. Write its word into the next table.
//!    3. Mark the slot as MOVED.
//!
//! A tombstone whose generation is not above the next table's floor is dropped instead of moved.
//!
//! If the next table has no place for all keys, it gets a successor, too. Then both tables are being left. The slots of
//! both are closed before any slot of either is moved.
//!
//! Invariant: the slots alone hold the progress of a rebuild. So a node may restart the rebuild at the first slot at
//! any time.
//! Invariant: a slot is frozen only while its word is being written into the next table.

use super::layout::{HEADER_SIZE, ItemHeader, Kind, Slot, Table, above};
use super::mutants;
use super::service::{Survey, live_of, points_to_item, read_slots};
use crate::kv::KEY_MAX;
use farside_remote::arena::Arena;
use farside_remote::service::{Rebuild, Service, Step};
use farside_remote::{Memory, Width};
use zerocopy::{FromBytes, IntoBytes};

/// State of a store with more than one table, whose rebuild is in progress.
pub(super) struct Moving {
    /// The store's tables: the tables that are being left, oldest first, then the newest table.
    tables: Vec<Table>,
    at: Stage,
    /// Number of completed passes over all slots.
    round: u32,
    /// Number of keys that found no place in the current pass.
    without_place: u64,
    /// Survey that determines the size of a further table, if one is needed.
    survey: Option<Survey>,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The next step writes the items MOVED and CLOSED, and closes the end slots.
    Begin,
    /// The next step closes the slot at this place, if the slot is empty.
    Close(Place),
    /// The next step moves the slot at this place. The number counts the slots at the start of the key's path in the
    /// next table that are known to belong to other keys.
    Move(Place, usize),
    Done,
}

/// Position of a slot in one of the tables that are being left.
#[derive(Clone, Copy, Default)]
struct Place {
    table: usize,
    slot: u64,
}

/// Number of slots of a former table that one step reads.
const SLOTS_PER_STEP: usize = 8;
/// Number of keys without a place after which the first pass stops looking for places.
const WITHOUT_PLACE_MAX: u64 = 64;
/// Number of slots of the next table that one step probes.
const PROBES_PER_STEP: usize = 6;

impl Moving {
    pub(super) fn new(tables: Vec<Table>) -> Moving {
        Moving { tables, at: Stage::Begin, round: 0, without_place: 0, survey: None }
    }

    fn next(&self) -> &Table {
        self.tables.last().expect("a store that is being rebuilt has two tables or more")
    }

    fn begin<M: Memory>(&mut self, memory: &M) -> Result<(), M::Wait> {
        for (table, pair) in self.tables.windows(2).enumerate() {
            let (at, items) = pair[1].left_items();
            memory.write(at, items.as_bytes())?;
            self.close(memory, Place { table, slot: pair[0].end() }, Slot::default())?;
        }
        self.at = Stage::Close(Place::default());
        Ok(())
    }

    fn close_some<M: Memory>(&mut self, memory: &M, first: Place) -> Result<(), M::Wait> {
        let mut slots = [Slot::default(); SLOTS_PER_STEP];
        let count = read_slots(memory, &self.tables[first.table], first.slot, &mut slots)?;
        for (slot, &word) in (first.slot..).zip(&slots[..count]).filter(|(_, word)| word.is_empty()) {
            self.close(memory, Place { slot, ..first }, word)?;
        }
        let next = self.place(first, count as u64);
        self.at = next.map_or(Stage::Move(Place::default(), 0), Stage::Close);
        Ok(())
    }

    /// Closes the slot at `place` if it is empty. If a client has just taken the slot, the rebuild moves it later.
    fn close<M: Memory>(&self, memory: &M, place: Place, word: Slot) -> Result<bool, M::Wait> {
        let is_end = place.slot == self.tables[place.table].end();
        let mutant = if is_end { mutants::END_SLOT_STAYS } else { mutants::EMPTY_SLOTS_STAY };
        if mutant.is_on() {
            return Ok(false);
        }
        self.exchange(memory, place, word, self.left(place, word))
    }

    fn move_some<M: Memory>(
        &mut self,
        memory: &M,
        (first, others): (Place, usize),
        dropped: &mut Vec<u64>,
    ) -> Result<Step, M::Wait> {
        let mut slots = [Slot::default(); SLOTS_PER_STEP];
        let count = read_slots(memory, &self.tables[first.table], first.slot, &mut slots)?;
        let successor = &self.tables[first.table + 1];
        // If many keys have no place, only a further table helps, and it is needed soon. So this pass moves no more
        // slots, except those that a failed node has frozen.
        let is_hopeless = self.round == 0 && self.without_place >= WITHOUT_PLACE_MAX;
        let is_there = |word: &Slot| {
            !word.is_empty() && successor.is_left(*word).is_none() && (!is_hopeless || word.is_frozen())
        };
        let Some(offset) = slots[..count].iter().position(is_there) else {
            return Ok(self.pass(first, count as u64));
        };
        let place = Place { slot: first.slot + offset as u64, ..first };
        let others = if offset == 0 { others } else { 0 };
        let moved = self.move_slot(memory, place, slots[offset], others, dropped)?;
        if let Moved::NoPlace = moved {
            self.without_place += 1;
        }
        Ok(match moved {
            Moved::Yes | Moved::NoPlace => self.pass(place, 1),
            Moved::NotYet { others } => {
                self.at = Stage::Move(place, others);
                Step::Made
            }
        })
    }

    /// Moves the rebuild's position past `count` slots from `place` on. Each of these slots was left, or its key has
    /// no place.
    fn pass(&mut self, place: Place, count: u64) -> Step {
        if let Some(next) = self.place(place, count) {
            self.at = Stage::Move(next, 0);
            return Step::Made;
        }
        if self.without_place == 0 {
            self.at = Stage::Done;
            return Step::Made;
        }
        (self.at, self.without_place) = (Stage::Move(Place::default(), 0), 0);
        self.round = self.round.saturating_add(1);
        Step::Stuck
    }

    /// Returns the place that lies `count` slots after this place, or `None` if that is behind the last slot that is
    /// being left.
    fn place(&self, Place { table, slot }: Place, count: u64) -> Option<Place> {
        if slot + count < self.tables[table].spec.slots {
            return Some(Place { table, slot: slot + count });
        }
        (table + 2 < self.tables.len()).then_some(Place { table: table + 1, slot: 0 })
    }

    /// Returns the word that marks a slot as left: a pointer to an item that lies behind the table after the slot's
    /// table.
    fn left(&self, place: Place, word: Slot) -> Slot {
        self.tables[place.table + 1].left(word)
    }

    fn move_slot<M: Memory>(
        &self,
        memory: &M,
        from: Place,
        slot: Slot,
        others: usize,
        dropped: &mut Vec<u64>,
    ) -> Result<Moved, M::Wait> {
        let (next, left) = (self.next(), self.left(from, slot));
        let Some((kind, key)) = self.item_of(memory, slot)? else {
            self.exchange(memory, from, slot, left)?; // Damaged: no client finds a key there.
            return Ok(Moved::NotYet { others });
        };
        if kind == Kind::Tombstone as u8 && above(slot.generation(), next.spec.floor).is_none() {
            let at = slot.0.ptr.raw();
            if self.exchange(memory, from, slot, left)?
                && Arena::of(memory).condemn(next.extent.key.region(), at)?
            {
                dropped.push(at);
            }
            return Ok(Moved::NotYet { others });
        }
        let mut others = others;
        for place in next.probe(&key).skip(others).take(PROBES_PER_STEP) {
            let at = Slot::of(memory.load(next.slot_at(place).raw(), Width::W16)?);
            // True if a node has written the word here before and then failed.
            let is_done = at.0.ptr == slot.0.ptr && !mutants::MOVED_TWICE.is_on();
            if place == next.end() {
                // No slot on the path is free, so the key stays where it is: thaw its slot, so that clients can write
                // it.
                self.exchange(memory, from, slot, slot.thawed())?;
                return Ok(Moved::NoPlace);
            }
            if !is_done && !at.is_empty() {
                others += 1;
                continue;
            }
            let word = slot.thawed();
            let frozen = if mutants::MOVED_UNFROZEN.is_on() { word } else { slot.frozen() };
            let is_frozen = slot == frozen || self.exchange(memory, from, slot, frozen)?;
            if !is_frozen || !is_done && !exchange(memory, next, place, at, word)? {
                return Ok(Moved::NotYet { others });
            }
            let is_left = self.exchange(memory, from, frozen, left)?;
            if mutants::MOVER_RECLAIMS.is_on() && is_left {
                let at = slot.0.ptr.raw();
                if Arena::of(memory).condemn(next.extent.key.region(), at)? {
                    dropped.push(at);
                }
            }
            return Ok(Moved::Yes);
        }
        Ok(Moved::NotYet { others })
    }

    /// Returns the kind and the key of a slot's item. The node reuses no buffer during a step, so the bytes are valid.
    fn item_of<M: Memory>(&self, memory: &M, slot: Slot) -> Result<Option<(u8, Vec<u8>)>, M::Wait> {
        if !points_to_item(memory, self.next(), slot)? {
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

    fn exchange<M: Memory>(&self, memory: &M, place: Place, old: Slot, new: Slot) -> Result<bool, M::Wait> {
        exchange(memory, &self.tables[place.table], place.slot, old, new)
    }
}

fn exchange<M: Memory>(memory: &M, table: &Table, index: u64, old: Slot, new: Slot) -> Result<bool, M::Wait> {
    let at = table.slot_at(index).raw();
    Ok(memory.exchange(at, Width::W16, old.word(), new.word())?.is_ok())
}

/// Outcome of one step that tries to move one slot.
enum Moved {
    Yes,
    /// The slot changed during the step, or the step ended before the end of the key's path in the next table. The
    /// first `others` slots of that path belong to other keys.
    NotYet {
        others: usize,
    },
    /// No slot of the path in the next table is free.
    NoPlace,
}

impl<M: Memory> Service<M> for Moving {
    /// Scans the former tables first, so that an item which moves during the scan is seen in at least one table.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let mut before = 0;
        for table in &self.tables {
            if cursor < before + table.spec.slots {
                let next = before + live_of(table, memory, cursor - before, found)?;
                let all: u64 = self.tables.iter().map(|table| table.spec.slots).sum();
                return Ok((next < all).then_some(next));
            }
            before += table.spec.slots;
        }
        Ok(None)
    }

    fn rebuild(&mut self) -> Option<&mut dyn Rebuild<M>> {
        Some(self)
    }
}

impl<M: Memory> Rebuild<M> for Moving {
    fn survey(&mut self, parameters: &str, quota: u64, entropy: u64) -> Result<(), String> {
        self.survey = Some(Survey::new(parameters, quota, entropy)?);
        Ok(())
    }

    fn step(&mut self, memory: &M, dropped: &mut Vec<u64>) -> Result<Step, M::Wait> {
        if let Some(step) = Survey::step_of(&mut self.survey, memory, &self.tables)? {
            return Ok(step);
        }
        match self.at {
            Stage::Begin => self.begin(memory)?,
            Stage::Close(first) => self.close_some(memory, first)?,
            Stage::Move(first, others) => return self.move_some(memory, (first, others), dropped),
            Stage::Done => return Ok(Step::Moved),
        }
        Ok(Step::Made)
    }

    fn moved_percent(&self) -> u8 {
        let formers = &self.tables[..self.tables.len() - 1];
        let all: u64 = formers.iter().map(|table| table.spec.slots).sum();
        let share = |place: Place| {
            let before: u64 = formers[..place.table].iter().map(|table| table.spec.slots).sum();
            ((before + place.slot) * 50 / all) as u8
        };
        match self.at {
            Stage::Begin => 0,
            Stage::Close(next) => share(next),
            Stage::Move(next, _) => 50 + share(next),
            Stage::Done => 100,
        }
    }
}
