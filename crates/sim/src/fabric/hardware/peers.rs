//! Machines that are nodes and clients at once, modelled with a [`Cluster`], as those of FaSST.
//!
//! Each machine runs a node, and threads with a core each. A thread posts READs on connections to other machines, and
//! sends calls as datagrams. The thread with the same number serves them at the other machine. Requests that a machine
//! sends and serves pass the same NIC and the same cores.
//!
//! The code of an exchange is a straight line: each step waits for the part of a machine that it passes.
//!
//! Invariant: the real node serves a call, and a READ returns its real bytes; only time is modelled.
//! Invariant: a call takes effect when its request is in the memory of the machine that handles it. A READ copies all
//! of its bytes at one instant, since no client of this model writes.

use super::{Machine, Machines, PoolClient};
use crate::hardware::{ACKNOWLEDGEMENT, Cluster, OP, POSTLIST, SHARED_LINES};
use crate::nic::{Packets, Port, Posting, Used};
use crate::station::Station;
use crate::world::{Nanos, World};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::wire::Code;
use farside_remote::{Addr, By, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// How threads use the queue pairs of their machines.
#[derive(Clone, Copy, Debug)]
pub struct Peering {
    /// The machines.
    pub cluster: Cluster,
    /// Number of connections of a thread to each machine. With several, a READ takes a random one, as if there were as
    /// many more machines.
    pub connections: u32,
    /// Number of threads that share each connection, under a lock.
    pub sharers: u32,
    /// How often doorbells are rung.
    pub doorbells: Doorbells,
    /// Number of bytes of a request and of a response that do not count, since the paper's packets lack them.
    pub omitted: [u64; 2],
}

/// How often threads ring the doorbell of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// Once for all messages that are posted on the queue pair at the same time, up to [`POSTLIST`].
    ForList,
    /// Once for each message.
    ForEach,
}

/// Numbers of doorbells and messages of all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rung {
    /// Doorbells for requests, and requests: READs and calls.
    pub requests: [u64; 2],
    /// Doorbells for responses, and responses.
    pub responses: [u64; 2],
}

/// Machines that are nodes and clients at once. The nodes have the numbers from 0.
pub struct Peers {
    world: World,
    peering: Peering,
    machines: Box<[Peer]>,
    /// Requests to the nodes' catalogs, which take no time, and chains that change leases.
    catalogs: Rc<PoolClient>,
    /// Whether calls take time.
    are_timed: Cell<bool>,
    rung: Cell<Rung>,
}

struct Peer {
    machine: Rc<Machine>,
    port: Port,
    threads: Box<[Core]>,
    /// The locks of shared connections, by the connections' numbers: of the queue pair, and of its completion queue.
    locks: RefCell<HashMap<u32, Rc<[Station; 2]>>>,
}

/// Core of a thread, and the burst of requests that it has taken up last: the virtual time at which the burst begins,
/// and its number of requests.
struct Core {
    station: Station,
    burst: Cell<(Nanos, u64)>,
}

impl Core {
    fn new() -> Core {
        Core { station: Station::new(1), burst: Cell::default() }
    }
}

impl Peers {
    /// Makes the machines of these nodes clients of each other.
    pub fn new(world: &World, machines: &Rc<Machines>, peering: Peering) -> Rc<Peers> {
        let Cluster { threads, .. } = peering.cluster;
        let peer = |machine: &Rc<Machine>| Peer {
            machine: Rc::clone(machine),
            port: Port::new(world, peering.cluster),
            threads: (0..threads).map(|_| Core::new()).collect(),
            locks: RefCell::default(),
        };
        Rc::new(Peers {
            world: world.clone(),
            peering,
            machines: machines.nodes.iter().map(peer).collect(),
            catalogs: machines.connect(),
            are_timed: Cell::new(true),
            rung: Cell::default(),
        })
    }

    /// Decides whether calls take time from now on. Those that load or check a store before or after a measurement need
    /// none.
    pub fn set_timed(&self, are_timed: bool) {
        self.are_timed.set(are_timed);
    }

    /// Returns a fabric for one task of a thread.
    pub fn task(self: &Rc<Peers>, machine: u32, thread: u32) -> Task {
        Task { peers: Rc::clone(self), machine, thread, list: Cell::default() }
    }

    /// Number of the machines.
    pub fn count(&self) -> u32 {
        self.machines.len() as u32
    }

    /// Numbers of doorbells and messages since the start.
    pub fn rung(&self) -> Rung {
        self.rung.get()
    }

    /// Work of all NICs since the start, and the number of connections that they had to fetch.
    pub fn used(&self) -> (Used, u64) {
        let mut all = Used::default();
        for Peer { port, .. } in &self.machines {
            let used = port.used();
            all.ends += used.ends;
            for direction in 0..2 {
                all.link[direction] += used.link[direction];
                all.pcie[direction] += used.pcie[direction];
            }
        }
        (all, self.machines.iter().map(|peer| peer.port.misses()).sum())
    }

