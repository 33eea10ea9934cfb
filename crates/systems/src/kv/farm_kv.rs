//! FaRM's key-value store: a hopscotch hash table with the values in the table, so that a GET is one READ (Dragojevic,
//! Narayanan, Hodson, Castro: NSDI'14, section 6.2).
//!
//! GET is one round trip: one READ of the key's neighbourhood, which consists of the key's home bucket and the bucket
//! after it. The GET accepts a bucket if all its lines have one version. If neither bucket has the key:
//! 1. Their joint versions must be equal. Otherwise a key is being moved from the one to the other, and GET starts
//!    again.
//! 2. If the home bucket has a chain of blocks, one more READ for each block.
//!
//! The READ returns 8 slots, and a GET needs one: FaSST's paper charges this design with 6 to 8 times the bytes.
//!
//! PUT and DELETE are one call each to the node's CPU ([`service`]).
//!
//! Differs from the papers (`docs/papers/farm-kv.md` has the reasons):
//! * All values lie in the table, so the store's longest pair of key and value is chosen when it is created.
//! * A key in a chain stays there until it is deleted.
//! * A GET that reads torn bytes [`ATTEMPTS_MAX`] times calls the service, and so does one of [`SLOW_MAX`] slow READs.
//!
//! A GET is linearizable:
//! * If it finds a value: the bucket or block had one version in all lines, so it was as it was read at some instant
//!   during the READ.
//! * If it finds none: let the key be present during the whole GET. If it lies in a chain, it stays in its block, which
//!   stays reachable; a block that has left the chain has another incarnation. Otherwise it lies in the bucket that the
//!   number of moves, the joint version, tells. Each bucket was read at an instant at which it had this joint version.
//!   So the GET would have found the key: it was absent at some instant.

pub mod layout;
pub mod mutants;
pub mod service;
mod system;

pub use super::called::{ATTEMPTS_MAX, SLOW_MAX};
use super::client::{Client, Look, LookUp, Reads};
use super::{Fetched, KvError};
use crate::store::{self, StoreError};
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId};
use layout::{CHAIN_MAX, Content, Start, Table};
use service::FarmKvKind;

/// Kind of the store in the catalog.
pub const KIND: &str = "farm-kv";

const DAMAGED: &str = "a bucket or block that no service wrote";

/// Client of one FaRM-KV store. It runs one operation at a time: give each task its own client.
pub type FarmKv<F> = Client<F, Table>;

impl<F: Fabric + Clock> FarmKv<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<FarmKv<F>, StoreError> {
        store::open::<FarmKvKind, F>(fabric, node, name).await
    }
}

impl LookUp for Table {
    const KIND: &'static str = KIND;
    const DAMAGED: &'static str = DAMAGED;
    type Table = Table;

    fn table(&self) -> &Table {
        self
    }

    /// READs the key's neighbourhood, then the chain of the home bucket, if it has one. Takes one round trip, and one
    /// more for each block of the chain.
    async fn look_up<F: Fabric + Clock>(
        &mut self,
        reads: &mut Reads<F>,
        key: &[u8],
        _attempt: u32,
    ) -> Result<Look, KvError> {
        let len = self.spec.bucket_len();
        if !self.read(reads, self.bucket_at(self.home(key)), 2 * len).await? {
            return Ok(Look::Slow);
        }
        let mut starts = [Start::default(); 2];
        for (start, bucket) in starts.iter_mut().zip(0..) {
            if self.decode(reads, bucket * len).is_none() {
                return Ok(Look::Unsure);
            }
            let content = Content::of(&reads.content).ok_or(KvError::Damaged(DAMAGED))?;
            *start = content.start;
            if let Some(found) = self.found(reads, key) {
                return Ok(Look::Found(found));
            }
        }
        let [of_home, of_next] = starts;
        if of_home.own != of_next.former && !mutants::JOINT_IGNORED.is_on() {
            return Ok(Look::Unsure);
        }
        let mut start = of_home;
        // The longest chain ends after its last block.
        for _ in 0..=CHAIN_MAX {
            let Some(block) = start.next.get().checked_sub(1).map(u64::from) else { return Ok(Look::Absent) };
            if block >= self.spec.blocks {
                return Err(KvError::Damaged(DAMAGED));
            }
            if !self.read(reads, self.block_at(block), len).await? {
                return Ok(Look::Slow);
            }
            let incarnation = u64::from(start.next_incarnation.get());
            let is_of_chain = |of: u64| of == incarnation || mutants::INCARNATION_IGNORED.is_on();
            if !self.decode(reads, 0).is_some_and(is_of_chain) {
                return Ok(Look::Unsure);
            }
            start = Content::of(&reads.content).ok_or(KvError::Damaged(DAMAGED))?.start;
            if let Some(found) = self.found(reads, key) {
                return Ok(Look::Found(found));
            }
        }
        Ok(Look::Unsure)
    }
}

impl Table {
    /// READs bytes of the table. Returns whether their lines show it if they are torn.
    async fn read<F: Fabric + Clock>(
        &self,
        reads: &mut Reads<F>,
        at: u64,
        len: u64,
    ) -> Result<bool, KvError> {
        Ok(reads.read_in_time(at, len).await? || mutants::WRAP_ACCEPTED.is_on())
    }

    /// Decodes the bucket or block at this offset of the bytes that were read last. Returns its incarnation, or `None`
    /// if it is torn.
    fn decode<F: Fabric + Clock>(&self, reads: &mut Reads<F>, offset: u64) -> Option<u64> {
        let checks = !mutants::LINES_UNCHECKED.is_on();
        reads.decode(offset, self.spec.content_len(), checks).map(|header| header.tag.get())
    }

    /// Searches the content that was decoded last for a key. Remembers the place of its value.
    fn found<F>(&self, reads: &mut Reads<F>, key: &[u8]) -> Option<Fetched> {
        let (slot, found) = Content::of(&reads.content)?.find(key)?;
        let at = self.spec.slot_at(slot) + layout::SLOT_HEADER + key.len();
        let (version, len) = (found.version, found.value.len());
        reads.value = Some(at..at + len);
        Some(Fetched { at: None, version })
    }
}
