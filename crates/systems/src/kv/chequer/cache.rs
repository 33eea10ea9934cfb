//! The client's cache of values, least recently used first out: a hash map from keys to nodes of a doubly linked list.
//!
//! Each value has the time stamp of its record in the server's table. The client READs the record, and then asks the
//! cache for the value that has the record's stamp. So a hit saves the READ of the value, and is never stale.
//!
//! All operations take constant time, apart from hashing and copying bytes. `put` evicts several small values for a
//! large one, each of which an earlier `put` has stored.
//!
//! The map's keys are 64-bit hashes of the cache's keys, so each key is stored only once. If two keys have the same
//! hash, only the one put last is in the cache.
//!
//! Invariants:
//! * The nodes' bytes, with [`ENTRY_BYTES`] for each node, never exceed the bound.
//! * A node is in the map and in the list, or its slot is free.

use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Bytes that an entry counts beside its key and its value: its node, its share of the map with room to grow, and the
/// allocator's header.
pub const ENTRY_BYTES: usize = 112;

/// No node.
const NONE: u32 = u32::MAX;

/// A cache of values.
pub struct Cache {
    secrets: RapidSecrets,
    /// Node of each key, by the key's hash.
    map: HashMap<u64, u32, BuildHasherDefault<AlreadyHashed>>,
    nodes: Vec<Node>,
    /// Slots of `nodes` without an entry.
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    bytes: usize,
    bytes_max: usize,
}

/// Place of a value in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u32);

struct Node {
    hash: u64,
    stamp: u64,
    newer: u32,
    older: u32,
    key_len: usize,
    /// The key, followed by the value.
    bytes: Vec<u8>,
}

impl Node {
    fn key(&self) -> &[u8] {
        &self.bytes[..self.key_len]
    }

    fn value(&self) -> &[u8] {
        &self.bytes[self.key_len..]
    }
}

impl Cache {
    /// Creates an empty cache of at most `bytes_max` bytes. 0 caches nothing. The seed makes it hard to choose keys
    /// that have the same hash.
    #[must_use]
    pub fn new(bytes_max: usize, seed: u64) -> Cache {
        Cache {
            secrets: RapidSecrets::seed(seed),
            map: HashMap::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            bytes: 0,
            bytes_max,
        }
    }

    /// Returns the key's value if it has this stamp, and makes it the most recently used. A value with another stamp
    /// becomes the next to be evicted, unless a `put` refreshes it.
    pub fn get(&mut self, key: &[u8], stamp: u64) -> Option<&[u8]> {
        self.find_current(key, stamp).map(|place| self.value(place))
    }

    /// The value that [`Cache::find_current`] has found. It is there until the cache is changed.
    #[must_use]
    pub fn value(&self, place: Place) -> &[u8] {
        self.nodes.get(place.0 as usize).map_or(&[], Node::value)
    }

    /// Does the same as [`Cache::get`], but returns the value's place.
    pub fn find_current(&mut self, key: &[u8], stamp: u64) -> Option<Place> {
        let at = self.find(key, self.hash(key))?;
        self.unlink(at);
        if self.nodes[at as usize].stamp != stamp {
            self.link_oldest(at);
            return None;
        }
        self.link_newest(at);
        Some(Place(at))
    }

