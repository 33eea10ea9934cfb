//! Ordered indexes: maps from keys to values in far memory, which also return the keys from a given one on, in order.
//!
//! Every index implements [`Index`], so one benchmark, one checker and one command line serve all of them.
//!
//! A store has keys of one kind ([`Keys`]). In both kinds, the order of keys is that of their bytes, and no key that an
//! index stores is a prefix of another: numbers have one length, and an index appends a zero byte to a string, which
//! therefore must not contain one. That byte is smaller than all others, so it keeps the order.

pub mod art;
pub mod mutants;
pub mod sherman;
pub mod smart;

mod place;
mod radix;
mod session;
mod turns;

use crate::lease::LeaseError;
use crate::members;
use crate::registry::{AnyIndex, named};
use crate::store::StoreError;
use crate::system::{Family, Options};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};
use serde::{Deserialize, Serialize};
use std::future::ready;
use std::pin::Pin;

/// Length of a key that is a number, in bytes.
pub const NUMBER_LEN: usize = 8;
/// Length of the longest key that is a string, in bytes. The shortest has 1 byte.
pub const STRING_MAX: usize = 128;

/// Kind of the keys of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keys {
    /// Integers of 64 bits, as 8 bytes in big-endian order.
    #[default]
    Numbers,
    /// Strings of 1 to [`STRING_MAX`] bytes, none of which is zero.
    Strings,
}

impl Keys {
    /// # Errors
    /// [`IndexError`]: no store with such keys can have this one.
    pub fn check(self, key: &[u8]) -> Result<(), IndexError> {
        let is_long_enough = match self {
            Keys::Numbers => key.len() == NUMBER_LEN,
            Keys::Strings => (1..=STRING_MAX).contains(&key.len()),
        };
        if !is_long_enough {
            return Err(IndexError::KeyLength { len: key.len(), keys: self });
        }
        if self == Keys::Strings && key.contains(&0) {
            return Err(IndexError::ZeroByte);
        }
        Ok(())
    }
}

/// What the parameters of every index's store say, whatever its system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Described {
    /// Kind of the keys.
    pub keys: Keys,
    /// Length of the longest value in bytes.
    pub value_max: u32,
}

/// Returns what the catalog says of an index; `None` if the store is no index.
pub fn described(store: &Store) -> Option<Described> {
    let is_index = named(&store.kind).is_some_and(|system| system.family == Family::Index);
    is_index.then(|| serde_json::from_str(&store.parameters).ok()).flatten()
}

/// How the operations of a client on one key share requests, in systems in which it is an option.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Combining {
    /// Gets share a READ, and puts a WRITE, if they begin before it is sent.
    #[default]
    Batches,
    /// Only gets share a READ.
    Reads,
    /// Operations also share a request that was sent before they began, as in the artifact of SMART. Then a get may
    /// return an old value, and a put may be lost.
    Window,
    /// Each operation sends its own requests.
    None,
}

/// How many of its techniques a system uses, in systems in which it is an option: those of all rungs up to this one.
/// For measurements of what each technique brings. All clients of a store use the same ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rung {
    /// A radix tree whose writers lock the node that they add a slot to. An update writes a new leaf.
    Art,
    /// Inner nodes are changed without locks.
    LockFree,
    /// An update writes the old leaf, under a lock that it then frees by a request of its own.
    InPlace,
    /// The WRITE of an update frees the lock.
    EmbeddedLock,
    /// Concurrent gets of a key share a READ.
    ReadDelegation,
    /// Concurrent puts of a key share a WRITE.
    #[default]
    WriteCombining,
}

impl Rung {
    /// All rungs, from the lowest on.
    pub const ALL: [Rung; 6] = [
        Rung::Art,
        Rung::LockFree,
        Rung::InPlace,
        Rung::EmbeddedLock,
        Rung::ReadDelegation,
        Rung::WriteCombining,
    ];

    /// The rung's name, as in a store's parameters.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Art => "art",
            Rung::LockFree => "lock-free",
            Rung::InPlace => "in-place",
            Rung::EmbeddedLock => "embedded-lock",
            Rung::ReadDelegation => "read-delegation",
            Rung::WriteCombining => "write-combining",
        }
    }

    /// How operations share requests, if clients have this option.
    pub(crate) fn combining(self, wanted: Combining) -> Combining {
        match self {
            Rung::WriteCombining => wanted,
            Rung::ReadDelegation if wanted != Combining::None => Combining::Reads,
            _ => Combining::None,
        }
    }

    pub(crate) fn is_highest(&self) -> bool {
        *self == Rung::default()
    }
}

