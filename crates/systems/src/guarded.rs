//! Objects of several cache lines, updated in place under locks whose dead owners are fenced. For tests.
//!
//! No paper describes this system. It is the smallest one that uses [`crate::lease`], [`crate::redo`],
//! `crate::holder` and [`crate::owned`] together, as indexes and transactions with locks do.
//!
//! ```text
//! table  | entries of leases | areas of redo records | object | x objects          each part begins at a cache line
//! object | lock word u64 | checksum u64 | count u64 | tag u64 | filler, to the length of the content |
//! ```
//!
//! - A READ of an object is one chain, without the lock. The checksum detects torn bytes, and the client retries.
//! - An ADD takes two chains: take the lock and read the object; write the record, write the object, free the lock.
//!
//! A client recovers the dead clients whose locks it finds in its way (`crate::holder`). [`Guarded::heal`] does so
//! for all dead clients, also for those that hold no lock. Each id has one record more than lanes: a client holds at
//! most one lock for each lane, so there is always a record that no inherited lock needs.
//!
//! A client may have several sessions with the node, at different engines, all bound to its nonce. Each lane uses one
//! of them.
//!
//! Invariant: an object's bytes change only under its lock.
//! Invariant: an ADD is a job of the client: if its caller goes, the client frees the lock.
//! Invariant: a client that may hold a lock and does not know, or that cannot free a lock, closes and gives up its
//! lease.

use crate::holder::{self, Holder, HolderError, Ids, Locks, Way};
use crate::identity::{self, Identity};
use crate::lease::{self, ClientId, ENTRY_SIZE, LeaseError, LockWord, Table};
use crate::owned::{Closed, Jobs};
use crate::redo::{self, Areas, Object, Record, RedoError};
use crate::store::{Members, StoreError};
use crate::system::{Family, Footprint, Options, Sizing, SizingError, System};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::mutant::Mutant;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, Capabilities, ChainBuf, Fabric, FabricError, Key, Memory, Mode, NodeId, Reply, Status, cas, read,
    read_as,
};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kind of the store in the catalog.
pub const KIND: &str = "guarded";
/// Number of objects of the largest store.
pub const OBJECTS_MAX: u64 = 1 << 16;
/// Largest content of an object in bytes.
pub const LEN_MAX: u32 = 16 << 10;
/// Longest pause between two attempts to take a lock.
const PAUSE_MAX: Duration = Duration::from_millis(1);
const PAUSE_FIRST: Duration = Duration::from_micros(10);
/// Number of times that an operation tries to take a lock, or to read an object whole.
const ATTEMPTS_MAX: u32 = 1000;
const LOCK_SIZE: u64 = size_of::<LockWord>() as u64;

/// Mutants of the guarded objects.
pub mod mutants {
    farside_remote::mutants! {
        /// An ADD whose caller has gone ends without freeing its lock.
        DROPPED_ADD_KEEPS_LOCK = "GuardedDroppedAddKeepsLock";
        /// A client whose update was refused goes on, although it holds the lock.
        REFUSED_UPDATE_KEEPS_LEASE = "GuardedRefusedUpdateKeepsLease";
    }
}

/// Parameters of a store, stored as JSON in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Number of objects.
    pub objects: u64,
    /// Bytes of an object's content: at least 24, a multiple of 8.
    pub len: u32,
    /// Number of client ids.
    pub ids: u16,
    /// Number of concurrent operations of a client.
    pub lanes: u16,
    /// Length of a lease in microseconds.
    pub lease_us: u64,
}

impl Spec {
    fn is_sound(&self) -> bool {
        (1..=OBJECTS_MAX).contains(&self.objects)
            && (CONTENT_MIN..=LEN_MAX).contains(&self.len)
            && self.len.is_multiple_of(8)
            && (1..=1024).contains(&self.ids)
            && (1..=64).contains(&self.lanes)
            && self.lease_us > 0
    }

    /// Length of a lease.
    fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// The ids of the store.
    fn ids(&self) -> Ids {
        Ids { count: self.ids, lease: self.lease() }
    }

