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
//! If nodes are replaced by copies, their slots have generations, too, and an operation that reads a node or one of its
//! slots checks that the node was not replaced.
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

use super::layout::{Far, GENERATIONS, Header, NodeType, NodeView, PREFIX_MAX, Slot, slot_at};
use super::order::Order;
use std::iter::{repeat, repeat_n};

/// Number of epochs after which an entry is dropped.
const AGE_MAX: u64 = 2 * GENERATIONS - 3;
/// No entry.
const NONE: u32 = u32::MAX;
/// Number of entries that the choice of one to evict looks at.
const LOOKS: usize = 64;
/// Number of slots of the largest entry whose slots are compared one by one. Larger ones have a table by byte.
const COMPARED_MAX: usize = 16;
/// Number of words of a table: a byte for each byte.
const TABLE_WORDS: usize = 256 / 8;
/// Bytes that an entry takes beside its own fields: its place in the order of the nodes, and what the allocator adds.
const EXTRA: usize = 20;

/// Copies of inner nodes.
pub(in crate::index) struct Cache {
    /// Largest size in bytes; if 0, nothing is cached.
    budget: usize,
    used: usize,
    root_at: Far,
    root: Slot,
    root_child: u32,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// The entries in the order of their nodes' locations.
    order: Order,
    /// Entry at which the next eviction begins to look.
    hand: usize,
    evicted: u64,
}

/// Copy of a node.
///
/// Most entries have a few slots that all lead to leaves, so only the others have places for links and a table.
struct Entry {
    node: Far,
    /// Epoch in which the slots were read.
    read_in: u64,
    /// The slots up to the last one that was in use, in the node's order.
    ///
    /// With more than [`COMPARED_MAX`] of them, a table follows: the index of a slot by its partial byte, eight in a
    /// word. The index of an unused byte may be that of any slot.
    ///
    /// If an entry is linked from one of the slots, the numbers of their entries follow, two in a word.
    words: Box<[u64]>,
    /// Entry of the node above; [`NONE`] if the root slot leads here.
    parent: u32,
    /// Index of the slot that leads here in the entry `parent`.
    parent_index: u8,
    kind: NodeType,
    has_links: bool,
    was_used: bool,
    /// Depth of the slot that leads here.
    from: u8,
    /// Bytes of the path between the slot that leads here and the node's slots.
    prefix_len: u8,
    prefix: [u8; PREFIX_MAX],
}

// Nearly all entries have a few slots, so fields are a large part of the cache.
const _: () = assert!(size_of::<Option<Entry>>() == 48);

impl Entry {
    fn branch(&self) -> usize {
        usize::from(self.from) + usize::from(self.prefix_len)
    }

    /// The bytes between the slot that leads here and the byte that selects one of the node's slots.
    fn prefix(&self) -> &[u8] {
        &self.prefix[..self.prefix_len.into()]
    }

    fn size(&self) -> usize {
        size_of::<Option<Entry>>() + size_of_val(&*self.words) + EXTRA
    }

    /// Number of words of the table, 0 without one.
    fn table_words(&self) -> usize {
        // Slots that need no table have at most half as many words of links.
        if self.words.len() > COMPARED_MAX + COMPARED_MAX / 2 { TABLE_WORDS } else { 0 }
    }

    /// Number of slots.
    fn len(&self) -> usize {
        let words = self.words.len() - self.table_words();
        if self.has_links { words * 2 / 3 } else { words }
    }

    /// Index of the first word of links, if there are any.
    fn links_at(&self) -> usize {
        self.len() + self.table_words()
    }

    /// The slot with this index, null if it was not in use, or was dropped.
    fn slot(&self, index: usize) -> Slot {
        Slot(self.words[index])
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        self.words[..self.len()].iter().map(|word| Slot(*word))
    }

    /// Entry that is linked from the slot with this index.
    fn child(&self, index: usize) -> u32 {
        if !self.has_links || index >= self.len() {
            return NONE;
        }
        (self.words[self.links_at() + index / 2] >> (index % 2 * 32)) as u32
    }

