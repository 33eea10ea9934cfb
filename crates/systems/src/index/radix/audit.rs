//! Checks of a store that no client uses, on the bytes of its members, for trials and tests.
//!
//! After the recovery of all dead clients, and after `heal`, nothing may be left of them:
//! no lock is held, and each unit is either in one slot, or the value of one leaf, and taken, or neither and free.
//! Chunks are never given back: a chunk stays with its id.

use super::layout::{
    Chunk, Claim, Class, Far, Growth, Layout, Leaf, NodeType, NodeView, Slot, State, View, leaf_of, lock_at,
    pointer_of,
};
use farside_remote::NodeId;
use farside_remote::control::Store;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the locks at one member that are not free, as the addresses of their leaves or nodes, and their words.
/// `load` returns the 8-byte word at an address of the member.
///
/// # Errors
/// A description of bytes that no client writes.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
    let image = Image::of(std::slice::from_ref(store), |_, at| load(at))?;
    let mut held = Vec::new();
    let has_locks = |class: &Class| match image.layout.spec.nodes {
        Growth::Switched => !class.is_of_node() && !class.is_of_value(),
        Growth::Copied => class.is_of_node(),
    };
    for (chunk, class) in image.claims()?.into_iter().filter(|(_, class)| has_locks(class)) {
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

/// Returns descriptions of the units of a store that are taken and have no owner, have one and are free, or have two. A
/// unit's owner is the slot or the leaf that points to it. `load` returns the 8-byte word at an address of the member
/// with this index.
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
    let (mut owned, mut slots) = (BTreeSet::new(), vec![image.layout.root()]);
    while let Some(slot_at) = slots.pop() {
        let slot = Slot(image.word(slot_at)?);
        let mut units = Vec::new();
        match image.layout.view(slot).map_err(|damaged| damaged.0)? {
            View::Null | View::Empty => {}
            View::Leaf { at, class, generation } => {
                units.push((at, class, Some(generation)));
                units.extend(image.value(at, class, generation)?);
            }
            View::Node { at, kind, generation } => {
                units.push((at, kind.class(), kind.is_copied().then_some(generation)));
                if !owned.contains(&at) {
                    let slots_max = if kind.is_copied() { kind.slots() } else { NodeType::MAX.slots() };
                    slots.extend((0..slots_max).map(|index| super::layout::slot_at(at, index)));
                    image.check_node(at)?;
                }
            }
        }
        for (at, class, generation) in units {
            let named = format!("unit {:#x} of member {}", image.address(at)?, at.member());
            if !owned.insert(at) {
                strays.push(format!("{named} has two owners"));
                continue;
            }
            match taken.remove(&(at, class)) {
                None => strays.push(format!("{named} has an owner, and is free")),
                Some(state) if generation.is_some_and(|generation| !state.is_of_slot(generation)) => {
                    strays
                        .push(format!("{named} has an owner of generation {generation:?}, and is {state:?}"));
                }
                Some(_) => {}
            }
        }
    }
    for ((at, class), state) in taken {
        strays.push(format!(
            "unit {:#x} of member {} ({class:?}) has no owner, and is {state:?}",
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
            for number in 0..table.pieces {
                let chunk = Chunk { member, number };
                let claim = Claim::of(self.word(self.layout.claim(chunk))?).map_err(|damaged| damaged.0)?;
                claims.extend(claim.map(|claim| (chunk, claim.class)));
            }
        }
        Ok(claims)
    }

    /// The unit of a leaf's value, with its class and its generation, if it lies apart.
    fn value(
        &self,
        at: Far,
        class: Class,
        generation: u32,
    ) -> Result<Option<(Far, Class, Option<u32>)>, String> {
        let layout = &self.layout;
        if !layout.spec.has_values_apart() {
            return Ok(None);
        }
        let words = (0..class.size()).step_by(8).map(|offset| self.word(at.plus(offset)));
        let words: Vec<u64> = words.collect::<Result<_, _>>()?;
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        match leaf_of(&layout.spec, generation, &bytes).map_err(|damaged| damaged.0)? {
            Leaf::Whole(_) => {}
            Leaf::Torn(_) | Leaf::Reused => return Ok(None),
        }
        let Some(pointer) = pointer_of(&bytes) else { return Ok(None) };
        let class = layout.class_of(&pointer).map_err(|damaged| damaged.0)?;
        Ok(Some((pointer.at, class, Some(pointer.generation))))
    }

    fn check_node(&self, at: Far) -> Result<(), String> {
        let words = [self.word(at)?, self.word(super::layout::header_at(at))?];
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        let view = NodeView::of(&bytes).map_err(|damaged| damaged.0)?;
        view.header().map(drop).map_err(|damaged| damaged.0.to_owned())
    }
}
