//! Key-value stores: arbitrary byte strings to arbitrary byte strings.
//!
//! [`prism_kv`] is PRISM-KV, and [`pilaf`] its rival whose writes go by the far CPU. [`Kv`] is what every key-value
//! system here offers, so that one benchmark, one checker and one command line serve all of them.

pub mod pilaf;
pub mod prism_kv;

use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId, Status};

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

/// The operations of a key-value store. Each is linearizable: it takes effect at one instant between call and
/// return, or, after an error for which [`KvError::ran`] is unknown, perhaps at one later instant or never.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Kv {
    /// The value of `key`, if it has one.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError>;

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
    /// The catalog no longer has the store, or has another under its name. Nothing was stored.
    Gone(String),
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
        KvError::Fabric(said(error, |_| Ran::No))
    }

    /// The error of a chain that installs: that it ran does not tell whether its CAS found what it expected.
    pub(crate) fn of_install(error: FabricError) -> KvError {
        KvError::Fabric(said(error, |ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
    }

    /// The error of one of several operations, of which others may have been carried out.
    pub(crate) fn of_several(self) -> KvError {
        match self {
            KvError::Fabric(lost @ FabricError::Lost { .. }) => KvError::Fabric(said(lost, |_| Ran::Unknown)),
            other => KvError::Several(Box::new(other)),
        }
    }
}

/// What the end of a session says of an operation, where its last chain's fate is known.
fn said(error: FabricError, of_operation: impl FnOnce(Ran) -> Ran) -> FabricError {
    match error {
        FabricError::Lost { node, ran, reason } => FabricError::Lost { node, ran: of_operation(ran), reason },
        other => other,
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
            KvError::Gone(reason) => write!(f, "the store is gone: {reason}"),
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

/// What the catalog of `node` tells of a store that is of this kind. One call.
///
/// # Errors
/// There is none, or it is of another kind; or the node was not reached. Nothing was changed.
pub async fn fetch_store<F: Fabric>(
    fabric: &F,
    node: NodeId,
    name: &str,
    kind: &str,
) -> Result<Store, KvError> {
    let store = fetch_any_store(fabric, node, name).await?;
    check_kind(&store, kind)?;
    Ok(store)
}

/// What the catalog of `node` tells of a store, of whatever kind. One call.
///
/// # Errors
/// There is none, or the node was not reached. Nothing was changed.
pub async fn fetch_any_store<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<Store, KvError> {
    let request = serde_json::to_vec(&Ask::OpenStore { name: name.to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await.map_err(|error| match error {
        FabricError::Refused(reason) => KvError::Gone(reason),
        other => KvError::of_look(other),
    })?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Store(store)) => Ok(store),
        _ => Err(KvError::Gone(format!("the node's answer about store '{name}' is not understood"))),
    }
}

/// # Errors
/// If the store is of another kind.
fn check_kind(store: &Store, kind: &str) -> Result<(), KvError> {
    if store.kind == kind {
        return Ok(());
    }
    Err(KvError::Gone(format!("store '{}' is a {}, not a {kind}: name another", store.name, store.kind)))
}
