//! The machines of a node and its clients, modelled with [`crate::hardware`]. Messages take as long as on the papers'
//! testbeds; the chains run on the real bytes of a real node.
//!
//! All requests pass the client's NIC, the network and the node's NIC ([`crate::nic`]), and wait for the requests
//! before them. At the node, one of these runs a chain:
//!
//! - the NIC, as a list of verbs, over the fabric of trials ([`super::verbs`]);
//! - the NIC's firmware, which runs PRISM's chains in order. It is the paper's projection of a NIC with PRISM's
//!   operations. It uses the NIC's own parts: PCIe reads, lock slots, and posted writes to the retire ring;
//! - a core of the CPU, or a core of a BlueField, which receive messages from the NIC.
//!
//! Only the cores are modelled here.
//!
//! Invariant: a chain that is no list of verbs takes effect at one instant, when it reaches the hardware that runs it.
//! Invariant: a chain that was sent takes effect, and its response uses the link, whether or not a task still waits.

pub mod peers;
mod threads;

pub use threads::Threads;

use super::verbs::Verbs;
use crate::fault::Struck;
use crate::hardware::{
    Access, INPUTS, Inputs, Platform, Testbed, accesses, answer_bytes, framed, request_bytes, trailing_reads,
};
use crate::memory::{Pace, Replay};
use crate::network::{Network, Wire};
use crate::nic::{Connection, Device, Exchange, Message, Nic, Sender, Traffic};
use crate::node::{Kinds, Letter, Node, OneShot, Options, Serving};
use crate::station::Station;
use crate::world::{MICROS, MILLIS, Nanos, ProcessId, World};
use farside_node::served::{Buffers, Called, Calling};
use farside_remote::arena::Arena;
use farside_remote::arena::session::SessionId;
use farside_remote::chain::OpView;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::ServiceId;
use farside_remote::service::{Work, addressed};
use farside_remote::{
    Addr, By, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply, Rights, Status,
};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Cost of one call to a store's service, without the cost of receiving the request and sending the response. The
/// caller, who knows the simulated system, provides this cost.
#[derive(Clone, Copy, Debug)]
pub struct ServiceWork {
    /// Number of accesses to uncached memory.
    pub accesses: u64,
    /// Returns the number of bytes that the call checksums, given the request and the number of bytes of the node's
    /// memory that the call has read.
    pub checksummed: fn(&[u8], u64) -> u64,
}

impl ServiceWork {
    /// No cost, for a system that calls no service.
    pub const NONE: ServiceWork = ServiceWork { accesses: 0, checksummed: |_, _| 0 };
}

/// How clients return unreachable buffers to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferReturn {
    /// The chain retires the buffers itself. Each buffer takes one posted write to the region's retire ring, after the
    /// response.
    ByChain,
    /// As in PRISM (section 6.1): a chain that installs a buffer reads the buffer's address in a trailing READ, and the
    /// client reports garbage in batches. Batches are so large that only the addresses cost bytes.
    ByReport,
}

/// Configuration of the model of a node and its clients.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Hardware that runs chains.
    pub platform: Platform,
    /// Network and machines of the testbed.
    pub testbed: Testbed,
    /// Parameters of the hardware.
    pub inputs: Inputs,
    /// Cost of each call to the store's service.
    pub service: ServiceWork,
    /// Way in which clients return unreachable buffers to the node.
    pub buffer_return: BufferReturn,
    /// Whether a core of the node that has no message sleeps until an event wakes it. If not, the core polls.
    pub sleeps: bool,
}

impl Setup {
    /// Creates a setup without cost for services, in which chains retire buffers themselves and cores poll.
    pub fn new(platform: Platform, testbed: Testbed) -> Setup {
        Setup {
            platform,
            testbed,
            inputs: INPUTS,
            service: ServiceWork::NONE,
            buffer_return: BufferReturn::ByChain,
            sleeps: false,
        }
    }

    /// Returns the node's NIC.
    pub const fn device(&self) -> Device {
        let Inputs { has_extensions, .. } = self.inputs;
        let timing = self.inputs.timing(self.testbed);
        Device { timing, has_masked_cas: has_extensions, has_on_chip_words: has_extensions }
    }

