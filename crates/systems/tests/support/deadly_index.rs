//! Accesses to a store of SMART, by their purpose.

use super::deadly_table::{Purpose, Table};
use super::observed::Made;
use farside_fabrics::memory::Mapping;
use farside_remote::leases::ENTRY_SIZE;
use farside_remote::{Addr, Key, Memory, NodeId};
use farside_systems::index::smart::{Growth, Spec};
use farside_systems::index::{Keys, Rung};
use farside_systems::redo::Areas;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Length of a lease.
pub(crate) const LEASE: Duration = Duration::from_millis(200);
/// Parameters of the stores. Their leaves have one size, and so have their values that lie apart.
pub(crate) const SPEC: Spec = Spec {
    keys: Keys::Numbers,
    value_max: 40,
    inline_max: 16,
    chunk: 1 << 14,
    ids: 8,
    lanes: 4,
    lease_us: LEASE.as_micros() as u64,
    redo: true,
    rung: Rung::WriteCombining,
    nodes: Growth::Switched,
};
/// Size of a leaf and of a value that lies apart in bytes.
const LEAF: u64 = 64;
/// Size of a node in bytes, and its class in the word of a chunk.
const NODE: u64 = 2112;
const NODE_CLASS: u64 = 1 << 10;
/// Class of a value that lies apart.
const VALUE_CLASS: u64 = 1 << 11 | 1;
/// Length of an intent: the start of a redo record.
const INTENT: usize = 24;

/// Purpose of an access, in terms of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// The lease or the epoch is claimed or renewed.
    Lease,
    /// A node, or the root slot, is read.
    ReadNode,
    ReadLeaf,
    /// A value that lies apart is read.
    ReadValue,
    /// Tokens of locks are reserved.
    Tokens,
    /// The client records which leaf it is about to lock.
    Intent,
    Lock,
    /// The client records the new bytes of a leaf.
    Record,
    /// A leaf is written in place; the last word frees the lock.
    Update,
    /// A lock is freed without an update.
    Unlock,
    /// A number of a chunk is drawn.
    Draw,
    Claim,
    /// The states of a chunk's units are read.
    ReadStates,
    NewLeaf,
    NewNode,
    /// A value that lies apart is written.
    NewValue,
    /// The state of a new leaf or node is written.
    Take,
    /// A null slot gets a leaf.
    Link,
    /// The slot of a leaf gets a node which leads to it, or that of a node: leaf split and path split.
    Split,
    SwitchType,
    /// The slot of a node gets the node's new type.
    HintType,
    /// The prefix of a node is shortened after a path split.
    Deepen,
    MoveRevPtr,
    /// A leaf is marked dead.
    Kill,
    /// The slot of a dead leaf is emptied.
    Empty,
    /// An empty slot, or that of a dead leaf, gets a new leaf.
    Revive,
    /// The state of a unit becomes free.
    Free,
    /// Any other access, also to memory that is not the store's.
    Other,
}

impl Purpose for Phase {
    /// Those of inserts, updates and deletes. A client reads no values.
    const ALL: &'static [Phase] = &[
        Phase::Lease,
        Phase::ReadNode,
        Phase::ReadLeaf,
        Phase::Tokens,
        Phase::Intent,
        Phase::Lock,
        Phase::Record,
        Phase::Update,
        Phase::Unlock,
        Phase::Draw,
        Phase::Claim,
        Phase::ReadStates,
        Phase::NewLeaf,
        Phase::NewNode,
        Phase::NewValue,
        Phase::Take,
        Phase::Link,
        Phase::Split,
        Phase::SwitchType,
        Phase::HintType,
        Phase::Deepen,
        Phase::MoveRevPtr,
        Phase::Kill,
        Phase::Empty,
        Phase::Revive,
        Phase::Free,
    ];
    const OTHER: Phase = Phase::Other;

    fn of(memory: &Mapping, table: Table, offset: u64, made: &Made<'_>) -> Phase {
        classify(memory, table, offset, made)
    }
}

