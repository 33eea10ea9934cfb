//! All integration tests of this crate, in one binary so that linking is done only once.

mod engines;
mod life;
mod log;
mod members;
#[cfg(farside_mutants)]
mod mutants;
mod private;
mod quiescence;
mod replacing;
mod replay;
mod services;
#[path = "../support/mod.rs"]
mod support;
mod wide;
