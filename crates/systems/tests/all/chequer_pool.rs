//! Random takes and releases of Chequer's memory pool against a model, which knows only which bytes are in use. They
//! also measure how much memory the pool needs for each byte in use.

use farside_remote::draws::Draws;
use farside_systems::kv::chequer::pool::{Block, ClaimError, Pool, QUARANTINE, Stat, UNIT, block_size};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// First address of every area.
const AT: u64 = 3 << 30;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Largest overhead, quarantine apart, for contents of 64 bytes and more. It also bounds the area's size over the bytes
/// in use when the area is full.
const OVERHEAD_MAX: f64 = 2.0;

/// A distribution of lengths, and an area for it. No byte of the area is ever touched.
struct Case {
    name: &'static str,
    area: u64,
    /// Draws a length. The second argument is the part of the run that has passed, 0 to 1.
    len: fn(&mut Draws, f64) -> u64,
}

/// Areas are no powers of two, so that their ends are tested, too.
const CASES: [Case; 9] = [
    Case { name: "fixed, 64 B", area: 7 * MIB + 96, len: |_, _| 64 },
    Case { name: "fixed, 65 B", area: 11 * MIB + 32, len: |_, _| 65 },
    Case { name: "fixed, 1 KiB + 16 B", area: 101 * MIB, len: |_, _| KIB + 16 },
    Case { name: "fixed, 64 KiB + 16 B", area: 3_000 * MIB, len: |_, _| 64 * KIB + 16 },
    Case { name: "fixed, 1 MiB + 16 B", area: 20_001 * MIB, len: |_, _| MIB + 16 },
    Case { name: "uniform, 64 B to 1 MiB", area: 10_000 * MIB, len: |draws, _| uniform(draws, 64, MIB) },
    Case { name: "uniform, 64 B to 1 KiB", area: 37 * MIB, len: |draws, _| uniform(draws, 64, KIB) },
    Case { name: "Zipf-like, 64 B to 1 MiB", area: 99 * MIB, len: |draws, _| zipf(draws) },
    Case { name: "small, then large", area: 5_000 * MIB, len: shifting },
];

fn uniform(draws: &mut Draws, least: u64, most: u64) -> u64 {
    least + draws.below(most + 1 - least)
}

/// The number of contents longer than a length is inversely proportional to the length.
fn zipf(draws: &mut Draws) -> u64 {
    ((64.0 / (1.0 - draws.share())) as u64).min(MIB)
}

/// The longest length doubles 14 times, from 64 B to 1 MiB. Lengths are at least a quarter of it.
fn shifting(draws: &mut Draws, passed: f64) -> u64 {
    let most = (64.0 * (14.0 * passed).exp2()) as u64;
    uniform(draws, (most / 4).max(64), most)
}

/// A pool and its model.
struct Scene {
    pool: Pool,
    area: u64,
    draws: Draws,
    now: Duration,
    /// Blocks in use.
    live: Vec<Block>,
    live_bytes: u64,
    /// Released blocks, with the end of each one's quarantine.
    released: VecDeque<(Duration, Block)>,
    /// The end of each block in use or in quarantine, by its first address.
    owned: BTreeMap<u64, u64>,
    overhead_max: f64,
}

impl Scene {
    fn new(area: u64, seed: u64) -> Scene {
        Scene {
            pool: Pool::new(AT, area),
            area,
            draws: Draws(seed),
            now: Duration::ZERO,
            live: Vec::new(),
            live_bytes: 0,
            released: VecDeque::new(),
            owned: BTreeMap::new(),
            overhead_max: 1.0,
        }
    }

    /// Takes a block and checks it. Returns whether the pool had one.
    fn take(&mut self, len: u64) -> Result<bool, String> {
        while self.released.front().is_some_and(|(until, _)| *until <= self.now) {
            let (_, block) = self.released.pop_front().expect("it has a front");
            self.owned.remove(&block.at);
        }
        let Some(block) = self.pool.take(len, self.now) else { return Ok(false) };
        let end = block.at + len.next_multiple_of(UNIT);
        if block.len != len || block.at % UNIT != 0 || block.at < AT || end > AT + self.area {
            return Err(format!("a take of {len} bytes returned {block:?} of {} bytes at {AT}", self.area));
        }
        // Blocks are disjoint, so only the last one that starts before this one's end may overlap it.
        if let Some((at, other)) = self.owned.range(..end).next_back().filter(|(_, other)| **other > block.at)
        {
            return Err(format!("{block:?} overlaps {at}..{other}, which is in use or in quarantine"));
        }
        self.owned.insert(block.at, end);
        self.live.push(block);
        self.live_bytes += len;
        Ok(true)
    }

