//! Trials of key-value stores whose keys are divided among several nodes, over a fixed range of seeds.

use farside_trial::sharded::{FAULTS, Step, run};
use std::collections::BTreeMap;

/// Seeds of every run of the tests.
const SEEDS: u64 = 400;
/// At most one in this many trials may have a history that the checker cannot decide, because of many operations
/// without an answer.
const UNDECIDED_ONE_IN: u64 = 1_000;

/// Runs trials, checks each of them and the sums over all of them.
fn play(seeds: std::ops::Range<u64>) {
    let (count, mut wrong, mut undecided) = (seeds.end - seeds.start, Vec::new(), Vec::new());
    let (mut matrix, mut sums) = (BTreeMap::<_, u64>::new(), BTreeMap::<_, u64>::new());
    for seed in seeds {
        let outcome = run(seed);
        wrong.extend(outcome.violated.iter().map(|reason| format!("seed {seed} is violated: {reason}")));
        undecided
            .extend(outcome.undecided.iter().map(|reason| format!("seed {seed} is undecided: {reason}")));
        for (cell, count) in outcome.matrix {
            *matrix.entry(cell).or_default() += count;
        }
        let counts = outcome.counts;
        let named = [
            ("done", counts.done),
            ("unknown", counts.unknown),
            ("lost", counts.lost),
            ("beside", counts.beside),
            ("parts", counts.parts),
            ("judged", counts.judged),
            ("reopened", counts.reopened),
            ("fetched", counts.fetched),
        ];
        named.into_iter().for_each(|(name, count)| *sums.entry(name).or_default() += count);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(undecided.len() as u64 <= count / UNDECIDED_ONE_IN, "{undecided:#?}");
    println!("{sums:?}; {matrix:?}");
    assert!(sums.values().all(|count| *count > 0), "{sums:?}");
    let empty = FAULTS.iter().flat_map(|fault| Step::ALL.map(|step| (fault.name().to_owned(), step)));
    let empty: Vec<_> = empty.filter(|cell| !matrix.contains_key(cell)).collect();
    assert!(empty.is_empty(), "these faults never struck within these steps: {empty:?}");
}

#[test]
fn every_key_is_linearizable_and_a_dead_node_fails_its_own_keys_only() {
    play(0..SEEDS);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_sharded_stores() {
    play(SEEDS..6_000);
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let digests = [5, 5, 6].map(|seed| run(seed).digest);
    assert_eq!(digests[0], digests[1]);
    assert_ne!(digests[0], digests[2]);
}

#[cfg(farside_mutants)]
#[test]
fn every_mutant_is_killed_by_its_seed() {
    let mutants = farside_systems::kv::sharded::mutants::ALL;
    let recorded = include_str!("../../kills/sharded.txt");
    crate::killed::by_their_seeds("sharded.txt", recorded, mutants, |seed| run(seed).violated);
}
