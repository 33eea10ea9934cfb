//! `index`: puts, gets, deletes and scans keys in order, loads and dumps files, and shows the shape of an index.
//!
//! Users name a number as decimal or, after `0x`, hexadecimal digits, and a string as itself. Output, and files of
//! lines and of JSON, have decimal numbers. Binary files have the bytes of a key, which are 8 for a number.

use super::kv::dump::{Dump, Source, Stopped};
use super::kv::load::{Destination, Load, Unstored};
use super::kv::progress::{Identity, Progress};
use super::kv::records::{Format, Pair};
use super::kv::{not_opened, present, value_of};
use super::{Done, Failure, StoreTarget, human_bytes, jsonl, tsv, written};
use farside::index::{Index as Client, Leaves, Shape};
use farside::{Error, Keys, Pool};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;

/// Put, get, delete and scan keys in order; load and dump files.
#[derive(clap::Args)]
pub(super) struct Index {
    #[command(flatten)]
    target: StoreTarget,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Set the value of a key
    Put {
        /// The key: a number, such as 4711 or 0x1267, or a string of 1 to 128 bytes, by the kind of the store's keys
        #[arg(allow_negative_numbers = true)]
        key: OsString,
        /// The value: the text itself, '@FILE' for the bytes of a file, or '-' for those of standard input [default:
        /// standard input]
        #[arg(allow_negative_numbers = true)]
        value: Option<OsString>,
    },
    /// Write the raw value of a key to standard output
    Get {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Delete a key
    Del {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Print keys and their values in the order of the keys, a line KEY<tab>VALUE for each
    Scan(Scan),
    /// Put every record of a file or of standard input
    Load(Load),
    /// Write every key and value, in the order of the keys, in a format that 'load' reads
    Dump(Dump),
    /// Show the shape of the index: its nodes by size, depth, fill, keys and bytes per key. Reads the whole index
    Stat {
        /// Print one JSON object, with this client's counters
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
struct Scan {
    /// Key at which to begin: print this key, if it has a value, and larger ones [default: the smallest key]
    #[arg(long, value_name = "KEY", allow_negative_numbers = true)]
    from: Option<OsString>,
    /// Number of keys to print
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Print a line {"key": "...", "value": "..."} for each key
    #[arg(long)]
    json: bool,
}

impl Index {
    pub(super) fn run(self) -> Done {
        let (pool, store) = self.target.connect()?;
        if let Action::Load(load) = self.action {
            return load.run(|| Putter::open(&pool, &store));
        }
        let mut client = open(&pool, &store)?;
        let keys = client.keys();
        match self.action {
            Action::Put { key, value } => {
                let key = key_of(keys, key.as_bytes())?;
                Ok(client.put(&key, &value_of(value)?)?)
            }
            Action::Get { key } => {
                let value = client.get(&key_of(keys, key.as_bytes())?)?.ok_or(Failure::Absent)?;
                let mut out = io::stdout().lock();
                written(out.write_all(&value).and_then(|()| out.flush()))
            }
            Action::Del { key } => present(client.delete(&key_of(keys, key.as_bytes())?)?),
            Action::Scan(scan) => scan.run(client),
            Action::Dump(dump) => dump.run(&mut InOrder::of(client)),
            Action::Stat { json } => stat(client, json),
            Action::Load(_) => unreachable!("handled above"),
        }
    }
}

impl Scan {
    fn run(self, client: Client) -> Done {
        let keys = client.keys();
        let from = self.from.map(|from| key_of(keys, from.as_bytes())).transpose()?;
        let mut source = InOrder { from: from.unwrap_or_else(|| smallest(keys)), ..InOrder::of(client) };
        let (mut out, mut left) = (BufWriter::new(io::stdout().lock()), self.limit);
        while left > 0 {
            let batch = BATCH.min(usize::try_from(left).unwrap_or(BATCH));
            let Some((key, value)) = source.pair(batch)? else { break };
            let key = shown(keys, &key);
            written(match self.json {
                true => jsonl::write_line(&mut out, &key, &value),
                false => tsv::write_line(&mut out, &key, &value),
            })?;
            left -= 1;
        }
        written(out.flush())
    }
}

/// Prints the shape of an index.
fn stat(mut client: Client, json: bool) -> Done {
    let shape = client.shape()?;
    let (fill, leaf_fill, bytes_per_key) = (shape.fill(), shape.leaf_fill(), shape.bytes_per_key());
    let Shape { nodes, slots, leaves, keys, dead, locked, depth, bytes } = shape;
    if json {
        let nodes: BTreeMap<u64, u64> = nodes.into_iter().collect();
        let counters: BTreeMap<String, u64> =
            client.counters().into_iter().map(|(name, count)| (name.replace(' ', "_"), count)).collect();
        let object = serde_json::json!({
            "keys": keys,
            "depth": depth,
            "nodes": nodes,
            "slots": slots,
            "fill": fill,
            "leaves": leaves.map(|leaves| leaves.count),
            "leaf_entries": leaves.map(|leaves| leaves.entries),
            "leaf_fill": leaf_fill,
            "bytes": bytes,
            "bytes_per_key": bytes_per_key,
            "deleted_leaves": dead,
            "locked_leaves": locked,
            "counters": counters,
        });
        print_line!("{object}");
        return Ok(());
    }
    let per_key = bytes_per_key.map_or(String::new(), |bytes| format!("{bytes:.1} bytes per key"));
    let share = |share: Option<f64>, of: &str| {
        share.map_or(String::new(), |share| format!("{:.1} % of all {of}", 100.0 * share))
    };
    let mut rows = vec![
        ("keys".to_owned(), keys.to_string(), String::new()),
        ("memory".to_owned(), human_bytes(bytes), per_key),
        ("depth".to_owned(), depth.to_string(), "nodes above the deepest key".to_owned()),
        ("nodes".to_owned(), nodes.iter().map(|(_, count)| count).sum::<u64>().to_string(), String::new()),
    ];
    rows.extend(
        nodes.iter().map(|(slots, count)| (format!("  of {slots} slots"), count.to_string(), String::new())),
    );
    rows.extend([("slots in use".to_owned(), slots.to_string(), share(fill, "slots"))]);
    if let Some(Leaves { count, entries }) = leaves {
        rows.extend([
            ("leaves".to_owned(), count.to_string(), format!("of {entries} entries each")),
            ("entries in use".to_owned(), keys.to_string(), share(leaf_fill, "entries")),
        ]);
    }
    rows.extend([
        ("deleted leaves".to_owned(), dead.to_string(), "still in a slot".to_owned()),
        ("locked leaves".to_owned(), locked.to_string(), String::new()),
    ]);
    for (name, amount, more) in rows {
        print_line!("{}", format!("{name:<24}{amount:>12}  {more}").trim_end());
    }
    Ok(())
}

fn open(pool: &Pool, store: &str) -> Result<Client, Failure> {
    Client::open(pool, store).map_err(|error| match error {
        Error::Kv(error) => not_opened(pool, store, error),
        error => error.into(),
    })
}

/// Returns the key that a text means.
///
/// # Errors
/// The store cannot have such a key.
fn key_of(keys: Keys, text: &[u8]) -> Result<Vec<u8>, Failure> {
    let key = parsed(keys, text).map_err(Failure::Error)?;
    keys.check(&key)?;
    Ok(key)
}

/// Returns the key that a text means. The store checks the length of a string.
///
/// # Errors
/// The store's keys are numbers, and this is none.
fn parsed(keys: Keys, text: &[u8]) -> Result<Vec<u8>, String> {
    if keys == Keys::Strings {
        return Ok(text.to_vec());
    }
    let digits = std::str::from_utf8(text).ok().filter(|text| !text.starts_with('+'));
    let number = digits.and_then(|text| match text.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None => text.parse().ok(),
    });
    number.map(|number: u64| number.to_be_bytes().to_vec()).ok_or_else(|| {
        format!(
            "'{}' is not a key of this store, whose keys are numbers: give 0 to {}, or 0x0 to {:#x}",
            String::from_utf8_lossy(text),
            u64::MAX,
            u64::MAX
        )
    })
}

/// Returns the text that means a key.
fn shown(keys: Keys, key: &[u8]) -> Vec<u8> {
    match (keys, key.try_into().map(u64::from_be_bytes)) {
        (Keys::Numbers, Ok(number)) => number.to_string().into_bytes(),
        _ => key.to_vec(),
    }
}

/// The smallest key.
fn smallest(keys: Keys) -> Vec<u8> {
    match keys {
        Keys::Numbers => vec![0; 8],
        Keys::Strings => vec![1],
    }
}

/// Number of keys that one scan reads.
const BATCH: usize = 1000;

/// The keys of an index, in order.
struct InOrder {
    client: Client,
    /// Key at which the next scan begins.
    from: Vec<u8>,
    /// Whether `from` was visited.
    is_visited: bool,
    /// Keys that were read and not visited.
    ahead: VecDeque<Pair>,
    is_complete: bool,
    count: u64,
}

impl InOrder {
    fn of(client: Client) -> InOrder {
        let from = smallest(client.keys());
        InOrder { client, from, is_visited: false, ahead: VecDeque::new(), is_complete: false, count: 0 }
    }

    /// Returns the next key with its value; `None` at the end. `batch` is the number of keys to read, if none was read
    /// ahead.
    fn pair(&mut self, batch: usize) -> Result<Option<Pair>, Error> {
        if self.ahead.is_empty() && !self.is_complete {
            let limit = batch + usize::from(self.is_visited);
            let found = self.client.scan(&self.from, limit)?;
            self.is_complete = found.len() < limit;
            self.ahead = found.into();
            if self.is_visited && self.ahead.front().is_some_and(|(key, _)| *key == self.from) {
                self.ahead.pop_front();
            }
        }
        let Some(pair) = self.ahead.pop_front() else {
            // The key at which the scan began was the last one, or was deleted and nothing follows.
            return if self.is_complete { Ok(None) } else { self.pair(batch) };
        };
        pair.0.clone_into(&mut self.from);
        self.is_visited = true;
        self.count += 1;
        Ok(Some(pair))
    }
}

impl Source for InOrder {
    fn identity(&mut self) -> Identity {
        Identity::of(self.client.store())
    }

    fn length(&mut self) -> (&'static str, u64) {
        // Nobody counts the keys of an index.
        ("dumping keys", 0)
    }

    fn begin(&mut self, before: Option<&Progress>) -> Result<(), Stopped> {
        if let Some(last) = before.and_then(|before| before.after.clone()) {
            (self.from, self.is_visited) = (last, true);
        }
        Ok(())
    }

    fn next(&mut self, format: Format, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<bool, Stopped> {
        let pair = self.pair(BATCH).map_err(|error| Stopped::Failed(error.to_string()))?;
        let Some((key, value)) = pair else { return Ok(false) };
        match format {
            Format::Binary => visit(&key, &value),
            Format::Tsv | Format::Jsonl => visit(&shown(self.client.keys(), &key), &value),
        }
        Ok(true)
    }

    fn record(&self, progress: &mut Progress) {
        progress.after = self.is_visited.then(|| self.from.clone());
    }

    fn done(&self) -> u64 {
        self.count
    }
}

/// Puts windows into an index.
struct Putter {
    client: Client,
    identity: Identity,
}

impl Putter {
    fn open(pool: &Pool, store: &str) -> Result<Putter, Failure> {
        let client = open(pool, store)?;
        let identity = Identity::of(client.store());
        Ok(Putter { client, identity })
    }
}

impl Destination for Putter {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn key(&self, format: Format, named: Vec<u8>) -> Result<Vec<u8>, String> {
        match format {
            Format::Binary => Ok(named),
            Format::Tsv | Format::Jsonl => parsed(self.client.keys(), &named),
        }
    }

    fn put_all(&mut self, pairs: &[Pair]) -> Result<(), Unstored> {
        if self.client.put_all(pairs).is_ok() {
            return Ok(());
        }
        // The lease may have expired meanwhile. To put a record again has no further effect.
        for (index, (key, value)) in pairs.iter().enumerate() {
            self.client.put(key, value).map_err(|error| Unstored {
                before: index as u64,
                unsure: (pairs.len() - index - 1) as u64,
                reason: error.to_string(),
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_shown_as_it_is_given() {
        for (text, number) in [("0", 0), ("0x1F", 31), ("0xff", 255), ("18446744073709551615", u64::MAX)] {
            let key = parsed(Keys::Numbers, text.as_bytes()).expect("a number");
            assert_eq!(key, u64::to_be_bytes(number));
            assert_eq!(shown(Keys::Numbers, &key), number.to_string().into_bytes());
        }
        for wrong in ["", "-1", "+1", "0x", "0x+1", "1e3", " 1", "18446744073709551616", "ключ"] {
            let refused = parsed(Keys::Numbers, wrong.as_bytes()).expect_err(wrong);
            assert!(refused.contains("give 0 to 18446744073709551615"), "{refused}");
        }
        assert_eq!(parsed(Keys::Strings, b"0x1f"), Ok(b"0x1f".to_vec()));
        assert_eq!(shown(Keys::Strings, b"8 bytes!"), b"8 bytes!");
    }
}
