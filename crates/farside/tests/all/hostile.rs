//! Peers that mean harm, or are broken: clients of a node, and what pretends to be a node.
//!
//! Invariant: frames are made by hand here, from the protocol's description. Afterwards the node serves, and holds
//! nobody's session or descriptor; a client ends with an error in time. Nobody panics.

#[path = "hostile/clients.rs"]
mod clients;
#[path = "hostile/guesses.rs"]
mod guesses;
#[path = "hostile/impostors.rs"]
mod impostors;
#[path = "hostile/peer.rs"]
mod peer;
#[path = "support/raw_ring.rs"]
mod raw_ring;
mod support;

use std::time::Duration;
use support::Ran;

/// A client that gets no answer gives up after about a second; machines may be slow.
#[track_caller]
fn in_time(ran: &Ran) {
    assert!(ran.took < Duration::from_secs(5), "it took {:?}", ran.took);
}
