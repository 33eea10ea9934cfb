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

use super::called::Calls;
pub use super::called::{ATTEMPTS_MAX, SLOW_MAX};
use super::inplace::{READ_TIME_MAX, decode};
use super::{Fetched, Item, Kv, KvError, Version, check_key};
use crate::store::{self, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, read};
use layout::{CHAIN_MAX, Content, Start, Table};
use service::FarmKvKind;
use std::ops::Range;

/// Kind of the store in the catalog.
pub const KIND: &str = "farm-kv";

const DAMAGED: &str = "a bucket or block that no service wrote";

/// Client of one FaRM-KV store. It runs one operation at a time: give each task its own client.
pub struct FarmKv<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    table: Table,
    chain: ChainBuf,
    reply: Reply,
    calls: Calls,
    /// Content of the bucket or block that was read last.
    content: Vec<u8>,
    /// The value in `content` that the last GET has found; `None` if it was found by a call.
    value: Option<Range<usize>>,
}

/// Outcome of one pass over a key's neighbourhood and chain.
enum Look {
    /// The key has a value, which lies in `content`.
    Found(Version),
    Absent,
    /// The bytes are of several versions, or the chain has changed.
    Torn,
    /// A READ took so long that the versions of lines may have wrapped.
    Slow,
}

impl<F: Fabric + Clock> FarmKv<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<FarmKv<F>, StoreError> {
        store::open::<FarmKvKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    fn of(fabric: F, node: NodeId, store: Store) -> Result<FarmKv<F>, StoreError> {
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        let calls = Calls::new(node, table.extent.key, table.spec.pair as usize, DAMAGED);
        let (chain, reply, content) = (ChainBuf::new(), Reply::new(), Vec::new());
        Ok(FarmKv { fabric, node, store, table, chain, reply, calls, content, value: None })
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }
}

impl<F: Fabric + Clock> Kv for FarmKv<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    /// Takes one round trip, and one more for each block of a chain.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        let mut slow = 0;
        for _ in 0..ATTEMPTS_MAX {
            match self.look(key).await? {
                Look::Found(version) => return Ok(Some(Fetched { at: None, version })),
                Look::Absent => return Ok(None),
                Look::Torn => {}
                Look::Slow => slow += 1,
            }
            if slow == SLOW_MAX {
                break;
            }
        }
        self.value = None;
        self.calls.get(&self.fabric, key).await
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let value = match self.value.clone() {
            Some(range) => self.content.get(range).unwrap_or_default(),
            None => self.calls.value(),
        };
        Item { value, version: fetched.version }
    }

    /// Takes one call to the node's CPU.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.calls.put(&self.fabric, key, value).await
    }

    /// Takes one call to the node's CPU.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.calls.delete(&self.fabric, key).await
    }
}

impl<F: Fabric + Clock> FarmKv<F> {
    /// READs the key's neighbourhood, then the chain of the home bucket, if it has one.
    async fn look(&mut self, key: &[u8]) -> Result<Look, KvError> {
        let (home, len) = (self.table.bucket_at(self.table.home(key)), self.table.spec.bucket_len());
        if !self.read(home, 2 * len).await? {
            return Ok(Look::Slow);
        }
        let mut starts = [Start::default(); 2];
        for (start, bucket) in starts.iter_mut().zip(0..) {
            if self.decode(bucket).is_none() {
                return Ok(Look::Torn);
            }
            let content = Content::of(&self.content).ok_or(KvError::Damaged(DAMAGED))?;
            *start = content.start;
            if let Some(version) = self.found(key) {
                return Ok(Look::Found(version));
            }
        }
        let [of_home, of_next] = starts;
        if of_home.own != of_next.former && !mutants::JOINT_IGNORED.is_on() {
            return Ok(Look::Torn);
        }
        let mut start = of_home;
        // The longest chain ends after its last block.
        for _ in 0..=CHAIN_MAX {
            let Some(block) = start.next.get().checked_sub(1).map(u64::from) else { return Ok(Look::Absent) };
            if block >= self.table.spec.blocks {
                return Err(KvError::Damaged(DAMAGED));
            }
            if !self.read(self.table.block_at(block), len).await? {
                return Ok(Look::Slow);
            }
            let incarnation = u64::from(start.next_incarnation.get());
            let is_of_chain = |of: u64| of == incarnation || mutants::INCARNATION_IGNORED.is_on();
            if !self.decode(0).is_some_and(is_of_chain) {
                return Ok(Look::Torn);
            }
            start = Content::of(&self.content).ok_or(KvError::Damaged(DAMAGED))?.start;
            if let Some(version) = self.found(key) {
                return Ok(Look::Found(version));
            }
        }
        Ok(Look::Torn)
    }

    /// READs bytes of the table. Returns whether the READ was so short that no line's version can have wrapped.
    async fn read(&mut self, at: u64, len: u64) -> Result<bool, KvError> {
        let begun = self.fabric.now();
        let mut chain = self.chain.begin(self.table.extent.key);
        let bytes = chain.also(read(Addr::new(at), len as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        self.reply.get(bytes).map_err(KvError::Refused)?;
        let took = self.fabric.now().saturating_sub(begun);
        Ok(took <= READ_TIME_MAX || mutants::WRAP_ACCEPTED.is_on())
    }

    /// Decodes one of the buckets or blocks that were read last into `content`. Returns its incarnation, or `None` if
    /// it is torn.
    fn decode(&mut self, index: usize) -> Option<u64> {
        let FarmKv { table, reply, content, .. } = self;
        let object = reply.output(0).get(index * table.spec.bucket_len() as usize..).unwrap_or_default();
        let checks = !mutants::LINES_UNCHECKED.is_on();
        decode(object, table.spec.content_len(), content, checks).map(|header| header.tag.get())
    }

    /// Searches `content` for a key. Remembers the place of its value.
    fn found(&mut self, key: &[u8]) -> Option<Version> {
        let (slot, found) = Content::of(&self.content)?.find(key)?;
        let at = self.table.spec.slot_at(slot) + layout::SLOT_HEADER + key.len();
        let (version, len) = (found.version, found.value.len());
        self.value = Some(at..at + len);
        Some(version)
    }
}
