//! The NIC of a client's machine, as far as it limits the verbs that the machine sends.

use crate::station::{Picos, Station};
use crate::world::Nanos;
use std::cell::RefCell;
use std::collections::VecDeque;

/// NIC of a client's machine. It caches the state of `known_max` connections. Before it sends on another connection, it
/// fetches that connection's state; during the fetch it sends nothing.
pub struct Sender {
    station: Station,
    /// Numbers of the cached connections, the most recently used last.
    known: RefCell<VecDeque<u32>>,
    known_max: usize,
    op: Picos,
    miss: Picos,
}

impl Sender {
    /// Creates a NIC that takes `op` picoseconds to send an op, and `miss` picoseconds more for a message if the
    /// connection's state is not cached. The NIC caches the state of `known_max` connections.
    pub fn new(op: Picos, miss: Picos, known_max: usize) -> Sender {
        Sender { station: Station::new(1), known: RefCell::default(), known_max, op, miss }
    }

    /// Returns the virtual time at which a message with this many ops, posted now on this connection, leaves the NIC.
    pub fn leaves(&self, now: Nanos, connection: u32, ops: u64) -> Nanos {
        let mut known = self.known.borrow_mut();
        let place = known.iter().position(|&other| other == connection);
        let is_known = place.and_then(|place| known.remove(place)).is_some();
        known.push_back(connection);
        if known.len() > self.known_max {
            known.pop_front();
        }
        self.station.pass(now, ops * self.op + if is_known { 0 } else { self.miss })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_over_more_connections_than_fit_always_misses() {
        for (connections, forgotten) in [(4, 0), (5, 20)] {
            let sender = Sender::new(0, 1_000, 4);
            let begun = (0..connections).map(|connection| sender.leaves(0, connection, 1)).max();
            let end = (0..20).map(|turn| sender.leaves(0, turn % connections, 1)).max();
            assert_eq!(end, begun.map(|begun| begun + forgotten), "{connections} connections");
        }
    }
}
