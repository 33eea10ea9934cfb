//! Work of the memory node's CPU for a PRISM-KV store with one table:
//! * plan the table,
//! * report the buffers that the table reaches (for the scan),
//! * detect when the table is crowded,
//! * survey the table before a rebuild.
//!
//! The module `rebuild` has the work for a store with several tables.

use super::KIND;
use super::layout::{
    GENERATION_MASK, HEADER_SIZE, ITEM_COUNT_MAX, ITEM_MAX, ItemHeader, ItemView, Kind as ItemKind,
    Placement, SLOT_SIZE, Slot, Table, TableSpec, above, slots_for, table_len,
};
use super::rebuild::Moving;
use crate::hash_slots::Request;
use farside_remote::arena::class::Class;
use farside_remote::arena::{Arena, SEGMENT_SIZE};
use farside_remote::service::{Context, Extent, Kind, Plan, Rebuild, Service, Step, Tick};
use farside_remote::{BoundedPtr, Memory};
use std::sync::{Mutex, PoisonError};
use zerocopy::FromBytes;

/// Node-side half of PRISM-KV.
pub struct PrismKvKind;

impl<M: Memory> Kind<M> for PrismKvKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn permits_reuse(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let request = Request::parse(parameters, KIND)?;
        let items = request.items(quota);
        let mut slots = slots_for(items).ok_or_else(|| too_many(items))?;
        // With its end slot, this table would take one more segment. The number of items is only a default and the
        // table can grow, so the table is halved instead.
        if request.items.is_none() && (slots * SLOT_SIZE).is_multiple_of(SEGMENT_SIZE) {
            slots /= 2;
        }
        plan_of(&TableSpec { slots, seed: entropy, placement: request.placement, epoch: 1, floor: 0 })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(PrismKvService {
            table: Table::new(parameters, table)?,
            watch: Mutex::default(),
            survey: None,
        }))
    }
}

fn too_many(items: u64) -> String {
    format!("{items} items are too many for one store: give at most {ITEM_COUNT_MAX}")
}

fn plan_of(spec: &TableSpec) -> Result<Plan, String> {
    let parameters = serde_json::to_string(spec).map_err(|error| error.to_string())?;
    let table_len = table_len(spec.slots).ok_or_else(|| too_many(spec.slots))?;
    Ok(Plan { table_len, parameters, wide: false })
}

struct PrismKvService {
    table: Table,
    watch: Mutex<Watch>,
    survey: Option<Survey>,
}

/// Samples how full the table is. Keys are spread evenly over the table, so a part of its slots represents the whole.
#[derive(Default)]
struct Watch {
    next: u64,
    seen: u64,
    taken: u64,
    is_crowded: bool,
}

/// Number of slots that one step samples.
const WATCHED_PER_STEP: u64 = 64;
/// Number of slots that are sampled before the load is judged.
const WATCHED: u64 = 1024;

/// Counts the slots of a store's tables to determine the size and the floor of the next table.
pub(super) struct Survey {
    /// Smallest number of items that the next table must hold. If absent, the table must not shrink.
    items: Option<u64>,
    seed: u64,
    /// Upper bound of the number of items, whatever the slots contain: each item has a buffer within the quota.
    most: u64,
    /// Next slot to count: the index of its table, and the index of the slot in that table.
    next: (usize, u64),
    /// Number of slots of the last table that have a key.
    taken: u64,
    /// Number of empty slots of the last table, which may still get a key before the rebuild closes them.
    empty: u64,
    /// Number of items that need slots in the next table: items with a value, and tombstones far above the floor.
    staying: u64,
    /// Number of generations by which the floor rises. The higher the floor, the more tombstones can be dropped.
    rise: u32,
}

/// Maximum rise of the floor in one rebuild. Because of this bound, generations repeat only after many rebuilds.
const RISE_MAX: u32 = 1 << 16;
/// Number of generations by which the floor rises above the largest generation seen. A key that is deleted during the
/// rebuild may get a larger generation. The margin keeps its tombstone below the floor too, so that the tombstone need
/// not be copied to the next table.
const RISE_BEYOND: u32 = 1 << 8;

/// Number of slots in one step of a scan or a survey.
const SLOTS_PER_STEP: u64 = 8;

impl<M: Memory> Service<M> for PrismKvService {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let next = live_of(&self.table, memory, cursor, found)?;
        Ok((next < self.table.spec.slots).then_some(next))
    }

    fn tick(&self, context: Context<'_, M>) -> Result<Tick, M::Wait> {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        watch.step(context.memory, &self.table)
    }

    fn rebuild(&mut self) -> Option<&mut dyn Rebuild<M>> {
        Some(self)
    }
}

