//! Tests that the checks kill every mutant of this crate.

use crate::wide::hammer;
use farside_fabrics::mutants::WIDE_WITHOUT_LOCKS;
use farside_remote::mutant::Mutant;

#[test]
fn wide_words_without_locks_tear_or_lose_updates() {
    let sound = hammer::hammer(4, 10_000, || Mutant::switch(None));
    assert!(sound.is_sound(), "{sound:?} without any mutant");
    // The mutant shows only if threads collide by chance, so each try gives them more rounds than the previous one.
    let tries: Vec<_> = (0..6)
        .map(|try_| hammer::hammer(4, 10_000 << try_, || Mutant::switch(Some(WIDE_WITHOUT_LOCKS))))
        .take_while(hammer::Outcome::is_sound)
        .collect();
    println!("WideWithoutLocks: killed by the hammer at try {}", tries.len() + 1);
    assert!(tries.len() < 6, "{tries:?}");
}
