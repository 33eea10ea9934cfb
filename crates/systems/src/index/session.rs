//! The session of an index's client: its lease, its epochs, and the recovery of the locks of dead clients.
//!
//! A client goes on over the next session with a node after one was lost, unless a request was in flight that may have
//! changed something: then it gives up.
//!
//! The first member has the table of leases and of epochs. Every member has redo records: before a change writes to an
//! object in place, its lane writes the new bytes into its record at that member. How the locks of a dead client are
//! found, and which object a lock guards, is the system's matter ([`Locked`]).
//!
//! Invariant: no lock is taken from an owner before the owner was fenced at all members.
//! Invariant: a client that may hold a lock and does not know gives up, and never releases its lease. So the lease
//! expires, and others recover the lock.
//! Invariant: a lane has at most one lock, and its record at that lock's member is not needed by any other operation.

use super::mutants;
use super::place::{self, Damaged, Far, Member};
use crate::epoch::Epochs;
use crate::held::Held;
use crate::identity::{self, Identity};
use crate::index::IndexError;
use crate::keyed::Keyed;
use crate::lease::{self, ClientId, Expired, Fenced, Lease, LeaseError, Leases, LockWord, Observer};
use crate::members::wait_for;
use crate::redo::{Object, Record, Recovery, RedoError, Tokens};
use crate::store::{Members, StoreError};
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::leases::{ENTRY_SIZE, Holder};
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, Reply, Status, read, read_as};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// Pauses between two looks at a lock that another client has.
const PAUSE_FIRST: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of words, and of entries of the table of leases, that one READ returns.
pub(super) const WORDS_PER_READ: u64 = 4096;
const ENTRIES_PER_READ: u64 = 512;
/// Number of times that a holder must raise its epoch until its operations of the noted epoch have ended.
const ADVANCES: u64 = 2;

/// Limits of a store's clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Number of client ids.
    pub(super) ids: u16,
    /// Number of concurrent changes of a client.
    pub(super) lanes: u16,
    /// Length of a lease.
    pub(super) lease: Duration,
}

/// Layout of a system's stores, as the sessions of its clients use it.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub(super) trait Locked: Sized {
    /// A lock.
    type Lock: Copy;

    fn members(&self) -> &[Member];

    fn terms(&self) -> Terms;

    /// Reads the locks that an id holds, with their words.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    async fn held<F: Fabric + Clock>(
        session: &Session<F, Self>,
        id: ClientId,
    ) -> Result<Vec<(LockWord, Self::Lock)>, IndexError>;

    /// Index of a lock's member.
    fn member_of(lock: Self::Lock) -> usize;

    /// Returns the bytes that the holder of a lock with this word may have changed. `record` is the record of the word.
    ///
    /// # Errors
    /// No such lock is there.
    fn object(&self, lock: Self::Lock, word: LockWord, record: &[u8]) -> Result<Object, Damaged>;
}

/// A client's session with all members of a store.
pub(super) struct Session<F, L> {
    pub(super) fabric: Rc<Keyed<F>>,
    pub(super) layout: L,
    /// The store's description at each member.
    stores: Vec<Store>,
    leases: Leases<Rc<Keyed<F>>>,
    pub(super) epochs: Epochs<Rc<Keyed<F>>>,
    held: Held,
    nonce: NonZeroU64,
    tokens: Tokens,
    observer: RefCell<Observer>,
    recovered: Cell<u64>,
}

impl<F: Fabric + Clock, L: Locked> Session<F, L> {
    /// Leases an id and binds the sessions with all members. If all ids are leased, waits for up to two lengths of a
    /// lease until one has expired, takes over its id, and recovers its locks.
    ///
    /// # Errors
    /// [`StoreError`]; the index was not changed.
    pub(super) async fn open(
        fabric: F,
        members: &Members,
        layout: L,
        options: &Options,
    ) -> Result<Session<F, L>, StoreError> {
        let stores: Vec<Store> = members.whole()?.iter().map(|(_, store)| (*store).clone()).collect();
        let Store { kind, name, .. } = &stores[0];
        if options.entropy == 0 {
            return Err(StoreError::Gone(format!(
                "store '{name}' has leases, and a client needs random entropy in its options, so that no two clients \
                 have one nonce: nothing was changed",
            )));
        }
        let nonce = NonZeroU64::new(Draws(options.entropy).next()).unwrap_or(NonZeroU64::MIN);
        let kind = kind.clone();
        let opened = Session::lease(Keyed::new(fabric, members), layout, stores, nonce).await;
        opened.map_err(|error| not_opened(&kind, error))
    }

