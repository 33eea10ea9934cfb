//! A client of a key-value store, of whichever kind the catalog says the store is.
//!
//! Invariant: who works on one for long asks once which it is; the operations themselves cost no more than the
//! system's own.

use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, NodeId};
use farside_systems::kv::pilaf::{self, Pilaf};
use farside_systems::kv::prism_kv::{self, PrismKv};
use farside_systems::kv::{Item, KvError};
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

/// Where a client has the value that it has read, until its next operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fetched {
    PrismKv(prism_kv::Fetched),
    Pilaf(pilaf::Fetched),
}

impl<F: Fabric + Clock> AnyKv<F> {
    /// Opens the store called `name` at `node`, as what it is.
    ///
    /// # Errors
    /// There is none of that name, or it is of a kind that this release does not know.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<AnyKv<F>, KvError> {
        match kind_of(&fabric, node, name).await?.as_str() {
            prism_kv::KIND => PrismKv::open(fabric, node, name).await.map(AnyKv::PrismKv),
            pilaf::KIND => Pilaf::open(fabric, node, name).await.map(AnyKv::Pilaf),
            raw::KIND => Err(KvError::Gone(format!(
                "store '{name}' is plain memory, in which there are no keys: name another store"
            ))),
            kind => Err(KvError::Gone(format!(
                "store '{name}' is a {kind}, which this release does not know: use the release that made it, or name \
                 another store"
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

async fn kind_of<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<String, KvError> {
    let request = serde_json::to_vec(&Ask::OpenStore { name: name.to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await.map_err(|error| match error {
        FabricError::Refused(reason) => KvError::Gone(reason),
        other => KvError::Fabric(other),
    })?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Store(store)) => Ok(store.kind),
        _ => Err(KvError::Gone(format!("the node's answer about store '{name}' is not understood"))),
    }
}
