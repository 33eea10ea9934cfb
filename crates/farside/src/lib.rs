//! Far memory that programs share: mutable, and reached without waking the far CPU.
//!
//! A *memory node* (`farside up`) lends memory. [`connect`] names one by a url; [`Pool::open`] gives a [`Client`] of a
//! store on it, which is `Send + Clone` and serves any threads or tasks; [`local::Client`] belongs to one thread and
//! pays nothing for that.
//!
//! ```no_run
//! # fn main() -> Result<(), farside::Error> {
//! let pool = farside::connect("shm:/run/user/1000/farside/default.sock")?;
//! let kv = pool.open("default")?;
//! kv.put("greeting", "hello").wait()?; // or `.await`, under any executor
//! let greeting = kv.get("greeting").wait()?.expect("just stored");
//! assert_eq!(greeting.value, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! What a program may assume: each operation is linearizable, and an error says whether the operation was carried
//! out ([`Error::ran`]).

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "this crate reads the environment for all others")]

pub mod config;
#[doc(hidden)]
pub mod figure;
pub mod local;

mod client;
mod endpoint;
mod error;
mod pool;
mod reopen;

pub use client::{Client, Pending, Value};
pub use error::Error;
pub use farside_remote::control::{NodeInfo, Store, StoreStat};
pub use farside_remote::fabric::Ran;
pub use farside_systems::kv::{Conflict, KEY_MAX, KvError, VALUE_MAX, Version};
pub use farside_systems::store::StoreError;
pub use pool::{NewStore, Options, Pool, connect, connect_with};

/// How the binary builds nodes and drives benchmarks; not for programs, and not stable.
#[doc(hidden)]
pub mod parts {
    pub use crate::endpoint::Endpoint;
    pub use crate::pool::{NO_TLS, addresses};
    pub use farside_systems::registry::{AnyKv, kinds};
}

/// The README's example is compiled and run like those of this documentation.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
