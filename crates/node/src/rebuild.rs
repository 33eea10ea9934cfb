//! A store gets another table: what the node does for it, whatever the store's kind (decision 0017).
//!
//! 1. *Survey*: the service finds out how large the next table must be.
//! 2. *Grant*: its segments become the store's.
//! 3. *Move*: the catalog shows both tables, and the service moves what is in the former one. If there is no place for
//!    all of it, the first three begin again: a further table takes what is in all others.
//! 4. *Leave*: the catalog shows the next one alone, with another key; whoever was let in by the former key ends.
//! 5. *Free*: the former table's segments become nobody's.
//!
//! Invariant: the catalog's record is written before what it says is done, so that a node which takes over knows at
//! least as many tables as clients do. Invariant: nothing of the former table is freed while a chain may be in it.

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

/// A rebuild that is under way.
pub struct Rebuild {
    /// Who is to be told when both tables are known.
    pub(crate) asked: Vec<Ticket>,
    /// Nobody has said how large the table is to be.
    pub(crate) is_growth: bool,
    /// The store's secret when it is done.
    pub(crate) next_secret: u64,
    pub(crate) stage: Stage,
    /// Something has found no place in the next table: a further one may be asked for.
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
    /// The former table's segments go when nobody is in it any more.
    Leave {
        grace: Option<Grace>,
        segments: Vec<u32>,
    },
    /// The former table's, or those of a table that does not come to be.
    Free {
        segments: Vec<u32>,
    },
}

impl Rebuild {
    pub(crate) fn new(asked: Vec<Ticket>, is_growth: bool, next_secret: u64) -> Rebuild {
        Rebuild { asked, is_growth, next_secret, stage: Stage::Survey, is_stuck: false }
    }

    /// One that another node had under way.
    pub(crate) fn resumed(former: &Former) -> Rebuild {
        Rebuild { stage: Stage::Move, ..Rebuild::new(Vec::new(), false, former.next_secret.max(1)) }
    }

    /// The table that it was granted does not come to be: what is left of it once those segments are back.
    pub(crate) fn freeing(segments: Vec<u32>) -> Rebuild {
        Rebuild { stage: Stage::Free { segments }, ..Rebuild::new(Vec::new(), false, 0) }
    }

    /// Whether it waits for a further table.
    pub(crate) fn wants_more(&self) -> bool {
        self.is_stuck && matches!(self.stage, Stage::Move)
    }

    /// Whether the table that was asked for last has been in the catalog.
    pub(crate) fn has_begun(&self) -> bool {
        !matches!(self.stage, Stage::Survey | Stage::Grant { .. })
    }

    /// Whose turn it waits for.
    pub(crate) fn waiting_for(&self) -> Option<&Grace> {
        match &self.stage {
            Stage::Leave { grace, .. } => grace.as_ref(),
            _ => None,
        }
    }
}

/// A service as one that gives its store another table.
///
/// # Errors
/// It cannot.
pub(crate) fn of<M: Memory>(service: &mut dyn Service<M>) -> Result<&mut dyn service::Rebuild<M>, String> {
    service.rebuild().ok_or_else(|| {
        "a store of this kind keeps its table: make another store, and put into it what is in this one".into()
    })
}

/// What a store is once the catalog shows a further table beside what it has.
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

/// What it is once its former tables are left.
pub(crate) fn with_one(store: &Store, secret: u64) -> Store {
    Store { former: None, secret, ..store.clone() }
}

/// A store, as whoever asks may know it.
pub(crate) fn shown<M: NodeMemory>(entry: &Entry<M>) -> Store {
    let moved = |service: &mut dyn Service<M>| service.rebuild().map(|rebuild| rebuild.moved_percent());
    let moved_percent = entry.served.try_attend().and_then(|mut served| moved(served.service())).unwrap_or(0);
    let former =
        entry.store.former.as_ref().map(|former| Former { moved_percent, next_secret: 0, ..former.clone() });
    Store { former, ..entry.store.clone() }
}

/// The segments of a table.
pub(crate) fn segments_of(geometry: Geometry, table_at: u64, table_len: u64) -> Vec<u32> {
    let first = geometry.segment_of(table_at);
    first.map_or(Vec::new(), |first| (first..first + (table_len / SEGMENT_SIZE) as u32).collect())
}

/// Makes the next segment of a table the store's. False once all are.
pub(crate) fn grant_step<M: NodeMemory>(
    memory: &M,
    region: u32,
    segments: &[u32],
    granted: &mut usize,
) -> Result<bool, M::Wait> {
    let Some(&index) = segments.get(*granted) else { return Ok(false) };
    let arena = Arena::of(memory);
    let segment = arena.segment(index)?;
    // If it was changed under us by a peer that has no right to: once more.
    if arena.assign(index, segment, region, Use::Table)? {
        crate::node::fill_table(memory, *granted, index);
        *granted += 1;
    }
    Ok(true)
}

/// Whether all chains that the former key let in have ended.
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

/// Frees the last of these segments. False once none is left.
pub(crate) fn free_step<M: NodeMemory>(
    memory: &M,
    extents: &mut Extents,
    segments: &mut Vec<u32>,
    owned: &mut Vec<u32>,
) -> Result<bool, M::Wait> {
    let Some(&index) = segments.last() else { return Ok(false) };
    let arena = Arena::of(memory);
    // Zeros first: a node that takes over after a death in between must not find a free segment that is not empty.
    memory.discard(index)?;
    let segment = arena.segment(index)?;
    if arena.assign(index, segment, 0, Use::Free)? {
        extents.give(index);
        owned.retain(|&of| of != index);
        segments.pop();
    }
    Ok(true)
}
