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
fn transactions_are_serializable_over_carriers_with_messages() {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut workloads, mut prepares) = (BTreeSet::new(), BTreeSet::new());
    let (mut conflicts, mut bad) = (0, Vec::new());
    assert_eq!(prism_tx().carriers(), [Carrier::Direct, Carrier::Datagrams, Carrier::Connections]);
    // If clients' own CPUs run the chains, a client that leaves does not always end yet.
    for carrier in [Carrier::Datagrams, Carrier::Connections] {
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

#[test]
fn equal_seeds_give_equal_trials() {
    let digest =
        |seed| judge(&Setup::of(prism_tx()), seed, false).report.map(|report| report.record.digest());
    for seed in 1..=3 {
        assert_eq!(digest(seed), digest(seed), "seed {seed}");
    }
}
