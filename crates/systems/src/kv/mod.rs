//! Key-value stores: arbitrary byte strings to arbitrary byte strings.
//!
//! [`prism_kv`] is PRISM-KV, and [`pilaf`] its rival whose writes go by the far CPU. [`Kv`] is what every key-value
//! system here offers, so that one benchmark, one checker and one command line serve all of them.

mod cursor;
pub mod pilaf;
pub mod prism_kv;

pub use cursor::{Cursor, Place};

use crate::registry::AnyKv;
use crate::store::StoreError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};

/// The longest key, in bytes. The shortest has one.
pub const KEY_MAX: usize = 4096;
/// The longest value, in bytes.
pub const VALUE_MAX: usize = 16 << 20;

/// Which install of a key's item one has seen. Grows with every put and delete of the key (31 bits, wrapping).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub u32);

/// A value as it was at one instant between the call and its return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item<'a> {
    /// Its bytes.
    pub value: &'a [u8],
    /// Which install this was.
    pub version: Version,
}

/// Where a client has the value that it read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The first byte of it in the reply's output; nothing if the client has it elsewhere.
    pub at: Option<usize>,
    /// Which install this was.
    pub version: Version,
}

/// Why a conditional put stored nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The version that the key has instead, if it has a value.
    pub version: Option<Version>,
}

/// The operations of a key-value store. Each is linearizable: it takes effect at one instant between call and
/// return, or, after an error for which [`KvError::ran`] is unknown, perhaps at one later instant or never.
///
/// A system that lacks an operation answers [`KvError::NotOffered`].
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Kv {
    /// The kind of the store.
    fn kind(&self) -> &'static str;

    /// Reads the value of `key`, if it has one; [`Kv::item`] has it until the next operation. As [`Kv::get`], for
    /// callers that try again after an error and must not hold the client borrowed.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError>;

    /// The value that the last operation, a [`Kv::fetch`] that answered this, has read.
    fn item(&self, fetched: Fetched) -> Item<'_>;

    /// The value of `key`, if it has one.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.fetch(key).await?;
        Ok(fetched.map(|fetched| self.item(fetched)))
    }

    /// Gives `key` a value, whether it had one or not.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError>;

    /// Takes the value of `key` away; answers whether it had one.
    ///
    /// # Errors
    /// [`KvError`], which says whether it may have been taken away.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError>;

    /// Gives `key` a value if it has none; answers whether it did.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    async fn put_if_absent(&mut self, _key: &[u8], _value: &[u8]) -> Result<bool, KvError> {
        Err(self.not_offered(CONDITIONAL_PUTS))
    }

    /// Gives `key` another value if it still has the version that a `get` answered; answers the new version.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored. A [`Conflict`] stored nothing.
    async fn compare_and_put(
        &mut self,
        _key: &[u8],
        _expected: Version,
        _value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        Err(self.not_offered(CONDITIONAL_PUTS))
    }

    /// The values of several keys, each at an instant of its own: `visit` is called once for each place in `keys`, in
    /// any order.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed, and some places may have been visited.
    async fn get_many(
        &mut self,
        _keys: &[&[u8]],
        _visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        Err(self.not_offered("to get several keys at once"))
    }

    /// Gives several keys values. Each is a put of its own; of a key that comes twice, the later value stays.
    ///
    /// # Errors
    /// [`KvError`]. [`Ran::No`]: none of the keys was stored; else any may have been.
    async fn put_many(&mut self, _items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        Err(self.not_offered("to put several keys at once"))
    }

    /// Where a visit of all keys begins, for [`Kv::next`].
    ///
    /// # Errors
    /// [`KvError::NotOffered`].
    fn first(&self) -> Result<Cursor, KvError> {
        Err(self.not_offered(ALL_KEYS))
    }

    /// Visits the next key with its value; false at the end. No snapshot: a key that is present all the while is
    /// visited exactly once.
    ///
    /// # Errors
    /// [`KvError`]; the cursor stays where it was.
    async fn next(
        &mut self,
        _cursor: &mut Cursor,
        _visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        Err(self.not_offered(ALL_KEYS))
    }

    /// The error of an operation that the system lacks.
    fn not_offered(&self, what: &'static str) -> KvError {
        KvError::NotOffered { kind: self.kind(), what }
    }
}

const CONDITIONAL_PUTS: &str = "conditional puts";
const ALL_KEYS: &str = "a visit of all keys";

impl<F: Fabric + Clock> AnyKv<F> {
    /// The store as the catalog has it.
    pub fn store(&self) -> &Store {
        with_kv!(self, kv => kv.store())
    }
}

