//! Trials of transactional stores: without faults they are good, each workload runs, and equal seeds give equal trials.

use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};
use std::collections::{BTreeMap, BTreeSet};

/// Seeds of each carrier in every run of the tests.
const SEEDS: u64 = 20;

/// Seeds of each carrier for FaRM and for FaSST.
const SEEDS_OF_FARM: u64 = 8;

fn prism_tx() -> System {
    System::named("prism-tx").expect("prism-tx can be tried")
}

fn farm() -> System {
    System::named("farm").expect("farm can be tried")
}

fn fasst() -> System {
    System::named("fasst").expect("fasst can be tried")
}

#[test]
fn transactions_of_prism_tx_are_serializable_over_all_carriers() {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut workloads, mut prepares) = (BTreeSet::new(), BTreeSet::new());
    let (mut conflicts, mut bad) = (0, Vec::new());
    assert_eq!(prism_tx().carriers(), [Carrier::Direct, Carrier::Datagrams, Carrier::Connections]);
    for carrier in prism_tx().carriers() {
        for seed in 1..=SEEDS {
            let setup = Setup { carrier: Some(carrier), faults: Vec::new(), ..Setup::of(prism_tx()) };
            let judged = judge(&setup, seed, true);
            if judged.verdict != Verdict::Good {
                bad.push(format!("{}: {judged}", carrier.name()));
            }
            let Some(report) = judged.report else { continue };
            report.counters.iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
            conflicts += report.counts.conflicts;
            let of =
                |name: &str| report.options.iter().find(|of| of.name == name).map(|of| of.value.to_string());
            workloads.insert(of("workload"));
            prepares.insert(of("prepare"));
        }
    }
    println!("{sums:?}, {conflicts} conflicts, {workloads:?}");
    assert!(bad.is_empty(), "{}: {}", bad.len(), bad.join("\n\n"));
    // Otherwise the trials have tested nothing.
    assert!(sums["commits"] > 4_000 && sums["aborts"] > 200 && conflicts > 400, "{sums:?}");
    assert_eq!((workloads.len(), prepares.len()), (4, 2), "{workloads:?}, {prepares:?}");
}

/// Sums of counters, and the values of options that were drawn.
type Tried = (BTreeMap<&'static str, u64>, BTreeMap<&'static str, BTreeSet<String>>);

/// Tries a system without faults over all carriers.
fn strictly_serializable(system: System) -> Tried {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    let mut drawn: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut bad = Vec::new();
    assert_eq!(system.carriers(), Carrier::ALL);
    for carrier in Carrier::ALL {
        for seed in 1..=SEEDS_OF_FARM {
            let setup = Setup { carrier: Some(carrier), faults: Vec::new(), ..Setup::of(system) };
            let judged = judge(&setup, seed, true);
            if judged.verdict != Verdict::Good {
                bad.push(format!("{}: {judged}", carrier.name()));
            }
            let Some(report) = judged.report else { continue };
            report.counters.iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
            let options = report.options.iter();
            options.for_each(|of| _ = drawn.entry(of.name).or_default().insert(of.value.to_string()));
        }
    }
    println!("{sums:?}");
    assert!(bad.is_empty(), "{}: {}", bad.len(), bad.join("\n\n"));
    // Otherwise the trials have tested nothing.
    assert!(sums["commits"] > 2_000 && sums["aborts"] > 100, "{sums:?}");
    (sums, drawn)
}

#[test]
fn transactions_of_farm_are_strictly_serializable_over_all_carriers() {
    let (sums, drawn) = strictly_serializable(farm());
    assert!(sums["torn reads"] > 0, "{sums:?}");
    let are_drawn = ["workload", "backups", "line"].iter().all(|name| drawn[name].len() > 1);
    assert!(are_drawn, "{drawn:?}");
}

#[test]
fn transactions_of_fasst_are_strictly_serializable_over_all_carriers() {
    let (_, drawn) = strictly_serializable(fasst());
    let are_drawn = ["workload", "backups"].iter().all(|name| drawn[name].len() > 1);
    assert!(are_drawn, "{drawn:?}");
}

#[test]
fn equal_seeds_give_equal_trials() {
    for system in [prism_tx(), farm(), fasst()] {
        let digest =
            |seed| judge(&Setup::of(system), seed, false).report.map(|report| report.record.digest());
        for seed in 1..=3 {
            assert_eq!(digest(seed), digest(seed), "{} seed {seed}", system.name());
        }
    }
}
