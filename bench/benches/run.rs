//! Cost of running a chain beyond the work itself: PRISM-KV's GET, compared with the same GET written by hand.
//!
//! The benchmark compares four ways to read a value in cache:
//! * `run` of a chain that was built before,
//! * the whole GET, from building the chain to comparing the key in the reply,
//! * by hand, from a mapping of the same memory,
//! * by hand, with the same checks of rights as `run`.
//!
//! Each way compares the key and passes the value to its caller. The last lines of the output are ratios of medians of
//! many short, alternating measurements.
//!
//! Invariant: no client writes to the store after it is filled.

mod support;

use criterion::Criterion;
use farside_bench::floor::ByHand;
use farside_fabrics::memory::Mapping;
use farside_remote::arena::session::SessionId;
use farside_remote::{Addr, By, Chain, ChainBuf, Key, Memory, Out, Reply, Width, read};
use farside_systems::kv::prism_kv::layout::{ItemView, SLOT_SIZE};
use std::hint::black_box;
use std::time::{Duration, Instant};
use support::{Store, median};

const BY: By = By::itself(SessionId { slot: 0, number: 1 });
/// Number of records. It is small, so that the slots and items stay in the first two caches.
const RECORDS: u64 = 64;
const VALUE_SIZE: usize = 512;
/// Maximum length in bytes of PRISM-KV's READ of an item.
const READ_MAX: u32 = 64 * 1024 - 64;

/// Number of measurements of each way to read.
const ROUNDS: usize = 301;
/// Number of GETs in one measurement.
const GETS: u64 = 64 * 400;

fn main() {
    let store = Store::fill(RECORDS, VALUE_SIZE, 16 << 20);
    let targets: Vec<Target> = (0..RECORDS).map(|number| store.target(number)).collect();
    let key = store.table.extent.key;
    let mut chains = Chains::new(&store);
    let mut buffers: Vec<ChainBuf> = targets.iter().map(|_| ChainBuf::new()).collect();
    let built = buffers.iter_mut().zip(&targets);
    let built: Vec<(&Target, Built<'_>)> =
        built.map(|(buffer, target)| (target, Built::new(buffer, key, target))).collect();
    let mut by_hand =
        ByHand::map(store.memory().fd(), READ_MAX as usize).expect("a second mapping of the node's memory");
    let rights = Rights { memory: store.memory(), key };

    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let mut group = criterion.benchmark_group("GET of 512 bytes in cache");
    group.bench_function("run", |bencher| {
        let mut next = built.iter().cycle();
        bencher.iter(|| chains.run(next.next().expect("an endless iterator")));
    });
    group.bench_function("build, run and decode", |bencher| {
        let mut next = targets.iter().cycle();
        bencher.iter(|| chains.get(next.next().expect("an endless iterator")));
    });
    group.bench_function("by hand", |bencher| {
        let mut next = targets.iter().cycle();
        bencher.iter(|| gets(&mut by_hand, next.next().expect("an endless iterator")));
    });
    group.finish();
    criterion.final_summary();

    let (mut run_ns, mut get_ns, mut hand_ns, mut judged_ns) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        run_ns.push(ns_per_get(&built, |built| chains.run(built)));
        get_ns.push(ns_per_get(&targets, |target| chains.get(target)));
        hand_ns.push(ns_per_get(&targets, |target| gets(&mut by_hand, target)));
        judged_ns.push(ns_per_get(&targets, |target| rights.admit(target) && gets(&mut by_hand, target)));
    }
    let (run_ns, get_ns) = (median(run_ns), median(get_ns));
    let (hand_ns, judged_ns) = (median(hand_ns), median(judged_ns));
    println!(
        "run {run_ns:.1} ns, whole GET {get_ns:.1} ns, by hand {hand_ns:.1} ns, and judged {judged_ns:.1} ns"
    );
    println!("run/hand ratio: {:.2}", run_ns / hand_ns);
    println!("run/hand and judged ratio: {:.2}", run_ns / judged_ns);
    println!("whole GET/hand ratio: {:.2}", get_ns / hand_ns);
}

