//! `man`: the manual's pages, one for each command, for whoever packs Farside.
//!
//! A packager has the binary and need not have the sources; so the binary writes the pages, of the commands that it was
//! built with. Invariant: the same binary writes the same bytes, whenever and wherever that is.

use super::{Cli, Done, Failure, written};
use clap::{Command, CommandFactory};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Write the manual: one page, or all of them into a folder
#[derive(clap::Args)]
#[command(after_help = "\
Read one: farside man kv get | man -l -
Install:  farside man --out /usr/local/share/man/man1")]
pub(super) struct Man {
    /// Of which command the page is written to standard output, such as kv get: of farside itself if none is named
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder, which is made if it is not there
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    out: Option<PathBuf>,
}

impl Man {
    pub(super) fn run(self) -> Done {
        let mut whole = Cli::command().disable_help_subcommand(true);
        whole.build();
        if let Some(folder) = &self.out {
            let failed = |error: std::io::Error| {
                Failure::Told(format!(
                    "could not write pages into {}: {error}; name another folder",
                    folder.display()
                ))
            };
            std::fs::create_dir_all(folder).map_err(failed)?;
            let count = write_all(&whole, folder).map_err(failed)?;
            tell!("{count} pages: {}", folder.display());
            return Ok(());
        }
        let command = named(&whole, &self.command).map_err(Failure::Told)?;
        written(std::io::stdout().write_all(&page(command)))
    }
}

/// Writes the command's page and those below it; answers how many.
fn write_all(command: &Command, folder: &Path) -> std::io::Result<usize> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    std::fs::write(folder.join(format!("{name}.1")), page(command))?;
    below(command).try_fold(1, |count, below| Ok(count + write_all(below, folder)?))
}

/// # Errors
/// There is no such command; says which there are.
fn named<'a>(whole: &'a Command, names: &[String]) -> Result<&'a Command, String> {
    names.iter().try_fold(whole, |command, name| {
        below(command).find(|below| below.get_name() == name).ok_or_else(|| {
            let known: Vec<&str> = below(command).map(Command::get_name).collect();
            let above = command.get_bin_name().unwrap_or("farside");
            match known.is_empty() {
                true => format!("'{above}' has no commands below it: leave '{name}' out"),
                false => format!("'{above}' has no command '{name}': name one of {}", known.join(", ")),
            }
        })
    })
}

/// Those that people type; others are started by commands.
fn below(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|below| !below.is_hide_set())
}

fn page(command: &Command) -> Vec<u8> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .source(concat!("Farside ", env!("CARGO_PKG_VERSION")))
        .manual("Farside Manual")
        .date(" ") // An empty one is left out, and then the others are taken for it.
        .render(&mut page)
        .expect("a vector takes all that is written");
    page
}
