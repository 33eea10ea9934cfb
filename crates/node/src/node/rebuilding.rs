//! The catalog's part of giving a store another table.

use super::{Node, NodeMemory, Ticket};
use crate::catalog::Division;
use crate::catalog::Entry;
use crate::rebuild::{Rebuild, Stage as RebuildStage};
use crate::served::{Served, Start};
use crate::session::Sessions;
use crate::{rebuild, restart};
use farside_remote::arena::{Arena, SEGMENT_SIZE};
use farside_remote::control::{Answer, Store};
use farside_remote::service::{Plan, Records, Service, Step, Tick, Work};
use std::cell::Cell;
use std::collections::BTreeSet;

const NOT_CROWDED: &str = "all slots for the key are taken, although the table as a whole is not crowded: enlarge it \
                           with 'farside store rebuild --items'";

impl<M: NodeMemory> Node<M> {
    pub(super) fn begin_rebuild(
        &mut self,
        ticket: Ticket,
        name: &str,
        parameters: Option<&str>,
        [seed, secret]: [u64; 2],
    ) -> Result<(), String> {
        let free = self.extents.free();
        let region = self.catalog.get(name)?.store.region;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(()) };
        if parameters.is_none() && entry.segments_needed > free {
            return Err(no_room_for_table(entry.segments_needed, free));
        }
        let mut served =
            entry.served.try_exclusive().ok_or("the store's service is busy with a call: retry")?;
        let quota = entry.store.quota + Division::reserve_of(entry.store.quota / SEGMENT_SIZE) * SEGMENT_SIZE;
        rebuild::of(&mut **served)?.survey(parameters.unwrap_or("{}"), quota, seed)?;
        drop(served);
        // A rebuild in progress already has a secret for the store: use it, since the catalog contains it.
        let next_secret = entry.rebuild.as_ref().map_or(secret.max(1), |rebuild| rebuild.next_secret);
        entry.rebuild = Some(Rebuild::new(vec![ticket], parameters.is_none(), next_secret));
        if !self.ticks.contains(&region) {
            self.ticks.push_back(region);
        }
        Ok(())
    }

    pub(super) fn is_being_rebuilt(&self, name: &str, rebuild: &Rebuild) -> String {
        let being_rebuilt = format!("the table of store '{name}' is being rebuilt");
        let grace = rebuild.waiting_for();
        let slots: BTreeSet<u32> =
            grace.iter().flat_map(|grace| grace.waiting_for()).map(|id| id.slot).collect();
        let sessions = self.sessions.iter().filter(|session| slots.contains(&session.id.slot));
        let pids = sessions.map(|session| format!("process {}", session.pid));
        let whom: Vec<String> = pids.collect();
        if whom.is_empty() {
            return format!("{being_rebuilt}: wait until it is done");
        }
        let whom = whom.join(", ");
        format!(
            "{being_rebuilt}: all entries are moved, but {whom} may still use the former table; wait for it, or end it \
             if it is stopped"
        )
    }

    /// Makes one step of a store's rebuild. Returns false if there is nothing more to do for the store until the next
    /// check.
    pub(super) fn rebuild_step(&mut self, memory: &M, region: u32) -> Result<bool, M::Wait> {
        let is_scanned = self.scan.as_ref().is_some_and(|(scan, _)| scan.region == region);
        let sequence = self.catalog_sequence + 1;
        let permits_reuse = self.catalog.permits_reuse(region) && !is_scanned;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(false) };
        if entry.rebuild.is_some() {
            let (has_ended, is_made) = entry.reuse.end_step(memory, &self.sessions, region)?;
            if !has_ended {
                return Ok(is_made);
            }
        } else if permits_reuse && entry.reuse.begin(memory, region)? {
            return Ok(true);
        }
        let Some(Rebuild { stage, next_secret, is_stuck, .. }) = &mut entry.rebuild else {
            if let Some(is_made) = checkpoint_step(memory, entry)? {
                return Ok(is_made);
            }
            // Busy with a call.
            let Some(served) = entry.served.try_lock(Work::Tick) else { return Ok(false) };
            let seed = *self.tick_seed.get_or_insert_with(&mut self.seeds);
            let tick = served.tick(memory, Start { now: self.now, seed })?;
            self.tick_seed = None;
            if entry.told < self.ended && tell_ended(&self.sessions, &entry.served, served.service()) {
                entry.told = self.ended;
            }
            drop(served);
            if let Some(mut service) = entry.served.try_exclusive() {
                entry.is_crowded |= service.rebuild().is_some_and(|rebuild| rebuild.is_crowded());
            }
            match tick {
                Tick::At(time) => self.timers.insert(region, time),
                Tick::Idle | Tick::Made => self.timers.remove(&region),
            };
            return Ok(tick == Tick::Made);
        };
        let Some(mut served) = entry.served.try_exclusive() else { return Ok(false) }; // Busy with a call.
        let Some(service) = served.rebuild() else { return Ok(false) };
        let next_secret = *next_secret;
        match stage {
            RebuildStage::Survey => {
                let step = service.step(memory, &mut Vec::new())?;
                drop(served);
                match step {
                    Step::Wants(plan) => self.grant_table(region, plan),
                    Step::Content => self.end_rebuild(region, Err(NOT_CROWDED.into())),
                    _ => {}
                }
            }
            RebuildStage::Grant { plan, segments, granted } => {
                if rebuild::grant_step(memory, region, segments, granted)? {
                    return Ok(true);
                }
                let table_at = self.geometry.segment_at(segments[0]);
                let store = rebuild::with_both(&entry.store, plan, table_at, next_secret);
                let segments = segments.clone();
                drop(served);
                self.publish_both(memory, store, segments)?;
            }
            RebuildStage::Move => {
                let mut dropped = Vec::new();
                let step = service.step(memory, &mut dropped)?;
                drop(served);
                dropped.into_iter().for_each(|at| self.reclaim.add(at));
                match step {
                    Step::Moved if is_scanned => return Ok(false), // The scan's cursor counts slots of both tables.
                    Step::Moved => {
                        let store = rebuild::with_one(&entry.store, next_secret);
                        self.publish_one(memory, sequence, store)?;
                    }
                    Step::Made => {}
                    Step::Stuck => {
                        (*is_stuck, entry.is_crowded) = (true, true);
                        return Ok(false);
                    }
                    _ => return Ok(false),
                }
            }
            RebuildStage::Leave { grace, segments } => {
                let has_begun = grace.is_some();
                if !rebuild::is_left(memory, &mut self.sessions, grace)? {
                    return Ok(!has_begun);
                }
                *stage = RebuildStage::Free { segments: std::mem::take(segments) };
            }
            RebuildStage::Free { segments } => {
                if !rebuild::free_step(memory, &mut self.extents, segments, &mut entry.segments)? {
                    entry.rebuild = entry.store.former.as_ref().map(Rebuild::resumed);
                }
            }
        }
        Ok(true)
    }

    /// Takes the segments for a store's next table, if enough adjacent segments are free.
    fn grant_table(&mut self, region: u32, plan: Plan) {
        let count = u32::try_from(plan.table_len.div_ceil(SEGMENT_SIZE)).unwrap_or(u32::MAX);
        let (first, free) = (self.extents.take_run(count), self.extents.free());
        let Some(entry) = self.catalog.by_region_mut(region) else { return };
        let (Some(first), Some(rebuild)) = (first, &mut entry.rebuild) else {
            if entry.rebuild.as_ref().is_some_and(|rebuild| rebuild.is_growth) {
                entry.segments_needed = count.max(free + 1); // If enough are free but not adjacent, more may help.
            }
            let reason = no_room_for_table(count, free);
            return self.end_rebuild(region, Err(reason));
        };
        let segments: Vec<u32> = (first..first + count).collect();
        entry.segments.extend(&segments);
        entry.segments_needed = 0;
        rebuild.stage = RebuildStage::Grant { plan, segments, granted: 0 };
    }

    /// Publishes both tables of a store. If that is impossible, starts to free the granted segments.
    fn publish_both(&mut self, memory: &M, store: Store, segments: Vec<u32>) -> Result<(), M::Wait> {
        let region = store.region;
        let served = self.catalog.serve(&store);
        let stores = self.stores_with(&store);
        let being_made = self.being_made();
        let fits =
            restart::record(1, &self.stores_with(&store).into_iter().chain(being_made).collect::<Vec<_>>());
        let service = match served.and_then(|service| fits.map(|_| service)) {
            Ok(service) => service,
            Err(reason) => {
                self.end_rebuild(region, Err(reason));
                if let Some(entry) = self.catalog.by_region_mut(region) {
                    entry.rebuild = Some(Rebuild::freeing(segments));
                }
                return Ok(());
            }
        };
        let record = restart::record(self.catalog_sequence + 1, &stores);
        self.write_catalog(memory, &record.expect("it fit together with the stores being created"))?;
        self.catalog_sequence += 1;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(()) };
        (entry.served, entry.store) = (entry.served.succeeded_by(&store, service), store);
        let Some(rebuild) = &mut entry.rebuild else { return Ok(()) };
        (rebuild.stage, rebuild.is_stuck) = (RebuildStage::Move, false);
        let asked = std::mem::take(&mut rebuild.asked);
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, Ok(Answer::Done))));
        Ok(())
    }

    /// Publishes a store that has left its former tables: only its next table, with another key.
    fn publish_one(&mut self, memory: &M, sequence: u64, store: Store) -> Result<(), M::Wait> {
        let service = self.catalog.serve(&store).expect("it was served together with its former tables");
        let record =
            restart::record(sequence, &self.stores_with(&store)).expect("the previous record was larger");
        self.write_catalog(memory, &record)?;
        let Some(entry) = self.catalog.by_region_mut(store.region) else { return Ok(()) };
        Arena::of(memory).set_secret(store.region, store.secret)?;
        let formers = entry.store.formers().into_iter().map(|(_, extent)| extent);
        let segments = formers.flat_map(|of| rebuild::segments_of(self.geometry, of.at, of.len)).collect();
        (entry.served, entry.store) = (entry.served.succeeded_by(&store, service), store);
        self.catalog_sequence = sequence;
        if let Some(rebuild) = &mut entry.rebuild {
            rebuild.stage = RebuildStage::Leave { grace: None, segments };
        }
        Ok(())
    }

    /// Abandons the requested table. If an earlier move was in progress, that move continues.
    fn end_rebuild(&mut self, region: u32, reported: Result<Answer, String>) {
        let Some(entry) = self.catalog.by_region_mut(region) else { return };
        let resumed = entry.store.former.as_ref().map(Rebuild::resumed);
        let ended = std::mem::replace(&mut entry.rebuild, resumed);
        let asked = ended.map_or(Vec::new(), |rebuild| rebuild.asked);
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, reported.clone())));
    }
}

