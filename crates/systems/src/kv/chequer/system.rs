//! The entries of Chequer and of Chequer-message in the registry.

use super::layout::{BLOCK_BUCKETS, PARTITIONS_MAX, PUT_THRESHOLD, Placement};
use super::layout::{HEAD_SIZE, LENGTH_SIZE, RECORD_SIZE, VALUE_MAX, block_len, slots_for};
use super::request::{PART_MAX, Request};
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
        "partitions": sizing.partitions,
    })
    .to_string()
}

fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
    if sizing.value_len > VALUE_MAX {
        return Err(SizingError::Value(VALUE_MAX));
    }
    let block_buckets = sizing.block_buckets.unwrap_or(BLOCK_BUCKETS);
    let least = block_buckets * sizing.partitions.unwrap_or(1);
    let slots = slots_for(sizing.items.unwrap_or(0), least).ok_or(SizingError::Items)?;
    let table_bytes = slots.checked_mul(RECORD_SIZE).ok_or(SizingError::Items)? + PARTITIONS_MAX * HEAD_SIZE;
    let item_bytes = pool::block_size(block_len(sizing.key_len, sizing.value_len) as u64);
    Ok(Footprint { slots, table_bytes, item_bytes })
}

/// Size of a CRC in bytes.
const CRC_SIZE: usize = size_of::<u64>();
/// Number of bytes of a record that the record's own CRC covers.
const CHECKED_RECORD: u64 = RECORD_SIZE - CRC_SIZE as u64;

/// Number of bytes that the service checksums for a call: the records of the block of buckets, unless the call searches
/// no key; the block of a value that is put; and the new record, twice, since it is in the partition's head, too.
fn call_checksummed(request: &[u8], read: u64) -> u64 {
    const SEARCH: u64 = BLOCK_BUCKETS * CHECKED_RECORD;
    const INSTALL: u64 = 2 * CHECKED_RECORD;
    match request.get(ADDRESS_SIZE..).map(Request::decode) {
        Some(Ok(Request::Get { .. } | Request::Hold { .. } | Request::Contains { .. })) => SEARCH,
        Some(Ok(Request::Put { value, .. })) => SEARCH + (LENGTH_SIZE + value.len()) as u64 + INSTALL,
        // The block that the client wrote is among the bytes that the call has read.
        Some(Ok(Request::Commit { .. })) => read + INSTALL,
        Some(Ok(Request::Delete { .. })) => SEARCH + INSTALL,
        Some(
            Ok(
                Request::Reserve { .. }
                | Request::Write { .. }
                | Request::Withdraw { .. }
                | Request::Release { .. },
            )
            | Err(_),
        )
        | None => 0,
    }
}

impl System for ChequerKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "Chequer";
    const SUMMARY: &'static str = "GET is two READs, or one if the value is cached; PUT a call";
    const FAMILY: Family = Family::Kv;
    const NODES: Nodes = Nodes::Shards;
    const NEEDS: Capabilities = Capabilities::CALLS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// A block is reused only after its quarantine, so few trials have a client that is slower. The pool's own tests
    /// find what is wrong in its allocator.
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::VALUE_UNCHECKED,
        mutants::ONLY_VALUE_REREAD,
        mutants::RESERVATION_FREED_BY_TIMEOUT,
        mutants::BUDDY_MERGES_IN_USE,
        mutants::REPLAYED_IN_ANOTHER_BUCKET,
        mutants::UNANSWERED_RESERVE_FORGOTTEN,
        mutants::RESERVATIONS_UNBOUNDED,
        mutants::QUARANTINE_FROM_BEGIN,
        mutants::CHECKPOINT_STEP_UNBOUNDED,
        mutants::LAST_COUNTER_FORGOTTEN,
        mutants::UNANSWERED_LEFT_IN_LOG,
    ];
    const WORK: Work = Work {
        chains_per_probe: 2,
        // Accesses to the block of buckets, the value's block, and the record. The partition's head is in a cache.
        call_accesses: 3,
        call_checksummed,
        // Every byte that a GET READs.
        get_checksummed: |got| got.returned,
        // The client names the CRC of a value that it WRITEs.
        put_checksummed: |options, value_len| {
            let is_written =
                value_len >= options.put_threshold.unwrap_or(PUT_THRESHOLD as usize).min(PART_MAX + 1);
            if is_written { (LENGTH_SIZE + value_len) as u64 } else { 0 }
        },
        quarantine: pool::QUARANTINE,
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
    const WORK: Work = Work {
        chains_per_probe: 0,
        get_checksummed: |_| 0,
        put_checksummed: |_, value_len| {
            if value_len > PART_MAX { (LENGTH_SIZE + value_len) as u64 } else { 0 }
        },
        ..ChequerKind::WORK
    };

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
