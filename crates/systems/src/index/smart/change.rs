//! Changes: put, put if absent, and delete.
//!
//! - **A key with a leaf** is updated in place: lock the leaf, and read it again in the same list; then write the redo
//!   record and the leaf, whose last word frees the lock. A delete sets the leaf's dead bit under the lock, for good,
//!   and empties the slot. The client whose CAS replaces the slot of a dead leaf retires the leaf.
//! - **A key without one** gets a new leaf, which is written before the CAS of a slot makes it visible. The slot is one
//!   that leads to the key's path and is empty or has a dead leaf; a null slot of a node; or the slot of another leaf
//!   or node, in front of which new nodes are put (leaf split, path split).
//!
//! A long value lies apart, in a unit that is written before the leaf. So a leaf never points to a value that is not
//! whole. The client that replaces the pointer, or unlinks the dead leaf, retires the old value.
//!
//! Inner nodes are changed without locks. Every writer tests the slots of a node in ascending order, a slot never
//! becomes null again, and it never changes its partial byte. So no two slots of a node have the same partial byte.
//!
//! A node without a null slot in use gets the leaf in a slot behind them ("insert behind"), which becomes visible when
//! the header's type rises (type switch). A writer that finds its key's byte behind the slots in use switches the type
//! first, since the other writer may have died.
//!
//! The lower rungs of the ladder ([`Rung`]) are for measurements. Without updates in place, a change of a key with a
//! leaf marks the leaf as replaced and CASes the slot; no leaf is ever locked or dead then. Without lock-free nodes, a
//! writer locks the node whose slot it sets or splits. Without the embedded lock, a request of its own frees a leaf's
//! lock, which is in the leaf all the same; in the paper it is in the memory of the NIC.
//!
//! Differs from the paper (4.2): the type in the header alone decides which slots are visible, so that the slot of the
//! node is a hint, and a path split cannot hide a type switch from readers. A dead leaf is never revived: a new leaf
//! takes its place, so no update can bring back a deleted value. A slot is emptied and not set to null.
//!
//! Invariant: a change is one CAS or one WRITE under the leaf's lock. What follows, such as reverse pointers and
//! headers after a split, only makes later walks shorter. So a client may die at any point.
//! Invariant: a leaf's `rev_ptr` is changed by CAS only, and no WRITE of a leaf in the tree covers it.

use super::walk::{End, Misses};
use super::{Client, mutants};
use crate::index::place::Damaged;
use crate::index::radix::drafts::{Lane, Put, Value, content_of, of_change};
use crate::index::radix::layout::{
    self, Class, Far, HEAD_AT, Header, Leaf, NodeType, NodeView, Slot, TYPE_MASK, View, header_at,
    leaf_bytes, leaf_of, node_bytes, pointer_of, slot_at,
};
use crate::index::radix::read::{At, LeafAt, Met, Own, lock_of};
use crate::index::radix::session::refused;
use crate::index::{IndexError, Rung};
use crate::lease::LockWord;
use crate::redo;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, Mode, Status, cas, read, write};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Number of walks by which a delete looks for the slot of its dead leaf, if others move the leaf.
const UNLINKS_MAX: u32 = 8;
const PAUSE: Duration = Duration::from_micros(10);

/// What an insert into a node has done.
enum Inserted {
    Done,
    /// Another writer has put the slot of this byte there.
    Follow(At),
}

