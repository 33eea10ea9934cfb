//! Reads logs at the start of a node: finds the stores, replays their records, and makes the logs ready to go on.
//!
//! A crash may leave an unfinished checkpoint, a next generation that was never used, files that a checkpoint has
//! replaced, and a torn tail of the last file. These are removed. Anything else that is missing or damaged is refused,
//! since it was stored.

use super::format::{self, Contents, End, Part};
use super::pairing::{self, Pairing};
use super::{CREATED, Disk, Log, LogOptions, UNFINISHED, folder_of, log_name, salt_of};
use farside_remote::control::Store;
use std::collections::BTreeMap;
use std::io;

/// A log that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Name of the log's folder.
    pub folder: String,
    /// The store whose log it is, as the earlier node had created it.
    pub store: Store,
    /// The memory with which the log is paired.
    pub pairing: Pairing,
    /// Whether the log has all contents of the store.
    pub is_whole: bool,
}

/// What a log contained.
#[derive(Debug)]
pub struct Recovered {
    /// The log, ready to be continued.
    pub log: Log,
    /// Number of records that were replayed.
    pub records: u64,
    /// Number of bytes of the torn tail that was cut off.
    pub torn: u64,
}

/// Reason why a log cannot be recovered.
#[derive(Debug)]
pub enum RecoverError {
    /// The system refused an access to this file or folder.
    Disk(String, io::Error),
    /// The last file of a log is damaged: its name, the sequence of the record, and its position.
    Damaged(String, u64, u64),
    /// Another file of a log is damaged or missing.
    Lost(String),
    /// A record cannot be carried out: the file, the record's sequence, and the reason.
    Invalid(String, u64, String),
    /// This folder has the log of a store whose folder has the second name.
    Misplaced(String, String),
}

impl std::fmt::Display for RecoverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RecoverError::Disk(name, error) => write!(
                f,
                "cannot read or write the log file {name}: {error}; check --log-dir and the permissions of its files"
            ),
            RecoverError::Damaged(name, sequence, at) => write!(
                f,
                "the log file {name} is damaged at byte {at}: record {sequence} was stored, and is no longer valid; \
                 restore the file from a copy, or give up this record and all later ones with 'truncate -s {at}'"
            ),
            RecoverError::Lost(name) => write!(
                f,
                "the log file {name} is damaged or missing, and records in it were stored; restore its folder from a \
                 copy, or remove the folder to give up the store"
            ),
            RecoverError::Invalid(name, sequence, reason) => write!(
                f,
                "cannot replay record {sequence} of the log file {name}: {reason}; use the release that wrote it, or \
                 more memory if there is too little, and start the node again; or move the file's folder away to \
                 give the store up"
            ),
            RecoverError::Misplaced(folder, own) => write!(
                f,
                "the folder {folder} has the log of {own}, perhaps as a copy: rename it to {own}, or move it out of \
                 --log-dir"
            ),
        }
    }
}

impl std::error::Error for RecoverError {}

/// Error within a file, whose name the caller knows.
enum Within {
    Disk(io::Error),
    Invalid(u64, String),
}

impl From<io::Error> for Within {
    fn from(error: io::Error) -> Within {
        Within::Disk(error)
    }
}

impl Within {
    fn of(self, name: &str) -> RecoverError {
        match self {
            Within::Disk(error) => RecoverError::Disk(name.to_owned(), error),
            Within::Invalid(sequence, reason) => RecoverError::Invalid(name.to_owned(), sequence, reason),
        }
    }
}

