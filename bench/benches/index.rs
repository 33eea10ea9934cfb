//! Ordered indexes with one client thread: SMART over `shm`, beside maps in this process's own memory.
//!
//! The rivals are `BTreeMap`, and two adaptive radix trees: `blart`, for one thread, and `congee`, for many. All have
//! the same keys of 8 bytes with values of 8 bytes. SMART's client has a warm cache that holds all inner nodes. Index
//! and rivals alternate within one run. The results are ratios of rates.
//!
//! `cargo bench -p farside-bench --bench index -- [dense] [KEYS]` takes 10 million keys if no number is given. They are
//! spread over all 64 bits; `dense` takes the numbers from 0 on.
//!
//! Invariant: every value that is read is checked.

use blart::TreeMap;
use congee::U64Congee;
use farside_bench::report::Spread;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Core, block_on, yield_now};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::shm;
use farside_node::host::{self, Host};
use farside_remote::NodeId;
use farside_remote::control::Ask;
use farside_systems::index::Index;
use farside_systems::index::Indexing;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart};
use farside_systems::registry;
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, Sizing, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::hint::black_box;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

const KEYS: u64 = 10_000_000;
/// Bytes of the store for each key: a leaf, its state, and a share of the nodes. Spread keys need more nodes.
const BYTES_PER_KEY: u64 = 640;
const TASKS: usize = 16;
/// Number of keys that a scan returns.
const SCANNED: usize = 100;
const ROUNDS: usize = 5;
const SLICE: Duration = Duration::from_millis(300);
/// Number of operations between two looks at the clock.
const GETS: u64 = 64;
const SCANS: u64 = 4;
const NAME: &str = "bench";
const NODE: NodeId = NodeId(0);

/// The keys, as a function of their numbers.
#[derive(Clone, Copy)]
struct Keys {
    count: u64,
    is_dense: bool,
}

