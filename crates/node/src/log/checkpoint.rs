//! The checkpoint of a log: when it begins, and its steps.
//!
//! The writer rotates to the next generation's file, writes the records that the node collects, and puts the checkpoint
//! into effect. Only then it removes the files that the checkpoint replaces.

use super::format::{self, Part};
use super::{CREATED, Log, Op, Removal, folder_of, log_name, mutants, salt_of};
use farside_remote::service::Records;
use std::io;
use std::time::Duration;

/// Pause before a checkpoint that the log needs is tried again.
const CHECKPOINT_RETRY: Duration = Duration::from_secs(1);
/// Size in bytes at which no more records of a checkpoint are collected for now.
const COLLECTED_MAX: usize = 1 << 20;

/// Progress of a checkpoint.
#[derive(Debug)]
pub(super) enum Checkpoint {
    None,
    /// The next generation's file is made: step 0 syncs the former, 1 makes the file, 2 syncs it, 3 syncs the names.
    Rotate(u8),
    /// The node collects records, which are written as they come.
    Collect(Collected),
    /// All records are written: step 0 syncs the log, 1 the checkpoint, 2 renames it, 3 syncs the names, and step 4
    /// removes the older files.
    Finish {
        step: u8,
        len: u64,
        through: u64,
        old: Vec<String>,
    },
}

/// A checkpoint that is being written.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Records that are not written yet.
    pub(super) records: Records,
    pub(super) is_made: bool,
    /// Sequence of the next record, and the size of the file.
    pub(super) sequence: u64,
    pub(super) len: u64,
    /// Whether the node has collected all records.
    pub(super) is_ended: bool,
    /// Whether the record that ends the checkpoint was written.
    pub(super) is_end_written: bool,
    /// Positions that the checkpoint may have the effects of.
    pub(super) through: u64,
}

/// Name of a checkpoint that is being written.
pub(super) const UNFINISHED: &str = "checkpoint.new";

pub(super) fn checkpoint_name(generation: u64) -> String {
    format!("checkpoint.{generation:08}")
}

impl Log {
    /// Begins a checkpoint if the log has grown enough. Returns whether the node must collect records for it now.
    pub fn wants_checkpoint(&mut self) -> bool {
        let is_free = self.broken.is_none() && self.full.is_none() && self.removal == Removal::Not;
        let is_due = self.logged > self.not_before || self.is_wanted && self.wanted_at <= self.now;
        match &self.checkpoint {
            Checkpoint::None if is_free && self.creation == CREATED && is_due => {
                self.checkpoint = Checkpoint::Rotate(0);
                false
            }
            Checkpoint::Collect(of) => !of.is_ended && of.records.size() < COLLECTED_MAX,
            _ => false,
        }
    }

    /// Generation of the checkpoint for which records are collected.
    pub fn collecting(&self) -> Option<u64> {
        matches!(self.checkpoint, Checkpoint::Collect(Collected { is_ended: false, .. }))
            .then_some(self.generation)
    }

    /// Adds records to the checkpoint. `is_last` says that no more will come.
    pub fn collect(&mut self, records: &Records, is_last: bool) {
        if let Checkpoint::Collect(of) = &mut self.checkpoint {
            records.iter().for_each(|record| of.records.append(record));
            (of.is_ended, of.through) = (is_last, self.appended);
        }
    }

    /// Makes the log request a checkpoint as soon as possible, since it does not have all of the store's contents. It
    /// is tried until it takes effect.
    pub fn want_checkpoint(&mut self) {
        self.is_wanted = true;
    }

