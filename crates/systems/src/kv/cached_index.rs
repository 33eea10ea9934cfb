//! A hash table whose index clients cache, so that a GET is one READ of the item once the cache is warm: the key-value
//! store below DrTM (Wei, Shi, Chen, Chen, Chen: SOSP'15, section 5), one of FaSST's rivals.
//!
//! GET:
//! 1. READ the bucket of the key, unless it is cached. A bucket may have a chain of further ones.
//! 2. READ the item to which the entry points. Accept it if all its lines have one version, and if it has the entry's
//!    incarnation and the key.
//!
//! A warm GET is one round trip, and a cold one two. If a cached entry leads to another incarnation, its key was
//! deleted: GET starts again from the node's index, and caches what it finds. The cache never shows that a key is
//! absent.
//!
//! PUT and DELETE are one call each to the node's CPU ([`service`]). A PUT of a present key writes the item in place,
//! so cached entries stay valid.
//!
//! Differs from the paper (`docs/papers/farm-kv.md` has the reasons):
//! * Items have versions in their lines. In DrTM, the hardware's transactional memory of the node shows torn READs.
//! * Writes are calls, and have no locks and leases. DrTM's transactions are not part of this store.
//! * A GET that reads torn bytes [`ATTEMPTS_MAX`] times calls the service, and so does one of [`SLOW_MAX`] slow READs.
//!
//! A GET is linearizable:
//! * If it finds a value: the item had one version, the key and the incarnation of an entry of the key at some instant
//!   during the READ. An item has this incarnation only while the key has this item.
//! * If it finds none: let the key be present during the whole GET. It keeps its entry and its item, and its entry's
//!   bucket stays in the chain, which the GET has READ from the node. So the GET would have found it.

mod cache;
pub mod layout;
pub mod mutants;
pub mod service;
mod system;

use super::called::Calls;
pub use super::called::{ATTEMPTS_MAX, SLOW_MAX};
use super::inplace::{READ_TIME_MAX, START, decode};
use super::{Fetched, Item, Kv, KvError, Version, check_key};
use crate::store::{self, StoreError};
use crate::system::Options;
pub use cache::CacheStat;
use cache::{Cache, Cached};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, read, read_as};
use layout::{Bucket, CHAIN_MAX, Entry, Table};
use service::CachedIndexKind;
use std::ops::Range;

/// Kind of the store in the catalog.
pub const KIND: &str = "cached-index";

/// Size of a client's cache in bytes if it is not given.
pub const CACHE_DEFAULT: usize = 16 << 20;

const DAMAGED: &str = "an entry or item that no service wrote";

/// Client of one store with a cached index. It runs one operation at a time: give each task its own client.
pub struct CachedIndex<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    table: Table,
    cache: Cache,
    chain: ChainBuf,
    reply: Reply,
    calls: Calls,
    /// Content of the item that was read last.
    content: Vec<u8>,
    /// The value in `content` that the last GET has found; `None` if it was found by a call.
    value: Option<Range<usize>>,
}

/// Outcome of one walk through a key's chain.
enum Look {
    /// The key has a value, which lies in `content`.
    Found(Version),
    Absent,
    /// The chain was cached in part or changed during the walk, or an item was torn.
    Unsure,
    /// A READ took so long that the versions of lines may have wrapped.
    Slow,
}

/// What an entry leads to.
enum Led {
    /// The key's item, of this version.
    ToKey(Version),
    /// The item of another key whose hash has the same bits.
    ToOther,
    /// An item that this entry does not belong to any more.
    Astray,
    /// An item of several versions.
    ToTorn,
    /// An item that was read too slowly.
    Slowly,
}

