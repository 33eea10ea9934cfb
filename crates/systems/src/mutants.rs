//! Mutants of stores with several members.

farside_remote::mutants! {
    /// A client uses a store whose members are not all committed.
    HALF_CREATED_USED = "HalfCreatedUsed";
    /// A member that has lost its memory counts as a missing store.
    WIPED_MEMBER_ABSENT = "WipedMemberAbsent";
    /// An attempt counts as aborted if the first member lacked it before another member was seen to hold it.
    ABSENCE_SEEN_TOO_EARLY = "AbsenceSeenTooEarly";
    /// A client that opens a store accepts members of another attempt than the one that it saw.
    MEMBERS_MIXED = "MembersMixed";
    /// A client takes a member for lost although nodes that may know of its replacement are silent.
    LOST_WHILE_OTHERS_SILENT = "LostWhileOthersSilent";
}
