//! Objects of several cache lines, updated in place under locks whose dead owners are fenced. For tests.
//!
//! No paper describes this system. It is the smallest one that uses [`crate::lease`], [`crate::redo`] and
//! [`crate::owned`] together, as indexes and transactions with locks do.
//!
//! ```text
//! table  | entries of leases | areas of redo records | object | x objects          each part begins at a cache line
//! object | lock word u64 | checksum u64 | count u64 | tag u64 | filler, to the length of the content |
//! ```
//!
//! - A READ of an object is one chain, without the lock. The checksum detects torn bytes, and the client retries.
//! - An ADD takes two chains: take the lock and read the object; write the record, write the object, free the lock.
//!
//! A client that finds a lock held watches the owner's lease. If the lease expires, the client fences the owner at the
//! node, recovers all of its locks, and frees its id.
//!
//! Invariant: an object's bytes change only under its lock.
//! Invariant: an ADD is a job of the client: if its caller goes, the client frees the lock.

use crate::lease::{
    ClientId, ENTRY_SIZE, Entry, Expired, Fenced, Lease, LeaseError, Leases, LockWord, Observer, Table,
};
use crate::owned::{Closed, Jobs};
use crate::redo::{Areas, Object, Record, Recovery, RedoError, Tokens};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, ChainBuf, Fabric, FabricError, Key, Memory, Mode, NodeId, Reply, Status, cas, read, read_as,
};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::future::{pending, poll_fn};
use std::num::NonZeroU64;
use std::pin::pin;
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
/// Number of lock words that one chain of a recovery reads.
const LOCKS_PER_CHAIN: u64 = 32;
const LOCK_SIZE: u64 = size_of::<LockWord>() as u64;

/// Mutants of the guarded objects.
pub mod mutants {
    farside_remote::mutants! {
        /// An ADD whose caller has gone ends without freeing its lock.
        DROPPED_ADD_KEEPS_LOCK = "GuardedDroppedAddKeepsLock";
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

    fn areas_offset(&self) -> u64 {
        (u64::from(self.ids) * ENTRY_SIZE).next_multiple_of(64)
    }

    fn areas(&self, extent: Extent, node: NodeId) -> Areas {
        let at = Addr::new(extent.at).plus(self.areas_offset());
        Areas { node, key: extent.key, at, lanes: self.lanes, len_max: self.len }
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
    /// The node refused a chain with this status.
    Refused(Status),
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
            _ => Ran::No,
        }
    }
}

impl From<FabricError> for GuardedError {
    fn from(error: FabricError) -> GuardedError {
        GuardedError::Fabric(error)
    }
}

impl From<LeaseError> for GuardedError {
    fn from(error: LeaseError) -> GuardedError {
        match error {
            LeaseError::Fabric(error) => GuardedError::Fabric(error.map_ran(|_| Ran::No)),
            error => GuardedError::Lease(error),
        }
    }
}

