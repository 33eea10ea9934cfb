//! Fabrics: the ways to carry a chain to a memory node.
//!
//! - [`memory`] maps a node's memory into a process ([`memory::Mapping`]).
//! - Over [`local`] and [`shm`] the caller's own CPU runs the chain on that memory, so the node's process may sleep.
//!   [`direct`] is the common part of both.
//! - [`session`] implements the client's and the engine's end of a session, without the sockets. [`ring`], [`udp`] and
//!   [`tcp`] carry its datagrams; [`ring`] uses shared memory between processes that do not trust each other.
//! - [`executor`] is the client core: one thread with at most 64 tasks. While one task waits for memory or the network,
//!   others run.
//! - [`layer`] wraps any fabric, to count, trace, delay or disturb its requests.
//!
//! Invariant: no fabric depends on any system built on it (a key-value store, for example).
//!
//! Almost all `unsafe` code of the project is in this crate. A comment at each block says why its conditions hold.

#![allow(unsafe_code, reason = "mapped memory, sockets and rings are reached from here")]

mod ahead;
mod connections;
pub mod direct;
pub mod executor;
pub mod layer;
pub mod local;
pub mod memory;
pub mod mutants;
pub mod nodes;
mod reactor;
pub mod ring;
pub mod runner;
pub mod session;
pub mod shm;
pub mod socket;
pub mod spin;
pub mod tcp;
pub mod timer;
mod together;
pub mod udp;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wait;
