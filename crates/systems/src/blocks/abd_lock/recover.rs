//! Locks of dead clients, in a store with leases: their owner is fenced, and then they are freed.
//!
//! Each replica counts as a store of its own here: it has the locks, the entries of the leases, and the sessions that a
//! fence ends. An operation that finds a lock held for a while reads the owner's entry at that replica, again and
//! again. If the entry has not changed for the length of a lease, by this client's clock, the client fences the owner
//! at the node of this replica, and then frees the lock by a CAS from the owner's word. An operation that succeeds
//! without a replica whose lock is held also reads the entry, once: otherwise a dead client's lock would keep it
//! behind.
//!
//! Why a fence at the lock's own replica suffices: ABDLOCK needs of a lock only that reading, comparing and writing the
//! block *at its replica* is one step (see [the parent module](super)). A fenced client's requests to this replica have
//! ended, and none runs later, so none of them falls into a step of the next holder. What the client still does at the
//! other replicas is an ordinary write, which reaches a majority or does not.
//!
//! Why nobody reads half a write: a WRITE goes to the block's spare copy, first the bytes and then the tag, by two ops
//! of one chain, which no fabric reorders. A tag is one word. Depending on when the holder was stopped:
//! * Before its WRITE: the copies are as they were.
//! * Within its WRITE: the spare copy has mixed bytes, but still its old tag, which is not the higher one. It remains
//!   the spare, and the next write overwrites all of its bytes. The write is undone at this replica.
//! * After its WRITE, before the lock was freed: the spare copy has the new tag, and is the block. The write is
//!   complete at this replica.
//! * After the lock was freed, there is nothing to recover.
//!
//! So the recoverer neither redoes nor undoes anything, needs no record of the holder, and may die at any point:
//! another one repeats the fence, which changes nothing, and frees the lock. A write of which some replicas have the
//! bytes and others do not is like any interrupted write of ABD: the next reader that sees it writes it back.
//!
//! A client whose task did not run for a while, since its program was idle, renews its lease before its next lock:
//! others may have seen its last beat long ago.
//!
//! A client that is cut off from one replica for longer than its lease, or was stopped, is fenced there if somebody
//! wants its lock. It continues with the other replicas. Fenced at a majority, it fails until its program opens the
//! store again, over new sessions.
//!
//! Invariant: a lock is freed for its owner only after a fence of its owner's nonce has succeeded at its replica.
//! Invariant: the entry of a lock's owner is read after the lock's word was seen. Ids are never reused, so the nonce
//! found is the owner's.

use super::operation::{Lane, Words};
use super::replica::{Buffers, Failure, Replica};
use super::{Client, mutants};
use crate::blocks::tag::WriterId;
use crate::lease::{ClientId, Fenced, LockWord, Observer};
use crate::members::REPLICAS_MAX;
use crate::quorum::quorum;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

/// What a client knows of the other clients' leases at one replica.
pub(super) struct Watch {
    observer: RefCell<Observer>,
    /// The clients that this client has fenced at the replica.
    fenced: RefCell<BTreeMap<ClientId, Fenced>>,
}

impl Watch {
    /// Begins to watch leases of this length.
    pub(super) fn new(lease: Duration) -> Watch {
        Watch { observer: RefCell::new(Observer::new(lease)), fenced: RefCell::default() }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Time for which a lock is held before its owner's lease is of interest.
    pub(super) fn recovers_after(&self) -> Duration {
        self.spec.lease().unwrap_or_default() / 4
    }

    /// Frees those of a block's locks whose owners' leases have expired. Returns the failures of the replicas at which
    /// this failed. In a store without leases, does nothing.
    pub(super) async fn recover(&self, own: &mut Lane, block: u64, words: Words) -> Vec<Failure> {
        if self.spec.lease_us.is_none() || words.iter().all(Option::is_none) {
            return Vec::new();
        }
        let id = self.id.get().map(|claim| claim.id);
        let mut each = self.replicas.iter().zip(own).zip(words).enumerate();
        let mut next = || {
            let (index, ((replica, own), word)) = each.next()?;
            let word = word?;
            let owner = WriterId::new(word.owner()?.number().into())?;
            let is_other = Some(owner) != id && owner.number() <= self.spec.writers;
            is_other.then_some(async move {
                Ok::<_, Infallible>(self.recover_one(index, replica, own, (block, word), owner).await)
            })
        };
        let mut asked = [pin!(next()), pin!(next()), pin!(next()), pin!(next()), pin!(next())];
        let asked: [_; REPLICAS_MAX] = asked.each_mut().map(|asked| asked.as_mut());
        let count = asked.iter().filter(|asked| asked.is_some()).count();
        let Ok(recovered) = quorum(count, asked).await else { unreachable!("no future fails") };
        recovered.into_iter().flatten().filter_map(|Ok(recovered)| recovered.err()).collect()
    }

    /// Frees a lock at one replica if its owner's lease has expired.
    async fn recover_one(
        &self,
        index: usize,
        replica: &Replica,
        own: &mut Buffers,
        (block, word): (u64, LockWord),
        owner: WriterId,
    ) -> Result<(), Failure> {
        let (fabric, watch) = (&self.fabric, &self.watches[index]);
        let Some(id) = word.owner() else { return Ok(()) };
        let asked = fabric.now();
        let entry = replica.entry(fabric, own, owner).await?;
        let is_fenced = || {
            let mut known = self.watches.iter().enumerate();
            known.any(|(at, watch)| {
                let counts = at == index || mutants::FENCED_AT_ONE_REPLICA.is_on();
                counts && watch.fenced.borrow().get(&id).is_some_and(|fenced| fenced.owns(word, entry))
            })
        };
        if !is_fenced() {
            let expired = watch.observer.borrow_mut().look(id, entry, asked, fabric.now());
            let Some(expired) = expired else { return Ok(()) };
            let fenced = replica.fence(fabric, expired).await?;
            watch.fenced.borrow_mut().insert(id, fenced);
        }
        match is_fenced() {
            true => replica.free_of_fenced(fabric, own, block, word).await,
            false => Ok(()),
        }
    }
}
