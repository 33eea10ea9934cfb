//! The walk from a slot down to a key's leaf, which readers and writers share.
//!
//! A slot leads to the same bytes of paths for ever: nodes are never unlinked, a slot never becomes null again and
//! never changes its partial byte, and a path split puts a node in between without changing what is below. So a walk
//! may start at any slot on the key's path.
//!
//! A slot that was read during the operation is *fresh*, one from the cache is not. What follows from each end of a
//! walk:
//! - An alive leaf with the key and the slot's generation is the key's only leaf, also below a slot that is not fresh:
//!   it was linked there, it was not reused, and a leaf is dead before it is unlinked.
//!   In stores without updates in place, a leaf is marked as replaced before it is unlinked instead. Then its value was
//!   current when the slot was read, so a slot that is not fresh is read again.
//! - A node has no slot for the next byte: the key was absent when the READ of the node began. All slots that were in
//!   use then are in the READ, since none becomes null again.
//! - Any other end means that the key was absent when the slot was read, so the slot must be fresh. If it is not, the
//!   walk reads it again, and goes on if it has changed.
//!
//! A leaf is visible once the header of its node says that its slot is in use. The type in the slot of the node only
//! says how much to read at first.
//!
//! Invariant: each step down increases the depth, and the number of other steps is limited. So a walk through damaged
//! memory ends.

use super::{Client, mutants};
use crate::index::IndexError;
use crate::index::place::Damaged;
use crate::index::radix::layout::{Far, Header, Leaf, LeafView, NodeType, NodeView, View, leaf_of, slot_at};
use crate::index::radix::read::{At, LeafAt, Met, Own};
use crate::lease::LockWord;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::time::Duration;

/// Number of steps of a walk that do not lead down, such as reading a slot or a torn leaf again.
const RETRIES_MAX: u32 = 100_000;
/// Number of times that a torn leaf is read before its lock is of interest.
const TORN_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_micros(2);

/// How sure a walk must be that a key is absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Misses {
    /// The slot at the end is fresh.
    Verified,
    /// The slot may be outdated. A writer replaces it by CAS, which fails if it is.
    Assumed,
}

