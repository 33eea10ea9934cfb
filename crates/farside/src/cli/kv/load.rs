//! `kv load` and `index load`: put every record of a file, many records at a time.
//!
//! A [`Destination`] puts the records: a key-value store here, an index in `index`.
//!
//! Records are put in *windows*:
//! - The puts of one window are in flight concurrently. The next window starts when all records of this one are stored.
//! - A window holds each key at most once, so of two records with one key the later one wins.
//! - If a put fails, the window is put again, record by record, to find the first record that fails. To put a record
//!   again has no further effect.
//!
//! Invariant: all records before the one that an error names are stored.

use super::progress::{Identity, Interrupt, Progress, ProgressFile, Work};
use super::records::{Format, Pair, Position, RecordError, Records, position_at};
use super::{cannot_read, not_opened};
use crate::cli::{Done, Failure, progress, signals};
use farside::local::Client;
use farside::parts::{AnyKv, Endpoint};
use farside::{KvError, Pool};
use farside_fabrics::executor::{Core, block_on};
use farside_systems::kv::Kv;
use farside_systems::system::Options;
use std::cell::Cell;
use std::collections::{BTreeSet, hash_map::RandomState};
use std::fs::File;
use std::hash::BuildHasher;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

/// Put every record of a file
#[derive(clap::Args)]
pub(in crate::cli) struct Load {
    /// File to load; '-' for standard input. Lines end with a line feed: in a tsv file with CRLF line ends, each value
    /// ends with a carriage return
    file: PathBuf,
    /// Format of the file [default: jsonl for .jsonl and .ndjson, binary for .bin, tsv for all others]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Resume an interrupted load of this file into this store, at the position that FILE.progress records
    #[arg(long)]
    resume: bool,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object at the end: keys, bytes, seconds
    #[arg(long)]
    json: bool,
}

/// Number of concurrent tasks.
const TASKS: usize = 16;
/// Maximum number of records that a task puts together: as many as one chain can store.
const GROUP: usize = 16;
/// A window is full when its keys and values have at least this many bytes. A single record may be larger.
const WINDOW_BYTES_MAX: usize = 4 << 20;

/// Where a load puts its records.
pub(in crate::cli) trait Destination {
    fn identity(&self) -> &Identity;

    /// Returns the key that a record of the file names.
    ///
    /// # Errors
    /// No key of the store is meant. Holds the reason and the remedy.
    fn key(&self, format: Format, named: Vec<u8>) -> Result<Vec<u8>, String>;

    /// Stores all records of a window, which has at least one.
    ///
    /// # Errors
    /// A put failed. The error names the first record that is not stored.
    fn put_all(&mut self, pairs: &[Pair]) -> Result<(), Unstored>;
}

impl Load {
    /// Loads the file into the destination that `open_it` opens.
    pub(in crate::cli) fn run<D: Destination>(self, open_it: impl FnOnce() -> Result<D, Failure>) -> Done {
        let began = Instant::now();
        let path = &*self.file;
        let format = self.format.unwrap_or_else(|| Format::of(path));
        let (mut input, len) = open(path)?;
        let mut putter = open_it()?;
        let mut progress_file = len.map(|_| ProgressFile::of(path));
        let start = self.start(&mut input, format, &progress_file, putter.identity())?;
        // Signals are handled only for regular files: a load that waits for a pipe must end on a signal at once.
        let interrupt = progress_file.as_ref().map(|_| Interrupt::watch()).transpose()?;
        let bar = progress("loading bytes", len.unwrap_or(0), self.quiet);
        let mut windows = Windows { records: Records::new(input, format, start), held: None };
        let first = windows.records.position();
        let mut done = first;
        loop {
            let Window { pairs, end, error } = windows.next(|named| putter.key(format, named));
            let stored = if pairs.is_empty() { Ok(()) } else { putter.put_all(&pairs) };
            if stored.is_ok() {
                done = end;
                bar.set_position(done.offset);
            }
            let failed = match (stored, error) {
                (Err(unstored), _) => Some(unstored),
                (Ok(()), Some(RecordError::ClosedPipe(error))) => return Err(cannot_read(path, &error)),
                (Ok(()), Some(RecordError::Malformed(reason))) => {
                    Some(Unstored { before: 0, unsure: 0, reason })
                }
                (Ok(()), None) if pairs.is_empty() => break,
                (Ok(()), None) => None,
            };
            let signal = interrupt.as_ref().and_then(Interrupt::signal);
            if failed.is_none()
                && signal.is_none()
                && !progress_file.as_ref().is_some_and(ProgressFile::is_due)
            {
                continue;
            }
            let mut may_resume = false;
            // While no record is stored, there is nothing to resume.
            if let Some(kept) = progress_file.as_mut().filter(|_| done.offset > 0) {
                let progress = Progress {
                    work: Work::Load,
                    format,
                    store: putter.identity().clone(),
                    offset: done.offset,
                    records: done.count,
                    crc64: done.digest.finalize(),
                    member: 0,
                    place: None,
                    after: None,
                };
                match kept.save(&progress) {
                    Ok(()) => may_resume = true,
                    Err(error) => {
                        let path = kept.path().display();
                        note!("farside: the progress is not saved: could not write {path}: {error}");
                        progress_file = None;
                    }
                }
            }
            if let Some(unstored) = failed {
                bar.finish_and_clear();
                return Err(unstored.into_failure(path, format, done.count, may_resume));
            }
            if let Some(signal) = signal {
                bar.finish_and_clear();
                let hint = if may_resume { "; continue with --resume" } else { "" };
                note!("farside: interrupted after {} keys{hint}", done.count);
                signals::end_by(signal);
            }
        }
        bar.finish_and_clear();
        if let Some(progress_file) = progress_file {
            progress_file.remove();
        }
        let keys = done.count - first.count;
        if self.json {
            let report = serde_json::json!({
                "keys": keys,
                "bytes": done.offset - first.offset,
                "seconds": began.elapsed().as_secs_f64(),
                "keys_before": first.count,
            });
            print_line!("{report}");
        } else if !self.quiet {
            note!("{keys} {} stored", if keys == 1 { "key" } else { "keys" });
        }
        Ok(())
    }

