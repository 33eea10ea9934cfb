//! Runs the workspace's test binaries in two lanes at the same time.
//!
//! `cargo test` starts one binary after the other. The longest test of a binary is often alone at its end, on one core,
//! and the tests of the command line wait more than they compute. So the package with the longest tests has a lane of
//! its own, and the binaries of all others run one after the other in the second lane.
//!
//! A lane prints the output of a binary when the binary has ended, so that outputs never mix.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::cargo::{self, cargo};

/// The package whose tests take the longest.
const FIRST_LANE: &str = "farside";

/// A test binary.
#[derive(Debug, PartialEq)]
pub(crate) struct Binary {
    pub(crate) package: String,
    /// Folder of the package, in which cargo starts its tests.
    pub(crate) folder: PathBuf,
    pub(crate) target: String,
    pub(crate) path: PathBuf,
}

/// Builds the workspace's tests. Returns their binaries; `None` if the build has failed.
pub(crate) fn built(root: &Path, prepare: fn(&mut Command)) -> Option<Vec<Binary>> {
    let arguments =
        ["test", "--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"];
    let mut command = cargo(root, &arguments);
    prepare(&mut command);
    let messages = cargo::output(command)?;
    Some(String::from_utf8_lossy(&messages).lines().filter_map(binary).collect())
}

/// Returns the test binary that a message of cargo is about, if it is about one.
fn binary(message: &str) -> Option<Binary> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).ok()?;
    let manifest: toml::Table = manifest.parse().ok()?;
    Some(Binary {
        package: manifest.get("package")?.get("name")?.as_str()?.to_owned(),
        target: message["target"]["name"].as_str()?.to_owned(),
        path: message["executable"].as_str()?.into(),
        folder,
    })
}

/// Runs the binaries, with `threads` tests at a time in all. Returns whether all tests have passed.
pub(crate) fn pass(binaries: &[Binary], threads: usize) -> bool {
    let (first, second): (Vec<_>, Vec<_>) = binaries.iter().partition(|binary| binary.package == FIRST_LANE);
    assert!(!first.is_empty(), "no test binary is of the package '{FIRST_LANE}'");
    let threads = (threads / 2).max(1);
    let in_turn = |lane: Vec<&Binary>| {
        lane.into_iter().map(|binary| passes(binary, threads)).fold(true, |all, one| all & one)
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| in_turn(first));
        let second = in_turn(second);
        first.join().expect("a lane does not panic") && second
    })
}

/// Runs the tests of a binary, and prints their output.
fn passes(binary: &Binary, threads: usize) -> bool {
    let started = Instant::now();
    let mut command = Command::new(&binary.path);
    command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder);
    command.env(crate::check::THREADS, threads.to_string());
    let (ran, passed) = match command.stdin(Stdio::null()).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            (text, output.status.success())
        }
        Err(error) => (format!("cannot start {}: {error}\n", binary.path.display()), false),
    };
    let outcome = if passed { "passed" } else { "FAILED" };
    let Binary { package, target, .. } = binary;
    println!("{ran}   tests '{target}' of {package} {outcome} in {:.1} s", started.elapsed().as_secs_f64());
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_about_test_binaries_are_found_among_others() {
        let folder = env!("CARGO_MANIFEST_DIR");
        let message = |reason: &str, test: bool| {
            format!(
                r#"{{"reason":"{reason}","manifest_path":"{folder}/Cargo.toml","target":{{"name":"all"}},
                    "profile":{{"test":{test}}},"executable":"/t/all-1"}}"#
            )
        };
        let found = Binary {
            package: "xtask".to_owned(),
            folder: folder.into(),
            target: "all".to_owned(),
            path: "/t/all-1".into(),
        };
        assert_eq!(binary(&message("compiler-artifact", true)), Some(found));
        assert_eq!(binary(&message("compiler-artifact", false)), None);
        assert_eq!(binary(&message("build-finished", true)), None);
        assert_eq!(binary("not a message"), None);
    }
}
