//! The interface through which trials use a family of systems: the operations that clients draw, how a system carries
//! out these operations, and the properties that must hold.
//!
//! All other parts of a trial are generic over families. To add a family, add a file to this folder and a line to
//! [`crate::systems`].

use crate::flight::{Phases, Request, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, Site};
use farside_node::log::LogOptions;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_sim::checker::Checker;
use farside_sim::fault::Fault;
use farside_sim::history::lines::Written;
use farside_sim::history::{Ask, Operation};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, Nanos, ProcessId};
use farside_systems::kv::KvError;
use farside_systems::store::StoreError;
use farside_systems::system::Sizing;
use std::rc::Rc;

/// Type of the outcomes of a family's operations.
pub(crate) type OutcomeOf<F> = <<F as Family>::Ask as Ask>::Outcome;

/// A system under trial, with the options that a seed has drawn for the system.
pub(crate) trait Family: Sized + 'static {
    /// Type of the family's operations. The type of their outcomes is `Ask::Outcome`.
    type Ask: Written;
    /// Type of a client of one store. Each task has a client of its own.
    type Client;
    /// Type of the state that all tasks of one session share.
    type Shared: Default;
    /// Type of the checker of the family's histories.
    type Checker: Checker<Ask = Self::Ask>;

    /// Whether one store lies on all nodes, so that each client has a session with each node.
    const SPANS: bool = false;

    /// Whether the store lies on all nodes and survives the loss of a minority of them. If it does not survive this, a
    /// loss is followed by another store.
    const IS_REPLICATED: bool = Self::SPANS;

    /// Largest number of concurrent operations of a client at each node.
    const TASKS_MAX: u64 = 3;

    /// Whether a client may run in a node's process.
    const MAY_LIVE_AT_NODE: bool = false;

    /// Whether a task of the client carries out the operations. Such an operation goes on if its caller's future is
    /// dropped. So a trial drops these futures after a random time, and not at a request.
    fn is_owned(&self) -> bool {
        false
    }

    /// Whether a client of a store on all nodes goes on over the next session with a node, after one was lost.
    fn goes_on(&self) -> bool {
        true
    }

    /// Whether an operation may wait for other clients, so that their outages count as its own.
    fn waits_for_others(&self) -> bool {
        false
    }

    /// Whether the system's operations go on after this fault.
    fn survives(&self, _fault: Fault) -> bool {
        true
    }

    /// Whether the lines of a WRITE may land in any order; `None` if the family works in either case.
    fn relaxed(&self) -> Option<bool> {
        None
    }

    /// Largest skew of a clock in ppm.
    fn skew_ppm(&self) -> u64 {
        200_000
    }

    /// Largest error of a wall clock in nanoseconds, as long as it does not jump. `None` if the family's stores need no
    /// time of creation: then wall clocks are right, but for their skew.
    fn wall_error(&self) -> Option<Nanos> {
        None
    }

    /// Number of members whose memory a store with this many may lose at the same time; 0 if the loss of one is that of
    /// the store. A minority, if the family's stores have replicas.
    fn tolerated(&self, members: u32) -> usize {
        if Self::IS_REPLICATED { (members as usize).saturating_sub(1) / 2 } else { 0 }
    }

    /// Draws the number of nodes.
    fn drawn_nodes(_system: System, _random: &Random) -> u32 {
        1
    }

    /// Creates the system with options that it draws. `drawn` is not complete yet: the fields that are drawn later are
    /// zero.
    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Self;

    /// Returns how often the node rebuilds the store's structure: after one in this many operations, or never if 0.
    fn rebuild_one_in(&self, _random: &Random) -> u64 {
        0
    }

    /// Options that the seed has drawn for the system, for reports.
    fn options(&self) -> Vec<Choice>;

    /// Parameters with which the node creates the store.
    fn parameters(&self) -> String;

    /// Quota in MiB of each store, if it is not the usual one.
    fn quota_mib(&self, _drawn: &Drawn) -> Option<u64> {
        None
    }

    /// Options of the stores' logs, if they have logs. A store with a log survives the loss of its node's memory.
    fn log(&self) -> Option<LogOptions> {
        None
    }

    /// Whether a store may lack its last operations after its node lost its memory, or its machine crashed.
    fn may_lose_last(&self) -> bool {
        false
    }

    /// Judges what a store has kept after such a loss. `before` has the operations on the store before, with the keys
    /// of [`Family::draw`]. Returns operations that bring an empty store to the state that it has now, and whether
    /// operations were lost.
    ///
    /// # Errors
    /// Returns a description of what the store lacks and must not lack.
    fn after_loss(
        &self,
        _node: &Node,
        _store: &Store,
        _before: &[Operation<Self::Ask>],
        _loss: &Loss,
    ) -> Result<Kept<Self>, String> {
        unreachable!("stores of this family lose nothing")
    }

    /// Numbers of the events that say how the store's structure changes, with their names, for reports. Empty if the
    /// family counts none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Size of the store that lies on all nodes.
    fn sizing(&self) -> Sizing {
        unreachable!("each store of this family lies on one node")
    }

    /// Number of clients that repair the store, beside those that use it. They may run at the same time.
    fn recoverers(&self) -> u32 {
        0
    }

    /// Number of nodes that have no part of the store at first, beside those that have one.
    fn spares(&self) -> u32 {
        0
    }

    /// Usual pause, in nanoseconds, after an operation after which a client pauses.
    fn rest(&self) -> Nanos {
        5 * MICROS
    }

    /// Usual pause, in nanoseconds, of a recoverer before it looks at the store again.
    fn recovers_after(&self) -> Nanos {
        unreachable!("this family has no recoverers")
    }

    /// Returns the phase of a recoverer's request. The arguments are the request and the bitmask of the phases that the
    /// recoverer has passed since the last request of the first phase that it returned.
    fn phase_of_recovery(_request: Request<'_>, _seen: u32) -> usize {
        unreachable!("this family has no recoverers")
    }

    /// Repairs the store, or changes what a recoverer may change, over the sessions of a recoverer. May fail.
    ///
    /// # Errors
    /// Returns a description of a failure that no fault explains.
    async fn recover(&self, _scene: &Scene, _fabric: &Tracked) -> Result<(), String> {
        unreachable!("this family has no recoverers")
    }

    /// Repairs everything, after the faults have ended. No other client is alive.
    ///
    /// # Errors
    /// Returns a description of what could not be repaired.
    async fn recover_all(&self, _scene: &Scene, _fabric: &Tracked) -> Result<(), String> {
        unreachable!("this family has no recoverers")
    }

    /// Draws parameters with which the node rebuilds the store.
    fn rebuilt(&self, _random: &Random) -> String {
        unreachable!("stores of this family are never rebuilt")
    }

    /// Whether clients use chains only and never call the store's service.
    fn is_one_sided(&self) -> bool;

    /// Phases of the protocol of `system`.
    fn phases(system: System) -> &'static Phases;

    /// Returns the phase in which an operation has found no memory. `last` is that of the last request of its task.
    fn exhausted_in(&self, last: usize) -> usize {
        last
    }

    /// Returns the checker of the family's histories.
    fn checker(&self) -> Self::Checker;

    /// Number of sessions that a client has with each node, each at another engine.
    fn sessions(&self) -> u32 {
        1
    }

    /// Draws how often a client's pause is longer than all timeouts: one in this many times, or never if 0.
    fn long_pause_one_in(&self, _random: &Random) -> u64 {
        0
    }

    /// Opens the store `name` at `node` over the sessions of `seat`, and returns a client of the store.
    async fn open(&self, seat: Seat<'_, Self>, node: NodeId, name: &str) -> Result<Self::Client, Failure>;

    /// Runs before a session is closed, after the last operation of its tasks.
    async fn leave(&self, _scene: &Scene, _shared: &Self::Shared) {}

    /// Runs in the client that reads every key, after the last read and after the faults have ended. No other client is
    /// alive.
    async fn heal(&self, _scene: &Scene, _client: &mut Self::Client) -> Result<(), Failure> {
        Ok(())
    }

    /// Draws the client's next operation and the operation's key.
    fn draw(&self, scene: &Scene, client: &mut Self::Client) -> (u64, Self::Ask);

    /// Carries out an operation on a key. `who` is the number of the client that runs it.
    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Self::Client,
        who: u32,
        key: u64,
        ask: &Self::Ask,
    ) -> Result<OutcomeOf<Self>, Failure>;

    /// Runs after each operation. May try a forbidden access, or do other work that the history does not record.
    async fn trespass(&self, _scene: &Scene, _client: &mut Self::Client) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns the operation that reads one key and does nothing else, if the family has one. A client whose session
    /// has ended first reads the keys that its unanswered operations may have written.
    fn read(&self) -> Option<Self::Ask> {
        None
    }

    /// Returns operations that together read every key.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Self::Ask)>;

    /// Checks further properties of the store at a node after the faults have ended.
    ///
    /// # Errors
    /// Returns a description of the violated property.
    async fn audit(&self, _scene: &Scene, _node: &Node, _store: &str) -> Result<(), String> {
        Ok(())
    }
}

