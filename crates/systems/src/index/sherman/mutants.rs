//! Broken variants of the tree, which differ from the correct one by one line. The first four were published.

farside_remote::mutants! {
    /// The versions at the two ends of a node or of an entry decide whether it is whole.
    PUBLISHED_VERSIONS = "ShermanPublishedVersions";
    /// A torn entry counts as absent.
    TORN_ENTRY_ABSENT = "ShermanTornEntryAbsent";
    /// A client that has lost the race for the new root fails, since its walk has met no node above the split one.
    ROOT_GROWTH_LOST = "ShermanRootGrowthLost";
    /// A READ is believed however long it took, although versions may have wrapped.
    WRAPS_BELIEVED = "ShermanWrapsBelieved";
    /// A lock is handed over before the WRITE under it is complete.
    HANDED_OVER_EARLY = "ShermanHandedOverEarly";
    /// A cached node whose child did not have the key is used again.
    INVALID_ENTRY_USED = "ShermanInvalidEntryUsed";
}
