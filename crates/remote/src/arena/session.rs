//! Session slots. A process that runs chains publishes in its slot its turn, the buffers that it retired, and its
//! counters.
//!
//! ```text
//! 0    number u32, 0 u32 | pid u64 | start time u64 | 0 u64
//! 64   turn u64          odd while chains may be running, even otherwise
//! 72   fenced u64        not 0 once the node has fenced the session; on the cache line of the turn
//! 80   epoch u64         the epoch before the turn began
//! 128  retired           4 x | first 48 bits, mark u16 | count u64 |   lists through the buffers' states (reuse)
//! 192  counters          8 x u64, written by the session alone, summed by the node
//! ```
//!
//! A node that takes over a dead node's memory waits for the processes of all slots that have a number.
//!
//! Invariant: numbers are never reused, so a dead session's buffers cannot be mistaken for another session's.
//! Invariant: the process that runs a session's chains sets the slot's number to 0 after its last access to the memory,
//! and before it notifies the node.
//! Invariant: a chain retires the buffers that it makes unreachable before the end of its turn is published.
//! Invariant: a process loads the memory's epoch and publishes it before it publishes a new turn.
//! Invariant: a process publishes a new turn, then a full fence, then it reads whether the session is fenced. If it is
//! not, the turn's chains run. So if the node has set the word and then reads an even turn, no further chain runs.

use super::lists::SECRET_OFFSET;
use super::reuse::{List, Retirees};
use super::state::{Stage, State};
use super::{Arena, Geometry, REGIONS_MAX, header};
use crate::memory::{Memory, Width};
use crate::mutants;

pub(crate) const SLOT_SIZE: u64 = 256;
const TURN_OFFSET: u64 = 64;
const FENCED_OFFSET: u64 = 72;
const EPOCH_OFFSET: u64 = 80;
pub(super) const RETIRED_OFFSET: u64 = 128;
const COUNTERS_OFFSET: u64 = 192;

/// Identity of a session, for the code that runs its chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// Slot number.
    pub slot: u32,
    /// Session number, unique for the lifetime of this memory. Not 0.
    pub number: u32,
}

/// A session's counters, which the node's metrics sum. The fields are in the order of their storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of chains run.
    pub chains: u64,
    /// Number of ops in those chains.
    pub ops: u64,
    /// Bytes of the chains in wire form.
    pub bytes_in: u64,
    /// Bytes of the replies in wire form.
    pub bytes_out: u64,
    /// Number of CAS and FETCH-ADD ops in those chains, whether they ran or not.
    pub atomics: u64,
    /// Number of chains that failed with NOT READY.
    pub not_ready: u64,
    /// Number of ops that were refused with ACCESS or INVALID.
    pub refused: u64,
    /// Number of buffers retired.
    pub retired: u64,
}

impl Counters {
    /// Size of all counters, in bytes.
    pub const SIZE: usize = 64;

    /// Encodes the counters as they are stored in the slot.
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

    /// Decodes the counters from the slot's bytes.
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

    /// Adds another session's counters. The sums wrap, since a peer may set a counter to any value.
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

/// Address of a session's turn. Only the session writes it: before the first chain of a turn, followed by a full fence,
/// and after the last chain of the turn.
pub const fn turn_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + TURN_OFFSET
}

/// Address of the word that fences a session. Only the node writes it. The session reads it when it has published a new
/// turn, before the turn's first chain.
pub const fn fenced_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + FENCED_OFFSET
}

/// Address of the epoch that a session has published for its turn. Only the session writes it.
pub const fn epoch_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + EPOCH_OFFSET
}

/// Address of a session's counters.
pub const fn counters_at(slot: u32) -> u64 {
    Geometry::session_at(slot) + COUNTERS_OFFSET
}

