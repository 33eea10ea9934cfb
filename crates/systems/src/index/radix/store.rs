//! Stores of radix trees: their parameters, their size, and the node-side half, which does nothing: clients use the
//! table alone.

use super::layout::{Growth, INLINE_MAX, Layout, Spec, VALUE_MAX};
use crate::index::{Indexing, Keys, NUMBER_LEN};
use crate::store::{Members, StoreError};
use crate::system::{Footprint, Sizing, SizingError, System};
use farside_remote::service::{Extent, Plan, Service};
use farside_remote::{Fabric, Memory, NodeId};
use std::time::Duration;

/// Size of the cache of a client whose options give none, in bytes.
pub(in crate::index) const CACHE: usize = 64 << 20;

/// Length of the longest value in a leaf if values are longer than any leaf has room for, and the store's creator gives
/// no other. A leaf has room for it, whatever its value.
const INLINE_CHOSEN: u32 = 256;

/// Parameters of a store of this size.
pub(in crate::index) fn spec_for(sizing: &Sizing, nodes: Growth) -> Spec {
    let default = Spec::of(nodes);
    let Indexing { keys, inline_max, chunk, ids, lanes, redo, rung, .. } = sizing.indexing;
    let (redo, rung) = if nodes == Growth::Switched { (redo, rung) } else { (None, None) };
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
        nodes,
        lease_us: sizing.lease.map_or(default.lease_us, lease_us),
    }
}

/// Memory of a store of this size.
pub(in crate::index) fn footprint(sizing: &Sizing, nodes: Growth) -> Result<Footprint, SizingError> {
    if sizing.value_len > VALUE_MAX as usize {
        return Err(SizingError::Value(VALUE_MAX as usize));
    }
    let (items, spec) = (sizing.items.unwrap_or(0), spec_for(sizing, nodes));
    spec.with_chunk(0).check().map_err(|_| SizingError::Items)?;
    let path_len = match sizing.key_len {
        0 => spec.path_max(),
        len => len + usize::from(spec.keys == Keys::Strings),
    };
    let table_bytes = spec.bytes_for(items, path_len).ok_or(SizingError::Items)?;
    Ok(Footprint { slots: items, table_bytes, item_bytes: 0 })
}

/// Plans a store of this kind.
///
/// # Errors
/// What is wrong with the parameters or the quota.
pub(in crate::index) fn plan(
    kind: &str,
    nodes: Growth,
    parameters: &str,
    quota: u64,
) -> Result<Plan, String> {
    let example = || serde_json::to_string(&Spec::of(nodes)).expect("plain data");
    let wrong = |reason: String| format!("{kind} stores take {}: {reason}", example());
    let spec: Spec = serde_json::from_str(parameters).map_err(|error| wrong(error.to_string()))?;
    if spec.nodes != nodes {
        return Err(wrong("its nodes are those of another kind".to_owned()));
    }
    let spec = spec.with_chunk(quota);
    spec.check().map_err(wrong)?;
    let least = spec.table_min();
    if quota < least {
        return Err(format!(
            "a {kind} store with these parameters needs {least} bytes: give a larger --quota"
        ));
    }
    let parameters = serde_json::to_string(&spec).expect("plain data");
    Ok(Plan { table_len: quota / 64 * 64, parameters, wide: false })
}

/// Returns the node-side half of a store.
///
/// # Errors
/// What is wrong with the parameters or the table.
pub(in crate::index) fn serve<M: Memory>(
    parameters: &str,
    table: Extent,
) -> Result<Box<dyn Service<M>>, String> {
    Layout::new(parameters, &[(NodeId(0), table)])?;
    Ok(Box::new(Plain))
}

/// Returns the layout of a store of the system `S`.
///
/// # Errors
/// [`StoreError`]: the store is of another kind or damaged, or the fabric cannot reach it.
pub(in crate::index) fn layout_of<S: System>(
    fabric: &impl Fabric,
    members: &Members,
) -> Result<Layout, StoreError> {
    members.check::<S>(fabric)?;
    let whole = members.whole()?;
    let tables: Vec<_> = whole.iter().map(|(node, store)| (*node, store.extent())).collect();
    Layout::new(&whole[0].1.parameters, &tables).map_err(StoreError::Gone)
}

/// Sentences about what healing has done.
pub(in crate::index) fn repairs(recovered: u64, swept: u64) -> Vec<String> {
    let mut done = Vec::new();
    if recovered > 0 {
        done.push(format!("recovered the locks of {recovered} dead clients"));
    }
    if swept > 0 {
        done.push(format!("freed {swept} pieces of memory that dead clients had left behind"));
    }
    done
}

struct Plain;

impl<M: Memory> Service<M> for Plain {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // Leaves and nodes lie in the table, and point to no buffers.
    }
}
