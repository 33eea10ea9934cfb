//! Requests in flight: the phase of each in its protocol, and the faults that have struck it there.
//!
//! Invariant: a fault is counted for a phase only if it struck a client with a request of that phase in flight. A
//! fault is counted for the idle phase only if the client had no request in flight.

use crate::{Carrier, Scene, mishaps};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::fabric::AnyFabric;
use farside_sim::fault::{Fault, Target};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Phase of a system's protocol.
pub struct Phase {
    /// Name of the phase in reports.
    pub name: &'static str,
    /// Whether requests of this phase allocate buffers.
    pub allocates: bool,
    /// Whether a trial has few requests of this phase, so that faults must strike most of them.
    pub(crate) is_rare: bool,
}

impl Phase {
    pub(crate) const fn new(name: &'static str) -> Phase {
        Phase { name, allocates: false, is_rare: false }
    }

    pub(crate) const fn allocating(name: &'static str) -> Phase {
        Phase { name, allocates: true, is_rare: false }
    }

    pub(crate) const fn rare(self) -> Phase {
        Phase { is_rare: true, ..self }
    }
}

/// Phases of a system's protocol. The first phase is idle: no request is in flight.
pub struct Phases {
    /// All phases, at most 32.
    pub all: &'static [Phase],
    /// Returns the phase of a request. The arguments are the request and the bitmask of the phases that its operation
    /// has passed.
    pub(crate) of: fn(Request<'_>, u32) -> usize,
}

/// Index of the idle phase.
pub(crate) const IDLE: usize = 0;

/// A request of a client: a chain, or a call to a service.
pub(crate) enum Request<'a> {
    Chain(ChainView<'a>),
    Call(ServiceId),
}

/// Returns whether a fault can strike within a phase over one of `carriers`.
pub fn can_strike(fault: Fault, phase: &Phase, carriers: &[Carrier]) -> bool {
    carriers.iter().any(|carrier| carrier.can_have(fault)) && (fault != Fault::Exhaustion || phase.allocates)
}

/// Number of times that each fault has struck within each phase, with a row for each of [`Fault::ALL`].
#[derive(Clone, Debug, Default)]
pub struct Matrix(pub Vec<Vec<u64>>);

impl Matrix {
    /// Creates a matrix of zeros for this number of phases.
    pub fn new(phases: usize) -> Matrix {
        Matrix(vec![vec![0; phases]; Fault::ALL.len()])
    }

    /// Adds the numbers of another trial's matrix to this matrix.
    pub fn add(&mut self, other: &Matrix) {
        if self.0.is_empty() {
            *self = Matrix::new(other.0.first().map_or(0, Vec::len));
        }
        let pairs = self.0.iter_mut().zip(&other.0).flat_map(|(mine, theirs)| mine.iter_mut().zip(theirs));
        pairs.for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Returns how often the fault has struck within the phase.
    pub fn of(&self, fault: Fault, phase: usize) -> u64 {
        self.0.get(fault as usize).and_then(|row| row.get(phase)).copied().unwrap_or(0)
    }
}

/// The number of a client, and the number of the site to which the client's request goes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    client: u32,
    site: usize,
}

/// All requests in flight, and the faults that have struck within each phase.
pub(crate) struct Flights {
    phases: &'static Phases,
    now: RefCell<Vec<(u64, Place, usize)>>,
    next: Cell<u64>,
    matrix: RefCell<Matrix>,
}

impl Flights {
    pub(crate) fn new(phases: &'static Phases) -> Flights {
        let matrix = RefCell::new(Matrix::new(phases.all.len()));
        Flights { phases, now: RefCell::default(), next: Cell::new(0), matrix }
    }

    pub(crate) fn matrix(&self) -> Matrix {
        self.matrix.borrow().clone()
    }

    /// Returns how often the fault has struck within the phase.
    pub(crate) fn struck(&self, fault: Fault, phase: usize) -> u64 {
        self.matrix.borrow().of(fault, phase)
    }

    /// Returns how often any fault has struck within the phase.
    pub(crate) fn struck_in(&self, phase: usize) -> u64 {
        self.matrix.borrow().0.iter().map(|row| row[phase]).sum()
    }

    fn begin(&self, place: Place, phase: usize) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        self.now.borrow_mut().push((number, place, phase));
        number
    }

    fn end(&self, number: u64) {
        self.now.borrow_mut().retain(|(flight, ..)| *flight != number);
    }

    /// Counts a fault that strikes a client at one site, or at all sites if `site` is `None`.
    fn strike(&self, fault: Fault, client: u32, site: Option<usize>) {
        let is_struck = |place: &Place| place.client == client && site.is_none_or(|site| place.site == site);
        let now = self.now.borrow();
        let struck = now
            .iter()
            .filter(|(_, place, _)| is_struck(place))
            .fold(0u32, |all, (.., phase)| all | 1 << phase);
        let struck = if struck == 0 { 1 << IDLE } else { struck };
        let row = &mut self.matrix.borrow_mut().0[fault as usize];
        (0..row.len()).filter(|phase| struck >> phase & 1 == 1).for_each(|phase| row[phase] += 1);
    }

