//! The log of a store: its service's records, which a restart replays.
//!
//! A log is a state machine without files or threads. Threads that run the service append records. One writer takes an
//! [`Op`] at a time from [`Log::next`], performs it on a [`Disk`], and reports the result to [`Log::done`]. In the host
//! the writer is a thread, in the simulator a task.
//!
//! Records wait in a queue of bounded size. A write takes all of them, so threads that append while a write or a sync
//! runs share the next one (group commit).
//!
//! When the log has grown much beyond its last *checkpoint*, the writer begins a file of the next *generation*. The
//! node then collects records from the service that recreate what the earlier generations contain, and the writer
//! writes them to a checkpoint. It takes effect by being renamed. Only then are the earlier files removed.
//!
//! Invariant: records reach the file in the order in which they were appended.
//! Invariant: a position is settled as good only when its record is as durable as the policy promises, and as failed
//! only if a restart will not replay it, or, after an error of the disk that leaves this open, not necessarily.
//! Invariant: records that count without being durable are dropped only if the disk fails, and not if it is full.
//! Invariant: what a checkpoint contains was durable in the log before the checkpoint takes effect.
//! Invariant: a record that is stored was appended after all calls ended whose records failed before it, so it depends
//! on none of them.

mod checkpoint;
pub mod format;
pub mod mutants;
pub mod pairing;
mod recover;
pub mod resume;

pub use recover::{Found, RecoverError, Recovered, find, recover};

use checkpoint::{Checkpoint, Collected, UNFINISHED};
use farside_remote::control::Store;
use farside_remote::fabric::UNKNOWN;
use farside_remote::service::Records;
use format::{Head, Part};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// When a record counts as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SyncPolicy {
    /// At once. The system writes it to the disk when it likes.
    Never,
    /// At once. The log is synced at least every [`LogOptions::sync_interval`].
    Interval,
    /// When it is on the disk.
    #[default]
    Each,
}

/// Usual interval of syncs under [`SyncPolicy::Interval`]: a crash of the machine loses at most what was appended in
/// this time before, and in the time that one sync takes.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before a failed write is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// Maximum size in bytes of the records that wait for the writer.
const QUEUE_MAX: usize = 16 << 20;
/// Minimum size of a log in bytes before a checkpoint replaces it.
pub const CHECKPOINT_MIN: u64 = 64 << 20;

/// Options of the logs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// When a record counts as stored.
    pub sync: SyncPolicy,
    /// Interval of syncs under [`SyncPolicy::Interval`].
    pub sync_interval: Duration,
    /// Minimum size of a log in bytes before a checkpoint replaces it.
    pub checkpoint_min: u64,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        let sync = SyncPolicy::default();
        LogOptions { sync, sync_interval: SYNC_INTERVAL, checkpoint_min: CHECKPOINT_MIN }
    }
}

/// Files of logs. A file's name is `STORE.ID/FILE`, relative to the folder of all logs.
pub trait Disk {
    /// Creates a file with these bytes, and its folder, if missing. Replaces a file of this name.
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// Writes bytes at a position of a file.
    fn write_at(&mut self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Cuts a file to this size.
    fn cut(&mut self, name: &str, len: u64) -> io::Result<()>;
    /// Makes a file's contents durable.
    fn sync(&mut self, name: &str) -> io::Result<()>;
    /// Makes the names in a store's folder durable, and the folder itself.
    fn sync_names(&mut self, folder: &str) -> io::Result<()>;
    /// Renames a file within its folder.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&mut self, name: &str) -> io::Result<()>;
    /// Renames a store's folder, durably. There is no folder of the new name.
    fn rename_folder(&mut self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a store's folder with all its files, all at once, and durably.
    fn remove_folder(&mut self, folder: &str) -> io::Result<()>;
    /// The stores' folders.
    fn folders(&self) -> io::Result<Vec<String>>;
    /// The names of a folder's files, without the folder.
    fn files(&self, folder: &str) -> io::Result<Vec<String>>;
    /// A file's contents.
    fn open(&self, name: &str) -> io::Result<Box<dyn format::Source + '_>>;
}

/// One operation of a log's writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// See [`Disk::create`].
    Create(String, Vec<u8>),
    /// See [`Disk::write_at`].
    Write(String, u64, Vec<u8>),
    /// See [`Disk::cut`].
    Cut(String, u64),
    /// See [`Disk::sync`].
    Sync(String),
    /// See [`Disk::sync_names`].
    SyncNames(String),
    /// See [`Disk::rename`].
    Rename(String, String),
    /// See [`Disk::remove`].
    Remove(String),
    /// See [`Disk::remove_folder`].
    RemoveFolder(String),
}

impl Op {
    /// Whether the node may wait for the end of the operation, other than for the records that it stores.
    pub fn concerns_node(&self) -> bool {
        match self {
            Op::Write(name, ..) => name.ends_with(UNFINISHED),
            Op::Sync(_) | Op::Cut(..) => false,
            _ => true,
        }
    }

