//! A client of a key-value store, of whichever kind the catalog says the store is.
//!
//! Invariant: who works on one for long asks once which it is; the operations themselves cost no more than the
//! system's own.

use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Fabric, NodeId};
use farside_systems::kv::pilaf::{self, Pilaf};
use farside_systems::kv::prism_kv::{self, PrismKv};
use farside_systems::kv::{Item, KvError, fetch_any_store};
use farside_systems::raw;

/// A client of one store, for one operation at a time.
#[allow(
    clippy::large_enum_variant,
    reason = "a task has one, and the way to the one that is used most is to be the shortest"
)]
pub enum AnyKv<F> {
    /// Of a `prism-kv` store.
    PrismKv(PrismKv<F>),
    /// Of a `pilaf` store.
    Pilaf(Pilaf<F>),
}

/// The same of whichever it is.
macro_rules! of_either {
    ($any:expr, $kv:ident => $then:expr) => {
        match $any {
            $crate::any::AnyKv::PrismKv($kv) => $then,
            $crate::any::AnyKv::Pilaf($kv) => $then,
        }
    };
}

pub(crate) use of_either;

/// What PRISM-KV stores alone offer, as [`AnyKv::prism_kv`] names it.
pub(crate) const GET_MANY: &str = "to get several keys at once";
/// See [`GET_MANY`].
pub(crate) const PUT_MANY: &str = "to put several keys at once";

/// Where a client has the value that it has read, until its next operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fetched {
    PrismKv(prism_kv::Fetched),
    Pilaf(pilaf::Fetched),
}

impl<F: Fabric + Clock> AnyKv<F> {
    /// Opens the store called `name` at `node`, as what it is. One call.
    ///
    /// # Errors
    /// There is none of that name, or it is of a kind that this release does not know.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<AnyKv<F>, KvError> {
        let store = fetch_any_store(&fabric, node, name).await?;
        AnyKv::of(fabric, node, store)
    }

    /// A client of a store as the catalog of `node` has told it. Nobody is asked.
    ///
    /// # Errors
    /// It is of a kind that this release does not know, or its description is not understood.
    pub(crate) fn of(fabric: F, node: NodeId, store: Store) -> Result<AnyKv<F>, KvError> {
        match store.kind.as_str() {
            prism_kv::KIND => PrismKv::of(fabric, node, store).map(AnyKv::PrismKv),
            pilaf::KIND => Pilaf::of(fabric, node, store).map(AnyKv::Pilaf),
            raw::KIND => Err(KvError::Gone(format!(
                "store '{}' is plain memory, in which there are no keys: name another store",
                store.name
            ))),
            kind => Err(KvError::Gone(format!(
                "store '{}' is a {kind}, which this release does not know: use the release that made it, or name \
                 another store",
                store.name
            ))),
        }
    }

    /// Remembers where up to `keys` keys have their slots, where that saves anything: in a PRISM-KV store.
    pub fn with_slot_cache(self, keys: usize) -> AnyKv<F> {
        match self {
            AnyKv::PrismKv(kv) => AnyKv::PrismKv(kv.with_slot_cache(keys)),
            pilaf => pilaf,
        }
    }

    /// The store as the catalog has it.
    pub fn store(&self) -> &Store {
        of_either!(self, kv => kv.store())
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        of_either!(self, kv => kv.get(key).await)
    }

    /// Gives `key` a value.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    pub async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        of_either!(self, kv => kv.put(key, value).await)
    }

    /// Takes the value of `key` away; answers whether it had one.
    ///
    /// # Errors
    /// [`KvError`], which says whether it may have been taken away.
    pub async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        of_either!(self, kv => kv.delete(key).await)
    }

    /// The client of a PRISM-KV store, for what no other kind offers: `what` names it.
    ///
    /// # Errors
    /// The store is of another kind. Nothing was asked of anyone.
    pub(crate) fn prism_kv(&mut self, what: &'static str) -> Result<&mut PrismKv<F>, KvError> {
        match self {
            AnyKv::PrismKv(kv) => Ok(kv),
            AnyKv::Pilaf(_) => Err(KvError::NotOffered { kind: pilaf::KIND, what }),
        }
    }

    /// What the last operation, a fetch that answered this, has read.
    pub(crate) fn item(&self, fetched: Fetched) -> Item<'_> {
        match (self, fetched) {
            (AnyKv::PrismKv(kv), Fetched::PrismKv(fetched)) => kv.item(fetched),
            (AnyKv::Pilaf(kv), Fetched::Pilaf(fetched)) => kv.item(fetched),
            _ => panic!("a value is where the client has it that read it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{NewStore, connect};
    use farside_fabrics::executor::block_on;
    use farside_fabrics::layer::count::Count;

    #[test]
    fn a_store_of_either_kind_is_opened_by_one_call() {
        let pool = connect("local:").expect("a node in this process");
        let pilaf = NewStore { kind: pilaf::KIND.into(), ..NewStore::prism_kv("calls", 4 << 20) };
        pool.create_store(&pilaf).expect("there is room");
        for (name, kind) in [("default", prism_kv::KIND), ("calls", pilaf::KIND)] {
            let fabric = Count::new(pool.endpoint().expect("room for a session"));
            let kv = block_on(fabric.inner(), AnyKv::open(&fabric, NodeId(0), name)).expect("it is there");
            assert_eq!(kv.store().kind, kind);
            let costs = fabric.take();
            assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "{name}");
        }
    }
}
