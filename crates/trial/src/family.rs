//! The interface through which trials use a family of systems: the operations that clients draw, how a system carries
//! out these operations, and the properties that must hold.
//!
//! All other parts of a trial are generic over families. To add a family, add a file to this folder and a line to
//! [`crate::systems`].

use crate::flight::{Phases, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene};
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_sim::checker::Checker;
use farside_sim::history::Ask;
use farside_sim::history::lines::Written;
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_systems::kv::KvError;
use farside_systems::store::StoreError;

/// Type of the outcomes of a family's operations.
pub(crate) type OutcomeOf<F> = <<F as Family>::Ask as Ask>::Outcome;

/// A system under trial, with the options that a seed has drawn for the system.
pub(crate) trait Family: Sized + 'static {
    /// Type of the family's operations. The type of their outcomes is `Ask::Outcome`.
    type Ask: Written;
    /// Type of a client of one store.
    type Client;
    /// Type of the checker of the family's histories.
    type Checker: Checker<Ask = Self::Ask>;

    /// Whether a client may run in a node's process.
    const MAY_LIVE_AT_NODE: bool = false;

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

    /// Draws parameters with which the node rebuilds the store.
    fn rebuilt(&self, _random: &Random) -> String {
        unreachable!("stores of this family are never rebuilt")
    }

    /// Whether clients use chains only and never call the store's service.
    fn is_one_sided(&self) -> bool;

    /// Phases of the protocol of `system`.
    fn phases(system: System) -> &'static Phases;

    /// Returns the checker of the family's histories.
    fn checker(&self) -> Self::Checker;

    /// Opens the store `name` at `node` over `fabric`, and returns a client of the store.
    async fn open(&self, fabric: Tracked, node: NodeId, name: &str) -> Result<Self::Client, Failure>;

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

    /// Runs after each operation. May try a forbidden access, which the history does not record.
    async fn trespass(&self, _scene: &Scene, _client: &mut Self::Client) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns operations that together read every key.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Self::Ask)>;

    /// Checks further properties of a store after the faults have ended.
    ///
    /// # Errors
    /// Returns a description of the violated property.
    async fn audit(&self, _scene: &Scene, _node: &Node, _store: &str) -> Result<(), String> {
        Ok(())
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
