//! A client's session with the members of a store: its lease, and the keys of the store.
//!
//! The table of leases of the first member counts. A client holds one id, whose log entries at every member are its
//! own.
//!
//! Invariant: a client that may have left locks that it cannot free gives up, and never releases its lease. So the
//! lease expires, and other clients settle its transactions.

use super::KIND;
use super::layout::{EntryId, TxnId};
use super::recover::Recovery;
use super::request::LaneState;
use super::site::Site;
use crate::identity::{self, Identity};
use crate::lease::{ClientId, Entry, Lease, LeaseError, Observer};
use crate::store::{Members, StoreError};
use crate::system::Options;
use crate::txn::TxnError;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Time of silence after which a node ends a session, unless the client's options give another.
const SILENCE: Duration = Duration::from_secs(5);

/// A client's session with all members of a store.
pub(super) struct Session<F> {
    pub(super) site: Rc<Site<F>>,
    /// Counts of the last transactions of the id, by lane, when the session was opened.
    pub(super) counts: Vec<u64>,
    /// Time of silence after which a node ends a session.
    pub(super) silence: Duration,
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    is_given_up: Cell<bool>,
    id: ClientId,
    pub(super) observer: RefCell<Observer>,
    /// Clients whose transactions are in the way of others, with their entries in the table of leases as they were
    /// first.
    suspects: RefCell<BTreeMap<ClientId, Option<Entry>>>,
}

