//! The locks of nodes, and the copies that replace nodes: with 4, 16, 48 and 256 slots.
//!
//! A writer that fills a null slot of a node, or replaces the node, has the node's lock. A slot that is not null is
//! changed by CAS without the lock: to another leaf, to a node in front of what it had, or to an empty slot. A slot
//! never becomes null again, and never changes its partial byte. So no two slots of a node have the same partial byte.
//!
//! A node that has no null slot, or too few slots in use, is replaced by a copy:
//! 1. lock the node, and take the memory of the copy;
//! 2. freeze the node and its slots, by masked CAS, which return what is copied;
//! 3. write the copy, without the slots of deleted keys;
//! 4. swing the slot that leads to the node, by CAS;
//! 5. free the lock, and retire the node.
//!
//! If the CAS fails, the slot has moved, or its own node is being replaced. Then the node stays frozen, and also if no
//! memory is left, or the writer dies between 2 and 4. The next writer that meets the node *thaws* it, with its lock,
//! if a slot still leads to it. That takes no memory, so keys can be deleted in a full store.
//!
//! Nobody but the holder of a node's lock unlinks the node. So a node that is linked when a writer with its lock has
//! read the slot stays linked until the writer frees the lock. A CAS of 4 that may still run would unlink it later, and
//! the copy would lack what was changed since: so a client with such a request gives up and keeps the lock, which is
//! free once the client is fenced.
//!
//! A copy with one leaf and nothing else is not written: the leaf takes the place of the node. A node with one node
//! below it stays, and the prefixes are not merged.
//!
//! Differs from ROWEX (section 4.2 of its paper): the node above is not locked. Its slot is swung by CAS, which fails
//! if the node above is frozen or has another node there. All slots are changed by CAS, so the lock mainly keeps
//! writers from replacing a node twice. Its two waves are what ROWEX costs in far memory.
//!
//! Invariant: a null slot is filled, and a slot is frozen, only by the holder of the node's lock.
//! Invariant: a node and all its slots are frozen before it is unlinked, and stay frozen until its unit is reused.
//! Invariant: a lock is freed by its holder only if none of the holder's requests under it may still run.
//! Invariant: a lane has at most one lock, and its record at the lock's member names the node.

use super::walk::{End, NodeAt, Purpose};
use super::{Client, mutants};
use crate::index::IndexError;
use crate::index::place::Damaged;
use crate::index::radix::drafts::{Lane, New, Value};
use crate::index::radix::layout::{
    FROZEN_MASK, FROZEN_NODE_MASK, Far, Header, NodeType, NodeView, Slot, View, copied_bytes, lock_at,
    slot_at,
};
use crate::index::radix::read::At;
use crate::index::radix::session::refused;
use crate::index::turns::Turn;
use crate::lease::LockWord;
use crate::redo;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, Mode, Status, cas, read, write};
use std::time::Duration;
use zerocopy::little_endian::U64;

/// Number of CAS in one chain.
const CAS_PER_CHAIN: usize = 32;

/// A lock that a lane has. The other lanes that want it wait until this is dropped.
pub(super) struct Locked<'a> {
    node: NodeAt,
    word: LockWord,
    _turn: Turn<'a, Far>,
}

/// A leaf that is put into the copy of a node.
pub(super) struct Added<'a> {
    pub(super) byte: u8,
    pub(super) path: &'a [u8],
    pub(super) value: Value<'a>,
}

