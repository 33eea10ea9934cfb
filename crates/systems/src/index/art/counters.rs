//! Numbers of events in a client's operations, beside those that all radix trees count.

use crate::counters::counters;

counters! {
    /// Nodes with 4, 16 and 48 slots that were replaced by larger ones.
    grown_from_4: "nodes grown from 4";
    grown_from_16: "nodes grown from 16";
    grown_from_48: "nodes grown from 48";
    /// Nodes that were replaced by copies of the same type, without slots of deleted keys.
    cleaned: "nodes cleaned";
    /// Nodes that were replaced by smaller ones, and by their only leaf or by none.
    shrunk: "nodes shrunk";
    collapsed: "nodes collapsed";
    /// Frozen nodes that were thawed.
    thawed: "nodes thawed";
    /// Frozen nodes that writers have met.
    frozen: "frozen nodes met";
    /// Cached nodes that were found to be replaced.
    nodes_stale: "cached nodes replaced";
}
