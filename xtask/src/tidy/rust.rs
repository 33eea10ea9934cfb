//! Rules for one Rust file. The lints of `Cargo.toml` and `clippy.toml` hold the rest: where `unsafe` stands and that
//! it has a safety note, which crates read the environment, and that no macro stands in for code.

use super::{Finding, found, is_test_file};

/// Where the lint against `unsafe` may be lifted, apart from what tests share.
const UNSAFE: [&str; 2] = ["crates/fabrics/", "bench/src/lib.rs"];

/// Where the lint against reading the environment may be lifted, apart from tests.
const ENVIRONMENT: [&str; 2] = ["crates/farside/", "xtask/"];

/// The widest line; rustfmt's own limit leaves long comments and literals alone.
const LINE_WIDTH_MAX: usize = 120;

/// Every finding in one file.
pub(super) fn findings(path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(purpose(path, text));
    let within = |places: &[&str]| places.iter().any(|place| path.starts_with(place));
    if !within(&UNSAFE) && !path.contains("/tests/support/") {
        findings.extend(lifted(path, text, "unsafe_code"));
    }
    if !within(&ENVIRONMENT) && !is_test_file(path) {
        findings.extend(lifted(path, text, "clippy::disallowed_methods"));
    }
    findings.extend(floor(path, text));
    findings.extend(width(path, text));
    findings
}

fn purpose(path: &str, text: &str) -> Option<Finding> {
    let remedy = "open it with `//!`: its purpose, then what always holds";
    (!text.starts_with("//!")).then(|| Finding::new(path, 1, "a file without a purpose", remedy))
}

/// A lint that holds a wall, lifted outside the places that ARCHITECTURE.md names.
fn lifted(path: &str, text: &str, lint: &str) -> Vec<Finding> {
    let attributes = ["allow(", "expect(", "warn("].map(|level| format!("{level}{lint}"));
    found(path, text, "ARCHITECTURE.md says where it may be lifted", |line| {
        attributes.iter().any(|attribute| line.contains(attribute)).then(|| format!("lifts `{lint}`"))
    })
}

/// The floors share no code with what they judge.
fn floor(path: &str, text: &str) -> Vec<Finding> {
    if !path.starts_with("bench/src/floor") {
        return Vec::new();
    }
    found(path, text, "a floor shares no code with what is measured against it: do it by hand", |line| {
        line.contains("farside_").then(|| "a floor mentions `farside_`".into())
    })
}

fn width(path: &str, text: &str) -> Vec<Finding> {
    found(path, text, &format!("break it before {LINE_WIDTH_MAX}"), |line| {
        let width = line.chars().count();
        (width > LINE_WIDTH_MAX).then(|| format!("{width} characters in a line"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    fn seen_in(path: &str, text: &str) -> Vec<String> {
        seen(&findings(path, text))
    }

    const NOTHING: [&str; 0] = [];

    #[test]
    fn a_file_opens_with_its_purpose() {
        assert_eq!(seen_in("crates/node/src/scan.rs", "use a;\n"), ["1: a file without a purpose"]);
        assert_eq!(seen_in("crates/node/src/scan.rs", "//! Scans.\nuse a;\n"), NOTHING);
    }

    #[test]
    fn the_lints_of_walls_are_lifted_only_where_they_may_be() {
        let lifts = |lint| format!("//! a\n#![{}({lint}, reason = \"b\")]\n", "allow");
        let text = lifts("unsafe_code");
        for path in ["crates/node/src/lib.rs", "bench/src/driver/mod.rs", "crates/node/tests/all/a.rs"] {
            assert_eq!(seen_in(path, &text), ["2: lifts `unsafe_code`"], "{path}");
        }
        for path in ["crates/fabrics/src/lib.rs", "bench/src/lib.rs", "crates/systems/tests/support/mod.rs"] {
            assert_eq!(seen_in(path, &text), NOTHING, "{path}");
        }
        let text = lifts("clippy::disallowed_methods");
        assert_eq!(seen_in("crates/node/src/a.rs", &text), ["2: lifts `clippy::disallowed_methods`"]);
        for path in ["crates/farside/src/lib.rs", "xtask/src/main.rs", "crates/node/tests/all/main.rs"] {
            assert_eq!(seen_in(path, &text), NOTHING, "{path}");
        }
    }

    #[test]
    fn a_floor_shares_no_code_with_what_it_judges() {
        let text = "//! a\nuse farside_remote::run;\n";
        assert_eq!(seen_in("bench/src/floor/table.rs", text), ["2: a floor mentions `farside_`"]);
        assert_eq!(seen_in("bench/src/workload/mod.rs", text), NOTHING);
    }

    #[test]
    fn long_lines_are_counted_in_characters() {
        let text = format!("//! {}\n//! {}\n", "ü".repeat(116), "a".repeat(117));
        assert_eq!(seen_in("crates/node/src/a.rs", &text), ["2: 121 characters in a line"]);
    }
}
