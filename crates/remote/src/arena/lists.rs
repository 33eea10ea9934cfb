//! Free lists: how a buffer is taken and given back by processes that may die at any point.
//!
//! A list of buffers belongs to a region and a class; a list of granted segments to a region. All are stacks whose
//! head is one 16-byte word `| first 48 bits (phase in its low 4), seq 48 bits, who u32 |`. A plain stack would
//! lose the buffer of a client that dies between popping it and noting whose it is. So both steps take three
//! exchanges, and *whoever meets a head in the middle of one finishes it first*:
//!
//! ```text
//! take:  head  A        -> A taking, by who      the decision; a death before it changed nothing
//!        state A FREE   -> LIVE, owner who       by the taker or by whoever comes next
//!        head  A taking -> A.next                likewise
//! give:  state A.next   =  first
//!        head  first    -> A putting             the decision
//!        state A        -> FREE
//!        head  A putting-> A
//! ```
//!
//! A helper reads the state, then sees that the head has not moved on, then exchanges exactly that state; as
//! states and heads never return to an earlier value, a helper that was stopped in between does nothing.
//!
//! Where the list is empty, the class's current segment is bumped (its table entry carries the same two phases),
//! and where that is used up, a granted segment becomes the class's. No link is ever written in advance.

use super::state::{Stage, State, owner};
use super::{Arena, Buffer, Geometry, SEGMENT_SIZE, class::Class, segment::Segment, segment::Use};
use crate::memory::{Memory, Width};
use crate::mutants;

/// `u64` of a region's record: its key's secret, 0 while nobody owns the region.
pub(crate) const SECRET_OFFSET: u64 = 0;
const GRANTED_OFFSET: u64 = 64;
const RESERVE_OFFSET: u64 = 80;
const CLASSES_OFFSET: u64 = 128;
const CLASS_SIZE: u64 = 64;
const FRESH_OFFSET: u64 = 16;
const FRESH_RESERVE_OFFSET: u64 = 32;
/// `u64` of a class's record: how often a buffer was given. A death may cost it one; it steers, and proves nothing.
const GIVEN_OFFSET: u64 = 48;

const _: () = assert!(CLASSES_OFFSET + super::class::CLASSES as u64 * CLASS_SIZE <= super::REGION_SIZE);

/// Which segments an ALLOCATE may turn into buffers once lists are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    /// Those within the quota.
    Quota,
    /// Those of the reserve, which exists so that a full store can be emptied.
    Reserve,
}

impl Supply {
    /// The region's list of segments granted from this supply.
    const fn granted_at(self, region: u32) -> u64 {
        Geometry::region_at(region)
            + match self {
                Supply::Quota => GRANTED_OFFSET,
                Supply::Reserve => RESERVE_OFFSET,
            }
    }

    /// The class's current segment from this supply.
    const fn fresh_at(self, region: u32, class: u8) -> u64 {
        class_at(region, class)
            + match self {
                Supply::Quota => FRESH_OFFSET,
                Supply::Reserve => FRESH_RESERVE_OFFSET,
            }
    }
}

const fn class_at(region: u32, class: u8) -> u64 {
    Geometry::region_at(region) + CLASSES_OFFSET + class as u64 * CLASS_SIZE
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Phase {
    Settled = 0,
    Taking = 1,
    Putting = 2,
}

const FIRST_BITS: u32 = 48;
const PHASE_MASK: u64 = 0xf;
const SEQ_MASK: u64 = (1 << 48) - 1;

/// The head of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// The first buffer's address, or the first segment's index + 1, shifted clear of the phase.
    first: u64,
    phase: Phase,
    /// Grows with every change.
    seq: u64,
    /// The session in whose name the step is, or the class that a granted segment is taken for.
    who: u32,
}

impl Head {
    fn unpack(word: u128) -> Head {
        let low = word as u64 & ((1 << FIRST_BITS) - 1);
        let phase = match low & PHASE_MASK {
            1 => Phase::Taking,
            2 => Phase::Putting,
            _ => Phase::Settled,
        };
        Head {
            first: low & !PHASE_MASK,
            phase,
            seq: (word >> FIRST_BITS) as u64 & SEQ_MASK,
            who: (word >> 96) as u32,
        }
    }

