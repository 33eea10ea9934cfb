//! What the rows of each unit must add up to after a run.
//!
//! Invariant: the total of a unit is what the loader and all committed transactions have added to it. Sums do not
//! depend on the order in which transactions have committed, so clients need not know this order.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::txn::TxnTrouble;

/// What a transaction adds to the totals of units: each with its number.
pub type Added = Vec<(u64, i64)>;

/// The totals of all units.
pub(super) struct Totals {
    added: Vec<AtomicI64>,
    /// The least and the most that transactions of unknown outcome may have added, by unit.
    unknown: Mutex<BTreeMap<u64, [i64; 2]>>,
}

impl Totals {
    pub(super) fn of(units: u64) -> Totals {
        let added = (0..units).map(|_| AtomicI64::new(0)).collect();
        Totals { added, unknown: Mutex::default() }
    }

    /// Counts a transaction that has committed.
    pub(super) fn add(&self, added: &[(u64, i64)]) {
        for (unit, added) in added {
            // Threads end before totals are checked.
            self.added[*unit as usize].fetch_add(*added, Ordering::Relaxed);
        }
    }

    /// Counts a transaction that may have committed.
    pub(super) fn may_add(&self, added: &[(u64, i64)]) {
        let mut unknown = self.unknown.lock().expect("no thread panicked with the lock");
        for (unit, added) in added {
            let [least, most] = unknown.entry(*unit).or_default();
            *least += (*added).min(0);
            *most += (*added).max(0);
        }
    }

    /// Compares the total of a unit with what transactions have added to it.
    ///
    /// # Errors
    /// They differ by more than what transactions of unknown outcome may have added.
    pub(super) fn check(&self, unit: u64, total: i64) -> Result<(), TxnTrouble> {
        let added = self.added[unit as usize].load(Ordering::Relaxed);
        let unknown = self.unknown.lock().expect("no thread panicked with the lock");
        let [least, most] = unknown.get(&unit).copied().unwrap_or_default().map(|unknown| added + unknown);
        match (least..=most).contains(&total) {
            true => Ok(()),
            false => Err(TxnTrouble::Total { unit, total, least, most }),
        }
    }
}
