//! Free lists, from which processes that may die at any point take buffers, and to which they return buffers.
//!
//! A list of buffers belongs to a region and a class; a list of granted segments belongs to a region. Each list is a
//! stack whose head is one 16-byte word `| first 48 bits (phase in its low 4), seq 48 bits, who u32 |`. A plain stack
//! would lose a buffer if its client died between popping the buffer and recording the owner. Therefore taking and
//! giving a buffer are sequences of exchanges, and *any process that finds a step unfinished completes it first*
//! (helping):
//!
//! ```text
//! take:  head  A        -> A taking, by who      the decision; a death before it changes nothing
//!        state A FREE   -> LIVE, owner who       by the taker or by a helper
//!        head  A taking -> A.next                by the taker or by a helper
//! give:  state A.next   =  first
//!        head  first    -> A putting             the decision
//!        state A        -> FREE
//!        head  A putting-> A
//! ```
//!
//! A helper reads the state, then checks that the head has not changed, then exchanges exactly the state that it read.
//! States and heads never return to an earlier value, so a helper that was delayed in between has no effect.
//!
//! If the list is empty, a buffer is taken from the class's current segment, in order of address, so the unused buffers
//! of a segment need no links. The segment's entry in the segment table records an unfinished step as a list's head
//! does. If the current segment is used up, a granted segment becomes the current one.

use super::state::{Stage, State, owner};
use super::{Arena, Buffer, Geometry, SEGMENT_SIZE, class::Class, segment::Segment, segment::Use};
use crate::memory::{Memory, Width};
use crate::mutants;

/// Offset of a `u64` in a region's record: the secret of the region's key, or 0 while no store owns the region.
pub(crate) const SECRET_OFFSET: u64 = 0;
/// Offset of a `u64` in a region's record: 1 if sessions reuse the buffers that they retire there, else 0.
pub(crate) const REUSE_OFFSET: u64 = 8;
const GRANTED_OFFSET: u64 = 64;
const RESERVE_OFFSET: u64 = 80;
const CLASSES_OFFSET: u64 = 128;
const CLASS_SIZE: u64 = 64;
const FRESH_OFFSET: u64 = 16;
const FRESH_RESERVE_OFFSET: u64 = 32;
/// Offset of a `u64` in a class's record: how many times a buffer was freed. The number is an estimate: each process
/// that dies may leave it one too low.
const GIVEN_OFFSET: u64 = 48;

const _: () = assert!(CLASSES_OFFSET + super::class::CLASSES as u64 * CLASS_SIZE <= super::REGION_SIZE);

/// One of a region's two supplies of granted segments, from which an ALLOCATE takes buffers once the free list is
/// empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    /// Supply of the segments within the quota.
    Quota,
    /// The reserve's segments, which exist so that a full store can be emptied.
    Reserve,
}

impl Supply {
    /// Address of the head of the region's list of segments that were granted from this supply.
    const fn granted_at(self, region: u32) -> u64 {
        Geometry::region_at(region)
            + match self {
                Supply::Quota => GRANTED_OFFSET,
                Supply::Reserve => RESERVE_OFFSET,
            }
    }

    /// Address of the word that names the class's current segment from this supply.
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

/// The decoded head of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// The first buffer's address, or the first segment's index + 1, shifted left by the 4 bits of the phase.
    first: u64,
    phase: Phase,
    /// Sequence number, which grows with every change of the head.
    seq: u64,
    /// The session for which the step is done, or the class for which a granted segment is taken.
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
        // A peer may have damaged the link in `first`. Mask its low bits, so that they cannot change the phase.
        Head { first: first & !PHASE_MASK, phase, seq, who }
    }
}

const SEGMENT_SHIFT: u32 = PHASE_MASK.count_ones();

const fn segment_link(index: u32) -> u64 {
    (index as u64 + 1) << SEGMENT_SHIFT
}

/// Reason why no buffer could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Empty {
    /// No buffer is free now, and no segment is granted.
    NotReady,
    /// A list's head names an object that does not belong on that list: a peer has damaged the memory.
    Damaged,
}

