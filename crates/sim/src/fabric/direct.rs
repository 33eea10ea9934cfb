//! The client's own CPU runs its chains on the node's memory, one access after the other, as over `local` and `shm`.
//!
//! A process may be stopped or die between any two accesses of a chain.
//!
//! Invariant: the session's turn counter is odd (a turn is in progress) from before a chain's first access until all
//! buffers that the chain made unreachable are on the session's list.

use crate::clock::ProcessClock;
use crate::memory::{Pace, Replay};
use crate::node::{Letter, Node, OneShot, Serving};
use crate::world::{Bell, MICROS, ProcessId, Turnstile, World, nanos, within};
use farside_fabrics::mutants;
use farside_node::identity::Sender;
use farside_remote::arena::session::{SessionId, epoch_at, fenced_at, turn_at};
use farside_remote::arena::{Arena, header};
use farside_remote::control::Ask;
use farside_remote::fabric::{DEADLINE, FENCED, Ran, ServiceId};
use farside_remote::{Addr, By, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply, Status, Width};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// Usual delay, in nanoseconds, until a client or the node notices that the process of the other has died.
const HEARD_AFTER: u64 = 100 * MICROS;
/// Usual one-way latency, in nanoseconds, of a letter: a message between a client and the node's process.
const LETTER: u64 = 5 * MICROS;
/// Usual delay, in nanoseconds, between the two accesses with which a bound session begins a turn.
const BETWEEN: u64 = 20;

/// A client's endpoint of a fabric over which the client's own CPU runs the chains.
pub struct Direct {
    world: World,
    node: NodeId,
    serving: Rc<Serving>,
    session: SessionId,
    memory: Replay,
    clock: ProcessClock,
    /// Lock for the CPU of the process, which runs one chain at a time.
    cpu: Turnstile,
    turn: Cell<u64>,
    retired: RefCell<VecDeque<(u32, Addr)>>,
    /// Bell that rings when the session's turn is to end.
    ends: Bell,
    /// Set after the node's process has died.
    has_died: Rc<Cell<bool>>,
    is_closed: Cell<bool>,
    /// Whether the node has bound the session to a client, so that the session may be fenced.
    is_bound: Cell<bool>,
}

impl Direct {
    /// Opens a session for `process`, which runs at the node's host.
    ///
    /// # Errors
    /// No process serves the node, or the node does not respond within a second.
    pub async fn open(
        node: &Node,
        process: ProcessId,
        clock: &ProcessClock,
        pace: Pace,
    ) -> Result<Rc<Direct>, FabricError> {
        let world = node.world().clone();
        let Some(serving) = node.serving() else { return Err(FabricError::NodeDied(node.id())) };
        let waiting = Rc::new(OneShot::default());
        world.sleep(world.random().heavy(LETTER)).await;
        serving.post(Letter::Open(process, Rc::clone(&waiting)));
        let opened = within(&world, nanos(DEADLINE), waiting.received()).await;
        let session = opened.flatten().ok_or_else(|| {
            let reason = "cannot open a session: the node is stopped, or has no free session; retry";
            FabricError::Refused(reason.to_owned())
        })?;
        // Each side notices the death of the other with a delay, as a connection would report it.
        let (theirs, reported) = (Rc::clone(&serving), world.clone());
        world.on_death(process, move || {
            let after = reported.now() + reported.random().heavy(HEARD_AFTER);
            reported.at(after, move || theirs.post(Letter::Close(session, false)));
        });
        let has_died = Rc::new(Cell::new(false));
        let (dies, reported) = (Rc::clone(&has_died), world.clone());
        world.on_death(serving.process, move || {
            let after = reported.now() + reported.random().heavy(HEARD_AFTER);
            reported.at(after, move || dies.set(true));
        });
        let direct = Rc::new(Direct {
            node: node.id(),
            memory: Replay::new(&world, serving.bytes(), pace).seen_by(serving.seen()),
            world: world.clone(),
            serving,
            session,
            clock: clock.clone(),
            cpu: Turnstile::default(),
            turn: Cell::new(0),
            retired: RefCell::default(),
            ends: Bell::default(),
            has_died,
            is_closed: Cell::new(false),
            is_bound: Cell::new(false),
        });
        let keeper = Rc::clone(&direct);
        world.spawn(process, async move { keeper.keep_turns().await });
        Ok(direct)
    }

    /// Clock of the client's process.
    pub fn clock(&self) -> &ProcessClock {
        &self.clock
    }

    /// Closes the session after all retired buffers are on the session's list.
    pub async fn close(&self) {
        while self.turn.get() % 2 == 1 && !self.has_died.get() {
            self.world.sleep(LETTER).await;
        }
        self.is_closed.set(true);
        self.serving.post(Letter::Close(self.session, true));
    }

    /// Whether the node's process has died, so that all further requests fail.
    pub fn is_over(&self) -> bool {
        self.has_died.get()
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node != self.node {
            return Err(FabricError::NoSuchNode(node));
        }
        if self.has_died.get() {
            return Err(FabricError::NodeDied(node));
        }
        assert!(!self.is_closed.get(), "a closed session sends no requests");
        Ok(())
    }

