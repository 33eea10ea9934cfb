//! Simulates FaSST's calls, and READs, under closed loops of tasks on machines that are nodes and clients at once
//! (Kalia et al., OSDI 2016).
//!
//! Each thread of each machine has several tasks. A task sends a batch of requests, each to another machine, waits for
//! all responses, and goes on. Calls are those of [`Echo`], so that the paper's batches, packets and handlers run.
//! READs are chains of one READ.
//!
//! Invariant: each response is checked. A READ returns the bytes of its address.

use super::STORE;
use farside_bench::report::Latencies;
use farside_remote::clock::Clock;
use farside_remote::control::Ask;
use farside_remote::draws::Draws;
use farside_remote::service::Extent;
use farside_remote::{Addr, BoundedPtr, ChainBuf, Fabric, NodeId, Reply, read};
use farside_sim::fabric::hardware::peers::{Doorbells, Peering, Peers, Rung, Task};
use farside_sim::fabric::hardware::{Machines, Setup, start_node};
use farside_sim::hardware::{Cluster, Distance, Platform, Testbed};
use farside_sim::nic::Used;
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, Nanos, SECONDS, World};
use farside_systems::members::{self, New};
use farside_systems::raw;
use farside_systems::registry;
use farside_systems::rpc::echo::{self, Asking, Echo, EchoKind};
use farside_systems::store;
use farside_systems::system::{Options, Sizing, System as _};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// A workload: the machines, and the operations of their tasks.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The machines' hardware.
    pub cluster: Cluster,
    /// Number of machines of the experiment, at least 2.
    pub machines: u32,
    /// Number of machines that issue operations. The others only serve them.
    pub issuing: u32,
    /// Number of threads of a machine that issue operations.
    pub threads: u32,
    /// Number of tasks of a thread.
    pub tasks: u32,
    /// Number of requests that a task sends at the same time, each to another machine.
    pub batch: u32,
    /// Length in bytes of what a request returns.
    pub len: u32,
    /// The requests.
    pub requests: Requests,
    /// Number of connections of a thread to each machine.
    pub connections: u32,
    /// Number of threads that share each connection.
    pub sharers: u32,
    /// How often doorbells are rung.
    pub doorbells: Doorbells,
}

/// Requests of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// One call. Its request has [`REQUEST_LEN`] bytes.
    Calls(Headers),
    /// This number of READs, one after the other, as if each READ returned the address of the next.
    Reads(u32),
}

/// Headers of a call's packets, which the model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    /// Those of the paper: an immediate, and 4 bytes for each request.
    Paper,
    /// Those of this project.
    Own,
}

/// Length of a call's request in bytes.
pub const REQUEST_LEN: usize = 32;

impl Headers {
    /// Number of bytes of a request and of a response that do not count, for packets with one request: this project's
    /// headers have 24 bytes for a packet and 8 for a request in it, and a request to a store has 8 more.
    pub(crate) const fn omitted(self) -> [u64; 2] {
        match self {
            Headers::Paper => [8 + 24 + 8 - 4, 24 + 8 - 4],
            Headers::Own => [0, 0],
        }
    }
}

impl Load {
    /// The load of FaSST's public code (`app/rpc-test/rpc-test.json`), on this number of machines of a cluster: all
    /// threads of all machines have 20 tasks, with a request in flight each. Requests and responses have 32 bytes.
    pub const fn paper(cluster: Cluster, machines: u32, requests: Requests) -> Load {
        Load {
            cluster,
            machines,
            issuing: machines,
            threads: cluster.threads,
            tasks: 20,
            batch: 1,
            len: REQUEST_LEN as u32,
            requests,
            connections: 1,
            sharers: 1,
            doorbells: Doorbells::ForList,
        }
    }

    /// Number of connections at a machine.
    pub const fn connections_of_machine(&self) -> u32 {
        (self.machines - 1) * self.cluster.threads.div_ceil(self.sharers) * self.connections
    }

    /// Number of tasks of all machines.
    const fn tasks_of_all(&self) -> u64 {
        self.issuing as u64 * self.threads as u64 * self.tasks as u64
    }

    fn peering(&self) -> Peering {
        let omitted = match self.requests {
            Requests::Calls(headers) => headers.omitted(),
            Requests::Reads(_) => [0, 0],
        };
        let Load { cluster, connections, sharers, doorbells, .. } = *self;
        Peering { cluster, connections, sharers, doorbells, omitted }
    }

