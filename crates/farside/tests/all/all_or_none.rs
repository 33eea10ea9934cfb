//! Groups of keys of a FaSST store, which processes insert, read and delete as a whole over `tcp`, while other
//! processes are killed with packets in flight, and nodes lose their memory. FaSST's public code has this test, without
//! deaths.
//!
//! The tests check that
//! * a committed transaction finds all keys of a group with one value, or none of them, also between a death and its
//!   healing,
//! * each process finds all transactions that it has committed, and at most one whose outcome it does not know,
//! * nothing is left of any transaction in the end.
//!
//! A *strike* kills a process at one of its packets: before the packet is sent, or once the packet was carried out.

use crate::support::{PATIENCE, Process, command, run, serve, until};
use farside::Pool;
use farside::parts::{Endpoint, Keepers};
use farside_fabrics::executor::block_on;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::service::ADDRESS_SIZE;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_systems::members;
use farside_systems::rpc::fasst::FIRST_TYPE;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, System};
use farside_systems::txn::fasst::service::FasstKind;
use farside_systems::txn::fasst::{Fasst, request};
use farside_systems::txn::{Left, Txn, TxnError};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};

const STORE: &str = "groups";
const NODES: usize = 3;
/// Processes that work for the whole test.
const WORKERS: u64 = 2;
const GROUPS: u64 = 6;
/// Number of keys of a group.
const KEYS: u64 = 8;
/// Number of packets of a kind that a victim sends before the one at which it dies, at most.
const NTH_MAX: u64 = 12;
/// Environment variable that holds the role of a child.
const ROLE: &str = "FARSIDE_TEST_ALL_OR_NONE";

/// Packets of a transaction, by their first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
enum Packet {
    Get = request::GET,
    Lock = request::LOCK,
    Validate = request::VALIDATE,
    Log = request::LOG,
    Backup = request::BACKUP,
    Commit = request::COMMIT,
    LockGet = request::LOCK_GET,
}

impl Packet {
    const ALL: [Packet; 7] = [
        Packet::Get,
        Packet::LockGet,
        Packet::Lock,
        Packet::Validate,
        Packet::Log,
        Packet::Backup,
        Packet::Commit,
    ];
}

/// Plan to kill a process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Strike {
    packet: Packet,
    /// Number of earlier packets of this kind.
    nth: u64,
    /// Whether the packet is carried out before the process dies.
    is_carried_out: bool,
}

/// What a child does: transactions, until the file `stop` exists or the strike comes.
#[derive(Debug, Serialize, Deserialize)]
struct Role {
    pool: String,
    number: u64,
    stop: PathBuf,
    strike: Option<Strike>,
}

/// What a child has done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Done {
    /// Number of committed transactions that read a group.
    reads: u64,
    /// Number of those that found the group's keys.
    found: u64,
    /// Number of committed transactions that wrote a group.
    writes: u64,
    /// Number of times that the store was opened again.
    opened_again: u64,
}

#[test]
fn groups_are_whole_while_clients_and_nodes_die() {
    stressed(Packet::ALL.len() * 2, Duration::ZERO, Packet::ALL.len());
}

#[test]
#[ignore = "takes ten minutes: cargo xtask soak"]
fn soak_groups_are_whole_for_ten_minutes_of_deaths() {
    // Each minute, eleven clients die, and a node.
    stressed(120, Duration::from_secs(5), 12);
}

/// Plays the role of a child, if the environment has one.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("Linux supports it");
    Worker::new(serde_json::from_str(&role).expect("a role")).work();
}