impl<F: Fabric + Clock> Client<F> {
    /// Stores a value. Returns false if the key has one and the put is conditional. `value` is called when the value is
    /// about to be written.
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
            let done = match self.walk(&mut lane.own, path, &mut at, Misses::Assumed).await? {
                Err(Met::Torn(leaf, word)) => {
                    self.await_whole(lane.number, leaf, word).await?;
                    false
                }
                Ok(End::Leaf(_)) if put == Put::IfAbsent => return Ok(false),
                Ok(End::Leaf(leaf)) if self.rung() < Rung::InPlace => {
                    self.replace(lane, &mut at, leaf, path, Some(value)).await?
                }
                Ok(End::Leaf(leaf)) => self.update(lane, leaf, path, value).await?,
                Ok(end) if self.rung() == Rung::Art => {
                    let slot_at = if let End::NoSlot(node, _) = end { slot_at(node, 0) } else { at.slot_at };
                    let lock = self.lock_node(lane, slot_at).await?;
                    let done = self.add(lane, &mut at, end, path, value).await;
                    self.unlock_node(lane, lock).await;
                    done?
                }
                Ok(end) => self.add(lane, &mut at, end, path, value).await?,
            };
            if done {
                return Ok(true);
            }
            if self.session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
        }
    }

    /// Adds a leaf of a key that has none, where its walk has ended. Returns false if another client has changed that
    /// place; then `at` is where the walk goes on.
    async fn add(
        &self,
        lane: &mut Lane,
        at: &mut At,
        end: End,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        match end {
            End::Leaf(_) => Ok(false),
            End::Empty => {
                let was_null = at.slot.is_null();
                let done = self.link(lane, at, path, value).await?;
                if done && !was_null {
                    self.counts.revivals.add();
                }
                Ok(done)
            }
            End::Dead(leaf, _) => {
                let done = self.link(lane, at, path, value).await?;
                if done {
                    self.counts.revivals.add();
                    self.retire_leaf(leaf, &lane.own.leaf);
                }
                Ok(done)
            }
            End::Other(leaf) => self.split_leaf(lane, at, leaf, path, value).await,
            End::NoSlot(node, header) => match self.insert(lane, at, (node, header), path, value).await? {
                Inserted::Done => Ok(true),
                Inserted::Follow(slot) => {
                    *at = slot;
                    Ok(false)
                }
            },
            End::Prefix(node, header, matched) => {
                self.split_path(lane, at, (node, header, matched), path, value).await
            }
        }
    }

    fn rung(&self) -> Rung {
        self.session.layout.spec.rung
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
        }
        done
    }

    async fn delete_guarded(&self, lane: &mut Lane, path: &[u8]) -> Result<bool, IndexError> {
        let mut at = self.start(&mut lane.own, path).await?;
        let until = self.session.fabric.now() + self.patience;
        loop {
            match self.walk(&mut lane.own, path, &mut at, Misses::Verified).await? {
                Err(Met::Torn(leaf, word)) => self.await_whole(lane.number, leaf, word).await?,
                Ok(End::Leaf(leaf)) if self.rung() < Rung::InPlace => {
                    if self.replace(lane, &mut at, leaf, path, None).await? {
                        self.counts.emptied.add();
                        return Ok(true);
                    }
                }
                Ok(End::Leaf(leaf)) => {
                    if let Some(word) = self.lock(lane, leaf, path).await? {
                        self.kill(lane, &mut at, leaf, word).await?;
                        self.unlink(lane, &mut at, leaf, path).await;
                        return Ok(true);
                    }
                }
                Ok(_) => return Ok(false),
            }
            if self.session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
        }
    }

    /// Makes a leaf dead whose lock the client holds, frees the lock, and tries to empty the slot `at`.
    async fn kill(
        &self,
        lane: &mut Lane,
        at: &mut At,
        leaf: LeafAt,
        word: LockWord,
    ) -> Result<(), IndexError> {
        let layout = &self.session.layout;
        let table = &layout.members[leaf.at.member()];
        let (_, head) = head_of(&lane.own.leaf)?;
        let dead = U64::new(head.dead().0);
        let (old, empty) = empty_of(at.slot);
        let is_same_member = at.slot_at.member() == leaf.at.member();
        let mut chain = lane.own.chain.begin(table.key());
        let written = chain.also(write(layout.addr(leaf.at.plus(HEAD_AT), 8)?, dead.as_bytes()));
        let freed = chain.also(cas(Mode::Eq, layout.addr(lock_of(leaf), 8)?, &word, &LockWord::FREE));
        let emptied = match is_same_member {
            true => Some(chain.also(cas(Mode::Eq, layout.addr(at.slot_at, 8)?, &old, &empty))),
            false => None,
        };
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|_| self.session.give_up()).map_err(IndexError::Fabric)?;
        if lane.own.reply.status(written) != Status::Ok {
            self.session.give_up();
            return Err(refused(lane.own.reply.status(written)));
        }
        match lane.own.reply.status(freed) {
            Status::Ok => {}
            // The leaf is dead, so the key is deleted if the store lives on.
            status => return Err(self.session.unsettled(not_freed(status))),
        }
        if emptied.is_some_and(|emptied| lane.own.reply.status(emptied) == Status::Ok) {
            self.note_emptied(&lane.own, at, leaf, Slot(empty.get()));
        }
        Ok(())
    }

    /// Notes that the slot of a dead leaf, which is in the buffers, was emptied.
    fn note_emptied(&self, own: &Own, at: &mut At, leaf: LeafAt, empty: Slot) {
        at.slot = empty;
        self.counts.emptied.add();
        self.cache.borrow_mut().update(at.slot_at, empty);
        self.retire_leaf(leaf, &own.leaf);
    }

    /// Empties the slot of a dead leaf, if it still has one. The delete is complete in any case: a later writer
    /// replaces what is left.
    async fn unlink(&self, lane: &mut Lane, at: &mut At, leaf: LeafAt, path: &[u8]) {
        for _ in 0..UNLINKS_MAX {
            match self.session.layout.view(at.slot) {
                Ok(View::Leaf { at: found, .. }) if found == leaf.at => {
                    let empty = Slot(empty_of(at.slot).1.get());
                    match self.swap_slot(&mut lane.own, at.slot_at, at.slot, empty).await {
                        Ok(Ok(())) => return self.note_emptied(&lane.own, at, leaf, empty),
                        Ok(Err(found)) => (at.slot, at.is_fresh) = (found, true),
                        Err(error) if error.ran() == Ran::No => return,
                        Err(_) => return self.session.give_up(),
                    }
                }
                Ok(View::Node { .. }) => match self.walk(&mut lane.own, path, at, Misses::Verified).await {
                    Ok(Ok(End::Dead(found, true))) if found.at == leaf.at => {}
                    _ => return,
                },
                _ => return,
            }
        }
    }

    /// Replaces the leaf of a key by a new one, or by none. The leaf is marked first, so that a reader who has found it
    /// by a cached slot reads the slot again. The change is the CAS of the slot. Returns false if the slot has changed.
    async fn replace(
        &self,
        lane: &mut Lane,
        at: &mut At,
        leaf: LeafAt,
        path: &[u8],
        value: Option<Value<'_>>,
    ) -> Result<bool, IndexError> {
        let (_, head) = head_of(&lane.own.leaf)?;
        let old = pointer_of(&lane.own.leaf);
        let slot = match value {
            Some(value) => {
                self.take_leaf(lane, path, value).await?;
                self.encode_leaf(lane, at.slot_at, path);
                let new = lane.leaf.expect("it was taken").unit;
                let image = lane.image.clone();
                self.write_new(lane, vec![(new.at, image)], Some((leaf.at, head))).await?;
                self.session.layout.leaf_slot(at.slot.partial(), new.at, new.class, new.generation)
            }
            None => {
                self.write_new(lane, Vec::new(), Some((leaf.at, head))).await?;
                Slot::empty(at.slot.partial())
            }
        };
        if !self.swap_at(lane, at, slot).await? {
            return Ok(false);
        }
        self.counts.replaced.add();
        self.units.retire(leaf.at, leaf.class, leaf.generation);
        self.retire_value(old);
        Ok(true)
    }

    /// Locks the node that has a slot, or the root slot. The lock orders writers and protects nothing: slots are
    /// changed by CAS all the same. So a lock that stays held for the length of a lease is taken from its owner.
    async fn lock_node(&self, lane: &mut Lane, slot_at: Far) -> Result<(Far, LockWord), IndexError> {
        let (session, layout) = (&self.session, &self.session.layout);
        let (lock, word) = (layout.node_lock(slot_at)?, session.next_word(lane.number).await?);
        let table = &layout.members[lock.member()];
        let (mut held, until) = (LockWord::FREE, session.fabric.now() + layout.spec.lease());
        loop {
            let mut chain = lane.own.chain.begin(table.key());
            let taken = chain.also(cas(Mode::Eq, layout.addr(lock, 8)?, &held, &word));
            let ran = session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
            ran.map_err(IndexError::of_read)?;
            let found = *lane.own.reply.get(taken).map_err(refused)?;
            if found == held {
                self.counts.node_locks.add();
                return Ok((lock, word));
            }
            let now = session.fabric.now();
            if now >= until + self.patience || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
            held = if now >= until { found } else { LockWord::FREE };
            session.fabric.sleep(PAUSE).await;
        }
    }

    /// Frees the lock of a node. If that fails, others wait for the length of a lease.
    async fn unlock_node(&self, lane: &mut Lane, (lock, word): (Far, LockWord)) {
        let layout = &self.session.layout;
        let table = &layout.members[lock.member()];
        let Ok(addr) = layout.addr(lock, 8) else { return };
        let mut chain = lane.own.chain.begin(table.key());
        chain.also(cas(Mode::Eq, addr, &word, &LockWord::FREE));
        let _others_wait = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
    }

    /// Updates a leaf in place. Returns false if the leaf is dead.
    async fn update(
        &self,
        lane: &mut Lane,
        leaf: LeafAt,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let is_apart = self.session.layout.spec.has_values_apart();
        if is_apart {
            // So that the lock is not held meanwhile.
            self.take_value(lane, value).await?;
            if !mutants::LEAF_BEFORE_VALUE.is_on() {
                self.write_new(lane, Vec::new(), None).await?;
            }
        }
        let Some(word) = self.lock(lane, leaf, path).await? else { return Ok(false) };
        let layout = &self.session.layout;
        let object = layout.object(leaf.at, leaf.class)?;
        let table = &layout.members[leaf.at.member()];
        let (rev_ptr, _) = head_of(&lane.own.leaf)?;
        let old = pointer_of(&lane.own.leaf);
        if !is_apart {
            value(&mut lane.own.value);
        }
        let content = (path, content_of(&lane.own, lane.apart));
        leaf_bytes(leaf.class, (rev_ptr, leaf.generation), content, LockWord::FREE, &mut lane.image);
        let bytes = &lane.image[HEAD_AT as usize..];
        lane.record.fill(word, &object, bytes);
        let mut chain = lane.own.chain.begin(table.key());
        let recorded = match layout.spec.redo && !redo::mutants::RECORD_AFTER_OBJECT.is_on() {
            true => {
                let record = self.session.record(leaf.at.member(), word);
                Some(chain.also(write(record, lane.record.as_bytes())))
            }
            false => None,
        };
        let is_embedded = self.rung() >= Rung::EmbeddedLock;
        let without_lock = &bytes[..bytes.len() - size_of::<LockWord>()];
        let written = match mutants::REV_PTR_ROLLED_BACK.is_on() {
            true => chain.also(write(layout.addr(leaf.at, leaf.class.size())?, &lane.image)),
            false => chain.also(write(object.at, if is_embedded { bytes } else { without_lock })),
        };
        let freed = match is_embedded {
            true => None,
            false => Some(chain.also(cas(Mode::Eq, object.lock, &word, &LockWord::FREE))),
        };
        if redo::mutants::RECORD_AFTER_OBJECT.is_on() {
            chain.also(write(self.session.record(leaf.at.member(), word), lane.record.as_bytes()));
        }
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|_| self.session.give_up()).map_err(IndexError::Fabric)?;
        match (lane.own.reply.status(written), freed.map(|freed| lane.own.reply.status(freed))) {
            (Status::Ok, None | Some(Status::Ok)) => {
                if mutants::LEAF_BEFORE_VALUE.is_on() {
                    self.write_new(lane, Vec::new(), None).await?;
                }
                lane.apart.take().into_iter().for_each(|new| self.units.linked(&new.unit));
                self.retire_value(old);
                Ok(true)
            }
            (Status::Ok, Some(status)) => Err(self.session.unsettled(not_freed(status))),
            (status, _) => {
                let recorded = recorded.map(|recorded| lane.own.reply.status(recorded));
                Err(self.session.refused_write(status, recorded))
            }
        }
    }

    /// Locks a leaf, and reads it again under the lock, into the buffers. Returns the lock's word, or `None` if the
    /// leaf is dead.
    async fn lock(&self, lane: &mut Lane, leaf: LeafAt, path: &[u8]) -> Result<Option<LockWord>, IndexError> {
        let (session, layout) = (&self.session, &self.session.layout);
        let (object, table) = (layout.object(leaf.at, leaf.class)?, &layout.members[leaf.at.member()]);
        let word = session.next_word(lane.number).await?;
        let intent = redo::intent(word, &object);
        let until = session.fabric.now() + self.patience;
        loop {
            let mut chain = lane.own.chain.begin(table.key());
            let noted = chain.also(write(session.record(leaf.at.member(), word), &intent));
            let taken = chain.also(cas(Mode::Eq, object.lock, &LockWord::FREE, &word));
            let bytes = chain.also(read(layout.addr(leaf.at, leaf.class.size())?, leaf.class.size() as u32));
            let ran = session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
            ran.inspect_err(|error| {
                if error.ran() != Ran::No {
                    session.give_up();
                }
            })
            .map_err(IndexError::of_read)?;
            let reply = &lane.own.reply;
            let found = *reply.get(taken).map_err(refused)?;
            let is_taken = reply.status(taken) == Status::Ok;
            let read = reply.get(bytes).map_err(refused);
            if is_taken && (read.is_err() || reply.status(noted) != Status::Ok) {
                session.give_up();
            }
            let read = read?;
            if is_taken && mutants::PRE_LOCK_COPY.is_on() {
                return Ok(Some(word));
            }
            lane.own.leaf.clear();
            lane.own.leaf.extend_from_slice(read);
            // The leaf was alive under this operation's guard, so it was not reused.
            let is_alive = match leaf_of(&layout.spec, leaf.generation, &lane.own.leaf) {
                Ok(Leaf::Whole(found)) if found.path == path => Ok(!found.head.is_dead()),
                Ok(Leaf::Torn(_)) if !is_taken => Ok(true),
                Ok(_) => Err(Damaged("a locked leaf that is torn, or has another key")),
                Err(damaged) => Err(damaged),
            };
            match (is_taken, is_alive) {
                (true, Ok(true)) => return Ok(Some(word)),
                (true, is_alive) => {
                    self.unlock(lane, leaf, word).await?;
                    return is_alive.map(|_| None).map_err(IndexError::from);
                }
                (false, Ok(false)) => return Ok(None),
                (false, Err(damaged)) => return Err(damaged.into()),
                (false, Ok(true)) => {}
            }
            self.counts.lock_failures.add();
            if session.fabric.now() >= until || self.is_abandoned(lane) {
                return Err(IndexError::Busy);
            }
            session.wait_for_owner(lane.number, (leaf.at, leaf.class), found).await?;
        }
    }

    /// Frees a lock under which the leaf was not changed.
    async fn unlock(&self, lane: &mut Lane, leaf: LeafAt, word: LockWord) -> Result<(), IndexError> {
        let layout = &self.session.layout;
        let table = &layout.members[leaf.at.member()];
        let mut chain = lane.own.chain.begin(table.key());
        let freed = chain.also(cas(Mode::Eq, layout.addr(lock_of(leaf), 8)?, &word, &LockWord::FREE));
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|_| self.session.give_up()).map_err(IndexError::of_read)?;
        match lane.own.reply.status(freed) {
            Status::Ok => Ok(()),
            status => {
                self.session.give_up();
                Err(not_freed(status))
            }
        }
    }

    /// Waits for the holder of the lock of a leaf that stays torn, or recovers it.
    pub(super) async fn await_whole(
        &self,
        lane: u16,
        leaf: LeafAt,
        word: LockWord,
    ) -> Result<(), IndexError> {
        if word.is_free() {
            self.session.fabric.sleep(PAUSE).await;
            return Ok(());
        }
        self.session.wait_for_owner(lane, (leaf.at, leaf.class), word).await
    }

    /// Puts a new leaf in the place of a slot that leads to no alive leaf. Returns false if the slot has changed.
    async fn link(
        &self,
        lane: &mut Lane,
        at: &mut At,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let leaf = self.new_leaf(lane, at.slot_at, path, value).await?;
        let partial = if at.depth == 0 { 0 } else { path[at.depth - 1] };
        let slot = self.session.layout.leaf_slot(partial, leaf.at, leaf.class, leaf.generation);
        self.swap_at(lane, at, slot).await
    }

    /// Replaces the slot `at`. Returns false if it has changed; then `at` has the slot that was found.
    async fn swap_at(&self, lane: &mut Lane, at: &mut At, slot: Slot) -> Result<bool, IndexError> {
        match self.swap_slot(&mut lane.own, at.slot_at, at.slot, slot).await? {
            Ok(()) => {
                (at.slot, at.is_fresh) = (slot, true);
                self.note_linked(lane, at.slot_at, slot);
                Ok(true)
            }
            Err(found) => {
                self.counts.slot_failures.add();
                self.cache.borrow_mut().update(at.slot_at, found);
                (at.slot, at.is_fresh) = (found, true);
                Ok(false)
            }
        }
    }

    /// Puts a new leaf into a null slot of a node.
    async fn insert(
        &self,
        lane: &mut Lane,
        at: &mut At,
        (node, header): (Far, Header),
        path: &[u8],
        value: Value<'_>,
    ) -> Result<Inserted, IndexError> {
        let (byte, visible) = (path[header.branch()], header.kind.slots());
        let nulls: Vec<usize> = NodeView::of(&lane.own.node)?
            .slots()
            .take(visible)
            .enumerate()
            .filter_map(|(index, slot)| slot.is_null().then_some(index))
            .collect();
        for index in nulls.into_iter().chain(visible..NodeType::MAX.slots()) {
            let slot_at = slot_at(node, index);
            let leaf = self.new_leaf(lane, slot_at, path, value).await?;
            let slot = self.session.layout.leaf_slot(byte, leaf.at, leaf.class, leaf.generation);
            match self.swap_slot(&mut lane.own, slot_at, Slot::NULL, slot).await? {
                Ok(()) => {
                    self.note_linked(lane, slot_at, slot);
                    if index >= visible && !mutants::TYPE_SWITCH_LEFT_OUT.is_on() {
                        let switched = self.switch_type(&mut lane.own, at, (node, header), index).await;
                        // The leaf is in its slot, and another writer may make it visible at any time.
                        switched.map_err(|error| self.session.unsettled(error))?;
                    }
                    return Ok(Inserted::Done);
                }
                Err(found) if found.partial() == byte => {
                    self.counts.slot_failures.add();
                    if index >= visible && !mutants::TYPE_SWITCH_NOT_HELPED.is_on() {
                        self.counters.switches_helped.add();
                        self.switch_type(&mut lane.own, at, (node, header), index).await?;
                    }
                    let depth = header.branch() + 1;
                    let above = at.slot;
                    return Ok(Inserted::Follow(At { slot_at, slot: found, above, depth, is_fresh: true }));
                }
                Err(_) => self.counts.slot_failures.add(),
            }
        }
        Err(Damaged("a node without a slot for a byte").into())
    }

    /// Raises the type of a node so that the slot with this index is visible.
    async fn switch_type(
        &self,
        own: &mut Own,
        at: &mut At,
        (node, mut header): (Far, Header),
        index: usize,
    ) -> Result<(), IndexError> {
        let layout = &self.session.layout;
        let (to, table) = (NodeType::for_slot(index), &layout.members[node.member()]);
        let is_hint = matches!(layout.view(at.slot)?, View::Node { at, kind, .. } if at == node && kind < to);
        let hint = [at.slot, at.slot.with_type(to)].map(|slot| U64::new(slot.0));
        let (is_same_member, mut is_first) = (at.slot_at.member() == node.member(), true);
        let mask = U64::new(TYPE_MASK);
        while header.kind < to {
            let (old, new) = (U64::new(header.word()), U64::new(Header { kind: to, ..header }.word()));
            let mut chain = own.chain.begin(table.key());
            let switch = cas(Mode::Eq, layout.addr(header_at(node), 8)?, &old, &new).masked(&mask, &mask);
            let switched = chain.also(switch);
            if is_first && is_hint && is_same_member {
                chain.also(cas(Mode::Eq, layout.addr(at.slot_at, 8)?, &hint[0], &hint[1]));
            }
            self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(of_change)?;
            let found = own.reply.get(switched).map_err(refused)?.get();
            let compared = if mutants::MASKED_CAS_FULL_WORD.is_on() { u64::MAX } else { TYPE_MASK };
            if (found ^ old.get()) & compared == 0 {
                self.count_switch(header.kind);
                break;
            }
            header = Header::of(found)?;
            is_first = false;
        }
        if is_hint && !is_same_member {
            let (old, new) = (Slot(hint[0].get()), Slot(hint[1].get()));
            let _only_a_hint = self.swap_slot(own, at.slot_at, old, new).await?;
        }
        Ok(())
    }

    fn count_switch(&self, from: NodeType) {
        let counters = &self.counters;
        match from.slots() {
            4 => counters.switches_from_4.add(),
            8 => counters.switches_from_8.add(),
            16 => counters.switches_from_16.add(),
            32 => counters.switches_from_32.add(),
            64 => counters.switches_from_64.add(),
            _ => counters.switches_from_128.add(),
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
        let (rev_ptr, _) = head_of(&lane.own.leaf)?;
        let Leaf::Whole(found) = leaf_of(&layout.spec, leaf.generation, &lane.own.leaf)? else {
            return Err(Damaged("a leaf that has changed in the buffers").into());
        };
        let common = found.path.iter().zip(path).take_while(|(one, other)| one == other).count();
        if common >= found.path.len() || common >= path.len() || common < at.depth {
            return Err(Damaged("a key that is a prefix of another").into());
        }
        let theirs = found.path[common];
        let (partial, depth) = (at.slot.partial(), at.depth);
        let count = (common - depth) / (PREFIX_AND_BRANCH) + 1;
        self.take_nodes(lane, Class::NODE, count).await?;
        let at_of = |lane: &Lane, index: usize| lane.nodes[index].unit.at;
        let last = at_of(lane, count - 1);
        self.take_leaf(lane, path, value).await?;
        self.encode_leaf(lane, slot_at(last, 1), path);
        let new = lane.leaf.expect("it was taken").unit;
        let mut writes = vec![(new.at, lane.image.clone())];
        let mut from = depth;
        for index in 0..count {
            let (node, mut bytes) = (at_of(lane, index), Vec::new());
            let above = if index == 0 { at.slot_at } else { slot_at(at_of(lane, index - 1), 0) };
            let is_last = index + 1 == count;
            let end = if is_last { common } else { from + PREFIX_AND_BRANCH - 1 };
            let header = Header::new(from, NodeType::SMALLEST, &path[from..end]);
            let slots = if is_last {
                let own = layout.leaf_slot(path[common], new.at, new.class, new.generation);
                vec![at.slot.with_partial(theirs), own]
            } else {
                vec![layout.node_slot(path[end], at_of(lane, index + 1), NodeType::SMALLEST)]
            };
            node_bytes(above, header, &slots, &mut bytes);
            writes.push((node, bytes));
            from = end + 1;
        }
        self.write_new(lane, writes, None).await?;
        let first = layout.node_slot(partial, at_of(lane, 0), NodeType::SMALLEST);
        if !self.swap_at(lane, at, first).await? {
            return Ok(false);
        }
        self.counts.leaf_splits.add();
        self.move_rev_ptr(&mut lane.own, leaf.at, rev_ptr, slot_at(last, 0)).await;
        Ok(true)
    }

    /// Puts a node in front of a node with a longer prefix, which leads to that node and to a new leaf. Returns false
    /// if the slot has changed.
    async fn split_path(
        &self,
        lane: &mut Lane,
        at: &mut At,
        (node, header, matched): (Far, Header, usize),
        path: &[u8],
        value: Value<'_>,
    ) -> Result<bool, IndexError> {
        let layout = &self.session.layout;
        let prefix = header.prefix_from(at.depth).ok_or(Damaged("a node at a wrong depth"))?;
        let rev_ptr = NodeView::of(&lane.own.node)?.rev_ptr();
        let (theirs, depth) = (prefix[matched], at.depth + matched);
        self.take_nodes(lane, Class::NODE, 1).await?;
        self.take_leaf(lane, path, value).await?;
        let above = lane.nodes[0].unit.at;
        self.encode_leaf(lane, slot_at(above, 1), path);
        let new = lane.leaf.expect("it was taken").unit;
        let own = layout.leaf_slot(path[depth], new.at, new.class, new.generation);
        let slots = [at.slot.with_partial(theirs), own];
        let mut bytes = Vec::new();
        let above_header = Header::new(at.depth, NodeType::SMALLEST, &path[at.depth..depth]);
        node_bytes(at.slot_at, above_header, &slots, &mut bytes);
        let writes = vec![(new.at, lane.image.clone()), (above, bytes)];
        self.write_new(lane, writes, None).await?;
        let slot = layout.node_slot(at.slot.partial(), above, NodeType::SMALLEST);
        if !self.swap_at(lane, at, slot).await? {
            return Ok(false);
        }
        self.counts.path_splits.add();
        let below = slot_at(above, 0);
        self.deepen(&mut lane.own, (node, header), (rev_ptr, below), depth + 1).await;
        Ok(true)
    }

    /// Moves the reverse pointer of a node to its new slot, and removes from the node's prefix what the nodes above it
    /// have now. The split is complete in any case.
    async fn deepen(
        &self,
        own: &mut Own,
        (node, mut header): (Far, Header),
        (from, to): (u64, Far),
        depth: usize,
    ) {
        let (layout, mask) = (&self.session.layout, U64::new(!TYPE_MASK));
        let [from, to] = [U64::new(from), U64::new(to.0)];
        let table = &layout.members[node.member()];
        let (Ok(rev_ptr), Ok(addr)) = (layout.addr(node, 8), layout.addr(header_at(node), 8)) else { return };
        let mut is_first = true;
        while usize::from(header.depth) < depth {
            let Some(deeper) = header.below(depth) else { return };
            let (old, new) = (U64::new(header.word()), U64::new(deeper.word()));
            let mut chain = own.chain.begin(table.key());
            let swapped = chain.also(cas(Mode::Eq, addr, &old, &new).masked(&mask, &mask));
            if is_first {
                chain.also(cas(Mode::Eq, rev_ptr, &from, &to));
            }
            if let Err(error) = self.session.fabric.run(table.node, &chain, &mut own.reply).await {
                return self.note_late(&error);
            }
            let Ok(found) = own.reply.get(swapped) else { return };
            if (found.get() ^ old.get()) & mask.get() == 0 {
                return;
            }
            let Ok(found) = Header::of(found.get()) else { return };
            (header, is_first) = (found, false);
        }
    }

    /// Moves the reverse pointer of a leaf to its new slot, unless another client has moved it.
    async fn move_rev_ptr(&self, own: &mut Own, leaf: Far, from: u64, to: Far) {
        let (layout, [from, to]) = (&self.session.layout, [U64::new(from), U64::new(to.0)]);
        let table = &layout.members[leaf.member()];
        let Ok(addr) = layout.addr(leaf, 8) else { return };
        let mut chain = own.chain.begin(table.key());
        chain.also(cas(Mode::Eq, addr, &from, &to));
        if let Err(error) = self.session.fabric.run(table.node, &chain, &mut own.reply).await {
            self.note_late(&error);
        }
    }
}

/// Number of bytes of a path that one node covers at most.
const PREFIX_AND_BRANCH: usize = layout::PREFIX_MAX + 1;

/// The slot without its leaf, as words.
fn empty_of(slot: Slot) -> (U64, U64) {
    let empty = if mutants::SLOT_SET_TO_NULL.is_on() { Slot::NULL } else { Slot::empty(slot.partial()) };
    (U64::new(slot.0), U64::new(empty.0))
}

/// Reverse pointer and head of a leaf in the buffers.
fn head_of(leaf: &[u8]) -> Result<(u64, layout::Head), Damaged> {
    layout::head_of(leaf).ok_or(Damaged("a leaf that is too short"))
}

/// Returns the error of an operation that could not free its lock. A store's key may be revoked at any time.
fn not_freed(status: Status) -> IndexError {
    match status {
        Status::CasFailed => Damaged("a lock that was taken from its living owner").into(),
        status => refused(status),
    }
}
