//! A family of systems, as its trials see it: what clients ask, how a system carries it out, and what must hold.
//!
//! Everything else of a trial is blind to families. A family is one file beside this one, and a line in
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

/// The outcome of what a family's clients ask.
pub(crate) type OutcomeOf<F> = <<F as Family>::Ask as Ask>::Outcome;

/// One system of a family under trial, with the options that a seed has drawn for it.
pub(crate) trait Family: Sized + 'static {
    /// What clients ask, and are answered.
    type Ask: Written;
    /// A client of one store.
    type Client;
    /// What decides whether a history is right.
    type Checker: Checker<Ask = Self::Ask>;

    /// Whether its clients may live in the process of a node.
    const MAY_LIVE_AT_NODE: bool = false;

    /// Draws a system's options. The parts of `drawn` that are drawn later are zero.
    fn drawn(system: System, drawn: &Drawn, random: &Random) -> Self;

    /// One operation in so many has the node rebuild the store's structure; none if 0.
    fn rebuild_one_in(&self, _random: &Random) -> u64 {
        0
    }

    /// The drawn options, for reports.
    fn options(&self) -> Vec<Choice>;

    /// The parameters by which the store is created.
    fn parameters(&self) -> String;

    /// Those of another structure for the same store.
    fn rebuilt(&self, _random: &Random) -> String {
        unreachable!("the stores of this family are never rebuilt")
    }

    /// Whether clients call no service of the store: their chains do everything.
    fn is_one_sided(&self) -> bool;

    /// The phases of a system's protocol.
    fn phases(system: System) -> &'static Phases;

    /// Judges histories.
    fn checker(&self) -> Self::Checker;

    /// Opens the store of that name.
    async fn open(&self, fabric: Tracked, node: NodeId, name: &str) -> Result<Self::Client, Failure>;

    /// Draws what a client asks next, and of which object.
    fn draw(&self, scene: &Scene, client: &mut Self::Client) -> (u64, Self::Ask);

    /// Carries it out. `who` is the number of the client.
    async fn perform(
        &self,
        scene: &Scene,
        client: &mut Self::Client,
        who: u32,
        key: u64,
        ask: &Self::Ask,
    ) -> Result<OutcomeOf<Self>, Failure>;

    /// After an operation: may try what no client is allowed to do, and is in no history.
    async fn trespass(&self, _scene: &Scene, _client: &mut Self::Client) -> Result<(), Failure> {
        Ok(())
    }

    /// The operations that read everything.
    fn look_at_all(&self, scene: &Scene) -> Vec<(u64, Self::Ask)>;

    /// Checks what else must hold of a store when all is quiet.
    ///
    /// # Errors
    /// What does not hold.
    async fn audit(&self, _scene: &Scene, _node: &Node, _store: &str) -> Result<(), String> {
        Ok(())
    }
}

/// Why an operation has no outcome.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Whether it may have been carried out.
    pub(crate) ran: Ran,
    pub(crate) why: Why,
    /// The error, in words.
    pub(crate) said: String,
}

/// What a failure says of the store and the session.
#[derive(Debug, PartialEq)]
pub(crate) enum Why {
    /// The store had no buffer left.
    OutOfMemory,
    /// The session is as good as before.
    Declined,
    /// The client was refused what it may ask.
    Refused,
    /// Whatever goes wrong, this must not happen.
    Wrong,
    /// The session is over, or the store is gone.
    Over,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        KvError::from(error).into()
    }
}

impl From<KvError> for Failure {
    fn from(error: KvError) -> Failure {
        let (why, said) = match &error {
            KvError::OutOfMemory => (Why::OutOfMemory, error.to_string()),
            KvError::TableFull(_) | KvError::NotMoved | KvError::Fabric(FabricError::Deadline { .. }) => {
                (Why::Declined, error.to_string())
            }
            KvError::Refused(status) => {
                (Why::Refused, format!("a client was refused what is its right: {status}"))
            }
            KvError::Damaged(what) => (Why::Wrong, format!("a client has found the store damaged: {what}")),
            _ => (Why::Over, error.to_string()),
        };
        Failure { ran: error.ran(), why, said }
    }
}