/// End of a walk. If it says nothing else, the slot is fresh if misses are verified.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// The key's leaf is alive. The slot may not be fresh. The buffers have the leaf.
    Leaf(LeafAt),
    /// The slot is empty, or is the null root slot.
    Empty,
    /// The slot's leaf is dead. The flag says whether it has the key. The buffers have the leaf.
    Dead(LeafAt, bool),
    /// The slot has the leaf of another key. The buffers have the leaf.
    Other(LeafAt),
    /// The slot's node has no visible slot for the next byte. The slot may not be fresh. The buffers have the node.
    NoSlot(Far, Header),
    /// The path leaves the prefix of the slot's node after this number of bytes. The buffers have the node.
    Prefix(Far, Header, usize),
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
        misses: Misses,
    ) -> Result<Result<End, Met>, IndexError> {
        let (mut retries, mut torn) = (0, 0);
        loop {
            retries += 1;
            if retries > RETRIES_MAX {
                return Err(IndexError::Busy);
            }
            match self.session.layout.view(at.slot)? {
                View::Null if at.depth > 0 => return Err(Damaged("a slot that has become null").into()),
                View::Null | View::Empty => {
                    if !self.is_outdated(own, at, misses).await? {
                        return Ok(Ok(End::Empty));
                    }
                }
                View::Leaf { at: leaf, class, generation } => {
                    let leaf = LeafAt { at: leaf, class, generation };
                    match self.end_at_leaf(own, path, (at, misses), leaf).await? {
                        AtLeaf::End(end) => return Ok(Ok(end)),
                        AtLeaf::Again => {}
                        AtLeaf::Torn(word) => {
                            self.counters.torn.add();
                            torn += 1;
                            if torn > TORN_MAX {
                                return Ok(Err(Met::Torn(leaf, word)));
                            }
                            self.session.fabric.sleep(PAUSE).await;
                        }
                    }
                }
                View::Node { at: node, kind, .. } => {
                    if let Some(end) = self.step_down(own, path, (at, misses), (node, kind)).await? {
                        return Ok(Ok(end));
                    }
                }
            }
        }
    }

    async fn end_at_leaf(
        &self,
        own: &mut Own,
        path: &[u8],
        (at, misses): (&mut At, Misses),
        leaf: LeafAt,
    ) -> Result<AtLeaf, IndexError> {
        self.read_leaf(own, leaf).await?;
        let (found, is_key, is_on_path) =
            match leaf_of(&self.session.layout.spec, leaf.generation, &own.leaf)? {
                Leaf::Torn(word) => return Ok(AtLeaf::Torn(word)),
                Leaf::Reused if at.is_fresh => {
                    return Err(Damaged("a slot that points to a unit of another generation").into());
                }
                Leaf::Reused => {
                    if !self.refresh(own, at).await? {
                        return Err(Damaged("a slot that points to a unit of another generation").into());
                    }
                    return Ok(AtLeaf::Again);
                }
                Leaf::Whole(LeafView { head, path: found, rev_ptr, .. }) => {
                    if rev_ptr != at.slot_at.0 {
                        self.forget_stale(at);
                    }
                    let is_on_path = found.get(..at.depth) == path.get(..at.depth);
                    (head, found == path, is_on_path)
                }
            };
        let leaf = LeafAt { generation: found.generation(), ..leaf };
        let is_in_doubt = found.is_replaced() && !at.is_fresh && !mutants::REPLACED_LEAF_BELIEVED.is_on();
        if is_in_doubt && self.refresh(own, at).await? {
            return Ok(AtLeaf::Again);
        }
        if is_key && !found.is_dead() {
            return Ok(AtLeaf::End(End::Leaf(leaf)));
        }
        if self.is_outdated(own, at, misses).await? {
            return Ok(AtLeaf::Again);
        }
        if !is_on_path {
            return Err(Damaged("a leaf that is not on its path").into());
        }
        Ok(AtLeaf::End(if found.is_dead() { End::Dead(leaf, is_key) } else { End::Other(leaf) }))
    }

    /// Reads the node of the slot `at`, and moves to the slot of the path's next byte. Returns the walk's end if there
    /// is none.
    async fn step_down(
        &self,
        own: &mut Own,
        path: &[u8],
        (at, misses): (&mut At, Misses),
        (node, kind): (Far, NodeType),
    ) -> Result<Option<End>, IndexError> {
        let header = self.read_node(own, node, kind).await?;
        let view = NodeView::of(&own.node)?;
        if !at.is_fresh && view.rev_ptr() != at.slot_at.0 && self.refresh(own, at).await? {
            return Ok(None);
        }
        let Some(prefix) = header.prefix_from(at.depth) else {
            // A path split has put another node in between since the slot was read.
            if !self.refresh(own, at).await? {
                return Err(Damaged("a node at a wrong depth").into());
            }
            return Ok(None);
        };
        let rest = path.get(at.depth..).unwrap_or_default();
        let matched = rest.iter().zip(prefix).take_while(|(one, other)| one == other).count();
        if matched == rest.len() {
            return Err(Damaged("a path that ends in a node").into());
        }
        if matched < prefix.len() {
            if self.is_outdated(own, at, misses).await? {
                return Ok(None);
            }
            return Ok(Some(End::Prefix(node, header, matched)));
        }
        self.cache_node(path, at, node, &header, &own.node);
        let byte = rest[matched];
        let view = NodeView::of(&own.node)?;
        let visible = view.slots().take(header.kind.slots()).enumerate();
        let mut found = visible.filter(|(_, slot)| !slot.is_null() && slot.partial() == byte);
        let Some((index, slot)) = found.next() else {
            return Ok(Some(End::NoSlot(node, header)));
        };
        let (slot_at, above) = (slot_at(node, index), at.slot);
        *at = At { slot_at, slot, above, depth: header.branch() + 1, is_fresh: true };
        Ok(None)
    }

    /// Whether a slot at which the walk would end has changed. It is read again, unless it is fresh or misses are
    /// assumed.
    async fn is_outdated(&self, own: &mut Own, at: &mut At, misses: Misses) -> Result<bool, IndexError> {
        let is_believed = misses == Misses::Assumed || mutants::MISS_FROM_CACHE_BELIEVED.is_on();
        Ok(!at.is_fresh && !is_believed && self.refresh(own, at).await?)
    }

    /// Reads a slot again. Returns whether it has changed. From now on, it is fresh.
    pub(super) async fn refresh(&self, own: &mut Own, at: &mut At) -> Result<bool, IndexError> {
        let slot = self.read_slot(own, at.slot_at).await?;
        let has_changed = slot != at.slot;
        if has_changed {
            self.counts.invalidations.add();
            self.cache.borrow_mut().update(at.slot_at, slot);
        }
        (at.slot, at.is_fresh) = (slot, true);
        Ok(has_changed)
    }

    /// Drops a cached slot whose leaf says that another slot points to it now.
    fn forget_stale(&self, at: &At) {
        if !at.is_fresh {
            self.counts.invalidations.add();
            self.cache.borrow_mut().forget(at.slot_at);
        }
    }

    fn cache_node(&self, path: &[u8], at: &At, node: Far, header: &Header, bytes: &[u8]) {
        let epoch = self.session.epochs.current();
        let from = (at.slot_at, at.slot, at.depth);
        self.cache.borrow_mut().insert(&path[..header.branch()], from, (node, header), bytes, epoch);
    }

    /// Reads all visible slots of a node into the buffers. `kind` is the type in the node's slot.
    pub(super) async fn read_node(
        &self,
        own: &mut Own,
        node: Far,
        kind: NodeType,
    ) -> Result<Header, IndexError> {
        self.read(own, node, kind.read_len()).await?;
        own.node.clear();
        own.node.extend_from_slice(own.reply.output(0));
        let header = NodeView::of(&own.node)?.header()?;
        if header.kind > kind {
            let read = own.node.len() as u64;
            self.read(own, node.plus(read), header.kind.read_len() - read as u32).await?;
            own.node.extend_from_slice(own.reply.output(0));
        }
        Ok(header)
    }
}

enum AtLeaf {
    End(End),
    /// The slot has changed.
    Again,
    Torn(LockWord),
}
