//! A client's sessions with the nodes of a pool, for the trials of stores with several members.
//!
//! A trial decides when the session after a lost one is opened: by the next request, or in the background.
//!
//! Invariant: a request is sent over one session only.
//! Invariant: each session with a node has another number than the session before it.

use farside_remote::{FabricError, NodeId};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::network::HostId;
use farside_sim::node::Node;
use farside_sim::world::{MILLIS, Nanos, ProcessId, World, within};
use std::cell::RefCell;
use std::rc::Rc;

/// Timeout, in nanoseconds, after which a session between a node and a silent client ends.
const SILENCE: Nanos = 60 * MILLIS;
/// Timeout for opening a session, in nanoseconds. A simulated node that is down is noticed soon, as by a pool of
/// sessions.
const OPENING_MAX: Nanos = 20 * MILLIS;

/// The sessions of one process with the nodes of its pool.
pub(crate) struct Sessions {
    /// The nodes, in the order of the pool: the pool's number of a node may differ from the node's own one.
    nodes: Vec<Node>,
    world: World,
    process: ProcessId,
    host: HostId,
    clock: ProcessClock,
    current: RefCell<Vec<Current>>,
}

#[derive(Clone, Default)]
struct Current {
    session: Option<Rc<Endpoint>>,
    /// Number of sessions that were opened with the node.
    number: u64,
}

impl Sessions {
    /// Creates a pool without open sessions for `process`, which runs at `host`.
    pub(crate) fn new(
        world: &World,
        nodes: Vec<Node>,
        process: ProcessId,
        host: HostId,
        clock: ProcessClock,
    ) -> Sessions {
        let current = RefCell::new(vec![Current::default(); nodes.len()]);
        Sessions { nodes, world: world.clone(), process, host, clock, current }
    }

    /// Clock of the client's process.
    pub(crate) fn clock(&self) -> &ProcessClock {
        &self.clock
    }

    /// Returns the node with this number in the pool.
    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    /// Number of the current or last session with a node; see [`farside_remote::Fabric::session_number`].
    pub(crate) fn number(&self, node: NodeId) -> u64 {
        self.current.borrow()[node.0 as usize].number
    }

    /// Returns the session with a node, unless the last one is over.
    pub(crate) fn current(&self, node: NodeId) -> Option<Rc<Endpoint>> {
        self.current.borrow()[node.0 as usize].session.clone()
    }

    /// Returns the session with a node. Opens another one if the last one is over.
    ///
    /// # Errors
    /// The errors of [`Sessions::open`].
    pub(crate) async fn current_or_next(&self, node: NodeId) -> Result<Rc<Endpoint>, FabricError> {
        match self.current(node) {
            Some(session) => Ok(session),
            None => self.open(node).await,
        }
    }

    /// Opens a session with a node, which replaces the current one.
    ///
    /// # Errors
    /// [`FabricError::Unreachable`].
    pub(crate) async fn open(&self, node: NodeId) -> Result<Rc<Endpoint>, FabricError> {
        let (at, index) = (self.node(node), node.0 as usize);
        let identity =
            Identity { identity: self.world.random().bits().into(), incarnation: 1, silence: SILENCE };
        let opening = Endpoint::open(at, 0, self.process, self.host, &self.clock, identity);
        match within(&self.world, OPENING_MAX, opening).await {
            Some(Ok(session)) => {
                let mut current = self.current.borrow_mut();
                let number = current[index].number + 1;
                current[index] = Current { session: Some(Rc::clone(&session)), number };
                Ok(session)
            }
            Some(Err(error)) => Err(FabricError::Unreachable { node, reason: error.to_string() }),
            None => Err(FabricError::Unreachable { node, reason: "no response to a greeting".to_owned() }),
        }
    }

    /// Forgets a session if the outcome of one of its requests shows that it is over. Returns whether it was the
    /// current one.
    pub(crate) fn forget_if_over(
        &self,
        node: NodeId,
        session: &Rc<Endpoint>,
        outcome: &Result<(), FabricError>,
    ) -> bool {
        let current = &mut self.current.borrow_mut()[node.0 as usize].session;
        let is_over = outcome.as_ref().is_err_and(|error| !matches!(error, FabricError::Refused(_)));
        let is_forgotten = is_over && current.as_ref().is_some_and(|current| Rc::ptr_eq(current, session));
        if is_forgotten {
            *current = None;
        }
        is_forgotten
    }
}