    fn areas_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(64)
    }

    fn areas(&self, extent: Extent, node: NodeId) -> Areas {
        let at = Addr::new(extent.at).plus(self.areas_offset());
        // One record more than lanes, for the recovery of inherited locks.
        Areas { node, key: extent.key, at, lanes: self.lanes + 1, len_max: self.len }
    }

    fn objects_offset(&self) -> u64 {
        let areas = self.areas(Extent { key: Key::new(0, 0), at: 0, len: 0 }, NodeId(0));
        self.areas_offset() + u64::from(self.ids) * areas.area_size()
    }

    fn object_size(&self) -> u64 {
        (LOCK_SIZE + u64::from(self.len)).next_multiple_of(64)
    }

    fn table_len(&self) -> u64 {
        self.objects_offset() + self.objects * self.object_size()
    }
}

/// Start of an object's content. The rest is filler, which follows from it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
struct Head {
    checksum: U64,
    count: U64,
    tag: U64,
}

const CONTENT_MIN: u32 = size_of::<Head>() as u32;

/// Number of ADDs that an object has seen, and the tag of the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Value {
    /// Number of ADDs.
    pub count: u64,
    /// Tag of the last ADD.
    pub tag: u64,
}

impl Value {
    /// Encodes an object's content.
    fn write_to(self, len: u32, out: &mut Vec<u8>) {
        out.clear();
        let head = Head { checksum: U64::ZERO, count: U64::new(self.count), tag: U64::new(self.tag) };
        out.extend_from_slice(head.as_bytes());
        let mut word = self.count.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.tag;
        while out.len() < len as usize {
            word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            out.extend_from_slice(&word.to_le_bytes());
        }
        let checksum = checksum(out);
        out[..size_of::<U64>()].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Decodes an object's content. Returns `None` if the bytes are torn.
    fn of(content: &[u8]) -> Option<Value> {
        let (head, _) = Head::read_from_prefix(content).ok()?;
        if content.iter().all(|&byte| byte == 0) {
            return Some(Value::default());
        }
        let value = Value { count: head.count.get(), tag: head.tag.get() };
        (head.checksum.get() == checksum(content)).then_some(value)
    }
}

fn checksum(content: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &content[size_of::<U64>()..])
}

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuardedError {
    /// The lease of this client's id failed.
    Lease(LeaseError),
    /// A redo record failed.
    Redo(RedoError),
    /// The node refused a chain with this status. Nothing was changed.
    Refused(Status),
    /// The node refused a part of an update with this status. The rest may have changed the object, and a recovery may
    /// carry out the update from its record.
    Unsettled(Status),
    /// The store holds bytes that no client writes.
    Damaged(&'static str),
    /// The object was locked, or changed under each read, for too long. Nothing was changed.
    Busy,
    /// The client was closed. Nothing was changed.
    Closed,
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl GuardedError {
    /// States whether an operation with this error may have been carried out.
    pub fn ran(&self) -> Ran {
        match self {
            GuardedError::Fabric(error) => error.ran(),
            GuardedError::Unsettled(_) => Ran::Unknown,
            _ => Ran::No,
        }
    }
}

impl From<FabricError> for GuardedError {
    fn from(error: FabricError) -> GuardedError {
        GuardedError::Fabric(error)
    }
}

impl From<HolderError> for GuardedError {
    fn from(error: HolderError) -> GuardedError {
        match error {
            HolderError::Lease(error) => GuardedError::Lease(error),
            HolderError::Redo(error) => GuardedError::Redo(error),
            HolderError::Refused(status) => GuardedError::Refused(status),
            HolderError::Damaged(what) => GuardedError::Damaged(what),
            HolderError::Fabric(error) => GuardedError::Fabric(error),
        }
    }
}

impl std::fmt::Display for GuardedError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            GuardedError::Lease(error) => error.fmt(f),
            GuardedError::Redo(error) => error.fmt(f),
            GuardedError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): open the store again")
            }
            GuardedError::Unsettled(status) => {
                write!(
                    f,
                    "the node refused a part of the update ({status}), which may be carried out: open the store again"
                )
            }
            GuardedError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            GuardedError::Busy => {
                f.write_str("the object was locked for too long, and nothing was changed: retry")
            }
            GuardedError::Closed => {
                f.write_str("the client was closed, and nothing was changed: open the store again")
            }
            GuardedError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for GuardedError {}

