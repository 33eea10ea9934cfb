//! Turns, retired buffers and the reuse of these buffers, under every interleaving that a scheduler finds.

use crate::support::quiescence::{Announces, explore};
use std::panic::catch_unwind;
use std::sync::atomic::Ordering;

const SEED: u64 = 1;
/// Number of schedules. This number exposes the faulty reader, so a correct reader that passes them is credible.
const ITERATIONS: usize = 10_000;

#[test]
fn no_chain_follows_a_pointer_into_a_freed_buffer() {
    let figures = explore(Announces::First, SEED, ITERATIONS);
    println!("{figures:?}");
    assert!(figures.reused.load(Ordering::Relaxed) > figures.schedules / 4, "{figures:?}");
}

#[test]
fn a_reader_that_announces_its_turn_late_is_detected() {
    for iterations in [10, 100, 1000, ITERATIONS] {
        if catch_unwind(|| explore(Announces::Late, SEED, iterations)).is_err() {
            println!("killed within {} schedules", 2 * iterations);
            return;
        }
    }
    panic!("no schedule exposes a turn that is announced after the first access");
}
