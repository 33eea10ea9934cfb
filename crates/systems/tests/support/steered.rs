//! Nodes in the simulator, and clients whose requests wait for each other, are lost, or are the last ones.
//!
//! Invariant: the test determines the fate of each request, and time is simulated, so a failure is reproducible.

use farside_fabrics::layer::count::Count;
use farside_remote::clock::Clock;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::service::ADDRESS_SIZE;
use farside_remote::wire::Code;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::AnyFabric;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::network::{Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World};
use farside_systems::registry::all_kinds;
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// A request of a client to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// A chain without a WRITE.
    Reads,
    /// A chain with a WRITE.
    Writes,
    /// A call to a store's service whose request has this byte at [`Steered::names_calls_by`].
    Call(u8),
}

/// Fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Runs,
    /// The request does not run, and its future is never ready.
    Stops,
    /// The request runs, and its future is never ready.
    RunsLast,
    /// The request runs if this says "yes", and its response is lost.
    Lost(Ran),
    /// The request is answered after this time.
    Takes(Duration),
}

type Fate = Pin<Box<dyn Future<Output = Then>>>;
type Before = Box<dyn FnMut(NodeId, Request) -> Fate>;

/// The nodes of a test.
pub(crate) struct Nodes {
    pub(crate) world: World,
    nodes: Vec<Node>,
    network: Network,
    clients: Cell<u64>,
}

/// A client's sessions with all nodes.
pub(crate) struct Steered {
    pub(crate) process: ProcessId,
    pub(crate) world: World,
    endpoints: Vec<AnyFabric>,
    clock: ProcessClock,
    before: RefCell<Before>,
    /// Place in a call of the byte that names it.
    named_at: Cell<usize>,
    /// The last call to a store's service that was lost.
    lost_call: RefCell<Option<(NodeId, ServiceId, Vec<u8>)>>,
}

/// The fabric of a client, whose requests are counted.
pub(crate) type Steering = Rc<Count<Rc<Steered>>>;

/// Runs a test on this number of nodes.
pub(crate) fn on_nodes<T: 'static, R: Future<Output = T> + 'static>(
    nodes: u32,
    test: impl FnOnce(Rc<Nodes>) -> R,
) -> T {
    let world = World::new(1);
    let struck = Rc::new(Struck::default());
    let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 0 }, &struck);
    let kinds: Kinds = Rc::new(all_kinds);
    let started = (0..nodes).map(|node| {
        let options = Options {
            engines: 1,
            is_reliable: true,
            memory_bytes: 16 << 20,
            wall: Some(0),
            ..Options::default()
        };
        Node::start(&world, &network, network.add_host(), NodeId(node), Rc::clone(&kinds), options)
    });
    let nodes = started.collect();
    let nodes = Rc::new(Nodes { world: world.clone(), nodes, network, clients: Cell::new(0) });
    let done = world.complete(60 * SECONDS, test(nodes));
    world.end();
    done.expect("the test ends")
}

impl Nodes {
    /// Gives a node another memory, and waits until it serves.
    pub(crate) async fn lose(&self, node: u32) {
        let node = &self.nodes[node as usize];
        node.lose_memory();
        while !node.is_served() {
            self.world.sleep(MICROS).await;
        }
    }

    /// Opens the sessions of another client.
    pub(crate) async fn client(&self) -> Steering {
        let (number, process) = (self.clients.get() + 1, self.world.start_process());
        self.clients.set(number);
        let host = self.network.add_host();
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(0));
        let mut endpoints = Vec::new();
        for node in &self.nodes {
            let identity =
                Identity { identity: 1000 + u128::from(number), incarnation: number, silence: 60 * MILLIS };
            let opened = Endpoint::open(node, 0, process, host, &clock, identity).await;
            endpoints.push(AnyFabric::Session(opened.expect("the node runs")));
        }
        Rc::new(Count::new(Rc::new(Steered {
            process,
            world: self.world.clone(),
            endpoints,
            clock,
            before: RefCell::new(Box::new(|_, _| Box::pin(std::future::ready(Then::Runs)))),
            named_at: Cell::new(ADDRESS_SIZE),
            lost_call: RefCell::default(),
        })))
    }
}

impl Steered {
    /// Determines the fate of each request from now on, except requests to the nodes themselves. The request waits for
    /// the future.
    pub(crate) fn before_each<R: Future<Output = Then> + 'static>(
        &self,
        mut before: impl FnMut(NodeId, Request) -> R + 'static,
    ) {
        *self.before.borrow_mut() = Box::new(move |node, request| Box::pin(before(node, request)));
    }

    /// Has the byte at this place of a service's request name calls, in place of the first one.
    pub(crate) fn names_calls_by(&self, at: usize) {
        self.named_at.set(ADDRESS_SIZE + at);
    }

    /// Lets all requests run from now on.
    pub(crate) fn runs_all(&self) {
        self.before_each(|_, _| std::future::ready(Then::Runs));
    }

    /// Carries out the last call that was lost.
    pub(crate) async fn repeat_lost_call(&self) {
        let lost = self.lost_call.borrow_mut().take();
        let (node, service, request) = lost.expect("a call was lost");
        let _refused = self.endpoints[node.0 as usize].call(node, service, &request, &mut Vec::new()).await;
    }

    async fn then(&self, node: NodeId, request: Request) -> Then {
        let fate = (self.before.borrow_mut())(node, request);
        fate.await
    }

    async fn answer(
        &self,
        node: NodeId,
        then: Then,
        run: impl Future<Output = Result<(), FabricError>>,
    ) -> Result<(), FabricError> {
        match then {
            Then::Runs => run.await,
            Then::Stops => std::future::pending().await,
            Then::RunsLast => {
                run.await?;
                std::future::pending().await
            }
            Then::Lost(ran) => {
                if ran == Ran::Yes {
                    run.await?;
                }
                let ran = if ran == Ran::Yes { Ran::Unknown } else { ran };
                Err(FabricError::Lost { node, ran, reason: "the response was lost".into() })
            }
            Then::Takes(time) => {
                let done = run.await;
                self.clock.sleep(time).await;
                done
            }
        }
    }
}

impl Fabric for Steered {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let is_write = chain.view().ops().any(|op| op.code() == Code::Write);
        let then = self.then(node, if is_write { Request::Writes } else { Request::Reads }).await;
        self.answer(node, then, self.endpoints[node.0 as usize].run(node, chain, reply)).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let then = match service {
            ServiceId::NODE => Then::Runs,
            _ => self.then(node, Request::Call(request.get(self.named_at.get()).copied().unwrap_or(0))).await,
        };
        if let Then::Lost(_) = then {
            *self.lost_call.borrow_mut() = Some((node, service, request.to_vec()));
        }
        self.answer(node, then, self.endpoints[node.0 as usize].call(node, service, request, answer)).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.endpoints[node.0 as usize].retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.endpoints[node.0 as usize].capabilities(node)
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        false // A request whose response is lost has run, or the test repeats it.
    }
}

impl Clock for Steered {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock.sleep(duration)
    }
}
