//! Fabrics: the ways to carry a chain to a memory node.
//!
//! [`memory::Mapping`] is a node's memory as mapped into a process. On [`local`] and [`shm`] the caller's own CPU runs
//! the chain on that memory ([`direct`]); neither wakes the node. [`executor`] is the client core: one thread with at
//! most 64 tasks, which run while others wait for memory or the network. [`layer`] wraps any fabric. [`session`]
//! implements the client's and the engine's end of a session, without the sockets; [`ring`], [`udp`] and [`tcp`] are
//! the carriers of its datagrams. [`ring`] uses shared memory between processes that do not trust each other.
//!
//! Invariant: no fabric depends on any system built on it (a key-value store, for example).
//!
//! Almost all `unsafe` code of the project is in this crate. Each block names who keeps its promise.

#![allow(unsafe_code, reason = "mapped memory, sockets and rings are reached from here")]

mod ahead;
mod connections;
pub mod direct;
pub mod executor;
pub mod layer;
pub mod local;
pub mod memory;
pub mod mutants;
mod reactor;
pub mod ring;
pub mod runner;
pub mod session;
pub mod shm;
pub mod socket;
pub mod spin;
pub mod tcp;
pub mod timer;
pub mod udp;
