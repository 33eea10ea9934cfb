//! Protocols as small models, of which every schedule is explored: all interleavings of the steps of a few clients.
//!
//! [`explore`] is the search. [`prism_tx`] is PRISM-TX with the death of clients and recovery. A model comes before the
//! protocol: it shows that the rules are right, and what breaks if one of them is left out.
//!
//! Invariant: this crate uses no other crate of the workspace, so that its tests build in seconds.

#![forbid(unsafe_code)]

pub mod explore;
pub mod prism_tx;
