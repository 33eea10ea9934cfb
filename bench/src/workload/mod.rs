//! YCSB's workloads: their property files, and their generators of operations and keys.
//!
//! ```text
//! property file -> Workload -> Chooser      draws the next operation
//!                          |-> KeyChooser   draws its record -> key
//!                          \-> LengthChooser   draws the length of a value
//! ```
//! Invariant: a workload and a seed determine the sequence of operations and keys.

mod distribution;
mod generators;
mod lengths;
mod operations;
mod properties;
pub mod skew;
mod spec;

use rand_core::SeedableRng;

pub use distribution::{Distribution, KeyChooser};
pub use generators::{
    Exponential, Hotspot, ScrambledZipfian, SkewedLatest, UniformLong, ZIPFIAN_THETA, Zipfian, fnv_hash, unit,
};
pub use lengths::{LengthChooser, Lengths};
pub use operations::{Chooser, Mix, Operation};
pub use properties::{Property, SyntaxError};
pub use spec::{Chosen, Workload, WorkloadError};

/// Random source of the benchmarks. Each client thread has its own, seeded with the thread's number.
pub type Random = rand_xoshiro::Xoshiro256PlusPlus;

/// Creates a random source. The same seed yields the same numbers.
pub fn random(seed: u64) -> Random {
    Random::seed_from_u64(seed)
}

/// Returns the key of record `number`: 8 bytes, big-endian, so that keys sort like numbers.
#[inline]
pub const fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}
