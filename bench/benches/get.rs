//! Cost of a whole GET beyond its memory accesses: PRISM-KV on `local` and `shm`, compared with the physical floor.
//!
//! The store has one million values of 512 bytes, and each key has its own slot. Both sides fetch the same keys in the
//! same order. With a single task, the next key depends on the bytes just fetched, so no CPU overlaps two fetches.
//! Store and floor alternate within one run. The results are ratios.
//!
//! A third measurement has as many GETs in flight as the second one, but each task fetches a group of keys by one
//! chain. It shows what a GET costs without a future, a chain and a reply of its own.

mod support;

use farside_bench::floor::{Floor, HugePages, Layout, Workload};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::Core;
use farside_systems::kv::{Item, Kv};
use std::cell::Cell;
use std::hint::black_box;
use std::rc::Rc;
use std::time::{Duration, Instant};
use support::{Client, Store, median, open, value_byte};

const RECORDS: u64 = 1_000_000;
const VALUE_SIZE: usize = 512;
/// Quota in bytes for the table, the buffers and the reserve.
const QUOTA: u64 = 896 << 20;
const TASKS: usize = 16;
/// Keys that a task fetches by one chain in the measurement of groups.
const GROUP: usize = 8;
const ROUNDS: usize = 3;
/// Number of slices of a round. Store and floor alternate by slice, so that a noisy neighbour affects both.
const SLICES: usize = 8;
const SLICE: Duration = Duration::from_millis(120);
/// Number of GETs between two readings of the clock.
const GETS_PER_LOOK: u64 = 64;

fn main() {
    let layout = Layout {
        records: RECORDS,
        value_size: VALUE_SIZE as u32,
        spares: 0,
        collision_free: true,
        huge_pages: HugePages::IfAvailable,
        seed: 7,
    };
    let floor = Floor::build(layout).expect("memory for the floor");
    let store = Store::fill(RECORDS, VALUE_SIZE, QUOTA);
    println!("page size {} bytes", store.memory().page_size().0);
    for (fabric, endpoint) in [("local", store.endpoint()), ("shm", store.shm_endpoint())] {
        report(fabric, &floor, &mut Clients::new(endpoint, floor.keys()));
    }
}

/// Measures and prints the ratios of each round and their medians.
fn report(fabric: &str, floor: &Floor, clients: &mut Clients<'_>) {
    let (mut alone, mut together, mut in_groups) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let one = compare(floor, clients, 1, 1);
        let many = compare(floor, clients, TASKS, 1);
        let groups = compare(floor, clients, TASKS / GROUP, GROUP);
        if round == 0 {
            continue; // Warm-up.
        }
        println!(
            "{fabric}, round {round}: 1 task {:.0} ns, floor {:.0} ns, time ratio {:.2}; \
             {TASKS} tasks {:.2} M/s, floor {:.2} M/s, rate ratio {:.2}; \
             {} tasks with {GROUP} keys each {:.2} M/s, rate ratio {:.2}",
            one.ns,
            one.floor_ns,
            one.ns / one.floor_ns,
            1e3 / many.ns,
            1e3 / many.floor_ns,
            many.floor_ns / many.ns,
            TASKS / GROUP,
            1e3 / groups.ns,
            groups.floor_ns / groups.ns
        );
        alone.push(one.ns / one.floor_ns);
        together.push(many.floor_ns / many.ns);
        in_groups.push(groups.floor_ns / groups.ns);
    }
    println!("{fabric}: get/floor time ratio, 1 task: {:.2}", median(alone));
    println!("{fabric}: get/floor rate ratio, {TASKS} tasks: {:.2}", median(together));
    println!("{fabric}: get/floor rate ratio, {TASKS} in groups of {GROUP}: {:.2}", median(in_groups));
}

struct Compared {
    ns: f64,
    floor_ns: f64,
}

