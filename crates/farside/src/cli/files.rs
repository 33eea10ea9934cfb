//! Output files and temporary folders of commands.
//!
//! Invariant: a command checks that an output file is writable before it starts the work that the file records.
//! Invariant: temporary folders are removed when the command ends, also if a signal ends it.

use super::signals::{self, end_by};
use super::{Done, Failure};
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A temporary folder for sockets, certificates and logs of child processes. Only this user may access it. The folder
/// and its content are removed when this value is dropped, and when a signal ends this process.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Creates a temporary folder whose name contains `command`.
    ///
    /// # Errors
    /// The folder cannot be created, or the thread that handles signals cannot be started.
    pub(super) fn make(command: &str) -> Result<Folder, String> {
        let drawn = getrandom::u64().expect("the system has random bytes");
        let path = std::env::temp_dir().join(format!("farside-{command}-{drawn:016x}"));
        // Locked until the folder exists: the signal thread waits for the lock, so it cannot miss the folder.
        let mut folders = folders();
        if folders.is_empty() {
            watch_for_the_end().map_err(|error| format!("could not start a thread: {error}"))?;
        }
        folders.push(path.clone());
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            format!("could not create the folder {}: {error}; name another place with TMPDIR", path.display())
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

/// Paths of all temporary folders that this process created, including those already removed.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn folders() -> MutexGuard<'static, Vec<PathBuf>> {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a thread that removes the folders when a signal ends this process.
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

/// Checks that a file can be written, without changing the file.
///
/// # Errors
/// The file cannot be opened for writing.
pub(super) fn check_writable(path: &Path) -> Done {
    // A pipe is not opened, because its reader would take the closing of it for the end of the data.
    if path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return Ok(());
    }
    let is_new = !path.exists();
    OpenOptions::new().append(true).create(true).open(path).map_err(|error| unwritable(path, &error))?;
    if is_new {
        // The new file is removed, so that an interrupted command leaves no empty file.
        std::fs::remove_file(path).map_err(|error| unwritable(path, &error))?;
    }
    Ok(())
}

/// Writes `content` to a file, replacing its former content.
pub(super) fn write(path: &Path, content: impl AsRef<[u8]>) -> Done {
    std::fs::write(path, content).map_err(|error| unwritable(path, &error))
}

pub(super) fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::Error(format!("cannot write '{}': {error}; name a file that can be written", path.display()))
}
