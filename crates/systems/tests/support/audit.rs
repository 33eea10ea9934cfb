//! Accounts for every buffer of a store from the bytes in memory: the buffers that the table reaches, the free lists,
//! and the state of each buffer. This module shares no code with the node's own scan.

use super::script;
use farside_fabrics::memory::Mapping;
use farside_remote::arena::class::Class;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::turn_at;
use farside_remote::arena::state::{Stage, State};
use farside_remote::control::Store;
use farside_remote::{BoundedPtr, Memory, Width};
use farside_systems::kv::prism_kv::layout::{ItemView, Kind, Slot, Table};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromBytes;

/// A store's buffers at one moment.
pub(crate) struct Audit {
    /// State of every buffer that was ever taken, by address.
    pub(crate) states: BTreeMap<u64, State>,
    /// Addresses that the table reaches (items, tombstones and parts), each with the number of references to it. This
    /// number must be 1.
    pub(crate) reachable: BTreeMap<u64, u32>,
    /// Generation of the slot of each key.
    generations: BTreeMap<Vec<u8>, u32>,
    /// Addresses of the buffers on free lists.
    listed: BTreeSet<u64>,
    /// Number of buffers that were ever taken, in all segments.
    used: u64,
    pub(crate) parts: u64,
}

/// State of the buffer that a dead client held when it died.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Held {
    Nothing,
    /// The buffer was allocated, but not written, or holds a part of a value that no item lists.
    AllocatedOnly,
    /// The buffer was allocated and written, but no slot points to its item.
    NotInstalled,
    /// Another item has replaced the buffer's item, but the buffer was not retired.
    NotRetired,
    /// The buffer was retired, but is on no list.
    NotListed,
}

impl Held {
    pub(crate) const ALL: [Held; 5] =
        [Held::Nothing, Held::AllocatedOnly, Held::NotInstalled, Held::NotRetired, Held::NotListed];
}

impl Audit {
    pub(crate) fn of(memory: &Mapping, store: &Store) -> Audit {
        let mut audit = Audit {
            states: BTreeMap::new(),
            reachable: BTreeMap::new(),
            generations: BTreeMap::new(),
            listed: BTreeSet::new(),
            used: 0,
            parts: 0,
        };
        audit.take_states(memory, store);
        audit.take_lists(memory, store);
        audit.take_table(memory, store);
        audit
    }

    fn take_states(&mut self, memory: &Mapping, store: &Store) {
        let arena = memory.arena();
        for index in 0..memory.geometry().segments() {
            let Ok(segment) = arena.segment(index);
            if segment.region != store.region || !matches!(segment.usage, Use::Buffers(_)) {
                continue;
            }
            let mut ordinal = 0;
            while let Ok(Some((buffer, state))) = arena.buffer_state(index, ordinal) {
                self.states.insert(buffer.at, state);
                ordinal += 1;
            }
            self.used += u64::from(ordinal);
        }
    }

    fn take_lists(&mut self, memory: &Mapping, store: &Store) {
        let arena = memory.arena();
        for class in Class::all() {
            let Ok(()) = arena.settle(store.region, class);
            let Ok(mut next) = arena.first_free(store.region, class);
            while let Some(buffer) = next {
                assert!(self.listed.insert(buffer.at), "{:#x} is on a free list twice", buffer.at);
                let Ok(state) = arena.state(&buffer);
                let Ok(found) = arena.buffer_at(state.next);
                assert_eq!(found.is_none(), state.next == 0, "a link points to no buffer");
                next = found.map(|(_, buffer)| buffer);
            }
        }
    }

    fn take_table(&mut self, memory: &Mapping, store: &Store) {
        let table = Table::new(&store.parameters, store.extent()).expect("parameters from the catalog");
        for index in 0..table.spec.slots {
            let Ok(word) = memory.load(table.slot_at(index).raw(), Width::W16);
            let slot = Slot(BoundedPtr::read_from_bytes(&word.to_le_bytes()).expect("a slot's size"));
            if slot.is_empty() {
                continue;
            }
            let at = slot.0.ptr.raw();
            *self.reachable.entry(at).or_default() += 1;
            let mut bytes = vec![0; slot.0.bound.get() as usize];
            let Ok(()) = memory.read(at, &mut bytes);
            let item = ItemView::decode(&bytes).expect("a slot points to an item");
            assert_eq!(
                item.header.generation.get(),
                slot.generation(),
                "an item carries its slot's generation"
            );
            self.generations.insert(item.key.to_vec(), slot.generation());
            if item.kind == Kind::Large {
                for part in item.parts().expect("valid parts") {
                    *self.reachable.entry(part.at.get()).or_default() += 1;
                    self.parts += 1;
                }
            }
        }
    }

    /// Checks that no buffer is leaked and that no buffer is in two places.
    pub(crate) fn check(&self) {
        let mut free = BTreeSet::new();
        for (at, state) in &self.states {
            match state.stage {
                Stage::Live => assert!(self.reachable.contains_key(at), "{at:#x} is leaked: {state:?}"),
                Stage::Free => assert!(free.insert(*at)),
                Stage::Parked => {}
                Stage::Unused | Stage::Retired => panic!("{at:#x} is neither in use nor free: {state:?}"),
            }
        }
        assert!(free == self.listed, "the free lists hold exactly the free buffers");
        for (at, times) in &self.reachable {
            assert_eq!(*times, 1, "{at:#x} is reached from two places");
            let state = self.states.get(at).unwrap_or_else(|| panic!("{at:#x} is reachable, but no buffer"));
            assert_eq!(state.stage, Stage::Live, "{at:#x} is reachable");
        }
        assert_eq!(self.states.len() as u64, self.used);
    }

    /// Returns the state of the buffer that the dead session with this number and slot held. No other session uses the
    /// keys of `seed`.
    pub(crate) fn held_by(&self, memory: &Mapping, seed: u64, number: u32, slot: u32) -> Held {
        let listed = self.retired_by(memory, slot);
        let mine = || self.states.iter().filter(|(_, state)| state.owner == number);
        if mine().any(|(at, state)| state.stage == Stage::Retired && !listed.contains(at)) {
            return Held::NotListed;
        }
        let keys: Vec<Vec<u8>> = (0..script::KEYS).map(|key| script::key(seed, key)).collect();
        let mut held = Held::Nothing;
        for (at, _) in
            mine().filter(|(at, state)| state.stage == Stage::Live && !self.reachable.contains_key(at))
        {
            let mut bytes = [0; 16 + 40];
            let Ok(()) = memory.read(*at, &mut bytes);
            let item = ItemView::decode(&bytes).ok().filter(|item| keys.iter().any(|key| item.is_of(key)));
            held = held.max(match item {
                None => Held::AllocatedOnly,
                Some(item) if self.generations.get(item.key) >= Some(&item.header.generation.get()) => {
                    Held::NotRetired
                }
                Some(_) => Held::NotInstalled,
            });
        }
        held
    }

    /// Addresses on the list of retired buffers of the session in `slot`.
    fn retired_by(&self, memory: &Mapping, slot: u32) -> BTreeSet<u64> {
        let Ok(head) = memory.load(turn_at(slot) + 64, Width::W16);
        let mut next = head as u64;
        let mut listed = BTreeSet::new();
        while next != 0 && listed.insert(next) {
            next = self.states.get(&next).map_or(0, |state| state.next);
        }
        listed
    }
}