    pub(super) fn next_of_checkpoint(&mut self) -> Option<Op> {
        let (generation, next) = (self.generation + 1, self.next);
        match &mut self.checkpoint {
            Checkpoint::None => None,
            Checkpoint::Rotate(step) => {
                let step = *step;
                let file = self.name(&log_name(generation));
                Some(match step {
                    0 => Op::Sync(self.file()),
                    1 => Op::Create(file, self.head(Part::Log, generation, next)),
                    2 => Op::Sync(file),
                    _ => Op::SyncNames(folder_of(&self.store)),
                })
            }
            Checkpoint::Collect(Collected { is_made: false, .. }) => {
                let head = self.head(Part::Checkpoint, self.generation, 1);
                Some(Op::Create(self.name(UNFINISHED), head))
            }
            Checkpoint::Collect(of) => {
                if of.records.is_empty() && !of.is_ended {
                    return None;
                }
                let salt = self.salt ^ salt_of(Part::Checkpoint, self.generation);
                let (at, mut bytes, records) = (of.len, Vec::new(), std::mem::take(&mut of.records));
                of.is_end_written = of.is_ended;
                for record in records.iter().chain(of.is_ended.then_some(&[][..])) {
                    format::put_frame(&mut bytes, salt, of.sequence, 0, record);
                    of.sequence += 1;
                }
                of.len += bytes.len() as u64;
                Some(Op::Write(self.name(UNFINISHED), at, bytes))
            }
            // What the checkpoint has must be in the file that is synced.
            Checkpoint::Finish { step: 0, through, .. } if self.written < *through => None,
            Checkpoint::Finish { step, old, .. } => {
                let (step, removed) = (*step, old.last().cloned());
                Some(match (step, removed) {
                    (0, _) => Op::Sync(self.file()),
                    (1, _) if mutants::LOG_CHECKPOINT_UNSYNCED.is_on() => Op::Sync(self.file()),
                    (1, _) => Op::Sync(self.name(UNFINISHED)),
                    (2, _) => Op::Rename(self.name(UNFINISHED), self.name(&checkpoint_name(self.generation))),
                    (3, _) => Op::SyncNames(folder_of(&self.store)),
                    (_, Some(file)) => Op::Remove(self.name(&file)),
                    (_, None) => Op::SyncNames(folder_of(&self.store)),
                })
            }
        }
    }

    /// Advances the checkpoint after an operation for it.
    pub(super) fn checkpointed_one(&mut self, result: io::Result<()>) {
        let syncs_log = matches!(self.checkpoint, Checkpoint::Rotate(0) | Checkpoint::Finish { step: 0, .. });
        if let Err(error) = &result
            && syncs_log
        {
            // The system reports an error once: a later sync succeeds although records that count are gone.
            self.break_down("be synced", error);
            return;
        }
        let is_effective = matches!(self.checkpoint, Checkpoint::Finish { step: 4.., .. });
        if let Err(error) = result
            && !is_effective
        {
            let name = &self.store.name;
            if !self.is_wanted {
                self.notes.push(format!(
                    "the log of store '{name}' was not shortened: {error}; it is tried again when the log has grown \
                     further"
                ));
            } else if !std::mem::replace(&mut self.has_reported, true) {
                self.notes.push(format!(
                    "the log of store '{name}' lacks what the memory has, since a checkpoint cannot be written: \
                     {error}; it is tried again; free space in --log-dir"
                ));
            }
            self.give_up_checkpoint();
            return;
        }
        match &mut self.checkpoint {
            Checkpoint::None => {}
            Checkpoint::Rotate(step @ 0..3) => *step += 1,
            Checkpoint::Rotate(_) => {
                self.old.push(log_name(self.generation));
                self.generation += 1;
                self.durable = self.next - 1;
                self.len = self.head(Part::Log, self.generation, self.next).len() as u64;
                self.checkpoint = Checkpoint::Collect(Collected { sequence: 1, ..Collected::default() });
            }
            Checkpoint::Collect(of) if !of.is_made => {
                of.is_made = true;
                let head = self.head(Part::Checkpoint, self.generation, 1).len() as u64;
                if let Checkpoint::Collect(of) = &mut self.checkpoint {
                    of.len = head;
                }
            }
            Checkpoint::Collect(of) => {
                if of.is_end_written {
                    let (len, through, old) = (of.len, of.through, self.old.clone());
                    self.checkpoint = Checkpoint::Finish { step: 0, len, through, old };
                }
            }
            Checkpoint::Finish { step: step @ 0..3, .. } => *step += 1,
            Checkpoint::Finish { step: step @ 3, len, .. } => {
                *step += 1;
                self.old = vec![checkpoint_name(self.generation)];
                (self.checkpointed, self.logged) = (*len, self.len);
                self.not_before = self.options.checkpoint_min.max(2 * self.checkpointed);
                (self.is_wanted, self.has_reported) = (false, false);
            }
            // A file that cannot be removed is removed by the next start.
            Checkpoint::Finish { old, .. } => {
                if old.pop().is_none() {
                    self.checkpoint = Checkpoint::None;
                }
            }
        }
    }

    pub(super) fn give_up_checkpoint(&mut self) {
        self.checkpoint = Checkpoint::None;
        self.not_before = self.logged + self.options.checkpoint_min;
        self.wanted_at = self.now + CHECKPOINT_RETRY;
    }
}
