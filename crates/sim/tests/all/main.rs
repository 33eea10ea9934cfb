//! All integration tests of this crate in one binary, which links once.

mod fuzz;
mod hardware;
mod history;
mod linearizable;
mod litmus;
mod nic;
mod picture;
#[path = "../support/mod.rs"]
mod support;
