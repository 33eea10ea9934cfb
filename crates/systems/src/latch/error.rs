//! The errors of operations on objects.

use crate::lease::LeaseError;
use crate::redo::RedoError;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId, Status};

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LatchError {
    /// The object was latched, or changed under each read, for as long as [`Options::patience`] says (5 s unless it is
    /// set). Nothing was changed.
    ///
    /// [`Options::patience`]: crate::system::Options::patience
    Busy,
    /// The store has no object with this number.
    NoSuchObject {
        /// The number.
        object: u64,
        /// Number of objects of the store.
        objects: u64,
    },
    /// The buffer of a read has another length than the content of an object. The field has the length of the latter.
    Length(u32),
    /// The node refused a request with this status. The latch may be held.
    Refused(Status),
    /// The client's lease failed. Nothing was changed.
    Lease(LeaseError),
    /// A redo record failed. Nothing was changed.
    Redo(RedoError),
    /// The store holds bytes that no client writes.
    Damaged(&'static str),
    /// The client has lost its lease, or has given it up since it may hold a latch. Nothing was changed.
    Lost,
    /// Other handles have all lanes of the client. Nothing was changed.
    NoLane,
    /// The fabric returned no response. The latch may be held, also if nothing was changed.
    Fabric(FabricError),
}

impl LatchError {
    /// States whether the operation with this error may have changed the object.
    pub fn ran(&self) -> Ran {
        match self {
            LatchError::Fabric(error) => error.ran(),
            // It may be about the release, after the WRITE.
            LatchError::Refused(_) | LatchError::Damaged(_) => Ran::Unknown,
            _ => Ran::No,
        }
    }

    /// The error of an operation whose WRITE has been carried out, and whose release failed with this error.
    pub(super) fn after_write(self, node: NodeId) -> LatchError {
        match self {
            LatchError::Fabric(error @ FabricError::Lost { .. }) => {
                LatchError::Fabric(error.map_ran(|_of_release| Ran::Yes))
            }
            LatchError::Fabric(error) if error.ran() == Ran::No => {
                LatchError::Fabric(FabricError::Lost { node, ran: Ran::Yes, reason: error.to_string() })
            }
            other => other,
        }
    }
}

impl From<FabricError> for LatchError {
    fn from(error: FabricError) -> LatchError {
        LatchError::Fabric(error)
    }
}

impl std::fmt::Display for LatchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LatchError::Busy => f.write_str(
                "the object was latched for too long, and nothing was changed: retry; if it persists, a client may \
                 have died with the latch, so create the store anew",
            ),
            LatchError::NoSuchObject { object, objects } => {
                write!(f, "there is no object {object}: the store has {objects}")
            }
            LatchError::Length(len) => write!(f, "the buffer must have {len} bytes, as the store's objects have"),
            LatchError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): open the store again")
            }
            LatchError::Lease(error) => error.fmt(f),
            LatchError::Redo(error) => error.fmt(f),
            LatchError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            LatchError::Lost => f.write_str(
                "this client has lost the lease of its latches, and nothing was changed: open the store again",
            ),
            LatchError::NoLane => f.write_str(
                "the client has more handles than the store has lanes for, and nothing was changed: drop other \
                 handles, or create the store with more lanes",
            ),
            LatchError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LatchError {}
