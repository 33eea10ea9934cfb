//! Broken variants of datagram sessions and of wide words.

farside_remote::mutants! {
    /// Compares and swaps a wide word without taking the lock that makes it atomic.
    WIDE_WITHOUT_LOCKS = "WideWithoutLocks";
    /// Runs a duplicated request a second time.
    DUPLICATE_RUNS_AGAIN = "DuplicateRunsAgain";
    /// Keeps a client's earlier session alive after the client opens a new one.
    OLD_SESSION_LIVES = "OldSessionLives";
}
