//! A client's session with the members of a transactional store: its leased id, and the clients that are in its way.
//!
//! The table of leases of the first member counts. A client holds one id, whose log entries at every member are its
//! own. [`Shards`] is what differs among the systems: how a client joins the members, and how it recovers another one.
//!
//! Invariant: a client that may have left something that it cannot settle gives up, and never releases its lease. So
//! the lease expires, and other clients settle its transactions.

use crate::held::Held;
use crate::keyed::Keyed;
use crate::lease::{ClientId, Entry, Expired, Lease, LeaseError, Leases, Observer};
use crate::store::{Members, StoreError};
use crate::system::Options;
use crate::txn::TxnError;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// How often other recoverers may be faster than [`heal`] or [`claim`] at one client. It is the length of a lease each
/// time.
const PASSED_MAX: u32 = 16;

/// Time of silence after which a node ends a session, unless the client's options give another.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

/// The members of a store of one system.
pub(super) trait Shards: Sized {
    type Fabric: Fabric + Clock;

    /// What the system keeps for a session.
    type Joined;

    fn fabric(&self) -> &Keyed<Self::Fabric>;

    fn leases(&self) -> &Leases<Rc<Keyed<Self::Fabric>>>;

    /// Number of client ids.
    fn ids(&self) -> u16;

    /// Length of a lease.
    fn lease(&self) -> Duration;

    /// Fetches the keys of the members with whose nodes the client has another session by now.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and a key is outdated.
    async fn fetch_keys(&self) -> Result<(), TxnError>;

    /// Does the same for the first member.
    ///
    /// # Errors
    /// Those of [`Shards::fetch_keys`].
    async fn fetch_first_key(&self) -> Result<(), TxnError>;

    /// Has all members accept the requests of the client that has claimed this lease, and reads what the last holder of
    /// the id has left in its log: nothing that is unsettled.
    ///
    /// # Errors
    /// [`TxnError`]; no key was changed.
    async fn join(&self, lease: &Lease, options: &Options) -> Result<Self::Joined, TxnError>;

    /// Recovers the client of an expired lease. If it waits for other clients, `observer` watches their leases. Frees
    /// no id if another recoverer has freed it, or is about to: then the caller watches the lease anew, for its whole
    /// length, so that recoverers do not outdate each other for long.
    ///
    /// # Errors
    /// [`TxnError`]; the store is as correct as before.
    async fn recover_client(
        &self,
        observer: &RefCell<Observer>,
        expired: Expired,
    ) -> Result<Recovery, TxnError>;
}

/// Result of recoveries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Recovery {
    /// Number of clients whose ids are free now.
    pub(super) clients: u64,
    /// Number of transactions that were committed, and that were aborted.
    pub(super) committed: u64,
    pub(super) aborted: u64,
}

/// A recovery that is in progress.
type Running<'s> = (ClientId, Pin<Box<dyn Future<Output = Result<Recovery, TxnError>> + 's>>);

/// A client's session with all members of a store.
pub(super) struct Session<S: Shards> {
    pub(super) site: Rc<S>,
    /// What the system keeps for the session.
    pub(super) joined: S::Joined,
    held: Held,
    observer: RefCell<Observer>,
    /// Clients whose transactions are in the way of others, with their entries in the table of leases as they were
    /// first.
    suspects: RefCell<BTreeMap<ClientId, Option<Entry>>>,
}

impl<S: Shards> Session<S> {
    /// Leases an id and joins all members. If all ids are leased, waits for up to two lengths of a lease until one has
    /// expired, and settles the transactions of its holder. If another recoverer is faster, waits as long again: at
    /// most 16 times for a holder.
    ///
    /// # Errors
    /// [`StoreError`]; no key was changed.
    pub(super) async fn open(
        site: S,
        members: &Members,
        options: &Options,
    ) -> Result<Session<S>, StoreError> {
        if options.entropy == 0 {
            return Err(StoreError::Gone(format!(
                "store '{}' has leases, and a client needs random entropy in its options, so that no two clients have \
                 one nonce: nothing was changed",
                members.store().name
            )));
        }
        let nonce = NonZeroU64::new(Draws(options.entropy).next()).unwrap_or(NonZeroU64::MIN);
        Ok(Session::join(site, nonce, options).await?)
    }

