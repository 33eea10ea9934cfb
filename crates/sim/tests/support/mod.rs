//! What the tests of this crate share.

pub(crate) mod machine;
pub(crate) mod operations;
