//! Changes of the catalog that take several steps: creating a store, dropping one, fencing a client, and revoking a
//! member's key.
//!
//! Invariant: a job's response is available only when the catalog's record has the change.

use super::replacing::Revocation;
use super::{JobStep, Node, NodeMemory, Ticket, fill_table};
use crate::catalog::{Division, Entry};
use crate::extents::Extents;
use crate::identity::{FENCED_MAX, Fence, Fencing};
use crate::log::pairing::{Paired, PairedState};
use crate::log::{Log, StoreLog};
use crate::reclaim::Reclaim;
use crate::restart::Recorded;
use crate::session::{Grace, Sessions};
use crate::{identity, mutants, restart};
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::{Arena, Geometry, SEGMENT_SIZE};
use farside_remote::control::{Answer, Membership, Store};
use farside_remote::service::Plan;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A change of the catalog that takes several steps.
pub(super) enum Job<M: NodeMemory> {
    Fence(Fence),
    Revoke(Revocation),
    Create {
        entry: Box<Entry<M>>,
        division: Division,
        granted: usize,
    },
    /// `answer` is the response at the end: a refusal if the store could not be created.
    Drop {
        entry: Box<Entry<M>>,
        leaving: Leaving,
        freed: usize,
        answer: Box<Result<Answer, String>>,
    },
}

impl<M: NodeMemory> Job<M> {
    /// The tickets that wait for a job which may have several.
    pub(super) fn asked(&mut self) -> Option<&mut Vec<Ticket>> {
        match self {
            Job::Fence(fence) => Some(&mut fence.asked),
            Job::Revoke(revocation) => Some(&mut revocation.asked),
            Job::Create { .. } | Job::Drop { .. } => None,
        }
    }
}

/// What a new store gets besides its plan.
pub(super) struct Origin {
    pub(super) id: u64,
    /// Time of creation, in microseconds since the Unix epoch.
    pub(super) created: u64,
    pub(super) secret: u64,
    pub(super) membership: Option<Membership>,
    /// Whether the store gets a log, if the node has logs.
    pub(super) is_logged: bool,
    /// The memory's relation to the log that the store has already.
    pub(super) paired: Option<Paired>,
}

/// Progress of a dropped store's memory towards being unreferenced.
pub(super) enum Leaving {
    /// The key of the store is still valid: leaving has not begun.
    Not,
    /// The key is revoked, but chains that it admitted may still run.
    Chains(Grace),
    /// The chains have ended, so no more buffers of the store will be retired. Buffers retired earlier are on sessions'
    /// lists, among buffers of other stores.
    Retired { is_round_begun: bool },
    /// The lists were taken. But sessions that were moving buffers from one list to another in the meantime may still
    /// have to undo this.
    Taken(Grace),
    /// No key and no pointer refers to the store's memory any more.
    Left,
}