    fn children(&self) -> impl Iterator<Item = u32> {
        (0..self.len()).map(|index| self.child(index))
    }

    /// Links the slot with this index to an entry, or to none.
    fn set_child(&mut self, index: usize, to: u32) {
        if self.child(index) == to {
            return;
        }
        let (len, links_at) = (self.len(), self.links_at());
        if !self.has_links {
            let mut words = self.words.to_vec();
            words.resize(links_at + len.div_ceil(2), u64::MAX);
            (self.words, self.has_links) = (words.into(), true);
        }
        let at = index % 2 * 32;
        let word = &mut self.words[links_at + index / 2];
        *word = *word & !(u64::from(u32::MAX) << at) | u64::from(to) << at;
        if to == NONE && self.children().all(|child| child == NONE) {
            (self.words, self.has_links) = (self.words[..links_at].into(), false);
        }
    }

    /// Replaces the slots, and drops the links.
    fn set_slots(&mut self, slots: &[Slot]) {
        let len = slots.iter().rposition(|slot| !slot.is_null()).map_or(0, |last| last + 1);
        let table = if len > COMPARED_MAX { TABLE_WORDS } else { 0 };
        self.words = slots[..len].iter().map(|slot| slot.0).chain(repeat_n(0, table)).collect();
        self.has_links = false;
        (0..len).for_each(|index| self.note_byte(index));
    }

    /// Changes a slot of the node, and keeps the links. Returns the slot before.
    fn set_slot(&mut self, index: usize, slot: Slot) -> Slot {
        if index >= self.len() && slot.is_null() {
            return Slot::NULL;
        }
        if index >= self.len() {
            let mut slots: Vec<Slot> = self.slots().collect();
            let children: Vec<u32> = self.children().collect();
            slots.resize(index, Slot::NULL);
            slots.push(slot);
            self.set_slots(&slots);
            let linked = children.into_iter().enumerate().filter(|(_, child)| *child != NONE);
            linked.for_each(|(index, child)| self.set_child(index, child));
            return Slot::NULL;
        }
        let old = std::mem::replace(&mut self.words[index], slot.0);
        self.note_byte(index);
        Slot(old)
    }

    fn note_byte(&mut self, index: usize) {
        let (slot, len) = (self.slot(index), self.len());
        if self.table_words() > 0 && !slot.is_null() {
            let (word, at) = Entry::in_table(slot.partial());
            let word = &mut self.words[len + word];
            *word = *word & !(u64::from(u8::MAX) << at) | (index as u64) << at;
        }
    }

    /// Word of the table, and bit in that word, at which the index of a byte's slot begins.
    fn in_table(byte: u8) -> (usize, u32) {
        (usize::from(byte / 8), u32::from(byte % 8) * 8)
    }

    /// Index of the slot of a byte.
    #[inline]
    fn index_of(&self, byte: u8) -> Option<usize> {
        let has_byte = |slot: &u64| *slot as u8 == byte && !Slot(*slot).is_null();
        let (slots, others) = self.words.split_at(self.len());
        if self.table_words() == 0 {
            return slots.iter().position(has_byte);
        }
        let (word, at) = Entry::in_table(byte);
        let index = usize::from((others[word] >> at) as u8);
        slots.get(index).is_some_and(has_byte).then_some(index)
    }

    /// Number of keys to expect below the node, by its cached slots.
    fn expected(&self) -> usize {
        self.slots().map(Slot::expected).sum()
    }

    /// Index of the slot that leads on along a path, if the path goes through this node and the slot is cached.
    #[inline]
    fn index_on(&self, path: &[u8]) -> Option<usize> {
        let branch = self.branch();
        let &byte = path.get(branch)?;
        (path[self.from.into()..branch] == *self.prefix()).then(|| self.index_of(byte))?
    }
}