    /// Releases a random block.
    fn release(&mut self) {
        let block = self.live.swap_remove(self.draws.below(self.live.len() as u64) as usize);
        self.live_bytes -= block.len;
        self.released.push_back((self.now + QUARANTINE, block));
        self.pool.release(block, self.now).expect("in use");
    }

    /// Checks that each unit of the area is counted once.
    fn check(&mut self) -> Result<Stat, String> {
        let stat = self.pool.stat();
        let counted = stat.live_block_bytes
            + stat.quarantine_bytes
            + stat.fast_bytes
            + stat.mixed_bytes
            + stat.free_bytes;
        if counted != self.area
            || (stat.live_bytes, stat.live_blocks) != (self.live_bytes, self.live.len() as u64)
        {
            return Err(format!(
                "{} blocks with {} bytes are live: {stat:?}",
                self.live.len(),
                self.live_bytes
            ));
        }
        self.overhead_max = self.overhead_max.max(stat.overhead());
        Ok(stat)
    }

    /// Releases all blocks and checks that the whole area is free and merged again.
    fn drain(&mut self) -> Result<(), String> {
        while !self.live.is_empty() {
            self.release();
        }
        let early = self.check()?;
        self.now += QUARANTINE;
        while self.pool.settle(self.now) > 0 {}
        let stat = self.check()?;
        let (units, whole) = (self.area / UNIT, Pool::new(AT, self.area).stat());
        if (stat.free_bytes, stat.largest_free_bytes) != (units * UNIT, whole.largest_free_bytes) {
            return Err(format!("memory leaked: {early:?}, then {stat:?}"));
        }
        Ok(())
    }
}

/// Makes random takes and releases around a moving target for the bytes in use. Then fills the area, and replaces
/// blocks while it is full. Returns a line with the measurements.
fn play(case: &Case, seed: u64, steps: u64) -> Result<String, String> {
    let mut scene = Scene::new(case.area, seed);
    for step in 0..steps {
        scene.now += Duration::from_micros(scene.draws.below(100));
        // The target rises to 60 % of the area and falls to 10 %, three times.
        let wave = (step as f64 / steps as f64 * 3.0).fract();
        let target = (0.6 - (wave - 0.5).abs()) * case.area as f64 / 2.0;
        let wants_more = scene.draws.chance(if (scene.live_bytes as f64) < target { 0.8 } else { 0.2 });
        if wants_more || scene.live.is_empty() {
            let len = (case.len)(&mut scene.draws, step as f64 / steps as f64);
            scene.take(len)?;
        } else {
            scene.release();
        }
        if step % 16 == 0 {
            scene.check()?;
        }
    }
    let calm = scene.pool.stat();
    let busy_max = scene.overhead_max;
    let full = fill(case, &mut scene, steps / 4)?;
    let line = format!(
        "{:<24} overhead at most {busy_max:.3}; area / bytes in use when full {:.3}, at most {:.3}; takes {} fast, \
         {} mixed, {} buddies",
        case.name, full.mean, full.most, calm.fast_takes, calm.mixed_takes, calm.buddy_takes
    );
    if scene.overhead_max.max(full.most) > OVERHEAD_MAX {
        return Err(format!("too much overhead: {line}; when full {:.3}", scene.overhead_max));
    }
    scene.drain()?;
    Ok(line)
}

/// The area's size over the bytes in use, at each time that the area had no block.
struct Full {
    mean: f64,
    most: f64,
}

/// Fills the area until it has no block for a drawn length, then replaces random blocks in a number of steps.
fn fill(case: &Case, scene: &mut Scene, steps: u64) -> Result<Full, String> {
    let mut samples = Vec::new();
    let mut step = 0;
    while step < steps {
        let len = (case.len)(&mut scene.draws, 1.0);
        if !scene.take(len)? {
            let area = case.area - scene.pool.stat().quarantine_bytes;
            samples.push(area as f64 / scene.live_bytes as f64);
            for _ in 0..1 + scene.draws.below(4) {
                scene.release();
            }
            scene.now += QUARANTINE;
        }
        step += u64::from(!samples.is_empty());
        if step % 16 == 0 {
            scene.check()?;
        }
    }
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    Ok(Full { mean, most: samples.into_iter().fold(1.0, f64::max) })
}

