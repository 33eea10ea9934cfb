//! The sessions of one client with all nodes, for families whose stores lie on several nodes.
//!
//! As in pools outside the simulator, a task of the client's process opens the session after a lost one, while requests
//! to that node fail at once.
//!
//! Invariant: a request is sent over one session only, except a binding.
//! Invariant: a session carries no request before the bindings of the sessions before it are repeated.
//! Invariant: each session with a node has another number than the session before it.

use crate::flight::IDLE;
use crate::{AGAIN, Carrier, PACE, Scene, Site, mishaps};
use farside_remote::clock::Clock;
use farside_remote::control::Ask;
use farside_remote::fabric::{FENCED, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::AnyFabric;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fabric::verbs::Verbs;
use farside_sim::world::{MICROS, MILLIS, Nanos, ProcessId, within};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Timeout, in nanoseconds, after which a session between a node and a silent client ends. It is shorter than in
/// production, to keep trials short.
pub(crate) const SILENCE: Nanos = 60 * MILLIS;

/// Timeout for opening a session, in nanoseconds. A node that is down is noticed soon.
const OPENING_MAX: Nanos = 20 * MILLIS;

/// The nodes that a client reaches.
#[derive(Clone)]
pub(crate) enum Reach {
    /// One node, over one session.
    Node(AnyFabric),
    /// All nodes.
    Pool(Rc<Pool>),
}

impl Reach {
    /// Site to which a request to `node` goes; `None` if the fabric has only one node.
    pub(crate) fn site(&self, node: NodeId) -> Option<usize> {
        match self {
            Reach::Node(_) => None,
            Reach::Pool(_) => Some(node.0 as usize),
        }
    }

    /// Waits for all outstanding responses, then closes the sessions.
    pub(crate) async fn close(&self) {
        match self {
            Reach::Node(fabric) => fabric.close().await,
            Reach::Pool(pool) => pool.close().await,
        }
    }
}

/// Longest pause, in nanoseconds, between two attempts to open a session.
const AGAIN_MAX: Nanos = 100 * MILLIS;
/// Longest time, in nanoseconds, for which a client that starts waits for its sessions.
pub(crate) const STARTS_WITHIN: Nanos = 5 * MILLIS;

/// One client's sessions with all nodes.
pub(crate) struct Pool {
    scene: Rc<Scene>,
    client: u32,
    process: ProcessId,
    clock: ProcessClock,
    identity: u128,
    links: Vec<Link>,
    is_closed: Cell<bool>,
    /// Whether the session after a lost one is opened.
    reopens: Cell<bool>,
}

/// A client's session with one node.
#[derive(Default)]
struct Link {
    session: RefCell<Option<AnyFabric>>,
    /// Number of sessions that were opened with the node, and number of attempts.
    number: Cell<u64>,
    attempts: Cell<u64>,
    /// The request that has bound the session to the client's nonce, if any: clients of a pool use one store.
    binding: RefCell<Option<Vec<u8>>>,
    /// Whether the node has refused the binding, since the client is fenced.
    is_fenced: Cell<bool>,
}

impl Pool {
    /// Creates the pool of a client's process, and begins to open a session with each node.
    pub(crate) fn open(scene: &Rc<Scene>, client: u32, process: ProcessId, clock: &ProcessClock) -> Rc<Pool> {
        let pool = Rc::new(Pool {
            scene: Rc::clone(scene),
            client,
            process,
            clock: clock.clone(),
            identity: scene.world.random().bits().into(),
            links: scene.sites.iter().map(|_| Link::default()).collect(),
            is_closed: Cell::new(false),
            reopens: Cell::new(true),
        });
        (0..pool.links.len()).for_each(|site| pool.reopen(site));
        pool
    }

    /// Opens no session after a lost one, for clients that do not outlive a session.
    pub(crate) fn reopen_none(&self) {
        self.reopens.set(false);
    }

    /// Waits until a session with each node was open, or at most for this time.
    pub(crate) async fn all_opened(&self, at_most: Nanos) {
        let world = &self.scene.world;
        let until = world.now().saturating_add(at_most);
        while world.now() < until && self.links.iter().any(|link| link.number.get() == 0) {
            world.sleep(10 * MICROS).await;
        }
    }

    async fn close(&self) {
        self.is_closed.set(true);
        for link in &self.links {
            let session = link.session.take();
            if let Some(session) = session.filter(|session| !session.is_over()) {
                session.close().await;
            }
        }
    }

    /// Opens the next session with a node in the background.
    fn reopen(self: &Rc<Self>, site: usize) {
        let own = Rc::clone(self);
        self.scene.world.spawn(self.process, async move {
            let Pool { scene, links, client, process, .. } = &*own;
            let (link, at) = (&links[site], &scene.sites[site]);
            while !own.is_closed.get() {
                scene.count(|counts| counts.sessions += 1);
                mishaps::on_request(scene, at, *client, IDLE);
                link.attempts.set(link.attempts.get() + 1);
                let identity =
                    Identity { identity: own.identity, incarnation: link.attempts.get(), silence: SILENCE };
                let mut opening = Box::pin(Rc::clone(&own).bound(site, identity));
                match within(&scene.world, OPENING_MAX, opening.as_mut()).await {
                    Some(Ok(session)) if own.is_closed.get() => return session.close().await,
                    Some(Err(error)) if error.is_fenced() => return link.is_fenced.set(true),
                    Some(Ok(session)) => {
                        link.number.set(link.number.get() + 1);
                        *link.session.borrow_mut() = Some(session);
                        return;
                    }
                    Some(Err(_)) => {}
                    None => scene.world.spawn(*process, async move {
                        // Nobody else knows of it, and its driver would never end.
                        if let Ok(late) = opening.await {
                            late.close().await;
                        }
                    }),
                }
                scene.world.sleep(scene.world.random().heavy(AGAIN).min(AGAIN_MAX)).await;
            }
        });
    }

    /// Opens a session with a node, which is bound as the one before was.
    async fn bound(self: Rc<Self>, site: usize, identity: Identity) -> Result<AnyFabric, FabricError> {
        let Pool { scene, links, client, process, clock, .. } = &*self;
        let at = &scene.sites[site];
        let engine = client % at.node.options().engines.max(1);
        let session = open_session(scene, at, *client, engine, *process, clock, identity).await?;
        let binding = links[site].binding.borrow().clone();
        if let Some(binding) = &binding {
            let bound = session.call(at.node.id(), ServiceId::NODE, binding, &mut Vec::new()).await;
            if let Err(error) = bound {
                session.close().await;
                return Err(error);
            }
        }
        Ok(session)
    }

    /// Returns the session with a node. If it is over, begins to open the next one.
    fn session(self: &Rc<Self>, node: NodeId) -> Result<AnyFabric, FabricError> {
        let link = self.links.get(node.0 as usize).ok_or(FabricError::NoSuchNode(node))?;
        let session = link.session.borrow().clone();
        if let Some(session) = &session {
            self.forget_if_over(node, session);
        }
        if link.is_fenced.get() {
            return Err(FabricError::Lost { node, ran: Ran::No, reason: FENCED.to_owned() });
        }
        if !self.reopens.get() && session.is_none() && link.number.get() > 0 {
            let reason = "the client's only session is over".to_owned();
            return Err(FabricError::Lost { node, ran: Ran::No, reason });
        }
        let reason = "the next session is being opened";
        let unreachable = || FabricError::Unreachable { node, reason: reason.to_owned() };
        session.filter(|session| !session.is_over()).ok_or_else(unreachable)
    }

    /// Notes a request that has bound `session`, so that the next ones are bound, too.
    ///
    /// # Errors
    /// The session has ended meanwhile, so that the next one is not bound.
    fn note_binding(
        &self,
        node: NodeId,
        session: &AnyFabric,
        service: ServiceId,
        request: &[u8],
    ) -> Result<(), FabricError> {
        let is_bind =
            service == ServiceId::NODE && matches!(serde_json::from_slice(request), Ok(Ask::Bind { .. }));
        if !is_bind {
            return Ok(());
        }
        let link = &self.links[node.0 as usize];
        if !link.session.borrow().as_ref().is_some_and(|current| current.is_same(session)) {
            let reason = "it ended while it was bound".to_owned();
            return Err(FabricError::Lost { node, ran: Ran::Yes, reason });
        }
        link.binding.replace(Some(request.to_vec()));
        Ok(())
    }

    /// Begins to open the next session if this one, which was the current one, is over.
    fn forget_if_over(self: &Rc<Self>, node: NodeId, session: &AnyFabric) {
        let site = node.0 as usize;
        let is_current =
            self.links[site].session.borrow().as_ref().is_some_and(|current| current.is_same(session));
        if is_current && session.is_over() {
            *self.links[site].session.borrow_mut() = None;
            if self.reopens.get() {
                self.reopen(site);
            }
        }
    }
}

/// Opens a session of a client with one of the engines of a site's node, over the trial's carrier.
pub(crate) async fn open_session(
    scene: &Scene,
    site: &Site,
    client: u32,
    engine: u32,
    process: ProcessId,
    clock: &ProcessClock,
    identity: Identity,
) -> Result<AnyFabric, FabricError> {
    let (node, host) = (&site.node, scene.host_of(client));
    Ok(match scene.drawn.carrier {
        Carrier::Direct => AnyFabric::Direct(Direct::open(node, process, clock, PACE).await?),
        Carrier::Verbs => {
            let sender = &scene.senders[client as usize];
            AnyFabric::Verbs(Verbs::open(node, engine, process, host, clock, identity, sender).await?)
        }
        Carrier::Datagrams | Carrier::Connections => {
            AnyFabric::Session(Endpoint::open(node, engine, process, host, clock, identity).await?)
        }
    })
}

impl Fabric for Reach {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        match self {
            Reach::Node(fabric) => fabric.run(node, chain, reply).await,
            Reach::Pool(pool) => {
                let session = pool.session(node)?;
                let ran = session.run(node, chain, reply).await;
                pool.forget_if_over(node, &session);
                ran
            }
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        match self {
            Reach::Node(fabric) => fabric.call(node, service, request, answer).await,
            Reach::Pool(pool) => {
                let session = pool.session(node)?;
                let called = session.call(node, service, request, answer).await;
                pool.forget_if_over(node, &session);
                called?;
                pool.note_binding(node, &session, service, request)
            }
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        match self {
            Reach::Node(fabric) => fabric.retire(node, key, buffer),
            Reach::Pool(pool) => {
                if let Ok(session) = pool.session(node) {
                    session.retire(node, key, buffer);
                }
            }
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        match self {
            Reach::Node(fabric) => fabric.capabilities(node),
            Reach::Pool(pool) => pool.scene.drawn.carrier.capabilities(),
        }
    }

    fn session_number(&self, node: NodeId) -> u64 {
        match self {
            Reach::Node(fabric) => fabric.session_number(node),
            Reach::Pool(pool) => pool.links.get(node.0 as usize).map_or(0, |link| link.number.get()),
        }
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        match self {
            Reach::Node(fabric) => fabric.may_run_abandoned(node),
            Reach::Pool(_) => true,
        }
    }
}

impl Reach {
    fn clock(&self) -> &ProcessClock {
        match self {
            Reach::Node(fabric) => fabric.clock(),
            Reach::Pool(pool) => &pool.clock,
        }
    }
}

impl Clock for Reach {
    fn now(&self) -> Duration {
        self.clock().now()
    }

    fn wall(&self) -> Duration {
        self.clock().wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock().sleep(duration)
    }
}
