//! Transactions on keys and values: reads and writes of several keys, on one node or on several, that take effect
//! together or not at all.
//!
//! Every system of this family implements [`Txn`], so one benchmark, one checker and one command line serve all of
//! them. A client has one lease and one task of its own, and any number of handles. A handle runs one transaction at a
//! time: give each task its own, by [`AnyTxn::another`].

pub mod farm;
pub mod fasst;
mod handle;
pub mod prism_tx;
pub mod retry;
mod session;

use crate::lease::LeaseError;
use crate::members;
use crate::registry::AnyTxn;
use crate::stamps::StampError;
use crate::store::StoreError;
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};
use serde::{Deserialize, Serialize};
use std::pin::Pin;
use std::time::Duration;

/// Length of the longest key, in bytes. The shortest key has 1 byte.
pub const KEY_MAX: usize = 1024;

/// Version of a value, or of its absence: a number that its writer gave it. Versions of a key are in the order of its
/// writes. 0 if the key has never had a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

/// What a transaction reads of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// The value, if the key has one.
    pub value: Option<&'a [u8]>,
    /// Version of the value or of its absence; `None` if the transaction itself has written the key.
    pub version: Option<Version>,
}

/// What transactions have left in a store. If other clients use the store meanwhile, the numbers are approximate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Number of keys that a transaction has prepared or locked, and not settled.
    pub unsettled: u64,
    /// Number of log entries whose transaction is not settled.
    pub open: u64,
    /// Number of copies at backups that differ from their key.
    pub outdated: u64,
}

/// A committed transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Version of all that the transaction has written; `None` if it has written nothing.
    pub version: Option<Version>,
}

/// Number of rounds in which a client validates a transaction, in systems in which it is an option.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prepare {
    /// One: the checks of all reads and writes of a shard together.
    #[default]
    Together,
    /// Two, as in the paper: all reads, then all writes.
    Paper,
}

/// Options of a new store. What is absent is chosen by the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transacting {
    /// Number of clients that have the store open at the same time.
    pub ids: Option<u16>,
    /// Number of transactions of a client that commit, or have locks, at the same time.
    pub lanes: Option<u16>,
    /// Number of bytes that a transaction can write at one member, keys and values together.
    pub writes_max: Option<u32>,
    /// Number of rounds in which transactions are validated.
    pub prepare: Option<Prepare>,
    /// Largest error of the clients' clocks. If present, a commit waits until its timestamp has passed on every clock,
    /// so that transactions are strictly serializable.
    pub clock_error: Option<Duration>,
    /// Number of other members that have copies of a key and of what transactions commit.
    pub backups: Option<u8>,
    /// Size in bytes of the units whose versions show that a read is torn.
    pub line: Option<u8>,
}

impl Transacting {
    /// No options: the same as the default, as a constant.
    pub const NONE: Transacting = Transacting {
        ids: None,
        lanes: None,
        writes_max: None,
        prepare: None,
        clock_error: None,
        backups: None,
        line: None,
    };
}

