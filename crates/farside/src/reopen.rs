//! Opens a store, and opens it again over a new session when the old session is over. Both clients of this crate use
//! it.
//!
//! Invariant: an operation is retried at most once, and only if the error shows that it was not carried out.
//! Invariant: a client stays with the store that it opened, also if a node has made it again from its log; it never
//! switches to another store of the same name.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use farside_fabrics::executor::block_on;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_systems::kv::AnyKv;
use farside_systems::kv::KvError;
use farside_systems::members;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::Options;
use std::rc::Rc;

/// Sessions with all nodes, for the calling thread, and one client of the store per task.
pub(crate) struct Opened {
    pub(crate) endpoint: Rc<Endpoint>,
    pub(crate) members: Members,
    pub(crate) kvs: Vec<AnyKv<Rc<Endpoint>>>,
}

impl Opened {
    /// Opens the store called `name` for `tasks` tasks. In a pool of one node, costs one call
    /// for any number of tasks.
    pub(crate) fn new(pool: &Pool, name: &str, tasks: usize, options: &Options) -> Result<Opened, Error> {
        let endpoint = Rc::new(pool.endpoint_over_all()?);
        let (members, kvs) = block_on(&endpoint, async {
            let members = members::open(&endpoint, endpoint.nodes(), name).await?;
            let mut kvs = Vec::with_capacity(tasks);
            for _ in 0..tasks {
                kvs.push(AnyKv::of(Rc::clone(&endpoint), endpoint.nodes(), &members, options).await?);
            }
            Ok::<_, StoreError>((members, kvs))
        })?;
        Ok(Opened { endpoint, members, kvs })
    }

    /// Opens `store` again over a new session. Fails if the node has another store under that name.
    pub(crate) fn reopen(
        pool: &Pool,
        store: &Store,
        tasks: usize,
        options: &Options,
    ) -> Result<Opened, Error> {
        let opened = Opened::new(pool, &store.name, tasks, options)?;
        if opened.kvs.iter().any(|kv| !kv.store().is(store)) {
            return Err(StoreError::another(store).into());
        }
        Ok(opened)
    }
}

/// Returns the error of an operation that was not carried out because its session is over and, due to `error`, no new
/// session could be opened.
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

/// Whether the error means that the session is over. All further requests over such a session fail.
pub(crate) fn is_over(error: &KvError) -> bool {
    matches!(error, KvError::Fabric(FabricError::Lost { .. }))
}

/// Whether the error means that the session is over and that the operation was not carried out.
pub(crate) fn may_retry(error: &KvError) -> bool {
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
    fn a_store_of_any_kind_is_opened_with_one_call() {
        let (pool, options) = (connect("local:").expect("a node in this process"), Options::default());
        for system in family(Family::Kv) {
            let new = NewStore { kind: system.kind.into(), ..NewStore::prism_kv(system.kind, 4 << 20) };
            pool.create_store(&new).expect("the node has enough memory");
            let fabric = Count::new(pool.endpoint_here().expect("the node has capacity for a session"));
            let opened = AnyKv::open(&fabric, 1, system.kind, &options);
            let kv = block_on(fabric.inner(), opened).expect("the store was just created");
            assert_eq!(kv.store().kind, system.kind);
            let costs = fabric.take();
            assert_eq!((costs.round_trips, costs.calls, costs.requests), (1, 1, 0), "{}", system.kind);
            drop(kv);
            drop(fabric);
            pool.drop_store(system.kind).expect("the store exists");
        }
    }
}
