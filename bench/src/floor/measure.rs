//! Measures a floor: fetches drawn keys one at a time or in batches, and times the fetches.
//!
//! Invariant: keys are drawn before the clock starts. The clock is read twice in about 256 fetches.
//! Invariant: every fetch compares the key and checks the value's last byte. Mismatches are counted.

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::table::{Table, VALUE, key, value_byte};
use super::{Floor, Layout, TASKS_MAX};
use crate::report::Latencies;

/// Number of keys drawn for a floor. Fetching all these keys once takes a large part of a second.
pub(super) const DRAWS: usize = 1 << 22;

const _: () = assert!(DRAWS.is_power_of_two() && DRAWS >= TASKS_MAX);

/// Number of fetches between two readings of the clock.
pub(super) const FETCHES_PER_LOOK: usize = 256;

/// Result of one measurement of a floor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Number of fetches.
    pub ops: u64,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
    /// Number of fetches per second.
    pub ops_per_s: f64,
    /// Median time of one fetch, or of one batch if several are fetched together, in microseconds; sampled.
    pub rtt_us_p50: f64,
    /// Size in bytes of a page of the mapping.
    pub page_size: u64,
    /// Number of slots probed to find a key, averaged over all keys.
    pub mean_probes: f64,
    /// Fraction of the table's slots that are in use.
    pub load_factor: f64,
    /// Number of fetches that did not return the key's own item. It is 0, unless this program or the host is faulty.
    pub mismatches: u64,
}

impl Floor {
    /// Fetches the drawn keys for about `duration`: one after another if `tasks` is 1, else in batches of `tasks` whose
    /// memory accesses overlap.
    ///
    /// # Errors
    /// `InvalidInput` if `tasks` is not 1 to [`TASKS_MAX`].
    pub fn measure(&self, tasks: usize, duration: Duration) -> io::Result<Measured> {
        check_tasks(tasks)?;
        let mut fetcher = Fetcher::new(self, tasks);
        Ok(match tasks {
            1 => fetcher.run(duration, Fetcher::fetch_one),
            _ => fetcher.run(duration, Fetcher::fetch_batch),
        })
    }
}

/// State of one measurement: a position in the drawn keys, and buffers for the items.
struct Fetcher<'floor> {
    table: &'floor Table,
    keys: &'floor [u32],
    next: usize,
    tasks: usize,
    /// Buffers for the fetched items, one for each task.
    fetched: Vec<Vec<u8>>,
    mismatches: u64,
}

impl<'floor> Fetcher<'floor> {
    fn new(floor: &'floor Floor, tasks: usize) -> Self {
        let fetched = vec![vec![0; floor.table.item_size()]; tasks];
        Self { table: &floor.table, keys: &floor.keys, next: 0, tasks, fetched, mismatches: 0 }
    }

    /// Repeats `step`, which fetches `tasks` keys, until `duration` has passed. The first step after each reading of
    /// the clock is timed separately.
    #[inline(always)]
    fn run(&mut self, duration: Duration, step: impl Fn(&mut Self)) -> Measured {
        let steps = FETCHES_PER_LOOK.div_ceil(self.tasks) as u64;
        let mut latencies = Latencies::new();
        let mut looks = 0;
        let started = Instant::now();
        let mut looked = started;
        while looked - started < duration || looks == 0 {
            step(self);
            latencies.record(looked.elapsed());
            for _ in 1..steps {
                step(self);
            }
            looks += 1;
            looked = Instant::now();
        }
        self.measured(looks * steps * self.tasks as u64, looked - started, &latencies)
    }

    /// Fetches one key: the slot, then its item. The next key depends on the fetched bytes. Otherwise the CPU would
    /// start the next fetch while this one waits for memory, and the time per fetch would not be a latency.
    #[inline(always)]
    fn fetch_one(&mut self) {
        let number = u64::from(self.keys[self.next]);
        let key = key(number);
        let found = self.table.fetch(&key, self.table.home(&key), &mut self.fetched[0]);
        let wrong = self.deliver(0, number, found);
        self.next = (self.next + 1 + usize::from(wrong)) % DRAWS;
    }

    /// Fetches `tasks` keys with overlapping cache misses: all slots, then all items, then the copies.
    #[inline(always)]
    fn fetch_batch(&mut self) {
        if self.next + self.tasks > self.keys.len() {
            self.next = 0;
        }
        let batch = &self.keys[self.next..self.next + self.tasks];
        self.next += self.tasks;

        let mut homes = [0; TASKS_MAX];
        for (home, &number) in homes.iter_mut().zip(batch) {
            *home = self.table.home(&key(u64::from(number)));
            self.table.prefetch_slot(*home);
        }
        for &home in &homes[..batch.len()] {
            self.table.prefetch_item(home);
        }
        for (task, (&number, &home)) in batch.iter().zip(&homes).enumerate() {
            let number = u64::from(number);
            let found = self.table.fetch(&key(number), home, &mut self.fetched[task]);
            self.deliver(task, number, found);
        }
    }

