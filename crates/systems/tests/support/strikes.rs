//! Clients that are killed while they use a store in shared memory. The node and each victim are separate processes. A
//! *strike* kills a client at one memory access, and the strikes are counted by the purpose of the access.
//!
//! This module checks that, after each death:
//! * no key stays locked for longer than a lease, a fence and a recovery take,
//! * other clients go on meanwhile.
//!
//! What else must hold, and what the clients do, is that of the store: see [`Struck`].

use super::deadly_table::{Purpose, Strike, Table};
use super::process::{Child, Role, alone};
use super::script;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::shm;
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask, Store};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
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
/// Longest time for which a key of a dead client may stay locked, beyond its lease: the fence and the recovery. A busy
/// machine may run none of the processes for a while.
const RECOVERED_WITHIN: Duration = Duration::from_millis(900);

/// Environment variable that holds a single strike, to replay a failure.
const STRIKE: &str = "FARSIDE_TEST_STRIKE";

/// A kind of stores whose clients are struck, with what its clients do and what must hold after each death.
pub(crate) trait Struck {
    type System: System;
    type Phase: Purpose;
    type Client;

    /// Name, or start of the names, of the tests, to replay a failure.
    const TEST: &'static str;
    /// Length of a lease.
    const LEASE: Duration;

    /// Parameters of the stores.
    fn parameters() -> String;

    /// Prepares a new store. Returns the part of its table in which accesses are classified.
    fn found(store: &Store, client: impl FnOnce() -> Self::Client) -> Table;

    /// Opens a store. No two clients of a store have the same `entropy`.
    fn open(endpoint: Rc<Direct>, name: &str, entropy: u64) -> Self::Client;

    /// Returns the process that is struck. It says `done` with the number of its acknowledged operations.
    fn victim(
        socket: PathBuf,
        store: String,
        table: Table,
        entropy: u64,
        strike: Option<Strike<Self::Phase>>,
    ) -> Role;

    /// A round of the client that goes on while another one is killed. Checks the results of its operations, and
    /// returns the time of the slowest one.
    fn go_on(client: &mut Self::Client, round: u64) -> Duration;

    /// Checks what the victim has left after so many acknowledged operations. Changes all that it may have locked.
    fn check(client: &mut Self::Client, done: u64);

    /// Checks the healed store. Another client has gone on for so many rounds.
    fn check_healed(client: Self::Client, rounds: u64);

    /// Ends a client, which gives its lease back.
    fn leave(client: Self::Client);
}

