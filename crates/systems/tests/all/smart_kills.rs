//! Clients of SMART that are killed while they change a tree in shared memory. The node and each victim are separate
//! processes.
//!
//! The tests check that, after each death:
//! * every acknowledged change is there, and the change in progress is there or not,
//! * scans return the keys in order, with whole values,
//! * no key stays locked for longer than a lease, a fence and a recovery take,
//! * other clients go on meanwhile,
//! * healing leaves no lock, and no memory that the tree does not have.
//!
//! A *strike* kills a client at one memory access. The tests count the strikes by the purpose of the access.

use crate::support::deadly_index::{LEASE, Phase, SPEC, Strike, Table};
use crate::support::index_script::{Op, TOUR, after, value};
use crate::support::kept_index::KeptIndex;
use crate::support::process::{Child, Role, alone};
use crate::support::script;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::shm;
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask, Store};
use farside_systems::index::Index;
use farside_systems::index::smart::KIND;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SEED: u64 = 0x5eed;
const QUOTA_MIB: u64 = 2;
/// Longest time for which a lock of a dead client may stay: its lease, the fence and the recovery. A busy machine may
/// run none of the processes for a while.
const LOCKED_MAX: Duration = Duration::from_millis(LEASE.as_millis() as u64 + 900);

/// Environment variable that holds a single strike, to replay a failure.
const STRIKE: &str = "FARSIDE_TEST_STRIKE";