/// Work of a lane.
#[derive(Clone, Copy, Debug)]
enum Job {
    /// Adds one to an object, with a tag.
    Add { object: u64, tag: u64 },
    /// Waits until an object's lock is no longer held with this word, or recovers the lock.
    Free { object: u64, word: LockWord },
    /// Recovers all dead clients.
    Heal,
}

type Done = Result<Value, GuardedError>;

/// A session with a node that holds a store, before the session's client has an id.
pub struct Session<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    spec: Spec,
    areas: Areas,
    table: Table,
}

impl<F> Session<F> {
    /// Creates a session with `store`, as the session has found it in the catalog of `node`.
    ///
    /// # Errors
    /// [`GuardedError::Damaged`]: the store's parameters are invalid.
    pub fn new(fabric: F, node: NodeId, store: &Store) -> Result<Session<F>, GuardedError> {
        const INVALID: GuardedError = GuardedError::Damaged("invalid parameters in the catalog");
        let spec: Spec = serde_json::from_str(&store.parameters).map_err(|_| INVALID)?;
        let extent = store.extent();
        if !spec.is_sound() || spec.table_len() > extent.len {
            return Err(INVALID);
        }
        let table = Table { node, key: extent.key, at: Addr::new(extent.at) };
        Ok(Session { fabric, node, store: store.clone(), spec, areas: spec.areas(extent, node), table })
    }

    fn way(&self) -> Way<'_, F> {
        Way { fabric: &self.fabric, areas: &self.areas, table: &self.table }
    }
}

/// Client of one store, which all tasks of a core share. [`Guarded::keep`] must run as a task of its own.
pub struct Guarded<F> {
    /// Sessions with the node, all bound to this client's nonce. The first one has the client's lease.
    sessions: Vec<Session<F>>,
    spec: Spec,
    holder: Holder<F, Objects>,
    jobs: Jobs<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    /// Index of the next job's session.
    next_session: Cell<usize>,
}

/// Buffers of a lane.
#[derive(Default)]
struct Lane {
    number: u16,
    /// Index of the session that the job uses.
    session: usize,
    record: Record,
    content: Vec<u8>,
    reply: Reply,
    chain: ChainBuf,
}

impl<F: Fabric + Clock + Clone> Guarded<F> {
    /// Leases an id, and binds the sessions to `nonce`, which is random and new for each call. All sessions are with
    /// the same store at the same node, and none of them was bound for this store before. If all ids are leased, waits
    /// for up to two lengths of a lease until one has expired, and takes over its id.
    ///
    /// # Errors
    /// [`GuardedError`]; no object was changed.
    ///
    /// # Panics
    /// If there is no session.
    pub async fn open(sessions: Vec<Session<F>>, nonce: NonZeroU64) -> Result<Rc<Guarded<F>>, GuardedError> {
        let first = &sessions[0];
        let (spec, node) = (first.spec, first.node);
        let objects = Objects { spec, at: first.table.at };
        let (holder, inherited) = Holder::open(first.way(), &first.store, spec.ids(), objects, nonce).await?;
        let identity = Identity { client: holder.id().number().into(), nonce: nonce.get() };
        for Session { fabric, store, .. } in &sessions {
            identity::bind(fabric, node, store, identity).await?;
        }
        let lane = |number| RefCell::new(Lane { number, ..Lane::default() });
        let client = Rc::new(Guarded {
            sessions,
            spec,
            holder,
            jobs: Jobs::new(spec.lanes.into()),
            lanes: (0..spec.lanes).map(lane).collect(),
            next_session: Cell::new(0),
        });
        if let Some(inherited) = inherited {
            let recovery = client.holder.inherit(client.sessions[0].way(), &inherited);
            client.holder.renewing(recovery, || client.jobs.close()).await?;
        }
        Ok(client)
    }

