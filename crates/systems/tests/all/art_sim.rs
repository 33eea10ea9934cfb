//! ART in the simulator, by the harness of [`crate::support::index_sim`]: nodes that grow and shrink, clients that die,
//! dropped futures.

#[cfg(farside_mutants)]
use crate::support::index_sim::is_found;
use crate::support::index_sim::{Plan, run_all, seeds};
use farside_remote::draws::Draws;
use farside_systems::index::Keys;
use farside_systems::index::art::KIND;

/// The plan of a seed. In each third seed, there are so many keys below one node that it grows to the largest type.
fn plan_of(seed: u64) -> Plan {
    let mut draws = Draws(seed ^ 0x0a27);
    let plan = Plan::of(KIND, seed);
    match draws.below(3) {
        0 => Plan {
            keys: Keys::Numbers,
            count: 300,
            operations: draws.pick(&[100, 300]),
            deletes: draws.pick(&[10, 30, 60]),
            ..plan
        },
        1 => Plan { count: draws.pick(&[8, 24]), deletes: draws.pick(&[30, 50]), ..plan },
        _ => plan,
    }
}

#[test]
fn every_key_of_art_is_a_register_whatever_happens_to_clients() {
    let events = run_all(seeds(60), plan_of);
    for name in [
        "nodes grown from 4",
        "nodes grown from 16",
        "nodes grown from 48",
        "nodes shrunk",
        "nodes collapsed",
        "nodes cleaned",
        "frozen nodes met",
        "cached nodes replaced",
        "leaf splits",
        "path splits",
        "lock failures",
        // Clients that free memory recover the dead ones, so the last client finds what these have left, and seldom
        // them.
        "nodes thawed",
        "swept units",
    ] {
        assert!(events.get(name).copied().unwrap_or(0) > 0, "no {name}: {events:?}");
    }
}

/// Number of seeds in which a mutant must fail.
#[cfg(farside_mutants)]
const HUNT: u64 = 2500;

#[cfg(farside_mutants)]
#[test]
fn the_trial_finds_broken_variants_of_art() {
    use farside_remote::mutant::Mutant;
    use farside_systems::index::art::mutants::ALL;
    use farside_systems::index::art::system::ArtKind;
    use farside_systems::system::System;
    let is_rare = |mutant: &Mutant| ArtKind::RARE_MUTANTS.contains(mutant);
    let frequent = ALL.iter().copied().filter(|mutant| !is_rare(mutant));
    let alive: Vec<Mutant> = frequent.filter(|mutant| !is_found(*mutant, seeds(HUNT), plan_of)).collect();
    assert!(alive.is_empty(), "these mutants live: {alive:?}");
}
