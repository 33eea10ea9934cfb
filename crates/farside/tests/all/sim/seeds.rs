//! Runs the simulator with as many seeds as every change can afford, and with all seeds that once found a bug.

use crate::sim::runs;
use farside_sim::fault::Fault;
use farside_sim::memory::Seen;
use farside_systems::registry::named;
use farside_systems::system::Family;
use farside_trial::flight::{Matrix, Phases, can_strike};
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};
use std::collections::BTreeMap;

/// Seeds to run for each pair of a system and a carrier.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=30;
/// The seeds of a block store, whose trials have several nodes and take the longest.
const SEEDS_OF_BLOCKS: std::ops::RangeInclusive<u64> = 1..=18;

/// The seeds of an index, whose trials also have several nodes.
const SEEDS_OF_INDEXES: std::ops::RangeInclusive<u64> = 1..=20;

/// The seeds of a transactional store.
const SEEDS_OF_TRANSACTIONS: std::ops::RangeInclusive<u64> = 1..=12;

/// Further seeds, by system and carrier: faults strike within phases in which no other seed has them.
const MORE_SEEDS: &[(&str, Carrier, u64)] = &[
    ("prism-rs", Carrier::Connections, 43),
    ("abd-lock", Carrier::Datagrams, 20),
    ("guarded", Carrier::Direct, 45),
    ("guarded", Carrier::Datagrams, 47),
    ("guarded", Carrier::Datagrams, 95),
    ("guarded", Carrier::Datagrams, 100),
    ("guarded", Carrier::Datagrams, 157),
    ("guarded", Carrier::Datagrams, 184),
    ("guarded", Carrier::Connections, 108),
    ("guarded", Carrier::Connections, 185),
    ("guarded", Carrier::Connections, 193),
    ("guarded", Carrier::Connections, 254),
    ("guarded", Carrier::Connections, 280),
    ("guarded", Carrier::Connections, 384),
    ("chequer", Carrier::Datagrams, 132),
    ("chequer-message", Carrier::Connections, 40),
    ("smart", Carrier::Direct, 136),
    ("smart", Carrier::Connections, 27),
    ("sherman", Carrier::Datagrams, 24),
    ("sherman", Carrier::Connections, 28),
    ("prism-tx", Carrier::Direct, 77),
    ("prism-tx", Carrier::Connections, 25),
    ("prism-tx", Carrier::Connections, 92),
    ("prism-tx", Carrier::Connections, 95),
    ("prism-tx", Carrier::Connections, 113),
    ("farm", Carrier::Datagrams, 77),
    ("farm", Carrier::Datagrams, 89),
    ("farm", Carrier::Connections, 44),
    ("fasst", Carrier::Datagrams, 42),
    ("fasst", Carrier::Connections, 21),
    ("fasst", Carrier::Connections, 22),
    ("fasst", Carrier::Connections, 43),
    ("fasst", Carrier::Connections, 49),
    ("fasst", Carrier::Connections, 54),
    ("fasst", Carrier::Verbs, 15),
];

/// Changes that happen only in stores with other parameters than those of trials: the tests of `farside-systems` try
/// the lower rungs of the ladder of SMART. Leaves of ART are never torn, so its scans read none again.
const ELSEWHERE: &[(&str, &str)] =
    &[("smart", "leaves replaced"), ("smart", "node locks"), ("art", "scan retries")];

/// Asserts that all seeds of a system over one carrier are good, and that every possible fault strikes. Over verbs,
/// whose clients read what a CPU was writing when it died, deaths must cut writes. Returns the system's phases, how
/// often each fault struck within each phase, and how often the structure of its stores has changed in which way.
#[track_caller]
fn over(system: System, carrier: Carrier) -> (&'static Phases, Matrix, Structure) {
    let setup = Setup { carrier: Some(carrier), ..Setup::of(system) };
    let (mut within, mut structure) = (Matrix::default(), Structure::default());
    let mut struck = [0; Fault::ALL.len()];
    let (mut operations, mut seen) = (0, Seen::default());
    let more = MORE_SEEDS.iter().filter(|(name, of, _)| *name == system.name() && *of == carrier);
    let seeds = match named(system.name()).map(|system| system.family) {
        Some(Family::Blocks) => SEEDS_OF_BLOCKS,
        Some(Family::Index) => SEEDS_OF_INDEXES,
        Some(Family::Txn) => SEEDS_OF_TRANSACTIONS,
        _ => SEEDS,
    };
    for seed in seeds.chain(more.map(|(.., seed)| *seed)) {
        let judged = judge(&setup, seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}");
        let report = judged.report.expect("a good run has a report");
        Fault::ALL.iter().for_each(|fault| struck[*fault as usize] += report.struck.of(*fault));
        within.add(&report.matrix);
        add(&mut structure, report.counters);
        operations += report.record.operations();
        seen = seen.plus(report.seen);
    }
    let phases = system.phases();
    let can_have = |fault: &Fault| phases.all.iter().any(|phase| can_strike(*fault, phase, &[carrier]));
    let possible = Fault::ALL.into_iter().filter(can_have);
    let never: Vec<&str> = possible.filter(|fault| struck[*fault as usize] == 0).map(Fault::name).collect();
    assert!(never.is_empty(), "{} over {}: these never struck: {never:?}", system.name(), carrier.name());
    assert!(seen.cut_writes > 0 || carrier != Carrier::Verbs, "{}: no death cut a write", system.name());
    println!("{} over {}: {operations} operations, {seen:?}", system.name(), carrier.name());
    (phases, within, structure)
}

