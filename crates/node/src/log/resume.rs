//! Recovery of stores with logs at the start of a node: each store and its log are made to agree.
//!
//! Invariant: a store is served only once it and its log agree. Otherwise it is refused.
//! Invariant: a memory is emptied only once its store's log was read to its end, and each record can be replayed.
//! Invariant: before a log takes a record, it has taken back all records that its memory never had
//! ([`Service::take_back`](farside_remote::service::Service::take_back)).
//! Invariant: a log whose pairing could not be written takes no record, unless it and this memory were a pair before.

use super::pairing::{Believed, Paired, PairedState, Pairing, believed, pair};
use super::{Appended, Disk, Found, Log, LogOptions, Next, RecoverError, Recovered, StoreLog, recover};
use crate::node::pairing::incomplete;
use crate::node::{Node, NodeMemory, Progress};
use crate::served::Start;
use farside_remote::control::Store;
use farside_remote::service::{Records, Work};
use std::sync::Arc;
use std::time::Duration;

/// End of the name of a log's folder that was set aside. It is no name of a log's folder.
const ASIDE: &str = ".aside";

/// Memory of a node that starts. Nobody else uses it yet.
pub trait StartMemory: NodeMemory {
    /// Runs `code`, none of whose accesses waits.
    fn run_at_once<R>(&self, code: impl FnOnce(&Self) -> Result<R, Self::Wait>) -> R;
}

/// The node's host, as the recovery of logs uses it.
pub trait Host {
    /// Draws 64 random bits.
    fn random(&mut self) -> u64;

    /// The time.
    fn now(&self) -> Duration;

    /// Notes that a step of a recovery is done. The next start goes on from there.
    ///
    /// # Errors
    /// The process ends here. Only the simulator's does.
    fn step_done(&mut self) -> Result<(), Ended> {
        Ok(())
    }
}

/// The process of a simulated node has ended between two steps of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

/// The stores of a node that starts, and their logs.
pub struct Resuming<'a, M: NodeMemory> {
    /// The files of the logs.
    pub disk: &'a mut dyn Disk,
    /// The node.
    pub node: &'a mut Node<M>,
    /// The node's memory.
    pub memory: &'a M,
    /// Options of the logs.
    pub options: LogOptions,
    /// Whether the machine has not crashed since the memory was served.
    pub is_same_boot: bool,
    /// The node's host.
    pub host: &'a mut dyn Host,
}

/// Error of the recovery of a log. The node must not serve.
#[derive(Debug)]
pub enum ResumeError {
    /// The log cannot be read.
    Log(RecoverError),
    /// The store and its log cannot be made to agree.
    Store(String),
    /// The process has ended.
    Ended,
}

impl std::fmt::Display for ResumeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ResumeError::Log(error) => error.fmt(f),
            ResumeError::Store(reason) => f.write_str(reason),
            ResumeError::Ended => f.write_str("the process ended"),
        }
    }
}

impl From<String> for ResumeError {
    fn from(reason: String) -> ResumeError {
        ResumeError::Store(reason)
    }
}

impl From<Ended> for ResumeError {
    fn from(Ended: Ended) -> ResumeError {
        ResumeError::Ended
    }
}