impl<M: Memory> Arena<'_, M> {
    /// Clears a slot for a new session and writes its number, pid and start time. Only the node calls this.
    pub fn open_session(&self, session: SessionId, pid: u32, start_time: u64) -> Result<(), M::Wait> {
        let mut slot = [0; SLOT_SIZE as usize];
        slot[0..4].copy_from_slice(&session.number.to_le_bytes());
        slot[8..12].copy_from_slice(&pid.to_le_bytes());
        slot[16..24].copy_from_slice(&start_time.to_le_bytes());
        self.memory.write(Geometry::session_at(session.slot), &slot)
    }

    /// Makes sessions watch this slot's turn before they advance the epoch. The slot was opened before. Only the node
    /// calls this.
    pub fn count_slot(&self, slot: u32) -> Result<(), M::Wait> {
        let mut slots = self.memory.load(header::SLOTS_AT, Width::W8)? as u64;
        while slots <= u64::from(slot)
            && let Err(now) =
                self.memory.exchange(header::SLOTS_AT, Width::W8, slots.into(), u128::from(slot + 1))?
        {
            slots = now as u64;
        }
        Ok(())
    }

    /// Marks a slot as unused, and ends its turn, in which the session's process may have died. Only the node calls
    /// this; a client calls [`Arena::leave_session`].
    pub fn close_session(&self, slot: u32) -> Result<(), M::Wait> {
        self.memory.write(Geometry::session_at(slot), &[0; 32])?;
        self.memory.write(turn_at(slot), &[0; 8])
    }

    /// Marks a session's slot as unused. This is the last access of the process that ran the session's chains, so that
    /// a node that takes over a dead node's memory does not wait for a process that lives on. Does nothing if the slot
    /// already belongs to another session.
    pub fn leave_session(&self, session: SessionId) -> Result<(), M::Wait> {
        let at = Geometry::session_at(session.slot);
        let word = self.memory.load(at, Width::W16)?;
        if word as u32 == session.number {
            // If this fails, the node has changed the slot: it is unused or another session's.
            let _left = self.memory.exchange(at, Width::W16, word, 0)?;
        }
        Ok(())
    }

    /// The session for which the slot was last opened, with its pid and start time; `None` if the slot is unused.
    pub fn session(&self, slot: u32) -> Result<Option<(SessionId, u32, u64)>, M::Wait> {
        let mut bytes = [0; 32];
        self.memory.read(Geometry::session_at(slot), &mut bytes)?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let start_time = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
        let number = u32_at(0);
        Ok((number != 0).then(|| (SessionId { slot, number }, u32_at(8), start_time)))
    }

    /// A session's turn: odd while the session may be running chains.
    pub fn turn(&self, slot: u32) -> Result<u64, M::Wait> {
        Ok(self.memory.load(turn_at(slot), Width::W8)? as u64)
    }

    /// Fences the session in this slot, and returns its turn as of afterwards: if it is even, the session runs no
    /// further chain. Only the node calls this.
    pub fn fence_session(&self, slot: u32) -> Result<u64, M::Wait> {
        // An exchange is a full fence between this word and the load of the turn. It fails if the word is set already.
        let _set_already = self.memory.exchange(fenced_at(slot), Width::W8, 0, 1)?;
        self.turn(slot)
    }

    /// Whether the session in this slot is fenced.
    #[inline]
    pub fn is_fenced(&self, slot: u32) -> Result<bool, M::Wait> {
        Ok(self.memory.load(fenced_at(slot), Width::W8)? != 0)
    }

    /// Returns the counters of the session in this slot.
    pub fn counters(&self, slot: u32) -> Result<Counters, M::Wait> {
        let mut bytes = [0; Counters::SIZE];
        self.memory.read(counters_at(slot), &mut bytes)?;
        Ok(Counters::from_bytes(&bytes))
    }

    /// Moves a live buffer of `region` to one of the session's lists of retired buffers, and returns which. The caller
    /// has made the buffer unreachable or has never published it. Returns `None`, and changes nothing, if `at` is not a
    /// buffer of that region or the buffer is not live, so a mistaken or repeated call is harmless.
    pub fn retire(&self, session: SessionId, region: u32, at: u64) -> Result<Option<Retirees>, M::Wait> {
        self.retire_where(session, region, at, |_| true)
    }

    /// Like [`Arena::retire`], but outside any chain, and only for a buffer that the session numbered `owner` has
    /// allocated and still owns. Also does nothing if the region has no key any more: the node is then freeing the
    /// region's segments, and no list may link through their buffers. Must be called within a turn, since the node
    /// waits for all turns before it frees them.
    pub fn retire_own(
        &self,
        session: SessionId,
        owner: u32,
        region: u32,
        at: u64,
    ) -> Result<Option<Retirees>, M::Wait> {
        let has_key = (1..REGIONS_MAX).contains(&region)
            && self.memory.load(Geometry::region_at(region) + SECRET_OFFSET, Width::W8)? != 0;
        if !has_key && !mutants::RETIRED_WHILE_DROPPED.is_on() {
            return Ok(None);
        }
        self.retire_where(session, region, at, |live| live.owner == owner)
    }

    fn retire_where(
        &self,
        session: SessionId,
        region: u32,
        at: u64,
        is_allowed: impl Fn(State) -> bool,
    ) -> Result<Option<Retirees>, M::Wait> {
        let buffer = self.buffer_at(at)?.filter(|(of, _)| *of == region && region != 0);
        let Some((_, buffer)) = buffer else { return Ok(None) };
        let mut word = self.memory.load(buffer.state_at, Width::W16)?;
        let list = self.joined(session, region, buffer.class)?;
        let head_at = list.head_at(session.slot);
        let mut head = self.memory.load(head_at, Width::W16)?;
        let mut state = loop {
            let live = State::unpack(word);
            if live.stage != Stage::Live && !mutants::RETIRE_WHAT_IS_NOT_LIVE.is_on() || !is_allowed(live) {
                return Ok(None);
            }
            let next = List::unpack(head).first;
            let retired =
                State { next, stage: Stage::Retired, owner: session.number, suspect: false, ..live };
            match self.memory.exchange(buffer.state_at, Width::W16, word, retired.pack())? {
                Ok(()) => break retired,
                Err(now) => word = now, // A scan may have changed the owner or the SUSPECT mark: retry.
            }
        };
        // Only this session adds to its list. The node may take the whole list at any moment.
        loop {
            let old = List::unpack(head);
            let linked = State { next: old.first, ..state };
            if linked != state {
                let swapped = self.exchange_state(&buffer, state, linked)?;
                if !swapped {
                    // No process but this one changes this state, so a peer has damaged it: leave the buffer to a scan.
                    return Ok(Some(list));
                }
                state = linked;
            }
            // The number wraps, since a peer may set it to any value.
            let mark = if list == Retirees::Gathering { old.mark.wrapping_add(1) } else { 0 };
            match self.memory.exchange(head_at, Width::W16, head, old.becoming(at, mark).pack())? {
                Ok(()) => return Ok(Some(list)),
                Err(now) => head = now,
            }
        }
    }

    /// Takes the whole of one of a session's lists of retired buffers. Returns its first buffer, or 0 if the list is
    /// empty. Only the node calls this.
    pub fn take_retired(&self, slot: u32, list: Retirees) -> Result<u64, M::Wait> {
        let head_at = list.head_at(slot);
        let mut word = self.memory.load(head_at, Width::W16)?;
        loop {
            let head = List::unpack(word);
            if head.first == 0 {
                return Ok(0);
            }
            match self.memory.exchange(head_at, Width::W16, word, head.becoming(0, 0).pack())? {
                Ok(()) => return Ok(head.first),
                Err(now) => word = now,
            }
        }
    }
}
