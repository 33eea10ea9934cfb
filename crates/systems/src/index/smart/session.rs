//! A client's lease, its epochs, and the recovery of the locks of dead clients.
//!
//! A client goes on over the next session with a node after one was lost, unless a request was in flight that may have
//! changed something: then it gives up.
//!
//! The first member has the table of leases and of epochs. Every member has redo records: each lane of a client writes
//! into its record at a leaf's member which leaf it is about to lock (an *intent*), and before it updates the leaf, the
//! new bytes. So a recoverer reads the dead client's records, and never walks the tree.
//!
//! Invariant: no lock is taken from an owner before the owner was fenced at all members.
//! Invariant: a client that may hold a lock and does not know gives up, and never releases its lease. So the lease
//! expires, and others recover the lock.
//! Invariant: a lane has at most one lock, and its record at that lock's member names the locked leaf.

use super::keyed::Keyed;
use super::layout::{Far, Layout, lock_at};
use super::{Damaged, layout::Class};
use crate::epoch::Epochs;
use crate::identity::{self, Identity};
use crate::index::IndexError;
use crate::lease::{self, ClientId, Entry, Expired, Fenced, Lease, LeaseError, Leases, LockWord, Observer};
use crate::redo::{self, Record, Recovery, RedoError, Tokens};
use crate::store::StoreError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, Reply, Status, read, read_as, write};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use zerocopy::FromBytes;

/// Pauses between two looks at a lock that another client has.
const PAUSE_FIRST: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of intents that one chain of a recovery reads.
const INTENTS_PER_CHAIN: u16 = 32;