fn play_all(steps: u64, test: &str) {
    for (seed, case) in (1..).zip(&CASES) {
        let line = play(case, seed, steps).unwrap_or_else(|error| {
            panic!("{}, seed {seed}: {error}; replay: cargo test -p farside-systems-tests {test}", case.name)
        });
        println!("{line}");
    }
}

#[test]
fn blocks_never_overlap_or_leak_and_need_at_most_twice_the_bytes_in_use() {
    play_all(50_000, "blocks_never_overlap");
}

#[test]
#[ignore = "takes 20 s: cargo xtask soak"]
fn soak_blocks_never_overlap_or_leak_in_a_million_steps_of_each_case() {
    play_all(1_000_000, "soak_blocks_never_overlap -- --ignored");
}

#[test]
fn a_new_area_is_filled_without_large_gaps() {
    for (seed, case) in (1..).zip(&CASES[..8]) {
        let mut scene = Scene::new(case.area / 8 / UNIT * UNIT, seed);
        let mut draws = scene.draws.clone();
        while scene.take((case.len)(&mut draws, 0.0)).expect(case.name) {}
        let (area, stat) = (scene.area as f64, scene.check().expect(case.name));
        let (blocks, bytes) = (area / stat.live_block_bytes as f64, area / stat.live_bytes as f64);
        println!("{:<24} area / blocks {blocks:.3}, area / bytes in use {bytes:.3}", case.name);
        // Five quarters of a power of two leave gaps of a sixth.
        assert!(blocks < 1.25 && bytes < 1.6, "{}: {stat:?}", case.name);
    }
}

#[test]
fn claimed_blocks_are_those_of_the_pool_before_the_restart() {
    for (seed, case) in (1..).zip(&CASES) {
        let mut scene = Scene::new(case.area, seed);
        for step in 0..20_000 {
            let len = (case.len)(&mut scene.draws, step as f64 / 20_000.0);
            if scene.draws.percent(30) && !scene.live.is_empty() {
                scene.release();
            } else {
                scene.take(len).expect(case.name);
            }
        }
        let mut again = Pool::new(AT, case.area);
        scene.draws.shuffle(&mut scene.live);
        for block in &scene.live {
            assert_eq!(again.claim(*block), Ok(()), "{}: {block:?}", case.name);
        }
        for block in &scene.live {
            assert_eq!(again.claim(*block), Err(ClaimError::Overlaps), "{}: {block:?}", case.name);
        }
        let (before, after) = (scene.pool.stat(), again.stat());
        assert_eq!((after.live_bytes, after.live_blocks), (before.live_bytes, before.live_blocks));
        assert_eq!(after.free_bytes, case.area - before.live_block_bytes);
        scene.pool = again;
        scene.released.clear();
        scene.owned = scene.live.iter().map(|block| (block.at, block.at + block_size(block.len))).collect();
        let len = (case.len)(&mut scene.draws, 1.0);
        scene.take(len).expect(case.name);
        scene.drain().expect(case.name);
    }
}

#[test]
fn an_area_of_100_gib_is_managed_from_end_to_end() {
    let area = 100 << 30;
    let mut pool = Pool::new(AT, area);
    let last = Block { at: AT + area - MIB, len: MIB };
    assert_eq!(pool.claim(last), Ok(()));
    let mut taken = 0;
    while pool.take(MIB, Duration::ZERO).is_some() {
        taken += 1;
    }
    assert_eq!(taken, 100 * 1_024 - 1);
    pool.release(last, Duration::ZERO).expect("in use");
    assert_eq!(pool.take(MIB, QUARANTINE), Some(last));
}

#[cfg(farside_mutants)]
#[test]
fn a_merge_with_a_block_in_use_is_detected() {
    use farside_remote::mutant::Mutant;
    use farside_systems::kv::chequer::mutants::BUDDY_MERGES_IN_USE;

    let case = &CASES[5];
    assert!(play(case, 1, 10_000).is_ok());
    Mutant::switch(Some(BUDDY_MERGES_IN_USE));
    let found = std::panic::catch_unwind(|| play(case, 1, 10_000));
    Mutant::switch(None);
    let found = match found {
        Ok(played) => played.expect_err("ChequerBuddyMergesInUse lives"),
        Err(_) => "the pool noticed that it freed a free block".into(),
    };
    println!("{BUDDY_MERGES_IN_USE:?}: killed, for {found}");
    println!("1 of 1 mutants were killed");
}