impl<F: Fabric + Clock> Session<F> {
    /// Leases an id and binds the sessions with all members. If all ids are leased, waits for up to two lengths of a
    /// lease until one has expired, and settles the transactions of its holder.
    ///
    /// # Errors
    /// [`StoreError`]; no key was changed.
    pub(super) async fn open(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Session<F>, StoreError> {
        let site = Site::new(fabric, members)?;
        if options.entropy == 0 {
            return Err(StoreError::Gone(format!(
                "store '{}' has leases, and a client needs random entropy in its options, so that no two clients have \
                 one nonce: nothing was changed",
                members.store().name
            )));
        }
        let nonce = NonZeroU64::new(Draws(options.entropy).next()).unwrap_or(NonZeroU64::MIN);
        Session::lease(site, nonce, options.silence.unwrap_or(SILENCE)).await.map_err(not_opened)
    }

    async fn lease(site: Site<F>, nonce: NonZeroU64, silence: Duration) -> Result<Session<F>, TxnError> {
        site.fetch_keys().await?;
        let lease = claim(&site, nonce).await?;
        let identity = Identity { client: lease.id().number().into(), nonce: nonce.get() };
        for (shard, store) in site.shards.iter().zip(&site.stores) {
            identity::bind(&*site.fabric, shard.node, store, identity).await.map_err(TxnError::of_read)?;
        }
        let states = site.look_at_all(lease.id()).await?;
        if states.iter().flatten().any(LaneState::is_open) {
            return Err(TxnError::Damaged("an unsettled transaction of an id without a holder"));
        }
        let last = |lane: usize| states.iter().map(|of| of[lane].last().count()).max().unwrap_or(0);
        let counts = (0..usize::from(site.shards[0].spec().lanes)).map(last).collect();
        Ok(Session {
            id: lease.id(),
            lease: RefCell::new(Some(lease)),
            is_renewing: Cell::new(false),
            is_given_up: Cell::new(false),
            observer: RefCell::new(Observer::new(site.lease())),
            suspects: RefCell::default(),
            site: Rc::new(site),
            counts,
            silence,
        })
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.id
    }

    /// The client's log entry of a lane.
    pub(super) fn entry(&self, lane: u16) -> EntryId {
        EntryId { client: self.id, lane }
    }

    /// Notes that a transaction is in the way of others.
    pub(super) fn suspect(&self, txn: TxnId) {
        txn.entry().into_iter().for_each(|entry| self.suspect_client(entry.client));
    }

    /// Notes that a transaction of a client is in the way of others.
    pub(super) fn suspect_client(&self, id: ClientId) {
        if id != self.id && id.number() <= self.site.shards[0].spec().ids {
            self.suspects.borrow_mut().entry(id).or_default();
        }
    }

    /// Watches the leases of the clients whose transactions were in the way, and recovers the clients whose leases
    /// expire. Runs as a task of the client, and never returns.
    pub(super) async fn keep_recovering(&self, recovered: impl Fn(Recovery)) {
        loop {
            self.site.fabric.sleep(self.site.lease() / 8).await;
            let suspects = self.suspects.borrow().clone();
            for (id, first) in suspects {
                if self.site.fetch_first_keys(1).await.is_err() {
                    break;
                }
                let observed = self.site.leases.observe(&self.observer, id).await;
                let Ok((entry, expired)) = observed else { break };
                let is_live = entry.nonce().is_none() || first.is_some_and(|first| first != entry);
                if let Some(expired) = expired {
                    // If it fails, the client is suspected again.
                    if let Ok(recovery) = self.site.recover(expired).await {
                        recovered(recovery);
                    }
                    self.suspects.borrow_mut().remove(&id);
                } else if is_live {
                    self.suspects.borrow_mut().remove(&id);
                } else {
                    self.suspects.borrow_mut().insert(id, Some(entry));
                }
            }
        }
    }

    /// Whether the client has lost its lease, or has given it up.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Renews the lease no more, so that other clients fence this one and settle its transactions.
    pub(super) fn give_up(&self) {
        self.is_given_up.set(true);
        self.lease.take();
    }

    /// Gives the lease back, unless the client has given it up. Its transactions are settled, and all its requests were
    /// answered.
    pub(super) async fn release(&self) {
        let lease = self.lease.take();
        if let Some(lease) = lease
            && self.site.fetch_keys().await.is_ok()
        {
            let _else_it_expires = self.site.leases.release(lease).await;
        }
    }

    /// Runs a future to its end, and renews the lease meanwhile. Calls `lost` if the lease is lost.
    pub(super) async fn renewing<T>(&self, future: impl Future<Output = T>, lost: impl Fn()) -> T {
        let (mut future, mut renewing) = (pin!(future), pin!(self.renew(lost)));
        let (mut output, mut is_over) = (None, false);
        poll_fn(|cx| {
            is_over = is_over || renewing.as_mut().poll(cx).is_ready();
            if output.is_none()
                && let Poll::Ready(ended) = future.as_mut().poll(cx)
            {
                output = Some(ended);
            }
            match output.take() {
                Some(ended) if !self.is_renewing.get() => Poll::Ready(ended),
                unfinished => {
                    output = unfinished;
                    Poll::Pending
                }
            }
        })
        .await
    }

    async fn renew(&self, lost: impl Fn()) {
        let period = self.site.lease() / 4;
        let give_up = || {
            self.give_up();
            lost();
        };
        loop {
            self.site.fabric.sleep(period).await;
            let Some(mut lease) = self.lease.take() else { return };
            self.is_renewing.set(true);
            // The first member has the lease. If its key is not fetched, the next renewal fetches it.
            let _else_nothing_is_sent = self.site.fetch_first_keys(1).await;
            match self.site.leases.renew(&mut lease).await {
                Err(LeaseError::Lost | LeaseError::Refused(_)) => give_up(),
                Err(LeaseError::Fabric(error)) if error.is_fenced() => give_up(),
                // The client may have given up while the renewal was in flight.
                _ if self.is_given_up.get() => {}
                _ => _ = self.lease.replace(Some(lease)),
            }
            self.is_renewing.set(false);
            if self.is_given_up.get() {
                return;
            }
        }
    }
}

/// Claims a free id. If there is none, recovers a client whose lease expires.
///
/// # Errors
/// [`LeaseError::NoneFree`] if all leases are renewed.
async fn claim<F: Fabric + Clock>(site: &Site<F>, nonce: NonZeroU64) -> Result<Lease, TxnError> {
    let (ids, length) = (site.shards[0].spec().ids, site.lease());
    let (begun, observer) = (site.fabric.now(), RefCell::new(Observer::new(length)));
    loop {
        match site.leases.claim(nonce, (nonce.get() % u64::from(ids)) as u16).await {
            Err(LeaseError::NoneFree) => {}
            claimed => return Ok(claimed?),
        }
        let mut is_one_free = false;
        for id in (1..=ids).filter_map(ClientId::new) {
            let (_, expired) = site.leases.observe(&observer, id).await?;
            if let Some(expired) = expired
                && site.recover(expired).await?.clients > 0
            {
                is_one_free = true;
                break;
            }
        }
        // A recovery may take longer than the lease.
        if is_one_free {
            continue;
        }
        if site.fabric.now().saturating_sub(begun) > 2 * length {
            return Err(LeaseError::NoneFree.into());
        }
        site.fabric.sleep(length / 4).await;
    }
}

/// Returns the error of a store that was not opened or healed.
pub(super) fn not_opened(error: TxnError) -> StoreError {
    match error {
        TxnError::Fabric(error) => StoreError::Fabric(error),
        TxnError::Store(error) => error,
        error => StoreError::Gone(format!("the {KIND} store was not opened: {error}")),
    }
}
