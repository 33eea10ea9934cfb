//! Measures a floor: performs drawn operations one at a time or in batches, and times them.
//!
//! Invariant: keys and kinds of operations are drawn before the clock starts. The clock is read twice in about 256
//! operations.
//! Invariant: every operation compares the key, and a fetch checks the value's last byte. Mismatches are counted.

use std::hint::black_box;
use std::io;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rand_core::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::overwrite::{Spare, Values};
use super::table::{Table, VALUE, key, last_byte};
use super::{Floor, Layout, TASKS_MAX, Workload};
use crate::report::Latencies;

/// Number of operations drawn for a floor. Performing them once takes a large part of a second.
pub(super) const DRAWS: usize = 1 << 22;

const _: () = assert!(DRAWS.is_power_of_two() && DRAWS >= TASKS_MAX);

/// Number of operations between two readings of the clock.
pub(super) const FETCHES_PER_LOOK: usize = 256;

/// Result of one measurement of a floor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Number of operations.
    pub ops: u64,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
    /// Number of operations per second.
    pub ops_per_s: f64,
    /// Median time of one operation, or of one batch if several are performed together, in microseconds; sampled.
    pub rtt_us_p50: f64,
    /// Size in bytes of a page of the mapping.
    pub page_size: u64,
    /// Number of slots probed to find a key, averaged over all keys.
    pub mean_probes: f64,
    /// Fraction of the table's slots that are in use.
    pub load_factor: f64,
    /// Number of operations that did not find the key, or did not return its own item. It is 0, unless this program or
    /// the host is faulty.
    pub mismatches: u64,
}

impl Floor {
    /// Performs the drawn operations of `workload` for about `duration`: one after another if `tasks` is 1, else in
    /// batches of `tasks` whose memory accesses overlap.
    ///
    /// # Errors
    /// `InvalidInput` if `tasks` is not 1 to [`TASKS_MAX`], or the floor has too few spare buffers.
    pub fn measure(&self, workload: Workload, tasks: usize, duration: Duration) -> io::Result<Measured> {
        check_tasks(tasks)?;
        let mut fetcher = Fetcher::new(self, tasks, self.take_spares(workload, tasks)?);
        let measured = match (workload, tasks) {
            (Workload::C, 1) => fetcher.run(duration, Fetcher::fetch_one),
            (Workload::C, _) => fetcher.run(duration, Fetcher::fetch_batch),
            (Workload::A, 1) => fetcher.run(duration, Fetcher::mix_one),
            (Workload::A, _) => fetcher.run(duration, Fetcher::mix_batch),
        };
        self.spares.lock().unwrap_or_else(PoisonError::into_inner).append(&mut fetcher.spares);
        Ok(measured)
    }

    fn take_spares(&self, workload: Workload, tasks: usize) -> io::Result<Vec<Spare>> {
        let needed = tasks * workload.spares() as usize;
        let mut spares = self.spares.lock().unwrap_or_else(PoisonError::into_inner);
        match spares.len().checked_sub(needed) {
            Some(left) => Ok(spares.split_off(left)),
            None => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{needed} spare buffers are needed and {} are left: build the floor with more",
                    spares.len()
                ),
            )),
        }
    }
}

/// Operations that a measurement performs in a cycle.
pub(super) struct Draws {
    /// Key number of each operation.
    pub(super) keys: Vec<u32>,
    /// One bit for each operation: whether it is an overwrite.
    overwrites: Vec<u64>,
}

impl Draws {
    /// Draws keys uniformly over the layout's records, and kinds of operations by the workload.
    pub(super) fn new(layout: &Layout, workload: Workload) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(!layout.seed);
        let keys = (0..DRAWS).map(|_| below(layout.records, &mut random) as u32).collect();
        let mut kinds = || match workload {
            Workload::A => random.next_u64(),
            Workload::C => 0,
        };
        Self { keys, overwrites: (0..DRAWS / u64::BITS as usize).map(|_| kinds()).collect() }
    }

    /// Whether the operation with this index is an overwrite.
    #[inline(always)]
    pub(super) fn is_overwrite(&self, index: usize) -> bool {
        self.overwrites[index / u64::BITS as usize] >> (index % u64::BITS as usize) & 1 != 0
    }
}

/// State of one measurement: a position in the drawn operations, and buffers for the items.
struct Fetcher<'floor> {
    table: &'floor Table,
    draws: &'floor Draws,
    next: usize,
    tasks: usize,
    /// Buffers for the fetched items, one for each task.
    fetched: Vec<Vec<u8>>,
    /// Spare buffers of the table, one for each task that overwrites.
    spares: Vec<Spare>,
    values: Values,
    mismatches: u64,
}

impl<'floor> Fetcher<'floor> {
    fn new(floor: &'floor Floor, tasks: usize, spares: Vec<Spare>) -> Self {
        let fetched = vec![vec![0; floor.table.item_size()]; tasks];
        let values = Values::new(floor.table.layout().value_size as usize);
        let (table, draws) = (&floor.table, &floor.draws);
        Self { table, draws, next: 0, tasks, fetched, spares, values, mismatches: 0 }
    }

