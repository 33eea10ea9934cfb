//! Reclamation of retired buffers. A buffer is taken from the session that retired it, kept until no chain can follow
//! an old pointer to it, then put on its class's free list (PRISM, section 3.2: the re-post rule, for whole chains).
//! If the store's clients keep pointers from one chain to the next, the buffer then also waits until their operations
//! have ended.
//!
//! If a region has no granted segment left and a class has many buffers on its list, buffers are *parked* instead, by
//! segment. A segment whose buffers are all parked is empty, and is granted again, for any class. So memory freed as
//! small buffers becomes available for large ones. Buffers are parked one at a time. The node waits for a grace period
//! before it grants the segment again: a process that was stopped while it helped to take one of the segment's buffers
//! may still compare with old states.
//!
//! Invariant: the buffers in `Reclaim::buffers` are RETIRED and owned by the node; parked buffers are PARKED.

use crate::epochs::{Epochs, Leased};
use crate::mutants;
use crate::node::NodeMemory;
use crate::session::{Grace, Sessions};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::arena::{Arena, Buffer, header};
use farside_remote::{Memory, Width};
use std::collections::{BTreeMap, BTreeSet};

/// The buffers that are being reclaimed, and the segments that are being emptied.
#[derive(Debug, Default)]
pub struct Reclaim {
    /// The sessions' lists of retired buffers that are still to be taken in this round, each with its session's slot.
    /// The last one is the next one.
    round: Vec<(u32, Retirees)>,
    /// Whether a round is to begin.
    is_due: bool,
    /// For each session's slot, the turn when the last round began, and whether that round took all lists of the slot.
    turns: BTreeMap<u32, (u64, bool)>,
    /// The slot whose retired list is being traversed, and the address of the next buffer on this list.
    walking: Option<(u32, u64)>,
    /// Slots of the sessions that had buffers for their own use when the node took their lists.
    keepers: BTreeSet<u32>,
    /// Retired buffers that wait for their grace period before they are freed.
    buffers: Delayed<u64>,
    /// Retired buffers that wait for the ends of clients' operations.
    epochs: Epochs,
    /// Index of the kind of waiting that the next step checks, and the number of consecutive checks without progress:
    /// for turns, then for each region's epochs.
    checks: (usize, usize),
    /// The parked buffers of each region and class, by segment.
    parked: BTreeMap<(u32, u8), BTreeMap<u32, Vec<u64>>>,
    /// Parked buffers that will go back to their free lists.
    unparked: Vec<u64>,
    /// Numbers and regions of the segments whose buffers are all parked. These segments wait to be granted again.
    emptied: Delayed<(u32, u32)>,
    /// Regions that have no granted segment left.
    short: BTreeSet<u32>,
    /// Total number of buffers reclaimed so far.
    pub reclaimed: u64,
}

/// Items that may be reused after a grace period.
#[derive(Debug)]
struct Delayed<T> {
    added: Vec<T>,
    grace: Option<(Vec<T>, Grace)>,
    ready: Vec<T>,
}

impl<T> Default for Delayed<T> {
    fn default() -> Delayed<T> {
        Delayed { added: Vec::new(), grace: None, ready: Vec::new() }
    }
}

impl<T> Delayed<T> {
    /// Makes one step of the items' grace periods. Returns false if the items wait for a session's turn to end, or if
    /// there are no items.
    fn step<M: Memory>(&mut self, memory: &M, sessions: &Sessions) -> Result<bool, M::Wait> {
        if mutants::REPOST_AT_ONCE.is_on() && !self.added.is_empty() {
            self.ready.append(&mut self.added);
        } else if let Some((things, grace)) = &mut self.grace {
            if !sessions.is_over(memory, grace)? {
                return Ok(false);
            }
            self.ready.append(things);
            self.grace = None;
        } else if !self.added.is_empty() {
            let grace = sessions.begin_grace(memory)?;
            self.grace = Some((std::mem::take(&mut self.added), grace));
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.grace.iter().flat_map(|(_, grace)| grace.waiting_for())
    }

    fn retain(&mut self, mut keeps: impl FnMut(&T) -> bool) {
        let under_way = self.grace.iter_mut().map(|(things, _)| things);
        under_way.chain([&mut self.added, &mut self.ready]).for_each(|things| things.retain(&mut keeps));
    }
}

/// Buffers are parked only from lists with more buffers than this number of segments holds.
const KEEP_SEGMENTS: u64 = 4;

impl Reclaim {
    /// Adds a leaked buffer that a scan has made RETIRED and owned by the node.
    pub fn add(&mut self, at: u64) {
        self.buffers.added.push(at);
    }

