//! What clients do in a benchmark: YCSB's workloads, from its property files to the last digit of its
//! generators.
//!
//! ```text
//! property file -> Workload -> Chooser      which operation comes next
//!                          \-> KeyChooser   which record it is about -> key
//! ```
//! Invariant: with one seed a workload makes one sequence of operations and keys.

mod distribution;
mod generators;
mod operations;
mod properties;
mod spec;

use rand_core::SeedableRng;

pub use distribution::{Distribution, KeyChooser};
pub use generators::{
    Exponential, Hotspot, ScrambledZipfian, SkewedLatest, UniformLong, ZIPFIAN_THETA, Zipfian, fnv_hash,
};
pub use operations::{Chooser, Mix, Operation};
pub use properties::{Property, SyntaxError};
pub use spec::{Chosen, Workload, WorkloadError};

/// The random source of the benchmarks. Each client thread has one, seeded by its number.
pub type Random = rand_xoshiro::Xoshiro256PlusPlus;

/// A random source that always gives the same numbers for `seed`.
pub fn random(seed: u64) -> Random {
    Random::seed_from_u64(seed)
}

/// The key of record `number`: its eight bytes, big-endian, so that keys sort as numbers do.
#[inline]
pub const fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}
