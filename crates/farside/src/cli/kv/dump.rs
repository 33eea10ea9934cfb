//! `kv dump` and `index dump`: write every key and value of a store to standard output, or to a file. A dump to a file
//! can be resumed.
//!
//! A [`Source`] visits the keys: the slots of a key-value store here, the keys of an index in order in `index`. A key
//! stays in its slot as long as the table exists, so an interrupted dump can resume at the slot that it reached. If the
//! table was rebuilt meanwhile, the dump cannot be resumed.
//! Invariant: an existing file is neither overwritten nor extended without a flag.

use super::progress::{Identity, Interrupt, Progress, ProgressFile, Work};
use super::records::{Format, Position, Writer, position_at};
use crate::cli::{Done, Failure, progress, signals, written};
use farside::KvError;
use farside::local::Client;
use farside_systems::kv::{Cursor, Kv, Place};
use farside_systems::registry::shape_of;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Write every key and value
#[derive(clap::Args)]
pub(in crate::cli) struct Dump {
    /// File to write, which must not exist yet [default: standard output]
    file: Option<PathBuf>,
    /// Format of the file [default: jsonl for .jsonl and .ndjson, binary for .bin, tsv for all others]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Overwrite an existing file
    #[arg(long, conflicts_with = "resume")]
    force: bool,
    /// Resume an interrupted dump of this store into this file, at the position that FILE.progress records
    #[arg(long)]
    resume: bool,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object at the end: keys, bytes, seconds
    #[arg(long)]
    json: bool,
}

/// What a dump writes: the keys of a store in an order in which it can be resumed.
pub(in crate::cli) trait Source {
    fn identity(&mut self) -> Identity;

    /// Label and length of the progress bar.
    fn length(&mut self) -> (&'static str, u64);

    /// Moves to the first key, or behind those that an earlier dump has visited.
    fn begin(&mut self, before: Option<&Progress>) -> Result<(), Stopped>;

    /// Calls `visit` with the next key, as a file of this format names it, and its value. Returns false at the end.
    fn next(&mut self, format: Format, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<bool, Stopped>;

    /// Records which keys were visited.
    fn record(&self, progress: &mut Progress);

    /// How much of the progress bar is done.
    fn done(&self) -> u64;
}

/// Reason why a dump cannot go on.
pub(in crate::cli) enum Stopped {
    /// The keys have changed places, so the dump cannot be resumed. Holds the error.
    Rebuilt(String),
    /// Any other failure. The dump may be resumed. Holds the error.
    Failed(String),
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Failure {
        match stopped {
            Stopped::Rebuilt(reason) | Stopped::Failed(reason) => Failure::Error(reason),
        }
    }
}

impl Dump {
    pub(in crate::cli) fn run(mut self, source: &mut impl Source) -> Done {
        match self.file.take().filter(|file| file != Path::new("-")) {
            Some(file) => self.to_file(source, &file),
            None if self.force || self.resume || self.json => Err(Failure::Error(
                "--force, --resume and --json require a file to dump to: name one, or leave them out".into(),
            )),
            None => {
                let out = BufWriter::with_capacity(1 << 20, io::stdout().lock());
                let format = self.format.unwrap_or(Format::Tsv);
                source.begin(None)?;
                // The writer is created at the first key, so that nothing is written if the store's kind has no
                // iteration.
                let mut writer = None;
                let mut out = Some(out);
                loop {
                    let mut put = Ok(());
                    let more = source.next(format, &mut |key, value| {
                        put = started(&mut writer, &mut out, format)
                            .and_then(|writer| writer.write(key, value));
                    })?;
                    written(put)?;
                    if !more {
                        return written(started(&mut writer, &mut out, format).and_then(Writer::finish));
                    }
                }
            }
        }
    }

    fn to_file(&self, source: &mut impl Source, path: &Path) -> Done {
        let began = Instant::now();
        let format = self.format.unwrap_or_else(|| Format::of(path));
        let mut progress_file = ProgressFile::of(path);
        let (file, start) = if self.resume {
            let before = progress_file.read(Work::Dump, format, &source.identity())?;
            let (file, at) = reopen(path, &before)?;
            if !self.quiet {
                note!("resuming after {} keys, at byte {}", at.count, at.offset);
            }
            source.begin(Some(&before))?;
            (file, Some(at).filter(|at| at.offset > 0))
        } else {
            source.begin(None)?;
            (create(path, self.force)?, None)
        };
        let interrupt = Interrupt::watch()?;
        let (label, length) = source.length();
        let bar = progress(label, length, self.quiet);
        let cannot = |error: &io::Error| {
            Failure::Error(format!(
                "could not write {}: {error}; free some space and give --resume, or write elsewhere",
                path.display()
            ))
        };
        let out = BufWriter::with_capacity(1 << 20, &file);
        let mut writer = Writer::new(out, format, start).map_err(|error| cannot(&error))?;
        let first = start.map_or((0, 0), |at| (at.count, at.offset));
        save(&mut progress_file, &mut writer, format, source).map_err(|error| cannot(&error))?;
        loop {
            let mut put = Ok(());
            let visited = source.next(format, &mut |key, value| put = writer.write(key, value));
            put.map_err(|error| cannot(&error))?;
            let signal = interrupt.signal();
            if progress_file.is_due() || signal.is_some() || visited.is_err() {
                save(&mut progress_file, &mut writer, format, source).map_err(|error| cannot(&error))?;
                bar.set_position(source.done());
            }
            let count = writer.position().count;
            match visited {
                Ok(true) => {}
                Ok(false) => break,
                Err(Stopped::Rebuilt(_)) => {
                    return Err(Failure::Error(format!(
                        "the store's table was rebuilt since {} was started, so keys would be missing or repeated: \
                         start again with --force",
                        path.display()
                    )));
                }
                Err(Stopped::Failed(reason)) => {
                    let path = path.display();
                    return Err(Failure::Error(format!(
                        "{reason} ({count} keys are in {path}; --resume continues after them)"
                    )));
                }
            }
            if let Some(signal) = signal {
                bar.finish_and_clear();
                note!("farside: interrupted after {count} keys; continue with --resume");
                signals::end_by(signal);
            }
        }
        writer.finish().and_then(|()| file.sync_all()).map_err(|error| cannot(&error))?;
        bar.finish_and_clear();
        progress_file.remove();
        let end = writer.position();
        let (keys, bytes) = (end.count - first.0, end.offset - first.1);
        if self.json {
            let seconds = began.elapsed().as_secs_f64();
            let report = serde_json::json!({
                "keys": keys,
                "bytes": bytes,
                "seconds": seconds,
                "keys_before": first.0,
            });
            print_line!("{report}");
        } else if !self.quiet {
            note!("{keys} {} written", if keys == 1 { "key" } else { "keys" });
        }
        Ok(())
    }
}

/// Returns the writer. The first call creates the writer, which then writes the file's header.
fn started<'a, W: io::Write>(
    writer: &'a mut Option<Writer<W>>,
    out: &mut Option<W>,
    format: Format,
) -> io::Result<&'a mut Writer<W>> {
    if let Some(out) = out.take() {
        *writer = Some(Writer::new(out, format, None)?);
    }
    Ok(writer.as_mut().expect("the first call created it"))
}

