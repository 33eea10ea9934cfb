//! What running a chain costs beyond the work itself: a GET of PRISM-KV against the same GET written by hand.
//!
//! Four ways to one value in cache: `run`, on a chain that was built before; the whole GET, from building the chain to
//! finding the key in the reply; by hand, from a mapping of the same memory; and by hand with the same rights judged as
//! `run` judges them. Each hands the value to its caller after comparing the key. The last lines are the ratios, of
//! medians of many short measurements that alternate.
//! Invariant: the GET by hand checks what it must to be safe on bytes that others write, and nothing more.

mod support;

use criterion::Criterion;
use farside_fabrics::memory::Mapping;
use farside_remote::{Addr, Chain, ChainBuf, Key, Memory, Out, Reply, Width, read};
use farside_systems::kv::prism_kv::layout::{HEADER_SIZE, ItemView, SLOT_SIZE};
use rustix::mm::{MapFlags, ProtFlags};
use std::hint::black_box;
use std::time::{Duration, Instant};
use support::{Store, median};

/// Few enough that their slots and items stay in the first two caches.
const RECORDS: u64 = 64;
const VALUE_SIZE: usize = 512;
/// As much of an item as PRISM-KV asks for.
const READ_MAX: u32 = 64 * 1024 - 64;

/// Measurements of each kind, and GETs in one of them.
const ROUNDS: usize = 301;
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
    let mut by_hand = ByHand::new(store.memory());
    let rights = Rights { memory: store.memory(), key };

    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let mut group = criterion.benchmark_group("GET of 512 bytes in cache");
    group.bench_function("run", |bencher| {
        let mut next = built.iter().cycle();
        bencher.iter(|| chains.run(next.next().expect("it cycles")));
    });
    group.bench_function("build, run and decode", |bencher| {
        let mut next = targets.iter().cycle();
        bencher.iter(|| chains.get(next.next().expect("it cycles")));
    });
    group.bench_function("by hand", |bencher| {
        let mut next = targets.iter().cycle();
        bencher.iter(|| by_hand.get(next.next().expect("it cycles")));
    });
    group.finish();
    criterion.final_summary();

    let (mut run_ns, mut get_ns, mut hand_ns, mut judged_ns) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        run_ns.push(ns_per_get(&built, |built| chains.run(built)));
        get_ns.push(ns_per_get(&targets, |target| chains.get(target)));
        hand_ns.push(ns_per_get(&targets, |target| by_hand.get(target)));
        judged_ns.push(ns_per_get(&targets, |target| rights.admit(target) && by_hand.get(target)));
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

/// What all are told: the key, and where its slot is.
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
            assert!(get(one), "every key has its value");
        }
    }
    started.elapsed().as_nanos() as f64 / GETS as f64
}

/// The GET of PRISM-KV, without what is asynchronous about it.
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
        let Ok(()) = farside_remote::run(self.memory, 1, chain.view(), &mut self.reply);
        finds(&self.reply, *item, target)
    }

    #[inline]
    fn get(&mut self, target: &Target) -> bool {
        let Built { chain, item } = Built::new(&mut self.chain, self.key, target);
        let Ok(()) = farside_remote::run(self.memory, 1, chain.view(), &mut self.reply);
        finds(&self.reply, item, target)
    }
}

/// A chain that is only to be run.
struct Built<'a> {
    chain: Chain<'a>,
    item: Out<[u8]>,
}

impl<'a> Built<'a> {
    #[inline]
    fn new(buffer: &'a mut ChainBuf, key: Key, target: &Target) -> Built<'a> {
        let mut chain = buffer.begin(key);
        let item = chain.also(read(Addr::new(target.slot_at), READ_MAX).indirect().bounded());
        Built { chain, item }
    }
}

#[inline]
fn finds(reply: &Reply, item: Out<[u8]>, target: &Target) -> bool {
    let Ok(bytes) = reply.get(item) else { return false };
    let Ok(item) = ItemView::decode(bytes) else { return false };
    let found = item.is_of(&target.key);
    found && item.value().is_ok_and(|value| black_box(value).len() == VALUE_SIZE)
}

/// The rights that `run` judges on the way of a GET: the key, the slot, the item.
struct Rights<'a> {
    memory: &'a Mapping,
    key: Key,
}

impl Rights<'_> {
    #[inline]
    fn admit(&self, target: &Target) -> bool {
        let Ok(admitted) = self.memory.admits(self.key);
        let Ok(slot_reach) = self.memory.reach(self.key.region(), target.slot_at, SLOT_SIZE);
        let Ok(slot) = self.memory.load(target.slot_at, Width::W16);
        let Ok(item_reach) =
            self.memory.reach(self.key.region(), slot as u64, u64::from((slot >> 64) as u32));
        admitted && slot_reach == SLOT_SIZE && item_reach == u64::from((slot >> 64) as u32)
    }
}

/// The same by hand, on a mapping of its own of the same memory.
struct ByHand {
    base: *const u8,
    len: usize,
    buffer: Vec<u8>,
}

impl ByHand {
    fn new(memory: &Mapping) -> ByHand {
        let len = memory.geometry().size() as usize;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping wherever the kernel likes, of a file that is sealed against resizing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, memory.fd(), 0) };
        let base = base.expect("the node's memory can be mapped twice").cast_const().cast();
        ByHand { base, len, buffer: vec![0; READ_MAX as usize] }
    }

    #[inline]
    fn get(&mut self, target: &Target) -> bool {
        const KEY_AT: usize = HEADER_SIZE;
        const VALUE_AT: usize = KEY_AT + 8;
        let slot_at = target.slot_at as usize;
        assert!(slot_at <= self.len - SLOT_SIZE as usize);
        // SAFETY: within the mapping, as just checked; nobody writes while this benchmark reads.
        let slot = unsafe { self.base.add(slot_at).cast::<u128>().read() };
        let (at, bound) = (slot as u64 as usize, (slot >> 64) as u32 as usize);
        if at > self.len || bound > self.len - at || !(VALUE_AT..=self.buffer.len()).contains(&bound) {
            return false;
        }
        // SAFETY: within the mapping and within the buffer, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at), self.buffer.as_mut_ptr(), bound) };
        let item = &self.buffer[..bound];
        item[KEY_AT..VALUE_AT] == target.key && black_box(&item[VALUE_AT..]).len() == VALUE_SIZE
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and read by nobody but `get`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast_mut().cast(), self.len) };
        assert!(unmapped.is_ok(), "what was mapped can be unmapped");
    }
}
