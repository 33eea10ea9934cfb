//! Files that a command was asked to write beside what it tells.
//!
//! Invariant: whether a file can be written is known before the work begins that would be lost with it.

use super::{Done, Failure};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;

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
