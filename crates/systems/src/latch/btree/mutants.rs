//! Broken trees, which differ from the correct one by one line.

farside_remote::mutants! {
    /// A split writes the left node before the right one, so a search that moves right finds a node without keys.
    LEFT_FIRST = "BtreeLeftFirst";
    /// A search for a key beyond a node's bound stays at the node.
    SEARCH_STAYS = "BtreeSearchStays";
    /// A put stores the leaf that it has found, with its pair, and does not read the leaf again under the latch.
    STALE_LEAF = "BtreeStaleLeaf";
    /// A put stores its pair into the leaf that it has found, although the leaf was split before the put took the
    /// latch.
    PUT_STAYS = "BtreePutStays";
}
