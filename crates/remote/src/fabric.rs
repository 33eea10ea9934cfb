//! The interface through which a protocol sends chains and calls.
//!
//! Invariant: a chain runs at most once. If its reply is lost, the error says whether the chain has run
//! ([`FabricError::ran`]).

use crate::address::{Addr, NodeId};
use crate::capability::Capabilities;
use crate::chain::Chain;
use crate::key::Key;
use crate::reply::Reply;
use std::rc::Rc;
use std::time::Duration;

/// A service at a node that accepts calls: [`ServiceId::NODE`], or the service of the store whose region has this
/// number. See [`crate::service::address`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceId(pub u32);

impl ServiceId {
    /// The service of the node itself, which handles the requests of [`crate::control`].
    pub const NODE: ServiceId = ServiceId(0);
    /// The engine itself, which gives the session access to memory by the node's NIC. No region has this number.
    pub const NIC: ServiceId = ServiceId(u32::MAX);
}

/// Maximum size of a call's request or response, in bytes.
pub const CALL_BYTES_MAX: usize = 60 * 1024;

/// Default deadline of a call or any other wait.
pub const DEADLINE: Duration = Duration::from_secs(1);

/// Beginning of the reason of a refusal that leaves open whether the call was carried out.
pub const UNKNOWN: &str = "whether this call was carried out is unknown";

/// Start of the reason why a fenced client's requests fail ([`FabricError::is_fenced`]).
pub const FENCED: &str = "another client took this one for dead, and fenced it";

/// Part of the reason why a store refuses a change while too much of its log is not written yet
/// ([`FabricError::is_log_behind`]).
pub const LOG_BEHIND: &str = " MiB behind: its disk is too slow for these writes; nothing was done";

/// The interface to memory nodes that carries chains and calls. An endpoint belongs to one thread: it is not `Send`.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Fabric {
    /// Runs the chain at `node` and stores the outcome in `reply`.
    ///
    /// If the future is cancelled, the chain may still run, at most once, until the session ends. Before a chain can
    /// run, the fabric calls [`Chain::note_posted`]. If the caller no longer waits for the reply, the fabric frees the
    /// buffers of [`Chain::held`], unless the chain published them, and those of [`crate::ChainView::unpublished`].
    ///
    /// # Errors
    /// No reply arrived; [`FabricError::ran`] says what may be assumed. The contents of `reply` are unspecified.
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError>;

    /// Calls a service on the CPU of `node` (two-sided). The response replaces the contents of `answer`.
    ///
    /// # Errors
    /// No response arrived ([`FabricError::ran`] says what may be assumed), or the service refused the call
    /// ([`FabricError::Refused`] has its reason).
    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError>;

    /// Retires a buffer that this session has allocated and never published. Never waits, so that `Drop`, which cannot
    /// wait for a chain, can call this function. All other buffers are retired by the chain that makes them
    /// unreachable. Does nothing unless `buffer` is a live buffer of the key's region that this session owns.
    fn retire(&self, node: NodeId, key: Key, buffer: Addr);

    /// The capabilities that the fabric has at `node`.
    fn capabilities(&self, node: NodeId) -> Capabilities;

    /// Number of the current or last session with `node`. It differs from that of the session before if the fabric
    /// opens sessions by itself; otherwise it is always the same. An engine grants keys for one session only, so a
    /// client that keeps keys compares the numbers before it uses a key.
    fn session_number(&self, _node: NodeId) -> u64 {
        0
    }

    /// Whether a chain may still run at `node` for which nobody waits any more: its future was dropped, or has failed
    /// with an unknown outcome. True if the fabric does not know.
    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        true
    }
}

/// Implements [`Fabric`] for a kind of reference to a fabric.
macro_rules! fabric_by_reference {
    ($reference:ty) => {
        impl<F: Fabric + ?Sized> Fabric for $reference {
            // Return the inner future: a wrapper would cost an extra poll.
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
            fn session_number(&self, node: NodeId) -> u64 {
                (**self).session_number(node)
            }
            fn may_run_abandoned(&self, node: NodeId) -> bool {
                (**self).may_run_abandoned(node)
            }
        }
    };
}

fabric_by_reference!(&F);
fabric_by_reference!(Rc<F>);

/// Whether an operation whose response is missing was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// The operation was not carried out, and never will be.
    No,
    /// The operation was carried out, but its outcome is lost.
    Yes,
    /// The operation may have been carried out, or may yet be. The caller must be correct in either case.
    Unknown,
}

