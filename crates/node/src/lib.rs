//! The memory node: it lends memory, takes back what is given up, and finds what is lost. It knows no system.
//!
//! [`node::Node`] is a state machine: it is handed questions and the time, and makes steps of at most about 16
//! accesses, so that a simulator runs it among everybody else's accesses. [`host`] alone has threads and sockets.
//!
//! Invariant: a step changes the node's own state only once its last access was answered.

#![forbid(unsafe_code)]

pub mod access;
pub mod catalog;
pub mod engine;
pub mod extents;
pub mod host;
pub mod mutants;
pub mod node;
mod rebuild;
pub mod reclaim;
mod restart;
pub mod scan;
pub mod served;
pub mod session;

pub use node::{Node, NodeMemory, Progress};
