//! Work of the memory node's CPU for an ABDLOCK store: plan the table. Nodes do not know of each other.

use super::KIND;
use super::layout::{Spec, Table, WRITERS};
use farside_remote::Memory;
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::service::{Extent, Kind, Plan, Service};
use serde::Deserialize;

/// Node-side half of ABDLOCK.
pub struct AbdLockKind;

/// Parameters in a request to create a store.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    block: u32,
    /// If absent, as many blocks as the quota holds, less the segment for buffers that each store has.
    blocks: Option<u64>,
    #[serde(default = "writers")]
    writers: u32,
    /// If absent, the store has no leases.
    lease_us: Option<u64>,
}

fn writers() -> u32 {
    WRITERS
}

impl<M: Memory> Kind<M> for AbdLockKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let Request { block, blocks, writers, lease_us } = serde_json::from_str(parameters)
            .map_err(|error| format!("an {KIND} store takes {{\"block\": BYTES, \"blocks\": N}}: {error}"))?;
        let one = Spec { block, blocks: 1, writers, lease_us };
        one.check()?;
        let most = quota.saturating_sub(one.blocks_offset() + SEGMENT_SIZE) / one.block_size();
        let spec = Spec { blocks: blocks.unwrap_or(most), ..one };
        spec.check()?;
        let table_len = spec.table_len().expect("the parameters were checked");
        Ok(Plan { table_len, parameters: serde_json::to_string(&spec).expect("plain data"), wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Table::new(parameters, table)?))
    }
}

impl<M: Memory> Service<M> for Table {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // The blocks lie in the table, and point to no buffers.
    }
}
