//! Edits lines at a terminal, with completion, hints, and a history file.
//!
//! Invariant: no value is written to the history file. These lines stay in memory, if they are kept at all: lines with
//! a value, lines that are not a command, and lines that begin with a blank.
//! Invariant: only the owner of the history file may read it.

use super::command::{self, ALL, LEAVE};
use super::words;
use farside::Pool;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::{History, MemHistory};
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Editor, Helper};
use std::borrow::Cow;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Escape sequence that turns off bracketed paste, which the editor has turned on, and starts a new line.
pub(super) const LEAVE_EDITOR: &str = "\x1b[?2004l\r\n";

/// Maximum number of lines in the history.
const LINES_MAX: usize = 1000;

/// Reads lines from the terminal and keeps the history.
pub(super) struct Lines {
    editor: Editor<Assistant, MemHistory>,
    file: Option<PathBuf>,
}

/// Input that the user typed at the prompt.
pub(super) enum Typed {
    /// A line, or several lines that were pasted.
    Line(String),
    /// The user cancelled the line, with Ctrl-C.
    Cancelled,
    /// The input has ended, for example by Ctrl-D.
    End,
}

impl Lines {
    /// Opens the editor. The history is kept in `file`, or only in memory if that is `None`.
    pub(super) fn open(pool: Pool, file: Option<PathBuf>) -> Result<Lines, String> {
        let config = Config::builder()
            .max_history_size(LINES_MAX)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(|error| read_error(&error))?
            .history_ignore_space(true)
            .completion_type(CompletionType::List)
            .build();
        let history = MemHistory::with_config(&config);
        let mut editor = Editor::with_history(config, history).map_err(|error| read_error(&error))?;
        editor.set_helper(Some(Assistant { pool }));
        let mut lines = Lines { editor, file };
        lines.recall();
        Ok(lines)
    }

    /// Reads the next line from the terminal, and adds it to the history.
    pub(super) fn next(&mut self, prompt: &str) -> Result<Typed, String> {
        match self.editor.readline(prompt) {
            Ok(line) => {
                self.remember(&line);
                Ok(Typed::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Cancelled),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(read_error(&error)),
        }
    }

    /// Loads the history file. If it has more than [`LINES_MAX`] lines, shortens the file to the last ones.
    fn recall(&mut self) {
        let Some(path) = &self.file else { return };
        let Ok(text) = std::fs::read_to_string(path) else { return };
        let lines: Vec<&str> = text.lines().collect();
        let kept = &lines[lines.len().saturating_sub(LINES_MAX)..];
        for line in kept {
            // The editor drops a line that equals the previous one.
            let _same = self.editor.history_mut().add(line);
        }
        if kept.len() < lines.len() {
            let text: String = kept.iter().flat_map(|line| [line, "\n"]).collect();
            self.file = replace(path, &text).is_ok().then(|| path.clone());
        }
    }

    fn remember(&mut self, line: &str) {
        let _same = self.editor.history_mut().add(line);
        if let Some(path) = self.file.as_ref().filter(|_| may_be_saved(line))
            && let Err(error) = append(path, line)
        {
            note!("farside: the history is not saved: could not write {}: {error}", path.display());
            self.file = None;
        }
    }
}

fn read_error(error: &ReadlineError) -> String {
    format!("could not read from the terminal: {error}; pipe commands in, or give one as arguments")
}

/// Whether a line may be written to the history file: it must be one command without a value, and must not begin with a
/// blank.
fn may_be_saved(line: &str) -> bool {
    let known = words::split(line.as_bytes()).ok().and_then(|words| {
        let name = words.first()?.clone();
        command::parse(words).ok()?;
        command::find(&name).ok()
    });
    !line.starts_with([' ', '\t'])
        && !line.contains(['\n', '\r'])
        && known.is_some_and(|known| !known.has_value)
}

fn append(path: &Path, line: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut file = File::options().append(true).create(true).mode(0o600).open(path)?;
    // The line is written at once, because two shells may append to the same file.
    file.write_all(format!("{line}\n").as_bytes())
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    let next = path.with_extension(format!("{}", std::process::id()));
    let written = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&next)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(&next, path));
    if written.is_err() {
        let _not_there = std::fs::remove_file(&next);
    }
    written
}

/// Completes the names of commands and stores, and shows hints for the arguments that follow.
struct Assistant {
    pool: Pool,
}

impl Assistant {
    fn candidates(&self, before: &[&str]) -> Vec<String> {
        let names = || ALL.iter().map(|known| known.name.to_owned());
        match before.first().map(|word| word.to_ascii_lowercase()).as_deref() {
            None => names().chain(LEAVE.map(str::to_owned)).collect(),
            Some(_) if before.len() > 1 => Vec::new(),
            Some("help") => names().collect(),
            Some("trace" | "time") => vec!["on".into(), "off".into()],
            // If the node does not respond, nothing is completed.
            Some("use") => {
                self.pool.stores().unwrap_or_default().into_iter().map(|store| store.name).collect()
            }
            Some(_) => Vec::new(),
        }
    }
}

impl Completer for Assistant {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let (before, word) = split_last(&line[..at]);
        let mut candidates = self.candidates(&before);
        candidates.retain(|candidate| {
            candidate.starts_with(&word.to_ascii_lowercase()) || candidate.starts_with(word)
        });
        Ok((at - word.len(), candidates.into_iter().map(|candidate| candidate + " ").collect()))
    }
}

/// Splits a line into the finished words and the unfinished last word.
fn split_last(line: &str) -> (Vec<&str>, &str) {
    let start = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    (line[..start].split_whitespace().collect(), &line[start..])
}

impl Hinter for Assistant {
    type Hint = String;

    fn hint(&self, line: &str, at: usize, _: &Context<'_>) -> Option<String> {
        if at < line.len() || !line.ends_with(' ') {
            return None;
        }
        let words = words::split(line.as_bytes()).ok()?;
        let known = command::find(words.first()?).ok()?;
        let left: Vec<&str> = known.usage.split_whitespace().skip(words.len() - 1).collect();
        (!left.is_empty()).then(|| left.join(" "))
    }
}

impl Highlighter for Assistant {
    fn highlight_hint<'h>(&self, hint: &'h str) -> Cow<'h, str> {
        Cow::Owned(format!("\x1b[2m{hint}\x1b[0m"))
    }
}

impl Validator for Assistant {}
impl Helper for Assistant {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_with_a_value_is_saved() {
        for kept in ["get k", "GET k", "del \"a b\"", "scan a 7", "use s", "help", "trace on"] {
            assert!(may_be_saved(kept), "{kept}");
        }
        for not in [
            "put k secret",
            "PUT k secret",
            "put-if-absent k secret",
            "cas k 7 secret",
            " get k",
            "get k secret",
            "secret",
            "pit k secret",
            "put k \"secret",
            "get k\nput k secret",
            "# secret",
            "",
        ] {
            assert!(!may_be_saved(not), "{not}");
        }
    }

    #[test]
    fn only_the_owner_may_read_the_history() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state/farside/history");
        for line in ["get a", "get b"] {
            append(&path, line).expect("it is writable");
        }
        assert_eq!(std::fs::read_to_string(&path).expect("text"), "get a\nget b\n");
        replace(&path, "get b\n").expect("it is writable");
        assert_eq!(std::fs::read_to_string(&path).expect("text"), "get b\n");
        let mode = |path: &Path| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().expect("a folder"))), (0o600, 0o700));
    }
}
