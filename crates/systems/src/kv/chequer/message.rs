//! Chequer-message: Chequer's table and pool of values, used by SEND and RECEIVE alone. It is what the paper compares
//! Chequer with.
//!
//! Every operation is a call to the service, which answers a GET from the same table that Chequer's clients READ. A value
//! that does not fit into one message travels in numbered parts, all on their way at once:
//! * GET: the first part, then all others. They name the stamp of the first, so a value never has parts of two puts.
//! * PUT: reserve a block, then all parts, then commit.

use super::ChequerMessageKind;
use super::calls::{Calls, Got, check_put};
use super::layout::Stamp;
use super::request::PART_MAX;
use crate::kv::{Fetched, Item, Kv, KvError, check_key};
use crate::store::{self, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Fabric, NodeId};

/// Kind of the store in the catalog.
pub const KIND: &str = "chequer-message";

/// Client of one Chequer-message store. It runs one operation at a time: give each task its own client.
pub struct ChequerMessage<F> {
    calls: Calls<F>,
    /// Whether the last value lies in the answer.
    is_in_answer: bool,
}

impl<F: Fabric + Clock> ChequerMessage<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<ChequerMessage<F>, StoreError> {
        store::open::<ChequerMessageKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    pub(super) fn of(fabric: F, node: NodeId, store: Store) -> Result<ChequerMessage<F>, StoreError> {
        let calls = Calls::of(fabric, node, store).map_err(StoreError::Gone)?;
        Ok(ChequerMessage { calls, is_in_answer: true })
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.calls.store
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.calls.fabric
    }
}

impl<F: Fabric + Clock> Kv for ChequerMessage<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    /// Takes one call, or two waves for a value of several parts.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        let Some((got, stamp)) = self.calls.get(key).await? else { return Ok(None) };
        self.is_in_answer = matches!(got, Got::Answer);
        Ok(Some(Fetched { at: None, version: Stamp::version(stamp) }))
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let value = if self.is_in_answer { self.calls.value_in_answer() } else { &self.calls.value };
        Item { value, version: fetched.version }
    }

    /// Takes one call.
    async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        check_key(key)?;
        self.calls.contains(key).await
    }

    /// Takes one call, or three waves for a value of several parts.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        check_put(key, value)?;
        if value.len() <= PART_MAX {
            return self.calls.put(key, value).await.map(drop);
        }
        let reserved = self.calls.reserve(key, value).await?;
        self.calls.write(reserved.number, key, value).await?;
        self.calls.commit(reserved.number).await.map(drop)
    }

    /// Takes one call.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.calls.delete(key).await
    }
}
