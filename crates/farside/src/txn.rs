//! A client of one transactional store, for one thread: reads and writes of several keys that take effect together.
//!
//! Each call runs on the caller's thread and returns when it is done. A client holds a lease, which its own task renews
//! while a call runs. Between calls nothing renews it. If it has expired and other clients have taken this one for
//! dead, the next transaction opens the store again.
//!
//! Invariant: a transaction is repeated only if it has not been committed and never will be.
//! Invariant: a client never switches to another store of the same name.

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::keeper::Keepers;
use crate::pool::Pool;
use farside_fabrics::executor::block_on;
use farside_remote::FabricError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_systems::lease::LeaseError;
use farside_systems::members;
use farside_systems::registry::AnyTxn;
use farside_systems::store::StoreError;
use farside_systems::system::Options;
use farside_systems::txn::retry::{Attempts, Retry};
use farside_systems::txn::{Txn as _, TxnError};
use std::rc::Rc;
use std::time::Duration;

type LocalTxn = AnyTxn<Rc<Endpoint>>;

/// Time that the client of a closed store may take to end.
const END_MAX: Duration = Duration::from_secs(1);

/// A client of one transactional store.
///
/// ```no_run
/// # fn main() -> Result<(), farside::Error> {
/// let mut bank = farside::Txn::open(&farside::connect("shm:/run/farside.sock")?, "bank")?;
/// bank.run(|transaction| {
///     let visits = transaction.get_to_write(b"visits")?.map_or(0, |bytes| bytes[0]);
///     transaction.put(b"visits", &[visits + 1])
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Txn {
    pool: Pool,
    store: Store,
    opened: Opened,
    /// Whether the store must be opened again before the next transaction.
    is_over: bool,
    draws: Draws,
}

/// Sessions with all nodes, and a client.
struct Opened {
    endpoint: Rc<Endpoint>,
    /// `None` while the client is being closed.
    handle: Option<LocalTxn>,
    keepers: Keepers,
}

/// A transaction in progress. It has no effect unless [`Transaction::commit`] succeeds. Otherwise it is rolled back
/// when it is dropped.
pub struct Transaction<'c> {
    client: &'c mut Txn,
    /// Whether it was committed, or its commit has failed.
    has_ended: bool,
}

impl Txn {
    /// Opens the transactional store called `name`.
    ///
    /// # Errors
    /// No key was changed. The store does not exist or is of another family, the token has no rights to it, the nodes
    /// cannot be reached, or too many clients have the store open.
    pub fn open(pool: &Pool, name: &str) -> Result<Txn, Error> {
        let (opened, store) = Opened::new(pool, name)?;
        let seed = getrandom::u64().expect("the system has random bytes: nonces must not be guessed");
        Ok(Txn { pool: pool.clone(), store, opened, is_over: false, draws: Draws(seed) })
    }

    /// Entry of the store in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Length of the longest value in bytes.
    pub fn value_max(&self) -> usize {
        self.opened.handle().value_max()
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// Nothing was changed. The session or the lease was over, and the store could not be opened again.
    pub fn begin(&mut self) -> Result<Transaction<'_>, Error> {
        if self.is_over {
            self.reopen()?;
        }
        self.opened.handle_mut().begin();
        Ok(Transaction { client: self, has_ended: false })
    }

