//! Many random schedules of a protocol, until one shows that it is broken.

use super::Protocol;
use super::schedule::{Actor, Bench, Drawing, Operation, Plan, Ran, Tally, UNIT};
use super::shrink::{Size, shrink};
use farside_sim::random::Random;
use serde::Serialize;
use std::collections::HashSet;
use std::rc::Rc;

/// Maximum number of operations of a client.
const OPERATIONS_MAX: u64 = 3;

/// Maximum number of different orders that are told apart, so that a long search does not fill the memory.
const ORDERS_MAX: usize = 1 << 22;

/// What to search.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Seed of the first schedule. The next schedules have the next seeds.
    pub seed: u64,
    /// Number of schedules.
    pub schedules: u64,
    /// Whether the lines of a WRITE land in any order.
    pub relaxed: bool,
}

/// What the schedules have covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Coverage {
    /// Number of schedules.
    pub schedules: u64,
    /// Number of different orders of accesses to memory among them, counted up to 4 194 304.
    pub orders: u64,
    /// Operations of writers that have completed.
    pub writes: u64,
    /// Reads that were accepted.
    pub accepted: u64,
    /// Attempts that started again.
    pub again: u64,
    /// READs whose lines were not a snapshot of one instant.
    pub torn_reads: u64,
}

/// A schedule that shows that the protocol is broken, shrunk.
#[derive(Debug)]
pub struct Found {
    /// Seed of the schedule before it was shrunk.
    pub seed: u64,
    /// The shrunk schedule.
    pub plan: Plan,
    /// Its run, with events.
    pub ran: Ran,
    /// Sizes before and after.
    pub sizes: [Size; 2],
}

/// Runs schedules until one has a finding. Returns what they have covered, and that schedule.
pub fn search<P: Protocol + 'static>(protocol: &Rc<P>, what: &Search) -> (Coverage, Option<Found>) {
    let bench = Bench::default();
    let mut orders = HashSet::new();
    let mut coverage = Coverage::default();
    for number in 0..what.schedules {
        let seed = what.seed.wrapping_add(number);
        let (plan, drawing) = draw(&**protocol, seed, what.relaxed);
        let ran = bench.run(protocol, &plan, Some(drawing), false);
        if orders.len() < ORDERS_MAX {
            orders.insert(ran.order);
        }
        coverage.add(ran.tally);
        coverage.orders = orders.len() as u64;
        if ran.finding.is_some() {
            let (plan, ran, sizes) = shrink(&bench, protocol, &plan, &ran);
            return (coverage, Some(Found { seed, plan, ran, sizes }));
        }
    }
    (coverage, None)
}

impl Coverage {
    fn add(&mut self, tally: Tally) {
        self.schedules += 1;
        self.writes += tally.written;
        self.accepted += tally.accepted;
        self.again += tally.again;
        self.torn_reads += tally.torn_reads;
    }
}

/// Draws the schedule of a seed.
fn draw<P: Protocol>(protocol: &P, seed: u64, relaxed: bool) -> (Plan, Drawing) {
    let random = Random::new(seed).fork();
    let shape = protocol.shape();
    let (writers, readers) =
        (random.between(1, shape.writers_max as u64), random.between(1, shape.readers_max as u64));
    // A line may be late by several round trips, so that a writer's whole operation fits in between.
    let late_max = [4, 15, 60][random.below(3) as usize];
    let pause_max = [0, 5, 40][random.below(3) as usize];
    let actor = |is_writer: bool| {
        let operation = |_| Operation {
            kind: if is_writer { random.below(protocol.kinds().len() as u64) as usize } else { 0 },
            pause: random.between(0, pause_max) * UNIT,
        };
        let operations = (0..random.between(1, OPERATIONS_MAX)).map(operation).collect();
        Actor { is_writer, operations, late: Vec::new() }
    };
    let writers = (0..writers).map(|_| true);
    let actors = writers.chain((0..readers).map(|_| false)).map(actor).collect();
    let one_in = [2, 4, 10][random.below(3) as usize];
    (Plan { seed, relaxed, actors }, Drawing { random, one_in, late_max })
}
