//! Numbers of events in a client's operations, beside those that all radix trees count.

use crate::counters::counters;

counters! {
    /// Switches from the types with 4, 8, 16, 32, 64 and 128 slots.
    switches_from_4: "type switches from 4";
    switches_from_8: "type switches from 8";
    switches_from_16: "type switches from 16";
    switches_from_32: "type switches from 32";
    switches_from_64: "type switches from 64";
    switches_from_128: "type switches from 128";
    /// Type switches that a writer has completed for another one.
    switches_helped: "type switches helped";
    /// Leaves that were read while they were written.
    torn: "torn leaves";
    /// Operations that took the result of another one's request.
    reads_delegated: "reads delegated";
    writes_combined: "writes combined";
}
