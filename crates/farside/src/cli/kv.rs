//! `kv`: puts, gets and deletes keys, loads and dumps files, and shows statistics of a store.
//!
//! - `load`, `dump`: copy a file into a store, and a store into a file. The command `index` uses them, too.
//! - `records`: reads and writes the records of such a file.
//! - `binary`: encodes the binary file format.
//! - `progress`: records the progress of a load or a dump, so that it can be resumed.
//! - `watch`, `view`: sample statistics for `stat --watch`, and display them.

mod binary;
pub(super) mod dump;
pub(super) mod load;
pub(super) mod progress;
pub(super) mod records;
mod view;
mod watch;

use super::store::table_of;
use super::{Done, Failure, StoreTarget, human_bytes, written};
use dump::Slots;
use farside::local::Client;
use farside::parts::AnyKv;
use farside::{KvError, StoreStat};
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::trace::Trace;
use farside_systems::kv::Kv as _;
use farside_systems::registry::shape_of;
use farside_systems::store::StoreError;
use farside_systems::system::Options;
use load::Putter;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, makedev};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// Put, get and delete keys; load and dump files.
#[derive(clap::Args)]
pub(super) struct Kv {
    #[command(flatten)]
    target: StoreTarget,
    /// Print to standard error the requests that 'put', 'get' and 'del' send to the node
    #[arg(long, global = true)]
    trace: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Set the value of a key
    Put {
        /// The key: 1 to 4096 bytes
        #[arg(allow_negative_numbers = true)]
        key: OsString,
        /// The value, up to 16 MiB: the text itself, '@FILE' for the bytes of a file, or '-' for those of standard
        /// input [default: standard input]
        #[arg(allow_negative_numbers = true)]
        value: Option<OsString>,
    },
    /// Write the raw value of a key to standard output
    Get {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Exit with 0 if a key has a value, and with 1 if not; print nothing
    Contains {
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
    /// Put every record of a file or of standard input
    Load(load::Load),
    /// Write every key and value in a format that 'load' reads
    Dump(dump::Dump),
    /// Show how the store's memory is used, once or repeatedly
    Stat(Stat),
}

#[derive(clap::Args)]
struct Stat {
    /// Print one JSON object, or one for each sample of --watch
    #[arg(long)]
    json: bool,
    /// Sample the node at this interval (1s if no TIME is given), and show rates, memory, and the latency of a small
    /// probe; 'q' quits
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = watch::interval)]
    watch: Option<Duration>,
    /// Stop --watch after N samples
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

impl Kv {
    pub(super) fn run(self) -> Done {
        if self.trace && matches!(self.action, Action::Load(_) | Action::Dump(_) | Action::Stat(_)) {
            return Err(Failure::Error(
                "--trace works with put, get, contains and del only: leave it out here".into(),
            ));
        }
        let (pool, store) = self.target.connect()?;
        if let Action::Stat(Stat { json, watch, count }) = self.action {
            return match watch {
                None => stat(&pool, &store, json),
                Some(every) => watch::run(pool, store, every, count, json),
            };
        }
        if self.trace {
            return traced(&pool, &store, self.action);
        }
        if let Action::Load(load) = self.action {
            return load.run(|| Putter::open(&pool, &store));
        }
        let mut client = Client::open(&pool, &store).map_err(|error| match error {
            farside::Error::Kv(error) => not_opened(&pool, &store, error),
            error => error.into(),
        })?;
        match self.action {
            Action::Put { key, value } => Ok(client.put(key.as_bytes(), &value_of(value)?)?),
            Action::Get { key } => {
                let item = client.get(key.as_bytes())?.ok_or(Failure::Absent)?;
                let mut out = io::stdout().lock();
                written(out.write_all(item.value).and_then(|()| out.flush()))
            }
            Action::Contains { key } => present(client.contains(key.as_bytes())?),
            Action::Del { key } => present(client.delete(key.as_bytes())?),
            Action::Dump(dump) => dump.run(&mut Slots::of(&mut client)),
            Action::Load(_) | Action::Stat(_) => unreachable!("handled above"),
        }
    }
}

/// # Errors
/// The key has, or had, no value.
pub(super) fn present(has_value: bool) -> Done {
    if has_value { Ok(()) } else { Err(Failure::Absent) }
}

/// Runs `put`, `get`, `contains` or `del` through a layer that prints each request and its reply.
fn traced(pool: &farside::Pool, store: &str, action: Action) -> Done {
    let endpoint = Rc::new(pool.endpoint_over_all()?);
    let fabric = Rc::new(Trace::new(Rc::clone(&endpoint), |text: &str| note!("{text}")));
    let mut kv = block_on(&endpoint, AnyKv::open(fabric, endpoint.nodes(), store, &Options::default()))
        .map_err(|error| not_opened(pool, store, error))?;
    match action {
        Action::Put { key, value } => {
            let value = value_of(value)?;
            Ok(block_on(&endpoint, kv.put(key.as_bytes(), &value))?)
        }
        Action::Get { key } => {
            let item = block_on(&endpoint, kv.get(key.as_bytes()))?.ok_or(Failure::Absent)?;
            let mut out = io::stdout().lock();
            written(out.write_all(item.value).and_then(|()| out.flush()))
        }
        Action::Contains { key } => present(block_on(&endpoint, kv.contains(key.as_bytes()))?),
        Action::Del { key } => present(block_on(&endpoint, kv.delete(key.as_bytes()))?),
        Action::Load(_) | Action::Dump(_) | Action::Stat(_) => unreachable!("refused above"),
    }
}

/// Explains why a store could not be opened. If no store has that name, the message does not say that the store is
/// gone, because the store may never have existed.
pub(super) fn not_opened(pool: &farside::Pool, store: &str, error: impl Into<KvError>) -> Failure {
    let reason = match error.into() {
        KvError::Store(StoreError::Gone(reason)) => reason,
        other => return other.into(),
    };
    match pool.stores() {
        Ok(stores) if !stores.is_empty() && stores.iter().all(|other| other.name != store) => {
            let names: Vec<&str> = stores.iter().map(|store| store.name.as_str()).collect();
            Failure::Error(format!(
                "there is no store '{store}'; the node has: {}; create it with 'farside store create {store}', or \
                 name another with --store",
                names.join(", ")
            ))
        }
        _ => Failure::Error(reason),
    }
}

/// Returns the value that an argument of `put` stands for: the text itself, or the content of a file or of standard
/// input.
pub(super) fn value_of(argument: Option<OsString>) -> Result<Vec<u8>, Failure> {
    let Some(argument) = argument.filter(|argument| argument != "-") else {
        if is_closed(io::stdin().as_fd()) {
            return Err(Failure::Error(
                "standard input is closed: redirect it, or give the value as an argument ('' for an empty one)".into(),
            ));
        }
        return read_value(io::stdin().lock(), Path::new("standard input"));
    };
    match argument.as_bytes().strip_prefix(b"@") {
        None => Ok(argument.into_vec()),
        Some(b"") => Err(Failure::Error(
            "'@' names no file: write @FILE, or pass a value that begins with '@' through standard input"
                .into(),
        )),
        Some(path) => {
            let path = Path::new(OsStr::from_bytes(path));
            read_value(File::open(path).map_err(|error| cannot_read(path, &error))?, path)
        }
    }
}

/// Whether this process was started with standard input closed. Rust then opens the null device instead, for reading
/// and writing. A shell's `</dev/null` opens that device only for reading.
pub(super) fn is_closed(input: BorrowedFd<'_>) -> bool {
    let is_null = fstat(input).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == makedev(1, 3)
    });
    is_null && fcntl_getfl(input).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR)
}

