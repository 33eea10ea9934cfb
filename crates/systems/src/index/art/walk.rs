//! The walk from a slot down to a key's leaf, which readers and writers share.
//!
//! Readers take no locks. A walk begins at a slot on the key's path, from the cache or the root slot. A slot that was
//! read during the operation is *fresh*. What keeps a walk right although nodes and leaves are replaced meanwhile:
//!
//! - A node is *frozen*, and then each of its slots, before a copy replaces it, and it does not change afterwards. So a
//!   node that was linked at some time during the operation has what it had at that time or later, even if it is
//!   frozen.
//! - A node below a fresh slot was linked when the slot was read. Below another slot, a node is believed only if it has
//!   the slot's generation and is not frozen. One word says both, so the node was linked when that word was read.
//! - A cached slot is read again together with the first word of its node, which says the same about that node. If the
//!   node was replaced, the cache drops it, and the walk begins anew.
//! - A leaf is marked as replaced before its slot changes. So a leaf without the mark, and with the generation of the
//!   slot, is current, even below a slot that is not fresh. A marked leaf is in doubt, and the slot is read again.
//! - Any other end of a walk means that the key was absent when the slot was read, so the slot must be fresh.
//!
//! A node's header never changes. After a path split, a node below a deeper slot skips the bytes of its prefix that the
//! nodes above it have ("optimistic" prefix check by level in the paper).
//!
//! Invariant: each step down increases the depth, and the number of other steps is limited. So a walk through damaged
//! memory ends.

use super::{Client, mutants};
use crate::index::IndexError;
use crate::index::place::Damaged;
use crate::index::radix::layout::{Far, Header, Leaf, NodeType, NodeView, Slot, View, leaf_of, slot_at};
use crate::index::radix::read::{At, LeafAt, Own};
use crate::index::radix::scan::Wanted;
use crate::index::radix::session::refused;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, Status, read};

/// Number of steps of a walk that do not lead down.
const RETRIES_MAX: u32 = 100_000;
/// Length of a node's first words: its generation, and its header.
const FIRST_WORDS: u64 = 16;

/// Location of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeAt {
    pub(super) at: Far,
    pub(super) kind: NodeType,
    pub(super) generation: u32,
}

/// Purpose of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To read a value. A frozen node is read like others.
    Read,
    /// To put a value. The slot at the end may be outdated, since a put replaces it by CAS.
    Put,
    /// To delete a key.
    Delete,
    /// To find the slot of a node.
    Find(Far),
}

/// End of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// The slot has the key's leaf, which the buffers have.
    Leaf(LeafAt),
    /// The slot is empty, or is the null root slot.
    Empty,
    /// The slot has the leaf of another key, which the buffers have.
    Other(LeafAt),
    /// The slot's node has no slot for the next byte. The buffers have the node.
    NoSlot(NodeAt, Header),
    /// The path leaves the prefix of the slot's node after this number of bytes.
    Prefix(Header, usize),
    /// A writer has met a frozen node, or one with a frozen slot. The slot that leads to the node is fresh.
    Frozen(NodeAt),
    /// The slot has the node that the walk looks for.
    Found,
}

impl<F: Fabric + Clock> Client<F> {
    /// Walks from the slot `at` to the end of a path. Moves `at` to the last slot.
    ///
    /// # Errors
    /// [`IndexError`]; a walk changes nothing.
    pub(super) async fn walk(
        &self,
        own: &mut Own,
        path: &[u8],
        at: &mut At,
        purpose: Purpose,
    ) -> Result<End, IndexError> {
        for _ in 0..RETRIES_MAX {
            let end = match self.session.layout.view(at.slot)? {
                View::Null if at.depth > 0 => return Err(Damaged("a slot that has become null").into()),
                View::Null | View::Empty => {
                    (!self.is_outdated(own, path, at, purpose).await?).then_some(End::Empty)
                }
                View::Leaf { at: leaf, class, generation } => {
                    self.end_at_leaf(own, path, (at, purpose), LeafAt { at: leaf, class, generation }).await?
                }
                View::Node { at: node, .. } if purpose == Purpose::Find(node) => Some(End::Found),
                View::Node { at: node, kind, generation } => {
                    self.step_down(own, path, (at, purpose), NodeAt { at: node, kind, generation }).await?
                }
            };
            if let Some(end) = end {
                return Ok(end);
            }
        }
        Err(IndexError::Busy)
    }

