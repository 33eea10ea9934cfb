//! READs of slots, leaves and values, and the slot at which a walk begins.

use super::cache::Found;
use super::layout::{Class, Far, Slot, lock_at, pointer_of, value_of};
use super::session::refused;
use super::together::{Late, Ticket};
use super::{Damaged, Tree};
use crate::index::IndexError;
use crate::lease::LockWord;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, read};
use std::future::poll_fn;
use std::task::Poll;

/// Buffers of an operation.
#[derive(Default)]
pub(in crate::index) struct Own {
    pub(in crate::index) chain: ChainBuf,
    pub(in crate::index) reply: Reply,
    /// The node that was read last.
    pub(in crate::index) node: Vec<u8>,
    /// The leaf that was read last.
    pub(in crate::index) leaf: Vec<u8>,
    /// The value that the operation writes, or one that it has read and that lies apart.
    pub(in crate::index) value: Vec<u8>,
}

impl Own {
    /// The value of the leaf that was read last, after [`Tree::read_value`].
    pub(in crate::index) fn found(&self) -> &[u8] {
        if pointer_of(&self.leaf).is_some() { &self.value } else { value_of(&self.leaf) }
    }
}

/// A slot on the way of a walk.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct At {
    pub(in crate::index) slot_at: Far,
    pub(in crate::index) slot: Slot,
    /// The slot that has led to the node with this slot; null above the root slot.
    pub(in crate::index) above: Slot,
    /// Number of bytes of the path that lead to the slot.
    pub(in crate::index) depth: usize,
    /// Whether the slot was read during the operation.
    pub(in crate::index) is_fresh: bool,
}

/// Location of a leaf.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct LeafAt {
    pub(in crate::index) at: Far,
    pub(in crate::index) class: Class,
    pub(in crate::index) generation: u32,
}

/// Why a walk waits.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) enum Met {
    /// A leaf stays torn, with this lock word.
    Torn(LeafAt, LockWord),
}

impl<F: Fabric + Clock> Tree<F> {
    /// Returns the slot at which a walk begins: a cached one, or the root slot.
    pub(in crate::index) async fn start(&self, own: &mut Own, path: &[u8]) -> Result<At, IndexError> {
        let cached = self.cache.borrow_mut().find(path, self.session.epochs.current());
        self.start_at(own, cached).await
    }

    /// Returns the slot at which a walk begins, like [`Tree::start`]. If other gets are in progress, it is found
    /// together with theirs, after the other tasks have run.
    pub(in crate::index) async fn start_together(
        &self,
        own: &mut Own,
        path: &[u8],
    ) -> Result<At, IndexError> {
        if !self.together.are_several() {
            return self.start(own, path).await;
        }
        let ticket = self.together.note(path);
        yield_now().await;
        let cached = self.found_together(ticket, path);
        self.start_at(own, cached).await
    }

    /// Returns the root slot, from which a walk reads every slot during the operation.
    pub(in crate::index) async fn start_at_root(&self, own: &mut Own) -> Result<At, IndexError> {
        let slot_at = self.session.layout.root();
        let slot = self.read_slot(own, slot_at).await?;
        Ok(At { slot_at, slot, above: Slot::NULL, depth: 0, is_fresh: true })
    }

    fn found_together(&self, ticket: Ticket, path: &[u8]) -> Option<Found> {
        let (mut cache, epoch) = (self.cache.borrow_mut(), self.session.epochs.current());
        let found = self.together.take(ticket, &mut cache, epoch);
        found.unwrap_or_else(|Late| cache.find(path, epoch))
    }

    async fn start_at(&self, own: &mut Own, cached: Option<Found>) -> Result<At, IndexError> {
        if let Some(Found { slot_at, slot, above, depth }) = cached {
            self.counts.cache_hits.add();
            return Ok(At { slot_at, slot, above, depth, is_fresh: false });
        }
        self.counts.cache_misses.add();
        self.start_at_root(own).await
    }

    /// Reads the 8 bytes of a slot.
    pub(in crate::index) async fn read_slot(&self, own: &mut Own, at: Far) -> Result<Slot, IndexError> {
        let bytes = self.read(own, at, 8).await?;
        Ok(Slot(u64::from_le_bytes(bytes.try_into().map_err(|_| Damaged("a short READ"))?)))
    }

    /// Reads a whole leaf into the buffers.
    pub(in crate::index) async fn read_leaf(&self, own: &mut Own, leaf: LeafAt) -> Result<(), IndexError> {
        self.read(own, leaf.at, leaf.class.size() as u32).await?;
        let Own { reply, leaf, .. } = own;
        leaf.clear();
        leaf.extend_from_slice(reply.output(0));
        Ok(())
    }

    /// Reads the value of the leaf that was read last, if it lies apart. The leaf was read under the same guard, so the
    /// value was not reused.
    pub(in crate::index) async fn read_value(&self, own: &mut Own) -> Result<(), IndexError> {
        let Some(pointer) = pointer_of(&own.leaf) else { return Ok(()) };
        self.session.layout.class_of(&pointer)?;
        self.read(own, pointer.at, pointer.len).await?;
        let Own { reply, value, .. } = own;
        value.clear();
        value.extend_from_slice(reply.output(0));
        Ok(pointer.check(value)?)
    }

    /// Reads bytes of the store with one chain. They are the reply's output 0.
    pub(in crate::index) async fn read<'a>(
        &self,
        own: &'a mut Own,
        at: Far,
        len: u32,
    ) -> Result<&'a [u8], IndexError> {
        let layout = &self.session.layout;
        let addr = layout.addr(at, len.into())?;
        let table = &layout.members[at.member()];
        let mut chain = own.chain.begin(table.key());
        let bytes = chain.also(read(addr, len));
        self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        own.reply.get(bytes).map_err(refused)
    }
}

/// Lets the other tasks that are ready run first.
async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Location of a leaf's lock.
pub(in crate::index) fn lock_of(leaf: LeafAt) -> Far {
    leaf.at.plus(lock_at(leaf.class))
}
