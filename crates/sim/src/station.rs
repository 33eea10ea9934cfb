//! A resource that serves requests one after the other: a link, a NIC, the cores of a CPU.
//!
//! The completion time of a request is known when the request arrives: first come, first served.
//!
//! Invariant: a later request is not served earlier, so callers make each request only at its arrival time.

use crate::world::Nanos;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Virtual time in picoseconds. For scale: on a link of 100 Gb/s, one byte takes 80 ps.
pub type Picos = u64;

const PICOS: Picos = 1_000;

/// A queue of requests with one or more identical servers.
pub struct Station {
    /// For each server, the time from which it is free.
    free: RefCell<BinaryHeap<Reverse<Picos>>>,
}

impl Station {
    /// Creates a station with this number of servers.
    ///
    /// # Panics
    /// If `servers` is 0.
    pub fn new(servers: u32) -> Station {
        assert!(servers > 0, "a station needs at least one server");
        Station { free: RefCell::new((0..servers).map(|_| Reverse(0)).collect()) }
    }

    /// Whether a server is free at `now`.
    pub fn is_idle(&self, now: Nanos) -> bool {
        self.free.borrow().peek().is_some_and(|Reverse(first)| *first <= now * PICOS)
    }

    /// Returns the virtual time, in nanoseconds, from which a server is free.
    pub fn free_at(&self) -> Nanos {
        self.free.borrow().peek().map_or(0, |Reverse(first)| first.div_ceil(PICOS))
    }

    /// Serves a request that arrives at `now` and occupies a server for `takes` picoseconds. Returns the time, in
    /// nanoseconds, at which the request completes.
    pub fn pass(&self, now: Nanos, takes: Picos) -> Nanos {
        let mut free = self.free.borrow_mut();
        let Reverse(first) = free.pop().expect("a station has servers");
        let end = first.max(now * PICOS) + takes;
        free.push(Reverse(end));
        end.div_ceil(PICOS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_the_first_free_server() {
        let station = Station::new(2);
        assert_eq!(station.pass(100, 10_000), 110);
        assert!(station.is_idle(100));
        assert_eq!(station.pass(100, 30_000), 130);
        assert!(!station.is_idle(109) && station.is_idle(110));
        assert_eq!(station.pass(105, 10_000), 120);
        assert_eq!(station.pass(200, 500), 201, "fractions of a nanosecond are not lost");
        let link = Station::new(1);
        let last = (0..1_000).map(|_| link.pass(0, 80)).max();
        assert_eq!(last, Some(80), "nor are they counted twice");
    }
}