/// A client's session with all members of a store.
pub(super) struct Session<F> {
    pub(super) fabric: Rc<Keyed<F>>,
    pub(super) layout: Layout,
    /// The store's description at each member.
    stores: Vec<Store>,
    leases: Leases<Rc<Keyed<F>>>,
    pub(super) epochs: Epochs<Rc<Keyed<F>>>,
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    is_given_up: Cell<bool>,
    id: ClientId,
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
        fabric: Keyed<F>,
        layout: Layout,
        stores: Vec<Store>,
        nonce: NonZeroU64,
    ) -> Result<Session<F>, IndexError> {
        let fabric = Rc::new(fabric);
        let leases = Leases::new(Rc::clone(&fabric), vec![layout.leases()], layout.spec.ids);
        fetch_keys(&fabric, &layout, &leases, layout.members.len()).await?;
        let first = (nonce.get() % u64::from(layout.spec.ids)) as u16;
        let (lease, inherited) = match leases.claim(nonce, first).await {
            Err(LeaseError::NoneFree) => take_over(&fabric, &layout, &stores, &leases, nonce).await?,
            claimed => (claimed?, None),
        };
        let identity = Identity { client: lease.id().number().into(), nonce: nonce.get() };
        for (table, store) in layout.members.iter().zip(&stores) {
            identity::bind(&*fabric, table.node, store, identity).await.map_err(IndexError::of_read)?;
        }
        let epochs = Epochs::open(&leases, &lease).await?;
        let session = Session {
            id: lease.id(),
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
            epochs,
        };
        if let Some(inherited) = inherited {
            let recovery = async {
                let _guard = session.epochs.enter();
                session.recover_locks(session.spare_lane(), &inherited).await
            };
            session.renewing(recovery, || ()).await?;
            session.recovered.set(1);
        }
        Ok(session)
    }

    /// Fetches the keys of the members with whose nodes the client has another session by now. Precedes each operation.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed, and a key is outdated.
    #[inline]
    pub(super) async fn fetch_keys(&self) -> Result<(), IndexError> {
        fetch_keys(&self.fabric, &self.layout, &self.leases, self.layout.members.len()).await
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.id
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
        if let Some(lease) = lease
            && self.fetch_keys().await.is_ok()
        {
            let _else_it_expires = self.leases.release(lease).await;
        }
    }

    /// Runs a future to its end. Renews the lease and publishes epochs meanwhile. Calls `lost` if the lease is lost.
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
        let give_up = || {
            self.give_up();
            lost();
        };
        loop {
            self.fabric.sleep(period).await;
            let Some(mut lease) = self.lease.take() else { return };
            self.is_renewing.set(true);
            // The first member has the lease. If its key is not fetched, the next renewal fetches it.
            let _else_nothing_is_sent = fetch_keys(&self.fabric, &self.layout, &self.leases, 1).await;
            let renewed = self.leases.renew_and_advance(&mut lease, &self.epochs, period / 2).await;
            match renewed {
                Err(LeaseError::Lost | LeaseError::Refused(_) | LeaseError::Exhausted) => give_up(),
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

    /// Returns the word of the next operation of a lane.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn next_word(&self, lane: u16) -> Result<LockWord, IndexError> {
        if self.is_given_up.get() {
            return Err(IndexError::Lost);
        }
        let areas = self.layout.members[0].areas();
        self.tokens.next(&*self.fabric, &areas, self.id, lane).await.map_err(of_redo)
    }

    /// Waits a while for the owner of a leaf's lock, which has this word. If the owner's lease has expired, recovers
    /// all its locks. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`]; nothing of the caller's was changed.
    pub(super) async fn wait_for(
        &self,
        lane: u16,
        (leaf, class): (Far, Class),
        word: LockWord,
    ) -> Result<(), IndexError> {
        let owner = word.owner().filter(|owner| owner.number() <= self.layout.spec.ids);
        let owner = owner.ok_or(Damaged("a lock of an id that the store does not have"))?;
        let lock = self.layout.addr(leaf.plus(lock_at(class)), 8)?;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut pause = PAUSE_FIRST;
        while pause <= PAUSE_MAX {
            self.fabric.sleep(pause).await;
            pause *= 2;
            let table = &self.layout.members[leaf.member()];
            let mut chain = buffer.begin(table.key());
            let held = chain.also(read_as::<LockWord>(lock));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let held = *reply.get(held).map_err(refused)?;
            if held != word || owner == self.id {
                return Ok(());
            }
            if let Some(expired) = self.look(owner).await? {
                return self.recover(lane, expired).await;
            }
        }
        Ok(())
    }

    /// Reads an id's lease. Returns a proof if the lease has expired.
    pub(super) async fn look(&self, id: ClientId) -> Result<Option<Expired>, IndexError> {
        let entry = self.leases.entry(id).await?;
        Ok(self.observer.borrow_mut().look(id, entry, self.fabric.now()))
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

    /// Fences a client whose lease has expired, recovers its locks, and frees its id. Holds a guard, since a redone
    /// update links a value.
    pub(super) async fn recover(&self, lane: u16, expired: Expired) -> Result<(), IndexError> {
        let _guard = self.epochs.enter();
        let fenced = fence(&*self.fabric, &self.layout, &self.stores, &self.leases, expired).await?;
        self.recover_locks(lane, &fenced).await?;
        match self.leases.free(fenced.recovered()).await {
            Ok(()) => self.recovered.set(self.recovered.get() + 1),
            Err(LeaseError::Lost) => {} // Another client has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Recovers the locks that the records of a fenced client name.
    async fn recover_locks(&self, lane: u16, fenced: &Fenced) -> Result<(), IndexError> {
        let mut held = Vec::new();
        for member in 0..self.layout.members.len() {
            held.append(&mut self.intents(member, fenced.id()).await?);
        }
        // A client that recovers the locks of its own id must keep the records that they need.
        let lanes = u64::from(self.spare_lane()) + 1;
        let is_needed = |lane: &u16| held.iter().any(|(word, ..)| word.token() % lanes == u64::from(*lane));
        let lane = match self.id == fenced.id() {
            false => lane,
            true => (0..=self.spare_lane())
                .rev()
                .find(|lane| !is_needed(lane))
                .ok_or(Damaged("more locks of an id than its client has lanes"))?,
        };
        for (word, leaf, class) in held {
            self.recover_lock(lane, fenced, (leaf, class), word).await?;
        }
        Ok(())
    }

    /// Reads the intents of an id at a member. Returns the words whose locks are held, with the leaves.
    async fn intents(&self, member: usize, id: ClientId) -> Result<Vec<(LockWord, Far, Class)>, IndexError> {
        let table = &self.layout.members[member];
        let (mut buffer, mut reply, mut held) = (ChainBuf::new(), Reply::new(), Vec::new());
        let lanes = table.areas().lanes;
        for first in (0..lanes).step_by(INTENTS_PER_CHAIN.into()) {
            let batch = first..lanes.min(first + INTENTS_PER_CHAIN);
            let mut chain = buffer.begin(table.key());
            for lane in batch.clone() {
                let word = LockWord::new(id, lane.into()).expect("a lane has few bits");
                chain.also(read(table.areas().record(word), redo::INTENT_LEN));
            }
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let found: Vec<(LockWord, Far, Class)> = (0..batch.len())
                .filter_map(|index| {
                    let (word, at, len) = redo::intended(reply.output(index))?;
                    let (leaf, class) = self.layout.leaf_of_object(member, at, len)?;
                    (word.owner() == Some(id)).then_some((word, leaf, class))
                })
                .collect();
            if found.is_empty() {
                continue;
            }
            let mut chain = buffer.begin(table.key());
            for (_, leaf, class) in &found {
                chain.also(read_as::<LockWord>(self.layout.addr(leaf.plus(lock_at(*class)), 8)?));
            }
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            for (index, found) in found.into_iter().enumerate() {
                let word = LockWord::read_from_bytes(reply.output(index)).unwrap_or_default();
                if word == found.0 {
                    held.push(found);
                }
            }
        }
        Ok(held)
    }

    async fn recover_lock(
        &self,
        lane: u16,
        fenced: &Fenced,
        (leaf, class): (Far, Class),
        word: LockWord,
    ) -> Result<(), IndexError> {
        let (table, object) = (&self.layout.members[leaf.member()], self.layout.object(leaf, class)?);
        let own_word = self.next_word(lane).await?;
        let entry = self.leases.entry(fenced.id()).await?;
        let (mut buffer, mut reply, mut own) = (ChainBuf::new(), Reply::new(), Record::default());
        let mut chain = buffer.begin(table.key());
        let found = chain.also(read(table.areas().record(word), table.areas().record_len()));
        self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        let found = reply.get(found).map_err(refused)?;
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
        let mut chain = buffer.begin(table.key());
        let taken = recovery.take(&mut chain, &table.areas(), &object, &own);
        self.fabric.run(table.node, &chain, &mut reply).await.map_err(unknown)?;
        match (reply.status(taken), &recovery) {
            (Status::Ok, Recovery::Redo(_)) => {
                // The bytes end with a free lock.
                let mut chain = buffer.begin(table.key());
                let written = chain.also(write(object.at, own.of_object(&object)));
                let ran = self.fabric.run(table.node, &chain, &mut reply).await;
                ran.inspect_err(|_| self.give_up()).map_err(IndexError::of_read)?;
                match reply.status(written) {
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

    /// Address of the record of an operation at a member.
    pub(super) fn record(&self, member: usize, word: LockWord) -> Addr {
        self.layout.members[member].areas().record(word)
    }
}

/// Fetches the keys of those of the first `members` members with whose nodes the client has another session by now.
///
/// # Errors
/// [`IndexError`]; nothing was changed, and a key is outdated.
#[inline]
async fn fetch_keys<F: Fabric + Clock>(
    fabric: &Keyed<F>,
    layout: &Layout,
    leases: &Leases<Rc<Keyed<F>>>,
    members: usize,
) -> Result<(), IndexError> {
    let granted = |member: usize, key| {
        layout.members[member].set_key(key);
        if member == 0 {
            leases.set_key(0, key);
        }
    };
    fabric.fetch_keys(members, granted).await.map_err(|error| match error {
        StoreError::Fabric(error) => IndexError::of_read(error),
        error => error.into(),
    })
}

/// Fences the client of an expired lease at all members.
async fn fence<F: Fabric + Clock>(
    fabric: &Keyed<F>,
    layout: &Layout,
    stores: &[Store],
    leases: &Leases<Rc<Keyed<F>>>,
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
    fabric: &Rc<Keyed<F>>,
    layout: &Layout,
    stores: &[Store],
    leases: &Leases<Rc<Keyed<F>>>,
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
        RedoError::Damaged => IndexError::Damaged("a redo record of another leaf"),
        RedoError::Fabric(error) => IndexError::of_read(error),
    }
}
