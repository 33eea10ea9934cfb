//! Broken variants of ABDLOCK.

farside_remote::mutants! {
    /// A client frees a lock without comparing it with its own word, so that it may free another client's lock.
    UNLOCKS_UNHELD = "AbdUnlocksUnheld";
    /// A phase ends when f replicas have carried it out.
    MINORITY_QUORUM = "AbdMinorityQuorum";
    /// The chain of a write frees the lock before it writes the block.
    UNLOCK_BEFORE_WRITE = "AbdUnlockBeforeWrite";
    /// A write reads the tags before the locks are held.
    READS_UNLOCKED = "AbdReadsUnlocked";
    /// A block is written also at a replica whose tag was not read, since its lock was granted late.
    LATE_GRANT_WRITTEN = "AbdLateGrantWritten";
    /// A lock whose request has an unknown outcome is settled while the request may still run.
    SETTLED_TOO_EARLY = "AbdSettledTooEarly";
    /// An operation whose caller has gone ends without freeing its locks.
    DROPPED_KEEPS_LOCKS = "AbdDroppedKeepsLocks";
    /// A lock is freed whose owner's lease has expired, without a fence.
    TAKEN_UNFENCED = "AbdTakenUnfenced";
    /// A client that was fenced at one replica counts as fenced at the others.
    FENCED_AT_ONE_REPLICA = "AbdFencedAtOneReplica";
    /// A client takes locks over sessions that are not bound to its nonce, so a fence misses them.
    LOCKS_UNBOUND = "AbdLocksUnbound";
    /// A client writes its nonce only at the replicas that its claim has reached, so others fence another nonce, or
    /// find none.
    ENTRY_OF_THE_CLAIM = "AbdEntryOfTheClaim";
    /// A write goes to the newest copy of a block, so a dead client leaves no whole one.
    WRITES_NEWEST_COPY = "AbdWritesNewestCopy";
    /// The tag of a copy is written before its bytes are complete.
    TAG_WITH_BYTES = "AbdTagWithBytes";
}
