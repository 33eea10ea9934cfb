//! Checks of a store that no client uses, on the bytes of its members, for trials and tests.
//!
//! After the recovery of all dead clients, and after [`Sherman::heal`](super::Sherman::heal), nothing may be left of
//! them: no lock is held, each unit is either free or a node of the tree, in one place, and each node is named by the
//! level above.

use super::layout::{Far, Layout, LockAt, Root};
use super::node::{Entry, Image};
use farside_remote::NodeId;
use farside_remote::control::Store;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the locks at one member that are not free, as their addresses and their words. `load` returns the 8-byte
/// word at an address of the member.
///
/// # Errors
/// A description of bytes that no client writes.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
    let bytes = Bytes::of(std::slice::from_ref(store), |_, at| load(at))?;
    let mut held = Vec::new();
    for index in 0..u64::from(bytes.layout.spec.locks) {
        let at = bytes.layout.lock(LockAt { member: 0, index });
        let word = bytes.word(at)?;
        if word != 0 {
            held.push((bytes.address(at)?, word));
        }
    }
    Ok(held)
}

/// Returns descriptions of the units of a store that are claimed and are no nodes of the tree, that are nodes and free
/// or in two places, and of nodes that are torn or that the level above does not name. `load` returns the 8-byte word
/// at an address of the member with this index.
///
/// # Errors
/// A description of bytes that no client writes.
pub fn strays(stores: &[Store], load: impl Fn(usize, u64) -> u64) -> Result<Vec<String>, String> {
    let bytes = Bytes::of(stores, load)?;
    let (layout, mut claimed, mut strays) = (&bytes.layout, BTreeMap::new(), Vec::new());
    let mut is_full = true;
    for (member, table) in layout.members.iter().enumerate() {
        for unit in 0..table.pieces {
            let nonce = bytes.word(layout.state(member, unit))?;
            match nonce {
                0 => is_full = false,
                _ => _ = claimed.insert(layout.unit(member, unit), nonce),
            }
        }
    }
    let root = layout.root_of(bytes.word(layout.root())?).map_err(|damaged| damaged.0)?;
    let mut named: BTreeSet<Far> = root.iter().map(|root| root.at).collect();
    let mut next = root;
    while let Some(Root { at: first, level }) = next {
        let (mut below, mut at, mut low) = (Vec::new(), first, Vec::new());
        loop {
            let text = format!("node {:#x} of member {} at level {level}", bytes.address(at)?, at.member());
            if claimed.remove(&at).is_none() {
                strays.push(format!("{text} is free, or has two places"));
                return Ok(strays);
            }
            // Without memory, a node above may not have been split.
            if !named.remove(&at) && !is_full {
                strays.push(format!("{text} is not named by the level above"));
            }
            let image = bytes.node(at, level)?;
            if image.low() != low {
                strays.push(format!("{text} does not begin where its left neighbour ends"));
            }
            match level {
                0 => strays.extend(bytes.entries(&image)?.map(|wrong| format!("{text} {wrong}"))),
                _ => below.extend(image.children(layout).map_err(|damaged| damaged.0)?),
            }
            let Some(high) = image.high(&layout.form) else { break };
            low = high.to_vec();
            at = image.sibling(layout).map_err(|damaged| damaged.0)?;
        }
        strays.extend(named.iter().map(|at| format!("{at:?} is named at level {level}, and is not there")));
        next = below.first().map(|(_, at)| Root { at: *at, level: level.saturating_sub(1) });
        named = below.into_iter().map(|(_, at)| at).collect();
    }
    for (at, nonce) in claimed {
        let address = bytes.address(at)?;
        strays.push(format!("unit {address:#x} of member {} is no node: nonce {nonce:#x}", at.member()));
    }
    Ok(strays)
}

/// The bytes of a store's members.
struct Bytes<L> {
    layout: Layout,
    load: L,
}

impl<L: Fn(usize, u64) -> u64> Bytes<L> {
    fn of(stores: &[Store], load: L) -> Result<Bytes<L>, String> {
        let first = stores.first().ok_or("a store without members")?;
        let extents: Vec<_> = stores.iter().map(|store| (NodeId(0), store.extent())).collect();
        Ok(Bytes { layout: Layout::new(&first.parameters, &extents)?, load })
    }

    /// Address of a location at its member.
    fn address(&self, at: Far) -> Result<u64, String> {
        Ok(self.layout.addr(at, 8).map_err(|damaged| damaged.0)?.raw())
    }

    fn word(&self, at: Far) -> Result<u64, String> {
        Ok((self.load)(at.member(), self.address(at)?))
    }

    fn node(&self, at: Far, level: u8) -> Result<Image, String> {
        let words =
            (0..self.layout.form.len(level == 0) as u64).step_by(8).map(|offset| self.word(at.plus(offset)));
        let words: Vec<u64> = words.collect::<Result<_, _>>()?;
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        let mut image = Image::default();
        match image.decode(&self.layout.form, level, &bytes).map_err(|damaged| damaged.0)? {
            true => Ok(image),
            false => Err(format!("node {:#x} is torn", self.address(at)?)),
        }
    }

    /// Returns what is wrong with the entries of a leaf.
    fn entries(&self, image: &Image) -> Result<Option<&'static str>, String> {
        let (form, mut keys) = (&self.layout.form, BTreeSet::new());
        for index in 0..form.span() {
            match image.entry(form, index).map_err(|damaged| damaged.0)? {
                Entry::Empty => {}
                Entry::Torn => return Ok(Some("has a torn entry")),
                Entry::Used { key, .. } if key < image.low() || image.is_before(form, key) => {
                    return Ok(Some("has a key out of its range"));
                }
                Entry::Used { key, .. } if !keys.insert(key) => return Ok(Some("has a key twice")),
                Entry::Used { .. } => {}
            }
        }
        Ok(None)
    }
}
