//! The mutants of this crate: for each mutant, at least one of the cases must fail.

use crate::support::cases::CASES;
use crate::support::quiescence::{Announces, explore};
use crate::{members, replacing};
use farside_node::mutants::{self, OLD_TABLE_FREED_AT_ONCE, REPOST_AT_ONCE};
use farside_remote::mutant::Mutant;
use farside_remote::mutants::{
    EPOCH_IGNORES_TURNS, RETIRE_WHAT_IS_NOT_LIVE, RETIRED_WHILE_DROPPED, REUSED_AN_EPOCH_EARLY,
    REUSED_AT_ONCE,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The case of the decision on a store with several members.
const DECISION: (&str, fn()) = (
    "the_first_decision_holds_and_only_a_drop_ends_a_committed_store",
    members::the_first_decision_holds_and_only_a_drop_ends_a_committed_store,
);

/// The case of the revocation of a member's key.
const REVOCATION: (&str, fn()) = (
    "a_revocation_waits_for_turns_and_names_a_stopped_process",
    replacing::a_revocation_waits_for_turns_and_names_a_stopped_process,
);

#[test]
fn every_mutant_is_killed_and_the_original_passes() {
    for (name, case) in CASES {
        assert!(passes(None, *case), "{name} fails without a mutant");
    }
    // The tests of the system that rebuilds tables kill the mutant left out here.
    let own = mutants::ALL.iter().copied().filter(|mutant| *mutant != OLD_TABLE_FREED_AT_ONCE);
    let mutants: Vec<Mutant> = own.chain([RETIRE_WHAT_IS_NOT_LIVE, RETIRED_WHILE_DROPPED]).collect();
    let mut killed = 0;
    for &mutant in &mutants {
        let killers =
            CASES.iter().chain([&DECISION, &REVOCATION]).filter(|(_, case)| !passes(Some(mutant), *case));
        let killers: Vec<&str> = killers.map(|(name, _)| *name).collect();
        println!(
            "{mutant:?}: killed by {}",
            if killers.is_empty() { "no case".into() } else { killers.join(", ") }
        );
        killed += usize::from(!killers.is_empty());
    }
    println!("{killed} of {} mutants were killed", mutants.len());
    assert_eq!(killed, mutants.len());
}

#[test]
fn a_schedule_exposes_reuse_without_a_grace_period() {
    let by_sessions =
        [REUSED_AT_ONCE, REUSED_AN_EPOCH_EARLY, EPOCH_IGNORES_TURNS].map(|mutant| (mutant, true));
    for (mutant, reuses) in [(REPOST_AT_ONCE, false)].into_iter().chain(by_sessions) {
        Mutant::switch(Some(mutant));
        let followed = catch_unwind(|| explore(Announces::First, reuses, 1, 1000));
        Mutant::switch(None);
        assert!(followed.is_err(), "{mutant:?} survives every schedule");
        println!("{mutant:?}: killed under a scheduler too");
    }
}

fn passes(mutant: Option<Mutant>, case: fn()) -> bool {
    Mutant::switch(mutant);
    let passed = catch_unwind(AssertUnwindSafe(case)).is_ok();
    Mutant::switch(None);
    passed
}
