//! One replica, as a client sees it: its key, which belongs to one session, and the attempts to reach it.
//!
//! A replica belongs to one configuration of the store. While its member is being replaced, or others are, the node may
//! refuse the key. Then the client asks for the next configuration until its time is over ([`StoreError::Replaced`]).
//!
//! Invariant: a replica that has lost its memory never answers this client again, since only the member with the
//! incarnation that the configuration names grants a key.

use super::layout::{Spec, Table};
use super::service::PrismRsKind;
use crate::blocks::BlocksError;
use crate::members::fetch_member;
use crate::store::{Member, Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, Ran};
use farside_remote::{ChainBuf, Fabric, FabricError, NodeId, Reply, Status};
use std::rc::Rc;
use std::time::Duration;

/// Time after which an unreachable replica counts as failed. The operation waits for it only if too few others answer.
pub(super) const PATIENCE: Duration = DEADLINE;
/// Pause before the first attempt to reach a replica again. Each pause is twice as long as the one before.
pub(super) const PAUSE: Duration = Duration::from_millis(1);
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(64);
/// Number of keys that an operation fetches until it takes a refusal as final.
const KEYS_MAX: u32 = 4;

/// A replica of the store.
pub(super) struct Replica {
    members: Rc<Members>,
    index: usize,
    /// The node that probably holds the replica, and the number of the session in which the node granted the key of
    /// `table`.
    node: NodeId,
    session: u64,
    /// The replica's table; `None` until the node has responded.
    table: Option<Table>,
    /// Why the replica never responds again.
    lost: Option<StoreError>,
    chain: ChainBuf,
    /// Reply of the last chain.
    pub(super) reply: Reply,
}

/// Access to a replica for one chain.
pub(super) struct Access<'a> {
    pub(super) node: NodeId,
    pub(super) table: Table,
    pub(super) chain: &'a mut ChainBuf,
    pub(super) reply: &'a mut Reply,
}

/// Failure of one replica in a phase.
#[derive(Debug)]
pub(super) struct Failure {
    /// The last error.
    pub(super) error: BlocksError,
    /// Whether one of the attempts may have been carried out.
    pub(super) ran: Ran,
}

impl Failure {
    /// Whether the replica's configuration is over.
    pub(super) fn is_replaced(&self) -> bool {
        matches!(self.error, BlocksError::Store(StoreError::Replaced { .. }))
    }
}

impl Replica {
    /// Creates the access to the member with this index, without a request.
    ///
    /// # Errors
    /// The fabric lacks a capability that PRISM-RS needs, or the description of the store is impossible.
    pub(super) fn new<F: Fabric>(
        fabric: &F,
        members: &Rc<Members>,
        index: usize,
    ) -> Result<Replica, StoreError> {
        let Member { node, session, store } = &members.list()[index];
        let (mut table, mut lost) = (None, None);
        match store {
            Ok(store) => {
                let part = Members::part(*node, *session, store.clone());
                table = Some(table_of(fabric, members, &part)?.1);
            }
            Err(error @ StoreError::MemoryLost { .. }) => lost = Some(error.clone()),
            Err(_) => {}
        }
        let (members, chain, reply) = (Rc::clone(members), ChainBuf::new(), Reply::new());
        Ok(Replica { members, index, node: *node, session: *session, table, lost, chain, reply })
    }

    /// Returns the same access for another task.
    pub(super) fn another(&self) -> Replica {
        let Replica { index, node, session, table, .. } = *self;
        let (members, lost) = (Rc::clone(&self.members), self.lost.clone());
        Replica { members, index, node, session, table, lost, chain: ChainBuf::new(), reply: Reply::new() }
    }

    /// Parameters of the store at this replica, if it has responded.
    pub(super) fn spec(&self) -> Option<Spec> {
        self.table.map(|table| table.spec)
    }

    /// Runs an operation of one chain at the replica. Repeats it while the replica cannot be reached or its answer is
    /// lost, and at most for [`PATIENCE`]: so the operation must be idempotent.
    pub(super) async fn run<F: Fabric + Clock, O>(
        &mut self,
        fabric: &F,
        operation: impl AsyncFnMut(Access<'_>) -> Result<O, BlocksError>,
    ) -> Result<O, Failure> {
        self.run_within(PATIENCE, fabric, operation).await
    }

    /// Runs an operation like [`Replica::run`], but repeats it at most for `patience`.
    pub(super) async fn run_within<F: Fabric + Clock, O>(
        &mut self,
        patience: Duration,
        fabric: &F,
        mut operation: impl AsyncFnMut(Access<'_>) -> Result<O, BlocksError>,
    ) -> Result<O, Failure> {
        let (until, mut pause) = (fabric.now() + patience, PAUSE);
        let (mut ran, mut keys) = (Ran::No, 0);
        loop {
            let error = match self.reach(fabric, &mut keys).await {
                Ok((node, table)) => {
                    let (chain, reply) = (&mut self.chain, &mut self.reply);
                    match operation(Access { node, table, chain, reply }).await {
                        Ok(output) => return Ok(output),
                        Err(error) => {
                            ran = if error.ran() == Ran::No { ran } else { Ran::Unknown };
                            error
                        }
                    }
                }
                Err(error) => error.into(),
            };
            let may_return = match &error {
                BlocksError::Fabric(FabricError::Refused(_) | FabricError::NoSuchNode(_)) => false,
                BlocksError::Fabric(error) => !error.is_fenced(),
                // The key may be that of a former session, or be revoked.
                BlocksError::Refused(Status::Access) if keys < KEYS_MAX => {
                    self.table = None;
                    if keys == 0 {
                        continue;
                    }
                    true
                }
                BlocksError::Store(StoreError::BeingReplaced { .. }) => true,
                _ => false,
            };
            if !may_return || fabric.now() >= until {
                return Err(Failure { error, ran });
            }
            fabric.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Returns the replica's node and table. Fetches the key if this is the first operation since the node responds, or
    /// the first in a new session.
    async fn reach<F: Fabric>(&mut self, fabric: &F, keys: &mut u32) -> Result<(NodeId, Table), StoreError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let session = fabric.session_number(self.node);
        if let Some(table) = self.table.filter(|_| session == self.session) {
            return Ok((self.node, table));
        }
        // On the heap, since it is rare and large: each phase has such a future for each replica.
        let part = match Box::pin(fetch_member(fabric, &self.members, self.index)).await {
            Ok(part) => part,
            Err(error) => {
                self.lost =
                    Some(error.clone()).filter(|error| matches!(error, StoreError::MemoryLost { .. }));
                return Err(error);
            }
        };
        let (node, table) = table_of(fabric, &self.members, &part)?;
        (self.node, self.session, self.table) = (node, part.list()[0].session, Some(table));
        *keys += 1;
        Ok((node, table))
    }
}

/// Returns the node and the table of a member, whose description is `part`.
///
/// # Errors
/// The fabric lacks a capability, or the description is impossible: a node may answer anything.
pub(super) fn table_of<F: Fabric>(
    fabric: &F,
    members: &Members,
    part: &Members,
) -> Result<(NodeId, Table), StoreError> {
    let (node, store) = part.one_of::<PrismRsKind>(fabric)?;
    if store.parameters != members.store().parameters {
        return Err(StoreError::Gone(format!(
            "the replicas of store '{}' have different parameters: someone has damaged the catalog of node {}; drop \
             the store and create it again",
            store.name, node.0
        )));
    }
    Ok((node, Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?))
}
