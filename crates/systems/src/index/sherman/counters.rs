//! Numbers of events in a client's operations.

use crate::counters::counters;

counters! {
    /// Splits of leaves and of inner nodes.
    leaf_splits: "leaf splits";
    inner_splits: "inner splits";
    /// Splits whose two nodes were written by one chain.
    splits_together: "splits by one chain";
    /// New roots, and attempts to install one that other clients have forestalled.
    root_growths: "root growths";
    root_races: "root races lost";
    /// Separators that were inserted for another client.
    separators_helped: "separators helped";
    /// Separators that were left out because the node above was locked for too long, or no memory was free.
    separators_left_out: "separators left out";
    /// Steps to the node at the right.
    right_moves: "right moves";
    /// Cached nodes that were found to be outdated.
    invalidations: "cache invalidations";
    /// Operations that began with a cached node, and those that began with the root.
    cache_hits: "cache hits";
    cache_misses: "cache misses";
    /// READs of nodes that have met a change, those that took so long that versions may have wrapped, whether or not
    /// they have met a change, and those under the node's lock by operations that change nothing in it.
    torn: "torn reads";
    late: "late reads";
    locked_reads: "locked reads";
    /// Attempts to take a lock that another client had.
    lock_failures: "lock failures";
    /// Locks that were handed over within the client.
    handovers: "locks handed over";
}
