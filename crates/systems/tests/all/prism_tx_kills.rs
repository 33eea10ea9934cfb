//! Clients of PRISM-TX that are killed while they commit transactions in shared memory. The node and each victim are
//! separate processes.
//!
//! The tests check that, after each death:
//! * the sum of the bank's accounts is that of the beginning, in every transaction,
//! * every acknowledged transfer is there, and the one in progress is there as a whole or not at all,
//! * no key stays locked for longer than a lease, a fence and a recovery take,
//! * other clients go on meanwhile,
//! * healing leaves no unsettled key and no open log entry.
//!
//! A *strike* kills a client at one memory access. The tests count the strikes by the purpose of the access.

use crate::support::bank::{ACCOUNTS, Bank, LEASE, OPENING, parameters, table_of};
use crate::support::deadly_bank::{Phase, Strike};
use crate::support::deadly_index::Table;
use crate::support::process::{Child, Role, alone};
use crate::support::script;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::Mapping;
use farside_fabrics::shm;
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use farside_systems::txn::prism_tx::KIND;
use farside_systems::txn::prism_tx::service::PrismTxKind;
use rustix::process::Signal;
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SEED: u64 = 0x5eed;
const QUOTA_MIB: u64 = 2;
/// Longest time for which a key of a dead client may stay locked: its lease, the fence and the recovery. A busy machine
/// may run none of the processes for a while.
const LOCKED_MAX: Duration = Duration::from_millis(LEASE.as_millis() as u64 + 900);

/// Environment variable that holds a single strike, to replay a failure.
const STRIKE: &str = "FARSIDE_TEST_STRIKE";

#[test]
fn clients_of_a_bank_killed_in_any_phase_lose_nothing() {
    killed_at_accesses(Phase::ALL.len());
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_of_a_bank_killed_in_any_phase_lose_nothing() {
    killed_at_accesses(200);
}

fn killed_at_accesses(strikes: usize) {
    let _alone = alone();
    let (mut pool, started) = (Pool::start(), Instant::now());
    let plans = match std::env::var(STRIKE) {
        Ok(plan) => vec![serde_json::from_str(&plan).expect("a strike that a failure printed")],
        Err(_) => pool.plan(strikes),
    };
    let is_whole = plans.len() > 1;
    let mut plans = VecDeque::from(plans);
    let mut struck: BTreeMap<Phase, u32> = BTreeMap::new();
    let (mut round, mut unstruck, mut survived, mut slowest) = (0, 0, 0, Duration::ZERO);
    let mut locked: Vec<(Duration, Phase)> = Vec::new();
    while let Some(strike) = plans.pop_front() {
        round += 1;
        let replay = Replay(strike);
        let name = format!("s{round}");
        let table = pool.create(&name);
        let survivor = Survivor::start(&pool.socket, &name);
        let mut victim = pool.victim(&name, table, Some(strike));
        let status = victim.wait();
        let died = Instant::now();
        assert!(
            status.success() || status.signal() == Some(Signal::KILL.as_raw()),
            "the client ended with {status}"
        );
        // `None` if it made fewer accesses of this kind than the scout.
        let phase: Option<Phase> = victim.heard_last("struck");
        let done: u64 = victim.heard_last("done").unwrap_or(0);
        // Whatever the victim had locked can be changed within the time.
        let mut checker = pool.client(&name);
        let (sum, count) = checker.write_all();
        let free = died.elapsed();
        assert_eq!(sum, ACCOUNTS * OPENING);
        assert!((done..=done + 1).contains(&count), "{done} transfers were acknowledged, {count} are there");
        let (ops, slow) = survivor.end();
        (survived, slowest) = (survived + ops, slowest.max(slow));
        checker.leave();
        pool.heal(&name);
        let stat = pool.client(&name).leave_with_stat();
        assert_eq!((stat.unsettled, stat.open), (0, 0), "{stat:?}");
        assert_eq!(stat.values, ACCOUNTS + 1, "{stat:?}");
        pool.drop_store(&name);
        match phase {
            Some(phase) => {
                *struck.entry(phase).or_default() += 1;
                locked.push((free, phase));
                assert!(free < LOCKED_MAX, "keys stayed locked for {free:?}");
            }
            None => {
                unstruck += 1;
                plans.extend((strike.nth > 0).then_some(Strike { nth: strike.nth / 2, ..strike }));
            }
        }
        drop(replay);
    }
    locked.sort_unstable();
    println!(
        "{} clients killed ({unstruck} more made too few accesses) in {:?}; meanwhile {survived} transfers of other \
         clients, the slowest {slowest:?}; the longest times until all keys of a victim were written again: {:?}",
        struck.values().sum::<u32>(),
        started.elapsed(),
        &locked[locked.len().saturating_sub(5)..]
    );
    struck.iter().for_each(|(phase, times)| println!("  {times:4} at {phase:?}"));
    assert!(slowest < LOCKED_MAX, "a survivor stalled for {slowest:?}");
    if is_whole {
        let missed: Vec<Phase> = Phase::ALL.into_iter().filter(|phase| !struck.contains_key(phase)).collect();
        assert!(missed.is_empty(), "never struck: {missed:?}");
    }
}

/// Prints how to replay a failure if the test panics while this value exists.
struct Replay(Strike);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let strike = serde_json::to_string(&self.0).expect("plain data");
            println!(
                "replay: {STRIKE}='{strike}' cargo test -p farside-systems --test all clients_of_a_bank_killed \
                 -- --nocapture"
            );
        }
    }
}