/// Options of a new store. What is absent is chosen by the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Indexing {
    /// Kind of the keys; if absent, numbers if keys have 8 bytes, else strings.
    pub keys: Option<Keys>,
    /// Length in bytes of the longest value that lies beside its key. Longer ones lie apart, where only as much memory
    /// is used as they need, and cost a request more.
    pub inline_max: Option<u32>,
    /// Size in bytes of the pieces in which clients claim memory.
    pub chunk: Option<u32>,
    /// Number of clients that have the store open at the same time.
    pub ids: Option<u16>,
    /// Number of concurrent changes of a client.
    pub lanes: Option<u16>,
    /// Whether each update in place first writes a redo record. Without it, a WRITE must never be cut in the middle:
    /// the memory is lost with each process that executes chains and dies, and no session over a NIC ends in a WRITE.
    pub redo: Option<bool>,
    /// How many of its techniques the system uses; if absent, all.
    pub rung: Option<Rung>,
    /// Number of locks of each member, in systems whose locks lie apart from what they guard.
    pub locks: Option<u32>,
    /// Versions by which a READ shows whether it has met a change, in systems in which they are an option.
    pub versions: Option<Versions>,
}

/// Versions of the parts of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Number of bytes that have a version. The fabric reads and writes them as a whole.
    pub line: u16,
    /// Number of bits of a version.
    pub bits: u8,
}

impl Indexing {
    /// No options: the same as the default, as a constant.
    pub const NONE: Indexing = Indexing {
        keys: None,
        inline_max: None,
        chunk: None,
        ids: None,
        lanes: None,
        redo: None,
        rung: None,
        locks: None,
        versions: None,
    };
}

/// Operations of an index. Each operation except [`Index::scan`] is linearizable: it takes effect at one instant
/// between its call and its return. If an operation fails and [`IndexError::ran`] returns [`Ran::Unknown`], or if its
/// future is dropped, the operation may take effect at one later instant, or never.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Index {
    /// Returns the kind of the store.
    fn kind(&self) -> &'static str;

    /// Kind of the store's keys.
    fn keys(&self) -> Keys;

    /// Length of the longest value in bytes. A value may be empty.
    fn value_max(&self) -> usize;

    /// Returns the value of `key`, if it has one.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError>;

    /// Stores a value for `key`. Replaces the old value, if the key has one.
    ///
    /// # Errors
    /// [`IndexError`]; [`IndexError::ran`] states whether the value may have been stored.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError>;

    /// Stores a value for `key` if the key has none. Returns whether the value was stored.
    ///
    /// # Errors
    /// [`IndexError`]; [`IndexError::ran`] states whether the value may have been stored.
    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError>;

    /// Deletes `key`. Returns whether the key had a value.
    ///
    /// # Errors
    /// [`IndexError`]; [`IndexError::ran`] states whether the key may have been deleted.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError>;

    /// Visits up to `limit` keys with their values: the smallest keys that are not below `from`, in ascending order.
    /// Returns their number, which is less than `limit` only if there are no further keys.
    ///
    /// A scan is no snapshot. Each visited value was current at some instant between the scan's call and its return. No
    /// key is visited twice. A key between `from` and the last visited key (or without an end, if fewer than `limit`
    /// were visited) that was present throughout the scan is visited.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed, and `visit` may have been called for some of the keys.
    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError>;

    /// Returns the client's own task, which all handles of the client share. The program spawns it once, beside the
    /// tasks that use the client, on the same core. It returns after the last handle was dropped. Operations that
    /// change the index are carried out by this task, so that an operation whose future is dropped is finished.
    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        Box::pin(ready(()))
    }

    /// Numbers of the events in the client's operations so far that say how the index changes and how its caches do,
    /// with their names, always in the same order. Empty if the system counts none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// Shape of an index. If other clients change the index meanwhile, the numbers are approximate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of inner nodes of each size: the number of slots of such a node, and of nodes. In ascending order.
    pub nodes: Vec<(u64, u64)>,
    /// Number of their slots in use.
    pub slots: u64,
    /// The leaves, in trees whose leaves have several keys.
    pub leaves: Option<Leaves>,
    /// Number of keys with a value.
    pub keys: u64,
    /// Number of deleted keys whose leaves still have a slot.
    pub dead: u64,
    /// Number of leaves whose locks are held.
    pub locked: u64,
    /// Number of nodes above the deepest leaf.
    pub depth: u64,
    /// Size in bytes of the memory that nodes and leaves take, those that wait for their reuse included.
    pub bytes: u64,
}

