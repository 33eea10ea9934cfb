//! Requests to nodes about members of stores, to one node or to several at the same time, and checks of the answers.
//!
//! Invariant: an answer that no correct node gives is an error, never a panic: a node may answer anything.

use super::{PAUSE, TELLS};
use crate::store::{Loss, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Decided, Decision, Found, MemberState};
use farside_remote::{Fabric, FabricError, NodeId};
use std::pin::Pin;
use std::task::Poll;

/// Requests a decision at the first member, and returns the state that holds.
///
/// # Errors
/// The first member did not answer, or has lost its memory.
pub(super) async fn decide<F: Fabric + Clock>(
    fabric: &F,
    node: NodeId,
    name: &str,
    attempt: Attempt,
    decision: Decision,
    incarnation: u64,
) -> Result<MemberState, StoreError> {
    let request = Ask::Decide { name: name.to_owned(), attempt, decision };
    match ask(fabric, node, &request).await? {
        Answer::Decided(Decided { state: MemberState::Prepared, .. }) => Err(not_understood(node)),
        Answer::Decided(decided) if decided.incarnation == incarnation => Ok(decided.state),
        // The items of a store that is being created are lost with any member.
        Answer::Decided(_) => {
            Err(StoreError::MemoryLost { name: name.to_owned(), member: 0, node, loss: Loss::Items })
        }
        _ => Err(not_understood(node)),
    }
}

/// What nodes have answered that were told of a decision.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Nodes that did not answer.
    pub(super) silent: Vec<NodeId>,
    /// Whether a member stays committed.
    pub(super) is_committed: bool,
}

/// Tells nodes of a decision, at the same time.
pub(super) async fn tell_all<F: Fabric + Clock>(
    fabric: &F,
    name: &str,
    attempt: Attempt,
    decision: Decision,
    nodes: &[NodeId],
) -> Told {
    let request = &Ask::Decide { name: name.to_owned(), attempt, decision };
    let told = all(nodes.iter().map(|node| async move {
        for tell in 0..TELLS {
            if tell > 0 {
                fabric.sleep(PAUSE * (1 << tell)).await;
            }
            if let Ok(Answer::Decided(Decided { state, .. })) = raw_ask(fabric, *node, request).await {
                return Ok(state == MemberState::Committed);
            }
        }
        Err(*node)
    }))
    .await;
    let is_committed = told.contains(&Ok(true));
    Told { silent: told.into_iter().filter_map(Result::err).collect(), is_committed }
}

pub(super) async fn ask<F: Fabric>(fabric: &F, node: NodeId, request: &Ask) -> Result<Answer, StoreError> {
    raw_ask(fabric, node, request).await.map_err(|error| match error {
        FabricError::Refused(reason) => StoreError::Gone(reason),
        other => StoreError::Fabric(other),
    })
}

pub(super) async fn raw_ask<F: Fabric>(
    fabric: &F,
    node: NodeId,
    request: &Ask,
) -> Result<Answer, FabricError> {
    let answer = crate::ask::ask(fabric, node, request).await?;
    answer.ok_or_else(|| FabricError::Refused(misunderstood(node)))
}

/// Asks a node for its store called `name`.
pub(super) async fn find<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<Found, StoreError> {
    understood(node, name, raw_ask(fabric, node, &Ask::FindStore { name: name.to_owned() }).await)
}

/// Checks a node's answer to an [`Ask::FindStore`]. A node may answer anything.
pub(super) fn understood(
    node: NodeId,
    name: &str,
    answer: Result<Answer, FabricError>,
) -> Result<Found, StoreError> {
    let found = match answer {
        Ok(Answer::Found(found)) => found,
        Ok(_) => return Err(not_understood(node)),
        Err(FabricError::Refused(reason)) => return Err(StoreError::Gone(reason)),
        Err(error) => return Err(StoreError::Fabric(error)),
    };
    let is_sound = found.store.as_ref().is_none_or(|store| {
        let membership = store.membership.as_ref();
        store.name == name
            && store.incarnation == found.incarnation
            && membership.is_none_or(|membership| membership.check(found.incarnation).is_ok())
    });
    let members =
        found.store.as_ref().and_then(|store| store.membership.as_ref()).map_or(0, |of| of.members.len());
    let is_sound = is_sound
        && found
            .accepted
            .as_ref()
            .is_none_or(|accepted| accepted.check().is_ok() && accepted.members.len() == members);
    if is_sound { Ok(found) } else { Err(not_understood(node)) }
}

pub(super) fn misunderstood(node: NodeId) -> String {
    format!(
        "the answer of node {} about a store is not understood: use the same release on all sides",
        node.0
    )
}

pub(super) fn not_understood(node: NodeId) -> StoreError {
    StoreError::Gone(misunderstood(node))
}

/// Runs futures at the same time and returns their outputs, in order.
pub(crate) async fn all<T: Unpin>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    wait_for(futures, |_| false).await.into_iter().flatten().collect()
}

/// Runs futures at the same time until all have completed, or the outputs so far are enough. Returns the outputs, in
/// order, and drops the other futures, which have no output. One future alone always completes, and costs no box.
pub(crate) async fn wait_for<T: Unpin>(
    mut futures: impl Iterator<Item = impl Future<Output = T>>,
    is_enough: impl Fn(&[Option<T>]) -> bool,
) -> Vec<Option<T>> {
    let Some(first) = futures.next() else { return Vec::new() };
    let Some(second) = futures.next() else { return vec![Some(first.await)] };
    let futures = [first, second].into_iter().chain(futures);
    let mut running: Vec<Option<Pin<Box<_>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut outputs: Vec<Option<T>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(move |cx| {
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if let Some(running) = future
                && let Poll::Ready(value) = running.as_mut().poll(cx)
            {
                (*future, *output) = (None, Some(value));
            }
        }
        if running.iter().all(Option::is_none) || is_enough(&outputs) {
            return Poll::Ready(std::mem::take(&mut outputs));
        }
        Poll::Pending
    })
    .await
}
