//! A client's one-sided requests: a queue pair, the regions that it reaches, and the lists in flight.
//!
//! Invariant: a list is posted at most once over each queue pair, and again only if the NIC has executed nothing of it.
//! Invariant: a list's buffer is used by nobody else until the list has completed, or its queue pair is destroyed.
//! Invariant: lists in flight end, also if the device loses the report of one: then the queue pair is destroyed.

use super::buffers::Buffers;
use super::error::VerbsError;
use super::line::{INLINE, VerbsLine};
use super::list::{List, Outside, Steps, Terms};
use super::request::{Extent, Pair as Asked};
use super::resources::{COMPLETIONS_AT_ONCE, NewPair, Pair, Way, status_text};
use super::setup::first_packet;
use super::sys::{IbvWc, is};
use crate::timer;
use farside_remote::wire::{CHAIN_BYTES_MAX, OPS_MAX, REPLY_BYTES_MAX};
use farside_remote::{ChainView, Key, Reply};
use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;
use std::time::Duration;

/// Time without a completion after which lists in flight are given up. A device gives up a request after its own
/// retries, within a few seconds, and reports that.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Number of requests in flight.
const DEPTH: u32 = 256;
/// Sizes of buffers, and how many there are of each.
const SMALL: (usize, usize) = (2048, 64);
const LARGE: (usize, usize) = (CHAIN_BYTES_MAX + REPLY_BYTES_MAX, 4);
const SLOTS: usize = SMALL.1 + LARGE.1;
const _: () = assert!(SLOTS <= 256 && OPS_MAX <= 256, "a number has a byte for each");

/// The one-sided requests of one session.
#[derive(Default)]
pub(super) struct Lists {
    // Dropped in this order: the pair before the buffers.
    pair: Option<Pair>,
    buffers: Option<[Buffers; 2]>,
    slots: Vec<Slot>,
    free: [Vec<u8>; 2],
    /// Number of requests in flight.
    posted: u32,
    /// Slots of the lists in flight, in the order in which they were posted. They complete in this order.
    order: VecDeque<u8>,
    /// Time of the last completion. If there was none since requests are in flight, the time when the first was posted.
    progressed: Duration,
    /// Number of the pair among the session's; completions of former pairs are ignored.
    generation: u64,
    regions: BTreeMap<u32, Region>,
    list: List,
    /// Tasks that wait for a free buffer, or for a queue pair.
    waiters: Vec<Waker>,
}

/// The memory of a region that the NIC reaches under a key of the session.
struct Region {
    key: Key,
    extents: Vec<Extent>,
}

/// A list in flight, or a free place for one.
#[derive(Default)]
struct Slot {
    state: State,
    steps: Steps,
    /// Number of requests of the list.
    requests: u32,
    size: usize,
    waker: Option<Waker>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    InFlight,
    /// The list's future was dropped.
    Abandoned,
    Ended(Ended),
}

/// How a list has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The NIC has executed it, up to the refused request, if one was.
    Executed {
        /// Number of the refused request in the list.
        refused: Option<u32>,
    },
    /// The NIC has executed nothing of it, since it has refused a request of another list.
    NotRun,
    /// The connection broke, for this reason. The NIC may have executed some of it.
    Unknown(String),
}

/// Outcome of an attempt to post a list.
pub(super) enum Posted {
    /// The list is in flight, in this slot.
    InSlot(usize),
    /// No request is needed: the reply is complete.
    Done,
    /// There is no queue pair.
    NoPair,
    /// The region is not registered under this key.
    NoRegion,
    /// An address is outside the region's registered memory.
    Outside,
    /// There is no free buffer now, or no space for more requests.
    Full,
}

impl Lists {
    /// Whether there is a queue pair.
    pub(super) fn is_up(&self) -> bool {
        self.pair.is_some()
    }

    /// Whether lists are in flight.
    pub(super) fn is_waiting(&self) -> bool {
        self.posted > 0
    }

    /// Time until the lists in flight have made no progress for too long: 0 if they have. `None` if there are none.
    pub(super) fn patience(&self, now: Duration) -> Option<Duration> {
        self.is_waiting().then(|| (self.progressed + PATIENCE).saturating_sub(now))
    }

    /// Whether the NIC may execute a list that no task waits for.
    pub(super) fn has_abandoned(&self) -> bool {
        self.slots.iter().any(|slot| slot.state == State::Abandoned)
    }