impl<M: NodeMemory> Node<M> {
    /// Starts to drop a store. The node forgets it at once, and responds with `answer` when its memory is free.
    pub(super) fn begin_drop(&mut self, name: &str, answer: Answer) -> Result<Job<M>, String> {
        let mut entry = Box::new(self.catalog.remove(name)?);
        self.bindings.forget_store(entry.store.region);
        self.timers.remove(&entry.store.region);
        let asked = entry.rebuild.take().map_or(Vec::new(), |rebuild| rebuild.asked);
        let dropped = Err(format!("store '{name}' was dropped in the meantime"));
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, dropped.clone())));
        Ok(Job::Drop { entry, leaving: Leaving::Not, freed: 0, answer: Box::new(Ok(answer)) })
    }

    pub(super) fn begin_create(
        &mut self,
        name: &str,
        kind: &str,
        parameters: &str,
        quota: u64,
        membership: Option<Membership>,
        [seed, secret]: [u64; 2],
    ) -> Result<Job<M>, String> {
        let kind_of = self.catalog.kind(kind)?;
        let (plan, is_logged) = (kind_of.plan(parameters, quota, seed)?, kind_of.is_logged());
        let origin = Origin { id: seed, created: self.wall, secret, membership, is_logged, paired: None };
        self.begin_planned(name, kind, plan, quota, origin)
    }

    /// Starts to create a store that its kind has planned.
    pub(super) fn begin_planned(
        &mut self,
        name: &str,
        kind: &str,
        plan: Plan,
        quota: u64,
        Origin { id, created, secret, membership, is_logged, paired }: Origin,
    ) -> Result<Job<M>, String> {
        let division = match self.catalog.kind(kind)?.is_table_only() {
            true => Division::of_table(quota, plan.table_len)?,
            false => Division::of(quota, plan.table_len)?,
        };
        if division.segments() > self.extents.free() {
            return Err(format!(
                "the store needs {} MiB and the node has {} MiB unassigned: give it a smaller --quota, drop \
                 another store, or serve more --memory",
                division.segments(),
                self.extents.free()
            ));
        }
        let region = self.catalog.reserve(name)?;
        let Some(first) = self.extents.take_run(division.table) else {
            self.catalog.release(region);
            return Err(format!(
                "the node has no {} MiB of adjacent segments for the table: use fewer --items, or drop a store",
                division.table
            ));
        };
        let mut segments: Vec<u32> = (first..first + division.table).collect();
        segments.extend(self.extents.take(division.buffers + division.reserve).expect("they were free"));
        let store = Store {
            name: name.to_owned(),
            kind: kind.to_owned(),
            parameters: plan.parameters,
            quota,
            incarnation: self.info.incarnation,
            region,
            secret: secret.max(1),
            table_at: self.geometry.segment_at(first),
            table_len: u64::from(division.table) * SEGMENT_SIZE,
            wide: plan.wide,
            created,
            id,
            former: None,
            membership,
        };
        // Reserve space in the catalog's record for stores that are still being created.
        let longest = Paired { number: u64::MAX, state: PairedState::Replaying };
        let may_be_paired = paired.is_some() || is_logged && self.log_options.is_some();
        let new = Recorded { paired: may_be_paired.then_some(longest), ..Recorded::from(&store) };
        let fits = restart::record(1, &self.stores_and(self.being_made().chain([new])));
        match fits.and_then(|_| self.catalog.kind(kind)?.serve(&store.parameters, store.extent())) {
            Ok(service) => {
                let mut entry = Box::new(Entry::new(store, service, segments));
                entry.paired = paired;
                if let Some(options) = self.log_options.filter(|_| is_logged) {
                    let salt = (self.seeds)();
                    let log = Log::new(entry.store.clone(), options, salt);
                    entry.paired = Some(Paired { number: log.first_pairing(), state: PairedState::Kept });
                    let log = Arc::new(StoreLog::new(log));
                    entry.served.set_log(Arc::clone(&log));
                    self.new_logs.push(log);
                }
                Ok(Job::Create { entry, division, granted: 0 })
            }
            Err(reason) => {
                segments.into_iter().for_each(|index| self.extents.give(index));
                self.catalog.release(region);
                Err(reason)
            }
        }
    }

    /// Makes a step of a job, or answers a question about a member. If both are possible, takes turns.
    pub(super) fn catalog_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let is_answerable =
            self.questions.front().is_some_and(|(_, question)| self.is_recorded(question.name()));
        if is_answerable && (!self.has_answered || self.jobs.is_empty()) {
            let is_done = self.question_step(memory)?;
            self.has_answered = true;
            return Ok(is_done);
        }
        let is_done = self.job_step(memory)?;
        self.has_answered = false;
        Ok(is_done || is_answerable)
    }

    /// Whether the catalog's record says about this store what the catalog says. If not, a job's next step writes it.
    pub(super) fn is_recorded(&self, name: &str) -> bool {
        !self.jobs.iter().any(|(_, job)| match job {
            Job::Drop { entry, leaving: Leaving::Not, .. } => entry.store.name == name,
            _ => false,
        })
    }

    /// Makes a step of the current job. If that job waits, goes on to the next job.
    fn job_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let (place, waiting) = self.at_job;
        let is_forgetting =
            matches!(self.jobs.get(place), Some((_, Job::Drop { leaving: Leaving::Not, .. })));
        if is_forgetting {
            // Record that the store is dropped, so that a node which takes over does not know it either.
            let record = restart::record(self.catalog_sequence + 1, &self.stores_and([]));
            self.write_catalog(memory, &record.expect("the previous record had one more store"))?;
        }
        let is_unrecorded =
            matches!(self.jobs.get(place), Some((_, Job::Fence(Fence { stage: Fencing::Record, .. }))));
        if is_unrecorded {
            self.fence_step(memory, place)?;
            self.at_job.1 = 0;
            return Ok(true);
        }
        if matches!(self.jobs.get(place), Some((_, Job::Revoke(revocation))) if revocation.is_beginning()) {
            self.revocation_step(memory, place)?;
            self.at_job.1 = 0;
            return Ok(true);
        }
        let Some((_, job)) = self.jobs.get_mut(place) else { return Ok(false) };
        let ended = match job {
            Job::Fence(fence) => fence.end_step(memory, &self.sessions)?,
            Job::Revoke(revocation) => revocation.end_step(memory, &self.sessions)?,
            Job::Create { entry, division, granted } => match grant_step(memory, entry, division, granted)? {
                None if entry.served.log().is_some_and(|log| !log.lock().is_ready()) => Some(false),
                ended => ended,
            },
            Job::Drop { leaving: Leaving::Left, entry, freed, .. } => {
                if entry.served.log().is_some_and(|log| !log.lock().is_removed()) {
                    return Ok(self.try_next_job(waiting, place));
                }
                free_step(memory, &mut self.extents, entry, freed)?
            }
            Job::Drop { entry, leaving, .. } => {
                // The log goes first: another node must not bring back a store whose drop was answered.
                if let Some(log) = entry.served.log() {
                    log.lock().remove();
                    log.wake();
                }
                leave_step(memory, &self.sessions, &mut self.reclaim, entry, leaving)?
            }
        };
        self.catalog_sequence += u64::from(is_forgetting);
        match ended {
            None => match self.failed_log(place) {
                Some(reason) => self.begin_undo(place, reason),
                None => self.end_job(memory, place)?,
            },
            Some(true) => self.at_job.1 = 0,
            Some(false) => return Ok(self.try_next_job(waiting, place)),
        }
        Ok(true)
    }

    /// Why the log of the store that the job at `place` creates cannot be made, if it cannot.
    fn failed_log(&self, place: usize) -> Option<String> {
        let Some((_, Job::Create { entry, .. })) = self.jobs.get(place) else { return None };
        let reason = entry.served.log()?.lock().refuses()?.to_owned();
        Some(format!(
            "store '{}' was not created, since its log could not be made: {reason}; free space in --log-dir, or give \
             another folder, and create the store again",
            entry.store.name
        ))
    }

    /// Goes on from the creation of a store to the removal of all that was made of it. The catalog never had it.
    fn begin_undo(&mut self, place: usize, reason: String) {
        let Some((ticket, Job::Create { entry, .. })) = self.jobs.remove(place) else { return };
        let job = Job::Drop { entry, leaving: Leaving::Not, freed: 0, answer: Box::new(Err(reason)) };
        self.jobs.insert(place, (ticket, job));
        self.at_job.1 = 0;
    }

    /// Goes on from a job that waits to the next one. Returns whether there is work: a job remains that was not tried
    /// since the last job made progress.
    fn try_next_job(&mut self, waiting: usize, place: usize) -> bool {
        let is_any_left = waiting + 1 < self.jobs.len();
        self.at_job = ((place + 1) % self.jobs.len(), if is_any_left { waiting + 1 } else { 0 });
        is_any_left
    }

    /// Makes the first step of a fence: records the nonce, then marks the sessions that are bound to it.
    fn fence_step(&mut self, memory: &M, place: usize) -> Result<(), M::Wait> {
        let Some((_, Job::Fence(Fence { region, id, nonce, .. }))) = self.jobs.get(place) else {
            return Ok(());
        };
        let (region, id, nonce) = (*region, *id, *nonce);
        let entry = self.catalog.by_region(region).filter(|entry| entry.store.id == id);
        let recorded = match entry {
            Some(entry) if entry.fenced.contains(&nonce) => Ok(None),
            // Other fences were recorded since this one was requested.
            Some(entry) if entry.fenced.len() >= FENCED_MAX => {
                Err(identity::too_many_fenced(&entry.store.name))
            }
            Some(_) => {
                let fenced = || {
                    self.catalog.iter().map(|entry| {
                        let mut recorded = Recorded::from(entry);
                        if entry.store.region == region {
                            recorded.fenced.to_mut().insert(nonce);
                        }
                        recorded
                    })
                };
                // The stores that are still being created have space in the record.
                let fits = restart::record(1, &fenced().chain(self.being_made()).collect::<Vec<_>>());
                fits.and_then(|_| restart::record(self.catalog_sequence + 1, &fenced().collect::<Vec<_>>()))
                    .map(Some)
            }
            None => Err("the store was dropped in the meantime, and nobody was fenced".to_owned()),
        };
        if let Ok(Some(record)) = &recorded {
            self.write_catalog(memory, record)?;
            self.catalog_sequence += 1;
        }
        if let Some(entry) = self.catalog.by_region_mut(region).filter(|_| recorded.is_ok()) {
            entry.fenced.insert(nonce);
        }
        let Some((_, Job::Fence(fence))) = self.jobs.get_mut(place) else { return Ok(()) };
        fence.stage = match recorded {
            Ok(_) => self.bindings.fence(region, nonce),
            Err(reason) => {
                fence.outcome = Err(reason);
                Fencing::nobody()
            }
        };
        Ok(())
    }

    fn stores_and<'a>(&'a self, more: impl IntoIterator<Item = Recorded<'a>>) -> Vec<Recorded<'a>> {
        self.catalog.iter().map(Recorded::from).chain(more).collect()
    }

    /// All stores of the catalog, with `changed` in the place of the store of the same region.
    pub(super) fn stores_with<'a>(&'a self, changed: &'a Store) -> Vec<Recorded<'a>> {
        let stores = self.catalog.iter().map(Recorded::from);
        let changed = |recorded: Recorded<'a>| match recorded.store.region == changed.region {
            true => Recorded { store: changed, ..recorded },
            false => recorded,
        };
        stores.map(changed).collect()
    }

    /// The stores that are being created, as the catalog's record will have them.
    pub(super) fn being_made(&self) -> impl Iterator<Item = Recorded<'_>> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Create { entry, .. } => Some(Recorded::from(&**entry)),
            Job::Drop { .. } | Job::Fence(_) | Job::Revoke(_) => None,
        })
    }

    /// Writes the next record of the catalog. The record takes effect once all accesses of the step have completed.
    pub(super) fn write_catalog(&self, memory: &M, record: &[u8]) -> Result<(), M::Wait> {
        memory.write(Geometry::catalog_at(self.catalog_sequence + 1), record)
    }

    /// Removes the completed job at index `place`, makes its change of the catalog, and makes its response available.
    fn end_job(&mut self, memory: &M, place: usize) -> Result<(), M::Wait> {
        if let Some((_, Job::Create { entry, .. })) = self.jobs.get(place) {
            let record =
                restart::record(self.catalog_sequence + 1, &self.stores_and([Recorded::from(&**entry)]));
            self.write_catalog(memory, &record.expect("its size was checked when the job began"))?;
            self.catalog_sequence += 1;
        }
        let Some((ticket, job)) = self.jobs.remove(place) else { return Ok(()) };
        self.at_job = (if place < self.jobs.len() { place } else { 0 }, 0);
        let answer = match job {
            Job::Fence(Fence { asked, outcome, .. }) => {
                let answer = outcome.map(|()| Answer::Done);
                self.answers.extend(asked.into_iter().map(|ticket| (ticket, answer.clone())));
                return Ok(());
            }
            Job::Revoke(revocation) => {
                let answer = self.end_revocation(&revocation);
                self.answers.extend(revocation.asked.into_iter().map(|ticket| (ticket, answer.clone())));
                return Ok(());
            }
            Job::Create { entry, .. } => {
                let store = without_key_if_not_served(entry.store.clone());
                self.catalog.insert(*entry);
                Ok(Answer::Store(store))
            }
            Job::Drop { entry, answer, .. } => {
                self.reclaim.forget(entry.store.region);
                self.catalog.release(entry.store.region);
                *answer
            }
        };
        self.answers.push_back((ticket, answer));
        Ok(())
    }
}

