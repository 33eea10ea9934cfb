//! The deterministic simulator: one thread, one seed, virtual nanoseconds. It runs the real protocols, sessions and
//! node on real bytes. Reads and writes can be torn, as PCIe and CPUs tear them.
//!
//! [`world`] is the executor: it runs tasks, stops and kills processes, and advances time. [`memory`] runs chains and
//! the node's steps access by access. [`hardware`] has every number about hardware, and [`fabric::hardware`] models the
//! papers' machines with these numbers.

#![forbid(unsafe_code)]

pub mod checker;
pub mod clock;
pub mod counter;
pub mod disk;
pub mod fabric;
pub mod fault;
pub mod fifo;
pub mod hardware;
pub mod history;
pub mod linearizable;
pub mod litmus;
pub mod memory;
pub mod micro;
pub mod network;
pub mod nic;
pub mod node;
pub mod ordered;
pub mod picture;
pub mod random;
mod search;
pub mod serializable;
pub mod station;
pub mod world;
