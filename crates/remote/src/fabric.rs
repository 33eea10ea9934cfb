//! What a protocol sees of whatever carries its chains.
//!
//! Invariant: a chain runs at most once, and the error of one that was not answered says what may be assumed.

use crate::address::{Addr, NodeId};
use crate::capability::Capabilities;
use crate::chain::Chain;
use crate::key::Key;
use crate::reply::Reply;
use std::rc::Rc;
use std::time::Duration;

/// A service at a node that calls can be made to: the node's own, or that of the store whose region has this number.
/// See [`crate::service::address`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceId(pub u32);

impl ServiceId {
    /// The node itself: its catalog. See [`crate::control`].
    pub const NODE: ServiceId = ServiceId(0);
}

/// The most bytes of a call's request or answer.
pub const CALL_BYTES_MAX: usize = 60 * 1024;

/// How long a call or any other wait may take unless told otherwise.
pub const DEADLINE: Duration = Duration::from_secs(1);

/// Carries chains and calls to memory nodes. Endpoints belong to one thread; nothing here is `Send`.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Fabric {
    /// Has `node` run the chain, and puts what came of it into `reply`.
    ///
    /// If the future is dropped, the chain may still run, once, until the session ends. Before a chain can run, the
    /// fabric calls [`Chain::note_posted`]; if nobody hears the answer, it gives back [`Chain::held`] unless they
    /// were shown, and [`crate::ChainView::untold`].
    ///
    /// # Errors
    /// There is no reply; what may be assumed is [`FabricError::ran`]. `reply` holds nothing of use.
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError>;

    /// Asks the CPU at `node`: the two-sided way. The answer's bytes replace what `answer` held.
    ///
    /// # Errors
    /// As [`Fabric::run`]; also [`FabricError::Refused`] with the service's reason.
    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError>;

    /// Gives back a buffer that this session has allocated and never shown to anybody: for `Drop`, which cannot wait
    /// for a chain. Everything else is retired by the chain that makes it unreachable. Never waits. What is not a live
    /// buffer of the key's region and this session's own is left alone.
    fn retire(&self, node: NodeId, key: Key, buffer: Addr);

    /// What it can have `node` do.
    fn capabilities(&self, node: NodeId) -> Capabilities;
}

/// A reference, of whatever kind, to a fabric is that fabric.
macro_rules! fabric_by_reference {
    ($reference:ty) => {
        impl<F: Fabric + ?Sized> Fabric for $reference {
            // The inner future as it is: one around it would be polled for nothing.
            #[inline]
            fn run(
                &self,
                node: NodeId,
                chain: &Chain<'_>,
                reply: &mut Reply,
            ) -> impl Future<Output = Result<(), FabricError>> {
                (**self).run(node, chain, reply)
            }
            fn call(
                &self,
                node: NodeId,
                service: ServiceId,
                request: &[u8],
                answer: &mut Vec<u8>,
            ) -> impl Future<Output = Result<(), FabricError>> {
                (**self).call(node, service, request, answer)
            }
            fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
                (**self).retire(node, key, buffer);
            }
            fn capabilities(&self, node: NodeId) -> Capabilities {
                (**self).capabilities(node)
            }
        }
    };
}

fabric_by_reference!(&F);
fabric_by_reference!(Rc<F>);

/// Whether an operation that got no answer was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It was not, and never will be.
    No,
    /// It was, and what came of it is lost.
    Yes,
    /// It may have been, or may yet be. Be safe under both.
    Unknown,
}

/// Why there is no answer. Says what failed, what may be assumed now, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FabricError {
    /// The node's process has ended. Chains that were answered before that ran; this one did not.
    NodeDied(NodeId),
    /// No answer came in time. A call may have been carried out, or may yet be.
    Deadline {
        /// Of whom it was asked.
        node: NodeId,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The connection broke. What was asked may have been carried out.
    Broken {
        /// To whom.
        node: NodeId,
        /// What the system said.
        reason: String,
    },
    /// The session with the node is over: nothing more can be asked over it.
    Lost {
        /// Which node.
        node: NodeId,
        /// Whether this operation was carried out.
        ran: Ran,
        /// What ended it.
        reason: String,
    },
    /// The node carried nothing out, and says why.
    Refused(String),
    /// There is no such node in the pool. Nothing was asked of anyone.
    NoSuchNode(NodeId),
}

impl FabricError {
    /// What may be assumed of the operation that got this error.
    pub const fn ran(&self) -> Ran {
        match self {
            FabricError::NodeDied(_) | FabricError::Refused(_) | FabricError::NoSuchNode(_) => Ran::No,
            FabricError::Lost { ran, .. } => *ran,
            FabricError::Deadline { .. } | FabricError::Broken { .. } => Ran::Unknown,
        }
    }

    /// The error of an operation whose last request got this one: `of_operation` says by the fate of that what became
    /// of the operation.
    pub fn map_ran(self, of_operation: impl FnOnce(Ran) -> Ran) -> FabricError {
        match self {
            FabricError::Lost { node, ran, reason } => {
                FabricError::Lost { node, ran: of_operation(ran), reason }
            }
            other => other,
        }
    }
}

impl std::fmt::Display for FabricError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FabricError::NodeDied(node) => write!(
                f,
                "node {} has ended: this operation did not run, and its memory is lost unless the node serves a \
                 --memory-file; drop all clients of it, start it again and connect anew",
                node.0
            ),
            FabricError::Deadline { node, waited } => write!(
                f,
                "node {} did not answer within {waited:?}: the operation may or may not have been carried out (if it \
                 only reads, nothing is changed); look whether the node is stopped or overloaded, then ask again",
                node.0
            ),
            FabricError::Broken { node, reason } => write!(
                f,
                "the connection to node {} broke ({reason}): the operation may or may not have been carried out (if it \
                 only reads, nothing is changed); connect anew",
                node.0
            ),
            FabricError::Lost { node, ran, reason } => write!(
                f,
                "the session with node {} is over ({reason}): the operation {}; connect anew",
                node.0,
                match ran {
                    Ran::No => "was not carried out",
                    Ran::Yes => "was carried out, and its answer is lost",
                    Ran::Unknown => "may or may not have been carried out",
                }
            ),
            FabricError::Refused(reason) => f.write_str(reason),
            FabricError::NoSuchNode(node) => {
                write!(
                    f,
                    "the pool has no node {}: nothing was asked; connect to the pool that has it",
                    node.0
                )
            }
        }
    }
}

impl std::error::Error for FabricError {}
