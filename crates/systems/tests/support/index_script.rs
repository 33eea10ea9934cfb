//! Operations on an index of a client that will be killed.
//!
//! Invariant: no other client changes this client's keys, and the client runs one operation after another. So the keys
//! have the values that a prefix of the script leaves.

use super::kept_index::KeptIndex;
use super::script;
use farside_fabrics::runner::Runs;
use farside_systems::index::Index;
use std::collections::BTreeMap;

/// One operation of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Put(u64),
    Delete(u64),
    /// Waits until units that were unlinked before are free.
    Pause,
}

/// Script with every kind of operation, so that a client makes every kind of access.
pub(crate) const TOUR: [Op; 43] = [
    // A leaf split with two nodes, and inserts into a node, which switch its type.
    Op::Put(0x0101),
    Op::Put(0x0102),
    Op::Put(0x0103),
    Op::Put(0x0104),
    Op::Put(0x0105),
    Op::Put(0x0106),
    Op::Put(0x0107),
    Op::Put(0x0108),
    Op::Put(0x0109),
    // Updates.
    Op::Put(0x0101),
    Op::Put(0x0109),
    Op::Put(0x0105),
    // Path splits.
    Op::Put(0x01_0000_0101),
    Op::Put(0xff_0000_0000_0101),
    Op::Put(0x02_0000_0101),
    // Leaf splits.
    Op::Put(0xff_0000_0000_0102),
    Op::Put(0x02_0000_0102),
    Op::Put(0x02_0000_0203),
    Op::Delete(0x0102),
    Op::Delete(0x0109),
    Op::Delete(0x02_0000_0102),
    Op::Put(0x02_0000_0102),
    Op::Put(0x0101),
    Op::Pause,
    Op::Put(0x0102),
    Op::Put(0x0102),
    Op::Put(0x0101),
    Op::Put(0x0201),
    Op::Put(0x0202),
    Op::Put(0x0202),
    Op::Delete(0x0103),
    Op::Put(0x0103),
    Op::Pause,
    Op::Put(0x0301),
    Op::Put(0x0302),
    Op::Put(0x0401),
    Op::Put(0x0501),
    Op::Put(0x0601),
    Op::Put(0x0501),
    Op::Delete(0x0601),
    Op::Put(0x0301),
    Op::Put(0x010a),
    Op::Pause,
];

/// Carries out an operation of the script.
pub(crate) fn perform<M: Runs + 'static>(client: &mut KeptIndex<M>, index: usize, op: Op) {
    match op {
        Op::Put(key) => {
            let put = client.run(async |client| client.put(&key.to_be_bytes(), &value(index)).await);
            put.expect("stored");
        }
        Op::Delete(key) => {
            let deleted = client.run(async |client| client.delete(&key.to_be_bytes()).await);
            assert!(deleted.expect("deleted"), "{key:x}");
        }
        Op::Pause => client.wait_for_units(),
    }
}

/// The value that operation number `index` puts.
pub(crate) fn value(index: usize) -> Vec<u8> {
    script::value(index as u64, index as u64, index * 7 % 41)
}

/// The keys that have values after the first `count` operations, with the numbers of the operations that put them.
pub(crate) fn after(count: usize) -> BTreeMap<u64, usize> {
    let mut values = BTreeMap::new();
    for (index, op) in TOUR.into_iter().enumerate().take(count) {
        match op {
            Op::Put(key) => _ = values.insert(key, index),
            Op::Delete(key) => _ = values.remove(&key),
            Op::Pause => {}
        }
    }
    values
}
