//! What the memory node's CPU does for a PRISM-KV store: plan its table, and tell which buffers it reaches.

use super::KIND;
use super::layout::{
    HEADER_SIZE, ITEM_COUNT_MAX, ITEM_MAX, ItemView, Kind as ItemKind, Request, SLOT_SIZE, Slot, Table,
    TableSpec, slots_for,
};
use farside_remote::arena::Arena;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{BoundedPtr, Memory};
use zerocopy::FromBytes;

/// PRISM-KV, as a node knows it.
pub struct PrismKvKind;

/// The item size for which a table is planned if nobody says how many items there will be.
const ITEM_SIZE_ASSUMED: u64 = 512;

impl<M: Memory> Kind<M> for PrismKvKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let request: Request = serde_json::from_str(parameters).map_err(|error| {
            format!("a {KIND} store takes {{\"items\": N, \"placement\": \"hashed\"|\"permuted\"}}: {error}")
        })?;
        let items = request.items.unwrap_or(quota / ITEM_SIZE_ASSUMED / 2);
        let slots = slots_for(items).ok_or_else(|| {
            format!("{items} items are too many for one store: give at most {ITEM_COUNT_MAX}")
        })?;
        let spec = TableSpec { slots, seed: entropy, placement: request.placement, epoch: 1 };
        let parameters = serde_json::to_string(&spec).map_err(|error| error.to_string())?;
        Ok(Plan { table_len: slots * SLOT_SIZE, parameters, wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(PrismKvService { table: Table::new(parameters, table)? }))
    }
}

struct PrismKvService {
    table: Table,
}

/// Slots looked at in one step.
const SLOTS_PER_STEP: u64 = 8;

impl<M: Memory> Service<M> for PrismKvService {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        let slots = self.table.spec.slots;
        let count = SLOTS_PER_STEP.min(slots.saturating_sub(cursor));
        let mut bytes = [0; (SLOTS_PER_STEP * SLOT_SIZE) as usize];
        let bytes = &mut bytes[..(count * SLOT_SIZE) as usize];
        memory.read(self.table.slot_at(cursor).raw(), bytes)?;
        for slot in bytes.chunks_exact(SLOT_SIZE as usize) {
            let slot = Slot(BoundedPtr::read_from_bytes(slot).expect("a slot's size"));
            if !slot.is_empty() {
                self.follow(memory, slot, found)?;
            }
        }
        let next = cursor + count;
        Ok((next < slots).then_some(next))
    }
}

impl PrismKvService {
    /// The slot's item and, if its value is large, its parts. The slot may be replaced meanwhile, and its buffer
    /// given back; but the node itself reuses none while it is in a step, so what is read was an item's bytes.
    fn follow<M: Memory>(&self, memory: &M, slot: Slot, found: &mut Vec<u64>) -> Result<(), M::Wait> {
        let at = slot.0.ptr.raw();
        let len = u64::from(slot.0.bound.get());
        // A slot that someone with the key has spoilt reaches nothing: no item is in a table, in the middle of a
        // buffer, or longer than what clients write. So a step reads and finds little, whatever slots say.
        let buffer = Arena::of(memory).buffer_at(at)?;
        let is_item = (HEADER_SIZE as u64..=ITEM_MAX as u64).contains(&len)
            && buffer.is_some_and(|(region, buffer)| {
                region == self.table.extent.key.region() && len <= u64::from(buffer.class.size)
            });
        if !is_item {
            return Ok(());
        }
        found.push(at);
        let mut header = [0; HEADER_SIZE];
        memory.read(at, &mut header)?;
        if !matches!(ItemView::decode(&header), Ok(item) if item.kind == ItemKind::Large) {
            return Ok(());
        }
        let mut bytes = vec![0; len as usize];
        memory.read(at, &mut bytes)?;
        if let Ok(item) = ItemView::decode(&bytes)
            && let Ok(parts) = item.parts()
        {
            found.extend(parts.iter().map(|part| part.at.get()));
        }
        Ok(())
    }
}