    /// Performs the operation.
    ///
    /// # Errors
    /// The disk failed.
    pub fn perform(&self, disk: &mut dyn Disk) -> io::Result<()> {
        match self {
            Op::Create(name, bytes) => disk.create(name, bytes),
            Op::Write(name, at, bytes) => disk.write_at(name, *at, bytes),
            Op::Cut(name, len) => disk.cut(name, *len),
            Op::Sync(name) => disk.sync(name),
            Op::SyncNames(folder) => disk.sync_names(folder),
            Op::Rename(from, to) => disk.rename(from, to),
            Op::Remove(name) => disk.remove(name),
            Op::RemoveFolder(folder) => disk.remove_folder(folder),
        }
    }
}

/// What a log's writer does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Performs an operation, and reports its result.
    Do(Op),
    /// Sleeps until the log changes, or until this time.
    Wait(Option<Duration>),
    /// Ends: the log was removed.
    End,
}

/// What became of an appended record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Appended {
    /// The record counts as stored.
    Stored,
    /// The record counts once this position is settled ([`Log::outcome`]).
    At(u64),
}

/// The log of a store. See the [module](self).
#[derive(Debug)]
pub struct Log {
    store: Store,
    options: LogOptions,
    /// Random number from which the salts of files are derived.
    salt: u64,
    generation: u64,
    /// Size of the valid part of the generation's file.
    len: u64,
    /// Sequence of the next frame.
    next: u64,
    /// Highest sequence that no crash can lose.
    durable: u64,
    /// Size of the files that a checkpoint would replace, and of the last checkpoint.
    logged: u64,
    checkpointed: u64,
    /// Number of positions so far: one for each append.
    appended: u64,
    /// Positions up to here are settled.
    settled: u64,
    /// Highest position in the file.
    written: u64,
    /// Ranges of positions that failed, with the reason, in ascending order.
    failed: VecDeque<(u64, u64, String)>,
    /// Positions up to here may have failed, which is no longer known.
    forgotten: u64,
    /// Number of failed appends whose calls have not ended, and the last failure. Nothing is appended until they have
    /// ended: it could depend on them, as the answer of a delete depends on the puts before it.
    unended: u64,
    last_failure: String,
    queue: Records,
    /// Position of the last record in the queue.
    queued: u64,
    /// Records whose write failed and is tried again, up to a position.
    retry: Option<(Records, u64)>,
    retry_at: Duration,
    /// Reason why no records are accepted for now.
    full: Option<String>,
    /// Reason why the log accepts nothing until a restart.
    broken: Option<String>,
    sync_at: Option<Duration>,
    /// Number of steps done to make the log's first file: the file, its sync, its name.
    creation: u8,
    must_cut: bool,
    /// Reason why the records since the last settled position fail, once the cut that removes them is durable.
    failing: Option<String>,
    /// Names of the files that the next checkpoint replaces, but for the generation's own.
    old: Vec<String>,
    /// Whether the last write failed.
    is_failing: bool,
    /// Whether the log has no writer.
    is_abandoned: bool,
    doing: Option<Doing>,
    checkpoint: Checkpoint,
    /// Size of the log before which no checkpoint is begun.
    not_before: u64,
    /// Whether the log lacks contents of the store, which the next checkpoint stores, and the time before which it is
    /// not begun.
    is_wanted: bool,
    wanted_at: Duration,
    /// Whether the log has reported that such a checkpoint failed.
    has_reported: bool,
    /// Time at which the writer last took an operation.
    now: Duration,
    removal: Removal,
    counted: Counted,
    /// Events for the node's report.
    notes: Vec<String>,
}

