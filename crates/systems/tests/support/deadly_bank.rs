//! Accesses to a store of PRISM-TX, by their purpose.

use super::bank::{IDS, LANES, SLOTS, WRITES_MAX};
use super::deadly_table::{Purpose, Table};
use super::observed::Made;
use farside_fabrics::memory::Mapping;
use farside_remote::leases::ENTRY_SIZE;
use farside_systems::txn::prism_tx::layout::{Prepared, Settled, Slot, Word};
use serde::{Deserialize, Serialize};
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

impl Purpose for Phase {
    const ALL: &'static [Phase] = &[
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
    const OTHER: Phase = Phase::Other;

    fn of(_memory: &Mapping, table: Table, offset: u64, made: &Made<'_>) -> Phase {
        assert_eq!(table.len, SLOTS_AT + SLOTS * SLOT_SIZE, "the layout of the table");
        classify(offset, made)
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
