//! Session slots: what a runner of chains publishes about itself, and the buffers that it gave back.
//!
//! ```text
//! 0    number u32, 0 u32 | pid u64 | start time u64 | 0 u64
//! 64   turn u64          odd while chains may be running, even while none are; on a line of its own
//! 128  retired           | first 48 bits, 0 16 | count u64 |   a list through the buffers' states
//! 192  counters          8 x u64, written by the session alone, summed by the node
//! ```
//!
//! A node that takes over the memory of one that died waits for the processes of all slots that have a number.
//!
//! Invariant: numbers are never reused, so that a dead session's buffers are nobody else's.
//! Invariant: whoever runs a session's chains sets its number to 0 after its last access, and before it tells the node.
//! Invariant: a chain retires what it makes unreachable before the end of its turn is published.

use super::lists::SECRET_OFFSET;
use super::state::{Stage, State};
use super::{Arena, Geometry, REGIONS_MAX};
use crate::memory::{Memory, Width};
use crate::mutants;

pub(crate) const SLOT_SIZE: u64 = 256;
const TURN_OFFSET: u64 = 64;
const RETIRED_OFFSET: u64 = 128;
const COUNTERS_OFFSET: u64 = 192;

/// One session, as those who run chains for it know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// Its slot.
    pub slot: u32,
    /// Its number, which no other session of this memory ever has. Not 0.
    pub number: u32,
}

/// What a session counts for the node's metrics, in the order in which the counters lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Chains run.
    pub chains: u64,
    /// Ops in them.
    pub ops: u64,
    /// Bytes of the chains on the wire.
    pub bytes_in: u64,
    /// Bytes of the replies on the wire.
    pub bytes_out: u64,
    /// CAS and FETCH-ADD asked for.
    pub atomics: u64,
    /// Chains answered NOT READY.
    pub not_ready: u64,
    /// Ops refused: access, invalid.
    pub refused: u64,
    /// Buffers retired.
    pub retired: u64,
}

impl Counters {
    /// Bytes of all counters.
    pub const SIZE: usize = 64;

    /// As they lie in the slot.
    pub fn to_bytes(self) -> [u8; Counters::SIZE] {
        let words = [
            self.chains,
            self.ops,
            self.bytes_in,
            self.bytes_out,
            self.atomics,
            self.not_ready,
            self.refused,
            self.retired,
        ];
        let mut bytes = [0; Counters::SIZE];
        for (word, place) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From the slot.
    pub fn from_bytes(bytes: &[u8; Counters::SIZE]) -> Counters {
        let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes"));
        Counters {
            chains: word(0),
            ops: word(1),
            bytes_in: word(2),
            bytes_out: word(3),
            atomics: word(4),
            not_ready: word(5),
            refused: word(6),
            retired: word(7),
        }
    }

    /// Adds those of another session. Peers write them, so a sum may wrap.
    pub fn add(&mut self, other: &Counters) {
        self.chains = self.chains.wrapping_add(other.chains);
        self.ops = self.ops.wrapping_add(other.ops);
        self.bytes_in = self.bytes_in.wrapping_add(other.bytes_in);
        self.bytes_out = self.bytes_out.wrapping_add(other.bytes_out);
        self.atomics = self.atomics.wrapping_add(other.atomics);
        self.not_ready = self.not_ready.wrapping_add(other.not_ready);
        self.refused = self.refused.wrapping_add(other.refused);
        self.retired = self.retired.wrapping_add(other.retired);
    }
}

/// Where a session's turn is stored. Written by the session alone; a store before its first chain, with a full
/// fence after it, and a store after its last.
pub const fn turn_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + TURN_OFFSET
}

/// Where a session's counters are stored.
pub const fn counters_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + COUNTERS_OFFSET
}

const LINK_BITS: u32 = 48;

/// The head of a list of retired buffers.
#[derive(Clone, Copy)]
struct Retired {
    first: u64,
    count: u64,
}

impl Retired {
    fn unpack(word: u128) -> Retired {
        Retired { first: word as u64 & ((1 << LINK_BITS) - 1), count: (word >> 64) as u64 }
    }

    fn pack(self) -> u128 {
        u128::from(self.first) | u128::from(self.count) << 64
    }

    fn with_first(self, first: u64) -> Retired {
        Retired { first, count: self.count.wrapping_add(1) }
    }
}

