//! Rules for one Rust file.

use super::{Finding, is_test_file, unfinished};
use crate::source::{self, Line, columns_of, has_word};

/// Where `unsafe` may stand, besides what tests share.
const UNSAFE: [&str; 3] = ["crates/fabrics/", "crates/capi/", "bench/src/floor/"];
const TEST_SUPPORT: &str = "/tests/support/";

/// Crates whose every root forbids `unsafe`.
const SAFE: [&str; 4] = ["crates/remote/", "crates/systems/", "crates/node/", "crates/farside/"];

/// What may read the environment, besides tests and build scripts.
const ENVIRONMENT: [&str; 2] = ["crates/farside/", "xtask/"];

/// The widest line; rustfmt's own limit leaves long comments and literals alone.
const LINE_WIDTH_MAX: usize = 120;

/// Of the code above an `unsafe`, how many lines may lie between it and its safety note: the rest of its
/// statement.
const SAFETY_LINES_MAX: usize = 3;

/// Every finding in one file.
pub(super) fn findings(path: &str, text: &str) -> Vec<Finding> {
    let lines = source::lines(text);
    let mut findings = Vec::new();
    findings.extend(purpose(path, text));
    findings.extend(unsafe_walls(path, &lines));
    findings.extend(safety_notes(path, &lines));
    findings.extend(forbids_unsafe(path, &lines));
    findings.extend(environment(path, &lines));
    findings.extend(stand_ins(path, &lines));
    findings.extend(unfinished(path, lines.iter().map(|line| line.code.as_str())));
    findings.extend(unfinished(path, lines.iter().map(|line| line.comment.as_str())));
    findings.extend(floor(path, text));
    findings.extend(width(path, text));
    findings
}

fn purpose(path: &str, text: &str) -> Option<Finding> {
    let remedy = "open it with `//!`: its purpose, then what always holds";
    (!text.starts_with("//!")).then(|| Finding::new(path, 1, "a file without a purpose", remedy))
}

fn unsafe_walls(path: &str, lines: &[Line]) -> Vec<Finding> {
    if UNSAFE.iter().any(|wall| path.starts_with(wall)) || path.contains(TEST_SUPPORT) {
        return Vec::new();
    }
    let remedy =
        "it stands only in crates/fabrics, crates/capi, bench/src/floor and tests/support; ask for safe code";
    found(path, lines, remedy, |line| {
        has_word(&line.code, "unsafe").then(|| "`unsafe` outside its walls".into())
    })
}

/// Clippy asks for notes too; this also sees what is compiled out under the present features and targets.
fn safety_notes(path: &str, lines: &[Line]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        for at in columns_of(&line.code, "unsafe") {
            let what = match after(lines, index, at + "unsafe".len()) {
                next if next.starts_with('{') => "an `unsafe` block",
                next if next.split_whitespace().next() == Some("impl") || next.starts_with("impl<") => {
                    "an `unsafe impl`"
                }
                _ => continue,
            };
            if !has_safety_note(lines, index) {
                let what = format!("{what} without a safety note");
                let remedy = "say above it `// SAFETY:` who keeps the promise, and until when";
                findings.push(Finding::new(path, index + 1, what, remedy));
            }
        }
    }
    findings
}

/// The code that follows a column of a line, without the blanks before it.
fn after(lines: &[Line], index: usize, at: usize) -> &str {
    let rest = lines[index].code[at..].trim_start();
    if !rest.is_empty() {
        return rest;
    }
    let following = lines[index + 1..].iter().map(|line| line.code.trim_start());
    following.into_iter().find(|code| !code.is_empty()).unwrap_or_default()
}

/// Looks at the line, then upwards over any number of comment lines and a few of code.
fn has_safety_note(lines: &[Line], index: usize) -> bool {
    let mut code_lines = 0;
    for line in lines[..=index].iter().rev() {
        if line.comment.contains("SAFETY:") {
            return true;
        }
        code_lines += usize::from(!line.is_comment());
        if code_lines > SAFETY_LINES_MAX {
            break;
        }
    }
    false
}

