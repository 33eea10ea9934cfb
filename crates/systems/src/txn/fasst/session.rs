//! FaSST's part of a client's session: the epoch that all packets of the client name, and the lanes as they were.

use super::layout::EntryId;
use super::request::LaneState;
use super::site::Site;
use crate::keyed::Keyed;
use crate::lease::{Expired, Lease, Leases, Observer};
use crate::system::Options;
use crate::txn::TxnError;
use crate::txn::session::{self, Recovery, Shards};
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
    /// Epoch of the client's packets.
    pub(super) epoch: u64,
}

impl<F: Fabric + Clock> Session<F> {
    /// The client's lane with this number.
    pub(super) fn entry(&self, lane: u16) -> EntryId {
        EntryId { client: self.id(), lane }
    }

    /// Epoch of the client's packets.
    pub(super) fn epoch(&self) -> u64 {
        self.joined.epoch
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

    /// Has all members admit the epoch of the id that this client alone has. If a recoverer is faster, it takes a later
    /// one.
    async fn join(&self, lease: &Lease, _: &Options) -> Result<Joined, TxnError> {
        let epoch = self.grant(lease).await?;
        let states = self.raise(lease.id(), epoch).await?;
        if states.iter().flatten().any(LaneState::is_open) {
            return Err(TxnError::Damaged("an unsettled transaction of an id without a holder"));
        }
        let last = |lane: usize| states.iter().map(|of| of[lane].last().count()).max().unwrap_or(0);
        let counts = (0..usize::from(self.shards[0].spec().lanes)).map(last).collect();
        Ok(Joined { counts, epoch })
    }

    async fn recover_client(&self, _: &RefCell<Observer>, expired: Expired) -> Result<Recovery, TxnError> {
        self.recover(expired).await
    }
}
