//! `kv dump`: writes every key and value of a store to standard output, or to a file. A dump to a file can be resumed.
//!
//! A dump visits the store's table slot by slot. A key stays in its slot as long as the table exists, so an interrupted
//! dump can resume at the slot that it reached. If the table was rebuilt meanwhile, the dump cannot be resumed.
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
pub(super) struct Dump {
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

impl Dump {
    pub(super) fn run(mut self, client: &mut Client) -> Done {
        match self.file.take().filter(|file| file != Path::new("-")) {
            Some(file) => self.to_file(client, &file),
            None if self.force || self.resume || self.json => Err(Failure::Error(
                "--force, --resume and --json require a file to dump to: name one, or leave them out".into(),
            )),
            None => {
                let out = BufWriter::with_capacity(1 << 20, io::stdout().lock());
                let format = self.format.unwrap_or(Format::Tsv);
                let mut cursor = Cursor::default();
                // The writer is created at the first key, so that nothing is written if the store's kind has no
                // iteration.
                let mut writer = None;
                let mut out = Some(out);
                loop {
                    let mut put = Ok(());
                    let more = client.next(&mut cursor, |key, item| {
                        put = started(&mut writer, &mut out, format)
                            .and_then(|writer| writer.write(key, item.value));
                    })?;
                    written(put)?;
                    if !more {
                        return written(started(&mut writer, &mut out, format).and_then(Writer::finish));
                    }
                }
            }
        }
    }

    fn to_file(&self, client: &mut Client, path: &Path) -> Done {
        let began = Instant::now();
        let first = client.kv().first()?;
        let format = self.format.unwrap_or_else(|| Format::of(path));
        let store = client.kv().store().clone();
        let identity = Identity::of(&store);
        let mut progress_file = ProgressFile::of(path);
        let (file, start, mut cursor) = if self.resume {
            let before = progress_file.read(Work::Dump, format, &identity)?;
            let (file, at) = reopen(path, &before)?;
            if !self.quiet {
                note!("resuming after {} keys, at byte {}", at.count, at.offset);
            }
            let place =
                before.place.map(|(table_epoch, slot)| Place { member: before.member, table_epoch, slot });
            (file, Some(at).filter(|at| at.offset > 0), place.map_or(first, Cursor::at))
        } else {
            (create(path, self.force)?, None, first)
        };
        let interrupt = Interrupt::watch()?;
        let bar = progress("dumping slots", shape_of(&store).map_or(0, |table| table.slots), self.quiet);
        let cannot = |error: &io::Error| {
            Failure::Error(format!(
                "could not write {}: {error}; free some space and give --resume, or write elsewhere",
                path.display()
            ))
        };
        let out = BufWriter::with_capacity(1 << 20, &file);
        let mut writer = Writer::new(out, format, start).map_err(|error| cannot(&error))?;
        let first = start.map_or((0, 0), |at| (at.count, at.offset));
        save(&mut progress_file, &mut writer, format, &identity, &cursor).map_err(|error| cannot(&error))?;
        loop {
            let mut put = Ok(());
            let visited = client.next(&mut cursor, |key, item| put = writer.write(key, item.value));
            put.map_err(|error| cannot(&error))?;
            let signal = interrupt.signal();
            if progress_file.is_due() || signal.is_some() || visited.is_err() {
                save(&mut progress_file, &mut writer, format, &identity, &cursor)
                    .map_err(|error| cannot(&error))?;
                bar.set_position(cursor.place().map_or(0, |place| place.slot));
            }
            let count = writer.position().count;
            match visited {
                Ok(true) => {}
                Ok(false) => break,
                Err(KvError::Rebuilt) => {
                    return Err(Failure::Error(format!(
                        "the store's table was rebuilt since {} was started, so keys would be missing or repeated: \
                         start again with --force",
                        path.display()
                    )));
                }
                Err(error) => {
                    let path = path.display();
                    return Err(Failure::Error(format!(
                        "{error} ({count} keys are in {path}; --resume continues after them)"
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
    store: &Identity,
    cursor: &Cursor,
) -> io::Result<()> {
    writer.flush()?;
    let at = writer.position();
    progress_file.save(&Progress {
        work: Work::Dump,
        format,
        store: store.clone(),
        offset: at.offset,
        records: at.count,
        crc64: at.digest.finalize(),
        member: cursor.place().map_or(0, |place| place.member),
        place: cursor.place().map(|place| (place.table_epoch, place.slot)),
    })
}
