//! Remote procedure calls in the manner of the systems that are built on them.

pub mod echo;
pub mod fasst;
