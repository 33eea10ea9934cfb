//! `kv`: keys and values from the command line.

use super::store::{spec_of, table_of};
use super::{Done, Failure, StoreTarget, human_bytes, progress, tsv, written};
use farside::local::Client;
use farside::parts::AnyKv;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::trace::Trace;
use farside_remote::NodeId;
use farside_systems::kv::KvError;
use farside_systems::kv::prism_kv::many::Cursor;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, makedev};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

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
    /// Put every line of a file: KEY<tab>VALUE, with \t \n \r \\ \xHH for what cannot be written
    Load {
        /// The file; '-' for standard input. A line ends with a line feed alone: where a file has CRLF, each value ends
        /// with the carriage return
        file: PathBuf,
        /// No progress
        #[arg(long, short)]
        quiet: bool,
    },
    /// Write every key and value as lines that 'load' reads
    Dump,
    /// Show how the store's memory is used
    Stat {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
}

impl Kv {
    pub(super) fn run(self) -> Done {
        if self.trace && matches!(self.action, Action::Load { .. } | Action::Dump | Action::Stat { .. }) {
            return Err(Failure::Told("--trace tells of put, get and del: leave it out here".into()));
        }
        let (pool, store) = self.target.connect()?;
        if let Action::Stat { json } = self.action {
            return stat(&pool, &store, json);
        }
        if self.trace {
            return traced(&pool, &store, self.action);
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
            Action::Load { file, quiet } => load(&mut client, &file, quiet),
            Action::Dump => dump(&mut client),
            Action::Stat { .. } => unreachable!("answered above"),
        }
    }
}

/// As the commands without a trace, through a layer that tells what goes by.
fn traced(pool: &farside::Pool, store: &str, action: Action) -> Done {
    let endpoint = Rc::new(pool.endpoint_here()?);
    let fabric = Rc::new(Trace::new(Rc::clone(&endpoint), |text: &str| note!("{text}")));
    let mut kv = block_on(&endpoint, AnyKv::open(fabric, NodeId(0), store))
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
        Action::Load { .. } | Action::Dump | Action::Stat { .. } => unreachable!("refused above"),
    }
}

/// Why a store could not be opened. One that is not there may never have been: it is not called gone.
pub(super) fn not_opened(pool: &farside::Pool, store: &str, error: KvError) -> Failure {
    let KvError::Gone(reason) = error else { return error.into() };
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

/// A longer line cannot be a key and a value, even if every byte of them is escaped.
pub(super) const LINE_MAX: u64 = 4 * (farside::VALUE_MAX + farside::KEY_MAX) as u64 + 2;

fn load(client: &mut Client, path: &Path, quiet: bool) -> Done {
    let (input, len): (Box<dyn BufRead>, u64) = if path == Path::new("-") {
        (Box::new(io::stdin().lock()), 0)
    } else {
        let file = File::open(path).map_err(|error| cannot_read(path, &error))?;
        let len = file.metadata().map_err(|error| cannot_read(path, &error))?.len();
        (Box::new(BufReader::with_capacity(1 << 20, file)), len)
    };
    let bar = progress("loading bytes", len, quiet);
    let mut input = input;
    let mut line = Vec::new();
    let mut loaded = 0u64;
    loop {
        line.clear();
        let read = input.by_ref().take(LINE_MAX).read_until(b'\n', &mut line);
        let read = read.map_err(|error| cannot_read(path, &error))?;
        if read == 0 {
            break;
        }
        bar.inc(read as u64);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let stored = tsv::parse_line(text)
            .and_then(|(key, value)| client.put(&key, &value).map_err(|error| error.to_string()));
        stored.map_err(|reason| {
            Failure::Told(format!(
                "line {} of {}: {reason} ({})",
                loaded + 1,
                path.display(),
                match loaded {
                    0 => "nothing is stored".into(),
                    1 => "the line before it is stored".into(),
                    _ => format!("the {loaded} lines before it are stored"),
                }
            ))
        })?;
        loaded += 1;
    }
    bar.finish_and_clear();
    if !quiet {
        note!("{loaded} {} stored", if loaded == 1 { "key" } else { "keys" });
    }
    Ok(())
}

fn dump(client: &mut Client) -> Done {
    let mut out = BufWriter::with_capacity(1 << 20, io::stdout().lock());
    let mut cursor = Cursor::default();
    loop {
        let mut written = Ok(());
        let more =
            client.next(&mut cursor, |key, item| written = tsv::write_line(&mut out, key, item.value))?;
        super::written(written)?;
        if !more {
            return super::written(out.flush());
        }
    }
}

/// Tells how a store's memory is used.
pub(super) fn stat(pool: &farside::Pool, store: &str, json: bool) -> Done {
    let stat = pool.stat(store)?;
    let known = pool.stores()?.into_iter().find(|known| known.name == store);
    if json {
        let mut stat = serde_json::to_value(&stat)?;
        stat["epoch"] = known.and_then(|store| spec_of(&store)).map(|table| table.epoch).into();
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