    async fn join(site: S, nonce: NonZeroU64, options: &Options) -> Result<Session<S>, TxnError> {
        site.fetch_keys().await?;
        let lease = claim(&site, nonce).await?;
        let joined = site.join(&lease, options).await?;
        Ok(Session {
            joined,
            held: Held::new(lease),
            observer: RefCell::new(Observer::new(site.lease())),
            suspects: RefCell::default(),
            site: Rc::new(site),
        })
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.held.id()
    }

    /// Length of a lease.
    pub(super) fn lease(&self) -> Duration {
        self.site.lease()
    }

    /// Notes that a transaction of a client is in the way of others.
    pub(super) fn suspect(&self, client: Option<ClientId>) {
        let is_other = |id: &ClientId| *id != self.id() && id.number() <= self.site.ids();
        client
            .into_iter()
            .filter(is_other)
            .for_each(|id| _ = self.suspects.borrow_mut().entry(id).or_default());
    }

    /// Watches the leases of the clients whose transactions were in the way, and recovers the clients whose leases
    /// expire, all at the same time: a recovery may wait for a transaction that waits for another one. Calls `ended`
    /// with the outcome of each recovery. Runs as a task of the client, and never returns.
    pub(super) async fn keep_recovering(&self, ended: impl Fn(Result<Recovery, TxnError>)) {
        let running = RefCell::new(Vec::new());
        let mut watching = pin!(self.keep_watching(&running));
        poll_fn(|cx| {
            // A chain that nobody polls would stop all others of the client's own CPU.
            let _never_ends: Poll<()> = watching.as_mut().poll(cx);
            running.borrow_mut().retain_mut(|(id, recovery): &mut Running<'_>| {
                match recovery.as_mut().poll(cx) {
                    Poll::Ready(done) => {
                        if matches!(done, Ok(Recovery { clients: 0, .. })) {
                            self.observer.borrow_mut().forget(*id);
                        }
                        ended(done);
                        false
                    }
                    Poll::Pending => true,
                }
            });
            Poll::Pending
        })
        .await
    }

    /// Watches the leases of the clients whose transactions were in the way. Adds the recoveries of the clients whose
    /// leases expire to `running`. Never returns.
    async fn keep_watching<'s>(&'s self, running: &RefCell<Vec<Running<'s>>>) {
        loop {
            self.site.fabric().sleep(self.site.lease() / 8).await;
            let suspects = self.suspects.borrow().clone();
            for (id, first) in suspects {
                if running.borrow().iter().any(|(of, _)| *of == id) {
                    continue;
                }
                if self.site.fetch_first_key().await.is_err() {
                    break;
                }
                let observed = self.site.leases().observe(&self.observer, id).await;
                let Ok((entry, expired)) = observed else { break };
                let is_live = entry.nonce().is_none() || first.is_some_and(|first| first != entry);
                if expired.is_some() || is_live {
                    self.suspects.borrow_mut().remove(&id);
                } else {
                    self.suspects.borrow_mut().insert(id, Some(entry));
                }
                if let Some(expired) = expired {
                    // If it fails, the client is suspected again.
                    let recovery = self.site.recover_client(&self.observer, expired);
                    running.borrow_mut().push((id, Box::pin(recovery)));
                }
            }
        }
    }

    /// Whether the client has lost its lease, or has given it up.
    pub(super) fn is_given_up(&self) -> bool {
        self.held.is_given_up()
    }

    /// Renews the lease no more, so that other clients settle this one's transactions.
    pub(super) fn give_up(&self) {
        self.held.give_up();
    }

    /// Gives the lease back, unless the client has given it up. Its transactions are settled, and all its requests were
    /// answered.
    pub(super) async fn release(&self) {
        if let Some(lease) = self.held.take()
            && self.site.fetch_keys().await.is_ok()
        {
            let _else_it_expires = self.site.leases().release(lease).await;
        }
    }

    /// Runs a future to its end, and renews the lease meanwhile. Calls `lost` if the lease is lost.
    pub(super) async fn renewing<T>(&self, future: impl Future<Output = T>, lost: impl Fn()) -> T {
        let site = &*self.site;
        let renew = async |lease: &mut Lease| {
            // The first member has the lease. If its key is not fetched, the next renewal fetches it.
            let _else_nothing_is_sent = site.fetch_first_key().await;
            site.leases().renew(lease).await
        };
        self.held.renewing(future, (site.fabric(), site.lease() / 4), renew, lost).await
    }
}

