//! Who runs chains on this memory: the sessions that are open, and how one waits until all have moved on.
//!
//! A session with a slot runs its chains itself, and says in the slot when it may hold pointers. A *remote* one has its
//! chains run by an engine, in a turn of the engine's slot. It has a number, to which its buffers belong, and no slot.
//! What a chain makes unreachable it retires in that same turn, so nobody waits for anything but turns.
//!
//! Invariant: numbers grow and are never reused, so "gone before" is a question about a number.
//! Invariant: a session counts as open until the buffers that it retired have been taken from its slot.

use farside_remote::Memory;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::owner;
use farside_remote::arena::{Arena, SESSIONS_MAX, header};
use std::collections::{BTreeMap, BTreeSet};

/// One session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its slot and number.
    pub id: SessionId,
    /// Its process.
    pub pid: u32,
    /// Its owner runs no more chains.
    pub ended: bool,
}

/// The open sessions, by slot.
#[derive(Debug)]
pub struct Sessions {
    open: BTreeMap<u32, Session>,
    /// The numbers of remote sessions.
    remote: BTreeSet<u32>,
    next_number: u32,
}

/// Sessions that may still follow pointers from before, each with its turn then.
#[derive(Debug)]
pub struct Grace {
    waiting: Vec<(SessionId, u64)>,
}

/// Who had ended by a certain moment.
#[derive(Clone, Debug)]
pub struct Gone {
    alive: Vec<u32>,
    next_number: u32,
}

impl Gone {
    /// Whether the buffers of this owner are nobody's by now.
    pub fn includes(&self, number: u32) -> bool {
        number == owner::NONE
            || (number < self.next_number
                && number != owner::NODE
                && self.alive.binary_search(&number).is_err())
    }
}

impl Sessions {
    /// None open. Numbers begin at `first_number`, above any that this memory has seen.
    pub fn new(first_number: u32) -> Sessions {
        let (open, remote) = (BTreeMap::new(), BTreeSet::new());
        Sessions { open, remote, next_number: first_number.max(1) }
    }

    /// The open sessions that have slots.
    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.open.values()
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open.len() + self.remote.len()
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Opens a session for a process; nothing if all slots are taken.
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
        self.pass_number();
        self.open.insert(slot, Session { id, pid, ended: false });
        Ok(Some(id))
    }

    /// Opens a remote session; answers its number.
    pub fn open_remote<M: Memory>(&mut self, memory: &M) -> Result<u32, M::Wait> {
        let number = self.next_number;
        self.note_next(memory)?;
        self.pass_number();
        self.remote.insert(number);
        Ok(number)
    }

    /// A remote session runs no more chains and retires nothing more.
    pub fn end_remote(&mut self, number: u32) {
        self.remote.remove(&number);
    }

    /// Before the number is used: a node that takes over must not give it to anyone else.
    fn note_next<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        memory.write(header::NEXT_SESSION_AT, &u64::from(self.next_number + 1).to_le_bytes())
    }

    fn pass_number(&mut self) {
        self.next_number = self
            .next_number
            .checked_add(1)
            .filter(|&n| n < owner::SERVICE)
            .expect("four thousand million sessions were opened on one memory; it must be served anew");
    }

    /// Whether this very session is open and may run chains.
    pub fn may_run(&self, id: SessionId) -> bool {
        self.open.get(&id.slot).is_some_and(|session| session.id == id && !session.ended)
    }

    /// Its owner runs no more chains, for it said so or is dead.
    pub fn end(&mut self, id: SessionId) {
        if let Some(session) = self.open.get_mut(&id.slot).filter(|session| session.id == id) {
            session.ended = true;
        }
    }

    /// Frees the slot of a session that ended and whose retired buffers were taken.
    pub fn close<M: Memory>(&mut self, memory: &M, slot: u32) -> Result<(), M::Wait> {
        Arena::of(memory).close_session(slot)?;
        self.open.remove(&slot);
        Ok(())
    }

    /// Who is gone now.
    pub fn gone(&self) -> Gone {
        let open = self.open.values().map(|session| session.id.number);
        let mut alive: Vec<u32> = open.chain(self.remote.iter().copied()).collect();
        alive.sort_unstable();
        Gone { alive, next_number: self.next_number }
    }

    /// Whoever may hold a pointer now. One load a session.
    pub fn begin_grace<M: Memory>(&self, memory: &M) -> Result<Grace, M::Wait> {
        let mut waiting = Vec::new();
        for session in self.open.values().filter(|session| !session.ended) {
            let turn = Arena::of(memory).turn(session.id.slot)?;
            if turn % 2 == 1 {
                waiting.push((session.id, turn));
            }
        }
        Ok(Grace { waiting })
    }

    /// Whether everyone who held a pointer when `grace` began has ended that turn, or has ended altogether. Looks at
    /// all of them, so that those who are still waited for are those who delay it.
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
    /// Whose turn it waits for.
    pub fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.waiting.iter().map(|&(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::{Mapping, Pages};

    #[test]
    fn numbers_are_shared_by_all_kinds_and_never_come_again() {
        let memory = Mapping::create(8 << 20, Pages::Small).expect("memory");
        let mut sessions = Sessions::new(5);
        let Ok(first) = sessions.open_remote(&memory);
        sessions.end_remote(first);
        let Ok(second) = sessions.open(&memory, 1, 1);
        let Ok(third) = sessions.open_remote(&memory);
        assert_eq!((first, second.expect("a slot").number, third, sessions.len()), (5, 6, 7, 2));
    }
}
