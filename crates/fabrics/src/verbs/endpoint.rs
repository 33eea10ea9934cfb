//! A session over RDMA, as a fabric: the NIC executes the lists that it can, the engine everything else.
//!
//! Before its first list, a session connects a queue pair for one-sided requests, and has each region registered when a
//! chain first needs it. Both are calls to the engine ([`Request`]). If either fails, the engine executes the chains,
//! except on a node with `--nic-atomics`, where they fail.
//!
//! Invariant: a chain is carried by one of both, the NIC or the engine. It is posted again only if it has not run.

use super::line::VerbsLine;
use super::list::{Runner, Terms, runner};
use super::lists::{Ended, Lists, PATIENCE, Posted};
use super::request::{Request, Response};
use super::setup::Abilities;
use crate::executor::{Idle, Turns};
use crate::nodes::Session;
use crate::session::client::Config;
use crate::session::endpoint::{Endpoint as Messages, OpenError};
use crate::spin::Waiting;
use crate::timer;
use crate::wait::{Waits, Wakeup, wait};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply, Status};
use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::pin::pin;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Number of times that a list is posted, if the NIC refuses requests of other lists meanwhile.
const ATTEMPTS: u32 = 4;
/// Pause after a failure to connect a queue pair or to register a region, or after a region was registered.
const PAUSE: Duration = Duration::from_millis(500);

/// A session with one engine over RDMA. Belongs to one thread.
pub struct Endpoint {
    // Dropped first: its queue pair uses completions of the line.
    lists: RefCell<Lists>,
    messages: Messages<VerbsLine>,
    abilities: Abilities,
    waiting_as: Cell<Waiting>,
    counters: Cell<Counters>,
    /// Whether a task connects a queue pair, or has a region registered.
    is_asking: Cell<bool>,
    /// Time before which nothing is connected or registered, since that failed lately or was done.
    asks_at: Cell<Duration>,
}

impl Endpoint {
    /// Opens a session over `line`, as [`Messages::open`] does.
    ///
    /// # Errors
    /// [`OpenError`] says why there is no session; no session is left behind.
    pub fn open(line: VerbsLine, node: NodeId, config: Config) -> Result<Endpoint, OpenError> {
        let abilities = line.abilities();
        let messages = Messages::open(line, node, config)?;
        Ok(Endpoint {
            lists: RefCell::default(),
            messages,
            abilities,
            waiting_as: Cell::default(),
            counters: Cell::default(),
            is_asking: Cell::new(false),
            asks_at: Cell::new(Duration::ZERO),
        })
    }

    /// Sets how this end waits for responses under [`crate::executor::Core`].
    pub fn set_waiting(&self, waiting: Waiting) {
        self.waiting_as.set(waiting);
    }

    /// Whether the NIC executes a chain that it can execute.
    fn uses_nic(&self, chain: &Chain<'_>) -> bool {
        // The engine frees the buffers that a chain holds, if its future is dropped.
        self.abilities.nic_atomics || self.abilities.has_lists() && chain.held().is_none()
    }

    fn line(&self) -> &VerbsLine {
        self.messages.tasks().line()
    }

    /// Runs a chain by the NIC, or by the engine if the NIC cannot reach the memory.
    async fn run_by_nic(
        &self,
        node: NodeId,
        chain: &Chain<'_>,
        size: usize,
        reply: &mut Reply,
    ) -> Result<(), FabricError> {
        let view = chain.view();
        let by_nic_only = self.abilities.nic_atomics;
        let mut terms = Terms { in_order: !by_nic_only, is_final: false };
        let (mut attempts, mut asked, mut was_refused) = (0, 0, false);
        loop {
            self.messages.tasks().check_open()?;
            let posted = self.lists.borrow_mut().post(view, size, terms, reply);
            let posted = match posted {
                Ok(posted) => posted,
                Err(error) => {
                    // The device may have accepted the first requests of the list.
                    chain.note_posted();
                    let reason = error.to_string();
                    self.break_off(&Ended::Unknown(reason.clone()));
                    return Err(FabricError::Broken { node, reason });
                }
            };
            match posted {
                Posted::InSlot(slot) => {
                    chain.note_posted();
                    match self.ended(slot).await {
                        // Nothing has run. The registration may have been dropped with rights that the session has no
                        // more, or that it has again.
                        Ended::Executed { refused: Some(0) } if !was_refused => {
                            was_refused = true;
                            self.release(slot);
                            self.lists.borrow_mut().forget_region(view.key());
                        }
                        Ended::Executed { refused } => {
                            self.lists.borrow().answer(slot, refused, reply);
                            self.release(slot);
                            self.count(&view, reply);
                            return Ok(());
                        }
                        Ended::NotRun => {
                            self.release(slot);
                            attempts += 1;
                            if attempts == ATTEMPTS {
                                let reason =
                                    "the node's NIC refuses other requests of this client".to_owned();
                                return Err(FabricError::Lost { node, ran: Ran::No, reason });
                            }
                        }
                        Ended::Unknown(reason) => {
                            self.release(slot);
                            return Err(FabricError::Broken { node, reason });
                        }
                    }
                }
                Posted::Done => {
                    self.count(&view, reply);
                    return Ok(());
                }
                Posted::Full => self.space().await,
                Posted::NoPair | Posted::NoRegion | Posted::Outside if by_nic_only => {
                    if self.is_asking.get() {
                        self.space().await;
                        continue;
                    }
                    asked += 1;
                    if asked > ATTEMPTS {
                        let reason = "its queue pair breaks again and again".to_owned();
                        return Err(FabricError::Lost { node, ran: Ran::No, reason });
                    }
                    self.ask(node, view.key()).await?;
                    terms.is_final = true;
                }
                Posted::NoPair | Posted::NoRegion | Posted::Outside => {
                    let may_ask = asked == 0 && !self.is_asking.get() && timer::now() >= self.asks_at.get();
                    asked += 1;
                    if !may_ask || self.ask(node, view.key()).await.is_err() {
                        return self.messages.run(node, chain, reply).await;
                    }
                }
            }
        }
    }