/// Kills clients at accesses of all purposes.
pub(crate) fn killed_at_accesses<S: Struck>(strikes: usize) {
    let _alone = alone();
    let locked_max = S::LEASE + RECOVERED_WITHIN;
    let (mut pool, started) = (Pool::start(), Instant::now());
    let plans = match std::env::var(STRIKE) {
        Ok(plan) => vec![serde_json::from_str(&plan).expect("a strike that a failure printed")],
        Err(_) => pool.plan::<S>(strikes),
    };
    let is_whole = plans.len() > 1;
    let mut plans: VecDeque<Strike<S::Phase>> = VecDeque::from(plans);
    let mut struck: BTreeMap<S::Phase, u32> = BTreeMap::new();
    let (mut round, mut unstruck, mut survived, mut slowest) = (0, 0, 0, Duration::ZERO);
    let mut locked: Vec<(Duration, S::Phase)> = Vec::new();
    while let Some(strike) = plans.pop_front() {
        round += 1;
        let replay = Replay { strike, test: S::TEST };
        let name = format!("s{round}");
        let table = pool.create::<S>(&name);
        let survivor = Survivor::start::<S>(&pool.socket, &name);
        let mut victim = pool.victim::<S>(&name, table, Some(strike));
        let status = victim.wait();
        let died = Instant::now();
        assert!(
            status.success() || status.signal() == Some(Signal::KILL.as_raw()),
            "the client ended with {status}"
        );
        // `None` if it made fewer accesses of this kind than the scout.
        let phase: Option<S::Phase> = victim.heard_last("struck");
        let done = victim.heard_last("done").unwrap_or(0);
        let mut checker = pool.client::<S>(&name);
        S::check(&mut checker, done);
        let free = died.elapsed();
        let (rounds, slow) = survivor.end();
        (survived, slowest) = (survived + rounds, slowest.max(slow));
        S::leave(checker);
        pool.heal::<S>(&name);
        S::check_healed(pool.client::<S>(&name), rounds);
        pool.drop_store(&name);
        match phase {
            Some(phase) => {
                *struck.entry(phase).or_default() += 1;
                locked.push((free, phase));
                assert!(free < locked_max, "keys stayed locked for {free:?}");
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
        "{} clients killed ({unstruck} more made too few accesses) in {:?}; meanwhile {survived} rounds of other \
         clients, the slowest operation {slowest:?}; the longest times until all keys of a victim were changed again: \
         {:?}",
        struck.values().sum::<u32>(),
        started.elapsed(),
        &locked[locked.len().saturating_sub(5)..]
    );
    struck.iter().for_each(|(phase, times)| println!("  {times:4} at {phase:?}"));
    assert!(slowest < locked_max, "a survivor stalled for {slowest:?}");
    if is_whole {
        let missed: Vec<_> = S::Phase::ALL.iter().filter(|phase| !struck.contains_key(phase)).collect();
        assert!(missed.is_empty(), "never struck: {missed:?}");
    }
}

/// Prints how to replay a failure if the test panics while this value exists.
struct Replay<P: Purpose> {
    strike: Strike<P>,
    test: &'static str,
}

impl<P: Purpose> Drop for Replay<P> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let strike = serde_json::to_string(&self.strike).expect("plain data");
            println!(
                "replay: {STRIKE}='{strike}' cargo test -p farside-systems-tests --test all {} -- --nocapture",
                self.test
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

    fn create<S: Struck>(&mut self, name: &str) -> Table {
        let (kind, quota) = (S::System::KIND.into(), QUOTA_MIB << 20);
        let ask = Ask::CreateStore { name: name.into(), kind, parameters: S::parameters(), quota };
        match self.node.ask(&ask) {
            Answer::Store(store) => S::found(&store, || self.client::<S>(name)),
            other => panic!("expected a store, got {other:?}"),
        }
    }

    fn drop_store(&mut self, name: &str) {
        assert_eq!(self.node.ask(&Ask::DropStore { name: name.into() }), Answer::Done);
    }

    fn victim<S: Struck>(&self, name: &str, table: Table, strike: Option<Strike<S::Phase>>) -> Child {
        Child::start(S::victim(self.socket.clone(), name.to_owned(), table, entropy(), strike))
    }

    fn client<S: Struck>(&self, name: &str) -> S::Client {
        S::open(connect(&self.socket), name, entropy())
    }

    /// Plans strikes, about the same number for each kind of access.
    fn plan<S: Struck>(&mut self, strikes: usize) -> Vec<Strike<S::Phase>> {
        let table = self.create::<S>("scout");
        let mut scout = self.victim::<S>("scout", table, None);
        let mut seen: BTreeMap<S::Phase, u64> = scout.hear("seen");
        assert!(scout.wait().success());
        self.drop_store("scout");
        println!("a client makes {} accesses: {seen:?}", seen.values().sum::<u64>());
        seen.remove(&S::Phase::OTHER);
        let kinds: Vec<(S::Phase, u64)> = seen.into_iter().collect();
        let strike = |drawn: usize| {
            let (phase, count) = kinds[drawn % kinds.len()];
            Strike { phase, nth: script::mix(SEED ^ drawn as u64) % count }
        };
        (0..strikes).map(strike).collect()
    }

    /// Recovers all dead clients, and frees what they have left behind.
    fn heal<S: Struck>(&self, name: &str) {
        let endpoint = connect(&self.socket);
        let healing = async {
            let kind = S::System::KIND;
            let store = store::fetch_of(&endpoint, NodeId(0), name, kind).await.expect("the store exists");
            let options = Options { entropy: entropy(), ..Options::NONE };
            S::System::heal(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        block_on(&endpoint, healing).expect("healed");
    }
}

fn connect(socket: &Path) -> Rc<Direct> {
    Rc::new(shm::connect(socket, NodeId(0)).unwrap_or_else(|error| panic!("{error}")))
}

/// Entropy that no other client has.
fn entropy() -> u64 {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    script::mix(CLIENTS.fetch_add(1, Ordering::Relaxed))
}

/// A client that goes on while another one is killed.
struct Survivor {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, Duration)>,
}

impl Survivor {
    fn start<S: Struck>(socket: &Path, name: &str) -> Survivor {
        let (socket, name, stop) = (socket.to_owned(), name.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client = S::open(connect(&socket), &name, entropy());
            let (mut rounds, mut slowest) = (0, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) || rounds == 0 {
                slowest = slowest.max(S::go_on(&mut client, rounds));
                rounds += 1;
            }
            S::leave(client);
            (rounds, slowest)
        });
        Survivor { stop, thread }
    }

    /// Stops the client. Returns the number of its rounds and the time of the slowest operation.
    fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