    /// Runs the client: carries out its jobs and renews its lease, until the client is closed. After a
    /// [`Guarded::close`], gives the lease back.
    pub async fn keep(&self) {
        let jobs = self.jobs.serve(|lane, job| self.carry_out(lane, job));
        self.holder.renewing(jobs, || self.jobs.close()).await;
        self.holder.release().await;
    }

    /// Closes the client once the jobs that were begun have ended. [`Guarded::keep`] then returns.
    pub fn close(&self) {
        self.jobs.close();
    }

    /// Id of the client.
    pub fn id(&self) -> ClientId {
        self.holder.id()
    }

    /// Number of dead clients that this client has recovered.
    pub fn recovered(&self) -> u64 {
        self.holder.recovered()
    }

    /// Adds one to an object. Returns the value before.
    ///
    /// # Errors
    /// [`GuardedError`]. If the outcome is unknown, the client is closed: it may hold a lock, which others recover.
    pub async fn add(&self, object: u64, tag: u64) -> Result<Value, GuardedError> {
        self.jobs.carry_out(Job::Add { object, tag }).await.map_err(|Closed| GuardedError::Closed)?
    }

    /// Recovers all dead clients: watches the leases of all ids until each was renewed, released, or has expired. Takes
    /// about the length of a lease.
    ///
    /// # Errors
    /// [`GuardedError`]; some dead clients may have been recovered.
    pub async fn heal(&self) -> Result<(), GuardedError> {
        self.jobs.carry_out(Job::Heal).await.map_err(|Closed| GuardedError::Closed)?.map(drop)
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`GuardedError`].
    pub async fn read(&self, object: u64) -> Result<Value, GuardedError> {
        let (number, object) = (object, self.object(object));
        let Session { fabric, node, areas, .. } = &self.sessions[0];
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut pause = PAUSE_FIRST;
        for _ in 0..ATTEMPTS_MAX {
            let mut chain = buffer.begin(areas.key);
            let word = chain.also(read_as::<LockWord>(object.lock));
            let content = chain.also(read(object.at, object.len));
            fabric.run(*node, &chain, &mut reply).await.map_err(holder::of_read)?;
            let word = *reply.get(word).map_err(GuardedError::Refused)?;
            if let Some(value) = Value::of(reply.get(content).map_err(GuardedError::Refused)?) {
                return Ok(value);
            }
            if !word.is_free() && pause >= PAUSE_MAX {
                let free = Job::Free { object: number, word };
                self.jobs.carry_out(free).await.map_err(|Closed| GuardedError::Closed)??;
            }
            fabric.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Err(GuardedError::Busy)
    }

    /// Location of an object.
    ///
    /// # Panics
    /// If the store has fewer objects.
    fn object(&self, number: u64) -> Object {
        assert!(number < self.spec.objects, "there is no object {number}");
        self.holder.locks().object(number)
    }

    /// The session of a lane's job.
    fn session_of(&self, lane: &Lane) -> &Session<F> {
        &self.sessions[lane.session]
    }

    /// Closes the client without releasing its lease, which then expires.
    fn give_up(&self) {
        self.holder.give_up();
        self.jobs.close();
    }

    async fn carry_out(&self, lane: usize, job: Job) -> Done {
        let mut own = self.lanes[lane].take();
        (own.number, own.session) = (lane as u16, self.next_session.get());
        self.next_session.set((own.session + 1) % self.sessions.len());
        let done = match job {
            Job::Add { object, tag } => self.add_in(&mut own, object, tag).await,
            Job::Free { object, word } => {
                let way = self.session_of(&own).way();
                let waited = self.holder.wait_for(way, own.number, &self.object(object), word).await;
                waited.map(|()| Value::default()).map_err(GuardedError::from)
            }
            Job::Heal => {
                let healed = self.holder.heal(self.session_of(&own).way(), own.number).await;
                healed.map(|()| Value::default()).map_err(GuardedError::from)
            }
        };
        self.lanes[lane].replace(own);
        done.inspect_err(|error| {
            let is_unknown = matches!(error, GuardedError::Fabric(error) if error.ran() != Ran::No);
            if is_unknown || self.holder.is_given_up() {
                // A lock may be held, and its request may still be in flight.
                self.give_up();
            }
        })
    }

    async fn add_in(&self, own: &mut Lane, number: u64, tag: u64) -> Done {
        let (object, Session { fabric, node, areas, .. }) = (self.object(number), self.session_of(own));
        let word = self.holder.next_word(self.session_of(own).way(), own.number).await?;
        let mut attempts = 0;
        let before = loop {
            let mut chain = own.chain.begin(areas.key);
            let taken = chain.also(cas(Mode::Eq, object.lock, &LockWord::FREE, &word));
            let content = chain.then(read(object.at, object.len));
            fabric.run(*node, &chain, &mut own.reply).await?;
            let found = *own.reply.get(taken).map_err(GuardedError::Refused)?;
            if own.reply.status(taken) == Status::Ok {
                break own.reply.get(content).map(Value::of).map_err(GuardedError::Refused);
            }
            attempts += 1;
            if attempts == ATTEMPTS_MAX || self.jobs.is_abandoned(own.number.into()) {
                return Err(GuardedError::Busy);
            }
            self.holder.wait_for(self.session_of(own).way(), own.number, &object, found).await?;
        };
        if self.jobs.is_abandoned(own.number.into()) {
            if !mutants::DROPPED_ADD_KEEPS_LOCK.is_on() {
                self.free(own, &object, word).await.inspect_err(|_| self.give_up())?;
            }
            return Err(GuardedError::Busy);
        }
        // Whatever the error, the lock may still be held, and the client is alive.
        self.update(own, &object, word, before, tag).await.inspect_err(|_| {
            if !mutants::REFUSED_UPDATE_KEEPS_LEASE.is_on() {
                self.give_up();
            }
        })
    }

    /// Adds one to the value `before` of an object whose lock the client holds with `word`, and frees the lock.
    async fn update(
        &self,
        own: &mut Lane,
        object: &Object,
        word: LockWord,
        before: Result<Option<Value>, GuardedError>,
        tag: u64,
    ) -> Done {
        let Session { fabric, node, areas, .. } = self.session_of(own);
        let before = before?.ok_or(GuardedError::Damaged("torn bytes of an object whose lock is held"))?;
        let after = Value { count: before.count.wrapping_add(1), tag };
        after.write_to(object.len, &mut own.content);
        own.record.fill(word, object, &own.content);
        let mut chain = own.chain.begin(areas.key);
        let freed = own.record.update(&mut chain, areas, object);
        fabric.run(*node, &chain, &mut own.reply).await?;
        match own.reply.status(freed) {
            Status::Ok => Ok(before),
            Status::CasFailed => Err(GuardedError::Damaged("a lock that was taken from its living owner")),
            refused => Err(GuardedError::Unsettled(refused)),
        }
    }

    /// Undoes the taking of a lock.
    async fn free(&self, own: &mut Lane, object: &Object, word: LockWord) -> Result<(), GuardedError> {
        let Session { fabric, node, areas, .. } = self.session_of(own);
        let mut chain = own.chain.begin(areas.key);
        let freed = chain.also(cas(Mode::Eq, object.lock, &word, &LockWord::FREE));
        fabric.run(*node, &chain, &mut own.reply).await?;
        own.reply.get(freed).map(drop).map_err(GuardedError::Refused)
    }
}

/// Returns the numbers of the ids that are leased, and of the objects whose locks are held, for audits of a store that
/// no client uses. `load` returns the 8-byte word at an address.
///
/// # Errors
/// [`GuardedError::Damaged`]: the store's parameters are invalid.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<(Vec<u16>, Vec<u64>), GuardedError> {
    let Session { spec, table, .. } = Session::new((), NodeId(0), store)?;
    let ids = spec.ids().all().filter(|id| load(table.entry(*id).raw()) != 0).map(ClientId::number).collect();
    let lock = |object: &u64| table.at.plus(spec.objects_offset() + object * spec.object_size()).raw();
    let locks = (0..spec.objects).filter(|object| load(lock(object)) != 0).collect();
    Ok((ids, locks))
}

