//! A client's session with the members of a store: its lease, its timestamps, and the keys of the store.
//!
//! The table of leases of the first member counts. A client holds one id, whose log entries at every member are its
//! own. Timestamps are those of [`crate::stamps`], with the id.
//!
//! Invariant: a client that may have left an intent that it cannot settle gives up, and never releases its lease. So
//! the lease expires, and other clients settle the intent.

use super::KIND;
use super::layout::{EntryId, Shard, Timestamp, Word};
use crate::identity::{self, Identity};
use crate::keyed::Keyed;
use crate::lease::{ClientId, Lease, LeaseError, Leases, Table};
use crate::members::all;
use crate::rendezvous::Rendezvous;
use crate::stamps::Stamps;
use crate::store::{Members, StoreError};
use crate::system::Options;
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::{ChainBuf, Fabric, Reply, read};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use zerocopy::FromBytes;

/// A client's session with all members of a store.
pub(super) struct Session<F> {
    pub(super) fabric: Rc<Keyed<F>>,
    pub(super) shards: Box<[Shard]>,
    pub(super) places: Rendezvous,
    /// The store's description at each member.
    pub(super) stores: Vec<Store>,
    pub(super) leases: Leases<Rc<Keyed<F>>>,
    pub(super) stamps: Stamps<Rc<Keyed<F>>>,
    /// The words of the client's entries, as they were when the session was opened, by member and lane.
    pub(super) words: Vec<Vec<Word>>,
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    is_given_up: Cell<bool>,
    id: ClientId,
}

