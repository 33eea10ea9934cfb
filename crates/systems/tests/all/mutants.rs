//! Tests that kill the mutants which only a running system exposes.

use crate::support::{locks, paced, poison, replacing, replicas, several, stepped};
use crate::{
    cached_index as cached_index_steps, chequer_steps, farm_kv as farm_kv_steps, prism_tx_sim,
    prism_tx_steps, read_stores,
};
use farside_node::mutants::{BOTH_DECISIONS, OLD_TABLE_FREED_AT_ONCE, REPOST_AT_ONCE};
use farside_remote::mutant::Mutant;
use farside_remote::mutants::{EPOCH_IGNORES_TURNS, REUSED_AT_ONCE};
use farside_systems::blocks::abd_lock::mutants as abd_lock;
use farside_systems::blocks::prism_rs::mutants as prism_rs;
use farside_systems::kv::cached_index::mutants as cached_index;
use farside_systems::kv::chequer::mutants as chequer;
use farside_systems::kv::farm_kv::mutants as farm_kv;
use farside_systems::kv::pilaf::mutants as pilaf;
use farside_systems::kv::prism_kv::mutants as prism_kv;
use farside_systems::mutants::{LOST_WHILE_OTHERS_SILENT, MEMBERS_MIXED};
use farside_systems::txn::prism_tx::mutants as prism_tx;

#[test]
fn a_buffer_reused_without_grace_period_is_read_as_poison() {
    let gets = poison::interrupt().expect("the correct code");
    println!("{gets} gets without a mutant");
    let mutants = [REPOST_AT_ONCE, REUSED_AT_ONCE, EPOCH_IGNORES_TURNS];
    for mutant in mutants {
        Mutant::switch(Some(mutant));
        let broken = poison::interrupt();
        Mutant::switch(None);
        println!("{mutant:?}: killed, for {}", broken.expect_err("the mutant lives"));
    }
    println!("{0} of {0} mutants were killed", mutants.len());
}

#[test]
fn a_pilaf_get_without_a_crc_check_returns_wrong_bytes() {
    assert_eq!(paced::play(|| ()), Ok(()));
    let mut killed = 0;
    // Only a NIC that reorders READs exposes the mutant left out here.
    let seen_here: Vec<Mutant> =
        pilaf::ALL.iter().copied().filter(|mutant| *mutant != pilaf::READS_KEEP_ORDER).collect();
    for &mutant in &seen_here {
        let played = paced::play(|| Mutant::switch(Some(mutant)));
        Mutant::switch(None);
        match &played {
            Err(found) => println!("{mutant:?}: killed, for {found}"),
            Ok(()) => println!("{mutant:?}: killed by nobody"),
        }
        killed += usize::from(played.is_err());
    }
    println!("{killed} of {} mutants were killed", seen_here.len());
    assert_eq!(killed, seen_here.len());
}

#[test]
fn every_mutant_of_farm_kv_and_of_the_cached_index_is_killed() {
    // The correct code passes the same cases in `farm_kv`, `cached_index` and `read_stores`.
    let at_every_point = read_stores::a_get_of_the_cached_index_is_right_at_every_point;
    let killers: [(Mutant, fn()); 13] = [
        (farm_kv::JOINT_IGNORED, farm_kv_steps::a_key_that_moves_during_a_read_is_found),
        (farm_kv::MOVED_SILENTLY, farm_kv_steps::a_key_that_moves_during_a_read_is_found),
        (farm_kv::INCARNATION_IGNORED, farm_kv_steps::a_block_that_changes_its_chain_hides_no_key),
        (farm_kv::LINES_UNCHECKED, read_stores::torn_bytes_are_never_returned_by_farm_kv),
        (farm_kv::WRAP_ACCEPTED, farm_kv_steps::a_slow_read_is_repeated),
        (farm_kv::UNREPAIRED, read_stores::a_node_failure_loses_nothing_of_farm_kv),
        (cached_index::INCARNATION_IGNORED, at_every_point),
        (cached_index::INCARNATION_KEPT, at_every_point),
        (cached_index::ABSENT_FROM_CACHE, at_every_point),
        (cached_index::STALE_IS_ABSENT, at_every_point),
        (cached_index::LINES_UNCHECKED, read_stores::torn_bytes_are_never_returned_by_the_cached_index),
        (cached_index::WRAP_ACCEPTED, cached_index_steps::a_slow_read_is_repeated),
        (cached_index::UNREPAIRED, read_stores::a_node_failure_loses_nothing_of_the_cached_index),
    ];
    let all = || farm_kv::ALL.iter().chain(cached_index::ALL);
    assert!(all().all(|mutant| killers.iter().any(|(killed, _)| killed == mutant)));
    for (mutant, case) in killers {
        assert!(!stepped::passes(Some(mutant), case), "{mutant:?} lives");
    }
    println!("{0} of {0} mutants were killed", killers.len());
}

#[test]
fn every_mutant_of_the_rebuild_is_killed() {
    // The correct code passes the same cases in `prism_kv_steps`.
    let mut killed = 0;
    // To kill MOVED_UNFROZEN, a client must act between two accesses of one step. Only the simulator can do that.
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
        // In reverse order, because the first two cases take by far the longest.
        let killer = stepped::CASES.iter().rev().find(|(_, case)| !stepped::passes(Some(mutant), *case));
        println!("{mutant:?}: killed by {}", killer.map_or("nobody", |(name, _)| *name));
        killed += usize::from(killer.is_some());
    }
    println!("{killed} of {of} mutants were killed");
    assert_eq!(killed, of);
}

