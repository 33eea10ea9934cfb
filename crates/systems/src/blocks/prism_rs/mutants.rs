//! Broken variants of PRISM-RS.

farside_remote::mutants! {
    /// A read returns a block that only a minority is known to hold, without writing it back.
    NO_WRITE_BACK = "RsNoWriteBack";
    /// A phase ends when f replicas have carried it out.
    MINORITY_QUORUM = "RsMinorityQuorum";
    /// A client takes a writer id that another client has claimed, so that two writes can have one tag.
    TAG_REUSED = "RsTagReused";
    /// The tag of a write exceeds the tags that were read, but not that of a dropped write of the same client.
    COUNTER_NOT_ABOVE_DROPPED = "RsCounterNotAboveDropped";
    /// A tag has no writer id.
    NO_WRITER_IN_TAG = "RsNoWriterInTag";
    /// A replica that has refused an install, or has not answered, counts as having it.
    ERROR_IS_ACK = "RsErrorIsAck";
    /// A replica that has a newer block, so that its CAS did not swap, does not count.
    REFUSAL_IS_NO_ACK = "RsRefusalIsNoAck";
    /// An install replaces a newer block.
    INSTALLS_OLDER = "RsInstallsOlder";
    /// A replica that lost its memory takes part again without what the others have: the next configuration is enabled
    /// at once.
    AMNESIAC_VOTES = "RsAmnesiacVotes";
    /// A replica that lost its memory counts as having an install.
    WIPED_ACK_COUNTS = "RsWipedAckCounts";
    /// A write adds up the replicas of two configurations that have it.
    CONFIGURATIONS_MIXED = "RsConfigurationsMixed";
    /// A client on its way to the next configuration gives up at the first answer that is lost.
    GIVES_UP_AT_ONCE = "RsGivesUpAtOnce";
    /// A recoverer reads the tags before it revokes the former configuration.
    READ_BEFORE_REVOCATION = "RsReadBeforeRevocation";
    /// All proposals of a recoverer have the same number, so two of them can have one ballot.
    BALLOT_REUSED = "RsBallotReused";
    /// A recoverer does not bring the highest writer id to the members of the next configuration.
    IDS_FORGOTTEN = "RsIdsForgotten";
    /// A recoverer goes on with its own next configuration although another one is decided.
    TWO_CONFIGURATIONS = "RsTwoConfigurations";
}
