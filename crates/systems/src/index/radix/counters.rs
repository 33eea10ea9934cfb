//! Numbers of events that the clients of all radix trees count.

use crate::counters::counters;

counters! {
    /// Leaf splits.
    leaf_splits: "leaf splits";
    /// Path splits.
    path_splits: "path splits";
    /// Leaves that were put in the place of a dead leaf or of an emptied slot.
    revivals: "tombstones revived";
    /// Slots that were emptied.
    emptied: "slots emptied";
    /// Leaves that were replaced by new ones.
    replaced: "leaves replaced";
    /// Nodes that were locked.
    node_locks: "node locks";
    /// Attempts to take a lock that another client had.
    lock_failures: "lock failures";
    /// CAS of slots that other clients had changed.
    slot_failures: "slot failures";
    /// Cached slots that were found to have changed.
    invalidations: "cache invalidations";
    /// Operations that began with a cached slot.
    cache_hits: "cache hits";
    /// Operations that began with the root slot.
    cache_misses: "cache misses";
    /// Leaves that a scan has read again.
    scan_retries: "scan retries";
    /// Units that were free for reuse.
    reused: "units freed";
}