fn forbids_unsafe(path: &str, lines: &[Line]) -> Option<Finding> {
    let in_crate = SAFE.iter().find_map(|folder| path.strip_prefix(folder))?;
    let is_root = ["src/lib.rs", "src/main.rs"].contains(&in_crate) || in_crate.starts_with("src/bin/");
    let forbids = |line: &Line| line.code.starts_with("#![forbid(") && has_word(&line.code, "unsafe_code");
    (is_root && !lines.iter().any(forbids)).then(|| {
        Finding::new(
            path,
            1,
            "this crate's root does not forbid `unsafe`",
            "add `#![forbid(unsafe_code)]` to it",
        )
    })
}

fn environment(path: &str, lines: &[Line]) -> Vec<Finding> {
    let is_build_script = path.ends_with("/build.rs");
    if ENVIRONMENT.iter().any(|place| path.starts_with(place)) || is_build_script || is_test_file(path) {
        return Vec::new();
    }
    let remedy = "only crates/farside reads it: take the value as an argument";
    found(path, lines, remedy, |line| {
        (!line.test && reads_environment(&line.code)).then(|| "reads the environment".into())
    })
}

/// `env::var`, `env::vars` and their kin, called or imported.
fn reads_environment(code: &str) -> bool {
    columns_of(code, "env").filter_map(|at| code[at..].strip_prefix("env::")).any(|path| {
        path.starts_with("var")
            || path.strip_prefix('{').is_some_and(|list| {
                list.split('}')
                    .take(1)
                    .flat_map(|list| list.split(','))
                    .any(|name| name.trim().starts_with("var"))
            })
    })
}

/// Macros that stand in for code, or look at it.
fn stand_ins(path: &str, lines: &[Line]) -> Vec<Finding> {
    let remedy = "write what it stands for, or take it out";
    found(path, lines, remedy, |line| {
        let is_called = |name: &&str| {
            columns_of(&line.code, name).any(|at| line.code[at + name.len()..].starts_with('!'))
        };
        ["todo", "unimplemented", "dbg"].iter().find(|name| is_called(name)).map(|name| format!("`{name}!`"))
    })
}

/// The floors share no code with what they judge.
fn floor(path: &str, text: &str) -> Vec<Finding> {
    if !path.starts_with("bench/src/floor") {
        return Vec::new();
    }
    let remedy = "a floor shares no code with what is measured against it: do it by hand";
    let lines = text.lines().enumerate().filter(|(_, line)| line.contains("farside_"));
    lines.map(|(index, _)| Finding::new(path, index + 1, "a floor mentions `farside_`", remedy)).collect()
}

fn width(path: &str, text: &str) -> Vec<Finding> {
    let widths = text.lines().map(|line| line.chars().count()).enumerate();
    let remedy = format!("break it before {LINE_WIDTH_MAX}");
    widths
        .filter(|(_, width)| *width > LINE_WIDTH_MAX)
        .map(|(index, width)| Finding::new(path, index + 1, format!("{width} characters in a line"), &remedy))
        .collect()
}

