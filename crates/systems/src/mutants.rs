//! Mutants of stores with several members.

farside_remote::mutants! {
    /// A client uses a store whose members are not all committed.
    HALF_CREATED_USED = "HalfCreatedUsed";
    /// A member that has lost its memory counts as a missing store.
    WIPED_MEMBER_ABSENT = "WipedMemberAbsent";
    /// A client mixes members of two attempts.
    MEMBERS_MIXED = "MembersMixed";
}
