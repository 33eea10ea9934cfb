//! Operations of a client that will be killed. The same seed yields the same operations, so the test can tell which
//! operations took effect.
//!
//! Invariant: no other client uses this client's keys, and the client runs one operation after another. So the keys
//! hold the result of a prefix of the script.

use farside_remote::draws::Draws;
use std::collections::BTreeMap;

/// One operation of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Put {
        key: u8,
        len: usize,
    },
    Delete {
        key: u8,
    },
    /// Waits, so that retired buffers return to their free lists.
    Pause,
}

/// Number of keys that a script uses.
pub(crate) const KEYS: u8 = 6;

/// Script with every kind of operation, so that a client makes every kind of access. First, the client overwrites one
/// key until it reuses what it has replaced: it has no buffers of other classes yet, which would be in the way until
/// the node takes them.
pub(crate) const TOUR: [Op; OVERWRITES + KINDS.len()] = {
    let mut tour = [Op::Put { key: 4, len: 300 }; OVERWRITES + KINDS.len()];
    let (_, kinds) = tour.split_at_mut(OVERWRITES);
    kinds.copy_from_slice(&KINDS);
    tour
};
const OVERWRITES: usize = 30;

const KINDS: [Op; 21] = [
    Op::Put { key: 0, len: 300 },
    Op::Put { key: 0, len: 300 },
    Op::Delete { key: 0 },
    Op::Put { key: 0, len: 700 },
    Op::Put { key: 1, len: 150_000 },
    Op::Pause,
    Op::Put { key: 0, len: 300 },
    Op::Put { key: 0, len: 700 },
    Op::Put { key: 1, len: 150_000 },
    Op::Put { key: 1, len: 500 },
    Op::Put { key: 2, len: 62_000 },
    Op::Delete { key: 2 },
    Op::Pause,
    Op::Put { key: 3, len: 3000 },
    Op::Put { key: 3, len: 3000 },
    Op::Put { key: 2, len: 62_000 },
    Op::Delete { key: 1 },
    Op::Pause,
    Op::Put { key: 0, len: 700 },
    Op::Put { key: 2, len: 62_000 },
    Op::Put { key: 3, len: 3000 },
];

/// Returns operation number `index` of the endless script of this seed.
pub(crate) fn endless(seed: u64, index: u64) -> Op {
    let random = mix(seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let key = (random >> 32) as u8 % KEYS;
    match random % 20 {
        0..=2 => Op::Delete { key },
        3 => Op::Put { key, len: [62_000, 150_000][(random >> 40) as usize % 2] },
        _ => Op::Put { key, len: [0, 100, 300, 700, 3000, 5000][(random >> 40) as usize % 6] },
    }
}

/// Returns the name of key number `key` of the client with this seed.
pub(crate) fn key(seed: u64, key: u8) -> Vec<u8> {
    format!("{seed:x}-{key}").into_bytes()
}

/// Returns the value of `len` bytes that operation number `index` puts.
pub(crate) fn value(seed: u64, index: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    for word in 0..len.div_ceil(8) as u64 {
        bytes.extend_from_slice(&mix(seed ^ mix(index) ^ word).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Maps each key that has a value after the first `count` operations to the number of the operation that put the
/// value, and to the value's length in bytes.
pub(crate) fn after(count: u64, op: impl Fn(u64) -> Op) -> BTreeMap<u8, (u64, usize)> {
    let mut values = BTreeMap::new();
    for index in 0..count {
        match op(index) {
            Op::Put { key, len } => drop(values.insert(key, (index, len))),
            Op::Delete { key } => drop(values.remove(&key)),
            Op::Pause => {}
        }
    }
    values
}

/// Returns the first random number of a seed.
pub(crate) fn mix(word: u64) -> u64 {
    Draws(word).next()
}
