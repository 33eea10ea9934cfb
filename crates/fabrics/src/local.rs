//! The in-process fabric: the caller runs the chain on the process's own memory.
//!
//! This fabric serves tests and programs that embed a node. A call runs in the caller's thread, under the node's own
//! lock.

use crate::direct::{Control, Direct};
use crate::memory::Mapping;
use farside_remote::arena::session::SessionId;
use farside_remote::fabric::ServiceId;
use farside_remote::{FabricError, NodeId};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A memory node in this process, as the in-process fabric uses it.
pub trait LocalNode: Send + Sync {
    /// Returns the node's memory.
    fn memory(&self) -> &Arc<Mapping>;

    /// Opens a session for this process.
    ///
    /// # Errors
    /// The node has reached its maximum number of sessions.
    fn open_session(&self) -> Result<SessionId, FabricError>;

    /// Ends a session, after which its owner runs no more chains.
    fn close_session(&self, session: SessionId);

    /// Runs `service` on a `request` of this session, and writes the service's response to `answer`.
    ///
    /// # Errors
    /// The service refused the call.
    fn call(
        &self,
        session: SessionId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError>;

    /// Wakes the node's own thread if it sleeps.
    fn ring(&self);
}

/// Opens an endpoint to the node of this process, which the endpoint calls `id`. The endpoint belongs to one thread.
///
/// # Errors
/// The node has reached its maximum number of sessions.
pub fn connect(node: &Arc<dyn LocalNode>, id: NodeId) -> Result<Direct, FabricError> {
    let session = node.open_session()?;
    let control = Session { node: Arc::clone(node), id, session };
    Ok(Direct::new(
        Arc::clone(node.memory()),
        Box::new(control),
        Arc::new(AtomicBool::new(false)),
        id,
        session,
    ))
}

struct Session {
    node: Arc<dyn LocalNode>,
    id: NodeId,
    session: SessionId,
}

impl Control for Session {
    fn call<'a>(
        &'a self,
        service: ServiceId,
        request: &'a [u8],
        answer: &'a mut Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), FabricError>> + 'a>> {
        Box::pin(async move {
            self.node.call(self.session, service, request, answer).map_err(|error| match error {
                // The node does not know the number that its client gives it.
                FabricError::Deadline { waited, .. } => FabricError::Deadline { node: self.id, waited },
                other => other,
            })
        })
    }

    fn ring(&self) {
        self.node.ring();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.node.close_session(self.session);
    }
}
