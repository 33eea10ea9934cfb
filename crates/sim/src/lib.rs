//! The simulator: one thread, one seed, virtual nanoseconds.

#![forbid(unsafe_code)]