    async fn lease(
        fabric: Keyed<F>,
        layout: L,
        stores: Vec<Store>,
        nonce: NonZeroU64,
    ) -> Result<Session<F, L>, IndexError> {
        let (fabric, terms) = (Rc::new(fabric), layout.terms());
        let leases = Leases::new(Rc::clone(&fabric), vec![place::leases(layout.members())], terms.ids);
        fetch_keys(&fabric, layout.members(), &leases, layout.members().len()).await?;
        let first = (nonce.get() % u64::from(terms.ids)) as u16;
        let (lease, inherited) = match leases.claim(nonce, first).await {
            Err(LeaseError::NoneFree) => take_over(&fabric, &layout, &stores, &leases, nonce).await?,
            claimed => (claimed?, None),
        };
        let identity = Identity { client: lease.id().number().into(), nonce: nonce.get() };
        for (member, store) in layout.members().iter().zip(&stores) {
            identity::bind(&*fabric, member.node, store, identity).await.map_err(IndexError::of_read)?;
        }
        let epochs = Epochs::open(&leases, &lease).await?;
        let session = Session {
            nonce,
            held: Held::new(lease),
            tokens: Tokens::default(),
            observer: RefCell::new(Observer::new(terms.lease)),
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
        let members = self.layout.members();
        fetch_keys(&self.fabric, members, &self.leases, members.len()).await
    }

    /// Id of the client.
    pub(super) fn id(&self) -> ClientId {
        self.held.id()
    }

    /// The client's nonce, which no other client has ever had.
    pub(super) fn nonce(&self) -> NonZeroU64 {
        self.nonce
    }

    /// Number of dead clients that this one has recovered.
    pub(super) fn recovered(&self) -> u64 {
        self.recovered.get()
    }

    /// Lane that no operation uses.
    pub(super) fn spare_lane(&self) -> u16 {
        self.layout.terms().lanes
    }

    /// Whether the client has lost its lease, or has given it up.
    pub(super) fn is_given_up(&self) -> bool {
        self.held.is_given_up()
    }

    /// Renews the lease no more, so that other clients fence this one and recover its locks.
    pub(super) fn give_up(&self) {
        self.held.give_up();
    }

    /// Gives up after something has failed that follows a change, and returns the error of the change.
    pub(super) fn unsettled(&self, error: IndexError) -> IndexError {
        self.give_up();
        IndexError::Unsettled(Box::new(error))
    }

    /// Gives up after the WRITE of a change was refused with a status, and returns the error of the change. `recorded`
    /// is the status of the WRITE of its redo record: who recovers this client's lock carries out a recorded change.
    pub(super) fn refused_write(&self, status: Status, recorded: Option<Status>) -> IndexError {
        match recorded {
            Some(Status::Ok) => self.unsettled(refused(status)),
            _ => {
                self.give_up();
                refused(status)
            }
        }
    }

    /// Gives the lease back, unless the client has given it up. It holds no locks, and all its requests were answered.
    pub(super) async fn release(&self) {
        if let Some(lease) = self.held.take()
            && self.fetch_keys().await.is_ok()
        {
            let _else_it_expires = self.leases.release(lease).await;
        }
    }

    /// Runs a future to its end. Renews the lease and publishes epochs meanwhile. Calls `lost` if the lease is lost.
    pub(super) async fn renewing<T>(&self, future: impl Future<Output = T>, lost: impl Fn()) -> T {
        let period = self.layout.terms().lease / 4;
        let renew = async |lease: &mut Lease| {
            // The first member has the lease. If its key is not fetched, the next renewal fetches it.
            let _else_nothing_is_sent =
                fetch_keys(&self.fabric, self.layout.members(), &self.leases, 1).await;
            self.leases.renew_and_advance(lease, &self.epochs, period / 2).await
        };
        self.held.renewing(future, (&*self.fabric, period), renew, lost).await
    }

    /// Returns the word of the next operation of a lane.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn next_word(&self, lane: u16) -> Result<LockWord, IndexError> {
        if self.held.is_given_up() {
            return Err(IndexError::Lost);
        }
        let areas = self.layout.members()[0].areas();
        self.tokens.next(&*self.fabric, &areas, self.id(), lane).await.map_err(of_redo)
    }

