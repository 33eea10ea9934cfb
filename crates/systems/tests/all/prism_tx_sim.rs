//! PRISM-TX in the simulator: one to three nodes, client processes that die or are stopped, futures that are dropped,
//! replies that are lost, and clocks that differ. The committed transactions must be serializable, and strictly so in
//! stores with commit-wait. At the end, no key may be left with PW != C.

use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_sim::checker::Checker;
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::AnyFabric;
use farside_sim::fabric::direct::Direct;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::history::transaction::{History, Outcome, Seen, Step};
use farside_sim::memory::Pace;
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Kinds, Node, Options as NodeOptions};
use farside_sim::serializable::workload::Workload;
use farside_sim::serializable::{Transactions, Versions};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World, within};
use farside_systems::members::{self, New};
use farside_systems::registry::{self, AnyTxn, all_kinds};
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::prism_tx::KIND;
use farside_systems::txn::{Prepare, Transacting, Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const LEASE: Duration = Duration::from_millis(1);
const STORE: &str = "s";
const IDS: u16 = 5;

/// What a run is like.
#[derive(Clone, Copy, Debug)]
struct Plan {
    nodes: u32,
    /// Whether the clients' CPUs run the chains; else the nodes' engines do.
    is_direct: bool,
    clients: u32,
    tasks: u32,
    /// Number of transactions of each task.
    transactions: u32,
    workload: Workload,
    prepare: Prepare,
    /// Number of transactions of a client that commit at the same time.
    lanes: u16,
    deaths: u32,
    /// Number of times that a process is stopped for longer than its lease.
    stops: u32,
    drops: bool,
    /// One in so many replies is lost; none if 0.
    losses: u64,
    /// Largest difference between a clock and the correct time, in microseconds.
    skew: u64,
    has_commit_wait: bool,
}

impl Plan {
    /// Whether a client may not learn what became of its transaction.
    fn may_lose_outcomes(&self) -> bool {
        self.deaths + self.stops > 0 || self.losses > 0 || self.drops
    }

    fn of(seed: u64) -> Plan {
        let mut draws = Draws(seed ^ 0x7a5a);
        let workload = match draws.below(4) {
            0 => Workload::Bank { accounts: 3 },
            1 => Workload::Pairs { pairs: 1 },
            _ => Workload::Registers { keys: draws.pick(&[2, 3, 6]) },
        };
        Plan {
            nodes: 1 + draws.below(3) as u32,
            is_direct: draws.once_in(2),
            clients: 2 + draws.below(2) as u32,
            tasks: 1 + draws.below(2) as u32,
            transactions: draws.pick(&[15, 30]),
            workload,
            prepare: draws.pick(&[Prepare::Together, Prepare::Together, Prepare::Paper]),
            lanes: draws.pick(&[1, 2]),
            deaths: draws.pick(&[0, 2, 4]),
            stops: draws.pick(&[0, 0, 2]),
            drops: draws.once_in(3),
            losses: draws.pick(&[0, 0, 30]),
            skew: draws.pick(&[0, 10, 200]),
            has_commit_wait: draws.once_in(4),
        }
    }
}

/// Sessions of a process with all nodes. Loses replies.
struct Many {
    endpoints: Vec<AnyFabric>,
    clock: ProcessClock,
    losses: u64,
    draws: RefCell<Draws>,
}

#[derive(Clone)]
struct Reach(Rc<Many>);

impl Fabric for Reach {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let Many { endpoints, losses, draws, .. } = &*self.0;
        let is_lost = *losses > 0 && draws.borrow_mut().once_in(*losses);
        let runs = !is_lost || draws.borrow_mut().once_in(2);
        if runs {
            endpoints[node.0 as usize].run(node, chain, reply).await?;
        }
        match is_lost {
            true => Err(FabricError::Lost { node, ran: Ran::Unknown, reason: "the reply was lost".into() }),
            false => Ok(()),
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.0.endpoints[node.0 as usize].call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.0.endpoints[node.0 as usize].retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.0.endpoints[node.0 as usize].capabilities(node)
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        false // A chain whose reply is lost has run, or never will.
    }
}

impl Clock for Reach {
    fn now(&self) -> Duration {
        self.0.clock.now()
    }

    fn wall(&self) -> Duration {
        self.0.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.0.clock.sleep(duration)
    }
}

/// Events of a run, by name.
type Events = BTreeMap<&'static str, u64>;

struct Bench {
    world: World,
    nodes: Vec<Node>,
    network: Network,
    incarnations: Cell<u64>,
    plan: Plan,
    history: RefCell<History>,
    draws: RefCell<Draws>,
    tags: Cell<u64>,
    events: RefCell<Events>,
    failure: RefCell<Option<String>>,
}

fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

fn bytes_of(tag: u64, amount: i64) -> Vec<u8> {
    let mut bytes = [tag.to_le_bytes(), amount.to_le_bytes()].concat();
    // Items of two size classes.
    bytes.resize(if tag.is_multiple_of(4) { 100 } else { 16 + (tag % 24) as usize }, tag as u8);
    bytes
}

/// Returns the tag and the amount of a value; `None` if the bytes are not those of a value.
fn value_of(bytes: &[u8]) -> Option<(u64, i64)> {
    let tag = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let amount = i64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
    (bytes_of(tag, amount) == bytes).then_some((tag, amount))
}

/// Makes a delete a write. An absent value has no tag, so the checker cannot know whether a delete of unknown outcome
/// has made it.
fn without_delete(step: &mut Step, tag: &mut u64) {
    if let Step::Delete(key) = *step {
        *tag += 1;
        *step = Step::Write { key, tag: *tag };
    }
}

impl Bench {
    fn new(seed: u64, plan: Plan) -> Rc<Bench> {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 500 }, &struck);
        let kinds: Kinds = Rc::new(all_kinds);
        let nodes = (0..plan.nodes).map(|node| {
            let at = network.add_host();
            let options = NodeOptions {
                engines: 1,
                is_reliable: true,
                memory_bytes: 24 << 20,
                wall: Some(0),
                ..NodeOptions::default()
            };
            Node::start(&world, &network, at, NodeId(node), Rc::clone(&kinds), options)
        });
        Rc::new(Bench {
            nodes: nodes.collect(),
            network,
            incarnations: Cell::new(0),
            plan,
            history: RefCell::new(History::new()),
            draws: RefCell::new(Draws(seed)),
            tags: Cell::new(0),
            events: RefCell::default(),
            failure: RefCell::default(),
            world,
        })
    }

    async fn connect(&self, process: ProcessId, host: HostId, losses: u64) -> Result<Reach, FabricError> {
        let incarnation = self.incarnations.get() + 1;
        self.incarnations.set(incarnation);
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(0));
        let wrong = self.draws.borrow_mut().below(2 * self.plan.skew + 1) as i64 - self.plan.skew as i64;
        clock.jump_wall(wrong * MICROS as i64);
        let mut endpoints = Vec::new();
        for node in &self.nodes {
            let identity =
                Identity { identity: 1000 + u128::from(incarnation), incarnation, silence: 60 * MILLIS };
            endpoints.push(match self.plan.is_direct {
                true => AnyFabric::Direct(Direct::open(node, process, &clock, Pace::CPU).await?),
                false => AnyFabric::Session(Endpoint::open(node, 0, process, host, &clock, identity).await?),
            });
        }
        let draws = RefCell::new(Draws(self.draws.borrow_mut().next()));
        Ok(Reach(Rc::new(Many { endpoints, clock, losses, draws })))
    }

    async fn create(&self) {
        let reach =
            self.connect(self.world.start_process(), self.network.add_host(), 0).await.expect("nodes");
        let Plan { prepare, lanes, nodes, skew, has_commit_wait, .. } = self.plan;
        let transacting = Transacting {
            ids: Some(IDS),
            lanes: Some(lanes),
            prepare: Some(prepare),
            clock_error: has_commit_wait.then(|| Duration::from_micros(skew + 1)),
            ..Transacting::NONE
        };
        let sizing =
            Sizing { items: Some(20), value_len: 120, lease: Some(LEASE), transacting, ..Sizing::default() };
        let (quota, members) = (u64::from(nodes) * (6 << 20), nodes as usize);
        let new = New { name: STORE.into(), kind: KIND.into(), sizing, quota, members };
        members::create(&reach, nodes, &new, [1, 2]).await.expect("the nodes have memory");
    }

    async fn open(&self, process: ProcessId, host: HostId, losses: u64) -> Result<AnyTxn<Reach>, String> {
        let reach = self.connect(process, host, losses).await.map_err(|error| error.to_string())?;
        let entropy = self.draws.borrow_mut().next() | 1;
        let options = Options { entropy, ..Options::NONE };
        let opened = AnyTxn::open_in(reach, self.plan.nodes, STORE, &options).await;
        opened.map_err(|error| error.to_string())
    }

    fn fail(&self, why: String) {
        self.failure.borrow_mut().get_or_insert(why);
    }

    fn count(&self, txn: &AnyTxn<Reach>) {
        let mut events = self.events.borrow_mut();
        for (name, count) in txn.counters() {
            *events.entry(name).or_default() += count;
        }
    }

    /// Runs one transaction, and records it.
    async fn transact(&self, client: u32, txn: &mut AnyTxn<Reach>) -> Result<(), TxnError> {
        let ask = {
            let mut tag = self.tags.get();
            let mut ask = self.plan.workload.draw(self.world.random(), &mut tag);
            if self.plan.may_lose_outcomes() {
                ask.0.iter_mut().for_each(|step| without_delete(step, &mut tag));
            }
            self.tags.set(tag);
            ask
        };
        let call = self.history.borrow_mut().call(client, 0, ask.clone(), self.world.now());
        let done = self.steps(&ask.0, txn).await;
        let now = self.world.now();
        match done {
            Ok(outcome) => {
                self.history.borrow_mut().returned(call, outcome, now);
                Ok(())
            }
            Err(error) => {
                if error.ran() == Ran::No {
                    self.history.borrow_mut().returned(call, Outcome::Failed, now);
                }
                Err(error)
            }
        }
    }

    async fn steps(&self, steps: &[Step], txn: &mut AnyTxn<Reach>) -> Result<Outcome, TxnError> {
        let workload = self.plan.workload;
        txn.begin();
        let (mut read, mut seen) = (Vec::new(), Vec::new());
        let reads = steps.iter().filter_map(|step| match step {
            Step::Read(of) => Some(key(*of)),
            _ => None,
        });
        if self.draws.borrow_mut().once_in(2) {
            let keys: Vec<[u8; 8]> = reads.collect();
            txn.fetch(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>()).await?;
        }
        let is_register = matches!(workload, Workload::Registers { .. });
        let mut amounts = Vec::new().into_iter();
        for (at, step) in steps.iter().enumerate() {
            match *step {
                Step::Read(of) => {
                    let found = txn.read(&key(of)).await?;
                    let version = found.version.map(|version| version.0);
                    let value = match found.value {
                        None => None,
                        Some(bytes) => {
                            let value = value_of(bytes);
                            if value.is_none() {
                                self.fail(format!("a read of key {of} has returned other bytes"));
                            }
                            value
                        }
                    };
                    read.push(value.map_or(workload.start(), |(_, amount)| amount));
                    seen.push((version, value, false));
                }
                Step::Write { key: of, tag } => {
                    let are_all_read = !is_register && amounts.len() == 0;
                    if are_all_read && !seen.iter().any(|(_, _, is_write)| *is_write) {
                        let ask = farside_sim::history::transaction::Ask(steps.to_vec());
                        let Some(drawn) = workload.amounts(&ask, &read) else { return Ok(Outcome::Failed) };
                        amounts = drawn.into_iter();
                    }
                    let amount = amounts.next().unwrap_or(0);
                    txn.put(&key(of), &bytes_of(tag, amount))?;
                    seen.push((None, Some((tag, amount)), true));
                }
                Step::Delete(of) => {
                    txn.delete(&key(of))?;
                    seen.push((None, None, true));
                }
                Step::Append { .. } => unreachable!("step {at} is of no workload of this test"),
            }
        }
        let committed = txn.commit().await?.version.map_or(0, |version| version.0);
        let seen = seen.into_iter().map(|(version, value, is_write)| {
            let version = version.unwrap_or(committed);
            match (value, is_write) {
                (value, true) => Seen::Wrote { version, amount: value.map_or(0, |(_, amount)| amount) },
                (Some((tag, amount)), false) => Seen::Value { tag, version, amount },
                (None, false) => Seen::Absent { version },
            }
        });
        Ok(Outcome::Committed(seen.collect()))
    }

    /// Heals the store, reads all keys, and checks that nothing is left of any transaction.
    async fn audit(&self) -> Result<(), String> {
        let (process, host) = (self.world.start_process(), self.network.add_host());
        let reach = self.connect(process, host, 0).await.map_err(|error| error.to_string())?;
        let members =
            members::open(&reach, self.plan.nodes, STORE).await.map_err(|error| error.to_string())?;
        registry::heal(reach, &members, &Options::NONE).await.map_err(|error| format!("heal: {error}"))?;
        let mut txn = self.open(process, host, 0).await.map_err(|error| format!("the last open: {error}"))?;
        self.world.spawn(process, txn.keeper());
        let AnyTxn::PrismTx(client) = &txn else { panic!("a store of another kind") };
        let stat = client.stat().await.map_err(|error| format!("stat: {error}"))?;
        if stat.unsettled > 0 || stat.open > 0 {
            return Err(format!("transactions are left behind: {stat:?}"));
        }
        // Each key by a transaction that reads and writes it, and then all of them together.
        for number in 0..6 {
            let (tag, of) = (self.tags.get() + 1, key(number));
            self.tags.set(tag);
            let ask = vec![Step::Read(number), Step::Write { key: number, tag }];
            let ask = farside_sim::history::transaction::Ask(ask);
            let call = self.history.borrow_mut().call(9999, 0, ask, self.world.now());
            txn.begin();
            let found = txn.read(&of).await.map_err(|error| format!("the last read: {error}"))?;
            let version = found.version.map_or(0, |version| version.0);
            let value = found.value.map(|bytes| value_of(bytes).ok_or("other bytes"));
            let value = value.transpose().map_err(str::to_owned)?;
            let amount = value.map_or(self.plan.workload.start(), |(_, amount)| amount);
            txn.put(&of, &bytes_of(tag, amount)).map_err(|error| error.to_string())?;
            let committed = txn.commit().await.map_err(|error| format!("the last update: {error}"))?;
            let read = match value {
                Some((tag, amount)) => Seen::Value { tag, version, amount },
                None => Seen::Absent { version },
            };
            let wrote = Seen::Wrote { version: committed.version.map_or(0, |version| version.0), amount };
            self.history.borrow_mut().returned(call, Outcome::Committed(vec![read, wrote]), self.world.now());
        }
        Ok(())
    }
}

