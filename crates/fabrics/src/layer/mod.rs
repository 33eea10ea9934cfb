//! Fabrics that wrap any other: protocols stay clean, and so do fabrics.

pub mod count;
pub mod trace;
