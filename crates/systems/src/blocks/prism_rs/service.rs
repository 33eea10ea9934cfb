//! Work of the memory node's CPU for a PRISM-RS store: plan the table, and report the buffers that the registers reach.
//! Nodes do not know of each other.

use super::KIND;
use super::layout::{REGISTER_SIZE, Register, Spec, Table, WRITERS};
use crate::blocks::Stripe;
use crate::store::buffer_bytes;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Memory, Width};
use serde::{Deserialize, Serialize};
use zerocopy::FromBytes;

/// Node-side half of PRISM-RS.
pub struct PrismRsKind;

/// Parameters in a request to create a store.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    pub(super) block: u32,
    /// If absent, so many blocks that all of them can be written, with buffers to spare for writes.
    pub(super) blocks: Option<u64>,
    #[serde(default = "writers")]
    pub(super) writers: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stripe: Option<Stripe>,
}

fn writers() -> u32 {
    WRITERS
}

impl<M: Memory> Kind<M> for PrismRsKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let Request { block, blocks, writers, stripe } = serde_json::from_str(parameters)
            .map_err(|error| format!("a {KIND} store takes {{\"block\": BYTES, \"blocks\": N}}: {error}"))?;
        let one = Spec { block, blocks: 1, writers, stripe };
        one.check()?;
        let most = quota / (buffer_bytes(block as usize) + REGISTER_SIZE);
        let spec = Spec { blocks: blocks.unwrap_or(most - most / 8), ..one };
        spec.check()?;
        let table_len = spec.table_len().expect("the parameters were checked");
        Ok(Plan { table_len, parameters: serde_json::to_string(&spec).expect("plain data"), wide: false })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Table::new(parameters, table)?))
    }
}

impl<M: Memory> Service<M> for Table {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        const PER_STEP: u64 = 16;
        let next = cursor.saturating_add(PER_STEP).min(self.spec.blocks);
        for block in cursor..next {
            let register = memory.load(self.register(block).raw(), Width::W16)?;
            let register = Register::read_from_bytes(&register.to_le_bytes()).expect("a register's size");
            if !register.at.is_null() {
                found.push(register.at.raw());
            }
        }
        Ok((next < self.spec.blocks).then_some(next))
    }
}
