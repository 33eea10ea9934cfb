//! From the root, or from a cached node, down to a leaf, without locks.
//!
//! A node never moves, never loses its least key, and passes keys only to new nodes at its right. So a pointer that was
//! right once leads to the node of a key, or to one that is left of it, for ever. A walk that finds its key beyond the
//! node follows the pointer to the sibling (B-link tree).
//!
//! A READ that has met a change is repeated, and so is a *late* one, which took so long that versions may have wrapped.
//! If that goes on, the writer may have died, or the link is slow: the node is then read under its lock. That recovers
//! a dead owner, and makes the READ safe however long it takes, so a walk over a slow link ends, too. The paper repeats
//! late READs for ever.
//!
//! Differs from the artifact: an entry that a READ has met while it was changed is read again, and not taken for
//! absent. A client that finds its key outside of a leaf that its cache named begins at the root, as in the paper.
//!
//! Invariant: a walk believes nothing of a node before all its lines were found to be of one version.
//! Invariant: an operation has no lock while it walks, so that it can take that of the node that it reads.

use super::layout::{Damaged, Far, Root};
use super::node::{Entry, Form, Image};
use super::session::refused;
use super::{Client, Job, Output, mutants};
use crate::index::IndexError;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, Status, read};
use std::time::Duration;

/// Number of READs of a node, one after the other, that may be torn or late before it is read under its lock, and the
/// pause after each that was torn.
const READS_MAX: u32 = 16;
const PAUSE: Duration = Duration::from_micros(2);
/// Number of READs of a member, one after the other, that must be late for its nodes to be read under their locks at
/// once.
const LATE_MAX: u32 = 3;
/// Number of steps to the right in one walk. More of them mean that damaged nodes lead in a circle.
const STEPS_MAX: u32 = 1 << 14;

/// Buffers of an operation.
#[derive(Default)]
pub(super) struct Own {
    /// The lane that carries out the operation; `None` if the operation is not carried out by the client's task.
    pub(super) lane: Option<u16>,
    pub(super) chain: ChainBuf,
    pub(super) reply: Reply,
    pub(super) image: Image,
}

impl Own {
    /// Takes the bytes that were read apart. Returns false if the READ has met a change of the whole node.
    fn decode(&mut self, form: &Form, level: u8) -> Result<bool, Damaged> {
        self.image.decode(form, level, self.reply.output(0))
    }
}

/// A leaf at which a walk arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) at: Far,
    /// Whether the cache has named it.
    pub(super) is_cached: bool,
}

/// What a leaf has of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// The entry with this index has the key.
    Found(usize),
    Absent,
    /// The READ has met a change of an entry, which may be that of the key.
    Torn,
}

/// Counts a step to the right.
///
/// # Errors
/// There were too many.
pub(super) fn check_steps(steps: &mut u32) -> Result<(), Damaged> {
    *steps += 1;
    if *steps > STEPS_MAX { Err(Damaged("nodes that lead in a circle")) } else { Ok(()) }
}