    /// Registers a task that waits for a free buffer or for a queue pair.
    pub(super) fn wait(&mut self, waker: &Waker) {
        if !self.waiters.iter().any(|known| known.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
    }

    /// Takes the tasks that [`Lists::wait`] has registered.
    pub(super) fn waiters(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.waiters)
    }

    /// Creates a queue pair and its description for the node.
    pub(super) fn prepare(&mut self, line: &VerbsLine) -> Result<(Pair, Asked), VerbsError> {
        if self.buffers.is_none() {
            let buffers = |(size, count)| Buffers::new(line.domain(), count, size);
            self.buffers = Some([buffers(SMALL)?, buffers(LARGE)?]);
            self.slots = (0..SLOTS).map(|_| Slot::default()).collect();
            self.free = [(0..SMALL.1 as u8).collect(), (SMALL.1 as u8..SLOTS as u8).collect()];
        }
        let completions = line.lists().queue();
        let new = NewPair {
            sent: completions,
            received: completions,
            shared: None,
            sends: DEPTH,
            receives: 1,
            inline: INLINE,
        };
        let (pair, here) = (Pair::new(line.domain(), &new)?, line.here());
        pair.begin(&here.way, 0)?;
        let asked = Asked::of(&here.end(pair.number(), first_packet()), here.way.mtu);
        Ok((pair, asked))
    }

    /// Connects a prepared pair to the node's.
    pub(super) fn connect(
        &mut self,
        line: &VerbsLine,
        (pair, own): (Pair, &Asked),
        theirs: &Asked,
    ) -> Result<(), String> {
        let end = theirs.check()?;
        let way = Way { mtu: own.mtu.min(theirs.mtu), ..line.here().way };
        pair.connect(&way, own.first, 1, &end).map_err(|error| error.to_string())?;
        self.generation += 1;
        self.regions.clear(); // The node may have dropped its registrations together with the former pair.
        self.pair = Some(pair);
        Ok(())
    }

    /// Notes the memory that the NIC reaches under a key.
    pub(super) fn note_region(&mut self, key: Key, mut extents: Vec<Extent>) {
        extents.sort_by_key(|extent| extent.at);
        self.regions.insert(key.region(), Region { key, extents });
    }

    /// Posts a chain as one list. `size` is the number of bytes that its buffer needs.
    ///
    /// # Errors
    /// The queue pair is broken. Some of the list may have been posted.
    pub(super) fn post(
        &mut self,
        chain: ChainView<'_>,
        size: usize,
        terms: Terms,
        reply: &mut Reply,
    ) -> Result<Posted, VerbsError> {
        let (Some(pair), Some(buffers)) = (&self.pair, &self.buffers) else { return Ok(Posted::NoPair) };
        let key = chain.key();
        let region = self.regions.get(&key.region()).filter(|region| region.key == key);
        let Some(region) = region else { return Ok(Posted::NoRegion) };
        let class = usize::from(size > SMALL.0);
        if self.posted + chain.len() as u32 > DEPTH {
            return Ok(Posted::Full);
        }
        let Some(&number) = self.free[class].last() else { return Ok(Posted::Full) };
        let buffer = buffer_of(number);
        let list = &mut self.list;
        // SAFETY: the slot is free, so neither the device nor a list uses its buffer.
        let bytes = unsafe { buffers[class].bytes(buffer, size) };
        let translated = list.translate(chain, &region.extents, (bytes, pair.inline_max()), terms);
        if let Err(Outside) = translated {
            return Ok(Posted::Outside);
        }
        let slot = &mut self.slots[usize::from(number)];
        list.steps(&mut slot.steps);
        if list.requests.is_empty() {
            slot.steps.answer(&[], None, reply);
            return Ok(Posted::Done);
        }
        list.place(self.generation << 16 | u64::from(number) << 8, buffers[class].piece(buffer, 0, size));
        // SAFETY: the pieces are in the slot's buffer, which is registered with the pair's domain. The slot stays in
        // use until its list has completed or the pair is destroyed.
        unsafe { pair.post(&mut list.requests, &mut list.pieces) }?;
        self.free[class].pop();
        slot.state = State::InFlight;
        (slot.requests, slot.size) = (list.requests.len() as u32, size);
        if self.posted == 0 {
            self.progressed = timer::coarse_now();
        }
        self.posted += slot.requests;
        self.order.push_back(number);
        Ok(Posted::InSlot(usize::from(number)))
    }

