//! This program as cargo's wrapper around rustc, which compiles the broken variants in.
//!
//! Set by `RUSTC_WORKSPACE_WRAPPER`, it sees our own packages alone: with RUSTFLAGS, everything that they depend on
//! would be compiled a second time.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

/// Set for a cargo that is to call this program in rustc's place.
const WRAPS: &str = "FARSIDE_XTASK_WRAPS_RUSTC";

/// Has `cargo` compile the broken variants in.
pub(crate) fn compile_in(cargo: &mut Command) {
    // Asked once: a cargo that builds this program anew leaves the running one without a path.
    static THIS: OnceLock<PathBuf> = OnceLock::new();
    let this = THIS.get_or_init(|| std::env::current_exe().expect("a running program has a path"));
    cargo.env("RUSTC_WORKSPACE_WRAPPER", this).env(WRAPS, "1");
    // Nobody edits this build step by step, and an incremental one takes more than twice the CPU time.
    cargo.env("CARGO_INCREMENTAL", "0");
}

/// Becomes rustc if that is what cargo called us for, with one more flag; nothing if it is not.
pub(crate) fn as_rustc(arguments: &[OsString]) -> Option<ExitCode> {
    as_rustc_if(std::env::var_os(WRAPS).is_some(), arguments)
}

fn as_rustc_if(wraps: bool, arguments: &[OsString]) -> Option<ExitCode> {
    if !wraps {
        return None;
    }
    let (rustc, rest) = arguments.split_first()?;
    let error = wrapped(rustc, rest).exec();
    eprintln!("xtask: cannot start {}: {error}; is the toolchain whole?", Path::new(rustc).display());
    Some(ExitCode::FAILURE)
}

fn wrapped(rustc: &OsString, rest: &[OsString]) -> Command {
    let mut command = Command::new(rustc);
    command.args(rest).args(["--cfg", "farside_mutants"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_gets_what_cargo_gave_it_and_one_flag_more() {
        let command = wrapped(&"rustc".into(), &["--crate-name".into(), "a".into()]);
        assert_eq!(command.get_program(), "rustc");
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--crate-name", "a", "--cfg", "farside_mutants"]);
    }

    #[test]
    fn without_being_asked_it_is_no_compiler() {
        assert!(as_rustc_if(false, &["rustc".into()]).is_none());
    }
}