/// Runs a client process until its transactions are done. Opens the store again if the client has lost its lease.
async fn run_client(bench: Rc<Bench>, process: ProcessId, host: HostId, client: u32) {
    let mut left = bench.plan.transactions * bench.plan.tasks;
    for _ in 0..50 {
        if left == 0 {
            return;
        }
        let txn = match bench.open(process, host, bench.plan.losses).await {
            Ok(txn) => txn,
            Err(error) => {
                if error.contains("damaged") {
                    bench.fail(format!("an open has failed: {error}"));
                }
                bench.world.sleep(MILLIS).await;
                continue;
            }
        };
        let has_ended = Rc::new(Cell::new(false));
        let (keeper, ended) = (txn.keeper(), Rc::clone(&has_ended));
        bench.world.spawn(process, async move {
            keeper.await;
            ended.set(true);
        });
        let (running, done) = (Rc::new(Cell::new(bench.plan.tasks)), Rc::new(Cell::new(0)));
        for task in 0..bench.plan.tasks {
            let (bench, running, done) = (Rc::clone(&bench), Rc::clone(&running), Rc::clone(&done));
            let (mut txn, share) = (txn.another(), left.div_ceil(bench.plan.tasks));
            let spawned = Rc::clone(&bench);
            spawned.world.clone().spawn(process, async move {
                for _ in 0..share {
                    let drops = bench.plan.drops && bench.draws.borrow_mut().once_in(6);
                    let transaction = bench.transact(client * 8 + task, &mut txn);
                    let outcome = if drops {
                        let after = bench.draws.borrow_mut().below(40 * MICROS);
                        within(&bench.world, after, transaction).await.unwrap_or(Ok(()))
                    } else {
                        transaction.await
                    };
                    done.set(done.get() + 1);
                    match outcome {
                        Ok(()) | Err(TxnError::Conflict | TxnError::OutOfMemory) => {}
                        Err(TxnError::Damaged(what)) => {
                            bench.fail(format!("the store is damaged: {what}"));
                            break;
                        }
                        Err(TxnError::Fabric(_)) if bench.plan.losses > 0 => {}
                        Err(_) => break,
                    }
                }
                running.set(running.get() - 1);
            });
        }
        while running.get() > 0 {
            bench.world.sleep(100 * MICROS).await;
        }
        bench.count(&txn);
        drop(txn);
        while !has_ended.get() {
            bench.world.sleep(100 * MICROS).await;
        }
        left = left.saturating_sub(done.get().max(1));
    }
}