impl<F: Fabric + Clock> Kv for AnyKv<F> {
    fn kind(&self) -> &'static str {
        with_kv!(self, kv => kv.kind())
    }

    #[inline]
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        with_kv!(self, kv => kv.fetch(key).await)
    }

    #[inline]
    fn item(&self, fetched: Fetched) -> Item<'_> {
        with_kv!(self, kv => kv.item(fetched))
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        with_kv!(self, kv => kv.get(key).await)
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        with_kv!(self, kv => kv.put(key, value).await)
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        with_kv!(self, kv => kv.delete(key).await)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, KvError> {
        with_kv!(self, kv => kv.put_if_absent(key, value).await)
    }

    async fn compare_and_put(
        &mut self,
        key: &[u8],
        expected: Version,
        value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        with_kv!(self, kv => kv.compare_and_put(key, expected, value).await)
    }

    async fn get_many(
        &mut self,
        keys: &[&[u8]],
        visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        with_kv!(self, kv => kv.get_many(keys, visit).await)
    }

    async fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        with_kv!(self, kv => kv.put_many(items).await)
    }

    fn first(&self) -> Result<Cursor, KvError> {
        with_kv!(self, kv => kv.first())
    }

    async fn next(
        &mut self,
        cursor: &mut Cursor,
        visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        with_kv!(self, kv => kv.next(cursor, visit).await)
    }
}

/// Why an operation has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvError {
    /// A key has 1 to [`KEY_MAX`] bytes; this one has so many. Nothing was asked of anyone.
    KeyLength(usize),
    /// A value has at most [`VALUE_MAX`] bytes; this one has so many. Nothing was asked of anyone.
    ValueLength(usize),
    /// Key and value have so many bytes together, more than this kind of store can have. Nothing was asked of anyone.
    PairLength {
        /// So many.
        len: usize,
        /// The most that are possible.
        max: usize,
    },
    /// No buffer of the item's size class was to be had for a tenth of a second. Nothing was stored; of another size,
    /// there may be some.
    OutOfMemory,
    /// Every slot that the key could have belongs to other keys, and the table does not grow, for this reason. Nothing
    /// was stored.
    TableFull(String),
    /// The key's slot is on its way to another table, and does not arrive. Nothing was stored.
    NotMoved,
    /// A chain was refused.
    Refused(Status),
    /// What was read is no item: a peer that may write to the store has damaged it.
    Damaged(&'static str),
    /// Stores of this kind do not offer the operation. Nothing was asked of anyone.
    NotOffered {
        /// Of which kind the store is.
        kind: &'static str,
        /// The operation.
        what: &'static str,
    },
    /// The table was rebuilt during an iteration, which is to be begun again.
    Rebuilt,
    /// The store cannot be opened, or no longer is what was opened. Nothing was stored.
    Store(StoreError),
    /// This became of one of several keys that were put together. Of the others, any may have been stored.
    Several(Box<KvError>),
    /// The fabric has no answer.
    Fabric(FabricError),
}

impl KvError {
    /// What may be assumed of a put or delete that failed so.
    pub fn ran(&self) -> Ran {
        match self {
            KvError::Fabric(error) => error.ran(),
            KvError::Several(_) => Ran::Unknown,
            // A chain that is refused may have done its first ops; those of a store install with their last.
            _ => Ran::No,
        }
    }

    /// The error of a chain that only looks or prepares: whatever became of it, the operation was not carried out.
    pub(crate) fn of_look(error: FabricError) -> KvError {
        KvError::Fabric(error.map_ran(|_| Ran::No))
    }

    /// The error of a chain that installs: that it ran does not tell whether its CAS found what it expected.
    pub(crate) fn of_install(error: FabricError) -> KvError {
        KvError::Fabric(error.map_ran(|ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
    }

    /// The error of one of several operations, of which others may have been carried out.
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
                "the store is out of memory for items of this size and nothing was stored: delete some of about this \
                 size, or many of others, make a store with a greater --quota, or see by 'farside kv stat' whether a \
                 stopped process delays reclamation",
            ),
            KvError::TableFull(reason) => {
                write!(f, "the store's table is full and nothing was stored: {reason}")
            }
            KvError::NotMoved => f.write_str(
                "the store's table is being rebuilt, and the node does not go on with it: nothing was stored; look \
                 whether the node is stopped, then try again",
            ),
            KvError::Rebuilt => f.write_str(
                "the store's table was rebuilt during the iteration, and what is left of it would come twice or never: \
                 begin it again",
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
            KvError::NotOffered { kind, what } => {
                write!(f, "a {kind} store does not offer {what}: use a prism-kv store, which does")
            }
            KvError::Store(StoreError::Gone(reason)) => write!(f, "the store is gone: {reason}"),
            KvError::Store(error) => error.fmt(f),
            KvError::Several(of_one) => {
                write!(f, "some of the keys may have been stored, and of one it is said: {of_one}")
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
/// If there is no such key.
pub(crate) fn check_key(key: &[u8]) -> Result<(), KvError> {
    if key.is_empty() || key.len() > KEY_MAX { Err(KvError::KeyLength(key.len())) } else { Ok(()) }
}
