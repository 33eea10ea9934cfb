//! All integration tests of this crate, in one binary so that linking is done only once.

mod life;
mod members;
#[cfg(farside_mutants)]
mod mutants;
mod quiescence;
mod replay;
#[path = "../support/mod.rs"]
mod support;
mod wide;
