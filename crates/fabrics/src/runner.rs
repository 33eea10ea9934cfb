//! Runs chains on a node's memory for one session, and keeps the session's turn, prefetch hints and counters.
//!
//! The session's slot in the node's memory says whether the session may hold pointers into that memory: its *turn*
//! number is odd from the first chain of a turn until the turn ends.
//!
//! Invariant: the turn number is odd before a chain's first access, and all processes can see that.

use crate::ahead::Ahead;
use crate::memory::Mapping;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::session::{Counters, SessionId, counters_at, epoch_at, turn_at};
use farside_remote::arena::{Arena, header};
use farside_remote::{Addr, By, ChainView, Memory, Reply, Status, Width};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::sync::Arc;

/// Number of chains after which a new turn begins even if the old one was not ended. A task that never yields would
/// otherwise have a turn without end.
const CHAINS_PER_TURN: u32 = 64;

/// Number of buffers retired for the node after which it is woken if it sleeps.
const RETIRED_PER_RING: u64 = 256;

/// Memory on which chains run: a node's mapping, or a wrapper that observes its use.
pub trait Runs: Memory<Wait = Infallible> {
    /// Returns the underlying mapping.
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
    /// Number of buffers that were retired for the node since it was last woken because of them.
    retired_for_node: Cell<u64>,
}

impl<M: Runs> Runner<M> {
    /// Creates the runner of a session that the node has opened on `memory`.
    pub fn new(memory: M, session: SessionId) -> Runner<M> {
        Runner {
            memory,
            session,
            turn: Cell::new(0),
            chains_in_turn: Cell::new(0),
            ahead: Ahead::new(session),
            counters: RefCell::default(),
            retired_for_node: Cell::new(0),
        }
    }

    /// Returns the node's memory.
    #[inline]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the session on whose behalf this runner runs chains.
    #[inline]
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Returns the counters of this session.
    pub fn counters(&self) -> Counters {
        *self.counters.borrow()
    }

    /// Queues hints of the memory that the chain will touch, for [`Runner::fetch_ahead`]. Returns the number of hints,
    /// which the caller passes to [`Runner::proceed`] before the chain runs.
    #[inline(always)]
    pub fn expect(&self, chain: ChainView<'_>) -> usize {
        self.ahead.post(self.memory.mapping(), chain)
    }

    /// Prefetches the memory of all chains passed to [`Runner::expect`]. Called after the last such call, before the
    /// chains run.
    #[inline]
    pub fn fetch_ahead(&self) {
        self.ahead.end_turn(self.memory.mapping());
    }

    /// Prefetches memory for later chains. Called when a chain that posted `hints` hints starts to run.
    #[inline(always)]
    pub fn proceed(&self, hints: usize) {
        self.ahead.proceed(self.memory.mapping(), hints);
    }

    /// Announces that this session may hold pointers from now on. Returns true if a new turn began.
    #[inline]
    pub fn enter(&self) -> bool {
        let turn = self.turn.get();
        let open = turn % 2 == 1;
        let chains = self.chains_in_turn.get() + 1;
        if open && chains < CHAINS_PER_TURN {
            self.chains_in_turn.set(chains);
            return false;
        }
        // A new turn may begin here: each earlier chain's task has used the chain's result before its next await.
        let next = if open { turn + 2 } else { turn + 1 };
        self.turn.set(next);
        self.chains_in_turn.set(0);
        let mapping = self.memory.mapping();
        let Ok(epoch) = mapping.load(header::EPOCH_AT, Width::W8);
        mapping.publish(epoch_at(self.session.slot), epoch as u64);
        mapping.publish_and_fence(turn_at(self.session.slot), next);
        true
    }

    /// Whether the node has fenced this session. Only after [`Runner::enter`] has begun a turn, the answer holds until
    /// the turn ends.
    #[inline]
    pub fn is_fenced(&self) -> bool {
        let Ok(is_fenced) = Arena::of(&self.memory).is_fenced(self.session.slot);
        is_fenced
    }

    /// Runs a chain within an entered turn. The buffers that the chain allocates belong to session number `owner`.
    #[inline(always)]
    pub fn run(&self, owner: u32, chain: ChainView<'_>, reply: &mut Reply) {
        self.run_on(&self.memory, owner, chain, reply);
    }

    /// Runs a chain like [`Runner::run`], but accesses the same memory through the view `seen`.
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

    #[inline(always)]
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

    /// Retires a buffer of session number `owner`, within an entered turn.
    pub fn retire(&self, owner: u32, region: u32, buffer: Addr) {
        let Ok(joined) = Arena::of(&self.memory).retire_own(self.session, owner, region, buffer.raw());
        self.counters.borrow_mut().retired += u64::from(joined.is_some());
        self.note_for_node(u64::from(joined == Some(Retirees::Node)));
    }

    fn note_for_node(&self, retired: u64) {
        self.retired_for_node.set(self.retired_for_node.get() + retired);
    }

    /// Whether the caller must wake the node if it sleeps. True if the chain with this `reply` needs memory, or if
    /// enough buffers were retired for the node since this function last returned true.
    #[inline]
    pub fn should_ring(&self, reply: &Reply) -> bool {
        let for_node = u64::from(reply.retired_for_node());
        self.note_for_node(for_node);
        reply.last_status() == Status::NotReady || (for_node > 0 && self.is_much_retired())
    }

    /// Whether enough buffers were retired for the node to wake it since this function or [`Runner::should_ring`] last
    /// returned true.
    pub fn is_much_retired(&self) -> bool {
        let is_much = self.retired_for_node.get() >= RETIRED_PER_RING;
        if is_much {
            self.retired_for_node.set(0);
        }
        is_much
    }

    /// Announces that this session no longer holds pointers into the memory.
    #[inline]
    pub fn end_turn(&self) {
        let turn = self.turn.get();
        if turn.is_multiple_of(2) {
            return;
        }
        let Ok(()) = self.memory.write(counters_at(self.session.slot), &self.counters.borrow().to_bytes());
        self.turn.set(turn + 1);
        self.chains_in_turn.set(0);
        // Release: all reads and retires of this turn happen before its end becomes visible to the node.
        self.memory.mapping().publish(turn_at(self.session.slot), turn + 1);
    }
}