/// Operations of transactions.
///
/// Committed transactions are serializable. Writes are kept at the client until [`Txn::commit`]. A read returns what
/// the transaction itself has written, and else what its first read of the key has returned. What a transaction reads
/// from several keys may be inconsistent; then its commit fails with [`TxnError::Conflict`].
///
/// # Keys that are read to be written
/// A transaction reads the keys that it is going to write by [`Txn::fetch_to_write`] or [`Txn::get_to_write`]. In
/// systems that can lock a key by the request that reads it, this saves a round trip, and the key does not change
/// before the commit. In all other systems these are plain reads.
///
/// A lock is held until the transaction commits, is rolled back, begins anew, or its handle is dropped: also while the
/// program computes or sleeps. Meanwhile transactions of others that meet the lock fail with [`TxnError::Conflict`]. As
/// long as the client's own task runs and renews the lease, no other client frees the lock, however long that takes. If
/// the task does not run for longer than the lease, others free it, and the commit fails with [`TxnError::Lost`]. So do
/// nothing slow between such a read and the commit.
///
/// A transaction that has locks also has one of the client's lanes. A task that runs two transactions at the same time,
/// on two handles, needs as many lanes: it would wait for its own lane forever.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Txn {
    /// Returns the kind of the store.
    fn kind(&self) -> &'static str;

    /// Length of the longest value in bytes. A value may be empty.
    fn value_max(&self) -> usize;

    /// Length of the clients' leases. A key that a dead client has locked stays locked for at least that time.
    fn lease(&self) -> Duration;

    /// Index of the member that holds a key.
    fn member_of(&self, key: &[u8]) -> usize;

    /// Begins a transaction. Forgets what the handle has read and written since the last commit, and frees what it has
    /// locked.
    fn begin(&mut self);

    /// Reads keys that the transaction has not read yet, at the same time. Later reads of these keys send no request.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and the transaction cannot commit.
    async fn fetch(&mut self, keys: &[&[u8]]) -> Result<(), TxnError>;

    /// Reads keys at the same time, as [`Txn::fetch`] does: those `to_write`, which the transaction is going to write,
    /// and those `to_read`, which it is not. A key that the transaction has read before must still have the same
    /// version.
    ///
    /// If the future is dropped, the transaction cannot commit.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and the transaction cannot commit. [`TxnError::Conflict`] if a key is locked.
    async fn fetch_to_write(&mut self, to_write: &[&[u8]], to_read: &[&[u8]]) -> Result<(), TxnError> {
        self.fetch(&[to_write, to_read].concat()).await
    }

    /// Reads a key.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and the transaction cannot commit.
    async fn read(&mut self, key: &[u8]) -> Result<Read<'_>, TxnError>;

    /// Returns the value of a key, if it has one.
    ///
    /// # Errors
    /// Those of [`Txn::read`].
    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, TxnError> {
        Ok(self.read(key).await?.value)
    }

    /// Returns the value of a key that the transaction is going to write, if it has one.
    ///
    /// # Errors
    /// Those of [`Txn::fetch_to_write`].
    async fn get_to_write(&mut self, key: &[u8]) -> Result<Option<&[u8]>, TxnError> {
        self.fetch_to_write(&[key], &[]).await?;
        self.get(key).await
    }

    /// Stores a value for `key` when the transaction commits.
    ///
    /// # Errors
    /// Key or value are too long; nothing was changed.
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), TxnError>;

    /// Deletes `key` when the transaction commits.
    ///
    /// # Errors
    /// The key is too long; nothing was changed.
    fn delete(&mut self, key: &[u8]) -> Result<(), TxnError>;

    /// Commits the transaction: all that it has read is still current, and all that it has written takes effect at one
    /// instant. The handle is then ready for the next transaction, also after an error.
    ///
    /// If the future is dropped, the client's task commits or aborts the transaction nevertheless.
    ///
    /// # Errors
    /// [`TxnError`]; [`TxnError::ran`] states whether the transaction may have been committed.
    async fn commit(&mut self) -> Result<Committed, TxnError>;

    /// Ends the transaction without a commit, and waits until its locks are free. [`Txn::begin`], and dropping the
    /// handle, do the same without waiting: the client's task frees the locks. So it does if a read of the transaction
    /// has failed before, or its future was dropped. If members do not respond, the client gives up, and other clients
    /// free the locks once its lease has expired.
    async fn roll_back(&mut self) {
        self.begin();
    }

    /// Returns the client's own task, which all handles of the client share. The program spawns it once, beside the
    /// tasks that use the client, on the same core. It returns after the last handle was dropped.
    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f;

    /// Numbers of events in the client's transactions so far, with their names, always in the same order.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// Returns what transactions have left in the store: nothing, once all clients have closed, or were recovered.
    /// Reads the whole table.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    async fn left(&self) -> Result<Left, TxnError>;
}

impl<F: Fabric + Clock> AnyTxn<F> {
    /// Opens the store called `name`, of any kind of this family, in a pool of `nodes` nodes.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open_in(
        fabric: F,
        nodes: u32,
        name: &str,
        options: &Options,
    ) -> Result<AnyTxn<F>, StoreError> {
        let members = members::open(&fabric, nodes, name).await?;
        AnyTxn::of(fabric, &members, options).await
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> AnyTxn<F> {
        with_txn!(self, txn -> txn.another())
    }
}

