//! All integration tests of this crate in one binary, which links only once.

mod generators;
mod ledger;