    /// Reads the input up to the position at which the load resumes, and returns that position; `None` if the load
    /// starts at the beginning.
    fn start(
        &self,
        input: &mut File,
        format: Format,
        progress_file: &Option<ProgressFile>,
        store: &Identity,
    ) -> Result<Option<Position>, Failure> {
        let path = &*self.file;
        match progress_file {
            None if self.resume => Err(Failure::Error(format!(
                "{} is not a regular file, so a load of it cannot be resumed: leave --resume out",
                path.display()
            ))),
            Some(progress_file) if self.resume => {
                let before = progress_file.read(Work::Load, format, store)?;
                let found = position_at(input, before.offset, before.records);
                let at = before.check(found.map_err(|error| cannot_read(path, &error))?, path)?;
                if !self.quiet {
                    note!("resuming after {} keys, at byte {}", at.count, at.offset);
                }
                // At offset 0 the file's header has not been read yet, so the reader must start from the beginning.
                Ok(Some(at).filter(|at| at.offset > 0))
            }
            Some(progress_file) if progress_file.exists() && !self.quiet => {
                note!(
                    "farside: {} belongs to an interrupted load, which --resume would continue; this load starts again",
                    progress_file.path().display()
                );
                Ok(None)
            }
            _ => Ok(None),
        }
    }
}

/// Opens the input. Also returns its size in bytes if it is a regular file.
fn open(path: &Path) -> Result<(File, Option<u64>), Failure> {
    let unreadable = |error: io::Error| cannot_read(path, &error);
    if path == Path::new("-") {
        let input = io::stdin().as_fd().try_clone_to_owned().map_err(unreadable)?;
        return Ok((File::from(input), None));
    }
    let file = File::open(path).map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?;
    Ok((file, found.is_file().then_some(found.len())))
}

/// A window: records that are in flight together.
struct Window {
    pairs: Vec<Pair>,
    /// Position in the input after the last record of `pairs`.
    end: Position,
    /// Reason why the record at `end` cannot be read.
    error: Option<RecordError>,
}

/// Divides the records of an input into windows.
struct Windows<R> {
    records: Records<R>,
    /// A record that was read but left for the next window, because the last window already had its key.
    held: Option<Pair>,
}

impl<R: Read> Windows<R> {
    /// Returns the next window. An empty window without an error means the end of the input. `key` returns the key that
    /// a record names.
    fn next(&mut self, key: impl Fn(Vec<u8>) -> Result<Vec<u8>, String>) -> Window {
        let hasher = RandomState::new();
        let (mut keys, mut bytes) = (BTreeSet::new(), 0);
        let mut window = Window { pairs: Vec::new(), end: self.records.position(), error: None };
        loop {
            let pair = match self.held.take() {
                Some(pair) => pair,
                None => match self.records.next() {
                    Ok(Some((named, value))) => match key(named) {
                        Ok(key) => (key, value),
                        Err(reason) => {
                            return Window { error: Some(RecordError::Malformed(reason)), ..window };
                        }
                    },
                    Ok(None) => return Window { end: self.records.position(), ..window },
                    Err(error) => return Window { error: Some(error), ..window },
                },
            };
            // If the hashes of two different keys are equal, the window only ends early.
            if !keys.insert(hasher.hash_one(&pair.0)) {
                self.held = Some(pair);
                return window;
            }
            bytes += pair.0.len() + pair.1.len();
            window.pairs.push(pair);
            window.end = self.records.position();
            let is_full = window.pairs.len() >= TASKS * GROUP || bytes >= WINDOW_BYTES_MAX;
            // Records that have arrived are stored before more input is awaited.
            if is_full || !self.records.is_buffered() {
                return window;
            }
        }
    }
}