fn without_key_if_not_served(store: Store) -> Store {
    if store.is_served() { store } else { Store { secret: 0, id: 0, ..store } }
}

/// Assigns one more segment to a store that is being created. Writes the store's key last.
pub(super) fn grant_step<M: NodeMemory>(
    memory: &M,
    entry: &Entry<M>,
    division: &Division,
    granted: &mut usize,
) -> JobStep<M::Wait> {
    let arena = Arena::of(memory);
    let region = entry.store.region;
    let Some(&index) = entry.segments.get(*granted) else {
        // The key of a PREPARED store opens nothing.
        let secret = if entry.store.is_prepared() { 0 } else { entry.store.secret };
        arena.set_secret(region, secret)?;
        return Ok(None);
    };
    let (table, quota) = (division.table as usize, (division.table + division.buffers) as usize);
    let segment = arena.segment(index)?;
    let usage = if *granted < table { Use::Table } else { Use::Granted };
    if !arena.assign(index, segment, region, usage)? {
        return Ok(Some(true)); // A peer without the right to do so has changed it: retry.
    }
    if usage == Use::Table {
        fill_table(memory, *granted, index);
    }
    if *granted >= table {
        let supply = if *granted < quota { Supply::Quota } else { Supply::Reserve };
        arena.grant(region, supply, index)?;
    }
    *granted += 1;
    Ok(Some(true))
}

