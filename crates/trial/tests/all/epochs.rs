//! Trials of epochs, over a fixed range of seeds.

use farside_trial::epochs::{FAULTS, run};
use std::collections::BTreeMap;

/// Seeds of every run of the tests.
const SEEDS: u64 = 80;

#[test]
fn no_operation_finds_a_reused_buffer_by_a_pointer_of_its_own() {
    let (mut struck, mut done, mut sums) = (BTreeMap::<_, u64>::new(), [0; 3], [0; 4]);
    for seed in 0..SEEDS {
        let outcome = run(seed);
        assert!(outcome.violated.is_empty(), "epochs::run({seed}) is violated: {:?}", outcome.violated);
        for (fault, count) in outcome.struck {
            *struck.entry(fault).or_default() += count;
        }
        (0..3).for_each(|index| done[index] += outcome.done[index]);
        let counts = [outcome.reclaimed, outcome.fenced, outcome.found_fenced, outcome.spanned];
        (0..4).for_each(|index| sums[index] += counts[index]);
    }
    println!("read, written, preceded: {done:?}; reclaimed, fenced, found it, spanned: {sums:?}; {struck:?}");
    assert!(done.iter().chain(&sums).all(|count| *count > 0), "{done:?}, {sums:?}");
    let missing: Vec<_> = FAULTS.iter().filter(|fault| !struck.contains_key(fault.name())).collect();
    assert!(missing.is_empty(), "these faults never struck: {missing:?}");
}

#[cfg(farside_mutants)]
#[test]
fn every_mutant_is_killed_by_its_seed() {
    use farside_node::mutants::{EPOCH_IGNORED, EPOCH_ONE_IS_ENOUGH};
    use farside_systems::epoch::mutants::EPOCH_ADVANCED_EARLY;
    let mutants = &[EPOCH_IGNORED, EPOCH_ONE_IS_ENOUGH, EPOCH_ADVANCED_EARLY];
    let recorded = include_str!("../../kills/epochs.txt");
    crate::killed::by_their_seeds("epochs.txt", recorded, mutants, |seed| run(seed).violated);
}
