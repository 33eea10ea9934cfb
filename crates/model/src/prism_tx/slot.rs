//! The slot of a key: PW, PR, C and the address of the value. Each function is one atomic op on it.
//!
//! Invariant: PW and C never decrease, and PW >= C.

use zerocopy::{Immutable, IntoBytes};

/// Timestamp of a transaction: "TS". The upper bits are a clock, the lower three the client's id, so timestamps of
/// different ids differ. Zero is the timestamp of the initial values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, IntoBytes, Immutable)]
#[repr(transparent)]
pub struct Timestamp(u8);

impl Timestamp {
    /// Returns the timestamp with this clock and this client's id.
    ///
    /// # Panics
    /// If the clock is above 31 or the id above 7: such worlds are too large to explore.
    pub fn new(clock: u8, id: usize) -> Timestamp {
        assert!(clock < 32 && id < 8, "clock {clock} or id {id} is too large for this model");
        Timestamp(clock << 3 | id as u8)
    }

    /// Returns the clock.
    pub fn clock(self) -> u8 {
        self.0 >> 3
    }

    /// Returns the client's id.
    pub fn id(self) -> usize {
        usize::from(self.0 & 7)
    }
}

/// Slot of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct Slot {
    /// "PW": the latest transaction that prepared a write of the key.
    pub write_prepared: Timestamp,
    /// "PR": the latest transaction that read the key and prepared.
    pub read_prepared: Timestamp,
    /// "C": the latest transaction that is settled, by an install or by an abort.
    pub committed: Timestamp,
    /// Number of the transaction that wrote the value; 0 for the initial value.
    pub value: u8,
}

/// Answer of the check of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// PW was as high already: the transaction must abort.
    No,
    /// PW was raised from `from`. The transaction must abort if it has not `passed`.
    Yes {
        /// PW before.
        from: Timestamp,
        /// Whether no later transaction has read the key.
        passed: bool,
    },
}

impl Slot {
    /// Checks a read: `CAS(LT, PW|PR, RC|TS)` that swaps PR alone. Returns whether the check has passed.
    ///
    /// Without a swap, the returned PW tells why: if it still is RC, then a later transaction has prepared to read the
    /// same version. This is a conflict only if the transaction also writes the key.
    pub fn check_read(&mut self, version: Timestamp, ts: Timestamp, also_writes: bool) -> bool {
        if (self.write_prepared, self.read_prepared) < (version, ts) {
            self.read_prepared = ts;
            return true;
        }
        self.write_prepared == version && !also_writes
    }

    /// Checks a write: `CAS(LT, PW, TS)`, which also returns PR. A read of the transaction itself has set PR to TS, so
    /// an equal PR passes.
    pub fn check_write(&mut self, ts: Timestamp) -> Raised {
        if self.write_prepared >= ts {
            return Raised::No;
        }
        let from = std::mem::replace(&mut self.write_prepared, ts);
        Raised::Yes { from, passed: ts >= self.read_prepared }
    }

    /// Installs a value: `CAS(LT, C, TS)` that swaps C and the address. Without a swap, a later transaction has
    /// overwritten the value before it was visible: the transaction is still committed.
    pub fn install(&mut self, ts: Timestamp, value: u8) {
        if self.committed < ts {
            (self.committed, self.value) = (ts, value);
        }
    }

    /// Settles an aborted transaction: `CAS(LT, C, TS)` that swaps C alone.
    pub fn raise(&mut self, ts: Timestamp) {
        self.committed = self.committed.max(ts);
    }

    /// Returns whether no transaction is between its prepare and its end on this key.
    pub fn is_settled(&self) -> bool {
        self.write_prepared == self.committed
    }
}
