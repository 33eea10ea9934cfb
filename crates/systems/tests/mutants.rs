//! Broken variants that only a running system can be seen to suffer from.
#![cfg(farside_mutants)]

mod support;

use farside_remote::mutant::Mutant;
use std::time::Duration;
use support::poison;

#[test]
fn a_buffer_that_comes_back_at_once_is_read_as_poison() {
    let sound = poison::play(Duration::from_secs(1), || ());
    assert!(sound.is_ok(), "{sound:?}");
    // It ends as soon as somebody reads poison: after seconds, on a machine that has nothing else to do.
    let broken = poison::play(Duration::from_secs(180), || Mutant::switch(Some(Mutant::RepostAtOnce)));
    let found = broken.expect_err("RepostAtOnce lives");
    println!("RepostAtOnce: killed, for {found}");
    println!("1 of 1 mutants were killed");
}