impl<F: Fabric + Clock> Session<F> {
    /// Leases an id and binds the sessions with all members.
    ///
    /// # Errors
    /// [`StoreError`]; the store was not changed.
    pub(super) async fn open(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Session<F>, StoreError> {
        let whole = members.whole()?;
        let stores: Vec<Store> = whole.iter().map(|(_, store)| (*store).clone()).collect();
        if options.entropy == 0 {
            return Err(StoreError::Gone(format!(
                "store '{}' has leases, and a client needs random entropy in its options, so that no two clients have \
                 one nonce: nothing was changed",
                stores[0].name
            )));
        }
        let shard = |(node, store): &(_, &Store)| Shard::new(*node, &store.parameters, store.extent());
        let shards: Box<[Shard]> =
            whole.iter().map(shard).collect::<Result<_, _>>().map_err(StoreError::Gone)?;
        let nonce = NonZeroU64::new(Draws(options.entropy).next()).unwrap_or(NonZeroU64::MIN);
        let (places, fabric) = (Rendezvous::of(members), Rc::new(Keyed::new(fabric, members)));
        Session::lease(fabric, shards, places, stores, nonce).await.map_err(not_opened)
    }

    async fn lease(
        fabric: Rc<Keyed<F>>,
        shards: Box<[Shard]>,
        places: Rendezvous,
        stores: Vec<Store>,
        nonce: NonZeroU64,
    ) -> Result<Session<F>, TxnError> {
        let table = Table { node: shards[0].node, key: shards[0].key(), at: shards[0].leases() };
        let ids = shards[0].spec().ids;
        let leases = Leases::new(Rc::clone(&fabric), vec![table], ids);
        fetch_keys(&fabric, &shards, &leases, shards.len()).await?;
        let first = (nonce.get() % u64::from(ids)) as u16;
        let lease = leases.claim(nonce, first).await?;
        let identity = Identity { client: lease.id().number().into(), nonce: nonce.get() };
        for (shard, store) in shards.iter().zip(&stores) {
            identity::bind(&*fabric, shard.node, store, identity).await.map_err(TxnError::of_read)?;
        }
        let nodes = shards.iter().map(|shard| shard.node);
        let described: Vec<_> = nodes.zip(&stores).collect();
        let stamps = Stamps::open_at(&leases, &lease, &described).await?;
        let read = all(shards.iter().map(|shard| read_words(&*fabric, shard, lease.id()))).await;
        let words = read.into_iter().collect::<Result<Vec<_>, _>>()?;
        if words.iter().flatten().any(|word| word.is_unsettled() || word.state().is_none()) {
            return Err(TxnError::Damaged("an unsettled transaction of an id without a holder"));
        }
        Ok(Session {
            id: lease.id(),
            lease: RefCell::new(Some(lease)),
            is_renewing: Cell::new(false),
            is_given_up: Cell::new(false),
            fabric,
            shards,
            places,
            stores,
            leases,
            stamps,
            words,
        })
    }

    /// Fetches the keys of the members with whose nodes the client has another session by now. Precedes each operation.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and a key is outdated.
    #[inline]
    pub(super) async fn fetch_keys(&self) -> Result<(), TxnError> {
        fetch_keys(&self.fabric, &self.shards, &self.leases, self.shards.len()).await
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.id
    }

    /// The client's log entry of a lane.
    pub(super) fn entry(&self, lane: u16) -> EntryId {
        EntryId { client: self.id, lane }
    }

    /// Returns the timestamp of a transaction: above this time in microseconds, and above all timestamps that the id
    /// has had.
    ///
    /// # Errors
    /// [`TxnError`]; the transaction must not prepare.
    pub(super) async fn timestamp(&self, above: u64) -> Result<Timestamp, TxnError> {
        let clock = self.stamps.next_above(above).await?;
        Timestamp::new(clock, self.id).ok_or(TxnError::TooOld)
    }

    /// If the store has commit-wait, waits until this timestamp has passed on every client's clock.
    pub(super) async fn await_clock(&self, ts: Timestamp) {
        let Some(error) = self.shards[0].spec().clock_error_us else { return };
        let passed = ts.clock().saturating_add(error.saturating_mul(2));
        loop {
            let now = self.stamps.time();
            if now > passed {
                return;
            }
            self.fabric.sleep(Duration::from_micros(passed - now + 1)).await;
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

    /// Gives the lease back, unless the client has given it up. Its entries are free or DONE, and all its requests were
    /// answered.
    pub(super) async fn release(&self) {
        let lease = self.lease.take();
        if let Some(lease) = lease
            && self.fetch_keys().await.is_ok()
        {
            let _else_it_expires = self.leases.release(lease).await;
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
        let period = self.shards[0].spec().lease() / 4;
        let give_up = || {
            self.give_up();
            lost();
        };
        loop {
            self.fabric.sleep(period).await;
            let Some(mut lease) = self.lease.take() else { return };
            self.is_renewing.set(true);
            // The first member has the lease. If its key is not fetched, the next renewal fetches it.
            let _else_nothing_is_sent = fetch_keys(&self.fabric, &self.shards, &self.leases, 1).await;
            match self.leases.renew(&mut lease).await {
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

/// Reads the words of all entries of a client at a member.
///
/// # Errors
/// [`TxnError`]; nothing was changed.
pub(super) async fn read_words<F: Fabric>(
    fabric: &F,
    shard: &Shard,
    client: ClientId,
) -> Result<Vec<Word>, TxnError> {
    const PER_READ: u16 = 1024;
    let (mut buffer, mut reply, mut words) = (ChainBuf::new(), Reply::new(), Vec::new());
    let lanes = shard.spec().lanes;
    for first in (0..lanes).step_by(PER_READ.into()) {
        let count = u32::from(PER_READ.min(lanes - first));
        let mut chain = buffer.begin(shard.key());
        let found =
            chain.also(read(shard.word(EntryId { client, lane: first }), count * size_of::<Word>() as u32));
        fabric.run(shard.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
        let found = <[Word]>::ref_from_bytes(reply.get(found).map_err(TxnError::Refused)?);
        words.extend_from_slice(found.map_err(|_| TxnError::Damaged("a short READ of the log"))?);
    }
    if words.len() == usize::from(lanes) {
        Ok(words)
    } else {
        Err(TxnError::Damaged("a short READ of the log"))
    }
}

/// Fetches the keys of those of the first `members` members with whose nodes the client has another session by now.
///
/// # Errors
/// [`TxnError`]; nothing was changed, and a key is outdated.
#[inline]
async fn fetch_keys<F: Fabric + Clock>(
    fabric: &Keyed<F>,
    shards: &[Shard],
    leases: &Leases<Rc<Keyed<F>>>,
    members: usize,
) -> Result<(), TxnError> {
    let granted = |member: usize, key| {
        shards[member].set_key(key);
        if member == 0 {
            leases.set_key(0, key);
        }
    };
    Ok(fabric.fetch_keys(members, granted).await?)
}

/// Returns the error of a store that was not opened or healed.
pub(super) fn not_opened(error: TxnError) -> StoreError {
    match error {
        TxnError::Fabric(error) => StoreError::Fabric(error),
        TxnError::Store(error) => error,
        error => StoreError::Gone(format!("the {KIND} store was not opened: {error}")),
    }
}