impl<M: Memory> Arena<'_, M> {
    /// Takes a buffer of `class` for `owner`, from the free list or else from the current segment.
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

    /// Takes the first buffer of a class's free list. If the list is empty, does not use the current segment.
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
            // If another process had taken this buffer after its state was read, the head would have changed. So the
            // next two exchanges fail only if a helper has already done them.
            let state = State::unpack(free);
            let live = state.taken(Stage::Live, owner);
            let _helped = self.memory.exchange(buffer.state_at, Width::W16, free, live.pack())?;
            let next = taking.becoming(state.next, Phase::Settled, 0);
            let _helped = self.memory.exchange(head_at, Width::W16, taking.pack(), next.pack())?;
            return Ok(Ok(head.first));
        }
    }

    /// Completes the unfinished step that `head` records. On return, the list's head is no longer `head`.
    fn finish(&self, head_at: u64, head: Head, buffer: &Buffer) -> Result<(), M::Wait> {
        loop {
            let word = self.memory.load(buffer.state_at, Width::W16)?;
            if self.memory.load(head_at, Width::W16)? != head.pack()
                && !mutants::HELPER_DOES_NOT_RECHECK_HEAD.is_on()
            {
                return Ok(());
            }
            // The head is unchanged, so the step is unfinished: the state read is the one before or after the step's
            // change.
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
                continue; // A helper changed it, or a scan changed its SUSPECT mark.
            }
            let _helped = self.memory.exchange(head_at, Width::W16, head.pack(), head_done.pack())?;
            return Ok(());
        }
    }

    /// Completes the unfinished step of the class's list, if there is one. A scan calls this before it reads buffers'
    /// states.
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

    /// Puts a buffer on its class's free list. The caller must hold the buffer: it is LIVE and owned by the caller, or
    /// RETIRED and past its grace period. If the state is neither, a peer has damaged it, and this function does
    /// nothing.
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
                    None => return Ok(()), // A peer has damaged the list: leave the buffer to a scan.
                }
                continue;
            }
            let linked = State { next: head.first, ..state };
            if linked != state {
                match self.memory.exchange(buffer.state_at, Width::W16, state.pack(), linked.pack())? {
                    Ok(()) => state = linked,
                    Err(now) => {
                        state = State::unpack(now); // A scan changed its SUSPECT mark.
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

    /// Approximate length of a class's free list. The length follows from the head's sequence number and the number of
    /// freed buffers, since every take and every give changes the head twice.
    pub fn list_len(&self, region: u32, class: &'static Class) -> Result<u64, M::Wait> {
        let head_at = class_at(region, class.index);
        let head = Head::unpack(self.memory.load(head_at, Width::W16)?);
        let given = self.memory.load(head_at + GIVEN_OFFSET, Width::W8)? as u64;
        Ok(if head.first == 0 { 0 } else { given.saturating_mul(2).saturating_sub(head.seq / 2).max(1) })
    }

    /// Changes a buffer that `owner` took and has not published from LIVE to RETIRED, so that [`Arena::give`] can free
    /// it. Returns false, and changes nothing, if the buffer is no longer live and owned by `owner`: then another
    /// client has retired the buffer, and that client's list contains it.
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

    /// Frees a live buffer at once, although other chains may still read its bytes. Only for structures whose readers
    /// detect reused buffers. Returns false, and changes nothing, unless `at` is a live buffer of that region. The
    /// caller has made the buffer unreachable.
    pub fn release(&self, region: u32, at: u64) -> Result<bool, M::Wait> {
        let Some((_, buffer)) = self.buffer_at(at)?.filter(|(of, _)| *of == region) else { return Ok(false) };
        loop {
            let live = self.state(&buffer)?;
            if live.stage != Stage::Live {
                return Ok(false); // A scan, or a client that holds the store's key, is already freeing it.
            }
            // Make the node the owner: if this node dies before `give`, the node that takes over frees the buffer.
            let retired = State { stage: Stage::Retired, suspect: false, owner: owner::NODE, ..live };
            if self.exchange_state(&buffer, live, retired)? {
                self.give(region, &buffer)?;
                return Ok(true);
            }
        }
    }

    /// The buffer at `at`, if it belongs to that region and class. Code that follows a list's links needs this check,
    /// since a peer may have damaged the links.
    pub(super) fn listed_buffer(
        &self,
        region: u32,
        class: &'static Class,
        at: u64,
    ) -> Result<Option<Buffer>, M::Wait> {
        let buffer = self.buffer_at(at)?;
        Ok(buffer.filter(|(of, buffer)| *of == region && buffer.class.index == class.index).map(|(_, b)| b))
    }

    /// Takes the next never-used buffer of the class's current segment.
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

    /// Completes the unfinished step on a segment whose next buffer is being taken, as [`Arena::finish`] does on a
    /// list.
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

    /// Makes a granted segment the class's current one, unless another process has just done so. A loop of calls
    /// terminates, since each call moves one segment from the granted list to a class.
    fn refill(
        &self,
        region: u32,
        class: &'static Class,
        supply: Supply,
    ) -> Result<Result<(), Empty>, M::Wait> {
        let (granted_at, fresh_at) = (supply.granted_at(region), supply.fresh_at(region, class.index));
        // Read the head first: if another client refills in the meantime, the exchange of this head fails, and the
        // caller retries.
        let word = self.memory.load(granted_at, Width::W16)?;
        let head = Head::unpack(word);
        if head.phase != Phase::Settled {
            return Ok(if self.finish_refill(region, supply, head)? { Ok(()) } else { Err(Empty::Damaged) });
        }
        let fresh = Head::unpack(self.memory.load(fresh_at, Width::W16)?);
        if let Some(current) = self.fresh_segment(fresh)
            && is_fresh(&self.segment(current)?, region, class)
        {
            return Ok(Ok(())); // Another process has just refilled.
        }
        if head.first == 0 {
            return Ok(Err(Empty::NotReady));
        }
        let Some(index) = self.fresh_segment(head) else { return Ok(Err(Empty::Damaged)) };
        let segment = self.segment(index)?;
        if segment.region != region || segment.usage != Use::Granted {
            // Either the segment has just left the list, and the head has changed; or the head is unchanged, and the
            // list is damaged.
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

    /// Completes the step that takes a granted segment for class `head.who`. The segment is first assigned to the
    /// class, then becomes current, then leaves the list, so that a segment which left the list is never lost. Returns
    /// false if the step cannot be completed, because a peer damaged the head or the segment's entry.
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
            // The segment is already assigned to the class. Until it is the current segment, no process takes its
            // buffers, so `used` is below `count`. Once it is current, all its buffers may have been taken.
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
        // The head was unchanged after `fresh_word` was read, so until then no other segment had become current.
        if segment.usage == Use::Granted {
            self.exchange_segment(index, segment, segment.put_to(region, Use::Buffers(class.index)))?;
        }
        if fresh.first != head.first {
            let current = fresh.becoming(head.first, Phase::Settled, 0);
            let _helped = self.memory.exchange(fresh_at, Width::W16, fresh_word, current.pack())?;
        }
        let _helped = self.memory.exchange(granted_at, Width::W16, head.pack(), settled.pack())?;
        // Prepare the memory last, since that may be slow and no other process should wait for it.
        self.memory.will_fill(self.memory.geometry().segment_at(index), SEGMENT_SIZE);
        Ok(true)
    }

    // Steps that only the node performs.

    /// Sets the secret of the key of region `region`. A secret of 0 removes the key: chains that start later are
    /// refused. Uses an exchange instead of a plain store, so that the new secret is visible before the node reads any
    /// session's turn: a session that starts its turn after that read sees that the key is gone.
    pub fn set_secret(&self, region: u32, secret: u64) -> Result<(), M::Wait> {
        let at = Geometry::region_at(region) + SECRET_OFFSET;
        let mut old = self.memory.load(at, Width::W8)?;
        while let Err(now) = self.memory.exchange(at, Width::W8, old, u128::from(secret))? {
            old = now;
        }
        Ok(())
    }

    /// Changes the live buffer at `at` to RETIRED and owned by the node. The caller must have made the buffer
    /// unreachable. Returns false if `at` is not a live buffer of that region, for example because another process has
    /// retired it.
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

    /// Clears the record of a region that is no longer used.
    pub fn clear_region(&self, region: u32) -> Result<(), M::Wait> {
        self.memory.write(Geometry::region_at(region), &[0; super::REGION_SIZE as usize])
    }

    /// Puts a segment on its region's granted list. The node has assigned it to the region as [`Use::Granted`].
    pub fn grant(&self, region: u32, supply: Supply, index: u32) -> Result<(), M::Wait> {
        let granted_at = supply.granted_at(region);
        loop {
            let word = self.memory.load(granted_at, Width::W16)?;
            let head = Head::unpack(word);
            if head.phase != Phase::Settled {
                if !self.finish_refill(region, supply, head)? {
                    return Ok(()); // The list is damaged: the segment stays the region's, and on no list.
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

    /// The segments on a granted list, first to last. Completes the list's unfinished step first. Only for a node that
    /// takes over the memory, while no other process uses it.
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

    /// Whether any segment is granted but not yet assigned to a class.
    pub fn has_granted(&self, region: u32, supply: Supply) -> Result<bool, M::Wait> {
        Ok(Head::unpack(self.memory.load(supply.granted_at(region), Width::W16)?).first != 0)
    }

    /// Buffer number `ordinal` of a segment and its state. Completes the segment's unfinished step first. `None` if the
    /// segment has no such buffer, or the buffer was never taken.
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

    /// Changes a buffer's state to `new` if it is still `old`. Returns whether it was.
    pub fn exchange_state(&self, buffer: &Buffer, old: State, new: State) -> Result<bool, M::Wait> {
        Ok(self.memory.exchange(buffer.state_at, Width::W16, old.pack(), new.pack())?.is_ok())
    }

    /// Returns the state of a buffer.
    pub fn state(&self, buffer: &Buffer) -> Result<State, M::Wait> {
        Ok(State::unpack(self.memory.load(buffer.state_at, Width::W16)?))
    }

    /// The buffer that a runner will probably take from this class, so that its memory can be prefetched. May be wrong.
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
