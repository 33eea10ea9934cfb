//! The broken variants of buffers' lives, each of which one of the stories must find.
#![cfg(farside_mutants)]

mod support;

use farside_remote::mutant::Mutant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use support::cases::CASES;
use support::quiescence::{Announces, explore};

#[test]
fn every_mutant_is_killed_and_the_unbroken_node_is_not() {
    for (name, case) in CASES {
        assert!(passes(None, *case), "{name} fails without any mutant");
    }
    let mut killed = 0;
    for mutant in Mutant::OF_LIFE {
        let killers = CASES.iter().filter(|(_, case)| !passes(Some(mutant), *case));
        let killers: Vec<&str> = killers.map(|(name, _)| *name).collect();
        println!(
            "{mutant:?}: killed by {}",
            if killers.is_empty() { "nobody".into() } else { killers.join(", ") }
        );
        killed += usize::from(!killers.is_empty());
    }
    println!("{killed} of {} mutants were killed", Mutant::OF_LIFE.len());
    assert_eq!(killed, Mutant::OF_LIFE.len());
}

#[test]
fn a_buffer_that_comes_back_at_once_is_followed_into() {
    Mutant::switch(Some(Mutant::RepostAtOnce));
    let followed = catch_unwind(|| explore(Announces::First, 1, 1000));
    Mutant::switch(None);
    assert!(followed.is_err(), "RepostAtOnce lives under every schedule");
    println!("RepostAtOnce: killed under a scheduler too");
}

fn passes(mutant: Option<Mutant>, case: fn()) -> bool {
    Mutant::switch(mutant);
    let passed = catch_unwind(AssertUnwindSafe(case)).is_ok();
    Mutant::switch(None);
    passed
}
