//! The memory node: it grants memory to stores, frees retired buffers, and finds leaked ones. The node has no code for
//! any system.
//!
//! [`node::Node`] is a state machine. The caller passes in requests, and runs the node in steps of at most about 16
//! memory accesses each, so that a simulator can interleave these accesses with those of other processes. Only [`host`]
//! has threads and sockets.
//!
//! Invariant: a step changes the node's own state only after its last access has completed.

#![forbid(unsafe_code)]

pub mod access;
pub mod catalog;
pub mod engine;
mod epochs;
pub mod extents;
pub mod host;
pub mod identity;
pub mod log;
pub mod mutants;
pub mod node;
mod rebuild;
pub mod reclaim;
mod restart;
mod reuse;
pub mod scan;
pub mod served;
pub mod session;
pub mod turn;

pub use node::{Node, NodeMemory, Progress};
