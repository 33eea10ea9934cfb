//! The language of far memory: what may be asked of a memory node, and what it means.
//!
//! A tour, from the bottom up. An [`Addr`] is a byte offset into one node's memory; a [`Key`] is the
//! capability for one region of it, with some [`Rights`] or all. An [`op::Op`] is one request (READ, WRITE, ALLOCATE,
//! CAS, FETCH-ADD, RETIRE, with PRISM's modifiers); a [`chain::Chain`] is a list of them, *bytes from birth*, that one
//! runner carries out in order; a [`reply::Reply`] holds a status and an output for each. [`run()`] says, once, what
//! every op means, over the few questions of [`memory::Memory`]. [`arena`] is the layout of a node's own records (free
//! lists, buffer states, segments, session slots) and the lock-free steps on them. [`fabric::Fabric`] is all that a
//! protocol sees of whatever carries its chains.
//!
//! What always holds here: no I/O, no thread, no clock of its own, no `unsafe`. Time and memory are handed in, so
//! that a simulator runs the very same code.

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