    /// Waits a while for the owner of the lock at an address of a member, which has this word. If the owner's lease has
    /// expired, recovers all its locks. `lane` has no lock.
    ///
    /// # Errors
    /// [`IndexError`]; nothing of the caller's was changed.
    pub(super) async fn wait_for(
        &self,
        lane: u16,
        (member, lock): (usize, Addr),
        word: LockWord,
    ) -> Result<(), IndexError> {
        let owner = word.owner().filter(|owner| owner.number() <= self.layout.terms().ids);
        let owner = owner.ok_or(Damaged("a lock of an id that the store does not have"))?;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut pause = PAUSE_FIRST;
        while pause <= PAUSE_MAX {
            self.fabric.sleep(pause).await;
            pause *= 2;
            let table = &self.layout.members()[member];
            let mut chain = buffer.begin(table.key());
            let held = chain.also(read_as::<LockWord>(lock));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let held = *reply.get(held).map_err(refused)?;
            if held != word || owner == self.id() {
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
        Ok(self.leases.observe(&self.observer, id).await?.1)
    }

    /// Watches the leases of all other ids for the length of a lease, and recovers the clients whose leases expire.
    ///
    /// # Errors
    /// [`IndexError`]; some dead clients may have been recovered.
    pub(super) async fn heal(&self, lane: u16) -> Result<(), IndexError> {
        let ids = (1..=self.layout.terms().ids).filter_map(ClientId::new).filter(|id| *id != self.id());
        let mut watched: Vec<(ClientId, Option<lease::Entry>)> = ids.map(|id| (id, None)).collect();
        while !watched.is_empty() {
            let mut left = Vec::new();
            for (id, first) in watched {
                let (entry, expired) = self.leases.observe(&self.observer, id).await?;
                if let Some(expired) = expired {
                    self.recover(lane, expired).await?;
                } else if entry.nonce().is_some() && first.is_none_or(|first| first == entry) {
                    left.push((id, Some(entry)));
                }
            }
            watched = left;
            if !watched.is_empty() {
                self.fabric.sleep(self.layout.terms().lease / 4).await;
            }
        }
        Ok(())
    }

    /// Fences a client whose lease has expired, recovers its locks, and frees its id. Holds a guard, since a redone
    /// update may link memory.
    pub(super) async fn recover(&self, lane: u16, expired: Expired) -> Result<(), IndexError> {
        let _guard = (!mutants::RECOVERY_UNGUARDED.is_on()).then(|| self.epochs.enter());
        let fenced = fence(&*self.fabric, self.layout.members(), &self.stores, &self.leases, expired).await?;
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
        let held = L::held(self, fenced.id()).await?;
        // A client that recovers the locks of its own id must keep the records that they need.
        let lanes = u64::from(self.spare_lane()) + 1;
        let is_needed = |lane: &u16| held.iter().any(|(word, ..)| word.token() % lanes == u64::from(*lane));
        let lane = match self.id() == fenced.id() {
            false => lane,
            true => (0..=self.spare_lane())
                .rev()
                .find(|lane| !is_needed(lane))
                .ok_or(Damaged("more locks of an id than its client has lanes"))?,
        };
        for (word, lock) in held {
            self.recover_lock(lane, fenced, lock, word).await?;
        }
        Ok(())
    }

    async fn recover_lock(
        &self,
        lane: u16,
        fenced: &Fenced,
        lock: L::Lock,
        word: LockWord,
    ) -> Result<(), IndexError> {
        let table = &self.layout.members()[L::member_of(lock)];
        let own_word = self.next_word(lane).await?;
        let entry = self.leases.entry(fenced.id()).await?;
        let (mut buffer, mut reply, mut own) = (ChainBuf::new(), Reply::new(), Record::default());
        let mut chain = buffer.begin(table.key());
        let found = chain.also(read(table.areas().record(word), table.areas().record_len()));
        self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        let found = reply.get(found).map_err(refused)?;
        let object = self.layout.object(lock, word, found)?;
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
                let mut chain = buffer.begin(table.key());
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

    /// Address of the record of an operation at a member.
    pub(super) fn record(&self, member: usize, word: LockWord) -> Addr {
        self.layout.members()[member].areas().record(word)
    }

    /// Reads words of the store.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn words(&self, at: Far, count: u64) -> Result<Vec<u64>, IndexError> {
        let members = self.layout.members();
        let (mut buffer, mut reply, mut all) = (ChainBuf::new(), Reply::new(), Vec::new());
        for first in (0..count).step_by(WORDS_PER_READ as usize) {
            let len = (count - first).min(WORDS_PER_READ) * 8;
            let addr = place::addr(members, at.plus(first * 8), len)?;
            let table = &members[at.member()];
            let mut chain = buffer.begin(table.key());
            let words = chain.also(read(addr, len as u32));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let words = reply.get(words).map_err(refused)?.chunks_exact(8);
            all.extend(words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))));
        }
        if all.len() as u64 == count { Ok(all) } else { Err(Damaged("a short READ").into()) }
    }

    /// Reads the holders of all ids.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn holders(&self) -> Result<Vec<(ClientId, Holder)>, IndexError> {
        let (ids, mut holders) = (u64::from(self.layout.terms().ids), Vec::new());
        for first in (0..ids).step_by(ENTRIES_PER_READ as usize) {
            let count = (ids - first).min(ENTRIES_PER_READ);
            let words = self.words(Far::new(0, first * ENTRY_SIZE), count * ENTRY_SIZE / 8).await?;
            for (index, entry) in (first..).zip(words.chunks_exact(ENTRY_SIZE as usize / 8)) {
                let bytes: Vec<u8> = entry.iter().flat_map(|word| word.to_le_bytes()).collect();
                let holder = Holder::of(&bytes.try_into().expect("an entry"));
                if let Some(id) = ClientId::new(index as u16 + 1)
                    && holder.nonce != 0
                {
                    holders.push((id, holder));
                }
            }
        }
        Ok(holders)
    }

    /// Drops noted holders whose operations have ended: those that have raised their epochs by two, have left, or were
    /// recovered. Recovers a holder whose lease has expired. The index's own operations must be of a later epoch.
    /// Returns whether a dropped holder has left or was recovered.
    ///
    /// # Errors
    /// [`IndexError`]; some dead clients may have been recovered.
    pub(super) async fn advanced(
        &self,
        noted: &mut Vec<(ClientId, Holder)>,
        lane: u16,
    ) -> Result<bool, IndexError> {
        let now: BTreeMap<ClientId, Holder> = self.holders().await?.into_iter().collect();
        let is_here = |id: &ClientId, noted: &Holder| now.get(id).filter(|now| now.nonce == noted.nonce);
        let have_left = noted.iter().any(|(id, noted)| is_here(id, noted).is_none());
        noted.retain(|(id, noted)| {
            is_here(id, noted).is_some_and(|now| now.epoch < noted.epoch.saturating_add(ADVANCES))
        });
        for (id, _) in noted.iter() {
            if *id != self.id()
                && let Some(expired) = self.look(*id).await?
            {
                self.recover(lane, expired).await?;
            }
        }
        Ok(have_left)
    }

    /// Waits until all operations that are in progress, and that have a guard, have ended. Recovers the clients whose
    /// leases expire meanwhile. The caller has no guard. Returns whether a client has left meanwhile, or was recovered.
    ///
    /// # Errors
    /// [`IndexError`]; some dead clients may have been recovered.
    pub(super) async fn grace(&self, lane: u16) -> Result<bool, IndexError> {
        let mut noted = self.holders().await?;
        let mut have_left = false;
        loop {
            have_left |= self.advanced(&mut noted, lane).await?;
            if noted.is_empty() {
                return Ok(have_left);
            }
            if self.is_given_up() {
                // This client's own epoch is raised no more.
                return Err(IndexError::Lost);
            }
            self.fabric.sleep(self.layout.terms().lease / 8).await;
        }
    }
}