#[test]
fn clients_of_a_tree_killed_at_any_access_lose_nothing() {
    killed_at_accesses(Phase::ALL.len());
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_of_a_tree_killed_at_any_access_lose_nothing() {
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
        let done = victim.heard_last("done").unwrap_or(0);
        let mut checker = pool.client(&name);
        check_script(&mut checker, done);
        // Whatever the victim had locked can be changed within the time.
        let keys: BTreeSet<u64> = TOUR.into_iter().filter_map(key_of).collect();
        for key in &keys {
            put(&mut checker, *key, b"last");
        }
        let free = died.elapsed();
        let (ops, slow) = survivor.end();
        (survived, slowest) = (survived + ops, slowest.max(slow));
        checker.leave();
        pool.heal(&name);
        let mut checker = pool.client(&name);
        let found = scan(&mut checker);
        let expected = keys.iter().map(|key| (*key, b"last".to_vec())).chain(Survivor::expected(ops));
        assert!(found == expected.collect(), "after healing, other keys or values are there: {found:?}");
        let stat = checker.run(async |index| index.stat().await).expect("a walk");
        assert_eq!((stat.locked, stat.hidden, stat.taken), (0, 0, stat.linked()), "{stat:?}");
        checker.leave();
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
        "{} clients killed ({unstruck} more made too few accesses) in {:?}; meanwhile {survived} operations of other \
         clients, the slowest {slowest:?}; the longest times until all keys of a victim were changed again: {:?}",
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
                "replay: {STRIKE}='{strike}' cargo test -p farside-systems --test all clients_of_a_tree_killed \
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

    fn create(&mut self, name: &str) -> Table {
        let parameters = serde_json::to_string(&SPEC).expect("plain data");
        let ask =
            Ask::CreateStore { name: name.into(), kind: KIND.into(), parameters, quota: QUOTA_MIB << 20 };
        match self.node.ask(&ask) {
            Answer::Store(Store { table_at: at, table_len: len, .. }) => Table { at, len },
            other => panic!("expected a store, got {other:?}"),
        }
    }

    fn drop_store(&mut self, name: &str) {
        assert_eq!(self.node.ask(&Ask::DropStore { name: name.into() }), Answer::Done);
    }

    fn victim(&self, name: &str, table: Table, strike: Option<Strike>) -> Child {
        let (socket, store) = (self.socket.clone(), name.to_owned());
        Child::start(Role::IndexClient { socket, store, table, entropy: entropy(), strike })
    }

    fn client(&self, name: &str) -> Client {
        KeptIndex::open(connect(&self.socket), name, entropy())
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

    /// Recovers all dead clients, and frees what they have left behind.
    fn heal(&self, name: &str) {
        let endpoint = connect(&self.socket);
        let healing = async {
            let store = store::fetch_of(&endpoint, NodeId(0), name, KIND).await.expect("the store exists");
            let options = Options { entropy: entropy(), ..Options::NONE };
            SmartKind::heal(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        block_on(&endpoint, healing).expect("healed");
    }
}

type Client = KeptIndex<Arc<farside_fabrics::memory::Mapping>>;

fn connect(socket: &Path) -> Rc<Direct> {
    Rc::new(shm::connect(socket, NodeId(0)).unwrap_or_else(|error| panic!("{error}")))
}

/// Entropy that no other client has.
fn entropy() -> u64 {
    static CLIENTS: AtomicU64 = AtomicU64::new(1);
    script::mix(CLIENTS.fetch_add(1, Ordering::Relaxed))
}

fn key_of(op: Op) -> Option<u64> {
    match op {
        Op::Put(key) | Op::Delete(key) => Some(key),
        Op::Pause => None,
    }
}

fn put(client: &mut Client, key: u64, value: &[u8]) {
    client.run(async |index| index.put(&key.to_be_bytes(), value).await).expect("stored");
}

fn get(client: &mut Client, key: u64) -> Option<Vec<u8>> {
    let got =
        client.run(async |index| index.get(&key.to_be_bytes()).await.map(|found| found.map(<[u8]>::to_vec)));
    got.expect("a get")
}

/// Scans all keys. They must be in order.
fn scan(client: &mut Client) -> BTreeMap<u64, Vec<u8>> {
    let mut found = Vec::new();
    let visit = |key: &[u8], value: &[u8]| {
        found.push((u64::from_be_bytes(key.try_into().expect("a number")), value.to_vec()));
    };
    client.run(async |index| index.scan(&[0; 8], usize::MAX, visit).await).expect("a scan");
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "a scan is not in order: {found:?}");
    found.into_iter().collect()
}

/// Checks that the victim's keys have the values that the first `done` operations of its script leave, or those after
/// the next operation, which was in progress. Gets and a scan must agree.
fn check_script(client: &mut Client, done: usize) {
    let scanned = scan(client);
    let found: BTreeMap<u64, Vec<u8>> = TOUR
        .into_iter()
        .filter_map(key_of)
        .filter_map(|key| get(client, key).map(|value| (key, value)))
        .collect();
    let is_left_by = |count: usize| {
        let expected: BTreeMap<u64, Vec<u8>> =
            after(count).into_iter().map(|(key, index)| (key, value(index))).collect();
        expected == found
    };
    assert!(is_left_by(done) || is_left_by(done + 1), "after {done} operations: {found:?}");
    let scanned: BTreeMap<u64, Vec<u8>> =
        scanned.into_iter().filter(|(key, _)| !Survivor::keys().any(|own| own == *key)).collect();
    assert!(scanned == found, "a scan has {scanned:?}, gets have {found:?}");
}

/// A client that goes on while another one is killed. It inserts, updates and deletes keys between the victim's, in the
/// same nodes.
struct Survivor {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, Duration)>,
}

impl Survivor {
    fn keys() -> impl Iterator<Item = u64> {
        (0..8).map(|key| [0x0180, 0x0380, 0x02_0000_0180, 0xff_0000_0000_0180][key as usize % 4] + key)
    }

    /// The value of the operation with this number on each key; `None` if it is a delete.
    fn value(number: u64) -> Option<Vec<u8>> {
        (!number.is_multiple_of(5)).then(|| script::value(number, number, number as usize % 41))
    }

    /// What the keys have after this number of rounds.
    fn expected(rounds: u64) -> impl Iterator<Item = (u64, Vec<u8>)> {
        Survivor::keys().filter_map(move |key| Some((key, Survivor::value(rounds - 1)?)))
    }

    fn start(socket: &Path, name: &str) -> Survivor {
        let (socket, name, stop) = (socket.to_owned(), name.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client: Client = KeptIndex::open(connect(&socket), &name, entropy());
            let (mut rounds, mut slowest) = (0, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) || rounds == 0 {
                for key in Survivor::keys() {
                    let before = Instant::now();
                    let value = Survivor::value(rounds);
                    match &value {
                        Some(value) => put(&mut client, key, value),
                        None => {
                            let deleted = client.run(async |index| index.delete(&key.to_be_bytes()).await);
                            assert_eq!(deleted, Ok(rounds > 0));
                        }
                    }
                    assert_eq!(get(&mut client, key), value);
                    slowest = slowest.max(before.elapsed());
                }
                rounds += 1;
                client.run(async |_| std::thread::sleep(Duration::from_micros(200)));
            }
            client.leave();
            (rounds, slowest)
        });
        Survivor { stop, thread }
    }

    /// Stops the client. Returns the number of its rounds and the time of the slowest change and get.
    fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
