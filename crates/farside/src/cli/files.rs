//! Files that a command writes beside what it tells.
//!
//! Invariant: whether a file can be written that was asked for is known before the work begins that would be lost with
//! it. Invariant: what was not asked for goes when the command ends, also by a signal.

use super::signals::{self, end_by};
use super::{Done, Failure};
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A folder for sockets, certificates and logs of processes that this one starts, for this user alone. It goes, with
/// all that is in it, when it is dropped, and when a signal ends this process.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes one for this command.
    ///
    /// # Errors
    /// There is no room where temporary files lie.
    pub(super) fn make(command: &str) -> Result<Folder, String> {
        let drawn = getrandom::u64().expect("the system has random bytes");
        let path = std::env::temp_dir().join(format!("farside-{command}-{drawn:016x}"));
        // Locked until it is known: a signal meanwhile waits for that.
        let mut folders = folders();
        if folders.is_empty() {
            watch_for_the_end().map_err(|error| format!("no thread can be started: {error}"))?;
        }
        folders.push(path.clone());
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            format!("the folder {} cannot be made: {error}; name another place by TMPDIR", path.display())
        })?;
        Ok(Folder(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _removed = std::fs::remove_dir_all(&self.0);
    }
}

/// All that were made, also those that have gone.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn folders() -> MutexGuard<'static, Vec<PathBuf>> {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that removes them all when a signal ends this process.
fn watch_for_the_end() -> io::Result<()> {
    let mut ending = signal_hook::iterator::Signals::new(signals::ending())?;
    std::thread::Builder::new().name("farside-signals".into()).spawn(move || {
        if let Some(signal) = ending.forever().next() {
            folders().iter().for_each(|path| _ = std::fs::remove_dir_all(path));
            end_by(signal);
        }
    })?;
    Ok(())
}

/// Whether it can be written, of which a file that is there notices nothing.
pub(super) fn can_be_written(path: &Path) -> Done {
    // Whoever reads from a pipe would take it for the end.
    if path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Ok(());
    }
    let is_new = !path.exists();
    OpenOptions::new().append(true).create(true).open(path).map_err(|error| unwritable(path, &error))?;
    if is_new {
        // What is broken off leaves nothing behind.
        std::fs::remove_file(path).map_err(|error| unwritable(path, &error))?;
    }
    Ok(())
}

/// Writes all of it, over what was there.
pub(super) fn write(path: &Path, content: impl AsRef<[u8]>) -> Done {
    std::fs::write(path, content).map_err(|error| unwritable(path, &error))
}

pub(super) fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::Told(format!("cannot write '{}': {error}; name a file that can be written", path.display()))
}
