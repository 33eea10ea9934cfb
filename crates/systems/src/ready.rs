//! A chain that found no buffer ran nothing at all: it is asked again, until that has gone on for too long.

use farside_remote::clock::Clock;
use farside_remote::{Chain, Fabric, FabricError, NodeId, Reply, Status};
use std::iter::successors;
use std::time::Duration;

/// How long a chain may find no buffer before the store is said to be out of memory.
const OUT_OF_MEMORY_AFTER: Duration = Duration::from_millis(100);

/// The first pause before asking again.
const BACKOFF_FIRST: Duration = Duration::from_micros(50);
/// The longest; pauses double.
const BACKOFF_MAX: Duration = Duration::from_millis(5);

/// The pauses before asking again and again, until the store is said to be out of memory. Their sum says when that is
/// and no clock: a machine that stood still for a while stood still for the node, too. What the requests between them
/// take comes on top: 26 round trips.
pub(crate) fn pauses() -> impl Iterator<Item = Duration> {
    let doubling = successors(Some(BACKOFF_FIRST), |&pause| Some((pause * 2).min(BACKOFF_MAX)));
    let mut waited = Duration::ZERO;
    doubling.take_while(move |&pause| {
        let is_due = waited < OUT_OF_MEMORY_AFTER;
        waited += pause;
        is_due
    })
}

/// Runs a chain until it finds its buffers; answers false if it never did: nothing ran then.
#[inline]
pub(crate) async fn run_until_ready<F: Fabric + Clock>(
    fabric: &F,
    node: NodeId,
    chain: &Chain<'_>,
    reply: &mut Reply,
) -> Result<bool, FabricError> {
    if once(fabric, node, chain, reply).await? {
        return Ok(true);
    }
    retry(fabric, node, chain, reply).await
}

/// Runs a chain, once; answers false if it found no buffer, and nothing ran.
#[inline]
pub(crate) async fn once<F: Fabric>(
    fabric: &F,
    node: NodeId,
    chain: &Chain<'_>,
    reply: &mut Reply,
) -> Result<bool, FabricError> {
    let ran = fabric.run(node, chain, reply).await;
    chain.note_answered(&ran);
    ran.map(|()| reply.last_status() != Status::NotReady)
}

#[cold]
async fn retry<F: Fabric + Clock>(
    fabric: &F,
    node: NodeId,
    chain: &Chain<'_>,
    reply: &mut Reply,
) -> Result<bool, FabricError> {
    for pause in pauses() {
        fabric.sleep(pause).await;
        if once(fabric, node, chain, reply).await? {
            return Ok(true);
        }
    }
    Ok(false)
}
