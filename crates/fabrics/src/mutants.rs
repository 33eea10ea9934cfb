//! Broken variants of datagram sessions, of wide words, and of turns.

farside_remote::mutants! {
    /// Compares and swaps a wide word without taking the lock that makes it atomic.
    WIDE_WITHOUT_LOCKS = "WideWithoutLocks";
    /// Runs a duplicated request a second time.
    DUPLICATE_RUNS_AGAIN = "DuplicateRunsAgain";
    /// Keeps a client's earlier session alive after the client opens a new one.
    OLD_SESSION_LIVES = "OldSessionLives";
    /// A session reads whether it is fenced before it has published its turn.
    FENCED_READ_TOO_EARLY = "FencedReadTooEarly";
    /// A pool uses a reopened session that is not bound to the client's nonce.
    REOPENED_UNBOUND = "ReopenedUnbound";
}