    /// Number of trailing READs that a chain needs in addition to its own ops.
    fn trailing_reads(&self, chain: ChainView<'_>) -> u64 {
        match self.buffer_return {
            BufferReturn::ByChain => 0,
            BufferReturn::ByReport => trailing_reads(chain),
        }
    }
}

/// Starts a node with the NIC of `setup` and without delays of its own: every step of the node runs at one instant, and
/// only the model adds time.
pub fn start_node(world: &World, id: NodeId, kinds: Kinds, memory_bytes: u64, setup: &Setup) -> Node {
    let network = Network::new(world, Wire { delay_ns: 0, jitter_ns: 0 }, &Rc::new(Struck::default()));
    let host = network.add_host();
    let options = Options {
        memory_bytes,
        engines: 0,
        pace: Pace::AT_ONCE,
        idle_pause: [20 * MICROS, MILLIS / 4],
        nic: Some(setup.device()),
        ..Options::default()
    };
    Node::start(world, &network, host, id, kinds, options)
}

/// Model of a node's machine.
pub struct Machine {
    world: World,
    setup: Setup,
    node: NodeId,
    serving: Rc<Serving>,
    session: SessionId,
    memory: Rc<Replay>,
    nic: Nic,
    cores: Station,
    arm: Station,
    senders: Rc<[Rc<Sender>]>,
    clients: Cell<u32>,
    /// Addresses of the node's memory whose ops take neither bytes nor time: see [`Machines::leave_out`].
    left_out: RefCell<Range<u64>>,
    /// Process of the requests for which no client waits any more.
    unawaited: ProcessId,
}

/// Creates the NICs of the clients' machines.
fn senders(setup: &Setup) -> Rc<[Rc<Sender>]> {
    (0..setup.testbed.machines).map(|_| Rc::new(setup.inputs.sender())).collect()
}

impl Machine {
    /// Creates the model of a node that [`start_node`] has started with the same setup.
    ///
    /// # Errors
    /// No process serves the node, or the node has no free session.
    pub async fn open(node: &Node, setup: Setup) -> Result<Rc<Machine>, FabricError> {
        Machine::open_for(node, setup, &senders(&setup)).await
    }

    /// Creates the model of a node whose clients' machines have the NICs `senders`.
    async fn open_for(
        node: &Node,
        setup: Setup,
        senders: &Rc<[Rc<Sender>]>,
    ) -> Result<Rc<Machine>, FabricError> {
        assert_eq!(node.options().pace, Pace::AT_ONCE, "a step of the node never waits");
        let world = node.world().clone();
        let Some(serving) = node.serving() else { return Err(FabricError::NodeDied(node.id())) };
        let (nic, device) = serving.nic().expect("start_node gives the node a NIC");
        assert_eq!(device, setup.device(), "the node has the NIC of the setup");
        let waiting = Rc::new(OneShot::default());
        // One session runs all chains. It needs no turns, since each chain ends at the instant at which it starts.
        serving.post(Letter::Open(world.start_process(), Rc::clone(&waiting)));
        let session = waiting.received().await;
        let session = session.ok_or_else(|| {
            FabricError::Refused("cannot open a session: the node has no free session; close one".to_owned())
        })?;
        let Setup { testbed, inputs, .. } = setup;
        Ok(Rc::new(Machine {
            unawaited: world.start_process(),
            memory: Rc::new(Replay::new(&world, serving.bytes(), Pace::AT_ONCE).seen_by(serving.seen())),
            world,
            setup,
            node: node.id(),
            serving,
            session,
            nic,
            cores: Station::new(testbed.cores),
            arm: Station::new(inputs.arm_cores),
            senders: Rc::clone(senders),
            clients: Cell::new(0),
            left_out: RefCell::new(0..0),
        }))
    }

    /// Connects another client, over a new connection. Successive clients are on successive machines, round robin.
    pub fn connect(self: &Rc<Machine>) -> Rc<Client> {
        let number = self.clients.get();
        self.clients.set(number + 1);
        Rc::new(self.connected(number, number))
    }