/// Describes the first record of a window that could not be stored.
pub(in crate::cli) struct Unstored {
    /// Number of records of the window before that record. All of them are stored.
    pub(in crate::cli) before: u64,
    /// Number of records of the window after that record. Each of them may or may not be stored.
    pub(in crate::cli) unsure: u64,
    pub(in crate::cli) reason: String,
}

impl Unstored {
    fn into_failure(self, path: &Path, format: Format, before: u64, may_resume: bool) -> Failure {
        let (one, many) = if format == Format::Binary { ("record", "records") } else { ("line", "lines") };
        let before = before + self.before;
        let stored = match before {
            0 => "nothing is stored".into(),
            1 => format!("the {one} before it is stored"),
            _ => format!("the {before} {many} before it are stored"),
        };
        let unsure = match self.unsure {
            0 => String::new(),
            unsure => format!("; of the {unsure} after it, any may be"),
        };
        let hint = if may_resume { "; after the cause is fixed, --resume continues there" } else { "" };
        let (number, path, others) = (before + 1, path.display(), format!("{stored}{unsure}{hint}"));
        Failure::Error(format!("{one} {number} of {path}: {} ({others})", self.reason))
    }
}

/// Puts windows into a key-value store.
pub(super) struct Putter {
    pool: Pool,
    store: String,
    identity: Identity,
    /// A session with a client for each task; `None` after the session has failed.
    tasks: Option<Tasks>,
}

struct Tasks {
    endpoint: Rc<Endpoint>,
    kvs: Vec<AnyKv<Rc<Endpoint>>>,
}

impl Putter {
    pub(super) fn open(pool: &Pool, store: &str) -> Result<Putter, Failure> {
        let tasks = Tasks::open(pool, store)?;
        let identity = Identity::of(tasks.kvs[0].store());
        Ok(Putter { pool: pool.clone(), store: store.to_owned(), identity, tasks: Some(tasks) })
    }
}

impl Destination for Putter {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn key(&self, _format: Format, named: Vec<u8>) -> Result<Vec<u8>, String> {
        Ok(named)
    }

    fn put_all(&mut self, pairs: &[Pair]) -> Result<(), Unstored> {
        let first = |reason: String| Unstored { before: 0, unsure: pairs.len() as u64 - 1, reason };
        let put = match &mut self.tasks {
            Some(tasks) => tasks.put_all(pairs),
            None => Err(()),
        };
        if put.is_ok() {
            return Ok(());
        }
        // The session may have ended, because the node closes idle sessions.
        self.tasks = None;
        let mut client = Client::open(&self.pool, &self.store).map_err(|error| first(error.to_string()))?;
        if Identity::of(client.kv().store()) != self.identity {
            return Err(first(
                "the store was dropped and created again meanwhile: load from the beginning".into(),
            ));
        }
        for (index, (key, value)) in pairs.iter().enumerate() {
            client.put(key, value).map_err(|error| Unstored {
                before: index as u64,
                unsure: (pairs.len() - index - 1) as u64,
                reason: error.to_string(),
            })?;
        }
        // If no session can be opened now, the next window is also put record by record, which reports the reason.
        self.tasks = Tasks::open(&self.pool, &self.store).ok();
        Ok(())
    }
}

impl Tasks {
    fn open(pool: &Pool, store: &str) -> Result<Tasks, Failure> {
        let endpoint = Rc::new(pool.endpoint_over_all()?);
        let mut kvs = Vec::with_capacity(TASKS);
        for _ in 0..TASKS {
            let kv = block_on(
                &endpoint,
                AnyKv::open(Rc::clone(&endpoint), endpoint.nodes(), store, &Options::default()),
            )
            .map_err(|error| not_opened(pool, store, error))?;
            kvs.push(kv);
        }
        Ok(Tasks { endpoint, kvs })
    }

    /// Stores all records of a window concurrently. After an error, each record may or may not be stored.
    fn put_all(&mut self, pairs: &[Pair]) -> Result<(), ()> {
        let groups: Vec<_> = pairs.chunks(GROUP).collect();
        let (next, failed) = (Cell::new(0), Cell::new(false));
        let mut core = Core::new(&self.endpoint);
        for kv in self.kvs.iter_mut().take(groups.len()) {
            let (groups, next, failed) = (&groups, &next, &failed);
            core.spawn(async move {
                while let Some(group) = groups.get(next.replace(next.get() + 1)).filter(|_| !failed.get()) {
                    if put_group(kv, group).await.is_err() {
                        failed.set(true);
                    }
                }
            });
        }
        core.run();
        drop(core);
        if failed.get() { Err(()) } else { Ok(()) }
    }
}

async fn put_group(kv: &mut AnyKv<Rc<Endpoint>>, group: &[Pair]) -> Result<(), KvError> {
    let items: Vec<(&[u8], &[u8])> = group.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    match kv.put_many(&items).await {
        Err(KvError::Unsupported { .. }) => {
            for (key, value) in items {
                kv.put(key, value).await?;
            }
            Ok(())
        }
        put => put,
    }
}