impl<M: Memory> Rebuild<M> for PrismKvService {
    fn is_crowded(&mut self) -> bool {
        let watch = self.watch.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut watch.is_crowded)
    }

    fn survey(&mut self, parameters: &str, quota: u64, entropy: u64) -> Result<(), String> {
        self.survey = Some(Survey::new(parameters, quota, entropy)?);
        Ok(())
    }

    fn succeed(&mut self, formers: &[(&str, Extent)]) -> Result<Box<dyn Service<M>>, String> {
        let formers = formers.iter().map(|&(parameters, extent)| Table::new(parameters, extent));
        let tables = formers.chain([Ok(self.table.clone())]).collect::<Result<_, _>>()?;
        Ok(Box::new(Moving::new(tables)))
    }

    fn step(&mut self, memory: &M, _dropped: &mut Vec<u64>) -> Result<Step, M::Wait> {
        let surveyed = Survey::step_of(&mut self.survey, memory, std::slice::from_ref(&self.table))?;
        Ok(surveyed.unwrap_or(Step::Content))
    }
}

impl Watch {
    fn step<M: Memory>(&mut self, memory: &M, table: &Table) -> Result<Tick, M::Wait> {
        let enough = WATCHED.min(table.spec.slots);
        let mut slots = [Slot::default(); WATCHED_PER_STEP as usize];
        let count = read_slots(memory, table, self.next, &mut slots)?;
        let slots = &slots[..count];
        self.next = (self.next + count as u64) & (table.spec.slots - 1);
        self.seen += count as u64;
        self.taken += slots.iter().filter(|slot| !slot.is_empty()).count() as u64;
        if self.seen < enough {
            return Ok(Tick::Made);
        }
        self.is_crowded = self.taken * 2 >= self.seen;
        (self.seen, self.taken) = (0, 0);
        Ok(Tick::Idle)
    }
}

impl Survey {
    pub(super) fn new(parameters: &str, quota: u64, seed: u64) -> Result<Survey, String> {
        let request: Request = serde_json::from_str(parameters)
            .map_err(|error| format!("the table of a {KIND} store takes {{\"items\": N}}: {error}"))?;
        if request.placement != Placement::default() {
            return Err(
                "a table keeps its placement: create another store, and copy this store's data into it"
                    .into(),
            );
        }
        let items = request.items;
        if items.is_some_and(|items| slots_for(items).is_none()) {
            return Err(too_many(items.unwrap_or_default()));
        }
        let most = quota / u64::from(Class::all()[0].size);
        Ok(Survey { items, seed, most, next: (0, 0), taken: 0, empty: 0, staying: 0, rise: 0 })
    }

    /// Runs one step of the current survey, if there is one.
    pub(super) fn step_of<M: Memory>(
        survey: &mut Option<Survey>,
        memory: &M,
        tables: &[Table],
    ) -> Result<Option<Step>, M::Wait> {
        let Some(under_way) = survey else { return Ok(None) };
        let step = under_way.step(memory, tables)?;
        if step != Step::Made {
            *survey = None;
        }
        Ok(Some(step))
    }

    /// Counts the next slots. After the last slot, returns the plan of the next table.
    fn step<M: Memory>(&mut self, memory: &M, tables: &[Table]) -> Result<Step, M::Wait> {
        let (of, first) = self.next;
        let Some(table) = tables.get(of) else { return Ok(self.next_table(tables)) };
        let current = &tables[tables.len() - 1];
        let mut slots = [Slot::default(); SLOTS_PER_STEP as usize];
        let count = read_slots(memory, table, first, &mut slots)?;
        let (mut staying, mut rise) = (0, self.rise);
        let taken = slots[..count].iter().filter(|slot| !slot.is_empty());
        for &slot in taken.clone() {
            // A slot that a client has damaged, or that was already moved, has no item to move.
            let Some(header) = header_of(memory, table, slot)? else { continue };
            let by = above(slot.generation(), current.spec.floor).unwrap_or(0);
            let is_too_far = by > RISE_MAX - RISE_BEYOND;
            rise = rise.max(if is_too_far { 0 } else { by });
            staying += u64::from(header.kind != ItemKind::Tombstone as u8 || is_too_far);
        }
        let taken = taken.count() as u64;
        if of + 1 == tables.len() {
            (self.taken, self.empty) = (self.taken + taken, self.empty + count as u64 - taken);
        }
        (self.staying, self.rise) = (self.staying + staying, rise);
        let next = first + count as u64;
        self.next = if next < table.spec.slots { (of, next) } else { (of + 1, 0) };
        Ok(Step::Made)
    }