impl Cache {
    pub(in crate::index) fn new(root_at: Far, budget: usize) -> Cache {
        Cache {
            budget,
            used: 0,
            root_at,
            root: Slot::NULL,
            root_child: NONE,
            entries: Vec::new(),
            free: Vec::new(),
            order: Order::default(),
            hand: 0,
            evicted: 0,
        }
    }

    /// Number of nodes that were evicted so far.
    pub(in crate::index) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the deepest cached slot on a path. `epoch` is the client's current one.
    #[inline]
    pub(in crate::index) fn find(&mut self, path: &[u8], epoch: u64) -> Option<Found> {
        let mut descent = self.descent();
        while self.step(&mut descent, path, epoch) {}
        descent.found
    }

    /// Begins to walk down.
    pub(in crate::index) fn descent(&self) -> Descent {
        Descent { next: self.root_child, found: None }
    }

    /// Walks one node down along a path. Returns whether there may be a further node.
    #[inline]
    pub(in crate::index) fn step(&mut self, descent: &mut Descent, path: &[u8], epoch: u64) -> bool {
        let next = std::mem::replace(&mut descent.next, NONE);
        let Some(entry) = self.entries.get_mut(next as usize).and_then(Option::as_mut) else { return false };
        if epoch.saturating_sub(entry.read_in) >= AGE_MAX {
            self.remove(next);
            return false;
        }
        entry.was_used = true;
        let root = Found { slot_at: self.root_at, slot: self.root, above: Slot::NULL, depth: 0 };
        let above = *descent.found.get_or_insert(root);
        let Some(index) = entry.index_on(path) else { return false };
        let (slot, child) = (entry.slot(index), entry.child(index));
        let (slot_at, above) = (slot_at(entry.node, index), above.slot);
        descent.found = Some(Found { slot_at, slot, above, depth: entry.branch() + 1 });
        descent.next = child;
        child != NONE
    }

    /// Returns the cached nodes with which a scan from `path` on begins, from the root's direction down. All of them
    /// are on the path. Below the first one, `keys` keys are to be expected from the path on, if the cache has such a
    /// node.
    pub(in crate::index) fn nodes_for(&self, path: &[u8], keys: usize) -> Vec<OnPath> {
        let (mut entries, mut next) = (Vec::new(), self.root_child);
        while let Some(entry) = self.at(next) {
            let branch = entry.branch();
            if path.len() <= branch || path[entry.from.into()..branch] != *entry.prefix() {
                break;
            }
            entries.push(entry);
            let Some(index) = entry.index_of(path[branch]) else { break };
            next = entry.child(index);
        }
        let mut expected = 0;
        let is_enough = |entry: &&Entry| {
            let bytes_behind = usize::from(u8::MAX - path[entry.branch()]);
            expected += entry.expected() * bytes_behind / 256;
            expected >= keys
        };
        let first = entries.iter().rposition(is_enough).unwrap_or(0);
        let on_path = |entry: &Entry| OnPath {
            node: entry.node,
            slot: self.at(entry.parent).map_or(self.root, |above| above.slot(entry.parent_index.into())),
            slots: entry.kind.slots(),
            branch: entry.branch(),
        };
        entries[first..].iter().map(|entry| on_path(entry)).collect()
    }

    /// Whether the cache has a node.
    pub(in crate::index) fn has(&self, node: Far) -> bool {
        self.entry_of(node).is_some()
    }

    /// Returns the cached slots of a node.
    pub(in crate::index) fn slots_of(&self, node: Far) -> Option<impl Iterator<Item = Slot>> {
        let entry = self.at(self.entry_of(node)?)?;
        Some(entry.slots().chain(repeat(Slot::NULL)).take(entry.kind.slots()))
    }