/// Runs `rounds` rounds of at least `round` each. In each of them a client dies, and in every `node_every`th a node
/// does, too.
fn stressed(rounds: usize, round: Duration, node_every: usize) {
    let began = Instant::now();
    let mut nodes = Nodes::start();
    let mut workers: Vec<Child> = (0..WORKERS).map(|number| nodes.child(number, None)).collect();
    let mut draws = Draws(0x5eed);
    let mut struck: BTreeMap<(Packet, bool), u64> = BTreeMap::new();
    let (mut unhealed_reads, mut lost) = (0, 0);
    for number in 0..rounds {
        let until = Instant::now() + round;
        let strike = Strike {
            packet: Packet::ALL[number % Packet::ALL.len()],
            nth: draws.below(NTH_MAX),
            is_carried_out: number / Packet::ALL.len() % 2 == 1,
        };
        let before = reads(&mut workers);
        let mut victim = nodes.child(WORKERS + number as u64, Some(strike));
        let died = victim.dies();
        *struck.entry((strike.packet, strike.is_carried_out)).or_default() += 1;
        await_reads(&mut workers);
        unhealed_reads += reads(&mut workers) - before;
        if (number + 1) % node_every == 0 {
            nodes.lose(draws.below(NODES as u64) as usize);
            lost += 1;
        }
        nodes.heal();
        await_reads(&mut workers);
        // What the victim has acknowledged is there, and the transaction in flight is or is not.
        let counted = nodes.counted(WORKERS + number as u64);
        assert!((died..=died + 1).contains(&counted), "{strike:?}: {died} acknowledged, {counted} are there");
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }
    std::fs::write(nodes.folder.path().join("stop"), b"").expect("a file");
    let done: Vec<Done> = workers.iter_mut().map(Child::ends).collect();
    nodes.heal();
    assert_eq!(nodes.left(), Left { unsettled: 0, open: 0, outdated: 0 });
    println!(
        "{:.0?}: {done:?}; {} clients and {lost} nodes died, {unhealed_reads} transactions read between a client's \
         start and its healing",
        began.elapsed(),
        struck.values().sum::<u64>()
    );
    struck.iter().for_each(|((packet, is_carried_out), times)| {
        println!("  {times:4} {} {packet:?}", if *is_carried_out { "after" } else { "before" });
    });
    assert!(done.iter().all(|done| done.found > 0 && done.writes > 0), "{done:?}");
    assert!(rounds < 2 * Packet::ALL.len() || struck.len() == 2 * Packet::ALL.len(), "{struck:?}");
}

/// Number of transactions that the workers have read in.
fn reads(workers: &mut [Child]) -> u64 {
    workers.iter_mut().map(|worker| worker.done().reads).sum()
}

/// Waits until each worker has committed a transaction that reads, and which it has begun since.
fn await_reads(workers: &mut [Child]) {
    for worker in workers {
        let before = worker.done().reads;
        until("a worker reads on", || worker.done().reads >= before + 2);
    }
}

/// The nodes' processes, and a folder for their logs.
struct Nodes {
    processes: Vec<Process>,
    listens: Vec<String>,
    folder: tempfile::TempDir,
}

impl Nodes {
    fn start() -> Nodes {
        let folder = tempfile::tempdir().expect("a folder");
        let listens: Vec<String> = (0..NODES)
            .map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"))
            .collect::<Vec<_>>() // Each is another port.
            .iter()
            .map(|free| format!("tcp://{}", free.local_addr().expect("an address")))
            .collect();
        let mut nodes = Nodes { processes: Vec::new(), listens, folder };
        nodes.processes = (0..NODES).map(|index| nodes.serve(index)).collect();
        let create = ["store", "create", STORE, "--kind", "fasst", "--quota", "12MiB", "--items", "400"];
        nodes.farside(&[&create[..], &["--value-size", "16", "--backups", "1"]].concat());
        nodes
    }

    fn serve(&self, index: usize) -> Process {
        let at = |name: &str| self.folder.path().join(format!("{index}.{name}"));
        let arguments = ["--memory", "24MiB", "--listen", &self.listens[index]];
        let process = serve(&at("sock"), &arguments, at("log"));
        assert!(process.line().contains("serves"));
        process
    }

    /// Kills a node. Another process takes its place, with empty memory.
    fn lose(&mut self, index: usize) {
        self.processes[index].kill();
        self.processes[index] = self.serve(index);
    }

    fn pool(&self) -> String {
        self.listens.join(",")
    }

    /// Runs a command to its success.
    fn farside(&self, arguments: &[&str]) -> crate::support::Ran {
        let mut command = command();
        command.env("FARSIDE_POOL", self.pool()).args(arguments);
        run(command, b"").done()
    }

    fn heal(&self) {
        self.farside(&["heal", "--store", STORE]);
    }

    /// Number of transactions that a child has committed, as the store counts them.
    fn counted(&self, number: u64) -> u64 {
        let mut client = farside::Txn::open(&self.connect(), STORE).expect("the store exists");
        let value = client.run(|transaction| transaction.get(&counter(number))).expect("it is read");
        value.map_or(0, |value| u64::from_le_bytes(value.try_into().expect("eight bytes")))
    }

    fn left(&self) -> Left {
        let mut opened = Opened::new(&self.connect(), None, u64::MAX).expect("the store exists");
        opened.run(async |txn| txn.left().await).expect("the table is read")
    }

    fn connect(&self) -> Pool {
        farside::connect(&self.pool()).expect("the nodes serve")
    }

