//! Pilaf's entry in the registry.

use super::layout::{
    ENTRY_SIZE, HEAD_SIZE, HEADER_SIZE, PAIR_MAX, REQUEST_SIZE, Table, slots_for, table_len,
};
use super::service::PilafKind;
use super::{KIND, Pilaf, mutants};
use crate::store::{Members, StoreError, buffer_bytes};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::{ADDRESS_SIZE, Kind};
use farside_remote::{Capabilities, Fabric, Memory};

/// Size of a CRC in bytes.
const CRC_SIZE: usize = size_of::<u64>();
/// Number of bytes of an entry that the entry's own CRC covers.
const CHECKED_ENTRY: usize = ENTRY_SIZE as usize - CRC_SIZE;

impl System for PilafKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "Pilaf";
    const SUMMARY: &'static str = "GET is two READs, PUT a call";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const WORK: Work = Work {
        chains_per_probe: 2,
        // Accesses to the slot's entry, the entry's item and the new item's buffer. The table's head is in a cache.
        call_accesses: 3,
        // The service checksums the item, the old and the new entry, and the head.
        call_checksummed: |request, _| {
            let item = HEADER_SIZE + request.len().saturating_sub(ADDRESS_SIZE + REQUEST_SIZE);
            (item + 2 * CHECKED_ENTRY + HEAD_SIZE as usize - CRC_SIZE) as u64
        },
        get_checksummed: |got| (CHECKED_ENTRY + HEADER_SIZE + got.key_len + got.value_len) as u64,
        ..Work::CHAINS
    };

    type Client<F: Fabric + Clock> = Pilaf<F>;

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        let value_max = PAIR_MAX.saturating_sub(sizing.key_len);
        if sizing.value_len > value_max {
            return Err(SizingError::Value(value_max));
        }
        let slots = slots_for(sizing.items.unwrap_or(0)).ok_or(SizingError::Items)?;
        let item_bytes = buffer_bytes(HEADER_SIZE + sizing.key_len + sizing.value_len);
        Ok(Footprint { slots, table_bytes: table_len(slots).ok_or(SizingError::Items)?, item_bytes })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(PilafKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Pilaf<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        Ok(Pilaf::of(fabric, node, store.clone(), PAIR_MAX, table))
    }
}
