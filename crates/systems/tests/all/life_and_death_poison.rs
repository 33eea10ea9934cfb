//! No READ returns a freed buffer's bytes: buffers are poisoned when they go back to their lists.

use crate::support::poison;
use std::time::Duration;

#[test]
fn no_get_ever_finds_what_was_in_a_free_buffer() {
    let figures = poison::play(Duration::from_secs(2), || ()).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{figures:?}");
    assert!(figures.poisoned > 1000 && figures.gets > 1000 && figures.slow_gets > 100, "{figures:?}");
}
