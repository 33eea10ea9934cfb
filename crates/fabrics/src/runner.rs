//! Runs chains on a node's memory in the name of one session's slot: its turns, its hints, its counters.
//!
//! A slot says when pointers into the memory may be held in its name: its *turn* is odd from the first chain of a turn
//! until the turn is ended. Invariant: the turn is odd, and that is visible to everyone, before a chain's first access.

use crate::ahead::Ahead;
use crate::memory::Mapping;
use farside_remote::arena::Arena;
use farside_remote::arena::session::{Counters, SessionId, counters_at, turn_at};
use farside_remote::{Addr, By, ChainView, Memory, Reply, Status};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::sync::Arc;

/// How many chains a turn may run before it says that it has moved on: a task that never awaits anything has a
/// turn without end.
const CHAINS_PER_TURN: u32 = 64;

/// Retired buffers after which the node is woken, if it sleeps.
const RETIRED_PER_RING: u64 = 256;

/// Memory on which chains run: a node's mapping, or something that looks on as it is used.
pub trait Runs: Memory<Wait = Infallible> {
    /// The mapping underneath.
    fn mapping(&self) -> &Mapping;
}

impl Runs for Arc<Mapping> {
    #[inline]
    fn mapping(&self) -> &Mapping {
        self
    }
}

/// A runner of chains. Belongs to one thread.
pub struct Runner<M: Runs = Arc<Mapping>> {
    memory: M,
    session: SessionId,
    turn: Cell<u64>,
    chains_in_turn: Cell<u32>,
    ahead: Ahead,
    counters: RefCell<Counters>,
    /// How many buffers were retired when the node was last rung for them.
    retired_rung: Cell<u64>,
}

impl<M: Runs> Runner<M> {
    /// The runner of a session that the node has opened on `memory`.
    pub fn new(memory: M, session: SessionId) -> Runner<M> {
        Runner {
            memory,
            session,
            turn: Cell::new(0),
            chains_in_turn: Cell::new(0),
            ahead: Ahead::new(),
            counters: RefCell::default(),
            retired_rung: Cell::new(0),
        }
    }

    /// The node's memory.
    #[inline]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// In whose name it runs.
    #[inline]
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// What it has counted.
    pub fn counters(&self) -> Counters {
        *self.counters.borrow()
    }

    /// Has what the chain will touch fetched by [`Runner::fetch_ahead`]; answers how many hints there were, for
    /// [`Runner::proceed`] when the chain's time has come.
    #[inline(always)]
    pub fn expect(&self, chain: ChainView<'_>) -> usize {
        self.ahead.post(self.memory.mapping(), chain)
    }

    /// All chains that run next were told.
    #[inline]
    pub fn fetch_ahead(&self) {
        self.ahead.end_turn(self.memory.mapping());
    }

    /// A chain that had so many hints runs now.
    #[inline(always)]
    pub fn proceed(&self, hints: usize) {
        self.ahead.proceed(self.memory.mapping(), hints);
    }

    /// Says that pointers may be held from now on. True if a turn began.
    #[inline]
    pub fn enter(&self) -> bool {
        let turn = self.turn.get();
        let open = turn % 2 == 1;
        let chains = self.chains_in_turn.get() + 1;
        if open && chains < CHAINS_PER_TURN {
            self.chains_in_turn.set(chains);
            return false;
        }
        // Every chain before this one has been followed up to its task's next await, so this is a new turn.
        let next = if open { turn + 2 } else { turn + 1 };
        self.turn.set(next);
        self.chains_in_turn.set(0);
        self.memory.mapping().publish_and_fence(turn_at(self.session.slot), next);
        true
    }

    /// Runs a chain, in a turn that was entered, whose buffers are to belong to `owner`.
    #[inline(always)]
    pub fn run(&self, owner: u32, chain: ChainView<'_>, reply: &mut Reply) {
        self.run_on(&self.memory, owner, chain, reply);
    }

    /// As [`Runner::run`], on the same memory as `seen` lets the chain see it.
    #[inline(always)]
    pub fn run_on(
        &self,
        seen: &impl Memory<Wait = Infallible>,
        owner: u32,
        chain: ChainView<'_>,
        reply: &mut Reply,
    ) {
        let Ok(()) = farside_remote::run(seen, By { owner, retires: self.session }, chain, reply);
        self.count(&chain, reply);
    }

    #[inline]
    fn count(&self, chain: &ChainView<'_>, reply: &Reply) {
        let mut counters = self.counters.borrow_mut();
        counters.chains += 1;
        counters.ops += chain.len() as u64;
        counters.bytes_in += chain.wire_len() as u64;
        counters.bytes_out += reply.as_bytes().len() as u64;
        counters.atomics += chain.atomics() as u64;
        counters.retired += u64::from(reply.retired());
        match reply.last_status() {
            Status::Access | Status::Invalid | Status::Aborted => counters.refused += 1,
            Status::NotReady => counters.not_ready += 1,
            _ => {}
        }
    }

    /// Gives back a buffer of the session numbered `owner`, in a turn that was entered.
    pub fn retire(&self, owner: u32, region: u32, buffer: Addr) {
        let Ok(retired) = Arena::of(&self.memory).retire_own(self.session, owner, region, buffer.raw());
        self.counters.borrow_mut().retired += u64::from(retired);
    }

    /// Whether the node, if it sleeps, should be rung: memory is wanted, by the chain that `reply` answers, or enough
    /// was retired since this was last said.
    #[inline]
    pub fn should_ring(&self, reply: &Reply) -> bool {
        reply.last_status() == Status::NotReady || (reply.retired() > 0 && self.is_much_retired())
    }

    /// Whether enough was retired to ring the node, since this or [`Runner::should_ring`] last said so.
    pub fn is_much_retired(&self) -> bool {
        let retired = self.counters.borrow().retired;
        let is_much = retired - self.retired_rung.get() >= RETIRED_PER_RING;
        if is_much {
            self.retired_rung.set(retired);
        }
        is_much
    }

    /// No pointer is held any more.
    #[inline]
    pub fn end_turn(&self) {
        let turn = self.turn.get();
        if turn.is_multiple_of(2) {
            return;
        }
        let Ok(()) = self.memory.write(counters_at(self.session.slot), &self.counters.borrow().to_bytes());
        self.turn.set(turn + 1);
        self.chains_in_turn.set(0);
        // Release: whatever this turn read and retired is done before it is said to be over.
        self.memory.mapping().publish(turn_at(self.session.slot), turn + 1);
    }
}
