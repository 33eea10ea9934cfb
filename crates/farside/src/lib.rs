//! Far memory that programs share: mutable, and reached without waking the far CPU.
//!
//! A *memory node* (`farside up`) lends memory. Its memory is divided into *stores*: key-value stores that any number
//! of programs read and write. A program uses a store in two steps:
//!
//! 1. [`connect`] connects to the node at a url and returns a [`Pool`]. A pool also creates, lists and drops stores.
//! 2. [`Pool::open`] opens a store and returns a [`Client`].
//!
//! There are two kinds of client:
//!
//! * [`Client`] is `Send + Clone`. All threads and async tasks can share it. It runs the operations on a thread of its
//!   own and keeps many of them in flight.
//! * [`local::Client`] belongs to one thread and runs one operation at a time. It has no queue, copies no value and
//!   allocates nothing per operation.
//!
//! # Example
//!
//! ```no_run
//! # fn main() -> Result<(), farside::Error> {
//! let pool = farside::connect("shm:/run/user/1000/farside/default.sock")?;
//! let kv = pool.open("default")?;
//! kv.put("greeting", "hello").wait()?; // or `.await`, under any executor
//! let greeting = kv.get("greeting").wait()?.expect("just stored");
//! assert_eq!(greeting.value, b"hello");
//!
//! // Stores only if the key still has the version that was read.
//! match kv.compare_and_put("greeting", greeting.version, "hello again").wait()? {
//!     Ok(version) => println!("replaced; the new version is {version:?}"),
//!     Err(conflict) => println!("another client was faster: {conflict:?}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The url `local:` starts a node inside the program, so that examples and tests need no other process.
//!
//! # What a program may assume
//!
//! * Each operation on a key is linearizable: it takes effect at one instant between the call and its return, in one
//!   order for all clients. Transactions over several keys need a store of the kind `prism-tx`: see [`Txn`].
//! * [`Error::ran`] tells whether an operation that failed was carried out: [`Ran::No`], [`Ran::Yes`] or
//!   [`Ran::Unknown`]. After `Unknown`, the program must be correct in both cases.
//! * A key has 1 to [`KEY_MAX`] bytes, a value 0 to [`VALUE_MAX`] bytes.

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "this crate reads the environment for all others")]

pub mod config;
#[doc(hidden)]
pub mod figure;
pub mod index;
pub mod local;
pub mod txn;
pub mod volume;

mod client;
mod endpoint;
mod error;
mod keeper;
mod pool;
mod reopen;

pub use client::{Client, Pending, Value};
pub use error::Error;
pub use farside_remote::control::{NodeInfo, Store, StoreStat};
pub use farside_remote::fabric::Ran;
pub use farside_systems::blocks::BlocksError;
pub use farside_systems::heal;
pub use farside_systems::index::{IndexError, Keys};
pub use farside_systems::kv::{Conflict, KEY_MAX, KvError, VALUE_MAX, Version};
pub use farside_systems::store::StoreError;
pub use farside_systems::txn::TxnError;
pub use pool::{NewStore, Options, Pool, connect, connect_with};
pub use txn::{Transaction, Txn};

/// Internals that the `farside` command uses to build nodes and run benchmarks. Not stable; programs must not use them.
#[doc(hidden)]
pub mod parts {
    pub use crate::endpoint::{Endpoint, Session};
    pub use crate::keeper::Keepers;
    pub use crate::pool::{NO_TLS, NO_VERBS, addresses, join_urls, nodes_of};
    pub use crate::volume::block_store;
    pub use farside_systems::kv::AnyKv;
    pub use farside_systems::registry::kinds;
}

/// Compiles and runs the README's examples as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
