//! Broken variants of the batches.

farside_remote::mutants! {
    /// A task takes the response of an earlier batch for that of its current one.
    OLD_RESPONSE_ACCEPTED = "FasstOldResponseAccepted";
}