/// Runs a seed to its end. Returns the events of its clients.
///
/// # Errors
/// What is wrong.
fn run(seed: u64, plan: Plan) -> Result<Events, String> {
    let bench = Bench::new(seed, plan);
    let theirs = Rc::clone(&bench);
    let ended = bench.world.complete(20 * SECONDS, async move {
        let bench = theirs;
        bench.create().await;
        let running = Rc::new(Cell::new(0));
        let mut client = 0;
        let start = |client: u32| {
            let (process, host) = (bench.world.start_process(), bench.network.add_host());
            let (theirs, running) = (Rc::clone(&bench), Rc::clone(&running));
            running.set(running.get() + 1);
            let ended = Rc::clone(&running);
            // A process ends once: when its work is done, or when it dies.
            let is_counted = Rc::new(Cell::new(false));
            let counted = Rc::clone(&is_counted);
            let end = move || {
                if !counted.replace(true) {
                    ended.set(ended.get() - 1);
                }
            };
            bench.world.on_death(process, end.clone());
            bench.world.spawn(process, async move {
                run_client(theirs, process, host, client).await;
                end();
            });
            process
        };
        let mut processes: Vec<ProcessId> = Vec::new();
        for _ in 0..bench.plan.clients {
            processes.push(start(client));
            client += 1;
        }
        let (mut deaths, mut stops) = (bench.plan.deaths, bench.plan.stops);
        while running.get() > 0 {
            let pause = bench.draws.borrow_mut().below(600 * MICROS);
            bench.world.sleep(pause).await;
            let victim = bench.draws.borrow_mut().below(processes.len() as u64) as usize;
            if deaths > 0 && bench.draws.borrow_mut().once_in(2) {
                deaths -= 1;
                bench.world.kill(processes[victim]);
                processes[victim] = start(client);
                client += 1;
            } else if stops > 0 && bench.draws.borrow_mut().once_in(3) {
                stops -= 1;
                let (process, after) = (processes[victim], 1500 * MICROS);
                if bench.world.is_alive(process) && !bench.world.is_stopped(process) {
                    bench.world.stop(process);
                    let theirs = Rc::clone(&bench);
                    bench.world.at(bench.world.now() + after, move || {
                        if theirs.world.is_stopped(process) {
                            theirs.world.resume(process);
                        }
                    });
                }
            }
        }
        if let Err(why) = bench.audit().await {
            bench.fail(why);
        }
    });
    bench.world.end();
    let what = match (ended, bench.failure.borrow().as_ref()) {
        (_, Some(failure)) => Some(failure.clone()),
        (None, _) => Some("the run does not end".into()),
        _ => None,
    };
    if let Some(what) = what {
        return Err(format!("seed {seed}: {what}: {plan:?}"));
    }
    let history = bench.history.borrow();
    let checker = Transactions { versions: Versions::OfTransactions, real_time: plan.has_commit_wait };
    let checked = [checker.check(&history), plan.workload.check(&history)];
    for checked in checked {
        if let Some(what) = checked.violated.iter().chain(&checked.undecided).next() {
            return Err(format!("seed {seed}: {what}: {plan:?}: {:#?}", checked.window));
        }
    }
    Ok(bench.events.borrow().clone())
}