    fn next_table(&self, tables: &[Table]) -> Step {
        let TableSpec { slots, placement, epoch, floor, .. } = tables[tables.len() - 1].spec;
        let is_stuck = tables.len() > 1;
        // Without a requested size, a crowded table or a full path has caused the survey. If fewer than a quarter of
        // the slots are taken, the table stays.
        if self.items.is_none() && !is_stuck && self.taken * 4 < slots {
            return Step::Content;
        }
        // If a rebuild has found no place for a key, the next table must also hold every key that clients can still add
        // before all slots are closed.
        let coming = if is_stuck { self.empty } else { 0 };
        let least = if self.items.is_none() || is_stuck { slots } else { 0 };
        let items = (self.staying + coming).min(self.most).max(self.items.unwrap_or(0));
        let Some(needed) = slots_for(items) else { return Step::Content };
        let floor = floor.wrapping_add(self.rise + RISE_BEYOND) & GENERATION_MASK;
        let spec =
            TableSpec { slots: needed.max(least), seed: self.seed, placement, epoch: epoch + 1, floor };
        plan_of(&spec).map_or(Step::Content, Step::Wants)
    }
}

/// Reads slots from the slot `first` on, until `out` is full or the table ends. Returns the number of slots read.
pub(super) fn read_slots<M: Memory>(
    memory: &M,
    table: &Table,
    first: u64,
    out: &mut [Slot],
) -> Result<usize, M::Wait> {
    let count = (out.len() as u64).min(table.spec.slots.saturating_sub(first)) as usize;
    let mut bytes = [0; (WATCHED_PER_STEP * SLOT_SIZE) as usize];
    let bytes = &mut bytes[..count * SLOT_SIZE as usize];
    memory.read(table.slot_at(first).raw(), bytes)?;
    for (slot, bytes) in out.iter_mut().zip(bytes.chunks_exact(SLOT_SIZE as usize)) {
        *slot = Slot(BoundedPtr::read_from_bytes(bytes).expect("a slot's size"));
    }
    Ok(count)
}

/// Reports the buffers that the slots from `first` on reach, for one step. Returns the slot at which to continue.
pub(super) fn live_of<M: Memory>(
    table: &Table,
    memory: &M,
    first: u64,
    found: &mut Vec<u64>,
) -> Result<u64, M::Wait> {
    let mut slots = [Slot::default(); SLOTS_PER_STEP as usize];
    let count = read_slots(memory, table, first, &mut slots)?;
    for &slot in slots[..count].iter().filter(|slot| !slot.is_empty()) {
        follow(table, memory, slot, found)?;
    }
    Ok(first + count as u64)
}

/// Reports the buffer of a slot's item and, if the item's value is large, the buffers of the value's parts.
///
/// A client may replace the item meanwhile and free its buffer. But the node reuses no buffer during a step, so the
/// bytes read were an item's bytes.
fn follow<M: Memory>(table: &Table, memory: &M, slot: Slot, found: &mut Vec<u64>) -> Result<(), M::Wait> {
    if !points_to_item(memory, table, slot)? {
        return Ok(());
    }
    let at = slot.0.ptr.raw();
    found.push(at);
    let mut header = [0; HEADER_SIZE];
    memory.read(at, &mut header)?;
    if !matches!(ItemView::decode(&header), Ok(item) if item.kind == ItemKind::Large) {
        return Ok(());
    }
    let mut bytes = vec![0; slot.0.bound.get() as usize];
    memory.read(at, &mut bytes)?;
    if let Ok(item) = ItemView::decode(&bytes)
        && let Ok(parts) = item.parts()
    {
        found.extend(parts.iter().map(|part| part.at.get()));
    }
    Ok(())
}

/// Whether a slot points to the start of a buffer that can hold its item.
///
/// A slot that a client has damaged may point into a table or into the middle of a buffer, or have an impossible
/// length. Such a slot reaches nothing, so a step reads a bounded number of bytes whatever the slots contain.
pub(super) fn points_to_item<M: Memory>(memory: &M, table: &Table, slot: Slot) -> Result<bool, M::Wait> {
    let len = u64::from(slot.0.bound.get());
    let buffer = Arena::of(memory).buffer_at(slot.0.ptr.raw())?;
    Ok((HEADER_SIZE as u64..=ITEM_MAX as u64).contains(&len)
        && buffer.is_some_and(|(region, buffer)| {
            region == table.extent.key.region() && len <= u64::from(buffer.class.size)
        }))
}

fn header_of<M: Memory>(memory: &M, table: &Table, slot: Slot) -> Result<Option<ItemHeader>, M::Wait> {
    if !points_to_item(memory, table, slot)? {
        return Ok(None);
    }
    let mut header = [0; HEADER_SIZE];
    memory.read(slot.0.ptr.raw(), &mut header)?;
    Ok(Some(ItemHeader::read_from_bytes(&header).expect("a header's size")))
}
