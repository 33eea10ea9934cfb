//! The holder of a leased id: renews its lease, and recovers the locks of dead holders.
//!
//! Each lock of the store guards an object that is updated in place, under a [`LockWord`] with the id of its owner. A
//! holder that finds a lock held watches the owner's lease ([`crate::lease`]). If the lease expires, it fences the
//! owner at the node, recovers all locks of the owner by their redo records ([`crate::redo`]), and frees the owner's
//! id. If a new holder finds all ids leased, it waits until a lease has expired, fences the dead holder, takes over
//! its id, and recovers the locks that it inherits.
//!
//! Invariant: no lock is taken from an owner before the owner was fenced.
//! Invariant: a holder that may hold a lock and does not know, or that cannot free a lock, gives up, and never releases
//! its lease. So the lease expires, and others recover the lock. In particular, a renewal that ends later does not
//! bring the lease back.

use crate::lease::{ClientId, Entry, Expired, Fenced, Lease, LeaseError, Leases, LockWord, Observer, Table};
use crate::redo::{Areas, Object, Record, Recovery, RedoError, Tokens};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Capabilities, ChainBuf, Fabric, FabricError, NodeId, Reply, Status, read, read_as};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use zerocopy::FromBytes;

/// Broken recoveries.
pub(crate) mod mutants {
    farside_remote::mutants! {
        /// The image that a recovery writes has the lock of the dead holder, which nobody frees any more.
        LOCK_OF_DEAD_HOLDER_WRITTEN = "HolderLockOfDeadHolderWritten";
    }
}

/// Longest pause between two looks at a lock that another holder has.
const PAUSE_MAX: Duration = Duration::from_millis(1);
const PAUSE_FIRST: Duration = Duration::from_micros(10);
/// Number of lock words that one chain of a recovery reads.
const LOCKS_PER_CHAIN: u64 = 32;

/// The locks of a store, and the objects that they guard.
pub(crate) trait Locks {
    /// Number of objects.
    fn count(&self) -> u64;

    /// Location of an object.
    fn object(&self, number: u64) -> Object;

    /// Changes the bytes of an object, which contain its lock, to those under a lock with this word. Does nothing if
    /// the bytes do not contain the lock.
    fn set_lock(&self, _bytes: &mut [u8], _word: LockWord) {}
}

/// Ids of a store, and the length of their leases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids {
    /// Number of ids.
    pub(crate) count: u16,
    /// Length of a lease.
    pub(crate) lease: Duration,
}

impl Ids {
    /// The ids of the store.
    pub(crate) fn all(self) -> impl Iterator<Item = ClientId> {
        (1..=self.count).filter_map(ClientId::new)
    }
}

/// Where a store's table of leases and its redo records lie, and the session by which they are reached.
#[derive(Debug)]
pub(crate) struct Way<'a, F> {
    pub(crate) fabric: &'a F,
    pub(crate) areas: &'a Areas,
    pub(crate) table: &'a Table,
}

impl<F> Clone for Way<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Way<'_, F> {}

impl<F> Way<'_, F> {
    fn node(&self) -> NodeId {
        self.table.node
    }
}

/// Error of a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HolderError {
    /// A lease was not claimed, renewed or fenced.
    Lease(LeaseError),
    /// A redo record failed.
    Redo(RedoError),
    /// The node refused a chain with this status.
    Refused(Status),
    /// The store holds bytes that no client writes.
    Damaged(&'static str),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl From<FabricError> for HolderError {
    fn from(error: FabricError) -> HolderError {
        HolderError::Fabric(error)
    }
}

impl From<LeaseError> for HolderError {
    fn from(error: LeaseError) -> HolderError {
        match error {
            LeaseError::Fabric(error) => HolderError::Fabric(error.map_ran(|_| Ran::No)),
            error => HolderError::Lease(error),
        }
    }
}

impl From<RedoError> for HolderError {
    fn from(error: RedoError) -> HolderError {
        match error {
            RedoError::Fabric(error) => HolderError::Fabric(error),
            error => HolderError::Redo(error),
        }
    }
}

