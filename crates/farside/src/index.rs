//! A client of one index, for one thread: keys in order, and scans.
//!
//! Each call runs its operation on the caller's thread and returns when the operation is done. A client holds a lease,
//! which its own task renews while a call runs. Between calls nothing renews it, so it expires after some seconds of
//! silence. The next operation then opens the store again.
//!
//! Invariant: an operation is repeated at most once, and only if the error shows that it was not carried out.
//! Invariant: a client never switches to another store of the same name.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::keeper::Keepers;
use crate::pool::Pool;
use farside_fabrics::executor::block_on;
use farside_remote::FabricError;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_systems::index::{Index as _, IndexError, Keys};
pub use farside_systems::index::{Leaves, Shape};
use farside_systems::lease::LeaseError;
use farside_systems::members;
use farside_systems::registry::AnyIndex;
use farside_systems::store::StoreError;
use farside_systems::system::Options;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A key with its value.
pub type Pair = (Vec<u8>, Vec<u8>);

type LocalIndex = AnyIndex<Rc<Endpoint>>;

/// Number of puts of [`Index::put_all`] in flight.
const IN_FLIGHT: usize = 16;
/// Time that the client of a closed index may take to end.
const END_MAX: Duration = Duration::from_secs(1);

/// A client of one index.
pub struct Index {
    pool: Pool,
    store: Store,
    opened: Opened,
}

/// Sessions with all nodes, and the handles of one client.
struct Opened {
    endpoint: Rc<Endpoint>,
    /// Never empty.
    handles: Vec<LocalIndex>,
    keepers: Keepers,
}

impl Index {
    /// Opens the index called `name`.
    ///
    /// # Errors
    /// Nothing was changed. The store does not exist or is no index, the token has no rights to it, the nodes cannot be
    /// reached, or too many clients have the store open.
    pub fn open(pool: &Pool, name: &str) -> Result<Index, Error> {
        let (opened, store) = Opened::new(pool, name)?;
        Ok(Index { pool: pool.clone(), store, opened })
    }

    /// Entry of the store in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Kind of the store's keys.
    pub fn keys(&self) -> Keys {
        self.opened.handles[0].keys()
    }

    /// Length of the longest value in bytes.
    pub fn value_max(&self) -> usize {
        self.opened.handles[0].value_max()
    }

    /// Returns the value of `key`, if it has one.
    ///
    /// # Errors
    /// [`Error::Index`]; nothing was changed.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        self.run(async |index| Ok(index.get(key).await?.map(<[u8]>::to_vec)))
    }

    /// Stores `value` under `key`, whether or not the key has a value.
    ///
    /// # Errors
    /// [`Error::Index`]; [`Error::ran`] tells whether the value may have been stored.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.run(async |index| index.put(key, value).await)
    }

    /// Stores many values under different keys, in any order.
    ///
    /// # Errors
    /// [`Error::Index`]; any of the values may have been stored.
    pub fn put_all(&mut self, items: &[(Vec<u8>, Vec<u8>)]) -> Result<(), Error> {
        let Opened { endpoint, handles, keepers } = &mut self.opened;
        while handles.len() < IN_FLIGHT.min(items.len()) {
            handles.push(handles[0].another());
        }
        let (next, failed) = (Cell::new(0), RefCell::new(None));
        let tasks = handles.iter_mut().map(|index| {
            let (next, failed) = (&next, &failed);
            async move {
                while let Some((key, value)) = items.get(next.replace(next.get() + 1)) {
                    if failed.borrow().is_some() {
                        break;
                    }
                    if let Err(error) = index.put(key, value).await {
                        failed.borrow_mut().get_or_insert(error);
                    }
                }
            }
        });
        keepers.run_beside(endpoint, tasks);
        failed.into_inner().map_or(Ok(()), |error| Err(Error::Index(error)))
    }

    /// Deletes `key`. Returns whether the key had a value.
    ///
    /// # Errors
    /// [`Error::Index`]; [`Error::ran`] tells whether the key may have been deleted.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, Error> {
        self.run(async |index| index.delete(key).await)
    }

    /// Returns up to `limit` keys with their values: the smallest keys that are not below `from`, in ascending order.
    /// There are fewer only if there are no further keys. The scan is no snapshot.
    ///
    /// # Errors
    /// [`Error::Index`]; nothing was changed.
    pub fn scan(&mut self, from: &[u8], limit: usize) -> Result<Vec<Pair>, Error> {
        self.run(async |index| {
            let mut found = Vec::new();
            let visit = |key: &[u8], value: &[u8]| found.push((key.to_vec(), value.to_vec()));
            index.scan(from, limit, visit).await?;
            Ok(found)
        })
    }

    /// Returns the shape of the index. Reads the whole index.
    ///
    /// # Errors
    /// [`Error::Index`]; nothing was changed.
    pub fn shape(&mut self) -> Result<Shape, Error> {
        self.run(async |index| index.shape().await)
    }

    /// Numbers of the events in this client's operations so far, with their names.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.opened.handles[0].counters()
    }

    /// Runs an operation. If the session or the lease is over and the operation was not carried out, opens the store
    /// again and runs the operation once more.
    fn run<O>(
        &mut self,
        operation: impl AsyncFn(&mut LocalIndex) -> Result<O, IndexError>,
    ) -> Result<O, Error> {
        match self.opened.run(&operation) {
            Err(error) if is_over(&error) => {
                self.reopen()?;
                Ok(self.opened.run(&operation)?)
            }
            done => Ok(done?),
        }
    }

    #[cold]
    fn reopen(&mut self) -> Result<(), Error> {
        let (opened, store) = Opened::new(&self.pool, &self.store.name)?;
        if !store.is(&self.store) {
            return Err(StoreError::another(&self.store).into());
        }
        self.opened = opened;
        Ok(())
    }
}

impl Opened {
    fn new(pool: &Pool, name: &str) -> Result<(Opened, Store), Error> {
        let endpoint = Rc::new(pool.endpoint_over_all()?);
        let entropy = getrandom::u64().expect("the system has random bytes: nonces must not be guessed");
        let options = Options { entropy, ..Options::NONE };
        let (store, index) = block_on(&endpoint, async {
            let members = members::open(&endpoint, endpoint.nodes(), name).await?;
            let index = AnyIndex::of(Rc::clone(&endpoint), &members, &options).await?;
            Ok::<_, StoreError>((members.store().clone(), index))
        })?;
        let keepers = Keepers::of_tasks([index.keeper()]);
        Ok((Opened { endpoint, handles: vec![index], keepers }, store))
    }

    fn run<O>(
        &mut self,
        operation: impl AsyncFn(&mut LocalIndex) -> Result<O, IndexError>,
    ) -> Result<O, IndexError> {
        let Opened { endpoint, handles, keepers } = self;
        block_on(&*endpoint, keepers.beside(operation(&mut handles[0])))
    }
}

/// Lets the client's own task end, which gives its lease back.
impl Drop for Opened {
    fn drop(&mut self) {
        self.handles.clear();
        block_on(&self.endpoint, std::mem::take(&mut self.keepers).end_within(END_MAX));
    }
}

/// Whether the error means that the session or the lease is over, and that the operation was not carried out.
fn is_over(error: &IndexError) -> bool {
    let is_over = matches!(
        error,
        IndexError::Lost
            | IndexError::Lease(LeaseError::Lost)
            | IndexError::NotKept { .. }
            | IndexError::Fabric(FabricError::Lost { .. })
    );
    is_over && error.ran() == Ran::No
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("store", &self.store.name).finish_non_exhaustive()
    }
}