/// Classifies an access at an offset of the table. The table's parts are those of `index/radix/layout.rs`.
fn classify(memory: &Mapping, table: Table, offset: u64, made: &Made<'_>) -> Phase {
    let areas_at = (u64::from(SPEC.ids) * ENTRY_SIZE).next_multiple_of(64);
    let len_max = LEAF as u32 - 8;
    let areas =
        Areas { node: NodeId(0), key: Key::new(0, 0), at: Addr::new(0), lanes: SPEC.lanes + 1, len_max };
    let root_at = areas_at + u64::from(SPEC.ids) * areas.area_size();
    let (hint_at, claims_at) = (root_at + 64, root_at + 128);
    let chunk_len = u64::from(SPEC.chunk);
    let mut chunks = (table.len - claims_at) / (chunk_len + 8);
    let chunks_at = |chunks: u64| (claims_at + chunks * 8).next_multiple_of(64);
    while chunks_at(chunks) + chunks * chunk_len > table.len {
        chunks -= 1;
    }
    match offset {
        _ if offset < areas_at => exchanged(made, |_, _| Phase::Lease),
        _ if offset < root_at => match made {
            Made::Read => Phase::Other,
            Made::Write(bytes) if bytes.len() == INTENT => Phase::Intent,
            Made::Write(_) => Phase::Record,
            Made::Exchange { .. } => Phase::Tokens,
        },
        _ if offset < hint_at => slot(made),
        _ if offset < claims_at => exchanged(made, |_, _| Phase::Draw),
        _ if offset < chunks_at(chunks) => exchanged(made, |_, _| Phase::Claim),
        _ => {
            let (number, within) =
                ((offset - chunks_at(chunks)) / chunk_len, (offset - chunks_at(chunks)) % chunk_len);
            let mut claim = [0; 8];
            let Ok(()) = memory.read(table.at + claims_at + number * 8, &mut claim);
            let class = u64::from_le_bytes(claim) >> 16;
            let size = if class == NODE_CLASS { NODE } else { LEAF };
            let mut units = chunk_len / (size + 8);
            while (units * 8).next_multiple_of(64) + units * size > chunk_len {
                units -= 1;
            }
            match within.checked_sub((units * 8).next_multiple_of(64)) {
                None => state(made),
                Some(within) if class == NODE_CLASS => node(within % NODE, made),
                Some(_) if class == VALUE_CLASS => match made {
                    Made::Read => Phase::ReadValue,
                    Made::Write(_) => Phase::NewValue,
                    Made::Exchange { .. } => Phase::Other,
                },
                Some(within) => leaf(within % LEAF, made),
            }
        }
    }
}

fn exchanged(made: &Made<'_>, phase: impl FnOnce(u64, u64) -> Phase) -> Phase {
    match made {
        Made::Exchange { old, new } => phase(*old as u64, *new as u64),
        _ => Phase::Other,
    }
}

fn state(made: &Made<'_>) -> Phase {
    match made {
        Made::Read => Phase::ReadStates,
        Made::Write(_) => Phase::Take,
        Made::Exchange { .. } => Phase::Free,
    }
}

fn node(at: u64, made: &Made<'_>) -> Phase {
    const TYPE: u64 = 0x1f00;
    match (at, made) {
        (_, Made::Read) => Phase::ReadNode,
        (_, Made::Write(_)) => Phase::NewNode,
        (0, _) => Phase::MoveRevPtr,
        (8, _) => exchanged(made, |old, new| match (old ^ new) & TYPE {
            0 => Phase::Deepen,
            _ => Phase::SwitchType,
        }),
        _ => slot(made),
    }
}

fn slot(made: &Made<'_>) -> Phase {
    const IS_LEAF: u64 = 1 << 15;
    let is_empty = |slot: u64| slot & !0xff == IS_LEAF;
    match made {
        Made::Read => Phase::ReadNode,
        Made::Write(_) => Phase::Other,
        Made::Exchange { .. } => exchanged(made, |old, new| match (old, new) {
            _ if is_empty(new) => Phase::Empty,
            (0, _) => Phase::Link,
            _ if new & IS_LEAF != 0 => Phase::Revive,
            _ if old & IS_LEAF == 0 && (old ^ new) >> 16 == 0 => Phase::HintType,
            _ => Phase::Split,
        }),
    }
}

fn leaf(at: u64, made: &Made<'_>) -> Phase {
    match (at, made) {
        (_, Made::Read) => Phase::ReadLeaf,
        (0, Made::Write(_)) => Phase::NewLeaf,
        (_, Made::Write([_, _, _, _, _, _, _, _])) => Phase::Kill,
        (_, Made::Write(_)) => Phase::Update,
        (0, _) => Phase::MoveRevPtr,
        _ => exchanged(made, |_, new| if new == 0 { Phase::Unlock } else { Phase::Lock }),
    }
}
