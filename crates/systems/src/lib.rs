//! Data structures that clients access with one-sided operations: one module for each system. A module follows its
//! paper, so that the two can be read together.
//!
//! Invariant: a system builds chains with the crate `remote`. It depends on no fabric, on no other system, and on no
//! clock except the one that its caller passes.
//!
//! Each system is one file, or one folder with the same modules as every other system's folder.

#![forbid(unsafe_code)]

// This module comes first, because the modules after it use its macros, which dispatch on the clients of a family.
#[macro_use]
pub mod registry;

mod ask;
pub mod blocks;
mod counters;
pub mod epoch;
mod erased;
pub mod guarded;
mod hash_slots;
pub mod heal;
mod held;
mod holder;
pub mod identity;
pub mod index;
mod keyed;
pub mod kv;
pub mod latch;
pub mod lease;
mod lines;
pub mod members;
pub mod mutants;
pub mod owned;
pub mod queue;
pub mod quorum;
pub mod raw;
mod ready;
pub mod redo;
mod rendezvous;
pub mod rpc;
pub mod stamps;
pub mod store;
pub mod system;
pub mod txn;
