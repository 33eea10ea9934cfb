//! Test that no READ returns bytes of a free buffer. The node poisons each buffer before it puts the buffer on a free
//! list, and a session before it reuses the buffer.

use crate::support::poison;
use std::time::Duration;

#[test]
fn no_get_reads_a_free_buffer() {
    // On a busy machine, the clients need more than one round for enough operations.
    for _ in 0..30 {
        let figures = poison::play(Duration::from_secs(2)).unwrap_or_else(|wrong| panic!("{wrong}"));
        println!("{figures:?}");
        if figures.poisoned > 1000 && figures.reused > 1000 && figures.gets > 1000 && figures.slow_gets > 100
        {
            return;
        }
    }
    panic!("the clients never did enough operations");
}
