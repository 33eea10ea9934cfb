//! Requests in flight: the phase of each in its protocol, and the faults that have struck it there.
//!
//! Invariant: a fault is counted for a phase only if it struck a client with a request of that phase in flight. A
//! fault is counted for the idle phase only if the client had no request in flight.

use crate::family::Family;
use crate::pool::Reach;
use crate::{Carrier, Counted, Scene, mishaps};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::fault::{Fault, Target};
use farside_sim::world::{MICROS, MILLIS, Nanos};
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
    /// Whether requests of this phase allocate buffers, and a store may have none left.
    pub allocates: bool,
    /// Whether requests of this phase append to the log of a store that has one, and its disk may be full.
    pub logs: bool,
    /// Whether a client may sleep in this phase. Only the skew of a clock that it sleeps by counts as a strike.
    pub(crate) sleeps: bool,
    /// Whether the store may be dropped and created again within the phase.
    pub(crate) is_revocable: bool,
    /// Whether a trial has few requests of this phase, so that faults must strike most of them.
    pub(crate) is_rare: bool,
    /// Whether each client makes requests of this phase when it opens the store.
    pub(crate) is_of_openings: bool,
    /// Phase whose interruption leads to requests of this phase, if nothing else does.
    pub(crate) led_to_by: Option<usize>,
    /// Whether a request of this phase begins anew: the phases before it no longer count as passed.
    pub(crate) is_first: bool,
    /// Whether this is a phase of recoverers. A trial focuses on all of these phases or on none.
    pub(crate) is_of_recoverers: bool,
}

impl Phase {
    pub(crate) const fn new(name: &'static str) -> Phase {
        Phase {
            name,
            allocates: false,
            logs: false,
            sleeps: true,
            is_revocable: true,
            is_rare: false,
            is_of_openings: false,
            led_to_by: None,
            is_first: false,
            is_of_recoverers: false,
        }
    }

    pub(crate) const fn allocating(name: &'static str) -> Phase {
        Phase { allocates: true, ..Phase::new(name) }
    }

    /// Creates a phase of a store that is never dropped and that has buffers to spare.
    pub(crate) const fn of_lasting(name: &'static str) -> Phase {
        Phase { is_revocable: false, ..Phase::new(name) }
    }

    /// States that requests of this phase append to the store's log.
    pub(crate) const fn logging(self) -> Phase {
        Phase { logs: true, ..self }
    }

    /// States that a client does not sleep in this phase. A carrier with messages sleeps nevertheless.
    pub(crate) const fn sleepless(self) -> Phase {
        Phase { sleeps: false, ..self }
    }

    pub(crate) const fn rare(self) -> Phase {
        Phase { is_rare: true, ..self }
    }

    /// States that each client makes requests of this phase when it opens the store.
    pub(crate) const fn of_openings(self) -> Phase {
        Phase { is_of_openings: true, ..self }
    }

    /// Whether only recoverers have requests of this phase.
    pub const fn is_of_recoverers(&self) -> bool {
        self.is_of_recoverers
    }

    /// Creates a phase of recoverers.
    pub(crate) const fn of_recoverers(name: &'static str) -> Phase {
        Phase { is_of_recoverers: true, ..Phase::of_lasting(name) }
    }

    /// States that a request of this phase begins anew.
    pub(crate) const fn first(self) -> Phase {
        Phase { is_first: true, ..self }
    }

    /// States that requests of this phase follow only if a process dies within the phase with this index.
    pub(crate) const fn led_to_by(self, phase: usize) -> Phase {
        Phase { led_to_by: Some(phase), ..self }
    }
}

