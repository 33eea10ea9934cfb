//! Broken variants of reclamation, scans, and rebuilt tables.

farside_remote::mutants! {
    /// The node gives a retired buffer back without waiting for anybody.
    REPOST_AT_ONCE = "RepostAtOnce";
    /// A scan frees whatever the structure does not reach, whoever holds it, and waits for nobody.
    SCAN_BY_REACHABILITY_ALONE = "ScanByReachabilityAlone";
    /// A scan does not wait for those who may have replaced what it looks for.
    SWEEP_WITHOUT_GRACE = "SweepWithoutGrace";
    /// Buffers go back to their lists between being seen reachable and being noted as such.
    REUSE_WHILE_ADOPTING = "ReuseWhileAdopting";
    /// A store is dropped while its buffers are on lists among those of other stores.
    DROP_WITHOUT_TAKING_LISTS = "DropWithoutTakingLists";
    /// A former table's memory is given back while chains may be under way in it.
    OLD_TABLE_FREED_AT_ONCE = "OldTableFreedAtOnce";
}
