//! The memory that a store of a number of keys takes: the size of its chunks, and the bytes of nodes and leaves.
//!
//! Each switched node reserves the memory for 256 slots, so the number of nodes for each key decides. It depends on the
//! keys:
//!
//! - Scattered numbers: if a level has x keys for each of its places, a place has a node if it has two keys or more.
//!   With x = 1.8, this is true for 0.54 of the places, so there are 0.30 nodes for each key, the most for any x. The
//!   levels above and below have 0.01 nodes for each key then.
//! - Dense numbers: one node for each 256 keys.
//! - Strings: the fewer letters they use, the fewer keys share a node. Digits need up to 0.44 nodes for each key. Mail
//!   addresses with the host first, and paths of web pages, need 0.45 to 0.51.
//! - Strings of two letters need up to one node for each key, and one more for each 7 bytes that keys have in common.
//!   A store is not sized for such keys.
//!
//! Copied nodes have few unused slots. Each slot that is in use takes at most 58 bytes of its node and of the smaller
//! ones that the node has replaced: those with 4 and 16 slots have 64 and 192 bytes, so it is 51 if a node has 5 slots
//! in use, 42 if it has 17, and 58 if it has 49.
//!
//! Invariant: a store with this memory has room for its keys, whichever of its clients put them.

use super::layout::{Class, Growth, NodeType, Spec, UNIT};
use crate::index::Keys;

/// Number of chunks of a store for each id, and at least, unless its chunks have the largest or the smallest size.
const CHUNKS_PER_ID: u64 = 32;
const CHUNKS_MIN: u64 = 512;
const CHUNK_MAX: u64 = 1 << 20;
/// Number of units of the largest class for which a chunk has room at least.
const UNITS_MIN: u64 = 4;
/// Size of the state of a unit in bytes.
const STATE: u64 = 8;

impl Spec {
    /// Number of nodes for each 16 keys, at most, if the keys are as usual.
    fn nodes_per_16_keys(&self) -> u64 {
        match self.keys {
            Keys::Numbers => 5,
            Keys::Strings => 9,
        }
    }

    /// The largest one of the classes of nodes, of the leaves of the longest paths, and of the longest values.
    pub(in crate::index) fn largest_class(&self) -> Class {
        let value = self.has_values_apart().then(|| self.value_class(self.value_max));
        let node = match self.nodes {
            Growth::Switched => NodeType::MAX,
            Growth::Copied => NodeType::COPIED[3],
        };
        let classes = [node.class(), self.leaf_class(self.path_max())].into_iter().chain(value);
        classes.max_by_key(|class| class.size()).unwrap_or(Class::NODE)
    }

    /// The same parameters with a chunk for a quota in bytes, if they have none. The units of the largest class fill
    /// the chunk.
    pub(in crate::index) fn with_chunk(self, quota: u64) -> Spec {
        if self.chunk != 0 {
            return self;
        }
        let (class, chunks) = (self.largest_class(), CHUNKS_MIN.max(CHUNKS_PER_ID * u64::from(self.ids)));
        let (units, _) = class.units((quota / chunks).min(CHUNK_MAX));
        Spec { chunk: class.chunk(units.max(UNITS_MIN)) as u32, ..self }
    }

