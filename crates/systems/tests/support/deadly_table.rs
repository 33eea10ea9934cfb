//! A memory that classifies each access of its process to a store's table, and kills the process at a given one: before
//! the access, or halfway through a WRITE.

use super::observed::{Made, Observed, Observer};
use super::process::say;
use farside_fabrics::memory::Mapping;
use farside_remote::Memory;
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Purpose of an access, in terms of the store's protocol.
pub(crate) trait Purpose: Copy + Debug + Ord + Serialize + DeserializeOwned + 'static {
    /// Purposes of accesses that a client makes sooner or later.
    const ALL: &'static [Self];
    /// Any other access, also to memory that is not the store's table.
    const OTHER: Self;

    /// Classifies an access at an offset of the table.
    fn of(memory: &Mapping, table: Table, offset: u64, made: &Made<'_>) -> Self;
}

/// Plan to kill a process at one of its accesses.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Strike<P> {
    /// Purpose of the access at which the strike comes.
    pub(crate) phase: P,
    /// Number of earlier accesses with the same purpose.
    pub(crate) nth: u64,
}

/// Location of a store's table in the memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Observer that kills its own process.
pub(crate) struct DeadlyTable<P> {
    table: Table,
    strike: Option<Strike<P>>,
    /// Number of accesses so far, by purpose.
    pub(crate) seen: RefCell<BTreeMap<P, u64>>,
}

impl<P: Purpose> DeadlyTable<P> {
    /// Wraps a memory with an observer that has counted no access yet.
    pub(crate) fn over(
        mapping: Arc<Mapping>,
        table: Table,
        strike: Option<Strike<P>>,
    ) -> Observed<DeadlyTable<P>> {
        Observed { mapping, observer: DeadlyTable { table, strike, seen: RefCell::default() } }
    }
}

impl<P: Purpose> Observer for DeadlyTable<P> {
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>) {
        let phase = match at.checked_sub(self.table.at).filter(|offset| *offset < self.table.len) {
            Some(offset) => P::of(memory, self.table, offset, made),
            None => P::OTHER,
        };
        let nth = {
            let mut seen = self.seen.borrow_mut();
            let count = seen.entry(phase).or_default();
            *count += 1;
            *count - 1
        };
        if self.strike.is_none_or(|strike| strike.phase != phase || strike.nth != nth) {
            return;
        }
        if let Made::Write(bytes) = made {
            let Ok(()) = memory.write(at, &bytes[..bytes.len() / 2]);
        }
        say("struck", &phase);
        rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).expect("a signal to oneself");
        // The signal may reach another thread first.
        std::thread::sleep(Duration::from_secs(10));
    }
}