impl<F: Fabric + Clock> Client<F> {
    /// Reads the leaf that has the key, or would have it, into the buffers. Returns the index of the key's entry, or
    /// `None` if the key is absent.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn find(&self, own: &mut Own, key: &[u8]) -> Result<Option<usize>, IndexError> {
        let form = &self.session.layout.form;
        let Some(Start { mut at, mut is_cached }) = self.start(own, key).await? else { return Ok(None) };
        let (mut reads, mut steps) = (0, 0);
        loop {
            if !self.read(own, at, 0, &mut reads).await? {
                continue;
            }
            if key < own.image.low() || own.image.is_before(form, key) {
                check_steps(&mut steps)?;
                let Some(next) = self.beyond(own, key, is_cached).await? else { return Ok(None) };
                (at, is_cached, reads) = (next.at, next.is_cached, 0);
                continue;
            }
            match self.lookup(&own.image, key)? {
                Lookup::Found(index) => return Ok(Some(index)),
                Lookup::Absent => return Ok(None),
                Lookup::Torn => self.pause_torn().await,
            }
        }
    }

    /// Returns the leaf at which to look next for a key that is not in the range of the leaf in the buffers.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn beyond(
        &self,
        own: &mut Own,
        key: &[u8],
        is_cached: bool,
    ) -> Result<Option<Start>, IndexError> {
        let at = match is_cached {
            true => {
                self.counters.invalidations.add();
                self.cache.borrow_mut().invalidate(key);
                if mutants::INVALID_ENTRY_USED.is_on() {
                    return self.start(own, key).await;
                }
                self.descend(own, key, 0).await?
            }
            false => Some(self.step_right(&own.image, key)?),
        };
        Ok(at.map(|at| Start { at, is_cached: false }))
    }

    /// Returns the node at the right of one that the key is beyond.
    pub(super) fn step_right(&self, image: &Image, key: &[u8]) -> Result<Far, Damaged> {
        if key < image.low() {
            return Err(Damaged("a pointer to a node that begins behind its key"));
        }
        self.counters.right_moves.add();
        if self.root.get().is_some_and(|root| root.level == image.level()) {
            // There is a new root, or soon will be.
            self.root.set(None);
        }
        image.sibling(&self.session.layout)
    }

    /// Returns the leaf at which an operation on a key begins; `None` if the tree is empty.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn start(&self, own: &mut Own, key: &[u8]) -> Result<Option<Start>, IndexError> {
        let cached = self.cache.borrow_mut().find(key, 1).and_then(|mut leaves| leaves.next());
        if let Some(at) = cached {
            self.counters.cache_hits.add();
            return Ok(Some(Start { at, is_cached: true }));
        }
        self.counters.cache_misses.add();
        let at = self.descend(own, key, 0).await?;
        Ok(at.map(|at| Start { at, is_cached: false }))
    }

    /// Walks from the root to a level. Returns a node of that level that has the key, or is left of the one that has.
    /// Caches the nodes above the leaves that it reads. Returns `None` if the tree is not as high.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn descend(
        &self,
        own: &mut Own,
        key: &[u8],
        level: u8,
    ) -> Result<Option<Far>, IndexError> {
        let mut root = self.root(own).await?;
        if root.is_some_and(|root| root.level < level) {
            root = self.read_root(own).await?;
        }
        let Some(root) = root.filter(|root| root.level >= level) else { return Ok(None) };
        let (Root { mut at, level: mut now_at }, mut steps) = (root, 0);
        while now_at > level {
            self.read_whole(own, at, now_at).await?;
            if key < own.image.low() || own.image.is_before(&self.session.layout.form, key) {
                check_steps(&mut steps)?;
                at = self.step_right(&own.image, key)?;
                continue;
            }
            if now_at == 1 {
                self.cache.borrow_mut().put(&self.session.layout, &own.image)?;
            }
            at = own.image.child(&self.session.layout, key)?;
            now_at -= 1;
        }
        Ok(Some(at))
    }

    /// The root, as the client knows it; `None` if the tree is empty. It may be outdated, and is then the first node of
    /// its level.
    async fn root(&self, own: &mut Own) -> Result<Option<Root>, IndexError> {
        match self.root.get() {
            Some(root) => Ok(Some(root)),
            None => self.read_root(own).await,
        }
    }

    /// Reads the root's word.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read_root(&self, own: &mut Own) -> Result<Option<Root>, IndexError> {
        let (layout, table) = (&self.session.layout, &self.session.layout.members[0]);
        let mut chain = own.chain.begin(table.key());
        let word = chain.also(read(layout.addr(layout.root(), 8)?, 8));
        self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        let word = own.reply.get(word).map_err(refused)?;
        let word = word.try_into().map_err(|_| Damaged("a short READ"))?;
        self.root.set(layout.root_of(u64::from_le_bytes(word))?);
        Ok(self.root.get())
    }

    /// Reads a node into the buffers, whole.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read_whole(&self, own: &mut Own, at: Far, level: u8) -> Result<(), IndexError> {
        let mut reads = 0;
        while !self.read(own, at, level, &mut reads).await? {}
        Ok(())
    }

    /// Reads a leaf into the buffers, whole and without a torn entry.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read_complete(&self, own: &mut Own, at: Far) -> Result<(), IndexError> {
        let mut reads = 0;
        loop {
            if self.read(own, at, 0, &mut reads).await? {
                if self.is_complete(&own.image)? {
                    return Ok(());
                }
                self.pause_torn().await;
            }
        }
    }

    /// Reads a node into the buffers. Returns false if the READ has met a change of the whole node, or was late.
    /// `reads` counts the READs of this node. If there were too many, or if the member's READs are late, reads the node
    /// under its lock: then the node is whole, and no entry is torn.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read(
        &self,
        own: &mut Own,
        at: Far,
        level: u8,
        reads: &mut u32,
    ) -> Result<bool, IndexError> {
        if *reads == READS_MAX || self.are_late(at.member()) {
            // Boxed: the future of each operation would be as large otherwise.
            Box::pin(self.read_under_lock(own, at, level)).await?;
            return Ok(true);
        }
        *reads += 1;
        if self.fetch(own, at, level).await? {
            self.counters.late.add();
            return Ok(false);
        }
        let is_whole = own.decode(&self.session.layout.form, level)?;
        if !is_whole {
            self.pause_torn().await;
        }
        Ok(is_whole)
    }

    /// Counts a torn READ, and gives the writer time.
    async fn pause_torn(&self) {
        self.counters.torn.add();
        self.session.fabric.sleep(PAUSE).await;
    }

    /// Whether the client's READs of a member are late, so that it reads the nodes there under their locks.
    pub(super) fn are_late(&self, member: usize) -> bool {
        self.late[member].get() >= LATE_MAX
    }

    /// Notes how long a READ of a member took. Returns whether it was late: versions may have wrapped meanwhile.
    pub(super) fn is_late(&self, member: usize, took: Duration) -> bool {
        let is_late = took >= self.session.layout.form.read_max() && !mutants::WRAPS_BELIEVED.is_on();
        let late = &self.late[member];
        late.set(if is_late { late.get().saturating_add(1) } else { 0 });
        is_late
    }

    /// Reads the bytes of a node with one READ. Returns whether it was late.
    async fn fetch(&self, own: &mut Own, at: Far, level: u8) -> Result<bool, IndexError> {
        let (layout, fabric) = (&self.session.layout, &self.session.fabric);
        let len = layout.form.len(level == 0);
        let table = &layout.members[at.member()];
        let mut chain = own.chain.begin(table.key());
        chain.also(read(layout.addr(at, len as u64)?, len as u32));
        let begun = fabric.now();
        fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        let is_late = self.is_late(at.member(), fabric.now().saturating_sub(begun));
        match own.reply.verdict() {
            Status::Ok => Ok(is_late),
            status => Err(refused(status)),
        }
    }

    /// Reads a node whose lock the lane has into the buffers.
    ///
    /// # Errors
    /// [`IndexError`]: the client has given up, and the lock is recovered by others.
    pub(super) async fn read_locked(&self, own: &mut Own, at: Far, level: u8) -> Result<(), IndexError> {
        // Nobody changes the node meanwhile, so a late READ is no worse.
        self.or_give_up(self.fetch(own, at, level).await)?;
        match self.or_give_up(own.decode(&self.session.layout.form, level))? {
            true => Ok(()),
            false => self.or_give_up(Err(Damaged("a locked node that is torn").into())),
        }
    }

    /// Takes the lock of a node, reads the node into the buffers, and frees the lock. If no lane carries out the
    /// operation, the client's task does this in a lane.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read_under_lock(&self, own: &mut Own, at: Far, level: u8) -> Result<(), IndexError> {
        let Some(lane) = own.lane else {
            match self.carry_out(Job::Read(at, level)).await? {
                Output::Node(image) => own.image = *image,
                output => unreachable!("a read returns a node and not {output:?}"),
            }
            return Ok(());
        };
        self.counters.locked_reads.add();
        let until = self.session.fabric.now() + self.patience;
        let lock = self.lock(own, lane, at, until).await?;
        self.read_locked(own, at, level).await?;
        let is_complete = level > 0 || self.or_give_up(self.is_complete(&own.image))?;
        self.free(own, lock).await?;
        if is_complete { Ok(()) } else { Err(Damaged("a locked leaf with a torn entry").into()) }
    }

    /// Whether no entry of a leaf is torn.
    ///
    /// # Errors
    /// The leaf is damaged.
    pub(super) fn is_complete(&self, image: &Image) -> Result<bool, Damaged> {
        let form = &self.session.layout.form;
        for index in 0..form.span() {
            if image.entry(form, index)? == Entry::Torn {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Looks for a key in a leaf that is whole.
    ///
    /// # Errors
    /// The leaf is damaged.
    pub(super) fn lookup(&self, image: &Image, key: &[u8]) -> Result<Lookup, Damaged> {
        let (form, mut is_torn) = (&self.session.layout.form, false);
        for index in 0..form.span() {
            match image.entry(form, index)? {
                Entry::Used { key: found, .. } if found == key => return Ok(Lookup::Found(index)),
                Entry::Torn => is_torn = true,
                _ => {}
            }
        }
        Ok(if is_torn && !mutants::TORN_ENTRY_ABSENT.is_on() { Lookup::Torn } else { Lookup::Absent })
    }
}
