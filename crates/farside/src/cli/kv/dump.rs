//! `kv dump`: writes every key and value of a store, to standard output or to a file that can be gone on with.
//!
//! A dump goes through the store's table slot by slot. A key stays in its slot for as long as the table lasts; so a
//! dump that was broken off goes on from its slot, and where the table was rebuilt meanwhile it is refused. Invariant:
//! a file that is there is neither overwritten nor added to, unless that was asked for.

use super::progress::{Beside, Ending, Identity, Progress, Work};
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
    /// The file, which is not there yet [default: standard output]
    file: Option<PathBuf>,
    /// How records lie in it [default: jsonl for .jsonl and .ndjson, binary for .bin, tsv for all else]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Overwrite a file that is there
    #[arg(long, conflicts_with = "resume")]
    force: bool,
    /// Go on where a dump of this store into this file was broken off, as FILE.progress says
    #[arg(long)]
    resume: bool,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
    /// One JSON object at the end: keys, bytes, seconds
    #[arg(long)]
    json: bool,
}

impl Dump {
    pub(super) fn run(mut self, client: &mut Client) -> Done {
        match self.file.take().filter(|file| file != Path::new("-")) {
            Some(file) => self.to_file(client, &file),
            None if self.force || self.resume || self.json => Err(Failure::Told(
                "--force, --resume and --json are for a dump to a file: name one, or leave them out".into(),
            )),
            None => {
                let out = BufWriter::with_capacity(1 << 20, io::stdout().lock());
                let format = self.format.unwrap_or(Format::Tsv);
                let mut cursor = Cursor::default();
                // Whether there are any keys to visit is known before anything is written.
                let mut writer = None;
                let mut out = Some(out);
                loop {
                    let mut put = Ok(());
                    let more = client.next(&mut cursor, |key, item| {
                        put = begun(&mut writer, &mut out, format)
                            .and_then(|writer| writer.write(key, item.value));
                    })?;
                    written(put)?;
                    if !more {
                        return written(begun(&mut writer, &mut out, format).and_then(Writer::finish));
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
        let mut beside = Beside::of(path);
        let (file, start, mut cursor) = if self.resume {
            let before = beside.read(Work::Dump, format, &identity)?;
            let (file, at) = go_on(path, &before)?;
            if !self.quiet {
                note!("going on after {} keys, at byte {}", at.count, at.offset);
            }
            let place = before.place.map(|(table_epoch, slot)| Place { table_epoch, slot });
            (file, Some(at).filter(|at| at.offset > 0), place.map_or(first, Cursor::at))
        } else {
            (create(path, self.force)?, None, first)
        };
        let ending = Ending::watch()?;
        let bar = progress("dumping slots", shape_of(&store).map_or(0, |table| table.slots), self.quiet);
        let cannot = |error: &io::Error| {
            Failure::Told(format!(
                "could not write {}: {error}; make room, then go on by --resume, or write elsewhere",
                path.display()
            ))
        };
        let out = BufWriter::with_capacity(1 << 20, &file);
        let mut writer = Writer::new(out, format, start).map_err(|error| cannot(&error))?;
        let first = start.map_or((0, 0), |at| (at.count, at.offset));
        keep(&mut beside, &mut writer, format, &identity, &cursor).map_err(|error| cannot(&error))?;
        loop {
            let mut put = Ok(());
            let visited = client.next(&mut cursor, |key, item| put = writer.write(key, item.value));
            put.map_err(|error| cannot(&error))?;
            let signal = ending.heard();
            if beside.is_due() || signal.is_some() || visited.is_err() {
                keep(&mut beside, &mut writer, format, &identity, &cursor).map_err(|error| cannot(&error))?;
                bar.set_position(cursor.place().map_or(0, |place| place.slot));
            }
            let count = writer.position().count;
            match visited {
                Ok(true) => {}
                Ok(false) => break,
                Err(KvError::Rebuilt) => {
                    return Err(Failure::Told(format!(
                        "the store's table was rebuilt since {} was begun, and what is left would come twice or never: \
                         begin anew by --force",
                        path.display()
                    )));
                }
                Err(error) => {
                    let path = path.display();
                    return Err(Failure::Told(format!(
                        "{error} ({count} keys are in {path}; --resume goes on from there)"
                    )));
                }
            }
            if let Some(signal) = signal {
                bar.finish_and_clear();
                note!("farside: broken off after {count} keys; go on by --resume");
                signals::end_by(signal);
            }
        }
        writer.finish().and_then(|()| file.sync_all()).map_err(|error| cannot(&error))?;
        bar.finish_and_clear();
        beside.remove();
        let end = writer.position();
        let (keys, bytes) = (end.count - first.0, end.offset - first.1);
        if self.json {
            let seconds = began.elapsed().as_secs_f64();
            let told = serde_json::json!({ "keys": keys, "bytes": bytes, "seconds": seconds, "keys_before": first.0 });
            tell!("{told}");
        } else if !self.quiet {
            note!("{keys} {} written", if keys == 1 { "key" } else { "keys" });
        }
        Ok(())
    }
}

/// The writer, which begins its file when it is first asked for.
fn begun<'a, W: io::Write>(
    writer: &'a mut Option<Writer<W>>,
    out: &mut Option<W>,
    format: Format,
) -> io::Result<&'a mut Writer<W>> {
    if let Some(out) = out.take() {
        *writer = Some(Writer::new(out, format, None)?);
    }
    Ok(writer.as_mut().expect("it was made of what it writes to"))
}

/// A file that is not there yet, or that is to be overwritten.
fn create(path: &Path, force: bool) -> Result<File, Failure> {
    if path.exists() && !path.is_file() {
        return Err(Failure::Told(format!(
            "{} is no regular file: leave it out and send standard output there",
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
        io::ErrorKind::AlreadyExists => Failure::Told(format!(
            "{} is there already: name another file, or overwrite it by --force; --resume goes on with a dump that was \
             broken off",
            path.display()
        )),
        _ => Failure::Told(format!(
            "could not write {}: {error}; name a file in a folder of yours",
            path.display()
        )),
    })
}

/// The file of a dump that was broken off, without what came after the last record that is known to be whole.
fn go_on(path: &Path, before: &Progress) -> Result<(File, Position), Failure> {
    let cannot =
        |error: io::Error| Failure::Told(format!("could not go on with {}: {error}", path.display()));
    let mut file = File::options().read(true).write(true).open(path).map_err(cannot)?;
    let found = position_at(&mut file, before.offset, before.records).map_err(cannot)?;
    let at = before.check(found, path)?;
    file.set_len(at.offset).and_then(|()| file.seek(SeekFrom::Start(at.offset))).map_err(cannot)?;
    Ok((file, at))
}

/// Hands all to the system, and notes how far that is.
fn keep<W: io::Write>(
    beside: &mut Beside,
    writer: &mut Writer<W>,
    format: Format,
    store: &Identity,
    cursor: &Cursor,
) -> io::Result<()> {
    writer.flush()?;
    let at = writer.position();
    beside.save(&Progress {
        work: Work::Dump,
        format,
        store: store.clone(),
        offset: at.offset,
        records: at.count,
        crc64: at.digest.finalize(),
        place: cursor.place().map(|place| (place.table_epoch, place.slot)),
    })
}
