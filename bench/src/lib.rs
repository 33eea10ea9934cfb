//! What Farside is measured with: what to ask, what may be answered, what it costs at least, how to say it.
//!
//! * [`workload`]: YCSB's workloads; which operation on which key comes next.
//! * [`verify`]: values that prove themselves; what nobody may ever read.
//! * [`compare`]: other people's stores, driven through the same workload.
//! * [`driver`]: clients of any family of systems, driven through its work.
//! * [`kv`]: the work of key-value stores: YCSB.
//! * [`floor`]: the physical floor; the same fetch done by hand, in code of its own.
//! * [`report`]: latencies, CPU time, the JSON line for scripts and the table for people.
//!
//! Invariant: nothing here knows a fabric; of systems, only what all key-value stores offer.
//! Invariant: `unsafe` stands in [`floor`] alone.

pub mod compare;
pub mod driver;
#[allow(unsafe_code, reason = "the fetch by hand, and the memory it is made from")]
pub mod floor;
pub mod kv;
pub mod report;
pub mod verify;
pub mod workload;
