//! Leased client ids, and what may be done once a lease has expired: fencing, never taking.
//!
//! A client that takes locks *leases* an id from the table of leases of its store. The id stands in each lock word that
//! the client takes, so that others know whose lock it is. If the client dies, its lease stops being renewed.
//!
//! ```text
//! table | entry 32 bytes | x ids          entry i is that of the id i + 1
//! entry | nonce u64, 0 if free | beat u64 | epoch u64 | reservation u64
//! ```
//!
//! A client claims a free entry by a CAS that writes its nonce, and renews it by a CAS that raises the beat. If a store
//! is replicated, each member has a table, and a claim or a renewal counts once a majority has it. The epoch and
//! the reservation are words of their own, see [`crate::epoch`] and [`crate::stamps`].
//!
//! Four types lead to a dead client's lock. Each is made from the one before:
//! 1. [`Observer`] returns [`Expired`] for an entry that it has seen unchanged for the lease's length.
//! 2. [`Leases::fence`] turns it into [`Fenced`]: no chain of that client runs any more, at any member.
//! 3. A lock word of that client may then be taken, by CAS on the whole word: [`Fenced::owns`], [`crate::redo`].
//! 4. When all its locks are free, the id is too: [`Fenced::recovered`], [`Leases::free`].
//!
//! Invariant: an observer measures time by its own monotonic clock. No two clocks are compared.
//! Invariant: a nonce is never reused, and an entry's beat never falls, not even when its id is leased again.
//! Invariant: an id is leased again only after its last holder was fenced, or had released its lease, and after all
//! locks with that id are free. Only [`Leases::take_over`] leases an id whose locks are not free: if all ids are leased
//! by dead clients, a new client takes over the id of one of them, with its locks, and recovers these locks first.

use crate::epoch::Epochs;
use crate::identity::{self, Identity};
use crate::quorum::quorum;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::leases::{EPOCH_OFFSET, RESERVATION_OFFSET};
use farside_remote::{
    Addr, Capabilities, ChainBuf, Fabric, FabricError, Key, Mode, NodeId, Reply, Status, cas, read_as,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use zerocopy::big_endian;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use farside_remote::leases::ENTRY_SIZE;

/// Maximum number of members that hold a table.
pub const MEMBERS_MAX: usize = 5;
/// Offset of the beat in an entry.
const BEAT_OFFSET: u64 = size_of::<U64>() as u64;
/// Largest number of tokens of an id.
const TOKEN_BITS: u32 = 48;

/// Mutants of leases.
pub mod mutants {
    farside_remote::mutants! {
        /// A lock is taken from an owner whose lease has expired, without a fence.
        TAKEN_UNFENCED = "LeaseTakenUnfenced";
        /// The time in which a look at a lease waits counts as time without a renewal.
        WAIT_COUNTED = "LeaseWaitCounted";
    }
}

/// Number of a client in the locks of a store. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(u16);

impl ClientId {
    /// Returns the id with this number; `None` if it is 0.
    pub const fn new(number: u16) -> Option<ClientId> {
        if number == 0 { None } else { Some(ClientId(number)) }
    }

    /// The number.
    pub const fn number(self) -> u16 {
        self.0
    }

    /// Index of the id's entry in the table.
    pub const fn index(self) -> u64 {
        self.0 as u64 - 1
    }
}

/// Word of a lock: 0 if it is free, else its owner's id in the low 16 bits, and above them the token of the operation
/// that took it. No two operations have the same word.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(transparent)]
pub struct LockWord(U64);

impl LockWord {
    /// Word of a free lock.
    pub const FREE: LockWord = LockWord(U64::ZERO);

    /// Returns the word of an operation. Returns `None` if the token has more than 48 bits.
    pub fn new(owner: ClientId, token: u64) -> Option<LockWord> {
        (token >> TOKEN_BITS == 0).then(|| LockWord(U64::new(token << 16 | u64::from(owner.0))))
    }

    /// The owner; `None` if the lock is free.
    pub fn owner(self) -> Option<ClientId> {
        ClientId::new(self.0.get() as u16)
    }

    /// The token of the operation that holds the lock.
    pub fn token(self) -> u64 {
        self.0.get() >> 16
    }

    /// The word as a number.
    pub(crate) fn bits(self) -> U64 {
        self.0
    }

    /// Returns the lock word that is this number.
    pub(crate) fn of_bits(bits: u64) -> LockWord {
        LockWord(U64::new(bits))
    }

    /// Whether no client holds the lock.
    pub fn is_free(self) -> bool {
        self == LockWord::FREE
    }
}

/// The words of an entry that a claim or a renewal changes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Entry {
    nonce: U64,
    beat: U64,
}