    /// Size in bytes of a store at one member that has room for `items` keys with paths of at most `path_len` bytes,
    /// and with the longest values, if the keys are as usual. `None` if no store is that large.
    pub(in crate::index) fn bytes_for(self, items: u64, path_len: usize) -> Option<u64> {
        let leaf = self.leaf_class(path_len);
        let nodes = items.checked_mul(self.nodes_per_16_keys())?.div_ceil(16);
        let path_min = if self.keys == Keys::Numbers { path_len } else { 2 };
        let value = self.has_values_apart().then(|| self.value_class(self.value_max));
        let values =
            value.map_or(0, |_| (self.value_max / self.inline_max.max(UNIT as u32)).max(1).ilog2() + 2);
        let of_nodes = if self.nodes == Growth::Copied { NodeType::COPIED.len() as u64 } else { 1 };
        let classes = 1 + of_nodes + u64::from(leaf.0 - self.leaf_class(path_min).0) + u64::from(values);
        let bytes = |spec: &Spec| {
            let value = value.map_or(Some(0), |class| spec.bytes_of(class))?;
            let units = items.checked_mul(spec.bytes_of(leaf)?.checked_add(value)?)?;
            let of_nodes = match spec.nodes {
                Growth::Switched => nodes.checked_mul(spec.bytes_of(Class::NODE)?)?,
                // Each key and each node has a slot.
                Growth::Copied => {
                    items.checked_add(nodes)?.checked_mul(spec.bytes_of(NodeType::COPIED[0].class())?)?
                }
            };
            let units = units.checked_add(of_nodes)?;
            // Each id may have a chunk of each class of which it uses one unit. A larger quota may have larger chunks.
            let chunk = u64::from(spec.chunk) + spec.largest_class().size() + STATE;
            let unused = u64::from(spec.ids) * classes * (chunk + STATE);
            let claims = units / u64::from(spec.chunk) * STATE + UNIT;
            spec.table_min().checked_add(units)?.checked_add(unused + claims)
        };
        let mut size = bytes(&self.with_chunk(0))?;
        loop {
            // The chunks grow with the size, but more slowly.
            match bytes(&self.with_chunk(size))? {
                larger if larger > size => size = larger,
                _ => return Some(size),
            }
        }
    }

    /// Bytes of chunks that a unit takes at most, with its state and its share of what is left over. `None` if it does
    /// not fit into a chunk.
    fn bytes_of(&self, class: Class) -> Option<u64> {
        let chunk = u64::from(self.chunk);
        // The chunks of a store with a larger quota may be larger: then less is left over for each unit.
        let is_filled = class == self.largest_class() && class.chunk(class.units(chunk).0) == chunk;
        let left_over = if is_filled { UNIT } else { class.size() + STATE + UNIT };
        let filled = chunk.checked_sub(left_over).filter(|filled| *filled >= class.size() + STATE)?;
        Some(((class.size() + STATE) * chunk).div_ceil(filled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> impl Iterator<Item = Spec> {
        [Keys::Numbers, Keys::Strings].into_iter().flat_map(|keys| {
            let spec = move |(value_max, inline_max, ids)| Spec {
                keys,
                value_max,
                inline_max,
                ids,
                ..Spec::default()
            };
            let inline = [(0, 0, 64), (8, 8, 1), (100, 200, 64), (2100, 7168, 1024), (7168, 7168, 64)];
            let apart =
                [(40, 0, 64), (40, 16, 8), (1000, 100, 64), (48 << 10, 256, 64), (48 << 10, 7168, 1024)];
            inline.into_iter().chain(apart).map(spec)
        })
    }

    #[test]
    fn a_unit_takes_no_more_of_its_chunk_than_is_counted_for_it() {
        for spec in specs() {
            for quota in [0, 1 << 20, 77 << 20, 1 << 30, (1 << 33) + 12345, 1 << 40] {
                let chosen = spec.with_chunk(quota);
                chosen.check().expect("it is possible");
                let value = spec.has_values_apart().then(|| [spec.inline_max + 1, spec.value_max]);
                let values = value.into_iter().flatten().map(|len| spec.value_class(len));
                let leaves = [spec.leaf_class(2), spec.leaf_class(spec.path_max()), Class::NODE];
                for class in leaves.into_iter().chain(values) {
                    let counted = chosen.bytes_of(class).expect("it fits");
                    for larger in [quota, quota + 4096, quota * 2, quota * 7 + 999] {
                        let chunk = u64::from(spec.with_chunk(larger).chunk);
                        let (units, _) = class.units(chunk);
                        assert!(counted * units >= chunk, "{spec:?} {quota} {larger} {class:?}");
                        assert!(counted <= class.size() * 3 / 2 + 100, "{class:?} takes {counted}");
                    }
                }
            }
        }
    }

    #[test]
    fn larger_stores_have_room_for_more_keys() {
        for spec in specs() {
            let sizes =
                [0, 1, 1000, 100_000, 100_000_000].map(|items| spec.bytes_for(items, spec.path_max()));
            assert!(sizes.is_sorted() && sizes[0].is_some_and(|least| least > spec.table_min()), "{sizes:?}");
            assert_eq!(spec.bytes_for(u64::MAX / 3, spec.path_max()), None);
        }
    }
}
