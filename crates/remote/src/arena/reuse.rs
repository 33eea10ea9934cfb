//! Buffers that a session retires and takes again itself, without the node.
//!
//! A session has three lists of such buffers, linked through the buffers' states. A retired buffer joins the list
//! *gathering*. If the list *waiting* is empty, the gathered buffers move there, and the list is marked with the
//! current epoch. When the grace of that epoch is over, they move to the list *ready*, from which the session's chains
//! take buffers:
//!
//! ```text
//! retire -> gathering -> waiting (since epoch E) -> ready -> take
//!                                      in epoch E + 2
//! ```
//!
//! The *epoch* is one number for the whole memory. A session publishes the current epoch before each of its turns. Any
//! session may advance the epoch, if each session in a turn has published the current one. Let a chain have begun
//! before a buffer was put to waiting in epoch E. Its session has published E or an earlier epoch. So the epoch does
//! not change from E + 1 to E + 2 before the chain's turn has ended.
//!
//! The node takes whole lists, as it takes the list of retired buffers that is for the node: when the session ends or
//! is idle, when a store is dropped, and when a chain has found no free buffer. Where the node itself follows pointers
//! outside of turns, it first ends reuse in the region ([`Arena::set_reuse`]).
//!
//! Invariant: a buffer on a session's list is RETIRED and owned by the session.
//! Invariant: only the session adds buffers to its lists, and only the node removes others than the first.
//! Invariant: buffers move from list to list in the order of [`Retirees::ALL`]. They are on the next list before they
//! leave the former one. So a node that takes the lists in this order finds each buffer. What a session has just copied
//! from a list that the node took, it removes in the same turn.

use super::class::Class;
use super::session::{SessionId, epoch_at};
use super::state::{Stage, State};
use super::{Arena, Buffer, Geometry, header};
use crate::memory::{Memory, Width};
use crate::mutants;
use crate::run::By;

/// One of a session's lists of retired buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retirees {
    /// The buffers retired since others were put to waiting.
    Gathering,
    /// The buffers that wait for the end of their grace.
    Waiting,
    /// The buffers past their grace, which the session takes.
    Ready,
    /// The buffers for the node, which waits for a grace period of its own.
    Node,
}

impl Retirees {
    /// All lists of a session, in the order in which buffers move from one to another.
    pub const ALL: [Retirees; 4] = [Retirees::Gathering, Retirees::Waiting, Retirees::Ready, Retirees::Node];

    /// Address of the list's head.
    pub(crate) const fn head_at(self, slot: u32) -> u64 {
        Geometry::session_at(slot) + super::session::RETIRED_OFFSET + 16 * self as u64
    }
}

/// The decoded head of a session's list of retired buffers: `| first 48 bits, mark u16 | count u64 |`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List {
    /// Address of the first buffer; 0 if the list is empty.
    pub(crate) first: u64,
    /// Gathering: the number of buffers. Waiting: the low bits of the epoch in which the buffers were put there.
    pub(crate) mark: u16,
    /// Number of changes of the head.
    count: u64,
}

const LINK_BITS: u32 = 48;

impl List {
    pub(crate) fn unpack(word: u128) -> List {
        let first = word as u64 & ((1 << LINK_BITS) - 1);
        List { first, mark: (word >> LINK_BITS) as u16, count: (word >> 64) as u64 }
    }

    pub(crate) fn pack(self) -> u128 {
        u128::from(self.first) | u128::from(self.mark) << LINK_BITS | u128::from(self.count) << 64
    }

    pub(crate) fn becoming(self, first: u64, mark: u16) -> List {
        List { first, mark, count: self.count.wrapping_add(1) }
    }
}

/// Maximum number of bytes on a list that gathers, and bounds for the number of its buffers.
const GATHERED_BYTES: u64 = 128 << 10;
const GATHERED_BUFFERS: (u64, u64) = (4, 256);
/// Number of gathered buffers from which on a session gives those up that are ready and that it does not take.
const PASSED_OVER: u64 = 32;
/// Number of epochs after which a buffer is reused.
const GRACE: u16 = 2;