    /// Connects the client with this number. `connection` identifies the connection at the client's NIC.
    fn connected(self: &Rc<Machine>, client: u32, connection: u32) -> Client {
        let sender = &self.senders[client as usize % self.senders.len()];
        let connection = self.nic.connect_from(sender, connection);
        let verbs = (self.setup.platform == Platform::Rdma).then(|| {
            Verbs::of_node(&self.world, self.node, connection.clone(), self.setup.device(), &self.memory)
        });
        Client { machine: Rc::clone(self), connection, verbs, garbage: Rc::default(), returned: Cell::new(0) }
    }

    /// Returns the traffic on the node's link since the machine's start.
    pub fn traffic(&self) -> Traffic {
        self.nic.traffic()
    }

    /// Configuration with which the model was created.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Whether an op takes bytes and time.
    fn counts(&self, op: &OpView<'_>) -> bool {
        !self.left_out.borrow().contains(&op.target().raw())
    }

    /// Calls `tell` with each access of an executed chain. Returns the number of bytes that the chain moved.
    fn accesses(&self, chain: ChainView<'_>, reply: &Reply, tell: impl FnMut(Access)) -> u64 {
        accesses(chain, |op| self.counts(op), reply, tell)
    }

    /// Returns the virtual time at which the NIC's firmware will have run a chain that it starts now.
    fn done_by_nic(&self, chain: ChainView<'_>, reply: &Reply) -> Nanos {
        let on_chip_ns = self.nic.timing().on_chip_ns;
        let mut done = self.world.now() + self.setup.trailing_reads(chain) * on_chip_ns;
        self.accesses(chain, reply, |access| {
            done = match access {
                Access::Read => self.nic.fetched(done),
                Access::Write => done,
                Access::OnChip => done + on_chip_ns,
                Access::Atomic(at) => {
                    let [_, back] = self.nic.locked(at, done);
                    back
                }
            }
        });
        self.nic.post(self.posted(reply));
        done
    }

    /// Number of writes to the retire ring that follow a chain. No client waits for them, but they occupy the hardware.
    fn posted(&self, reply: &Reply) -> u64 {
        match self.setup.buffer_return {
            BufferReturn::ByChain => u64::from(reply.retired()),
            BufferReturn::ByReport => 0,
        }
    }

    /// Returns the virtual time at which a core of the CPU will have served a message that arrives now.
    fn done_by_core(&self, accesses: u64, moved: u64, checksummed: u64) -> Nanos {
        let (inputs, now) = (&self.setup.inputs, self.world.now());
        let mut busy = inputs.core_message_ns + accesses * inputs.core_access_ns + inputs.crc_ns(checksummed);
        if self.setup.sleeps && self.cores.is_idle(now) {
            busy += inputs.wake_ns;
        }
        self.cores.pass(now, busy * 1_000 + moved * inputs.core_copy_ps)
    }

    /// Returns the virtual time at which a core of the BlueField will have run a chain that arrives now.
    fn done_by_arm(&self, chain: ChainView<'_>, reply: &Reply) -> Nanos {
        let inputs = &self.setup.inputs;
        let mut busy = inputs.arm_message_ns;
        self.accesses(chain, reply, |access| {
            busy += match access {
                Access::Read => inputs.arm_read_ns,
                Access::Write => inputs.arm_write_ns,
                Access::Atomic(_) => 2 * inputs.arm_read_ns,
                Access::OnChip => 0,
            }
        });
        let now = self.world.now();
        let done = self.arm.pass(now, busy * 1_000);
        self.arm.pass(now, self.posted(reply) * inputs.arm_write_ns * 1_000);
        done
    }

    /// Runs a chain now. Returns the virtual time at which the modelled hardware will have run the chain.
    fn carry_out(&self, chain: ChainView<'_>, reply: &mut Reply) -> Nanos {
        let by = By::itself(self.session);
        self.memory.run_at_once(|memory| farside_remote::run(memory, by, chain, reply));
        if reply.last_status() == Status::NotReady {
            self.serving.ring();
        }
        match self.setup.platform {
            Platform::Rdma | Platform::PrismHw => self.done_by_nic(chain, reply),
            Platform::BlueField => self.done_by_arm(chain, reply),
            Platform::PrismSw => {
                let mut missed = 0;
                let moved =
                    self.accesses(chain, reply, |access| missed += u64::from(access != Access::OnChip));
                let done = self.done_by_core(missed, moved, 0);
                let posted = self.posted(reply) * self.setup.inputs.core_access_ns;
                self.cores.pass(self.world.now(), posted * 1_000);
                done
            }
        }
    }

