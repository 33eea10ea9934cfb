//! The entries of Chequer and of Chequer-message in the registry.

use super::layout::{BLOCK_BUCKETS, PARTITIONS_MAX, Placement};
use super::layout::{HEAD_SIZE, LENGTH_SIZE, RECORD_SIZE, VALUE_MAX, block_len, slots_for};
use super::service::{ChequerService, plan};
use super::{Chequer, KIND, MESSAGE_KIND, mutants, pool};
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System, Work};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::{ADDRESS_SIZE, Extent, Kind, Plan, Service};
use farside_remote::{Capabilities, Fabric, Memory};

/// Node-side half of Chequer.
pub struct ChequerKind;

/// Node-side half of Chequer-message.
pub struct ChequerMessageKind;

/// Implements [`Kind`] for one of Chequer's kinds.
macro_rules! kind {
    ($kind:ty, $name:expr) => {
        impl<M: Memory> Kind<M> for $kind {
            fn name(&self) -> &'static str {
                $name
            }

            fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
                plan($name, parameters, quota, entropy)
            }

            fn is_logged(&self) -> bool {
                true
            }

            fn is_table_only(&self) -> bool {
                true
            }

            fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
                Ok(Box::new(ChequerService::new($name, parameters, table)?))
            }
        }
    };
}

kind!(ChequerKind, KIND);
kind!(ChequerMessageKind, MESSAGE_KIND);

fn parameters(sizing: &Sizing) -> String {
    let placement = if sizing.collision_free { Placement::Permuted } else { Placement::Hashed };
    serde_json::json!({
        "items": sizing.items,
        "placement": placement,
        "block_buckets": sizing.block_buckets,
        "put_threshold": sizing.put_threshold,
    })
    .to_string()
}

fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
    if sizing.value_len > VALUE_MAX {
        return Err(SizingError::Value(VALUE_MAX));
    }
    let block_buckets = sizing.block_buckets.unwrap_or(BLOCK_BUCKETS);
    let slots = slots_for(sizing.items.unwrap_or(0), block_buckets).ok_or(SizingError::Items)?;
    let table_bytes = slots.checked_mul(RECORD_SIZE).ok_or(SizingError::Items)? + PARTITIONS_MAX * HEAD_SIZE;
    let item_bytes = pool::block_size(block_len(sizing.key_len, sizing.value_len) as u64);
    Ok(Footprint { slots, table_bytes, item_bytes })
}

/// Size of a CRC in bytes.
const CRC_SIZE: usize = size_of::<u64>();
/// Number of bytes of a record that the record's own CRC covers.
const CHECKED_RECORD: usize = RECORD_SIZE as usize - CRC_SIZE;

impl System for ChequerKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "Chequer";
    const SUMMARY: &'static str = "GET is two READs, or one if the value is cached; PUT a call";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    const WORK: Work = Work {
        chains_per_probe: 2,
        // Accesses to the block of buckets, the value's block, and the record. The partition's head is in a cache.
        call_accesses: 3,
        // The service checksums the value, the record before and the new one, and the new one again in the head.
        call_checksummed: |request_len| {
            let block = LENGTH_SIZE + request_len.saturating_sub(ADDRESS_SIZE + super::request::REQUEST_SIZE);
            (block + (BLOCK_BUCKETS as usize + 2) * CHECKED_RECORD) as u64
        },
        get_checksummed: |_key_len, value_len| {
            (BLOCK_BUCKETS as usize * CHECKED_RECORD + LENGTH_SIZE + value_len) as u64
        },
    };

    type Client<F: Fabric + Clock> = Chequer<F>;

    fn parameters(sizing: &Sizing) -> String {
        parameters(sizing)
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        footprint(sizing)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(ChequerKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Chequer<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        let client = Chequer::of(fabric, node, store.clone())?.with_cache(options.value_cache);
        Ok(match options.put_threshold {
            Some(bytes) => client.with_put_threshold(bytes),
            None => client,
        })
    }
}

impl System for ChequerMessageKind {
    const KIND: &'static str = MESSAGE_KIND;
    const TITLE: &'static str = "Chequer-message";
    const SUMMARY: &'static str = "Chequer's table by calls alone";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const WORK: Work = Work { chains_per_probe: 0, get_checksummed: |_, _| 0, ..ChequerKind::WORK };

    type Client<F: Fabric + Clock> = Chequer<F>;

    fn parameters(sizing: &Sizing) -> String {
        parameters(sizing)
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        footprint(sizing)
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(ChequerMessageKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Chequer<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        Chequer::of(fabric, node, store.clone())
    }
}