/// Finds all logs. Removes folders of logs whose creation was not complete.
///
/// # Errors
/// The disk failed, a log has files but none with a valid head, or a folder has the log of another one.
pub fn find(disk: &mut dyn Disk) -> Result<Vec<Found>, RecoverError> {
    let failed = |name: &str, error| RecoverError::Disk(name.to_owned(), error);
    let mut found = Vec::new();
    let folders = disk.folders().map_err(|error| failed("folder", error))?;
    for folder in folders.into_iter().filter(|folder| is_log(folder)) {
        let files = Files::of(disk, &folder)?;
        let paired = pairing::read(disk, &folder, &files.others)?;
        // The first file has the head if any has.
        let first = files.checkpoints.values().chain(files.logs.values()).next();
        let Some(name) = first.map(|file| format!("{folder}/{file}")) else { continue };
        match read(disk, &name, |_, _| Ok(()), true)? {
            Some(Contents { head, salt, .. }) => {
                let own = folder_of(&head.store);
                if own != folder {
                    return Err(RecoverError::Misplaced(folder, own));
                }
                let first = || Pairing {
                    number: salt ^ salt_of(head.part, head.generation),
                    former: None,
                    whole_from: 0,
                    incarnation: head.store.incarnation,
                };
                let pairing = paired.unwrap_or_else(first);
                let newest = files.checkpoints.last_key_value().map_or(0, |(&generation, _)| generation);
                let is_whole = newest >= pairing.whole_from;
                found.push(Found { folder, store: head.store.into_owned(), pairing, is_whole });
            }
            None if files.is_new() => {
                disk.remove_folder(&folder).map_err(|error| failed(&folder, error))?;
            }
            None => return Err(RecoverError::Lost(name)),
        }
    }
    Ok(found)
}

/// Passes the records of a log to `replay`, and makes the log ready to be continued.
///
/// # Errors
/// A file that had stored records is damaged or missing, the disk failed, or `replay` failed.
pub fn recover(
    disk: &mut dyn Disk,
    found: &Found,
    options: LogOptions,
    mut replay: impl FnMut(&[u8]) -> Result<(), String>,
) -> Result<Recovered, RecoverError> {
    let folder = &found.folder;
    let path = |file: &str| format!("{folder}/{file}");
    let failed = |name: &str| {
        let name = name.to_owned();
        move |error| RecoverError::Disk(name, error)
    };
    let mut records = 0;
    let mut replay = |sequence: u64, record: &[u8]| {
        records += 1;
        replay(record).map_err(|reason| Within::Invalid(sequence, reason))
    };
    let files = Files::of(disk, folder)?;
    let (mut log, mut useless) = (Log::new(found.store.clone(), options, 0), files.useless.clone());
    let mut least = 1;
    if let Some((&generation, file)) = files.checkpoints.last_key_value() {
        let name = path(file);
        let contents = read(disk, &name, &mut replay, false)?;
        match contents {
            Some(of) if of.is_ended && of.end == End::Clean && is_of(&of, Part::Checkpoint, generation) => {
                log.checkpointed = of.len;
                log.old.push(file.clone());
            }
            _ => return Err(RecoverError::Lost(name)),
        }
        useless.extend(files.checkpoints.range(..generation).map(|(_, file)| file.clone()));
        useless.extend(files.logs.range(..generation).map(|(_, file)| file.clone()));
        least = generation;
    }
    let logs: Vec<(u64, &String)> =
        files.logs.range(least..).map(|(&generation, file)| (generation, file)).collect();
    let mut last: Option<(Contents, String)> = None;
    let mut torn = 0;
    for (index, &(generation, file)) in logs.iter().enumerate() {
        let name = path(file);
        if generation != least + index as u64 {
            return Err(RecoverError::Lost(path(&log_name(least + index as u64))));
        }
        let is_last = index + 1 == logs.len();
        let next = last.as_ref().map(|(contents, _)| contents.next);
        // A generation that does not follow the former one was never used, or the former one lost its tail.
        let head = read(disk, &name, |_, _| Ok(()), true)?.filter(|of| is_of(of, Part::Log, generation));
        let head = head.filter(|of| next.is_none_or(|next| next == of.head.first));
        if head.is_none() && is_last && next.is_some() && is_unused(disk, &name)? {
            useless.push(file.clone());
            break;
        }
        let contents = if head.is_some() { read(disk, &name, &mut replay, false)? } else { None };
        let Some(contents) = contents else { return Err(RecoverError::Lost(name)) };
        match contents.end {
            End::Clean => {}
            End::Damaged { sequence } if is_last => {
                return Err(RecoverError::Damaged(name, sequence, contents.len));
            }
            End::Damaged { .. } => return Err(RecoverError::Lost(name)),
            // The former generation was synced before the next one was made, and the next one may be unused.
            End::Torn { .. } if !is_last && !is_unused(disk, &path(logs[index + 1].1))? => {
                return Err(RecoverError::Lost(name));
            }
            End::Torn { lost } => {
                torn = lost;
                disk.cut(&name, contents.len).map_err(failed(&name))?;
            }
        }
        log.logged += contents.len;
        last = Some((contents, file.clone()));
    }
    let Some((contents, file)) = last else { return Err(RecoverError::Lost(path(&log_name(least)))) };
    // What was read from the system's cache must be on the disk before more counts on it.
    let name = path(&file);
    disk.sync(&name).map_err(failed(&name))?;
    for file in &useless {
        disk.remove(&path(file)).map_err(failed(&path(file)))?;
    }
    disk.sync_names(folder).map_err(failed(folder))?;
    log.salt = contents.salt ^ salt_of(Part::Log, contents.head.generation);
    (log.generation, log.len) = (contents.head.generation, contents.len);
    (log.next, log.durable) = (contents.next, contents.next - 1);
    let former = logs.iter().map(|&(_, file)| file).filter(|former| **former != file);
    log.old.extend(former.filter(|file| !useless.contains(file)).cloned());
    (log.creation, log.not_before) = (CREATED, options.checkpoint_min.max(2 * log.checkpointed));
    debug_assert_eq!(folder_of(&log.store), *folder, "a log lies in the folder of its store");
    Ok(Recovered { log, records, torn })
}