    /// Puts a node into the cache, which was read below the slot `slot` at `slot_from`. `path` leads to the node's
    /// slots, and its first `from` bytes to that slot. If the cache does not have the node above, nothing happens.
    pub(in crate::index) fn insert(
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
        let (parent, parent_index) = match slot_from == self.root_at {
            true => (NONE, 0),
            false => match self.slot_of(slot_from) {
                Some(parent) if self.at(parent.0).is_some_and(|above| above.branch() + 1 == from) => parent,
                _ => return,
            },
        };
        let slots: Vec<Slot> = view.slots().take(header.kind.slots()).collect();
        self.update(slot_from, slot);
        if let Some(known) = self.entry_of(node) {
            if self.at(known).is_some_and(|entry| {
                (entry.parent, entry.parent_index) == (parent, parent_index)
                    && usize::from(entry.from) == from
            }) {
                return self.replace(known, header.kind, &slots, epoch);
            }
            self.remove(known);
        }
        // The removal may have removed the node above.
        if parent != NONE && self.at(parent).is_none() {
            return;
        }
        let mut prefix = [0; PREFIX_MAX];
        prefix[..prefix_len].copy_from_slice(&path[from..]);
        let mut entry = Entry {
            node,
            read_in: epoch,
            words: Box::default(),
            parent,
            parent_index,
            kind: header.kind,
            has_links: false,
            was_used: true,
            from: from as u8,
            prefix_len: prefix_len as u8,
            prefix,
        };
        entry.set_slots(&slots);
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
        self.order.insert(number, node_of(&self.entries));
        self.link((parent, parent_index), number);
        self.evict(number);
    }

    /// Changes a cached slot, if the cache has it.
    pub(in crate::index) fn update(&mut self, at: Far, slot: Slot) {
        let (old, child) = if at == self.root_at {
            (std::mem::replace(&mut self.root, slot), self.root_child)
        } else {
            let Some((number, index)) = self.slot_of(at) else { return };
            let Some(entry) = &mut self.entries[number as usize] else { return };
            let index = usize::from(index);
            self.used -= entry.size();
            let old = entry.set_slot(index, slot);
            self.used += entry.size();
            (old, entry.child(index))
        };
        if !old.is_same_place(slot) && child != NONE {
            self.remove(child);
        }
    }

    /// Drops the copy of a node, and of all nodes below it.
    pub(in crate::index) fn forget_node(&mut self, node: Far) {
        if let Some(number) = self.entry_of(node) {
            self.remove(number);
        }
    }

    /// Drops a cached slot, so that a lookup finds the slot of its node.
    pub(in crate::index) fn forget(&mut self, at: Far) {
        if at != self.root_at {
            self.update(at, Slot::NULL);
        }
    }

    fn at(&self, number: u32) -> Option<&Entry> {
        self.entries.get(number as usize)?.as_ref()
    }

    /// Entry of a node.
    fn entry_of(&self, node: Far) -> Option<u32> {
        let number = self.order.last_up_to(&node, node_of(&self.entries))?;
        self.at(number).is_some_and(|entry| entry.node == node).then_some(number)
    }

    /// Entry and index of the slot at this location.
    fn slot_of(&self, at: Far) -> Option<(u32, u8)> {
        let number = self.order.last_up_to(&at, node_of(&self.entries))?;
        let entry = self.at(number)?;
        let index = at.0.checked_sub(slot_at(entry.node, 0).0)? / 8;
        (index < entry.kind.slots() as u64).then_some((number, index as u8))
    }

    /// Links a slot to an entry, or to none.
    fn link(&mut self, (parent, index): (u32, u8), to: u32) {
        let Some(parent) = self.entries.get_mut(parent as usize).and_then(Option::as_mut) else {
            self.root_child = to;
            return;
        };
        self.used -= parent.size();
        parent.set_child(index.into(), to);
        self.used += parent.size();
    }

    /// Replaces the slots of an entry by newer ones.
    fn replace(&mut self, number: u32, kind: NodeType, slots: &[Slot], epoch: u64) {
        let Some(entry) = &mut self.entries[number as usize] else { return };
        if kind < entry.kind {
            return; // A node never has fewer slots than before.
        }
        self.used -= entry.size();
        let old: Vec<(Slot, u32)> = entry.slots().zip(entry.children()).collect();
        entry.set_slots(slots);
        let mut moved = Vec::new();
        for (index, (old, child)) in old.into_iter().enumerate().filter(|(_, (_, child))| *child != NONE) {
            match slots.get(index).is_some_and(|new| new.is_same_place(old)) {
                true => entry.set_child(index, child),
                false => moved.push(child),
            }
        }
        (entry.kind, entry.read_in, entry.was_used) = (kind, epoch, true);
        self.used += entry.size();
        moved.into_iter().for_each(|child| self.remove_below(child));
    }

