//! Broken variants of the client of a store whose keys are divided among its members.

farside_remote::mutants! {
    /// A key of a member that has lost its memory counts as absent.
    WIPED_ABSENT = "ShardWipedAbsent";
    /// The member of a key depends on the order in which the client lists the pool's nodes.
    BY_ORDER = "ShardByOrder";
    /// An operation whose outcome is unknown is repeated over the next session.
    RETRIES_UNKNOWN = "ShardRetriesUnknown";
    /// A client uses the key that a node granted it in a former session.
    KEEPS_KEY = "ShardKeepsKey";
    /// A put of several keys reports the error of one member, although other members have stored values.
    PARTS_FORGOTTEN = "ShardPartsForgotten";
}
