//! The entry of the tree in the registry, and the node-side half, which does nothing: clients use the table alone.

use super::cache::Cache;
use super::change::Lane;
use super::combine::Combine;
use super::counters::Counters;
use super::layout::Layout;
use super::session::Session;
use super::together::Together;
use super::units::Units;
use super::{Client, INLINE_MAX, KIND, MEMBERS_MAX, PATIENCE, Smart, Spec, VALUE_MAX, mutants};
use crate::index::session::{beside, not_opened};
use crate::index::{Index, Indexing, Keys, NUMBER_LEN};
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

/// Length of the longest value in a leaf if values are longer than any leaf has room for, and the store's creator gives
/// no other. A leaf has room for it, whatever its value.
const INLINE_CHOSEN: u32 = 256;

/// Node-side half of the tree.
pub struct SmartKind;

impl System for SmartKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "SMART";
    const SUMMARY: &'static str = "get is one round trip with a warm cache, put is three";
    const FAMILY: Family = Family::Index;
    const NODES: Nodes = Nodes::Shards;
    const MEMBERS_MAX: usize = MEMBERS_MAX;
    const NEEDS: Capabilities = Capabilities::MASKED_CAS;
    const MUTANTS: &'static [Mutant] = mutants::ALL;
    /// The first two only cost requests, and a reader notices the third only if memory is damaged. The fourth acts only
    /// if some values lie apart, and the last one in stores without updates in place.
    const RARE_MUTANTS: &'static [Mutant] = &[
        mutants::REV_PTR_ROLLED_BACK,
        mutants::MASKED_CAS_FULL_WORD,
        mutants::CHECKSUM_WITHOUT_KEY,
        mutants::LEAF_BEFORE_VALUE,
        mutants::REPLACED_LEAF_BELIEVED,
    ];

    type Client<F: Fabric + Clock> = Smart<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&spec_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        if sizing.value_len > VALUE_MAX as usize {
            return Err(SizingError::Value(VALUE_MAX as usize));
        }
        let (items, spec) = (sizing.items.unwrap_or(0), spec_for(sizing));
        spec.with_chunk(0).check().map_err(|_| SizingError::Items)?;
        let path_len = match sizing.key_len {
            0 => spec.path_max(),
            len => len + usize::from(spec.keys == Keys::Strings),
        };
        let table_bytes = spec.bytes_for(items, path_len).ok_or(SizingError::Items)?;
        Ok(Footprint { slots: items, table_bytes, item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(SmartKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Smart<F>, StoreError> {
        members.check::<Self>(&fabric)?;
        let whole = members.whole()?;
        let first = whole[0].1;
        let tables: Vec<_> = whole.iter().map(|(node, store)| (*node, store.extent())).collect();
        let layout = Layout::new(&first.parameters, &tables).map_err(StoreError::Gone)?;
        let (root, lanes, rung) = (layout.root(), layout.spec.lanes, layout.spec.rung);
        let session = Session::open(fabric, members, layout, options).await?;
        Ok(Smart::of(&Rc::new(Client {
            session,
            units: Units::default(),
            together: Together::default(),
            cache: RefCell::new(Cache::new(root, options.node_cache.unwrap_or(CACHE))),
            counters: Counters::default(),
            combining: rung.combining(options.combining),
            gets: Combine::default(),
            puts: Combine::default(),
            jobs: Jobs::new(lanes.into()),
            lanes: (0..lanes).map(|_| RefCell::new(Lane::default())).collect(),
            handles: Cell::new(0),
            swept: Cell::new(0),
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
            (healed, client.recovered(), client.swept())
        };
        let (healed, recovered, swept) = beside(keeper, healing).await;
        healed.map_err(|error| not_opened(KIND, error))?;
        let mut done = Vec::new();
        if recovered > 0 {
            done.push(format!("recovered the locks of {recovered} dead clients"));
        }
        if swept > 0 {
            done.push(format!("freed {swept} pieces of memory that dead clients had left behind"));
        }
        Ok(done)
    }
}

/// Parameters of a store of this size.
fn spec_for(sizing: &Sizing) -> Spec {
    let default = Spec::default();
    let Indexing { keys, inline_max, chunk, ids, lanes, redo, rung, .. } = sizing.indexing;
    let are_numbers = sizing.key_len == NUMBER_LEN || sizing.key_len == 0;
    let value_max = if sizing.value_len == 0 { default.value_max } else { sizing.value_len as u32 };
    let lease_us = |lease: Duration| u64::try_from(lease.as_micros()).unwrap_or(u64::MAX);
    Spec {
        keys: keys.unwrap_or(if are_numbers { Keys::Numbers } else { Keys::Strings }),
        value_max,
        inline_max: inline_max.unwrap_or(if value_max > INLINE_MAX { INLINE_CHOSEN } else { value_max }),
        chunk: chunk.unwrap_or(default.chunk),
        ids: ids.unwrap_or(default.ids),
        lanes: lanes.unwrap_or(default.lanes),
        redo: redo.unwrap_or(default.redo),
        rung: rung.unwrap_or(default.rung),
        lease_us: sizing.lease.map_or(default.lease_us, lease_us),
    }
}

impl<M: Memory> Kind<M> for SmartKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, quota: u64, _entropy: u64) -> Result<Plan, String> {
        let wrong = |reason: String| format!("a {KIND} store takes {}: {reason}", example());
        let spec: Spec = serde_json::from_str(parameters).map_err(|error| wrong(error.to_string()))?;
        let spec = spec.with_chunk(quota);
        spec.check().map_err(wrong)?;
        let least = spec.table_min();
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
        Ok(None) // Leaves and nodes lie in the table, and point to no buffers.
    }
}