    fn at(&self, node: NodeId) -> Result<&Peer, FabricError> {
        self.machines.get(node.0 as usize).ok_or(FabricError::NoSuchNode(node))
    }

    async fn fly(&self) {
        self.world.sleep(self.peering.cluster.inputs.verb_ns / 2).await;
    }

    /// Keeps a core busy.
    async fn work(&self, core: &Core, busy: Nanos) {
        let done = core.station.pass(self.world.now(), busy * 1_000);
        self.world.sleep_until(done).await;
    }

    /// Keeps a core busy with a queue under a lock. Before that, the core waits for the lock.
    async fn work_under(&self, lock: &Station, core: &Core, busy: Nanos) {
        while !core.station.is_idle(self.world.now()) {
            self.world.sleep_until(core.station.free_at()).await;
        }
        let now = self.world.now();
        let done = lock.pass(now, busy * 1_000);
        core.station.pass(now, (done - now) * 1_000);
        self.world.sleep_until(done).await;
    }

    fn count_rung(&self, add: impl FnOnce(&mut Rung)) {
        let mut rung = self.rung.get();
        add(&mut rung);
        self.rung.set(rung);
    }
}

/// Fabric of one task of a thread. Its clones are those of other tasks.
#[derive(Clone)]
pub struct Task {
    peers: Rc<Peers>,
    machine: u32,
    thread: u32,
    /// The list of calls that was posted last: its virtual time, and its number of calls.
    list: Cell<(Nanos, u64)>,
}

impl Task {
    fn here(&self) -> &Peer {
        &self.peers.machines[self.machine as usize]
    }

    fn core_of<'p>(&self, peer: &'p Peer) -> &'p Core {
        &peer.threads[self.thread as usize]
    }

    /// Number, at one machine, of a connection of this thread to another machine.
    fn connection(&self, to: u32, copy: u32) -> u32 {
        let Peering { connections, sharers, cluster, .. } = self.peers.peering;
        (to * cluster.threads + self.thread / sharers) * connections + copy
    }

    /// Number, at each machine, of the thread's queue pair for datagrams.
    fn datagrams(&self) -> u32 {
        u32::MAX - self.thread
    }

    /// Decides whether a call that is posted now has a doorbell. Calls of one batch are posted at the same time.
    fn posting(&self) -> Posting {
        let now = self.peers.world.now();
        let (at, len) = self.list.get();
        let is_in_list =
            self.peers.peering.doorbells == Doorbells::ForList && at == now && (1..POSTLIST).contains(&len);
        self.list.set((now, if is_in_list { len + 1 } else { 1 }));
        if is_in_list { Posting::Listed } else { Posting::Doorbell }
    }

    /// Keeps the thread's core busy with half of the work of verbs on a connection: their post, or their completion.
    async fn half_of_verbs(&self, connection: u32, half: usize, verbs: u64) {
        let Peers { peering, .. } = &*self.peers;
        let Cluster { core_verb_ns, doorbell_ns, line_ns, .. } = peering.cluster;
        let busy = verbs * core_verb_ns / 2 + if half == 0 { doorbell_ns } else { 0 };
        let core = self.core_of(self.here());
        if peering.sharers == 1 {
            return self.peers.work(core, busy).await;
        }
        let new = || Rc::new([Station::new(1), Station::new(1)]);
        let locks = Rc::clone(self.here().locks.borrow_mut().entry(connection).or_insert_with(new));
        self.peers.work_under(&locks[half], core, busy + SHARED_LINES[half] * line_ns).await;
    }

    /// Handles a request at the other machine. Returns once the response is posted, and whether that took a doorbell:
    /// the responses to requests that a core has taken up together share one.
    async fn handle(&self, core: &Core, busy: Nanos) -> Posting {
        let Peers { world, peering, .. } = &*self.peers;
        let (now, (begins, len)) = (world.now(), core.burst.get());
        let is_in_list =
            peering.doorbells == Doorbells::ForList && now <= begins && (1..POSTLIST).contains(&len);
        let busy = busy + if is_in_list { 0 } else { peering.cluster.doorbell_ns };
        let done = core.station.pass(now, busy * 1_000);
        core.burst.set(if is_in_list { (begins, len + 1) } else { (done - busy, 1) });
        self.peers.count_rung(|rung| {
            rung.responses[0] += u64::from(!is_in_list);
            rung.responses[1] += 1;
        });
        world.sleep_until(done).await;
        if is_in_list { Posting::Listed } else { Posting::Doorbell }
    }
}