impl<M: Memory> Arena<'_, M> {
    /// Clears a slot for a new session and writes who it is. The node's step.
    pub fn open_session(&self, session: SessionId, pid: u32, start_time: u64) -> Result<(), M::Wait> {
        let mut slot = [0; SLOT_SIZE as usize];
        slot[0..4].copy_from_slice(&session.number.to_le_bytes());
        slot[8..12].copy_from_slice(&pid.to_le_bytes());
        slot[16..24].copy_from_slice(&start_time.to_le_bytes());
        self.memory.write(Geometry::session_at(session.slot), &slot)
    }

    /// Marks a slot as nobody's. The node's step; a client's own is [`Arena::leave_session`].
    pub fn close_session(&self, slot: u32) -> Result<(), M::Wait> {
        self.memory.write(Geometry::session_at(slot), &[0; 32])
    }

    /// Marks a session's slot as nobody's: the last access of whoever ran its chains, so that a node which takes over
    /// the memory of one that died does not wait for a process that goes on living. A slot that is another's by now is
    /// left alone.
    pub fn leave_session(&self, session: SessionId) -> Result<(), M::Wait> {
        let at = Geometry::session_at(session.slot);
        let word = self.memory.load(at, Width::W16)?;
        if word as u32 == session.number {
            // Whoever has changed it meanwhile is the node, and it is nobody's or another's.
            let _left = self.memory.exchange(at, Width::W16, word, 0)?;
        }
        Ok(())
    }

    /// The session that a slot was last opened for, with its pid and start time; nothing if it is nobody's.
    pub fn session(&self, slot: u32) -> Result<Option<(SessionId, u32, u64)>, M::Wait> {
        let mut bytes = [0; 32];
        self.memory.read(Geometry::session_at(slot), &mut bytes)?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let start_time = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
        let number = u32_at(0);
        Ok((number != 0).then(|| (SessionId { slot, number }, u32_at(8), start_time)))
    }

    /// A session's turn: odd while it may be running chains.
    pub fn turn(&self, slot: u32) -> Result<u64, M::Wait> {
        Ok(self.memory.load(turn_at(slot), Width::W8)? as u64)
    }

    /// What a session has counted.
    pub fn counters(&self, slot: u32) -> Result<Counters, M::Wait> {
        let mut bytes = [0; Counters::SIZE];
        self.memory.read(counters_at(slot), &mut bytes)?;
        Ok(Counters::from_bytes(&bytes))
    }

    /// Moves a live buffer of `region`, which the caller has made unreachable or has never shown, to the session's
    /// retired list. False, and nothing changes, if it is no buffer of that region, or not live: a mistaken or doubled
    /// retirement does no harm.
    pub fn retire(&self, session: SessionId, region: u32, at: u64) -> Result<bool, M::Wait> {
        self.retire_where(session, region, at, |_| true)
    }

    /// As [`Arena::retire`], outside any chain, of a buffer that the session numbered `owner` has taken and not given
    /// away since: no other than that is retired. Nor is one of a region that has no key any more: its segments are
    /// being taken from it, and a list may not lead through them. To be called within a turn, which the end of a region
    /// waits for.
    pub fn retire_own(&self, session: SessionId, owner: u32, region: u32, at: u64) -> Result<bool, M::Wait> {
        let has_key = (1..REGIONS_MAX).contains(&region)
            && self.memory.load(Geometry::region_at(region) + SECRET_OFFSET, Width::W8)? != 0;
        if !has_key && !mutants::RETIRED_WHILE_DROPPED.is_on() {
            return Ok(false);
        }
        self.retire_where(session, region, at, |live| live.owner == owner)
    }

    fn retire_where(
        &self,
        session: SessionId,
        region: u32,
        at: u64,
        is_allowed: impl Fn(State) -> bool,
    ) -> Result<bool, M::Wait> {
        let buffer = self.buffer_at(at)?.filter(|(of, _)| *of == region && region != 0);
        let Some((_, buffer)) = buffer else { return Ok(false) };
        let head_at = Geometry::session_at(session.slot) + RETIRED_OFFSET;
        let mut word = self.memory.load(buffer.state_at, Width::W16)?;
        let mut head = self.memory.load(head_at, Width::W16)?;
        let mut state = loop {
            let live = State::unpack(word);
            if live.stage != Stage::Live && !mutants::RETIRE_WHAT_IS_NOT_LIVE.is_on() || !is_allowed(live) {
                return Ok(false);
            }
            let next = Retired::unpack(head).first;
            let retired =
                State { next, stage: Stage::Retired, owner: session.number, suspect: false, ..live };
            match self.memory.exchange(buffer.state_at, Width::W16, word, retired.pack())? {
                Ok(()) => break retired,
                Err(now) => word = now, // Its owner may be changing, or a scan may be marking it.
            }
        };
        // Only this session adds to its list; the node may take the whole of it at any moment.
        loop {
            let list = Retired::unpack(head);
            let linked = State { next: list.first, ..state };
            if linked != state {
                let swapped = self.exchange_state(&buffer, state, linked)?;
                if !swapped {
                    return Ok(true); // Nobody may touch it now: a peer has damaged it. It is left to a scan.
                }
                state = linked;
            }
            match self.memory.exchange(head_at, Width::W16, head, list.with_first(at).pack())? {
                Ok(()) => return Ok(true),
                Err(now) => head = now,
            }
        }
    }

    /// Takes the whole list of buffers that a session retired; answers its first, 0 if there is none. The node's
    /// step.
    pub fn take_retired(&self, slot: u32) -> Result<u64, M::Wait> {
        let head_at = Geometry::session_at(slot) + RETIRED_OFFSET;
        let mut word = self.memory.load(head_at, Width::W16)?;
        loop {
            let head = Retired::unpack(word);
            if head.first == 0 {
                return Ok(0);
            }
            match self.memory.exchange(head_at, Width::W16, word, head.with_first(0).pack())? {
                Ok(()) => return Ok(head.first),
                Err(now) => word = now,
            }
        }
    }
}