impl<F: Fabric + Clock> Txn for AnyTxn<F> {
    fn kind(&self) -> &'static str {
        with_txn!(self, txn => txn.kind())
    }

    fn value_max(&self) -> usize {
        with_txn!(self, txn => txn.value_max())
    }

    fn lease(&self) -> Duration {
        with_txn!(self, txn => txn.lease())
    }

    fn member_of(&self, key: &[u8]) -> usize {
        with_txn!(self, txn => txn.member_of(key))
    }

    fn begin(&mut self) {
        with_txn!(self, txn => txn.begin());
    }

    async fn fetch(&mut self, keys: &[&[u8]]) -> Result<(), TxnError> {
        with_txn!(self, txn => txn.fetch(keys).await)
    }

    async fn fetch_to_write(&mut self, to_write: &[&[u8]], to_read: &[&[u8]]) -> Result<(), TxnError> {
        with_txn!(self, txn => txn.fetch_to_write(to_write, to_read).await)
    }

    async fn read(&mut self, key: &[u8]) -> Result<Read<'_>, TxnError> {
        with_txn!(self, txn => txn.read(key).await)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        with_txn!(self, txn => txn.put(key, value))
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), TxnError> {
        with_txn!(self, txn => txn.delete(key))
    }

    async fn commit(&mut self) -> Result<Committed, TxnError> {
        with_txn!(self, txn => txn.commit().await)
    }

    async fn roll_back(&mut self) {
        with_txn!(self, txn => txn.roll_back().await);
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        with_txn!(self, txn => txn.keeper())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        with_txn!(self, txn => txn.counters())
    }

    async fn left(&self) -> Result<Left, TxnError> {
        with_txn!(self, txn => txn.left().await)
    }
}