/// Measures store and floor in alternating slices, with `tasks` tasks that fetch `group` keys at a time. Returns the
/// median times per GET in nanoseconds.
fn compare(floor: &Floor, clients: &mut Clients<'_>, tasks: usize, group: usize) -> Compared {
    let (mut ns, mut floor_ns) = (Vec::new(), Vec::new());
    for _ in 0..SLICES {
        ns.push(clients.ns_per_get(tasks, group));
        let measured = floor.measure(Workload::C, tasks * group, SLICE).expect("a valid number of tasks");
        assert_eq!(measured.mismatches, 0, "the floor returns every key's own value");
        floor_ns.push(1e9 / measured.ops_per_s);
    }
    Compared { ns: median(ns), floor_ns: median(floor_ns) }
}

/// The clients of one core, one for each of the core's tasks.
struct Clients<'a> {
    endpoint: Rc<Direct>,
    clients: Vec<Client>,
    keys: &'a [u32],
    /// Index of the next key to fetch.
    next: Cell<usize>,
    mismatches: Cell<u64>,
}

impl<'a> Clients<'a> {
    fn new(endpoint: Rc<Direct>, keys: &'a [u32]) -> Clients<'a> {
        assert!(keys.len().is_power_of_two(), "indexes wrap around with a mask");
        let clients = (0..TASKS).map(|_| open(&endpoint)).collect();
        Clients { endpoint, clients, keys, next: Cell::new(0), mismatches: Cell::new(0) }
    }

    fn ns_per_get(&mut self, tasks: usize, group: usize) -> f64 {
        let (gets, over) = (Cell::new(0), Cell::new(false));
        let started = Instant::now();
        let mut core = Core::new(&*self.endpoint);
        for client in &mut self.clients[..tasks] {
            let (gets, over, keys, next) = (&gets, &over, self.keys, &self.next);
            let mismatches = &self.mismatches;
            core.spawn(async move {
                while !over.get() {
                    for _ in 0..GETS_PER_LOOK / group as u64 {
                        let wrong = match group {
                            1 => u64::from(fetch(client, keys, next).await != 0),
                            _ => fetch_group(client, keys, next).await,
                        };
                        mismatches.set(mismatches.get() + wrong);
                    }
                    gets.set(gets.get() + GETS_PER_LOOK);
                    over.set(over.get() || started.elapsed() >= SLICE);
                }
            });
        }
        core.run();
        drop(core);
        assert_eq!(self.mismatches.get(), 0, "the store returns every key's own value");
        started.elapsed().as_nanos() as f64 / gets.get() as f64
    }
}

/// Performs one GET, and reads its value before the next key is drawn. Returns the difference of the value's last byte
/// from its expected value: 0, unless there is a fault.
#[inline]
async fn fetch(client: &mut Client, keys: &[u32], next: &Cell<usize>) -> u8 {
    let place = next.get();
    next.set((place + 1) & (keys.len() - 1));
    let number = u64::from(keys[place]);
    let item =
        client.get(&number.to_be_bytes()).await.expect("a healthy store").expect("every key has a value");
    let value = black_box(item.value);
    let wrong = value.last().map_or(1, |last| last ^ value_byte(number, VALUE_SIZE - 1));
    next.set((next.get() + usize::from(wrong)) & (keys.len() - 1)); // The next key depends on the fetched bytes.
    wrong
}

/// Performs [`GROUP`] GETs by one chain. Returns the number of wrong values.
async fn fetch_group(client: &mut Client, keys: &[u32], next: &Cell<usize>) -> u64 {
    let place = next.get();
    next.set((place + GROUP) & (keys.len() - 1));
    let numbers: [u64; GROUP] = std::array::from_fn(|nth| keys[(place + nth) & (keys.len() - 1)].into());
    let bytes = numbers.map(u64::to_be_bytes);
    let mut wrong = 0;
    let check = |nth: usize, item: Option<Item<'_>>| {
        let value = black_box(item.expect("every key has a value").value);
        let right = value_byte(numbers[nth], VALUE_SIZE - 1);
        wrong += u64::from(value.last() != Some(&right));
    };
    client.get_many(&bytes.each_ref().map(|key| &key[..]), check).await.expect("a healthy store");
    wrong
}