impl Entry {
    /// The holder's nonce; `None` if the id is free.
    pub fn nonce(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.nonce.get())
    }

    /// Number of claims and renewals of the id so far, by all its holders.
    pub fn beat(&self) -> u64 {
        self.beat.get()
    }

    fn with(nonce: u64, beat: u64) -> Entry {
        Entry { nonce: U64::new(nonce), beat: U64::new(beat) }
    }
}

/// Table of leases at one member of a store.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Node of the member.
    pub node: NodeId,
    /// Key of the store at this member.
    pub key: Key,
    /// Address of the first entry.
    pub at: Addr,
}

impl Table {
    /// Address of an id's entry.
    pub fn entry(&self, id: ClientId) -> Addr {
        self.at.plus(id.index() * ENTRY_SIZE)
    }

    /// Address of an id's epoch.
    pub fn epoch(&self, id: ClientId) -> Addr {
        self.entry(id).plus(EPOCH_OFFSET)
    }

    /// Address of an id's reservation of timestamps.
    pub fn reservation(&self, id: ClientId) -> Addr {
        self.entry(id).plus(RESERVATION_OFFSET)
    }

    /// Raises a big-endian word at this member to `new`, unless it is as high already. A late or repeated request of
    /// this function never lowers the word. `known` is the value that the caller believes it to have.
    ///
    /// # Errors
    /// [`LeaseError`]: the word may be lower.
    pub(crate) async fn raise<F: Fabric>(
        &self,
        fabric: &F,
        at: Addr,
        known: u64,
        new: u64,
    ) -> Result<(), LeaseError> {
        // Without PRISM's modes, a CAS can only compare with the value that this client knows.
        let is_plain = !fabric.capabilities(self.node).contains(Capabilities::CONDITIONAL_OPS);
        let (mut found, word) = (big_endian::U64::new(known), big_endian::U64::new(new));
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        loop {
            let mut chain = buffer.begin(self.key);
            let raised = chain.also(match is_plain {
                true => cas(Mode::Eq, at, &found, &word),
                false => cas(Mode::Lt, at, &word, &word),
            });
            fabric.run(self.node, &chain, &mut reply).await?;
            match reply.status(raised) {
                Status::Ok => return Ok(()),
                Status::CasFailed => {
                    found = *reply.get(raised).map_err(LeaseError::Refused)?;
                    if found.get() >= new {
                        return Ok(());
                    }
                }
                refused => return Err(LeaseError::Refused(refused)),
            }
        }
    }
}

/// A leased id, and the holder's proof of it. Not `Clone`: a client has one.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    id: ClientId,
    nonce: NonZeroU64,
    beat: u64,
}

impl Lease {
    /// The leased id.
    pub fn id(&self) -> ClientId {
        self.id
    }

    /// The holder's nonce.
    pub fn nonce(&self) -> NonZeroU64 {
        self.nonce
    }
}

/// Proof that an observer has seen an entry unchanged for the length of a lease. Permits fencing, and nothing else.
#[derive(Debug, PartialEq, Eq)]
pub struct Expired {
    id: ClientId,
    nonce: NonZeroU64,
}

impl Expired {
    /// Id of the expired lease.
    pub fn id(&self) -> ClientId {
        self.id
    }

    /// Nonce of the client to fence.
    pub fn nonce(&self) -> NonZeroU64 {
        self.nonce
    }

    /// States that the caller has fenced the client at the only member that has its lease and its locks.
    pub(crate) fn fenced_at_only_member(self) -> Fenced {
        Fenced { id: self.id, nonce: self.nonce }
    }

