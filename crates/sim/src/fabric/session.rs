//! Client side of a datagram session in virtual time, as over `udp`, `tcp` and `ring`. The session uses either a
//! network that loses, duplicates, delays and reorders datagrams, or a connection that may break.
//!
//! Requests that a client's tasks make at the same instant are sent together.
//!
//! Invariant: a request is cancelled when no task waits for it any more.
//!
//! Invariant: after the session has ended nothing is sent, and each waiting task gets an error that says what may be
//! assumed.

use crate::clock::ProcessClock;
use crate::network::{Address, Arrival, HostId, Inbox, Network};
use crate::node::Node;
use crate::world::{Bell, MILLIS, Nanos, ProcessId, World, nanos, within};
use farside_fabrics::session::answer;
use farside_fabrics::session::client::{Ask, Client, Config, Event, Fate, Lost, SlotRef};
use farside_remote::chain::PIECES_MAX;
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, FENCED, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Timeout for opening a session, in nanoseconds.
const GREETING_WAIT: Nanos = 90 * MILLIS;
/// Maximum number of buffers that one request retires.
const RETIRED_MAX: usize = 64;

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
    world: World,
    network: Network,
    node: NodeId,
    engine: Address,
    inbox: Rc<Inbox>,
    is_reliable: bool,
    clock: ProcessClock,
    state: RefCell<State>,
    /// Bell that rings when the session's state has changed.
    changed: Bell,
    /// Bell that rings when there is a request to send.
    asked: Bell,
}

