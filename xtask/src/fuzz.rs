//! `cargo xtask fuzz`: runs every decoder's fuzz target for longer than `cargo test` does.
//!
//! A target is a test named `fuzz_*`. `FARSIDE_FUZZ_SECONDS` sets how long it runs, in seconds.

use std::path::Path;

use crate::cargo::{cargo, succeeds};

/// Default number of seconds for which each target runs.
pub(crate) const SECONDS: u64 = 600;

/// Runs all targets, each for `seconds`. Returns whether all of them passed.
pub(crate) fn run(root: &Path, seconds: u64) -> bool {
    let test = ["test", "--workspace", "--locked", "--lib", "--bins", "--test", "all", "fuzz_"];
    // Run one target at a time, so that each target has a core and its output stays readable.
    let mut command = cargo(root, &[&test[..], &["--", "--nocapture", "--test-threads=1"]].concat());
    command.env("FARSIDE_FUZZ_SECONDS", seconds.to_string());
    succeeds(command)
}
