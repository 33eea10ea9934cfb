//! The entry of the tree in the registry, and the node-side half, which does nothing: clients use the table alone.

use super::cache::Cache;
use super::change::Lane;
use super::counters::Counters;
use super::layout::{Layout, NODE_MAX, SPAN};
use super::memory::Units;
use super::session::Session;
use super::{Client, KIND, MEMBERS_MAX, PATIENCE, Sherman, Spec, VALUE_MAX, mutants};
use crate::index::session::{beside, not_healed};
use crate::index::turns::Locals;
use crate::index::{Index, Indexing, Keys, NUMBER_LEN, STRING_MAX};
use crate::owned::Jobs;
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Nodes, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{Capabilities, Fabric, Memory};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Size of the cache of a client whose options give none, in bytes.
const CACHE: usize = 64 << 20;
/// Number of units of the smallest store.
const UNITS_MIN: u64 = 16;

/// Node-side half of the tree.
pub struct ShermanKind;

impl System for ShermanKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "Sherman";
    const SUMMARY: &'static str = "get is one round trip with a warm cache, put is three";
    const FAMILY: Family = Family::Index;
    const NODES: Nodes = Nodes::Shards;
    const MEMBERS_MAX: usize = MEMBERS_MAX;
    const NEEDS: Capabilities = Capabilities::NONE;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// Needs exactly as many changes within one READ as a version counts.
    const RARE_MUTANTS: &'static [Mutant] = &[mutants::WRAPS_BELIEVED];

    type Client<F: Fabric + Clock> = Sherman<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&spec_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX as usize {
            return Err(SizingError::Value(VALUE_MAX as usize));
        }
        let (items, spec) = (sizing.items.unwrap_or(0), spec_for(sizing));
        spec.check().map_err(|_| SizingError::Items)?;
        // Leaves are half full after a split, and there is an inner node for half a span of leaves.
        let half = u64::from(spec.span) / 2;
        let leaves = items.div_ceil(half);
        let units = UNITS_MIN + leaves + 2 * leaves.div_ceil(half);
        let table_bytes = spec.table_len(units);
        if table_bytes == u64::MAX {
            return Err(SizingError::Items);
        }
        Ok(Footprint { slots: items, table_bytes, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(ShermanKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Sherman<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let whole = members.whole()?;
        let first = whole[0].1;
        let tables: Vec<_> = whole.iter().map(|(node, store)| (*node, store.extent())).collect();
        let layout = Layout::new(&first.parameters, &tables).map_err(StoreError::Gone)?;
        let late = tables.iter().map(|_| Cell::new(0)).collect();
        let are_whole = |(node, _): &(_, _)| fabric.capabilities(*node).contains(Capabilities::WHOLE_LINES);
        if layout.spec.line == 64 && !whole.iter().all(are_whole) {
            return Err(StoreError::Gone(format!(
                "store '{}' has versions for lines of 64 bytes, which this fabric does not read as a whole, and \
                 nothing was changed: use it over verbs, or create a store with lines of 16 bytes",
                first.name
            )));
        }
        let lanes = layout.spec.lanes;
        let session = Session::open(fabric, members, layout, options).await?;
        Ok(Sherman::of(&Rc::new(Client {
            session,
            units: Units::default(),
            cache: RefCell::new(Cache::new(options.node_cache.unwrap_or(CACHE))),
            root: Cell::new(None),
            locals: Locals::default(),
            counters: Counters::default(),
            jobs: Jobs::new(lanes.into()),
            lanes: (0..lanes).map(|_| RefCell::new(Lane::default())).collect(),
            handles: Cell::new(0),
            healed: Cell::new((0, 0)),
            late,
            patience: options.patience.unwrap_or(PATIENCE),
        })))
    }

    async fn heal<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Vec<String>, StoreError> {
        let mut client = Self::open(fabric, members, options).await?;
        let keeper = client.keeper();
        let healing = async move {
            let healed = client.heal().await;
            (healed, client.recovered(), client.completed(), client.swept())
        };
        let (healed, recovered, completed, swept) = beside(keeper, healing).await;
        healed.map_err(|error| not_healed(KIND, error))?;
        let repairs = [
            (recovered, format!("recovered the locks of {recovered} dead clients")),
            (completed, format!("completed {completed} splits of dead clients")),
            (swept, format!("freed {swept} pieces of memory that dead clients had left behind")),
        ];
        Ok(repairs.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect())
    }
}

/// Parameters of a store of this size. Clients claim memory in nodes, so the size of a chunk is that of a node.
fn spec_for(sizing: &Sizing) -> Spec {
    let (default, Indexing { keys, chunk, ids, lanes, redo, locks, versions, .. }) =
        (Spec::default(), sizing.indexing);
    let are_numbers = sizing.key_len == NUMBER_LEN || sizing.key_len == 0;
    let keys = keys.unwrap_or(if are_numbers { Keys::Numbers } else { Keys::Strings });
    let lease_us = |lease: Duration| u64::try_from(lease.as_micros()).unwrap_or(u64::MAX);
    let spec = Spec {
        keys,
        key_max: match keys {
            Keys::Numbers => NUMBER_LEN as u16,
            Keys::Strings if sizing.key_len == 0 => STRING_MAX as u16,
            Keys::Strings => sizing.key_len.min(STRING_MAX) as u16,
        },
        value_max: if sizing.value_len == 0 { default.value_max } else { sizing.value_len as u32 },
        ids: ids.unwrap_or(default.ids),
        lanes: lanes.unwrap_or(default.lanes),
        locks: locks.unwrap_or(default.locks),
        line: versions.map_or(default.line, |versions| versions.line),
        version_bits: versions.map_or(default.version_bits, |versions| versions.bits),
        lease_us: sizing.lease.map_or(default.lease_us, lease_us),
        redo: redo.unwrap_or(default.redo),
        ..default
    };
    match chunk {
        Some(chunk) => spec.with_node_size(chunk as usize),
        None => Spec { span: spec.with_node_size(NODE_MAX).span.min(SPAN), ..spec },
    }
}

impl<M: Memory> Kind<M> for ShermanKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let wrong = |reason: String| format!("a {KIND} store takes {}: {reason}", example());
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| wrong(error.to_string()))?;
        spec.check().map_err(wrong)?;
        let least = spec.table_len(UNITS_MIN);
        if quota < least {
            return Err(format!(
                "a {KIND} store with these parameters needs {least} bytes: give a larger --quota"
            ));
        }
        let parameters = serde_json::to_string(&spec).expect("plain data");
        Ok(Plan { table_len: quota / 64 * 64, parameters, wide: false })
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Layout::new(parameters, &[(farside_remote::NodeId(0), table)])?;
        Ok(Box::new(Plain))
    }
}

/// Parameters of a store, as an example.
fn example() -> String {
    serde_json::to_string(&Spec::default()).expect("plain data")
}

struct Plain;

impl<M: Memory> Service<M> for Plain {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // Nodes lie in the table, and point to no buffers.
    }
}
