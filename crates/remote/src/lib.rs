//! The language of far memory: the requests that a memory node accepts, and their meaning.
//!
//! The types, from the bottom up. An [`Addr`] is a byte offset into one node's memory. A [`Key`] is the capability for
//! one region of a node's memory, with all [`Rights`] or a subset. An [`op::Op`] is one request: READ, WRITE, ALLOCATE,
//! CAS, FETCH-ADD or RETIRE, with PRISM's modifiers. A [`chain::Chain`] is a list of ops, built in wire form, that one
//! runner executes in order. A [`reply::Reply`] holds a status and an output for each op. [`run()`] is the single
//! definition of every op's meaning, which accesses memory only through the methods of [`memory::Memory`]. [`arena`] is
//! the layout of a node's own records (free lists, buffer states, segments, session slots) and the lock-free steps that
//! change these records. [`fabric::Fabric`] is the interface through which a protocol sends chains.
//!
//! Invariant: no I/O, no thread, no clock of its own, no `unsafe`. The caller passes in time and memory, so a simulator
//! runs the same code as a node.

#![forbid(unsafe_code)]

pub mod address;
pub mod arena;
pub mod capability;
pub mod chain;
pub mod clock;
pub mod control;
pub mod draws;
pub mod fabric;
pub mod key;
pub mod leases;
pub mod memory;
#[doc(hidden)]
pub mod mutant;
pub mod mutants;
pub mod op;
pub mod reply;
pub mod rights;
pub mod run;
pub mod service;
pub mod wire;
mod word;

pub use address::{Addr, BoundedPtr, NodeId};
pub use capability::Capabilities;
pub use chain::{Chain, ChainBuf, ChainView, Out};
pub use fabric::{Fabric, FabricError};
pub use key::Key;
pub use memory::{Memory, Width};
pub use op::{Mode, Op, allocate, cas, cas_from, fetch_add, read, read_as, retire, write};
pub use reply::{Reply, Status};
pub use rights::Rights;
pub use run::{By, hints, run};
