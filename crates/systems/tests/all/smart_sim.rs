//! SMART in the simulator, by the harness of [`crate::support::index_sim`]: all techniques of the paper, and fewer.

#[cfg(farside_mutants)]
use crate::support::index_sim::is_found;
use crate::support::index_sim::{Plan, run_all, seeds};
use farside_systems::index::Rung;
use farside_systems::index::smart::KIND;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::system::System;

#[test]
fn every_key_is_a_register_whatever_happens_to_clients() {
    run_all(seeds(60), |seed| Plan::of(KIND, seed));
}

#[test]
fn every_rung_of_the_ladder_is_correct() {
    for rung in Rung::ALL {
        let events = run_all(seeds(24), |seed| Plan { rung, ..Plan::of(KIND, seed) });
        let has = |name: &str| events.get(name).copied() > Some(0);
        assert_eq!(has("node locks"), rung == Rung::Art, "{rung:?}: {events:?}");
        assert_eq!(has("leaves replaced"), rung < Rung::InPlace, "{rung:?}: {events:?}");
        assert_eq!(has("reads delegated"), rung >= Rung::ReadDelegation, "{rung:?}: {events:?}");
        assert_eq!(has("writes combined"), rung == Rung::WriteCombining, "{rung:?}: {events:?}");
    }
}

#[test]
fn the_kind_of_the_store_is_known_by_its_name() {
    assert_eq!(SmartKind::KIND, KIND);
}

/// Number of seeds in which a mutant must fail.
#[cfg(farside_mutants)]
const HUNT: u64 = 2500;

#[cfg(farside_mutants)]
#[test]
fn the_trial_finds_a_reader_that_believes_a_replaced_leaf() {
    let mutant = farside_systems::index::smart::mutants::REPLACED_LEAF_BELIEVED;
    let plan = |seed| Plan { rung: Rung::LockFree, cache: 1 << 20, ..Plan::of(KIND, seed) };
    assert!(is_found(mutant, seeds(HUNT), plan), "the mutant lives");
}

#[cfg(farside_mutants)]
#[test]
fn the_trial_finds_broken_variants() {
    use farside_remote::mutant::Mutant;
    use farside_systems::{lease, redo};
    let others = [lease::mutants::TAKEN_UNFENCED, redo::mutants::RECORD_AFTER_OBJECT];
    // Mutants that hundreds of seeds leave alive, each with a seed that kills it, which is tried first.
    let known = [
        ("SmartTypeSwitchNotHelped", 2226),
        ("SmartWriterJoinsLate", 424),
        ("SmartReusedBeforeEpoch", 1035),
        ("RedoRecordAfterObject", 379),
    ];
    let mut used = 0;
    let mut alive = Vec::new();
    let is_tried = |mutant: &Mutant| {
        !SmartKind::RARE_MUTANTS.contains(mutant) || known.iter().any(|(of, _)| *of == mutant.name())
    };
    for mutant in SmartKind::MUTANTS.iter().copied().filter(is_tried).chain(others) {
        let first = known.iter().find(|(of, _)| *of == mutant.name()).map(|(_, seed)| *seed);
        used += usize::from(first.is_some());
        if !is_found(mutant, first.into_iter().chain(seeds(HUNT)), |seed| Plan::of(KIND, seed)) {
            alive.push(mutant);
        }
    }
    assert_eq!(used, known.len(), "a mutant with a known seed has another name now");
    assert!(alive.is_empty(), "these mutants live: {alive:?}");
}
