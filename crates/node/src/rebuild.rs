//! Rebuild of a store's table: the node's part, for any kind of store (decision 0017).
//!
//! 1. *Survey*: the service computes the size of the next table.
//! 2. *Grant*: the node assigns the next table's segments to the store.
//! 3. *Move*: the catalog shows both tables, and the service moves the entries of the former table. If the next table
//!    cannot hold them all, steps 1 to 3 are repeated, and a further table takes the entries of all others.
//! 4. *Leave*: the catalog shows only the next table, with another key; the node waits until all chains that the former
//!    key admitted have ended.
//! 5. *Free*: the former table's segments become free.
//!
//! Invariant: the catalog's record is written before the step that it describes is done, so that a node which takes
//! over knows every table that clients know.
//! Invariant: no part of the former table is freed while a chain may access it.

use crate::catalog::Entry;
use crate::extents::Extents;
use crate::mutants;
use crate::node::{NodeMemory, Ticket};
use crate::session::{Grace, Sessions};
use farside_remote::Memory;
use farside_remote::arena::segment::Use;
use farside_remote::arena::{Arena, Geometry, SEGMENT_SIZE};
use farside_remote::control::{Former, Store};
use farside_remote::service::{self, Plan, Service};

/// A rebuild of one store's table that is in progress.
pub struct Rebuild {
    /// Requests that get a response once the catalog shows both tables.
    pub(crate) asked: Vec<Ticket>,
    /// Whether the request left the size of the table to the service.
    pub(crate) is_growth: bool,
    /// The store's secret after the rebuild.
    pub(crate) next_secret: u64,
    pub(crate) stage: Stage,
    /// Whether an entry did not fit into the next table, so that a further table may be requested.
    pub(crate) is_stuck: bool,
}

pub(crate) enum Stage {
    Survey,
    Grant {
        plan: Plan,
        segments: Vec<u32>,
        granted: usize,
    },
    Move,
    /// The former table's segments wait until no chain can access them any more.
    Leave {
        grace: Option<Grace>,
        segments: Vec<u32>,
    },
    /// The segments of the former table, or of an abandoned table, are being freed.
    Free {
        segments: Vec<u32>,
    },
}

impl Rebuild {
    pub(crate) fn new(asked: Vec<Ticket>, is_growth: bool, next_secret: u64) -> Rebuild {
        Rebuild { asked, is_growth, next_secret, stage: Stage::Survey, is_stuck: false }
    }

    /// Creates a rebuild that continues the one which the previous node had begun.
    pub(crate) fn resumed(former: &Former) -> Rebuild {
        Rebuild { stage: Stage::Move, ..Rebuild::new(Vec::new(), false, former.next_secret.max(1)) }
    }

    /// Creates a rebuild that only frees the segments of an abandoned table.
    pub(crate) fn freeing(segments: Vec<u32>) -> Rebuild {
        Rebuild { stage: Stage::Free { segments }, ..Rebuild::new(Vec::new(), false, 0) }
    }

    /// Whether the rebuild waits for a further table, since the next one is too small.
    pub(crate) fn wants_more(&self) -> bool {
        self.is_stuck && matches!(self.stage, Stage::Move)
    }

    /// Whether the last requested table is already in the catalog.
    pub(crate) fn has_begun(&self) -> bool {
        !matches!(self.stage, Stage::Survey | Stage::Grant { .. })
    }

    /// The grace period that the rebuild waits for, if it waits for one.
    pub(crate) fn waiting_for(&self) -> Option<&Grace> {
        match &self.stage {
            Stage::Leave { grace, .. } => grace.as_ref(),
            _ => None,
        }
    }
}

/// Returns the service's [`service::Rebuild`] interface.
///
/// # Errors
/// The service cannot rebuild its table.
pub(crate) fn of<M: Memory>(service: &mut dyn Service<M>) -> Result<&mut dyn service::Rebuild<M>, String> {
    service.rebuild().ok_or_else(|| {
        "stores of this kind cannot be rebuilt: create another store, and copy the entries into it".into()
    })
}

/// The store's catalog entry with a further table in addition to the existing ones.
pub(crate) fn with_both(store: &Store, plan: &Plan, table_at: u64, next_secret: u64) -> Store {
    let before = store.former.as_ref().map(|former| Box::new(Former { next_secret: 0, ..former.clone() }));
    let former = Former {
        parameters: store.parameters.clone(),
        table_at: store.table_at,
        table_len: store.table_len,
        moved_percent: 0,
        next_secret,
        before,
    };
    let table_len = plan.table_len.next_multiple_of(SEGMENT_SIZE);
    Store { parameters: plan.parameters.clone(), table_at, table_len, former: Some(former), ..store.clone() }
}

/// The store's catalog entry after the former tables were left: with one table.
pub(crate) fn with_one(store: &Store, secret: u64) -> Store {
    Store { former: None, secret, ..store.clone() }
}

/// A store's entry for clients: with the current progress of a rebuild, without the next secret.
pub(crate) fn shown<M: NodeMemory>(entry: &Entry<M>) -> Store {
    let moved = || entry.served.try_exclusive()?.rebuild().map(|rebuild| rebuild.moved_percent());
    let former = entry.store.former.as_ref().map(|former| Former {
        moved_percent: moved().unwrap_or(0),
        next_secret: 0,
        ..former.clone()
    });
    Store { former, ..entry.store.clone() }
}

/// The numbers of a table's segments.
pub(crate) fn segments_of(geometry: Geometry, table_at: u64, table_len: u64) -> Vec<u32> {
    let first = geometry.segment_of(table_at);
    first.map_or(Vec::new(), |first| (first..first + (table_len / SEGMENT_SIZE) as u32).collect())
}

/// Assigns the next segment of a table to the store. Returns false once all are assigned.
pub(crate) fn grant_step<M: NodeMemory>(
    memory: &M,
    region: u32,
    segments: &[u32],
    granted: &mut usize,
) -> Result<bool, M::Wait> {
    let Some(&index) = segments.get(*granted) else { return Ok(false) };
    let arena = Arena::of(memory);
    let segment = arena.segment(index)?;
    // If this fails, a peer without the right to do so has changed the entry: the next step retries.
    if arena.assign(index, segment, region, Use::Table)? {
        crate::node::fill_table(memory, *granted, index);
        *granted += 1;
    }
    Ok(true)
}

/// Whether all chains that the former key admitted have ended.
pub(crate) fn is_left<M: NodeMemory>(
    memory: &M,
    sessions: &mut Sessions,
    grace: &mut Option<Grace>,
) -> Result<bool, M::Wait> {
    if mutants::OLD_TABLE_FREED_AT_ONCE.is_on() {
        return Ok(true);
    }
    match grace {
        None => *grace = Some(sessions.begin_grace(memory)?),
        Some(grace) => return sessions.is_over(memory, grace),
    }
    Ok(false)
}

/// Frees the last segment of the list. Returns false once the list is empty.
pub(crate) fn free_step<M: NodeMemory>(
    memory: &M,
    extents: &mut Extents,
    segments: &mut Vec<u32>,
    owned: &mut Vec<u32>,
) -> Result<bool, M::Wait> {
    let Some(&index) = segments.last() else { return Ok(false) };
    let arena = Arena::of(memory);
    // Zero the segment before its entry changes: if the node dies in between, the next node must not find a free
    // segment with data.
    memory.discard(index)?;
    let segment = arena.segment(index)?;
    if arena.assign(index, segment, 0, Use::Free)? {
        extents.give(index);
        owned.retain(|&of| of != index);
        segments.pop();
    }
    Ok(true)
}