impl From<RedoError> for GuardedError {
    fn from(error: RedoError) -> GuardedError {
        match error {
            RedoError::Fabric(error) => GuardedError::Fabric(error),
            error => GuardedError::Redo(error),
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
    Heal { object: u64, word: LockWord },
}

type Done = Result<Value, GuardedError>;

/// Client of one store, which all tasks of a core share. [`Guarded::keep`] must run as a task of its own.
pub struct Guarded<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    spec: Spec,
    areas: Areas,
    table: Table,
    objects: Addr,
    leases: Leases<F>,
    lease: RefCell<Option<Lease>>,
    id: ClientId,
    tokens: Tokens,
    observer: RefCell<Observer>,
    jobs: Jobs<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    /// Number of dead clients that this client has recovered.
    recovered: Cell<u64>,
}

/// Buffers of a lane.
#[derive(Default)]
struct Lane {
    number: u16,
    record: Record,
    content: Vec<u8>,
    reply: Reply,
    chain: ChainBuf,
}

impl<F: Fabric + Clock + Clone> Guarded<F> {
    /// Opens a store, leases an id, and binds the session to `nonce`, which is random and new for each call.
    ///
    /// # Errors
    /// [`GuardedError`]; nothing was changed.
    pub async fn open(
        fabric: F,
        node: NodeId,
        store: &Store,
        nonce: NonZeroU64,
    ) -> Result<Rc<Guarded<F>>, GuardedError> {
        const INVALID: GuardedError = GuardedError::Damaged("invalid parameters in the catalog");
        let spec: Spec = serde_json::from_str(&store.parameters).map_err(|_| INVALID)?;
        let extent = store.extent();
        if !spec.is_sound() || spec.table_len() > extent.len {
            return Err(INVALID);
        }
        let table = Table { node, key: extent.key, at: Addr::new(extent.at) };
        let leases = Leases::new(fabric.clone(), vec![table], spec.ids);
        let lease = leases.claim(nonce, (nonce.get() % u64::from(spec.ids)) as u16).await?;
        leases.bind(&lease, store).await?;
        let lane = |number| RefCell::new(Lane { number, ..Lane::default() });
        Ok(Rc::new(Guarded {
            fabric,
            node,
            store: store.clone(),
            spec,
            areas: spec.areas(extent, node),
            table,
            objects: Addr::new(extent.at).plus(spec.objects_offset()),
            leases,
            id: lease.id(),
            lease: RefCell::new(Some(lease)),
            tokens: Tokens::default(),
            observer: RefCell::new(Observer::new(Duration::from_micros(spec.lease_us))),
            jobs: Jobs::new(spec.lanes.into()),
            lanes: (0..spec.lanes).map(lane).collect(),
            recovered: Cell::new(0),
        }))
    }

    /// Runs the client: carries out its jobs and renews its lease, until the client is closed. After a
    /// [`Guarded::close`], gives the lease back.
    pub async fn keep(&self) {
        {
            let mut serving = pin!(self.jobs.serve(|lane, job| self.carry_out(lane, job)));
            let mut renewing = pin!(async {
                self.renew().await;
                pending::<()>().await
            });
            poll_fn(|cx| {
                let _until_closed = renewing.as_mut().poll(cx);
                serving.as_mut().poll(cx)
            })
            .await;
        }
        // A client that has lost a lock, or does not know, keeps no lease: it is fenced.
        let lease = self.lease.take();
        if let Some(lease) = lease {
            let _else_it_expires = self.leases.release(lease).await;
        }
    }

    /// Closes the client once the jobs that were begun have ended. [`Guarded::keep`] then returns.
    pub fn close(&self) {
        self.jobs.close();
    }

    /// Id of the client.
    pub fn id(&self) -> ClientId {
        self.id
    }

    /// Number of dead clients that this client has recovered.
    pub fn recovered(&self) -> u64 {
        self.recovered.get()
    }