/// Holder of a leased id of one store on one node.
pub(crate) struct Holder<F, L> {
    store: Store,
    ids: Ids,
    locks: L,
    leases: Leases<F>,
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    /// Whether the holder may hold a lock that it cannot free, so that it must be fenced.
    is_given_up: Cell<bool>,
    id: ClientId,
    tokens: Tokens,
    observer: RefCell<Observer>,
    /// Number of dead holders that this one has recovered.
    recovered: Cell<u64>,
}

/// Runs a future to its end, and renews a lease meanwhile. Waits for the end of the last renewal, which has the lease:
/// `is_renewing` says whether one is in flight.
pub(crate) async fn beside_renewals<T>(
    future: impl Future<Output = T>,
    renewals: impl Future<Output = ()>,
    is_renewing: &Cell<bool>,
) -> T {
    let (mut future, mut renewals) = (pin!(future), pin!(renewals));
    let (mut output, mut is_over) = (None, false);
    poll_fn(|cx| {
        is_over = is_over || renewals.as_mut().poll(cx).is_ready();
        if output.is_none()
            && let Poll::Ready(ended) = future.as_mut().poll(cx)
        {
            output = Some(ended);
        }
        match output.take() {
            Some(ended) if !is_renewing.get() => Poll::Ready(ended),
            unfinished => {
                output = unfinished;
                Poll::Pending
            }
        }
    })
    .await
}

impl<F: Fabric + Clock + Clone, L: Locks> Holder<F, L> {
    /// Leases an id with this nonce, which is random and new for each call. If all ids are leased, waits for up to two
    /// lengths of a lease until one has expired, and takes over its id. Then it also returns the proof with which
    /// [`Holder::inherit`] recovers the locks of that id. The caller binds its sessions first.
    ///
    /// # Errors
    /// [`HolderError`]; no object was changed.
    pub(crate) async fn open(
        way: Way<'_, F>,
        store: &Store,
        ids: Ids,
        locks: L,
        nonce: NonZeroU64,
    ) -> Result<(Holder<F, L>, Option<Fenced>), HolderError> {
        let leases = Leases::new(way.fabric.clone(), vec![*way.table], ids.count);
        let (lease, inherited) = match claim(&leases, ids, nonce).await {
            Err(LeaseError::NoneFree) => take_over(&leases, way.fabric, store, ids, nonce).await?,
            claimed => (claimed?, None),
        };
        let holder = Holder {
            store: store.clone(),
            ids,
            locks,
            leases,
            id: lease.id(),
            lease: RefCell::new(Some(lease)),
            is_renewing: Cell::new(false),
            is_given_up: Cell::new(false),
            tokens: Tokens::default(),
            observer: RefCell::new(Observer::new(ids.lease)),
            recovered: Cell::new(0),
        };
        Ok((holder, inherited))
    }

    /// The store's locks.
    pub(crate) fn locks(&self) -> &L {
        &self.locks
    }

    /// The leased id.
    pub(crate) fn id(&self) -> ClientId {
        self.id
    }

    /// Number of dead holders that this one has recovered.
    pub(crate) fn recovered(&self) -> u64 {
        self.recovered.get()
    }

    /// Runs a future to its end, and renews the lease meanwhile. Waits for the end of the last renewal, which has the
    /// lease. Calls `lost` if the lease is lost.
    pub(crate) async fn renewing<T>(&self, future: impl Future<Output = T>, lost: impl Fn()) -> T {
        beside_renewals(future, self.renew(lost), &self.is_renewing).await
    }

    /// Renews the lease until the holder gives up. While a client that was closed ends its operations, it still needs
    /// the lease.
    async fn renew(&self, lost: impl Fn()) {
        let (period, fabric) = (self.ids.lease / 4, self.leases.fabric());
        let give_up = || {
            self.give_up();
            lost();
        };
        loop {
            fabric.sleep(period).await;
            let Some(mut lease) = self.lease.take() else { return };
            let mut renewal = Renewal::begin(self);
            let renewed = self.leases.renew(&mut lease).await;
            renewal.is_over = true;
            drop(renewal);
            match renewed {
                Err(LeaseError::Lost | LeaseError::Refused(_)) => return give_up(),
                Err(LeaseError::Fabric(FabricError::Lost { .. } | FabricError::NodeDied(_))) => {
                    return give_up();
                }
                // The holder may have given up while the renewal was in flight.
                _ if self.is_given_up.get() => return,
                _ => _ = self.lease.replace(Some(lease)),
            }
        }
    }