    /// Slots of the sessions whose unfinished turn delays reclamation.
    pub fn waiting_for(&self) -> impl Iterator<Item = u32> + '_ {
        self.buffers.waiting_for().chain(self.emptied.waiting_for()).map(|id| id.slot)
    }

    /// Number of the client id for whose operations the buffers of a region wait, if they wait for any.
    pub fn waits_for_client(&self, region: u32) -> Option<u16> {
        self.epochs.waits_for(region)
    }

    /// Whether the retired list of the session in `slot` is neither being traversed nor still to be taken in this
    /// round.
    pub fn is_done_with(&self, slot: u32) -> bool {
        self.round.iter().all(|&(of, _)| of != slot)
            && self.walking.is_none_or(|(walking, _)| walking != slot)
    }

    /// Whether the session in `slot` had buffers for its own use when the node took its lists, this time or earlier.
    pub fn is_keeper(&self, slot: u32) -> bool {
        self.keepers.contains(&slot)
    }

    /// Forgets a session that is over.
    pub fn forget_session(&mut self, slot: u32) {
        self.keepers.remove(&slot);
        self.turns.remove(&slot);
    }

    /// Whether no session's retired list is being taken.
    pub fn is_between_rounds(&self) -> bool {
        self.round.is_empty() && self.walking.is_none()
    }

    /// Sets whether a region has no granted segment left.
    pub fn set_short(&mut self, region: u32, short: bool) {
        if short {
            self.short.insert(region)
        } else {
            self.short.remove(&region)
        };
    }

    /// Whether a region has no granted segment left.
    pub fn is_short(&self, region: u32) -> bool {
        self.short.contains(&region)
    }

    /// Forgets the parked buffers of a dropped region.
    pub fn forget(&mut self, region: u32) {
        self.short.remove(&region);
        self.parked.retain(|&(of, _), _| of != region);
        self.emptied.retain(|&(of, _)| of != region);
    }

    /// Forgets the buffers of a region that is about to be freed. Otherwise later buffers at the same addresses would
    /// be freed without a grace period of their own.
    pub fn forget_buffers(&mut self, is_of_region: impl Fn(u64) -> bool) {
        self.buffers.retain(|&at| !is_of_region(at));
        self.epochs.retain(|at| !is_of_region(at));
        self.unparked.retain(|&at| !is_of_region(at));
    }

    /// Adds all lists of one session to this round.
    pub fn take_from(&mut self, slot: u32) {
        // A session moves buffers in the order of the lists, so they are taken in this order.
        self.round.extend(Retirees::ALL.into_iter().rev().map(|list| (slot, list)));
    }

    /// Makes a round due that takes the lists of buffers for the node from all sessions, unless a round is in progress.
    /// The round also takes the lists of buffers that a session would reuse: from all sessions if a chain has found no
    /// free buffer, else from those that have begun no turn since the last round.
    pub fn poll(&mut self) {
        self.is_due |= self.round.is_empty();
    }

    /// Starts a round that takes all lists of all sessions. No round may be in progress.
    pub fn begin_round(&mut self, sessions: &Sessions) {
        for session in sessions.iter() {
            self.take_from(session.id.slot);
        }
    }

    /// Starts a round, given each session's slot and turn. No round may be in progress.
    fn begin_partly(&mut self, turns: Vec<(u32, u64)>, is_needed: bool) {
        let last = std::mem::take(&mut self.turns);
        for (slot, turn) in turns {
            let idle = last.get(&slot).filter(|(before, _)| *before == turn && turn.is_multiple_of(2));
            // What an idle session had kept is taken once.
            let is_complete = is_needed || idle.is_some_and(|(_, is_taken)| !is_taken);
            match is_complete {
                true => self.take_from(slot),
                false => self.round.push((slot, Retirees::Node)),
            }
            let is_taken = is_complete || idle.is_some();
            self.turns.insert(slot, (turn, is_taken));
        }
    }

