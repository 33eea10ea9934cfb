//! What `local` and `shm` share: the caller's own CPU runs the chain on the node's memory.
//!
//! A session says in its slot when it may hold pointers: its *turn* is odd from the first chain of a turn until
//! every task has gone on to its next await. That covers the retirements that follow a chain, since whoever made
//! a buffer unreachable retires it before it awaits anything else. Invariant: the turn is odd, and that is visible
//! to everyone, before a chain's first access.

use crate::ahead::Ahead;
use crate::executor::{self, Turns};
use crate::memory::Mapping;
use crate::timer;
use farside_remote::arena::Arena;
use farside_remote::arena::session::{Counters, SessionId, counters_at, turn_at};
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, ServiceId};
use farside_remote::{Addr, Chain, ChainView, Fabric, FabricError, Key, Memory, NodeId, Reply, Status};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

/// The two-sided way to the node, and what is known of its life. One per session.
pub trait Control {
    /// Asks a service; the answer replaces what `answer` held.
    fn call<'a>(
        &'a self,
        service: ServiceId,
        request: &'a [u8],
        answer: &'a mut Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), FabricError>> + 'a>>;

    /// Wakes the node if it sleeps: memory is wanted, or much of it was given back.
    fn ring(&self);
}

/// How many chains a turn may run before it says that it has moved on: a task that never awaits anything has a
/// turn without end.
const CHAINS_PER_TURN: u32 = 64;
/// After so many retired buffers the node is rung, in case it sleeps.
const RETIRED_PER_RING: u64 = 256;

/// Memory on which an endpoint runs chains: a node's mapping, or something that looks on as it is used.
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

/// An endpoint whose own CPU runs the chains. Belongs to one thread.
pub struct Direct<M: Runs = Arc<Mapping>> {
    memory: M,
    control: Box<dyn Control>,
    /// Set by whoever watches the node's process.
    died: Arc<AtomicBool>,
    node: NodeId,
    session: SessionId,
    turn: Cell<u64>,
    chains_in_turn: Cell<u32>,
    ahead: Ahead,
    counters: RefCell<Counters>,
    driver: RefCell<Option<Waker>>,
    patience: Cell<Duration>,
}

impl<M: Runs> Direct<M> {
    /// The endpoint of a session that the node has opened on `memory`.
    pub fn new(
        memory: M,
        control: Box<dyn Control>,
        died: Arc<AtomicBool>,
        node: NodeId,
        session: SessionId,
    ) -> Direct<M> {
        Direct {
            memory,
            control,
            died,
            node,
            session,
            turn: Cell::new(0),
            chains_in_turn: Cell::new(0),
            ahead: Ahead::new(),
            counters: RefCell::default(),
            driver: RefCell::new(None),
            patience: Cell::new(DEADLINE),
        }
    }

    /// The node's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Which session this is.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Sets how long the answer to a call may take, in place of [`DEADLINE`].
    pub fn set_patience(&self, patience: Duration) {
        self.patience.set(patience);
    }

    /// What this session has counted.
    pub fn counters(&self) -> Counters {
        *self.counters.borrow()
    }

    /// Keeps the session's turns under an executor that is not ours: spawn it on the same thread, and let it run
    /// for as long as the endpoint is used. Without it the session looks busy after its last chain, and buffers
    /// that others retire wait for it. Never completes.
    pub async fn drive(&self) {
        std::future::poll_fn(|cx| {
            self.end_turn();
            *self.driver.borrow_mut() = Some(cx.waker().clone());
            std::task::Poll::Pending
        })
        .await
    }

    #[inline]
    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node != self.node {
            return Err(FabricError::NoSuchNode(node));
        }
        if self.died.load(Ordering::Relaxed) {
            return Err(FabricError::NodeDied(node));
        }
        Ok(())
    }

    /// Says that pointers may be held from now on.
    #[inline]
    fn enter(&self) {
        let turn = self.turn.get();
        let open = turn % 2 == 1;
        let chains = self.chains_in_turn.get() + 1;
        if open && chains < CHAINS_PER_TURN {
            self.chains_in_turn.set(chains);
            return;
        }
        // Every chain before this one has been followed up to its task's next await, so this is a new turn.
        let next = if open { turn + 2 } else { turn + 1 };
        self.turn.set(next);
        self.chains_in_turn.set(0);
        self.memory.mapping().publish_and_fence(turn_at(self.session.slot), next);
        let driver = self.driver.borrow().clone(); // An executor may poll it at once, and then it is borrowed again.
        if let Some(driver) = driver {
            driver.wake();
        }
    }

    #[inline]
    fn count(&self, chain: &ChainView<'_>, reply: &Reply) {
        let mut counters = self.counters.borrow_mut();
        counters.chains += 1;
        counters.ops += chain.len() as u64;
        counters.bytes_in += chain.wire_len() as u64;
        counters.bytes_out += reply.as_bytes().len() as u64;
        counters.atomics += chain.atomics() as u64;
        match reply.last_status() {
            Status::Access | Status::Invalid | Status::Aborted => counters.refused += 1,
            Status::NotReady => {
                counters.not_ready += 1;
                self.control.ring();
            }
            _ => {}
        }
    }
}

impl<M: Runs> Turns for Direct<M> {
    #[inline]
    fn end_turn(&self) {
        self.ahead.end_turn(self.memory.mapping());
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

impl<M: Runs> Fabric for Direct<M> {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        if executor::in_company() {
            let hints = self.ahead.post(self.memory.mapping(), chain.view());
            executor::yield_now().await;
            self.ahead.proceed(self.memory.mapping(), hints);
        }
        self.check(node)?;
        self.enter();
        let view = chain.view(); // Anew, so that it does not lie in the future while that waits.
        let Ok(()) = farside_remote::run(&self.memory, self.session.number, view, reply);
        self.count(&view, reply);
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.check(node)?;
        let called = timer::within(self.patience.get(), self.control.call(service, request, answer)).await;
        called.unwrap_or(Err(FabricError::Deadline { node, waited: self.patience.get() }))
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_err() {
            return; // The memory is gone, or not ours to touch.
        }
        // Or else the store could be dropped, and its segments be another's, between the question and the step.
        self.enter();
        let Ok(retired) = Arena::of(&self.memory).retire(self.session, key, buffer.raw());
        let mut counters = self.counters.borrow_mut();
        counters.retired += u64::from(retired);
        if counters.retired.is_multiple_of(RETIRED_PER_RING) {
            self.control.ring();
        }
    }
}

impl<M: Runs> Clock for Direct<M> {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}

impl<M: Runs> Drop for Direct<M> {
    fn drop(&mut self) {
        self.end_turn();
    }
}
