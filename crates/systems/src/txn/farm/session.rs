//! FaRM's part of a client's session: the binding of the sessions with the members, and the lanes as they were.

use super::log::EntryId;
use super::request::LaneState;
use super::site::Site;
use crate::identity::{self, Identity};
use crate::keyed::Keyed;
use crate::lease::{Expired, Lease, Leases, Observer};
use crate::system::Options;
use crate::txn::TxnError;
use crate::txn::session::{self, Recovery, SILENCE, Shards};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// A client's session with all members of a store.
pub(super) type Session<F> = session::Session<Site<F>>;

/// What a client keeps for its session.
pub(super) struct Joined {
    /// Counts of the last transactions of the id, by lane, when the session was opened.
    pub(super) counts: Vec<u64>,
    /// Time of silence after which a node ends a session.
    pub(super) silence: Duration,
}

impl<F: Fabric + Clock> Session<F> {
    /// The client's log entry of a lane.
    pub(super) fn entry(&self, lane: u16) -> EntryId {
        EntryId { client: self.id(), lane }
    }
}

impl<F: Fabric + Clock> Shards for Site<F> {
    type Fabric = F;
    type Joined = Joined;

    fn fabric(&self) -> &Keyed<F> {
        &self.fabric
    }

    fn leases(&self) -> &Leases<Rc<Keyed<F>>> {
        &self.leases
    }

    fn ids(&self) -> u16 {
        self.shards[0].spec().ids
    }

    fn lease(&self) -> Duration {
        self.shards[0].spec().lease()
    }

    async fn fetch_keys(&self) -> Result<(), TxnError> {
        self.fetch_first_keys(self.shards.len()).await
    }

    async fn fetch_first_key(&self) -> Result<(), TxnError> {
        self.fetch_first_keys(1).await
    }

    /// Binds the sessions with all members.
    async fn join(&self, lease: &Lease, options: &Options) -> Result<Joined, TxnError> {
        let identity = Identity { client: lease.id().number().into(), nonce: lease.nonce().get() };
        for (shard, store) in self.shards.iter().zip(&self.stores) {
            identity::bind(&*self.fabric, shard.node, store, identity).await.map_err(TxnError::of_read)?;
        }
        let states = self.look_at_all(lease.id()).await?;
        if states.iter().flatten().any(LaneState::is_open) {
            return Err(TxnError::Damaged("an unsettled transaction of an id without a holder"));
        }
        let last = |lane: usize| states.iter().map(|of| of[lane].last().count()).max().unwrap_or(0);
        let counts = (0..usize::from(self.shards[0].spec().lanes)).map(last).collect();
        Ok(Joined { counts, silence: options.silence.unwrap_or(SILENCE) })
    }

    async fn recover_client(&self, _: &RefCell<Observer>, expired: Expired) -> Result<Recovery, TxnError> {
        self.recover(expired).await
    }
}
