//! A client's lease, and the recovery of the locks of dead clients.
//!
//! The first member has the table of leases. Every member has redo records: before a change writes to a node, its lane
//! writes the bytes into its record at that node's member. A recoverer reads all locks of the members, which lie
//! together, and finds those of the dead client by the id in their words. The word selects the record.
//!
//! A lock keeps its word when it is handed over to another lane, until that lane changes the node: then the lane writes
//! its own word first. So the word is that of the last change under the lock. If its record is still there, the record
//! has the bytes that the node has, or should have.
//!
//! Invariant: no lock is taken from an owner before the owner was fenced at all members.
//! Invariant: a client that may hold a lock and does not know gives up, and never releases its lease. So the lease
//! expires, and others recover the lock.

use super::layout::{Damaged, Far, Layout, LockAt};
use crate::identity::{self, Identity};
use crate::index::IndexError;
use crate::lease::{self, ClientId, Entry, Expired, Fenced, Lease, LeaseError, Leases, LockWord, Observer};
use crate::redo::{self, Object, Record, Recovery, RedoError, Tokens};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, Reply, Status, read, read_as};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Pauses between two looks at a lock that another client has.
const PAUSE_FIRST: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of words that one READ returns.
const WORDS_PER_READ: u64 = 4096;

/// A client's session with all members of a store.
pub(super) struct Session<F> {
    pub(super) fabric: Rc<F>,
    pub(super) layout: Layout,
    /// The store's description at each member.
    stores: Vec<Store>,
    leases: Leases<Rc<F>>,
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    is_given_up: Cell<bool>,
    id: ClientId,
    nonce: NonZeroU64,
    tokens: Tokens,
    observer: RefCell<Observer>,
    recovered: Cell<u64>,
}

impl<F: Fabric + Clock> Session<F> {
    /// Leases an id with this nonce, which is random and new for each call, and binds the sessions with all members. If
    /// all ids are leased, waits for up to two lengths of a lease until one has expired, takes over its id, and
    /// recovers its locks.
    ///
    /// # Errors
    /// [`IndexError`]; the index was not changed.
    pub(super) async fn open(
        fabric: Rc<F>,
        layout: Layout,
        stores: Vec<Store>,
        nonce: NonZeroU64,
    ) -> Result<Session<F>, IndexError> {
        let leases = Leases::new(Rc::clone(&fabric), vec![layout.leases()], layout.spec.ids);
        let first = (nonce.get() % u64::from(layout.spec.ids)) as u16;
        let (lease, inherited) = match leases.claim(nonce, first).await {
            Err(LeaseError::NoneFree) => take_over(&fabric, &layout, &stores, &leases, nonce).await?,
            claimed => (claimed?, None),
        };
        let identity = Identity { client: lease.id().number().into(), nonce: nonce.get() };
        for (table, store) in layout.members.iter().zip(&stores) {
            identity::bind(&*fabric, table.node, store, identity).await.map_err(IndexError::of_read)?;
        }
        let session = Session {
            id: lease.id(),
            nonce,
            lease: RefCell::new(Some(lease)),
            is_renewing: Cell::new(false),
            is_given_up: Cell::new(false),
            tokens: Tokens::default(),
            observer: RefCell::new(Observer::new(layout.spec.lease())),
            recovered: Cell::new(0),
            fabric,
            layout,
            stores,
            leases,
        };
        if let Some(inherited) = inherited {
            let recovery = session.recover_locks(session.spare_lane(), &inherited);
            session.renewing(recovery, || ()).await?;
            session.recovered.set(1);
        }
        Ok(session)
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.id
    }

    /// Nonce of the client, which no other client has ever had.
    pub(super) fn nonce(&self) -> NonZeroU64 {
        self.nonce
    }

    /// Number of dead clients that this one has recovered.
    pub(super) fn recovered(&self) -> u64 {
        self.recovered.get()
    }

    /// Lane that no operation uses.
    pub(super) fn spare_lane(&self) -> u16 {
        self.layout.spec.lanes
    }

    /// Whether the client has lost its lease, or has given it up.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Renews the lease no more, so that other clients fence this one and recover its locks.
    pub(super) fn give_up(&self) {
        self.is_given_up.set(true);
        self.lease.take();
    }

