//! Trials of timestamps, over a fixed range of seeds.

use farside_trial::stamps::run;

/// Seeds of every run of the tests.
const SEEDS: u64 = 16;

#[test]
fn stamps_rise_and_are_never_far_ahead() {
    let mut sums = [0; 4];
    for seed in 0..SEEDS {
        let outcome = run(seed);
        assert!(outcome.violated.is_empty(), "stamps::run({seed}) is violated: {:?}", outcome.violated);
        let counts = [outcome.given, outcome.ahead, outcome.reopened, outcome.jumps];
        (0..4).for_each(|index| sums[index] += counts[index]);
    }
    println!("given, ahead, reopened, jumps: {sums:?}");
    assert!(sums.iter().all(|count| *count > 0), "{sums:?}");
}

#[cfg(farside_mutants)]
#[test]
fn every_mutant_is_killed_by_its_seed() {
    let mutants = farside_systems::stamps::mutants::ALL;
    let recorded = include_str!("../../kills/stamps.txt");
    crate::killed::by_their_seeds("stamps.txt", recorded, mutants, |seed| run(seed).violated);
}
