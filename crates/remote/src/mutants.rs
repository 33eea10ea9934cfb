//! Mutants of the code that runs chains, of the words that a CAS compares, and of the free lists.

crate::mutants! {
    /// A helper exchanges a buffer's state without checking again that the step which it helps is unfinished.
    HELPER_DOES_NOT_RECHECK_HEAD = "HelperDoesNotRecheckHead";
    /// The head of a list has no sequence number, as in a plain stack.
    POP_WITHOUT_SEQ = "PopWithoutSeq";
    /// A granted segment leaves its list before it becomes the current segment of a class.
    SEGMENT_LEAVES_LIST_FIRST = "SegmentLeavesListFirst";
    /// A chain keeps the buffers that it reserved and did not use.
    UNUSED_RESERVATION_IS_KEPT = "UnusedReservationIsKept";
    /// A skipped op counts as successful, so the next conditional op runs.
    SKIPPED_COUNTS_AS_SUCCESS = "SkippedCountsAsSuccess";
    /// Comparisons treat the byte with the highest address as the most significant.
    LITTLE_ENDIAN_COMPARE = "LittleEndianCompare";
    /// A new chain's scratch contains data that an earlier chain left there.
    SCRATCH_IS_NOT_ZEROED = "ScratchIsNotZeroed";
    /// Concurrent chains at one node share one scratch.
    SHARED_SCRATCH = "SharedScratch";
    /// An indirect access continues beyond the end of the buffer that its pointer points into.
    NO_CLAMP = "NoClamp";
    /// The key is checked for the pointer's own address only, not for the address that the pointer holds.
    POINTEE_IS_NOT_CHECKED = "PointeeIsNotChecked";
    /// A key with any right has all rights.
    ONE_RIGHT_IS_ALL = "OneRightIsAll";
    /// Retiring a buffer does not check that it is live.
    RETIRE_WHAT_IS_NOT_LIVE = "RetireWhatIsNotLive";
    /// A session can retire a buffer of a store that is being dropped.
    RETIRED_WHILE_DROPPED = "RetiredWhileDropped";
    /// A reclaiming CAS whose comparison failed keeps the buffers allocated for it.
    LOSER_KEEPS_BUFFER = "LoserKeepsBuffer";
    /// A reclaiming CAS that was skipped, refused or aborted keeps the buffers allocated for it.
    SKIPPED_KEEPS_BUFFER = "SkippedKeepsBuffer";
    /// A reclaiming CAS that swapped also retires the buffer that it installed.
    WINNER_LOSES_BUFFER = "WinnerLosesBuffer";
    /// A reclaiming CAS that swaps without changing the pointer retires the buffer that its word still points to.
    UNCHANGED_IS_RECLAIMED = "UnchangedIsReclaimed";
    /// A buffer that a chain makes unreachable is freed at once, even if another chain may still follow an old pointer
    /// to it.
    RECLAIMED_WITHOUT_GRACE = "ReclaimedWithoutGrace";
    /// A session reuses the buffers that it retired without waiting for other sessions' turns.
    REUSED_AT_ONCE = "ReusedAtOnce";
    /// A session reuses the buffers that it retired one epoch too early.
    REUSED_AN_EPOCH_EARLY = "ReusedAnEpochEarly";
    /// A session advances the epoch although another session is in a turn of an earlier epoch.
    EPOCH_IGNORES_TURNS = "EpochIgnoresTurns";
    /// A session keeps retired buffers that the node has taken from the list from which the session moved them.
    TAKEN_LIST_IS_KEPT = "TakenListIsKept";
}
