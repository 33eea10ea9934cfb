//! What a memory node's CPU does for a store: the two-sided half of a system.
//!
//! A node knows no system. It creates a store's service from a specification, hands it calls, and asks it which
//! buffers are still reachable. Invariant: a service touches its store's memory only by chains' own primitives,
//! so that clients' atomics hold against it too (PRISM gives no guarantee against the server's CPU).

use crate::key::Key;
use crate::memory::Memory;

/// Where a store's table lies, and the key that opens it and the store's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Opens the store's region.
    pub key: Key,
    /// The address of the table's first byte.
    pub at: u64,
    /// Bytes of it, zero when the store is created.
    pub len: u64,
}

/// The service of one store.
pub trait Service<M: Memory>: Send {
    /// Finds more of the buffers that the structure reaches, beginning at `cursor` (0 at first), in at most about
    /// 16 accesses; puts their addresses into `found`. Answers where to go on, or nothing at the end.
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait>;
}

/// A kind of store that a node can create.
pub trait Kind<M: Memory>: Send + Sync {
    /// The name by which stores ask for it.
    fn name(&self) -> &'static str;

    /// Bytes of table that a store with these parameters needs. `entropy` is random, for hash seeds and the like;
    /// what the kind wants to keep of it goes into the answered parameters, which are stored in the catalog and
    /// handed to every client.
    ///
    /// # Errors
    /// What is wrong with the parameters, and what would be right.
    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String>;

    /// The service of a store that was planned with these parameters and has this table.
    ///
    /// # Errors
    /// The parameters are not such as [`Kind::plan`] answers.
    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String>;
}

/// What a store needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Bytes of table, before rounding up to whole segments.
    pub table_len: u64,
    /// The parameters as every client will see them.
    pub parameters: String,
    /// Whether words of 24 and 32 bytes are compared and swapped in it. Its chains are then run by the node's engines
    /// alone, on [`Memory`] that is wide: those of clients that run them themselves would not take the locks.
    pub wide: bool,
}
