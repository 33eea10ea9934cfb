//! Running cargo: each command is shown before it runs, and its output streams through.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// The cargo that started us, in the workspace's root. A caller adds the environment it needs.
pub(crate) fn cargo(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(arguments);
    // What `cargo xtask` has set about this package: build scripts that look at it, as ring's does, would run again.
    let is_ours = |name: &OsString| name.to_string_lossy().starts_with("CARGO_PKG_");
    std::env::vars_os().map(|(name, _)| name).filter(is_ours).for_each(|name| _ = command.env_remove(name));
    command
}

/// What the caller's environment sets in `variable`, followed by `flags`.
pub(crate) fn flags_after_the_callers(variable: &str, flags: &str) -> OsString {
    let mut all = std::env::var_os(variable).unwrap_or_default();
    if !all.is_empty() {
        all.push(" ");
    }
    all.push(flags);
    all
}

/// Runs `command` and says whether it succeeded; why it did not is on the terminal by then.
pub(crate) fn succeeds(mut command: Command) -> bool {
    println!("   $ {}", shown(&command));
    match command.status() {
        Ok(status) if status.success() => true,
        Ok(status) => {
            println!("   {status}");
            false
        }
        Err(error) => {
            println!("   cannot start it: {error}; is cargo on PATH?");
            false
        }
    }
}

/// The command as one would type it, with the environment that was set for it.
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
    fn what_cargo_says_of_this_package_is_no_concern_of_others() {
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some(), "cargo runs the tests");
        let command = cargo(Path::new("."), &["build"]);
        assert!(command.get_envs().any(|(name, value)| name == "CARGO_PKG_NAME" && value.is_none()));
    }

    #[test]
    fn a_shown_command_can_be_typed() {
        let mut command = cargo(Path::new("."), &["test", "--locked"]);
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTFLAGS");
        assert_eq!(shown(&command), "RUSTDOCFLAGS='-D warnings' cargo test --locked");
    }
}