    /// Gives the lease back, unless the client has given it up. It holds no locks, and all its requests were answered.
    pub(super) async fn release(&self) {
        let lease = self.lease.take();
        if let Some(lease) = lease {
            let _else_it_expires = self.leases.release(lease).await;
        }
    }

    /// Runs a future to its end. Renews the lease meanwhile. Calls `lost` if the lease is lost.
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
        let period = self.layout.spec.lease() / 4;
        loop {
            self.fabric.sleep(period).await;
            let Some(mut lease) = self.lease.take() else { return };
            self.is_renewing.set(true);
            let renewed = self.leases.renew(&mut lease).await;
            self.is_renewing.set(false);
            match renewed {
                Err(LeaseError::Lost | LeaseError::Refused(_) | LeaseError::Exhausted) => self.give_up(),
                Err(LeaseError::Fabric(FabricError::Lost { .. } | FabricError::NodeDied(_))) => {
                    self.give_up()
                }
                // The client may have given up while the renewal was in flight.
                _ if self.is_given_up.get() => {}
                _ => _ = self.lease.replace(Some(lease)),
            }
            if self.is_given_up.get() {
                return lost();
            }
        }
    }

    /// Returns the word of the next operation of a lane.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn next_word(&self, lane: u16) -> Result<LockWord, IndexError> {
        if self.is_given_up.get() {
            return Err(IndexError::Lost);
        }
        let areas = &self.layout.members[0].areas;
        self.tokens.next(&*self.fabric, areas, self.id, lane).await.map_err(of_redo)
    }

    /// Waits until a lock is no longer held, for a while. If its owner's lease has expired, recovers all locks of the
    /// owner. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`]; nothing of the caller's was changed.
    pub(super) async fn wait_for(&self, lane: u16, lock: LockAt) -> Result<(), IndexError> {
        let (table, at) = (&self.layout.members[lock.member], self.layout.addr(self.layout.lock(lock), 8)?);
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let (mut pause, mut first) = (PAUSE_FIRST, None);
        while pause <= PAUSE_MAX {
            let mut chain = buffer.begin(table.extent.key);
            let held = chain.also(read_as::<LockWord>(at));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let held = *reply.get(held).map_err(refused)?;
            let Some(owner) = held.owner().filter(|_| first.is_none_or(|first| first == held)) else {
                return Ok(());
            };
            if owner.number() > self.layout.spec.ids {
                return Err(Damaged("a lock of an id that the store does not have").into());
            }
            if owner != self.id
                && let Some(expired) = self.look(owner).await?
            {
                return self.recover(lane, expired).await;
            }
            first = Some(held);
            self.fabric.sleep(pause).await;
            pause *= 2;
        }
        Ok(())
    }

    /// Reads an id's lease. Returns a proof if the lease has expired.
    async fn look(&self, id: ClientId) -> Result<Option<Expired>, IndexError> {
        let entry = self.leases.entry(id).await?;
        Ok(self.observer.borrow_mut().look(id, entry, self.fabric.now()))
    }

    /// Nonces of the clients that hold an id.
    pub(super) async fn nonces(&self) -> Result<Vec<u64>, IndexError> {
        let mut nonces = Vec::new();
        for id in (1..=self.layout.spec.ids).filter_map(ClientId::new) {
            nonces.extend(self.leases.entry(id).await?.nonce().map(NonZeroU64::get));
        }
        Ok(nonces)
    }

    /// Watches the leases of all other ids for the length of a lease, and recovers the clients whose leases expire.
    ///
    /// # Errors
    /// [`IndexError`]; some dead clients may have been recovered.
    pub(super) async fn heal(&self, lane: u16) -> Result<(), IndexError> {
        let ids = (1..=self.layout.spec.ids).filter_map(ClientId::new).filter(|id| *id != self.id);
        let mut watched: Vec<(ClientId, Option<Entry>)> = ids.map(|id| (id, None)).collect();
        while !watched.is_empty() {
            let mut left = Vec::new();
            for (id, first) in watched {
                let entry = self.leases.entry(id).await?;
                let expired = self.observer.borrow_mut().look(id, entry, self.fabric.now());
                if let Some(expired) = expired {
                    self.recover(lane, expired).await?;
                } else if entry.nonce().is_some() && first.is_none_or(|first| first == entry) {
                    left.push((id, Some(entry)));
                }
            }
            watched = left;
            if !watched.is_empty() {
                self.fabric.sleep(self.layout.spec.lease() / 4).await;
            }
        }
        Ok(())
    }

    /// Fences a client whose lease has expired, recovers its locks, and frees its id.
    async fn recover(&self, lane: u16, expired: Expired) -> Result<(), IndexError> {
        let fenced = fence(&*self.fabric, &self.layout, &self.stores, &self.leases, expired).await?;
        self.recover_locks(lane, &fenced).await?;
        match self.leases.free(fenced.recovered()).await {
            Ok(()) => self.recovered.set(self.recovered.get() + 1),
            Err(LeaseError::Lost) => {} // Another client has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Recovers the locks of a fenced client.
    async fn recover_locks(&self, lane: u16, fenced: &Fenced) -> Result<(), IndexError> {
        let mut held = Vec::new();
        for (lock, word) in self.locks().await? {
            if word.owner() == Some(fenced.id()) {
                held.push((lock, word));
            }
        }
        // A client that recovers the locks of its own id must keep the records that they need.
        let lanes = u64::from(self.spare_lane()) + 1;
        let is_needed = |lane: &u16| held.iter().any(|(_, word)| word.token() % lanes == u64::from(*lane));
        let lane = match self.id == fenced.id() {
            false => lane,
            true => (0..=self.spare_lane())
                .rev()
                .find(|lane| !is_needed(lane))
                .ok_or(Damaged("more locks of an id than its client has lanes"))?,
        };
        for (lock, word) in held {
            self.recover_lock(lane, fenced, lock, word).await?;
        }
        Ok(())
    }

    /// Reads all locks that are held.
    pub(super) async fn locks(&self) -> Result<Vec<(LockAt, LockWord)>, IndexError> {
        let (count, mut held) = (u64::from(self.layout.spec.locks), Vec::new());
        for member in 0..self.layout.members.len() {
            let first = self.layout.lock(LockAt { member, index: 0 });
            for (index, word) in self.words(first, count).await?.into_iter().enumerate() {
                let word = LockWord::of_bits(word);
                if !word.is_free() {
                    held.push((LockAt { member, index: index as u64 }, word));
                }
            }
        }
        Ok(held)
    }

    async fn recover_lock(
        &self,
        lane: u16,
        fenced: &Fenced,
        at: LockAt,
        word: LockWord,
    ) -> Result<(), IndexError> {
        let (table, lock) = (&self.layout.members[at.member], self.layout.addr(self.layout.lock(at), 8)?);
        let own_word = self.next_word(lane).await?;
        let entry = self.leases.entry(fenced.id()).await?;
        let (mut buffer, mut reply, mut own) = (ChainBuf::new(), Reply::new(), Record::default());
        let mut chain = buffer.begin(table.extent.key);
        let found = chain.also(read(table.areas.record(word), table.areas.record_len()));
        self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        let found = reply.get(found).map_err(refused)?;
        // A record of another operation names other bytes, and does not count.
        let object = match redo::intended(found) {
            Some((of, bytes_at, len)) if of == word && self.layout.guards(at, bytes_at, len) => {
                Object { lock, at: Addr::new(bytes_at), len: len as u32 }
            }
            _ => Object { lock, at: lock, len: 0 },
        };
        let recovery = Recovery::of(fenced, &object, (word, entry, found), (&mut own, own_word));
        let recovery = recovery.map_err(of_redo)?;
        if recovery == Recovery::Over {
            return Ok(());
        }
        // From here on, this client may hold the lock.
        let unknown = |error: FabricError| {
            if error.ran() != Ran::No {
                self.give_up();
            }
            IndexError::of_read(error)
        };
        let mut chain = buffer.begin(table.extent.key);
        let taken = recovery.take(&mut chain, &table.areas, &object, &own);
        self.fabric.run(table.node, &chain, &mut reply).await.map_err(unknown)?;
        match (reply.status(taken), &recovery) {
            (Status::Ok, Recovery::Redo(_)) => {
                let mut chain = buffer.begin(table.extent.key);
                own.finish(&mut chain, &object);
                let ran = self.fabric.run(table.node, &chain, &mut reply).await;
                ran.inspect_err(|_| self.give_up()).map_err(IndexError::of_read)?;
                match reply.verdict() {
                    Status::Ok => Ok(()),
                    status => {
                        self.give_up();
                        Err(refused(status))
                    }
                }
            }
            // Another recoverer may have been faster.
            (Status::Ok | Status::CasFailed, _) => Ok(()),
            (status, _) => Err(refused(status)),
        }
    }

    /// Reads words of the store.
    pub(super) async fn words(&self, at: Far, count: u64) -> Result<Vec<u64>, IndexError> {
        let table = &self.layout.members[at.member()];
        let (mut buffer, mut reply, mut all) = (ChainBuf::new(), Reply::new(), Vec::new());
        for first in (0..count).step_by(WORDS_PER_READ as usize) {
            let len = (count - first).min(WORDS_PER_READ) * 8;
            let mut chain = buffer.begin(table.extent.key);
            let words = chain.also(read(self.layout.addr(at.plus(first * 8), len)?, len as u32));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let words = reply.get(words).map_err(refused)?.chunks_exact(8);
            all.extend(words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))));
        }
        if all.len() as u64 == count { Ok(all) } else { Err(Damaged("a short READ").into()) }
    }
}