    /// Gives the lease back, unless the holder has given up. The holder has no locks.
    pub(crate) async fn release(&self) {
        // A holder that has lost a lock, or does not know, has given up its lease: it is fenced.
        let lease = self.lease.take();
        if let Some(lease) = lease {
            let _else_it_expires = self.leases.release(lease).await;
        }
    }

    /// Returns the word of the next operation of a lane.
    ///
    /// # Errors
    /// [`HolderError`]; nothing was changed.
    pub(crate) async fn next_word(&self, way: Way<'_, F>, lane: u16) -> Result<LockWord, HolderError> {
        Ok(self.tokens.next(way.fabric, way.areas, self.id, lane).await?)
    }

    /// Waits a while for the owner of a lock. If the owner's lease has expired, recovers the owner's locks. `lane` is a
    /// lane of the holder that has no lock.
    ///
    /// # Errors
    /// [`HolderError`].
    pub(crate) async fn wait_for(
        &self,
        way: Way<'_, F>,
        lane: u16,
        object: &Object,
        word: LockWord,
    ) -> Result<(), HolderError> {
        let owner = word.owner().filter(|owner| owner.number() <= self.ids.count);
        let owner = owner.ok_or(HolderError::Damaged("a lock of an id that the store does not have"))?;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut pause = PAUSE_FIRST;
        while pause <= PAUSE_MAX {
            way.fabric.sleep(pause).await;
            pause *= 2;
            let asked = way.fabric.now();
            let mut chain = buffer.begin(way.areas.key);
            let now_held = chain.also(read_as::<LockWord>(object.lock));
            let entry = chain.also(read_as::<Entry>(way.table.entry(owner)).fenced());
            way.fabric.run(way.node(), &chain, &mut reply).await.map_err(of_read)?;
            let now_held = *reply.get(now_held).map_err(HolderError::Refused)?;
            let entry = *reply.get(entry).map_err(HolderError::Refused)?;
            if now_held != word || owner == self.id {
                return Ok(());
            }
            let expired = self.observer.borrow_mut().look(owner, entry, asked, way.fabric.now());
            if let Some(expired) = expired {
                return self.recover(way, lane, expired).await;
            }
        }
        Ok(())
    }

    /// Watches the leases of all other ids, and recovers the holders whose leases expire.
    ///
    /// # Errors
    /// [`HolderError`]; some dead holders may have been recovered.
    pub(crate) async fn heal(&self, way: Way<'_, F>, lane: u16) -> Result<(), HolderError> {
        let mut first = BTreeMap::new();
        let mut watched: BTreeSet<ClientId> = self.ids.all().filter(|id| *id != self.id).collect();
        loop {
            for id in watched.clone() {
                let (entry, expired) = self.leases.observe(&self.observer, id).await?;
                if let Some(expired) = expired {
                    self.recover(way, lane, expired).await?;
                    watched.remove(&id);
                } else if entry.nonce().is_none() || *first.entry(id).or_insert(entry) != entry {
                    watched.remove(&id);
                }
            }
            if watched.is_empty() {
                return Ok(());
            }
            way.fabric.sleep(self.ids.lease / 4).await;
        }
    }