    /// Runs a transaction until it commits: begins it, calls `body`, and commits. If another transaction was in the
    /// way, pauses and tries again, for up to 2 seconds and 6 leases: 5 seconds, if the store's creator gives leases no
    /// other length. This is longer than the keys of a dead client stay locked. Returns the output of the `body` that
    /// was committed.
    ///
    /// # Errors
    /// [`Error::Txn`] with [`TxnError::Conflict`] after the last attempt, or the first other error. [`Error::ran`]
    /// tells whether the transaction may have been committed.
    pub fn run<O>(&mut self, body: impl FnMut(&mut Transaction<'_>) -> Result<O, Error>) -> Result<O, Error> {
        self.run_within(None, body).map(|(output, _)| output)
    }

    /// Does the same as [`Txn::run`]; with at most this number of attempts, if one is given, however long they take.
    /// Returns also the number of attempts.
    ///
    /// # Errors
    /// Those of [`Txn::run`].
    pub fn run_within<O>(
        &mut self,
        attempts: Option<u32>,
        mut body: impl FnMut(&mut Transaction<'_>) -> Result<O, Error>,
    ) -> Result<(O, u32), Error> {
        let attempts = match attempts {
            None => Attempts::outlasting(self.opened.handle().lease()),
            Some(most) => Attempts { most, ..Attempts::UNLIMITED },
        };
        let mut retry = Retry::new(attempts, self.opened.endpoint.now());
        loop {
            let mut transaction = self.begin()?;
            let done = body(&mut transaction).and_then(|output| transaction.commit().map(|()| output));
            let pause = match done {
                Err(conflict @ Error::Txn(TxnError::Conflict)) => {
                    retry.pause(self.opened.endpoint.now(), &mut self.draws).ok_or(conflict)?
                }
                done => return done.map(|output| (output, retry.made())),
            };
            let Opened { endpoint, keepers, .. } = &mut self.opened;
            block_on(&**endpoint, keepers.beside(endpoint.sleep(pause)));
        }
    }

    /// Numbers of the events in this client's transactions so far, with their names.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.opened.handle().counters()
    }

    fn call<O>(
        &mut self,
        operation: impl AsyncFnOnce(&mut LocalTxn) -> Result<O, TxnError>,
    ) -> Result<O, Error> {
        let done = self.opened.run(operation);
        self.is_over |= done.as_ref().is_err_and(is_over);
        done.map_err(Error::Txn)
    }

    #[cold]
    fn reopen(&mut self) -> Result<(), Error> {
        let (opened, store) = Opened::new(&self.pool, &self.store.name)?;
        if !store.is(&self.store) {
            return Err(StoreError::another(&self.store).into());
        }
        (self.opened, self.is_over) = (opened, false);
        Ok(())
    }
}

impl Transaction<'_> {
    /// Returns the value of `key`, if it has one: the value that the transaction itself has written, or else the one
    /// that its first read of the key has found.
    ///
    /// # Errors
    /// [`Error::Txn`]; nothing was changed, and the transaction cannot commit.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        self.client.call(async |txn| Ok(txn.get(key).await?.map(<[u8]>::to_vec)))
    }

    /// Returns the values of several keys, which it reads at the same time.
    ///
    /// # Errors
    /// [`Error::Txn`]; nothing was changed, and the transaction cannot commit.
    pub fn get_many(&mut self, keys: &[&[u8]]) -> Result<Vec<Option<Vec<u8>>>, Error> {
        self.client.call(async |txn| {
            txn.fetch(keys).await?;
            let mut values = Vec::with_capacity(keys.len());
            for key in keys {
                values.push(txn.get(key).await?.map(<[u8]>::to_vec));
            }
            Ok(values)
        })
    }

    /// Returns the value of a key that the transaction is going to write, as [`Transaction::get`] does. In a store that
    /// can lock a key by the request that reads it, this saves a round trip.
    ///
    /// Such a key is locked until the transaction commits or is dropped: transactions of others that meet the lock are
    /// tried again. Nothing renews the client's lease while the program computes. If that takes longer than the lease,
    /// others may free the lock, and the commit fails with [`TxnError::Lost`]. So do nothing slow before the commit.
    ///
    /// # Errors
    /// Those of [`Transaction::get`].
    pub fn get_to_write(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        self.client.call(async |txn| Ok(txn.get_to_write(key).await?.map(<[u8]>::to_vec)))
    }

    /// Reads keys at the same time: those `to_write`, as [`Transaction::get_to_write`] does, and those `to_read`. Gets
    /// of these keys send no request then.
    ///
    /// # Errors
    /// Those of [`Transaction::get`].
    pub fn fetch_to_write(&mut self, to_write: &[&[u8]], to_read: &[&[u8]]) -> Result<(), Error> {
        self.client.call(async |txn| txn.fetch_to_write(to_write, to_read).await)
    }

    /// Stores `value` under `key` when the transaction commits. Sends no request.
    ///
    /// # Errors
    /// [`Error::Txn`]: key or value are too long.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.client.opened.handle_mut().put(key, value).map_err(Error::Txn)
    }

    /// Deletes `key` when the transaction commits. Sends no request.
    ///
    /// # Errors
    /// [`Error::Txn`]: the key is too long.
    pub fn delete(&mut self, key: &[u8]) -> Result<(), Error> {
        self.client.opened.handle_mut().delete(key).map_err(Error::Txn)
    }

    /// Commits the transaction.
    ///
    /// # Errors
    /// [`Error::Txn`]; [`Error::ran`] tells whether the transaction may have been committed.
    pub fn commit(mut self) -> Result<(), Error> {
        self.has_ended = true;
        self.client.call(async |txn| txn.commit().await.map(drop))
    }
}

/// Frees what a transaction has locked that was not committed.
impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.client.opened.run(async |txn| txn.roll_back().await);
        }
    }
}

impl Opened {
    fn new(pool: &Pool, name: &str) -> Result<(Opened, Store), Error> {
        let endpoint = Rc::new(pool.endpoint_over_all()?);
        let entropy = getrandom::u64().expect("the system has random bytes: nonces must not be guessed");
        let options = Options { entropy, ..Options::NONE };
        let (store, handle) = block_on(&endpoint, async {
            let members = members::open(&endpoint, endpoint.nodes(), name).await?;
            let handle = AnyTxn::of(Rc::clone(&endpoint), &members, &options).await?;
            Ok::<_, StoreError>((members.store().clone(), handle))
        })?;
        let keepers = Keepers::of_tasks([handle.keeper()]);
        Ok((Opened { endpoint, handle: Some(handle), keepers }, store))
    }

    fn handle(&self) -> &LocalTxn {
        self.handle.as_ref().expect("it is taken when the client is dropped")
    }

    fn handle_mut(&mut self) -> &mut LocalTxn {
        self.handle.as_mut().expect("it is taken when the client is dropped")
    }

    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut LocalTxn) -> O) -> O {
        let Opened { endpoint, handle, keepers } = self;
        let handle = handle.as_mut().expect("it is taken when the client is dropped");
        block_on(&**endpoint, keepers.beside(operation(handle)))
    }
}

/// Lets the client's own task end, which gives its lease back.
impl Drop for Opened {
    fn drop(&mut self) {
        self.handle.take();
        block_on(&self.endpoint, std::mem::take(&mut self.keepers).end_within(END_MAX));
    }
}

/// Whether the error means that the session or the lease is over.
fn is_over(error: &TxnError) -> bool {
    match error {
        TxnError::Lost
        | TxnError::Lease(LeaseError::Lost)
        | TxnError::NotKept { .. }
        | TxnError::Fabric(FabricError::Lost { .. })
        | TxnError::Unknown(_) => true,
        TxnError::Fabric(error) => error.is_fenced(),
        _ => false,
    }
}

impl std::fmt::Debug for Txn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Txn").field("store", &self.store.name).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Transaction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transaction").field("store", &self.client.store.name).finish_non_exhaustive()
    }
}
