//! The mutants of this crate: for each mutant, at least one of the checks must fail.

use crate::support::cases::{Comparison, Shape, enumerate};
use crate::support::lists::{Fate, SCENARIOS};
use farside_remote::mutant::Mutant;
use farside_remote::mutants::{self, RETIRE_WHAT_IS_NOT_LIVE, RETIRED_WHILE_DROPPED, SHARED_SCRATCH};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

const CHECKS: [(&str, fn()); 4] = [
    ("model", model),
    ("lists", lists),
    ("lists, one client stopped", lists_with_a_stopped_client),
    ("lists, one client dead", lists_with_a_dead_client),
];

fn model() {
    enumerate(&mut Comparison::new(), &Shape::all(), 4, 50);
}

fn lists() {
    for scenario in SCENARIOS {
        scenario.explore(Fate::Lives, 1, 200);
    }
}

fn lists_with_a_stopped_client() {
    for scenario in SCENARIOS {
        scenario.explore_all(Fate::Stops, 3, 20);
    }
}

fn lists_with_a_dead_client() {
    for scenario in SCENARIOS {
        scenario.explore_all(Fate::Dies, 2, 20);
    }
}

#[test]
fn every_mutant_is_killed_and_the_original_passes() {
    for (name, check) in CHECKS {
        assert!(passes(None, check), "{name} fails without a mutant");
    }
    // Only tests with a node or concurrent chains can detect these mutants. The node's tests and the trials kill them.
    let elsewhere = [RETIRE_WHAT_IS_NOT_LIVE, RETIRED_WHILE_DROPPED, SHARED_SCRATCH];
    let mutants: Vec<Mutant> =
        mutants::ALL.iter().copied().filter(|mutant| !elsewhere.contains(mutant)).collect();
    let mut killed = 0;
    for &mutant in &mutants {
        let started = Instant::now();
        let killer = CHECKS.into_iter().find(|(_, check)| !passes(Some(mutant), *check));
        let by = killer.map_or("no check", |(name, _)| name);
        println!("{mutant:?}: killed by {by} in {:.1} s", started.elapsed().as_secs_f64());
        killed += usize::from(killer.is_some());
    }
    println!("{killed} of {} mutants were killed", mutants.len());
    assert_eq!(killed, mutants.len());
}

fn passes(mutant: Option<Mutant>, check: fn()) -> bool {
    Mutant::switch(mutant);
    let passed = catch_unwind(AssertUnwindSafe(check)).is_ok();
    Mutant::switch(None);
    passed
}
