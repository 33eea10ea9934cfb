//! House rules that no other tool checks: which crates may depend on which, and conventions of text.
//!
//! A rule is a function that takes a file's path and text and returns findings, so its test needs only a few lines of
//! sample text.
//! [`rust`] checks Rust files, [`manifest`] the dependencies between crates, and [`markdown`] the links of documents.
//! Paths are relative to the workspace's root, with `/` as separator.

mod manifest;
mod markdown;
mod rust;

use std::fmt;
use std::path::Path;

/// A violation of a rule: its place, description and remedy.
#[derive(Debug, PartialEq)]
pub(crate) struct Finding {
    path: String,
    /// Number of the line, counted from 1.
    line: usize,
    what: String,
    remedy: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { path: path.into(), line, what: what.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, what, remedy } = self;
        write!(out, "{path}:{line}: {what}; {remedy}")
    }
}

/// Returns every violation of a house rule in the tree.
pub(crate) fn findings(root: &Path) -> Vec<Finding> {
    let exists = |path: &str| root.join(path).exists();
    let has_heading = |path: &str, anchor: &str| {
        std::fs::read_to_string(root.join(path)).is_ok_and(|text| markdown::has_heading(&text, anchor))
    };
    let mut findings = Vec::new();
    for path in files(root) {
        let text = match std::fs::read_to_string(root.join(&path)) {
            Ok(text) => text,
            Err(error) => {
                findings.push(Finding::new(
                    &path,
                    1,
                    format!("cannot read it: {error}"),
                    "store text as UTF-8",
                ));
                continue;
            }
        };
        findings.extend(folders_of_one_machine(&path, &text));
        findings.extend(unfinished(&path, &text));
        if path.ends_with(".rs") {
            findings.extend(rust::findings(&path, &text));
        } else if path.ends_with(".md") {
            findings.extend(markdown::findings(&path, &text, exists, has_heading));
        } else if path.ends_with("Cargo.toml") {
            findings.extend(manifest::findings(&path, &text));
        }
    }
    findings
}

/// Returns the sorted paths of the tree's text files. Skips hidden folders and build output.
pub(crate) fn files(root: &Path) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(root.join(&folder)) else { continue };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Ok(kind) = entry.file_type() else { continue };
            let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
            let is_hidden = name.starts_with('.') && name != ".ci" && name != ".cargo";
            if kind.is_dir() && !is_hidden && name != "target" {
                folders.push(path);
            } else if kind.is_file() && is_read_by_people(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn is_read_by_people(path: &str) -> bool {
    const ENDINGS: [&str; 7] = [".rs", ".md", ".toml", ".sh", ".yml", ".yaml", ".properties"];
    path.starts_with(".ci/") || ENDINGS.iter().any(|ending| path.ends_with(ending))
}

/// Whether a file contains tests or benchmarks only.
pub(crate) fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.split('/').any(|folder| folder == "tests" || folder == "benches")
}

/// Words that mark unfinished work. Each word is split in two, so that this file does not contain it.
const UNFINISHED: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX")];

fn unfinished(path: &str, text: &str) -> Vec<Finding> {
    found(path, text, "finish it, or return an error that names the unsupported case", |line| {
        let mut words = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        words.find(|word| UNFINISHED.contains(word)).map(|mark| format!("`{mark}`"))
    })
}

/// Folders whose paths differ between machines. Each path is split in two, so that this file does not contain it.
const FOLDERS_OF_ONE_MACHINE: [&str; 4] =
    [concat!("/", "home/"), concat!("/", "root/"), concat!("/", "work/"), concat!("/", "Users/")];

/// Finds absolute paths into home or work folders, which exist on one machine only.
fn folders_of_one_machine(path: &str, text: &str) -> Vec<Finding> {
    found(path, text, "use a path relative to the repository", |line| {
        let is_absolute = |at: usize| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|letter| letter.is_alphanumeric() || "._-~/}".contains(letter))
        };
        let is_named = |folder: &&str| line.match_indices(*folder).any(|(at, _)| is_absolute(at));
        let folder = FOLDERS_OF_ONE_MACHINE.into_iter().find(is_named)?;
        Some(format!("`{folder}` names a machine-specific folder"))
    })
}

/// Returns a finding for each line in which `look` detects a violation.
fn found(path: &str, text: &str, remedy: &str, look: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let lines = text.lines().enumerate();
    lines.filter_map(|(index, line)| Some(Finding::new(path, index + 1, look(line)?, remedy))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats each finding as `line: what`.
    pub(super) fn seen(findings: &[Finding]) -> Vec<String> {
        findings.iter().map(|finding| format!("{}: {}", finding.line, finding.what)).collect()
    }

    #[test]
    fn a_finding_names_place_violation_and_remedy() {
        let finding = Finding::new("a/b.rs", 3, "it is wrong", "mend it");
        assert_eq!(finding.to_string(), "a/b.rs:3: it is wrong; mend it");
    }

    #[test]
    fn marks_of_unfinished_work_match_whole_words() {
        let [todo, fixme, _] = UNFINISHED;
        let text = format!("a = 1 # {todo}: b\nmktemp dir-XXXXXX\n{fixme}\n");
        let marks = [format!("1: `{todo}`"), format!("3: `{fixme}`")];
        assert_eq!(seen(&unfinished("a.toml", &text)), marks);
    }

    #[test]
    fn only_absolute_paths_are_machine_specific() {
        for folder in FOLDERS_OF_ONE_MACHINE {
            let text =
                format!("docs{folder}a and https://a.b{folder}c\n\"{folder}a\"\n${{A}}{folder}b\n{folder}\n");
            let found = folders_of_one_machine("a.md", &text);
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2, 4], "{folder}");
        }
    }

    #[test]
    fn a_test_file_is_recognized_by_its_path() {
        assert!(is_test_file("crates/remote/tests/model.rs"));
        assert!(is_test_file("bench/benches/get.rs"));
        assert!(is_test_file("crates/node/src/scan/tests.rs"));
        assert!(!is_test_file("crates/node/src/scan.rs"));
    }

    #[test]
    fn build_output_is_not_checked() {
        let files = files(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
        assert!(files.contains(&"xtask/src/tidy.rs".into()) && files.contains(&".ci/run".into()));
        assert!(!files.iter().any(|file| file.starts_with("target/") || file.starts_with(".git/")));
    }
}
