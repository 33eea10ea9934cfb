//! Broken variants of chains, of the words of a CAS, and of free lists.

crate::mutants! {
    /// A helper exchanges a buffer's state without seeing that the step it helps is still unfinished.
    HELPER_DOES_NOT_RECHECK_HEAD = "HelperDoesNotRecheckHead";
    /// Heads do not count their changes, as in a plain stack.
    POP_WITHOUT_SEQ = "PopWithoutSeq";
    /// A granted segment leaves the list before it is anybody's current one.
    SEGMENT_LEAVES_LIST_FIRST = "SegmentLeavesListFirst";
    /// The buffers that a chain reserved and did not use stay with it.
    UNUSED_RESERVATION_IS_KEPT = "UnusedReservationIsKept";
    /// A skipped op lets the next conditional one run.
    SKIPPED_COUNTS_AS_SUCCESS = "SkippedCountsAsSuccess";
    /// The byte with the highest address is the most significant.
    LITTLE_ENDIAN_COMPARE = "LittleEndianCompare";
    /// A chain finds what an earlier one left in scratch.
    SCRATCH_IS_NOT_ZEROED = "ScratchIsNotZeroed";
    /// Chains under way at one node use the same scratch.
    SHARED_SCRATCH = "SharedScratch";
    /// An indirect access goes on beyond the buffer that it points into.
    NO_CLAMP = "NoClamp";
    /// The key is asked for the pointer's place only.
    POINTEE_IS_NOT_CHECKED = "PointeeIsNotChecked";
    /// A key that opens its region for something opens it for everything.
    ONE_RIGHT_IS_ALL = "OneRightIsAll";
    /// Whatever is given back goes onto the list of retired buffers.
    RETIRE_WHAT_IS_NOT_LIVE = "RetireWhatIsNotLive";
    /// A session gives back a buffer of a store that is being dropped.
    RETIRED_WHILE_DROPPED = "RetiredWhileDropped";
    /// A reclaiming CAS that has lost keeps what was allocated for it.
    LOSER_KEEPS_BUFFER = "LoserKeepsBuffer";
    /// A reclaiming CAS that was skipped, refused or aborted keeps what was allocated for it.
    SKIPPED_KEEPS_BUFFER = "SkippedKeepsBuffer";
    /// A reclaiming CAS that has swapped retires what it installed as well.
    WINNER_LOSES_BUFFER = "WinnerLosesBuffer";
    /// A reclaiming CAS retires a buffer to which its word still points.
    UNCHANGED_IS_RECLAIMED = "UnchangedIsReclaimed";
    /// What a chain makes unreachable is free at once, whoever follows an old pointer to it.
    RECLAIMED_WITHOUT_GRACE = "ReclaimedWithoutGrace";
}