    /// Counts a fault that strikes a single request of this phase.
    pub(crate) fn strike_phase(&self, fault: Fault, phase: usize) {
        self.matrix.borrow_mut().0[fault as usize][phase] += 1;
    }
}

/// Counts a fault for the phase of each request that the fault has struck.
pub(crate) fn note(scene: &Scene, fault: Fault, target: Target) {
    let flights = &scene.flights;
    match target {
        Target::Client(client) => flights.strike(fault, client, None),
        Target::Node(site) => {
            (0..scene.drawn.clients).for_each(|client| flights.strike(fault, client, Some(site as usize)));
        }
        Target::Session(from, to) => {
            let client = scene.hosts.iter().position(|host| [from, to].contains(host));
            let site = scene.sites.iter().position(|site| [from, to].contains(&site.node.host()));
            if let (Some(client), Some(site)) = (client, site) {
                flights.strike(fault, client as u32, Some(site));
            }
        }
        Target::None => {}
    }
}

/// Fabric that one task uses. The fabric records the task's requests in flight.
#[derive(Clone)]
pub(crate) struct Tracked {
    inner: AnyFabric,
    lane: Rc<Lane>,
}

/// State of the operation that a task carries out, and of its requests.
struct Lane {
    scene: Rc<Scene>,
    place: Place,
    /// Bitmask of the phases that the operation's requests have had. `last` is the latest of these phases.
    seen: Cell<u32>,
    last: Cell<usize>,
    /// The await at which the operation's future is to be dropped, if any.
    plan: Cell<Option<Plan>>,
    is_cancelled: Cell<bool>,
}

/// Plan to drop an operation's future at one of its awaits.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Number of the operation's requests that complete before this await.
    pub(crate) requests: u32,
    /// Number of times that the next request is polled before the drop. Ignored for a chain that the client's own CPU
    /// would run: such a chain is not polled.
    pub(crate) polls: u32,
}

/// A request in the list of requests in flight. Dropping this value removes the request from the list.
struct Flight<'a>(&'a Flights, u64);

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Tracked {
    pub(crate) fn new(inner: AnyFabric, scene: &Rc<Scene>, client: u32, site: usize) -> Tracked {
        let (place, scene) = (Place { client, site }, Rc::clone(scene));
        let (seen, last) = (Cell::new(0), Cell::new(IDLE));
        let lane = Lane { scene, place, seen, last, plan: Cell::new(None), is_cancelled: Cell::new(false) };
        Tracked { inner, lane: Rc::new(lane) }
    }

    /// Carries out an operation. Returns `None` if the task's plan dropped the operation's future before the future
    /// completed.
    pub(crate) async fn carry_out<T>(
        &self,
        plan: Option<Plan>,
        operation: impl Future<Output = T>,
    ) -> Option<T> {
        let lane = &self.lane;
        lane.seen.set(0);
        lane.plan.set(plan);
        lane.is_cancelled.set(false);
        let mut operation = pin!(operation);
        let outcome = poll_fn(|cx| match operation.as_mut().poll(cx) {
            Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
            Poll::Pending if lane.is_cancelled.get() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        let outcome = outcome.await;
        lane.plan.set(None); // The operation may have made fewer requests than planned.
        outcome
    }

    /// Waits for a request. If the task's plan drops the operation at this request, the returned future never
    /// completes.
    async fn or_cancelled<T>(&self, request: impl Future<Output = T>, is_droppable: bool) -> T {
        let lane = &self.lane;
        let Some(Plan { requests, polls }) = lane.plan.get() else { return request.await };
        if let Some(requests) = requests.checked_sub(1) {
            lane.plan.set(Some(Plan { requests, polls }));
            return request.await;
        }
        let mut request = pin!(request);
        let mut polls_left = if is_droppable { polls } else { 0 };
        poll_fn(|cx| match polls_left.checked_sub(1) {
            Some(left) => {
                polls_left = left;
                request.as_mut().poll(cx)
            }
            None => {
                lane.is_cancelled.set(true);
                Poll::Pending
            }
        })
        .await
    }

    /// Phase of the task's last request.
    pub(crate) fn last_phase(&self) -> usize {
        self.lane.last.get()
    }

    fn flight(&self, request: Request<'_>) -> Flight<'_> {
        let Lane { scene, place, seen, last, .. } = &*self.lane;
        let phase = (scene.flights.phases.of)(request, seen.get());
        seen.set(seen.get() | 1 << phase);
        last.set(phase);
        mishaps::on_request(scene, &scene.sites[place.site], place.client, phase);
        Flight(&scene.flights, scene.flights.begin(*place, phase))
    }
}

impl Fabric for Tracked {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let _flight = self.flight(Request::Chain(chain.view()));
        let is_droppable = matches!(self.inner, AnyFabric::Session(_) | AnyFabric::Verbs(_));
        self.or_cancelled(self.inner.run(node, chain, reply), is_droppable).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let _flight = self.flight(Request::Call(service));
        self.or_cancelled(self.inner.call(node, service, request, answer), true).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }
}

impl Clock for Tracked {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}
