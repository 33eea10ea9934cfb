//! Code shared by the tests of this crate.

pub(crate) mod machine;
pub(crate) mod operations;