    /// Makes one step of reclaiming buffers. Returns false if there was nothing to do.
    pub(crate) fn step<M: NodeMemory>(
        &mut self,
        memory: &M,
        sessions: &Sessions,
        leased: &impl Leased,
    ) -> Result<bool, M::Wait> {
        if let Some((slot, at)) = self.walking {
            let next = self.take_over(memory, at)?;
            self.walking = (next != 0).then_some((slot, next));
        } else if let Some(&at) = self.epochs.ready.last() {
            self.give_or_park(memory, at)?;
            self.epochs.ready.pop();
            self.reclaimed += 1;
        } else if let Some(&at) = self.buffers.ready.last()
            && leased.is_any()
            && !mutants::EPOCH_IGNORED.is_on()
            && let Some((region, _)) = Arena::of(memory).buffer_at(at)?
            && leased.table(region).is_some()
        {
            self.epochs.add(region, at);
            self.buffers.ready.pop();
        } else if let Some(&at) = self.buffers.ready.last() {
            self.give_or_park(memory, at)?;
            self.buffers.ready.pop();
            self.reclaimed += 1;
        } else if let Some(&at) = self.unparked.last() {
            if let Some((region, buffer)) = Arena::of(memory).buffer_at(at)?
                && Arena::of(memory).state(&buffer)?.stage == Stage::Parked
            {
                Arena::of(memory).give(region, &buffer)?;
            }
            self.unparked.pop();
        } else if let Some(&(slot, list)) = self.round.last() {
            let first = Arena::of(memory).take_retired(slot, list)?;
            self.round.pop();
            if first != 0 && list != Retirees::Node {
                self.keepers.insert(slot);
            }
            self.walking = (first != 0).then_some((slot, first));
        } else if self.is_due {
            let is_needed = memory.load(header::NEEDED_AT, Width::W8)? != 0;
            let turns = sessions.turns(memory)?;
            if is_needed {
                memory.write(header::NEEDED_AT, &[0; 8])?;
            }
            self.is_due = false;
            self.begin_partly(turns, is_needed);
        } else {
            return self.wait_step(memory, sessions, leased);
        }
        Ok(true)
    }

    /// Checks one of the things that retired buffers wait for. Returns false once all of them in turn have made no
    /// progress. A check may change the state after its last access, so a step makes one check only.
    fn wait_step<M: NodeMemory>(
        &mut self,
        memory: &M,
        sessions: &Sessions,
        leased: &impl Leased,
    ) -> Result<bool, M::Wait> {
        let (mut check, fruitless) = self.checks;
        if self.epochs.regions() == 0 {
            check = 0;
        }
        let is_progress = match check {
            0 => self.buffers.step(memory, sessions)?,
            _ => self.epochs.step(memory, leased)?,
        };
        let of = 1 + self.epochs.regions();
        let fruitless = if is_progress { 0 } else { fruitless + 1 };
        let is_over = fruitless >= of;
        self.checks = ((check + 1) % of, if is_over { 0 } else { fruitless });
        Ok(!is_over)
    }

    /// Makes one step of granting emptied segments again. Returns false if there was nothing to do.
    pub fn regrant_step<M: NodeMemory>(&mut self, memory: &M, sessions: &Sessions) -> Result<bool, M::Wait> {
        let Some(&(region, index)) = self.emptied.ready.last() else {
            return self.emptied.step(memory, sessions);
        };
        grant_again(memory, region, index)?;
        self.emptied.ready.pop();
        Ok(true)
    }

