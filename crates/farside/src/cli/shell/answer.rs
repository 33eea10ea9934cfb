//! Prints the shell's results: quoted for terminals, raw for pipes, as JSON for programs.
//!
//! Invariant: on a terminal, keys and values are quoted and escaped, so that they cannot control the terminal. With
//! `--raw` and in pipes they are printed unchanged; with `--json`, each result is one JSON object a line.

use super::words::quoted;
use crate::cli::{Done, jsonl, tsv, written};
use serde_json::{Map, Value};
use std::io::{self, Write};

/// Format in which the shell prints results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Values in quotes, with escapes.
    Quoted,
    /// Values byte for byte, each followed by a line feed.
    Raw,
    /// One JSON object a line.
    Json,
}

/// Prints results to standard output.
pub(super) struct Printer {
    pub(super) format: Format,
    /// Line number of the command in a script; `None` if the commands do not come from a script.
    pub(super) line: Option<u64>,
}

impl Printer {
    /// Prints `ok`.
    pub(super) fn ok(&self) -> Done {
        self.result("ok", &[("ok", true.into())])
    }

    /// Prints `words`; in the JSON format, an object with `fields` instead.
    pub(super) fn result(&self, words: &str, fields: &[(&str, Value)]) -> Done {
        if self.format != Format::Json {
            return self.line(words.as_bytes());
        }
        let mut object = Map::new();
        for (name, value) in fields {
            object.insert((*name).to_owned(), value.clone());
        }
        self.object(object)
    }

    /// Prints the value of a key, and its version if given.
    pub(super) fn value(&self, key: &[u8], value: &[u8], version: Option<u32>) -> Done {
        match self.format {
            Format::Json => {
                let mut object = Map::new();
                object.insert("found".into(), true.into());
                jsonl::insert(&mut object, "key", key);
                jsonl::insert(&mut object, "value", value);
                if let Some(version) = version {
                    object.insert("version".into(), version.into());
                }
                self.object(object)
            }
            Format::Quoted => {
                let before = version.map_or(String::new(), |version| format!("(version {version}) "));
                self.line(format!("{before}{}", quoted(value)).as_bytes())
            }
            Format::Raw => {
                let before = version.map_or(String::new(), |version| format!("{version}\t"));
                self.line(&[before.as_bytes(), value].concat())
            }
        }
    }

    /// Reports that a key is absent. Scripts get a line for this too, so that every command prints a line.
    pub(super) fn absent(&self, key: &[u8], is_alone: bool) -> Done {
        match self.format {
            Format::Json => {
                let mut object = Map::new();
                object.insert("found".into(), false.into());
                jsonl::insert(&mut object, "key", key);
                self.object(object)
            }
            _ if is_alone => Ok(()), // The exit code and a line on standard error report it.
            Format::Quoted => self.line(b"(absent)"),
            Format::Raw => self.line(b""),
        }
    }

    /// Prints a key of a listing, and its value if `value` is given. `number` is its position in the listing.
    pub(super) fn item(&self, number: u64, key: &[u8], value: Option<&[u8]>) -> Done {
        match (self.format, value) {
            (Format::Json, value) => {
                let mut object = Map::new();
                jsonl::insert(&mut object, "key", key);
                if let Some(value) = value {
                    jsonl::insert(&mut object, "value", value);
                }
                self.object(object)
            }
            (Format::Quoted, None) => self.line(format!("{number}) {}", quoted(key)).as_bytes()),
            (Format::Quoted, Some(value)) => {
                self.line(format!("{number}) {} = {}", quoted(key), quoted(value)).as_bytes())
            }
            (Format::Raw, None) => self.line(key),
            (Format::Raw, Some(value)) => written(tsv::write_line(&mut io::stdout().lock(), key, value)),
        }
    }

    /// Prints the end of a listing of `count` keys. `more`: the store may hold further keys.
    pub(super) fn listed(&self, count: u64, more: bool) -> Done {
        match self.format {
            Format::Json => self.result("", &[("count", count.into()), ("more", more.into())]),
            Format::Quoted if count == 0 => self.line(b"(none)"),
            _ => {
                if more {
                    note!("farside: there may be more keys: give a greater COUNT, or a longer PREFIX");
                }
                Ok(())
            }
        }
    }

    fn object(&self, mut object: Map<String, Value>) -> Done {
        if let Some(line) = self.line {
            object.insert("line".into(), line.into());
        }
        self.line(Value::Object(object).to_string().as_bytes())
    }

    fn line(&self, bytes: &[u8]) -> Done {
        let mut out = io::stdout().lock();
        written(out.write_all(bytes).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
    }
}
