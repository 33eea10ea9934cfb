//! Mutants of logs.

farside_remote::mutants! {
    /// A record that must be durable counts as stored before the sync.
    LOG_COUNTS_UNSYNCED = "LogCountsUnsynced";
    /// A record is replayed whatever its checksum says.
    LOG_TAKES_TORN_RECORDS = "LogTakesTornRecords";
    /// What a failed write left in the file stays there.
    LOG_KEEPS_FAILED_WRITES = "LogKeepsFailedWrites";
    /// A failed write is reported before what it left in the file is durably cut off.
    LOG_FAILS_BEFORE_CUT = "LogFailsBeforeCut";
    /// A damaged record ends the log, although it was durable.
    LOG_CUTS_DAMAGED_RECORDS = "LogCutsDamagedRecords";
    /// A checkpoint takes effect before it was synced.
    LOG_CHECKPOINT_UNSYNCED = "LogCheckpointUnsynced";
    /// Records that count are dropped when the disk is full.
    LOG_DROPS_WHEN_FULL = "LogDropsWhenFull";
    /// A log that is to be synced at intervals never is.
    LOG_NEVER_SYNCS = "LogNeverSyncs";
    /// After a crash of the machine, a memory that was kept is believed, although it may lack pages.
    LOG_BELIEVES_CRASHED_MEMORY = "LogBelievesCrashedMemory";
    /// Records are stored that were appended while an earlier write failed.
    LOG_STORES_AFTER_FAILURE = "LogStoresAfterFailure";
    /// A checkpoint takes effect with the effects of records that failed.
    LOG_CHECKPOINT_HAS_FAILED = "LogCheckpointHasFailed";
}
