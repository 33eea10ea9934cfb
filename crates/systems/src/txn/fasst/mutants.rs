//! Broken variants of FaSST, which differ from the correct one by one rule.

farside_remote::mutants! {
    /// Validation compares versions, and accepts buckets that are locked.
    LOCK_IGNORED = "FasstLockIgnored";
    /// A primary without room for a new key keeps the lock.
    LOCK_LEFT = "FasstLockLeft";
    /// A lock that is freed by an abort gives its bucket a new version.
    ABORT_RAISES_VERSION = "FasstAbortRaisesVersion";
    /// The log gets the record after the primaries have installed the values.
    LOGGED_LATE = "FasstLoggedLate";
    /// Primaries install the values before all backups have them.
    BACKUP_NOT_AWAITED = "FasstBackupNotAwaited";
    /// A put is carried out although its transaction has no lock any more, or its copy is newer.
    PUT_REPLAYED = "FasstPutReplayed";
    /// Keys that were found absent are not validated.
    PHANTOM_ACCEPTED = "FasstPhantomAccepted";
    /// Deletes are not in the record.
    DELETE_UNLOGGED = "FasstDeleteUnlogged";
    /// The record has other bytes in place of the values.
    LOG_GARBAGE = "FasstLogGarbage";
    /// A member locks for a transaction that was aborted there.
    LATE_LOCK_GRANTED = "FasstLateLockGranted";
    /// Members carry out packets of an old epoch.
    OLD_EPOCH_ACCEPTED = "FasstOldEpochAccepted";
    /// A recoverer frees the locks of a committed transaction before it installs the values.
    RELEASED_BEFORE_ROLL_FORWARD = "FasstReleasedBeforeRollForward";
    /// A recoverer aborts a transaction although a log has its record.
    RECORD_IGNORED = "FasstRecordIgnored";
    /// A newcomer's extra buckets do not become parts of chains.
    EXTRA_UNCHAINED = "FasstExtraUnchained";
    /// A newcomer gives away extra buckets that have keys.
    EXTRA_TAKEN_TWICE = "FasstExtraTakenTwice";
    /// A promoter fills the newcomer before it has settled the transactions.
    FILLED_EARLY = "FasstFilledEarly";
    /// Members keep the epochs of clients in a promotion.
    EPOCHS_KEPT = "FasstEpochsKept";
    /// A recoverer takes an epoch of a client that has lost its id.
    LEASE_UNCONFIRMED = "FasstLeaseUnconfirmed";
    /// A client that is slow to join gets an epoch after its recoverer.
    FENCED_JOINS = "FasstFencedJoins";
    /// A read that locks ignores what the transaction has read of the bucket before.
    LOCK_UNCHECKED = "FasstLockUnchecked";
    /// A read that locks compares its bucket with only one of several versions that the transaction has read.
    VERSIONS_MIXED = "FasstVersionsMixed";
    /// A transaction that its program abandons keeps its locks.
    ABANDONED_LOCK_LEFT = "FasstAbandonedLockLeft";
    /// A recoverer leaves the locks of a committed transaction on buckets that it has not written.
    VAIN_LOCK_LEFT = "FasstVainLockLeft";
    /// A read that locks adds extra buckets to a chain.
    READ_CHAINS = "FasstReadChains";
    /// The record of a lane is given to a recoverer of an old epoch.
    OLD_EPOCH_GETS_RECORD = "FasstOldEpochGetsRecord";
    /// The state of a lane is given to a recoverer, or to a client that joins, of an old epoch.
    OLD_EPOCH_LOOKS = "FasstOldEpochLooks";
    /// Members carry out packets of a promoter after a later one has begun to settle.
    PROMOTERS_UNFENCED = "FasstPromotersUnfenced";
}

/// Mutants that trials expose too seldom, or that only make transactions abort without need.
pub(super) const RARE: &[farside_remote::mutant::Mutant] = &[
    LOCK_LEFT,
    ABORT_RAISES_VERSION,
    BACKUP_NOT_AWAITED,
    DELETE_UNLOGGED,
    LATE_LOCK_GRANTED,
    OLD_EPOCH_ACCEPTED,
    EXTRA_UNCHAINED,
    EXTRA_TAKEN_TWICE,
    FILLED_EARLY,
    EPOCHS_KEPT,
    LEASE_UNCONFIRMED,
    FENCED_JOINS,
    VAIN_LOCK_LEFT,
    READ_CHAINS,
    VERSIONS_MIXED,
    OLD_EPOCH_GETS_RECORD,
    OLD_EPOCH_LOOKS,
    PROMOTERS_UNFENCED,
];
