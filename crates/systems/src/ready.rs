//! Retries for chains that find no free buffer. Such a chain runs none of its ops, so it is safe to send it again.

use farside_remote::clock::Clock;
use farside_remote::{Chain, Fabric, FabricError, NodeId, Reply, Status};
use std::iter::successors;
use std::time::Duration;

/// Sum of the pauses after which a chain that finds no buffer fails with "out of memory".
const OUT_OF_MEMORY_AFTER: Duration = Duration::from_millis(100);

/// Length of the pause before the first retry.
const BACKOFF_FIRST: Duration = Duration::from_micros(50);
/// Longest pause before a retry. Each pause is twice as long as the one before.
const BACKOFF_MAX: Duration = Duration::from_millis(5);

/// Returns the pauses between retries. The store counts as out of memory once their sum reaches
/// [`OUT_OF_MEMORY_AFTER`].
///
/// The sum of the pauses decides, not a clock, because a clock continues while the machine is suspended, but the node
/// then frees no buffer. The retries between the pauses take 26 further round trips.
pub(crate) fn pauses() -> impl Iterator<Item = Duration> {
    let doubling = successors(Some(BACKOFF_FIRST), |&pause| Some((pause * 2).min(BACKOFF_MAX)));
    let mut waited = Duration::ZERO;
    doubling.take_while(move |&pause| {
        let is_due = waited < OUT_OF_MEMORY_AFTER;
        waited += pause;
        is_due
    })
}

/// Runs a chain, and retries it while the node has no free buffer for the chain. Returns false if the last retry found
/// no buffer either; no op has run in that case.
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

/// Runs a chain once. Returns false if the node has no free buffer for the chain; no op has run in that case.
#[inline]
pub(crate) async fn once<F: Fabric>(
    fabric: &F,
    node: NodeId,
    chain: &Chain<'_>,
    reply: &mut Reply,
) -> Result<bool, FabricError> {
    let ran = fabric.run(node, chain, reply).await;
    chain.note_outcome(&ran);
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