    /// Runs a chain that a client has sent. Returns the virtual time when the response is ready, and its size in bytes.
    fn serve(&self, garbage: &Garbage, chain: ChainView<'_>, reply: &mut Reply) -> (Nanos, u64) {
        garbage.give_back(self);
        let done = self.carry_out(chain, reply);
        if self.setup.buffer_return == BufferReturn::ByReport {
            garbage.unreported.set(garbage.unreported.get() + u64::from(reply.retired()));
        }
        let counted = chain.ops().enumerate().take(reply.len()).filter(|(_, op)| self.counts(op));
        let outputs = counted.map(|(index, _)| reply.output(index).len() as u64);
        (done, answer_bytes(outputs, self.setup.trailing_reads(chain), self.setup.platform.is_one_sided()))
    }

    /// Runs a call to a store's service now, at one instant.
    fn answer(&self, service: ServiceId, request: &[u8], answer: &mut Vec<u8>) -> Result<(), String> {
        let (key, request) = addressed(service, request)?;
        let served = self.serving.served(key)?;
        let attended = served.try_lock(Work::Call(request));
        let attended = attended.expect("calls and steps of the node are at one instant each");
        let session = Some(self.session.number);
        let calling = Calling { key, rights: Rights::ALL, session, request };
        let start = self.serving.start();
        let buffers = &mut Buffers::default();
        match self.memory.run_at_once(|memory| attended.call(memory, start, calling, buffers, answer)) {
            Called::Answered(answered) => answered,
            // The papers' machines have no logs, so the records count at once.
            Called::Appends => {
                let begun = std::mem::take(answer);
                let end = |memory: &Replay| attended.end(memory, start, (&begun, &Ok(())), buffers, answer);
                self.memory.run_at_once(end)
            }
        }
    }
}

/// Connection of a client to a node's machine.
pub struct Client {
    machine: Rc<Machine>,
    connection: Connection,
    /// The fabric on which the NIC executes chains as verbs; used with [`Platform::Rdma`].
    verbs: Option<Verbs>,
    garbage: Rc<Garbage>,
    /// Bytes that the chains of this client have returned.
    returned: Cell<u64>,
}

/// Buffers that a client returns to the node.
#[derive(Default)]
struct Garbage {
    /// Buffers that the next request returns.
    retired: RefCell<Vec<(Key, Addr)>>,
    /// Number of retired buffers that this client has not reported yet; used with [`BufferReturn::ByReport`].
    unreported: Cell<u64>,
}

/// Size of a returned buffer's address.
const RETIRED: u64 = 8;

impl Garbage {
    fn give_back(&self, Machine { memory, session, .. }: &Machine) {
        for (key, buffer) in self.retired.borrow_mut().drain(..) {
            memory.run_at_once(|memory| {
                Arena::of(memory).retire_own(*session, session.number, key.region(), buffer.raw())
            });
        }
    }

    /// Returns the size in bytes of the addresses of the buffers to return with a request, and counts these buffers as
    /// reported.
    fn reported(&self) -> u64 {
        RETIRED * (self.retired.borrow().len() as u64 + self.unreported.take())
    }
}

/// A chain that was sent to the hardware that runs it. If this value is dropped before the response has left the node,
/// the exchange goes on without it.
struct Sent<'c> {
    machine: &'c Rc<Machine>,
    garbage: &'c Rc<Garbage>,
    chain: ChainView<'c>,
    /// The exchange; `None` after it was handed on.
    exchange: Option<Exchange>,
}

impl Sent<'_> {
    async fn complete(&mut self, reply: &mut Reply) {
        let Sent { machine, garbage, chain, exchange } = self;
        let exchange = exchange.as_mut().expect("the exchange was not handed on");
        exchange.complete(|| machine.serve(garbage, *chain, reply)).await;
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let Some(mut exchange) = self.exchange.take().filter(|exchange| !exchange.is_answered()) else {
            return;
        };
        let (machine, garbage) = (Rc::clone(self.machine), Rc::clone(self.garbage));
        let mut bytes = Vec::new();
        self.chain.write_to(&mut bytes);
        self.machine.world.spawn(self.machine.unawaited, async move {
            let (chain, _) = ChainView::decode(&bytes).expect("the bytes are those of a chain");
            exchange.complete(|| machine.serve(&garbage, chain, &mut Reply::new())).await;
        });
    }
}