/// Error of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TxnError {
    /// The key has this number of bytes; it must have 1 to [`KEY_MAX`]. No request was sent.
    KeyLength(usize),
    /// The value is longer than `max` bytes. No request was sent.
    ValueLength {
        /// Length of the value in bytes.
        len: usize,
        /// Maximum length of a value in bytes.
        max: usize,
    },
    /// The key and the value together are longer than `max` bytes. No request was sent.
    PairLength {
        /// Length of the key and the value in bytes.
        len: usize,
        /// Maximum length in bytes.
        max: usize,
    },
    /// The writes at one member are longer than `max` bytes. Nothing was changed.
    WritesLength {
        /// Length of the writes in bytes, with their keys.
        len: usize,
        /// Maximum length in bytes.
        max: usize,
    },
    /// Another transaction was in the way. Nothing was changed, and the transaction may be tried again.
    Conflict,
    /// A read of the transaction has failed before, so that it cannot commit. Nothing was changed.
    Doomed,
    /// No memory was free for 100 ms. Nothing was changed.
    OutOfMemory,
    /// All slots on a key's probe path belong to other keys. Nothing was changed.
    TableFull,
    /// The client's own task ([`Txn::keeper`]) does not run, or has ended. Nothing was changed, or the transaction was
    /// handed to the task and its outcome is unknown.
    NotKept {
        /// Whether the transaction may have been committed.
        ran: Ran,
    },
    /// The client has lost its lease, or has given it up. Nothing was changed.
    Lost,
    /// The transaction may have been committed, or may yet be: a request of its commit has failed. Other clients
    /// complete or abort it.
    Unknown(Box<TxnError>),
    /// A lease was not claimed, renewed or fenced. Nothing was changed.
    Lease(LeaseError),
    /// The client has no timestamp for the transaction. Nothing was changed.
    Stamp(StampError),
    /// The store is so old that there are no more timestamps. Nothing was changed.
    TooOld,
    /// The node refused a chain with this status. Nothing was changed.
    Refused(Status),
    /// The bytes read are not bytes that a client writes; the text states the fault. A peer with write access has
    /// damaged the store.
    Damaged(&'static str),
    /// The store cannot be opened, or a member has lost its memory. Nothing was changed.
    Store(StoreError),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl TxnError {
    /// States whether a transaction with this error may have been committed.
    pub fn ran(&self) -> Ran {
        match self {
            TxnError::Fabric(error) => error.ran(),
            TxnError::NotKept { ran } => *ran,
            TxnError::Unknown(_) => Ran::Unknown,
            _ => Ran::No,
        }
    }

    /// Returns the error of a transaction whose failed request only reads or prepares: it was not committed, and never
    /// will be.
    pub(crate) fn of_read(error: FabricError) -> TxnError {
        let ran = error.ran();
        match error {
            FabricError::Lost { .. } => TxnError::Fabric(error.map_ran(|_| Ran::No)),
            FabricError::Deadline { node, .. } | FabricError::Broken { node, .. } => {
                let reason = error.to_string();
                TxnError::Fabric(FabricError::Lost { node, ran: Ran::No, reason })
            }
            _ if ran == Ran::No => TxnError::Fabric(error),
            _ => TxnError::Fabric(FabricError::Refused(error.to_string())),
        }
    }
}

impl From<StoreError> for TxnError {
    fn from(error: StoreError) -> TxnError {
        match error {
            StoreError::Fabric(error) => TxnError::of_read(error),
            other => TxnError::Store(other),
        }
    }
}

impl From<TxnError> for StoreError {
    /// Returns the error of a store that was not opened or healed.
    fn from(error: TxnError) -> StoreError {
        match error {
            TxnError::Fabric(error) => StoreError::Fabric(error),
            TxnError::Store(error) => error,
            error => StoreError::Gone(format!("the store was not opened: {error}")),
        }
    }
}

impl From<LeaseError> for TxnError {
    fn from(error: LeaseError) -> TxnError {
        match error {
            LeaseError::Fabric(error) => TxnError::of_read(error),
            other => TxnError::Lease(other),
        }
    }
}

impl From<StampError> for TxnError {
    fn from(error: StampError) -> TxnError {
        match error {
            StampError::Lease(error) => error.into(),
            ahead @ StampError::Ahead { .. } => TxnError::Stamp(ahead),
        }
    }
}

impl std::fmt::Display for TxnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TxnError::KeyLength(0) => write!(f, "the key is empty: give it 1 to {KEY_MAX} bytes"),
            TxnError::KeyLength(len) => {
                write!(f, "the key has {len} bytes, at most {KEY_MAX} are possible: shorten it")
            }
            TxnError::ValueLength { len, max } => {
                write!(f, "the value has {len} bytes, and at most {max} are possible in this store: split it")
            }
            TxnError::PairLength { len, max } => write!(
                f,
                "the key and the value have {len} bytes, and at most {max} are possible in this store: shorten the \
                 key, split the value, or create a store with a larger --value-size"
            ),
            TxnError::WritesLength { len, max } => write!(
                f,
                "the transaction writes {len} bytes at one member, at most {max} are possible in this store, and \
                 nothing was changed: split the transaction, or create a store with a larger --value-size"
            ),
            TxnError::Conflict => {
                f.write_str("another transaction was in the way, and nothing was changed: try the transaction again")
            }
            TxnError::Doomed => f.write_str(
                "a read of this transaction has failed, so it cannot commit, and nothing was changed: begin it again",
            ),
            TxnError::OutOfMemory => f.write_str(
                "the store is out of memory for the transaction, and nothing was changed: delete keys, or create a \
                 store with a larger --quota",
            ),
            TxnError::TableFull => f.write_str(
                "all slots for the key belong to other keys, and nothing was changed: create a store for more items, \
                 and copy this store's data into it",
            ),
            TxnError::NotKept { ran: Ran::No } => f.write_str(
                "the client's own task does not run, and nothing was changed: spawn the client's keeper",
            ),
            TxnError::NotKept { .. } => f.write_str(
                "the client's own task has ended, and the transaction may or may not have been committed: open the \
                 store again",
            ),
            TxnError::Lost => f.write_str(
                "this client has lost its lease, or has given it up, and nothing was changed: open the store again",
            ),
            TxnError::Unknown(error) => write!(
                f,
                "the transaction may or may not have been committed, and other clients complete or abort it: open the \
                 store again, and read what the transaction has written ({error})"
            ),
            TxnError::Lease(error) => error.fmt(f),
            TxnError::Stamp(error) => error.fmt(f),
            TxnError::TooOld => f.write_str(
                "the store has no more timestamps after 8.9 years, and nothing was changed: copy its data to a new \
                 store",
            ),
            TxnError::Refused(status) => write!(
                f,
                "the node refused the transaction ({status}), and nothing was changed: open the store again"
            ),
            TxnError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            TxnError::Store(error) => error.fmt(f),
            TxnError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TxnError {}
