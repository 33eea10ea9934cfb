//! A client's identity at the nodes that hold a store, and the fencing of a client that seems dead.
//!
//! A client draws its nonce once, when it starts, and binds every session to it before the session's first chain, also
//! a session that it has reopened. A client that is fenced holds nothing any more; it may go on with a new nonce.
//!
//! Invariant: only when [`fence`] has succeeded at every node that holds what a lock guards may the lock be taken from
//! the fenced client.

use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId};

/// A client's number and nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of the client, which other clients find in the locks that it holds.
    pub client: u32,
    /// Random number that the client drew when it started. Not 0.
    pub nonce: u64,
}

/// Binds the session with `node` to a client's nonce, for this store. Call it before the session's first chain on the
/// store, and again after the session was reopened.
///
/// # Errors
/// The session is not bound, unless [`FabricError::ran`] says otherwise. If [`FabricError::is_fenced`], it never will
/// be.
pub async fn bind<F: Fabric>(
    fabric: &F,
    node: NodeId,
    store: &Store,
    identity: Identity,
) -> Result<(), FabricError> {
    let Identity { client, nonce } = identity;
    ask(fabric, node, &Ask::Bind { name: store.name.clone(), id: store.id, client, nonce }).await
}

/// Fences the client with this nonce at `node`, for this store. Once it has succeeded, no chain and no call of the
/// client runs there any more.
///
/// # Errors
/// The client may or may not be fenced, and its chains may still run: repeat the request. If a stopped process delays
/// the fence, the error names its id.
pub async fn fence<F: Fabric>(
    fabric: &F,
    node: NodeId,
    store: &Store,
    nonce: u64,
) -> Result<(), FabricError> {
    ask(fabric, node, &Ask::Fence { name: store.name.clone(), id: store.id, nonce }).await
}

async fn ask<F: Fabric>(fabric: &F, node: NodeId, ask: &Ask) -> Result<(), FabricError> {
    let request = serde_json::to_vec(ask).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Done) => Ok(()),
        _ => Err(FabricError::Lost {
            node,
            ran: Ran::Unknown,
            reason: "its answer is not understood: use the same release on both sides".into(),
        }),
    }
}