impl Client {
    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.machine.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
    }

    /// Runs a chain now, as if all machines took no time.
    fn run_at_once(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        chain.note_posted();
        let Machine { memory, session, .. } = &*self.machine;
        let by = By::itself(*session);
        memory.run_at_once(|memory| farside_remote::run(memory, by, chain.view(), reply));
        Ok(())
    }

    fn note_returned(&self, reply: &Reply) {
        let bytes: usize = (0..reply.len()).map(|op| reply.output(op).len()).sum();
        self.returned.set(self.returned.get() + bytes as u64);
    }

    /// Sends a request to the node itself, for its catalog. In the model, this request takes no time.
    async fn ask(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), FabricError> {
        let ask = farside_node::turn::parse(request).map_err(FabricError::Refused)?;
        // One session runs the chains of all clients. It is bound to none of them: no client of the model is fenced.
        if matches!(ask, Ask::Bind { .. }) {
            *answer = serde_json::to_vec(&Answer::Done).expect("plain data");
            return Ok(());
        }
        let waiting = Rc::new(OneShot::default());
        let sender = farside_node::identity::Sender::Host;
        self.machine.serving.post(Letter::LocalRequest(sender, ask, Rc::clone(&waiting)));
        let answered = waiting.received().await.map_err(FabricError::Refused)?;
        *answer = serde_json::to_vec(&answered).expect("plain data");
        Ok(())
    }
}

impl Fabric for Client {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        if let Some(verbs) = &self.verbs {
            verbs.run(node, chain, reply).await?;
            self.note_returned(reply);
            return Ok(());
        }
        chain.note_posted();
        let (view, Setup { platform, inputs, .. }) = (chain.view(), &self.machine.setup);
        let is_one_sided = platform.is_one_sided();
        let trailing = self.machine.setup.trailing_reads(view);
        let counted = || view.ops().filter(|op| self.machine.counts(op));
        let message = Message {
            bytes: request_bytes(counted(), trailing, is_one_sided) + self.garbage.reported(),
            ops: if is_one_sided { counted().count() as u64 + trailing } else { 1 },
            extra_ns: match platform {
                Platform::Rdma | Platform::PrismHw => 0,
                Platform::PrismSw => inputs.two_sided_ns,
                Platform::BlueField => inputs.arm_ns - inputs.arm_message_ns,
            },
        };
        let exchange = Some(self.connection.send_message(message));
        Sent { machine: &self.machine, garbage: &self.garbage, chain: view, exchange }.complete(reply).await;
        self.note_returned(reply);
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
        if service == ServiceId::NODE {
            return self.ask(request, answer).await;
        }
        let Setup { inputs, service: work, .. } = &self.machine.setup;
        let mut answered = Ok(());
        let bytes = framed(request.len() as u64) + self.garbage.reported();
        let message = Message { bytes, ops: 1, extra_ns: inputs.two_sided_ns };
        let serve = || {
            self.garbage.give_back(&self.machine);
            let before = self.machine.memory.bytes_read();
            answered = self.machine.answer(service, request, answer);
            let read = self.machine.memory.bytes_read() - before;
            // Bytes that are read and sent, or received and written, are moved once.
            let moved = read.max((request.len() + answer.len()) as u64);
            let done = self.machine.done_by_core(work.accesses, moved, (work.checksummed)(request, read));
            (done, framed(answer.len() as u64))
        };
        self.connection.exchange(message, serve).await;
        answered.map_err(FabricError::Refused)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_ok() {
            self.garbage.retired.borrow_mut().push((key, buffer));
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        let Setup { platform, .. } = self.machine.setup;
        match platform {
            Platform::Rdma => platform.capabilities().and(self.machine.setup.device().capabilities()),
            _ => platform.capabilities(),
        }
    }
}