/// Node-side half of the guarded objects.
pub struct GuardedKind;

impl System for GuardedKind {
    const KIND: &'static str = KIND;
    const TITLE: &'static str = "guarded objects";
    const SUMMARY: &'static str = "add is two chains, read is one";
    const FAMILY: Family = Family::Objects;
    // Sessions can be bound over every fabric that has conditional ops, so binding is no capability of its own.
    const NEEDS: Capabilities = Capabilities::CONDITIONAL_OPS;
    const FOR_TESTS: bool = true;
    const MUTANTS: &'static [Mutant] = &[
        lease::mutants::TAKEN_UNFENCED,
        redo::mutants::RECORD_AFTER_OBJECT,
        redo::mutants::TAKEN_BEFORE_OWN_RECORD,
        redo::mutants::FREED_FIRST,
        redo::mutants::TOKEN_NOT_IN_CHECKSUM,
        redo::mutants::STALE_RECORD_REDONE,
        mutants::DROPPED_ADD_KEEPS_LOCK,
        mutants::REFUSED_UPDATE_KEEPS_LEASE,
    ];
    /// The first needs a process that dies between two stores of a record, over the bytes of an older one. The second
    /// needs a client that loses one of two sessions between two chains.
    const RARE_MUTANTS: &'static [Mutant] =
        &[redo::mutants::TOKEN_NOT_IN_CHECKSUM, mutants::REFUSED_UPDATE_KEEPS_LEASE];

    /// A session, because a client also needs a nonce: see [`Guarded::open`].
    type Client<F: Fabric + Clock> = Session<F>;

    fn parameters(sizing: &Sizing) -> String {
        serde_json::to_string(&spec_for(sizing)).expect("plain data")
    }

    fn footprint(sizing: &Sizing) -> Result<Footprint, SizingError> {
        let spec = spec_for(sizing);
        if sizing.value_len > LEN_MAX as usize {
            return Err(SizingError::Value(LEN_MAX as usize));
        }
        if !spec.is_sound() {
            return Err(SizingError::Items);
        }
        Ok(Footprint { slots: spec.objects, table_bytes: spec.table_len(), item_bytes: 0 })
    }

    fn kind<M: Memory>() -> Box<dyn Kind<M>> {
        Box::new(GuardedKind)
    }

    async fn open<F: Fabric + Clock>(
        fabric: F,
        members: &Members,
        _options: &Options,
    ) -> Result<Session<F>, StoreError> {
        let (node, store) = members.one_of::<Self>(&fabric)?;
        Session::new(fabric, node, store).map_err(|error| StoreError::Gone(error.to_string()))
    }
}