struct State {
    client: Client,
    failed: Vec<(SlotRef, Fate)>,
    retired: Vec<(u32, Addr)>,
    over: Option<String>,
    is_open: bool,
    out: Vec<u8>,
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
        let state = State {
            client: Client::new(clock.now(), config),
            failed: Vec::new(),
            retired: Vec::new(),
            over: None,
            is_open: false,
            out: Vec::new(),
        };
        let endpoint = Rc::new(Endpoint {
            node: node.id(),
            engine,
            inbox,
            is_reliable: options.is_reliable,
            clock: clock.clone(),
            state: RefCell::new(state),
            changed: Bell::default(),
            asked: Bell::default(),
            world: world.clone(),
            network,
        });
        let driven = Rc::clone(&endpoint);
        world.spawn(process, async move { driven.drive().await });
        let opened = within(&world, GREETING_WAIT, endpoint.is_open()).await;
        match opened {
            Some(true) => Ok(endpoint),
            Some(false) => Err(endpoint.over(Ran::No)),
            None => {
                endpoint.state.borrow_mut().client.close();
                endpoint.asked.ring();
                let reason = "cannot open a session: no node responded; check that a node runs there";
                Err(FabricError::Refused(reason.to_owned()))
            }
        }
    }

    /// Clock of the client's process.
    pub fn clock(&self) -> &ProcessClock {
        &self.clock
    }

    /// Waits for all outstanding responses, then closes the session.
    pub async fn close(&self) {
        loop {
            let changed = self.changed.rung();
            let is_done = {
                let state = self.state.borrow();
                state.over.is_some() || state.retired.is_empty() && !state.client.is_waiting()
            };
            if is_done {
                break;
            }
            changed.await;
        }
        self.state.borrow_mut().client.close();
        self.asked.ring();
    }

    /// Addresses of the client and of the engine.
    pub(super) fn addresses(&self) -> [Address; 2] {
        [self.inbox.address(), self.engine]
    }

    /// Whether the session has ended, so that all further requests fail.
    pub fn is_over(&self) -> bool {
        self.state.borrow().over.is_some()
    }

    /// Checks that the session has not ended.
    pub(super) fn check_open(&self) -> Result<(), FabricError> {
        if self.is_over() { Err(self.over(Ran::No)) } else { Ok(()) }
    }

    /// Waits until the session has ended.
    pub(super) async fn ended(&self) {
        loop {
            let changed = self.changed.rung();
            if self.state.borrow().over.is_some() {
                return;
            }
            changed.await;
        }
    }

    async fn is_open(&self) -> bool {
        loop {
            let changed = self.changed.rung();
            if let Some(is_open) = self.state.borrow().is_open() {
                return is_open;
            }
            changed.await;
        }
    }

    /// Sends, receives and handles timeouts, until the session ends.
    async fn drive(&self) {
        loop {
            let (rung, asked) = (self.inbox.bell().rung(), self.asked.rung());
            self.receive();
            self.send();
            let wait = {
                let state = self.state.borrow();
                if state.over.is_some() && !state.client.is_waiting() {
                    return;
                }
                let timeout = state.client.next_timeout();
                timeout.map(|at| at.saturating_sub(self.clock.now()))
            };
            let mut news = std::pin::pin!(first(rung, asked));
            match wait {
                Some(wait) => {
                    let mut sleep = std::pin::pin!(self.clock.sleep(wait));
                    first(&mut news, &mut sleep).await;
                }
                None => news.await,
            }
        }
    }

    /// Handles arrived messages.
    fn receive(&self) {
        let mut has_news = false;
        while let Some(arrival) = self.inbox.take() {
            has_news = true;
            let mut state = self.state.borrow_mut();
            match arrival {
                Arrival::Message(_, bytes) => {
                    let _refused_is_counted = state.client.receive(self.clock.now(), &bytes);
                }
                Arrival::HungUp(_) => {
                    state.client.close();
                    state.over.get_or_insert_with(|| "the connection broke".to_owned());
                }
            }
        }
        if has_news {
            self.handle_events();
            // A message can complete a wait without an event of the session.
            self.changed.ring();
        }
    }

    /// Sends the session's pending packets.
    fn send(&self) {
        let mut state = self.state.borrow_mut();
        let now = self.clock.now();
        state.retire_buffers(now);
        let State { client, out, over, .. } = &mut *state;
        let mut has_broken = false;
        while client.transmit(now, out) {
            let (from, bytes) = (self.inbox.address(), out.clone());
            if !self.is_reliable {
                self.network.send(from, self.engine, bytes);
            } else if !self.network.send_on(from, self.engine, bytes) {
                client.close();
                over.get_or_insert_with(|| "the connection broke".to_owned());
                has_broken = true;
                break;
            }
        }
        drop(state);
        self.handle_events();
        if has_broken {
            self.changed.ring();
        }
    }

    /// Handles the session's events, and wakes the tasks that wait for these events.
    fn handle_events(&self) {
        let mut state = self.state.borrow_mut();
        let mut has_news = state.client.take_answered() != 0;
        while let Some(event) = state.client.next_event() {
            has_news = true;
            match event {
                Event::Open(_) => state.is_open = true,
                Event::Failed { request, fate } => state.failed.push((request, fate)),
                Event::Lost(lost) => {
                    let reason = match lost {
                        Lost::Silent => "the node was silent for too long",
                        Lost::Gone => "the node has ended the session, or was restarted",
                        Lost::Fenced => FENCED,
                    };
                    state.over.get_or_insert_with(|| reason.to_owned());
                }
                Event::Refused(reason) => {
                    state.over.get_or_insert(reason);
                }
                Event::Answered { .. } => {}
            }
        }
        drop(state);
        if has_news {
            self.changed.ring();
        }
    }

    pub(super) fn over(&self, ran: Ran) -> FabricError {
        let reason = self.state.borrow().over.clone().unwrap_or_default();
        FabricError::Lost { node: self.node, ran, reason }
    }

    /// Submits a request once a slot is free, and waits for the response or for the request's fate.
    async fn request(
        &self,
        ask: Ask,
        patience: Duration,
        parts: &[&[u8]],
        chain: Option<&Chain<'_>>,
    ) -> Result<SlotRef, FabricError> {
        let asked = within(&self.world, nanos(patience), self.submitted(ask, patience, parts)).await;
        let request = asked.unwrap_or_else(|| {
            let reason = "request timed out: no slot became free; the request was not sent; retry";
            Err(FabricError::Refused(reason.to_owned()))
        })?;
        if let Some(chain) = chain
            && let Some(held) = chain.held()
        {
            self.state.borrow_mut().client.hold(request, held.buffers, held.published_by);
            chain.note_posted();
        }
        let mut outstanding = Outstanding { endpoint: self, request: Some(request) };
        loop {
            let changed = self.changed.rung();
            let news = self.state.borrow_mut().news_of(request);
            if let Some(news) = news {
                outstanding.request = None;
                return news.map(|()| request).map_err(|fate| self.failed(fate, patience));
            }
            changed.await;
        }
    }

    async fn submitted(&self, ask: Ask, patience: Duration, parts: &[&[u8]]) -> Result<SlotRef, FabricError> {
        loop {
            let changed = self.changed.rung();
            if self.state.borrow().over.is_some() {
                return Err(self.over(Ran::No));
            }
            let now = self.clock.now();
            let submitted = self.state.borrow_mut().client.submit_within(now, patience, ask, parts);
            if let Some(request) = submitted {
                self.asked.ring();
                return Ok(request);
            }
            changed.await;
        }
    }

    fn failed(&self, fate: Fate, patience: Duration) -> FabricError {
        let ran = match fate {
            Fate::DidNotRun => Ran::No,
            Fate::DidRun => Ran::Yes,
            Fate::Unknown => Ran::Unknown,
        };
        let is_over = self.state.borrow().over.is_some();
        match ran {
            _ if is_over => self.over(ran),
            Ran::No => {
                let reason =
                    "request timed out: the node granted no capacity; the request was not sent; retry";
                FabricError::Refused(reason.to_owned())
            }
            _ => FabricError::Deadline { node: self.node, waited: patience },
        }
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
    }
}

