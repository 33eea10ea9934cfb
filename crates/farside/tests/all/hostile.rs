//! Malicious or broken peers over `shm`: clients of a node, and impostors of a node.
//!
//! Invariant: these tests build frames by hand, from the protocol's description.
//! Invariant: afterwards the node serves and holds no session or descriptor of an attacker. A client of an impostor
//! exits with an error within 5 s. No process panics.

mod clients;
mod guesses;
mod impostors;
mod peer;
use crate::support::Ran;
use std::time::Duration;

/// Asserts that a command took less than 5 s. A client without a response times out after about 1 s; the other 4 s are
/// for slow machines.
#[track_caller]
fn in_time(ran: &Ran) {
    assert!(ran.took < Duration::from_secs(5), "it took {:?}", ran.took);
}
