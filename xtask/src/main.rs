//! The project's chores, run as `cargo xtask CHORE`.
//!
//! - [`check`]: what CI runs, a step at a time; [`tidy`] is its step for the house rules.
//! - [`soak`]: the tests that are too long for every change.
//! - [`fuzz`]: the fuzz targets of all decoders, for longer than in every test run.
//! - [`sim`]: systems in the simulator by many seeds, and the broken variants that it must find.
//! - [`size`]: how many lines stand where.
//! - [`mutants`]: this program in rustc's place, where the broken variants are to be compiled in.

#![allow(clippy::disallowed_methods, reason = "cargo tells its chores by the environment")]

mod cargo;
mod check;
mod fuzz;
mod mutants;
mod sim;
mod size;
mod soak;
mod tidy;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

const HELP: &str = "\
The project's chores: cargo xtask CHORE

    check   what CI runs: format, house rules, clippy, tests (of broken variants, too), docs
    tidy    the house rules alone
    soak    the long tests: everything ignored and named soak_*, in release mode
    fuzz    every decoder's fuzz target, each for --seconds N (600 if left out)
    sim     systems in the simulator, by --seeds A..B (1..1000 if left out) in --jobs N processes (as many as there are
            cores); other flags are those of `farside sim`, such as --system and --faults
            --mutants: finds every broken variant, and --write-kills writes down by which seeds;
            --kills: replays those; --digests: the tests' digests anew
    size    lines of code, comment and test of each crate
    help    this text
";

/// Exit code of a command line that cannot be understood.
const USAGE: u8 = 2;

#[derive(Debug, PartialEq)]
enum Chore {
    Check,
    Tidy,
    Soak,
    /// Each target for so many seconds.
    Fuzz(u64),
    Sim(sim::Asked),
    Size,
    Help,
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(exit) = mutants::as_rustc(&arguments) {
        return exit;
    }
    let arguments: Vec<String> =
        arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let chore = match chore(&arguments) {
        Ok(chore) => chore,
        Err(message) => {
            eprintln!("xtask: {message}");
            return ExitCode::from(USAGE);
        }
    };
    // The folder that cargo runs this for, not the one it was compiled in: clones may share what they build.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = Path::new(&own).parent().expect("xtask lies in the workspace's root");
    let passed = match chore {
        Chore::Check => check::run(root),
        Chore::Tidy => check::house_rules(root),
        Chore::Soak => soak::run(root),
        Chore::Fuzz(seconds) => fuzz::run(root, seconds),
        Chore::Sim(asked) => sim::run(root, &asked),
        Chore::Size => size::run(root),
        Chore::Help => {
            print!("{HELP}");
            true
        }
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the command line asks for, or a message that names the remedy.
fn chore(arguments: &[String]) -> Result<Chore, String> {
    let Some((name, rest)) = arguments.split_first() else {
        return Err("no chore named; `cargo xtask help` lists them".into());
    };
    let chore = match name.as_str() {
        "fuzz" => return fuzz_for(rest).map(Chore::Fuzz),
        "sim" => return sim::asked(rest).map(Chore::Sim),
        "check" => Chore::Check,
        "tidy" => Chore::Tidy,
        "soak" => Chore::Soak,
        "size" => Chore::Size,
        "help" | "--help" | "-h" => Chore::Help,
        _ => return Err(format!("no chore is called `{name}`; `cargo xtask help` lists them")),
    };
    match rest.first() {
        None => Ok(chore),
        Some(extra) => Err(format!("`{name}` takes no arguments; leave out `{extra}`")),
    }
}

/// How long each fuzz target is to run.
fn fuzz_for(arguments: &[String]) -> Result<u64, String> {
    match arguments {
        [] => Ok(fuzz::SECONDS),
        [flag, seconds] if flag == "--seconds" => {
            seconds.parse().ok().filter(|&seconds| seconds > 0).ok_or_else(|| {
                format!("'{seconds}' is no number of seconds; write it like `fuzz --seconds 600`")
            })
        }
        _ => Err("`fuzz` takes `--seconds N` and nothing else".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chore_of(line: &str) -> Result<Chore, String> {
        chore(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn every_chore_in_the_help_is_understood() {
        let is_name = |line: &&str| !line.starts_with(' ');
        let lines = HELP.lines().filter_map(|line| line.strip_prefix("    ")).filter(is_name);
        let named = lines.filter_map(|line| line.split_whitespace().next());
        assert_eq!(named.clone().count(), 7);
        for name in named {
            assert!(chore_of(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_line_that_cannot_be_understood_names_the_remedy() {
        assert!(chore_of("").unwrap_err().contains("cargo xtask help"));
        assert!(chore_of("chekc").unwrap_err().contains("no chore is called `chekc`"));
        assert!(chore_of("check --fast").unwrap_err().contains("leave out `--fast`"));
        for wrong in ["fuzz --seconds", "fuzz --seconds 0", "fuzz --seconds x", "fuzz 600"] {
            assert!(chore_of(wrong).unwrap_err().contains("--seconds"), "{wrong}");
        }
        assert_eq!(chore_of("fuzz --seconds 7"), Ok(Chore::Fuzz(7)));
        assert!(chore_of("sim --seeds 5").unwrap_err().contains("--seeds 1..1000"));
    }
}