/// Tests that also detect broken variants which trials expose too rarely.
#[cfg(farside_mutants)]
pub(crate) const CASES: [(&str, fn()); 1] =
    [("each moment", a_client_may_die_at_each_moment_of_a_transaction)];

/// Kills clients that write several keys at each of two members, each client some nanoseconds later in its transaction
/// than the one before: so clients also die between two memory accesses of a chain.
#[test]
pub(crate) fn a_client_may_die_at_each_moment_of_a_transaction() {
    const KEYS: u64 = 6;
    const STEP: u64 = 40;
    const VICTIMS: u64 = 300;
    let plan = Plan {
        nodes: 2,
        is_direct: true,
        clients: 0,
        tasks: 1,
        transactions: 1,
        workload: Workload::Registers { keys: KEYS },
        prepare: Prepare::Together,
        lanes: 1,
        deaths: 0,
        stops: 0,
        drops: false,
        losses: 0,
        skew: 0,
        has_commit_wait: false,
    };
    let bench = Bench::new(1, plan);
    let world = bench.world.clone();
    let values_of = async |bench: &Bench| {
        let (process, host) = (bench.world.start_process(), bench.network.add_host());
        let reach = bench.connect(process, host, 0).await.expect("the nodes run");
        let members = members::open(&reach, bench.plan.nodes, STORE).await.expect("the store exists");
        registry::heal(reach, &members, &Options::NONE).await.expect("the nodes run");
        let mut txn = bench.open(process, host, 0).await.expect("an id is free");
        bench.world.spawn(process, txn.keeper());
        let mut values = Vec::new();
        for number in 0..KEYS {
            let value = txn.get(&key(number)).await.expect("nothing is in the way");
            values.push(value.map(|bytes| value_of(bytes).expect("a value").0));
        }
        txn.commit().await.expect("nothing is in the way");
        drop(txn);
        bench.world.sleep(MILLIS).await; // The client gives its id back.
        values
    };
    let sweeps = async move {
        bench.create().await;
        let (mut outcomes, mut last) = ([0; 2], None);
        for victim in 0..VICTIMS {
            let (process, host) = (bench.world.start_process(), bench.network.add_host());
            let mut txn = bench.open(process, host, 0).await.expect("an id is free");
            bench.world.spawn(process, txn.keeper());
            let has_committed = Rc::new(Cell::new(false));
            let committed = Rc::clone(&has_committed);
            bench.world.spawn(process, async move {
                txn.begin();
                (0..KEYS).for_each(|of| txn.put(&key(of), &bytes_of(victim, 0)).expect("a valid value"));
                committed.set(txn.commit().await.is_ok());
            });
            // The first one lives until it has claimed slots for the keys.
            bench.world.sleep(if victim == 0 { MILLIS } else { victim * STEP }).await;
            bench.world.kill(process);
            let values = values_of(&bench).await;
            let (is_new, is_old) = (values[0] == Some(victim), values[0] == last);
            assert!(
                values.iter().all(|value| *value == values[0]) && (is_new || is_old && !has_committed.get()),
                "victim {victim} after {last:?} leaves {values:?}"
            );
            outcomes[usize::from(is_new)] += 1;
            last = values[0];
        }
        outcomes
    };
    let [backed_out, done] = world.complete(20 * SECONDS, sweeps).expect("the sweep ends");
    world.end();
    println!("{backed_out} transactions were backed out, {done} were done");
    assert!(backed_out > VICTIMS / 10 && done > VICTIMS / 10, "clients die before and after the decision");
}

