//! The field's one-sided data structures, each beside its rivals, each readable beside its paper.
//!
//! What always holds: a system asks `remote` for chains and knows no fabric, no other system, no clock but the one
//! handed in. One system is one file, or one folder with the same rooms everywhere.

#![forbid(unsafe_code)]

// First: it defines the macros that match a family's clients.
#[macro_use]
pub mod registry;

mod hash_slots;
pub mod kv;
pub mod queue;
pub mod raw;
mod ready;
pub mod store;
pub mod system;
