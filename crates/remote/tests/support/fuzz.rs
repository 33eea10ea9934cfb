//! What all fuzz targets share: how long they run, and changes to bytes that were good.
//!
//! A target runs for half a second, or for as many seconds as `FARSIDE_FUZZ_SECONDS` says. Changes are generated
//! values, so that whoever drives them (by chance, or by coverage) finds a short failing case.

#![allow(dead_code, reason = "each target uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// How long one target runs.
pub(crate) fn budget() -> Duration {
    let seconds = std::env::var("FARSIDE_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    seconds.map_or(Duration::from_millis(500), Duration::from_secs)
}

/// Counts executions, and tells how many there were when the target ends.
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

/// A change to bytes. Places count from the beginning and wrap.
#[derive(Clone, Copy, Debug, bolero::TypeGenerator)]
pub(crate) enum Change {
    /// Puts a byte there.
    Set(u16, u8),
    /// Turns one bit over.
    Flip(u16, u8),
    /// Puts one of the numbers there that are at the edge of something.
    Edge(u16, u8),
    /// Nothing is left from there on.
    Cut(u16),
    /// Some zeros more.
    Grow(u16, u8),
    /// Bytes from one place also at another.
    Copy(u16, u16, u8),
    /// So many bytes there are taken out.
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
