//! Records the progress of a load or a dump in a file `FILE.progress` next to the data file, so that it can be resumed.
//!
//! Invariant: all records that the progress file covers are stored or written.
//! Invariant: if the data file was changed before the recorded position, the work is not resumed.

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

/// Kind of work that can be resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    Load,
    Dump,
}

/// Identity of a store. A new store of the same name has another identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::cli) struct Identity {
    name: String,
    id: u64,
    incarnation: u64,
}

impl Identity {
    pub(in crate::cli) fn of(store: &Store) -> Identity {
        // If the store has several members, any of them may have supplied the description.
        let [id, incarnation] = store.identity();
        Identity { name: store.name.clone(), id, incarnation }
    }
}

/// Content of the progress file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cli) struct Progress {
    pub(super) work: Work,
    pub(super) format: Format,
    pub(super) store: Identity,
    /// Number of bytes at the start of the data file that are done.
    pub(super) offset: u64,
    /// Number of records in those bytes.
    pub(super) records: u64,
    /// CRC-64/NVME of the bytes before `offset`.
    pub(super) crc64: u64,
    /// For a dump that has visited a slot: the index of the member of the store at which the dump resumes; 0 if the
    /// store lies on one node.
    #[serde(default)]
    pub(super) member: u32,
    /// For a dump that has visited a slot: the epoch of the store's table, and the number of the slot at which the dump
    /// resumes.
    pub(super) place: Option<(u64, u64)>,
    /// For a dump of an index that has visited a key: the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::cli) after: Option<Vec<u8>>,
}

/// The progress file of a data file.
pub(super) struct ProgressFile {
    path: PathBuf,
    saved: Instant,
}

/// Minimum interval between two writes of the progress file.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

impl ProgressFile {
    /// Returns the progress file of the data file at `path`, without reading it.
    pub(super) fn of(path: &Path) -> ProgressFile {
        let mut name = path.as_os_str().to_owned();
        name.push(".progress");
        ProgressFile { path: name.into(), saved: Instant::now() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Whether [`SAVE_INTERVAL`] has passed since the last write.
    pub(super) fn is_due(&self) -> bool {
        self.saved.elapsed() >= SAVE_INTERVAL
    }

    /// Replaces the progress file atomically: a reader finds either the former content or the new one.
    pub(super) fn save(&mut self, progress: &Progress) -> io::Result<()> {
        self.saved = Instant::now();
        let next = self.path.with_extension("progress-next");
        std::fs::write(&next, serde_json::to_string(progress).expect("plain data"))?;
        std::fs::rename(&next, &self.path)
    }

    /// Removes the progress file, because the work is complete.
    pub(super) fn remove(&self) {
        let _never_written = std::fs::remove_file(&self.path);
    }

    /// Reads the progress file.
    ///
    /// # Errors
    /// The progress file is missing or malformed, or belongs to another kind of work, another format or another store.
    pub(super) fn read(&self, work: Work, format: Format, store: &Identity) -> Result<Progress, Failure> {
        let name = self.path.display();
        let again = "leave --resume out to start again";
        let text = std::fs::read_to_string(&self.path).map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::NotFound => {
                    "nothing was interrupted, or it was interrupted at once".to_owned()
                }
                _ => error.to_string(),
            };
            Failure::Error(format!("nothing to resume from {name} ({why}): {again}"))
        })?;
        let progress: Progress = serde_json::from_str(&text)
            .map_err(|error| Failure::Error(format!("{name} is not a progress file ({error}): {again}")))?;
        if progress.work != work {
            return Err(Failure::Error(format!("{name} belongs to another command: {again}")));
        }
        if progress.format != format {
            return Err(Failure::Error(format!(
                "{name} belongs to a file in another format ({:?}): give that as --format, or {again}",
                progress.format
            )));
        }
        if progress.store != *store {
            return Err(Failure::Error(format!(
                "{name} belongs to another store, or the store was dropped and created again since: {again}"
            )));
        }
        Ok(progress)
    }
}

impl Progress {
    /// Checks that the data file is unchanged up to the recorded position.
    ///
    /// # Errors
    /// The data file is shorter, or its bytes differ.
    pub(super) fn check(&self, found: Option<Position>, file: &Path) -> Result<Position, Failure> {
        found.filter(|found| found.digest.finalize() == self.crc64).ok_or_else(|| {
            Failure::Error(format!(
                "{} has changed within its first {} bytes, which are done: leave --resume out to start again",
                file.display(),
                self.offset
            ))
        })
    }
}

/// Watches for signals that end this process. The first one lets the command save its progress; a second one ends the
/// process at once.
pub(super) struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    pub(super) fn watch() -> io::Result<Interrupt> {
        let signal_number = Arc::<AtomicUsize>::default();
        let is_repeated = Arc::<AtomicBool>::default();
        for signal in signals::ending() {
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&is_repeated))?;
            signal_hook::flag::register(signal, Arc::clone(&is_repeated))?;
            signal_hook::flag::register_usize(signal, Arc::clone(&signal_number), signal as usize)?;
        }
        Ok(Interrupt(signal_number))
    }

    /// Returns the signal that arrived, if one did.
    pub(super) fn signal(&self) -> Option<c_int> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as c_int),
        }
    }
}