    /// Fences a holder whose lease has expired, recovers its locks, and frees its id.
    async fn recover(&self, way: Way<'_, F>, lane: u16, expired: Expired) -> Result<(), HolderError> {
        let fenced = self.leases.fence(expired, &self.store).await?;
        for (number, word) in self.locks_of(way, fenced.id()).await? {
            self.recover_lock(way, lane, &fenced, &self.locks.object(number), word).await?;
        }
        match self.leases.free(fenced.recovered()).await {
            Ok(()) => self.recovered.set(self.recovered.get() + 1),
            Err(LeaseError::Lost) => {} // Another holder has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Recovers the locks of the dead holder whose id this one has taken over.
    ///
    /// # Errors
    /// [`HolderError`]; some locks may have been recovered.
    pub(crate) async fn inherit(&self, way: Way<'_, F>, inherited: &Fenced) -> Result<(), HolderError> {
        let held = self.locks_of(way, self.id).await?;
        let records = way.areas.lanes;
        let needed: BTreeSet<u64> = held.iter().map(|(_, word)| word.token() % u64::from(records)).collect();
        let spare = (0..records).find(|record| !needed.contains(&u64::from(*record)));
        let lane = spare.ok_or(HolderError::Damaged("more locks of an id than its client has lanes"))?;
        for (number, word) in held {
            self.recover_lock(way, lane, inherited, &self.locks.object(number), word).await?;
        }
        self.recovered.set(self.recovered.get() + 1);
        Ok(())
    }

    /// Reads all locks. Returns the objects whose locks have this owner, with the locks' words.
    async fn locks_of(&self, way: Way<'_, F>, owner: ClientId) -> Result<Vec<(u64, LockWord)>, HolderError> {
        let (mut buffer, mut reply, mut held) = (ChainBuf::new(), Reply::new(), Vec::new());
        for first in (0..self.locks.count()).step_by(LOCKS_PER_CHAIN as usize) {
            let batch = first..(first + LOCKS_PER_CHAIN).min(self.locks.count());
            let mut chain = buffer.begin(way.areas.key);
            for number in batch.clone() {
                chain.also(read_as::<LockWord>(self.locks.object(number).lock));
            }
            way.fabric.run(way.node(), &chain, &mut reply).await.map_err(of_read)?;
            for (index, number) in batch.enumerate() {
                let status = reply.status_at(index).unwrap_or(Status::Skipped);
                let bytes = Some(reply.output(index)).filter(|_| status == Status::Ok);
                let word = bytes
                    .and_then(|bytes| LockWord::read_from_bytes(bytes).ok())
                    .ok_or(HolderError::Refused(status))?;
                if word.owner() == Some(owner) {
                    held.push((number, word));
                }
            }
        }
        Ok(held)
    }

    /// Recovers one lock of a fenced holder. Gives up if it fails and may leave the lock with this holder.
    async fn recover_lock(
        &self,
        way: Way<'_, F>,
        lane: u16,
        fenced: &Fenced,
        object: &Object,
        word: LockWord,
    ) -> Result<(), HolderError> {
        let Way { fabric, areas, table } = way;
        let (mut buffer, mut reply, mut own) = (ChainBuf::new(), Reply::new(), Record::default());
        let own_word = self.next_word(way, lane).await?;
        let mut chain = buffer.begin(areas.key);
        let now_held = chain.also(read_as::<LockWord>(object.lock));
        // A NIC may otherwise execute these READs before the first one.
        let entry = chain.also(read_as::<Entry>(table.entry(fenced.id())).fenced());
        let record = chain.also(read(areas.record(word), areas.record_len()).fenced());
        fabric.run(way.node(), &chain, &mut reply).await.map_err(of_read)?;
        let now_held = *reply.get(now_held).map_err(HolderError::Refused)?;
        let entry = *reply.get(entry).map_err(HolderError::Refused)?;
        let found = reply.get(record).map_err(HolderError::Refused)?;
        if now_held != word {
            return Ok(());
        }
        let recovery = Recovery::of(fenced, object, (word, entry, found), (&mut own, own_word))?;
        match recovery {
            Recovery::Over => return Ok(()),
            Recovery::Free(_) => {}
            Recovery::Redo(_) => {
                let mut bytes = own.of_object(object).to_vec();
                if !mutants::LOCK_OF_DEAD_HOLDER_WRITTEN.is_on() {
                    self.locks.set_lock(&mut bytes, own_word);
                }
                own.fill(own_word, object, &bytes);
            }
        }
        // To free the lock of an operation that has changed nothing takes no lock.
        let takes = matches!(recovery, Recovery::Redo(_));
        let is_conditional = fabric.capabilities(way.node()).contains(Capabilities::CONDITIONAL_OPS);
        let mut is_taken = false;
        let mut chain = buffer.begin(areas.key);
        if is_conditional {
            recovery.chain(&mut chain, areas, object, &own);
        } else {
            let taken = recovery.take(&mut chain, areas, object, &own);
            let ran = fabric.run(way.node(), &chain, &mut reply).await.map_err(HolderError::from);
            ran.inspect_err(|error| {
                if takes && may_have_run(error) {
                    self.give_up();
                }
            })?;
            if reply.status(taken) != Status::Ok || !takes {
                return of_recovery(reply.status(taken));
            }
            is_taken = true;
            chain = buffer.begin(areas.key);
            own.finish(&mut chain, object);
        }
        let ran = fabric.run(way.node(), &chain, &mut reply).await.map_err(HolderError::from);
        let recovered = ran.and_then(|()| of_recovery(reply.verdict()));
        recovered.inspect_err(|error| {
            if is_taken || takes && may_have_run(error) {
                self.give_up();
            }
        })
    }
}

impl<F, L> Holder<F, L> {
    /// Whether the holder has given up, so that it must be fenced.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Ends the holder without releasing its lease, which then expires.
    pub(crate) fn give_up(&self) {
        self.is_given_up.set(true);
        self.lease.take();
    }
}

/// A renewal in flight, which has the lease. If it is dropped, nobody knows whether the lease was renewed, and the
/// holder gives up.
struct Renewal<'a, F, L> {
    holder: &'a Holder<F, L>,
    is_over: bool,
}

impl<'a, F, L> Renewal<'a, F, L> {
    fn begin(holder: &'a Holder<F, L>) -> Renewal<'a, F, L> {
        holder.is_renewing.set(true);
        Renewal { holder, is_over: false }
    }
}

impl<F, L> Drop for Renewal<'_, F, L> {
    fn drop(&mut self) {
        self.holder.is_renewing.set(false);
        if !self.is_over {
            self.holder.give_up();
        }
    }
}

/// Returns the outcome of the last chain of a recovery. A failed CAS means that another recoverer was faster.
fn of_recovery(status: Status) -> Result<(), HolderError> {
    match status {
        Status::Ok | Status::CasFailed | Status::Skipped => Ok(()),
        refused => Err(HolderError::Refused(refused)),
    }
}

/// Whether a request with this error may have run, all of it or a part.
fn may_have_run(error: &HolderError) -> bool {
    !matches!(error, HolderError::Fabric(error) if error.ran() == Ran::No)
}

/// Claims a free id. Clients with different nonces begin at different ids, so that they seldom compete.
async fn claim<F: Fabric + Clock>(
    leases: &Leases<F>,
    ids: Ids,
    nonce: NonZeroU64,
) -> Result<Lease, LeaseError> {
    leases.claim(nonce, (nonce.get() % u64::from(ids.count)) as u16).await
}

/// Claims an id that becomes free, or takes over the id of a holder whose lease expires. In the second case, also
/// returns the proof with which the locks of that holder are recovered.
///
/// # Errors
/// [`LeaseError::NoneFree`] if all leases are renewed.
async fn take_over<F: Fabric + Clock>(
    leases: &Leases<F>,
    fabric: &F,
    store: &Store,
    ids: Ids,
    nonce: NonZeroU64,
) -> Result<(Lease, Option<Fenced>), LeaseError> {
    let (begun, observer) = (fabric.now(), RefCell::new(Observer::new(ids.lease)));
    loop {
        for id in ids.all() {
            let (entry, expired) = leases.observe(&observer, id).await?;
            if entry.nonce().is_none() {
                match claim(leases, ids, nonce).await {
                    Err(LeaseError::NoneFree) => continue,
                    claimed => return claimed.map(|lease| (lease, None)),
                }
            }
            let Some(expired) = expired else { continue };
            match leases.take_over(leases.fence(expired, store).await?, nonce).await {
                Err(LeaseError::Lost) => {} // Another client was faster.
                taken => return taken.map(|lease| (lease.0, Some(lease.1))),
            }
        }
        if fabric.now().saturating_sub(begun) > 2 * ids.lease {
            return Err(LeaseError::NoneFree);
        }
        fabric.sleep(ids.lease / 4).await;
    }
}

/// Returns the error of a chain that only reads. Whether or not the chain ran, nothing was changed.
pub(crate) fn of_read(error: FabricError) -> HolderError {
    HolderError::Fabric(error.map_ran(|_| Ran::No))
}