/// The loss of a node's memory, or a crash of its machine.
pub(crate) struct Loss {
    /// Times of the deaths of the node's processes since the store was created, or since the loss before this one. The
    /// last one is the time of this loss.
    pub(crate) deaths: Vec<Nanos>,
    /// Start and end of each period in which the node could not write its log in time.
    pub(crate) stalls: Vec<[Nanos; 2]>,
}

/// What a store has kept: operations that bring an empty store to its state, and whether any operation was lost.
pub(crate) type Kept<F> = (Vec<(u64, <F as Family>::Ask, OutcomeOf<F>)>, bool);

/// The sessions over which a task opens a store.
pub(crate) struct Seat<'a, F: Family> {
    pub(crate) scene: &'a Rc<Scene>,
    pub(crate) site: &'a Site,
    /// Number of the client, and its process.
    pub(crate) client: u32,
    pub(crate) process: ProcessId,
    /// The client's sessions with the node. There is at least one.
    pub(crate) fabrics: Vec<Tracked>,
    /// State that all tasks of the client share, for as long as the sessions last.
    pub(crate) shared: &'a F::Shared,
    /// The first key, in the history, of the store's contents.
    pub(crate) first_key: u64,
}

impl<F: Family> Seat<'_, F> {
    /// The client's first session.
    pub(crate) fn fabric(&self) -> Tracked {
        self.fabrics[0].clone()
    }
}

