//! This program as cargo's wrapper around rustc, which compiles the broken variants in.
//!
//! Set by `RUSTC_WORKSPACE_WRAPPER`, it sees our own packages alone: with RUSTFLAGS, everything that they depend on
//! would be compiled a second time. Invariant: no chore is called as the compiler is.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Becomes rustc if that is what cargo called us for, with one more flag; nothing if it is not.
pub(crate) fn as_rustc(arguments: &[String]) -> Option<ExitCode> {
    let command = wrapped(arguments)?;
    let error = { command }.exec();
    eprintln!("xtask: cannot start {}: {error}; is the toolchain whole?", arguments[0]);
    Some(ExitCode::FAILURE)
}

fn wrapped(arguments: &[String]) -> Option<Command> {
    let (program, rest) = arguments.split_first()?;
    if Path::new(program).file_stem()? != "rustc" {
        return None;
    }
    let mut command = Command::new(program);
    command.args(rest).args(["--cfg", "farside_mutants"]);
    Some(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_is_wrapped_and_a_chore_is_not() {
        let line = |words: &str| words.split_whitespace().map(String::from).collect::<Vec<_>>();
        let command = wrapped(&line("/bin/rustc --crate-name a")).expect("it is the compiler");
        assert_eq!(command.get_program(), "/bin/rustc");
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["--crate-name", "a", "--cfg", "farside_mutants"]);
        assert!(wrapped(&line("check")).is_none());
        assert!(wrapped(&[]).is_none());
    }
}