    /// Connects a queue pair, if there is none, and has a region registered.
    async fn ask(&self, node: NodeId, key: Key) -> Result<(), FabricError> {
        let _asking = Asking::new(self);
        // In a box, since this is rare, and all futures that run a chain would be larger by it.
        let asked = Box::pin(async {
            if !self.lists.borrow().is_up() {
                self.connect(node).await?;
            }
            self.register(node, key).await
        });
        let asked = asked.await;
        self.asks_at.set(timer::now().saturating_add(PAUSE));
        asked
    }

    async fn connect(&self, node: NodeId) -> Result<(), FabricError> {
        let prepared = self.lists.borrow_mut().prepare(self.line());
        let (pair, own) = prepared.map_err(|error| FabricError::Refused(error.to_string()))?;
        match self.request(node, &Request::Connect(own.clone())).await? {
            Response::Connected(theirs) => {
                let connected = self.lists.borrow_mut().connect(self.line(), (pair, &own), &theirs);
                connected.map_err(FabricError::Refused)
            }
            _ => Err(FabricError::Refused(UNEXPECTED.to_owned())),
        }
    }

    async fn register(&self, node: NodeId, key: Key) -> Result<(), FabricError> {
        let request = Request::Register { region: key.region(), secret: key.secret() };
        loop {
            match self.request(node, &request).await? {
                Response::Pending => {}
                Response::Registered(extents) => {
                    self.lists.borrow_mut().note_region(key, extents);
                    return Ok(());
                }
                Response::Connected(_) => return Err(FabricError::Refused(UNEXPECTED.to_owned())),
            }
        }
    }

    async fn request(&self, node: NodeId, request: &Request) -> Result<Response, FabricError> {
        let request = serde_json::to_vec(request).expect("plain data");
        let mut response = Vec::new();
        self.messages.call(node, ServiceId::NIC, &request, &mut response).await?;
        serde_json::from_slice(&response).map_err(|_| FabricError::Refused(UNEXPECTED.to_owned()))
    }

    /// Waits until a list has ended. If the future is dropped before, the list is abandoned.
    async fn ended(&self, slot: usize) -> Ended {
        let mut flight = Flight { endpoint: self, slot: Some(slot) };
        let ended = std::future::poll_fn(|cx| match self.lists.borrow_mut().ended(slot, cx.waker()) {
            Some(ended) => Poll::Ready(ended),
            None => Poll::Pending,
        });
        let ended = ended.await;
        flight.slot = None;
        ended
    }

