//! The machines of a node and its clients, modelled with [`crate::hardware`]. Messages take as long as on the papers'
//! testbeds; the chains run on the real bytes of a real node.
//!
//! A request passes the client's NIC, the network, the node's link and the node's NIC. At the node, one of these runs
//! the chain: the NIC itself, a core of the CPU, or a core of a BlueField. The response passes the node's link and the
//! network. Each of these parts except the network serves one request after the other, so requests queue under load.
//!
//! Invariant: a chain takes effect at one instant, between request and response, when it reaches the hardware that runs
//! it.

use crate::fault::Struck;
use crate::hardware::{
    Access, INPUTS, Inputs, Platform, Testbed, accesses, answer_bytes, framed, is_classic, request_bytes,
    trailing_reads,
};
use crate::memory::{Pace, Replay};
use crate::network::{Network, Wire};
use crate::node::{Kinds, Letter, Node, OneShot, Options, Serving};
use crate::station::{Sender, Station};
use crate::world::{MICROS, MILLIS, Nanos, World};
use farside_remote::arena::Arena;
use farside_remote::arena::session::SessionId;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::service::addressed;
use farside_remote::{
    Addr, By, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply, Rights, Status,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Cost of one call to a store's service, without the cost of receiving the request and sending the response. The
/// caller, who knows the simulated system, provides this cost.
#[derive(Clone, Copy, Debug)]
pub struct ServiceWork {
    /// Number of accesses to uncached memory.
    pub accesses: u64,
    /// Returns the number of bytes that the call checksums, given the length of the request.
    pub checksummed: fn(usize) -> u64,
}

impl ServiceWork {
    /// No cost, for a system that calls no service.
    pub const NONE: ServiceWork = ServiceWork { accesses: 0, checksummed: |_| 0 };
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
}

impl Setup {
    /// Creates a setup without cost for services, in which chains retire buffers themselves.
    pub fn new(platform: Platform, testbed: Testbed) -> Setup {
        Setup {
            platform,
            testbed,
            inputs: INPUTS,
            service: ServiceWork::NONE,
            buffer_return: BufferReturn::ByChain,
        }
    }

    /// Number of trailing READs that a chain needs in addition to its own ops.
    fn trailing_reads(&self, chain: ChainView<'_>) -> u64 {
        match self.buffer_return {
            BufferReturn::ByChain => 0,
            BufferReturn::ByReport => trailing_reads(chain),
        }
    }
}

/// Counters of the traffic on the node's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of requests, each with its response.
    pub round_trips: u64,
    /// Bytes sent to the node, including packet overhead.
    pub bytes_in: u64,
    /// Bytes sent by the node, including packet overhead.
    pub bytes_out: u64,
}

/// Starts a node without delays of its own: every step of the node runs at one instant, and only the model adds time.
pub fn start_node(world: &World, kinds: Kinds, memory_bytes: u64) -> Node {
    let network = Network::new(world, Wire { delay_ns: 0, jitter_ns: 0 }, &Rc::new(Struck::default()));
    let host = network.add_host();
    let options = Options {
        memory_bytes,
        engines: 0,
        pace: Pace::AT_ONCE,
        idle_pause: [20 * MICROS, MILLIS / 4],
        ..Options::default()
    };
    Node::start(world, &network, host, NodeId(0), kinds, options)
}

/// Model of a node's machine.
pub struct Machine {
    world: World,
    setup: Setup,
    node: NodeId,
    serving: Rc<Serving>,
    session: SessionId,
    memory: Replay,
    /// The two directions of the node's link: to the node (`incoming`) and from the node (`outgoing`).
    incoming: Station,
    outgoing: Station,
    nic: Station,
    cores: Station,
    arm: Station,
    slots: RefCell<BTreeMap<u64, Station>>,
    senders: Vec<Rc<Sender>>,
    clients: Cell<u32>,
    traffic: Cell<Traffic>,
}

