//! A memory that classifies each access of its process to a store of PRISM-TX, and kills the process at a given one:
//! before the access, or halfway through a WRITE.

use super::bank::{IDS, LANES, SLOTS, WRITES_MAX};
use super::deadly_index::Table;
use super::observed::{Made, Observed, Observer};
use super::process::say;
use farside_fabrics::memory::Mapping;
use farside_remote::Memory;
use farside_remote::leases::ENTRY_SIZE;
use farside_systems::txn::prism_tx::layout::{Prepared, Settled, Slot, Word};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// Purpose of an access, in terms of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// The lease is claimed or renewed, or timestamps are reserved.
    Lease,
    /// A slot is read.
    ReadSlot,
    /// A new key gets a slot.
    Claim,
    /// The writes of a transaction are written to its log entry.
    Body,
    /// A log entry becomes ACTIVE.
    Activate,
    /// PR of a key is raised.
    RaiseRead,
    /// PW of a key is raised.
    RaiseWrite,
    /// A log entry becomes DECIDED.
    Decide,
    /// The slot of a key gets the new item.
    Install,
    /// C of a key is raised without an item, after an abort.
    Settle,
    /// A log entry becomes free.
    Free,
    /// Any other access, also to memory that is not the store's table.
    Other,
}

impl Phase {
    /// Accesses that a client makes sooner or later.
    pub(crate) const ALL: [Phase; 11] = [
        Phase::Lease,
        Phase::ReadSlot,
        Phase::Claim,
        Phase::Body,
        Phase::Activate,
        Phase::RaiseRead,
        Phase::RaiseWrite,
        Phase::Decide,
        Phase::Install,
        Phase::Settle,
        Phase::Free,
    ];
}

/// Plan to kill a process at one of its accesses.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Strike {
    /// Purpose of the access at which the strike comes.
    pub(crate) phase: Phase,
    /// Number of earlier accesses with the same purpose.
    pub(crate) nth: u64,
}

/// Observer that kills its own process.
pub(crate) struct DeadlyBank {
    table: Table,
    strike: Option<Strike>,
    /// Number of accesses so far, by purpose.
    pub(crate) seen: RefCell<BTreeMap<Phase, u64>>,
}

impl DeadlyBank {
    /// Wraps a memory with an observer that has counted no access yet.
    pub(crate) fn over(mapping: Arc<Mapping>, table: Table, strike: Option<Strike>) -> Observed<DeadlyBank> {
        assert_eq!(table.len, SLOTS_AT + SLOTS * SLOT_SIZE, "the layout of the table");
        Observed { mapping, observer: DeadlyBank { table, strike, seen: RefCell::default() } }
    }
}

impl Observer for DeadlyBank {
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>) {
        let phase = match at.checked_sub(self.table.at).filter(|offset| *offset < self.table.len) {
            Some(offset) => classify(offset, made),
            None => Phase::Other,
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

const WORD_SIZE: u64 = size_of::<Word>() as u64;
const SLOT_SIZE: u64 = size_of::<Slot>() as u64;
const WORDS_AT: u64 = IDS * ENTRY_SIZE;
const BODIES_AT: u64 = WORDS_AT + IDS * LANES * WORD_SIZE;
const BODY_SIZE: u64 = (16 + WRITES_MAX).next_multiple_of(16);
const SLOTS_AT: u64 = (BODIES_AT + IDS * LANES * BODY_SIZE).next_multiple_of(64);

/// Classifies an access at an offset of the table. The table's parts are those of `txn/prism_tx/layout.rs`.
fn classify(offset: u64, made: &Made<'_>) -> Phase {
    match made {
        _ if offset < WORDS_AT => match made {
            Made::Exchange { .. } => Phase::Lease,
            _ => Phase::Other,
        },
        Made::Exchange { new, .. } if offset < BODIES_AT => match half::<Word>(*new).state() {
            Some(state) => match state as u64 {
                0 => Phase::Free,
                1 => Phase::Activate,
                2 => Phase::Decide,
                _ => Phase::Other,
            },
            None => Phase::Other,
        },
        _ if offset < BODIES_AT => Phase::Other,
        Made::Write(_) if offset < SLOTS_AT => Phase::Body,
        _ if offset < SLOTS_AT => Phase::Other,
        Made::Read => Phase::ReadSlot,
        Made::Write(_) => Phase::Other,
        Made::Exchange { old, new } if (offset - SLOTS_AT).is_multiple_of(SLOT_SIZE) => {
            match half::<Prepared>(*old).pw == half::<Prepared>(*new).pw {
                true => Phase::RaiseRead,
                false => Phase::RaiseWrite,
            }
        }
        Made::Exchange { old, new } => {
            let (old, new) = (half::<Settled>(*old), half::<Settled>(*new));
            match (old.at.is_null(), old.at == new.at) {
                (_, true) => Phase::Settle,
                (true, false) => Phase::Claim,
                (false, false) => Phase::Install,
            }
        }
    }
}

/// Decodes 16 bytes of memory.
fn half<T: FromBytes>(word: u128) -> T {
    T::read_from_bytes(&word.to_le_bytes()).expect("the size of a half")
}
