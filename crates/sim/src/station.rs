//! What is busy with one thing after another: a link, a NIC, the cores of a CPU.
//!
//! Whoever comes is told at once when it will have been served: first come, first served. Invariant: who comes later is
//! not served before, so each is to ask only when its time has come.

use crate::world::Nanos;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Virtual time in picoseconds: a byte on a link of 100 Gb/s takes 80.
pub type Picos = u64;

const PICOS: Picos = 1_000;

/// So many that serve alike.
pub struct Station {
    /// From when on each is free.
    free: RefCell<BinaryHeap<Reverse<Picos>>>,
}

impl Station {
    /// A station of `servers`.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(servers: u32) -> Station {
        assert!(servers > 0, "a station without servers serves nobody");
        Station { free: RefCell::new((0..servers).map(|_| Reverse(0)).collect()) }
    }

    /// When whoever comes at `now` and takes so long will have been served.
    pub fn pass(&self, now: Nanos, takes: Picos) -> Nanos {
        let mut free = self.free.borrow_mut();
        let Reverse(first) = free.pop().expect("a station has servers");
        let end = first.max(now * PICOS) + takes;
        free.push(Reverse(end));
        end.div_ceil(PICOS)
    }
}

/// The NIC of a client's machine. It remembers so many connections; another's state it has to fetch, and meanwhile it
/// sends nothing.
pub struct Sender {
    station: Station,
    /// The connections that it remembers, that used last at the end.
    known: RefCell<VecDeque<u32>>,
    known_max: usize,
    op: Picos,
    miss: Picos,
}

impl Sender {
    /// A NIC that takes `op` for what it sends, `miss` more where it has to fetch the connection's state, and remembers
    /// `known_max` of them.
    pub fn new(op: Picos, miss: Picos, known_max: usize) -> Sender {
        Sender { station: Station::new(1), known: RefCell::default(), known_max, op, miss }
    }

    /// When what is posted now on that connection leaves.
    pub fn leaves(&self, now: Nanos, connection: u32) -> Nanos {
        let mut known = self.known.borrow_mut();
        let place = known.iter().position(|&other| other == connection);
        let is_known = place.and_then(|place| known.remove(place)).is_some();
        known.push_back(connection);
        if known.len() > self.known_max {
            known.pop_front();
        }
        self.station.pass(now, self.op + if is_known { 0 } else { self.miss })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_while_all_are_busy_waits_for_the_first_that_is_free() {
        let station = Station::new(2);
        assert_eq!(station.pass(100, 10_000), 110);
        assert_eq!(station.pass(100, 30_000), 130);
        assert_eq!(station.pass(105, 10_000), 120);
        assert_eq!(station.pass(200, 500), 201, "a part of a nanosecond is not lost");
        let link = Station::new(1);
        let last = (0..1_000).map(|_| link.pass(0, 80)).max();
        assert_eq!(last, Some(80), "nor is it counted twice");
    }

    #[test]
    fn connections_in_turn_are_remembered_only_if_there_is_room_for_all() {
        for (connections, forgotten) in [(4, 0), (5, 20)] {
            let sender = Sender::new(0, 1_000, 4);
            let begun = (0..connections).map(|connection| sender.leaves(0, connection)).max();
            let end = (0..20).map(|turn| sender.leaves(0, turn % connections)).max();
            assert_eq!(end, begun.map(|begun| begun + forgotten), "{connections} connections");
        }
    }
}