/// A finding for each line in which `look` sees something.
fn found(path: &str, lines: &[Line], remedy: &str, look: impl Fn(&Line) -> Option<String>) -> Vec<Finding> {
    let seen = lines.iter().enumerate().filter_map(|(index, line)| Some((index, look(line)?)));
    seen.map(|(index, what)| Finding::new(path, index + 1, what, remedy)).collect()
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
    fn unsafe_stands_only_within_its_walls() {
        let text = "//! a\n// SAFETY: b\nlet c = unsafe { d() };\nunsafe fn e() {}\n";
        let outside = ["3: `unsafe` outside its walls", "4: `unsafe` outside its walls"];
        for path in ["crates/node/src/a.rs", "crates/remote/src/run.rs", "bench/src/workload.rs"] {
            assert_eq!(seen_in(path, text), outside, "{path}");
        }
        for path in ["crates/node/tests/a.rs", "bench/benches/get.rs", "crates/node/src/host/tests/a.rs"] {
            assert_eq!(seen_in(path, text), outside, "{path}");
        }
        for path in ["crates/fabrics/src/a.rs", "crates/fabrics/tests/a.rs", "bench/src/floor/ring.rs"] {
            assert_eq!(seen_in(path, text), NOTHING, "{path}");
        }
        for path in ["crates/capi/a.rs", "crates/node/tests/support/a.rs"] {
            assert_eq!(seen_in(path, text), NOTHING, "{path}");
        }
    }

    #[test]
    fn unsafe_in_words_is_not_unsafe() {
        let text =
            "//! unsafe\n#![deny(unsafe_code)]\n/* unsafe { } */ fn a() { b(\"unsafe { }\") } // unsafe\n";
        assert_eq!(seen_in("crates/remote/src/a.rs", text), NOTHING);
    }

    #[test]
    fn unsafe_blocks_and_impls_have_safety_notes() {
        let path = "crates/fabrics/src/a.rs";
        let bare = "//! a\n\nfn b() {\n    c();\n    unsafe { d() }\n}\nunsafe impl Send for E {}\n\
                    unsafe\nimpl<T> Sync for E<T> {}\n";
        assert_eq!(
            seen_in(path, bare),
            [
                "5: an `unsafe` block without a safety note",
                "7: an `unsafe impl` without a safety note",
                "8: an `unsafe impl` without a safety note"
            ]
        );
        let noted = "//! a\nfn b() {\n    // SAFETY: a\n    // long\n    // note\n    // of\n    // many lines\n    \
                     let c =\n        unsafe { d() };\n}\n// SAFETY: e\nunsafe impl Send for E {}\nunsafe fn f();\n";
        assert_eq!(seen_in(path, noted), NOTHING);
        let far = "//! SAFETY: a\na\nb\nc\nd\nunsafe { e() }\n";
        assert_eq!(seen_in(path, far), ["6: an `unsafe` block without a safety note"]);
    }

    #[test]
    fn the_roots_of_safe_crates_forbid_unsafe() {
        let what = ["1: this crate's root does not forbid `unsafe`"];
        for path in ["crates/remote/src/lib.rs", "crates/farside/src/main.rs", "crates/node/src/bin/a.rs"] {
            assert_eq!(seen_in(path, "//! a\n// #![forbid(unsafe_code)]\n"), what, "{path}");
            assert_eq!(seen_in(path, "//! a\n\n#![forbid(unsafe_code)]\n"), NOTHING, "{path}");
        }
        assert_eq!(seen_in("crates/remote/src/run.rs", "//! a\n"), NOTHING);
        assert_eq!(seen_in("crates/fabrics/src/lib.rs", "//! a\n"), NOTHING);
    }

    #[test]
    fn only_the_front_reads_the_environment() {
        let text = "//! env::var\nlet a = std::env::var(\"B\");\nuse std::env::{self, vars_os};\n\
                    let c = env::args();\n#[cfg(test)]\nmod tests { fn d() { env::vars(); } }\n";
        assert_eq!(
            seen_in("crates/node/src/a.rs", text),
            ["2: reads the environment", "3: reads the environment"]
        );
        for path in
            ["crates/farside/src/a.rs", "xtask/src/a.rs", "crates/fabrics/build.rs", "crates/node/tests/a.rs"]
        {
            assert_eq!(seen_in(path, text), NOTHING, "{path}");
        }
    }

    #[test]
    fn nothing_is_left_for_later() {
        let text =
            "//! a\ntodo!();\nlet a = dbg!(b);\nunimplemented![]\nfn todo() {} // TODO: c\nd(\"todo!()\");\n";
        assert_eq!(
            seen_in("crates/node/src/a.rs", text),
            ["2: `todo!`", "3: `dbg!`", "4: `unimplemented!`", "5: `TODO`"]
        );
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