    /// Passes the fetched item to a black box, so that the compiler keeps the copy, and checks the item. Returns the
    /// difference of the value's last byte from its expected value: 0, unless there is a fault.
    #[inline(always)]
    fn deliver(&mut self, task: usize, number: u64, found: bool) -> u8 {
        let value = black_box(&self.fetched[task][VALUE..]);
        let wrong = value.last().map_or(0, |last| last ^ value_byte(number, value.len() - 1));
        self.mismatches += u64::from(!found || wrong != 0);
        wrong
    }

    fn measured(&self, ops: u64, elapsed: Duration, latencies: &Latencies) -> Measured {
        let seconds = elapsed.as_secs_f64();
        Measured {
            ops,
            seconds,
            ops_per_s: ops as f64 / seconds,
            rtt_us_p50: latencies.percentile_us(50.0),
            page_size: self.table.page_size() as u64,
            mean_probes: self.table.mean_probes(),
            load_factor: self.table.load_factor(),
            mismatches: self.mismatches,
        }
    }
}

pub(super) fn check_tasks(tasks: usize) -> io::Result<()> {
    if !(1..=TASKS_MAX).contains(&tasks) {
        let wrong = format!("{tasks} tasks: the valid range is 1 to {TASKS_MAX}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
    }
    Ok(())
}

/// Draws the key numbers to fetch, uniformly over the layout's records.
pub(super) fn draw_keys(layout: &Layout) -> Vec<u32> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(!layout.seed);
    (0..DRAWS).map(|_| below(layout.records, &mut random) as u32).collect()
}

/// Returns the numbers below `count`, at most 2^32, in random order.
pub(super) fn shuffled(count: u64, random: &mut Xoshiro256PlusPlus) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).map(|number| number as u32).collect();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, below(last as u64 + 1, random) as usize);
    }
    numbers
}

/// Draws a number below `bound`, which is at most 2^32. All numbers are equally likely, to one part in 2^32.
fn below(bound: u64, random: &mut Xoshiro256PlusPlus) -> u64 {
    ((u128::from(random.next_u64()) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::floor::HugePages;

    fn floor(collision_free: bool, value_size: u32) -> Floor {
        let layout =
            Layout { records: 5000, value_size, collision_free, huge_pages: HugePages::No, seed: 11 };
        Floor::build(layout).unwrap()
    }

    /// Returns the keys in the items that `steps` steps of `tasks` fetches returned, in order.
    fn visited(floor: &Floor, tasks: usize, steps: usize) -> Vec<u64> {
        let mut fetcher = Fetcher::new(floor, tasks);
        let mut visited = Vec::new();
        for _ in 0..steps {
            if tasks == 1 {
                fetcher.fetch_one()
            } else {
                fetcher.fetch_batch()
            }
            let keys = fetcher
                .fetched
                .iter()
                .map(|item| u64::from_be_bytes(item[VALUE - 8..VALUE].try_into().unwrap()));
            visited.extend(keys);
        }
        assert_eq!(fetcher.mismatches, 0);
        visited
    }

    #[test]
    fn one_task_and_sixteen_visit_the_same_keys() {
        for collision_free in [false, true] {
            let floor = floor(collision_free, 100);
            let alone = visited(&floor, 1, 4800);
            assert_eq!(alone, visited(&floor, 16, 300));
            assert!(alone.iter().zip(floor.keys()).all(|(&seen, &drawn)| seen == u64::from(drawn)));
        }
    }

    #[test]
    fn a_batch_size_that_divides_no_power_of_two_wraps_around() {
        let floor = floor(true, 8);
        let mut fetcher = Fetcher::new(&floor, 48);
        fetcher.next = DRAWS - 50;
        for _ in 0..3 {
            fetcher.fetch_batch();
        }
        assert_eq!(fetcher.mismatches, 0);
    }

    #[test]
    fn a_measurement_counts_its_fetches() {
        for (tasks, value_size) in [(1, 0), (16, 0), (1, 512), (TASKS_MAX, 512)] {
            let measured = floor(false, value_size).measure(tasks, Duration::from_millis(20)).unwrap();
            assert_eq!(measured.mismatches, 0);
            assert!(measured.ops >= FETCHES_PER_LOOK as u64 && measured.seconds >= 0.02, "{measured:?}");
            assert!(measured.rtt_us_p50 > 0.0 && measured.mean_probes > 1.0 && measured.page_size >= 4096);
        }
    }

    #[test]
    fn an_item_with_the_wrong_bytes_is_counted() {
        let floor = floor(true, 16);
        let mut fetcher = Fetcher::new(&floor, 1);
        fetcher.fetched[0][VALUE + 15] = value_byte(9, 15) ^ 1;
        assert_eq!(fetcher.deliver(0, 9, true), 1);
        assert_eq!(fetcher.mismatches, 1);
    }

    #[test]
    fn a_number_of_tasks_out_of_range_is_refused() {
        for tasks in [0, TASKS_MAX + 1] {
            let refusal = floor(true, 8).measure(tasks, Duration::ZERO).unwrap_err();
            assert_eq!(refusal.to_string(), format!("{tasks} tasks: the valid range is 1 to 64"));
        }
    }
}