impl Machine {
    /// Creates the model of a node that [`start_node`] has started.
    ///
    /// # Errors
    /// No process serves the node, or the node has no free session.
    pub async fn open(node: &Node, setup: Setup) -> Result<Rc<Machine>, FabricError> {
        assert_eq!(node.options().pace, Pace::AT_ONCE, "a step of the node never waits");
        let world = node.world().clone();
        let Some(serving) = node.serving() else { return Err(FabricError::NodeDied(node.id())) };
        let waiting = Rc::new(OneShot::default());
        // One session runs all chains. It needs no turns, since each chain ends at the instant at which it starts.
        serving.post(Letter::Open(world.start_process(), Rc::clone(&waiting)));
        let session = waiting.received().await;
        let session = session.ok_or_else(|| {
            FabricError::Refused("cannot open a session: the node has no free session; close one".to_owned())
        })?;
        let Setup { testbed, inputs, .. } = setup;
        Ok(Rc::new(Machine {
            memory: Replay::new(&world, serving.bytes(), Pace::AT_ONCE).seen_by(serving.seen()),
            world,
            setup,
            node: node.id(),
            serving,
            session,
            incoming: Station::new(1),
            outgoing: Station::new(1),
            nic: Station::new(1),
            cores: Station::new(testbed.cores),
            arm: Station::new(inputs.arm_cores),
            slots: RefCell::default(),
            senders: (0..testbed.machines).map(|_| Rc::new(inputs.sender())).collect(),
            clients: Cell::new(0),
            traffic: Cell::default(),
        }))
    }

    /// Connects another client, over a new connection. Successive clients are on successive machines, round robin.
    pub fn connect(self: &Rc<Machine>) -> Rc<Client> {
        let number = self.clients.get();
        self.clients.set(number + 1);
        let sender = Rc::clone(&self.senders[number as usize % self.senders.len()]);
        Rc::new(Client {
            machine: Rc::clone(self),
            sender,
            number,
            retired: RefCell::default(),
            unreported: Cell::new(0),
        })
    }

    /// Returns the traffic on the node's link since the machine's start.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// Configuration with which the model was created.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Returns the virtual time at which the NIC will have run a chain that arrives now.
    fn done_by_nic(&self, chain: ChainView<'_>, reply: &Reply) -> Nanos {
        let inputs = &self.setup.inputs;
        let trailing = self.setup.trailing_reads(chain);
        let mut done = self.nic.pass(self.world.now(), (chain.len() as u64 + trailing) * inputs.nic_op_ps);
        done += trailing * inputs.on_chip_ns;
        accesses(chain, reply, |access| match access {
            Access::Read => done += inputs.pcie_ns,
            Access::Write => {}
            Access::OnChip => done += inputs.on_chip_ns,
            Access::Atomic(at) => {
                let mut slots = self.slots.borrow_mut();
                let slot = slots.entry((at & inputs.slot_mask) / 8).or_insert_with(|| Station::new(1));
                done = slot.pass(done + inputs.atomic_ns, inputs.slot_ns * 1_000);
            }
        });
        self.nic.pass(self.world.now(), self.posted(reply) * inputs.nic_op_ps);
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
        let inputs = &self.setup.inputs;
        let busy = inputs.core_message_ns + accesses * inputs.core_access_ns + inputs.crc_ns(checksummed);
        let arrived = self.nic.pass(self.world.now(), inputs.nic_op_ps);
        self.cores.pass(arrived, busy * 1_000 + moved * inputs.core_copy_ps)
    }

    /// Returns the virtual time at which a core of the BlueField will have run a chain that arrives now.
    fn done_by_arm(&self, chain: ChainView<'_>, reply: &Reply) -> Nanos {
        let inputs = &self.setup.inputs;
        let mut busy = inputs.arm_message_ns;
        accesses(chain, reply, |access| {
            busy += match access {
                Access::Read => inputs.arm_read_ns,
                Access::Write => inputs.arm_write_ns,
                Access::Atomic(_) => 2 * inputs.arm_read_ns,
                Access::OnChip => 0,
            }
        });
        let arrived = self.nic.pass(self.world.now(), inputs.nic_op_ps);
        let done = self.arm.pass(arrived, busy * 1_000);
        self.arm.pass(arrived, self.posted(reply) * inputs.arm_write_ns * 1_000);
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
                let moved = accesses(chain, reply, |access| missed += u64::from(access != Access::OnChip));
                let done = self.done_by_core(missed, moved, 0);
                let posted = self.posted(reply) * self.setup.inputs.core_access_ns;
                self.cores.pass(self.world.now(), posted * 1_000);
                done
            }
        }
    }

    /// Runs a call to a store's service now, at one instant.
    fn answer(&self, service: ServiceId, request: &[u8], answer: &mut Vec<u8>) -> Result<(), String> {
        let (key, asked) = addressed(service, request)?;
        let served = self.serving.served(key)?;
        let mut attended = served.try_lock().expect("calls and steps of the node are at one instant each");
        self.memory.run_at_once(|memory| attended.call(memory, key, Rights::ALL, asked, answer))
    }

    fn count(&self, bytes_in: u64, bytes_out: u64) {
        let traffic = self.traffic.get();
        self.traffic.set(Traffic {
            round_trips: traffic.round_trips + 1,
            bytes_in: traffic.bytes_in + bytes_in,
            bytes_out: traffic.bytes_out + bytes_out,
        });
    }
}