/// Reason why an operation failed. The message names the failure, what may be assumed, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FabricError {
    /// The node's process exited before this operation ran. Chains whose replies arrived earlier have run.
    NodeDied(NodeId),
    /// No response arrived before the deadline. A call may have been carried out, or may yet be.
    Deadline {
        /// The node that did not respond.
        node: NodeId,
        /// Time spent waiting.
        waited: Duration,
    },
    /// The connection broke. The request may have been carried out.
    Broken {
        /// The node at the other end.
        node: NodeId,
        /// Error of the operating system.
        reason: String,
    },
    /// The session with the node is closed: no further request can be sent over it.
    Lost {
        /// The session's node.
        node: NodeId,
        /// Whether this operation was carried out.
        ran: Ran,
        /// Reason why the session was closed.
        reason: String,
    },
    /// The node refused the request for the given reason, and changed nothing, unless the reason begins with
    /// [`UNKNOWN`].
    Refused(String),
    /// The pool has no session with the node now. Nothing was sent. The pool opens a session in the background.
    Unreachable {
        /// The node.
        node: NodeId,
        /// Why there is no session.
        reason: String,
    },
    /// The pool has no such node. Nothing was sent.
    NoSuchNode(NodeId),
}

impl FabricError {
    /// Whether the operation that failed with this error was carried out.
    pub const fn ran(&self) -> Ran {
        match self {
            FabricError::Refused(reason) if begins_with(reason.as_str(), UNKNOWN) => Ran::Unknown,
            FabricError::NodeDied(_)
            | FabricError::Refused(_)
            | FabricError::Unreachable { .. }
            | FabricError::NoSuchNode(_) => Ran::No,
            FabricError::Lost { ran, .. } => *ran,
            FabricError::Deadline { .. } | FabricError::Broken { .. } => Ran::Unknown,
        }
    }

    /// Whether the request failed because another client has fenced this one ([`crate::control::Ask::Fence`]). Nothing
    /// that this client held is its own any more. It can go on only with a new nonce, over a new session.
    pub fn is_fenced(&self) -> bool {
        matches!(self, FabricError::Lost { reason, .. } | FabricError::Refused(reason) if reason.starts_with(FENCED))
    }

    /// Whether a store refused a change because too much of its log is not written yet. A later request may succeed.
    pub fn is_log_behind(&self) -> bool {
        matches!(self, FabricError::Refused(reason) if reason.contains(LOG_BEHIND))
    }

    /// Converts the error of an operation's last request into the error of the whole operation. `of_operation` receives
    /// whether that request was carried out and returns whether the operation was. Only [`FabricError::Lost`] changes.
    pub fn map_ran(self, of_operation: impl FnOnce(Ran) -> Ran) -> FabricError {
        match self {
            FabricError::Lost { node, ran, reason } => {
                FabricError::Lost { node, ran: of_operation(ran), reason }
            }
            other => other,
        }
    }
}

/// Whether a text has this beginning.
const fn begins_with(text: &str, beginning: &str) -> bool {
    match text.as_bytes().split_at_checked(beginning.len()) {
        Some((first, _)) => {
            let mut at = 0;
            while at < first.len() {
                if first[at] != beginning.as_bytes()[at] {
                    return false;
                }
                at += 1;
            }
            true
        }
        None => false,
    }
}

impl std::fmt::Display for FabricError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FabricError::NodeDied(node) => write!(
                f,
                "node {} has exited: this operation did not run, and the node's memory is lost unless it serves a \
                 --memory-file; drop all clients of the node, restart it and reconnect",
                node.0
            ),
            FabricError::Deadline { node, waited } => write!(
                f,
                "node {} did not answer within {waited:?}: the operation may or may not have been carried out (a read \
                 changes nothing); check whether the node is stopped or overloaded, then retry",
                node.0
            ),
            FabricError::Broken { node, reason } => write!(
                f,
                "the connection to node {} broke ({reason}): the operation may or may not have been carried out (a \
                 read changes nothing); reconnect",
                node.0
            ),
            FabricError::Lost { node, ran, reason } => write!(
                f,
                "the session with node {} is closed ({reason}): the operation {}; {}",
                node.0,
                match ran {
                    Ran::No => "was not carried out",
                    Ran::Yes => "was carried out, but its response is lost",
                    Ran::Unknown => "may or may not have been carried out",
                },
                match self.is_fenced() {
                    true => "discard what this client held, and reconnect as a new client",
                    false => "reconnect",
                }
            ),
            FabricError::Refused(reason) => f.write_str(reason),
            FabricError::Unreachable { node, reason } => write!(
                f,
                "node {} cannot be reached ({reason}): nothing was sent; check the node, then retry: the connection \
                 is opened again in the background",
                node.0
            ),
            FabricError::NoSuchNode(node) => {
                write!(
                    f,
                    "the pool has no node {}: nothing was sent; connect to a pool that contains it",
                    node.0
                )
            }
        }
    }
}

impl std::error::Error for FabricError {}