impl State {
    /// Returns whether the session is open, or `None` if that is not known yet.
    fn is_open(&self) -> Option<bool> {
        (self.is_open || self.over.is_some()).then_some(self.over.is_none())
    }

    /// Returns the outcome of a request, or `None` if it is not known yet. Removes the record of a failed request.
    fn news_of(&mut self, request: SlotRef) -> Option<Result<(), Fate>> {
        if self.client.is_answered(request) {
            return Some(Ok(()));
        }
        self.take_failed(request).map(Err)
    }

    fn take_failed(&mut self, request: SlotRef) -> Option<Fate> {
        let place = self.failed.iter().position(|(failed, _)| *failed == request)?;
        Some(self.failed.swap_remove(place).1)
    }

    /// Retires the buffers that dropped futures held. Sends the buffers' addresses in batches, each batch once a slot
    /// is free.
    fn retire_buffers(&mut self, now: Duration) {
        self.client.take_unpublished(&mut self.retired);
        while !self.retired.is_empty() && self.over.is_none() {
            let count = self.retired.len().min(RETIRED_MAX);
            if !self.client.retire(now, &self.retired[..count]) {
                return;
            }
            self.retired.drain(..count);
        }
    }
}

/// Request that a task waits for. Dropping this value cancels the request.
struct Outstanding<'a> {
    endpoint: &'a Endpoint,
    request: Option<SlotRef>,
}

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            let mut state = self.endpoint.state.borrow_mut();
            let _nobody_asks = state.client.cancel(request).or_else(|| state.take_failed(request));
            drop(state);
            self.endpoint.asked.ring();
        }
    }
}

/// Completes when either future completes.
async fn first(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (std::pin::pin!(one), std::pin::pin!(other));
    std::future::poll_fn(|cx| {
        if one.as_mut().poll(cx).is_ready() {
            return std::task::Poll::Ready(());
        }
        other.as_mut().poll(cx)
    })
    .await;
}

impl Fabric for Endpoint {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        let view = chain.view();
        let mut pieces = [&[][..]; PIECES_MAX];
        let count = view.pieces().zip(&mut pieces).map(|(piece, place)| *place = piece).count();
        let request = self.request(Ask::Chain, DEADLINE, &pieces[..count], Some(chain)).await?;
        let mut state = self.state.borrow_mut();
        let client = &mut state.client;
        let outcome = match answer::refusal(client.reply(request)) {
            Some(reason) => Err(FabricError::Refused(reason)),
            None => reply.fill(view.len(), |own| client.take_reply(request, own)).map_err(|error| {
                let reason = format!("the node's reply is malformed: {error}");
                FabricError::Lost { node, ran: Ran::Yes, reason }
            }),
        };
        client.release(request);
        drop(state);
        // Another task may be waiting for the slot.
        self.changed.ring();
        outcome
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        reported: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.check(node)?;
        let request = self.request(Ask::Call(service), DEADLINE, &[request], None).await?;
        let mut state = self.state.borrow_mut();
        let bytes = state.client.reply(request);
        let outcome = match answer::refusal(bytes) {
            Some(reason) => Err(FabricError::Refused(reason)),
            None => {
                reported.clear();
                reported.extend_from_slice(answer::body(bytes));
                Ok(())
            }
        };
        state.client.release(request);
        drop(state);
        self.changed.ring();
        self.asked.ring();
        outcome
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        let mut state = self.state.borrow_mut();
        if node == self.node && state.over.is_none() {
            state.retired.push((key.region(), buffer));
            drop(state);
            self.asked.ring();
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        self.state.borrow().client.is_draining()
    }
}