    /// Removes an entry with all entries below it.
    fn remove(&mut self, number: u32) {
        let Some(parent) = self.at(number).map(|entry| (entry.parent, entry.parent_index)) else { return };
        self.link(parent, NONE);
        self.remove_below(number);
    }

    /// Removes an entry that nothing is linked to, with all entries below it.
    fn remove_below(&mut self, number: u32) {
        let mut left = vec![number];
        while let Some(number) = left.pop() {
            let Some(node) = self.at(number).map(|entry| entry.node) else { continue };
            self.order.remove(&node, node_of(&self.entries));
            let Some(entry) = self.entries[number as usize].take() else { continue };
            self.used -= entry.size();
            self.free.push(number);
            left.extend(entry.children().filter(|child| *child != NONE));
        }
    }

    /// Removes entries without entries below them until the cache fits its budget. Keeps the entry `kept`, unless
    /// nothing else is found.
    fn evict(&mut self, kept: u32) {
        while self.used > self.budget {
            let victim = self.victim(kept);
            self.evicted += 1;
            self.remove(victim.unwrap_or(kept));
            if victim.is_none() {
                return;
            }
        }
    }

    /// Chooses an entry to evict: one that was not used since the last look at it, if one of the next ones is.
    fn victim(&mut self, kept: u32) -> Option<u32> {
        let mut used = None;
        for _ in 0..LOOKS {
            self.hand = (self.hand + 1) % self.entries.len();
            let number = self.hand as u32;
            let Some(entry) = &mut self.entries[self.hand] else { continue };
            if number == kept || entry.has_links {
                continue;
            }
            if !std::mem::replace(&mut entry.was_used, false) {
                return Some(number);
            }
            used = used.or(Some(number));
        }
        used
    }
}

/// Returns the function that returns the location of an entry's node.
fn node_of(entries: &[Option<Entry>]) -> impl Fn(u32) -> Far {
    |number| entries[number as usize].as_ref().map_or(Far::new(0, 0), |entry| entry.node)
}

/// A cached slot on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Found {
    pub(in crate::index) slot_at: Far,
    pub(in crate::index) slot: Slot,
    /// The slot that has led to the node with this slot; null if it is the root slot.
    pub(in crate::index) above: Slot,
    /// Number of bytes of the path that lead to the slot.
    pub(in crate::index) depth: usize,
}

/// A walk down the cached nodes along a path.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct Descent {
    /// The next entry.
    next: u32,
    /// The deepest slot so far.
    pub(in crate::index) found: Option<Found>,
}

/// A cached node on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct OnPath {
    pub(in crate::index) node: Far,
    /// The cached slot that leads to the node.
    pub(in crate::index) slot: Slot,
    /// Number of cached slots.
    pub(in crate::index) slots: usize,
    /// Number of bytes of the path that lead to the node's slots. All keys that begin with them are below the node, for
    /// ever.
    pub(in crate::index) branch: usize,
}

