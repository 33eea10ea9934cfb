//! Changes: put, put if absent, delete, and splits.
//!
//! - **A change of a key** locks its leaf, reads it, and writes one entry; the WRITE that frees the lock is in the same
//!   chain (command combination; paper, 4.5). If the lock is handed over by another lane, the first step costs nothing.
//! - **A full leaf** is split under its lock: its upper half goes to a new node at its right, which is written first.
//!   Then one WRITE of the leaf makes the sibling visible. The lock is freed, and the *separator*, the sibling's least
//!   key, is inserted into the node above, which may be split in turn. Walks find the sibling meanwhile all the same.
//! - **If there is no node above**, the client writes a new root above the old one, and CASes the root's word. If
//!   another client was faster, it walks down from that root and inserts its separator there.
//!
//! A writer that had to step to the right inserts the separator that it has missed: its owner may have died.
//!
//! Differs from the artifact: a client that loses the race for the root does not fail. A sibling at another member is
//! written before the chain that links it, as chains to two members have no order.
//!
//! Invariant: a node is changed under its lock only, by one WRITE. Before it, in the same chain, the bytes are in the
//! redo record, and the lock has the word of that record.
//! Invariant: a lane has at most one lock.
//! Invariant: an operation that fails with a lock has freed it, or the client has given up, so that others recover it.
//! Invariant: a unit that was not linked is given back, unless the client has given up. Then `heal` frees it.

use super::layout::{Damaged, Far, LEVEL_MAX, LockAt, Root};
use super::node::{Entry, Image};
use super::session::refused;
use super::walk::{Lookup, Own, Start};
use super::{Client, mutants};
use crate::index::IndexError;
use crate::index::turns::{HANDOVERS_MAX, Held, Turn};
use crate::lease::LockWord;
use crate::redo::{self, Object, Record};
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Mode, Status, cas, write};
use std::ops::Range;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// A lane of a client: its buffers.
#[derive(Default)]
pub(super) struct Lane {
    pub(super) number: u16,
    pub(super) own: Own,
    record: Record,
    /// Bytes of the node that is changed.
    bytes: Vec<u8>,
    /// The new sibling of the node, and its bytes.
    sibling: Image,
    sibling_bytes: Vec<u8>,
}

/// What a put does if the key has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// Replaces it.
    Always,
    /// Nothing.
    IfAbsent,
}

/// A change of one key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change<'a> {
    Put(Put, &'a [u8]),
    Delete,
}

/// A lock that a lane has.
pub(super) struct Lock<'a> {
    turn: Turn<'a, LockAt>,
    at: LockAt,
    word: LockWord,
    /// Number of times that the lock was handed over.
    times: u32,
    /// Whether the word is of the lane's own operation.
    is_own: bool,
}