/// The leaves of a tree whose leaves have several keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaves {
    /// Number of leaves.
    pub count: u64,
    /// Number of keys that a leaf has room for.
    pub entries: u64,
}

impl Shape {
    /// Share of the slots of all inner nodes that are in use, from 0 to 1; `None` if there are no inner nodes.
    pub fn fill(&self) -> Option<f64> {
        let slots: u64 = self.nodes.iter().map(|(slots, nodes)| slots * nodes).sum();
        (slots > 0).then(|| self.slots as f64 / slots as f64)
    }

    /// Share of the entries of all leaves that have a key, from 0 to 1; `None` if no leaf has several keys.
    pub fn leaf_fill(&self) -> Option<f64> {
        let entries = self.leaves.map_or(0, |leaves| leaves.count * leaves.entries);
        (entries > 0).then(|| self.keys as f64 / entries as f64)
    }

    /// Bytes of memory for each key; `None` if there are no keys.
    pub fn bytes_per_key(&self) -> Option<f64> {
        (self.keys > 0).then(|| self.bytes as f64 / self.keys as f64)
    }
}

impl<F: Fabric + Clock> AnyIndex<F> {
    /// Opens the index called `name`, of any kind, in a pool of `nodes` nodes.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open_in(
        fabric: F,
        nodes: u32,
        name: &str,
        options: &Options,
    ) -> Result<AnyIndex<F>, StoreError> {
        let members = members::open(&fabric, nodes, name).await?;
        AnyIndex::of(fabric, &members, options).await
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> AnyIndex<F> {
        with_index!(self, index -> index.another())
    }

    /// Returns the shape of the index. Reads the whole index.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn shape(&mut self) -> Result<Shape, IndexError> {
        with_index!(self, index => index.shape().await)
    }
}

impl<F: Fabric + Clock> Index for AnyIndex<F> {
    fn kind(&self) -> &'static str {
        with_index!(self, index => index.kind())
    }

    fn keys(&self) -> Keys {
        with_index!(self, index => index.keys())
    }

    fn value_max(&self) -> usize {
        with_index!(self, index => index.value_max())
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError> {
        with_index!(self, index => index.get(key).await)
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        with_index!(self, index => index.put(key, value).await)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        with_index!(self, index => index.put_if_absent(key, value).await)
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        with_index!(self, index => index.delete(key).await)
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        with_index!(self, index => index.scan(from, limit, visit).await)
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        with_index!(self, index => index.keeper())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        with_index!(self, index => index.counters())
    }
}

