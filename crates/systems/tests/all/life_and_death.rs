//! Processes that are stopped or killed while they use shared memory. The node and each client are separate processes.
//!
//! The tests check that:
//! * no other process stalls,
//! * no acknowledged operation is lost or torn,
//! * every buffer is accounted for after the scan for the dead clients.
//!
//! A *strike* stops or kills a client at one memory access. The tests count the strikes for each kind of access.

use crate::support::audit::{Audit, Held};
use crate::support::deadly::{Access, Strike};
use crate::support::process::{self, Child, Role, alone, until};
use crate::support::script::{self, Op};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::shm::{self, ConnectError};
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::{FabricError, NodeId};
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::{Kv, KvError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::collections::{BTreeMap, VecDeque};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Client = PrismKv<Rc<Direct>>;

macro_rules! go {
    ($client:expr, $op:ident ( $($arg:expr),* )) => {{
        let endpoint = Rc::clone($client.fabric());
        block_on(&endpoint, $client.$op($($arg),*))
    }};
}

/// Entry point of the child processes. The test does nothing when the test runner calls it.
#[test]
fn child() {
    process::play();
}

// The node is stopped or killed.

/// Number of overwrites while the node is stopped: five times what fits into the memory.
const OVERWRITES: u32 = 70_000;

#[test]
fn a_stopped_node_is_usable_until_memory_is_full_and_then_recovers() {
    let _alone = alone();
    let mut pool = Pool::start(64, None);
    pool.node.create("s", 16);
    let mut client = pool.client("s");
    let value = |n: u32| vec![n as u8; if n < 1000 { 1000 } else { 50_000 }];
    for n in 0..1000u32 {
        go!(client, put(&n.to_be_bytes(), &value(n))).expect("stored");
    }
    // A node that is stopped while it follows pointers itself has ended the reuse of buffers. So it is stopped at rest.
    until("all retired buffers are freed", || pool.node.stat("s").retired_buffers == 0);
    std::thread::sleep(Duration::from_millis(250));
    pool.node.stop();
    let (mut puts, mut slowest) = (0u32, Duration::ZERO);
    // The client reuses the buffers that it replaces. So it can overwrite more than the memory holds.
    let error = loop {
        let n = if puts < OVERWRITES { puts % 1000 } else { puts - OVERWRITES + 1000 };
        let since = Instant::now();
        if let Err(error) = go!(client, put(&n.to_be_bytes(), &value(n))) {
            break error;
        }
        slowest = slowest.max(since.elapsed());
        assert!(go!(client, get(&n.to_be_bytes())).expect("read").is_some_and(|item| item.value == value(n)));
        puts += 1;
    };
    assert_eq!(error, KvError::OutOfMemory);
    assert!(puts > OVERWRITES, "the client reused no buffers after {puts} puts");
    let keys = puts - OVERWRITES + 1000;
    for n in 0..keys {
        assert!(go!(client, get(&n.to_be_bytes())).expect("read").is_some_and(|item| item.value == value(n)));
    }
    let since = Instant::now();
    let refused = shm::connect(&pool.socket, NodeId(0)).err().expect("no node answers");
    let waited = since.elapsed();
    assert!(matches!(refused, ConnectError::Stopped(pid) if pid == pool.node.pid()), "{refused}");
    assert!(refused.to_string().contains(&format!("pid {} is stopped", pool.node.pid())), "{refused}");
    assert!(waited < Duration::from_secs(1), "a new client waited {waited:?}");
    println!(
        "{puts} puts and gets with a stopped node, slowest put {slowest:?}; a new client waited {waited:?}"
    );
    assert!(keys > 1150, "{keys} keys in about 14 MiB");

    for n in 1000..1100u32 {
        assert!(go!(client, delete(&n.to_be_bytes())).expect("there is memory for tombstones"));
    }
    pool.node.signal(Signal::CONT);
    let recovered = until("puts succeed again", || go!(client, put(b"after", &value(1000))).is_ok());
    println!("the first put succeeded {recovered:?} after the node continued");
    for n in 0..5000 {
        go!(client, put(&(n % 1000u32).to_be_bytes(), &value(n % 1000))).expect("memory is freed");
    }
    drop(client);
    pool.account_for("s");
}

#[test]
fn clients_of_a_dead_node_fail_within_10_ms() {
    let _alone = alone();
    const ROUNDS: usize = 9;
    let mut delays = Vec::new();
    for _ in 0..ROUNDS {
        let mut pool = Pool::start(32, None);
        pool.node.create("s", 8);
        let mut client = pool.client("s");
        go!(client, put(b"k", b"v")).expect("stored");
        let pid = Pid::from_raw(pool.node.pid() as i32).expect("a valid pid");
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("the node is alive");
        let watcher = std::thread::spawn(move || {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            while poll(&mut fds, None).is_err() {}
            Instant::now()
        });
        pool.node.signal(Signal::KILL);
        let since = Instant::now();
        let error = loop {
            assert!(since.elapsed() < process::PATIENCE, "chains still run");
            if let Err(error) = go!(client, get(b"k")) {
                break error;
            }
        };
        let failed = Instant::now();
        assert_eq!(error, KvError::Fabric(FabricError::NodeDied(NodeId(0))));
        assert_eq!(go!(client, put(b"k", b"w")), Err(KvError::Fabric(FabricError::NodeDied(NodeId(0)))));
        let died = watcher.join().expect("the watcher succeeds");
        delays.push(failed.saturating_duration_since(died));
        pool.node.wait();
        let absent = shm::connect(&pool.socket, NodeId(0)).err().expect("no node serves");
        assert!(matches!(absent, ConnectError::Absent(_)), "{absent}");
    }
    delays.sort_unstable();
    println!("time from the node's pidfd to the client's error: {delays:?}");
    assert!(delays[ROUNDS / 2] < Duration::from_millis(10), "half of the clients took longer: {delays:?}");
}

// A client is stopped.

#[test]
fn a_client_stopped_in_a_chain_delays_no_other_and_is_reported() {
    let _alone = alone();
    let mut pool = Pool::start(64, None);
    let (mut victim, mut client) = pool.stopped_client();
    let slowest = use_store(&mut client, Duration::from_millis(300));
    assert_eq!(pool.node.stopped_pids(), [victim.pid()]);
    let stat = pool.node.stat("s");
    println!("with a stopped client: slowest {slowest:?}, {} buffers wait for it", stat.retired_buffers);
    assert!(stat.retired_buffers > 0 && stat.delaying_pids == [victim.pid()], "{stat:?}");
    let before = stat.retired_buffers;
    use_store(&mut client, Duration::from_millis(50));
    assert!(pool.node.stat("s").retired_buffers > before, "no buffer is freed");

    victim.signal(Signal::CONT);
    let back = until("memory is freed", || pool.node.stat("s").retired_buffers == 0);
    println!("all buffers were freed {back:?} after the client continued");
    until("no process is reported", || pool.node.stopped_pids().is_empty());
    let _: BTreeMap<Access, u64> = victim.hear("seen");
    assert!(victim.wait().success());
    check_script(&mut client, SEED, script::TOUR.len() as u64, |index| script::TOUR[index as usize]);
    drop(client);
    pool.account_for("s");
}

#[test]
fn a_client_stopped_for_too_long_is_evicted() {
    let _alone = alone();
    const ALLOWED: Duration = Duration::from_millis(300);
    let mut pool = Pool::start(64, Some(ALLOWED));
    let (mut victim, mut client) = pool.stopped_client();
    let since = Instant::now();
    let slowest = use_store(&mut client, Duration::from_millis(50));
    let status = victim.wait();
    let evicted = since.elapsed();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    assert!(evicted >= ALLOWED, "the client was killed after {evicted:?}");
    let back = until("memory is freed", || pool.node.stat("s").retired_buffers == 0);
    println!("evicted after {evicted:?}, all buffers were freed {back:?} later; slowest {slowest:?}");
    drop(client);
    pool.account_for("s");
}

// Clients are killed.

const SEED: u64 = 0x5eed;

#[test]
fn clients_killed_at_any_access_lose_nothing() {
    killed_at_accesses(88);
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_killed_at_any_access_lose_nothing() {
    killed_at_accesses(200);
}

#[test]
fn clients_killed_while_tables_are_rebuilt_lose_nothing() {
    killed_at_moments(24, true);
}

#[test]
fn clients_killed_at_any_moment_lose_nothing() {
    killed_at_moments(20, false);
}

#[test]
#[ignore = "kills 200 processes: for the soak"]
fn soak_200_clients_killed_at_any_moment_lose_nothing() {
    killed_at_moments(200, false);
}

/// Environment variable that holds the plan of a single strike to run, to replay a failure:
/// `FARSIDE_TEST_STRIKE=PLAN`.
const STRIKE: &str = "FARSIDE_TEST_STRIKE";
/// Environment variable that holds a seed, to select other moments: `FARSIDE_TEST_SEED=N`.
const SEED_VARIABLE: &str = "FARSIDE_TEST_SEED";

fn killed_at_accesses(strikes: usize) {
    let _alone = alone();
    let mut pool = Pool::start(64, None);
    let started = Instant::now();
    let plans = match std::env::var(STRIKE) {
        Ok(plan) => vec![serde_json::from_str(&plan).expect("a plan that a failure printed")],
        Err(_) => pool.plan(strikes),
    };
    let is_whole = plans.len() > 1;
    let mut plans = VecDeque::from(plans);
    let mut struck: BTreeMap<Access, u32> = BTreeMap::new();
    let (mut slowest, mut survived) = (Duration::ZERO, 0);
    let (mut round, mut stopped, mut unstruck) = (0, 0, 0);
    while let Some((strike, slot_cache)) = plans.pop_front() {
        round += 1;
        let replay = Replay(format!(
            "{STRIKE}='{}' cargo test -p farside-systems-tests --test all clients_killed_at_any_access \
             -- --nocapture",
            serde_json::to_string(&(strike, slot_cache)).expect("plain data")
        ));
        let name = format!("s{round}");
        let store = pool.node.create(&name, QUOTA_MIB);
        let survivor = Survivor::start(&pool.socket, &name);
        let mut victim = pool.victim(&name, SEED, true, slot_cache, Some(strike));
        let is_stopped = strike.stop && victim.wait_or_stop();
        if is_stopped {
            // The other clients must make progress without the stopped one.
            std::thread::sleep(Duration::from_millis(20));
            victim.signal(if strike.nth % 2 == 0 { Signal::CONT } else { Signal::KILL });
        }
        let status = victim.wait();
        assert!(
            status.success() || status.signal() == Some(Signal::KILL.as_raw()),
            "the client ended with {status}"
        );
        // `None` if other clients helped the victim, so that it made fewer accesses of this kind.
        let access: Option<Access> = victim.heard_last("struck");
        stopped += u32::from(is_stopped);
        let done = victim.heard_last("done").unwrap_or(0);
        let (ops, slow) = survivor.end();
        (survived, slowest) = (survived + ops, slowest.max(slow));
        let mut client = pool.client(&name);
        check_script(&mut client, SEED, done, |index| {
            script::TOUR.get(index as usize).copied().unwrap_or(Op::Pause)
        });
        check_survivor(&mut client);
        drop(client);
        pool.account_for_store(&store);
        pool.drop_store(&name);
        match access {
            Some(access) => *struck.entry(access).or_default() += 1,
            None => {
                unstruck += 1;
                let earlier = Strike { nth: strike.nth / 2, ..strike };
                plans.extend((strike.nth > 0).then_some((earlier, slot_cache)));
            }
        }
        drop(replay);
    }
    println!(
        "{} clients struck, {stopped} of them only stopped ({unstruck} more made too few accesses), in {:?}; \
         meanwhile {survived} operations of other clients, the slowest {slowest:?}:",
        struck.values().sum::<u32>(),
        started.elapsed()
    );
    struck.iter().for_each(|(access, times)| println!("  {times:4} at {access:?}"));
    assert!(slowest < Duration::from_secs(1), "a survivor stalled for {slowest:?}");
    if is_whole {
        let missed: Vec<Access> = Access::ALL.into_iter().filter(|kind| !struck.contains_key(kind)).collect();
        assert!(missed.is_empty(), "never struck: {missed:?}");
    }
}

/// Kills clients at random moments. If `rebuilds` is set, the node rebuilds the store's table all the time.
fn killed_at_moments(kills: u64, rebuilds: bool) {
    let _alone = alone();
    let mut pool = Pool::start(64, None);
    let auditor = pool.endpoint();
    let started = Instant::now();
    let seed: u64 = std::env::var(SEED_VARIABLE).map_or(SEED, |seed| seed.parse().expect("a number"));
    let mut found: BTreeMap<Held, u32> = Held::ALL.into_iter().map(|held| (held, 0)).collect();
    let (mut slowest, mut survived, mut rebuilt) = (Duration::ZERO, 0, 0);
    for round in 0..kills {
        let replay = Replay(format!(
            "{SEED_VARIABLE}={seed} cargo test -p farside-systems-tests --test all \
             clients_killed_at_any_moment -- --nocapture (moments differ from run to run)"
        ));
        let (name, own) = (format!("m{round}"), script::mix(seed ^ round));
        let store = pool.node.create(&name, QUOTA_MIB);
        let survivor = Survivor::start(&pool.socket, &name);
        let mut victim = pool.victim(&name, own, false, round % 2 == 0, None);
        let (number, slot): (u32, u32) = victim.hear("session");
        let moment = Instant::now() + Duration::from_micros(2000 + own % 20_000);
        while rebuilds && Instant::now() < moment {
            let parameters = format!(r#"{{"items": {}}}"#, [1, 500, 9000][rebuilt % 3]);
            rebuilt +=
                usize::from(pool.node.try_ask(&Ask::RebuildStore { name: name.clone(), parameters }).is_ok());
        }
        std::thread::sleep(moment.saturating_duration_since(Instant::now()));
        // Stop the node, so that it does not clean up before the audit.
        pool.node.stop();
        victim.signal(Signal::KILL);
        victim.wait();
        if !rebuilds {
            // The audit expects a single table, and a rebuild may have two.
            let held = Audit::of(auditor.memory(), &store).held_by(auditor.memory(), own, number, slot);
            *found.entry(held).or_default() += 1;
        }
        pool.node.signal(Signal::CONT);
        let done = victim.heard_last("done").unwrap_or(0);
        let (ops, slow) = survivor.end();
        (survived, slowest) = (survived + ops, slowest.max(slow));
        let mut client = pool.client(&name);
        check_script(&mut client, own, done, |index| script::endless(own, index));
        check_survivor(&mut client);
        drop(client);
        until("the rebuild ends", || pool.store(&name).former.is_none());
        pool.account_for(&name);
        pool.drop_store(&name);
        drop(replay);
    }
    println!(
        "{rebuilt} rebuilds; {kills} clients killed in {:?}; meanwhile {survived} operations of other clients, the \
         slowest {slowest:?}:",
        started.elapsed()
    );
    found.iter().for_each(|(held, times)| println!("  {times:4} held {held:?}"));
    assert!(slowest < Duration::from_secs(1), "a survivor stalled for {slowest:?}");
    assert_eq!(rebuilds, rebuilt > 0, "{rebuilt} rebuilds");
}

/// Command that replays a failure. It is printed if the test panics while this value exists.
struct Replay(String);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("replay: {}", self.0);
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
    fn start(mib: u64, evict_stopped_after: Option<Duration>) -> Pool {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("node.sock");
        let mut node = Child::start(Role::Node { socket: socket.clone(), mib, evict_stopped_after });
        let () = node.hear("ready");
        Pool { node, socket, _folder: folder }
    }

    fn endpoint(&self) -> Rc<Direct> {
        connect(&self.socket)
    }

    fn client(&self, name: &str) -> Client {
        open(&self.socket, name)
    }

    fn victim(&self, name: &str, seed: u64, tour: bool, slot_cache: bool, strike: Option<Strike>) -> Child {
        let (socket, store) = (self.socket.clone(), name.to_owned());
        Child::start(Role::Client { socket, store, seed, tour, slot_cache, strike })
    }

    /// Creates a store `s`, a client that is stopped just before it installs an item, and a client that runs.
    fn stopped_client(&mut self) -> (Child, Client) {
        self.node.create("s", 16);
        let client = self.client("s");
        let strike = Strike { access: Access::SwingSlot, nth: 1, stop: true };
        let victim = self.victim("s", SEED, true, false, Some(strike));
        until("the client is stopped", || shm::is_stopped(victim.pid()));
        let mut victim = victim;
        let struck: Access = victim.hear("struck");
        println!("stopped at {struck:?}");
        assert_eq!(struck, Access::SwingSlot);
        (victim, client)
    }

    /// Returns the number of accesses of each kind in an undisturbed tour.
    fn accesses(&self, name: &str, slot_cache: bool) -> BTreeMap<Access, u64> {
        let mut scout = self.victim(name, SEED, true, slot_cache, None);
        let seen = scout.hear("seen");
        assert!(scout.wait().success());
        seen
    }

    /// Plans strikes, about the same number for each kind of access. The flag states whether the victim has a slot
    /// cache.
    fn plan(&mut self, strikes: usize) -> Vec<(Strike, bool)> {
        let mut kinds = Vec::new();
        for slot_cache in [false, true] {
            self.node.create("scout", QUOTA_MIB);
            let seen = self.accesses("scout", slot_cache);
            self.drop_store("scout");
            println!(
                "the tour with slot cache {slot_cache} makes {} accesses: {seen:?}",
                seen.values().sum::<u64>()
            );
            kinds.extend(seen.into_iter().map(|(access, count)| (access, count, slot_cache)));
        }
        let strike = |drawn: usize| {
            let (access, count, slot_cache) = kinds[drawn % kinds.len()];
            let nth = script::mix(SEED ^ drawn as u64) % count;
            // One in five clients is stopped instead of killed. No number of kinds is a multiple of five, so every kind
            // gets both.
            (Strike { access, nth, stop: drawn.is_multiple_of(5) }, slot_cache)
        };
        (0..strikes).map(strike).collect()
    }

    /// Makes the node scan for the buffers of dead clients, then accounts for every buffer of the store.
    fn account_for(&mut self, name: &str) {
        let store = self.store(name);
        self.account_for_store(&store);
    }

    fn store(&mut self, name: &str) -> Store {
        match self.node.ask(&Ask::OpenStore { name: name.into() }) {
            Answer::Store(store) => store,
            other => panic!("expected a store, got {other:?}"),
        }
    }

    fn account_for_store(&mut self, store: &Store) {
        let name = &store.name;
        assert_eq!(self.node.ask(&Ask::Scan { name: name.clone() }), Answer::Done);
        until("all retired buffers are freed", || self.node.stat(name).retired_buffers == 0);
        let stat = self.node.stat(name);
        let audit = Audit::of(self.endpoint().memory(), store);
        audit.check();
        assert_eq!(stat.live_buffers, audit.reachable.len() as u64, "{stat:?}");
        let counted = stat.live_buffers + stat.free_buffers + stat.parked_buffers + stat.retired_buffers;
        assert_eq!(counted, audit.states.len() as u64, "{stat:?}");
    }

    fn drop_store(&mut self, name: &str) {
        assert_eq!(self.node.ask(&Ask::DropStore { name: name.into() }), Answer::Done);
    }
}

fn connect(socket: &Path) -> Rc<Direct> {
    Rc::new(shm::connect(socket, NodeId(0)).unwrap_or_else(|error| panic!("{error}")))
}

fn open(socket: &Path, name: &str) -> Client {
    let endpoint = connect(socket);
    block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), name)).expect("the store exists")
}

