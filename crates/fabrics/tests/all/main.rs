//! All integration tests of this crate in one binary, which links once.

#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]
#![allow(unsafe_code, reason = "an allocator that counts, and raw peers of rings")]

mod conformance;
mod endpoint;
mod fault;
mod fuzz;
#[cfg(farside_mutants)]
mod mutants;
mod nodes;
mod ring;
mod session;
mod tasks;
mod wide;
