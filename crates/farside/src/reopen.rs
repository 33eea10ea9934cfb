//! A store's session, and another in its place when it has ended: what this crate's clients share.
//!
//! Invariant: an operation is tried again only if it is known that it was not carried out, and once.
//! Invariant: a client stays with the store that it has opened; another one of the same name is not taken for it.

use crate::any::AnyKv;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use farside_fabrics::executor::block_on;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_systems::kv::{KvError, fetch_any_store};
use std::rc::Rc;

/// A session with the node, for the calling thread, and a client of the store for each of its tasks.
pub(crate) struct Opened {
    pub(crate) endpoint: Rc<Endpoint>,
    pub(crate) kvs: Vec<AnyKv<Rc<Endpoint>>>,
}

impl Opened {
    /// Opens the store called `name`, for so many tasks. One call, however many there are.
    pub(crate) fn new(pool: &Pool, name: &str, tasks: usize) -> Result<Opened, Error> {
        let endpoint = Rc::new(pool.endpoint()?);
        let store = block_on(&endpoint, fetch_any_store(&endpoint, NodeId(0), name))?;
        let kv = || AnyKv::of(Rc::clone(&endpoint), NodeId(0), store.clone());
        let kvs = (0..tasks).map(|_| kv()).collect::<Result<Vec<_>, KvError>>()?;
        Ok(Opened { endpoint, kvs })
    }

    /// Opens `store` again, which was opened before.
    pub(crate) fn again(pool: &Pool, store: &Store, tasks: usize) -> Result<Opened, Error> {
        // A key is a session's own, and a table may have been rebuilt: neither says which store it is.
        let identity = |store: &Store| (store.id, store.incarnation, store.region, store.kind.clone());
        let opened = Opened::new(pool, &store.name, tasks)?;
        if opened.kvs.iter().any(|kv| identity(kv.store()) != identity(store)) {
            return Err(Error::Kv(KvError::Gone(format!(
                "'{}' is another one by now, which was made since: what this client had stored is lost; open it anew",
                store.name
            ))));
        }
        Ok(opened)
    }
}

/// What an operation answers that was not carried out, as its session is over and there is no other.
pub(crate) fn not_opened(error: &Error) -> KvError {
    match error {
        Error::Kv(gone @ KvError::Gone(_)) => gone.clone(),
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
