//! The client's own CPU runs its chains on the node's memory, one access after the other: `local` and `shm`.
//!
//! A process may be stopped or die between any two accesses of a chain. Invariant: the session's turn is odd before a
//! chain's first access, and until all that its chains made unreachable is on the session's list.

use crate::clock::ProcessClock;
use crate::memory::{Pace, Replay};
use crate::node::{Letter, Node, Serving, Waiting};
use crate::world::{Bell, MICROS, ProcessId, Turnstile, World, nanos, within};
use farside_remote::arena::Arena;
use farside_remote::arena::session::{SessionId, turn_at};
use farside_remote::fabric::{DEADLINE, ServiceId};
use farside_remote::{Addr, By, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply, Status};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// How long it usually takes until somebody hears that a process has ended.
const HEARD_AFTER: u64 = 100 * MICROS;
/// How long a question to the node's process usually takes on its way, and the answer on its own.
const LETTER: u64 = 5 * MICROS;

/// An endpoint whose own CPU runs the chains.
pub struct Direct {
    world: World,
    node: NodeId,
    serving: Rc<Serving>,
    session: SessionId,
    memory: Replay,
    clock: ProcessClock,
    /// A process has one CPU, which runs one chain at a time.
    cpu: Turnstile,
    turn: Cell<u64>,
    retired: RefCell<VecDeque<(u32, Addr)>>,
    /// Rung when a turn has something to end.
    ends: Bell,
    /// Set by whoever watches the node's process.
    has_died: Rc<Cell<bool>>,
    is_closed: Cell<bool>,
}

impl Direct {
    /// Opens a session for `process`, which is at the node's host.
    ///
    /// # Errors
    /// No process serves the node, or it does not answer within a second.
    pub async fn open(
        node: &Node,
        process: ProcessId,
        clock: &ProcessClock,
        pace: Pace,
    ) -> Result<Rc<Direct>, FabricError> {
        let world = node.world().clone();
        let Some(serving) = node.serving() else { return Err(FabricError::NodeDied(node.id())) };
        let waiting = Rc::new(Waiting::default());
        world.sleep(world.random().heavy(LETTER)).await;
        serving.post(Letter::Open(process, Rc::clone(&waiting)));
        let opened = within(&world, nanos(DEADLINE), waiting.taken()).await;
        let session = opened.flatten().ok_or_else(|| {
            FabricError::Refused("the node is stopped, or has as many sessions as it can".to_owned())
        })?;
        // Whoever has a connection is told when the other end dies, a little later.
        let (theirs, told) = (Rc::clone(&serving), world.clone());
        world.on_death(process, move || {
            let after = told.now() + told.random().heavy(HEARD_AFTER);
            told.at(after, move || theirs.post(Letter::Close(session, false)));
        });
        let has_died = Rc::new(Cell::new(false));
        let (dies, told) = (Rc::clone(&has_died), world.clone());
        world.on_death(serving.process, move || {
            let after = told.now() + told.random().heavy(HEARD_AFTER);
            told.at(after, move || dies.set(true));
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
        });
        let keeper = Rc::clone(&direct);
        world.spawn(process, async move { keeper.keep_turns().await });
        Ok(direct)
    }

    /// Its process's clock.
    pub fn clock(&self) -> &ProcessClock {
        &self.clock
    }

    /// Says that it runs no more chains, when all that it retired is on its list.
    pub async fn close(&self) {
        while self.turn.get() % 2 == 1 && !self.has_died.get() {
            self.world.sleep(LETTER).await;
        }
        self.is_closed.set(true);
        self.serving.post(Letter::Close(self.session, true));
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node != self.node {
            return Err(FabricError::NoSuchNode(node));
        }
        if self.has_died.get() {
            return Err(FabricError::NodeDied(node));
        }
        assert!(!self.is_closed.get(), "a session that was closed asks nothing");
        Ok(())
    }

    /// Says that pointers may be held from now on.
    fn enter(&self) {
        if self.turn.get().is_multiple_of(2) {
            self.publish();
        }
        self.ends.ring();
    }

    fn publish(&self) {
        self.turn.set(self.turn.get() + 1);
        self.serving.bytes().poke(turn_at(self.session.slot), &self.turn.get().to_le_bytes());
    }

    /// Ends turns, when whoever ran a chain has gone on to its next await.
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

    /// Tells the node's process, and waits for its answer.
    async fn answered<T>(
        &self,
        letter: Letter,
        waiting: &Waiting<T>,
        patience: Duration,
    ) -> Result<T, FabricError> {
        self.world.sleep(self.world.random().heavy(LETTER)).await;
        self.serving.post(letter);
        let answered = within(&self.world, nanos(patience), waiting.taken()).await;
        self.check(self.node).map_err(|_| FabricError::Broken {
            node: self.node,
            reason: "the node's process has ended".to_owned(),
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
        self.enter();
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
            let waiting = Rc::new(Waiting::default());
            let letter = Letter::Called(service, request.to_vec(), Rc::clone(&waiting));
            let answered = self.answered(letter, &waiting, DEADLINE).await?;
            *answer = answered.map_err(FabricError::Refused)?;
            return Ok(());
        }
        let ask = crate::node::parse(request).map_err(FabricError::Refused)?;
        let (patience, waiting) = (ask.patience(), Rc::new(Waiting::default()));
        let letter = Letter::AskedDirectly(ask, Rc::clone(&waiting));
        let answered = self.answered(letter, &waiting, patience).await?.map_err(FabricError::Refused)?;
        answer.clear();
        answer.extend_from_slice(&serde_json::to_vec(&answered).expect("plain data"));
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_ok() {
            self.retired.borrow_mut().push_back((key.region(), buffer));
            self.enter();
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }
}