/// Input of a GET: the key, and the address of its slot.
struct Target {
    key: [u8; 8],
    slot_at: u64,
}

impl Store {
    fn target(&self, number: u64) -> Target {
        let key = number.to_be_bytes();
        let index = self.table.probe(&key).next().expect("a table has slots");
        Target { key, slot_at: self.table.slot_at(index).raw() }
    }
}

fn ns_per_get<T>(each: &[T], mut get: impl FnMut(&T) -> bool) -> f64 {
    let started = Instant::now();
    for _ in 0..GETS / RECORDS {
        for one in each {
            assert!(get(one), "every key has a value");
        }
    }
    started.elapsed().as_nanos() as f64 / GETS as f64
}

/// State for PRISM-KV's GETs without their asynchronous parts.
struct Chains<'a> {
    memory: &'a Mapping,
    key: Key,
    chain: ChainBuf,
    reply: Reply,
}

impl<'a> Chains<'a> {
    fn new(store: &'a Store) -> Chains<'a> {
        let key = store.table.extent.key;
        Chains { memory: store.memory(), key, chain: ChainBuf::new(), reply: Reply::new() }
    }

    #[inline]
    fn run(&mut self, (target, Built { chain, item }): &(&Target, Built<'_>)) -> bool {
        let Ok(()) = farside_remote::run(self.memory, BY, chain.view(), &mut self.reply);
        finds(&self.reply, *item, target)
    }

    #[inline]
    fn get(&mut self, target: &Target) -> bool {
        let mut chain = self.chain.begin(self.key);
        let item = ask_for(&mut chain, target);
        let Ok(()) = farside_remote::run(self.memory, BY, chain.view(), &mut self.reply);
        finds(&self.reply, item, target)
    }
}

/// A chain that is built before the measurement.
struct Built<'a> {
    chain: Chain<'a>,
    item: Out<[u8]>,
}

impl<'a> Built<'a> {
    fn new(buffer: &'a mut ChainBuf, key: Key, target: &Target) -> Built<'a> {
        let mut chain = buffer.begin(key);
        let item = ask_for(&mut chain, target);
        Built { chain, item }
    }
}

/// Adds the only op of a GET, an indirect READ, to a chain.
#[inline]
fn ask_for(chain: &mut Chain<'_>, target: &Target) -> Out<[u8]> {
    chain.also(read(Addr::new(target.slot_at), READ_MAX).indirect().bounded())
}

#[inline]
fn finds(reply: &Reply, item: Out<[u8]>, target: &Target) -> bool {
    let Ok(bytes) = reply.get(item) else { return false };
    let Ok(item) = ItemView::decode(bytes) else { return false };
    let found = item.is_of(&target.key);
    found && item.value().is_ok_and(|value| black_box(value).len() == VALUE_SIZE)
}

#[inline]
fn gets(by_hand: &mut ByHand, target: &Target) -> bool {
    let value = by_hand.get(target.slot_at as usize, &target.key);
    value.is_some_and(|value| black_box(value).len() == VALUE_SIZE)
}

/// State for the checks of rights that `run` makes for a GET: of the key, the slot and the item.
struct Rights<'a> {
    memory: &'a Mapping,
    key: Key,
}

impl Rights<'_> {
    #[inline]
    fn admit(&self, target: &Target) -> bool {
        let Ok(rights) = self.memory.admits(self.key);
        let Ok(slot_reach) = self.memory.reach(self.key.region(), target.slot_at, SLOT_SIZE);
        let Ok(slot) = self.memory.load(target.slot_at, Width::W16);
        let Ok(item_reach) =
            self.memory.reach(self.key.region(), slot as u64, u64::from((slot >> 64) as u32));
        let admitted = rights.contains(farside_remote::Rights::READ);
        admitted && slot_reach == SLOT_SIZE && item_reach == u64::from((slot >> 64) as u32)
    }
}
