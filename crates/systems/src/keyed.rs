//! The sessions with the nodes of a store, and the keys that the nodes have granted in them.
//!
//! A pool opens the session after a lost one by itself, and binds it to the client's nonce. A node grants keys for one
//! session only. So before an operation, the client fetches the keys of the members with whose nodes it has another
//! session by now. A chain that was built before that is not sent, as if the node could not be reached.
//!
//! Invariant: no chain is sent over a session in which its key was not granted.

use crate::members::fetch_member;
use crate::store::{Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::Cell;
use std::time::Duration;

/// Fabric of a client whose chains have the keys of one store.
pub(crate) struct Keyed<F> {
    inner: F,
    members: Members,
    granted: Box<[Granted]>,
}

/// The key of a member.
struct Granted {
    node: NodeId,
    /// Number of the session in which the node has granted the key.
    session: Cell<u64>,
}

impl<F: Fabric> Keyed<F> {
    /// Creates the fabric of a client that has the keys of these members.
    pub(crate) fn new(inner: F, members: &Members) -> Keyed<F> {
        let granted = members.list().iter().map(|member| {
            let session = Cell::new(member.session);
            Granted { node: member.node, session }
        });
        Keyed { granted: granted.collect(), members: members.clone(), inner }
    }

    /// Fetches the keys of those of the first `members` members with whose nodes there is another session. Calls
    /// `granted` with the index and the key of each.
    ///
    /// # Errors
    /// [`StoreError`]: a node does not answer, its member has lost its memory, or the store was dropped. The member's
    /// key is outdated.
    #[inline]
    pub(crate) async fn fetch_keys(
        &self,
        members: usize,
        granted: impl Fn(usize, Key),
    ) -> Result<(), StoreError> {
        for (index, of) in self.granted.iter().enumerate().take(members) {
            if !self.is_current(of) {
                // Boxed: the future of each operation would be as large otherwise.
                let part = Box::pin(fetch_member(&self.inner, &self.members, index)).await?;
                granted(index, part.store().extent().key);
                of.session.set(part.list()[0].session);
            }
        }
        Ok(())
    }

    fn is_current(&self, granted: &Granted) -> bool {
        self.inner.session_number(granted.node) == granted.session.get()
    }
}

impl<F: Fabric> Fabric for Keyed<F> {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        // The fabric takes its session with the node when it is polled for the first time, so it is this one.
        match self.granted.iter().any(|granted| granted.node == node && !self.is_current(granted)) {
            true => Err(outdated(node)),
            false => self.inner.run(node, chain, reply).await,
        }
    }

    fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> impl Future<Output = Result<(), FabricError>> {
        self.inner.call(node, service, request, answer)
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.inner.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.inner.may_run_abandoned(node)
    }
}

impl<F: Clock> Clock for Keyed<F> {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn wall(&self) -> Duration {
        self.inner.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}

#[cold]
fn outdated(node: NodeId) -> FabricError {
    let reason = "the session was opened again, and the client has not fetched the store's key in it yet";
    FabricError::Unreachable { node, reason: reason.to_owned() }
}
