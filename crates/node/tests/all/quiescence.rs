//! Turns, retired buffers and the reuse of these buffers, under every interleaving that a scheduler finds.

use crate::support::quiescence::{Announces, explore};
use std::panic::catch_unwind;
use std::sync::atomic::Ordering;

const SEED: u64 = 1;
/// Number of schedules. This number exposes the faulty reader, so a correct reader that passes them is credible.
const ITERATIONS: usize = 10_000;

#[test]
fn no_chain_follows_a_pointer_into_a_freed_buffer() {
    let figures = explore(Announces::First, false, SEED, ITERATIONS);
    println!("{figures:?}");
    assert!(figures.freed.load(Ordering::Relaxed) > figures.schedules / 4, "{figures:?}");
}

#[test]
fn no_chain_follows_a_pointer_into_a_buffer_that_its_session_has_reused() {
    let figures = explore(Announces::First, true, SEED, ITERATIONS);
    println!("{figures:?}");
    assert!(figures.retaken.load(Ordering::Relaxed) > figures.schedules / 4, "{figures:?}");
}

#[test]
fn a_reader_that_announces_its_turn_late_is_detected() {
    for reuses in [false, true] {
        let is_detected = |iterations: &usize| {
            catch_unwind(|| explore(Announces::Late, reuses, SEED, *iterations)).is_err()
        };
        let iterations = [10, 100, 1000, ITERATIONS].into_iter().find(is_detected);
        let iterations =
            iterations.expect("no schedule exposes a turn that is announced after the first access");
        println!("reuse: {reuses}; killed within {} schedules", 2 * iterations);
    }
}
