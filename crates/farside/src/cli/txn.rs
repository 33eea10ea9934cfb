//! `txn`: runs transactions on a transactional store: on one key, or as a script says.
//!
//! A script has one operation a line. Its words are those of the shell: see [`super::shell::words`].
//!
//! ```text
//! get KEY            prints the value
//! put KEY VALUE      stores the value
//! del KEY            deletes the key
//! add KEY NUMBER     adds to the number that the key has as its value, which is 0 if it has none
//! expect KEY VALUE   changes nothing unless the key has this value
//! expect KEY         changes nothing unless the key has no value
//! ```
//!
//! Invariant: output is printed once the transaction has committed.

use super::kv::{not_opened, present, value_of};
use super::shell::words::{quoted, split};
use super::{Done, Failure, StoreTarget, jsonl, written};
use clap::builder::RangedU64ValueParser;
use farside::txn::Transaction;
use farside::{Error, Pool, Ran, Txn as Client, TxnError};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Run transactions: on one key, or on several as a file says
#[derive(clap::Args)]
#[command(
    after_help = "If other transactions are in the way, the transaction is tried again. Exit codes: 0: committed. 1: \
the key is absent, or an 'expect' does not hold; nothing was changed. 2: any other failure; nothing was changed. 3: \
the transaction may or may not have been committed, or it was committed and its output could not be written."
)]
pub(super) struct Txn {
    #[command(flatten)]
    target: StoreTarget,
    /// Number of attempts, if other transactions are in the way [default: as many as begin within 2 seconds and 6
    /// leases]
    #[arg(long, value_name = "N", global = true)]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(1..))]
    attempts: Option<u32>,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Write the raw value of a key to standard output
    Get {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Set the value of a key
    Put {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
        /// The value: the text itself, '@FILE' for the bytes of a file, or '-' for those of standard input [default:
        /// standard input]
        #[arg(allow_negative_numbers = true)]
        value: Option<OsString>,
    },
    /// Delete a key
    Del {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Run the operations of a file as one transaction
    ///
    /// One operation a line: 'get KEY', 'put KEY VALUE', 'del KEY', 'add KEY NUMBER', which adds to the number that the
    /// key has as its value, or 'expect KEY VALUE' and 'expect KEY': unless the key has this value, or none, nothing is
    /// changed. Quote words as in 'farside shell'. A line that begins with '#' is a comment.
    Run {
        /// The file, or '-' for standard input
        file: OsString,
        /// Print one JSON object: whether the transaction was committed, and the values that it has read and the number
        /// of attempts, or the reason
        #[arg(long)]
        json: bool,
    },
}

impl Txn {
    pub(super) fn run(self) -> Done {
        let Txn { target, attempts, action } = self;
        // An invalid script is an error before the client connects.
        let script = match &action {
            Action::Run { file, .. } => Some(parsed(&script_of(file)?).map_err(Failure::Error)?),
            _ => None,
        };
        let value = match &action {
            Action::Put { value, .. } => Some(value_of(value.clone())?),
            _ => None,
        };
        let (pool, store) = target.connect()?;
        let mut client = open(&pool, &store)?;
        match action {
            Action::Get { key } => {
                let read = client.run_within(attempts, |transaction| transaction.get(key.as_bytes()));
                let (value, _) = read.map_err(failed)?;
                let mut out = io::stdout().lock();
                written(out.write_all(&value.ok_or(Failure::Absent)?).and_then(|()| out.flush()))
            }
            Action::Put { key, .. } => {
                let value = value.unwrap_or_default();
                let put = client.run_within(attempts, |transaction| transaction.put(key.as_bytes(), &value));
                put.map(drop).map_err(failed)
            }
            Action::Del { key } => {
                let deleted = client.run_within(attempts, |transaction| {
                    let had_value = transaction.get_to_write(key.as_bytes())?.is_some();
                    transaction.delete(key.as_bytes())?;
                    Ok(had_value)
                });
                present(deleted.map_err(failed)?.0)
            }
            Action::Run { json, .. } => run(&mut client, attempts, &script.unwrap_or_default(), json),
        }
    }
}

/// An operation of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Operation {
    Get(Vec<u8>),
    Put(Vec<u8>, Vec<u8>),
    Delete(Vec<u8>),
    Add(Vec<u8>, i64),
    Expect(Vec<u8>, Option<Vec<u8>>),
}

/// A key that was read, and its value. Numbers that were added to are here with their sums.
type Read = (Vec<u8>, Option<Vec<u8>>);

/// Parses a script.
///
/// # Errors
/// The number of the first line that is no operation, what is wrong with it, and the remedy.
fn parsed(text: &[u8]) -> Result<Vec<Operation>, String> {
    let mut operations = Vec::new();
    for (number, line) in (1u64..).zip(text.split(|&byte| byte == b'\n')) {
        let words = split(line).map_err(|reason| format!("line {number}: {reason}"))?;
        let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
        operations.push(match words[..] {
            [] => continue,
            [b"get", key] => Operation::Get(key.to_vec()),
            [b"put", key, value] => Operation::Put(key.to_vec(), value.to_vec()),
            [b"del", key] => Operation::Delete(key.to_vec()),
            [b"add", key, summand] => {
                let summand = integer(summand).ok_or_else(|| {
                    format!("line {number}: {} is not a number: give one such as 7 or -7", quoted(summand))
                })?;
                Operation::Add(key.to_vec(), summand)
            }
            [b"expect", key] => Operation::Expect(key.to_vec(), None),
            [b"expect", key, value] => Operation::Expect(key.to_vec(), Some(value.to_vec())),
            [first, ..] => {
                return Err(format!(
                    "line {number}: this is no operation, or has too few or too many words: {}: write get KEY, put KEY \
                     VALUE, del KEY, add KEY NUMBER, expect KEY VALUE or expect KEY, with quotes around words that \
                     have blanks",
                    quoted(first)
                ));
            }
        });
    }
    Ok(operations)
}

/// Returns the bytes of a script.
fn script_of(file: &OsStr) -> Result<Vec<u8>, Failure> {
    match file.as_bytes() {
        b"-" => value_of(None),
        path => value_of(Some(OsString::from_vec([b"@", path].concat()))),
    }
}

fn integer(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Runs a script and prints what it has read.
fn run(client: &mut Client, attempts: Option<u32>, script: &[Operation], json: bool) -> Done {
    // The outer error is that of the transaction. With the inner one, nothing is committed.
    let mut refused = None;
    let done = client.run_within(attempts, |transaction| {
        refused = None;
        let carried = carry_out(transaction, script)?;
        carried.map_err(|failure| {
            refused = Some(failure);
            Error::Txn(TxnError::Doomed)
        })
    });
    let mut out = io::BufWriter::new(io::stdout().lock());
    if let Some(refused) = refused {
        if json && let Failure::NotGood(reason) | Failure::Error(reason) = &refused {
            let told = json!({ "committed": false, "reason": reason });
            written(writeln!(out, "{told}").and_then(|()| out.flush()))?;
        }
        return Err(refused);
    }
    let (reads, attempts) = done.map_err(failed)?;
    let mut print = || {
        if json {
            let reads: Vec<Value> = reads.iter().map(|(key, value)| object(key, value.as_deref())).collect();
            writeln!(out, "{}", json!({ "committed": true, "attempts": attempts, "reads": reads }))?;
        } else {
            for (key, value) in &reads {
                let value = value.as_ref().map_or("absent".to_owned(), |value| quoted(value));
                writeln!(out, "{} {value}", quoted(key))?;
            }
        }
        out.flush()
    };
    written(print()).map_err(|failure| match failure {
        Failure::Error(reason) => {
            Failure::Unknown(format!("the transaction was committed, and what it has read is lost: {reason}"))
        }
        closed => closed,
    })
}

/// A read as a JSON object. `value` is null if the key has none.
fn object(key: &[u8], value: Option<&[u8]>) -> Value {
    let mut object = Map::new();
    jsonl::insert(&mut object, "key", key);
    match value {
        Some(value) => jsonl::insert(&mut object, "value", value),
        None => drop(object.insert("value".to_owned(), Value::Null)),
    }
    Value::Object(object)
}

/// Carries out the operations of a script. With the inner error, the transaction must not commit.
fn carry_out(
    transaction: &mut Transaction<'_>,
    script: &[Operation],
) -> Result<Result<Vec<Read>, Failure>, Error> {
    let written: BTreeSet<&[u8]> = script.iter().filter_map(Operation::written_key).collect();
    let read_keys = script.iter().filter_map(Operation::read_key);
    let (to_write, to_read): (Vec<&[u8]>, Vec<&[u8]>) = read_keys.partition(|key| written.contains(key));
    transaction.fetch_to_write(&to_write, &to_read)?;
    let mut reads = Vec::new();
    for operation in script {
        match operation {
            Operation::Get(key) => {
                let value = transaction.get(key)?;
                reads.push((key.clone(), value));
            }
            Operation::Put(key, value) => transaction.put(key, value)?,
            Operation::Delete(key) => transaction.delete(key)?,
            Operation::Add(key, summand) => {
                let before = transaction.get(key)?;
                let Some(before) = before.map_or(Some(0), |before| integer(&before)) else {
                    return Ok(Err(Failure::Error(format!(
                        "the value of {} is not a number to which {summand} can be added, and nothing was changed: put \
                         a number there first",
                        quoted(key)
                    ))));
                };
                let Some(sum) = before.checked_add(*summand) else {
                    return Ok(Err(Failure::Error(format!(
                        "{before}, the value of {}, and {summand} have no sum of 64 bits, and nothing was changed: add \
                         less",
                        quoted(key)
                    ))));
                };
                let sum = sum.to_string().into_bytes();
                transaction.put(key, &sum)?;
                reads.push((key.clone(), Some(sum)));
            }
            Operation::Expect(key, expected) => {
                let value = transaction.get(key)?;
                if value != *expected {
                    let found = value.map_or("no value".to_owned(), |value| quoted(&value));
                    let key = quoted(key);
                    return Ok(Err(Failure::NotGood(format!("{key} has {found}, and nothing was changed"))));
                }
            }
        }
    }
    Ok(Ok(reads))
}

impl Operation {
    /// The key that the operation reads, if it reads one.
    fn read_key(&self) -> Option<&[u8]> {
        match self {
            Operation::Get(key) | Operation::Add(key, _) | Operation::Expect(key, _) => Some(key),
            Operation::Put(..) | Operation::Delete(_) => None,
        }
    }

    /// The key that the operation writes, if it writes one.
    fn written_key(&self) -> Option<&[u8]> {
        match self {
            Operation::Put(key, _) | Operation::Delete(key) | Operation::Add(key, _) => Some(key),
            Operation::Get(_) | Operation::Expect(..) => None,
        }
    }
}

fn open(pool: &Pool, store: &str) -> Result<Client, Failure> {
    Client::open(pool, store).map_err(|error| match error {
        Error::Kv(error) => not_opened(pool, store, error),
        error => error.into(),
    })
}

/// Returns the failure of a transaction. An unknown outcome has its own exit code.
fn failed(error: Error) -> Failure {
    match error.ran() {
        Ran::No => error.into(),
        Ran::Yes | Ran::Unknown => Failure::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_has_one_operation_a_line() {
        let text = b"# a transfer\nget 'a b'\n\n  add alice -10\nadd bob 10\n\
                     put k \"v\\n\"\ndel old\nexpect k\nexpect l 1";
        let bytes = |text: &str| text.as_bytes().to_vec();
        let expected = vec![
            Operation::Get(bytes("a b")),
            Operation::Add(bytes("alice"), -10),
            Operation::Add(bytes("bob"), 10),
            Operation::Put(bytes("k"), bytes("v\n")),
            Operation::Delete(bytes("old")),
            Operation::Expect(bytes("k"), None),
            Operation::Expect(bytes("l"), Some(bytes("1"))),
        ];
        assert_eq!(parsed(text), Ok(expected));
        for wrong in
            ["get", "get a b", "put a", "add a x", "add a 1e3", "frob", "get 'a", "expect", "del a b"]
        {
            let refused = parsed(format!("get a\n{wrong}").as_bytes()).expect_err(wrong);
            assert!(refused.starts_with("line 2: "), "{refused}");
        }
    }
}
