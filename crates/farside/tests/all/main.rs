//! All integration tests of this crate in one binary, so that the tests are linked only once.

#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]

mod all_or_none;
mod attacks;
mod cli;
mod clients;
mod faults;
mod figures;
mod fuzz;
mod guide;
mod hostile;
mod logs;
#[cfg(farside_mutants)]
mod mutants;
mod readme;
mod replicas;
mod sim;
mod soak;
#[path = "../support/mod.rs"]
mod support;
mod survival;
#[cfg(feature = "verbs")]
mod verbs;
mod verify;