#[test]
fn a_member_that_obeys_a_creator_of_long_ago_is_detected() {
    // The correct code passes the same case in `replacing`.
    let case = replacing::a_creator_that_sleeps_over_a_replacement_drops_nothing;
    assert!(!stepped::passes(Some(BOTH_DECISIONS), case), "BothDecisions lives");
    println!("1 of 1 mutants were killed");
}

#[test]
fn a_client_that_mixes_members_of_two_attempts_is_detected() {
    // The correct code passes the same case in `members`.
    let case = several::members_of_two_attempts_are_never_in_one_list;
    assert!(!stepped::passes(Some(MEMBERS_MIXED), case), "MembersMixed lives");
    println!("1 of 1 mutants were killed");
}

#[test]
fn a_client_that_takes_members_for_lost_too_early_is_detected() {
    // The correct code passes the same case in `replacing`.
    let case = replacing::a_client_that_reaches_no_node_with_news_knows_of_no_loss;
    assert!(!stepped::passes(Some(LOST_WHILE_OTHERS_SILENT), case), "LostWhileOthersSilent lives");
    println!("1 of 1 mutants were killed");
}

#[test]
fn every_mutant_of_prism_rs_is_killed() {
    // The correct code passes the same cases in `blocks` and `replacing`.
    let mut killed = 0;
    for &mutant in prism_rs::ALL {
        let mut cases = replicas::CASES.iter().chain(&replacing::CASES);
        let killer = cases.find(|(_, case)| !stepped::passes(Some(mutant), *case));
        println!("{mutant:?}: killed by {}", killer.map_or("nobody", |(name, _)| *name));
        killed += usize::from(killer.is_some());
    }
    println!("{killed} of {} mutants were killed", prism_rs::ALL.len());
    assert_eq!(killed, prism_rs::ALL.len());
}

#[test]
fn every_mutant_of_abdlock_is_killed() {
    // The correct code passes the same cases in `abd_lock`.
    let mut killed = 0;
    for &mutant in abd_lock::ALL {
        let killer = locks::CASES.iter().find(|(_, case)| !stepped::passes(Some(mutant), *case));
        println!("{mutant:?}: killed by {}", killer.map_or("nobody", |(name, _)| *name));
        killed += usize::from(killer.is_some());
    }
    println!("{killed} of {} mutants were killed", abd_lock::ALL.len());
    assert_eq!(killed, abd_lock::ALL.len());
}

#[test]
fn the_mutants_of_chequer_that_trials_expose_seldom_are_killed() {
    // The correct code passes the same cases in `chequer_steps`.
    let killers = [
        (chequer::VALUE_UNCHECKED, "slow reader"),
        (chequer::ONLY_VALUE_REREAD, "slow reader"),
        (chequer::RESERVATION_FREED_BY_TIMEOUT, "reservation"),
        (chequer::REPLAYED_IN_ANOTHER_BUCKET, "full table"),
        (chequer::UNANSWERED_RESERVE_FORGOTTEN, "unanswered reserve"),
        (chequer::RESERVATIONS_UNBOUNDED, "many reservations"),
        (chequer::QUARANTINE_FROM_BEGIN, "quarantine"),
        (chequer::CHECKPOINT_STEP_UNBOUNDED, "checkpoint"),
        (chequer::LAST_COUNTER_FORGOTTEN, "versions"),
        (chequer::UNANSWERED_LEFT_IN_LOG, "unanswered put"),
    ];
    let mut killed = 0;
    for (mutant, name) in killers {
        let (_, case) = chequer_steps::CASES.iter().find(|case| case.0 == name).expect("a case of this name");
        // Each table has another secret, and some have room for all keys in any order.
        let tries = if mutant == chequer::REPLAYED_IN_ANOTHER_BUCKET { 20 } else { 1 };
        let lives = (0..tries).all(|_| stepped::passes(Some(mutant), *case));
        println!("{mutant:?}: killed by {}", if lives { "nobody" } else { name });
        killed += usize::from(!lives);
    }
    println!("{killed} of {} mutants were killed", killers.len());
    assert_eq!(killed, killers.len());
}

/// Mutants of PRISM-TX that trials expose seldom, and the directed cases that kill them. The correct code passes the
/// same cases in `prism_tx_steps` and `prism_tx_sim`.
pub(crate) const SELDOM_IN_PRISM_TX: [(Mutant, &str); 9] = [
    (prism_tx::READ_UNPREPARED, "single read"),
    (prism_tx::DECIDED_ERASED, "recoverer dies"),
    (prism_tx::LEASE_UNCONFIRMED, "recoverer late"),
    (prism_tx::RAISED_WITHOUT_WAIT, "smaller intent"),
    (prism_tx::UNKNOWN_FORGOTTEN, "client goes on"),
    (prism_tx::VERDICT_FROM_SLOTS, "overwritten value"),
    (prism_tx::RAISED_UNPREPARED, "unprepared key"),
    (prism_tx::LARGER_FIRST, "two lanes"),
    (prism_tx::DECIDED_LATE, "each moment"),
];

#[test]
fn the_mutants_of_prism_tx_that_trials_expose_seldom_are_killed() {
    let mut killed = 0;
    for (mutant, name) in SELDOM_IN_PRISM_TX {
        let mut cases = prism_tx_steps::CASES.iter().chain(&prism_tx_sim::CASES);
        let (_, case) = cases.find(|case| case.0 == name).expect("a case of this name");
        let lives = stepped::passes(Some(mutant), *case);
        println!("{mutant:?}: killed by {}", if lives { "nobody" } else { name });
        killed += usize::from(!lives);
    }
    println!("{killed} of {} mutants were killed", SELDOM_IN_PRISM_TX.len());
    assert_eq!(killed, SELDOM_IN_PRISM_TX.len());
}