/// What a log has done since the node's process started.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// Number and size of the records that were appended.
    records: u64,
    bytes: u64,
    syncs: u64,
    /// Number of writes that failed.
    failed: u64,
    /// Number of records of the replay at the start, and how long it took.
    replayed: u64,
    replay_ms: u64,
}

#[derive(Debug)]
enum Doing {
    Create,
    Write { records: Records, position: u64, size: u64 },
    Cut,
    SyncCut,
    Sync { sequence: u64, position: u64 },
    Checkpoint,
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    Not,
    Wanted,
    Done,
}

/// Number of steps that make a log's first file.
const CREATED: u8 = 3;

/// A log that threads share.
#[derive(Debug)]
pub struct StoreLog {
    log: Mutex<Log>,
    /// Signalled when the writer has work.
    work: Condvar,
    /// Signalled when positions are settled.
    settled: Condvar,
}

impl StoreLog {
    /// Shares a log.
    pub fn new(log: Log) -> StoreLog {
        StoreLog { log: Mutex::new(log), work: Condvar::new(), settled: Condvar::new() }
    }

    /// Locks the log.
    pub fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the writer.
    pub fn wake(&self) {
        self.work.notify_one();
    }

    /// Wakes the threads that wait for an outcome.
    pub fn announce(&self) {
        self.settled.notify_all();
    }

