//! Broken variants of Chequer.

farside_remote::mutants! {
    /// A GET does not check the CRC of the record (checksum 2). It READs at a wrong address or with a wrong length.
    RECORD_UNCHECKED = "ChequerRecordUnchecked";
    /// A GET does not check the CRC of the value (checksum 1). It returns bytes that no put has written.
    VALUE_UNCHECKED = "ChequerValueUnchecked";
    /// A GET whose value has a wrong CRC reads the value again, and not the record. If the value has moved, it reads
    /// for ever.
    ONLY_VALUE_REREAD = "ChequerOnlyValueReread";
    /// Stamps are milliseconds of a clock. Two puts in one millisecond have the same, and a client's cache returns the
    /// first value for the second.
    STAMP_BY_CLOCK = "ChequerStampByClock";
    /// The stamps of a key begin anew when it is put after a delete.
    STAMP_RESTARTS_AFTER_DELETE = "ChequerStampRestartsAfterDelete";
    /// The stamps begin anew when a node takes over.
    STAMPS_RESTART_WITH_SERVER = "ChequerStampsRestartWithServer";
    /// A node that takes over looks for the last stamp in the records alone. The last one of a log that was replayed
    /// may be in none.
    LAST_COUNTER_FORGOTTEN = "ChequerLastCounterForgotten";
    /// A delete empties its bucket. A search ends there, before keys that lie behind.
    DELETED_BUCKET_CLEARED = "ChequerDeletedBucketCleared";
    /// A reservation installs its record at once, before the client has written the value.
    INSTALLED_BEFORE_COMMIT = "ChequerInstalledBeforeCommit";
    /// A client whose COMMIT was not answered puts the value again.
    COMMIT_REPEATED = "ChequerCommitRepeated";
    /// A reservation is freed after a time, although its session is still open. Its client then writes into a block
    /// that has another value.
    RESERVATION_FREED_BY_TIMEOUT = "ChequerReservationFreedByTimeout";
    /// A put is installed before its record of the log is durable.
    INSTALLED_BEFORE_DURABLE = "ChequerInstalledBeforeDurable";
    /// A put or delete replaces one with a greater stamp that was installed before it.
    OLDER_INSTALLED = "ChequerOlderInstalled";
    /// The replay of a log keeps the oldest value of each key.
    REPLAYED_OUT_OF_ORDER = "ChequerReplayedOutOfOrder";
    /// The replay of a log puts values wherever the pool has space. Those of a full store then fit no more.
    REPLAYED_ELSEWHERE = "ChequerReplayedElsewhere";
    /// The replay of a log puts a record into the first free bucket of its key. Those of a full table then find none.
    REPLAYED_IN_ANOTHER_BUCKET = "ChequerReplayedInAnotherBucket";
    /// A node that believes its memory leaves records in the log whose puts were never answered. A later value gets the
    /// place of such a put.
    UNANSWERED_LEFT_IN_LOG = "ChequerUnansweredLeftInLog";
    /// A checkpoint has the values of the first partition alone.
    CHECKPOINT_OF_ONE_PARTITION = "ChequerCheckpointOfOnePartition";
    /// A checkpoint does not have the last stamp. If the newest put or delete is a delete, a replay draws its stamp
    /// again.
    CHECKPOINT_WITHOUT_STAMP = "ChequerCheckpointWithoutStamp";
    /// A put keeps the block of the value that it replaces.
    OVERWRITTEN_BLOCK_KEPT = "ChequerOverwrittenBlockKept";
    /// A reservation does not end with its session.
    RESERVATION_OUTLIVES_SESSION = "ChequerReservationOutlivesSession";
    /// A client whose put was dropped before the answer to its RESERVE never gives the block back.
    UNANSWERED_RESERVE_FORGOTTEN = "ChequerUnansweredReserveForgotten";
    /// A session may reserve as many blocks as it likes.
    RESERVATIONS_UNBOUNDED = "ChequerReservationsUnbounded";
    /// The quarantine of a block begins when the call begins that frees it, and not when the call ends.
    QUARANTINE_FROM_BEGIN = "ChequerQuarantineFromBegin";
    /// A step of a checkpoint has all values of a block of buckets, whatever their size is.
    CHECKPOINT_STEP_UNBOUNDED = "ChequerCheckpointStepUnbounded";
    /// A contains answers from the client's cache of values.
    CONTAINS_BY_CACHE = "ChequerContainsByCache";
    /// The buddy allocator merges a free block with a buddy that is in use.
    BUDDY_MERGES_IN_USE = "ChequerBuddyMergesInUse";
}