    /// # Errors
    /// There is no such load.
    fn check(&self) -> Result<(), String> {
        if self.machines < 2 || self.batch == 0 || self.batch >= self.machines {
            return Err(format!(
                "each of the {} requests of a batch goes to another machine, and there are {}",
                self.batch, self.machines
            ));
        }
        if self.issuing > self.machines || self.threads > self.cluster.threads {
            return Err("more machines or threads issue requests than there are".to_owned());
        }
        let lens =
            if matches!(self.requests, Requests::Reads(_)) { WORD..=LEN_MAX } else { WORD..=echo::LEN_MAX };
        let is_possible = lens.contains(&(self.len as usize)) && (self.len as usize).is_multiple_of(WORD);
        if is_possible { Ok(()) } else { Err(format!("no requests that return {} bytes", self.len)) }
    }
}

/// One measurement of a load.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Operations per second of a machine that issues them.
    pub ops_per_s: f64,
    /// Mean latency of a batch, in microseconds.
    pub mean_us: f64,
    /// Mean number of doorbells for the requests of a batch; of READs, for those that are posted together.
    pub doorbells: f64,
    /// Mean number of responses that share a doorbell; 0 if there are none.
    pub responses_per_doorbell: f64,
    /// Mean number of times that an operation had to wait for the state of a connection, at both ends.
    pub misses: f64,
    /// Share of the time in which parts of the machines' NICs are busy. The one that is near 1 limits the rate.
    pub busy: Busy,
    /// Mean number of bytes that an operation sends and receives on the links of all machines, with headers.
    pub link_bytes: f64,
}

/// Utilization of the parts of a NIC, from 0 to 1, as the mean of all machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Busy {
    /// The unit that starts ends of exchanges, and fetches the state of connections.
    pub unit: f64,
    /// The busier direction of the link.
    pub link: f64,
    /// The busier direction of PCIe.
    pub pcie: f64,
}

impl Busy {
    /// Utilization of the NICs of these machines in a time in which their work and their misses grew so.
    pub(crate) fn between(
        cluster: &Cluster,
        machines: u32,
        before: &(Used, u64),
        after: &(Used, u64),
        lasted: Nanos,
    ) -> Busy {
        type Count = fn(&(Used, u64)) -> u64;
        let grown = |of: Count| (of(after) - of(before)) as f64;
        let time_ps = lasted as f64 * 1e3 * f64::from(machines);
        let (op_ps, miss_ps) = (cluster.inputs.nic_op_ps as f64, cluster.inputs.qp_miss_ns as f64 * 1e3);
        let busier = |of: [Count; 2]| grown(of[0]).max(grown(of[1]));
        let on = |bytes: f64, gbit: u64| bytes * 8e3 / gbit as f64 / time_ps;
        Busy {
            unit: (grown(|(used, _)| used.ends) * op_ps + grown(|(_, misses)| *misses) * miss_ps) / time_ps,
            link: on(busier([|(used, _)| used.link[0], |(used, _)| used.link[1]]), cluster.link_gbit),
            pcie: on(busier([|(used, _)| used.pcie[0], |(used, _)| used.pcie[1]]), cluster.pcie_gbit),
        }
    }
}

/// Mean number of batches of a task in a warm-up and, at least, in a measurement.
const WARM_UP: u64 = 16;
const ROUNDS: u64 = 40;
/// Time in which all tasks begin.
const BEGIN: Duration = Duration::from_micros(20);

/// Bytes of a node's memory that READs read.
const MEMORY: u64 = 1 << 20;
/// Alignment of READs and of their lengths.
const WORD: usize = 8;
/// Length of the longest READ.
const LEN_MAX: usize = 4_096;
/// Name of the memory that READs read.
const PLAIN: &str = "plain";

/// Machines with a store of [`EchoKind`] on all nodes, and plain memory at each.
pub struct Bed {
    world: World,
    peers: Rc<Peers>,
    load: Load,
    /// The plain memory of each node.
    memory: Rc<[Extent]>,
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.world.end();
    }
}