/// Whether a folder has the name of a log's folder. A mounted disk may have others, such as `lost+found`.
fn is_log(folder: &str) -> bool {
    let id = folder.rsplit_once('.').map(|(_, id)| id);
    id.is_some_and(|id| id.len() == 16 && id.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Files of a log's folder, by their generations.
#[derive(Default)]
struct Files {
    logs: BTreeMap<u64, String>,
    checkpoints: BTreeMap<u64, String>,
    useless: Vec<String>,
    others: Vec<String>,
}

impl Files {
    fn of(disk: &dyn Disk, folder: &str) -> Result<Files, RecoverError> {
        let listed = disk.files(folder).map_err(|error| RecoverError::Disk(folder.to_owned(), error))?;
        let mut files = Files::default();
        for file in listed {
            let generation = |prefix: &str| file.strip_prefix(prefix)?.parse().ok();
            if let Some(generation) = generation("log.") {
                files.logs.insert(generation, file);
            } else if let Some(generation) = generation("checkpoint.") {
                files.checkpoints.insert(generation, file);
            } else if file == UNFINISHED || file == pairing::UNFINISHED {
                files.useless.push(file);
            } else {
                files.others.push(file);
            }
        }
        Ok(files)
    }

    /// Whether the log's first file was being created, so that nothing was stored in it.
    fn is_new(&self) -> bool {
        self.checkpoints.is_empty() && self.logs.keys().eq([1].iter())
    }
}

fn is_of(contents: &Contents, part: Part, generation: u64) -> bool {
    (contents.head.part, contents.head.generation) == (part, generation)
}

/// Whether a file has no record: none was written to it, or its head was not complete.
fn is_unused(disk: &dyn Disk, name: &str) -> Result<bool, RecoverError> {
    let contents = read(disk, name, |_, _| Ok(()), false)?;
    Ok(contents.is_none_or(|of| of.next == of.head.first && !matches!(of.end, End::Damaged { .. })))
}

/// Reads a file. With `head_alone`, the result describes the head alone.
fn read(
    disk: &dyn Disk,
    name: &str,
    each: impl FnMut(u64, &[u8]) -> Result<(), Within>,
    head_alone: bool,
) -> Result<Option<Contents>, RecoverError> {
    let source = disk.open(name).map_err(|error| RecoverError::Disk(name.to_owned(), error))?;
    let contents = if head_alone { format::read_head(&*source) } else { format::read(&*source, each) };
    contents.map_err(|within| within.of(name))
}

#[cfg(test)]
mod tests {
    use super::super::checkpoint::checkpoint_name;
    use super::*;

    #[test]
    fn names_of_files_have_their_generations() {
        let (log, checkpoint) = (log_name(7), checkpoint_name(12));
        assert_eq!((log.as_str(), checkpoint.as_str()), ("log.00000007", "checkpoint.00000012"));
        assert!(is_log("a.b.00000000000000ab") && !is_log("lost+found") && !is_log("a.b"));
    }
}
