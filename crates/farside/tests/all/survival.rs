//! One of three nodes is killed under load and started again: the rates and errors of the clients of each node.
//!
//! Each task reads keys of one node, so that no task for a surviving node waits for the dead one. The test prints its
//! measurements and asserts only what holds on any machine.

use crate::support::{PATIENCE, Process, serve};
use farside::NewStore;
use farside::parts::AnyKv;
use farside_fabrics::executor::{Core, block_on};
use farside_remote::clock::Clock;
use farside_systems::kv::{Kv, KvError};
use farside_systems::system::Options;
use std::cell::{Cell, RefCell};
use std::net::TcpListener;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const NODES: usize = 3;
const KEYS: u32 = 600;
/// Tasks for the keys of each node.
const TASKS: usize = 8;
/// The node that dies.
const VICTIM: usize = 1;
/// Duration of each phase.
const PHASE: Duration = Duration::from_millis(400);

/// Pause of a task after a failure.
const PAUSE: Duration = Duration::from_millis(1);

/// Outcomes of the reads by the tasks of one node in one phase.
#[derive(Clone, Debug, Default)]
struct Met {
    reads: u64,
    failures: u64,
    /// Longest time of a failed operation.
    slowest_failure: Duration,
    /// A failure whose text does not name the node.
    unnamed: Option<String>,
    /// Time of the first success, after the tasks have noticed the begin of the phase.
    first: Option<Duration>,
}

/// Phases of the load, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    All,
    Dead,
    Back,
    Over,
}

fn start(folder: &Path, index: usize, listen: &str) -> Process {
    let memory = folder.join(format!("memory{index}")).display().to_string();
    let arguments = ["--memory", "32MiB", "--memory-file", &memory, "--listen", listen];
    let node = serve(&folder.join(format!("{index}.sock")), &arguments, folder.join(format!("log{index}")));
    node.line();
    node
}

/// Runs the load over urls of this scheme.
fn survive(scheme: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let listens = [(); NODES].map(|()| {
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        format!("tcp://{}", free.local_addr().expect("an address"))
    });
    let mut nodes: Vec<Process> =
        listens.iter().enumerate().map(|(index, listen)| start(folder, index, listen)).collect();
    let urls = listens.iter().enumerate().map(|(index, listen)| match scheme {
        "shm" => format!("shm:{}", folder.join(format!("{index}.sock")).display()),
        _ => listen.clone(),
    });
    let pool = farside::connect(&urls.collect::<Vec<_>>().join(",")).expect("the nodes serve");
    let new = NewStore { items: Some(u64::from(KEYS) * 2), ..NewStore::prism_kv("all", 36 << 20) };
    pool.create_store(&new).expect("the nodes have memory");

    let phase = AtomicUsize::new(Phase::All as usize);
    let (began, met) = std::thread::scope(|scope| {
        let (pool, phase) = (&pool, &phase);
        let (warm, is_warm) = mpsc::channel();
        let load = scope.spawn(move || load(pool, phase, warm));
        is_warm.recv_timeout(PATIENCE).expect("the keys are stored");
        std::thread::sleep(PHASE);
        nodes[VICTIM].kill();
        phase.store(Phase::Dead as usize, Ordering::Release);
        std::thread::sleep(PHASE);
        nodes[VICTIM] = start(folder, VICTIM, &listens[VICTIM]);
        phase.store(Phase::Back as usize, Ordering::Release);
        let began = Instant::now();
        std::thread::sleep(PHASE.max(Duration::from_secs(1)));
        phase.store(Phase::Over as usize, Ordering::Release);
        (began.elapsed(), load.join().expect("the load reports what it meets"))
    });
    let rate = |phase: Phase, node: usize, lasted: Duration| {
        met[phase as usize][node].reads as f64 / lasted.as_secs_f64()
    };
    for node in 0..NODES {
        let [all, dead] = [Phase::All, Phase::Dead].map(|phase| rate(phase, node, PHASE));
        let back = rate(Phase::Back, node, began);
        let down = &met[Phase::Dead as usize][node];
        // A request that was in flight when the node was killed fails before the test knows that the node is gone.
        let slowest = met.iter().map(|phase| phase[node].slowest_failure).max().unwrap_or_default();
        println!(
            "{scheme}, node {node}: {all:.0} reads/s, {dead:.0} while node {VICTIM} is dead ({:.2}x), {back:.0} after; \
             {} failures, the slowest after {:.2?}; first read after the return at {:.0?}",
            dead / all,
            down.failures,
            slowest,
            met[Phase::Back as usize][node].first.unwrap_or_default(),
        );
        for phase in &met {
            assert_eq!(phase[node].unnamed, None);
        }
        if node != VICTIM {
            assert!(met.iter().all(|phase| phase[node].failures == 0), "node {node} lives: {met:?}");
            assert!(down.reads > 0, "node {node} lives: {met:?}");
        }
    }
    assert!(met[Phase::Dead as usize][VICTIM].failures > 0, "its keys cannot be read: {met:?}");
    assert!(met[Phase::Back as usize][VICTIM].reads > 0, "it is used again: {met:?}");
}