    /// Adds one to an object. Returns the value before.
    ///
    /// # Errors
    /// [`GuardedError`]. If the outcome is unknown, the client is closed: it may hold a lock, which others recover.
    pub async fn add(&self, object: u64, tag: u64) -> Result<Value, GuardedError> {
        self.jobs.carry_out(Job::Add { object, tag }).await.map_err(|Closed| GuardedError::Closed)?
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`GuardedError`].
    pub async fn read(&self, object: u64) -> Result<Value, GuardedError> {
        let (number, object) = (object, self.object(object));
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut pause = PAUSE_FIRST;
        for _ in 0..ATTEMPTS_MAX {
            let mut chain = buffer.begin(self.areas.key);
            let word = chain.also(read_as::<LockWord>(object.lock));
            let content = chain.also(read(object.at, object.len));
            self.fabric.run(self.node, &chain, &mut reply).await.map_err(of_read)?;
            let word = *reply.get(word).map_err(GuardedError::Refused)?;
            if let Some(value) = Value::of(reply.get(content).map_err(GuardedError::Refused)?) {
                return Ok(value);
            }
            if !word.is_free() && pause >= PAUSE_MAX {
                let heal = Job::Heal { object: number, word };
                self.jobs.carry_out(heal).await.map_err(|Closed| GuardedError::Closed)??;
            }
            self.fabric.sleep(pause).await;
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
        let lock = self.objects.plus(number * self.spec.object_size());
        Object { lock, at: lock.plus(LOCK_SIZE), len: self.spec.len }
    }

    /// Renews the lease until the client is closed, or has lost its lease.
    async fn renew(&self) {
        let period = Duration::from_micros(self.spec.lease_us) / 4;
        loop {
            self.fabric.sleep(period).await;
            let lease = self.lease.take();
            let Some(mut lease) = lease.filter(|_| !self.jobs.is_closed()) else { return };
            match self.leases.renew(&mut lease).await {
                Err(LeaseError::Lost | LeaseError::Refused(_)) => return self.jobs.close(),
                Err(LeaseError::Fabric(FabricError::Lost { .. } | FabricError::NodeDied(_))) => {
                    return self.jobs.close();
                }
                _ => _ = self.lease.replace(Some(lease)),
            }
        }
    }

    async fn carry_out(&self, lane: usize, job: Job) -> Done {
        let mut own = self.lanes[lane].take();
        own.number = lane as u16;
        let done = match job {
            Job::Add { object, tag } => self.add_in(&mut own, object, tag).await,
            Job::Heal { object, word } => {
                self.wait_for(&mut own, &self.object(object), word).await.map(|()| Value::default())
            }
        };
        self.lanes[lane].replace(own);
        done.inspect_err(|error| {
            if matches!(error, GuardedError::Fabric(error) if error.ran() != Ran::No) {
                // A lock may be held, and its request may still be in flight: stop renewing, so that others fence.
                self.lease.take();
                self.jobs.close();
            }
        })
    }

    async fn add_in(&self, own: &mut Lane, number: u64, tag: u64) -> Done {
        let object = self.object(number);
        let word = self.tokens.next(&self.fabric, &self.areas, self.id, own.number).await?;
        let mut attempts = 0;
        let before = loop {
            let mut chain = own.chain.begin(self.areas.key);
            let taken = chain.also(cas(Mode::Eq, object.lock, &LockWord::FREE, &word));
            let content = chain.then(read(object.at, object.len));
            self.fabric.run(self.node, &chain, &mut own.reply).await?;
            let found = *own.reply.get(taken).map_err(GuardedError::Refused)?;
            if own.reply.status(taken) == Status::Ok {
                break Value::of(own.reply.get(content).map_err(GuardedError::Refused)?);
            }
            attempts += 1;
            if attempts == ATTEMPTS_MAX || self.jobs.is_abandoned(own.number.into()) {
                return Err(GuardedError::Busy);
            }
            self.wait_for(own, &object, found).await?;
        };
        if self.jobs.is_abandoned(own.number.into()) {
            if !mutants::DROPPED_ADD_KEEPS_LOCK.is_on() {
                self.free(own, &object, word).await?;
            }
            return Err(GuardedError::Busy);
        }
        let before = before.ok_or(GuardedError::Damaged("torn bytes of an object whose lock is held"))?;
        let after = Value { count: before.count.wrapping_add(1), tag };
        after.write_to(object.len, &mut own.content);
        own.record.fill(word, &object, &own.content);
        let mut chain = own.chain.begin(self.areas.key);
        let freed = own.record.update(&mut chain, &self.areas, &object);
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        match own.reply.status(freed) {
            Status::Ok => Ok(before),
            Status::CasFailed => Err(GuardedError::Damaged("a lock that was taken from its living owner")),
            refused => Err(GuardedError::Refused(refused)),
        }
    }

    /// Undoes the taking of a lock.
    async fn free(&self, own: &mut Lane, object: &Object, word: LockWord) -> Result<(), GuardedError> {
        let mut chain = own.chain.begin(self.areas.key);
        let freed = chain.also(cas(Mode::Eq, object.lock, &word, &LockWord::FREE));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        own.reply.get(freed).map(drop).map_err(GuardedError::Refused)
    }

    /// Waits a while for the owner of a lock. If the owner's lease has expired, recovers the owner's locks.
    async fn wait_for(&self, own: &mut Lane, object: &Object, word: LockWord) -> Result<(), GuardedError> {
        let owner = word.owner().filter(|owner| owner.number() <= self.spec.ids);
        let owner = owner.ok_or(GuardedError::Damaged("a lock of an id that the store does not have"))?;
        let mut pause = PAUSE_FIRST;
        while pause <= PAUSE_MAX {
            self.fabric.sleep(pause).await;
            pause *= 2;
            let mut chain = own.chain.begin(self.areas.key);
            let now_held = chain.also(read_as::<LockWord>(object.lock));
            let entry = chain.also(read_as::<Entry>(self.table.entry(owner)));
            self.fabric.run(self.node, &chain, &mut own.reply).await.map_err(of_read)?;
            let now_held = *own.reply.get(now_held).map_err(GuardedError::Refused)?;
            let entry = *own.reply.get(entry).map_err(GuardedError::Refused)?;
            if now_held != word || owner == self.id {
                return Ok(());
            }
            let expired = self.observer.borrow_mut().look(owner, entry, self.fabric.now());
            if let Some(expired) = expired {
                return self.recover(own, expired).await;
            }
        }
        Ok(())
    }

    /// Fences a client whose lease has expired, recovers its locks, and frees its id.
    async fn recover(&self, own: &mut Lane, expired: Expired) -> Result<(), GuardedError> {
        let fenced = self.leases.fence(expired, &self.store).await?;
        for first in (0..self.spec.objects).step_by(LOCKS_PER_CHAIN as usize) {
            let batch = first..(first + LOCKS_PER_CHAIN).min(self.spec.objects);
            let mut chain = own.chain.begin(self.areas.key);
            for number in batch.clone() {
                chain.also(read_as::<LockWord>(self.object(number).lock));
            }
            self.fabric.run(self.node, &chain, &mut own.reply).await.map_err(of_read)?;
            let mut held = [LockWord::FREE; LOCKS_PER_CHAIN as usize];
            for (index, word) in held.iter_mut().enumerate().take(batch.clone().count()) {
                let status = own.reply.status_at(index).unwrap_or(Status::Skipped);
                let bytes = Some(own.reply.output(index)).filter(|_| status == Status::Ok);
                *word = bytes
                    .and_then(|bytes| LockWord::read_from_bytes(bytes).ok())
                    .ok_or(GuardedError::Refused(status))?;
            }
            for (number, word) in batch.zip(held) {
                if word.owner() == Some(fenced.id()) {
                    self.recover_lock(own, &fenced, &self.object(number), word).await?;
                }
            }
        }
        match self.leases.free(fenced.recovered()).await {
            Ok(()) => self.recovered.set(self.recovered.get() + 1),
            Err(LeaseError::Lost) => {} // Another client has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Recovers one lock of a fenced client.
    async fn recover_lock(
        &self,
        own: &mut Lane,
        fenced: &Fenced,
        object: &Object,
        word: LockWord,
    ) -> Result<(), GuardedError> {
        let own_word = self.tokens.next(&self.fabric, &self.areas, self.id, own.number).await?;
        let mut chain = own.chain.begin(self.areas.key);
        let now_held = chain.also(read_as::<LockWord>(object.lock));
        let entry = chain.also(read_as::<Entry>(self.table.entry(fenced.id())));
        let record = chain.also(read(self.areas.record(word), self.areas.record_len()));
        self.fabric.run(self.node, &chain, &mut own.reply).await.map_err(of_read)?;
        let now_held = *own.reply.get(now_held).map_err(GuardedError::Refused)?;
        let entry = *own.reply.get(entry).map_err(GuardedError::Refused)?;
        let found = own.reply.get(record).map_err(GuardedError::Refused)?;
        if now_held != word {
            return Ok(());
        }
        let recovery = Recovery::of(fenced, object, (word, entry, found), (&mut own.record, own_word))?;
        if recovery == Recovery::Over {
            return Ok(());
        }
        let mut chain = own.chain.begin(self.areas.key);
        recovery.chain(&mut chain, &self.areas, object, &own.record);
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        match own.reply.verdict() {
            // A failed CAS means that another recoverer was faster.
            Status::Ok | Status::CasFailed | Status::Skipped => Ok(()),
            refused => Err(GuardedError::Refused(refused)),
        }
    }
}

/// Returns the error of a chain that only reads. Whether or not the chain ran, nothing was changed.
fn of_read(error: FabricError) -> GuardedError {
    GuardedError::Fabric(error.map_ran(|_| Ran::No))
}

/// Node-side half of the guarded objects.
pub struct GuardedKind;

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
        Ok(Box::new(Objects))
    }
}

struct Objects;

impl<M: Memory> Service<M> for Objects {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // The objects lie in the table, and point to no buffers.
    }
}
