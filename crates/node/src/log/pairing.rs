//! The pairing of a log with a node's memory, which decides at a start which of the two is believed.
//!
//! A node draws a number at each start, and writes it into a file of the log, then into the store's record in the
//! memory. If the node dies between the two, the file also has the number that the memory had before. While both have
//! the same number, the memory has the effects of all calls that were answered, as long as the machine does not crash:
//! then pages of a memory file may be lost, and the log is believed. A node that serves the memory without its log
//! notes that in the memory, which is then believed. A memory with another number is an old one.
//!
//! Invariant: the log has a number before a memory has it.
//! Invariant: a memory is paired only once the whole log was replayed into it, or the log is known to lack what the
//! memory has.

use super::{Disk, Log, RecoverError, folder_of, format, mutants};
use serde::{Deserialize, Serialize};
use std::io;

/// A log's side of the pairing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pairing {
    /// Random number that the paired memory has, too.
    pub number: u64,
    /// Number that the memory has until it gets the new one, if nothing was served in between.
    #[serde(default)]
    pub former: Option<u64>,
    /// Generation of the first checkpoint with which the log has all contents of the store. Before, only the memory has
    /// them. 0 if the log has them without a checkpoint.
    pub whole_from: u64,
    /// Incarnation of the paired memory.
    pub incarnation: u64,
}

/// A memory's side of the pairing, in the record of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paired {
    /// The number that the log has, too.
    pub number: u64,
    /// The memory's relation to this log.
    pub state: PairedState,
}

/// Relation of a memory to a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PairedState {
    /// All changes went to the log, too.
    Kept,
    /// The store was served without the log since.
    Ahead,
    /// The log is being replayed into the memory, which lacks a part of it.
    Replaying,
}

/// The source of a store's contents at a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Believed {
    /// The memory. No record is replayed.
    Memory,
    /// The log, which is replayed into an empty store.
    Log,
}

/// Decides between a log and the memory that has the same store. `is_whole` says that the log has all contents of the
/// store. `is_same_boot` says that the machine has not crashed since the memory was served.
///
/// # Errors
/// Both have changes that the other one lacks.
pub fn believed(
    pairing: &Pairing,
    is_whole: bool,
    memory: Option<&Paired>,
    is_same_boot: bool,
) -> Result<Believed, String> {
    let Some(paired) = memory else {
        // The record that names the log may not have reached a memory file.
        return Ok(if is_whole { Believed::Log } else { Believed::Memory });
    };
    let is_paired = paired.number == pairing.number || Some(paired.number) == pairing.former;
    match paired.state {
        PairedState::Replaying => Ok(Believed::Log),
        _ if !is_whole => Ok(Believed::Memory),
        PairedState::Ahead if is_paired => Ok(Believed::Memory),
        PairedState::Ahead => Err("the memory and the log were each served without the other, and each has changes \
                                   that the other one lacks; serve another --memory-file to use the log, or move the \
                                   log's folder away to use the memory"
            .to_owned()),
        PairedState::Kept if is_paired && (is_same_boot || mutants::LOG_BELIEVES_CRASHED_MEMORY.is_on()) => {
            Ok(Believed::Memory)
        }
        PairedState::Kept => Ok(Believed::Log),
    }
}

/// Name of the file, and of one that is being written.
const FILE: &str = "pairing";
pub(super) const UNFINISHED: &str = "pairing.new";

/// Writes a log's side of the pairing, durably.
///
/// # Errors
/// The disk failed.
pub fn pair(disk: &mut dyn Disk, log: &Log, pairing: &Pairing) -> Result<(), RecoverError> {
    let folder = folder_of(log.store());
    write(disk, &folder, pairing).map_err(|error| RecoverError::Disk(format!("{folder}/{FILE}"), error))
}

fn write(disk: &mut dyn Disk, folder: &str, pairing: &Pairing) -> io::Result<()> {
    let (name, file) = (format!("{folder}/{UNFINISHED}"), format!("{folder}/{FILE}"));
    let mut bytes = Vec::new();
    format::put_frame(&mut bytes, SALT, 0, 0, &serde_json::to_vec(pairing).expect("plain data"));
    disk.create(&name, &bytes)?;
    disk.sync(&name)?;
    disk.rename(&name, &file)?;
    disk.sync_names(folder)
}

/// The salt of the file's only frame: the file is never written in place.
const SALT: u64 = u64::from_le_bytes(*b"FARPAIR1");

/// Reads the pairing of the log in a folder with these files, if it has one.
pub(super) fn read(disk: &dyn Disk, folder: &str, files: &[String]) -> Result<Option<Pairing>, RecoverError> {
    if !files.iter().any(|file| file == FILE) {
        return Ok(None);
    }
    let name = format!("{folder}/{FILE}");
    let mut bytes = vec![0; SIZE_MAX];
    let read = disk.open(&name).and_then(|source| source.read_at(0, &mut bytes));
    let read = read.map_err(|error| RecoverError::Disk(name.clone(), error))?;
    let frame = format::take_frame(&bytes[..read], SALT);
    let pairing = frame.and_then(|(frame, _)| serde_json::from_slice(frame.bytes).ok());
    pairing.map(Some).ok_or(RecoverError::Lost(name))
}

/// Maximum size of the file in bytes.
const SIZE_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_believed_unless_the_memory_is_known_to_have_more() {
        let pairing = Pairing { number: 7, former: Some(6), whole_from: 0, incarnation: 1 };
        let of = |number, state| Some(Paired { number, state });
        let believe = |memory: Option<Paired>, is_whole, is_same_boot| {
            believed(&pairing, is_whole, memory.as_ref(), is_same_boot).ok()
        };
        use Believed::{Log, Memory};
        use PairedState::{Ahead, Kept, Replaying};
        for (memory, same_boot, other_boot, partial) in [
            (None, Some(Log), Some(Log), Some(Memory)),
            (of(7, Kept), Some(Memory), Some(Log), Some(Memory)),
            (of(8, Kept), Some(Log), Some(Log), Some(Memory)),
            (of(7, Ahead), Some(Memory), Some(Memory), Some(Memory)),
            (of(8, Ahead), None, None, Some(Memory)),
            (of(7, Replaying), Some(Log), Some(Log), Some(Log)),
            // The node died between the two halves of a pairing.
            (of(6, Kept), Some(Memory), Some(Log), Some(Memory)),
            (of(6, Ahead), Some(Memory), Some(Memory), Some(Memory)),
        ] {
            assert_eq!(believe(memory, true, true), same_boot, "{memory:?}");
            assert_eq!(believe(memory, true, false), other_boot, "{memory:?}, after a crash of the machine");
            for is_same_boot in [true, false] {
                assert_eq!(
                    believe(memory, false, is_same_boot),
                    partial,
                    "{memory:?}, with a part of the log"
                );
            }
        }
    }
}