impl<M: Memory> Arena<'_, M> {
    /// Sets whether sessions reuse the buffers that they retire in a region. A session that has begun its turn before
    /// may act on the former setting until the turn ends. Only the node calls this.
    pub fn set_reuse(&self, region: u32, is_on: bool) -> Result<(), M::Wait> {
        let at = Geometry::region_at(region) + super::lists::REUSE_OFFSET;
        let mut old = self.memory.load(at, Width::W8)?;
        // An exchange, so that the setting is visible before the node reads any session's turn.
        while let Err(now) = self.memory.exchange(at, Width::W8, old, u128::from(is_on))? {
            old = now;
        }
        Ok(())
    }

    #[inline]
    fn is_reused(&self, region: u32) -> Result<bool, M::Wait> {
        let at = Geometry::region_at(region) + super::lists::REUSE_OFFSET;
        Ok(self.memory.load(at, Width::W8)? != 0)
    }

    /// The list that a buffer joins when the session retires it.
    #[inline]
    pub(crate) fn joined(&self, session: SessionId, region: u32, class: &Class) -> Result<Retirees, M::Wait> {
        let is_kept = self.is_reused(region)? && self.has_room(session, class)?;
        Ok(if is_kept { Retirees::Gathering } else { Retirees::Node })
    }

    /// Whether the session may gather one more buffer of `class`.
    #[inline]
    fn has_room(&self, session: SessionId, class: &Class) -> Result<bool, M::Wait> {
        let (least, most) = GATHERED_BUFFERS;
        Ok(self.gathered(session)? < (GATHERED_BYTES / u64::from(class.size)).clamp(least, most))
    }

    /// Number of buffers that the session has gathered.
    #[inline]
    fn gathered(&self, session: SessionId) -> Result<u64, M::Wait> {
        let head = self.memory.load(Retirees::Gathering.head_at(session.slot), Width::W16)?;
        Ok(u64::from(List::unpack(head).mark))
    }

    /// Takes a buffer of `class` that the session retired earlier, if one is past its grace. Must be called within a
    /// turn of the session.
    pub fn reuse(&self, by: By, region: u32, class: &'static Class) -> Result<Option<u64>, M::Wait> {
        if !self.is_reused(region)? {
            return Ok(None);
        }
        let (session, head_at) = (by.retires, Retirees::Ready.head_at(by.retires.slot));
        loop {
            let word = self.memory.load(head_at, Width::W16)?;
            let list = List::unpack(word);
            if list.first == 0 {
                match self.rotate(session)? {
                    true => continue,
                    false => return Ok(None),
                }
            }
            let Some((of, buffer, retired)) = self.retired_by(session, list.first)? else {
                // The node has just taken the list. Or a peer has damaged it: then its buffers are left to a scan.
                let _taken = self.memory.exchange(head_at, Width::W16, word, list.becoming(0, 0).pack())?;
                return Ok(None);
            };
            if of != region || buffer.class.index != class.index {
                // Those behind it may be of this class. If many others wait by now, the session takes few of its class.
                if self.gathered(session)? >= PASSED_OVER {
                    self.move_all(session, Retirees::Ready, Retirees::Node, 0)?;
                }
                return Ok(None);
            }
            if self
                .memory
                .exchange(head_at, Width::W16, word, list.becoming(retired.next, 0).pack())?
                .is_err()
            {
                continue; // The node has taken the list.
            }
            if self.exchange_state(&buffer, retired, retired.taken(Stage::Live, by.owner))? {
                return Ok(Some(buffer.at));
            }
            // No other process changes this state, so a peer has damaged it: leave the buffer to a scan.
        }
    }

    /// The buffer at `at` with its region and its state, if the session has retired it.
    #[inline]
    fn retired_by(&self, session: SessionId, at: u64) -> Result<Option<(u32, Buffer, State)>, M::Wait> {
        let Some((region, buffer)) = self.buffer_at(at)? else { return Ok(None) };
        let state = self.state(&buffer)?;
        let is_retired = state.stage == Stage::Retired && state.owner == session.number;
        Ok(is_retired.then_some((region, buffer, state)))
    }

    /// Makes the buffers ready whose grace is over, and puts those gathered to waiting. Returns whether buffers may
    /// have become ready.
    fn rotate(&self, session: SessionId) -> Result<bool, M::Wait> {
        let waiting = List::unpack(self.memory.load(Retirees::Waiting.head_at(session.slot), Width::W16)?);
        if waiting.first != 0 && !self.is_past(waiting.mark)? {
            return Ok(false);
        }
        let is_ready = waiting.first != 0 && self.move_all(session, Retirees::Waiting, Retirees::Ready, 0)?;
        let epoch = self.memory.load(header::EPOCH_AT, Width::W8)? as u16;
        self.move_all(session, Retirees::Gathering, Retirees::Waiting, epoch)?;
        Ok(is_ready)
    }

    /// Whether the grace of what was put to waiting in this epoch is over. Tries to advance the epoch if it is not.
    fn is_past(&self, since: u16) -> Result<bool, M::Wait> {
        if mutants::REUSED_AT_ONCE.is_on() {
            return Ok(true);
        }
        let grace = if mutants::REUSED_AN_EPOCH_EARLY.is_on() { GRACE - 1 } else { GRACE };
        let mut epoch = self.memory.load(header::EPOCH_AT, Width::W8)? as u64;
        if (epoch as u16).wrapping_sub(since) < grace && self.advance(epoch)? {
            epoch = epoch.wrapping_add(1); // A peer may have set it to any value.
        }
        // The mark has only the epoch's low bits. If they lead to a wrong answer, then to false.
        Ok((epoch as u16).wrapping_sub(since) >= grace)
    }

    /// Advances the epoch from `epoch` to the next one, unless a session is in a turn for which it has published
    /// another epoch. Returns whether the epoch is later than `epoch` now.
    fn advance(&self, epoch: u64) -> Result<bool, M::Wait> {
        let slots = self.memory.load(header::SLOTS_AT, Width::W8)? as u64;
        for slot in 0..slots.min(u64::from(super::SESSIONS_MAX)) as u32 {
            let is_in_turn = self.turn(slot)? % 2 == 1 && !mutants::EPOCH_IGNORES_TURNS.is_on();
            if is_in_turn && self.memory.load(epoch_at(slot), Width::W8)? as u64 != epoch {
                return Ok(false);
            }
        }
        // If this fails, another session has advanced the epoch.
        let _advanced = self.memory.exchange(
            header::EPOCH_AT,
            Width::W8,
            u128::from(epoch),
            u128::from(epoch.wrapping_add(1)),
        )?;
        Ok(true)
    }

    /// Moves all buffers of one list to the next one, if that list is empty. Returns whether buffers were moved.
    fn move_all(&self, session: SessionId, from: Retirees, to: Retirees, mark: u16) -> Result<bool, M::Wait> {
        let (from_at, to_at) = (from.head_at(session.slot), to.head_at(session.slot));
        let (from_word, to_word) =
            (self.memory.load(from_at, Width::W16)?, self.memory.load(to_at, Width::W16)?);
        let (moved, empty) = (List::unpack(from_word), List::unpack(to_word));
        if moved.first == 0 || empty.first != 0 {
            return Ok(false);
        }
        let put = empty.becoming(moved.first, mark).pack();
        if self.memory.exchange(to_at, Width::W16, to_word, put)?.is_err() {
            return Ok(false); // No other process changes the head of an empty list: a peer has damaged it.
        }
        let cleared = moved.becoming(0, 0).pack();
        if self.memory.exchange(from_at, Width::W16, from_word, cleared)?.is_ok()
            || mutants::TAKEN_LIST_IS_KEPT.is_on()
        {
            return Ok(true);
        }
        // The node has taken the list in the meantime, and perhaps from its new place, too.
        let _taken_again = self.memory.exchange(to_at, Width::W16, put, empty.becoming(0, 0).pack())?;
        Ok(false)
    }

    /// The buffer that the session's next ALLOCATE in `region` will probably take, so that its memory can be
    /// prefetched: the first one, or the one after `before`. May be wrong.
    pub fn next_reused(
        &self,
        session: SessionId,
        region: u32,
        class: &'static Class,
        before: Option<Buffer>,
    ) -> Result<Option<Buffer>, M::Wait> {
        let at = match before {
            Some(before) => self.state(&before)?.next,
            None => List::unpack(self.memory.load(Retirees::Ready.head_at(session.slot), Width::W16)?).first,
        };
        self.listed_buffer(region, class, at)
    }
}