    fn child(&self, number: u64, strike: Option<Strike>) -> Child {
        let role = Role { pool: self.pool(), number, stop: self.folder.path().join("stop"), strike };
        let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
        command.args(["all_or_none::child", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, serde_json::to_string(&role).expect("plain data"));
        let log = self.folder.path().join(format!("child {number}.log"));
        Child { process: Process::start(command, log), done: Done::default() }
    }
}

/// A process that works.
struct Child {
    process: Process,
    done: Done,
}

impl Child {
    /// What the child has done so far.
    fn done(&mut self) -> Done {
        for line in self.process.lines_so_far() {
            self.hears(&line);
        }
        assert!(!self.process.has_ended(), "a worker has ended: {}", self.process.log());
        self.done
    }

    fn hears(&mut self, line: &str) {
        if let Some(done) = line.strip_prefix("@done ") {
            self.done = serde_json::from_str(done).expect("plain data");
        }
    }

    /// Waits until the child ends by itself. Returns what it has done.
    fn ends(&mut self) -> Done {
        self.hears_all();
        assert_eq!(self.process.ended(), Some(0), "{}", self.process.log());
        self.done
    }

    /// Waits until the child dies by its strike. Returns how many transactions it has committed with writes.
    fn dies(&mut self) -> u64 {
        let has_struck = self.hears_all();
        assert_eq!(self.process.ended(), None, "{}", self.process.log());
        assert!(has_struck, "the child died of something else: {}", self.process.log());
        self.done.writes
    }

    /// Hears what the child says until its end; panics after [`PATIENCE`]. Returns whether it has been struck.
    fn hears_all(&mut self) -> bool {
        let (mut has_struck, deadline) = (false, Instant::now() + PATIENCE);
        while let Some(line) = self.process.line_if_any() {
            self.hears(&line);
            has_struck |= line == "@struck";
            let is_late = Instant::now() >= deadline;
            assert!(!is_late, "still working after {PATIENCE:?}: {:?}; {}", self.done, self.process.log());
        }
        has_struck
    }
}

/// Sends a line to the parent.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{line}").and_then(|()| out.flush()).expect("the parent reads");
}

/// Key in which a process counts its committed transactions.
fn counter(number: u64) -> Vec<u8> {
    format!("counter {number}").into_bytes()
}

/// The sessions of a child, and its client.
struct Opened {
    endpoint: Rc<Endpoint>,
    txn: Fasst<Deadly>,
    keepers: Keepers,
}

impl Opened {
    fn new(pool: &Pool, strike: Option<Strike>, entropy: u64) -> Result<Opened, String> {
        let endpoint = pool.endpoint_over_all().map_err(|error| error.to_string())?;
        let endpoint = Rc::new(endpoint);
        let fabric = Deadly { inner: Rc::clone(&endpoint), strike, seen: Rc::default() };
        let options = Options { entropy, ..Options::NONE };
        let txn = block_on(&endpoint, async {
            let members = members::open(&endpoint, endpoint.nodes(), STORE).await?;
            FasstKind::open(fabric, &members, &options).await
        });
        let txn = txn.map_err(|error: StoreError| error.to_string())?;
        let keepers = Keepers::of_tasks([txn.keeper()]);
        Ok(Opened { endpoint, txn, keepers })
    }

    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Fasst<Deadly>) -> O) -> O {
        let Opened { endpoint, txn, keepers } = self;
        block_on(&**endpoint, keepers.beside(operation(txn)))
    }

    fn close(self) {
        let Opened { endpoint, txn, keepers } = self;
        drop(txn);
        block_on(&endpoint, keepers.end_within(Duration::from_secs(1)));
    }
}

/// A client that works until it dies, or until it is stopped.
struct Worker {
    role: Role,
    pool: Pool,
    draws: Draws,
    done: Done,
    /// Whether the outcome of the last transaction that writes is unknown.
    is_unsure: bool,
}

/// What a transaction does with a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Read,
    Insert([u8; 8]),
    Delete,
}

impl Worker {
    fn new(role: Role) -> Worker {
        let pool = farside::connect(&role.pool).expect("the nodes serve");
        let draws = Draws(role.number);
        Worker { role, pool, draws, done: Done::default(), is_unsure: false }
    }

