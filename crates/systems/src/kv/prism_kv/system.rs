//! PRISM-KV's entry in the registry.

use super::layout::{
    HEADER_SIZE, ITEM_MAX, PART_MAX, Placement, SLOTS_PER_ITEM, TableSpec, slots_for, table_len,
};
use super::service::PrismKvKind;
use super::{KIND, PrismKv, mutants};
use crate::kv::VALUE_MAX;
use crate::store::{Members, StoreError, buffer_bytes};
use crate::system::{Family, Footprint, Nodes, Options, Shape, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::Kind;
use farside_remote::{Capabilities, Fabric, Memory};

impl System for PrismKvKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "PRISM-KV";
    const SUMMARY: &'static str = "GET is one indirect READ, PUT two chains";
    const FAMILY: Family = Family::Kv;
    /// Capabilities that PRISM-KV needs. A PUT to a cached slot compares the tag alone, which needs a masked CAS.
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CONDITIONAL_OPS.and(Capabilities::MASKED_CAS);
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// Mutants that trials expose too seldom. The first mutant shows only on a probe path without a free slot. The
    /// second mutant shows only if a node fails between two exchanges and the same key is put afterwards.
    const RARE_MUTANTS: &'static [Mutant] = &[mutants::END_SLOT_STAYS, mutants::MOVED_TWICE];

    type Client<F: Fabric + Clock> = PrismKv<F>;

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX {
            return Err(SizingError::Value(VALUE_MAX));
        }
        let slots = slots_for(sizing.items.unwrap_or(0)).ok_or(SizingError::Items)?;
        let item = HEADER_SIZE + sizing.key_len + sizing.value_len;
        let item_bytes = if item <= ITEM_MAX {
            buffer_bytes(item)
        } else {
            // The parts, and the head that lists them.
            let whole = (item / PART_MAX) as u64;
            whole * buffer_bytes(PART_MAX) + buffer_bytes(item % PART_MAX) + buffer_bytes(ITEM_MAX / 8)
        };
        Ok(Footprint { slots, table_bytes: table_len(slots).ok_or(SizingError::Items)?, item_bytes })
    }

    fn shape(parameters: &str) -> Option<Shape> {
        let TableSpec { epoch, slots, placement, .. } = serde_json::from_str(parameters).ok()?;
        let is_collision_free = placement == Placement::Permuted;
        Some(Shape { epoch, slots, items: slots / SLOTS_PER_ITEM, is_collision_free })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(PrismKvKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<PrismKv<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        Ok(PrismKv::of(fabric, node, store.clone())?.with_slot_cache(options.slot_cache))
    }
}
