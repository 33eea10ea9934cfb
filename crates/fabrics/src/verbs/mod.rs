//! Sessions over RDMA: reliable queue pairs of a NIC.
//!
//! A client has two queue pairs with its engine:
//!
//! - One carries the frames of the session as SENDs, like a connection of [`crate::tcp`]: chains, calls, tokens and
//!   everything else that engines do ([`line`](self::VerbsLine), [`port`](self::VerbsPort)).
//! - One is for one-sided requests, which the node's NIC executes without the node's CPU ([`Endpoint`]). Its memory is
//!   registered by region and by the rights of the session's token ([`Grants`]).
//!
//! A chain that has only READs and WRITEs becomes one list of requests, posted with one doorbell. The engine executes
//! all other chains. On a node with `--nic-atomics`, the NIC executes every classic op, atomics included, and engines
//! execute no atomics: a NIC's atomics and a CPU's are not atomic to each other.
//!
//! The set-up goes over TCP (`setup`). The TCP connection stays open, so that each side learns at once that the other
//! side's process has ended.
//!
//! libibverbs is loaded when a device is first needed (`sys`); a program that needs none starts without it.

mod buffers;
pub mod device;
mod endpoint;
mod error;
mod grants;
mod line;
mod list;
mod lists;
mod port;
pub mod request;
mod resources;
mod setup;
mod sys;

pub use endpoint::Endpoint;
pub use error::VerbsError;
pub use grants::{EXTENTS_MAX, Grants};
pub use line::VerbsLine;
pub use port::{VerbsAddress, VerbsPort};
pub use setup::{Choice, PORT};
