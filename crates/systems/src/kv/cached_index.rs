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

pub use super::called::{ATTEMPTS_MAX, SLOW_MAX};
use super::client::{Client, Look, LookUp, Reads};
use super::inplace::START;
use super::{Fetched, KvError, Version};
use crate::store::{self, StoreError};
pub use cache::CacheStat;
use cache::{Cache, Cached};
use farside_remote::clock::Clock;
use farside_remote::{Fabric, NodeId};
use layout::{Bucket, CHAIN_MAX, Entry, Table};
use service::CachedIndexKind;

/// Kind of the store in the catalog.
pub const KIND: &str = "cached-index";

/// Size of a client's cache in bytes if it is not given.
pub const CACHE_DEFAULT: usize = 16 << 20;

const DAMAGED: &str = "an entry or item that no service wrote";

/// Client of one store with a cached index. It runs one operation at a time: give each task its own client.
pub type CachedIndex<F> = Client<F, Index>;

/// The table, and what a client has cached of its index.
pub struct Index {
    table: Table,
    cache: Cache,
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

    /// Returns the counters of this client's cache.
    pub fn cache(&self) -> CacheStat {
        self.look_up.cache.stat()
    }
}

impl LookUp for Index {
    const KIND: &'static str = KIND;
    const DAMAGED: &'static str = DAMAGED;
    type Table = Table;

    fn table(&self) -> &Table {
        &self.table
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let CacheStat { bytes, hits, misses, stale, .. } = self.cache.stat();
        vec![("cache bytes", bytes), ("cache hits", hits), ("cache misses", misses), ("stale entries", stale)]
    }

    /// Follows the entries in the key's chain that may belong to the key. The first attempt takes cached buckets. Takes
    /// one round trip if the key's entry is cached, and two or more otherwise.
    async fn look_up<F: Fabric + Clock>(
        &mut self,
        reads: &mut Reads<F>,
        key: &[u8],
        attempt: u32,
    ) -> Result<Look, KvError> {
        let from_cache = attempt == 0;
        let mut bucket = self.table.home(key);
        let (mut is_cached, mut has_changed, mut was_stale) = (false, false, false);
        for _ in 0..CHAIN_MAX {
            let cached = if from_cache { self.cache.get(bucket) } else { None };
            let of = match cached {
                Some(of) => of,
                None => self.read_bucket(reads, bucket).await?,
            };
            is_cached |= cached.is_some();
            for entry in &of.entries {
                let Some(item) = self.table.item_of(key, entry) else { continue };
                match self.read_item(reads, key, item, entry).await? {
                    Led::ToKey(version) => {
                        if from_cache {
                            self.cache.count(if cached.is_some() { Cached::Hit } else { Cached::Miss });
                        }
                        return Ok(Look::Found(Fetched { at: None, version }));
                    }
                    Led::ToOther => {}
                    Led::Astray => {
                        has_changed = true;
                        was_stale |= cached.is_some();
                    }
                    Led::ToTorn => return Ok(Look::Unsure),
                    Led::Slowly => return Ok(Look::Slow),
                }
            }
            let Some(extra) = of.next() else {
                if from_cache {
                    self.cache.count(if was_stale { Cached::Stale } else { Cached::Miss });
                }
                let trusts = if was_stale { &mutants::STALE_IS_ABSENT } else { &mutants::ABSENT_FROM_CACHE };
                let is_sure = (!is_cached && !has_changed) || (is_cached && trusts.is_on());
                return Ok(if is_sure { Look::Absent } else { Look::Unsure });
            };
            bucket = self.table.extra(extra).ok_or(KvError::Damaged(DAMAGED))?;
        }
        Ok(Look::Unsure)
    }
}

impl Index {
    async fn read_bucket<F: Fabric + Clock>(
        &mut self,
        reads: &mut Reads<F>,
        bucket: u64,
    ) -> Result<Bucket, KvError> {
        let of = reads.read_one(self.table.bucket_at(bucket)).await?;
        self.cache.put(bucket, of);
        Ok(of)
    }

    /// READs the item to which an entry points. Remembers the place of its value.
    async fn read_item<F: Fabric + Clock>(
        &self,
        reads: &mut Reads<F>,
        key: &[u8],
        item: u64,
        entry: &Entry,
    ) -> Result<Led, KvError> {
        let spec = self.table.spec();
        let is_in_time = reads.read_in_time(self.table.item_at(item), spec.item_len()).await?;
        if !is_in_time && !mutants::WRAP_ACCEPTED.is_on() {
            return Ok(Led::Slowly);
        }
        let header = reads.decode(0, spec.content_len(), !mutants::LINES_UNCHECKED.is_on());
        let Some(header) = header else { return Ok(Led::ToTorn) };
        if header.tag != entry.incarnation && !mutants::INCARNATION_IGNORED.is_on() {
            return Ok(Led::Astray);
        }
        let item = layout::Item::of(&reads.content).ok_or(KvError::Damaged(DAMAGED))?;
        if item.key != key {
            return Ok(Led::ToOther);
        }
        let at = START + key.len();
        let (version, len) = (item.version, item.value.len());
        reads.value = Some(at..at + len);
        Ok(Led::ToKey(version))
    }
}