    /// Caches the key's value and makes it the most recently used. It replaces the key's former value. A value that
    /// does not fit into an empty cache is not cached, and the key's former value is removed.
    pub fn put(&mut self, key: &[u8], stamp: u64, value: &[u8]) {
        let hash = self.hash(key);
        let mut spare = Vec::new();
        if let Some(&at) = self.map.get(&hash) {
            // An entry of another key with the same hash goes, too.
            spare = self.take(at);
        }
        let len = key.len() + value.len();
        let Some(room) = self.bytes_max.checked_sub(len + ENTRY_BYTES) else { return };
        while self.bytes > room {
            spare = self.take(self.oldest);
        }
        let node = Node {
            hash,
            stamp,
            newer: NONE,
            older: NONE,
            key_len: key.len(),
            bytes: filled(spare, key, value),
        };
        let at = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node {
                hash: 0,
                stamp: 0,
                newer: NONE,
                older: NONE,
                key_len: 0,
                bytes: Vec::new(),
            });
            u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 entries fit into the bound")
        });
        self.bytes += len + ENTRY_BYTES;
        self.nodes[at as usize] = node;
        self.map.insert(hash, at);
        self.link_newest(at);
    }

    /// Removes the key's value. Returns whether there was one.
    pub fn remove(&mut self, key: &[u8]) -> bool {
        match self.find(key, self.hash(key)) {
            Some(at) => {
                self.take(at);
                true
            }
            None => false,
        }
    }

    /// Removes all values and frees their memory.
    pub fn clear(&mut self) {
        self.map = HashMap::default();
        self.nodes = Vec::new();
        self.free = Vec::new();
        (self.newest, self.oldest) = (NONE, NONE);
        self.bytes = 0;
    }

    /// Number of bytes of all keys and values, with [`ENTRY_BYTES`] for each entry.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the cache has no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    fn hash(&self, key: &[u8]) -> u64 {
        rapidhash_v3_seeded(key, &self.secrets)
    }

    fn find(&self, key: &[u8], hash: u64) -> Option<u32> {
        let at = *self.map.get(&hash)?;
        (self.nodes[at as usize].key() == key).then_some(at)
    }

    /// Removes an entry, and returns its allocation for reuse.
    fn take(&mut self, at: u32) -> Vec<u8> {
        self.unlink(at);
        let node = &mut self.nodes[at as usize];
        let (hash, bytes) = (node.hash, std::mem::take(&mut node.bytes));
        self.bytes -= bytes.len() + ENTRY_BYTES;
        self.map.remove(&hash);
        self.free.push(at);
        bytes
    }

    fn unlink(&mut self, at: u32) {
        let Node { newer, older, .. } = self.nodes[at as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let older = std::mem::replace(&mut self.newest, at);
        self.nodes[at as usize].newer = NONE;
        self.nodes[at as usize].older = older;
        match older {
            NONE => self.oldest = at,
            older => self.nodes[older as usize].newer = at,
        }
    }

    fn link_oldest(&mut self, at: u32) {
        let newer = std::mem::replace(&mut self.oldest, at);
        self.nodes[at as usize].newer = newer;
        self.nodes[at as usize].older = NONE;
        match newer {
            NONE => self.newest = at,
            newer => self.nodes[newer as usize].older = at,
        }
    }
}

/// Returns a key followed by a value, in a former entry's allocation if that fits. An allocation that is more than a
/// quarter too large is not reused, because an entry counts only its bytes.
fn filled(mut spare: Vec<u8>, key: &[u8], value: &[u8]) -> Vec<u8> {
    let len = key.len() + value.len();
    if !(len..=len + len / 4).contains(&spare.capacity()) {
        spare = Vec::with_capacity(len);
    }
    spare.clear();
    spare.extend_from_slice(key);
    spare.extend_from_slice(value);
    spare
}