impl Keys {
    fn key(self, number: u64) -> u64 {
        // An odd factor makes a permutation of all numbers of 64 bits.
        if self.is_dense { number } else { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    /// The key after `state` in a fixed pseudo-random order, with repetitions.
    fn next(self, state: &Cell<u64>) -> u64 {
        let next =
            state.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.set(next);
        self.key(((u128::from(next) * u128::from(self.count)) >> 64) as u64)
    }
}

fn value(key: u64) -> u64 {
    key ^ 0x5555
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(KEYS);
    let keys = Keys { count, is_dense: arguments.iter().any(|argument| argument == "dense") };
    let quota = (count * BYTES_PER_KEY).max(64 << 20).next_multiple_of(2 << 20);
    let memory = Mapping::create(quota + (64 << 20), Pages::Auto).expect("memory for the node");
    let socket = std::env::temp_dir().join(format!("farside-index-{}.sock", std::process::id()));
    let options = host::Options { socket: Some(socket.clone()), ..host::Options::default() };
    let node = Host::start(memory, registry::kinds(), options).expect("a node");
    let indexing = Indexing { chunk: Some(1 << 20), ..Indexing::default() };
    let sizing = Sizing { items: Some(count), key_len: 8, value_len: 8, indexing, ..Sizing::default() };
    let (name, kind, parameters) = (NAME.to_owned(), KIND.to_owned(), SmartKind::parameters(&sizing));
    node.ask(Ask::CreateStore { name, kind, parameters, quota }, Duration::from_secs(60))
        .expect("memory for the store");
    let endpoint = Rc::new(shm::connect(&socket, NODE).expect("the node serves there"));
    let index = block_on(&*endpoint, open(Rc::clone(&endpoint), keys));
    let work = Work::default();
    let mut core = Core::new(&*endpoint);
    core.spawn(index.keeper());
    for _ in 0..TASKS {
        core.spawn(work.task(index.another(), keys));
    }
    core.spawn(compare(index, keys, &work));
    core.run();
}

type Client = Smart<Rc<Direct>>;

async fn open(endpoint: Rc<Direct>, keys: Keys) -> Client {
    let store = store::fetch_of(&endpoint, NODE, NAME, KIND).await.expect("the store exists");
    let cache = (keys.count as usize * 512).max(64 << 20);
    let options =
        Options { entropy: u64::from(std::process::id()), node_cache: Some(cache), ..Options::NONE };
    SmartKind::open(endpoint, &Members::one(NODE, store), &options).await.expect("a store of its kind")
}

/// What the tasks of the index's client do now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    /// Puts all keys, each by one task.
    Load,
    /// Gets keys, by this number of tasks.
    Get(usize),
    /// Scans from random keys on, by this number of tasks.
    Scan(usize),
    Over,
}

/// Work that the tasks share.
#[derive(Default)]
struct Work {
    phase: Cell<Phase>,
    tasks: Cell<usize>,
    /// Number of tasks that are at work.
    busy: Cell<usize>,
    /// Number of operations that were done in this phase; while keys are loaded, number of tasks that are done.
    done: Cell<u64>,
    /// Tasks that have nothing to do in this phase. They sleep, so that they cost the others no time.
    asleep: RefCell<Vec<Waker>>,
}

impl Work {
    fn begin(&self, phase: Phase) {
        self.phase.set(phase);
        self.asleep.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until another phase than `phase` has begun.
    async fn is_over(&self, phase: Phase) {
        poll_fn(|cx| {
            if self.phase.get() != phase {
                return Poll::Ready(());
            }
            self.asleep.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// A task of the client. It does what the phase says until that is over.
    async fn task(&self, mut index: Client, keys: Keys) {
        let number = self.tasks.replace(self.tasks.get() + 1);
        let random = Cell::new(number as u64);
        while self.phase.get() != Phase::Over {
            let phase = self.phase.get();
            self.busy.set(self.busy.get() + 1);
            match phase {
                Phase::Load => self.load(&mut index, keys, number as u64).await,
                Phase::Get(tasks) if number < tasks => self.get(&mut index, keys, &random).await,
                Phase::Scan(tasks) if number < tasks => self.scan(&mut index, keys, &random).await,
                _ => {}
            }
            self.busy.set(self.busy.get() - 1);
            self.is_over(phase).await;
        }
    }

    async fn load(&self, index: &mut Client, keys: Keys, first: u64) {
        for number in (first..keys.count).step_by(TASKS) {
            let key = keys.key(number);
            let stored = index.put(&key.to_be_bytes(), &value(key).to_le_bytes()).await;
            stored.expect("memory for every key");
        }
        self.done.set(self.done.get() + 1);
    }

    async fn get(&self, index: &mut Client, keys: Keys, random: &Cell<u64>) {
        while self.phase.get() != Phase::Idle {
            for _ in 0..GETS {
                let key = keys.next(random);
                let found = index.get(&key.to_be_bytes()).await.expect("a healthy store");
                assert_eq!(found, Some(&value(key).to_le_bytes()[..]), "every key has its value");
            }
            self.done.set(self.done.get() + GETS);
        }
    }

    async fn scan(&self, index: &mut Client, keys: Keys, random: &Cell<u64>) {
        while self.phase.get() != Phase::Idle {
            for _ in 0..SCANS {
                let from = keys.next(random);
                let check = |key: &[u8], found: &[u8]| {
                    let key = u64::from_be_bytes(key.try_into().expect("8 bytes"));
                    assert_eq!(found, value(key).to_le_bytes(), "every key has its value");
                };
                black_box(index.scan(&from.to_be_bytes(), SCANNED, check).await.expect("a healthy store"));
            }
            self.done.set(self.done.get() + SCANS);
        }
    }

    /// Runs a phase for a slice. Returns the operations per second.
    async fn rate(&self, phase: Phase) -> f64 {
        self.done.set(0);
        let began = Instant::now();
        self.begin(phase);
        while began.elapsed() < SLICE {
            yield_now().await;
        }
        self.begin(Phase::Idle);
        // The caller is never at work, so nobody is once the tasks have ended their last operations.
        yield_now().await;
        while self.busy.get() > 0 {
            yield_now().await;
        }
        self.done.get() as f64 / began.elapsed().as_secs_f64()
    }
}

/// Loads the index and its rivals, then measures them in turn.
async fn compare(mut index: Client, keys: Keys, work: &Work) {
    let began = Instant::now();
    work.begin(Phase::Load);
    while work.done.get() < TASKS as u64 {
        yield_now().await;
    }
    work.begin(Phase::Idle);
    println!(
        "loaded {} keys at {:.2} M/s",
        keys.count,
        keys.count as f64 / began.elapsed().as_secs_f64() / 1e6
    );
    let stat = index.stat().await.expect("a healthy store");
    println!("{stat:?}");
    let rivals = Rivals::new(keys);
    work.rate(Phase::Get(TASKS)).await; // Fills the cache.
    let gets: [Phase; 2] = [Phase::Get(1), Phase::Get(TASKS)];
    for phase in gets {
        let mut rates = Rates::default();
        for _ in 0..ROUNDS {
            rates.add("smart", work.rate(phase).await);
            rates.add("BTreeMap", rate(GETS, |random| rivals.get_btree(keys.next(random))));
            rates.add("blart", rate(GETS, |random| rivals.get_blart(keys.next(random))));
            rates.add("congee", rate(GETS, |random| rivals.get_congee(keys.next(random))));
        }
        rates.print(&format!("{phase:?}"));
    }
    for phase in [Phase::Scan(1), Phase::Scan(TASKS)] {
        let mut rates = Rates::default();
        for _ in 0..ROUNDS {
            rates.add("smart", work.rate(phase).await);
            rates.add("BTreeMap", rate(SCANS, |random| rivals.scan_btree(keys.next(random))));
            rates.add("blart", rate(SCANS, |random| rivals.scan_blart(keys.next(random))));
            rates.add("congee", rate(SCANS, |random| rivals.scan_congee(keys.next(random))));
        }
        rates.print(&format!("{phase:?} of {SCANNED} keys"));
    }
    work.begin(Phase::Over);
}

/// Rates of one operation by contender, in the order in which they were first added.
#[derive(Default)]
struct Rates(Vec<(&'static str, Vec<f64>)>);

impl Rates {
    fn add(&mut self, contender: &'static str, rate: f64) {
        match self.0.iter_mut().find(|(name, _)| *name == contender) {
            Some((_, rates)) => rates.push(rate),
            None => self.0.push((contender, vec![rate])),
        }
    }

    /// Prints each contender's rate, and the index's rate divided by it, round by round.
    fn print(&self, title: &str) {
        let ours = &self.0[0].1;
        for (name, rates) in &self.0 {
            let ratios: Vec<f64> = ours.iter().zip(rates).map(|(ours, theirs)| ours / theirs).collect();
            let (rate, ratio) = (Spread::of(rates).expect("rounds"), Spread::of(&ratios).expect("rounds"));
            println!(
                "{title:<22} {name:<9} {:>8.3} M/s; smart is {:.2} of it ({:.2} to {:.2})",
                rate.median / 1e6,
                ratio.median,
                ratio.min,
                ratio.max
            );
        }
    }
}

/// Maps in this process's memory with the same keys and values.
struct Rivals {
    btree: BTreeMap<u64, u64>,
    blart: TreeMap<[u8; 8], u64>,
    congee: U64Congee<usize>,
}

impl Rivals {
    fn new(keys: Keys) -> Rivals {
        let (mut btree, mut blart, congee) = (BTreeMap::new(), TreeMap::new(), U64Congee::new());
        let guard = congee::epoch::pin();
        for key in (0..keys.count).map(|number| keys.key(number)) {
            btree.insert(key, value(key));
            blart.try_insert(key.to_be_bytes(), value(key)).expect("no key is a prefix of another");
            congee.insert(key, value(key) as usize, &guard).expect("memory for every key");
        }
        Rivals { btree, blart, congee }
    }

    fn get_btree(&self, key: u64) {
        assert_eq!(self.btree.get(&key), Some(&value(key)), "every key has its value");
    }

    fn get_blart(&self, key: u64) {
        assert_eq!(self.blart.get(&key.to_be_bytes()), Some(&value(key)), "every key has its value");
    }

    fn get_congee(&self, key: u64) {
        let found = self.congee.get(key, &congee::epoch::pin());
        assert_eq!(found, Some(value(key) as usize), "every key has its value");
    }

    fn scan_btree(&self, from: u64) {
        for (&key, &found) in self.btree.range(from..).take(SCANNED) {
            assert_eq!(found, value(key), "every key has its value");
        }
    }

    fn scan_blart(&self, from: u64) {
        for (key, &found) in self.blart.range(from.to_be_bytes()..).take(SCANNED) {
            assert_eq!(found, value(u64::from_be_bytes(*key)), "every key has its value");
        }
    }

    fn scan_congee(&self, from: u64) {
        let mut found = [([0; 8], 0); SCANNED];
        let count = self.congee.range(from, u64::MAX, &mut found, &congee::epoch::pin());
        for (key, found) in &found[..count] {
            assert_eq!(*found as u64, value(u64::from_be_bytes(*key)), "every key has its value");
        }
    }
}

/// Runs an operation for a slice, looking at the clock after each `batch`. Returns the operations per second.
fn rate(batch: u64, operation: impl Fn(&Cell<u64>)) -> f64 {
    let (random, began) = (Cell::new(1), Instant::now());
    let mut done = 0;
    while began.elapsed() < SLICE {
        (0..batch).for_each(|_| operation(&random));
        done += batch;
    }
    done as f64 / began.elapsed().as_secs_f64()
}