/// Number of seeds; `PRISM_TX_SEEDS` sets another one, and `PRISM_TX_SEED` the first.
fn seeds(default: u64) -> std::ops::Range<u64> {
    let from = |name| std::env::var(name).ok().and_then(|number: String| number.parse().ok());
    let first = from("PRISM_TX_SEED").unwrap_or(0);
    first..first + from("PRISM_TX_SEEDS").unwrap_or(default)
}

#[test]
fn transactions_are_serializable_whatever_happens_to_clients() {
    let (mut events, mut failures) = (Events::new(), Vec::new());
    for seed in seeds(60) {
        match run(seed, Plan::of(seed)) {
            Ok(seen) => seen.into_iter().for_each(|(name, count)| *events.entry(name).or_default() += count),
            Err(failure) => failures.push(failure),
        }
    }
    println!("{events:?}");
    assert!(failures.is_empty(), "{} failures: {}", failures.len(), failures[0]);
    let quiet: Vec<_> = events.iter().filter(|(_, count)| **count == 0).collect();
    assert!(quiet.is_empty(), "these events did not happen: {quiet:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let runs = [0; 2].map(|_| run(7, Plan::of(7)));
    assert_eq!(runs[0], runs[1]);
}

/// Number of seeds in which a mutant must fail.
#[cfg(farside_mutants)]
const HUNT: u64 = 2500;

#[cfg(farside_mutants)]
#[test]
#[ignore = "hunts each mutant by up to 2500 seeds: cargo xtask soak"]
fn soak_the_trial_finds_broken_variants() {
    use crate::mutants::SELDOM_IN_PRISM_TX;
    use farside_remote::mutant::Mutant;
    use farside_systems::lease;
    use farside_systems::txn::prism_tx::mutants;
    let is_frequent = |mutant: &Mutant| SELDOM_IN_PRISM_TX.iter().all(|(seldom, _)| seldom != mutant);
    let frequent = mutants::ALL.iter().copied().filter(is_frequent).chain([lease::mutants::TAKEN_UNFENCED]);
    let wanted = std::env::var("PRISM_TX_MUTANT").ok();
    assert!(wanted.as_ref().is_none_or(|wanted| frequent.clone().any(|mutant| mutant.name() == wanted)));
    let mut alive = Vec::new();
    for mutant in frequent {
        if wanted.as_ref().is_some_and(|wanted| wanted != mutant.name()) {
            continue;
        }
        Mutant::switch(Some(mutant));
        let found = seeds(HUNT).find_map(|seed| Some((seed, run(seed, Plan::of(seed)).err()?)));
        Mutant::switch(None);
        match found {
            Some((seed, failure)) => {
                println!("{mutant:?}: {}", failure.chars().take(200).collect::<String>());
                assert_eq!(run(seed, Plan::of(seed)).err(), None, "the correct code fails, too");
            }
            None => {
                println!("{mutant:?} LIVES");
                alive.push(mutant);
            }
        }
    }
    assert!(alive.is_empty(), "these mutants live: {alive:?}");
}
