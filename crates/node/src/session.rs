//! Open sessions, which run chains on this memory, and grace periods, which wait for the turns of these sessions.
//!
//! A session with a slot runs its own chains. It publishes each turn in the slot, and may hold pointers only during a
//! turn. A *remote* session has a number, which its buffers record as their owner, but no slot: an engine runs its
//! chains in a turn of the engine's slot. A chain retires buffers that it makes unreachable within its own turn, so a
//! grace period need only wait for turns.
//!
//! Invariant: numbers grow and are never reused, so a number shows whether its session ended before a given moment.
//! Invariant: a session counts as open until the buffers that it retired have been taken from its slot.

use farside_remote::Memory;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::owner;
use farside_remote::arena::{Arena, SESSIONS_MAX, header};
use std::collections::{BTreeMap, BTreeSet};

/// An open session that has a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Slot and number of the session.
    pub id: SessionId,
    /// Id of the session's process.
    pub pid: u32,
    /// Whether the session's process has declared that it runs no more chains, or is dead.
    pub ended: bool,
}

/// The open sessions: those with slots, by slot, and the remote ones.
#[derive(Debug)]
pub struct Sessions {
    open: BTreeMap<u32, Session>,
    /// Numbers of the open remote sessions.
    remote: BTreeSet<u32>,
    next_number: u32,
}

/// A grace period: the sessions that may still follow old pointers, each with its turn when the period began.
#[derive(Debug, Default)]
pub struct Grace {
    waiting: Vec<(SessionId, u64)>,
}

/// The set of session numbers that had ended at a certain moment.
#[derive(Clone, Debug)]
pub struct Gone {
    alive: Vec<u32>,
    next_number: u32,
}

impl Gone {
    /// Whether the owner `number` no longer holds its buffers.
    pub fn includes(&self, number: u32) -> bool {
        number == owner::NONE
            || (number < self.next_number
                && number != owner::NODE
                && self.alive.binary_search(&number).is_err())
    }
}

impl Sessions {
    /// Creates an empty set of sessions. New sessions get numbers from `first_number` on, which must be higher than all
    /// earlier numbers in this memory.
    pub fn new(first_number: u32) -> Sessions {
        let (open, remote) = (BTreeMap::new(), BTreeSet::new());
        Sessions { open, remote, next_number: first_number.max(1) }
    }