/// Error of an operation of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// The key has a length that the store's keys do not have. No request was sent.
    KeyLength {
        /// Length of the key in bytes.
        len: usize,
        /// Kind of the store's keys.
        keys: Keys,
    },
    /// The key is a string and contains a zero byte. No request was sent.
    ZeroByte,
    /// The value is longer than `max` bytes. No request was sent.
    ValueLength {
        /// Length of the value in bytes.
        len: usize,
        /// Maximum length of a value in bytes.
        max: usize,
    },
    /// No memory was free for 100 ms. Nothing was stored.
    OutOfMemory,
    /// Other clients have locked or changed the key's item at each attempt. Nothing was changed.
    Busy,
    /// The client's own task ([`Index::keeper`]) does not run, or has ended. Nothing was changed, or the operation was
    /// handed to the task and its outcome is unknown.
    NotKept {
        /// Whether the operation may have been carried out.
        ran: Ran,
    },
    /// The client has lost its lease, or has given it up. Nothing was changed.
    Lost,
    /// A lease was not claimed, renewed or fenced. Nothing was changed.
    Lease(LeaseError),
    /// The node refused a chain with this status.
    Refused {
        /// The status.
        status: Status,
        /// Whether the operation may have been carried out.
        ran: Ran,
    },
    /// The bytes read are not bytes that a client writes; the text states the fault. A peer with write access has
    /// damaged the store. The operation may have been carried out.
    Damaged(&'static str),
    /// A step that follows the change has failed. Whether the change takes effect is unknown.
    Unsettled(Box<IndexError>),
    /// The store cannot be opened, or a member has lost its memory.
    Store(StoreError),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl IndexError {
    /// States whether an operation with this error may have been carried out.
    pub fn ran(&self) -> Ran {
        match self {
            IndexError::Fabric(error) => error.ran(),
            IndexError::Refused { ran, .. } | IndexError::NotKept { ran } => *ran,
            IndexError::Damaged(_) | IndexError::Unsettled(_) => Ran::Unknown,
            _ => Ran::No,
        }
    }

    /// Returns the error of an operation whose failed request only reads or prepares. Whether or not the request ran,
    /// the operation was not carried out.
    pub(crate) fn of_read(error: FabricError) -> IndexError {
        IndexError::Fabric(error.map_ran(|_| Ran::No))
    }
}

impl From<StoreError> for IndexError {
    fn from(error: StoreError) -> IndexError {
        match error {
            StoreError::Fabric(error) => IndexError::Fabric(error),
            other => IndexError::Store(other),
        }
    }
}

impl From<LeaseError> for IndexError {
    fn from(error: LeaseError) -> IndexError {
        match error {
            LeaseError::Fabric(error) => IndexError::of_read(error),
            other => IndexError::Lease(other),
        }
    }
}

impl std::fmt::Display for IndexError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            IndexError::KeyLength { len, keys: Keys::Numbers } => {
                write!(f, "the key has {len} bytes, and the store's keys are numbers of {NUMBER_LEN} bytes")
            }
            IndexError::KeyLength { len, keys: Keys::Strings } => {
                write!(f, "the key has {len} bytes, and the store's keys are strings of 1 to {STRING_MAX} bytes")
            }
            IndexError::ZeroByte => f.write_str(
                "the key contains a zero byte, which strings of an index must not contain: encode the key otherwise",
            ),
            IndexError::ValueLength { len, max } => {
                write!(f, "the value has {len} bytes, and at most {max} are possible in this store: split it")
            }
            IndexError::OutOfMemory => f.write_str(
                "the store is out of memory and nothing was stored: dump it and load it into a store with a larger \
                 --quota; deleted keys make room only in radix trees",
            ),
            IndexError::Busy => f.write_str(
                "other clients have locked or changed the item at each attempt, and nothing was changed: retry",
            ),
            IndexError::NotKept { ran: Ran::No } => f.write_str(
                "the client's own task does not run, and nothing was changed: spawn the index's keeper",
            ),
            IndexError::NotKept { .. } => f.write_str(
                "the client's own task has ended, and the change may or may not have been carried out: open the store \
                 again",
            ),
            IndexError::Lost => f.write_str(
                "this client has lost its lease, or has given it up, and nothing was changed: open the store again",
            ),
            IndexError::Lease(error) => error.fmt(f),
            IndexError::Refused { status, ran } => {
                let outcome = match ran {
                    Ran::No => "nothing was changed",
                    Ran::Yes => "the change was carried out",
                    Ran::Unknown => "the change may or may not have been carried out",
                };
                write!(f, "the node refused the operation ({status}), and {outcome}: open the store again")
            }
            IndexError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            IndexError::Unsettled(error) => {
                write!(f, "the change may or may not have been carried out, since a step after it has failed: {error}")
            }
            IndexError::Store(error) => error.fmt(f),
            IndexError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for IndexError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_another_kind_is_refused() {
        assert_eq!(Keys::Numbers.check(&[0; 8]), Ok(()));
        let short = IndexError::KeyLength { len: 7, keys: Keys::Numbers };
        assert_eq!(Keys::Numbers.check(&[1; 7]), Err(short));
        assert_eq!(Keys::Strings.check(&[1; 128]), Ok(()));
        assert!(Keys::Strings.check(&[1; 129]).is_err() && Keys::Strings.check(&[]).is_err());
        assert_eq!(Keys::Strings.check(b"a\0b"), Err(IndexError::ZeroByte));
    }
}
