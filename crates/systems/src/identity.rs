//! A client's identity at the nodes that hold a store, and the fencing of a client that seems dead.
//!
//! A client draws its nonce once, when it starts, and binds every session to it before the session's first chain, also
//! a session that it has reopened. A client that is fenced holds nothing any more; it may go on with a new nonce.
//!
//! Invariant: only when [`fence`] has succeeded at every node that holds what a lock guards may the lock be taken from
//! the fenced client.

use crate::ask;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::Ran;
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

async fn ask<F: Fabric>(fabric: &F, node: NodeId, request: &Ask) -> Result<(), FabricError> {
    match ask::ask(fabric, node, request).await? {
        Some(Answer::Done) => Ok(()),
        _ => Err(ask::not_understood(node, Ran::Unknown)),
    }
}