/// Puts and gets for the time `during`, and until each key was overwritten, so that there are retired buffers. Returns
/// the time of the slowest pair of a put and a get.
fn use_store(client: &mut Client, during: Duration) -> Duration {
    const KEYS: u32 = 50;
    let (since, mut slowest) = (Instant::now(), Duration::ZERO);
    for n in 0u32.. {
        let before = Instant::now();
        if before - since > during && n >= 2 * KEYS {
            break;
        }
        let key = (n % KEYS).to_be_bytes();
        go!(client, put(&key, &n.to_le_bytes())).expect("stored");
        assert!(go!(client, get(&key)).expect("read").is_some_and(|item| item.value == n.to_le_bytes()));
        slowest = slowest.max(before.elapsed());
        std::thread::sleep(Duration::from_micros(100));
    }
    assert!(slowest < Duration::from_secs(1), "a client stalled for {slowest:?}");
    slowest
}

/// Checks that a client's keys hold the result of a prefix of its script.
///
/// The prefix has at least `done` operations, because the client acknowledged them. It has at most 17 more: the client
/// reports its progress at least every 16 operations, and one more may be in flight.
fn check_script(client: &mut Client, seed: u64, done: u64, op: impl Fn(u64) -> Op) {
    let mut found = BTreeMap::new();
    for key in 0..script::KEYS {
        let item = go!(client, get(&script::key(seed, key))).expect("read");
        found.extend(item.map(|item| (key, item.value.to_vec())));
    }
    let is_left_by = |count: u64| {
        let expected = script::after(count, &op);
        expected.len() == found.len()
            && expected
                .iter()
                .all(|(key, &(index, len))| found.get(key) == Some(&script::value(seed, index, len)))
    };
    let lengths: Vec<_> = found.iter().map(|(key, value)| (key, value.len())).collect();
    assert!((done..=done + 17).any(is_left_by), "after {done} operations, keys have {lengths:?} bytes");
}

