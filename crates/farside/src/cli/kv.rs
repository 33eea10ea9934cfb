//! `kv`: keys and values from the command line.
//!
//! `load` and `dump` have rooms of their own: `records` is what lies in a file, `binary` one form of it, `progress` how
//! far one came that was broken off. `watch` asks again and again for `stat`, `view` is how that looks.

mod binary;
mod dump;
mod load;
mod progress;
mod records;
mod view;
mod watch;

use super::store::table_of;
use super::{Done, Failure, StoreTarget, human_bytes, written};
use farside::KvError;
use farside::local::Client;
use farside::parts::AnyKv;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::trace::Trace;
use farside_remote::NodeId;
use farside_systems::kv::Kv as _;
use farside_systems::registry::shape_of;
use farside_systems::store::StoreError;
use farside_systems::system::Options;
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
    /// Tell on standard error what 'put', 'get' and 'del' ask of the node
    #[arg(long, global = true)]
    trace: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Give a key a value
    Put {
        /// 1 to 4096 bytes
        #[arg(allow_negative_numbers = true)]
        key: OsString,
        /// The value itself; '@FILE' for the bytes of a file, '-' or nothing for those of standard input: up to 16 MiB
        #[arg(allow_negative_numbers = true)]
        value: Option<OsString>,
    },
    /// Write the raw value of a key to standard output
    Get {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Take the value of a key away
    Del {
        /// The key
        #[arg(allow_negative_numbers = true)]
        key: OsString,
    },
    /// Put every record of a file, or every line of standard input
    Load(load::Load),
    /// Write every key and value as 'load' reads them
    Dump(dump::Dump),
    /// Show how the store's memory is used, once or again and again
    Stat(Stat),
}

#[derive(clap::Args)]
struct Stat {
    /// One JSON object, each time
    #[arg(long)]
    json: bool,
    /// Look again and again, each second if no other time is said, and show what was done meanwhile: rates, memory, and
    /// the latency of a small probe; 'q' ends it
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = watch::interval)]
    watch: Option<Duration>,
    /// With --watch: end after so many times
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

impl Kv {
    pub(super) fn run(self) -> Done {
        if self.trace && matches!(self.action, Action::Load(_) | Action::Dump(_) | Action::Stat(_)) {
            return Err(Failure::Told("--trace tells of put, get and del: leave it out here".into()));
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
            return load.run(&pool, &store);
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
            Action::Del { key } => {
                if client.delete(key.as_bytes())? {
                    Ok(())
                } else {
                    Err(Failure::Absent)
                }
            }
            Action::Dump(dump) => dump.run(&mut client),
            Action::Load(_) | Action::Stat(_) => unreachable!("answered above"),
        }
    }
}

/// As the commands without a trace, through a layer that tells what goes by.
fn traced(pool: &farside::Pool, store: &str, action: Action) -> Done {
    let endpoint = Rc::new(pool.endpoint_here()?);
    let fabric = Rc::new(Trace::new(Rc::clone(&endpoint), |text: &str| note!("{text}")));
    let mut kv = block_on(&endpoint, AnyKv::open(fabric, NodeId(0), store, &Options::default()))
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
        Action::Del { key } => {
            if block_on(&endpoint, kv.delete(key.as_bytes()))? {
                Ok(())
            } else {
                Err(Failure::Absent)
            }
        }
        Action::Load(_) | Action::Dump(_) | Action::Stat(_) => unreachable!("refused above"),
    }
}

/// Why a store could not be opened. One that is not there may never have been: it is not called gone.
pub(super) fn not_opened(pool: &farside::Pool, store: &str, error: impl Into<KvError>) -> Failure {
    let reason = match error.into() {
        KvError::Store(StoreError::Gone(reason)) => reason,
        other => return other.into(),
    };
    match pool.stores() {
        Ok(stores) if !stores.is_empty() && stores.iter().all(|other| other.name != store) => {
            let names: Vec<&str> = stores.iter().map(|store| store.name.as_str()).collect();
            Failure::Told(format!(
                "there is no store '{store}'; the node has: {}; make it by 'farside store create {store}', or name \
                 another by --store",
                names.join(", ")
            ))
        }
        _ => Failure::Told(reason),
    }
}

fn value_of(argument: Option<OsString>) -> Result<Vec<u8>, Failure> {
    let Some(argument) = argument.filter(|argument| argument != "-") else {
        if is_closed(io::stdin().as_fd()) {
            return Err(Failure::Told(
                "standard input is closed: give it something, or the value as an argument ('' for an empty one)".into(),
            ));
        }
        return read_value(io::stdin().lock(), Path::new("standard input"));
    };
    match argument.as_bytes().strip_prefix(b"@") {
        None => Ok(argument.into_vec()),
        Some(b"") => Err(Failure::Told(
            "'@' names no file: write @FILE, or give a value that begins with '@' by standard input".into(),
        )),
        Some(path) => {
            let path = Path::new(OsStr::from_bytes(path));
            read_value(File::open(path).map_err(|error| cannot_read(path, &error))?, path)
        }
    }
}

/// Whether this process was started without a standard input: Rust then opens the null device in its place, for
/// reading and writing, where a shell's `</dev/null` is for reading alone.
fn is_closed(input: BorrowedFd<'_>) -> bool {
    let is_null = fstat(input).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == makedev(1, 3)
    });
    is_null && fcntl_getfl(input).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR)
}

fn read_value(input: impl Read, name: &Path) -> Result<Vec<u8>, Failure> {
    let mut value = Vec::new();
    // One byte more than fits is enough to know that it does not.
    let read = input.take(farside::VALUE_MAX as u64 + 1).read_to_end(&mut value);
    read.map_err(|error| cannot_read(name, &error))?;
    if value.len() > farside::VALUE_MAX {
        return Err(Failure::Told(format!(
            "{} has more than {}, the most that a value can have: split it",
            name.display(),
            human_bytes(farside::VALUE_MAX as u64)
        )));
    }
    Ok(value)
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    Failure::Told(format!(
        "could not read {}: {error}; name a file that you may read, or '-' for standard input",
        path.display()
    ))
}

/// Tells how a store's memory is used.
pub(super) fn stat(pool: &farside::Pool, store: &str, json: bool) -> Done {
    let stat = pool.stat(store)?;
    let known = pool.stores()?.into_iter().find(|known| known.name == store);
    if json {
        let mut stat = serde_json::to_value(&stat)?;
        stat["epoch"] = known.and_then(|store| shape_of(&store)).map(|table| table.epoch).into();
        tell!("{stat}");
        return Ok(());
    }
    let rows = [
        ("quota", human_bytes(stat.quota_bytes), String::new()),
        ("table", human_bytes(stat.table_bytes), known.map_or(String::new(), |store| table_of(&store))),
        ("never used", human_bytes(stat.granted_bytes), "including a small reserve beyond the quota".into()),
        ("in segments of buffers", human_bytes(stat.buffer_segment_bytes), String::new()),
        ("  live", human_bytes(stat.live_bytes), format!("{} buffers", stat.live_buffers)),
        ("  free", human_bytes(stat.free_bytes), format!("{} buffers", stat.free_buffers)),
        ("  on their way back", String::new(), format!("{} buffers", stat.retired_buffers)),
        ("  set aside", String::new(), format!("{} buffers", stat.parked_buffers)),
    ];
    for (name, amount, more) in rows {
        tell!("{}", format!("{name:<24}{amount:>12}  {more}").trim_end());
    }
    for pid in &stat.delaying_pids {
        tell!("memory waits for process {pid}; if it is stopped, let it go on with 'kill -CONT {pid}'");
    }
    Ok(())
}
