//! `completions`: generates completion scripts for shells.
//!
//! The binary generates the scripts, because the set of commands depends on the features that the binary was built
//! with.

use super::{Cli, Done, written};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

/// Print the completion script of a shell
#[derive(clap::Args)]
#[command(after_help = "\
bash: farside completions bash > ~/.local/share/bash-completion/completions/farside
zsh:  farside completions zsh > DIR/_farside, where DIR is in $fpath
fish: farside completions fish > ~/.config/fish/completions/farside.fish")]
pub(super) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Done {
        // The generator panics if a write fails, for example because a pipe is closed. So it writes to memory.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut visible(Cli::command()), "farside", &mut script);
        written(std::io::stdout().write_all(&script))
    }
}

/// Returns the command without its hidden subcommands. Only other commands start these, but the generator would offer
/// them to users.
fn visible(command: Command) -> Command {
    if !command.get_subcommands().any(Command::is_hide_set) {
        return command.mut_subcommands(visible);
    }
    // clap cannot remove a subcommand, so the command is built again. Its name must be `'static`; the leak is harmless
    // in a process that ends soon.
    let name: &'static str = command.get_name().to_owned().leak();
    let below = command.get_subcommands().filter(|below| !below.is_hide_set()).cloned().map(visible);
    Command::new(name)
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments())
        .subcommands(below)
}
