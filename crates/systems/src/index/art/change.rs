//! Changes: put, put if absent, and delete.
//!
//! - **A key with a leaf** gets a new leaf ("out-of-place"): mark the old one, and write the new one, in one wave; then
//!   CAS the slot, and retire the old leaf. A delete empties the slot. The mark is there before the slot changes, so no
//!   client believes the old leaf after the change has returned, whatever slot of it its cache has.
//! - **A key without one** gets a leaf in its empty slot; in a null slot of its node, under the node's lock
//!   ([`nodes`]); or below new nodes in front of another leaf or node (leaf split, path split).
//!
//! Every change is one CAS of a slot. It fails if the slot has changed, or is frozen since its node is being replaced.
//! The address of a slot may be in a node that was replaced, whose unit is in use again. So before the CAS, a slot from
//! the cache is read again with its node's first words, in the wave that writes the new leaf.
//!
//! Differs from ROWEX: a slot that is not null is changed without the node's lock, so an update has no wave for one.
//! The header of a node does not change with a path split (`walk`).
//!
//! [`nodes`]: super::nodes
//!
//! Invariant: a slot is CASed only if its node was linked at some time during the operation, so that the node's unit is
//! not reused before the operation has ended.

use super::nodes::Added;
use super::walk::{End, NodeAt, Purpose};
use super::{Client, mutants};
use crate::index::IndexError;
use crate::index::place::Damaged;
use crate::index::radix::drafts::{Lane, Put, Value};
use crate::index::radix::layout::{
    Far, Head, Header, Leaf, NodeType, NodeView, PREFIX_MAX, Slot, View, copied_bytes, head_of, leaf_of,
    pointer_of, slot_at,
};
use crate::index::radix::read::{At, LeafAt};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;

/// Type of the nodes that splits put in front of others.
const SMALLEST: NodeType = NodeType::COPIED[0];

