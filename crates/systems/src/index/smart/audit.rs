//! Checks of a store that no client uses, on the bytes of its members, for trials and tests.
//!
//! After the recovery of all dead clients, and after [`Smart::heal`](super::Smart::heal), nothing may be left of them:
//! no lock is held, and each unit is either in one slot and taken, or in none and free. Inner nodes and chunks are
//! never given back: a node stays in its slot, and a chunk stays with its id.

use super::layout::{Chunk, Claim, Class, Far, Layout, NodeType, NodeView, Slot, State, View, lock_at};
use farside_remote::NodeId;
use farside_remote::control::Store;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the locks at one member that are not free, as the addresses of their leaves and their words. `load` returns
/// the 8-byte word at an address of the member.
///
/// # Errors
/// A description of bytes that no client writes.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
    let image = Image::of(std::slice::from_ref(store), |_, at| load(at))?;
    let mut held = Vec::new();
    for (chunk, class) in image.claims()?.into_iter().filter(|(_, class)| *class != Class::NODE) {
        for number in 0..image.layout.units(class) {
            let leaf = image.layout.unit(chunk, class, number);
            let word = image.word(leaf.plus(lock_at(class)))?;
            if word != 0 {
                held.push((image.address(leaf)?, word));
            }
        }
    }
    Ok(held)
}

/// Returns descriptions of the units of a store that are taken and in no slot, in a slot and free, or in two slots.
/// `load` returns the 8-byte word at an address of the member with this index.
///
/// # Errors
/// A description of bytes that no client writes.
pub fn strays(stores: &[Store], load: impl Fn(usize, u64) -> u64) -> Result<Vec<String>, String> {
    let image = Image::of(stores, load)?;
    let (mut taken, mut strays) = (BTreeMap::new(), Vec::new());
    for (chunk, class) in image.claims()? {
        for number in 0..image.layout.units(class) {
            let state = State::of(image.word(image.layout.state(chunk, number))?);
            if state.is_taken {
                taken.insert((image.layout.unit(chunk, class, number), class), state);
            }
        }
    }
    let (mut linked, mut slots) = (BTreeSet::new(), vec![image.layout.root()]);
    while let Some(slot_at) = slots.pop() {
        let slot = Slot(image.word(slot_at)?);
        let (at, class, generation) = match image.layout.view(slot).map_err(|damaged| damaged.0)? {
            View::Null | View::Empty => continue,
            View::Leaf { at, class, generation } => (at, class, Some(generation)),
            View::Node { at, .. } => (at, Class::NODE, None),
        };
        let named = format!("unit {:#x} of member {}", image.address(at)?, at.member());
        if !linked.insert(at) {
            strays.push(format!("{named} is in two slots"));
            continue;
        }
        match taken.remove(&(at, class)) {
            None => strays.push(format!("{named} is in a slot, and free")),
            Some(state) if generation.is_some_and(|generation| !state.is_of_slot(generation)) => {
                strays.push(format!("{named} is in a slot of generation {generation:?}, and is {state:?}"));
            }
            Some(_) => {}
        }
        if class == Class::NODE {
            slots.extend((0..NodeType::MAX.slots()).map(|index| super::layout::slot_at(at, index)));
            image.check_node(at)?;
        }
    }
    for ((at, class), state) in taken {
        strays.push(format!(
            "unit {:#x} of member {} ({class:?}) is in no slot, and is {state:?}",
            image.address(at)?,
            at.member()
        ));
    }
    Ok(strays)
}

/// The bytes of a store's members.
struct Image<L> {
    layout: Layout,
    load: L,
}

impl<L: Fn(usize, u64) -> u64> Image<L> {
    fn of(stores: &[Store], load: L) -> Result<Image<L>, String> {
        let first = stores.first().ok_or("a store without members")?;
        let extents: Vec<_> = stores.iter().map(|store| (NodeId(0), store.extent())).collect();
        Ok(Image { layout: Layout::new(&first.parameters, &extents)?, load })
    }

    /// Address of a location at its member.
    fn address(&self, at: Far) -> Result<u64, String> {
        Ok(self.layout.addr(at, 8).map_err(|damaged| damaged.0)?.raw())
    }

    fn word(&self, at: Far) -> Result<u64, String> {
        Ok((self.load)(at.member(), self.address(at)?))
    }

    /// The chunks that clients have claimed.
    fn claims(&self) -> Result<Vec<(Chunk, Class)>, String> {
        let mut claims = Vec::new();
        for (member, table) in self.layout.members.iter().enumerate() {
            for number in 0..table.chunks {
                let chunk = Chunk { member, number };
                let claim = Claim::of(self.word(self.layout.claim(chunk))?).map_err(|damaged| damaged.0)?;
                claims.extend(claim.map(|claim| (chunk, claim.class)));
            }
        }
        Ok(claims)
    }

    fn check_node(&self, at: Far) -> Result<(), String> {
        let words = [self.word(at)?, self.word(super::layout::header_at(at))?];
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        let view = NodeView::of(&bytes).map_err(|damaged| damaged.0)?;
        view.header().map(drop).map_err(|damaged| damaged.0.to_owned())
    }
}