/// Hashes a number that is a hash to itself.
#[derive(Default)]
struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        panic!("the map's keys are numbers");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::draws::Draws;

    /// The same cache by a list that is searched from its start: key, stamp, value; the most recently used comes first.
    struct Naive {
        entries: Vec<(Vec<u8>, u64, Vec<u8>)>,
        bytes_max: usize,
    }

    impl Naive {
        fn bytes(&self) -> usize {
            self.entries.iter().map(|(key, _, value)| key.len() + value.len() + ENTRY_BYTES).sum()
        }

        fn pull(&mut self, key: &[u8]) -> Option<(Vec<u8>, u64, Vec<u8>)> {
            let at = self.entries.iter().position(|(of, ..)| of == key)?;
            Some(self.entries.remove(at))
        }

        fn get(&mut self, key: &[u8], stamp: u64) -> Option<Vec<u8>> {
            let entry = self.pull(key)?;
            let found = (entry.1 == stamp).then(|| entry.2.clone());
            let at = if found.is_some() { 0 } else { self.entries.len() };
            self.entries.insert(at, entry);
            found
        }

        fn put(&mut self, key: &[u8], stamp: u64, value: &[u8]) {
            self.pull(key);
            self.entries.insert(0, (key.to_vec(), stamp, value.to_vec()));
            if key.len() + value.len() + ENTRY_BYTES > self.bytes_max {
                self.entries.remove(0);
            }
            while self.bytes() > self.bytes_max {
                self.entries.pop();
            }
        }
    }

    /// Number of entries in the list from either end.
    fn lengths(cache: &Cache) -> (usize, usize) {
        let follow = |first: u32, next: fn(&Node) -> u32| {
            let (mut at, mut len) = (first, 0);
            while at != NONE {
                len += 1;
                at = next(&cache.nodes[at as usize]);
            }
            len
        };
        (follow(cache.newest, |node| node.older), follow(cache.oldest, |node| node.newer))
    }

    #[test]
    fn random_operations_match_a_naive_list() {
        for seed in 0..20 {
            let mut draws = Draws(seed);
            let bytes_max = draws.below(20_000) as usize;
            let mut cache = Cache::new(bytes_max, seed);
            let mut naive = Naive { entries: Vec::new(), bytes_max };
            let (mut hits, mut stale, mut refused) = (0, 0, 0);
            for step in 0..10_000 {
                let key = draws.below(60).to_le_bytes()[..1 + draws.below(2) as usize].to_vec();
                let stamp = draws.below(3);
                match draws.below(100) {
                    0..50 => {
                        let found = cache.get(&key, stamp).map(<[u8]>::to_vec);
                        assert_eq!(found, naive.get(&key, stamp), "seed {seed}, step {step}");
                        hits += u32::from(found.is_some());
                        stale +=
                            u32::from(found.is_none() && naive.entries.iter().any(|(of, ..)| *of == key));
                    }
                    50..90 => {
                        let most = if draws.once_in(50) { 2 * bytes_max as u64 + 100 } else { 1_500 };
                        let len = draws.below(most) as usize;
                        let value = draws.bytes(len);
                        cache.put(&key, stamp, &value);
                        naive.put(&key, stamp, &value);
                        refused += u32::from(naive.entries.first().is_none_or(|(of, ..)| *of != key));
                    }
                    90..99 => {
                        assert_eq!(cache.remove(&key), naive.pull(&key).is_some(), "seed {seed}, step {step}")
                    }
                    _ if draws.once_in(20) => {
                        cache.clear();
                        naive.entries.clear();
                    }
                    _ => {}
                }
                let sizes = (cache.bytes(), cache.len(), cache.is_empty());
                assert_eq!(sizes, (naive.bytes(), naive.entries.len(), naive.entries.is_empty()));
                assert!(cache.bytes() <= bytes_max);
            }
            assert_eq!(lengths(&cache), (cache.len(), cache.len()));
            assert_eq!(cache.nodes.len(), cache.len() + cache.free.len(), "no slot is lost");
            assert!(hits > 0 && stale > 0 && refused > 0, "seed {seed}: {hits}, {stale}, {refused}");
        }
    }

    #[test]
    fn a_cache_without_room_caches_nothing() {
        for bytes_max in [0, ENTRY_BYTES, ENTRY_BYTES + 1] {
            let mut cache = Cache::new(bytes_max, 0);
            cache.put(b"k", 1, b"v");
            assert_eq!(cache.get(b"k", 1), None);
            assert_eq!(cache.bytes(), 0);
        }
        let mut cache = Cache::new(ENTRY_BYTES + 2, 0);
        cache.put(b"k", 1, b"v");
        assert_eq!(cache.get(b"k", 1), Some(&b"v"[..]));
    }

    #[test]
    fn the_evicted_allocation_is_reused() {
        let mut cache = Cache::new(2 * (ENTRY_BYTES + 101), 0);
        let start = |cache: &Cache| cache.nodes[cache.newest as usize].bytes.as_ptr();
        cache.put(b"a", 1, &[1; 100]);
        let first = start(&cache);
        cache.put(b"b", 2, &[2; 100]);
        cache.put(b"c", 3, &[3; 90]);
        assert_eq!((start(&cache), cache.nodes.len()), (first, 2));
        assert_eq!(cache.get(b"a", 1), None);
        assert_eq!(cache.get(b"c", 3), Some(&[3; 90][..]));
        // An allocation of 101 bytes would waste too much.
        cache.put(b"c", 4, &[4; 10]);
        assert!(cache.nodes[cache.newest as usize].bytes.capacity() < 101);
    }

    #[test]
    fn keys_of_one_hash_displace_each_other() {
        let mut cache = Cache::new(1_000, 0);
        cache.put(b"a", 1, b"1");
        // As if `b` had the hash of `a`.
        let hash = cache.hash(b"b");
        let at = cache.map.remove(&cache.hash(b"a")).expect("it was put");
        cache.nodes[at as usize].hash = hash;
        cache.map.insert(hash, at);
        assert_eq!(cache.get(b"b", 1), None);
        assert!(!cache.remove(b"b"));
        cache.put(b"b", 1, b"2");
        assert_eq!(cache.get(b"b", 1), Some(&b"2"[..]));
        assert_eq!(cache.len(), 1);
    }
}
