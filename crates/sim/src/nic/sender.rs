//! The NIC of a client's machine, as far as it limits the verbs that the machine sends.

use crate::station::{Picos, Station};
use crate::world::Nanos;
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};

/// NIC of a client's machine. It caches the state of some connections. Before it sends on another connection, it
/// fetches that connection's state; during the fetch it sends nothing.
pub struct Sender {
    station: Station,
    known: RefCell<Known>,
    misses: Cell<u64>,
    op: Picos,
    miss: Picos,
}

/// Cache of connections, in which a new one replaces the least recently used one.
struct Known {
    /// Number of connections that the cache has room for.
    max: usize,
    /// Number of uses so far, which numbers them.
    uses: u64,
    /// Number of the last use of each cached connection.
    last: HashMap<u32, u64, FixedState>,
    /// Uses in their order, with their numbers. Some of them have later uses of the same connection behind them.
    order: VecDeque<(u32, u64)>,
}

impl Known {
    /// Uses a connection. Returns whether it was cached.
    fn uses(&mut self, connection: u32) -> bool {
        self.uses += 1;
        let was_cached = self.last.insert(connection, self.uses).is_some();
        self.order.push_back((connection, self.uses));
        while let Some(&(oldest, number)) = self.order.front() {
            let is_last_use = self.last.get(&oldest) == Some(&number);
            if is_last_use && self.last.len() <= self.max {
                break;
            }
            self.order.pop_front();
            if is_last_use {
                self.last.remove(&oldest);
            }
        }
        if self.order.len() > 4 * self.max + 64 {
            let last = &self.last;
            self.order.retain(|(connection, number)| last.get(connection) == Some(number));
        }
        was_cached
    }
}

impl Sender {
    /// Creates a NIC that takes `op` picoseconds to send an op, and `miss` picoseconds more for a message if the
    /// connection's state is not cached. The NIC caches the state of `known_max` connections.
    pub fn new(op: Picos, miss: Picos, known_max: usize) -> Sender {
        let known = Known { max: known_max, uses: 0, last: HashMap::default(), order: VecDeque::default() };
        Sender { station: Station::new(1), known: RefCell::new(known), misses: Cell::new(0), op, miss }
    }

    /// Returns the virtual time at which a message with this many ops, posted now on this connection, leaves the NIC.
    pub fn leaves(&self, now: Nanos, connection: u32, ops: u64) -> Nanos {
        let is_known = self.known.borrow_mut().uses(connection);
        self.misses.set(self.misses.get() + u64::from(!is_known));
        self.station.pass(now, ops * self.op + if is_known { 0 } else { self.miss })
    }

    /// Number of times that the state of a connection was not cached.
    pub fn misses(&self) -> u64 {
        self.misses.get()
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
            assert_eq!(sender.misses(), u64::from(connections) + forgotten);
        }
    }

    #[test]
    fn the_least_recently_used_connection_is_replaced() {
        let sender = Sender::new(0, 1_000, 2);
        let missed = |connection| {
            let before = sender.misses();
            sender.leaves(0, connection, 1);
            sender.misses() > before
        };
        // Many uses of one connection leave the other one cached.
        assert!(missed(1) && missed(2) && (0..1_000).all(|_| !missed(2)));
        assert!(!missed(1) && missed(3) && !missed(1) && missed(2) && missed(3));
    }
}