/// Error of an operation that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Whether the failed operation may have been carried out.
    pub(crate) ran: Ran,
    pub(crate) kind: FailureKind,
    /// Text of the operation's error.
    pub(crate) message: String,
}

/// Kind of a failure: its consequence for the store and the session.
#[derive(Debug, PartialEq)]
pub(crate) enum FailureKind {
    /// The store had no free buffer.
    OutOfMemory,
    /// The operation failed, and the session is still usable.
    Declined,
    /// The disk of the store's log was full. Nothing was done, and the session is still usable.
    DiskFull,
    /// The disk of the store's log was full when the node started with other memory, so the log accepts nothing until
    /// the node is started again. Nothing was done, and the session is still usable.
    Unpaired,
    /// The disk of the store's log has failed to sync, so the log accepts nothing until the node is started again. The
    /// session is still usable.
    SyncFailed,
    /// So many answers were lost that the operation has failed. Faults of messages are to blame, and the session is
    /// still usable.
    Interrupted,
    /// The store has no ids left for new clients. No fault is to blame, and the session is still usable.
    NoIds,
    /// The node denied the client an access. This is a violation unless the store has been dropped.
    Refused,
    /// The failure must not happen under any fault.
    Wrong,
    /// The session has ended, or the store has been dropped.
    Over,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        KvError::from(error).into()
    }
}

impl From<KvError> for Failure {
    fn from(error: KvError) -> Failure {
        let (kind, message) = match &error {
            KvError::OutOfMemory => (FailureKind::OutOfMemory, error.to_string()),
            KvError::TableFull(_) | KvError::NotMoved | KvError::Fabric(FabricError::Deadline { .. }) => {
                (FailureKind::Declined, error.to_string())
            }
            KvError::Refused(status) => {
                (FailureKind::Refused, format!("a client was denied an access that it is allowed: {status}"))
            }
            KvError::Damaged(what) => {
                (FailureKind::Wrong, format!("a client found the store damaged: {what}"))
            }
            _ => (FailureKind::Over, error.to_string()),
        };
        Failure { ran: error.ran(), kind, message }
    }
}
