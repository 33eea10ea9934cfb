//! Time of Chequer's memory pool and of its client's cache, without the values' memory: a lock that all engines share
//! is held for this long.
//!
//! Each element of `replace` is a put over a random key: a take, and the release of the key's former block. The time
//! between two puts is long enough that the quarantine lets one block go for each that enters. Half of the area is in
//! use. `claim` builds the pool again from the blocks of `replace`, in random order, as after a restart.
//!
//! Invariant: all draws depend on constant seeds.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use farside_remote::draws::Draws;
use farside_systems::kv::chequer::cache::Cache;
use farside_systems::kv::chequer::pool::{Block, Pool};
use std::hint::black_box;
use std::time::Duration;

criterion_group!(benches, pool, cache);
criterion_main!(benches);

const AREA: u64 = 256 << 20;
/// Time between two puts. At most 1,000 blocks are in quarantine.
const PAUSE: Duration = Duration::from_micros(10);

/// A distribution of lengths, by name.
type Lengths = (&'static str, fn(&mut Draws) -> u64);

const LENGTHS: [Lengths; 4] = [
    ("64 B", |_| 64),
    ("64 KiB + 16 B", |_| (64 << 10) + 16),
    ("64 B to 64 KiB", |draws| 64 + draws.below((64 << 10) - 63)),
    ("Zipf-like, 64 B to 1 MiB", |draws| ((64.0 / (1.0 - draws.share())) as u64).min(1 << 20)),
];

/// A pool half of whose area is in use.
struct Filled {
    pool: Pool,
    blocks: Vec<Block>,
    draws: Draws,
    now: Duration,
}

fn fill(len: fn(&mut Draws) -> u64) -> Filled {
    let (mut pool, mut blocks, mut draws) = (Pool::new(0, AREA), Vec::new(), Draws(1));
    while pool.stat().live_block_bytes < AREA / 2 {
        let len = len(&mut draws);
        blocks.push(pool.take(len, Duration::ZERO).expect("half of the area is free"));
    }
    let mut filled = Filled { pool, blocks, draws, now: Duration::ZERO };
    for _ in 0..filled.blocks.len() {
        replace(&mut filled, len);
    }
    filled
}

fn replace(filled: &mut Filled, len: fn(&mut Draws) -> u64) {
    filled.now += PAUSE;
    let len = len(&mut filled.draws);
    let at = filled.draws.below(filled.blocks.len() as u64) as usize;
    let new = filled.pool.take(len, filled.now).expect("a third of the area is free");
    let old = std::mem::replace(&mut filled.blocks[at], new);
    filled.pool.release(old, filled.now).expect("in use");
}

fn pool(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pool");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    for (name, len) in LENGTHS {
        let mut filled = fill(len);
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("replace, {name}"), |bencher| {
            bencher.iter(|| replace(&mut filled, len));
        });
        filled.draws.shuffle(&mut filled.blocks);
        group.throughput(Throughput::Elements(filled.blocks.len() as u64));
        group.bench_function(format!("claim, {name}"), |bencher| {
            bencher.iter_batched(
                || Pool::new(0, AREA),
                |mut pool| {
                    for block in &filled.blocks {
                        pool.claim(*block).expect("a block in use");
                    }
                    pool
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

fn cache(criterion: &mut Criterion) {
    const KEYS: u64 = 10_000;
    let mut group = criterion.benchmark_group("cache of values of 1 KiB");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2)).sample_size(20);
    let (value, mut draws) = ([7; 1024], Draws(2));
    let mut cache = Cache::new(2 * KEYS as usize * value.len(), 3);
    (0..KEYS).for_each(|key| cache.put(&key.to_le_bytes(), 1, &value));
    group.bench_function("hit", |bencher| {
        bencher.iter(|| black_box(cache.get(&draws.below(KEYS).to_le_bytes(), 1).is_some()));
    });
    group.bench_function("evict and put", |bencher| {
        bencher.iter(|| cache.put(&draws.next().to_le_bytes(), 1, black_box(&value)));
    });
    group.finish();
}
