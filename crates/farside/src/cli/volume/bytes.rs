//! `volume read` and `volume write`: copy bytes between a volume and a file.
//!
//! Invariant: bytes travel in chunks that end at the same places as blocks do. So no block is written twice.

use super::warn_if_scarce;
use crate::cli::kv::is_closed;
use crate::cli::{Done, Failure, human_bytes, progress, written};
use farside::config::parse_bytes;
use farside::volume::Volume;
use farside::{Pool, Ran};
use std::fs::File;
use std::io::{self, IsTerminal, Read as _, Write as _};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes that are read or written at once.
const CHUNK: u64 = 1 << 20;

/// Write bytes of a volume to a file or to standard output.
#[derive(clap::Args)]
pub(super) struct Read {
    /// Name of the volume
    name: String,
    /// First byte to read
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    offset: u64,
    /// Number of bytes to read [default: up to the end of the volume]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    length: Option<u64>,
    /// File to write, which is replaced if it exists [default: standard output]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Blocks in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object at the end: bytes, seconds; requires --output
    #[arg(long, requires = "output")]
    json: bool,
}

/// Write the bytes of a file or of standard input to a volume.
#[derive(clap::Args)]
pub(super) struct Write {
    /// Name of the volume
    name: String,
    /// Byte of the volume that the first byte goes to
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    offset: u64,
    /// File to read [default: standard input]
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Blocks in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object at the end: bytes, seconds
    #[arg(long)]
    json: bool,
}

impl Read {
    pub(super) fn run(self, pool: &Pool) -> Done {
        let mut volume = Volume::open(pool, &self.name)?.with_in_flight(self.in_flight as usize);
        let left = volume.size().saturating_sub(self.offset);
        let length = self.length.unwrap_or(left);
        if self.offset > volume.size() || length > left {
            return Err(Failure::Error(format!(
                "volume '{}' has {} bytes, and {length} bytes from {} on are not all within it: give a smaller \
                 --offset or --length",
                self.name,
                volume.size(),
                self.offset
            )));
        }
        let path = self.output.as_deref().filter(|path| *path != Path::new("-"));
        if self.json && path.is_none() {
            return Err(Failure::Error(
                "--json prints to standard output, where the volume's bytes go: name a file with --output"
                    .into(),
            ));
        }
        let mut out: Box<dyn io::Write> = match path {
            None => Box::new(io::stdout().lock()),
            Some(path) => Box::new(File::create(path).map_err(|error| unwritable(path, &error))?),
        };
        let quiet = self.quiet || path.is_none() && io::stdout().is_terminal();
        let (began, bar) = (Instant::now(), progress("reading, bytes", length, quiet || length <= CHUNK));
        let mut buffer = vec![0; CHUNK as usize];
        let mut at = self.offset;
        let end = self.offset + length;
        while at < end {
            let bytes = &mut buffer[..chunk(at, end, volume.block_len() as u64) as usize];
            volume.read_at(at, bytes)?;
            match path {
                None => written(out.write_all(bytes))?,
                Some(path) => out.write_all(bytes).map_err(|error| unwritable(path, &error))?,
            }
            at += bytes.len() as u64;
            bar.set_position(at - self.offset);
        }
        match path {
            None => written(out.flush())?,
            Some(path) => out.flush().map_err(|error| unwritable(path, &error))?,
        }
        bar.finish_and_clear();
        if path.is_some() {
            tell(self.json, self.quiet, "read", length, began)?;
        }
        Ok(())
    }
}

impl Write {
    pub(super) fn run(self, pool: &Pool) -> Done {
        let mut volume = Volume::open(pool, &self.name)?.with_in_flight(self.in_flight as usize);
        let input = self.input.as_deref().filter(|path| *path != Path::new("-"));
        let unreadable = |error: io::Error| {
            let name = input.map_or("standard input".into(), |path| path.display().to_string());
            Failure::Error(format!(
                "could not read {name}: {error}; name a file that you may read, or '-' for standard input"
            ))
        };
        let mut len = 0;
        let mut from: Box<dyn io::Read> = match input {
            None if is_closed(io::stdin().as_fd()) => {
                return Err(Failure::Error(
                    "standard input is closed: redirect it, or name a file with --input".into(),
                ));
            }
            None => Box::new(io::stdin().lock()),
            Some(path) => {
                let file = File::open(path).map_err(unreadable)?;
                len = file.metadata().map_err(unreadable)?.len();
                Box::new(file)
            }
        };
        let (size, left) = (volume.size(), volume.size().saturating_sub(self.offset));
        let too_long = |written: u64| {
            Failure::Error(format!(
                "volume '{}' has {size} bytes, and the input does not fit into it from {} on ({written} bytes were \
                 written): give a smaller --offset or a shorter input",
                self.name, self.offset
            ))
        };
        if self.offset > volume.size() || len > left {
            return Err(too_long(0));
        }
        let (began, bar) = (Instant::now(), progress("writing, bytes", len, self.quiet || len <= CHUNK));
        let mut buffer = Vec::with_capacity(CHUNK as usize);
        let mut at = self.offset;
        loop {
            buffer.clear();
            let wanted = chunk(at, volume.size(), volume.block_len() as u64);
            if wanted == 0 {
                // The volume is full: the input must end here.
                let more = from.by_ref().take(1).read_to_end(&mut buffer).map_err(unreadable)?;
                if more > 0 {
                    return Err(too_long(at - self.offset));
                }
                break;
            }
            from.by_ref().take(wanted).read_to_end(&mut buffer).map_err(unreadable)?;
            if buffer.is_empty() {
                break;
            }
            volume.write_at(at, &buffer).map_err(|error| {
                let written = at - self.offset;
                Failure::Error(match error.ran() {
                    Ran::No => format!(
                        "{error}; the first {written} bytes of the input were written, and none of the next: write \
                         again from --offset {at} on"
                    ),
                    _ => format!(
                        "{error}; the first {written} bytes of the input were written, and some of the next {} may \
                         have been: write again from --offset {at} on",
                        buffer.len()
                    ),
                })
            })?;
            at += buffer.len() as u64;
            bar.set_position(at - self.offset);
        }
        bar.finish_and_clear();
        if at > self.offset {
            // The bytes are written, so a failure here is no failure of the command.
            match volume.writer_ids() {
                Ok(groups) => groups.into_iter().flatten().for_each(|ids| warn_if_scarce(&self.name, ids)),
                Err(error) => note!("farside: how many writer ids are left is unknown: {error}"),
            }
        }
        tell(self.json, self.quiet, "wrote", at - self.offset, began)
    }
}

/// Number of bytes to copy from `at` on, which ends at the end of a block or at `end`.
fn chunk(at: u64, end: u64, block: u64) -> u64 {
    let most = (CHUNK / block).max(1) * block - at % block;
    most.min(end.saturating_sub(at))
}

fn tell(json: bool, quiet: bool, verb: &str, bytes: u64, began: Instant) -> Done {
    let seconds = began.elapsed().as_secs_f64();
    if json {
        print_line!("{}", serde_json::json!({ "bytes": bytes, "seconds": seconds }));
    } else if !quiet {
        let rate = human_bytes((bytes as f64 / seconds.max(1e-9)) as u64);
        note!("{verb} {} in {seconds:.2} s, {rate}/s", human_bytes(bytes));
    }
    Ok(())
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    crate::cli::files::unwritable(path, error)
}