/// Fetches the keys of those of the first `members` members with whose nodes the client has another session by now.
///
/// # Errors
/// [`IndexError`]; nothing was changed, and a key is outdated.
#[inline]
async fn fetch_keys<F: Fabric + Clock>(
    fabric: &Keyed<F>,
    tables: &[Member],
    leases: &Leases<Rc<Keyed<F>>>,
    members: usize,
) -> Result<(), IndexError> {
    let granted = |member: usize, key| {
        tables[member].set_key(key);
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
    members: &[Member],
    stores: &[Store],
    leases: &Leases<Rc<Keyed<F>>>,
    expired: Expired,
) -> Result<Fenced, IndexError> {
    for (member, store) in members.iter().zip(stores).skip(1) {
        if !lease::mutants::TAKEN_UNFENCED.is_on() {
            let fenced = identity::fence(fabric, member.node, store, expired.nonce().get()).await;
            fenced.map_err(IndexError::of_read)?;
        }
    }
    Ok(leases.fence(expired, &stores[0]).await?)
}

/// Claims an id that becomes free, or takes over the id of a client whose lease expires.
///
/// # Errors
/// [`LeaseError::NoneFree`] if all leases are renewed.
async fn take_over<F: Fabric + Clock, L: Locked>(
    fabric: &Rc<Keyed<F>>,
    layout: &L,
    stores: &[Store],
    leases: &Leases<Rc<Keyed<F>>>,
    nonce: NonZeroU64,
) -> Result<(Lease, Option<Fenced>), IndexError> {
    let Terms { ids, lease: length, .. } = layout.terms();
    let (begun, observer) = (fabric.now(), RefCell::new(Observer::new(length)));
    loop {
        for id in (1..=ids).filter_map(ClientId::new) {
            let (entry, expired) = leases.observe(&observer, id).await?;
            if entry.nonce().is_none() {
                match leases.claim(nonce, id.number() - 1).await {
                    Err(LeaseError::NoneFree) => continue,
                    claimed => return Ok((claimed?, None)),
                }
            }
            let Some(expired) = expired else { continue };
            let fenced = fence(&**fabric, layout.members(), stores, leases, expired).await?;
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

/// Runs work with a client's own task beside it, until both have ended. Returns the output of the work.
pub(super) async fn beside<T: Unpin>(keeper: impl Future<Output = ()>, work: impl Future<Output = T>) -> T {
    let both: [Pin<Box<dyn Future<Output = Option<T>> + '_>>; 2] = [
        Box::pin(async move {
            keeper.await;
            None
        }),
        Box::pin(async move { Some(work.await) }),
    ];
    let ended = wait_for(both.into_iter(), |_| false).await;
    ended.into_iter().flatten().flatten().next().expect("the work has ended")
}

/// Returns the error of a store of this kind that was not opened.
pub(super) fn not_opened(kind: &str, error: IndexError) -> StoreError {
    of_store(error, |error| format!("the {kind} store was not opened: {error}"))
}

/// Returns the error of a store of this kind that was opened, and not healed.
pub(super) fn not_healed(kind: &str, error: IndexError) -> StoreError {
    of_store(error, |error| format!("the {kind} store was not healed, or only in part: {error}"))
}

fn of_store(error: IndexError, text: impl FnOnce(IndexError) -> String) -> StoreError {
    match error {
        IndexError::Fabric(error) => StoreError::Fabric(error),
        IndexError::Store(error) => error,
        error => StoreError::Gone(text(error)),
    }
}

pub(super) fn refused(status: Status) -> IndexError {
    IndexError::Refused { status, ran: Ran::No }
}

fn of_redo(error: RedoError) -> IndexError {
    match error {
        RedoError::NoTokens => IndexError::Lost,
        RedoError::Refused(status) => refused(status),
        RedoError::Damaged => IndexError::Damaged("a redo record of another object"),
        RedoError::Fabric(error) => IndexError::of_read(error),
    }
}
