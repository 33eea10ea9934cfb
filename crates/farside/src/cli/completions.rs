//! `completions`: what a shell proposes when somebody presses the tab key.
//!
//! The binary writes it, since it alone knows its commands, and which of them it was built with.

use super::{Cli, Done, written};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

/// Write what a shell is to propose for half-typed commands
#[derive(clap::Args)]
#[command(after_help = "\
bash: farside completions bash > ~/.local/share/bash-completion/completions/farside
zsh:  farside completions zsh > DIR/_farside, where DIR is in $fpath
fish: farside completions fish > ~/.config/fish/completions/farside.fish")]
pub(super) struct Completions {
    /// For which shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn run(self) -> Done {
        // The generator gives up where it cannot write, and whoever reads standard output may leave.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut visible(Cli::command()), "farside", &mut script);
        written(std::io::stdout().write_all(&script))
    }
}

/// The command without those below it that only other commands start: the generator would propose them.
fn visible(command: Command) -> Command {
    if !command.get_subcommands().any(Command::is_hide_set) {
        return command.mut_subcommands(visible);
    }
    // What is below a command cannot be taken away, so it is made anew. It wants a name for as long as the process
    // lives, which is not long.
    let name: &'static str = command.get_name().to_owned().leak();
    let below = command.get_subcommands().filter(|below| !below.is_hide_set()).cloned().map(visible);
    Command::new(name)
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments())
        .subcommands(below)
}
