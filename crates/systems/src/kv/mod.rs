//! Key-value stores: maps from byte strings to byte strings.
//!
//! [`prism_kv`] is PRISM-KV. [`pilaf`] is the baseline that its paper compares it with: Pilaf's writes run on the
//! node's CPU. [`farm_kv`] and [`cached_index`] need one READ for a GET. Every key-value system implements [`Kv`], so
//! one benchmark, one checker and one command line serve all of them.

mod any;
pub mod cached_index;
pub mod called;
pub mod chequer;
pub mod client;
mod cursor;
pub mod farm_kv;
mod inplace;
pub mod pilaf;
mod places;
pub mod prism_kv;
pub mod sharded;

pub use any::AnyKv;
pub use cursor::{Cursor, Place};
pub use sharded::Sharded;

use crate::store::StoreError;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, Status};

/// Length of the longest key, in bytes. The shortest key has 1 byte.
pub const KEY_MAX: usize = 4096;
/// Length of the longest value, in bytes.
pub const VALUE_MAX: usize = 16 << 20;

/// Version of a key's item. Grows with every put and delete of the key (31 bits, wrapping).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub u32);

/// A value as it was at one instant between the operation's call and its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Bytes of the value.
    pub value: &'a [u8],
    /// Version of the value.
    pub version: Version,
}

/// Location and version of the value that a client read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Offset of the value's first byte in the reply's output; `None` if the client keeps the value elsewhere.
    pub at: Option<usize>,
    /// Version of the value.
    pub version: Version,
}

/// Outcome of a conditional put that stored nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The key's current version; `None` if the key has no value.
    pub version: Option<Version>,
}

/// Operations of a key-value store. Each operation is linearizable: it takes effect at one instant between its call
/// and its return. If an operation fails and [`KvError::ran`] returns [`Ran::Unknown`], the operation may take effect
/// at one later instant, or never.
///
/// A system that lacks an operation returns [`KvError::Unsupported`].
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Kv {
    /// Returns the kind of the store.
    fn kind(&self) -> &'static str;

    /// Number of nodes among which the keys of the store are divided.
    fn shards(&self) -> usize {
        1
    }

    /// Index of the node that holds `key`, less than [`Kv::shards`].
    fn shard_of(&self, _key: &[u8]) -> usize {
        0
    }

    /// Numbers of events in the operations of this client so far, with their names; sizes have names that end with
    /// `bytes`. Empty if the system counts none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Reads the value of `key`, if it has one. [`Kv::item`] returns the value until the next operation.
    ///
    /// Like [`Kv::get`], but the result does not borrow the client, so that a caller can retry after an error.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError>;

    /// Returns the value that the last operation read. That operation must be the [`Kv::fetch`] that returned
    /// `fetched`.
    fn item(&self, fetched: Fetched) -> Item<'_>;

    /// Returns the value of `key`, if it has one.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.fetch(key).await?;
        Ok(fetched.map(|fetched| self.item(fetched)))
    }

    /// Whether `key` has a value.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        Ok(self.fetch(key).await?.is_some())
    }

    /// Stores a value for `key`. Replaces the old value, if the key has one.
    ///
    /// # Errors
    /// [`KvError`]; [`KvError::ran`] states whether the value may have been stored.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError>;

    /// Deletes `key`. Returns whether the key had a value.
    ///
    /// # Errors
    /// [`KvError`]; [`KvError::ran`] states whether the key may have been deleted.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError>;

    /// Stores a value for `key` if the key has none. Returns whether the value was stored.
    ///
    /// # Errors
    /// [`KvError`]; [`KvError::ran`] states whether the value may have been stored.
    async fn put_if_absent(&mut self, _key: &[u8], _value: &[u8]) -> Result<bool, KvError> {
        Err(self.not_offered(CONDITIONAL_PUTS))
    }

    /// Replaces the value of `key` if the key still has the version that a `get` returned. Returns the new version.
    ///
    /// # Errors
    /// [`KvError`]; [`KvError::ran`] states whether the value may have been stored. If the result is a [`Conflict`],
    /// nothing was stored.
    async fn compare_and_put(
        &mut self,
        _key: &[u8],
        _expected: Version,
        _value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        Err(self.not_offered(CONDITIONAL_PUTS))
    }

    /// Reads the values of several keys, each at a different instant. Calls `visit` once for each index of `keys`, in
    /// any order.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed, and `visit` may have been called for some of the keys.
    async fn get_many(
        &mut self,
        _keys: &[&[u8]],
        _visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        Err(self.not_offered("gets of several keys"))
    }

    /// Stores values for several keys. Each put takes effect on its own. If a key occurs twice, the later value wins.
    ///
    /// # Errors
    /// [`KvError`]. If [`KvError::ran`] returns [`Ran::No`], none of the values was stored. Otherwise any of them may
    /// have been stored.
    async fn put_many(&mut self, _items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        Err(self.not_offered("puts of several keys"))
    }

    /// Returns the cursor at the start of an iteration over all keys, for [`Kv::next`].
    ///
    /// # Errors
    /// [`KvError::Unsupported`].
    fn first(&self) -> Result<Cursor, KvError> {
        Err(self.not_offered(ALL_KEYS))
    }

    /// Visits the next key with its value. Returns false at the end of the iteration.
    ///
    /// The iteration is no snapshot: it visits exactly once each key that is present from the iteration's start to its
    /// end.
    ///
    /// # Errors
    /// [`KvError`]; the cursor does not move.
    async fn next(
        &mut self,
        _cursor: &mut Cursor,
        _visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        Err(self.not_offered(ALL_KEYS))
    }

    /// Returns the error of an operation that the system lacks.
    fn not_offered(&self, what: &'static str) -> KvError {
        KvError::Unsupported { kind: self.kind(), what }
    }
}