/// A client that keeps running while another client is killed.
struct Survivor {
    stop: std::sync::Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, Duration)>,
}

const SURVIVORS_KEYS: u64 = 12;
/// Quota in MiB of the stores in which clients are killed: enough for one segment of every class in use, and a few
/// more.
const QUOTA_MIB: u64 = 20;

fn survivors_value(n: u64) -> Vec<u8> {
    let len = [300, 700, 40, 300, 61_900][n as usize % 5]; // Partly in the same classes as the victim's values.
    script::value(n % SURVIVORS_KEYS, n, len)
}

impl Survivor {
    fn start(socket: &Path, name: &str) -> Survivor {
        let (socket, name, stop) =
            (socket.to_owned(), name.to_owned(), std::sync::Arc::new(AtomicBool::new(false)));
        let stopped = std::sync::Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client = open(&socket, &name);
            let (mut n, mut slowest) = (0u64, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) || n < SURVIVORS_KEYS {
                let key = [b"survivor ", &(n % SURVIVORS_KEYS).to_be_bytes()[..]].concat();
                let value = [&n.to_le_bytes()[..], &survivors_value(n)].concat();
                let before = Instant::now();
                go!(client, put(&key, &value)).expect("stored");
                let is_whole = go!(client, get(&key)).expect("read").is_some_and(|item| item.value == value);
                slowest = slowest.max(before.elapsed());
                assert!(is_whole, "the get after put {n} returned another value");
                n += 1;
                if n.is_multiple_of(16) {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            (n, slowest)
        });
        Survivor { stop, thread }
    }

    /// Stops the client. Returns the number of its operations and the time of the slowest operation.
    fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn check_survivor(client: &mut Client) {
    for key in 0..SURVIVORS_KEYS {
        let name = [b"survivor ", &key.to_be_bytes()[..]].concat();
        let item = go!(client, get(&name)).expect("read").expect("present");
        let (n, value) = item.value.split_first_chunk().expect("a value starts with a number");
        assert!(value == survivors_value(u64::from_le_bytes(*n)), "a survivor's value is torn");
    }
}