    /// Waits until a list has ended, a queue pair is connected, or a region is registered.
    async fn space(&self) {
        let mut has_waited = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.lists.borrow_mut().wait(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Handles completions, and wakes the tasks that wait for them. Returns false if there were none.
    fn poll_lists(&self) -> bool {
        if self.messages.is_over() && self.lists.borrow().is_up() {
            // The node has destroyed its queue pair, so no list completes any more.
            self.break_off(&Ended::Unknown("its session is over".into()));
            return true;
        }
        let mut woken = Vec::new();
        let polled = self.lists.borrow_mut().poll(self.line(), &mut woken);
        woken.into_iter().for_each(Waker::wake);
        match polled {
            Ok(has_received) => has_received,
            Err(error) => {
                self.break_off(&Ended::Unknown(error.to_string()));
                true
            }
        }
    }

    /// Ends the lists in flight if the NIC has completed none for too long. Reads a clock if there are any.
    fn check_progress(&self) {
        if self.patience() == Some(Duration::ZERO) {
            let reason = format!("the NIC has completed no request for over {} s", PATIENCE.as_secs());
            self.break_off(&Ended::Unknown(reason));
        }
    }

    /// Time until the lists in flight are given up; `None` if there are none.
    fn patience(&self) -> Option<Duration> {
        let lists = self.lists.borrow();
        if lists.is_waiting() { lists.patience(timer::coarse_now()) } else { None }
    }

    /// Frees or abandons a list, and wakes the tasks that wait for its slot.
    fn release(&self, slot: usize) {
        let waiters = self.lists.borrow_mut().release(slot);
        waiters.into_iter().for_each(Waker::wake);
    }

    fn break_off(&self, ended: &Ended) {
        let mut woken = Vec::new();
        self.lists.borrow_mut().break_off(ended, &mut woken);
        woken.into_iter().for_each(Waker::wake);
    }

    fn count(&self, chain: &ChainView<'_>, reply: &Reply) {
        let mut counters = self.counters.get();
        counters.chains += 1;
        counters.ops += chain.len() as u64;
        counters.atomics += chain.atomics() as u64;
        counters.bytes_in += chain.wire_len() as u64;
        counters.bytes_out += reply.as_bytes().len() as u64;
        if matches!(reply.last_status(), Status::Access | Status::Invalid | Status::Aborted) {
            counters.refused += 1;
        }
        self.counters.set(counters);
    }
}

const UNEXPECTED: &str = "the node's answer is not understood: use the same release on both sides";

/// A list that a task waits for. Dropping it abandons the list.
struct Flight<'a> {
    endpoint: &'a Endpoint,
    slot: Option<usize>,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.endpoint.release(slot);
        }
    }
}

/// Marks that a task connects a queue pair or has a region registered. Others wait, or use the engine.
struct Asking<'a>(&'a Endpoint);

impl Asking<'_> {
    fn new(endpoint: &Endpoint) -> Asking<'_> {
        endpoint.is_asking.set(true);
        Asking(endpoint)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.is_asking.set(false);
        let waiters = self.0.lists.borrow_mut().waiters();
        waiters.into_iter().for_each(Waker::wake);
    }
}

impl Fabric for Endpoint {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        match runner(chain.view(), self.abilities.nic_atomics) {
            Runner::Nic(size) if self.uses_nic(chain) => self.run_by_nic(node, chain, size, reply).await,
            Runner::Nobody(reason) => Err(FabricError::Refused(reason)),
            Runner::Nic(_) | Runner::Engine => self.messages.run(node, chain, reply).await,
        }
    }

    fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        response: &mut Vec<u8>,
    ) -> impl Future<Output = Result<(), FabricError>> {
        self.messages.call(node, service, request, response)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.messages.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        if !self.abilities.nic_atomics {
            return self.messages.capabilities(node);
        }
        let lines = if self.abilities.whole_lines { Capabilities::WHOLE_LINES } else { Capabilities::NONE };
        Capabilities::CALLS.and(lines)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.lists.borrow().has_abandoned() || self.messages.may_run_abandoned(node)
    }
}

impl Turns for Endpoint {
    fn end_turn(&self) {
        // If some task is always ready, the core never waits, so completions must be polled for here.
        self.poll_lists();
        self.check_progress();
        self.messages.end_turn();
    }

    fn wait(&self, core: &Idle<'_>) {
        wait(std::iter::once(self), self.waiting_as.get(), None, core);
    }
}

impl Waits for Endpoint {
    fn begin_wait(&self) {
        self.messages.begin_wait();
    }

    fn is_waiting(&self) -> bool {
        self.lists.borrow().is_waiting() || self.messages.is_waiting()
    }

    fn poll(&self) -> bool {
        let has_received = self.messages.poll();
        self.poll_lists() | has_received
    }

    fn end_wait(&self, wakeup: Wakeup) {
        self.check_progress();
        self.messages.end_wait(wakeup);
    }

    fn may_sleep(&self) -> bool {
        self.messages.may_sleep()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.messages.fd()
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        [self.messages.sleep_max(now), self.patience()].into_iter().flatten().min()
    }
}

impl Session for Endpoint {
    fn is_over(&self) -> bool {
        self.messages.is_over()
    }

    fn set_call_timeout(&self, patience: Duration) {
        self.messages.set_call_timeout(patience);
    }

    fn counters(&self) -> Counters {
        let mut sum = self.counters.get();
        sum.add(&self.messages.counters());
        sum
    }

    async fn drive(&self) {
        let mut messages = pin!(self.messages.drive());
        let mut checks = pin!(async {
            loop {
                timer::sleep(self.patience().unwrap_or(PATIENCE)).await;
                self.check_progress();
            }
        });
        std::future::poll_fn(|cx| {
            self.poll_lists();
            let _never_completes: Poll<()> = checks.as_mut().poll(cx);
            // Sleeps until the descriptor reports an arrival, which may be a completion of a list.
            let _never_completes = messages.as_mut().poll(cx);
            self.poll_lists();
            Poll::<()>::Pending
        })
        .await;
    }
}

impl Clock for Endpoint {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn wall(&self) -> Duration {
        timer::wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}
