//! Entry point of the `farside` command, which the module `cli` implements.

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "this crate reads the environment for all others")]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
