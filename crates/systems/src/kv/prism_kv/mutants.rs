//! Broken variants of PRISM-KV and of its rebuilds.

farside_remote::mutants! {
    /// An install leaves the slot's generation as it was.
    NO_GENERATION = "KvNoGeneration";
    /// A put to a remembered slot that has changed counts as done.
    CACHED_PUT_YIELDS = "KvCachedPutYields";
    /// A put that has lost counts as done whoever won.
    YIELDS_TO_ANYONE = "KvYieldsToAnyone";
    /// A deleted key's slot is given to another.
    SLOT_REUSE = "KvSlotReuse";
    /// An item that tells its slot's key and version is read, and after it the slot that a put compares with.
    TWO_SNAPSHOTS = "KvTwoSnapshots";
    /// A new key is put into the next table while its place in the former one is still open.
    WRITE_BEFORE_MOVED = "WriteBeforeMoved";
    /// An install compares with a frozen word.
    FROZEN_IS_COMPARED = "FrozenIsCompared";
    /// The former table's empty slots are not closed.
    EMPTY_SLOTS_STAY = "EmptySlotsStay";
    /// The former table's end slot is not closed.
    END_SLOT_STAYS = "EndSlotStays";
    /// A slot is moved while clients may write it.
    MOVED_UNFROZEN = "MovedUnfrozen";
    /// A key that a node had moved when it died is moved once more.
    MOVED_TWICE = "MovedTwice";
    /// The item of a slot that was moved is retired, although the next table points to it.
    MOVER_RECLAIMS = "MoverReclaims";
    /// A key whose tombstone went begins again with the first generation.
    DROPPED_TOMBSTONE_RESTARTS_GENERATIONS = "DroppedTombstoneRestartsGenerations";
}
