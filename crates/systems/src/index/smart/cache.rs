//! The client's cache: copies of inner nodes, linked as in the tree, so that a lookup is a walk without requests.
//!
//! A lookup returns the deepest slot on a key's path that the cache has. The slot may be outdated. A node without a
//! slot for the next byte leads to the slot of the node itself, so that the walk reads the node again.
//!
//! # Why an outdated slot does no harm
//!
//! An outdated slot is on the key's path all the same, as `walk` says. If it points to a node, that node is there for
//! ever. If it points to a leaf, the leaf may have been unlinked, and its unit may be in use again: even for a leaf of
//! the same key that no slot points to yet, or never will. The value of such a leaf must not be returned.
//!
//! A slot has the low bits of the *generation* of its leaf's unit, and so does the leaf. The generation rises by one
//! with each reuse. So a leaf whose bits are those of the slot was not reused since the slot was read, or was reused a
//! multiple of [`GENERATIONS`] times. The second case cannot be: let E be the client's epoch when the slot was read. A
//! unit is freed when each holder of an id has raised its epoch by two since the unit was unlinked, this client
//! included (`units`). So after k reuses, this client has published E + 2 k or more. An operation that holds a guard of
//! the epoch C ends before C + 2 is published. So there were fewer than [`GENERATIONS`] reuses until its end if C + 1
//! is below E + 2 [`GENERATIONS`]. An entry notes the current epoch when its slots have arrived, which is E or E + 1,
//! and is dropped [`AGE_MAX`] epochs later.
//!
//! A leaf that is alive and was not reused is the leaf that was linked below the slot: a leaf is dead before its slot
//! is emptied, for good.
//!
//! Differs from the paper (4.4): the reverse pointer of a leaf decides nothing. It only tells that a cached slot is
//! outdated.
//!
//! Invariant: a slot in the cache was read, or written by this client, at a member; so it is on the paths that the
//! cache finds it for.
//! Invariant: the entries are a tree: each is linked from one slot of another, or from the root slot.

use super::layout::{Far, GENERATIONS, Header, NodeView, PREFIX_MAX, Slot, slot_at};
use std::collections::BTreeMap;

/// Number of epochs after which an entry is dropped.
const AGE_MAX: u64 = 2 * GENERATIONS - 3;
/// No entry.
const NONE: u32 = u32::MAX;
/// Least number of entries that an eviction looks at.
const LOOKS: usize = 64;

/// Copies of inner nodes.
pub(super) struct Cache {
    /// Largest size in bytes; if 0, nothing is cached.
    budget: usize,
    used: usize,
    root_at: Far,
    root: Slot,
    root_child: u32,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Entries by the locations of their nodes.
    by_node: BTreeMap<Far, u32>,
    /// Entry at which the next eviction begins to look.
    hand: usize,
    evicted: u64,
}

struct Entry {
    node: Far,
    /// Depth of the slot that leads here.
    from: usize,
    /// Bytes of the path between that slot and the node's slots.
    prefix: [u8; PREFIX_MAX],
    prefix_len: usize,
    slots: Vec<Slot>,
    /// Entries of the slots' nodes.
    children: Vec<u32>,
    /// Entry and index of the slot that leads here; [`NONE`] for the root slot.
    parent: (u32, usize),
    /// Epoch in which the slots were read.
    read_in: u64,
    was_used: bool,
}

impl Entry {
    fn branch(&self) -> usize {
        self.from + self.prefix_len
    }

    fn size(&self) -> usize {
        size_of::<Entry>() + self.slots.capacity() * (size_of::<Slot>() + size_of::<u32>()) + 32
    }

    fn has_children(&self) -> bool {
        self.children.iter().any(|&child| child != NONE)
    }
}

impl Cache {
    pub(super) fn new(root_at: Far, budget: usize) -> Cache {
        Cache {
            budget,
            used: 0,
            root_at,
            root: Slot::NULL,
            root_child: NONE,
            entries: Vec::new(),
            free: Vec::new(),
            by_node: BTreeMap::new(),
            hand: 0,
            evicted: 0,
        }
    }

    /// Number of nodes that were evicted so far.
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the deepest cached slot on a path, with its location and its depth. `epoch` is the client's current one.
    pub(super) fn find(&mut self, path: &[u8], epoch: u64) -> Option<(Far, Slot, usize)> {
        let mut best = None;
        let mut next = self.root_child;
        let mut from = (self.root_at, self.root, 0);
        while let Some(entry) = self.entries.get_mut(next as usize).and_then(Option::as_mut) {
            if epoch.saturating_sub(entry.read_in) >= AGE_MAX {
                self.remove(next);
                break;
            }
            best = Some(from);
            entry.was_used = true;
            let branch = entry.branch();
            let prefix = &entry.prefix[..entry.prefix_len];
            if path.get(entry.from..branch) != Some(prefix) {
                break;
            }
            let Some(&byte) = path.get(branch) else { break };
            let found = entry.slots.iter().position(|slot| slot.partial() == byte && !slot.is_null());
            let Some(index) = found else { break };
            from = (slot_at(entry.node, index), entry.slots[index], branch + 1);
            best = Some(from);
            next = entry.children[index];
        }
        best
    }