/// Phases of a system's protocol. The first phase is idle: no request is in flight.
pub struct Phases {
    /// All phases, at most 32. Those of recoverers are the last.
    pub all: &'static [Phase],
    /// Returns the phase of a request. The arguments are the request and the bitmask of the phases that its operation
    /// has passed.
    pub(crate) of: fn(Request<'_>, u32) -> usize,
}

/// Longest time, in nanoseconds, for which a recoverer waits for an operation to begin.
const WAITS_FOR_OPERATION: Nanos = MILLIS;

/// Usual time, in nanoseconds, after which a request that is to be dropped is polled again. Most fabrics wake a task
/// only when its response has arrived. Without further polls, no request would be dropped in flight.
const POLLED_AGAIN: Nanos = 2 * MICROS;

/// Index of the idle phase.
pub(crate) const IDLE: usize = 0;

/// A request of a client: a chain, or a call to a service.
pub(crate) enum Request<'a> {
    Chain(ChainView<'a>),
    /// The service, and the request's bytes.
    Call(ServiceId, &'a [u8]),
}

/// Returns whether a fault can strike within a phase over one of `carriers`.
pub fn can_strike(fault: Fault, phase: &Phase, carriers: &[Carrier]) -> bool {
    carriers.iter().any(|carrier| carrier.can_have(fault))
        && (fault != Fault::Exhaustion || phase.allocates)
        && (fault != Fault::Revocation || phase.is_revocable)
        && (!fault.is_of_logs() || phase.logs)
        && (fault != Fault::ClockSkew
            || phase.sleeps
            || carriers.iter().any(|carrier| *carrier != Carrier::Direct))
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
    /// Number of strikes that the requests of each phase have ordered.
    ordered: Box<[Cell<u64>]>,
}

impl Flights {
    pub(crate) fn new(phases: &'static Phases) -> Flights {
        let matrix = RefCell::new(Matrix::new(phases.all.len()));
        let ordered = phases.all.iter().map(|_| Cell::new(0)).collect();
        Flights { phases, now: RefCell::default(), next: Cell::new(0), matrix, ordered }
    }

    pub(crate) fn matrix(&self) -> Matrix {
        self.matrix.borrow().clone()
    }

    /// Returns the phase with this index.
    pub(crate) fn phase(&self, index: usize) -> &'static Phase {
        &self.phases.all[index]
    }

    /// Returns how often the fault has struck within the phase.
    pub(crate) fn struck(&self, fault: Fault, phase: usize) -> u64 {
        self.matrix.borrow().of(fault, phase)
    }

    /// Returns how often any fault has struck within the phase.
    pub(crate) fn struck_in(&self, phase: usize) -> u64 {
        self.matrix.borrow().0.iter().map(|row| row[phase]).sum()
    }

    /// Counts a strike that a request of the phase has ordered.
    pub(crate) fn order(&self, phase: usize) {
        self.ordered[phase].set(self.ordered[phase].get() + 1);
    }

    /// Returns how many strikes the requests of the phase have ordered.
    pub(crate) fn ordered_in(&self, phase: usize) -> u64 {
        self.ordered[phase].get()
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

    /// Counts a fault that strikes a client at one site, or at all sites if `site` is `None`. A client that is
    /// `never_idle` is not counted if it has no request in flight.
    fn strike(&self, fault: Fault, client: u32, site: Option<usize>, never_idle: bool) {
        let is_struck = |place: &Place| place.client == client && site.is_none_or(|site| place.site == site);
        let now = self.now.borrow();
        let struck = now
            .iter()
            .filter(|(_, place, _)| is_struck(place))
            .fold(0u32, |all, (.., phase)| all | 1 << phase);
        let struck = if struck == 0 && !never_idle { 1 << IDLE } else { struck };
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
    let strike = |client: u32, site| match scene.recoverers().contains(&client) {
        false => scene.flights.strike(fault, client, site, false),
        // A recoverer matters only while a client is in the midst of an operation.
        true if scene.running.get() > 0 => scene.flights.strike(fault, client, site, true),
        true => {}
    };
    match target {
        Target::Client(client) => strike(client, None),
        Target::Node(site) => {
            let clients = (0..scene.drawn.clients).chain(scene.recoverers());
            clients.for_each(|client| strike(client, Some(site as usize)));
        }
        Target::Session(from, to) => {
            let client = scene.hosts.iter().position(|host| [from, to].contains(host));
            let site = scene.sites.iter().position(|site| [from, to].contains(&site.node.host()));
            if let (Some(client), Some(site)) = (client, site) {
                strike(client as u32, Some(site));
            }
        }
        Target::None => {}
    }
}

/// Fabric that one task uses. The fabric records the task's requests in flight.
///
/// If the clients of several tasks use the fabric of one of them, a request belongs to the task whose operation makes
/// it.
#[derive(Clone)]
pub(crate) struct Tracked {
    inner: Reach,
    lane: Rc<Lane>,
    polled: Polled,
}

/// Task whose operation is being polled, of the tasks that share a client.
#[derive(Clone, Default)]
pub(crate) struct Polled(Rc<RefCell<Option<Rc<Lane>>>>);

/// State of the operation that a task carries out, and of its requests.
struct Lane {
    scene: Rc<Scene>,
    /// Number of the client, and the site of a client that uses one site.
    place: Place,
    /// Bitmask of the phases that the operation's requests have had. `last` is the latest of these phases.
    seen: Cell<u32>,
    last: Cell<usize>,
    /// The await at which the operation's future is to be dropped, if any.
    plan: Cell<Option<Plan>>,
    is_cancelled: Cell<bool>,
    /// Returns the phase of a request, as that of [`Phases`].
    of: fn(Request<'_>, u32) -> usize,
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
    pub(crate) fn new(inner: Reach, scene: &Rc<Scene>, client: u32, site: usize) -> Tracked {
        let (place, scene, of) = (Place { client, site }, Rc::clone(scene), scene.flights.phases.of);
        let (seen, last) = (Cell::new(0), Cell::new(IDLE));
        let lane =
            Lane { scene, place, seen, last, plan: Cell::new(None), is_cancelled: Cell::new(false), of };
        Tracked { inner, lane: Rc::new(lane), polled: Polled::default() }
    }

    /// Creates the fabric of a recoverer.
    pub(crate) fn recovering<F: Family>(inner: Reach, scene: &Rc<Scene>, number: u32) -> Tracked {
        let (place, scene) = (Place { client: number, site: 0 }, Rc::clone(scene));
        let (seen, last, of) = (Cell::new(0), Cell::new(IDLE), F::phase_of_recovery);
        let lane =
            Lane { scene, place, seen, last, plan: Cell::new(None), is_cancelled: Cell::new(false), of };
        Tracked { inner, lane: Rc::new(lane), polled: Polled::default() }
    }

    /// Returns the fabric of a task whose operations may use the fabrics of other tasks with the same `polled`.
    pub(crate) fn sharing(self, polled: &Polled) -> Tracked {
        Tracked { polled: polled.clone(), ..self }
    }

    /// The task to which a request of this fabric belongs.
    fn lane(&self) -> Rc<Lane> {
        Rc::clone(self.polled.0.borrow().as_ref().unwrap_or(&self.lane))
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
        let outcome = poll_fn(|cx| {
            let others = self.polled.0.replace(Some(Rc::clone(lane)));
            let polled = operation.as_mut().poll(cx);
            self.polled.0.replace(others);
            match polled {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending if lane.is_cancelled.get() => Poll::Ready(None),
                Poll::Pending => Poll::Pending,
            }
        });
        let outcome = outcome.await;
        lane.plan.set(None); // The operation may have made fewer requests than planned.
        outcome
    }

    /// Waits for a request. If the task's plan drops the operation at this request, the returned future never
    /// completes.
    async fn or_cancelled<T>(&self, lane: &Lane, request: impl Future<Output = T>, is_droppable: bool) -> T {
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
                let polled = request.as_mut().poll(cx);
                if polled.is_pending() {
                    let (world, waker) = (&lane.scene.world, cx.waker().clone());
                    let again = world.now() + world.random().heavy(POLLED_AGAIN);
                    world.at(again, move || waker.wake());
                }
                polled
            }
            None => {
                lane.is_cancelled.set(true);
                Poll::Pending
            }
        })
        .await
    }

    /// Waits, but not for long, until a client is in the midst of an operation, if this is a rare request of a
    /// recoverer and the trial focuses on recoverers.
    async fn wait_for_operation(&self, lane: &Lane, request: Request<'_>) {
        let scene = &lane.scene;
        if !scene.is_about_recoverers() || !scene.recoverers().contains(&lane.place.client) {
            return;
        }
        if scene.flights.phase((lane.of)(request, lane.seen.get())).is_rare {
            let awaiting = Counted::new(&scene.awaiting);
            let until = scene.world.now() + WAITS_FOR_OPERATION;
            while scene.running.get() == 0 && scene.world.now() < until {
                scene.world.sleep(10 * MICROS).await;
            }
            drop(awaiting);
        }
    }

    /// Phase of the task's last request.
    pub(crate) fn last_phase(&self) -> usize {
        self.lane.last.get()
    }

    fn flight<'a>(&self, lane: &'a Lane, node: NodeId, request: Request<'_>) -> Flight<'a> {
        let Lane { scene, place, seen, last, .. } = lane;
        let place = Place { site: self.inner.site(node).unwrap_or(place.site), ..*place };
        let phase = (lane.of)(request, seen.get());
        let before = if scene.flights.phase(phase).is_first { 0 } else { seen.get() };
        seen.set(before | 1 << phase);
        last.set(phase);
        mishaps::on_request(scene, &scene.sites[place.site], place.client, phase);
        Flight(&scene.flights, scene.flights.begin(place, phase))
    }
}

impl Fabric for Tracked {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let lane = self.lane();
        self.wait_for_operation(&lane, Request::Chain(chain.view())).await;
        let _flight = self.flight(&lane, node, Request::Chain(chain.view()));
        let is_droppable = lane.scene.drawn.carrier != Carrier::Direct;
        self.or_cancelled(&lane, self.inner.run(node, chain, reply), is_droppable).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let lane = self.lane();
        self.wait_for_operation(&lane, Request::Call(service, request)).await;
        let _flight = self.flight(&lane, node, Request::Call(service, request));
        let called = self.or_cancelled(&lane, self.inner.call(node, service, request, answer), true).await;
        if lane.scene.recoverers().contains(&lane.place.client) {
            lane.scene.configurations.look(&lane.scene);
        }
        called
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.inner.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.inner.may_run_abandoned(node)
    }
}

impl Clock for Tracked {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn wall(&self) -> Duration {
        self.inner.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}
