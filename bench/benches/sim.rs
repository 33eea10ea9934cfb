//! Events per second of the simulator in small worlds, compared with the minimum work for an event: pop the earliest
//! event from a heap and push a later one.
//!
//! [`World::events`] counts the events: sleeps that ended, messages that arrived, and memory accesses. Each world runs
//! to its end from the same seeds, so every sample has the same events. The time of a trial includes the node and its
//! memory, but not the checker. All times are CPU times.
//!
//! Results of one run, in millions of events per second, on a machine with two cores that other processes also used:
//! bare heap 33.7, sleeps 16.1, datagrams 7.5, verbs 7.2; trials of PRISM-KV 8.4 calm and 8.6 with all faults, of Pilaf
//! 8.5 and 8.0.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use farside_sim::fault::{Fault, Struck};
use farside_sim::hardware::PACKET_MAX;
use farside_sim::memory::Bytes;
use farside_sim::network::{Arrival, Inbox, Network, Wire};
use farside_sim::nic::{Completion, Connection, Nic, Timing, Verb};
use farside_sim::random::Random;
use farside_sim::world::{MICROS, World};
use farside_trial::{Setup, System};
use rustix::time::{ClockId, clock_gettime};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;

/// Number of events after which a world without an end of its own is stopped.
const EVENTS: u64 = 100_000;
/// Number of tasks in a world without an end of its own, each with one operation in flight. The bare heap holds the
/// same number of events.
const TASKS: u64 = 16;
/// Number of clients in a trial. The seeds determine all other random draws.
const CLIENTS: u32 = 2;
const SEEDS: u64 = 8;

criterion_group!(benches, sim);
criterion_main!(benches);

fn sim(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sim");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    measure(&mut group, "bare heap", bare_heap);
    measure(&mut group, "sleeps", || in_a_world(sleeps));
    measure(&mut group, "datagrams", || in_a_world(datagrams));
    measure(&mut group, "verbs", || in_a_world(verbs));
    for system in System::all() {
        for (how, faults) in [("calm", &[][..]), ("all faults", &Fault::ALL)] {
            let name = format!("{} trials, {how}", system.name());
            let setup = Setup { clients: Some(CLIENTS), faults: faults.to_vec(), ..Setup::of(system) };
            measure(&mut group, &name, || {
                (0..SEEDS).map(|seed| farside_trial::run(&setup, seed, None).events).sum()
            });
        }
    }
    group.finish();
}

/// Measures `run`, which returns its number of events. This number must always be the same.
fn measure(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut run: impl FnMut() -> u64) {
    group.throughput(Throughput::Elements(run()));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let spent = cpu();
            (0..times).for_each(|_| _ = black_box(run()));
            cpu() - spent
        });
    });
}

/// Returns the CPU time of this thread so far, without the time of concurrent processes.
fn cpu() -> Duration {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

fn bare_heap() -> u64 {
    let random = Random::new(1);
    let mut heap: BinaryHeap<_> = (0..TASKS).map(|number| Reverse((random.below(1_000), number))).collect();
    for _ in 0..EVENTS {
        let Reverse((at, number)) = heap.pop().expect("the heap keeps its size");
        heap.push(Reverse((at + random.below(1_000), number)));
    }
    black_box(heap);
    EVENTS
}

/// Runs a world with the tasks that `begin` starts. Returns the world's number of events.
fn in_a_world(begin: impl Fn(&World)) -> u64 {
    let world = World::new(1);
    begin(&world);
    world.run_while(u64::MAX, || world.events() < EVENTS);
    world.end();
    world.events()
}

fn sleeps(world: &World) {
    let process = world.start_process();
    for _ in 0..TASKS {
        let theirs = world.clone();
        world.spawn(process, async move {
            loop {
                theirs.sleep(theirs.random().below(1_000)).await;
            }
        });
    }
}

/// Starts pairs of hosts. One host of each pair sends back each message of the other host.
fn datagrams(world: &World) {
    let wire = Wire { delay_ns: 2 * MICROS, jitter_ns: MICROS };
    let network = Network::new(world, wire, &Rc::new(Struck::default()));
    for _ in 0..TASKS {
        let ends = [(); 2].map(|()| network.bind_any(network.add_host()));
        network.send(ends[0].address(), ends[1].address(), vec![0; 64]);
        for inbox in ends {
            world.spawn(world.start_process(), send_back(network.clone(), inbox));
        }
    }
}

async fn send_back(network: Network, inbox: Rc<Inbox>) {
    loop {
        let rung = inbox.bell().rung();
        while let Some(arrival) = inbox.take() {
            let Arrival::Message(from, bytes) = arrival else { unreachable!("no connection is opened") };
            network.send(inbox.address(), from, bytes);
        }
        rung.await;
    }
}

/// Starts connections to a NIC, each with several verbs in flight.
fn verbs(world: &World) {
    let bytes = Rc::new(Bytes::new(8 << 20));
    let timing = Timing {
        flight_ns: 600,
        flight_spread_ns: 50,
        link_gbit: 0,
        op_ps: 10_000,
        lists_are_ops: false,
        packet_max: PACKET_MAX,
        fetch_ns: 200,
        fetch_spread_ns: 50,
        land_spread_ns: 20,
        atomic_ns: 100,
        slot_ns: 200,
        slot_spread_ns: 50,
        slot_mask: 0xfff,
        on_chip_ns: 9,
        relaxed: false,
    };
    let nic = Nic::new(world, &bytes, timing);
    for _ in 0..TASKS / 4 {
        world.spawn(world.start_process(), post_for_ever(world.clone(), nic.connect()));
    }
}

async fn post_for_ever(world: World, connection: Connection) {
    let mut posted = VecDeque::<Completion>::new();
    for number in 0_u64.. {
        let at = (4 << 20) + 64 * world.random().below(1 << 10);
        let verb = match number % 4 {
            0 | 1 => Verb::Read { at, len: 128 },
            2 => Verb::Write { at, bytes: number.to_le_bytes().repeat(8) },
            _ => Verb::cas(at, 0, number),
        };
        posted.push_back(connection.post(verb, false));
        if posted.len() == 4 {
            black_box(posted.pop_front().expect("a posted verb").done().await);
        }
    }
}