impl<F: Fabric + Clock> Client<F> {
    /// Changes a key. Returns whether it did: false for a put if absent of a key with a value, and for a delete of a
    /// key without one.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) async fn change(
        &self,
        lane: &mut Lane,
        key: &[u8],
        change: Change<'_>,
    ) -> Result<bool, IndexError> {
        let until = self.session.fabric.now() + self.patience;
        let form = &self.session.layout.form;
        let (mut next, mut has_moved) = (self.start(&mut lane.own, key).await?, false);
        loop {
            let Some(Start { at, is_cached }) = next else {
                if matches!(change, Change::Delete) {
                    return Ok(false);
                }
                self.plant(lane).await?;
                next = self.start(&mut lane.own, key).await?;
                continue;
            };
            let lock = self.lock(&mut lane.own, lane.number, at, until).await?;
            self.read_locked(&mut lane.own, at, 0).await?;
            if key < lane.own.image.low() || lane.own.image.is_before(form, key) {
                self.free(&mut lane.own, lock).await?;
                has_moved = !is_cached;
                next = self.beyond(&mut lane.own, key, is_cached).await?;
                self.check_patience(lane.number, until)?;
                continue;
            }
            let missed = has_moved.then(|| lane.own.image.low().to_vec());
            let done = self.change_leaf(lane, lock, at, key, change).await?;
            if let Some(separator) = missed {
                // The change is complete in any case.
                let helped = self.insert_separator(lane, 1, separator, at).await;
                if helped == Ok(true) {
                    self.counters.separators_helped.add();
                }
            }
            return Ok(done);
        }
    }

    fn check_patience(&self, lane: u16, until: Duration) -> Result<(), IndexError> {
        if self.session.fabric.now() >= until || self.jobs.is_abandoned(lane.into()) {
            return Err(IndexError::Busy);
        }
        Ok(())
    }

    /// Changes a key in the leaf that is in the buffers, and frees the leaf's lock.
    async fn change_leaf(
        &self,
        lane: &mut Lane,
        lock: Lock<'_>,
        at: Far,
        key: &[u8],
        change: Change<'_>,
    ) -> Result<bool, IndexError> {
        let form = &self.session.layout.form;
        let found = match self.or_give_up(self.lookup(&lane.own.image, key))? {
            Lookup::Found(index) => Some(index),
            Lookup::Absent => None,
            Lookup::Torn => return self.or_give_up(Err(Damaged("a locked leaf with a torn entry").into())),
        };
        let (index, key, value) = match (change, found) {
            (Change::Delete, None) | (Change::Put(Put::IfAbsent, _), Some(_)) => {
                return self.free(&mut lane.own, lock).await.map(|()| false);
            }
            (Change::Delete, Some(index)) => (index, &[][..], &[][..]),
            (Change::Put(_, value), Some(index)) => (index, key, value),
            (Change::Put(_, value), None) => {
                let is_empty = |index: &usize| lane.own.image.entry(form, *index) == Ok(Entry::Empty);
                match (0..form.span()).find(is_empty) {
                    Some(index) => (index, key, value),
                    None => return self.split_leaf(lane, lock, at, key, value).await.map(|()| true),
                }
            }
        };
        lane.own.image.set_entry(form, index, key, value);
        lane.own.image.encode(form, &mut lane.bytes);
        self.write(lane, lock, at, form.range(index), None).await.map(|()| true)
    }

    /// Splits the full leaf in the buffers, and puts a key into one of the halves.
    async fn split_leaf(
        &self,
        lane: &mut Lane,
        lock: Lock<'_>,
        at: Far,
        key: &[u8],
        value: &[u8],
    ) -> Result<(), IndexError> {
        let form = &self.session.layout.form;
        let mut entries = vec![(key.to_vec(), value.to_vec())];
        for index in 0..form.span() {
            if let Entry::Used { key, value } = self.or_give_up(lane.own.image.entry(form, index))? {
                entries.push((key.to_vec(), value.to_vec()));
            }
        }
        entries.sort_unstable();
        let right = entries.split_off(entries.len() / 2);
        let separator = right[0].0.clone();
        let (sibling, lock) = self.take_unit(lane, lock).await?;
        self.or_give_up(self.begin_sibling(lane, &separator))?;
        lane.sibling.fill_all(form, &right);
        lane.own.image.shrink(form, &separator, sibling);
        lane.own.image.fill_all(form, &entries);
        self.write_halves(lane, lock, at, sibling).await?;
        self.counters.leaf_splits.add();
        // The split is complete in any case: walks step to the right.
        match self.insert_separator(lane, 1, separator, sibling).await {
            Ok(_) => {}
            Err(damaged @ IndexError::Damaged(_)) => return Err(damaged),
            Err(_) => self.counters.separators_left_out.add(),
        }
        Ok(())
    }

    /// Takes a unit for a new node. If there is none, frees the lock.
    async fn take_unit<'a>(&self, lane: &mut Lane, lock: Lock<'a>) -> Result<(Far, Lock<'a>), IndexError> {
        match self.units.take(&self.session).await {
            Ok(unit) => Ok((unit, lock)),
            Err(error) => {
                self.free(&mut lane.own, lock).await?;
                Err(error)
            }
        }
    }

    /// Begins the image of a sibling, which has the keys of the node in the buffers from the separator on.
    fn begin_sibling(&self, lane: &mut Lane, separator: &[u8]) -> Result<(), Damaged> {
        let (layout, image) = (&self.session.layout, &lane.own.image);
        let high = image.high(&layout.form);
        let next = high.map(|_| image.sibling(layout)).transpose()?;
        lane.sibling.begin(&layout.form, image.level(), (separator, high), next);
        Ok(())
    }

    /// Writes a node that was split, and its new sibling.
    async fn write_halves(
        &self,
        lane: &mut Lane,
        lock: Lock<'_>,
        at: Far,
        sibling: Far,
    ) -> Result<(), IndexError> {
        let form = &self.session.layout.form;
        lane.sibling.encode(form, &mut lane.sibling_bytes);
        lane.own.image.raise(form);
        lane.own.image.encode(form, &mut lane.bytes);
        let range = 0..lane.bytes.len();
        if sibling.member() == at.member() {
            self.counters.splits_together.add();
            return self.write(lane, lock, at, range, Some(sibling)).await;
        }
        self.or_give_up(self.write_new(lane, sibling).await)?;
        self.write(lane, lock, at, range, None).await
    }

    /// Inserts a separator into the node above a new sibling, unless it is there already. Returns whether it was not.
    ///
    /// # Errors
    /// [`IndexError`]. Walks that miss the separator step to the right.
    pub(super) async fn insert_separator(
        &self,
        lane: &mut Lane,
        mut level: u8,
        mut separator: Vec<u8>,
        mut child: Far,
    ) -> Result<bool, IndexError> {
        let layout = &self.session.layout;
        // Long enough for the recovery of a dead client that has locked the node above.
        let until = self.session.fabric.now() + self.patience.max(2 * layout.spec.lease());
        let form = &layout.form;
        if separator.is_empty() {
            return Ok(false); // The first node of a level has none.
        }
        let mut next = None;
        loop {
            if level > LEVEL_MAX {
                return Err(Damaged("a tree that is too high").into());
            }
            if self.session.fabric.now() >= until {
                return Err(IndexError::Busy);
            }
            let above = match next.take() {
                Some(at) => Some(at),
                None => self.descend(&mut lane.own, &separator, level).await?,
            };
            let Some(at) = above else {
                match self.grow(lane, level, &separator, child).await? {
                    true => return Ok(true),
                    false => continue,
                }
            };
            let lock = self.lock(&mut lane.own, lane.number, at, until).await?;
            self.read_locked(&mut lane.own, at, level).await?;
            if lane.own.image.is_before(form, &separator) {
                next = Some(self.or_give_up(self.step_right(&lane.own.image, &separator))?);
                self.free(&mut lane.own, lock).await?;
                continue;
            }
            let mut records = self.or_give_up(lane.own.image.children(layout))?;
            let (_, leftmost) = records.remove(0);
            let place = records.partition_point(|(key, _)| *key < separator);
            // A separator that was promoted is the least key of a node at this level.
            let is_there = lane.own.image.low() == separator
                || records.get(place).is_some_and(|(key, _)| *key == separator);
            if is_there {
                return self.free(&mut lane.own, lock).await.map(|()| false);
            }
            records.insert(place, (separator, child));
            if records.len() <= form.span() {
                lane.own.image.fill_records(form, &records);
                lane.own.image.raise(form);
                lane.own.image.encode(form, &mut lane.bytes);
                self.write(lane, lock, at, 0..lane.bytes.len(), None).await?;
                self.cache_own(&lane.own.image)?;
                return Ok(true);
            }
            let mut right = records.split_off(records.len() / 2);
            let (promoted, first) = right.remove(0);
            let (sibling, lock) = self.take_unit(lane, lock).await?;
            self.or_give_up(self.begin_sibling(lane, &promoted))?;
            lane.sibling.set_leftmost(first);
            lane.sibling.fill_records(form, &right);
            lane.own.image.shrink(form, &promoted, sibling);
            lane.own.image.set_leftmost(leftmost);
            lane.own.image.fill_records(form, &records);
            self.write_halves(lane, lock, at, sibling).await?;
            self.cache_own(&lane.own.image)?;
            self.cache_own(&lane.sibling)?;
            self.counters.inner_splits.add();
            (level, separator, child) = (level + 1, promoted, sibling);
        }
    }

    /// Caches a node that this client has written, if it is above the leaves.
    fn cache_own(&self, image: &Image) -> Result<(), Damaged> {
        if image.level() == 1 { self.cache.borrow_mut().put(&self.session.layout, image) } else { Ok(()) }
    }

    /// Puts a leaf without keys into an empty tree, unless another client does.
    async fn plant(&self, lane: &mut Lane) -> Result<(), IndexError> {
        let at = self.units.take(&self.session).await?;
        lane.sibling.begin(&self.session.layout.form, 0, (&[], None), None);
        self.install_root(lane, 0, Root { at, level: 0 }).await.map(drop)
    }

    /// Puts a new root above the present one, with one separator. Returns false if there is a root of this level
    /// already.
    async fn grow(
        &self,
        lane: &mut Lane,
        level: u8,
        separator: &[u8],
        child: Far,
    ) -> Result<bool, IndexError> {
        let form = &self.session.layout.form;
        let root = self.read_root(&mut lane.own).await?.ok_or(Damaged("a tree that has lost its root"))?;
        if root.level >= level {
            return Ok(false);
        }
        if root.level + 1 != level {
            return Err(Damaged("a root that is too low").into());
        }
        let at = self.units.take(&self.session).await?;
        lane.sibling.begin(form, level, (&[], None), None);
        lane.sibling.set_leftmost(root.at);
        lane.sibling.fill_records(form, &[(separator.to_vec(), child)]);
        if self.install_root(lane, root.word(), Root { at, level }).await? {
            self.counters.root_growths.add();
            self.cache_own(&lane.sibling)?;
            return Ok(true);
        }
        self.counters.root_races.add();
        if mutants::ROOT_GROWTH_LOST.is_on() {
            return Err(Damaged("a split node without a node above").into());
        }
        Ok(false)
    }

    /// Writes a new root, and CASes the root's word. Returns false if the word is not `old`. The unit is given back
    /// unless it becomes the root.
    async fn install_root(&self, lane: &mut Lane, old: u64, root: Root) -> Result<bool, IndexError> {
        let installed = self.try_install_root(lane, old, root).await;
        // A client that has given up may have a request for the unit in flight, or has linked it.
        if installed != Ok(true) && !self.session.is_given_up() {
            self.units.give_back(root.at);
        }
        installed
    }

    async fn try_install_root(&self, lane: &mut Lane, old: u64, root: Root) -> Result<bool, IndexError> {
        let (layout, table) = (&self.session.layout, &self.session.layout.members[0]);
        lane.sibling.encode(&layout.form, &mut lane.sibling_bytes);
        self.write_new(lane, root.at).await?;
        let [old, new] = [old, root.word()].map(U64::new);
        let mut chain = lane.own.chain.begin(table.key());
        let swapped = chain.also(cas(Mode::Eq, layout.addr(layout.root(), 8)?, &old, &new));
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
        match lane.own.reply.status(swapped) {
            Status::Ok => {
                self.root.set(Some(root));
                Ok(true)
            }
            Status::CasFailed => {
                self.root.set(None);
                Ok(false)
            }
            status => Err(refused(status)),
        }
    }

    /// Writes the bytes of the new sibling to a unit that no pointer names.
    async fn write_new(&self, lane: &mut Lane, at: Far) -> Result<(), IndexError> {
        let (layout, table) = (&self.session.layout, &self.session.layout.members[at.member()]);
        let mut chain = lane.own.chain.begin(table.key());
        let len = lane.sibling_bytes.len() as u64;
        chain.also(write(layout.addr(at, len)?, &lane.sibling_bytes));
        let ran = self.session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
        match lane.own.reply.verdict() {
            Status::Ok => Ok(()),
            status => Err(refused(status)),
        }
    }

    /// Gives up if a request that has failed may still run: it must not meet what a later owner of the id does.
    fn note_late(&self, error: &FabricError) {
        if error.ran() != Ran::No {
            self.session.give_up();
        }
    }

    /// Locks a node, for a lane without a lock.
    ///
    /// # Errors
    /// [`IndexError`]; the lane has no lock, or the client has given up.
    pub(super) async fn lock(
        &self,
        own: &mut Own,
        lane: u16,
        node: Far,
        until: Duration,
    ) -> Result<Lock<'_>, IndexError> {
        let (session, layout) = (&self.session, &self.session.layout);
        let at = layout.lock_of(node);
        let mut turn = self.locals.enter(at).await;
        if session.is_given_up() {
            return Err(IndexError::Lost);
        }
        if let Some(Held { word, times }) = turn.take_held() {
            return Ok(Lock { turn, at, word, times, is_own: false });
        }
        let (table, addr) = (&layout.members[at.member], layout.addr(layout.lock(at), 8)?);
        let word = session.next_word(lane).await?;
        loop {
            let mut chain = own.chain.begin(table.key());
            let taken = chain.also(cas(Mode::Eq, addr, &LockWord::FREE, &word));
            let ran = session.fabric.run(table.node, &chain, &mut own.reply).await;
            ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
            match own.reply.status(taken) {
                Status::Ok => return Ok(Lock { turn, at, word, times: 0, is_own: true }),
                Status::CasFailed => {}
                status => return Err(refused(status)),
            }
            let held = *own.reply.get(taken).map_err(refused)?;
            self.counters.lock_failures.add();
            self.check_patience(lane, until)?;
            session.wait_for(lane, (at.member, addr), held).await?;
        }
    }

    /// Frees a lock, or hands it over, without a change.
    pub(super) async fn free(&self, own: &mut Own, mut lock: Lock<'_>) -> Result<(), IndexError> {
        if self.is_handed_over(&lock) {
            lock.turn.hand_over(Held { word: lock.word, times: lock.times + 1 });
            self.counters.handovers.add();
            return Ok(());
        }
        let (layout, table) = (&self.session.layout, &self.session.layout.members[lock.at.member]);
        let mut chain = own.chain.begin(table.key());
        chain.also(write(layout.addr(layout.lock(lock.at), 8)?, LockWord::FREE.as_bytes()));
        let ran = self.session.fabric.run(table.node, &chain, &mut own.reply).await;
        self.or_give_up(ran).map_err(IndexError::of_read)?;
        match own.reply.verdict() {
            Status::Ok => Ok(()),
            status => self.or_give_up(Err(refused(status))),
        }
    }

    /// Gives up if the result is an error: the lane has a lock, which nobody frees then.
    pub(super) fn or_give_up<T, E>(&self, result: Result<T, E>) -> Result<T, E> {
        result.inspect_err(|_| self.session.give_up())
    }

    fn is_handed_over(&self, lock: &Lock<'_>) -> bool {
        lock.turn.is_wanted() && lock.times < HANDOVERS_MAX && !self.session.is_given_up()
    }

    /// Writes a range of the bytes of a node whose lock the lane has, after the new sibling, if it lies at the same
    /// member, and frees the lock or hands it over.
    async fn write(
        &self,
        lane: &mut Lane,
        lock: Lock<'_>,
        at: Far,
        range: Range<usize>,
        sibling: Option<Far>,
    ) -> Result<(), IndexError> {
        let (session, layout) = (&self.session, &self.session.layout);
        let table = &layout.members[at.member()];
        let word = match lock.is_own {
            true => lock.word,
            false => session.next_word(lane.number).await.inspect_err(|_| session.give_up())?,
        };
        let lock_addr = layout.addr(layout.lock(lock.at), 8)?;
        let bytes = &lane.bytes[range.clone()];
        let object = Object {
            lock: lock_addr,
            at: layout.addr(at.plus(range.start as u64), range.len() as u64)?,
            len: range.len() as u32,
        };
        lane.record.fill(word, &object, bytes);
        let is_early = redo::mutants::RECORD_AFTER_OBJECT.is_on();
        let is_handed_over = self.is_handed_over(&lock);
        let mut chain = lane.own.chain.begin(table.key());
        if let Some(sibling) = sibling {
            let len = lane.sibling_bytes.len() as u64;
            chain.also(write(layout.addr(sibling, len)?, &lane.sibling_bytes));
        }
        let record = write(table.areas().record(word), lane.record.as_bytes());
        let mut record = layout.spec.redo.then_some(record);
        let recorded = if is_early { None } else { record.take().map(|record| chain.also(record)) };
        if !lock.is_own {
            chain.also(write(lock_addr, word.as_bytes()));
        }
        let written = chain.also(write(object.at, bytes));
        record.into_iter().for_each(|record| _ = chain.also(record));
        let freed = match is_handed_over {
            true => None,
            false => Some(chain.also(write(lock_addr, LockWord::FREE.as_bytes()))),
        };
        let (mut turn, held) = (Some(lock.turn), Held { word, times: lock.times + 1 });
        if is_handed_over && mutants::HANDED_OVER_EARLY.is_on() {
            turn.take().into_iter().for_each(|mut turn| turn.hand_over(held));
        }
        let ran = session.fabric.run(table.node, &chain, &mut lane.own.reply).await;
        ran.inspect_err(|_| session.give_up()).map_err(IndexError::Fabric)?;
        let status = lane.own.reply.status(written);
        if status != Status::Ok {
            let recorded = recorded.map(|recorded| lane.own.reply.status(recorded));
            return Err(session.refused_write(status, recorded));
        }
        let freed = freed.map_or(Status::Ok, |freed| lane.own.reply.status(freed));
        if freed != Status::Ok {
            return Err(session.unsettled(refused(freed)));
        }
        if is_handed_over {
            self.counters.handovers.add();
            turn.into_iter().for_each(|mut turn| turn.hand_over(held));
        }
        Ok(())
    }
}
