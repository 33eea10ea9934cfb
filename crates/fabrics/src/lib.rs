//! What carries a chain to a memory node.
//!
//! [`memory::Mapping`] is a node's memory as a process has it mapped. On [`local`] and [`shm`] the caller's own CPU
//! runs the chain on it ([`direct`]); neither wakes anyone. [`executor`] is the client core that both are made for:
//! one thread, at most 64 tasks, and the hiding of memory's latency behind one another. [`layer`] wraps any fabric.
//! [`session`] has both ends of a conversation by datagrams, without the sockets; [`ring`] carries them through shared
//! memory, between those who do not trust each other.
//!
//! What always holds: fabrics know no system. `unsafe` stands in this crate and hardly anywhere else; each block
//! says who keeps the promise.

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
