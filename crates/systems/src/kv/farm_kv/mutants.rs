//! Broken variants of FaRM-KV, which differ from the correct one by one rule.

farside_remote::mutants! {
    /// A GET that misses its key does not compare the joint versions of the two buckets. It misses a key that is moved
    /// from the one to the other.
    JOINT_IGNORED = "FarmKvJointIgnored";
    /// The service moves a key from a bucket to the next one without a new joint version.
    MOVED_SILENTLY = "FarmKvMovedSilently";
    /// A GET does not compare the versions of lines. It returns bytes of several versions.
    LINES_UNCHECKED = "FarmKvLinesUnchecked";
    /// A GET accepts a READ that took longer than the versions of lines need to wrap.
    WRAP_ACCEPTED = "FarmKvWrapAccepted";
    /// A GET follows a chain into a block that has left the chain. It misses the keys behind that block.
    INCARNATION_IGNORED = "FarmKvIncarnationIgnored";
    /// A node that takes over does not complete the change that an earlier node has begun.
    UNREPAIRED = "FarmKvUnrepaired";
}