/// Connection of a client to a node's machine.
pub struct Client {
    machine: Rc<Machine>,
    sender: Rc<Sender>,
    number: u32,
    /// Buffers that the next request returns to the node.
    retired: RefCell<Vec<(Key, Addr)>>,
    /// Number of retired buffers that this client has not reported yet; used with [`BufferReturn::ByReport`].
    unreported: Cell<u64>,
}

/// Size of a returned buffer's address.
const RETIRED: u64 = 8;

impl Client {
    /// Models a request of `bytes_in` bytes on the wire, whose latency exceeds a verb's by `extra_ns`. Calls `serve`
    /// when the request arrives. `serve` returns the time when the response leaves, and the response's size in bytes.
    async fn exchange(&self, bytes_in: u64, extra_ns: Nanos, serve: impl FnOnce() -> (Nanos, u64)) {
        let Machine { world, setup, incoming, outgoing, .. } = &*self.machine;
        let way = setup.inputs.verb_ns + setup.testbed.distance.round_trip_ns();
        let there = self.sender.leaves(world.now(), self.number) + way / 2;
        world.sleep_until(incoming.pass(there, setup.testbed.wire(bytes_in)) + extra_ns / 2).await;
        self.give_back();
        let (done, bytes_out) = serve();
        world.sleep_until(done).await;
        let sent = outgoing.pass(done, setup.testbed.wire(bytes_out));
        world.sleep_until(sent + way.div_ceil(2) + extra_ns.div_ceil(2)).await;
        self.machine.count(bytes_in, bytes_out);
    }

    fn give_back(&self) {
        let Machine { memory, session, .. } = &*self.machine;
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

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.machine.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
    }

    /// Sends a request to the node itself, for its catalog. In the model, this request takes no time.
    async fn ask(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), FabricError> {
        let ask = crate::node::parse(request).map_err(FabricError::Refused)?;
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
        chain.note_posted();
        let (view, Setup { platform, inputs, .. }) = (chain.view(), &self.machine.setup);
        if *platform == Platform::Rdma && !is_classic(view) {
            return Err(FabricError::Refused(format!(
                "chain refused: a NIC of platform '{}' has no PRISM operations; choose prism-sw, prism-hw or bluefield",
                platform.name()
            )));
        }
        let is_one_sided = platform.is_one_sided();
        let extra = match platform {
            Platform::Rdma | Platform::PrismHw => 0,
            Platform::PrismSw => inputs.two_sided_ns,
            Platform::BlueField => inputs.arm_ns - inputs.arm_message_ns,
        };
        let trailing = self.machine.setup.trailing_reads(view);
        let bytes = request_bytes(view, trailing, is_one_sided) + self.reported();
        let serve = || {
            let done = self.machine.carry_out(view, reply);
            if self.machine.setup.buffer_return == BufferReturn::ByReport {
                self.unreported.set(self.unreported.get() + u64::from(reply.retired()));
            }
            (done, answer_bytes(reply, trailing, is_one_sided))
        };
        self.exchange(bytes, extra, serve).await;
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
        let bytes = framed(request.len() as u64) + self.reported();
        let serve = || {
            answered = self.machine.answer(service, request, answer);
            let moved = (request.len() + answer.len()) as u64;
            let done = self.machine.done_by_core(work.accesses, moved, (work.checksummed)(request.len()));
            (done, framed(answer.len() as u64))
        };
        self.exchange(bytes, inputs.two_sided_ns, serve).await;
        answered.map_err(FabricError::Refused)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if self.check(node).is_ok() {
            self.retired.borrow_mut().push((key, buffer));
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        self.machine.setup.platform.capabilities()
    }
}

impl Clock for Client {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.machine.world.now())
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.machine.world.sleep(crate::world::nanos(duration))
    }
}
