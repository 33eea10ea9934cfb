//! Broken variants of PRISM-TX, which differ from the correct one by one rule. Some were published. The model explores
//! the same variants; `docs/papers/prism-tx.md` lists them.

farside_remote::mutants! {
    /// The published abort: C is raised at once, for the keys whose checks have passed.
    ABORT_AS_PUBLISHED = "TxAbortAsPublished";
    /// An abort raises C at once.
    RAISED_AT_ONCE = "TxRaisedAtOnce";
    /// An abort raises C only for keys whose checks have passed.
    RAISED_IF_PASSED = "TxRaisedIfPassed";
    /// An abort drops the requests of its prepare that were not answered yet.
    PREPARE_DROPPED = "TxPrepareDropped";
    /// A prepare without a response counts as one that never ran.
    UNKNOWN_FORGOTTEN = "TxUnknownForgotten";
    /// With commit-wait, a transaction that only reads a single key does not prepare it.
    READ_UNPREPARED = "TxReadUnprepared";
    /// The version of a read is the timestamp in the item.
    VERSION_OF_ITEM = "TxVersionOfItem";
    /// Execution reads the value, and then the slot.
    VALUE_BEFORE_SLOT = "TxValueBeforeSlot";
    /// The check of a write wants TS > PR.
    STRICT_READERS = "TxStrictReaders";
    /// PR is checked before PW is raised.
    READERS_BEFORE_RAISE = "TxReadersBeforeRaise";
    /// C is installed before the address.
    VERSION_APART = "TxVersionApart";
    /// A commit is reported although a shard has not answered its installs.
    SUCCESS_BEFORE_INSTALLS = "TxSuccessBeforeInstalls";
    /// DECIDED is written after the installs.
    DECIDED_LATE = "TxDecidedLate";
    /// The next intent is written before the entry is freed.
    BODY_BEFORE_CLEAR = "TxBodyBeforeClear";
    /// An entry is freed by a WRITE that the client does not wait for.
    UNAWAITED_CLEAR = "TxUnawaitedClear";
    /// An id is freed once its holder is fenced.
    ID_FREED_EARLY = "TxIdFreedEarly";
    /// A recoverer commits a transaction if a slot has its item.
    VERDICT_FROM_SLOTS = "TxVerdictFromSlots";
    /// A recoverer reads the log before the fence.
    LOG_BEFORE_FENCE = "TxLogBeforeFence";
    /// A recoverer does not confirm that its client has its id still.
    LEASE_UNCONFIRMED = "TxLeaseUnconfirmed";
    /// A recoverer raises C without waiting for smaller intents.
    RAISED_WITHOUT_WAIT = "TxRaisedWithoutWait";
    /// A recoverer raises C though PW < TS.
    RAISED_UNPREPARED = "TxRaisedUnprepared";
    /// A recoverer frees an entry that is DECIDED, as soon as its shard is complete.
    DECIDED_ERASED = "TxDecidedErased";
    /// A recoverer settles the larger timestamps first.
    LARGER_FIRST = "TxLargerFirst";
}
