//! `man`: generates the pages of the manual, one for each command.
//!
//! The binary generates the pages. So packagers need no sources, and the pages match the features that the binary was
//! built with.
//! Invariant: the same binary always writes the same bytes.

use super::{Cli, Done, Failure, written};
use clap::{Command, CommandFactory};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Print a page of the manual, or write all pages to a folder
#[derive(clap::Args)]
#[command(after_help = "\
Read one: farside man kv get | man -l -
Install:  farside man --out /usr/local/share/man/man1")]
pub(super) struct Man {
    /// Command whose page is printed to standard output, such as kv get [default: farside itself]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
    /// Write the pages of all commands to this folder, which is created if it is missing
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    out: Option<PathBuf>,
}

impl Man {
    pub(super) fn run(self) -> Done {
        let mut whole = Cli::command().disable_help_subcommand(true);
        whole.build();
        if let Some(folder) = &self.out {
            let failed = |error: std::io::Error| {
                Failure::Error(format!(
                    "could not write pages to {}: {error}; name another folder",
                    folder.display()
                ))
            };
            std::fs::create_dir_all(folder).map_err(failed)?;
            let count = write_all(&whole, folder).map_err(failed)?;
            print_line!("{count} pages: {}", folder.display());
            return Ok(());
        }
        let command = named(&whole, &self.command).map_err(Failure::Error)?;
        written(std::io::stdout().write_all(&page(command)))
    }
}

/// Writes the pages of a command and of its subcommands. Returns the number of pages.
fn write_all(command: &Command, folder: &Path) -> std::io::Result<usize> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    std::fs::write(folder.join(format!("{name}.1")), page(command))?;
    below(command).try_fold(1, |count, below| Ok(count + write_all(below, folder)?))
}

/// Finds a command by the path of names that leads to it, such as `kv`, `get`.
///
/// # Errors
/// There is no such command. The message lists the existing ones.
fn named<'a>(whole: &'a Command, names: &[String]) -> Result<&'a Command, String> {
    names.iter().try_fold(whole, |command, name| {
        below(command).find(|below| below.get_name() == name).ok_or_else(|| {
            let known: Vec<&str> = below(command).map(Command::get_name).collect();
            let above = command.get_bin_name().unwrap_or("farside");
            match known.is_empty() {
                true => format!("'{above}' has no subcommands: leave '{name}' out"),
                false => format!("'{above}' has no command '{name}': name one of {}", known.join(", ")),
            }
        })
    })
}

/// Returns the visible subcommands of a command. Hidden subcommands are omitted, because only other commands start
/// them.
fn below(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|below| !below.is_hide_set())
}

fn page(command: &Command) -> Vec<u8> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .source(concat!("Farside ", env!("CARGO_PKG_VERSION")))
        .manual("Farside Manual")
        .date(" ") // An empty date is omitted, and then the following fields move into its place.
        .render(&mut page)
        .expect("a write to a vector does not fail");
    page
}
