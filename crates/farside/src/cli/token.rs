//! `token`: creates tokens, which grant clients rights to stores.
//!
//! A token's secret is printed only once, for the client. The file of `serve --tokens` holds only the secret's hash.

use super::{Done, Failure};
use farside::config::read_private;
use farside_fabrics::session::TOKEN_BYTES_MAX;
use farside_node::access::{self, EVERY_STORE, Fingerprint, Grant, Tokens};
use farside_remote::Rights;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Create tokens, which grant clients rights to stores.
#[derive(clap::Args)]
pub(super) struct Token {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Generate a secret; print it, and the entry for the file of 'farside serve --tokens'
    New {
        /// Name of the token in logs: 1 to 64 letters, digits, '-', '_' or '.'
        #[arg(long)]
        name: String,
        /// Rights to a store: read, write, atomic and allocate, separated by commas, or all. The store '*' stands for
        /// every store that is not named. May be given several times
        #[arg(long, value_name = "STORE=RIGHTS", value_parser = grant)]
        store: Vec<(String, Grant)>,
        /// Allow it to create, drop and list all stores
        #[arg(long)]
        admin: bool,
        /// Write the secret to this new file, which no other user may read, and print only the entry
        #[arg(long, value_name = "PATH")]
        secret_file: Option<PathBuf>,
    },
}

impl Token {
    pub(super) fn run(self) -> Done {
        let Action::New { name, store, admin, secret_file } = self.action;
        if store.is_empty() && !admin {
            return Err(Failure::Error(
                "the token would have no rights: give --store STORE=RIGHTS, such as default=all, or --admin"
                    .into(),
            ));
        }
        let secret = secret();
        let sha256 = Fingerprint::of(secret.as_bytes());
        let tokens = Tokens {
            token: vec![access::Token { name, sha256, admin, stores: store.into_iter().collect() }],
        };
        tokens.check().map_err(Failure::Error)?;
        let entry = toml::to_string(&tokens)?;
        match secret_file {
            Some(path) => write_new(&path, &secret).map_err(Failure::Error)?,
            None => {
                print_line!(
                    "The secret, for the file that a client names with --token-file; it is printed only once:"
                );
                print_line!("{secret}");
                print_line!("\nThe entry, for the file of 'farside serve --tokens':");
            }
        }
        print_line!("{entry}"); // Followed by an empty line, which separates it from the next entry of the file.
        Ok(())
    }
}

/// Generates a secret: 256 random bits, with a prefix by which scanners for leaked secrets recognise it.
fn secret() -> String {
    let words: [u64; 4] = std::array::from_fn(|_| {
        getrandom::u64().expect("the system has random bytes, without which a secret could be guessed")
    });
    words.iter().fold("farside_".to_owned(), |secret, word| secret + &format!("{word:016x}"))
}

const _: () = assert!(TOKEN_BYTES_MAX >= "farside_".len() + 64);

fn write_new(path: &Path, secret: &str) -> Result<(), String> {
    let file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{secret}"));
    written.map_err(|error| format!("could not write {}: {error}; name another new file", path.display()))
}

/// Parses, for clap, the name of a store and the rights to it, such as `default=read,write`.
fn grant(text: &str) -> Result<(String, Grant), String> {
    let (store, words) = text.split_once('=').ok_or_else(|| {
        format!("'{text}' names no rights: write it like default=read,write or default=all")
    })?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if store != EVERY_STORE && (store.is_empty() || store.len() > 64 || !store.chars().all(is_name)) {
        return Err(format!(
            "'{store}' is not a name of a store: use 1 to 64 letters, digits, '-', '_' or '.', or '*'"
        ));
    }
    let rights: Result<Rights, String> = words.split(',').map(|word| Ok(Grant::parse(word)?.0)).collect();
    Ok((store.to_owned(), Grant(rights?)))
}

/// Reads the file of `serve --tokens`.
///
/// # Errors
/// The file cannot be read, other users can read it, or it is malformed. The message has the position of the mistake,
/// and never the content of the file.
pub(super) fn read(path: &Path) -> Result<Tokens, String> {
    let text = read_private(path)?;
    let wrong = |reason: &str, at: String| {
        format!(
            "{}{at} is not a file of tokens: {reason}; 'farside token new' prints entries for it",
            path.display()
        )
    };
    let tokens: Tokens = toml::from_str(&text).map_err(|error| {
        let at = error.span().map_or_else(String::new, |span| place(&text, span.start));
        wrong(error.message(), at)
    })?;
    tokens.check().map_err(|reason| wrong(&reason, String::new()))?;
    if tokens.token.is_empty() {
        tracing::warn!("{} has no token, so the engines refuse all clients", path.display());
    }
    Ok(tokens)
}

/// Formats the byte offset `at` in `text` as `:LINE:COLUMN`. Lines and columns are numbered from 1.
fn place(text: &str, at: usize) -> String {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!(":{line}:{column}")
}