    /// Iterates over the open sessions that have slots.
    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.open.values()
    }

    /// Number of open sessions, including remote ones.
    pub fn len(&self) -> usize {
        self.open.len() + self.remote.len()
    }

    /// Whether no session is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Opens a session for a process. Returns `None` if all slots are taken.
    pub fn open<M: Memory>(
        &mut self,
        memory: &M,
        pid: u32,
        start_time: u64,
    ) -> Result<Option<SessionId>, M::Wait> {
        let Some(slot) = (0..SESSIONS_MAX).find(|slot| !self.open.contains_key(slot)) else {
            return Ok(None);
        };
        let id = SessionId { slot, number: self.next_number };
        self.note_next(memory)?;
        Arena::of(memory).open_session(id, pid, start_time)?;
        Arena::of(memory).count_slot(slot)?;
        self.pass_number();
        self.open.insert(slot, Session { id, pid, ended: false });
        Ok(Some(id))
    }

    /// Opens a remote session, and returns its number.
    pub fn open_remote<M: Memory>(&mut self, memory: &M) -> Result<u32, M::Wait> {
        let number = self.next_number;
        self.note_next(memory)?;
        self.pass_number();
        self.remote.insert(number);
        Ok(number)
    }

    /// Whether a remote session with this number is open.
    pub(crate) fn is_remote(&self, number: u32) -> bool {
        self.remote.contains(&number)
    }

    /// Ends a remote session, which runs no more chains and retires no more buffers.
    pub fn end_remote(&mut self, number: u32) {
        self.remote.remove(&number);
    }

    /// Records the next number in the memory before that number is used, so that a node which takes over does not reuse
    /// it.
    fn note_next<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        memory.write(header::NEXT_SESSION_AT, &u64::from(self.next_number + 1).to_le_bytes())
    }

    fn pass_number(&mut self) {
        self.next_number = self
            .next_number
            .checked_add(1)
            .filter(|&n| n < owner::SERVICE)
            .expect("4 billion sessions were opened on one memory: serve a fresh memory");
    }

    /// Whether exactly this session is open and may run chains.
    pub fn may_run(&self, id: SessionId) -> bool {
        self.open.get(&id.slot).is_some_and(|session| session.id == id && !session.ended)
    }

    /// Ends a session whose owner has declared that it runs no more chains, or is dead.
    pub fn end(&mut self, id: SessionId) {
        if let Some(session) = self.open.get_mut(&id.slot).filter(|session| session.id == id) {
            session.ended = true;
        }
    }

    /// Frees the slot of an ended session whose retired buffers were taken.
    pub fn close<M: Memory>(&mut self, memory: &M, slot: u32) -> Result<(), M::Wait> {
        Arena::of(memory).close_session(slot)?;
        self.open.remove(&slot);
        Ok(())
    }

    /// Whether the session with this number has ended, and its retired buffers were taken.
    pub(crate) fn has_ended(&self, number: u32) -> bool {
        number < self.next_number
            && number != owner::NONE
            && !self.remote.contains(&number)
            && !self.open.values().any(|session| session.id.number == number)
    }

    /// The set of sessions that have ended so far.
    pub fn gone(&self) -> Gone {
        let open = self.open.values().map(|session| session.id.number);
        let mut alive: Vec<u32> = open.chain(self.remote.iter().copied()).collect();
        alive.sort_unstable();
        Gone { alive, next_number: self.next_number }
    }

    /// The slots of all open sessions, each with its session's turn. Loads one word per session.
    pub(crate) fn turns<M: Memory>(&self, memory: &M) -> Result<Vec<(u32, u64)>, M::Wait> {
        let slots = self.open.keys();
        slots.map(|&slot| Ok((slot, Arena::of(memory).turn(slot)?))).collect()
    }

    /// Starts a grace period for all sessions that may hold a pointer now. Loads one word per session.
    pub fn begin_grace<M: Memory>(&self, memory: &M) -> Result<Grace, M::Wait> {
        self.begin_grace_of(memory, |_| true)
    }

    /// Starts a grace period for those of the sessions in the slots that `includes` accepts.
    pub(crate) fn begin_grace_of<M: Memory>(
        &self,
        memory: &M,
        includes: impl Fn(u32) -> bool,
    ) -> Result<Grace, M::Wait> {
        let mut grace = Grace::default();
        for session in self.open.values().filter(|session| !session.ended && includes(session.id.slot)) {
            let turn = Arena::of(memory).turn(session.id.slot)?;
            grace.add(session.id, turn);
        }
        Ok(grace)
    }

    /// Whether every session that was in a turn when `grace` began has ended that turn or has itself ended. Checks all
    /// these sessions, so that afterwards `grace` lists only the sessions that delay it.
    pub fn is_over<M: Memory>(&self, memory: &M, grace: &mut Grace) -> Result<bool, M::Wait> {
        let mut waiting = Vec::new();
        for &(id, turn) in &grace.waiting {
            if self.may_run(id) && Arena::of(memory).turn(id.slot)? == turn {
                waiting.push((id, turn));
            }
        }
        grace.waiting = waiting;
        Ok(grace.waiting.is_empty())
    }
}

impl Grace {
    /// Also waits for the end of this turn of the session, unless `turn` is even.
    pub(crate) fn add(&mut self, id: SessionId, turn: u64) {
        if turn % 2 == 1 {
            self.waiting.push((id, turn));
        }
    }

    /// The sessions whose turns must end before this grace period is over.
    pub fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.waiting.iter().map(|&(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::{Mapping, Pages};

    #[test]
    fn numbers_are_unique_among_local_and_remote_sessions() {
        let memory = Mapping::create(8 << 20, Pages::Small).expect("memory");
        let mut sessions = Sessions::new(5);
        let Ok(first) = sessions.open_remote(&memory);
        sessions.end_remote(first);
        let Ok(second) = sessions.open(&memory, 1, 1);
        let Ok(third) = sessions.open_remote(&memory);
        assert_eq!((first, second.expect("a slot").number, third, sessions.len()), (5, 6, 7, 2));
    }
}