    /// Locations of the cached nodes on a path, from the root on, with the numbers of their cached slots.
    pub(super) fn nodes_on(&self, path: &[u8]) -> Vec<(Far, usize)> {
        let (mut nodes, mut next) = (Vec::new(), self.root_child);
        while let Some(entry) = self.entries.get(next as usize).and_then(Option::as_ref) {
            nodes.push((entry.node, entry.slots.len()));
            let branch = entry.branch();
            let byte = path.get(branch);
            if path.get(entry.from..branch) != Some(&entry.prefix[..entry.prefix_len]) || byte.is_none() {
                break;
            }
            let found = entry.slots.iter().position(|slot| Some(&slot.partial()) == byte && !slot.is_null());
            let Some(index) = found else { break };
            next = entry.children[index];
        }
        nodes
    }

    /// Returns the cached slots of a node.
    pub(super) fn slots_of(&self, node: Far) -> Option<&[Slot]> {
        let entry = self.entries[*self.by_node.get(&node)? as usize].as_ref()?;
        Some(&entry.slots)
    }

    /// Puts a node into the cache, which was read below the slot `slot` at `slot_from`. `path` leads to the node's
    /// slots, and its first `from` bytes to that slot. If the cache does not have the node above, nothing happens.
    pub(super) fn insert(
        &mut self,
        path: &[u8],
        (slot_from, slot, from): (Far, Slot, usize),
        (node, header): (Far, &Header),
        bytes: &[u8],
        epoch: u64,
    ) {
        let Ok(view) = NodeView::of(bytes) else { return };
        let prefix_len = path.len().saturating_sub(from);
        if self.budget == 0 || prefix_len > PREFIX_MAX || slot.is_null() {
            return;
        }
        let parent = match slot_from == self.root_at {
            true => (NONE, 0),
            false => match self.slot_of(slot_from) {
                Some(parent) if self.at(parent.0).is_some_and(|above| above.branch() + 1 == from) => parent,
                _ => return,
            },
        };
        let slots: Vec<Slot> = view.slots().take(header.kind.slots()).collect();
        let mut prefix = [0; PREFIX_MAX];
        prefix[..prefix_len].copy_from_slice(&path[from..]);
        self.update(slot_from, slot);
        if let Some(&known) = self.by_node.get(&node) {
            if self.at(known).is_some_and(|entry| entry.parent == parent && entry.from == from) {
                return self.replace(known, slots, epoch);
            }
            self.remove(known);
        }
        // The removal may have removed the node above.
        if parent.0 != NONE && self.at(parent.0).is_none() {
            return;
        }
        let children = vec![NONE; slots.len()];
        let entry =
            Entry { node, from, prefix, prefix_len, slots, children, parent, read_in: epoch, was_used: true };
        self.used += entry.size();
        let number = match self.free.pop() {
            Some(number) => {
                self.entries[number as usize] = Some(entry);
                number
            }
            None => {
                self.entries.push(Some(entry));
                (self.entries.len() - 1) as u32
            }
        };
        self.by_node.insert(node, number);
        self.link(parent, number);
        self.evict(number);
    }

    /// Changes a cached slot, if the cache has it.
    pub(super) fn update(&mut self, at: Far, slot: Slot) {
        let (old, child) = if at == self.root_at {
            (std::mem::replace(&mut self.root, slot), self.root_child)
        } else {
            let Some((number, index)) = self.slot_of(at) else { return };
            let Some(entry) = &mut self.entries[number as usize] else { return };
            (std::mem::replace(&mut entry.slots[index], slot), entry.children[index])
        };
        if !old.is_same_place(slot) && child != NONE {
            self.remove(child);
        }
    }

    /// Drops a cached slot, so that a lookup finds the slot of its node.
    pub(super) fn forget(&mut self, at: Far) {
        if at != self.root_at {
            self.update(at, Slot::NULL);
        }
    }

    fn at(&self, number: u32) -> Option<&Entry> {
        self.entries.get(number as usize)?.as_ref()
    }

    /// Entry and index of the slot at this location.
    fn slot_of(&self, at: Far) -> Option<(u32, usize)> {
        let (_, &number) = self.by_node.range(..=at).next_back()?;
        let entry = self.at(number)?;
        let index = at.0.checked_sub(slot_at(entry.node, 0).0)? / 8;
        (index < entry.slots.len() as u64).then_some((number, index as usize))
    }

    fn link(&mut self, (parent, index): (u32, usize), to: u32) {
        match self.entries.get_mut(parent as usize).and_then(Option::as_mut) {
            Some(parent) => parent.children[index] = to,
            None => self.root_child = to,
        }
    }

    /// Replaces the slots of an entry by newer ones.
    fn replace(&mut self, number: u32, slots: Vec<Slot>, epoch: u64) {
        let Some(entry) = &mut self.entries[number as usize] else { return };
        if slots.len() < entry.slots.len() {
            return; // A node never has fewer slots than before.
        }
        self.used -= entry.size();
        let mut moved = Vec::new();
        for (index, child) in entry.children.iter().enumerate() {
            let is_same = slots.get(index).is_some_and(|slot| slot.is_same_place(entry.slots[index]));
            if *child != NONE && !is_same {
                moved.push(*child);
            }
        }
        entry.children.resize(slots.len(), NONE);
        entry.slots = slots;
        (entry.read_in, entry.was_used) = (epoch, true);
        self.used += entry.size();
        moved.into_iter().for_each(|child| self.remove(child));
    }

