//! All integration tests of this crate in one binary, which links once.

mod generators;
mod ledger;