    /// Reads the leaf of the slot `at`. Returns `None` if the slot was outdated.
    async fn end_at_leaf(
        &self,
        own: &mut Own,
        path: &[u8],
        (at, purpose): (&mut At, Purpose),
        leaf: LeafAt,
    ) -> Result<Option<End>, IndexError> {
        self.read_leaf(own, leaf).await?;
        let Leaf::Whole(found) = leaf_of(&self.session.layout.spec, leaf.generation, &own.leaf)? else {
            // A leaf is whole before a slot points to it, and does not change. So the unit was reused.
            if at.is_fresh || !self.refresh(own, path, at).await? {
                return Err(Damaged("a slot that points to a unit of another generation").into());
            }
            return Ok(None);
        };
        let leaf = LeafAt { generation: found.head.generation(), ..leaf };
        let (is_key, is_on_path) = (found.path == path, found.path.get(..at.depth) == path.get(..at.depth));
        if found.head.is_replaced() && !at.is_fresh && self.refresh(own, path, at).await? {
            return Ok(None);
        }
        if is_key {
            return Ok(Some(End::Leaf(leaf)));
        }
        if self.is_outdated(own, path, at, purpose).await? {
            return Ok(None);
        }
        if is_on_path {
            Ok(Some(End::Other(leaf)))
        } else {
            Err(Damaged("a leaf that is not on its path").into())
        }
    }

    /// Reads the node of the slot `at`, and moves to the slot of the path's next byte. Returns the walk's end if there
    /// is none.
    async fn step_down(
        &self,
        own: &mut Own,
        path: &[u8],
        (at, purpose): (&mut At, Purpose),
        node: NodeAt,
    ) -> Result<Option<End>, IndexError> {
        self.read(own, node.at, node.kind.read_len()).await?;
        own.node.clear();
        own.node.extend_from_slice(own.reply.output(0));
        let view = NodeView::of(&own.node)?;
        if !view.is_of(node.generation) {
            if at.is_fresh || !self.refresh(own, path, at).await? {
                return Err(Damaged("a slot that points to a unit of another generation").into());
            }
            return Ok(None);
        }
        let is_believed = at.is_fresh || mutants::REPLACED_NODE_BELIEVED.is_on();
        let is_in_doubt = if purpose == Purpose::Read { view.is_frozen() } else { view.is_closing() };
        if is_in_doubt && !is_believed && self.refresh(own, path, at).await? {
            return Ok(None);
        }
        let view = NodeView::of(&own.node)?;
        let (header, generation) = (view.header()?, view.generation());
        let node = NodeAt { generation, ..node };
        if view.is_closing() && purpose != Purpose::Read {
            return Ok(Some(End::Frozen(node)));
        }
        let prefix = header.prefix_from(at.depth).filter(|_| header.kind == node.kind);
        let prefix = prefix.ok_or(Damaged("a node with an invalid header"))?;
        let rest = path.get(at.depth..).unwrap_or_default();
        let matched = rest.iter().zip(prefix).take_while(|(one, other)| one == other).count();
        if matched == rest.len() {
            return Err(Damaged("a path that ends in a node").into());
        }
        if matched < prefix.len() {
            let is_outdated = self.is_outdated(own, path, at, purpose).await?;
            return Ok((!is_outdated).then_some(End::Prefix(header, matched)));
        }
        if !view.is_frozen() {
            self.cache_node(path, at, node.at, &header, &own.node);
        }
        let byte = rest[matched];
        let mut slots = NodeView::of(&own.node)?.slots().take(node.kind.slots()).enumerate();
        let Some((index, slot)) = slots.find(|(_, slot)| !slot.is_null() && slot.partial() == byte) else {
            return Ok(Some(End::NoSlot(node, header)));
        };
        let (slot_at, above) = (slot_at(node.at, index), at.slot);
        *at = At { slot_at, slot, above, depth: header.branch() + 1, is_fresh: true };
        Ok(None)
    }