    /// Returns how a list has ended, or `None` if it is in flight; then `waker` is woken when it ends.
    pub(super) fn ended(&mut self, slot: usize, waker: &Waker) -> Option<Ended> {
        let slot = &mut self.slots[slot];
        if let State::Ended(ended) = &slot.state {
            return Some(ended.clone());
        }
        let known = slot.waker.take().filter(|known| known.will_wake(waker));
        slot.waker = Some(known.unwrap_or_else(|| waker.clone()));
        None
    }

    /// Stores the reply of a list that the NIC has executed.
    pub(super) fn answer(&self, slot: usize, refused: Option<u32>, reply: &mut Reply) {
        let Some(buffers) = &self.buffers else { return };
        let Slot { steps, size, .. } = &self.slots[slot];
        // SAFETY: the list has completed, so the device does not use its buffer any more.
        let bytes = unsafe { buffers[class_of(slot)].bytes(buffer_of(slot as u8), *size) };
        steps.answer(bytes, refused, reply);
    }

    /// Frees the slot of a list whose outcome was taken, or abandons the list if it is in flight. Returns the tasks
    /// that wait for a slot.
    #[must_use]
    pub(super) fn release(&mut self, slot: usize) -> Vec<Waker> {
        match self.slots[slot].state {
            State::Ended(_) => {
                self.free(slot);
                return self.waiters();
            }
            State::InFlight => self.slots[slot].state = State::Abandoned,
            State::Free | State::Abandoned => {}
        }
        Vec::new()
    }

    /// Forgets the memory that the NIC reaches under a key, so that the region is registered again.
    pub(super) fn forget_region(&mut self, key: Key) {
        self.regions.remove(&key.region());
    }

    fn free(&mut self, slot: usize) {
        self.slots[slot].state = State::Free;
        self.slots[slot].waker = None;
        self.free[class_of(slot)].push(slot as u8);
    }

    /// Handles completions, and adds the tasks to wake to `woken`. Returns false if there were none.
    ///
    /// # Errors
    /// The completion queue is unusable.
    pub(super) fn poll(&mut self, line: &VerbsLine, woken: &mut Vec<Waker>) -> Result<bool, VerbsError> {
        let mut found = [IbvWc::default(); COMPLETIONS_AT_ONCE];
        let count = line.lists().poll(&mut found)?;
        for completion in &found[..count] {
            if completion.wr_id >> 16 == self.generation && self.pair.is_some() {
                self.complete(completion, woken);
            }
        }
        if count > 0 {
            self.progressed = timer::coarse_now();
            woken.append(&mut self.waiters);
        }
        Ok(count > 0)
    }

    fn complete(&mut self, completion: &IbvWc, woken: &mut Vec<Waker>) {
        let slot = (completion.wr_id >> 8 & 0xff) as usize;
        if self.order.pop_front().is_some_and(|first| usize::from(first) != slot) {
            // The NIC may have executed the lists before this one.
            return self.break_off(&Ended::Unknown("the NIC has not reported a request's end".into()), woken);
        }
        if completion.status == is::WC_SUCCESS {
            return self.end(slot, Ended::Executed { refused: None }, woken);
        }
        // Requests complete in order, so this is the first request of the list that has not completed.
        let refused = (completion.wr_id & 0xff) as u32;
        match completion.status {
            is::WC_REM_ACCESS_ERR | is::WC_REM_INV_REQ_ERR => {
                self.end(slot, Ended::Executed { refused: Some(refused) }, woken);
                // The node's NIC executes nothing of a queue pair after a request that it has refused.
                self.break_off(&Ended::NotRun, woken);
            }
            status => self.break_off(&Ended::Unknown(format!("RDMA: {}", status_text(status))), woken),
        }
    }

    /// Destroys the queue pair. All lists in flight end like this.
    pub(super) fn break_off(&mut self, ended: &Ended, woken: &mut Vec<Waker>) {
        self.pair = None;
        self.order.clear();
        for slot in 0..self.slots.len() {
            if matches!(self.slots[slot].state, State::InFlight | State::Abandoned) {
                self.end(slot, ended.clone(), woken);
            }
        }
        woken.append(&mut self.waiters);
    }

    fn end(&mut self, slot: usize, ended: Ended, woken: &mut Vec<Waker>) {
        let of = &mut self.slots[slot];
        match of.state {
            State::InFlight => {
                of.state = State::Ended(ended);
                woken.extend(of.waker.take());
                self.posted -= of.requests;
            }
            State::Abandoned => {
                self.posted -= of.requests;
                self.free(slot);
            }
            State::Free | State::Ended(_) => {}
        }
    }
}

