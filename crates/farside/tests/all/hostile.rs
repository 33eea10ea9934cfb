//! Peers that mean harm, or are broken: clients of a node, and what pretends to be a node.
//!
//! Invariant: frames are made by hand here, from the protocol's description. Afterwards the node serves, and holds
//! nobody's session or descriptor; a client ends with an error in time. Nobody panics.

mod clients;
mod guesses;
mod impostors;
mod peer;
use crate::support::Ran;
use std::time::Duration;

/// A client that gets no answer gives up after about a second; machines may be slow.
#[track_caller]
fn in_time(ran: &Ran) {
    assert!(ran.took < Duration::from_secs(5), "it took {:?}", ran.took);
}
