//! Clients of key-value stores of any kind: [`OneKv`] of a store that lies on one node, [`AnyKv`] of any store.
//!
//! Invariant: the dispatch is static, so an operation costs no more than the system's own.

use super::{Conflict, Cursor, Fetched, Item, Kv, KvError, Sharded, Version};
use crate::members;
use crate::registry::OneKv;
use crate::store::{Members, StoreError};
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Fabric, NodeId};

/// A client of a key-value store of any kind, on one node or on several.
#[allow(
    clippy::large_enum_variant,
    reason = "a task has one client, and the path to a store on one node must be the shortest"
)]
pub enum AnyKv<F: Fabric + Clock> {
    /// The whole store lies on one node.
    One(OneKv<F>),
    /// Each member of the store holds a part of the keys.
    Sharded(Sharded<F>),
}

/// Evaluates the expression `then`, with `client` bound to the client inside the [`AnyKv`] `any`. The dispatch is
/// static, so the operation costs no more than the system's own.
#[macro_export]
macro_rules! with_kv {
    ($any:expr, $client:ident => $then:expr) => {
        match $any {
            $crate::kv::AnyKv::One(one) => $crate::registry::with_one_kv!(one, $client => $then),
            $crate::kv::AnyKv::Sharded($client) => $then,
        }
    };
}

impl<F: Fabric + Clock + Clone> AnyKv<F> {
    /// Opens the key-value store called `name`, of any kind, in a pool of `nodes` nodes. Makes one call to the
    /// only node, or a few to each of several.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open(fabric: F, nodes: u32, name: &str, options: &Options) -> Result<AnyKv<F>, StoreError> {
        let members = members::open(&fabric, nodes, name).await?;
        AnyKv::of(fabric, nodes, &members, options).await
    }

    /// Creates a client of the store that `members` describe, in a pool of `nodes` nodes. In a pool of several, the
    /// client waits for the next session of a node, even if its store lies on that node alone.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn of(
        fabric: F,
        nodes: u32,
        members: &Members,
        options: &Options,
    ) -> Result<AnyKv<F>, StoreError> {
        if nodes == 1 && members.list().len() == 1 {
            return OneKv::of(fabric, members, options).await.map(AnyKv::One);
        }
        Sharded::of(fabric, members, options).await.map(AnyKv::Sharded)
    }
}

impl<F: Fabric + Clock> AnyKv<F> {
    /// Returns the store's description in the catalog of its first member.
    pub fn store(&self) -> &Store {
        with_kv!(self, kv => kv.store())
    }

    /// Returns the node that holds a key.
    pub fn node_of(&self, key: &[u8]) -> NodeId {
        match self {
            // The only node of the pool.
            AnyKv::One(_) => NodeId(0),
            AnyKv::Sharded(sharded) => sharded.node_of(key),
        }
    }
}

impl<F: Fabric + Clock> OneKv<F> {
    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        with_one_kv!(self, kv => kv.store())
    }
}

/// Implements [`Kv`] for an enum of clients, by the macro that dispatches on it.
macro_rules! kv_by_dispatch {
    ($client:ident by $with:ident $(where F: $more:ident)?) => {
        impl<F: Fabric + Clock $(+ $more)?> Kv for $client<F> {
            fn kind(&self) -> &'static str {
                $with!(self, kv => kv.kind())
            }

            fn shards(&self) -> usize {
                $with!(self, kv => kv.shards())
            }

            fn shard_of(&self, key: &[u8]) -> usize {
                $with!(self, kv => kv.shard_of(key))
            }

            fn counters(&self) -> Vec<(&'static str, u64)> {
                $with!(self, kv => kv.counters())
            }

            #[inline]
            async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
                $with!(self, kv => kv.fetch(key).await)
            }

            #[inline]
            fn item(&self, fetched: Fetched) -> Item<'_> {
                $with!(self, kv => kv.item(fetched))
            }

            async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
                $with!(self, kv => kv.get(key).await)
            }

            async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
                $with!(self, kv => kv.put(key, value).await)
            }

            async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
                $with!(self, kv => kv.contains(key).await)
            }

            async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
                $with!(self, kv => kv.delete(key).await)
            }

            async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, KvError> {
                $with!(self, kv => kv.put_if_absent(key, value).await)
            }

            async fn compare_and_put(
                &mut self,
                key: &[u8],
                expected: Version,
                value: &[u8],
            ) -> Result<Result<Version, Conflict>, KvError> {
                $with!(self, kv => kv.compare_and_put(key, expected, value).await)
            }

            async fn get_many(
                &mut self,
                keys: &[&[u8]],
                visit: impl FnMut(usize, Option<Item<'_>>),
            ) -> Result<(), KvError> {
                $with!(self, kv => kv.get_many(keys, visit).await)
            }

            async fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
                $with!(self, kv => kv.put_many(items).await)
            }

            fn first(&self) -> Result<Cursor, KvError> {
                $with!(self, kv => kv.first())
            }

            async fn next(
                &mut self,
                cursor: &mut Cursor,
                visit: impl FnMut(&[u8], Item<'_>),
            ) -> Result<bool, KvError> {
                $with!(self, kv => kv.next(cursor, visit).await)
            }
        }
    };
}

kv_by_dispatch!(AnyKv by with_kv where F: Clone);
kv_by_dispatch!(OneKv by with_one_kv);