fn read_value(input: impl Read, name: &Path) -> Result<Vec<u8>, Failure> {
    let mut value = Vec::new();
    // One byte more than the limit shows that the value is too large.
    let read = input.take(farside::VALUE_MAX as u64 + 1).read_to_end(&mut value);
    read.map_err(|error| cannot_read(name, &error))?;
    if value.len() > farside::VALUE_MAX {
        return Err(Failure::Error(format!(
            "{} is larger than {}, the largest possible value: split it",
            name.display(),
            human_bytes(farside::VALUE_MAX as u64)
        )));
    }
    Ok(value)
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    Failure::Error(format!(
        "could not read {}: {error}; name a file that you may read, or '-' for standard input",
        path.display()
    ))
}

/// Prints how a store's memory is used.
pub(super) fn stat(pool: &farside::Pool, store: &str, json: bool) -> Done {
    let known = pool.stores()?.into_iter().find(|known| known.name == store);
    let members = match known.as_ref().and_then(|store| store.membership.as_ref()) {
        None => Vec::new(),
        Some(_) => pool.members(store)?,
    };
    let members: Vec<(String, StoreStat)> = members
        .iter()
        .map(|member| Ok((member.url().to_owned(), member.stat(store)?)))
        .collect::<Result<_, farside::Error>>()?;
    let stat = if members.is_empty() {
        pool.stat(store)?
    } else {
        let mut sum = StoreStat::default();
        members.iter().for_each(|(_, stat)| sum.add(stat));
        sum
    };
    if json {
        let mut stat = serde_json::to_value(&stat)?;
        stat["epoch"] = known.and_then(|store| shape_of(&store)).map(|table| table.epoch).into();
        if !members.is_empty() {
            let of_member = |(url, stat): &(String, StoreStat)| {
                let mut stat = serde_json::to_value(stat)?;
                stat["url"] = url.as_str().into();
                Ok(stat)
            };
            stat["members"] = members.iter().map(of_member).collect::<Result<_, serde_json::Error>>()?;
        }
        print_line!("{stat}");
        return Ok(());
    }
    let mut rows = vec![
        ("quota", human_bytes(stat.quota_bytes), String::new()),
        ("table", human_bytes(stat.table_bytes), known.map_or(String::new(), |store| table_of(&store))),
    ];
    if !stat.is_table_only() {
        rows.extend([
            (
                "never used",
                human_bytes(stat.granted_bytes),
                "including a small reserve beyond the quota".to_owned(),
            ),
            ("segments of buffers", human_bytes(stat.buffer_segment_bytes), String::new()),
            ("  live", human_bytes(stat.live_bytes), format!("{} buffers", stat.live_buffers)),
            ("  free", human_bytes(stat.free_bytes), format!("{} buffers", stat.free_buffers)),
            ("  retired", String::new(), format!("{} buffers", stat.retired_buffers)),
            ("  parked", String::new(), format!("{} buffers", stat.parked_buffers)),
            ("leak scans", stat.scans.to_string(), "completed since the node started".into()),
        ]);
    }
    for (name, amount, more) in rows {
        print_line!("{}", format!("{name:<24}{amount:>12}  {more}").trim_end());
    }
    for (name, number) in &stat.service {
        let name = name.replace('_', " ");
        match name.strip_suffix(" bytes") {
            Some(name) => print_line!("{name:<24}{:>12}", human_bytes(*number)),
            None => print_line!("{name:<24}{number:>12}"),
        }
    }
    for (index, (url, stat)) in members.iter().enumerate() {
        let (name, live) = (format!("member {index}"), human_bytes(stat.live_bytes));
        print_line!("{name:<24}{live:>12}  {} live buffers at {url}", stat.live_buffers);
    }
    for pid in &stat.delaying_pids {
        print_line!("memory waits for process {pid}; if it is stopped, resume it with 'kill -CONT {pid}'");
    }
    for id in &stat.delaying_ids {
        print_line!(
            "memory waits for an operation of client id {id}; if that client is stopped, resume or end it"
        );
    }
    Ok(())
}