/// Reads keys until all phases are over. Sends to `warm` when the first phase begins. Returns for each phase what the
/// tasks of each node have met.
fn load(pool: &farside::Pool, phase: &AtomicUsize, warm: mpsc::Sender<()>) -> Vec<Vec<Met>> {
    let endpoint = Rc::new(pool.endpoint_over_all().expect("the nodes serve"));
    let options = Options::default();
    let open = || {
        let opened = AnyKv::open(Rc::clone(&endpoint), NODES as u32, "all", &options);
        block_on(&endpoint, opened).expect("the store exists")
    };
    let mut kv = open();
    let mut keys: Vec<Vec<Vec<u8>>> = vec![Vec::new(); NODES];
    for number in 0..KEYS {
        let key = number.to_be_bytes().to_vec();
        keys[kv.node_of(&key).0 as usize].push(key);
    }
    let items: Vec<(&[u8], &[u8])> = keys.iter().flatten().map(|key| (&key[..], &[7; 100][..])).collect();
    for batch in items.chunks(60) {
        block_on(&endpoint, kv.put_many(batch)).expect("stored");
    }
    let met = RefCell::new(vec![vec![Met::default(); NODES]; Phase::Over as usize]);
    let warm_until = endpoint.now() + PHASE / 2;
    let warm = Cell::new(Some(warm));
    // Times at which the tasks have noticed the begin of each phase.
    let begun = RefCell::new(vec![endpoint.now()]);
    let mut clients: Vec<_> = (0..NODES * TASKS).map(|_| open()).collect();
    let mut core = Core::new(&endpoint);
    for (task, kv) in clients.iter_mut().enumerate() {
        let (node, endpoint, met, begun, warm) = (task % NODES, &endpoint, &met, &begun, &warm);
        let keys = &keys[node];
        core.spawn(async move {
            for key in keys.iter().cycle().skip(task * 7) {
                let since = endpoint.now();
                let outcome = kv.get(key).await.map(|item| item.is_some());
                let (now, at) = (endpoint.now(), phase.load(Ordering::Acquire));
                if at == Phase::Over as usize {
                    return;
                }
                let noticed = begun.borrow().len();
                if noticed <= at {
                    begun.borrow_mut().push(now);
                }
                if now < warm_until {
                    continue;
                }
                if let Some(warm) = warm.take() {
                    warm.send(()).expect("the test waits");
                }
                let has_failed = outcome.is_err();
                met.borrow_mut()[at][node].count(outcome, node, since, now);
                if has_failed {
                    endpoint.sleep(PAUSE).await;
                }
            }
        });
    }
    let began = Instant::now();
    core.run();
    assert!(began.elapsed() < PATIENCE, "a task hung");
    drop(core);
    let mut met = met.into_inner();
    for (phase, begun) in met.iter_mut().zip(begun.into_inner()) {
        phase.iter_mut().for_each(|met| met.first = met.first.map(|first| first.saturating_sub(begun)));
    }
    met
}

impl Met {
    /// Counts the outcome of a read of one of the keys of `node`, which lasted from `since` to `now`.
    fn count(&mut self, outcome: Result<bool, KvError>, node: usize, since: Duration, now: Duration) {
        match outcome {
            Ok(is_there) => {
                assert!(is_there, "a key of node {node} is lost");
                self.reads += 1;
                self.first.get_or_insert(now);
            }
            Err(error) => {
                self.failures += 1;
                self.slowest_failure = self.slowest_failure.max(now.saturating_sub(since));
                let text = error.to_string();
                if !text.contains(&format!("node {node}")) {
                    self.unnamed = Some(text);
                }
            }
        }
    }
}

#[test]
fn two_of_three_nodes_go_on_while_the_third_is_dead_and_it_is_used_again() {
    survive("tcp");
    survive("shm");
}