    /// Removes an entry with all entries below it.
    fn remove(&mut self, number: u32) {
        let Some(parent) = self.at(number).map(|entry| entry.parent) else { return };
        self.link(parent, NONE);
        let mut left = vec![number];
        while let Some(number) = left.pop() {
            let Some(entry) = self.entries.get_mut(number as usize).and_then(Option::take) else { continue };
            self.used -= entry.size();
            self.by_node.remove(&entry.node);
            self.free.push(number);
            left.extend(entry.children.iter().filter(|child| **child != NONE));
        }
    }

    /// Removes entries without entries below them until the cache fits its budget. Keeps the entry `kept`.
    fn evict(&mut self, kept: u32) {
        let mut looks = LOOKS.max(self.entries.len() * 2);
        while self.used > self.budget && looks > 0 {
            looks -= 1;
            self.hand = (self.hand + 1) % self.entries.len();
            let number = self.hand as u32;
            if number == kept {
                continue;
            }
            let Some(entry) = &mut self.entries[self.hand] else { continue };
            if !entry.has_children() && !std::mem::replace(&mut entry.was_used, false) {
                self.evicted += 1;
                self.remove(number);
            }
        }
        if self.used > self.budget {
            self.evicted += 1;
            self.remove(kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{NodeType, node_bytes};
    use super::*;

    const ROOT: Far = Far::new(0, 64);

    fn cache(budget: usize) -> Cache {
        Cache::new(ROOT, budget)
    }

    fn node(number: u64) -> Far {
        Far::new(0, 4096 + number * 2112)
    }

    fn slot(partial: u8, to: u64) -> Slot {
        Slot(u64::from(partial) | 1 << 8 | to << 27)
    }

    /// Puts a node with these slots into a cache.
    fn put(
        cache: &mut Cache,
        path: &[u8],
        from: (Far, Slot, usize),
        number: u64,
        slots: &[Slot],
        epoch: u64,
    ) {
        let header = Header::new(from.2, NodeType::SMALLEST, &path[from.2..]);
        let mut bytes = Vec::new();
        node_bytes(from.0, header, slots, &mut bytes);
        cache.insert(path, from, (node(number), &header), &bytes, epoch);
    }

    #[test]
    fn a_lookup_ends_at_the_deepest_slot() {
        let mut cache = cache(1 << 20);
        assert_eq!(cache.find(b"abc", 5), None);
        put(&mut cache, b"a", (ROOT, slot(0, 1), 0), 1, &[slot(b'b', 2), slot(b'x', 7)], 5);
        let below = (slot_at(node(1), 0), slot(b'b', 2), 2);
        assert_eq!(cache.find(b"abc", 5), Some(below));
        put(&mut cache, b"ab", below, 2, &[slot(b'c', 9)], 5);
        assert_eq!(cache.find(b"abc", 5), Some((slot_at(node(2), 0), slot(b'c', 9), 3)));
        assert_eq!(cache.find(b"abd", 5), Some(below), "no slot");
        assert_eq!(cache.find(b"b", 5), Some((ROOT, slot(0, 1), 0)), "another prefix");
        cache.forget(below.0);
        assert_eq!(cache.find(b"abc", 5), Some((ROOT, slot(0, 1), 0)));
        assert_eq!(cache.find(b"axc", 5), Some((slot_at(node(1), 1), slot(b'x', 7), 2)));
    }

    #[test]
    fn an_entry_of_an_old_epoch_is_dropped() {
        let mut cache = cache(1 << 20);
        put(&mut cache, b"a", (ROOT, slot(0, 1), 0), 1, &[slot(b'b', 2)], 5);
        assert!(cache.find(b"abc", 5 + AGE_MAX - 1).is_some());
        assert_eq!(cache.find(b"abc", 5 + AGE_MAX), None);
        assert_eq!(cache.used, 0);
    }

    #[test]
    fn the_cache_keeps_its_budget() {
        // Room for about three nodes.
        const BUDGET: usize = 900;
        let mut cache = cache(BUDGET);
        let slots: Vec<Slot> = (0..4).map(|index| slot(index, u64::from(index) + 2)).collect();
        put(&mut cache, b"a", (ROOT, slot(0, 1), 0), 1, &slots, 1);
        for round in 0..100 {
            let index = round % 4;
            let from = (slot_at(node(1), index), slots[index], 2);
            put(&mut cache, &[b'a', index as u8], from, 2 + index as u64, &[slot(9, 99)], 1);
            assert!(cache.used <= BUDGET, "{}", cache.used);
        }
        assert!(cache.evicted() > 0);
        let live = cache.entries.iter().flatten().map(Entry::size).sum::<usize>();
        assert_eq!(live, cache.used);
    }
}
