//! Runs cargo. Prints each command before it runs, and passes the command's output through.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// Returns a command that runs the same cargo as the one that started this process, in the workspace's root. The caller
/// adds the environment variables that the command needs.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(arguments);
    // Removes the variables that `cargo xtask` sets for this package. Some build scripts, such as ring's, read them and
    // would run again after each change of their values.
    let is_ours = |name: &OsString| name.to_string_lossy().starts_with("CARGO_PKG_");
    std::env::vars_os().map(|(name, _)| name).filter(is_ours).for_each(|name| _ = command.env_remove(name));
    command
}

/// Returns the present value of the environment variable `variable`, followed by `flags`.
pub(crate) fn flags_after_the_callers(variable: &str, flags: &str) -> OsString {
    let mut all = std::env::var_os(variable).unwrap_or_default();
    if !all.is_empty() {
        all.push(" ");
    }
    all.push(flags);
    all
}

/// Runs `command`. Returns whether it succeeded; prints the reason for a failure.
pub(crate) fn succeeds(mut command: Command) -> bool {
    println!("   $ {}", shown(&command));
    has_succeeded(command.status())
}

/// Runs `command`. Returns its standard output; prints the reason for a failure, and returns `None`.
pub(crate) fn output(mut command: Command) -> Option<Vec<u8>> {
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    match command.spawn().and_then(Child::wait_with_output) {
        Ok(output) => has_succeeded(Ok(output.status)).then_some(output.stdout),
        Err(error) => {
            has_succeeded(Err(error));
            None
        }
    }
}

/// Returns a command that runs `command` with a low priority.
pub(crate) fn niced(command: &Command) -> Command {
    let mut niced = Command::new("nice");
    niced.args(["-n", "10"]).arg(command.get_program()).args(command.get_args());
    niced.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => niced.env(name, value),
            None => niced.env_remove(name),
        };
    }
    niced
}

/// Returns whether a command that ended with `status` succeeded; prints the reason for a failure.
pub(crate) fn has_succeeded(status: std::io::Result<ExitStatus>) -> bool {
    match status {
        Ok(status) if status.success() => true,
        Ok(status) => {
            println!("   {status}");
            false
        }
        Err(error) => {
            println!("   cannot start cargo: {error}; nothing has run; check that cargo is on PATH");
            false
        }
    }
}

/// Formats the command as it is typed in a shell, including the environment variables that are set for it.
fn shown(command: &Command) -> String {
    let set = command.get_envs().filter_map(|(name, value)| Some((name.display(), value?.display())));
    let mut shown: String = set.map(|(name, value)| format!("{name}='{value}' ")).collect();
    shown.push_str("cargo");
    for argument in command.get_args() {
        shown.push_str(&format!(" {}", argument.display()));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_packages_do_not_see_this_packages_variables() {
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some(), "cargo runs the tests");
        let command = cargo(Path::new("."), &["build"]);
        assert!(command.get_envs().any(|(name, value)| name == "CARGO_PKG_NAME" && value.is_none()));
    }

    #[test]
    fn a_command_of_low_priority_is_the_same_command() {
        let mut command = Command::new("printenv");
        command.args(["PWD", "A"]).current_dir("/").env("A", "b").env_remove("C");
        let niced = niced(&command);
        let arguments: Vec<_> = niced.get_args().collect();
        assert_eq!(
            (niced.get_program(), &arguments[2..]),
            ("nice".as_ref(), &["printenv", "PWD", "A"].map(AsRef::as_ref)[..])
        );
        assert_eq!(niced.get_current_dir(), Some(Path::new("/")));
        assert!(niced.get_envs().eq(command.get_envs()));
    }

    #[test]
    fn a_printed_command_can_be_pasted_into_a_shell() {
        let mut command = cargo(Path::new("."), &["test", "--locked"]);
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTFLAGS");
        assert_eq!(shown(&command), "RUSTDOCFLAGS='-D warnings' cargo test --locked");
    }
}