    /// States that every member refuses the client's requests for its locks from now on, since it admits a later epoch
    /// of the client's id alone.
    pub(crate) fn fenced_by_epoch(self) -> Fenced {
        Fenced { id: self.id, nonce: self.nonce }
    }
}

/// Proof that a client was fenced at every member: no chain of its sessions runs, or will run.
#[derive(Debug, PartialEq, Eq)]
pub struct Fenced {
    id: ClientId,
    /// Nonce of the entry as long as the locks with this id are those of fenced clients alone: that of the fenced
    /// client, or that of the client that has taken over its id.
    nonce: NonZeroU64,
}

impl Fenced {
    /// Id of the fenced client.
    pub fn id(&self) -> ClientId {
        self.id
    }

    /// Whether the fenced client holds a lock with this word, so that the lock may be taken by a CAS on the word.
    /// `entry` is that of the word's owner, read after the word: if it has the fenced client's nonce, then the word is
    /// not that of a later holder of the same id.
    pub fn owns(&self, word: LockWord, entry: Entry) -> bool {
        word.owner() == Some(self.id) && entry.nonce() == Some(self.nonce)
    }

    /// States that the caller has read every lock of the store since the fence, and that none has this client's id.
    pub fn recovered(self) -> Recovered {
        Recovered(self)
    }
}

/// Proof that a fenced client holds no locks any more, so that its id may be leased again.
#[derive(Debug, PartialEq, Eq)]
pub struct Recovered(Fenced);

/// Watches entries by one monotonic clock, until a lease has expired.
#[derive(Debug)]
pub struct Observer {
    length: Duration,
    seen: BTreeMap<ClientId, (Entry, Duration)>,
}

impl Observer {
    /// Creates an observer for leases of this length. Holders renew their leases several times within it.
    pub fn new(length: Duration) -> Observer {
        Observer { length, seen: BTreeMap::new() }
    }

    /// Forgets what was noted of a client: its lease has expired once it is seen to be silent for its length again.
    pub(crate) fn forget(&mut self, id: ClientId) {
        self.seen.remove(&id);
    }

    /// Notes an entry that was requested at `asked` and received at `answered`, by the observer's clock. Returns
    /// whether the lease has expired: all entries that were noted within its length are equal to this one. A gap in
    /// the observations does no harm: it can only make a live client be fenced, which is safe.
    ///
    /// The time from an entry's request to its answer does not count. In this time, the request may wait at a node that
    /// stands still, and the renewal of a live client behind it.
    pub fn look(
        &mut self,
        id: ClientId,
        entry: Entry,
        asked: Duration,
        answered: Duration,
    ) -> Option<Expired> {
        let Some(nonce) = entry.nonce() else {
            self.seen.remove(&id);
            return None;
        };
        match self.seen.get(&id) {
            Some((seen, since)) if *seen == entry => {
                let asked = if mutants::WAIT_COUNTED.is_on() { answered } else { asked };
                (asked.saturating_sub(*since) >= self.length).then_some(Expired { id, nonce })
            }
            _ => {
                self.seen.insert(id, (entry, answered));
                None
            }
        }
    }
}

/// Reason why a lease was not claimed, renewed or given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseError {
    /// All ids are leased.
    NoneFree,
    /// The entry has another nonce: the lease was lost.
    Lost,
    /// A member refused a chain with this status.
    Refused(Status),
    /// An epoch in the table is so high that no client can raise it.
    Exhausted,
    /// A member did not respond.
    Fabric(FabricError),
}

impl From<FabricError> for LeaseError {
    fn from(error: FabricError) -> LeaseError {
        LeaseError::Fabric(error)
    }
}

impl std::fmt::Display for LeaseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LeaseError::NoneFree => f.write_str(
                "all client ids of the store are leased, and nothing was changed: close other clients, or wait until \
                 the leases of dead ones are recovered",
            ),
            LeaseError::Lost => f.write_str(
                "the lease of this client has expired and another client has recovered it: discard what this client \
                 held, and open the store again",
            ),
            LeaseError::Refused(status) => {
                write!(f, "the node refused access to the table of leases ({status}): open the store again")
            }
            LeaseError::Exhausted => f.write_str(
                "the epoch of a client id is at its maximum, which no client publishes: someone who holds the store's \
                 key has overwritten its table of leases; copy the store's data to a new store",
            ),
            LeaseError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LeaseError {}