impl Bed {
    /// Creates the machines and their stores.
    ///
    /// # Errors
    /// There is no such load, or a store cannot be created.
    pub fn new(load: Load, seed: u64) -> Result<Bed, String> {
        const QUOTA: u64 = 4 << 20;
        load.check()?;
        let (world, random) = (World::new(seed), Random::new(!seed));
        let Cluster { threads, link_gbit, inputs, .. } = load.cluster;
        let machines = load.machines;
        let testbed = Testbed { link_gbit, distance: Distance::Direct, cores: threads, machines };
        let setup = Setup { inputs, ..Setup::new(Platform::Rdma, testbed) };
        let kinds = || -> farside_sim::node::Kinds { Rc::new(registry::all_kinds) };
        let start = |id| start_node(&world, NodeId(id), kinds(), 40 << 20, &setup);
        let nodes: Vec<Node> = (0..machines).map(start).collect();
        let (name, kind) = (STORE.to_owned(), echo::KIND.to_owned());
        let quota = QUOTA * u64::from(machines);
        let new = New { name, kind, sizing: Sizing::default(), quota, members: nodes.len() };
        let (theirs, attempt) = (world.clone(), [random.bits(), random.bits()]);
        let opened = world.complete(SECONDS, async move {
            let machines = Machines::open(&nodes, setup).await.map_err(|error| error.to_string())?;
            let peers = Peers::new(&theirs, &machines, load.peering());
            let created = members::create(&peers.task(0, 0), peers.count(), &new, attempt).await;
            created.map_err(|error| error.to_string())?;
            let mut memory = Vec::new();
            for node in &nodes {
                memory.push(plain(node, &peers.task(0, 0), QUOTA).await?);
            }
            Ok::<_, String>((peers, memory.into()))
        });
        let opened = opened.unwrap_or_else(|| Err("the nodes did not respond within 1 s".to_owned()));
        let (peers, memory) = opened?;
        Ok(Bed { world, peers, load, memory })
    }

    /// Measures `operations` operations of all machines together, or more: each task sends `ROUNDS` batches on
    /// average.
    /// Before that, it sends `WARM_UP`, and each connection is used several times. Tasks begin at random times, since
    /// they would stay in step otherwise.
    ///
    /// # Errors
    /// An operation failed, or the operations did not complete in time.
    pub fn measure(&self, operations: u64) -> Result<Measured, String> {
        /// Longest mean time per operation of a task.
        const SLOWEST: Nanos = 1_000 * MICROS;
        let (world, load) = (&self.world, &self.load);
        let run = Rc::new(Run::default());
        let opened = world.complete(SECONDS, open(Rc::clone(&self.peers)));
        let members = opened.unwrap_or_else(|| Err("the store was not opened within 1 s".to_owned()))?;
        let members = Rc::new(members);
        for machine in 0..load.issuing {
            for thread in 0..load.threads {
                for task in 0..load.tasks {
                    let fabric = self.peers.task(machine, thread);
                    let (load, random, run) = (*load, world.random().fork(), Rc::clone(&run));
                    let (members, memory) = (Rc::clone(&members), Rc::clone(&self.memory));
                    run.tasks.set(run.tasks.get() + 1);
                    world.spawn(world.start_process(), async move {
                        fabric.sleep(BEGIN.mul_f64(random.share())).await;
                        let client = Client::of(fabric, (machine, task), load, &members, memory).await;
                        let done = match client {
                            Ok(client) => closed_loop(client, &random, &run).await,
                            Err(error) => Err(error),
                        };
                        if let Err(error) = done {
                            run.failed.borrow_mut().get_or_insert(error);
                        }
                        run.tasks.set(run.tasks.get() - 1);
                    });
                }
            }
        }
        let of_connections = u64::from(load.connections_of_machine()) * u64::from(load.issuing) * 2;
        let round = load.tasks_of_all() * u64::from(load.batch);
        let warm_up = (round * WARM_UP).max(of_connections);
        let operations = operations.max(round * ROUNDS);
        self.run_until(&run, warm_up, SLOWEST)?;
        let (since, before) = (world.now(), self.counted());
        run.done.set(0);
        run.latencies.replace(Latencies::new());
        self.run_until(&run, operations, SLOWEST)?;
        let measured = self.measured(&run, world.now() - since, before);
        run.is_over.set(true);
        world.run_while(world.now() + SECONDS, || run.tasks.get() > 0);
        if run.tasks.get() > 0 {
            return Err("the operations did not end within 1 s".to_owned());
        }
        Ok(measured)
    }

