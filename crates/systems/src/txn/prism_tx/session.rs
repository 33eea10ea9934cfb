//! PRISM-TX's part of a client's session: the binding of the sessions with the members, the timestamps, and the log
//! entries as they were. Timestamps are those of [`crate::stamps`], with the id.

use super::layout::{EntryId, Timestamp, Word};
use super::mutants;
use super::site::Site;
use crate::identity::{self, Identity};
use crate::keyed::Keyed;
use crate::lease::{Expired, Lease, Leases, Observer};
use crate::members::all;
use crate::stamps::Stamps;
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
pub(super) struct Joined<F> {
    pub(super) stamps: Stamps<Rc<Keyed<F>>>,
    /// The words of the client's entries, as they were when the session was opened, by member and lane.
    pub(super) words: Vec<Vec<Word>>,
    /// Time of silence after which a node ends a session.
    pub(super) silence: Duration,
}

impl<F: Fabric + Clock> Session<F> {
    /// The client's log entry of a lane.
    pub(super) fn entry(&self, lane: u16) -> EntryId {
        EntryId { client: self.id(), lane }
    }

    /// Returns the timestamp of a transaction: above this time in microseconds, and above all timestamps that the id
    /// has had.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not prepare.
    pub(super) async fn timestamp(&self, above: u64) -> Result<Timestamp, TxnError> {
        let clock = self.joined.stamps.next_above(above).await?;
        Timestamp::new(clock, self.id()).ok_or(TxnError::TooOld)
    }
}

impl<F: Fabric + Clock> Shards for Site<F> {
    type Fabric = F;
    type Joined = Joined<F>;

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
    async fn join(&self, lease: &Lease, options: &Options) -> Result<Joined<F>, TxnError> {
        let identity = Identity { client: lease.id().number().into(), nonce: lease.nonce().get() };
        for (shard, store) in self.shards.iter().zip(&self.stores) {
            identity::bind(&*self.fabric, shard.node, store, identity).await.map_err(TxnError::of_read)?;
        }
        let described: Vec<_> = self.shards.iter().map(|shard| shard.node).zip(&self.stores).collect();
        let stamps = Stamps::open_at(&self.leases, lease, &described).await?;
        let read = all((0..self.shards.len()).map(|shard| self.words_of(shard, lease.id()))).await;
        let words = read.into_iter().collect::<Result<Vec<_>, _>>()?;
        let is_wrong = |word: &Word| word.is_unsettled() || word.state().is_none();
        if words.iter().flatten().any(is_wrong) && !mutants::ID_FREED_EARLY.is_on() {
            return Err(TxnError::Damaged("an unsettled transaction of an id without a holder"));
        }
        Ok(Joined { stamps, words, silence: options.silence.unwrap_or(SILENCE) })
    }

    async fn recover_client(
        &self,
        observer: &RefCell<Observer>,
        expired: Expired,
    ) -> Result<Recovery, TxnError> {
        self.recover(observer, expired).await
    }
}
