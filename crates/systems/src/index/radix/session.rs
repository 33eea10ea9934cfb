//! A client's session with the members of a store, and how it finds the locks of a dead client.
//!
//! Each lane of a client writes into its record at a leaf's member which leaf it is about to lock (an *intent*), and
//! before it updates the leaf, the new bytes. So a recoverer reads the dead client's records, and never walks the tree.
//! In stores of ART, the locks are those of nodes, which are not updated in place: their records have intents alone.
//!
//! Invariant: the record of a lane that has a lock, at that lock's member, names the locked leaf or node.

use super::Damaged;
use super::layout::{Class, Far, Layout, lock_at};
use crate::index::IndexError;
use crate::index::place::Member;
use crate::index::session::{Locked, Terms};
use crate::lease::{ClientId, LockWord};
use crate::redo::{self, Object};
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, Status, read, read_as};
use zerocopy::FromBytes;

pub(in crate::index) use crate::index::session::refused;

/// Number of intents that one chain of a recovery reads.
const INTENTS_PER_CHAIN: u16 = 32;

/// A client's session with all members of a store.
pub(in crate::index) type Session<F> = crate::index::session::Session<F, Layout>;

impl Locked for Layout {
    /// A leaf, or a copied node.
    type Lock = (Far, Class);

    fn members(&self) -> &[Member] {
        &self.members
    }

    fn terms(&self) -> Terms {
        Terms { ids: self.spec.ids, lanes: self.spec.lanes, lease: self.spec.lease() }
    }

    async fn held<F: Fabric + Clock>(
        session: &Session<F>,
        id: ClientId,
    ) -> Result<Vec<(LockWord, (Far, Class))>, IndexError> {
        let mut held = Vec::new();
        for member in 0..session.layout.members.len() {
            held.append(&mut session.intents(member, id).await?);
        }
        Ok(held)
    }

    fn member_of((leaf, _): (Far, Class)) -> usize {
        leaf.member()
    }

    fn object(&self, (leaf, class): (Far, Class), _: LockWord, _: &[u8]) -> Result<Object, Damaged> {
        Layout::object(self, leaf, class)
    }
}

impl<F: Fabric + Clock> Session<F> {
    /// Waits a while for the owner of the lock of a leaf or of a copied node, which has this word. If the owner's lease
    /// has expired, recovers all its locks. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`]; nothing of the caller's was changed.
    pub(in crate::index) async fn wait_for_owner(
        &self,
        lane: u16,
        (leaf, class): (Far, Class),
        word: LockWord,
    ) -> Result<(), IndexError> {
        let lock = self.layout.addr(leaf.plus(lock_at(class)), 8)?;
        self.wait_for(lane, (leaf.member(), lock), word).await
    }

    /// Reads the intents of an id at a member. Returns the words whose locks are held, with the
    /// leaves or nodes.
    async fn intents(
        &self,
        member: usize,
        id: ClientId,
    ) -> Result<Vec<(LockWord, (Far, Class))>, IndexError> {
        let table = &self.layout.members[member];
        let (mut buffer, mut reply, mut held) = (ChainBuf::new(), Reply::new(), Vec::new());
        let lanes = table.areas().lanes;
        for first in (0..lanes).step_by(INTENTS_PER_CHAIN.into()) {
            let batch = first..lanes.min(first + INTENTS_PER_CHAIN);
            let mut chain = buffer.begin(table.key());
            for lane in batch.clone() {
                let word = LockWord::new(id, lane.into()).expect("a lane has few bits");
                chain.also(read(table.areas().record(word), redo::INTENT_LEN));
            }
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            whole(&reply)?;
            let found: Vec<(LockWord, (Far, Class))> = (0..batch.len())
                .filter_map(|index| {
                    let (word, at, len) = redo::intended(reply.output(index))?;
                    let leaf = self.layout.unit_of_object(member, at, len)?;
                    (word.owner() == Some(id)).then_some((word, leaf))
                })
                .collect();
            if found.is_empty() {
                continue;
            }
            let mut chain = buffer.begin(table.key());
            for (_, (leaf, class)) in &found {
                chain.also(read_as::<LockWord>(self.layout.addr(leaf.plus(lock_at(*class)), 8)?));
            }
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            whole(&reply)?;
            for (index, found) in found.into_iter().enumerate() {
                let word = LockWord::read_from_bytes(reply.output(index)).unwrap_or_default();
                if word == found.0 {
                    held.push(found);
                }
            }
        }
        Ok(held)
    }
}

/// Checks that a chain of READs was carried out. A lock that was not read would count as free.
fn whole(reply: &Reply) -> Result<(), IndexError> {
    match reply.verdict() {
        Status::Ok => Ok(()),
        status => Err(refused(status)),
    }
}