fn class_of(slot: usize) -> usize {
    usize::from(slot >= SMALL.1)
}

/// Number of a slot's buffer among those of its size.
fn buffer_of(slot: u8) -> u32 {
    u32::from(slot) - if usize::from(slot) >= SMALL.1 { SMALL.1 as u32 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_slot_has_a_buffer_of_its_own() {
        let buffers: BTreeSet<(usize, u32)> =
            (0..SLOTS).map(|slot| (class_of(slot), buffer_of(slot as u8))).collect();
        assert_eq!(buffers.len(), SLOTS);
        let count = |class| buffers.iter().filter(|(of, _)| *of == class).count();
        assert_eq!((count(0), count(1)), (SMALL.1, LARGE.1));
        assert!(buffers.iter().all(|&(class, buffer)| buffer < [SMALL.1, LARGE.1][class] as u32));
    }

    /// Lists without a queue pair that are in flight in these slots, in this order.
    fn in_flight(slots: &[u8]) -> Lists {
        let in_flight = || Slot { state: State::InFlight, requests: 1, ..Slot::default() };
        Lists {
            slots: slots.iter().map(|_| in_flight()).collect(),
            posted: slots.len() as u32,
            order: slots.iter().copied().collect(),
            ..Lists::default()
        }
    }

    fn states(lists: &Lists) -> Vec<&State> {
        lists.slots.iter().map(|slot| &slot.state).collect()
    }

    fn completion(slot: u64, status: u32) -> IbvWc {
        let mut completion = IbvWc::default();
        (completion.wr_id, completion.status) = (slot << 8, status);
        completion
    }

    #[test]
    fn lists_in_flight_have_patience_and_end_when_the_pair_is_broken_off() {
        let mut lists = Lists { progressed: Duration::from_secs(1), ..in_flight(&[0, 1]) };
        lists.slots[1].state = State::Abandoned;
        assert_eq!(lists.patience(Duration::from_secs(2)), Some(PATIENCE - Duration::from_secs(1)));
        assert_eq!(lists.patience(Duration::from_secs(50)), Some(Duration::ZERO));
        let unknown = Ended::Unknown("stuck".into());
        lists.break_off(&unknown, &mut Vec::new());
        assert_eq!(states(&lists), [&State::Ended(unknown), &State::Free]);
        assert_eq!((lists.posted, lists.order.len()), (0, 0));
        assert_eq!(lists.patience(Duration::from_secs(50)), None);
    }

    #[test]
    fn lists_complete_in_the_order_in_which_they_were_posted() {
        let done = State::Ended(Ended::Executed { refused: None });
        let mut lists = in_flight(&[1, 0, 2]);
        lists.complete(&completion(1, is::WC_SUCCESS), &mut Vec::new());
        assert_eq!(states(&lists), [&State::InFlight, &done, &State::InFlight]);
        lists.complete(&completion(0, is::WC_SUCCESS), &mut Vec::new());
        assert_eq!(states(&lists), [&done, &done, &State::InFlight]);
    }

    #[test]
    fn a_list_whose_end_was_not_reported_is_never_posted_again() {
        for status in [is::WC_SUCCESS, is::WC_REM_ACCESS_ERR] {
            let mut lists = in_flight(&[0, 1, 2]);
            lists.complete(&completion(1, status), &mut Vec::new());
            for state in states(&lists) {
                assert!(matches!(state, State::Ended(Ended::Unknown(_))), "{state:?}");
            }
        }
    }

    #[test]
    fn only_lists_behind_a_refused_one_are_posted_again() {
        let mut lists = in_flight(&[0, 1]);
        lists.complete(&completion(0, is::WC_REM_ACCESS_ERR), &mut Vec::new());
        let refused = State::Ended(Ended::Executed { refused: Some(0) });
        assert_eq!(states(&lists), [&refused, &State::Ended(Ended::NotRun)]);
    }

    #[test]
    fn a_list_without_a_queue_pair_is_not_posted() {
        let mut buf = farside_remote::ChainBuf::new();
        let mut chain = buf.begin(Key::new(1, 2));
        chain.also(farside_remote::read(farside_remote::Addr::new(0), 8));
        let terms = Terms { in_order: false, is_final: true };
        let posted = Lists::default().post(chain.view(), 8, terms, &mut Reply::new());
        assert!(matches!(posted, Ok(Posted::NoPair)));
    }
}
