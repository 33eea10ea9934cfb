//! `cargo xtask soak`: runs the long tests, which are `#[ignore]`d with a reason and named `soak_*`.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use crate::cargo::{cargo, succeeds};
use crate::tidy;

const TEST: [&str; 5] = ["test", "--release", "--locked", "--test", "all"];

/// Lists the long tests and runs them. Returns whether all of them passed. It is a failure if there are no long tests.
pub(crate) fn run(root: &Path) -> bool {
    let packages = packages(root);
    let test: Vec<&str> =
        TEST.into_iter().chain(packages.iter().flat_map(|name| ["--package", name])).collect();
    let Some(tests) = long_tests(root, &test) else {
        println!("soak: the tests do not build; see above");
        return false;
    };
    if tests.is_empty() {
        println!("soak: no long tests found: none is both `#[ignore]`d and named soak_*");
        return false;
    }
    println!("soak: {} long tests:", tests.len());
    for test in &tests {
        println!("   {test}");
    }
    let started = Instant::now();
    // Run the tests one at a time: they measure, and some need most of the machine's memory.
    let passed = succeeds(cargo(
        root,
        &[&test[..], &["--", "--ignored", "--nocapture", "--test-threads=1", "soak_"]].concat(),
    ));
    let outcome = if passed { "passed" } else { "FAILED" };
    println!("soak: {outcome} in {:.1} s", started.elapsed().as_secs_f64());
    passed
}

/// Returns the packages that have long tests. Other packages need not be built.
fn packages(root: &Path) -> BTreeSet<String> {
    let has_long_ones =
        |file: &&String| std::fs::read_to_string(root.join(file)).is_ok_and(|text| text.contains("fn soak_"));
    tidy::files(root).iter().filter(has_long_ones).filter_map(|file| package_of(file)).collect()
}

/// Returns the package of an integration test's file.
fn package_of(file: &str) -> Option<String> {
    let (folder, _) = file.split_once("/tests/all/")?;
    match folder.strip_prefix("crates/").unwrap_or(folder) {
        "farside" => Some("farside".into()),
        "systems" => Some("farside-systems-tests".into()),
        name => Some(format!("farside-{name}")),
    }
}

/// Returns the names of the long tests, or `None` if the tests do not build.
fn long_tests(root: &Path, test: &[&str]) -> Option<Vec<String>> {
    let listing = cargo(root, &[test, &["--quiet", "--", "--ignored", "--list", "soak_"]].concat())
        .stderr(Stdio::inherit())
        .output()
        .ok()?;
    listing.status.success().then(|| listed(&String::from_utf8_lossy(&listing.stdout)))
}

fn listed(listing: &str) -> Vec<String> {
    listing.lines().filter_map(|line| line.strip_suffix(": test")).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_belongs_to_its_package() {
        assert_eq!(package_of("crates/farside/tests/all/soak.rs").as_deref(), Some("farside"));
        assert_eq!(package_of("crates/systems/tests/all/raw.rs").as_deref(), Some("farside-systems-tests"));
        assert_eq!(package_of("crates/trial/tests/all/txn.rs").as_deref(), Some("farside-trial"));
        assert_eq!(package_of("bench/tests/all/ledger.rs").as_deref(), Some("farside-bench"));
        assert_eq!(package_of("crates/farside/src/main.rs"), None);
    }

    #[test]
    fn a_listing_is_parsed_to_its_tests_only() {
        let listing =
            "soak_kills: test\n\n1 test, 0 benchmarks\nscan::soak_fill: test\n0 tests, 0 benchmarks\n";
        assert_eq!(listed(listing), ["soak_kills", "scan::soak_fill"]);
    }
}