    /// Makes the node the owner of one retired buffer. Returns the address of the next buffer on the list, or 0 if a
    /// peer has damaged the list. In that case a scan finds the other buffers.
    fn take_over<M: Memory>(&mut self, memory: &M, at: u64) -> Result<u64, M::Wait> {
        let arena = Arena::of(memory);
        let Some((_, buffer)) = arena.buffer_at(at)? else { return Ok(0) };
        let state = arena.state(&buffer)?;
        let mine = State { owner: owner::NODE, ..state };
        if state.stage != Stage::Retired
            || state.owner == owner::NODE
            || !arena.exchange_state(&buffer, state, mine)?
        {
            return Ok(0);
        }
        self.buffers.added.push(at);
        Ok(state.next)
    }

    fn give_or_park<M: Memory>(&mut self, memory: &M, at: u64) -> Result<(), M::Wait> {
        let arena = Arena::of(memory);
        // The buffer's region may have been dropped in the meantime, and its segment may be unused or another region's.
        let Some((region, buffer)) = arena.buffer_at(at)? else { return Ok(()) };
        let state = arena.state(&buffer)?;
        if state.stage != Stage::Retired || state.owner != owner::NODE {
            return Ok(());
        }
        if self.is_short(region) && arena.list_len(region, buffer.class)? >= keep(buffer.class) {
            return self.park(memory, region, &buffer, state);
        }
        arena.give(region, &buffer)
    }

    /// Parks a buffer that the node holds, so that its segment can be emptied.
    fn park<M: Memory>(
        &mut self,
        memory: &M,
        region: u32,
        buffer: &Buffer,
        state: State,
    ) -> Result<(), M::Wait> {
        let arena = Arena::of(memory);
        let Some(index) = arena.geometry().segment_of(buffer.at) else { return Ok(()) };
        if arena.exchange_state(buffer, state, State { stage: Stage::Parked, owner: owner::NODE, ..state })? {
            let class = self.parked.entry((region, buffer.class.index)).or_default();
            let segment = class.entry(index).or_default();
            segment.push(buffer.at);
            if segment.len() == buffer.class.count as usize {
                class.remove(&index);
                self.emptied.added.push((region, index));
            }
        }
        Ok(())
    }

    /// Makes one step for a class of a region that is short of memory. Unparks buffers if the free list has run low,
    /// and parks one buffer if the list has many. Returns false if there was nothing to do.
    pub fn relieve<M: Memory>(
        &mut self,
        memory: &M,
        region: u32,
        class: &'static Class,
    ) -> Result<bool, M::Wait> {
        let arena = Arena::of(memory);
        let len = arena.list_len(region, class)?;
        if len < keep(class) / 2 {
            return Ok(self.unpark(region, class));
        }
        if len <= keep(class) {
            return Ok(false);
        }
        let Ok(at) = arena.take_listed(region, class, owner::NODE)? else { return Ok(false) };
        if let Some((_, buffer)) = arena.buffer_at(at)? {
            let state = arena.state(&buffer)?;
            self.park(memory, region, &buffer, state)?;
        }
        Ok(true)
    }

    /// Chooses the segment with the fewest parked buffers, and sends these buffers back to their free list.
    fn unpark(&mut self, region: u32, class: &'static Class) -> bool {
        let Some(segments) = self.parked.get_mut(&(region, class.index)) else { return false };
        let least = segments.iter().min_by_key(|(_, parked)| parked.len()).map(|(&index, _)| index);
        let Some(buffers) = least.and_then(|index| segments.remove(&index)) else { return false };
        self.unparked.extend(buffers);
        true
    }
}

fn keep(class: &Class) -> u64 {
    KEEP_SEGMENTS * u64::from(class.count)
}

/// Zeroes an empty segment and grants it again: to the reserve if the reserve is used up, else within the quota.
fn grant_again<M: NodeMemory>(memory: &M, region: u32, index: u32) -> Result<(), M::Wait> {
    let arena = Arena::of(memory);
    let segment = arena.segment(index)?;
    if segment.region != region
        || !arena.assign(index, segment, region, farside_remote::arena::segment::Use::Granted)?
    {
        return Ok(());
    }
    memory.discard(index)?;
    let supply = if arena.has_granted(region, Supply::Reserve)? { Supply::Quota } else { Supply::Reserve };
    arena.grant(region, supply, index)
}
