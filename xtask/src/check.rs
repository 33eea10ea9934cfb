//! `cargo xtask check`: everything CI runs.
//!
//! All steps run even after one has failed, so that one run reports every failure. The quick steps come first.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cargo::{cargo, flags_after_the_callers, succeeds};
use crate::{lanes, mutants, tidy, verbs};

type Step = (&'static str, fn(&Path) -> bool);

const STEPS: [Step; 6] = [
    ("format", format),
    ("tidy", house_rules),
    ("clippy", clippy),
    ("doc", doc),
    ("test", test),
    ("verbs", verbs::quick),
];

/// Outcome of one step of the check.
struct Outcome {
    name: &'static str,
    passed: bool,
    took: Duration,
}

/// Runs every step. Returns whether all of them passed.
pub(crate) fn run(root: &Path) -> bool {
    let outcomes = STEPS.map(|(name, step)| {
        println!("== {name}");
        let started = Instant::now();
        let passed = step(root);
        Outcome { name, passed, took: started.elapsed() }
    });
    print!("{}", summary(&outcomes));
    outcomes.iter().all(|outcome| outcome.passed)
}

fn format(root: &Path) -> bool {
    succeeds(cargo(root, &["fmt", "--all", "--check"]))
}

/// Prints every violation of a house rule. Returns whether there are none.
pub(crate) fn house_rules(root: &Path) -> bool {
    let findings = tidy::findings(root);
    for finding in &findings {
        println!("{finding}");
    }
    findings.is_empty()
}

/// Lints the build without mutants. [`test()`] builds with mutants, so that both builds are compiled.
fn clippy(root: &Path) -> bool {
    succeeds(cargo(root, &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

/// Builds all tests with the mutants and runs them. Each mutant is off unless a test switches it on.
fn test(root: &Path) -> bool {
    let passed = lanes::pass(root, mutants::compile_in);
    let mut examples = cargo(root, &["test", "--workspace", "--locked", "--doc", "--no-fail-fast"]);
    mutants::compile_in(&mut examples);
    succeeds(examples) & passed
}

fn doc(root: &Path) -> bool {
    let mut command = cargo(root, &["doc", "--workspace", "--no-deps", "--locked"]);
    command.env("RUSTDOCFLAGS", flags_after_the_callers("RUSTDOCFLAGS", "-D warnings"));
    succeeds(command)
}

/// Formats a line for each step with its share of the time, and a line for the total.
fn summary(outcomes: &[Outcome]) -> String {
    let whole: Duration = outcomes.iter().map(|outcome| outcome.took).sum();
    let mut summary = String::new();
    for Outcome { name, passed, took } in outcomes {
        let share = 100.0 * took.as_secs_f64() / whole.as_secs_f64();
        let outcome = if *passed { "ok" } else { "FAILED" };
        summary += &format!("== {name:<6} {:>7.1} s {share:>3.0} % {outcome}\n", took.as_secs_f64());
    }
    let failed: Vec<&str> =
        outcomes.iter().filter(|outcome| !outcome.passed).map(|outcome| outcome.name).collect();
    let (steps, whole) = (outcomes.len(), whole.as_secs_f64());
    summary += &if failed.is_empty() {
        format!("check: all {steps} steps passed in {whole:.1} s\n")
    } else {
        format!("check: {} of {steps} steps FAILED in {whole:.1} s: {}\n", failed.len(), failed.join(", "))
    };
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_failed_steps_and_each_steps_share() {
        let outcome = |name, passed, seconds| Outcome { name, passed, took: Duration::from_secs(seconds) };
        let passed = summary(&[outcome("clippy", true, 20), outcome("test", true, 60)]);
        let shares = "== clippy    20.0 s  25 % ok\n== test      60.0 s  75 % ok\n";
        assert_eq!(passed, format!("{shares}check: all 2 steps passed in 80.0 s\n"));
        let failed = summary(&[outcome("clippy", false, 20), outcome("doc", false, 60)]);
        assert!(failed.ends_with("check: 2 of 2 steps FAILED in 80.0 s: clippy, doc\n"), "{failed}");
    }
}
