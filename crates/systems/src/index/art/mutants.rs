//! Broken variants of the tree, which differ from the correct one by one line.

farside_remote::mutants! {
    /// An update returns while the old leaf is still valid for clients that have its slot in their caches.
    OLD_LEAF_VALID = "ArtOldLeafValid";
    /// A node is copied as it was read, before its slots are frozen.
    COPIED_UNFROZEN = "ArtCopiedUnfrozen";
    /// A client that has a node in its cache does not notice that a copy has replaced it.
    REPLACED_NODE_BELIEVED = "ArtReplacedNodeBelieved";
    /// A frozen node is thawed although a copy has replaced it.
    THAWED_UNLINKED = "ArtThawedUnlinked";
    /// A client frees the lock of a node while its request to replace the node may still run.
    FREED_TOO_EARLY = "ArtFreedTooEarly";
    /// A miss that began with a cached slot is believed.
    MISS_FROM_CACHE_BELIEVED = "ArtMissFromCacheBelieved";
}
