//! Client side of a datagram session in virtual time, as over `udp`, `tcp` and `ring`. The session uses either a
//! network that loses, duplicates, delays and reorders datagrams, or a connection that may break.
//!
//! The session itself is the one of the real fabrics ([`TaskSession`]), driven as under a foreign executor. This file
//! has what the simulator provides for it: a line over the simulated network, and the bell of its inbox.

use crate::clock::ProcessClock;
use crate::network::{Address, Arrival, HostId, Inbox, Network};
use crate::node::Node;
use crate::world::{Bell, MILLIS, Nanos, ProcessId, within};
use farside_fabrics::session::carrier::{Arrivals, Broken, Datagrams};
use farside_fabrics::session::client::{Client, Config};
use farside_fabrics::session::tasks::TaskSession;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Timeout for opening a session, in nanoseconds.
const GREETING_WAIT: Nanos = 90 * MILLIS;

/// Identity of a client that opens a session.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Identifier of the client, the same for all incarnations of the client.
    pub identity: u128,
    /// Number of this incarnation, higher than those of all earlier incarnations.
    pub incarnation: u64,
    /// Timeout, in nanoseconds, after which the client considers a silent node dead.
    pub silence: Nanos,
}

/// Client's endpoint of a session with one engine.
pub struct Endpoint {
    tasks: TaskSession<Line, ProcessClock>,
    /// Rung when the client stops without a BYE.
    stopped: Bell,
}

/// A client's end of the simulated network, to one engine.
struct Line {
    network: Network,
    inbox: Rc<Inbox>,
    engine: Address,
    is_reliable: bool,
}

impl Datagrams for Line {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        let (from, bytes) = (self.inbox.address(), datagram.to_vec());
        if !self.is_reliable {
            self.network.send(from, self.engine, bytes);
            return Ok(());
        }
        let is_sent = self.network.send_on(from, self.engine, bytes);
        is_sent.then_some(()).ok_or_else(broken)
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(())
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let mut has_received = false;
        while let Some(arrival) = self.inbox.take() {
            match arrival {
                Arrival::Message(_, bytes) => take(&bytes),
                Arrival::HungUp(_) => return Err(broken()),
            }
            has_received = true;
        }
        Ok(has_received)
    }
}

fn broken() -> Broken {
    Broken("the connection broke".to_owned())
}

impl Arrivals for Bell {
    fn arm(&self, waker: &Waker) {
        self.wake_at_ring(waker);
    }
}

impl Endpoint {
    /// Opens a session with one of the node's engines for `process`, which runs at `host`.
    ///
    /// # Errors
    /// The node does not respond, or refuses.
    pub async fn open(
        node: &Node,
        engine: u32,
        process: ProcessId,
        host: HostId,
        clock: &ProcessClock,
        identity: Identity,
    ) -> Result<Rc<Endpoint>, FabricError> {
        let (world, network, options) = (node.world().clone(), node.network().clone(), node.options());
        let inbox = network.bind_any(host);
        let engine = node.engine(engine);
        if options.is_reliable {
            network.connect(inbox.address(), engine);
            // The operating system closes the connections of a dead process.
            let (theirs, from) = (network.clone(), inbox.address());
            world.on_death(process, move || theirs.hang_up(from, engine));
        }
        let config = Config {
            identity: identity.identity,
            incarnation: identity.incarnation,
            nonce: world.random().bits(),
            datagram: options.datagram,
            is_reliable: options.is_reliable,
            silence: Duration::from_nanos(identity.silence),
            ..Config::default()
        };
        let client = Client::new(clock.now(), config);
        let line = Line { network, inbox, engine, is_reliable: options.is_reliable };
        let endpoint = Rc::new(Endpoint {
            tasks: TaskSession::new(line, clock.clone(), node.id(), client, None),
            stopped: Bell::default(),
        });
        let driven = Rc::clone(&endpoint);
        world.spawn(process, async move { driven.drive().await });
        let opened = within(&world, GREETING_WAIT, endpoint.tasks.opened()).await;
        match opened {
            Some(Ok(())) => Ok(endpoint),
            Some(Err(error)) => Err(error),
            None => {
                endpoint.tasks.give_up();
                let reason = "cannot open a session: no node responded; check that a node runs there";
                Err(FabricError::Refused(reason.to_owned()))
            }
        }
    }

    /// Clock of the client's process.
    pub fn clock(&self) -> &ProcessClock {
        self.tasks.clock()
    }

    /// Waits for all outstanding responses, then closes the session.
    pub async fn close(&self) {
        self.tasks.settled().await;
        if !self.tasks.leave() && !self.is_over() {
            // As when a client's endpoint is dropped that must not say BYE.
            self.stopped.ring();
            let Line { network, inbox, engine, is_reliable } = self.tasks.line();
            if *is_reliable {
                network.hang_up(inbox.address(), *engine);
            }
        }
    }

    /// Addresses of the client and of the engine.
    pub(super) fn addresses(&self) -> [Address; 2] {
        let Line { inbox, engine, .. } = self.tasks.line();
        [inbox.address(), *engine]
    }

    /// Whether the session has ended, so that all further requests fail.
    pub fn is_over(&self) -> bool {
        self.tasks.is_over()
    }

    /// Checks that the session has not ended.
    pub(super) fn check_open(&self) -> Result<(), FabricError> {
        self.tasks.check_open()
    }

    /// Waits until the session has ended. Returns the error of a request whose outcome is unknown.
    pub(super) async fn ended(&self) -> FabricError {
        self.tasks.ended().await
    }

    /// Drives the session until it ends.
    async fn drive(&self) {
        let mut stopped = pin!(self.stopped.rung());
        let mut ended = pin!(self.tasks.ended());
        let mut driven = pin!(self.tasks.drive(self.tasks.line().inbox.bell(), Duration::ZERO));
        std::future::poll_fn(|cx| {
            let is_stopped = stopped.as_mut().poll(cx).is_ready();
            if !is_stopped && driven.as_mut().poll(cx).is_pending() && ended.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl Fabric for Endpoint {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.tasks.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        response: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.tasks.call(node, service, request, response).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.tasks.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.tasks.capabilities(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.tasks.may_run_abandoned(node)
    }
}
