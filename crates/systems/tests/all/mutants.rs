//! Broken variants that only a running system can be seen to suffer from.

use crate::support::{paced, poison, stepped};
use farside_node::mutants::{OLD_TABLE_FREED_AT_ONCE, REPOST_AT_ONCE};
use farside_remote::mutant::Mutant;
use farside_systems::kv::pilaf::mutants as pilaf;
use farside_systems::kv::prism_kv::mutants as prism_kv;
use std::time::Duration;

#[test]
fn a_buffer_that_comes_back_at_once_is_read_as_poison() {
    let sound = poison::play(Duration::from_secs(1), || ());
    assert!(sound.is_ok(), "{sound:?}");
    // It ends as soon as somebody reads poison: after seconds, on a machine that has nothing else to do.
    let broken = poison::play(Duration::from_secs(180), || Mutant::switch(Some(REPOST_AT_ONCE)));
    let found = broken.expect_err("RepostAtOnce lives");
    println!("RepostAtOnce: killed, for {found}");
    println!("1 of 1 mutants were killed");
}

#[test]
fn a_reader_of_pilaf_that_believes_too_soon_answers_what_was_not_there() {
    assert_eq!(paced::play(|| ()), Ok(()));
    let mut killed = 0;
    for &mutant in pilaf::ALL {
        let played = paced::play(|| Mutant::switch(Some(mutant)));
        Mutant::switch(None);
        match &played {
            Err(found) => println!("{mutant:?}: killed, for {found}"),
            Ok(()) => println!("{mutant:?}: killed by nobody"),
        }
        killed += usize::from(played.is_err());
    }
    println!("{killed} of {} mutants were killed", pilaf::ALL.len());
    assert_eq!(killed, pilaf::ALL.len());
}

#[test]
fn every_broken_rebuild_is_seen() {
    // The unbroken code passes the same cases in `prism_kv_steps`.
    let mut killed = 0;
    // MOVED_UNFROZEN shows where a client comes between two accesses of one step: that takes the simulator.
    let seen_here = [
        prism_kv::WRITE_BEFORE_MOVED,
        prism_kv::FROZEN_IS_COMPARED,
        prism_kv::EMPTY_SLOTS_STAY,
        prism_kv::END_SLOT_STAYS,
        prism_kv::MOVED_TWICE,
        prism_kv::MOVER_RECLAIMS,
        prism_kv::DROPPED_TOMBSTONE_RESTARTS_GENERATIONS,
        OLD_TABLE_FREED_AT_ONCE,
    ];
    let of = seen_here.len();
    for mutant in seen_here {
        // The first case takes longest by far, so it comes last.
        let killer = stepped::CASES.iter().rev().find(|(_, case)| !stepped::passes(Some(mutant), *case));
        println!("{mutant:?}: killed by {}", killer.map_or("nobody", |(name, _)| *name));
        killed += usize::from(killer.is_some());
    }
    println!("{killed} of {of} mutants were killed");
    assert_eq!(killed, of);
}