    /// Starts a turn, unless a turn is in progress. The client may hold pointers into the node's memory until the turn
    /// ends. The process may be stopped between the two accesses of a bound session.
    ///
    /// # Errors
    /// The session is fenced, so no chain may run.
    async fn enter(&self) -> Result<(), FabricError> {
        let is_new = self.turn.get().is_multiple_of(2);
        if is_new && self.is_bound.get() {
            let is_early = mutants::FENCED_READ_TOO_EARLY.is_on();
            let was_fenced = is_early && self.is_fenced();
            if is_early {
                self.pause().await;
            }
            self.publish();
            self.ends.ring(); // The chain may be dropped before it begins.
            if !is_early {
                self.pause().await;
            }
            if was_fenced || !is_early && self.is_fenced() {
                self.retired.borrow_mut().clear(); // A scan finds these buffers.
                self.publish();
                return Err(self.fenced());
            }
        } else if is_new {
            self.publish();
        }
        self.ends.ring();
        Ok(())
    }

    async fn pause(&self) {
        self.world.sleep(self.world.random().heavy(BETWEEN)).await;
    }

    fn is_fenced(&self) -> bool {
        self.serving.bytes().load(fenced_at(self.session.slot), Width::W8) != 0
    }

    fn fenced(&self) -> FabricError {
        FabricError::Lost { node: self.node, ran: Ran::No, reason: FENCED.to_owned() }
    }

    fn publish(&self) {
        self.turn.set(self.turn.get() + 1);
        let bytes = self.serving.bytes();
        let epoch = bytes.load(header::EPOCH_AT, Width::W8) as u64;
        bytes.poke(epoch_at(self.session.slot), &epoch.to_le_bytes());
        bytes.poke(turn_at(self.session.slot), &self.turn.get().to_le_bytes());
    }

    /// Ends each turn of the session once the task that ran a chain has reached its next await.
    async fn keep_turns(&self) {
        loop {
            let rung = self.ends.rung();
            if self.turn.get().is_multiple_of(2) {
                rung.await;
            }
            let _cpu = self.cpu.enter().await;
            while let Some((region, buffer)) = self.next_retired() {
                let session = self.session;
                let retire = |memory: &Replay| {
                    Arena::of(memory).retire_own(session, session.number, region, buffer.raw())
                };
                self.memory.run(retire).await;
            }
            if self.turn.get() % 2 == 1 {
                self.publish();
            }
        }
    }

    /// Sends a letter (a message other than a chain) to the node's process and waits for the response.
    async fn answered<T>(
        &self,
        letter: Letter,
        waiting: &OneShot<T>,
        patience: Duration,
    ) -> Result<T, FabricError> {
        self.world.sleep(self.world.random().heavy(LETTER)).await;
        self.serving.post(letter);
        let answered = within(&self.world, nanos(patience), waiting.received()).await;
        self.check(self.node).map_err(|_| FabricError::Broken {
            node: self.node,
            reason: "the node's process has exited".to_owned(),
        })?;
        answered.ok_or(FabricError::Deadline { node: self.node, waited: patience })
    }

    fn next_retired(&self) -> Option<(u32, Addr)> {
        self.retired.borrow_mut().pop_front()
    }
}

impl Fabric for Direct {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let _cpu = self.cpu.enter().await;
        self.check(node)?;
        self.enter().await?;
        chain.note_posted();
        let view = chain.view();
        self.memory.run(|memory| farside_remote::run(memory, By::itself(self.session), view, reply)).await;
        if reply.last_status() == Status::NotReady {
            self.serving.ring();
        }
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
        if service != ServiceId::NODE {
            let waiting = Rc::new(OneShot::default());
            let letter = Letter::Call(self.session, service, request.to_vec(), Rc::clone(&waiting));
            let answered = self.answered(letter, &waiting, DEADLINE).await?;
            *answer = answered.map_err(FabricError::Refused)?;
            return Ok(());
        }
        let ask = farside_node::turn::parse(request).map_err(FabricError::Refused)?;
        let (patience, waiting) = (ask.patience(), Rc::new(OneShot::default()));
        let is_bind = matches!(ask, Ask::Bind { .. });
        let letter = Letter::LocalRequest(Sender::Slot(self.session), ask, Rc::clone(&waiting));
        // Set first: the node may bind the session although its response is lost.
        self.is_bound.set(self.is_bound.get() || is_bind);
        let answered = self.answered(letter, &waiting, patience).await?.map_err(FabricError::Refused)?;
        answer.clear();
        answer.extend_from_slice(&serde_json::to_vec(&answered).expect("plain data"));
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_ok() {
            if self.turn.get().is_multiple_of(2) {
                self.publish();
            }
            if self.is_fenced() {
                self.ends.ring(); // A scan finds the buffer.
                return;
            }
            self.retired.borrow_mut().push_back((key.region(), buffer));
            self.ends.ring();
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        false // Trials drop no chain of a client's own CPU, and the node reads a client's calls in their order.
    }
}