impl<F: Fabric + Clock> CachedIndex<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<CachedIndex<F>, StoreError> {
        store::open::<CachedIndexKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    fn of(fabric: F, node: NodeId, store: Store, options: &Options) -> Result<CachedIndex<F>, StoreError> {
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        let calls = Calls::new(node, table.extent().key, table.spec().pair as usize, DAMAGED);
        let cache = Cache::new(options.node_cache.unwrap_or(CACHE_DEFAULT), table.buckets());
        let (chain, reply, content) = (ChainBuf::new(), Reply::new(), Vec::new());
        Ok(CachedIndex { fabric, node, store, table, cache, chain, reply, calls, content, value: None })
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

    /// Returns the counters of this client's cache.
    pub fn cache(&self) -> CacheStat {
        self.cache.stat()
    }
}

impl<F: Fabric + Clock> Kv for CachedIndex<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let CacheStat { bytes, hits, misses, stale, .. } = self.cache();
        vec![("cache bytes", bytes), ("cache hits", hits), ("cache misses", misses), ("stale entries", stale)]
    }

    /// Takes one round trip if the key's entry is cached, and two or more otherwise.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        let mut slow = 0;
        for attempt in 0..ATTEMPTS_MAX {
            match self.walk(key, attempt == 0).await? {
                Look::Found(version) => return Ok(Some(Fetched { at: None, version })),
                Look::Absent => return Ok(None),
                Look::Unsure => {}
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

impl<F: Fabric + Clock> CachedIndex<F> {
    /// Follows the entries in the key's chain that may belong to the key. Takes cached buckets if `from_cache` is set.
    async fn walk(&mut self, key: &[u8], from_cache: bool) -> Result<Look, KvError> {
        let mut bucket = self.table.home(key);
        let (mut is_cached, mut has_changed, mut was_led) = (false, false, false);
        for _ in 0..CHAIN_MAX {
            let cached = if from_cache { self.cache.get(bucket) } else { None };
            let of = match cached {
                Some(of) => of,
                None => self.read_bucket(bucket).await?,
            };
            is_cached |= cached.is_some();
            for entry in &of.entries {
                let Some(item) = self.table.item_of(key, entry) else { continue };
                was_led |= cached.is_some();
                match self.read_item(key, item, entry).await? {
                    Led::ToKey(version) => {
                        if from_cache {
                            self.cache.count(if cached.is_some() { Cached::Hit } else { Cached::Miss });
                        }
                        return Ok(Look::Found(version));
                    }
                    Led::ToOther => {}
                    Led::Astray => has_changed = true,
                    Led::ToTorn => return Ok(Look::Unsure),
                    Led::Slowly => return Ok(Look::Slow),
                }
            }
            let Some(extra) = of.next() else {
                if from_cache {
                    self.cache.count(if was_led { Cached::Stale } else { Cached::Miss });
                }
                let trusts = if was_led { &mutants::STALE_IS_ABSENT } else { &mutants::ABSENT_FROM_CACHE };
                let is_sure = (!is_cached && !has_changed) || (is_cached && trusts.is_on());
                return Ok(if is_sure { Look::Absent } else { Look::Unsure });
            };
            bucket = self.table.extra(extra).ok_or(KvError::Damaged(DAMAGED))?;
        }
        Ok(Look::Unsure)
    }

    async fn read_bucket(&mut self, bucket: u64) -> Result<Bucket, KvError> {
        let mut chain = self.chain.begin(self.table.extent().key);
        let of = chain.also(read_as::<Bucket>(Addr::new(self.table.bucket_at(bucket))));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        let of = *self.reply.get(of).map_err(KvError::Refused)?;
        self.cache.put(bucket, of);
        Ok(of)
    }

    /// READs the item to which an entry points, into `content`. Remembers the place of its value.
    async fn read_item(&mut self, key: &[u8], item: u64, entry: &Entry) -> Result<Led, KvError> {
        let begun = self.fabric.now();
        let len = self.table.spec().item_len() as u32;
        let mut chain = self.chain.begin(self.table.extent().key);
        let object = chain.also(read(Addr::new(self.table.item_at(item)), len));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        let object = self.reply.get(object).map_err(KvError::Refused)?;
        // A READ that takes longer may return two versions whose lines have the same number.
        if self.fabric.now().saturating_sub(begun) > READ_TIME_MAX && !mutants::WRAP_ACCEPTED.is_on() {
            return Ok(Led::Slowly);
        }
        let checks = !mutants::LINES_UNCHECKED.is_on();
        let header = decode(object, self.table.spec().content_len(), &mut self.content, checks);
        let Some(header) = header else { return Ok(Led::ToTorn) };
        if header.tag != entry.incarnation && !mutants::INCARNATION_IGNORED.is_on() {
            return Ok(Led::Astray);
        }
        let item = layout::Item::of(&self.content).ok_or(KvError::Damaged(DAMAGED))?;
        if item.key != key {
            return Ok(Led::ToOther);
        }
        let at = START + key.len();
        self.value = Some(at..at + item.value.len());
        Ok(Led::ToKey(item.version))
    }
}