impl Fabric for Task {
    /// Runs a chain of READs, which is one list on a connection. A chain with another op is one of a lease: it takes no
    /// part of these machines, as requests to the catalogs do.
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        const KIND: Packets = Packets::Connected;
        let peers = &*self.peers;
        let (here, there) = (self.here(), peers.at(node)?);
        let view = chain.view();
        if view.ops().any(|op| op.code() != Code::Read) {
            return peers.catalogs.run(node, chain, reply).await;
        }
        chain.note_posted();
        let verbs = view.len() as u64;
        let copies = peers.peering.connections;
        let copy = if copies == 1 { 0 } else { peers.world.random().below(copies.into()) as u32 };
        let (connection, other_end) = (self.connection(node.0, copy), self.connection(self.machine, copy));

        self.half_of_verbs(connection, 0, verbs).await;
        peers.count_rung(|rung| {
            rung.requests[0] += 1;
            rung.requests[1] += verbs;
        });
        here.port.take(Posting::Doorbell, KIND).await;
        for _ in 1..verbs {
            here.port.take(Posting::Listed, KIND).await;
        }
        here.port.start(connection, verbs).await;
        for _ in 0..verbs {
            here.port.send(OP, KIND).await;
        }
        peers.fly().await;

        for _ in 0..verbs {
            there.port.receive(OP, KIND).await;
        }
        there.port.start(other_end, verbs).await;
        let by = By::itself(there.machine.session);
        there.machine.memory.run_at_once(|memory| farside_remote::run(memory, by, view, reply));
        let lens = (0..reply.len()).map(|op| reply.output(op).len() as u64);
        for len in lens.clone() {
            there.port.read(len).await;
            there.port.send(ACKNOWLEDGEMENT + len, KIND).await;
        }
        peers.fly().await;

        for len in lens {
            here.port.receive(ACKNOWLEDGEMENT + len, KIND).await;
            here.port.write(len).await;
        }
        self.half_of_verbs(connection, 1, verbs).await;
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        const KIND: Packets = Packets::Datagrams;
        let peers = &*self.peers;
        if service == ServiceId::NODE {
            return peers.catalogs.call(node, service, request, answer).await;
        }
        let (here, there) = (self.here(), peers.at(node)?);
        if !peers.are_timed.get() {
            return there.machine.answer(service, request, answer).map_err(FabricError::Refused);
        }
        let Peering { cluster, omitted, .. } = &peers.peering;
        let Cluster { inputs, doorbell_ns, .. } = cluster;
        // Work without doorbells. The caller's core has half of it, before the request and after the response.
        let work = inputs.core_message_ns.saturating_sub(2 * doorbell_ns);

        let posting = self.posting();
        let rings = posting == Posting::Doorbell;
        peers.count_rung(|rung| {
            rung.requests[0] += u64::from(rings);
            rung.requests[1] += 1;
        });
        peers.work(self.core_of(here), work / 4 + if rings { *doorbell_ns } else { 0 }).await;
        here.port.take(posting, KIND).await;
        here.port.start(self.datagrams(), 1).await;
        let asked = (request.len() as u64).saturating_sub(omitted[0]);
        here.port.send(asked, KIND).await;
        peers.fly().await;

        there.port.receive(asked, KIND).await;
        there.port.start(self.datagrams(), 1).await;
        there.port.deliver(asked).await;
        peers.world.sleep(inputs.two_sided_ns / 2).await;
        let before = there.machine.memory.bytes_read();
        let answered = there.machine.answer(service, request, answer);
        let read = there.machine.memory.bytes_read() - before;
        let moved = read.max((request.len() + answer.len()) as u64);
        let service = &there.machine.setup.service;
        let more = service.accesses * inputs.core_access_ns
            + inputs.crc_ns((service.checksummed)(request, read))
            + moved * inputs.core_copy_ps / 1_000;
        let posting = self.handle(self.core_of(there), work / 2 + more).await;
        there.port.take(posting, KIND).await;
        let returned = (answer.len() as u64).saturating_sub(omitted[1]);
        there.port.send(returned, KIND).await;
        peers.fly().await;

        here.port.receive(returned, KIND).await;
        here.port.deliver(returned).await;
        peers.world.sleep(inputs.two_sided_ns / 2).await;
        peers.work(self.core_of(here), work / 4).await;
        answered.map_err(FabricError::Refused)
    }

    /// No client of this model has buffers.
    fn retire(&self, _node: NodeId, _key: Key, _buffer: Addr) {}

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::CALLS.and(Capabilities::WHOLE_LINES)
    }
}

impl Clock for Task {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.peers.world.now())
    }

    fn wall(&self) -> Duration {
        self.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.peers.world.sleep(crate::world::nanos(duration))
    }
}
