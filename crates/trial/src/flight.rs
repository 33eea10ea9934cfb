//! Requests in flight: which phase of its protocol each is in, and which faults have struck it there.
//!
//! Invariant: a fault counts for a phase only if a request of that phase was in flight at a client that it struck; for
//! idle only if none was.

use crate::{Carrier, Scene};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::fabric::AnyFabric;
use farside_sim::fault::{Fault, Whom};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A phase of a protocol.
pub struct Phase {
    /// Its name in reports.
    pub name: &'static str,
    /// Whether its requests take buffers.
    pub allocates: bool,
}

impl Phase {
    pub(crate) const fn new(name: &'static str) -> Phase {
        Phase { name, allocates: false }
    }

    pub(crate) const fn allocating(name: &'static str) -> Phase {
        Phase { name, allocates: true }
    }
}

/// The phases of a protocol. The first is idle: no request is in flight.
pub struct Phases {
    /// All of them; at most 32.
    pub all: &'static [Phase],
    /// The phase of a request, from its shape and from the phases that its operation has had, a bit each.
    pub(crate) of: fn(Request<'_>, u32) -> usize,
}

/// The number of the phase in which nothing is in flight.
const IDLE: usize = 0;

/// A request.
pub(crate) enum Request<'a> {
    Chain(ChainView<'a>),
    Call(ServiceId),
}

/// Whether a fault can strike within a phase, over one of these carriers.
pub fn can_strike(fault: Fault, phase: &Phase, carriers: &[Carrier]) -> bool {
    carriers.iter().any(|carrier| carrier.can_have(fault)) && (fault != Fault::Exhaustion || phase.allocates)
}

/// How often each fault has struck within each phase: a row for each of [`Fault::ALL`].
#[derive(Clone, Debug, Default)]
pub struct Matrix(pub Vec<Vec<u64>>);

impl Matrix {
    /// Nothing has struck.
    pub fn new(phases: usize) -> Matrix {
        Matrix(vec![vec![0; phases]; Fault::ALL.len()])
    }

    /// Adds what another run came to.
    pub fn add(&mut self, other: &Matrix) {
        if self.0.is_empty() {
            *self = Matrix::new(other.0.first().map_or(0, Vec::len));
        }
        let pairs = self.0.iter_mut().zip(&other.0).flat_map(|(mine, theirs)| mine.iter_mut().zip(theirs));
        pairs.for_each(|(mine, theirs)| *mine += theirs);
    }

    /// How often this fault has struck within that phase.
    pub fn of(&self, fault: Fault, phase: usize) -> u64 {
        self.0.get(fault as usize).and_then(|row| row.get(phase)).copied().unwrap_or(0)
    }
}

/// A task of a client, and where it asks.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    client: u32,
    site: usize,
}

/// All requests of a world that are in flight.
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

    fn begin(&self, place: Place, phase: usize) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        self.now.borrow_mut().push((number, place, phase));
        number
    }

    fn end(&self, number: u64) {
        self.now.borrow_mut().retain(|(flight, ..)| *flight != number);
    }

    /// A fault strikes all requests at these places.
    fn strike(&self, fault: Fault, is_struck: impl Fn(Place) -> bool) {
        let struck = self
            .now
            .borrow()
            .iter()
            .filter(|(_, place, _)| is_struck(*place))
            .fold(0u32, |all, flight| all | 1 << flight.2);
        let struck = if struck == 0 { 1 << IDLE } else { struck };
        let row = &mut self.matrix.borrow_mut().0[fault as usize];
        (0..row.len()).filter(|phase| struck >> phase & 1 == 1).for_each(|phase| row[phase] += 1);
    }

    /// A fault strikes a request of that phase, and nothing else.
    pub(crate) fn strike_phase(&self, fault: Fault, phase: usize) {
        self.matrix.borrow_mut().0[fault as usize][phase] += 1;
    }
}

/// A fault has struck: counts it for the phases of what was in flight there.
pub(crate) fn note(scene: &Scene, fault: Fault, whom: Whom) {
    let flights = &scene.flights;
    match whom {
        Whom::Client(client) => flights.strike(fault, |place| place.client == client),
        Whom::Node(site) => flights.strike(fault, |place| place.site == site as usize),
        Whom::Session(from, to) => {
            let client = scene.hosts.iter().position(|host| [from, to].contains(host));
            let site = scene.sites.iter().position(|site| [from, to].contains(&site.node.host()));
            let (Some(client), Some(site)) = (client, site) else { return };
            let session = Place { client: client as u32, site };
            flights.strike(fault, |place| place == session);
        }
        Whom::Nobody => {}
    }
}

/// One task's fabric: it knows what is in flight.
#[derive(Clone)]
pub(crate) struct Tracked {
    inner: AnyFabric,
    lane: Rc<Lane>,
}

/// A task's requests.
struct Lane {
    scene: Rc<Scene>,
    place: Place,
    /// The phases that the operation has had, and the last of them.
    seen: Cell<u32>,
    last: Cell<usize>,
}

/// Takes a request off the list when it is over, or dropped.
struct Flight<'a>(&'a Flights, u64);

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

impl Tracked {
    pub(crate) fn new(inner: AnyFabric, scene: &Rc<Scene>, client: u32, site: usize) -> Tracked {
        let (place, scene) = (Place { client, site }, Rc::clone(scene));
        let lane = Lane { scene, place, seen: Cell::new(0), last: Cell::new(IDLE) };
        Tracked { inner, lane: Rc::new(lane) }
    }

    /// An operation begins.
    pub(crate) fn begin(&self) {
        self.lane.seen.set(0);
    }

    /// The phase of the last request.
    pub(crate) fn last_phase(&self) -> usize {
        self.lane.last.get()
    }

    fn flight(&self, request: Request<'_>) -> Flight<'_> {
        let Lane { scene, place, seen, last } = &*self.lane;
        let phase = (scene.flights.phases.of)(request, seen.get());
        seen.set(seen.get() | 1 << phase);
        last.set(phase);
        Flight(&scene.flights, scene.flights.begin(*place, phase))
    }
}

impl Fabric for Tracked {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let _flight = self.flight(Request::Chain(chain.view()));
        self.inner.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let _flight = self.flight(Request::Call(service));
        self.inner.call(node, service, request, answer).await
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