/// Numbers of changes of the structure of stores, by their names.
type Structure = BTreeMap<&'static str, u64>;

fn add(sums: &mut Structure, counts: impl IntoIterator<Item = (&'static str, u64)>) {
    counts.into_iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
}

#[test]
fn all_seeds_are_good_and_every_fault_strikes_in_every_phase() {
    let of = |system: System| system.carriers().into_iter().map(move |carrier| (system, carrier));
    let runs: Vec<_> = System::all().flat_map(of).collect();
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> =
            runs.iter().map(|(system, carrier)| scope.spawn(|| over(*system, *carrier))).collect();
        threads.into_iter().map(|thread| thread.join().expect("its seeds are good")).collect::<Vec<_>>()
    });
    let mut empty = Vec::new();
    let mut outcomes = outcomes.into_iter();
    for system in System::all() {
        let carriers = system.carriers();
        let of_carriers: Vec<_> = outcomes.by_ref().take(carriers.len()).collect();
        let (mut within, mut structure) = (Matrix::default(), Structure::default());
        for (_, matrix, changes) in &of_carriers {
            within.add(matrix);
            add(&mut structure, changes.iter().map(|(name, count)| (*name, *count)));
        }
        let is_tried = |name: &str| !ELSEWHERE.contains(&(system.name(), name));
        let never = structure.iter().filter(|(name, count)| **count == 0 && is_tried(name));
        empty.extend(never.map(|(name, _)| format!("{}: no {name}", system.name())));
        let (phases, ..) = of_carriers[0];
        for fault in Fault::ALL {
            for (at, phase) in phases.all.iter().enumerate() {
                // The tests of `farside-trial` try recoverers longer.
                if can_strike(fault, phase, &carriers)
                    && within.of(fault, at) == 0
                    && !phase.is_of_recoverers()
                {
                    empty.push(format!("{}: {} within {}", system.name(), fault.name(), phase.name));
                }
            }
        }
    }
    assert!(empty.is_empty(), "these faults or changes never happened, so they are untested: {empty:#?}");
}

/// Number of READs of each system that a NIC must tear, and smallest and largest number of seeds for that. No seed runs
/// after enough are torn: that seeds are good is for the other tests.
const TORN: u64 = 5;
const SEEDS_OF_TEARS: std::ops::RangeInclusive<u64> = 4..=20;

/// Few keys and hardly any faults: freed buffers are soon written again, while READs of their old items are in flight.
/// Clients of ABDLOCK read under locks, which nothing tears, and those of Chequer-message and FaSST make calls alone.
#[test]
fn a_nic_tears_reads_and_they_are_counted() {
    let reads_freely = |system: &System| !["abd-lock", "chequer-message", "fasst"].contains(&system.name());
    let systems = System::all().filter(|system| system.carriers().contains(&Carrier::Verbs));
    let systems = systems.filter(reads_freely);
    for system in systems {
        let setup = Setup {
            carrier: Some(Carrier::Verbs),
            clients: Some(5),
            keys: Some(1),
            operations: Some(400),
            faults: vec![Fault::Delay],
            ..Setup::of(system)
        };
        let mut torn = 0;
        for seed in 1..=*SEEDS_OF_TEARS.end() {
            let judged = judge(&setup, seed, true);
            assert_eq!(judged.verdict, Verdict::Good, "{judged}");
            torn += judged.report.expect("a good run has a report").seen.torn_reads;
            if torn >= TORN && seed >= *SEEDS_OF_TEARS.start() {
                break;
            }
        }
        println!("{}: {torn} torn READs", system.name());
        assert!(torn >= TORN, "{}: {torn} torn READs", system.name());
    }
}

#[test]
fn seeds_that_once_found_a_bug_are_good() {
    let mut kept = 0;
    for run in runs(include_str!("regressions.txt")) {
        let judged = judge(&run.setup, run.seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}\n  it once found: {}", run.rest);
        kept += 1;
    }
    assert!(kept > 0, "regressions.txt has no seed");
}
