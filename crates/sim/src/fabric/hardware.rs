//! A node's machine and its clients' as [`crate::hardware`] has them: messages take as long as on the papers'
//! testbeds, on the real bytes of a real node.
//!
//! A request passes the client's NIC, the way, the node's link and its NIC; there the NIC itself, a core of the CPU or
//! one of a BlueField runs the chain; the answer passes the node's link and the way. Each of these serves one after
//! another, so that what is asked for too fast waits.
//!
//! Invariant: what a chain does, it does at one instant, when it reaches what runs it: between request and answer.

use crate::fault::Struck;
use crate::hardware::{
    Access, INPUTS, Inputs, Platform, Testbed, accesses, answer_bytes, framed, is_classic, request_bytes,
    trailing_reads,
};
use crate::memory::{Pace, Replay};
use crate::network::{Network, Wire};
use crate::node::{Kinds, Letter, Node, Options, Serving, Waiting};
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

/// What a store's service does for a call beside receiving and answering it. Whoever knows the system says it.
#[derive(Clone, Copy, Debug)]
pub struct ServiceWork {
    /// Accesses to memory that no cache has.
    pub accesses: u64,
    /// How many bytes it brings into checksums for a request of so many.
    pub checksummed: fn(usize) -> u64,
}

impl ServiceWork {
    /// Nothing that takes time.
    pub const NONE: ServiceWork = ServiceWork { accesses: 0, checksummed: |_| 0 };
}

/// How buffers that a chain has made unreachable get to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// The chain retires them itself: each is one posted write to the region's retire ring, after the answer.
    ByChain,
    /// As in PRISM (section 6.1): a chain that installs a buffer reads the buffer's address back in a trailing READ,
    /// and the client reports what became garbage in batches. A batch is so large that only its addresses cost.
    ByReport,
}

/// What is modelled.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// What runs chains.
    pub platform: Platform,
    /// What connects machines.
    pub testbed: Testbed,
    /// What machines are made of.
    pub inputs: Inputs,
    /// What calls cost.
    pub service: ServiceWork,
    /// How buffers are given back.
    pub given_back: GivenBack,
}

impl Setup {
    /// That platform on that testbed, without services.
    pub fn new(platform: Platform, testbed: Testbed) -> Setup {
        Setup {
            platform,
            testbed,
            inputs: INPUTS,
            service: ServiceWork::NONE,
            given_back: GivenBack::ByChain,
        }
    }

    /// READs that a chain has beside its own ops.
    fn trailing_reads(&self, chain: ChainView<'_>) -> u64 {
        match self.given_back {
            GivenBack::ByChain => 0,
            GivenBack::ByReport => trailing_reads(chain),
        }
    }
}

/// What went over the node's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests, each with its answer.
    pub round_trips: u64,
    /// Bytes to the node, with those of packets.
    pub bytes_in: u64,
    /// Bytes from it.
    pub bytes_out: u64,
}

/// A node that has nothing to wait for but what the model says: a memory, and the node's own steps at one instant each.
pub fn start_node(world: &World, kinds: Kinds, memory_bytes: u64) -> Node {
    let network = Network::new(world, Wire { delay_ns: 0, jitter_ns: 0 }, &Rc::new(Struck::default()));
    let host = network.add_host();
    let options = Options {
        memory_bytes,
        engines: 0,
        pace: Pace::AT_ONCE,
        look: [20 * MICROS, MILLIS / 4],
        ..Options::default()
    };
    Node::start(world, &network, host, NodeId(0), kinds, options)
}

/// The machine of a node.
pub struct Machine {
    world: World,
    setup: Setup,
    node: NodeId,
    serving: Rc<Serving>,
    session: SessionId,
    memory: Replay,
    /// The node's link, to it and from it.
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
    /// That of a node which [`start_node`] has started.
    ///
    /// # Errors
    /// No process serves the node, or it has as many sessions as it can.
    pub async fn open(node: &Node, setup: Setup) -> Result<Rc<Machine>, FabricError> {
        assert_eq!(node.options().pace, Pace::AT_ONCE, "a step of the node never waits");
        let world = node.world().clone();
        let Some(serving) = node.serving() else { return Err(FabricError::NodeDied(node.id())) };
        let waiting = Rc::new(Waiting::default());
        // One session for all that is run here. It is in no turn: what runs is over at once.
        serving.post(Letter::Open(world.start_process(), Rc::clone(&waiting)));
        let session = waiting.taken().await;
        let session =
            session.ok_or_else(|| FabricError::Refused("the node has all the sessions it can".to_owned()))?;
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

    /// Another client, at the machines in turn, with a connection of its own.
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

    /// What went over its link so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic.get()
    }

    /// What is modelled.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// When a NIC has done what it was asked now.
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

    /// Writes to the retire ring that follow a chain. Nobody waits for them, but they keep busy what runs chains.
    fn posted(&self, reply: &Reply) -> u64 {
        match self.setup.given_back {
            GivenBack::ByChain => u64::from(reply.retired()),
            GivenBack::ByReport => 0,
        }
    }

    /// When a core of the CPU has.
    fn done_by_core(&self, accesses: u64, moved: u64, checksummed: u64) -> Nanos {
        let inputs = &self.setup.inputs;
        let busy = inputs.core_message_ns + accesses * inputs.core_access_ns + inputs.crc_ns(checksummed);
        let arrived = self.nic.pass(self.world.now(), inputs.nic_op_ps);
        self.cores.pass(arrived, busy * 1_000 + moved * inputs.core_copy_ps)
    }

    /// When a core of the BlueField has.
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

    /// Runs a chain, now, and tells when what runs chains here will have done it.
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

    /// Has a store's service answer a call, now.
    fn answer(&self, service: ServiceId, request: &[u8], answer: &mut Vec<u8>) -> Result<(), String> {
        let (key, asked) = addressed(service, request)?;
        let served = self.serving.served(key)?;
        let mut attended = served.try_attend().expect("calls and steps of the node are at one instant each");
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

/// One client's connection to a node's machine.
pub struct Client {
    machine: Rc<Machine>,
    sender: Rc<Sender>,
    number: u32,
    /// Told with the next request.
    retired: RefCell<Vec<(Key, Addr)>>,
    /// Buffers that chains have retired and that this client has yet to report, where that is the client's.
    unreported: Cell<u64>,
}

/// Bytes by which a buffer is named that is given back.
const RETIRED: u64 = 8;

impl Client {
    /// A request of so many bytes on the wire that takes `extra_ns` more than a verb; what `serve` does when it has
    /// arrived; and an answer of as many bytes as that says, when that says.
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

    /// Bytes of what is told with a request. It counts as told then.
    fn told(&self) -> u64 {
        RETIRED * (self.retired.borrow().len() as u64 + self.unreported.take())
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.machine.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
    }

    /// Asks the node itself: its catalog, which no model has a time for.
    async fn ask(&self, request: &[u8], answer: &mut Vec<u8>) -> Result<(), FabricError> {
        let ask = crate::node::parse(request).map_err(FabricError::Refused)?;
        let waiting = Rc::new(Waiting::default());
        self.machine.serving.post(Letter::AskedDirectly(ask, Rc::clone(&waiting)));
        let answered = waiting.taken().await.map_err(FabricError::Refused)?;
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
                "a NIC of platform '{}' has no PRISM operations: choose prism-sw, prism-hw or bluefield",
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
        let bytes = request_bytes(view, trailing, is_one_sided) + self.told();
        let serve = || {
            let done = self.machine.carry_out(view, reply);
            if self.machine.setup.given_back == GivenBack::ByReport {
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
        let bytes = framed(request.len() as u64) + self.told();
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
