//! From the root, or from a cached node, down to a leaf, without locks.
//!
//! A node never moves, never loses its least key, and passes keys only to new nodes at its right. So a pointer that was
//! right once leads to the node of a key, or to one that is left of it, for ever. A walk that finds its key beyond the
//! node follows the pointer to the sibling (B-link tree).
//!
//! A READ that has met a change is repeated. If that goes on, the writer may have died, and the walk stops: its
//! operation lets the client's task wait for the owner of the node's lock, or recover it.
//!
//! Differs from the artifact: an entry that a READ has met while it was changed is read again, and not taken for
//! absent. A client that finds its key outside of a leaf that its cache named begins at the root, as in the paper.
//!
//! Invariant: a walk believes nothing of a node before all its lines were found to be of one version.

use super::layout::{Damaged, Far, Root};
use super::node::{Entry, Image};
use super::session::refused;
use super::{Client, mutants};
use crate::index::IndexError;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, read};
use std::time::Duration;

/// Number of READs of a node, one after the other, that may meet changes before the walk stops.
const READS_MAX: u32 = 16;
/// Number of steps to the right in one walk. More of them mean that damaged nodes lead in a circle.
const STEPS_MAX: u32 = 1 << 14;

/// Buffers of an operation.
#[derive(Default)]
pub(super) struct Own {
    pub(super) chain: ChainBuf,
    pub(super) reply: Reply,
    pub(super) image: Image,
}

/// Reason why an operation stops.
#[derive(Debug)]
pub(super) enum Stop {
    /// READs of this node meet a change that does not end.
    Torn(Far),
    Failed(IndexError),
}

impl From<IndexError> for Stop {
    fn from(error: IndexError) -> Stop {
        Stop::Failed(error)
    }
}

impl From<Damaged> for Stop {
    fn from(damaged: Damaged) -> Stop {
        Stop::Failed(damaged.into())
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
    /// [`Stop`].
    pub(super) async fn find(&self, own: &mut Own, key: &[u8]) -> Result<Option<usize>, Stop> {
        let form = &self.session.layout.form;
        let Some(Start { mut at, mut is_cached }) = self.start(own, key).await? else { return Ok(None) };
        let (mut reads, mut steps) = (0, 0);
        loop {
            if reads == READS_MAX {
                return Err(Stop::Torn(at));
            }
            reads += 1;
            if !self.read(own, at, 0).await? {
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
                Lookup::Torn => self.counters.torn.add(),
            }
        }
    }

    /// Returns the leaf at which to look next for a key that is not in the range of the leaf in the buffers.
    ///
    /// # Errors
    /// [`Stop`].
    pub(super) async fn beyond(
        &self,
        own: &mut Own,
        key: &[u8],
        is_cached: bool,
    ) -> Result<Option<Start>, Stop> {
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
    /// [`Stop`].
    pub(super) async fn start(&self, own: &mut Own, key: &[u8]) -> Result<Option<Start>, Stop> {
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
    /// [`Stop`].
    pub(super) async fn descend(&self, own: &mut Own, key: &[u8], level: u8) -> Result<Option<Far>, Stop> {
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

    /// Reads a node into the buffers, until a READ meets no change of the whole node.
    ///
    /// # Errors
    /// [`Stop`].
    pub(super) async fn read_whole(&self, own: &mut Own, at: Far, level: u8) -> Result<(), Stop> {
        for _ in 0..READS_MAX {
            if self.read(own, at, level).await? {
                return Ok(());
            }
        }
        Err(Stop::Torn(at))
    }

    /// Reads a node into the buffers. Returns false if the READ has met a change of the whole node.
    pub(super) async fn read(&self, own: &mut Own, at: Far, level: u8) -> Result<bool, IndexError> {
        let is_whole = self.read_once(own, at, level, |took| self.is_late(took)).await?;
        if !is_whole {
            self.counters.torn.add();
        }
        Ok(is_whole)
    }

    /// Whether versions may have wrapped during a READ that took this long.
    pub(super) fn is_late(&self, took: Duration) -> bool {
        let is_late = took >= self.session.layout.form.read_max() && !mutants::WRAPS_BELIEVED.is_on();
        if is_late {
            self.counters.late.add();
        }
        is_late
    }

    /// Reads a node into the buffers with one READ. Returns false if the READ has met a change of the whole node, or
    /// `is_late` says that the READ took too long.
    pub(super) async fn read_once(
        &self,
        own: &mut Own,
        at: Far,
        level: u8,
        is_late: impl Fn(Duration) -> bool,
    ) -> Result<bool, IndexError> {
        let (layout, fabric) = (&self.session.layout, &self.session.fabric);
        let len = layout.form.len(level == 0);
        let table = &layout.members[at.member()];
        let mut chain = own.chain.begin(table.key());
        let bytes = chain.also(read(layout.addr(at, len as u64)?, len as u32));
        let begun = fabric.now();
        fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        let bytes = own.reply.get(bytes).map_err(refused)?;
        if is_late(fabric.now().saturating_sub(begun)) {
            return Ok(false);
        }
        Ok(own.image.decode(&layout.form, level, bytes)?)
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

    /// Waits for the owner of the lock of a node that READs find torn, or recovers it. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) async fn await_whole(&self, lane: u16, at: Far) -> Result<(), IndexError> {
        self.session.wait_for_node(lane, at).await
    }
}