impl<M: StartMemory> Resuming<'_, M> {
    /// Makes a store and its log agree: replays the log into the store, which is created if the memory does not have
    /// it, or makes the log store what the memory has. A store whose log has a record that cannot be replayed is
    /// refused, and the node serves the others.
    ///
    /// # Errors
    /// [`ResumeError`]. The recovery may be tried again.
    pub fn resume(&mut self, found: &Found) -> Result<(), ResumeError> {
        let Found { folder, store, pairing, is_whole } = found;
        let name = &store.name;
        let incarnation = self.node.info().incarnation;
        let held = self.node.catalog().get(name);
        let held = held.map(|entry| (entry.store.id, entry.paired().copied()));
        let source = match held {
            Ok((id, _)) if id != store.id => {
                return Err(ResumeError::Store(format!(
                    "the memory has another store '{name}' than the log {folder}; serve the memory that belongs to \
                     the log, or move the log's folder away"
                )));
            }
            Ok((_, paired)) => believed(pairing, *is_whole, paired.as_ref(), self.is_same_boot)
                .map_err(|reason| format!("store '{name}' has the log {folder}: {reason}"))?,
            Err(_) if pairing.incarnation == incarnation && self.is_same_boot => {
                // The memory was kept, and its catalog does not have the store. Either its drop was recorded, and the
                // node died before it removed the log. Or the memory is a copy that is older than the store. After a
                // crash of the machine, the record of its creation may be missing instead.
                return Ok(self.set_aside(found)?);
            }
            Err(_) if store.membership.is_some() => {
                return Err(ResumeError::Store(format!(
                    "the log {folder} is of a store with several members, whose part at this node is lost with the \
                     memory; replace the member, and move the log's folder away"
                )));
            }
            Err(_) => {
                self.recreate(store).map_err(|reason| {
                    format!("the store '{name}' of the log {folder} cannot be created: {reason}")
                })?;
                self.host.step_done()?;
                Believed::Log
            }
        };
        let read = match source {
            Believed::Memory => self.compare(found)?,
            // What the memory has is given up only once the log is known to be readable.
            Believed::Log if held.is_ok() => match self.check(found)? {
                Ok(()) => {
                    self.host.step_done()?;
                    self.empty(found)?;
                    self.host.step_done()?;
                    self.replay(found)?
                }
                Err(reason) => Err(reason),
            },
            Believed::Log => self.replay(found)?,
        };
        let mut log = match read {
            Ok(log) => log,
            Err(reason) => {
                tracing::error!("store '{name}' is not served: {reason}");
                return Ok(self.node.refuse(name, reason)?);
            }
        };
        self.host.step_done()?;
        let before = held.ok().and_then(|(_, paired)| paired);
        let is_kept = before.is_some_and(|paired| paired.state == PairedState::Kept);
        let whole_from = match source {
            Believed::Log if !is_whole => {
                tracing::error!(
                    "the memory of store '{name}' is lost, and its log {folder} did not have all contents yet: what \
                     is older than the log is lost"
                );
                0
            }
            Believed::Log => pairing.whole_from,
            // Records may have been lost in the process that was to write them, or were never answered.
            Believed::Memory => {
                log.want_checkpoint();
                if is_kept && *is_whole { pairing.whole_from } else { log.next_generation() }
            }
        };
        let is_former_memory = pairing.incarnation == incarnation;
        let former = before.filter(|_| source == Believed::Memory).map(|paired| paired.number);
        let pairing = Pairing { number: self.host.random(), former, whole_from, incarnation };
        match pair(self.disk, &log, &pairing) {
            Ok(()) => {
                self.host.step_done()?;
                self.paired(&log, &pairing)?;
                self.host.step_done()?;
                // A copy of the memory that was made before lacks what is written from now on.
                pair(self.disk, &log, &Pairing { former: None, ..pairing }).unwrap_or_else(|error| {
                    tracing::warn!(
                        "a copy of the memory of store '{name}' may be taken for the memory: {error}"
                    );
                });
            }
            // The next start could replay the log again, believe another memory that came back, or believe this one
            // after a crash of the machine. Each lacks what is answered from now on.
            Err(error) if source == Believed::Log || !is_former_memory || !is_kept => {
                log.refuse_unpaired(&error);
                log.take_notes().iter().for_each(|note| tracing::error!("{note}"));
            }
            // What the memory and the log say of each other stays true, so the next start decides between them as if
            // this one had not been.
            Err(error) => {
                tracing::warn!("the log of store '{name}' could not be paired with the memory: {error}")
            }
        }
        self.host.step_done()?;
        Ok(self.node.resume_log(name, Arc::new(StoreLog::new(log)))?)
    }

    /// Renames the log of a store that was dropped or is newer than the memory, so that no start finds it.
    fn set_aside(&mut self, found: &Found) -> Result<(), String> {
        let Found { folder, store, .. } = found;
        let failed = |error| {
            format!(
                "the log {folder} of a store that the memory lacks cannot be renamed: {error}; move it away"
            )
        };
        let folders = self.disk.folders().map_err(failed)?;
        let mut names = (1..).map(|number| match number {
            1 => format!("{folder}{ASIDE}"),
            _ => format!("{folder}{ASIDE}-{number}"),
        });
        let aside = names.find(|name| !folders.contains(name)).expect("some number is free");
        self.disk.rename_folder(folder, &aside).map_err(failed)?;
        tracing::warn!(
            "the memory lacks store '{}': the store was dropped, or the memory is a copy that is older; the log \
             {folder} is not used, and was renamed to {aside}",
            store.name
        );
        Ok(())
    }

    /// Creates a store that the memory lacks, for the replay of its log.
    fn recreate(&mut self, store: &Store) -> Result<(), String> {
        let ticket = self.node.recreate(store, self.host.random())?;
        while self.memory.run_at_once(|memory| self.node.step(memory)) == Progress::Made {}
        match self.node.answer() {
            Some((answered, Ok(_))) if answered == ticket => Ok(()),
            other => Err(format!("{other:?}; start again")),
        }
    }

    /// Discards the contents of a store that the memory has, for the replay of its log.
    fn empty(&mut self, found: &Found) -> Result<(), String> {
        let (name, secret) = (&found.store.name, self.host.random());
        let emptied = self.memory.run_at_once(|memory| self.node.empty(memory, name, secret));
        emptied.map_err(|reason| {
            format!("the store '{name}' of the log {} cannot be created: {reason}", found.folder)
        })
    }

    /// Reads a log that is to be replayed, and changes nothing in the store. Returns the inner error if a record cannot
    /// be replayed.
    fn check(&mut self, found: &Found) -> Result<Result<(), String>, ResumeError> {
        let served = Arc::clone(&self.node.catalog().get(&found.store.name)?.served);
        let guard = served.lock(Work::Live);
        Ok(self.read(found, |_, record| guard.service().check(record))?.map(drop))
    }

    /// Reads the log of a store whose memory is believed, and takes back the records that the memory never had.
    fn compare(&mut self, found: &Found) -> Result<Result<Log, String>, ResumeError> {
        let (name, memory) = (&found.store.name, self.memory);
        let served = Arc::clone(&self.node.catalog().get(name)?.served);
        let guard = served.lock(Work::Live);
        let compared = self.read(found, |_, record| {
            memory.run_at_once(|memory| guard.compare(memory, record));
            Ok(())
        });
        let Recovered { mut log, records, .. } = match compared? {
            Ok(recovered) => recovered,
            Err(reason) => return Ok(Err(reason)),
        };
        tracing::info!(records, "the memory of store '{name}' has what its log has");
        let mut is_ended = false;
        while !is_ended {
            let mut records = Records::default();
            is_ended = !memory.run_at_once(|memory| guard.take_back(memory, &mut records));
            if records.is_empty() {
                continue;
            }
            tracing::info!(
                "{} records of store '{name}' were never answered, and are taken back",
                records.len()
            );
            if let Err(reason) = self.write(&mut log, &records) {
                log.refuse_unanswered(&reason);
                log.take_notes().iter().for_each(|note| tracing::error!("{note}"));
                break;
            }
            self.host.step_done()?;
        }
        Ok(Ok(log))
    }

    /// Writes records to a log before it takes any other.
    fn write(&mut self, log: &mut Log, records: &Records) -> Result<(), String> {
        let appended = log.append(records)?;
        while let Next::Do(op) = log.next(self.host.now()) {
            log.done(op.perform(self.disk));
        }
        match appended {
            Appended::At(position) => log.outcome(position).expect("its writer waits for nothing else"),
            Appended::Stored => log.refuses().map_or(Ok(()), |reason| Err(reason.to_owned())),
        }
    }

    /// Reads a log, and replays it into its store. Returns the inner error if a record cannot be replayed.
    ///
    /// # Errors
    /// The log is damaged, or cannot be read.
    fn replay(&mut self, found: &Found) -> Result<Result<Log, String>, ResumeError> {
        let Found { folder, store: Store { name, .. }, .. } = found;
        let (served, memory) = (Arc::clone(&self.node.catalog().get(name)?.served), self.memory);
        let began = self.host.now();
        let mut has_ended = Ok(());
        let recovered = self.read(found, |host, record| {
            let start = Start { now: host.now(), seed: host.random() };
            memory.run_at_once(|memory| served.lock(Work::Live).replay(memory, start, record))?;
            has_ended = host.step_done();
            has_ended.map_err(|Ended| String::new())
        });
        has_ended?;
        let Recovered { mut log, records, .. } = match recovered? {
            Ok(recovered) => recovered,
            Err(reason) => return Ok(Err(reason)),
        };
        let start = Start { now: self.host.now(), seed: self.host.random() };
        let dropped = memory.run_at_once(|memory| served.lock(Work::Live).replayed(memory, start));
        if dropped > 0 {
            tracing::error!(
                "{dropped} entries of store '{name}' were dropped: its log {folder} lacks what had replaced others"
            );
        }
        let took = self.host.now() - began;
        tracing::info!(records, "replayed the log of store '{name}' in {} ms", took.as_millis());
        log.note_replay(records, took);
        Ok(Ok(log))
    }

    /// Reads a log, and passes each record to `each`. Returns the inner error if `each` refuses a record.
    ///
    /// # Errors
    /// The log is damaged, or cannot be read.
    fn read(
        &mut self,
        found: &Found,
        mut each: impl FnMut(&mut dyn Host, &[u8]) -> Result<(), String>,
    ) -> Result<Result<Recovered, String>, ResumeError> {
        let Resuming { disk, host, options, .. } = self;
        let recovered = match recover(*disk, found, *options, |record| each(*host, record)) {
            Err(error @ RecoverError::Invalid(..)) => return Ok(Err(error.to_string())),
            recovered => recovered.map_err(ResumeError::Log)?,
        };
        if recovered.torn > 0 {
            tracing::warn!(
                "the log of store '{}' ended with {} bytes of an incomplete write, which were cut off",
                found.store.name,
                recovered.torn
            );
        }
        Ok(Ok(recovered))
    }

    /// Begins the log of a store that the memory has. Its contents are older than its log, so a checkpoint has to store
    /// them first.
    ///
    /// # Errors
    /// The disk failed, or the store's contents are incomplete without its log.
    pub fn begin(&mut self, name: &str) -> Result<(), ResumeError> {
        let entry = self.node.catalog().get(name)?;
        if entry.paired().is_some_and(|paired| paired.state == PairedState::Replaying) {
            return Err(ResumeError::Store(incomplete(name)));
        }
        let (number, salt) = (self.host.random(), self.host.random());
        let mut log = Log::new(entry.store.clone(), self.options, salt);
        log.want_checkpoint();
        let (whole_from, incarnation) = (log.next_generation(), self.node.info().incarnation);
        let pairing = Pairing { number, former: None, whole_from, incarnation };
        pair(self.disk, &log, &pairing).map_err(ResumeError::Log)?;
        self.host.step_done()?;
        self.paired(&log, &pairing)?;
        self.host.step_done()?;
        Ok(self.node.resume_log(name, Arc::new(StoreLog::new(log)))?)
    }

    /// Records in the memory that it is paired with a log.
    fn paired(&mut self, log: &Log, pairing: &Pairing) -> Result<(), String> {
        let paired = Paired { number: pairing.number, state: PairedState::Kept };
        self.memory.run_at_once(|memory| self.node.pair(memory, &log.store().name, paired))
    }
}