impl<F: Fabric + Clock> Client<F> {
    /// Locks a node, and reads it under the lock, into the buffers. The lanes of the client do so one after the other.
    ///
    /// # Errors
    /// [`IndexError`]; the client does not have the lock, or has given up.
    pub(super) async fn lock(&self, lane: &mut Lane, node: NodeAt) -> Result<Locked<'_>, IndexError> {
        let until = self.session.fabric.now() + self.patience;
        let turn = self.locals.enter(node.at).await;
        let word = self.lock_at_node(lane, node, until).await?;
        Ok(Locked { node, word, _turn: turn })
    }

    async fn lock_at_node(
        &self,
        lane: &mut Lane,
        node: NodeAt,
        until: Duration,
    ) -> Result<LockWord, IndexError> {
        let (session, layout) = (&self.session, &self.session.layout);
        let (class, table) = (node.kind.class(), &layout.members[node.at.member()]);
        let object = layout.object(node.at, class)?;
        let word = session.next_word(lane.number).await?;
        let intent = redo::intent(word, &object);
        loop {
            let mut chain = lane.own.chain.begin(table.key());
            let noted = chain.also(write(session.record(node.at.member(), word), &intent));
            let taken = chain.also(cas(Mode::Eq, object.lock, &LockWord::FREE, &word));
            let len = node.kind.read_len();
            let bytes = chain.also(read(layout.addr(node.at, len.into())?, len));
            let ran = session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
            ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
            let reply = &lane.own.reply;
            let found = *reply.get(taken).map_err(refused)?;
            let is_taken = reply.status(taken) == Status::Ok;
            let read = reply.get(bytes).map_err(refused);
            if is_taken && (read.is_err() || reply.status(noted) != Status::Ok) {
                session.give_up();
            }
            let bytes = read?;
            if is_taken {
                self.counts.node_locks.add();
                lane.own.node.clear();
                lane.own.node.extend_from_slice(bytes);
                // The node was linked under this operation's guard, so it was not reused.
                if !NodeView::of(&lane.own.node)?.is_of(node.generation) {
                    self.unlock_at_node(lane, node, word).await;
                    return Err(Damaged("a locked node of another generation").into());
                }
                return Ok(word);
            }
            self.counts.lock_failures.add();
            if session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
            session.wait_for_owner(lane.number, (node.at, class), found).await?;
        }
    }

    /// Frees the lock of a node. If that fails, the client gives up, so that others recover the lock. A client that has
    /// given up keeps the lock: a request under it may still run.
    pub(super) async fn unlock(&self, lane: &mut Lane, locked: Locked<'_>) {
        self.unlock_at_node(lane, locked.node, locked.word).await;
    }

    async fn unlock_at_node(&self, lane: &mut Lane, node: NodeAt, word: LockWord) {
        if self.session.is_given_up() && !mutants::FREED_TOO_EARLY.is_on() {
            return;
        }
        let layout = &self.session.layout;
        let table = &layout.members[node.at.member()];
        let Ok(addr) = layout.addr(node.at.plus(lock_at(node.kind.class())), 8) else { return };
        let mut chain = lane.own.chain.begin(table.key());
        let freed = chain.also(cas(Mode::Eq, addr, &word, &LockWord::FREE));
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        if ran.is_err() || lane.own.reply.status(freed) != Status::Ok {
            self.session.give_up();
        }
    }

    /// Thaws a frozen node that a writer has met below the slot `at`, unless the slot leads elsewhere by now.
    pub(super) async fn help(
        &self,
        lane: &mut Lane,
        path: &[u8],
        at: &mut At,
        node: NodeAt,
    ) -> Result<(), IndexError> {
        self.counters.frozen.add();
        let locked = self.lock(lane, node).await?;
        let is_closing = NodeView::of(&lane.own.node).map(|view| view.is_closing());
        let helped = match is_closing {
            Ok(true) => match self.refresh(&mut lane.own, path, at).await {
                Ok(has_changed) if has_changed && !mutants::THAWED_UNLINKED.is_on() => Ok(()),
                Ok(_) => self.thaw(lane, node).await,
                Err(error) => Err(error),
            },
            Ok(false) => Ok(()),
            Err(damaged) => Err(damaged.into()),
        };
        self.unlock(lane, locked).await;
        helped
    }

    /// Replaces a node by a smaller one, if that has room for the slots in use.
    pub(super) async fn shrink(&self, lane: &mut Lane, path: &[u8], node: NodeAt) -> Result<(), IndexError> {
        self.read(&mut lane.own, node.at, node.kind.read_len()).await?;
        if !is_sparse(node.kind, &NodeView::of(lane.own.reply.output(0))?) {
            return Ok(());
        }
        let mut at = self.start_at_root(&mut lane.own).await?;
        let End::Found = self.walk(&mut lane.own, path, &mut at, Purpose::Find(node.at)).await? else {
            return Ok(());
        };
        let View::Node { generation, kind, .. } = self.session.layout.view(at.slot)? else { return Ok(()) };
        let node = NodeAt { at: node.at, kind, generation };
        let locked = self.lock(lane, node).await?;
        let done = match NodeView::of(&lane.own.node) {
            Ok(view) if is_sparse(kind, &view) && !view.is_closing() => {
                self.replace_node(lane, &mut at, node, None).await.map(drop)
            }
            Ok(_) => Ok(()),
            Err(damaged) => Err(damaged.into()),
        };
        self.unlock(lane, locked).await;
        done
    }

    /// Replaces a node, which the client has locked and which is in the buffers, by a copy, to which a leaf may be
    /// added. The slot `at` is fresh. Returns false if that slot has changed.
    pub(super) async fn replace_node(
        &self,
        lane: &mut Lane,
        at: &mut At,
        node: NodeAt,
        added: Option<Added<'_>>,
    ) -> Result<bool, IndexError> {
        let view = NodeView::of(&lane.own.node)?;
        let (header, generation) = (view.header()?, view.generation());
        let read: Vec<Slot> = view.slots().collect();
        // Memory is taken first, so that a node is seldom frozen for lack of it.
        self.take_copy(lane, live(&read).count(), added.as_ref()).await?;
        let frozen = if mutants::COPIED_UNFROZEN.is_on() { read } else { self.freeze(lane, node).await? };
        let mut slots: Vec<Slot> = live(&frozen).collect();
        // Meanwhile, keys may have been deleted, and puts may have filled empty slots.
        let kind = self.take_copy(lane, slots.len(), added.as_ref()).await?;
        let (new, layout, mut writes) = (lane.nodes[0].unit, &self.session.layout, Vec::new());
        if let Some(Added { byte, path, .. }) = &added {
            self.encode_leaf(lane, slot_at(new.at, slots.len()), path);
            let leaf = lane.leaf.expect("it was taken").unit;
            slots.push(layout.leaf_slot(*byte, leaf.at, leaf.class, leaf.generation));
            writes.push((leaf.at, lane.image.clone()));
        }
        let partial = at.slot.partial();
        let slot = match &slots[..] {
            [] => Slot::empty(partial),
            [leaf] if leaf.is_leaf() => leaf.with_partial(partial),
            _ => {
                let header = Header { kind, ..header };
                let mut image = Vec::new();
                copied_bytes(new.generation, header, &slots, &mut image);
                writes.push((new.at, image));
                layout.copied_slot(partial, (new.at, kind), new.generation)
            }
        };
        self.write_new(lane, writes, None).await?;
        let swapped = self.swap_slot(&mut lane.own, at.slot_at, at.slot, slot).await;
        if swapped.as_ref().is_err_and(|error| error.ran() != Ran::No) {
            self.session.give_up();
        }
        if let Err(found) = swapped? {
            self.counts.slot_failures.add();
            if !found.is_frozen() {
                self.cache.borrow_mut().update(at.slot_at, found);
                at.slot = found;
            }
            return Ok(false);
        }
        if added.is_some() {
            self.note_linked(lane, at.slot_at, slot);
        } else {
            self.cache.borrow_mut().update(at.slot_at, slot);
            let count = if slot.is_leaf() { 0 } else { lane.nodes.len() };
            lane.nodes.drain(..count).for_each(|New { unit, .. }| self.units.linked(&unit));
        }
        at.slot = slot;
        self.units.retire(node.at, node.kind.class(), generation);
        self.count_replaced(node.kind, if slot.is_leaf() { None } else { Some(kind) });
        Ok(true)
    }

    /// Takes the memory of a copy with this number of slots, and of the leaf that is added to them. Returns its type.
    async fn take_copy(
        &self,
        lane: &mut Lane,
        live: usize,
        added: Option<&Added<'_>>,
    ) -> Result<NodeType, IndexError> {
        let kind = NodeType::copied_for(live + usize::from(added.is_some()));
        let kind = kind.ok_or(Damaged("a node with two slots of one byte"))?;
        self.take_nodes(lane, kind.class(), 1).await?;
        if let Some(Added { path, value, .. }) = added {
            self.take_leaf(lane, path, *value).await?;
        }
        Ok(kind)
    }

    fn count_replaced(&self, from: NodeType, to: Option<NodeType>) {
        let counters = &self.counters;
        match (from.slots(), to) {
            (_, None) => counters.collapsed.add(),
            (_, Some(to)) if to < from => counters.shrunk.add(),
            (_, Some(to)) if to == from => counters.cleaned.add(),
            (4, _) => counters.grown_from_4.add(),
            (16, _) => counters.grown_from_16.add(),
            _ => counters.grown_from_48.add(),
        }
    }

    /// Freezes a node that the client has locked, and its slots. Returns what these have from now on.
    async fn freeze(&self, lane: &mut Lane, node: NodeAt) -> Result<Vec<Slot>, IndexError> {
        self.set_frozen(lane, node, true).await
    }

    /// Thaws a node that the client has locked, and that is linked.
    async fn thaw(&self, lane: &mut Lane, node: NodeAt) -> Result<(), IndexError> {
        self.set_frozen(lane, node, false).await?;
        self.counters.thawed.add();
        Ok(())
    }

    async fn set_frozen(
        &self,
        lane: &mut Lane,
        node: NodeAt,
        is_frozen: bool,
    ) -> Result<Vec<Slot>, IndexError> {
        let layout = &self.session.layout;
        let table = &layout.members[node.at.member()];
        let masks @ [slot_mask, node_mask] = [FROZEN_MASK, FROZEN_NODE_MASK].map(U64::new);
        let zeros = [U64::ZERO; 2];
        let ([slot_from, node_from], [slot_to, node_to]) =
            if is_frozen { (zeros, masks) } else { (masks, zeros) };
        let mut slots = Vec::new();
        for first in (0..node.kind.slots()).step_by(CAS_PER_CHAIN) {
            let mut chain = lane.own.chain.begin(table.key());
            let count = CAS_PER_CHAIN.min(node.kind.slots() - first);
            for index in first..first + count {
                let addr = layout.addr(slot_at(node.at, index), 8)?;
                chain.also(cas(Mode::Eq, addr, &slot_from, &slot_to).masked(&slot_mask, &slot_mask));
            }
            if first == 0 {
                let addr = layout.addr(node.at, 8)?;
                chain.also(cas(Mode::Eq, addr, &node_from, &node_to).masked(&node_mask, &node_mask));
            }
            let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
            ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
            for index in 0..count {
                match lane.own.reply.status_at(index) {
                    Some(Status::Ok | Status::CasFailed) => {}
                    status => return Err(refused(status.unwrap_or(Status::NotReady))),
                }
                let word = lane.own.reply.output(index);
                let word = word.try_into().map_err(|_| Damaged("a short word"))?;
                slots.push(Slot(u64::from_le_bytes(word)).thawed());
            }
        }
        Ok(slots)
    }
}

/// The slots that lead to keys.
fn live(slots: &[Slot]) -> impl Iterator<Item = Slot> {
    slots.iter().copied().filter(|slot| !slot.is_null() && *slot != Slot::empty(slot.partial()))
}

/// Whether so few slots of a node lead to keys that a smaller node is better. It has room for at least one more key.
fn is_sparse(kind: NodeType, node: &NodeView<'_>) -> bool {
    let slots: Vec<Slot> = node.slots().collect();
    match kind.slots() {
        4 => {
            let mut live = live(&slots);
            live.next().is_none_or(|first| first.is_leaf() && live.next().is_none())
        }
        16 => live(&slots).count() <= 3,
        48 => live(&slots).count() <= 12,
        _ => live(&slots).count() <= 37,
    }
}
