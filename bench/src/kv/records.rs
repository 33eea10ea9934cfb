//! Numbers of the records that exist while clients insert more: YCSB's `AcknowledgedCounterGenerator`.
//!
//! Invariant: the insert of every record up to the newest one has ended.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Numbers of the records that exist and that are being inserted.
pub(crate) struct Records {
    next: AtomicU64,
    newest: AtomicU64,
    inserts: Mutex<Inserts>,
    has_failed: AtomicBool,
}

#[derive(Default)]
struct Inserts {
    /// Numbers of those that have ended while one with a lower number has not ended.
    ended: BTreeSet<u64>,
    /// Numbers of those that have failed.
    failed: BTreeSet<u64>,
}

impl Records {
    /// Creates the state for `loaded` records that exist at the start.
    pub(crate) fn new(loaded: u64) -> Records {
        Records {
            next: AtomicU64::new(loaded),
            newest: AtomicU64::new(loaded.saturating_sub(1)),
            inserts: Mutex::default(),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Returns the highest number up to which all inserts have ended.
    #[inline]
    pub(crate) fn newest(&self) -> u64 {
        // Acquire: pairs with the Release in `end`, so that a client reads a record after its insert.
        self.newest.load(Ordering::Acquire)
    }

    /// Starts an insert. Returns the number of the new record.
    pub(crate) fn begin(&self) -> u64 {
        // Relaxed: the number does not imply that any record exists.
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Ends the insert of record `number`. As in YCSB, a failed insert ends, too: otherwise no later record would ever
    /// be read.
    pub(crate) fn end(&self, number: u64, has_succeeded: bool) {
        let mut inserts = self.inserts.lock().expect("no thread panicked with the lock");
        inserts.ended.insert(number);
        if !has_succeeded {
            inserts.failed.insert(number);
            self.has_failed.store(true, Ordering::Relaxed); // The Release below comes after it.
        }
        let mut newest = self.newest.load(Ordering::Relaxed); // It changes only under the lock.
        while inserts.ended.remove(&(newest + 1)) {
            newest += 1;
        }
        self.newest.store(newest, Ordering::Release);
    }

    /// Whether an insert has failed: at least, whether that of any record up to [`Records::newest`], as the caller has
    /// seen it, has.
    #[inline]
    pub(crate) fn have_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed) // Stored before the newest record, which the caller has acquired.
    }

    /// Whether the insert of record `number` has failed, so that the record may be absent.
    pub(crate) fn may_be_absent(&self, number: u64) -> bool {
        self.have_failed()
            && self.inserts.lock().expect("no thread panicked with the lock").failed.contains(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_record_has_no_gap_before_it() {
        let records = Records::new(10);
        let numbers = [(); 4].map(|()| records.begin());
        assert_eq!(numbers, [10, 11, 12, 13]);
        for (ended, newest) in [(12, 9), (10, 10), (13, 10), (11, 13)] {
            records.end(ended, ended != 12);
            assert_eq!(records.newest(), newest);
        }
        assert_eq!(numbers.map(|number| records.may_be_absent(number)), [false, false, true, false]);
    }
}