impl Clock for Client {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.machine.world.now())
    }

    fn wall(&self) -> Duration {
        self.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.machine.world.sleep(crate::world::nanos(duration))
    }
}

/// Model of the machines of several nodes. The nodes have the numbers from 0, and the same clients' machines reach
/// them.
pub struct Machines {
    nodes: Box<[Rc<Machine>]>,
    clients: Cell<u32>,
}

impl Machines {
    /// Creates the model of nodes that [`start_node`] has started with the same setup.
    ///
    /// # Errors
    /// As [`Machine::open`].
    pub async fn open(nodes: &[Node], setup: Setup) -> Result<Rc<Machines>, FabricError> {
        let senders = senders(&setup);
        let mut machines = Vec::new();
        for node in nodes {
            machines.push(Machine::open_for(node, setup, &senders).await?);
        }
        Ok(Rc::new(Machines { nodes: machines.into(), clients: Cell::new(0) }))
    }

    /// Connects another client to all nodes. Successive clients are on successive machines, round robin.
    ///
    /// A NIC that runs chains has a connection for each client. Messages to CPUs are datagrams, so one queue pair of
    /// the client's NIC reaches all nodes.
    pub fn connect(&self) -> Rc<PoolClient> {
        let client = self.clients.get();
        self.clients.set(client + 1);
        let count = self.nodes.len() as u32;
        let connected = |(machine, index): (&Rc<Machine>, u32)| {
            let is_one_sided = machine.setup.platform.is_one_sided();
            machine.connected(client, if is_one_sided { client * count + index } else { client })
        };
        Rc::new(PoolClient { nodes: self.nodes.iter().zip(0..).map(connected).collect() })
    }

    /// Connects another client, whose machine has this many threads, to all nodes. The nodes' NICs run its chains.
    /// Successive clients are on successive machines, round robin.
    pub fn connect_threads(&self, threads: u32) -> Rc<Threads> {
        /// Number of clients whose connections have different numbers.
        const CLIENTS_MAX: u32 = 1 << 20;
        let client = self.clients.get();
        self.clients.set(client + 1);
        let count = self.nodes.len() as u32;
        let connected = |(machine, index): (&Rc<Machine>, u32)| {
            let of = |thread: u32| machine.connected(client, thread * CLIENTS_MAX + client * count + index);
            (0..threads).map(of).collect()
        };
        Rc::new(Threads::new(self.nodes.iter().zip(0..).map(connected)))
    }

    /// Leaves the ops on these addresses of a node's memory out of the model from now on: they run, and take neither
    /// bytes nor time. So an experiment shows what a part of a protocol costs. Verbs that the NIC runs always count.
    pub fn leave_out(&self, node: NodeId, addresses: Range<u64>) {
        *self.nodes[node.0 as usize].left_out.borrow_mut() = addresses;
    }

    /// Number of the nodes.
    pub fn count(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Returns the traffic on the links of all nodes since the machines' start.
    pub fn traffic(&self) -> Traffic {
        self.nodes.iter().map(|machine| machine.traffic()).fold(Traffic::default(), |sum, more| Traffic {
            round_trips: sum.round_trips + more.round_trips,
            ops: sum.ops + more.ops,
            bytes_in: sum.bytes_in + more.bytes_in,
            bytes_out: sum.bytes_out + more.bytes_out,
        })
    }
}

/// Connections of a client to the machines of several nodes.
pub struct PoolClient {
    nodes: Box<[Client]>,
}

impl PoolClient {
    /// Number of bytes that the chains of this client have returned, from all nodes.
    pub fn returned(&self) -> u64 {
        self.nodes.iter().map(|client| client.returned.get()).sum()
    }

    fn to(&self, node: NodeId) -> Result<&Client, FabricError> {
        self.nodes.get(node.0 as usize).ok_or(FabricError::NoSuchNode(node))
    }
}

impl Fabric for PoolClient {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.to(node)?.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.to(node)?.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Ok(client) = self.to(node) {
            client.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.to(node).map_or(Capabilities::NONE, |client| client.capabilities(node))
    }
}

impl Clock for PoolClient {
    fn now(&self) -> Duration {
        self.nodes[0].now()
    }

    fn wall(&self) -> Duration {
        self.nodes[0].wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.nodes[0].sleep(duration)
    }
}
