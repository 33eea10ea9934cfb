//! Maintenance commands ("chores") of this repository, run as `cargo xtask CHORE`.
//!
//! - [`check`]: everything CI runs, step by step. [`tidy`] is its step for the house rules.
//! - [`soak`]: the tests that take too long to run on every change.
//! - [`fuzz`]: every decoder's fuzz target, for longer than in `cargo test`.
//! - [`sim`]: runs systems in the simulator with many seeds, and finds seeds that expose mutants (variants with a
//!   deliberate bug).
//! - [`verbs`]: the tests that take an RDMA device, in a virtual machine ([`vm`]).
//! - [`size`]: line counts of each crate.
//! - [`mutants`]: the part of this program that runs as a wrapper around rustc and compiles the mutants in.

#![allow(clippy::disallowed_methods, reason = "cargo passes paths to xtask through the environment")]

mod cargo;
mod check;
mod fuzz;
mod lanes;
mod mutants;
mod sim;
mod size;
mod soak;
mod tidy;
mod verbs;
mod vm;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

const HELP: &str = "\
Maintenance commands: cargo xtask CHORE

    check   everything CI runs: format, house rules, clippy, tests (including broken variants), docs
    tidy    the house rules only
    soak    the long tests: all tests that are ignored and named soak_*, in release mode
    fuzz    every decoder's fuzz target, each for --seconds N (default: 600)
    sim     runs systems in the simulator with --seeds A..B (default: 1..1000) in --jobs N processes (default: one
            per core); other flags are passed to `farside sim`, such as --system and --faults
            --mutants: searches for a seed that exposes each broken variant (mutant); --write-kills also saves
            the seeds; --kills: replays the saved seeds; --digests: recomputes the digests that the tests compare
    verbs   the tests that take an RDMA device, in a virtual machine with Soft-RoCE; --quick: only what CI runs;
            --here: on a device of this machine; NAME: only tests whose name contains it
    vm      runs the COMMAND after -- as root in that virtual machine, with --memory MIB, --cpus N and --seconds N;
            without a command, only prepares the virtual machine
    size    lines of code, comments and tests of each crate
    help    prints this text
";

/// Exit code of this program for an invalid command line.
const USAGE: u8 = 2;

#[derive(Debug, PartialEq)]
enum Chore {
    Check,
    Tidy,
    Soak,
    /// Runs each fuzz target for this many seconds.
    Fuzz(u64),
    Sim(sim::Options),
    Verbs(verbs::Options),
    Vm(vm::Options),
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
    // Prefer the folder for which cargo runs this program to the folder where the program was compiled, since clones
    // may share a target folder.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = Path::new(&own).parent().expect("xtask is a folder of the workspace's root");
    let passed = match chore {
        Chore::Check => check::run(root),
        Chore::Tidy => check::house_rules(root),
        Chore::Soak => soak::run(root),
        Chore::Fuzz(seconds) => fuzz::run(root, seconds),
        Chore::Sim(options) => sim::run(root, &options),
        Chore::Verbs(options) => verbs::run(root, &options),
        Chore::Vm(options) => return ExitCode::from(vm::run(root, &options)),
        Chore::Size => size::run(root),
        Chore::Help => {
            print!("{HELP}");
            true
        }
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Parses the command line of this program. The error message says how to correct it.
fn chore(arguments: &[String]) -> Result<Chore, String> {
    let Some((name, rest)) = arguments.split_first() else {
        return Err("no chore given; `cargo xtask help` lists the chores".into());
    };
    let chore = match name.as_str() {
        "fuzz" => return fuzz_for(rest).map(Chore::Fuzz),
        "sim" => return sim::parse(rest).map(Chore::Sim),
        "verbs" => return verbs::parse(rest).map(Chore::Verbs),
        "vm" => return vm::parse(rest).map(Chore::Vm),
        "check" => Chore::Check,
        "tidy" => Chore::Tidy,
        "soak" => Chore::Soak,
        "size" => Chore::Size,
        "help" | "--help" | "-h" => Chore::Help,
        _ => return Err(format!("unknown chore `{name}`; `cargo xtask help` lists the chores")),
    };
    match rest.first() {
        None => Ok(chore),
        Some(extra) => Err(format!("`{name}` takes no arguments; remove `{extra}`")),
    }
}

/// Parses the number of seconds for which each fuzz target runs.
fn fuzz_for(arguments: &[String]) -> Result<u64, String> {
    match arguments {
        [] => Ok(fuzz::SECONDS),
        [flag, seconds] if flag == "--seconds" => {
            seconds.parse().ok().filter(|&seconds| seconds > 0).ok_or_else(|| {
                format!("invalid number of seconds '{seconds}'; use a positive integer, such as `fuzz --seconds 600`")
            })
        }
        _ => Err("invalid arguments of `fuzz`; it takes `--seconds N` only".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chore_of(line: &str) -> Result<Chore, String> {
        chore(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn every_chore_in_the_help_is_accepted() {
        let is_name = |line: &&str| !line.starts_with(' ');
        let lines = HELP.lines().filter_map(|line| line.strip_prefix("    ")).filter(is_name);
        let named = lines.filter_map(|line| line.split_whitespace().next());
        assert_eq!(named.clone().count(), 9);
        for name in named {
            assert!(chore_of(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn an_invalid_command_line_names_the_remedy() {
        assert!(chore_of("").unwrap_err().contains("cargo xtask help"));
        assert!(chore_of("chekc").unwrap_err().contains("unknown chore `chekc`"));
        assert!(chore_of("check --fast").unwrap_err().contains("remove `--fast`"));
        for wrong in ["fuzz --seconds", "fuzz --seconds 0", "fuzz --seconds x", "fuzz 600"] {
            assert!(chore_of(wrong).unwrap_err().contains("--seconds"), "{wrong}");
        }
        assert_eq!(chore_of("fuzz --seconds 7"), Ok(Chore::Fuzz(7)));
        assert!(chore_of("sim --seeds 5").unwrap_err().contains("--seeds 1..1000"));
    }
}