/// Tells a service which sessions have ended. Returns false if it asked about one whose calls are not finished, so that
/// it must be told again.
fn tell_ended<M: NodeMemory>(sessions: &Sessions, served: &Served<M>, service: &dyn Service<M>) -> bool {
    let is_all = Cell::new(true);
    service.sessions_ended(&|number| {
        let (has_ended, is_finished) = (sessions.has_ended(number), !served.has_unfinished(number));
        is_all.set(is_all.get() && (is_finished || !has_ended));
        has_ended && is_finished
    });
    is_all.get()
}

/// Makes a step of the checkpoint of a store's log. Returns `None` if the log wants none now, and else whether there is
/// more to do at once.
fn checkpoint_step<M: NodeMemory>(memory: &M, entry: &mut Entry<M>) -> Result<Option<bool>, M::Wait> {
    let Some(log) = entry.served.log() else { return Ok(None) };
    // If memory makes the step wait, it runs again with the same accesses, whatever the log's writer has done
    // meanwhile.
    if entry.collecting.is_none() {
        let (wants, generation) = {
            let mut log = log.lock();
            (log.wants_checkpoint(), log.collecting())
        };
        log.wake();
        entry.collecting = generation.filter(|_| wants);
    }
    let Some(generation) = entry.collecting else { return Ok(None) };
    let Some(served) = entry.served.try_lock(Work::Live) else {
        entry.collecting = None;
        return Ok(Some(false)); // Busy with a call.
    };
    // The cursor of a checkpoint that was given up is of another generation.
    let cursor = entry.checkpoint.filter(|&(of, _)| of == generation).map_or(0, |(_, cursor)| cursor);
    let mut records = Records::default();
    let next = served.service().checkpoint(memory, cursor, &mut records)?;
    entry.checkpoint = next.map(|next| (generation, next));
    entry.collecting = None;
    {
        let mut log = log.lock();
        if log.collecting() == Some(generation) {
            log.collect(&records, next.is_none());
        }
    }
    log.wake();
    Ok(Some(true))
}

fn no_room_for_table(needed: u32, free: u32) -> String {
    format!(
        "a larger table needs {needed} MiB of adjacent segments, and the node has {free} MiB unassigned: drop another \
         store, or serve more --memory"
    )
}
