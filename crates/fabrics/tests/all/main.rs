//! All integration tests of this crate in one binary, which links once.

mod conformance;
mod endpoint;
mod fault;
mod fuzz;
#[cfg(farside_mutants)]
mod mutants;
mod ring;
mod session;
mod wide;
