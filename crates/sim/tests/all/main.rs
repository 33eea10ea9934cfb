//! All integration tests of this crate in one binary, so that only one is linked.

mod engine;
mod fuzz;
mod hardware;
mod history;
mod linearizable;
mod litmus;
mod logs;
mod nic;
mod picture;
mod private;
mod services;
#[path = "../support/mod.rs"]
mod support;
mod verbs;
