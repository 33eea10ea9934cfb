//! A wrapper around rustc that compiles the mutants in (variants of the code with a deliberate bug).
//!
//! cargo calls the program in `RUSTC_WORKSPACE_WRAPPER` only for the workspace's own packages. Flags in `RUSTFLAGS`
//! would make cargo recompile every dependency as well.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

/// Environment variable that tells this program that cargo calls it as the wrapper around rustc.
const WRAPS: &str = "FARSIDE_XTASK_WRAPS_RUSTC";

/// Makes the command `cargo` compile the mutants in.
pub(crate) fn compile_in(cargo: &mut Command) {
    // The path is read only once: when cargo rebuilds this program, the running process can no longer find its path.
    static THIS: OnceLock<PathBuf> = OnceLock::new();
    let this = THIS.get_or_init(|| std::env::current_exe().expect("a running program has a path"));
    cargo.env("RUSTC_WORKSPACE_WRAPPER", this).env(WRAPS, "1");
    // Incremental compilation does not pay: nobody edits this build step by step, and incremental compilation takes
    // more than twice the CPU time.
    cargo.env("CARGO_INCREMENTAL", "0");
}

/// If cargo called this program as a wrapper, replaces this process by rustc with one more flag. Otherwise returns
/// `None`.
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
