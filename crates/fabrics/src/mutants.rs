//! Broken variants of datagram sessions and of wide words.

farside_remote::mutants! {
    /// A wide word is compared and swapped without the lock that makes it one.
    WIDE_WITHOUT_LOCKS = "WideWithoutLocks";
    /// A request that comes a second time runs a second time.
    DUPLICATE_RUNS_AGAIN = "DuplicateRunsAgain";
    /// A client's earlier session goes on when it has a new one.
    OLD_SESSION_LIVES = "OldSessionLives";
}
