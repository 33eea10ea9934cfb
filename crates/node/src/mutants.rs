//! Mutants of reclamation, epochs, scans, rebuilds, decisions, fencing and revocation.

farside_remote::mutants! {
    /// The node frees a retired buffer without a grace period.
    REPOST_AT_ONCE = "RepostAtOnce";
    /// A scan frees all buffers that the structure does not reach, even held ones, and without a grace period.
    SCAN_BY_REACHABILITY_ALONE = "ScanByReachabilityAlone";
    /// A scan sweeps without waiting for chains that may have replaced a suspect buffer but not yet retired it.
    SWEEP_WITHOUT_GRACE = "SweepWithoutGrace";
    /// A buffer may be freed after a scan has seen it reachable and before the scan has recorded it as reachable.
    REUSE_WHILE_ADOPTING = "ReuseWhileAdopting";
    /// A store is dropped while its buffers are still on sessions' retired lists, among those of other stores.
    DROP_WITHOUT_TAKING_LISTS = "DropWithoutTakingLists";
    /// A former table's memory is freed while chains may still run in it.
    OLD_TABLE_FREED_AT_ONCE = "OldTableFreedAtOnce";
    /// A node that has committed a store with several members also aborts it.
    BOTH_DECISIONS = "BothDecisions";
    /// A fence ends a client's sessions at one engine only.
    FENCE_MISSES_AN_ENGINE = "FenceMissesAnEngine";
    /// A fence does not wait until the turns of the client's sessions have ended.
    FENCE_WITHOUT_GRACE = "FenceWithoutGrace";
    /// A revocation does not wait until the chains that the key admitted have ended.
    REVOKED_WITHOUT_GRACE = "RevokedWithoutGrace";
    /// A fenced nonce may be bound to a reopened session.
    FENCED_NONCE_BINDS = "FencedNonceBinds";
    /// A buffer is reused although a client may follow a pointer to it that an earlier chain has read.
    EPOCH_IGNORED = "EpochIgnored";
    /// A buffer is reused once each client has raised its epoch by one.
    EPOCH_ONE_IS_ENOUGH = "EpochOneIsEnough";
    /// Sessions reuse the buffers of a store that they retire while the node scans the store.
    REUSE_DURING_SCAN = "ReuseDuringScan";
}
