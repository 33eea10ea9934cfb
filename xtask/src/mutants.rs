//! Wrapper around rustc that compiles the broken variants (mutants) in.
//!
//! `RUSTC_WORKSPACE_WRAPPER` makes cargo call this program for the workspace's own packages only. `RUSTFLAGS` would
//! recompile every dependency.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

/// Environment variable set for a cargo that calls this program instead of rustc.
const WRAPS: &str = "FARSIDE_XTASK_WRAPS_RUSTC";

/// Makes the `cargo` command compile the broken variants in.
pub(crate) fn compile_in(cargo: &mut Command) {
    // Looked up once: when cargo rebuilds this program, the running process loses its path.
    static THIS: OnceLock<PathBuf> = OnceLock::new();
    let this = THIS.get_or_init(|| std::env::current_exe().expect("a running program has a path"));
    cargo.env("RUSTC_WORKSPACE_WRAPPER", this).env(WRAPS, "1");
    // This build is never edited incrementally, and incremental compilation takes more than twice the CPU time.
    cargo.env("CARGO_INCREMENTAL", "0");
}

/// Replaces this process by rustc, with one more flag, if cargo called it as a wrapper. Otherwise returns `None`.
pub(crate) fn as_rustc(arguments: &[OsString]) -> Option<ExitCode> {
    as_rustc_if(std::env::var_os(WRAPS).is_some(), arguments)
}

fn as_rustc_if(wraps: bool, arguments: &[OsString]) -> Option<ExitCode> {
    if !wraps {
        return None;
    }
    let (rustc, rest) = arguments.split_first()?;
    let error = wrapped(rustc, rest).exec();
    let rustc = Path::new(rustc).display();
    eprintln!(
        "xtask: cannot start {rustc}: {error}; nothing was compiled; check the toolchain with `rustup show`"
    );
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
    fn rustc_gets_cargos_arguments_and_one_more_flag() {
        let command = wrapped(&"rustc".into(), &["--crate-name".into(), "a".into()]);
        assert_eq!(command.get_program(), "rustc");
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--crate-name", "a", "--cfg", "farside_mutants"]);
    }

    #[test]
    fn without_the_variable_it_is_no_wrapper() {
        assert!(as_rustc_if(false, &["rustc".into()]).is_none());
    }
}
