//! Rules for one Rust file. The lints of `Cargo.toml` and `clippy.toml` check the rest: where `unsafe` is allowed, that
//! each `unsafe` block has a safety comment, which crates read the environment, and that no `todo!`, `unimplemented!`
//! or `dbg!` is left.

use super::{Finding, found, is_test_file};

/// Paths where the lint against `unsafe` may be lifted. Shared test code is also allowed.
const UNSAFE: [&str; 2] = ["crates/fabrics/", "bench/src/lib.rs"];

/// Paths where the lint against reading the environment may be lifted. Tests are also allowed.
const ENVIRONMENT: [&str; 2] = ["crates/farside/", "xtask/"];

/// Maximum line width in characters. This rule is needed because rustfmt does not wrap long comments and literals.
const LINE_WIDTH_MAX: usize = 120;

/// Returns every finding in one file.
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
    let remedy = "open it with `//!`: its purpose, then its invariants";
    (!text.starts_with("//!")).then(|| Finding::new(path, 1, "the file has no module doc", remedy))
}

/// Finds attributes that lift `lint`. The caller leaves out the paths where ARCHITECTURE.md allows this.
fn lifted(path: &str, text: &str, lint: &str) -> Vec<Finding> {
    let attributes = ["allow(", "expect(", "warn("].map(|level| format!("{level}{lint}"));
    found(path, text, "remove the attribute; ARCHITECTURE.md lists where it is allowed", |line| {
        attributes.iter().any(|attribute| line.contains(attribute)).then(|| format!("lifts `{lint}`"))
    })
}

/// Checks an invariant: the floors share no code with the systems that they are compared with.
fn floor(path: &str, text: &str) -> Vec<Finding> {
    if !path.starts_with("bench/src/floor") {
        return Vec::new();
    }
    found(path, text, "reimplement it: a floor shares no code with the systems measured against it", |line| {
        line.contains("farside_").then(|| "a floor mentions `farside_`".into())
    })
}

fn width(path: &str, text: &str) -> Vec<Finding> {
    found(path, text, &format!("wrap it at {LINE_WIDTH_MAX}"), |line| {
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
    fn a_file_opens_with_its_module_doc() {
        assert_eq!(seen_in("crates/node/src/scan.rs", "use a;\n"), ["1: the file has no module doc"]);
        assert_eq!(seen_in("crates/node/src/scan.rs", "//! Scans.\nuse a;\n"), NOTHING);
    }

    #[test]
    fn wall_lints_are_lifted_only_where_allowed() {
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
    fn a_floor_shares_no_code_with_the_measured_systems() {
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