/// A node in a separate process, and the path of the node's socket.
struct Pool {
    node: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Pool {
    fn start() -> Pool {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("node.sock");
        let mut node =
            Child::start(Role::Node { socket: socket.clone(), mib: 32, evict_stopped_after: None });
        let () = node.hear("ready");
        Pool { node, socket, _folder: folder }
    }

    /// Creates a store whose accounts have their first amounts.
    fn create(&mut self, name: &str) -> Table {
        let quota = QUOTA_MIB << 20;
        let ask = Ask::CreateStore { name: name.into(), kind: KIND.into(), parameters: parameters(), quota };
        let Answer::Store(store) = self.node.ask(&ask) else { panic!("expected a store") };
        let mut founder = self.client(name);
        founder.found();
        founder.leave();
        table_of(&store)
    }

    fn drop_store(&mut self, name: &str) {
        assert_eq!(self.node.ask(&Ask::DropStore { name: name.into() }), Answer::Done);
    }

    fn victim(&self, name: &str, table: Table, strike: Option<Strike>) -> Child {
        let (socket, store) = (self.socket.clone(), name.to_owned());
        Child::start(Role::BankClient { socket, store, table, entropy: entropy(), strike })
    }

    fn client(&self, name: &str) -> Client {
        Bank::open(connect(&self.socket), name, entropy())
    }

    /// Plans strikes, about the same number for each kind of access.
    fn plan(&mut self, strikes: usize) -> Vec<Strike> {
        let table = self.create("scout");
        let mut scout = self.victim("scout", table, None);
        let mut seen: BTreeMap<Phase, u64> = scout.hear("seen");
        assert!(scout.wait().success());
        self.drop_store("scout");
        println!("a client makes {} accesses: {seen:?}", seen.values().sum::<u64>());
        seen.remove(&Phase::Other);
        let kinds: Vec<(Phase, u64)> = seen.into_iter().collect();
        let strike = |drawn: usize| {
            let (phase, count) = kinds[drawn % kinds.len()];
            Strike { phase, nth: script::mix(SEED ^ drawn as u64) % count }
        };
        (0..strikes).map(strike).collect()
    }

    /// Recovers all dead clients.
    fn heal(&self, name: &str) {
        let endpoint = connect(&self.socket);
        let healing = async {
            let store = store::fetch_of(&endpoint, NodeId(0), name, KIND).await.expect("the store exists");
            let options = Options { entropy: entropy(), ..Options::NONE };
            PrismTxKind::heal(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        block_on(&endpoint, healing).expect("healed");
    }
}

type Client = Bank<Arc<Mapping>>;

fn connect(socket: &Path) -> Rc<Direct> {
    Rc::new(shm::connect(socket, NodeId(0)).unwrap_or_else(|error| panic!("{error}")))
}

/// Entropy that no other client has.
fn entropy() -> u64 {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    script::mix(CLIENTS.fetch_add(1, Ordering::Relaxed))
}

/// A client that goes on while another one is killed. It moves money between the same accounts.
struct Survivor {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, Duration)>,
}

impl Survivor {
    fn start(socket: &Path, name: &str) -> Survivor {
        let (socket, name, stop) = (socket.to_owned(), name.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client: Client = Bank::open(connect(&socket), &name, entropy());
            let (mut transfers, mut slowest) = (0, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) || transfers == 0 {
                let before = Instant::now();
                assert_eq!(client.transfer_and_add(), ACCOUNTS * OPENING);
                slowest = slowest.max(before.elapsed());
                transfers += 1;
                client.run(async |_| std::thread::sleep(Duration::from_micros(200)));
            }
            client.leave();
            (transfers, slowest)
        });
        Survivor { stop, thread }
    }

    /// Stops the client. Returns the number of its transfers and the time of the slowest one.
    fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
