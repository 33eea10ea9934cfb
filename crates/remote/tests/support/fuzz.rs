//! Code that all fuzz targets share: their run time, and modifications of valid bytes.
//!
//! A target runs for half a second, or for the number of seconds in `FARSIDE_FUZZ_SECONDS`. Modifications are generated
//! values, so that the driver (random or coverage-guided) can shrink a failing case.

#![allow(dead_code, reason = "each target uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Returns the time for which one target runs.
pub(crate) fn budget() -> Duration {
    let seconds = std::env::var("FARSIDE_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    seconds.map_or(Duration::from_millis(500), Duration::from_secs)
}

/// Counts a target's executions, and prints the count at its end.
pub(crate) struct Executions {
    target: &'static str,
    count: AtomicU64,
}

impl Executions {
    pub(crate) fn of(target: &'static str) -> Executions {
        Executions { target, count: AtomicU64::new(0) }
    }

    pub(crate) fn one_more(&self) {
        self.count.fetch_add(1, Relaxed);
    }
}

impl Drop for Executions {
    fn drop(&mut self) {
        let count = self.count.load(Relaxed);
        println!("fuzz {}: {count} executions", self.target);
        if !std::thread::panicking() {
            assert!(count > 0, "a target that never ran finds nothing");
        }
    }
}

/// A modification of a byte string. Offsets are in bytes from its start, and wrap.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
pub(crate) enum Change {
    /// Sets the byte at an offset to a value.
    Set(u16, u8),
    /// Flips one bit of the byte at an offset.
    Flip(u16, u8),
    /// Writes one of the [`EDGES`] at an offset.
    Edge(u16, u8),
    /// Truncates the input at this offset.
    Cut(u16),
    /// Inserts a number of zeros at an offset.
    Grow(u16, u8),
    /// Copies a number of bytes from one offset to another.
    Copy(u16, u16, u8),
    /// Removes a number of bytes at an offset.
    Remove(u16, u8),
}

const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 62,
    i64::MAX as u64,
    u64::MAX - 7,
    u64::MAX,
];

pub(crate) fn change(bytes: &mut Vec<u8>, changes: &[Change]) {
    for &change in changes {
        let end = bytes.len();
        let place = |at: u16| usize::from(at) % end.max(1);
        match change {
            Change::Grow(at, count) => {
                let at = usize::from(at) % (end + 1);
                bytes.splice(at..at, vec![0; count.into()]);
            }
            _ if end == 0 => {}
            Change::Set(at, byte) => bytes[place(at)] = byte,
            Change::Flip(at, bit) => bytes[place(at)] ^= 1 << (bit % 8),
            Change::Edge(at, which) => {
                let edge = EDGES[usize::from(which) % EDGES.len()].to_le_bytes();
                let len = [1, 2, 4, 8][usize::from(which >> 4) % 4];
                let at = place(at);
                let len = len.min(end - at);
                bytes[at..at + len].copy_from_slice(&edge[..len]);
            }
            Change::Cut(at) => bytes.truncate(place(at)),
            Change::Copy(from, to, len) => {
                let (from, to) = (place(from), place(to));
                let len = usize::from(len).min(end - from.max(to));
                bytes.copy_within(from..from + len, to);
            }
            Change::Remove(at, len) => {
                let at = place(at);
                bytes.drain(at..end.min(at + usize::from(len)));
            }
        }
    }
}
