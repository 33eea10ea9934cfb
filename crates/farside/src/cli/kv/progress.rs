//! How far a load or a dump came, in a file beside the one that is loaded or written, so that it can go on from there.
//!
//! Invariant: what it says was done is done, and a file that differs before the place that it names is not gone on
//! with.

use super::records::{Format, Position};
use crate::cli::{Failure, signals};
use farside_remote::control::Store;
use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    Load,
    Dump,
}

/// Which store it was: another of the same name is not the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    name: String,
    id: u64,
    incarnation: u64,
}

impl Identity {
    pub(super) fn of(store: &Store) -> Identity {
        Identity { name: store.name.clone(), id: store.id, incarnation: store.incarnation }
    }
}

/// How far it came.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    pub(super) work: Work,
    pub(super) format: Format,
    pub(super) store: Identity,
    /// Bytes of the file that are done with.
    pub(super) offset: u64,
    /// Records in those.
    pub(super) records: u64,
    /// CRC-64/NVME of those.
    pub(super) crc64: u64,
    /// Where in the store the rest begins: a table's epoch, and a slot. For a dump that has begun.
    pub(super) place: Option<(u64, u64)>,
}

/// The file that says it.
pub(super) struct Beside {
    path: PathBuf,
    saved: Instant,
}

/// How often it is written.
const EVERY: Duration = Duration::from_secs(1);

impl Beside {
    /// Beside the file at `path`.
    pub(super) fn of(path: &Path) -> Beside {
        let mut name = path.as_os_str().to_owned();
        name.push(".progress");
        Beside { path: name.into(), saved: Instant::now() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Whether it is time to write it again.
    pub(super) fn is_due(&self) -> bool {
        self.saved.elapsed() >= EVERY
    }

    /// Replaces it whole: whoever reads it finds what was written before, or this.
    pub(super) fn save(&mut self, progress: &Progress) -> io::Result<()> {
        self.saved = Instant::now();
        let next = self.path.with_extension("progress-next");
        std::fs::write(&next, serde_json::to_string(progress).expect("plain data"))?;
        std::fs::rename(&next, &self.path)
    }

    /// Nothing is to be gone on with.
    pub(super) fn remove(&self) {
        let _never_written = std::fs::remove_file(&self.path);
    }

    /// What it says, if that is about such work on such a store.
    pub(super) fn read(&self, work: Work, format: Format, store: &Identity) -> Result<Progress, Failure> {
        let name = self.path.display();
        let again = "leave --resume out to begin anew";
        let text = std::fs::read_to_string(&self.path).map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::NotFound => "nothing was broken off there, or it had hardly begun".to_owned(),
                _ => error.to_string(),
            };
            Failure::Told(format!("there is nothing to go on from in {name} ({why}): {again}"))
        })?;
        let progress: Progress = serde_json::from_str(&text)
            .map_err(|error| Failure::Told(format!("{name} says nothing certain ({error}): {again}")))?;
        if progress.work != work {
            return Err(Failure::Told(format!("{name} is of another command: {again}")));
        }
        if progress.format != format {
            return Err(Failure::Told(format!(
                "{name} is of a file in another format ({:?}): name that by --format, or {again}",
                progress.format
            )));
        }
        if progress.store != *store {
            return Err(Failure::Told(format!(
                "{name} is about another store, or that was made anew since: what was done is not there; {again}"
            )));
        }
        Ok(progress)
    }
}

impl Progress {
    /// Whether the file is still what it was, up to where it was done with.
    pub(super) fn check(&self, found: Option<Position>, file: &Path) -> Result<Position, Failure> {
        found.filter(|found| found.digest.finalize() == self.crc64).ok_or_else(|| {
            Failure::Told(format!(
                "{} is not what it was: its first {} bytes differ; leave --resume out to begin anew",
                file.display(),
                self.offset
            ))
        })
    }
}

/// Signals that end this process once what was done is written down; the second at once.
pub(super) struct Ending(Arc<AtomicUsize>);

impl Ending {
    pub(super) fn watch() -> io::Result<Ending> {
        let heard = Arc::<AtomicUsize>::default();
        let insists = Arc::<AtomicBool>::default();
        for signal in signals::ending() {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&insists))?;
            signal_hook::flag::register(signal, Arc::clone(&insists))?;
            signal_hook::flag::register_usize(signal, Arc::clone(&heard), signal as usize)?;
        }
        Ok(Ending(heard))
    }

    /// The signal that came, if one did.
    pub(super) fn heard(&self) -> Option<c_int> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as c_int),
        }
    }
}