/// Makes one step of a store's drop. The steps revoke the key, wait until no chain can run in the region, then take all
/// lists of retired buffers and wait until no session is moving what was on them: a list that links through freed
/// memory would be cut there.
fn leave_step<M: NodeMemory>(
    memory: &M,
    sessions: &Sessions,
    reclaim: &mut Reclaim,
    entry: &Entry<M>,
    leaving: &mut Leaving,
) -> JobStep<M::Wait> {
    match leaving {
        Leaving::Not => {
            Arena::of(memory).set_secret(entry.store.region, 0)?;
            *leaving = Leaving::Chains(sessions.begin_grace(memory)?);
        }
        Leaving::Chains(grace) => {
            if !sessions.is_over(memory, grace)? {
                return Ok(Some(false));
            }
            *leaving = match mutants::DROP_WITHOUT_TAKING_LISTS.is_on() {
                false => Leaving::Retired { is_round_begun: false },
                true => Leaving::Left,
            };
        }
        Leaving::Retired { .. } | Leaving::Taken(_) if !reclaim.is_between_rounds() => {
            return Ok(Some(false));
        }
        Leaving::Retired { is_round_begun: false } => {
            reclaim.begin_round(sessions);
            *leaving = Leaving::Retired { is_round_begun: true };
        }
        Leaving::Retired { is_round_begun: true } => {
            // A session that had nothing on its own lists is moving nothing.
            let grace = sessions.begin_grace_of(memory, |slot| reclaim.is_keeper(slot))?;
            *leaving = Leaving::Taken(grace);
        }
        Leaving::Taken(grace) => {
            if !sessions.is_over(memory, grace)? {
                return Ok(Some(false));
            }
            let segments: BTreeSet<u32> = entry.segments.iter().copied().collect();
            let geometry = memory.geometry();
            let is_of_it = |at| geometry.segment_of(at).is_some_and(|index| segments.contains(&index));
            reclaim.forget_buffers(is_of_it);
            *leaving = Leaving::Left;
        }
        Leaving::Left => {}
    }
    Ok(Some(true))
}

/// Frees one segment of a store that is being dropped and to which nothing refers any more.
fn free_step<M: NodeMemory>(
    memory: &M,
    extents: &mut Extents,
    entry: &Entry<M>,
    freed: &mut usize,
) -> JobStep<M::Wait> {
    let arena = Arena::of(memory);
    let Some(&index) = entry.segments.get(*freed) else {
        arena.clear_region(entry.store.region)?;
        return Ok(None);
    };
    // Zero the segment before its entry changes: if the node dies in between, the next node must not find a free
    // segment with data.
    memory.discard(index)?;
    let segment = arena.segment(index)?;
    if !arena.assign(index, segment, 0, Use::Free)? {
        return Ok(Some(true)); // A peer without the right to do so has changed it: retry.
    }
    extents.give(index);
    *freed += 1;
    Ok(Some(true))
}
