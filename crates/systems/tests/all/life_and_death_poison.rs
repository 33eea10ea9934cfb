//! Test that no READ returns bytes of a free buffer. The node poisons each buffer before it puts the buffer on a free
//! list.

use crate::support::poison;
use std::time::Duration;

#[test]
fn no_get_reads_a_free_buffer() {
    let figures = poison::play(Duration::from_secs(2), || ()).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{figures:?}");
    assert!(figures.poisoned > 1000 && figures.gets > 1000 && figures.slow_gets > 100, "{figures:?}");
}