/// Parameters of a store of this size, with 16 clients, 4 concurrent operations each, and leases of 50 ms.
fn spec_for(sizing: &Sizing) -> Spec {
    let len = u32::try_from(sizing.value_len.next_multiple_of(8)).unwrap_or(u32::MAX).max(CONTENT_MIN);
    Spec { objects: sizing.items.unwrap_or(1024), len, ids: 16, lanes: 4, lease_us: 50_000 }
}

impl<M: Memory> Kind<M> for GuardedKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let spec: Spec = serde_json::from_str(parameters)
            .map_err(|error| format!("invalid parameters of a {KIND} store: {error}"))?;
        if !spec.is_sound() {
            return Err(format!("invalid parameters of a {KIND} store: {spec:?}"));
        }
        Ok(Plan { table_len: spec.table_len(), parameters: parameters.into(), wide: false })
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Plain))
    }
}

/// The objects of a store whose table begins at an address.
struct Objects {
    spec: Spec,
    at: Addr,
}

impl Locks for Objects {
    fn count(&self) -> u64 {
        self.spec.objects
    }

    fn object(&self, number: u64) -> Object {
        let lock = self.at.plus(self.spec.objects_offset() + number * self.spec.object_size());
        Object { lock, at: lock.plus(LOCK_SIZE), len: self.spec.len }
    }
}

struct Plain;

impl<M: Memory> Service<M> for Plain {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // The objects lie in the table, and point to no buffers.
    }
}
