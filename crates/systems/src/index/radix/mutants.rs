//! Broken variants of what all radix trees share. The trials of SMART expose them.

farside_remote::mutants! {
    /// The checksum of a leaf does not cover its key.
    CHECKSUM_WITHOUT_KEY = "SmartChecksumWithoutKey";
    /// The checksum of a leaf covers its lock.
    CHECKSUM_OVER_LOCK = "SmartChecksumOverLock";
    /// A scan returns the value of a leaf whose checksum is wrong.
    TORN_LEAF_EMITTED = "SmartTornLeafEmitted";
    /// A scan that finds nodes in the cache skips what they did not have when they were cached.
    UNCACHED_GAP_SKIPPED = "SmartUncachedGapSkipped";
    /// A unit that was unlinked is reused without a grace.
    REUSED_BEFORE_EPOCH = "SmartReusedBeforeEpoch";
}
