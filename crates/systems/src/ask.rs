//! Requests to a node's catalog, as JSON.

use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Fabric, FabricError, NodeId};

/// Sends a request to the catalog of `node`. Returns the answer; `None` if it is not understood. A node may answer
/// anything.
///
/// # Errors
/// The node refused the request, or did not answer. [`FabricError::ran`] says whether the request was carried out.
pub(crate) async fn ask<F: Fabric>(
    fabric: &F,
    node: NodeId,
    request: &Ask,
) -> Result<Option<Answer>, FabricError> {
    let request = serde_json::to_vec(request).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await?;
    Ok(serde_json::from_slice(&answer).ok())
}

/// Error of a request whose answer is not understood.
pub(crate) fn not_understood(node: NodeId, ran: Ran) -> FabricError {
    let reason = "its answer is not understood: use the same release on both sides".into();
    FabricError::Lost { node, ran, reason }
}