/// Creates a file, or empties an existing one if `force`.
fn create(path: &Path, force: bool) -> Result<File, Failure> {
    if path.exists() && !path.is_file() {
        return Err(Failure::Error(format!(
            "{} is not a regular file: leave it out, and redirect standard output there",
            path.display()
        )));
    }
    let mut options = File::options();
    if force {
        options.write(true).create(true).truncate(true);
    } else {
        options.write(true).create_new(true);
    }
    options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Failure::Error(format!(
            "{} exists already: name another file, or overwrite it with --force; --resume continues an interrupted \
             dump",
            path.display()
        )),
        _ => Failure::Error(format!(
            "could not write {}: {error}; name a file in a folder that you may write to",
            path.display()
        )),
    })
}

/// Opens the file of an interrupted dump for appending. First cuts off the bytes after the recorded progress, as their
/// last record may be incomplete.
fn reopen(path: &Path, before: &Progress) -> Result<(File, Position), Failure> {
    let cannot = |error: io::Error| Failure::Error(format!("could not resume {}: {error}", path.display()));
    let mut file = File::options().read(true).write(true).open(path).map_err(cannot)?;
    let found = position_at(&mut file, before.offset, before.records).map_err(cannot)?;
    let at = before.check(found, path)?;
    file.set_len(at.offset).and_then(|()| file.seek(SeekFrom::Start(at.offset))).map_err(cannot)?;
    Ok((file, at))
}

/// Flushes the writer and saves the progress.
fn save<W: io::Write>(
    progress_file: &mut ProgressFile,
    writer: &mut Writer<W>,
    format: Format,
    source: &mut impl Source,
) -> io::Result<()> {
    writer.flush()?;
    let at = writer.position();
    let mut progress = Progress {
        work: Work::Dump,
        format,
        store: source.identity(),
        offset: at.offset,
        records: at.count,
        crc64: at.digest.finalize(),
        member: 0,
        place: None,
        after: None,
    };
    source.record(&mut progress);
    progress_file.save(&progress)
}

/// The slots of a key-value store's tables.
pub(super) struct Slots<'c> {
    client: &'c mut Client,
    cursor: Cursor,
}

impl Slots<'_> {
    pub(super) fn of(client: &mut Client) -> Slots<'_> {
        Slots { client, cursor: Cursor::default() }
    }
}

impl Source for Slots<'_> {
    fn identity(&mut self) -> Identity {
        Identity::of(self.client.kv().store())
    }

    fn length(&mut self) -> (&'static str, u64) {
        ("dumping slots", shape_of(self.client.kv().store()).map_or(0, |table| table.slots))
    }

    fn begin(&mut self, before: Option<&Progress>) -> Result<(), Stopped> {
        let first = self.client.kv().first()?;
        let place = before.and_then(|before| {
            before.place.map(|(table_epoch, slot)| Place { member: before.member, table_epoch, slot })
        });
        self.cursor = place.map_or(first, Cursor::at);
        Ok(())
    }

    fn next(&mut self, _format: Format, visit: &mut dyn FnMut(&[u8], &[u8])) -> Result<bool, Stopped> {
        Ok(self.client.next(&mut self.cursor, |key, item| visit(key, item.value))?)
    }

    fn record(&self, progress: &mut Progress) {
        let place = self.cursor.place();
        progress.member = place.map_or(0, |place| place.member);
        progress.place = place.map(|place| (place.table_epoch, place.slot));
    }

    fn done(&self) -> u64 {
        self.cursor.place().map_or(0, |place| place.slot)
    }
}

impl From<KvError> for Stopped {
    fn from(error: KvError) -> Stopped {
        match error {
            KvError::Rebuilt => Stopped::Rebuilt(error.to_string()),
            error => Stopped::Failed(error.to_string()),
        }
    }
}
