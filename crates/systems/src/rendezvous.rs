//! Rendezvous hashing: the member of a store that a key belongs to.
//!
//! A key belongs to the member for which the hash of key and member is largest. So every client finds the same member,
//! in whatever order it lists the nodes.
//!
//! Invariant: the member of a key depends only on the key and on the incarnations of the store's members, which never
//! change.

use crate::store::Members;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};

/// The members of a store, as the places of its keys.
pub(crate) struct Rendezvous {
    /// Seeds of the hash, one for each member. Never empty.
    seeds: Box<[RapidSecrets]>,
}

impl Rendezvous {
    /// Derives the seeds from the incarnations of the members.
    pub(crate) fn of(members: &Members) -> Rendezvous {
        match &members.store().membership {
            Some(of) => Rendezvous::seeded(of.members.iter().map(|id| id.incarnation)),
            None => Rendezvous::seeded([members.store().incarnation].into_iter()),
        }
    }

    /// Creates places with these seeds, of which there is at least one.
    pub(crate) fn seeded(seeds: impl Iterator<Item = u64>) -> Rendezvous {
        Rendezvous { seeds: seeds.map(RapidSecrets::seed).collect() }
    }

    /// Index of the member to which a key belongs.
    pub(crate) fn place_of(&self, key: &[u8]) -> usize {
        let hashes = self.seeds.iter().map(|seed| rapidhash_v3_seeded(key, seed));
        let highest = hashes.enumerate().max_by_key(|&(_, hash)| hash);
        highest.expect("a store has a member").0
    }
}