/// The leases of a store: one table at each member.
pub struct Leases<F> {
    fabric: F,
    tables: Rc<[Cell<Table>]>,
    ids: u16,
}

impl<F: Fabric + Clock> Leases<F> {
    /// Creates access to the tables of leases of a store's members, each with `ids` entries.
    ///
    /// # Panics
    /// If there are no members, or more than [`MEMBERS_MAX`].
    pub fn new(fabric: F, members: Vec<Table>, ids: u16) -> Leases<F> {
        assert!((1..=MEMBERS_MAX).contains(&members.len()), "a store has 1 to {MEMBERS_MAX} members");
        Leases { fabric, tables: members.into_iter().map(Cell::new).collect(), ids }
    }

    /// Replaces the key of a member's table by the one that its node has granted in another session. Epochs of these
    /// leases use it, too.
    ///
    /// # Panics
    /// If there is no such member.
    pub(crate) fn set_key(&self, member: usize, key: Key) {
        self.tables[member].set(Table { key, ..self.tables[member].get() });
    }

    fn majority(&self) -> usize {
        self.tables.len() / 2 + 1
    }

    /// Claims a free id with this nonce, which must be random and new. Tries the ids in turn, from `first` on; clients
    /// that begin at different ids seldom compete.
    ///
    /// # Errors
    /// [`LeaseError`]. An id that was claimed at a minority of the members is given back; if that fails as well, its
    /// entry expires.
    pub async fn claim(&self, nonce: NonZeroU64, first: u16) -> Result<Lease, LeaseError> {
        for tried in 0..self.ids {
            let number = (u32::from(first) + u32::from(tried)) % u32::from(self.ids) + 1;
            let id = ClientId(number as u16);
            let entry = self.entry(id).await?;
            if entry.nonce().is_some() {
                continue;
            }
            let new = Entry::with(nonce.get(), beat_after(entry.beat()));
            match self.swap_everywhere(id, |found| found.nonce().is_none().then_some(new)).await {
                Ok(()) => return Ok(Lease { id, nonce, beat: new.beat() }),
                Err(LeaseError::Lost) => {
                    let free = Entry::with(0, new.beat());
                    let is_mine = |found: Entry| (found.nonce() == Some(nonce)).then_some(free);
                    match self.swap_everywhere(id, is_mine).await {
                        Ok(()) | Err(LeaseError::Lost) => {}
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(LeaseError::NoneFree)
    }

    /// Renews a lease at a majority of the members.
    ///
    /// # Errors
    /// [`LeaseError::Lost`] if the entry is no longer this client's. After any other error the lease may or may not be
    /// renewed, and another renewal may follow.
    pub async fn renew(&self, lease: &mut Lease) -> Result<(), LeaseError> {
        self.renew_with(lease, None).await
    }

    /// Renews a lease, and publishes an epoch in the same chains.
    async fn renew_with(&self, lease: &mut Lease, next: Option<(&Epochs<F>, u64)>) -> Result<(), LeaseError> {
        let (id, nonce, highest) = (lease.id, lease.nonce, Cell::new(lease.beat));
        let raised = |found: Entry| {
            // A renewal whose answer was lost may have raised the beat at some members only.
            highest.set(highest.get().max(found.beat()));
            (found.nonce() == Some(nonce)).then(|| Entry::with(nonce.get(), beat_after(highest.get())))
        };
        let raised = &raised;
        let ask = |member: usize| {
            let table = self.tables.get(member)?.get();
            Some(async move {
                match next {
                    Some((epochs, next)) if !epochs.is_plain(member) => {
                        epochs.swap_and_publish(member, next, raised).await
                    }
                    _ => self.swap_at(&table, id, raised).await,
                }
            })
        };
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        let renewed = quorum(self.majority(), asked).await.map(drop).map_err(first_error);
        lease.beat = beat_after(highest.get());
        renewed
    }

    /// Renews a lease as [`Leases::renew`] does, and publishes the client's next epoch, if it may, in the same chains,
    /// or in chains of their own if the fabric has no conditional ops. Then waits at most `patience` for the members
    /// that a majority did not need. If they do not answer, the epoch is published by a later call.
    ///
    /// # Errors
    /// Those of [`Leases::renew`].
    pub async fn renew_and_advance(
        &self,
        lease: &mut Lease,
        epochs: &Epochs<F>,
        patience: Duration,
    ) -> Result<(), LeaseError> {
        let next = epochs.next();
        self.renew_with(lease, next.map(|next| (epochs, next))).await?;
        if let Some(next) = next {
            let mut publishing = pin!(epochs.publish(next));
            let mut patience = pin!(self.fabric.sleep(patience));
            poll_fn(|cx| match publishing.as_mut().poll(cx) {
                Poll::Ready(_else_a_later_call_publishes_it) => Poll::Ready(()),
                Poll::Pending => patience.as_mut().poll(cx),
            })
            .await;
        }
        Ok(())
    }

    /// Writes this client's nonce into its entry at all members, also at those that its claim has not reached. The
    /// caller has bound its sessions at all members: if it was fenced, no later holder's nonce is overwritten.
    ///
    /// # Errors
    /// [`LeaseError`]: a member does not have the nonce.
    pub(crate) async fn hold(&self, lease: &Lease) -> Result<(), LeaseError> {
        let (nonce, beat) = (lease.nonce, lease.beat);
        for table in self.tables.iter().map(Cell::get) {
            if self.read_at(&table, lease.id).await?.nonce() != Some(nonce) {
                let mine = |found: Entry| Some(Entry::with(nonce.get(), beat_after(found.beat().max(beat))));
                self.swap_at(&table, lease.id, mine).await?;
            }
        }
        Ok(())
    }

    pub(crate) fn fabric(&self) -> &F {
        &self.fabric
    }

    pub(crate) fn tables(&self) -> &Rc<[Cell<Table>]> {
        &self.tables
    }

    /// Binds this client's sessions at all members of `store` to the lease's nonce. Precedes the first lock.
    ///
    /// # Errors
    /// [`LeaseError`]. If the nonce was fenced, the client needs another lease, with another nonce.
    pub async fn bind(&self, lease: &Lease, store: &Store) -> Result<(), LeaseError> {
        self.bind_each(lease, &[store; MEMBERS_MAX]).await
    }

    /// Does the same as [`Leases::bind`], with the store's description at each member: nodes draw its id.
    ///
    /// # Errors
    /// Those of [`Leases::bind`].
    ///
    /// # Panics
    /// If there are fewer descriptions than members.
    pub async fn bind_each(&self, lease: &Lease, stores: &[&Store]) -> Result<(), LeaseError> {
        assert!(stores.len() >= self.tables.len(), "each member is bound");
        let identity = Identity { client: lease.id.number().into(), nonce: lease.nonce.get() };
        for (table, store) in self.tables.iter().map(Cell::get).zip(stores) {
            identity::bind(&self.fabric, table.node, store, identity).await?;
        }
        Ok(())
    }

    /// Fences the client of an expired lease at all members of `store`, one after the other.
    ///
    /// # Errors
    /// [`LeaseError`]: a member has not fenced the client, so its locks must not be taken. Fencing may be repeated with
    /// another proof.
    pub async fn fence(&self, expired: Expired, store: &Store) -> Result<Fenced, LeaseError> {
        self.fence_each(expired, &[store; MEMBERS_MAX]).await
    }

    /// Does the same as [`Leases::fence`], with the store's description at each member: nodes draw its id.
    ///
    /// # Errors
    /// Those of [`Leases::fence`].
    ///
    /// # Panics
    /// If there are fewer descriptions than members.
    pub async fn fence_each(&self, expired: Expired, stores: &[&Store]) -> Result<Fenced, LeaseError> {
        assert!(stores.len() >= self.tables.len(), "each member is fenced");
        let Expired { id, nonce } = expired;
        let members = self.tables.iter().map(Cell::get).zip(stores);
        for (table, store) in members.filter(|_| !mutants::TAKEN_UNFENCED.is_on()) {
            identity::fence(&self.fabric, table.node, store, nonce.get()).await?;
        }
        Ok(Fenced { id, nonce })
    }

    /// Takes over the id of a fenced client, together with the locks that the client held. The new holder recovers
    /// these locks with the returned proof before it takes a lock of its own. If it dies, its locks and the inherited
    /// ones are recovered together.
    ///
    /// # Errors
    /// [`LeaseError`]; [`LeaseError::Lost`] if another client has freed the id or taken it over.
    pub async fn take_over(&self, fenced: Fenced, nonce: NonZeroU64) -> Result<(Lease, Fenced), LeaseError> {
        let (id, beat) = (fenced.id, Cell::new(0));
        let mine = |found: Entry| {
            beat.set(beat.get().max(beat_after(found.beat())));
            (found.nonce() == Some(fenced.nonce)).then(|| Entry::with(nonce.get(), beat.get()))
        };
        self.swap_everywhere(id, mine).await?;
        Ok((Lease { id, nonce, beat: beat.get() }, Fenced { id, nonce }))
    }

    /// Gives a lease back. The caller holds no locks, and all its chains have been answered.
    ///
    /// # Errors
    /// [`LeaseError`]; if the lease was not given back, it expires.
    pub async fn release(&self, lease: Lease) -> Result<(), LeaseError> {
        self.vacate(lease.id, lease.nonce, beat_after(lease.beat)).await
    }

    /// Frees the id of a client whose locks were all recovered.
    ///
    /// # Errors
    /// [`LeaseError`]; [`LeaseError::Lost`] if another client has freed the id.
    pub async fn free(&self, Recovered(fenced): Recovered) -> Result<(), LeaseError> {
        let entry = self.entry(fenced.id).await?;
        self.vacate(fenced.id, fenced.nonce, beat_after(entry.beat())).await
    }

    async fn vacate(&self, id: ClientId, nonce: NonZeroU64, beat: u64) -> Result<(), LeaseError> {
        let free = Entry::with(0, beat);
        self.swap_everywhere(id, |found| (found.nonce() == Some(nonce)).then_some(free)).await
    }

    /// Reads an id's entry at a majority of the members. Returns the one with the highest beat.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub async fn entry(&self, id: ClientId) -> Result<Entry, LeaseError> {
        let ask = |member: usize| {
            let table = self.tables.get(member)?.get();
            Some(async move { self.read_at(&table, id).await })
        };
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        let outcomes = quorum(self.majority(), asked).await.map_err(first_error)?;
        let entries = outcomes.into_iter().flatten().flatten();
        Ok(entries.max_by_key(Entry::beat).expect("a majority has answered"))
    }

    /// Reads an id's entry, and has an observer note it. Returns a proof if the lease has expired.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub async fn observe(
        &self,
        observer: &RefCell<Observer>,
        id: ClientId,
    ) -> Result<(Entry, Option<Expired>), LeaseError> {
        let asked = self.fabric.now();
        let entry = self.entry(id).await?;
        let expired = observer.borrow_mut().look(id, entry, asked, self.fabric.now());
        Ok((entry, expired))
    }

    /// Replaces an id's entry at a majority of the members by what `next` returns for it. Waits for the answers of all
    /// members: a dropped request could run later and leave a nonce at one of them, which would wait for its epoch.
    ///
    /// # Errors
    /// [`LeaseError::Lost`] if `next` returned `None` at so many members that no majority is left.
    async fn swap_everywhere(
        &self,
        id: ClientId,
        next: impl Fn(Entry) -> Option<Entry>,
    ) -> Result<(), LeaseError> {
        let next = &next;
        let ask = |member: usize| {
            let table = self.tables.get(member)?.get();
            Some(async move { Ok::<_, Infallible>(self.swap_at(&table, id, next).await) })
        };
        let mut asked = [pin!(ask(0)), pin!(ask(1)), pin!(ask(2)), pin!(ask(3)), pin!(ask(4))];
        let asked = asked.each_mut().map(|asked| asked.as_mut());
        let Ok(answered) = quorum(self.tables.len(), asked).await else { unreachable!("no future fails") };
        let outcomes = answered.map(|answered| answered.map(|Ok(swapped)| swapped));
        match outcomes.iter().flatten().filter(|swapped| swapped.is_ok()).count() >= self.majority() {
            true => Ok(()),
            false => Err(first_error(outcomes)),
        }
    }

    async fn read_at(&self, table: &Table, id: ClientId) -> Result<Entry, LeaseError> {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let entry = chain.also(read_as::<Entry>(table.entry(id)));
        self.fabric.run(table.node, &chain, &mut reply).await?;
        reply.get(entry).copied().map_err(LeaseError::Refused)
    }

    async fn swap_at(
        &self,
        table: &Table,
        id: ClientId,
        next: impl Fn(Entry) -> Option<Entry>,
    ) -> Result<(), LeaseError> {
        let mut found = self.read_at(table, id).await?;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        // Without PRISM's operations, a CAS changes one word. An entry's nonce is changed by its holder, or once the
        // holder was fenced, so a holder that has seen its nonce may change its beat alone. No two nonces are equal, so
        // a new nonce needs no new beat.
        let is_plain = !self.fabric.capabilities(table.node).contains(Capabilities::CONDITIONAL_OPS);
        while is_plain && let Some(new) = next(found) {
            let (word, old, new) = match found.nonce == new.nonce {
                true => (table.entry(id).plus(BEAT_OFFSET), found.beat, new.beat),
                false => (table.entry(id), found.nonce, new.nonce),
            };
            let mut chain = buffer.begin(table.key);
            let swapped = chain.also(cas(Mode::Eq, word, &old, &new));
            self.fabric.run(table.node, &chain, &mut reply).await?;
            match reply.status(swapped) {
                Status::Ok => return Ok(()),
                Status::CasFailed => found = self.read_at(table, id).await?,
                refused => return Err(LeaseError::Refused(refused)),
            }
        }
        while !is_plain && let Some(new) = next(found) {
            let mut chain = buffer.begin(table.key);
            let old = chain.also(cas(Mode::Eq, table.entry(id), &found, &new));
            self.fabric.run(table.node, &chain, &mut reply).await?;
            match reply.status(old) {
                Status::Ok => return Ok(()),
                Status::CasFailed => found = *reply.get(old).map_err(LeaseError::Refused)?,
                refused => return Err(LeaseError::Refused(refused)),
            }
        }
        Err(LeaseError::Lost)
    }
}

/// The beat after this one. A client that holds the store's key may have written any beat.
fn beat_after(beat: u64) -> u64 {
    beat.saturating_add(1)
}

/// Returns the error of a quorum that was not reached: [`LeaseError::Lost`] if a member says so, else the first error.
fn first_error<T, const N: usize>(outcomes: [Option<Result<T, LeaseError>>; N]) -> LeaseError {
    let mut errors = outcomes.into_iter().flatten().filter_map(Result::err);
    let first = errors.next().expect("a quorum is missed by errors");
    if errors.any(|error| error == LeaseError::Lost) { LeaseError::Lost } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_request_does_not_count_as_time_without_a_renewal() {
        let ms = Duration::from_millis;
        let (mut observer, id, held) = (Observer::new(ms(20)), ClientId(1), Entry::with(7, 1));
        // The entry was read in 0..=15 for the first time.
        assert_eq!(observer.look(id, held, ms(0), ms(15)), None);
        // It may have been read again at once after this request, which was answered late.
        assert_eq!(observer.look(id, held, ms(34), ms(60)), None);
        let expired = observer.look(id, held, ms(35), ms(36));
        assert_eq!(expired.map(|expired| (expired.id(), expired.nonce().get())), Some((id, 7)));
        // A renewal begins another period.
        assert_eq!(observer.look(id, Entry::with(7, 2), ms(36), ms(37)), None);
        assert_eq!(observer.look(id, Entry::with(7, 2), ms(56), ms(57)), None);
        assert!(observer.look(id, Entry::with(7, 2), ms(57), ms(58)).is_some());
    }
}
