//! Work of the memory node's CPU for a PRISM-TX store: plan the table, and report the items that the slots reach.

use super::KIND;
use super::layout::{HEADER_SIZE, Settled, Shard, Spec, WRITES_MAX, slots_for};
use crate::hash_slots::{Placement, items_of};
use crate::txn::{KEY_MAX, Prepare};
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Memory, NodeId, Width};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use zerocopy::FromBytes;

/// Node-side half of PRISM-TX.
pub struct PrismTxKind;

/// Number of client ids, unless the store's creator gives another.
const IDS: u16 = 64;
/// Number of transactions of a client that commit at the same time, unless the store's creator gives another.
const LANES: u16 = 16;
/// Length of the longest value in bytes, unless the store's creator gives another.
const VALUE_LEN: u32 = 1024;
/// Number of the longest values that a transaction can write at one member, unless the store's creator gives another
/// limit.
const WRITES: u32 = 4;
/// Length of a lease, unless the store's creator gives another.
const LEASE: Duration = Duration::from_millis(500);

/// Parameters in a request to create a store.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Request {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) items: Option<u64>,
    pub(super) placement: Placement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ids: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lanes: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lease_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) writes_max: Option<u32>,
    pub(super) prepare: Prepare,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clock_error_us: Option<u64>,
}

impl Request {
    /// Returns the parameters of a store in a quota.
    ///
    /// # Errors
    /// No store has these parameters.
    pub(super) fn spec(&self, quota: u64, seed: u64) -> Result<Spec, String> {
        let items = self.items.unwrap_or_else(|| items_of(quota));
        let slots = slots_for(items)
            .ok_or_else(|| format!("{items} items are too many for one store: give fewer --items"))?;
        let value_max = self.value_max.unwrap_or(VALUE_LEN);
        let pair = value_max.saturating_add((HEADER_SIZE * 2 + KEY_MAX) as u32);
        let chosen =
            || pair.max((value_max + HEADER_SIZE as u32 + 64).saturating_mul(WRITES)).min(WRITES_MAX);
        let spec = Spec {
            slots,
            seed,
            placement: self.placement,
            ids: self.ids.unwrap_or(IDS),
            lanes: self.lanes.unwrap_or(LANES),
            lease_us: self.lease_us.unwrap_or(LEASE.as_micros() as u64),
            value_max,
            writes_max: self.writes_max.unwrap_or_else(chosen),
            prepare: self.prepare,
            clock_error_us: self.clock_error_us,
        };
        spec.check()?;
        Ok(spec)
    }
}

impl<M: Memory> Kind<M> for PrismTxKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn permits_reuse(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let request: Request = serde_json::from_str(parameters).map_err(|error| {
            let example = Request { items: Some(1000), value_max: Some(VALUE_LEN), ..Request::default() };
            let example = serde_json::to_string(&example).expect("plain data");
            format!("a {KIND} store takes parameters such as {example}: {error}")
        })?;
        let spec = request.spec(quota, entropy)?;
        let parameters = serde_json::to_string(&spec).expect("plain data");
        Ok(Plan {
            table_len: spec.table_len().expect("the parameters were checked"),
            parameters,
            wide: false,
        })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        let shard = Shard::new(NodeId(0), parameters, table)?;
        let (first, slots) = (shard.settled(0).raw(), shard.spec().slots);
        Ok(Box::new(PrismTxService { first, slots }))
    }
}

struct PrismTxService {
    /// Address of the half `C|address` of the first slot.
    first: u64,
    slots: u64,
}

impl<M: Memory> Service<M> for PrismTxService {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        const PER_STEP: u64 = 16;
        let next = cursor.saturating_add(PER_STEP).min(self.slots);
        for slot in cursor..next {
            let half = memory.load(self.first + slot * super::layout::SLOT_SIZE, Width::W16)?;
            let half = Settled::read_from_bytes(&half.to_le_bytes()).expect("the size of a half");
            if !half.at.is_null() {
                found.push(half.at.raw());
            }
        }
        Ok((next < self.slots).then_some(next))
    }
}
