//! The field's one-sided data structures: one module a system, written to be read beside its paper.
//!
//! Invariant: a system builds chains with `remote` and depends on no fabric, on no other system, and on no clock except
//! the one it is given.
//!
//! A system is one file, or one folder with the same modules as every other system.

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