    /// Whether a slot at which the walk would end has changed. It is read again, unless it is fresh or the walk is that
    /// of a put.
    async fn is_outdated(
        &self,
        own: &mut Own,
        path: &[u8],
        at: &mut At,
        purpose: Purpose,
    ) -> Result<bool, IndexError> {
        let is_believed = purpose == Purpose::Put || mutants::MISS_FROM_CACHE_BELIEVED.is_on();
        Ok(!at.is_fresh && !is_believed && self.refresh(own, path, at).await?)
    }

    /// Reads a slot again. Returns whether it has changed, and then `at` is where the walk goes on. If not, it is fresh
    /// from now on.
    pub(super) async fn refresh(&self, own: &mut Own, path: &[u8], at: &mut At) -> Result<bool, IndexError> {
        let wanted = self.reads_of(at)?;
        let table = &self.session.layout.members[at.slot_at.member()];
        let mut chain = own.chain.begin(table.key());
        for Wanted { at, len } in &wanted {
            chain.also(read(self.session.layout.addr(*at, *len)?, *len as u32));
        }
        self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        match own.reply.verdict() {
            Status::Ok => {}
            status => return Err(refused(status)),
        }
        let found: Vec<Vec<u8>> = (0..wanted.len()).map(|index| own.reply.output(index).to_vec()).collect();
        let current = self.current_of(at, &found)?;
        self.note_current(own, path, at, current).await
    }

    /// The READs that say what a slot has: that of the slot, and that of the first words of its node.
    pub(super) fn reads_of(&self, at: &At) -> Result<Vec<Wanted>, Damaged> {
        let mut wanted = vec![Wanted { at: at.slot_at, len: 8 }];
        if let View::Node { at, .. } = self.session.layout.view(at.above)? {
            wanted.push(Wanted { at, len: FIRST_WORDS });
        }
        Ok(wanted)
    }

    /// Returns what a slot has, from the results of these READs; `None` if its node was replaced or is being replaced.
    pub(super) fn current_of(&self, at: &At, read: &[Vec<u8>]) -> Result<Option<Slot>, Damaged> {
        let word = read.first().and_then(|word| word[..].try_into().ok()).ok_or(Damaged("a short READ"))?;
        let slot = Slot(u64::from_le_bytes(word));
        if let (View::Node { generation, .. }, Some(first)) =
            (self.session.layout.view(at.above)?, read.get(1))
        {
            let view = NodeView::of(first)?;
            let is_replaced = !view.is_of(generation) || view.is_frozen() || slot.is_frozen();
            if is_replaced && !mutants::REPLACED_NODE_BELIEVED.is_on() {
                return Ok(None);
            }
        }
        Ok(Some(slot.thawed()))
    }

    /// Notes what was read of a slot: what it has, or that its node was replaced. Returns whether it has changed.
    pub(super) async fn note_current(
        &self,
        own: &mut Own,
        path: &[u8],
        at: &mut At,
        current: Option<Slot>,
    ) -> Result<bool, IndexError> {
        let Some(slot) = current else {
            self.restart(own, path, at).await?;
            return Ok(true);
        };
        let has_changed = slot != at.slot;
        if has_changed {
            self.counts.invalidations.add();
            self.cache.borrow_mut().update(at.slot_at, slot);
        }
        (at.slot, at.is_fresh) = (slot, true);
        Ok(has_changed)
    }

    /// Begins the walk anew, since the node with the slot `at` was replaced or is being replaced.
    pub(super) async fn restart(&self, own: &mut Own, path: &[u8], at: &mut At) -> Result<(), IndexError> {
        self.counters.nodes_stale.add();
        if let View::Node { at: node, .. } = self.session.layout.view(at.above)? {
            self.cache.borrow_mut().forget_node(node);
        }
        *at = self.start(own, path).await?;
        Ok(())
    }

    fn cache_node(&self, path: &[u8], at: &At, node: Far, header: &Header, bytes: &[u8]) {
        let epoch = self.session.epochs.current();
        let from = (at.slot_at, at.slot, at.depth);
        self.cache.borrow_mut().insert(&path[..header.branch()], from, (node, header), bytes, epoch);
    }
}
