//! Broken variants of what all indexes share, which differ from the correct one by one line.

farside_remote::mutants! {
    /// A client that recovers another one has no guard, so others do not wait for it.
    RECOVERY_UNGUARDED = "IndexRecoveryUnguarded";
}
