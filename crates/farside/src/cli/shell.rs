//! `shell`: commands on a store, typed at a terminal, given as arguments, or read from a pipe.
//!
//! - `words`: splits lines into words, and quotes bytes.
//! - `command`: parses words into commands.
//! - `session`: runs operations on the store, and reopens it if needed.
//! - `answer`: prints results.
//! - `editor`: reads lines from a terminal.
//!
//! Invariant: at a terminal, an error message has a remedy, and no error ends the shell. The shell continues after a
//! restart of the node.

mod answer;
mod command;
mod editor;
mod session;
pub(super) mod words;

use super::{Done, Failure, StoreTarget, connect, info, kv, signals, store, terminal};
use answer::{Format, Printer};
use command::{ALL, Command, Description};
use editor::{LEAVE_EDITOR, Lines, Typed};
use farside::{Version, config};
use farside_systems::kv::{Cursor, Kv as _};
use session::{Kv, Session};
use std::ffi::OsString;
use std::io::{self, BufRead, IsTerminal, Read};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Run commands on a store (put, get, cas, scan, stat ...): at a prompt, from the arguments, or from a pipe
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Shell {
    #[command(flatten)]
    target: StoreTarget,
    /// Print one JSON object a line; bytes that are not UTF-8 are in 'key_base64' and 'value_base64'
    #[arg(long, conflicts_with = "raw")]
    json: bool,
    /// Print values byte for byte, each followed by a line feed [default if standard output is not a terminal]
    #[arg(long)]
    raw: bool,
    /// Continue after a line of a pipe that failed; exit with 2 if any line failed
    #[arg(long, conflicts_with = "command")]
    keep_going: bool,
    /// One command to run, with its arguments; 'help' lists the commands. Flags go before it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const AFTER_HELP: &str = "\
At a terminal: a prompt with history and completion. 'help' lists the commands, Ctrl-C cancels a line, Ctrl-D exits. \
With arguments: runs them as one command. From a pipe: runs each line as a command. Empty lines and lines that begin \
with '#' are skipped; a carriage return at the end of a line is ignored. The first line that fails ends the shell, and \
the error has the line's number. An absent key is reported, but is not a failure.";

impl Shell {
    pub(super) fn run(self) -> Done {
        let format = if self.json {
            Format::Json
        } else if self.raw || !io::stdout().is_terminal() {
            Format::Raw
        } else {
            Format::Quoted
        };
        let words: Vec<_> = self.command.into_iter().map(OsString::into_vec).collect();
        let alone =
            if words.is_empty() { None } else { Some(command::parse(words).map_err(Failure::Error)?) };
        if let Some(Command::Help(about)) = alone {
            return help(about, format);
        }
        let settings = self.target.settings()?;
        let session = Session::new(connect(&settings)?, settings.store.value);
        let printer = Printer { format, line: None };
        let open = Open { session, printer, timing: false, stop: Arc::default() };
        match alone {
            Some(command) => open.alone(command),
            None if io::stdin().is_terminal() && io::stdout().is_terminal() => open.typed(),
            None => open.piped(self.keep_going),
        }
    }
}

/// Maximum number of bytes in a line: a command, and a key and a value of maximum length in which every byte is the
/// 4-byte escape `\xHH`.
const LINE_MAX: u64 = 4 * (farside::VALUE_MAX + farside::KEY_MAX) as u64 + 128;

/// A shell that is connected to a node.
struct Open {
    session: Session,
    printer: Printer,
    /// Whether to print the duration of each command.
    timing: bool,
    /// Ctrl-C sets this flag, on which a listing stops early.
    stop: Arc<AtomicBool>,
}

/// Result of a shell command that ran without an error.
#[derive(Debug, PartialEq)]
enum Outcome {
    Done,
    /// The store has no such key.
    Absent,
    /// The condition of the command was not met, so nothing was stored. Holds the reason.
    Unmet(String),
    /// The command ends the shell.
    Leave,
}

impl Open {
    fn alone(mut self, command: Command) -> Done {
        match self.carry_out(command, true)? {
            Outcome::Done | Outcome::Leave => Ok(()),
            Outcome::Absent => Err(Failure::Absent),
            Outcome::Unmet(reason) => Err(Failure::NotGood(reason)),
        }
    }

    fn piped(mut self, keep_going: bool) -> Done {
        self.session.ensure()?;
        let mut input = io::stdin().lock();
        let (mut line, mut number, mut failed) = (Vec::new(), 0u64, 0u64);
        loop {
            line.clear();
            let read = input.by_ref().take(LINE_MAX).read_until(b'\n', &mut line);
            let read = read.map_err(|error| {
                Failure::Error(format!(
                    "could not read standard input: {error}; pipe commands in, a line each"
                ))
            })?;
            if read == 0 {
                break;
            }
            number += 1;
            self.printer.line = Some(number);
            let reason = match self.line(&line) {
                Ok(Outcome::Leave) => break,
                Ok(Outcome::Done | Outcome::Unmet(_)) => continue,
                Ok(Outcome::Absent) => {
                    note!("farside: line {number}: absent: the store has no such key");
                    continue;
                }
                Err(Failure::Error(reason)) => format!("line {number}: {reason}"),
                Err(other) => return Err(other),
            };
            if !keep_going {
                return Err(Failure::Error(reason));
            }
            note!("farside: {reason}");
            failed += 1;
        }
        match failed {
            0 => Ok(()),
            _ => Err(Failure::Error(format!("{failed} of {number} lines failed; the others were executed"))),
        }
    }

    fn typed(mut self) -> Done {
        self.session.ensure()?;
        terminal::restore_on(
            signals::ending().into_iter().filter(|&signal| signal != signal_hook::consts::SIGINT),
            LEAVE_EDITOR,
        )?;
        let file = config::state_folder().map(|folder| folder.join("history"));
        let mut lines = Lines::open(self.session.pool.clone(), file).map_err(Failure::Error)?;
        // This handler is registered after the editor's own one, because only the last registered handler is called.
        signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&self.stop))?;
        if self.printer.format == Format::Quoted {
            let url = self.session.pool.url();
            print_line!(
                "Store '{}' at {url}. 'help' lists the commands; Ctrl-D exits.",
                self.session.store()
            );
        }
        loop {
            let prompt = format!("{}> ", self.session.store());
            let typed = match lines.next(&prompt).map_err(Failure::Error)? {
                Typed::End => return Ok(()),
                Typed::Cancelled => continue,
                Typed::Line(line) => line,
            };
            self.stop.store(false, Ordering::Relaxed);
            for line in typed.lines() {
                match self.line(line.as_bytes()) {
                    Ok(Outcome::Leave) => return Ok(()),
                    Ok(Outcome::Done | Outcome::Absent) => {}
                    Ok(Outcome::Unmet(reason)) => note!("{reason}"),
                    Err(Failure::Error(reason)) => note!("error: {reason}"),
                    Err(other) => return Err(other),
                }
            }
        }
    }

    fn line(&mut self, line: &[u8]) -> Result<Outcome, Failure> {
        let words = words::split(line).map_err(Failure::Error)?;
        if words.is_empty() {
            return Ok(Outcome::Done);
        }
        let command = command::parse(words).map_err(Failure::Error)?;
        let timed = self.timing && !matches!(command, Command::Time(_) | Command::Quit);
        let since = Instant::now();
        let outcome = self.carry_out(command, false);
        if timed {
            note!("({:.3} ms)", since.elapsed().as_secs_f64() * 1e3);
        }
        outcome
    }

    /// Runs a command. `is_alone`: it is the only command, so the exit code reports its result.
    fn carry_out(&mut self, command: Command, is_alone: bool) -> Result<Outcome, Failure> {
        let json = self.printer.format == Format::Json;
        match command {
            Command::Get { key } => return self.get(&key, false, is_alone),
            Command::GetV { key } => return self.get(&key, true, is_alone),
            Command::Put { key, value } => {
                self.session.carry_out(async |kv: &mut Kv| kv.put(&key, &value).await)?;
                self.printer.ok()?;
            }
            Command::PutIfAbsent { key, value } => {
                let stored =
                    self.session.carry_out(async |kv: &mut Kv| kv.put_if_absent(&key, &value).await)?;
                if !stored {
                    return self.unmet(None, "the key already has a value: nothing was stored");
                }
                self.printer.result("ok", &[("stored", true.into())])?;
            }
            Command::Cas { key, version, value } => {
                let put = self.session.carry_out(async |kv: &mut Kv| {
                    kv.compare_and_put(&key, Version(version), &value).await
                })?;
                match put {
                    Ok(Version(new)) => {
                        let words = if self.printer.format == Format::Raw {
                            new.to_string()
                        } else {
                            format!("(version {new})")
                        };
                        self.printer.result(&words, &[("stored", true.into()), ("version", new.into())])?;
                    }
                    Err(conflict) => {
                        let has = conflict.version.map(|Version(version)| version);
                        let reason = match has {
                            Some(has) => format!("the key has version {has} instead: nothing was stored"),
                            None => "the key has no value: nothing was stored".into(),
                        };
                        return self.unmet(Some(has), &reason);
                    }
                }
            }
            Command::Del { key } => {
                if !self.session.carry_out(async |kv: &mut Kv| kv.delete(&key).await)? {
                    self.printer.absent(&key, is_alone)?;
                    return Ok(Outcome::Absent);
                }
                self.printer.result("ok", &[("deleted", true.into())])?;
            }
            Command::Exists { key } => {
                let exists = self.session.carry_out(async |kv: &mut Kv| kv.contains(&key).await)?;
                self.printer.result(if exists { "yes" } else { "no" }, &[("exists", exists.into())])?;
                return Ok(if exists || !is_alone { Outcome::Done } else { Outcome::Absent });
            }
            Command::List { prefix, count, values } => self.list(&prefix, count, values)?,
            Command::Stat => kv::stat(&self.session.pool, self.session.store(), json)?,
            Command::Info => info::about(&self.session.pool, json)?,
            Command::Stores => store::list(&self.session.pool, json)?,
            Command::Use { store } => {
                self.session.change_to(store)?;
                self.printer.ok()?;
            }
            Command::Trace(on) => {
                self.session.trace(on);
                self.printer.ok()?;
            }
            Command::Time(on) => {
                self.timing = on;
                self.printer.ok()?;
            }
            Command::Help(about) => help(about, self.printer.format)?,
            Command::Quit => return Ok(Outcome::Leave),
        }
        Ok(Outcome::Done)
    }

    fn get(&mut self, key: &[u8], versioned: bool, is_alone: bool) -> Result<Outcome, Failure> {
        let got = self.session.carry_out(async |kv: &mut Kv| {
            Ok(kv.get(key).await?.map(|item| (item.value.to_vec(), item.version)))
        })?;
        match got {
            Some((value, Version(version))) => {
                self.printer.value(key, &value, versioned.then_some(version))?;
                Ok(Outcome::Done)
            }
            None => {
                self.printer.absent(key, is_alone)?;
                Ok(Outcome::Absent)
            }
        }
    }

    /// Reports that the condition of a command was not met. `has` is the key's present version: `None` if it is
    /// unknown, `Some(None)` if the key is absent.
    fn unmet(&self, has: Option<Option<u32>>, reason: &str) -> Result<Outcome, Failure> {
        match self.printer.format {
            Format::Json => {
                let mut fields = vec![("stored", false.into())];
                fields.extend(has.map(|has| ("version", has.into())));
                self.printer.result("", &fields)?;
            }
            Format::Raw if self.printer.line.is_some() => {
                note!("farside: line {}: {reason}", self.printer.line.unwrap_or_default());
                self.printer.result("", &[])?;
            }
            _ => {}
        }
        Ok(Outcome::Unmet(reason.to_owned()))
    }

    fn list(&mut self, prefix: &[u8], count: u64, values: bool) -> Done {
        let mut cursor = Cursor::default();
        let (mut listed, mut written) = (0, Ok(()));
        let mut more = true;
        while more && listed < count && written.is_ok() && !self.stop.load(Ordering::Relaxed) {
            let (printer, cursor) = (&self.printer, &mut cursor);
            more = self.session.carry_out(async |kv: &mut Kv| {
                kv.next(cursor, |key, item| {
                    if key.starts_with(prefix) {
                        listed += 1;
                        written = printer.item(listed, key, values.then_some(item.value));
                    }
                })
                .await
            })?;
        }
        written?;
        self.printer.listed(listed, more)
    }
}

fn help(about: Option<&'static Description>, format: Format) -> Done {
    let shown = |known: &Description| {
        if format == Format::Json {
            serde_json::json!({ "command": known.form(), "what": known.what, "more": known.more }).to_string()
        } else {
            format!("{:<26}{}", known.form(), known.what)
        }
    };
    match about {
        Some(known) => {
            print_line!("{}", shown(known));
            if format != Format::Json && !known.more.is_empty() {
                print_line!("{}", known.more);
            }
        }
        None => {
            for known in &ALL {
                print_line!("{}", shown(known));
            }
            if format != Format::Json {
                print_line!("{:<26}exit the shell, as Ctrl-D does", "quit");
            }
        }
    }
    Ok(())
}
