//! Broken variants of PRISM-KV and of its rebuilds.

farside_remote::mutants! {
    /// An install does not raise the slot's generation.
    NO_GENERATION = "KvNoGeneration";
    /// A put to a cached slot counts as done even if the slot has changed.
    CACHED_PUT_YIELDS = "KvCachedPutYields";
    /// A put whose CAS failed counts as done, whichever install won.
    YIELDS_TO_ANYONE = "KvYieldsToAnyone";
    /// A deleted key's slot is given to another key.
    SLOT_REUSE = "KvSlotReuse";
    /// A probe reads the item first, and only then the slot's word that the put's CAS expects.
    TWO_SNAPSHOTS = "KvTwoSnapshots";
    /// A new key is put into the next table while its place in the former table is still open.
    WRITE_BEFORE_MOVED = "WriteBeforeMoved";
    /// The CAS of an install expects a frozen word.
    FROZEN_IS_COMPARED = "FrozenIsCompared";
    /// The rebuild does not close the former table's empty slots.
    EMPTY_SLOTS_STAY = "EmptySlotsStay";
    /// The rebuild does not close the former table's end slot.
    END_SLOT_STAYS = "EndSlotStays";
    /// The rebuild moves a slot while clients may still write it.
    MOVED_UNFROZEN = "MovedUnfrozen";
    /// A key that a failed node had already moved is moved once more.
    MOVED_TWICE = "MovedTwice";
    /// The rebuild retires the item of a moved slot, although the next table points to it.
    MOVER_RECLAIMS = "MoverReclaims";
    /// A key whose tombstone was dropped starts again at the first generation.
    DROPPED_TOMBSTONE_RESTARTS_GENERATIONS = "DroppedTombstoneRestartsGenerations";
}