/// Fences the client of an expired lease at all members.
async fn fence<F: Fabric + Clock>(
    fabric: &F,
    layout: &Layout,
    stores: &[Store],
    leases: &Leases<Rc<F>>,
    expired: Expired,
) -> Result<Fenced, IndexError> {
    for (table, store) in layout.members.iter().zip(stores).skip(1) {
        if !lease::mutants::TAKEN_UNFENCED.is_on() {
            let fenced = identity::fence(fabric, table.node, store, expired.nonce().get()).await;
            fenced.map_err(IndexError::of_read)?;
        }
    }
    Ok(leases.fence(expired, &stores[0]).await?)
}

/// Claims an id that becomes free, or takes over the id of a client whose lease expires.
///
/// # Errors
/// [`LeaseError::NoneFree`] if all leases are renewed.
async fn take_over<F: Fabric + Clock>(
    fabric: &Rc<F>,
    layout: &Layout,
    stores: &[Store],
    leases: &Leases<Rc<F>>,
    nonce: NonZeroU64,
) -> Result<(Lease, Option<Fenced>), IndexError> {
    let length = layout.spec.lease();
    let (begun, mut observer) = (fabric.now(), Observer::new(length));
    loop {
        for id in (1..=layout.spec.ids).filter_map(ClientId::new) {
            let entry = leases.entry(id).await?;
            if entry.nonce().is_none() {
                match leases.claim(nonce, id.number() - 1).await {
                    Err(LeaseError::NoneFree) => continue,
                    claimed => return Ok((claimed?, None)),
                }
            }
            let Some(expired) = observer.look(id, entry, fabric.now()) else { continue };
            let fenced = fence(&**fabric, layout, stores, leases, expired).await?;
            match leases.take_over(fenced, nonce).await {
                Err(LeaseError::Lost) => {} // Another client was faster.
                taken => return taken.map(|(lease, fenced)| (lease, Some(fenced))).map_err(IndexError::from),
            }
        }
        if fabric.now().saturating_sub(begun) > 2 * length {
            return Err(LeaseError::NoneFree.into());
        }
        fabric.sleep(length / 4).await;
    }
}

pub(super) fn refused(status: Status) -> IndexError {
    IndexError::Refused { status, ran: Ran::No }
}

fn of_redo(error: RedoError) -> IndexError {
    match error {
        RedoError::NoTokens => IndexError::Lost,
        RedoError::Refused(status) => refused(status),
        RedoError::Damaged => IndexError::Damaged("a redo record of another node"),
        RedoError::Fabric(error) => IndexError::of_read(error),
    }
}
