//! All integration tests of this crate, in one binary so that linking is done only once.

mod fuzz;
mod lists;
mod model;
#[cfg(farside_mutants)]
mod mutants;
mod rights;
#[path = "../support/mod.rs"]
mod support;
mod tearing;
