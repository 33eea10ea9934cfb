//! Trials of stores with several members, over a fixed range of seeds.

use farside_trial::members::{FAULTS, Step, run};
use std::collections::BTreeMap;

/// Seeds of every run of the tests.
const SEEDS: u64 = 90;

#[test]
fn a_store_is_at_all_of_its_members_or_at_none() {
    let (mut matrix, mut done, mut lost) = (BTreeMap::<_, u64>::new(), [0; 3], 0);
    for seed in 0..SEEDS {
        let outcome = run(seed);
        assert!(outcome.violated.is_empty(), "members::run({seed}) is violated: {:?}", outcome.violated);
        for (cell, count) in outcome.matrix {
            *matrix.entry(cell).or_default() += count;
        }
        (0..3).for_each(|index| done[index] += outcome.done[index]);
        lost += outcome.lost;
    }
    println!("created, opened, dropped: {done:?}; members lost: {lost}; {matrix:?}");
    assert!(done.iter().all(|count| *count > 0) && lost > 0, "{done:?}, {lost}");
    let empty = FAULTS.iter().flat_map(|fault| Step::ALL.map(|step| (fault.name().to_owned(), step)));
    let empty: Vec<_> = empty.filter(|cell| !matrix.contains_key(cell)).collect();
    assert!(empty.is_empty(), "these faults never struck within these steps: {empty:?}");
}

#[cfg(farside_mutants)]
#[test]
fn every_mutant_is_killed_by_its_seed() {
    use farside_remote::mutant::Mutant;
    use farside_systems::mutants::{LOST_WHILE_OTHERS_SILENT, MEMBERS_MIXED};
    // The fetch of all keys takes a few microseconds, so no seed of 600 drops and creates a store meanwhile. No member
    // is replaced here. Tests of `farside_systems` do both.
    let is_here = |mutant: &&Mutant| ![MEMBERS_MIXED, LOST_WHILE_OTHERS_SILENT].contains(*mutant);
    let mutants = farside_systems::mutants::ALL.iter().filter(is_here);
    let mutants = mutants.chain([&farside_node::mutants::BOTH_DECISIONS]);
    let recorded = include_str!("../../kills/members.txt");
    crate::killed::by_their_seeds("members.txt", recorded, mutants, |seed| run(seed).violated);
}
