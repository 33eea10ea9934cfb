//! Benchmarks of Farside: workloads, verification, rivals, physical floors and reports.
//!
//! * [`workload`]: YCSB's workloads, which select the next operation and key.
//! * [`verify`]: values with a checksum and a stamp, and a check that each key behaves as one register.
//! * [`compare`]: rival stores (Redis, memcached, LMDB) under the same workload.
//! * [`driver`]: runs clients of any family of systems.
//! * [`kv`]: YCSB on key-value stores.
//! * [`index`]: YCSB on ordered indexes, with scans.
//! * [`blocks`]: reads and writes of whole blocks.
//! * [`latched`]: reads and changes of objects under one-sided latches.
//! * [`calls`]: batches of calls to nodes that answer at once.
//! * [`txn`]: transactions that read and write several records.
//! * [`oltp`]: benchmarks of transactions with tables and procedures.
//! * [`floor`]: the physical floor, the same reads and overwrites written by hand.
//! * [`report`]: latencies, CPU time, JSON lines for scripts and tables for people.
//!
//! Invariant: this crate depends on no fabric, and uses a system only through the trait of its family.
//! Invariant: only [`floor`] has `unsafe` code.

pub mod blocks;
pub mod calls;
pub mod compare;
pub mod driver;
#[allow(unsafe_code, reason = "the fetch by hand, and the memory it is made from")]
pub mod floor;
pub mod index;
pub mod kv;
pub mod latched;
pub mod oltp;
pub mod report;
pub mod txn;
pub mod verify;
pub mod workload;
