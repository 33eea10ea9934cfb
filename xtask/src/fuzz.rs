//! `cargo xtask fuzz`: every decoder's fuzz target, for longer than in `cargo test`.
//!
//! A target is a test named `fuzz_*`; how long it runs is told by `FARSIDE_FUZZ_SECONDS`.

use std::path::Path;

use crate::cargo::{cargo, succeeds};

/// How long each target runs where nothing is said.
pub(crate) const SECONDS: u64 = 600;

/// Runs all targets, each for so long, and says whether none found anything.
pub(crate) fn run(root: &Path, seconds: u64) -> bool {
    let test = ["test", "--workspace", "--locked", "--lib", "--bins", "--test", "all", "fuzz_"];
    // One at a time: each is to have a core, and what it prints is to be read.
    let mut command = cargo(root, &[&test[..], &["--", "--nocapture", "--test-threads=1"]].concat());
    command.env("FARSIDE_FUZZ_SECONDS", seconds.to_string());
    succeeds(command)
}
