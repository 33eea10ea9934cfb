//! Broken variants of the cached index, which differ from the correct one by one rule.

farside_remote::mutants! {
    /// A GET accepts an item with its key, whatever the item's incarnation. It returns a value that was deleted.
    INCARNATION_IGNORED = "CachedIndexIncarnationIgnored";
    /// A delete does not raise the item's incarnation. A client with a cached entry reads the deleted value.
    INCARNATION_KEPT = "CachedIndexIncarnationKept";
    /// A GET whose key is in no cached entry does not READ the index. It misses a key that was put since.
    ABSENT_FROM_CACHE = "CachedIndexAbsentFromCache";
    /// A GET that has found a cached entry stale does not READ the index again. It misses a key that was put again.
    STALE_IS_ABSENT = "CachedIndexStaleIsAbsent";
    /// A GET does not compare the versions of lines. It returns bytes of several versions.
    LINES_UNCHECKED = "CachedIndexLinesUnchecked";
    /// A GET accepts a READ that took longer than the versions of lines need to wrap.
    WRAP_ACCEPTED = "CachedIndexWrapAccepted";
    /// A node that takes over does not complete the change that an earlier node has begun.
    UNREPAIRED = "CachedIndexUnrepaired";
}