    fn pack(self) -> u128 {
        u128::from(self.first | self.phase as u64)
            | u128::from(self.seq & SEQ_MASK) << FIRST_BITS
            | u128::from(self.who) << 96
    }

    fn becoming(self, first: u64, phase: Phase, who: u32) -> Head {
        let seq = if mutants::POP_WITHOUT_SEQ.is_on() { self.seq } else { self.seq.wrapping_add(1) };
        // `first` may be a link that a peer has damaged: its low bits must not say that a step is under way.
        Head { first: first & !PHASE_MASK, phase, seq, who }
    }
}

const SEGMENT_SHIFT: u32 = PHASE_MASK.count_ones();

const fn segment_link(index: u32) -> u64 {
    (index as u64 + 1) << SEGMENT_SHIFT
}

/// Why there is no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Empty {
    /// None is free now, and no segment is granted.
    NotReady,
    /// A list's head names something that does not belong on that list: the memory was damaged by a peer.
    Damaged,
}

impl<M: Memory> Arena<'_, M> {
    /// Takes a buffer of `class` for `owner`.
    pub fn take(
        &self,
        region: u32,
        class: &'static Class,
        supply: Supply,
        owner: u32,
    ) -> Result<Result<u64, Empty>, M::Wait> {
        loop {
            match self.take_listed(region, class, owner)? {
                Err(Empty::NotReady) => {}
                taken => return Ok(taken),
            }
            for supply in [Supply::Quota, supply] {
                if let Some(at) = self.take_fresh(region, class, supply, owner)? {
                    return Ok(Ok(at));
                }
            }
            let mut refilled = self.refill(region, class, Supply::Quota)?;
            if refilled.is_err() && supply != Supply::Quota {
                refilled = self.refill(region, class, supply)?;
            }
            if let Err(empty) = refilled {
                return Ok(Err(empty));
            }
        }
    }

    /// Takes the first buffer of a class's free list, and nothing else.
    pub fn take_listed(
        &self,
        region: u32,
        class: &'static Class,
        owner: u32,
    ) -> Result<Result<u64, Empty>, M::Wait> {
        let head_at = class_at(region, class.index);
        loop {
            let word = self.memory.load(head_at, Width::W16)?;
            let head = Head::unpack(word);
            if head.first == 0 {
                return Ok(Err(Empty::NotReady));
            }
            let Some(buffer) = self.listed_buffer(region, class, head.first)? else {
                return Ok(Err(Empty::Damaged));
            };
            if head.phase != Phase::Settled {
                self.finish(head_at, head, &buffer)?;
                continue;
            }
            let free = self.memory.load(buffer.state_at, Width::W16)?;
            let taking = head.becoming(head.first, Phase::Taking, owner);
            if self.memory.exchange(head_at, Width::W16, word, taking.pack())?.is_err() {
                continue;
            }
            // Nobody could take this buffer since its state was read, or the head would have changed. So these
            // two fail only where a helper has done them.
            let state = State::unpack(free);
            let live = state.taken(Stage::Live, owner);
            let _helped = self.memory.exchange(buffer.state_at, Width::W16, free, live.pack())?;
            let next = taking.becoming(state.next, Phase::Settled, 0);
            let _helped = self.memory.exchange(head_at, Width::W16, taking.pack(), next.pack())?;
            return Ok(Ok(head.first));
        }
    }

    /// Finishes the step in whose middle a free list's head is. Once this returns, `head` is not that head.
    fn finish(&self, head_at: u64, head: Head, buffer: &Buffer) -> Result<(), M::Wait> {
        loop {
            let word = self.memory.load(buffer.state_at, Width::W16)?;
            if self.memory.load(head_at, Width::W16)? != head.pack()
                && !mutants::HELPER_DOES_NOT_RECHECK_HEAD.is_on()
            {
                return Ok(());
            }
            // The step is unfinished, so the state is either as it was before it or as the step leaves it.
            let state = State::unpack(word);
            let (state_done, head_done) = match head.phase {
                Phase::Taking => (
                    if state.stage == Stage::Free { state.taken(Stage::Live, head.who) } else { state },
                    head.becoming(state.next, Phase::Settled, 0),
                ),
                Phase::Putting => (freed(state), head.becoming(head.first, Phase::Settled, 0)),
                Phase::Settled => return Ok(()),
            };
            if state_done != state
                && self.memory.exchange(buffer.state_at, Width::W16, word, state_done.pack())?.is_err()
            {
                continue; // Another did it, or its SUSPECT mark changed under us.
            }
            let _helped = self.memory.exchange(head_at, Width::W16, head.pack(), head_done.pack())?;
            return Ok(());
        }
    }

    /// Finishes whatever step the class's list is in the middle of: what a scan does before it judges states.
    pub fn settle(&self, region: u32, class: &'static Class) -> Result<(), M::Wait> {
        let head_at = class_at(region, class.index);
        let head = Head::unpack(self.memory.load(head_at, Width::W16)?);
        if head.phase != Phase::Settled
            && let Some(buffer) = self.listed_buffer(region, class, head.first)?
        {
            self.finish(head_at, head, &buffer)?;
        }
        Ok(())
    }

    /// Puts a buffer on its class's free list. The caller holds it, as LIVE and its own or as RETIRED and past its
    /// grace. If its state says that nobody holds it, a peer has damaged that, and nothing is done.
    pub fn give(&self, region: u32, buffer: &Buffer) -> Result<(), M::Wait> {
        let head_at = class_at(region, buffer.class.index);
        let mut state = State::unpack(self.memory.load(buffer.state_at, Width::W16)?);
        loop {
            if !matches!(state.stage, Stage::Live | Stage::Retired | Stage::Parked) {
                return Ok(());
            }
            let word = self.memory.load(head_at, Width::W16)?;
            let head = Head::unpack(word);
            if head.phase != Phase::Settled {
                match self.listed_buffer(region, buffer.class, head.first)? {
                    Some(first) => self.finish(head_at, head, &first)?,
                    None => return Ok(()), // Damaged by a peer; what cannot be linked is left to a scan.
                }
                continue;
            }
            let linked = State { next: head.first, ..state };
            if linked != state {
                match self.memory.exchange(buffer.state_at, Width::W16, state.pack(), linked.pack())? {
                    Ok(()) => state = linked,
                    Err(now) => {
                        state = State::unpack(now); // Its SUSPECT mark changed under us.
                        continue;
                    }
                }
            }
            let putting = head.becoming(buffer.at, Phase::Putting, 0);
            if self.memory.exchange(head_at, Width::W16, word, putting.pack())?.is_err() {
                continue;
            }
            self.finish(head_at, putting, buffer)?;
            return self.count_given(head_at + GIVEN_OFFSET);
        }
    }

    fn count_given(&self, at: u64) -> Result<(), M::Wait> {
        let mut given = self.memory.load(at, Width::W8)?;
        while let Err(now) = self.memory.exchange(at, Width::W8, given, given + 1)? {
            given = now;
        }
        Ok(())
    }

    /// About how many buffers are on a class's free list: every take and every give changes its head twice.
    pub fn list_len(&self, region: u32, class: &'static Class) -> Result<u64, M::Wait> {
        let head_at = class_at(region, class.index);
        let head = Head::unpack(self.memory.load(head_at, Width::W16)?);
        let given = self.memory.load(head_at + GIVEN_OFFSET, Width::W8)? as u64;
        Ok(if head.first == 0 { 0 } else { given.saturating_mul(2).saturating_sub(head.seq / 2).max(1) })
    }

    /// Withdraws a buffer that `owner` took and has shown to nobody, so that it can be given. False, and nothing
    /// changes, if it is not live and the owner's any more: whoever retired it has it on a list.
    pub(crate) fn withdraw(&self, buffer: &Buffer, owner: u32) -> Result<bool, M::Wait> {
        loop {
            let live = self.state(buffer)?;
            if live.stage != Stage::Live || live.owner != owner {
                return Ok(false);
            }
            let retired = State { stage: Stage::Retired, suspect: false, ..live };
            if self.exchange_state(buffer, live, retired)? {
                return Ok(true);
            }
        }
    }

    /// Gives a live buffer back at once, although its bytes may still be read: for structures whose readers can tell.
    /// False, and nothing changes, unless it is a live buffer of that region. The caller has made it unreachable.
    pub fn release(&self, region: u32, at: u64) -> Result<bool, M::Wait> {
        let Some((_, buffer)) = self.buffer_at(at)?.filter(|(of, _)| *of == region) else { return Ok(false) };
        loop {
            let live = self.state(&buffer)?;
            if live.stage != Stage::Live {
                return Ok(false); // A scan, or a client that holds the store's key, has it on its way back.
            }
            // The node's, so that a node that takes over in the middle of this gives it back.
            let retired = State { stage: Stage::Retired, suspect: false, owner: owner::NODE, ..live };
            if self.exchange_state(&buffer, live, retired)? {
                self.give(region, &buffer)?;
                return Ok(true);
            }
        }
    }

    /// The buffer at `at` if it is one of that region and class: a list's own pointers are input too.
    fn listed_buffer(&self, region: u32, class: &'static Class, at: u64) -> Result<Option<Buffer>, M::Wait> {
        let buffer = self.buffer_at(at)?;
        Ok(buffer.filter(|(of, buffer)| *of == region && buffer.class.index == class.index).map(|(_, b)| b))
    }

    /// Takes the next buffer of the class's current segment that was never taken before.
    fn take_fresh(
        &self,
        region: u32,
        class: &'static Class,
        supply: Supply,
        owner: u32,
    ) -> Result<Option<u64>, M::Wait> {
        let fresh = Head::unpack(self.memory.load(supply.fresh_at(region, class.index), Width::W16)?);
        let Some(index) = self.fresh_segment(fresh) else { return Ok(None) };
        loop {
            let segment = self.segment(index)?;
            if !is_fresh(&segment, region, class) {
                return Ok(None);
            }
            let buffer = self.geometry().buffer(index, class, segment.used);
            if segment.taking {
                self.finish_fresh(index, segment, &buffer)?;
                continue;
            }
            let unused = self.memory.load(buffer.state_at, Width::W16)?;
            let taking =
                Segment { taking: true, taker: owner, count: segment.count.wrapping_add(1), ..segment };
            if self.exchange_segment(index, segment, taking)? {
                let live = State::unpack(unused).taken(Stage::Live, owner);
                let _helped = self.memory.exchange(buffer.state_at, Width::W16, unused, live.pack())?;
                self.exchange_segment(index, taking, bumped(taking))?;
                return Ok(Some(buffer.at));
            }
        }
    }

    /// As [`Arena::finish`], for a segment whose next buffer is being taken.
    pub(crate) fn finish_fresh(&self, index: u32, segment: Segment, buffer: &Buffer) -> Result<(), M::Wait> {
        let word = self.memory.load(buffer.state_at, Width::W16)?;
        if self.segment(index)? != segment {
            return Ok(());
        }
        let state = State::unpack(word);
        if state.stage == Stage::Unused {
            let live = state.taken(Stage::Live, segment.taker);
            let _helped = self.memory.exchange(buffer.state_at, Width::W16, word, live.pack())?;
        }
        self.exchange_segment(index, segment, bumped(segment))?;
        Ok(())
    }

    fn fresh_segment(&self, fresh: Head) -> Option<u32> {
        let index = (fresh.first >> SEGMENT_SHIFT).checked_sub(1)?;
        u32::try_from(index).ok().filter(|&index| index < self.geometry().segments())
    }

    /// Makes a granted segment the class's current one, or finds that another has. Whoever calls this again and again
    /// comes to an end: each time a segment leaves the list that was granted, and so becomes a class's.
    fn refill(
        &self,
        region: u32,
        class: &'static Class,
        supply: Supply,
    ) -> Result<Result<(), Empty>, M::Wait> {
        let (granted_at, fresh_at) = (supply.granted_at(region), supply.fresh_at(region, class.index));
        // The head comes first: if another client refilled in between, taking fails, and we look again.
        let word = self.memory.load(granted_at, Width::W16)?;
        let head = Head::unpack(word);
        if head.phase != Phase::Settled {
            return Ok(if self.finish_refill(region, supply, head)? { Ok(()) } else { Err(Empty::Damaged) });
        }
        let fresh = Head::unpack(self.memory.load(fresh_at, Width::W16)?);
        if let Some(current) = self.fresh_segment(fresh)
            && is_fresh(&self.segment(current)?, region, class)
        {
            return Ok(Ok(())); // Another has just made it so.
        }
        if head.first == 0 {
            return Ok(Err(Empty::NotReady));
        }
        let Some(index) = self.fresh_segment(head) else { return Ok(Err(Empty::Damaged)) };
        let segment = self.segment(index)?;
        if segment.region != region || segment.usage != Use::Granted {
            // It has just left the list, unless the list says that it has not.
            let damaged = self.memory.load(granted_at, Width::W16)? == word;
            return Ok(if damaged { Err(Empty::Damaged) } else { Ok(()) });
        }
        let taking = head.becoming(head.first, Phase::Taking, u32::from(class.index));
        if self.memory.exchange(granted_at, Width::W16, word, taking.pack())?.is_ok()
            && !self.finish_refill(region, supply, taking)?
        {
            return Ok(Err(Empty::Damaged));
        }
        Ok(Ok(()))
    }

    /// Finishes taking a granted segment for class `head.who`: the segment is the class's, then current, then off
    /// the list, in that order, so that a segment which left the list is never forgotten.
    /// False if it cannot be finished: a peer damaged the head, or the segment's entry.
    fn finish_refill(&self, region: u32, supply: Supply, head: Head) -> Result<bool, M::Wait> {
        let granted_at = supply.granted_at(region);
        let (Some(index), Some(class)) = (self.fresh_segment(head), Class::get(head.who as u8)) else {
            return Ok(false);
        };
        let fresh_at = supply.fresh_at(region, class.index);
        let segment = self.segment(index)?;
        let fresh_word = self.memory.load(fresh_at, Width::W16)?;
        let next = self.segment_next(index)?;
        if self.memory.load(granted_at, Width::W16)? != head.pack() {
            return Ok(true);
        }
        let fresh = Head::unpack(fresh_word);
        let is_this_steps = match segment.usage {
            Use::Granted => true,
            // The first half is done. Nobody takes buffers before the second, which makes it current; after that all
            // of them may be gone.
            Use::Buffers(of) => {
                of == class.index && (segment.used < class.count || fresh.first == head.first)
            }
            Use::Free | Use::Table => false,
        };
        if segment.region != region || !is_this_steps {
            return Ok(false);
        }
        let settled = head.becoming(next, Phase::Settled, 0);
        if mutants::SEGMENT_LEAVES_LIST_FIRST.is_on() {
            let _helped = self.memory.exchange(granted_at, Width::W16, head.pack(), settled.pack())?;
        }
        // Unfinished still, so nobody else can have made another segment current since `fresh_word` was read.
        if segment.usage == Use::Granted {
            self.exchange_segment(index, segment, segment.put_to(region, Use::Buffers(class.index)))?;
        }
        if fresh.first != head.first {
            let current = fresh.becoming(head.first, Phase::Settled, 0);
            let _helped = self.memory.exchange(fresh_at, Width::W16, fresh_word, current.pack())?;
        }
        let _helped = self.memory.exchange(granted_at, Width::W16, head.pack(), settled.pack())?;
        // Last, since it may take a while and nobody is to wait for it.
        self.memory.will_fill(self.memory.geometry().segment_at(index), SEGMENT_SIZE);
        Ok(true)
    }

    // What the node alone does.

    /// Gives region number `region` its key's secret, or takes it away with 0: no chain that begins later is
    /// admitted. An exchange and no plain store, so that it is visible before the node looks at anybody's turn:
    /// whoever is not seen in the middle of a turn then sees that the key is gone.
    pub fn set_secret(&self, region: u32, secret: u64) -> Result<(), M::Wait> {
        let at = Geometry::region_at(region) + SECRET_OFFSET;
        let mut old = self.memory.load(at, Width::W8)?;
        while let Err(now) = self.memory.exchange(at, Width::W8, old, u128::from(secret))? {
            old = now;
        }
        Ok(())
    }

    /// Makes a live buffer RETIRED and the node's, in whose structure nothing reaches it any more. False if it is none
    /// of that region, or somebody else has retired it.
    pub fn condemn(&self, region: u32, at: u64) -> Result<bool, M::Wait> {
        let Some((_, buffer)) = self.buffer_at(at)?.filter(|(of, _)| *of == region) else { return Ok(false) };
        loop {
            let live = self.state(&buffer)?;
            if live.stage != Stage::Live {
                return Ok(false);
            }
            let mine = State { stage: Stage::Retired, owner: owner::NODE, suspect: false, ..live };
            if self.exchange_state(&buffer, live, mine)? {
                return Ok(true);
            }
        }
    }

    /// Clears the record of a region that nobody uses any more.
    pub fn clear_region(&self, region: u32) -> Result<(), M::Wait> {
        self.memory.write(Geometry::region_at(region), &[0; super::REGION_SIZE as usize])
    }

    /// Puts a segment, which the node has assigned to the region as [`Use::Granted`], on its list.
    pub fn grant(&self, region: u32, supply: Supply, index: u32) -> Result<(), M::Wait> {
        let granted_at = supply.granted_at(region);
        loop {
            let word = self.memory.load(granted_at, Width::W16)?;
            let head = Head::unpack(word);
            if head.phase != Phase::Settled {
                if !self.finish_refill(region, supply, head)? {
                    return Ok(()); // Damaged; the segment stays the region's, and on no list.
                }
                continue;
            }
            self.set_segment_next(index, head.first)?;
            let first = head.becoming(segment_link(index), Phase::Settled, 0);
            if self.memory.exchange(granted_at, Width::W16, word, first.pack())?.is_ok() {
                return Ok(());
            }
        }
    }

    /// The segments on a granted list, first to last, after whatever step it was in the middle of is finished. For a
    /// node that starts over, while nobody else is there.
    pub fn granted(&self, region: u32, supply: Supply) -> Result<Vec<u32>, M::Wait> {
        let granted_at = supply.granted_at(region);
        let mut head = Head::unpack(self.memory.load(granted_at, Width::W16)?);
        if head.phase != Phase::Settled {
            self.finish_refill(region, supply, head)?;
            head = Head::unpack(self.memory.load(granted_at, Width::W16)?);
        }
        let mut listed = Vec::new();
        while let Some(index) = self.fresh_segment(head)
            && listed.len() < self.geometry().segments() as usize
        {
            listed.push(index);
            head.first = self.segment_next(index)?;
        }
        Ok(listed)
    }

    /// Whether any segment is granted and not yet of a class.
    pub fn has_granted(&self, region: u32, supply: Supply) -> Result<bool, M::Wait> {
        Ok(Head::unpack(self.memory.load(supply.granted_at(region), Width::W16)?).first != 0)
    }

    /// Buffer number `ordinal` of a segment with its state, once whatever step it is in the middle of is finished.
    /// Nothing if the segment has no such buffer, or it was never taken.
    pub fn buffer_state(&self, index: u32, ordinal: u32) -> Result<Option<(Buffer, State)>, M::Wait> {
        let mut segment = self.segment(index)?;
        let Use::Buffers(class) = segment.usage else { return Ok(None) };
        let Some(class) = Class::get(class) else { return Ok(None) };
        if segment.taking && segment.used == ordinal && ordinal < class.count {
            self.finish_fresh(index, segment, &self.geometry().buffer(index, class, ordinal))?;
            segment = self.segment(index)?;
        }
        if ordinal >= segment.used.min(class.count) {
            return Ok(None);
        }
        let buffer = self.geometry().buffer(index, class, ordinal);
        let state = State::unpack(self.memory.load(buffer.state_at, Width::W16)?);
        Ok(Some((buffer, state)))
    }

    /// Changes a buffer's state if it is still `old`.
    pub fn exchange_state(&self, buffer: &Buffer, old: State, new: State) -> Result<bool, M::Wait> {
        Ok(self.memory.exchange(buffer.state_at, Width::W16, old.pack(), new.pack())?.is_ok())
    }

    /// The state of a buffer.
    pub fn state(&self, buffer: &Buffer) -> Result<State, M::Wait> {
        Ok(State::unpack(self.memory.load(buffer.state_at, Width::W16)?))
    }

    /// What a runner will touch when it takes a buffer of this class, for prefetching. Only a guess.
    pub fn first_free(&self, region: u32, class: &'static Class) -> Result<Option<Buffer>, M::Wait> {
        let head = Head::unpack(self.memory.load(class_at(region, class.index), Width::W16)?);
        self.listed_buffer(region, class, head.first)
    }
}

fn freed(state: State) -> State {
    State { stage: Stage::Free, suspect: false, owner: 0, ..state }
}

fn is_fresh(segment: &Segment, region: u32, class: &Class) -> bool {
    segment.region == region && segment.usage == Use::Buffers(class.index) && segment.used < class.count
}

fn bumped(segment: Segment) -> Segment {
    Segment {
        taking: false,
        taker: 0,
        used: segment.used + 1,
        count: segment.count.wrapping_add(1),
        ..segment
    }
}