#[cfg(test)]
mod tests {
    use super::super::layout::node_bytes;
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
        let find = |cache: &mut Cache, path: &[u8]| {
            cache.find(path, 5).map(|Found { slot_at, slot, depth, .. }| (slot_at, slot, depth))
        };
        assert_eq!(find(&mut cache, b"abc"), None);
        put(&mut cache, b"a", (ROOT, slot(0, 1), 0), 1, &[slot(b'b', 2), slot(b'x', 7)], 5);
        let below = (slot_at(node(1), 0), slot(b'b', 2), 2);
        assert_eq!(find(&mut cache, b"abc"), Some(below));
        put(&mut cache, b"ab", below, 2, &[slot(b'c', 9)], 5);
        assert_eq!(find(&mut cache, b"abc"), Some((slot_at(node(2), 0), slot(b'c', 9), 3)));
        assert_eq!(find(&mut cache, b"abd"), Some(below), "no slot");
        assert_eq!(find(&mut cache, b"b"), Some((ROOT, slot(0, 1), 0)), "another prefix");
        cache.forget(below.0);
        assert_eq!(find(&mut cache, b"abc"), Some((ROOT, slot(0, 1), 0)));
        assert_eq!(find(&mut cache, b"axc"), Some((slot_at(node(1), 1), slot(b'x', 7), 2)));
    }

    #[test]
    fn an_entry_has_links_beside_any_number_of_slots() {
        for count in [1, 2, 3, 16, 17, 48, 256] {
            let slots: Vec<Slot> = (0..count).map(|index| slot(index as u8, 1000 + index)).collect();
            let mut cache = cache(1 << 20);
            let kind = NodeType::for_slot(slots.len() - 1);
            let header = Header::new(0, kind, b"a");
            let mut bytes = Vec::new();
            node_bytes(ROOT, header, &slots, &mut bytes);
            cache.insert(b"a", (ROOT, slot(0, 1), 0), (node(0), &header), &bytes, 1);
            let at = |index: usize| (slot_at(node(0), index), slots[index], 2);
            let found = |cache: &mut Cache, path: &[u8]| cache.find(path, 1).map(|found| found.slot_at);
            for index in 0..slots.len() {
                put(&mut cache, &[b'a', index as u8], at(index), 1 + index as u64, &[slot(9, 99)], 1);
            }
            for index in 0..slots.len() {
                let path = [b'a', index as u8, 9];
                assert_eq!(found(&mut cache, &path), Some(slot_at(node(1 + index as u64), 0)));
                cache.forget_node(node(1 + index as u64));
                assert_eq!(found(&mut cache, &path), Some(at(index).0));
            }
            let sizes = |cache: &Cache| cache.entries.iter().flatten().map(Entry::size).sum::<usize>();
            assert_eq!(cache.used, sizes(&cache));
            assert!(cache.entries.iter().flatten().all(|entry| !entry.has_links));
        }
    }

    #[test]
    fn a_slot_that_comes_into_use_is_added() {
        let mut cache = cache(1 << 20);
        let header = Header::new(0, NodeType::for_slot(20), b"a");
        let mut bytes = Vec::new();
        node_bytes(ROOT, header, &[slot(b'b', 2), slot(b'c', 3)], &mut bytes);
        cache.insert(b"a", (ROOT, slot(0, 1), 0), (node(1), &header), &bytes, 1);
        let below = (slot_at(node(1), 1), slot(b'c', 3), 2);
        put(&mut cache, b"ac", below, 2, &[slot(9, 99)], 1);
        let found = |cache: &mut Cache, path: &[u8]| cache.find(path, 1).map(|found| found.slot_at);
        // The second one makes a table necessary.
        for index in [4, 20] {
            let added = slot(b'f' + index as u8, 7);
            assert_eq!(found(&mut cache, &[b'a', added.partial(), 1]), Some(ROOT));
            cache.update(slot_at(node(1), index), added);
            assert_eq!(found(&mut cache, &[b'a', added.partial(), 1]), Some(slot_at(node(1), index)));
            assert_eq!(found(&mut cache, b"ac\x09"), Some(slot_at(node(2), 0)), "the link is kept");
        }
        // A slot that is not in use, behind those that are.
        cache.forget(slot_at(node(1), 30));
        assert_eq!(found(&mut cache, b"ac\x09"), Some(slot_at(node(2), 0)), "the link is kept");
        // Behind the slots of the node's type.
        cache.update(slot_at(node(1), 40), slot(b'!', 7));
        assert_eq!(found(&mut cache, b"a!1"), Some(ROOT));
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
        const BUDGET: usize = 360;
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
