//! Broken variants of FaRM, which differ from the correct one by one rule.

farside_remote::mutants! {
    /// Validation compares versions, and accepts objects that are locked.
    LOCK_IGNORED = "FarmLockIgnored";
    /// The read objects are validated before all locks are granted.
    VALIDATED_EARLY = "FarmValidatedEarly";
    /// A primary that finds another version keeps the locks that it has taken for the transaction.
    LOCK_LEFT = "FarmLockLeft";
    /// Primaries install the values before all backups have the record.
    PRIMARY_BEFORE_BACKUPS = "FarmPrimaryBeforeBackups";
    /// A transaction that has only read commits without a validation.
    DOOMED_RETURNED = "FarmDoomedReturned";
    /// A read that took longer than the versions of lines need to wrap is accepted.
    WRAP_ACCEPTED = "FarmWrapAccepted";
    /// A read does not compare the versions of lines.
    LINES_UNCHECKED = "FarmLinesUnchecked";
    /// A primary does not mark the lines of an object while it writes them.
    LINES_UNMARKED = "FarmLinesUnmarked";
    /// A primary locks for a transaction that was aborted there.
    LATE_LOCK_GRANTED = "FarmLateLockGranted";
    /// A recoverer aborts a transaction although a backup has its record.
    RECORD_IGNORED = "FarmRecordIgnored";
    /// A recoverer aborts a transaction although a primary has installed its values.
    DONE_IGNORED = "FarmDoneIgnored";
    /// A recoverer does not copy a record to the backups that lack it.
    RECORD_UNCOPIED = "FarmRecordUncopied";
    /// A recoverer does not confirm that its client has its id still.
    LEASE_UNCONFIRMED = "FarmLeaseUnconfirmed";
    /// A recoverer looks once at what a client has left.
    LOOKED_ONCE = "FarmLookedOnce";
    /// A recoverer looks until two rounds find the same, although another one has released the id.
    LOOKED_ON = "FarmLookedOn";
    /// A client reuses the place of a record that the backup has not applied.
    RECORD_OVERWRITTEN = "FarmRecordOverwritten";
    /// A backup applies a record although its copy is newer.
    OLDER_APPLIED = "FarmOlderApplied";
}
