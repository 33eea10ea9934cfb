//! Numbers of events in a client's operations.

use crate::index::counters::counters;

counters! {
    /// Leaf splits.
    leaf_splits: "leaf splits";
    /// Path splits.
    path_splits: "path splits";
    /// Switches from the types with 4, 8, 16, 32, 64 and 128 slots.
    switches_from_4: "type switches from 4";
    switches_from_8: "type switches from 8";
    switches_from_16: "type switches from 16";
    switches_from_32: "type switches from 32";
    switches_from_64: "type switches from 64";
    switches_from_128: "type switches from 128";
    /// Type switches that a writer has completed for another one.
    switches_helped: "type switches helped";
    /// Leaves that were put in the place of a dead leaf or of an emptied slot.
    revivals: "tombstones revived";
    /// Slots that were emptied.
    emptied: "slots emptied";
    /// Cached slots that were found to have changed.
    invalidations: "cache invalidations";
    /// Operations that began with a cached slot.
    cache_hits: "cache hits";
    /// Operations that began with the root slot.
    cache_misses: "cache misses";
    /// Leaves that were read while they were written.
    torn: "torn leaves";
    /// Attempts to lock a leaf that another client had locked.
    lock_failures: "lock failures";
    /// CAS of slots that other clients had changed.
    slot_failures: "slot failures";
    /// Units that were free for reuse.
    reused: "units freed";
    /// Operations that took the result of another one's request.
    reads_delegated: "reads delegated";
    writes_combined: "writes combined";
    /// Leaves that a scan has read again.
    scan_retries: "scan retries";
    /// Leaves that were replaced by new ones, and nodes that were locked, on the lower rungs of the ladder.
    replaced: "leaves replaced";
    node_locks: "node locks";
}