const CONDITIONAL_PUTS: &str = "conditional puts";
const ALL_KEYS: &str = "iteration over all keys";

/// Error of a key-value operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvError {
    /// The key has this number of bytes; it must have 1 to [`KEY_MAX`]. No request was sent.
    KeyLength(usize),
    /// The value has this number of bytes, more than [`VALUE_MAX`]. No request was sent.
    ValueLength(usize),
    /// Key and value together are longer than this kind of store supports. No request was sent.
    PairLength {
        /// Bytes of key and value together.
        len: usize,
        /// Largest number of bytes that the store supports.
        max: usize,
    },
    /// No buffer of the item's size class was free for 100 ms. Nothing was stored. Other classes may have free buffers.
    OutOfMemory,
    /// All slots on the key's probe path belong to other keys, and the table does not grow, for the reason given here.
    /// Nothing was stored.
    TableFull(String),
    /// The key's slot is being moved to another table, and the move makes no progress. Nothing was stored.
    NotMoved,
    /// The node refused a chain with this status.
    Refused(Status),
    /// The bytes read are no valid item; the text states the fault. A peer with write access has damaged the store.
    Damaged(&'static str),
    /// Stores of this kind do not support the operation. No request was sent.
    Unsupported {
        /// Kind of the store.
        kind: &'static str,
        /// Name of the operation.
        what: &'static str,
    },
    /// The table was rebuilt during an iteration. The iteration must start again.
    Rebuilt,
    /// The store cannot be opened, or was replaced after the client had opened it. Nothing was stored.
    Store(StoreError),
    /// One of several puts failed with this error. Any of the other puts may have been carried out.
    Several(Box<KvError>),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl KvError {
    /// States whether a put or delete with this error may have been carried out.
    pub fn ran(&self) -> Ran {
        match self {
            KvError::Fabric(error) => error.ran(),
            KvError::Several(_) => Ran::Unknown,
            // A refused chain may have run its first ops. But a store's chains install last, so a refused one installed
            // nothing.
            _ => Ran::No,
        }
    }

    /// Returns the error of an operation whose failed chain only reads or prepares. Whether or not the chain ran, the
    /// operation was not carried out.
    pub(crate) fn of_read(error: FabricError) -> KvError {
        KvError::Fabric(error.map_ran(|_| Ran::No))
    }

    /// Returns the error of an operation whose failed chain installs. Even if the chain ran, its CAS may have failed,
    /// so the outcome is unknown.
    pub(crate) fn of_install(error: FabricError) -> KvError {
        KvError::Fabric(error.map_ran(|ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
    }

    /// Converts the error of one operation in a group of several. The other operations may have been carried out.
    pub(crate) fn of_several(self) -> KvError {
        match self {
            KvError::Fabric(lost @ FabricError::Lost { .. }) => {
                KvError::Fabric(lost.map_ran(|_| Ran::Unknown))
            }
            other => KvError::Several(Box::new(other)),
        }
    }
}

impl From<StoreError> for KvError {
    fn from(error: StoreError) -> KvError {
        match error {
            StoreError::Fabric(error) => KvError::Fabric(error),
            other => KvError::Store(other),
        }
    }
}

impl From<FabricError> for KvError {
    fn from(error: FabricError) -> KvError {
        KvError::Fabric(error)
    }
}

impl std::fmt::Display for KvError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KvError::KeyLength(0) => write!(f, "the key is empty: give it 1 to {KEY_MAX} bytes"),
            KvError::KeyLength(len) => {
                write!(f, "the key has {len} bytes, at most {KEY_MAX} are possible: shorten it")
            }
            KvError::ValueLength(len) => {
                write!(f, "the value has {len} bytes, at most {VALUE_MAX} are possible: split it")
            }
            KvError::PairLength { len, max } => write!(
                f,
                "key and value have {len} bytes together, at most {max} are possible in a store of this kind: split \
                 the value, or use a prism-kv store"
            ),
            KvError::OutOfMemory => f.write_str(
                "the store is out of memory for items of this size and nothing was stored: delete items of about this \
                 size or many others, create a store with a larger --quota, or check with 'farside kv stat' whether \
                 a stopped process delays reclamation",
            ),
            KvError::TableFull(reason) => {
                write!(f, "the store's table is full and nothing was stored: {reason}")
            }
            KvError::NotMoved => f.write_str(
                "the store's table is being rebuilt, and the rebuild makes no progress: nothing was stored; check \
                 whether the node is stopped, then retry",
            ),
            KvError::Rebuilt => f.write_str(
                "the store's table was rebuilt during the iteration: the remaining keys would come twice or never; \
                 start it again",
            ),
            KvError::Refused(status @ Status::Access) => write!(
                f,
                "the node refused the operation ({status}): the store may have been dropped, so open it anew; or the \
                 token lacks a right to it: get needs 'read', put and delete need 'read', 'atomic' and 'allocate'"
            ),
            KvError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): the store may have been dropped; open it anew")
            }
            KvError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            KvError::Unsupported { kind, what } => {
                write!(f, "a {kind} store does not support {what}: use a prism-kv store, which does")
            }
            KvError::Store(StoreError::Gone(reason)) => write!(f, "the store is gone: {reason}"),
            KvError::Store(error) => error.fmt(f),
            KvError::Several(of_one) => {
                write!(f, "some of the keys may have been stored, and one failed: {of_one}")
            }
            KvError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for KvError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            KvError::Fabric(error) => Some(error),
            KvError::Several(of_one) => Some(&**of_one),
            _ => None,
        }
    }
}

/// # Errors
/// The key is empty or too long.
pub(crate) fn check_key(key: &[u8]) -> Result<(), KvError> {
    if key.is_empty() || key.len() > KEY_MAX { Err(KvError::KeyLength(key.len())) } else { Ok(()) }
}
