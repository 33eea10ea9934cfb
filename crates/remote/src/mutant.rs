//! Deliberately broken variants: published flaws and pitfalls of the specification, one a time, so that the tests can
//! show that they would notice.
//!
//! Invariant: without `--cfg farside_mutants` none can be switched on, and asking costs nothing.

/// One thing done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// A helper exchanges a buffer's state without seeing that the step it helps is still unfinished.
    HelperDoesNotRecheckHead,
    /// Heads do not count their changes, as in a plain stack.
    PopWithoutSeq,
    /// A granted segment leaves the list before it is anybody's current one.
    SegmentLeavesListFirst,
    /// The buffers that a chain reserved and did not use stay with it.
    UnusedReservationIsKept,
    /// A skipped op lets the next conditional one run.
    SkippedCountsAsSuccess,
    /// The byte with the highest address is the most significant.
    LittleEndianCompare,
    /// A chain finds what an earlier one left in scratch.
    ScratchIsNotZeroed,
    /// Chains under way at one node use the same scratch.
    SharedScratch,
    /// An indirect access goes on beyond the buffer that it points into.
    NoClamp,
    /// The key is asked for the pointer's place only.
    PointeeIsNotChecked,
    /// A key that opens its region for something opens it for everything.
    OneRightIsAll,
    /// A wide word is compared and swapped without the lock that makes it one.
    WideWithoutLocks,
    /// Whatever a late or doubled report names goes onto the list of retired buffers.
    RetireWhatIsNotLive,
    /// The node gives a retired buffer back without waiting for anybody.
    RepostAtOnce,
    /// A scan frees whatever the structure does not reach, whoever holds it, and waits for nobody.
    ScanByReachabilityAlone,
    /// A scan does not wait for those who may have replaced what it looks for.
    SweepWithoutGrace,
    /// Buffers go back to their lists between being seen reachable and being noted as such.
    ReuseWhileAdopting,
    /// A store is dropped while its buffers are on lists among those of other stores.
    DropWithoutTakingLists,
    /// A request that comes a second time runs a second time.
    DuplicateRunsAgain,
    /// A client's earlier session goes on when it has a new one.
    OldSessionLives,
    /// An install leaves the slot's generation as it was.
    KvNoGeneration,
    /// A put to a remembered slot that has changed counts as done.
    KvCachedPutYields,
    /// A put that has lost counts as done whoever won.
    KvYieldsToAnyone,
    /// A deleted key's slot is given to another.
    KvSlotReuse,
    /// An item that tells its slot's key and version is read, and after it the slot that a put compares with.
    KvTwoSnapshots,
    /// The buffer of a put that has lost is kept.
    KvLoserKeepsBuffer,
    /// A reader of Pilaf believes entries whose CRC is another's: it READs where nothing is, or beyond a buffer's end,
    /// and fails although nobody did wrong.
    PilafEntryUnchecked,
    /// A reader of Pilaf believes items whose CRC is another's: it answers bytes that no put has written.
    PilafItemUnchecked,
    /// A reader of Pilaf looks at an entry's CRC after it has READ as many bytes as the entry says: it fails where
    /// there are not so many.
    PilafSizeTrusted,
    /// A new key is put into the next table while its place in the former one is still open.
    WriteBeforeMoved,
    /// An install compares with a frozen word.
    FrozenIsCompared,
    /// The former table's empty slots are not closed.
    EmptySlotsStay,
    /// The former table's end slot is not closed.
    EndSlotStays,
    /// A slot is moved while clients may write it.
    MovedUnfrozen,
    /// A key that a node had moved when it died is moved once more.
    MovedTwice,
    /// A key whose tombstone went begins again with the first generation.
    DroppedTombstoneRestartsGenerations,
    /// A former table's memory is given back while chains may be under way in it.
    OldTableFreedAtOnce,
}

impl Mutant {
    /// Whether this thread is to do it wrong.
    #[inline(always)]
    #[must_use]
    pub fn is_on(self) -> bool {
        #[cfg(farside_mutants)]
        return switch::ON.get() == Some(self);
        #[cfg(not(farside_mutants))]
        false
    }
}

#[cfg(farside_mutants)]
mod switch {
    use super::Mutant;
    use std::cell::Cell;

    thread_local! {
        pub(super) static ON: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    impl Mutant {
        /// Those of this crate that its own checks find.
        pub const ALL: [Mutant; 10] = [
            Mutant::HelperDoesNotRecheckHead,
            Mutant::PopWithoutSeq,
            Mutant::SegmentLeavesListFirst,
            Mutant::UnusedReservationIsKept,
            Mutant::SkippedCountsAsSuccess,
            Mutant::LittleEndianCompare,
            Mutant::ScratchIsNotZeroed,
            Mutant::NoClamp,
            Mutant::PointeeIsNotChecked,
            Mutant::OneRightIsAll,
        ];

        /// Those of buffers' lives, which take a node to be found.
        pub const OF_LIFE: [Mutant; 6] = [
            Mutant::RetireWhatIsNotLive,
            Mutant::RepostAtOnce,
            Mutant::ScanByReachabilityAlone,
            Mutant::SweepWithoutGrace,
            Mutant::ReuseWhileAdopting,
            Mutant::DropWithoutTakingLists,
        ];

        /// Those of how chains run that clients can notice.
        pub const OF_CHAINS: [Mutant; 7] = [
            Mutant::UnusedReservationIsKept,
            Mutant::SkippedCountsAsSuccess,
            Mutant::LittleEndianCompare,
            Mutant::ScratchIsNotZeroed,
            Mutant::SharedScratch,
            Mutant::NoClamp,
            Mutant::PointeeIsNotChecked,
        ];

        /// Those of sessions.
        pub const OF_SESSIONS: [Mutant; 2] = [Mutant::DuplicateRunsAgain, Mutant::OldSessionLives];

        /// Those of PRISM-KV.
        pub const OF_PRISM_KV: [Mutant; 6] = [
            Mutant::KvNoGeneration,
            Mutant::KvCachedPutYields,
            Mutant::KvYieldsToAnyone,
            Mutant::KvSlotReuse,
            Mutant::KvTwoSnapshots,
            Mutant::KvLoserKeepsBuffer,
        ];

        /// Those of Pilaf's readers, which take a put under way to be found.
        pub const OF_PILAF: [Mutant; 3] =
            [Mutant::PilafEntryUnchecked, Mutant::PilafItemUnchecked, Mutant::PilafSizeTrusted];

        /// Those of tables that are rebuilt.
        pub const OF_REBUILDS: [Mutant; 8] = [
            Mutant::WriteBeforeMoved,
            Mutant::FrozenIsCompared,
            Mutant::EmptySlotsStay,
            Mutant::EndSlotStays,
            Mutant::MovedUnfrozen,
            Mutant::MovedTwice,
            Mutant::DroppedTombstoneRestartsGenerations,
            Mutant::OldTableFreedAtOnce,
        ];

        /// Switches one on for this thread, or none.
        pub fn switch(to: Option<Mutant>) {
            ON.set(to);
        }
    }
}
