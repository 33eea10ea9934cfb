//! Which records there are while some are added: YCSB's `AcknowledgedCounterGenerator`.
//!
//! Invariant: whoever asks for a record up to the newest asks for one whose insert has ended.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of records.
pub(super) struct Records {
    next: AtomicU64,
    newest: AtomicU64,
    /// Inserts that have ended while one of a lower number has not.
    ended: Mutex<BTreeSet<u64>>,
}

impl Records {
    /// So many are there, or will be once they are loaded.
    pub(super) fn new(loaded: u64) -> Records {
        Records {
            next: AtomicU64::new(loaded),
            newest: AtomicU64::new(loaded.saturating_sub(1)),
            ended: Mutex::default(),
        }
    }

    /// The highest number of which all lower ones are there too.
    #[inline]
    pub(super) fn newest(&self) -> u64 {
        // Acquire: pairs with the Release in `end`, so that whoever reads a record does so after its insert.
        self.newest.load(Ordering::Acquire)
    }

    /// The number of a record that is to be added.
    pub(super) fn begin(&self) -> u64 {
        // Relaxed: a number says nothing about what is there.
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Its insert has ended; as in YCSB, also if it failed, or else nobody would ever ask for a later one.
    pub(super) fn end(&self, number: u64) {
        let mut ended = self.ended.lock().expect("whoever held it did not panic");
        ended.insert(number);
        let mut newest = self.newest.load(Ordering::Relaxed); // It changes under the lock alone.
        while ended.remove(&(newest + 1)) {
            newest += 1;
        }
        self.newest.store(newest, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_is_the_last_without_a_gap_before_it() {
        let records = Records::new(10);
        let numbers = [(); 4].map(|()| records.begin());
        assert_eq!(numbers, [10, 11, 12, 13]);
        for (ended, newest) in [(12, 9), (10, 10), (13, 10), (11, 13)] {
            records.end(ended);
            assert_eq!(records.newest(), newest);
        }
    }
}