    /// Waits for the outcome of an append at this position.
    ///
    /// # Errors
    /// The record was not stored, for this reason.
    pub fn wait_for(&self, position: u64) -> Result<(), String> {
        let mut log = self.lock();
        loop {
            if let Some(outcome) = log.outcome(position) {
                return outcome;
            }
            log = self.settled.wait(log).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the writer is woken, for at most this time.
    pub fn wait<'a>(&self, log: MutexGuard<'a, Log>, left: Option<Duration>) -> MutexGuard<'a, Log> {
        match left {
            Some(left) => self.work.wait_timeout(log, left).unwrap_or_else(PoisonError::into_inner).0,
            None => self.work.wait(log).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// Name of the folder of a store's log.
pub fn folder_of(store: &Store) -> String {
    format!("{}.{:016x}", store.name, store.id)
}

fn log_name(generation: u64) -> String {
    format!("log.{generation:08}")
}

impl Log {
    /// Begins the log of a store without earlier records. `salt` is random.
    pub fn new(store: Store, options: LogOptions, salt: u64) -> Log {
        Log {
            // The key of the store is no business of its files.
            store: Store { secret: 0, former: None, ..store },
            options,
            salt,
            generation: 1,
            len: 0,
            next: 1,
            durable: 0,
            logged: 0,
            checkpointed: 0,
            appended: 0,
            settled: 0,
            written: 0,
            failed: VecDeque::new(),
            forgotten: 0,
            unended: 0,
            last_failure: String::new(),
            queue: Records::default(),
            queued: 0,
            retry: None,
            retry_at: Duration::ZERO,
            full: None,
            broken: None,
            sync_at: None,
            creation: 0,
            must_cut: false,
            failing: None,
            old: Vec::new(),
            is_failing: false,
            is_abandoned: false,
            doing: None,
            checkpoint: Checkpoint::None,
            not_before: options.checkpoint_min,
            is_wanted: false,
            wanted_at: Duration::ZERO,
            has_reported: false,
            now: Duration::ZERO,
            removal: Removal::Not,
            counted: Counted::default(),
            notes: Vec::new(),
        }
    }

    /// The store whose log it is.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The number with which a log is paired that was never replayed.
    pub fn first_pairing(&self) -> u64 {
        self.salt
    }

    /// Generation of the next checkpoint.
    pub fn next_generation(&self) -> u64 {
        self.generation + 1
    }

    /// Appends the records of one call. They are stored together or not at all, unless a crash strikes in between.
    ///
    /// # Errors
    /// Nothing was appended; the error gives the reason and the remedy.
    pub fn append(&mut self, records: &Records) -> Result<Appended, String> {
        let name = &self.store.name;
        if let Some(reason) = &self.broken {
            return Err(format!(
                "the log of store '{name}' failed, and nothing is written to the store until the node is restarted: \
                 {reason}; nothing was done"
            ));
        }
        if let Some(reason) = self.full.as_ref().or((self.unended > 0).then_some(&self.last_failure)) {
            return Err(format!(
                "the log of store '{name}' cannot be written: {reason}; nothing was done; free space in --log-dir, \
                 and retry"
            ));
        }
        if self.removal != Removal::Not {
            return Err(format!("store '{name}' is being dropped; nothing was done"));
        }
        if records.iter().any(|record| record.len() > format::RECORD_MAX) {
            return Err(format!(
                "a record for the log of store '{name}' is longer than {} MiB; nothing was done; put less at a time",
                format::RECORD_MAX >> 20
            ));
        }
        if self.queue.size() + records.size() > QUEUE_MAX {
            return Err(format!(
                "the log of store '{name}' is {} MiB behind: its disk is too slow for these writes; nothing was done; \
                 retry later",
                QUEUE_MAX >> 20
            ));
        }
        records.iter().for_each(|record| self.queue.append(record));
        self.counted.records += records.len() as u64;
        self.counted.bytes += records.size() as u64;
        self.appended += 1;
        self.queued = self.appended;
        Ok(match self.options.sync {
            SyncPolicy::Each => Appended::At(self.appended),
            SyncPolicy::Interval | SyncPolicy::Never => Appended::Stored,
        })
    }

    /// The outcome of an append at this position, once it is settled.
    pub fn outcome(&self, position: u64) -> Option<Result<(), String>> {
        if position > self.settled {
            return None;
        }
        if position <= self.forgotten {
            let name = &self.store.name;
            return Some(Err(format!(
                "{UNKNOWN}: the log of store '{name}' settled a write long ago, and its outcome is forgotten; read \
                 the value"
            )));
        }
        let failed = self.failed.iter().find(|(from, to, _)| (*from..=*to).contains(&position));
        Some(failed.map_or(Ok(()), |(_, _, reason)| Err(reason.clone())))
    }

    /// Notes that the call ended whose records were appended at this position.
    pub fn note_end(&mut self, position: u64) {
        let has_failed = matches!(self.outcome(position), Some(Err(_)));
        self.unended = self.unended.saturating_sub(u64::from(has_failed));
    }

    /// Number of appends whose outcome is not known yet.
    pub fn outstanding(&self) -> u64 {
        self.appended - self.settled
    }

    /// Whether the log's file exists, durably, or cannot be made.
    pub fn is_ready(&self) -> bool {
        self.creation == CREATED || self.broken.is_some()
    }

    /// Notes how many records were replayed at the start, and how long that took.
    pub fn note_replay(&mut self, records: u64, took: Duration) {
        self.counted.replayed = records;
        self.counted.replay_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    }

    /// Numbers for the operator, by their names. All but the size of the files count since the node's process started.
    pub fn report(&self) -> [(&'static str, u64); 7] {
        let Counted { records, bytes, syncs, failed, replayed, replay_ms } = self.counted;
        let collected = match &self.checkpoint {
            Checkpoint::Collect(of) => of.len,
            Checkpoint::Finish { step: 0..=3, len, .. } => *len,
            _ => 0,
        };
        [
            ("log_records", records),
            ("log_record_bytes", bytes),
            ("log_file_bytes", self.logged + self.checkpointed + collected),
            ("log_syncs", syncs),
            ("log_failed_writes", failed),
            ("log_replayed_records", replayed),
            ("log_replay_ms", replay_ms),
        ]
    }

    /// Reason why the log accepts no records, if it does not.
    pub fn refuses(&self) -> Option<&str> {
        self.broken.as_deref().or(self.full.as_deref())
    }

    /// Discards all records, and removes the log's files.
    pub fn remove(&mut self) {
        if self.removal == Removal::Not {
            // Without a writer, nothing was written.
            self.removal = if self.is_abandoned { Removal::Done } else { Removal::Wanted };
        }
    }

    /// Whether the log's files are gone, or cannot be removed.
    pub fn is_removed(&self) -> bool {
        self.removal == Removal::Done
    }

    /// Removes and returns events to report.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Gives the log up because it could not be paired with the node's memory: what was written to it would be lost if
    /// the memory with which it is paired came back.
    pub fn refuse_unpaired(&mut self, error: &RecoverError) {
        self.break_down("be paired with the memory", error);
    }

    /// Gives the log up because it has records that the memory never had, which could not be taken back: later records
    /// could be lost by their replay.
    pub fn refuse_unanswered(&mut self, reason: &str) {
        self.break_down("take back what was never answered", &reason);
    }

    /// Gives the log up because its writer ends with the node. Nobody waits for a record that nobody writes.
    pub fn end(&mut self) {
        self.broken.get_or_insert_with(|| "the node has ended".into());
        self.settle_failed(
            self.appended,
            "the node has ended, and nothing was done; reach it when it serves again",
        );
    }

    /// Gives the log up because it has no writer: its thread could not be started, with this error.
    pub fn abandon(&mut self, error: &io::Error) {
        self.is_abandoned = true;
        self.break_down("get a thread", error);
    }

    /// Number of records that count or wait, and are not in the file.
    pub fn unwritten(&self) -> usize {
        self.queue.len() + self.retry.as_ref().map_or(0, |(records, _)| records.len())
    }

    /// Tries a failed write again at once.
    pub fn retry_now(&mut self) {
        self.retry_at = Duration::ZERO;
    }

    /// The file to sync when a node ends, so that records are durable that count without it.
    pub fn file_to_sync(&self) -> Option<String> {
        (self.broken.is_none() && self.durable + 1 < self.next).then(|| self.file())
    }

    fn name(&self, file: &str) -> String {
        format!("{}/{file}", folder_of(&self.store))
    }

    fn file(&self) -> String {
        self.name(&log_name(self.generation))
    }

    fn head(&self, part: Part, generation: u64, first: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let head = Head { part, generation, first, store: Cow::Borrowed(&self.store) };
        format::put_head(&mut bytes, self.salt ^ salt_of(part, generation), &head);
        bytes
    }

    /// What the writer does next, at this time.
    ///
    /// # Panics
    /// The result of the last operation was not reported.
    pub fn next(&mut self, now: Duration) -> Next {
        assert!(self.doing.is_none(), "a log's writer does one thing at a time");
        let (doing, op) = match self.removal {
            Removal::Done => return Next::End,
            Removal::Wanted => (Doing::Remove, Op::RemoveFolder(folder_of(&self.store))),
            Removal::Not if self.broken.is_some() => return Next::Wait(None),
            Removal::Not => match self.next_op(now) {
                Ok(next) => next,
                Err(until) => return Next::Wait(until),
            },
        };
        self.doing = Some(doing);
        Next::Do(op)
    }

    fn next_op(&mut self, now: Duration) -> Result<(Doing, Op), Option<Duration>> {
        self.now = now;
        let is_waiting = self.is_wanted && matches!(self.checkpoint, Checkpoint::None);
        let wanted_at = Some(self.wanted_at).filter(|&at| is_waiting && at > now);
        if self.creation < CREATED {
            let op = match self.creation {
                0 => {
                    let head = self.head(Part::Log, self.generation, self.next);
                    self.len = head.len() as u64;
                    Op::Create(self.file(), head)
                }
                1 => Op::Sync(self.file()),
                _ => Op::SyncNames(folder_of(&self.store)),
            };
            return Ok((Doing::Create, op));
        }
        if self.must_cut {
            return Ok((Doing::Cut, Op::Cut(self.file(), self.len)));
        }
        if self.failing.is_some() {
            return Ok((Doing::SyncCut, Op::Sync(self.file())));
        }
        let is_unsynced = self.durable + 1 < self.next;
        let is_sync_due = match self.options.sync {
            SyncPolicy::Each => is_unsynced,
            SyncPolicy::Interval => is_unsynced && self.sync_at.is_some_and(|at| at <= now),
            SyncPolicy::Never => false,
        };
        if is_sync_due {
            let (sequence, position) = (self.next - 1, self.written);
            return Ok((Doing::Sync { sequence, position }, Op::Sync(self.file())));
        }
        if let Some(op) = self.next_of_checkpoint() {
            return Ok((Doing::Checkpoint, op));
        }
        if self.retry.is_some() && now < self.retry_at {
            return Err(Some(self.retry_at));
        }
        if self.retry.is_none() && self.queue.is_empty() {
            let sync_at = self.sync_at.filter(|_| is_unsynced && self.options.sync == SyncPolicy::Interval);
            return Err(sync_at.into_iter().chain(wanted_at).min());
        }
        let (records, position) =
            self.retry.take().unwrap_or_else(|| (std::mem::take(&mut self.queue), self.queued));
        let durable = match self.options.sync {
            // What an earlier write has stored counts, as nothing more is known.
            SyncPolicy::Never => self.next - 1,
            SyncPolicy::Interval | SyncPolicy::Each => self.durable,
        };
        let mut bytes = Vec::with_capacity(records.size() + records.len() * format::frame_size(0));
        let salt = self.salt ^ salt_of(Part::Log, self.generation);
        for (sequence, record) in (self.next..).zip(records.iter()) {
            format::put_frame(&mut bytes, salt, sequence, durable, record);
        }
        if self.options.sync == SyncPolicy::Interval && !is_unsynced {
            self.sync_at = (!mutants::LOG_NEVER_SYNCS.is_on()).then_some(now + self.options.sync_interval);
        }
        self.retry_at = now + RETRY;
        let doing = Doing::Write { records, position, size: bytes.len() as u64 };
        Ok((doing, Op::Write(self.file(), self.len, bytes)))
    }

    /// Reports the result of the operation that [`Log::next`] returned last.
    ///
    /// # Panics
    /// There was no such operation.
    pub fn done(&mut self, result: io::Result<()>) {
        match self.doing.take().expect("an operation was begun") {
            Doing::Create => match result {
                Ok(()) => self.creation += 1,
                Err(error) => self.break_down("be created", &error),
            },
            Doing::Write { records, position, size } => self.wrote(records, position, size, result),
            Doing::Cut => match result {
                Ok(()) => self.must_cut = false,
                Err(error) => self.break_down("have its file cut", &error),
            },
            Doing::SyncCut => match result {
                Ok(()) => {
                    if let Some(reason) = self.failing.take() {
                        // Records that were appended meanwhile may depend on those that failed.
                        self.queue.clear();
                        self.fail_with_checkpoint(self.appended, &reason);
                    }
                }
                Err(error) => self.break_down("be synced", &error),
            },
            Doing::Sync { sequence, position } => match result {
                Ok(()) => {
                    self.counted.syncs += 1;
                    self.durable = sequence;
                    self.sync_at = None;
                    self.settle_good(position);
                }
                // The system may have dropped the bytes that it could not write: nothing is known of them any more.
                Err(error) => self.break_down("be synced", &error),
            },
            Doing::Checkpoint => self.checkpointed_one(result),
            Doing::Remove => {
                if let Err(error) = result {
                    self.notes.push(format!(
                        "the log of store '{}', which was dropped, cannot be removed: {error}; remove its folder {} \
                         from --log-dir before the node is started again",
                        self.store.name,
                        folder_of(&self.store)
                    ));
                }
                self.removal = Removal::Done;
                self.fail_all("the store was dropped");
            }
        }
    }

    fn wrote(&mut self, records: Records, position: u64, size: u64, result: io::Result<()>) {
        let name = &self.store.name;
        match result {
            Ok(()) => {
                if std::mem::take(&mut self.is_failing) {
                    self.notes.push(format!("the log of store '{name}' is written again"));
                }
                self.full = None;
                self.next += records.len() as u64;
                (self.len, self.logged) = (self.len + size, self.logged + size);
                self.written = position;
                if self.options.sync != SyncPolicy::Each || mutants::LOG_COUNTS_UNSYNCED.is_on() {
                    self.settle_good(position);
                }
            }
            Err(error) => {
                self.counted.failed += 1;
                // Bytes of the write may be in the file, and must not stay there before those of the next write.
                self.must_cut = !mutants::LOG_KEEPS_FAILED_WRITES.is_on();
                if !std::mem::replace(&mut self.is_failing, true) {
                    self.notes.push(format!(
                        "the log of store '{name}' cannot be written: {error}; puts and deletes fail until --log-dir \
                         has space again"
                    ));
                }
                if self.options.sync == SyncPolicy::Each {
                    let reason = format!(
                        "the log of store '{name}' could not be written: {error}; nothing was done; free space in \
                         --log-dir, and retry"
                    );
                    self.last_failure = error.to_string();
                    if mutants::LOG_STORES_AFTER_FAILURE.is_on() {
                        self.fail_with_checkpoint(position, &reason);
                    } else if self.must_cut && !mutants::LOG_FAILS_BEFORE_CUT.is_on() {
                        // Until the cut, a restart could replay whole records of the write.
                        self.failing = Some(reason);
                    } else {
                        self.queue.clear();
                        self.fail_with_checkpoint(self.appended, &reason);
                    }
                } else {
                    // These records count already.
                    self.retry = (!mutants::LOG_DROPS_WHEN_FULL.is_on()).then_some((records, position));
                    self.full = Some(error.to_string());
                }
            }
        }
    }

    /// Settles all positions up to `position` as failed. Gives up a checkpoint that may have the effects of some.
    fn fail_with_checkpoint(&mut self, position: u64, reason: &str) {
        let first = self.settled + 1;
        let has_effects = match &self.checkpoint {
            // Records may have been read for it that are not collected yet.
            Checkpoint::Collect(Collected { is_ended: false, .. }) => true,
            Checkpoint::Collect(Collected { through, .. }) | Checkpoint::Finish { step: 0, through, .. } => {
                first <= *through
            }
            _ => false,
        };
        if has_effects && !mutants::LOG_CHECKPOINT_HAS_FAILED.is_on() {
            self.give_up_checkpoint();
        }
        self.settle_failed(position, reason);
        self.unended += (position + 1).saturating_sub(first);
    }

    fn settle_good(&mut self, position: u64) {
        self.settled = self.settled.max(position);
    }

    /// Settles all positions up to `position` as failed.
    fn settle_failed(&mut self, position: u64, reason: &str) {
        if position <= self.settled {
            return;
        }
        let first = self.settled + 1;
        self.settled = position;
        match self.failed.back_mut() {
            Some((_, last, of)) if *last + 1 == first && of == reason => *last = position,
            _ => self.failed.push_back((first, position, reason.to_owned())),
        }
        // Callers ask for an outcome soon after it is settled.
        if self.failed.len() > FAILED_MAX
            && let Some((_, last, _)) = self.failed.pop_front()
        {
            self.forgotten = last;
        }
    }

    fn fail_all(&mut self, reason: &str) {
        self.queue.clear();
        self.retry = None;
        self.settle_failed(self.appended, reason);
    }

    /// Gives the log up until the next start.
    fn break_down(&mut self, what: &str, error: &dyn std::fmt::Display) {
        let name = &self.store.name;
        let reason = format!(
            "the log of store '{name}' could not {what}: {error}; nothing is written to the store until the node is \
             restarted with a sound disk for --log-dir"
        );
        let unknown = format!("{UNKNOWN}: {reason}");
        self.notes.push(reason);
        self.broken = Some(format!("it could not {what}: {error}"));
        self.checkpoint = Checkpoint::None;
        self.fail_all(&unknown);
    }
}

/// Maximum number of failed ranges that are kept.
const FAILED_MAX: usize = 1024;

/// The part of a file's salt that distinguishes the files of a log.
fn salt_of(part: Part, generation: u64) -> u64 {
    generation.rotate_left(32) ^ u64::from(part == Part::Checkpoint)
}
