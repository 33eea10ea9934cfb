//! A store on its way from its former table to the next: what the node's CPU does, and nobody else (decision 0017).
//!
//! First the former table's end slot and every empty slot of it are CLOSED, so that no key can come into it any more.
//! Then every slot that has a key is MOVED: frozen, so that no client writes it; its word written into the next table;
//! and left. A tombstone that is not above the next table's floor is dropped instead.
//!
//! If the next table has no place for all keys, it is given a next one itself: then both are being left, and the first
//! steps are made in both before anything is moved from either.
//!
//! Invariant: how far it has come lies in the slots alone, so whoever begins again at the first does no harm.
//! Invariant: a slot is frozen only while its item's place in the next table is being taken.

use super::layout::{HEADER_SIZE, ItemHeader, Kind, Slot, Table, above};
use super::mutants;
use super::service::{Survey, live_of, points_to_item, read_slots};
use crate::kv::KEY_MAX;
use farside_remote::arena::Arena;
use farside_remote::service::{Rebuild, Service, Step};
use farside_remote::{Memory, Width};
use zerocopy::{FromBytes, IntoBytes};

/// A store with more than one table.
pub(super) struct Moving {
    /// The tables that are being left, oldest first, and the one that takes their place.
    tables: Vec<Table>,
    at: Stage,
    /// How often all slots were passed, and how many keys were found without a place in this round.
    round: u32,
    without_place: u64,
    /// A further table is wanted.
    survey: Option<Survey>,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The items MOVED and CLOSED are to be written, and the end slots closed.
    Begin,
    /// The next slot to be closed, if it is empty.
    Close(Place),
    /// The next slot to be moved, and how many slots of its key's path in the next table are known to be others'.
    Move(Place, usize),
    Done,
}

/// A slot of one of the tables that are being left.
#[derive(Clone, Copy, Default)]
struct Place {
    table: usize,
    slot: u64,
}

/// Slots looked at in one step.
const SLOTS_PER_STEP: usize = 8;
/// After so many keys without a place the first round does not look for places any more.
const WITHOUT_PLACE_MAX: u64 = 64;
/// Slots of the next table looked at in one step.
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

    /// If a client has taken it by now, it is moved later.
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
        // A further table is wanted soonest, but not before every slot that another node has frozen was moved.
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

    /// All slots before those `count` after `place` are left, and they too; or they have keys without a place.
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

    /// The place so many slots behind another; nothing behind the last slot that is being left.
    fn place(&self, Place { table, slot }: Place, count: u64) -> Option<Place> {
        if slot + count < self.tables[table].spec.slots {
            return Some(Place { table, slot: slot + count });
        }
        (table + 2 < self.tables.len()).then_some(Place { table: table + 1, slot: 0 })
    }

    /// What a slot becomes when it is left: it points behind the table that came after its own.
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
            self.exchange(memory, from, slot, left)?; // Spoilt: no client finds a key there.
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
            let is_done = at.0.ptr == slot.0.ptr && !mutants::MOVED_TWICE.is_on(); // By one who has died since.
            if place == next.end() {
                // As it was, so that it can be used where it is.
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

    /// The kind and the key of the item that a slot points to, which nobody reuses while the node is in a step.
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
    /// The former tables first: what moves meanwhile is seen in one or the other.
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
