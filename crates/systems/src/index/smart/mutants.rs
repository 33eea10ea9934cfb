//! Broken variants of the tree, which differ from the correct one by one line. Several were published.

farside_remote::mutants! {
    /// An update writes back the copy of the leaf that it has read before it took the lock.
    PRE_LOCK_COPY = "SmartPreLockCopy";
    /// An update also writes `rev_ptr`, as it was before a concurrent leaf split.
    REV_PTR_ROLLED_BACK = "SmartRevPtrRolledBack";
    /// A delete sets the slot to null, and not to empty.
    SLOT_SET_TO_NULL = "SmartSlotSetToNull";
    /// A miss that began with a cached slot is believed.
    MISS_FROM_CACHE_BELIEVED = "SmartMissFromCacheBelieved";
    /// An update writes a value that lies apart after the leaf that points to it.
    LEAF_BEFORE_VALUE = "SmartLeafBeforeValue";
    /// The success of a masked CAS is judged by the whole word.
    MASKED_CAS_FULL_WORD = "SmartMaskedCasFullWord";
    /// An insert behind the slots in use is complete before the type switch.
    TYPE_SWITCH_LEFT_OUT = "SmartTypeSwitchLeftOut";
    /// A writer that finds a key behind the slots in use does not complete the type switch.
    TYPE_SWITCH_NOT_HELPED = "SmartTypeSwitchNotHelped";
    /// A reader that joins after the batch's request was posted gets its result (G1).
    READER_JOINS_LATE = "SmartReaderJoinsLate";
    /// A writer that joins after the batch's request was posted is done with it (G2).
    WRITER_JOINS_LATE = "SmartWriterJoinsLate";
    /// A reader believes a leaf that it has found by a cached slot, although it is being replaced.
    REPLACED_LEAF_BELIEVED = "SmartReplacedLeafBelieved";
    /// If the future of a batch's first reader is dropped, those that have joined wait for ever.
    JOINERS_STRANDED = "SmartJoinersStranded";
}