    /// Lets this number of operations complete.
    fn run_until(&self, run: &Run, operations: u64, slowest: Nanos) -> Result<(), String> {
        let until = self.world.now() + SECONDS + operations / self.load.tasks_of_all() * slowest;
        self.world.run_while(until, || run.done.get() < operations && run.failed.borrow().is_none());
        match run.failed.take() {
            Some(error) => Err(error),
            None if run.done.get() < operations => Err("the operations did not complete in time".to_owned()),
            None => Ok(()),
        }
    }

    fn counted(&self) -> (Rung, Used, u64) {
        let (used, misses) = self.peers.used();
        (self.peers.rung(), used, misses)
    }

    /// Returns what a run that goes on has done since a time, at which these were the counters.
    fn measured(&self, run: &Run, lasted: Nanos, before: (Rung, Used, u64)) -> Measured {
        let after = self.counted();
        let Load { cluster, batch, issuing, machines, .. } = self.load;
        let done = run.done.get() as f64;
        let grown = |of: fn(&(Rung, Used, u64)) -> u64| (of(&after) - of(&before)) as f64;
        let misses = grown(|(.., misses)| *misses);
        let responses =
            grown(|(rung, ..)| rung.responses[1]) / grown(|(rung, ..)| rung.responses[0]).max(1.0);
        let [sent, received] = [grown(|(_, used, _)| used.link[0]), grown(|(_, used, _)| used.link[1])];
        let busy = Busy::between(&cluster, machines, &(before.1, before.2), &(after.1, after.2), lasted);
        Measured {
            ops_per_s: done * SECONDS as f64 / lasted as f64 / f64::from(issuing),
            mean_us: run.latencies.borrow().mean_us(),
            doorbells: grown(|(rung, ..)| rung.requests[0]) * f64::from(batch)
                / grown(|(rung, ..)| rung.requests[1]),
            responses_per_doorbell: responses,
            misses: misses / done,
            busy,
            link_bytes: (sent + received) / done,
        }
    }
}

/// Creates plain memory at a node, with the address of each word in the word.
async fn plain(node: &Node, task: &Task, quota: u64) -> Result<Extent, String> {
    let (kind, name, parameters) = (raw::KIND.to_owned(), PLAIN.to_owned(), "{}".to_owned());
    node.answer(Ask::CreateStore { kind, name, parameters, quota }).await?;
    let found = store::fetch_of(task, node.id(), PLAIN, raw::KIND).await;
    let table = found.map_err(|error| error.to_string())?.extent();
    let slots = raw::SLOTS * size_of::<BoundedPtr>() as u64;
    let words = Extent { at: table.at + slots, len: MEMORY, ..table };
    if slots + MEMORY > table.len {
        return Err("the memory for READs has no room".to_owned());
    }
    let memory = node.memory();
    for at in (words.at..words.at + MEMORY).step_by(WORD) {
        memory.poke(at, &at.to_le_bytes());
    }
    Ok(words)
}

/// Opens the store of all nodes.
async fn open(peers: Rc<Peers>) -> Result<store::Members, String> {
    let opened = members::open(&peers.task(0, 0), peers.count(), STORE).await;
    opened.map_err(|error| error.to_string())
}

/// Operations of tasks that go on until the run is over.
#[derive(Default)]
struct Run {
    is_over: Cell<bool>,
    /// Number of tasks that have not stopped.
    tasks: Cell<u32>,
    /// Number of operations of the current measurement, and the latencies of batches.
    done: Cell<u64>,
    latencies: RefCell<Latencies>,
    /// The first error of any task.
    failed: RefCell<Option<String>>,
}

async fn closed_loop(mut client: Client, random: &Random, run: &Run) -> Result<(), String> {
    while !run.is_over.get() {
        let since = client.clock.now();
        client.perform(random).await?;
        run.latencies.borrow_mut().record(client.clock.now() - since);
        run.done.set(run.done.get() + u64::from(client.load.batch));
    }
    Ok(())
}

/// Client of one task.
struct Client {
    clock: Task,
    load: Load,
    /// The other machines. The first ones are those of the batch.
    others: Vec<u32>,
    kind: ClientKind,
}

enum ClientKind {
    Calls {
        echo: Box<Echo<Task>>,
        /// For each machine, its place among the members of the store.
        places: Vec<u64>,
    },
    Reads {
        memory: Rc<[Extent]>,
        lanes: Vec<Lane>,
    },
}

