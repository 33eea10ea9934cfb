//! A store's session, and another in its place when it has ended: what this crate's clients share.
//!
//! Invariant: an operation is tried again only if it is known that it was not carried out, and once.
//! Invariant: a client stays with the store that it has opened; another one of the same name is not taken for it.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use farside_fabrics::executor::block_on;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_systems::kv::KvError;
use farside_systems::registry::AnyKv;
use farside_systems::store::{self, Members, StoreError};
use farside_systems::system::Options;
use std::rc::Rc;

/// A session with the node, for the calling thread, and a client of the store for each of its tasks.
pub(crate) struct Opened {
    pub(crate) endpoint: Rc<Endpoint>,
    pub(crate) kvs: Vec<AnyKv<Rc<Endpoint>>>,
}

impl Opened {
    /// Opens the store called `name`, for so many tasks. One call, however many there are.
    pub(crate) fn new(pool: &Pool, name: &str, tasks: usize, options: &Options) -> Result<Opened, Error> {
        let endpoint = Rc::new(pool.endpoint()?);
        let kvs = block_on(&endpoint, async {
            let store = store::fetch(&endpoint, NodeId(0), name).await?;
            let members = Members::one(NodeId(0), store);
            let mut kvs = Vec::with_capacity(tasks);
            for _ in 0..tasks {
                kvs.push(AnyKv::of(Rc::clone(&endpoint), &members, options).await?);
            }
            Ok::<_, StoreError>(kvs)
        })?;
        Ok(Opened { endpoint, kvs })
    }

    /// Opens `store` again, which was opened before.
    pub(crate) fn again(
        pool: &Pool,
        store: &Store,
        tasks: usize,
        options: &Options,
    ) -> Result<Opened, Error> {
        // A key is a session's own, and a table may have been rebuilt: neither says which store it is.
        let identity = |store: &Store| (store.id, store.incarnation, store.region, store.kind.clone());
        let opened = Opened::new(pool, &store.name, tasks, options)?;
        if opened.kvs.iter().any(|kv| identity(kv.store()) != identity(store)) {
            return Err(StoreError::another(store).into());
        }
        Ok(opened)
    }
}

/// What an operation answers that was not carried out, as its session is over and there is no other.
pub(crate) fn not_opened(error: &Error) -> KvError {
    match error {
        Error::Kv(gone @ KvError::Store(_)) => gone.clone(),
        error => KvError::Fabric(FabricError::Lost {
            node: NodeId(0),
            ran: Ran::No,
            reason: format!("and another could not be opened: {error}"),
        }),
    }
}

/// Whether the session is over: all that is asked over it will fail.
pub(crate) fn is_over(error: &KvError) -> bool {
    matches!(error, KvError::Fabric(FabricError::Lost { .. }))
}

/// Whether the session is over, and the operation is known not to have been carried out.
pub(crate) fn may_try_again(error: &KvError) -> bool {
    is_over(error) && error.ran() == Ran::No
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{NewStore, connect};
    use farside_fabrics::layer::count::Count;
    use farside_systems::registry::family;
    use farside_systems::system::Family;

    #[test]
    fn a_store_of_any_kind_is_opened_by_one_call() {
        let (pool, options) = (connect("local:").expect("a node in this process"), Options::default());
        for system in family(Family::Kv) {
            let new = NewStore { kind: system.kind.into(), ..NewStore::prism_kv(system.kind, 4 << 20) };
            pool.create_store(&new).expect("there is room");
            let fabric = Count::new(pool.endpoint().expect("room for a session"));
            let opened = AnyKv::open(&fabric, NodeId(0), system.kind, &options);
            let kv = block_on(fabric.inner(), opened).expect("it is there");
            assert_eq!(kv.store().kind, system.kind);
            let costs = fabric.take();
            assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "{}", system.kind);
        }
    }
}
