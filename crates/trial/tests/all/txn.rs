//! Trials of transactional stores: without faults they are good, each workload runs, and equal seeds give equal trials.

use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};
use std::collections::{BTreeMap, BTreeSet};

/// Seeds of each carrier in every run of the tests.
const SEEDS: u64 = 20;

fn prism_tx() -> System {
    System::named("prism-tx").expect("prism-tx can be tried")
}

#[test]
fn transactions_are_serializable_over_every_carrier() {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut workloads, mut conflicts, mut bad) = (BTreeSet::new(), 0, Vec::new());
    for carrier in prism_tx().carriers() {
        assert_ne!(carrier, Carrier::Verbs, "a NIC has no conditional ops");
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
            workloads.insert((of("workload"), of("prepare")));
        }
    }
    println!("{sums:?}, {conflicts} conflicts, {workloads:?}");
    assert!(bad.is_empty(), "{}: {}", bad.len(), bad.join("\n\n"));
    // Otherwise the trials have tested nothing.
    assert!(sums["commits"] > 4_000 && sums["aborts"] > 200 && conflicts > 400, "{sums:?}");
    assert_eq!(workloads.len(), 8, "four workloads, each with two kinds of prepare: {workloads:?}");
}

#[test]
fn equal_seeds_give_equal_trials() {
    let digest =
        |seed| judge(&Setup::of(prism_tx()), seed, false).report.map(|report| report.record.digest());
    for seed in 1..=3 {
        assert_eq!(digest(seed), digest(seed), "seed {seed}");
    }
}