/// A READ that a task has in flight.
struct Lane {
    fabric: Task,
    chain: ChainBuf,
    reply: Reply,
}

impl Client {
    async fn of(
        fabric: Task,
        (machine, task): (u32, u32),
        load: Load,
        members: &store::Members,
        memory: Rc<[Extent]>,
    ) -> Result<Client, String> {
        let clock = fabric.clone();
        let kind = match load.requests {
            Requests::Calls(_) => {
                let list = members.whole().map_err(|error| error.to_string())?;
                let place = |node: u32| list.iter().position(|(at, _)| at.0 == node);
                let places: Option<Vec<usize>> = (0..load.machines).map(place).collect();
                let places = places.ok_or("the store has no member at a machine")?;
                let opened = EchoKind::open(fabric, members, &Options::NONE).await;
                let echo = opened.map_err(|error| error.to_string())?.another(task as u16);
                let places = places.into_iter().map(|place| place as u64).collect();
                ClientKind::Calls { echo: Box::new(echo), places }
            }
            Requests::Reads(_) => {
                let lane = |_| Lane { fabric: fabric.clone(), chain: ChainBuf::new(), reply: Reply::new() };
                ClientKind::Reads { memory, lanes: (0..load.batch).map(lane).collect() }
            }
        };
        let others = (0..load.machines).filter(|&other| other != machine).collect();
        Ok(Client { clock, load, others, kind })
    }

    /// Sends a batch, and checks the responses.
    async fn perform(&mut self, random: &Random) -> Result<(), String> {
        let Load { batch, len, requests, .. } = self.load;
        for place in 0..batch as usize {
            let rest = self.others.len() - place;
            self.others.swap(place, place + random.below(rest as u64) as usize);
        }
        match &mut self.kind {
            ClientKind::Calls { echo, places } => {
                let asking =
                    Asking { requests: batch as usize, request_len: REQUEST_LEN, response_len: len as usize };
                let mut to = self.others.iter().map(|&machine| places[machine as usize]);
                let draw = || to.next().expect("a batch has fewer requests than there are other machines");
                echo.ask(asking, draw).await.map_err(|error| error.to_string())
            }
            ClientKind::Reads { memory, lanes } => {
                let Requests::Reads(count) = requests else { unreachable!("the client is one of READs") };
                let reads = lanes.iter_mut().zip(&self.others).map(|(lane, &machine)| {
                    let (words, draws) = (memory[machine as usize], Draws(random.bits()));
                    lane.read(NodeId(machine), words, len, count, draws)
                });
                all(reads).await
            }
        }
    }
}

impl Lane {
    /// READs `len` bytes this many times, one after the other, and checks them.
    async fn read(
        &mut self,
        node: NodeId,
        words: Extent,
        len: u32,
        count: u32,
        mut draws: Draws,
    ) -> Result<(), String> {
        for _ in 0..count {
            let places = (MEMORY - u64::from(len)) / WORD as u64 + 1;
            let at = words.at + draws.next() % places * WORD as u64;
            let mut chain = self.chain.begin(words.key);
            let out = chain.also(read(Addr::new(at), len));
            self.fabric.run(node, &chain, &mut self.reply).await.map_err(|error| error.to_string())?;
            let bytes = self.reply.get(out).map_err(|status| format!("a READ was refused: {status:?}"))?;
            let expected = (at..at + u64::from(len)).step_by(WORD).flat_map(u64::to_le_bytes);
            if !bytes.iter().copied().eq(expected) {
                return Err(format!("a READ of {at} returned other bytes"));
            }
        }
        Ok(())
    }
}

/// Runs futures at the same time. Returns the first error, once all have completed.
async fn all<F: Future<Output = Result<(), String>>>(futures: impl Iterator<Item = F>) -> Result<(), String> {
    let mut left: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut outcome = Ok(());
    std::future::poll_fn(|context| {
        left.retain_mut(|future| match future.as_mut().poll(context) {
            Poll::Ready(done) => {
                if outcome.is_ok() {
                    outcome = done;
                }
                false
            }
            Poll::Pending => true,
        });
        if left.is_empty() { Poll::Ready(std::mem::replace(&mut outcome, Ok(()))) } else { Poll::Pending }
    })
    .await
}