    /// Repeats `step`, which performs `tasks` operations, until `duration` has passed. The first step after each
    /// reading of the clock is timed separately.
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
        let number = u64::from(self.draws.keys[self.next]);
        let key = key(number);
        let found = self.table.fetch(&key, self.table.home(&key), &mut self.fetched[0]);
        let wrong = self.deliver(0, number, found);
        self.next = (self.next + 1 + usize::from(wrong)) % DRAWS;
    }

    /// Fetches `tasks` keys with overlapping cache misses: all slots, then all items, then the copies.
    #[inline(always)]
    fn fetch_batch(&mut self) {
        let first = self.next_batch();
        let batch = &self.draws.keys[first..first + self.tasks];

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

    /// Fetches or overwrites one key. As in [`fetch_one`](Self::fetch_one), the next key depends on the result.
    #[inline(always)]
    fn mix_one(&mut self) {
        let number = u64::from(self.draws.keys[self.next]);
        let wrong = self.mix(0, self.next, number, self.table.home(&key(number)));
        self.next = (self.next + 1 + usize::from(wrong)) % DRAWS;
    }

    /// Fetches or overwrites `tasks` keys with overlapping cache misses: all slots, then all items or their keys, then
    /// the copies.
    #[inline(always)]
    fn mix_batch(&mut self) {
        let first = self.next_batch();
        let batch = &self.draws.keys[first..first + self.tasks];

        let mut homes = [0; TASKS_MAX];
        for (home, &number) in homes.iter_mut().zip(batch) {
            *home = self.table.home(&key(u64::from(number)));
            self.table.prefetch_slot(*home);
        }
        for (draw, &home) in (first..).zip(&homes[..batch.len()]) {
            match self.draws.is_overwrite(draw) {
                true => self.table.prefetch_key(home),
                false => self.table.prefetch_item(home),
            }
        }
        for (task, (&number, &home)) in batch.iter().zip(&homes).enumerate() {
            self.mix(task, first + task, u64::from(number), home);
        }
    }

    /// Performs the operation with the index `draw`. Returns 0, unless there is a fault.
    #[inline(always)]
    fn mix(&mut self, task: usize, draw: usize, number: u64, home: usize) -> u8 {
        if self.draws.is_overwrite(draw) {
            let value = self.values.starting_with(draw as u8);
            let found = self.table.overwrite(&key(number), home, value, &mut self.spares[task]);
            self.mismatches += u64::from(!found);
            return u8::from(!found);
        }
        let found = self.table.fetch(&key(number), home, &mut self.fetched[task]);
        self.deliver(task, number, found)
    }

    /// Returns the index of the first operation of the next batch.
    #[inline(always)]
    fn next_batch(&mut self) -> usize {
        let first = if self.next + self.tasks > DRAWS { 0 } else { self.next };
        self.next = first + self.tasks;
        first
    }

    /// Passes the fetched item to a black box, so that the compiler keeps the copy, and checks the value. Returns the
    /// difference of the value's last byte from its expected value: 0, unless there is a fault.
    #[inline(always)]
    fn deliver(&mut self, task: usize, number: u64, found: bool) -> u8 {
        let value = black_box(&self.fetched[task][VALUE..]);
        let wrong = wrong_end(value, number, self.table.has_overwrites());
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

/// Returns the difference of the last byte of a value of key `number` from its expected value. Without overwrites, the
/// value starts with the low byte of the number; otherwise with any byte.
#[inline(always)]
pub(super) fn wrong_end(value: &[u8], number: u64, has_overwrites: bool) -> u8 {
    let Some(last) = value.last() else { return 0 };
    let first = if has_overwrites { value[0] } else { number as u8 };
    last ^ last_byte(first, value.len())
}

pub(super) fn check_tasks(tasks: usize) -> io::Result<()> {
    if !(1..=TASKS_MAX).contains(&tasks) {
        let wrong = format!("{tasks} tasks: the valid range is 1 to {TASKS_MAX}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, wrong));
    }
    Ok(())
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
    use crate::floor::{HugePages, table};

    const A_WHILE: Duration = Duration::from_millis(20);

    fn floor(collision_free: bool, value_size: u32) -> Floor {
        spared(5000, value_size, collision_free, 0)
    }

    /// Returns a floor with these spare buffers.
    fn spared(records: u64, value_size: u32, collision_free: bool, spares: u32) -> Floor {
        let huge_pages = HugePages::No;
        Floor::build(Layout { records, value_size, spares, collision_free, huge_pages, seed: 11 }).unwrap()
    }

    fn fetcher(floor: &Floor, workload: Workload, tasks: usize) -> Fetcher<'_> {
        Fetcher::new(floor, tasks, floor.take_spares(workload, tasks).unwrap())
    }

    /// Returns the keys in the items that `steps` steps of `tasks` fetches returned, in order.
    fn visited(floor: &Floor, tasks: usize, steps: usize) -> Vec<u64> {
        let mut fetcher = fetcher(floor, Workload::C, tasks);
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
    fn one_task_and_sixteen_leave_the_same_values() {
        let records = 100;
        let after = |tasks: usize, steps: usize| {
            let floor = spared(records, 64, false, 16);
            let mut fetcher = fetcher(&floor, Workload::A, tasks);
            for _ in 0..steps {
                if tasks == 1 { fetcher.mix_one() } else { fetcher.mix_batch() }
            }
            assert_eq!(fetcher.mismatches, 0);
            let mut out = Vec::new();
            (0..records).map(|number| floor.get(number, &mut out).unwrap().to_vec()).collect::<Vec<_>>()
        };
        let alone = after(1, 1600);
        assert_eq!(alone, after(16, 100));
        // The last overwrite of a key before this operation left the value of its own draw.
        let floor = spared(records, 64, false, 16);
        let expected = |number: u64| {
            let its =
                |&draw: &usize| floor.draws.is_overwrite(draw) && u64::from(floor.draws.keys[draw]) == number;
            (0..1600).rev().find(its).map_or(number as u8, |draw| draw as u8)
        };
        for (number, value) in (0..).zip(&alone) {
            assert_eq!(*value, table::value(expected(number), 64), "key {number}");
        }
    }

    #[test]
    fn half_of_the_operations_are_overwrites() {
        let floor = floor(true, 8);
        let overwrites = (0..DRAWS).filter(|&draw| floor.draws.is_overwrite(draw)).count();
        // The standard deviation of the number of 2^22 fair bits that are set is 1024.
        assert!(overwrites.abs_diff(DRAWS / 2) < 8 * 1024, "{overwrites}");
        let reads = Draws::new(floor.table.layout(), Workload::C);
        assert!((0..DRAWS).all(|draw| !reads.is_overwrite(draw)));
        assert_eq!(reads.keys, floor.draws.keys, "both workloads visit the same keys");
    }

    #[test]
    fn a_batch_size_that_divides_no_power_of_two_wraps_around() {
        let floor = spared(5000, 8, true, 48);
        let mut fetcher = fetcher(&floor, Workload::A, 48);
        for step in [Fetcher::fetch_batch, Fetcher::mix_batch] {
            fetcher.next = DRAWS - 50;
            for _ in 0..3 {
                step(&mut fetcher);
            }
            assert_eq!((fetcher.mismatches, fetcher.next), (0, 96));
        }
    }

    #[test]
    fn a_measurement_counts_its_operations() {
        for (tasks, value_size) in [(1, 0), (16, 0), (1, 512), (TASKS_MAX, 512), (3, 1)] {
            for spares in [0, tasks as u32] {
                let mut floor = spared(5000, value_size, false, spares);
                for workload in [Workload::A, Workload::C] {
                    if spares < workload.spares() {
                        continue;
                    }
                    let measured = floor.measure(workload, tasks, A_WHILE).unwrap();
                    assert_eq!(measured.mismatches, 0);
                    assert!(
                        measured.ops >= FETCHES_PER_LOOK as u64 && measured.seconds >= 0.02,
                        "{measured:?}"
                    );
                    assert!(measured.rtt_us_p50 > 0.0 && measured.mean_probes > 1.0);
                    assert!(measured.page_size >= 4096);
                    floor.check().unwrap();
                }
            }
        }
    }

    #[test]
    fn threads_that_overwrite_the_same_few_keys_tear_and_lose_nothing() {
        for (records, tasks) in [(1, 1), (3, 2), (40, 16)] {
            let mut floor = spared(records, 512, false, 3 * tasks as u32);
            std::thread::scope(|scope| {
                let measure = || floor.measure(Workload::A, tasks, 5 * A_WHILE).unwrap();
                let threads = [(); 3].map(|()| scope.spawn(measure));
                // A reader that compares all bytes of each value.
                let mut out = Vec::new();
                while threads.iter().any(|thread| !thread.is_finished()) {
                    for number in 0..records {
                        let value = floor.get(number, &mut out).expect("no key is ever absent");
                        assert_eq!(value, table::value(value[0], 512), "key {number}");
                    }
                }
                for thread in threads {
                    assert_eq!(thread.join().unwrap().mismatches, 0);
                }
            });
            floor.check().unwrap();
        }
    }

    #[test]
    fn an_item_with_the_wrong_bytes_is_counted() {
        let floor = floor(true, 16);
        let mut fetcher = fetcher(&floor, Workload::C, 1);
        fetcher.fetched[0][VALUE + 15] = last_byte(9, 16) ^ 1;
        assert_eq!(fetcher.deliver(0, 9, true), 1);
        assert_eq!(fetcher.mismatches, 1);
    }

    #[test]
    fn a_number_of_tasks_out_of_range_is_refused() {
        for tasks in [0, TASKS_MAX + 1] {
            let refusal = floor(true, 8).measure(Workload::C, tasks, Duration::ZERO).unwrap_err();
            assert_eq!(refusal.to_string(), format!("{tasks} tasks: the valid range is 1 to 64"));
        }
        let refusal = spared(10, 8, true, 3).measure(Workload::A, 4, Duration::ZERO).unwrap_err();
        assert_eq!(refusal.kind(), io::ErrorKind::InvalidInput);
        assert!(refusal.to_string().contains("4 spare buffers are needed and 3 are left"), "{refusal}");
    }
}