    fn work(mut self) {
        let mut failing_since: Option<Instant> = None;
        let mut last = String::new();
        while !self.role.stop.exists() {
            let since = *failing_since.get_or_insert_with(Instant::now);
            assert!(since.elapsed() < PATIENCE, "no transaction runs: {last}");
            let entropy = (self.role.number << 32) + self.done.opened_again;
            match Opened::new(&self.pool, self.role.strike, entropy) {
                Ok(mut opened) => {
                    let before = self.done.reads + self.done.writes;
                    last = match self.transact(&mut opened) {
                        Ok(()) => "it was stopped".into(),
                        Err(error) => error.to_string(),
                    };
                    if self.done.reads + self.done.writes > before {
                        failing_since = None;
                    }
                    opened.close();
                }
                Err(error) => last = error,
            }
            self.done.opened_again += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        self.say_done();
    }

    fn say_done(&self) {
        say(&format!("@done {}", serde_json::to_string(&self.done).expect("plain data")));
    }

    /// Runs transactions until it is stopped.
    ///
    /// # Errors
    /// The store has to be opened again.
    fn transact(&mut self, opened: &mut Opened) -> Result<(), TxnError> {
        while !self.role.stop.exists() {
            let op = match self.draws.below(4) {
                0 | 1 => Op::Read,
                2 => Op::Insert(self.draws.next().to_le_bytes()),
                _ => Op::Delete,
            };
            let group = self.draws.below(GROUPS);
            match opened.run(async |txn| transaction(txn, group, op, self.role.number).await) {
                Ok(Seen::Group(values)) => {
                    let is_whole = values.windows(2).all(|pair| pair[0] == pair[1]);
                    assert!(is_whole, "group {group} is torn: {values:?}");
                    self.done.reads += 1;
                    self.done.found += u64::from(values[0].is_some());
                }
                Ok(Seen::Counter(count)) => {
                    let (least, most) = (self.done.writes, self.done.writes + u64::from(self.is_unsure));
                    assert!(
                        (least..=most).contains(&count),
                        "{count} of {least} to {most} transactions are there"
                    );
                    (self.done.writes, self.is_unsure) = (count + 1, false);
                }
                Err(TxnError::Conflict) => {
                    let pause = Duration::from_micros(self.draws.below(500));
                    let Opened { endpoint, keepers, .. } = opened;
                    block_on(&**endpoint, keepers.beside(endpoint.sleep(pause)));
                    continue;
                }
                Err(error) => {
                    self.is_unsure |= op != Op::Read && error.ran() != Ran::No;
                    return Err(error);
                }
            }
            self.say_done();
        }
        Ok(())
    }
}

/// What a transaction has seen.
enum Seen {
    /// The values of all keys of a group.
    Group(Vec<Option<Vec<u8>>>),
    /// The number of transactions that the process has committed before.
    Counter(u64),
}

async fn transaction(txn: &mut Fasst<Deadly>, group: u64, op: Op, number: u64) -> Result<Seen, TxnError> {
    txn.begin();
    let keys: Vec<Vec<u8>> = (0..KEYS).map(|key| format!("{group} {key}").into_bytes()).collect();
    if op == Op::Read {
        txn.fetch(&keys.iter().map(Vec::as_slice).collect::<Vec<_>>()).await?;
        let mut values = Vec::new();
        for key in &keys {
            values.push(txn.get(key).await?.map(<[u8]>::to_vec));
        }
        txn.commit().await?;
        return Ok(Seen::Group(values));
    }
    let counter = counter(number);
    let count = txn.get_to_write(&counter).await?;
    let count = count.map_or(0, |value| u64::from_le_bytes(value.try_into().expect("eight bytes")));
    txn.put(&counter, &(count + 1).to_le_bytes())?;
    for key in &keys {
        match op {
            Op::Insert(value) => txn.put(key, &value)?,
            _ => txn.delete(key)?,
        }
    }
    txn.commit().await?;
    Ok(Seen::Counter(count))
}

/// A fabric that kills its process at one of its packets.
struct Deadly {
    inner: Rc<Endpoint>,
    strike: Option<Strike>,
    /// Number of packets so far, by their first request.
    seen: Rc<RefCell<BTreeMap<u8, u64>>>,
}

impl Fabric for Deadly {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.inner.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let strike =
            self.strike.filter(|strike| service != ServiceId::NODE && self.is_struck(strike, request));
        let Some(strike) = strike else { return self.inner.call(node, service, request, answer).await };
        if strike.is_carried_out {
            self.inner.call(node, service, request, answer).await?;
        }
        say("@struck");
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            .expect("a signal to oneself");
        // The signal may reach another thread first.
        std::thread::sleep(PATIENCE);
        unreachable!("the process is dead")
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

impl Deadly {
    /// Counts a packet. Returns whether it is the one of the strike.
    fn is_struck(&self, strike: &Strike, request: &[u8]) -> bool {
        let Some(kind) = request.get(ADDRESS_SIZE + FIRST_TYPE) else { return false };
        let mut seen = self.seen.borrow_mut();
        let count = seen.entry(*kind).or_default();
        *count += 1;
        *kind == strike.packet as u8 && *count == strike.nth + 1
    }
}

impl Clock for Deadly {
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