impl<F: Fabric + Clock> Client<F> {
    /// Stores a value. Returns false if the key has one and the put is conditional.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) async fn put(
        &self,
        lane: &mut Lane,
        path: &[u8],
        put: Put,
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let guard = self.session.epochs.enter();
        let done = self.put_guarded(lane, path, put, value).await;
        if done.as_ref().is_err_and(|error| error.ran() != Ran::No) || self.session.is_given_up() {
            // A request may still run, so the memory that it reaches must not be reused.
            guard.keep();
            (lane.leaf, lane.nodes, lane.apart) = (None, Vec::new(), None);
        } else {
            self.give_back(lane).await;
        }
        done
    }

    async fn put_guarded(
        &self,
        lane: &mut Lane,
        path: &[u8],
        put: Put,
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let mut at = self.start(&mut lane.own, path).await?;
        let until = self.session.fabric.now() + self.patience;
        loop {
            let done = match self.walk(&mut lane.own, path, &mut at, Purpose::Put).await? {
                End::Leaf(_) if put == Put::IfAbsent => return Ok(false),
                End::Leaf(leaf) => self.replace(lane, &mut at, Some(leaf), path, Some(value)).await?,
                End::Empty => self.replace(lane, &mut at, None, path, Some(value)).await?,
                End::Other(leaf) => self.split_leaf(lane, &mut at, leaf, path, value).await?,
                End::Prefix(header, matched) => {
                    self.split_path(lane, &mut at, (header, matched), path, value).await?
                }
                End::NoSlot(node, header) => {
                    let added = Added { byte: path[header.branch()], path, value };
                    self.insert(lane, &mut at, node, added).await?
                }
                End::Frozen(node) => {
                    self.help(lane, path, &mut at, node).await?;
                    false
                }
                End::Found => false,
            };
            if done {
                return Ok(true);
            }
            if self.session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
        }
    }

    /// Deletes a key. Returns whether it had a value.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) async fn delete(&self, lane: &mut Lane, path: &[u8]) -> Result<bool, IndexError> {
        let guard = self.session.epochs.enter();
        let done = self.delete_guarded(lane, path).await;
        if done.as_ref().is_err_and(|error| error.ran() != Ran::No) || self.session.is_given_up() {
            guard.keep();
            lane.nodes.clear();
        } else {
            self.give_back(lane).await;
        }
        done
    }

    async fn delete_guarded(&self, lane: &mut Lane, path: &[u8]) -> Result<bool, IndexError> {
        let mut at = self.start(&mut lane.own, path).await?;
        let until = self.session.fabric.now() + self.patience;
        loop {
            match self.walk(&mut lane.own, path, &mut at, Purpose::Delete).await? {
                End::Leaf(leaf) => {
                    if self.replace(lane, &mut at, Some(leaf), path, None).await? {
                        self.counts.emptied.add();
                        if let View::Node { at: node, kind, generation } =
                            self.session.layout.view(at.above)?
                        {
                            // The delete is complete. A later one shrinks the node.
                            let shrunk = self.shrink(lane, path, NodeAt { at: node, kind, generation }).await;
                            if shrunk.is_err_and(|error| error.ran() != Ran::No) {
                                self.session.give_up();
                            }
                        }
                        return Ok(true);
                    }
                }
                End::Frozen(node) => self.help(lane, path, &mut at, node).await?,
                _ => return Ok(false),
            }
            if self.session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
        }
    }

    /// Replaces the leaf of a slot, if it has one, by a new leaf or by none. Returns false if the slot has changed.
    async fn replace(
        &self,
        lane: &mut Lane,
        at: &mut At,
        old: Option<LeafAt>,
        path: &[u8],
        value: Option<Value<'_>>,
    ) -> Result<bool, IndexError> {
        let apart = old.and_then(|_| pointer_of(&lane.own.leaf));
        let mark = match old {
            Some(leaf) if !mutants::OLD_LEAF_VALID.is_on() => {
                let (_, head) = head_of(&lane.own.leaf).ok_or(Damaged("a leaf that is too short"))?;
                Some((leaf.at, head))
            }
            _ => None,
        };
        let (slot, writes) = match value {
            Some(value) => {
                let (slot, write) = self.draft_leaf(lane, at.slot_at, at.slot.partial(), path, value).await?;
                (slot, vec![write])
            }
            None => (Slot::empty(at.slot.partial()), Vec::new()),
        };
        let was_null = at.slot.is_null();
        if !self.prepare(lane, at, path, writes, mark).await? || !self.swap_at(lane, at, path, slot).await? {
            return Ok(false);
        }
        match old {
            Some(leaf) => {
                self.counts.replaced.add();
                self.units.retire(leaf.at, leaf.class, leaf.generation);
                self.retire_value(apart);
            }
            None if !was_null => self.counts.revivals.add(),
            None => {}
        }
        Ok(true)
    }

    /// Fills a null slot of a node that has no slot for a byte, or adds the leaf to a copy of the node. Returns false
    /// if another client has changed that place; then `at` is where the walk goes on.
    async fn insert(
        &self,
        lane: &mut Lane,
        at: &mut At,
        node: NodeAt,
        added: Added<'_>,
    ) -> Result<bool, IndexError> {
        let locked = self.lock(lane, node).await?;
        let done = self.insert_locked(lane, at, node, added).await;
        self.unlock(lane, locked).await;
        done
    }

    /// Does the same in a node that the client has locked, and that is in the buffers.
    async fn insert_locked(
        &self,
        lane: &mut Lane,
        at: &mut At,
        node: NodeAt,
        added: Added<'_>,
    ) -> Result<bool, IndexError> {
        let view = NodeView::of(&lane.own.node)?;
        let slots: Vec<Slot> = view.slots().collect();
        if view.is_closing() || slots.iter().any(|slot| !slot.is_null() && slot.partial() == added.byte) {
            // The walk goes on below the slot `at`, and meets what is there now.
            return Ok(false);
        }
        let Some(index) = slots.iter().position(|slot| slot.is_null()) else {
            // The slot is CASed after the node is frozen, so its own node must not have been replaced.
            if !at.is_fresh && self.refresh(&mut lane.own, added.path, at).await? {
                return Ok(false);
            }
            return self.replace_node(lane, at, node, Some(added)).await;
        };
        let slot_at = slot_at(node.at, index);
        let (slot, write) = self.draft_leaf(lane, slot_at, added.byte, added.path, added.value).await?;
        self.write_new(lane, vec![write], None).await?;
        match self.swap_slot(&mut lane.own, slot_at, Slot::NULL, slot).await? {
            Ok(()) => {
                self.note_linked(lane, slot_at, slot);
                Ok(true)
            }
            Err(_) => {
                self.counts.slot_failures.add();
                Ok(false)
            }
        }
    }

    /// Puts nodes in front of the leaf of another key, which lead to that leaf and to a new one. Returns false if the
    /// slot has changed.
    async fn split_leaf(
        &self,
        lane: &mut Lane,
        at: &mut At,
        leaf: LeafAt,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let layout = &self.session.layout;
        let Leaf::Whole(found) = leaf_of(&layout.spec, leaf.generation, &lane.own.leaf)? else {
            return Err(Damaged("a leaf that has changed in the buffers").into());
        };
        let common = found.path.iter().zip(path).take_while(|(one, other)| one == other).count();
        if common >= found.path.len() || common >= path.len() || common < at.depth {
            return Err(Damaged("a key that is a prefix of another").into());
        }
        let theirs = at.slot.with_partial(found.path[common]);
        // Each node above the last one has as long a prefix as possible, and one slot.
        let count = (common - at.depth) / (PREFIX_MAX + 1) + 1;
        self.take_nodes(lane, SMALLEST.class(), count).await?;
        let last = lane.nodes[count - 1].unit.at;
        let (ours, write) = self.draft_leaf(lane, slot_at(last, 1), path[common], path, value).await?;
        let (mut writes, mut slots, mut end) = (vec![write], vec![theirs, ours], common);
        for index in (0..count).rev() {
            let (node, start) = (lane.nodes[index].unit, at.depth + index * (PREFIX_MAX + 1));
            let mut image = Vec::new();
            copied_bytes(
                node.generation,
                Header::new(start, SMALLEST, &path[start..end]),
                &slots,
                &mut image,
            );
            writes.push((node.at, image));
            let partial = if index == 0 { at.slot.partial() } else { path[start - 1] };
            slots = vec![layout.copied_slot(partial, (node.at, SMALLEST), node.generation)];
            end = start.saturating_sub(1);
        }
        let first = slots[0];
        if !self.prepare(lane, at, path, writes, None).await? || !self.swap_at(lane, at, path, first).await? {
            return Ok(false);
        }
        self.counts.leaf_splits.add();
        Ok(true)
    }

    /// Puts a node in front of a node with a longer prefix, which leads to that node and to a new leaf. Returns false
    /// if the slot has changed.
    async fn split_path(
        &self,
        lane: &mut Lane,
        at: &mut At,
        (header, matched): (Header, usize),
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let layout = &self.session.layout;
        let prefix = header.prefix_from(at.depth).ok_or(Damaged("a node at a wrong depth"))?;
        let (theirs, depth) = (at.slot.with_partial(prefix[matched]), at.depth + matched);
        self.take_nodes(lane, SMALLEST.class(), 1).await?;
        let above = lane.nodes[0].unit;
        let (ours, write) = self.draft_leaf(lane, slot_at(above.at, 1), path[depth], path, value).await?;
        let mut image = Vec::new();
        let header = Header::new(at.depth, SMALLEST, &path[at.depth..depth]);
        copied_bytes(above.generation, header, &[theirs, ours], &mut image);
        let slot = layout.copied_slot(at.slot.partial(), (above.at, SMALLEST), above.generation);
        let writes = vec![write, (above.at, image)];
        if !self.prepare(lane, at, path, writes, None).await? || !self.swap_at(lane, at, path, slot).await? {
            return Ok(false);
        }
        self.counts.path_splits.add();
        Ok(true)
    }

    /// Takes and encodes the operation's leaf. Returns its slot, and what is to be written.
    async fn draft_leaf(
        &self,
        lane: &mut Lane,
        slot_at: Far,
        partial: u8,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<(Slot, (Far, Vec<u8>)), IndexError> {
        self.take_leaf(lane, path, value).await?;
        self.encode_leaf(lane, slot_at, path);
        let leaf = lane.leaf.expect("it was taken").unit;
        let slot = self.session.layout.leaf_slot(partial, leaf.at, leaf.class, leaf.generation);
        Ok((slot, (leaf.at, lane.image.clone())))
    }

    /// Writes what a slot is about to lead to, and marks the leaf `old`. Reads the slot again at the same time, unless
    /// it is fresh. Returns false if it has changed; then `at` is where the walk goes on.
    async fn prepare(
        &self,
        lane: &mut Lane,
        at: &mut At,
        path: &[u8],
        writes: Vec<(Far, Vec<u8>)>,
        old: Option<(Far, Head)>,
    ) -> Result<bool, IndexError> {
        if at.is_fresh {
            return self.write_new(lane, writes, old).await.map(|()| true);
        }
        let read = self.write_and_read(lane, writes, old, &self.reads_of(at)?).await?;
        let current = self.current_of(at, &read)?;
        Ok(!self.note_current(&mut lane.own, path, at, current).await?)
    }

    /// Replaces the slot `at`. Returns false if it has changed; then `at` is where the walk goes on.
    async fn swap_at(
        &self,
        lane: &mut Lane,
        at: &mut At,
        path: &[u8],
        slot: Slot,
    ) -> Result<bool, IndexError> {
        match self.swap_slot(&mut lane.own, at.slot_at, at.slot, slot).await? {
            Ok(()) => {
                self.note_linked(lane, at.slot_at, slot);
                (at.slot, at.is_fresh) = (slot, true);
                return Ok(true);
            }
            Err(found) if found.is_frozen() => self.restart(&mut lane.own, path, at).await?,
            Err(found) => {
                self.cache.borrow_mut().update(at.slot_at, found);
                (at.slot, at.is_fresh) = (found, true);
            }
        }
        self.counts.slot_failures.add();
        Ok(false)
    }
}
