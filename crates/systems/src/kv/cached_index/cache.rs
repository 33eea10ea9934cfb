//! The buckets of the index that a client has cached.
//!
//! Invariant: a cached bucket only suggests places. A GET trusts an entry only if the item has its incarnation, and
//! never takes a key for absent because of cached buckets.

use super::layout::Bucket;

/// A cache of buckets in which each bucket has one place.
pub(super) struct Cache {
    places: Vec<Option<(u64, Bucket)>>,
    /// Largest number of places.
    capacity: usize,
    stat: CacheStat,
}

/// Counters of a client's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStat {
    /// Number of cached buckets.
    pub buckets: u64,
    /// Memory that the cache takes, in bytes.
    pub bytes: u64,
    /// Number of GETs that found their key by a cached entry: with one READ, unless a cached entry of another key has
    /// the same bits of the hash.
    pub hits: u64,
    /// Number of GETs without a cached entry of their key, also if one has the same bits of the hash.
    pub misses: u64,
    /// Number of GETs that did not find their key by a cached entry, of which one led to another incarnation: its key
    /// was deleted.
    pub stale: u64,
}

impl Cache {
    /// Creates a cache of at most so many bytes for an index of so many buckets.
    pub(super) fn new(bytes: usize, buckets: u64) -> Cache {
        let capacity = bytes / size_of::<Option<(u64, Bucket)>>();
        let capacity = capacity.min(usize::try_from(buckets).unwrap_or(usize::MAX));
        Cache { places: Vec::new(), capacity, stat: CacheStat::default() }
    }

    pub(super) fn get(&self, bucket: u64) -> Option<Bucket> {
        let place = self.places.get(self.place_of(bucket)?)?;
        place.filter(|(cached, _)| *cached == bucket).map(|(_, of)| of)
    }

    pub(super) fn put(&mut self, bucket: u64, of: Bucket) {
        let Some(place) = self.place_of(bucket) else { return };
        if self.places.is_empty() {
            self.places.resize(self.capacity, None);
        }
        self.stat.buckets += u64::from(self.places[place].is_none());
        self.places[place] = Some((bucket, of));
    }

    pub(super) fn stat(&self) -> CacheStat {
        let bytes = self.places.len() * size_of::<Option<(u64, Bucket)>>();
        CacheStat { bytes: bytes as u64, ..self.stat }
    }

    pub(super) fn count(&mut self, of: Cached) {
        let CacheStat { hits, misses, stale, .. } = &mut self.stat;
        *match of {
            Cached::Hit => hits,
            Cached::Miss => misses,
            Cached::Stale => stale,
        } += 1;
    }

    fn place_of(&self, bucket: u64) -> Option<usize> {
        bucket.checked_rem(self.capacity as u64).map(|place| place as usize)
    }
}

/// How a GET has fared with the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cached {
    Hit,
    Miss,
    Stale,
}