/// Claims a free id. If there is none, recovers a client whose lease expires.
///
/// # Errors
/// [`LeaseError::NoneFree`] if all leases are renewed, or other recoverers are faster, and other clients claim the ids.
async fn claim<S: Shards>(site: &S, nonce: NonZeroU64) -> Result<Lease, TxnError> {
    let (ids, length) = (site.ids(), site.lease());
    let (mut begun, observer) = (site.fabric().now(), RefCell::new(Observer::new(length)));
    let mut passed: BTreeMap<ClientId, u32> = BTreeMap::new();
    loop {
        match site.leases().claim(nonce, (nonce.get() % u64::from(ids)) as u16).await {
            Err(LeaseError::NoneFree) => {}
            claimed => return Ok(claimed?),
        }
        let mut may_be_free = false;
        for id in (1..=ids).filter_map(ClientId::new) {
            let (_, expired) = site.leases().observe(&observer, id).await?;
            let Some(expired) = expired else { continue };
            may_be_free = true;
            if site.recover_client(&observer, expired).await?.clients > 0 {
                break;
            }
            // Another recoverer is faster, and another client may claim the id. Or the recoverer may die.
            observer.borrow_mut().forget(id);
            let times = passed.entry(id).or_default();
            *times += 1;
            if *times <= PASSED_MAX {
                begun = site.fabric().now();
            }
        }
        // A recovery may take longer than the lease.
        if may_be_free {
            continue;
        }
        if site.fabric().now().saturating_sub(begun) > 2 * length {
            return Err(LeaseError::NoneFree.into());
        }
        site.fabric().sleep(length / 4).await;
    }
}

/// Watches the leases of all ids until each was renewed, released, or has expired. Recovers the clients whose leases
/// expire. Takes about the length of a lease. Returns a description of what was done.
///
/// # Errors
/// [`StoreError`]; some dead clients may have been recovered.
pub(super) async fn heal<S: Shards>(site: &S) -> Result<Vec<String>, StoreError> {
    let Recovery { clients, committed, aborted } = recover_all(site).await?;
    let mut done = Vec::new();
    if clients > 0 {
        done.push(format!(
            "recovered {clients} dead clients: completed {committed} of their transactions and aborted {aborted}"
        ));
    }
    Ok(done)
}

async fn recover_all<S: Shards>(site: &S) -> Result<Recovery, TxnError> {
    site.fetch_keys().await?;
    let (mut recovery, observer) = (Recovery::default(), RefCell::new(Observer::new(site.lease())));
    let ids = (1..=site.ids()).filter_map(ClientId::new);
    let mut watched: Vec<(ClientId, Option<Entry>)> = ids.map(|id| (id, None)).collect();
    let mut passed: BTreeMap<ClientId, u32> = BTreeMap::new();
    loop {
        let mut left = Vec::new();
        for (id, first) in watched {
            let (entry, expired) = site.leases().observe(&observer, id).await?;
            if let Some(expired) = expired {
                let Recovery { clients, committed, aborted } =
                    site.recover_client(&observer, expired).await?;
                recovery.clients += clients;
                recovery.committed += committed;
                recovery.aborted += aborted;
                if clients == 0 {
                    // Another recoverer is faster. It may die before it has freed the id.
                    observer.borrow_mut().forget(id);
                    left.push((id, Some(entry)));
                    let times = passed.entry(id).or_default();
                    *times += 1;
                    if *times > PASSED_MAX {
                        return Err(TxnError::Store(StoreError::Gone(format!(
                            "the id of dead client {} is not free after {times} recoveries, though others may be: \
                             other clients recover it at the same time, or its epochs are damaged; heal the store \
                             again while fewer clients use it",
                            id.number()
                        ))));
                    }
                }
            } else if entry.nonce().is_some() && first.is_none_or(|first| first == entry) {
                left.push((id, Some(entry)));
            }
        }
        if left.is_empty() {
            return Ok(recovery);
        }
        watched = left;
        site.fabric().sleep(site.lease() / 4).await;
    }
}
