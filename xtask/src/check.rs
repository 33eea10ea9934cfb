//! `cargo xtask check`: what CI runs.
//!
//! Every step runs, even after one has failed, so that one run tells everything. The quick ones come first.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cargo::{cargo, flags_after_the_callers, succeeds};
use crate::{mutants, tidy};

type Step = (&'static str, fn(&Path) -> bool);

const STEPS: [Step; 6] = [
    ("format", format),
    ("tidy", house_rules),
    ("clippy", clippy),
    ("test", test),
    ("mutants", test_mutants),
    ("doc", doc),
];

/// Runs every step and says whether all of them passed.
pub(crate) fn run(root: &Path) -> bool {
    let started = Instant::now();
    let mut failed = Vec::new();
    for (name, step) in STEPS {
        println!("== {name}");
        let step_started = Instant::now();
        let passed = step(root);
        let outcome = if passed { "ok" } else { "FAILED" };
        println!("== {name}: {outcome} in {}", seconds(step_started.elapsed()));
        if !passed {
            failed.push(name);
        }
    }
    println!("{}", summary(&failed, started.elapsed()));
    failed.is_empty()
}

fn format(root: &Path) -> bool {
    succeeds(cargo(root, &["fmt", "--all", "--check"]))
}

/// Tells what breaks a house rule; whether nothing does.
pub(crate) fn house_rules(root: &Path) -> bool {
    let findings = tidy::findings(root);
    for finding in &findings {
        println!("{finding}");
    }
    findings.is_empty()
}

fn clippy(root: &Path) -> bool {
    succeeds(cargo(root, &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

fn test(root: &Path) -> bool {
    succeeds(cargo(root, &["test", "--workspace", "--locked", "--no-fail-fast"]))
}

/// The broken variants: a package keeps the tests that must find them in `tests/all/mutants.rs`.
fn test_mutants(root: &Path) -> bool {
    let mut command =
        cargo(root, &["test", "--workspace", "--locked", "--no-fail-fast", "--test", "all", "mutants::"]);
    // Into our packages alone, which cargo then keeps apart: what they depend on is the same and is not built again.
    mutants::compile_in(&mut command);
    succeeds(command)
}

fn doc(root: &Path) -> bool {
    let mut command = cargo(root, &["doc", "--workspace", "--no-deps", "--locked"]);
    command.env("RUSTDOCFLAGS", flags_after_the_callers("RUSTDOCFLAGS", "-D warnings"));
    succeeds(command)
}

fn summary(failed: &[&str], took: Duration) -> String {
    let took = seconds(took);
    if failed.is_empty() {
        format!("check: all {} steps passed in {took}", STEPS.len())
    } else {
        format!("check: {} of {} steps FAILED in {took}: {}", failed.len(), STEPS.len(), failed.join(", "))
    }
}

fn seconds(took: Duration) -> String {
    format!("{:.1} s", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_failed() {
        let took = Duration::from_millis(61_250);
        assert_eq!(summary(&[], took), "check: all 6 steps passed in 61.2 s");
        assert_eq!(summary(&["clippy", "doc"], took), "check: 2 of 6 steps FAILED in 61.2 s: clippy, doc");
    }
}
