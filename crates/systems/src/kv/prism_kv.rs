//! PRISM-KV: a hash table of pointers to items, read and changed without the far CPU (PRISM, section 6).
//!
//! GET is one indirect READ per probe. PUT is two round trips: find the slot, then allocate a new item and swing
//! the slot's pointer to it if the slot is still as it was found. Where the slot is cached, PUT is one.
//!
//! Where we leave the paper (the layout has the bytes):
//! * The slot's tag is a generation, raised by every install, so that no CAS succeeds on a slot that only looks the
//!   same, and `get` can answer a [`Version`] for conditional puts.
//! * A PUT whose CAS fails may count as done just before the one that won, as in the paper, only if the winner
//!   directly followed what this PUT had found *and* did not itself depend on what was there: a conditional put or
//!   a delete that won has seen the older value, so nothing can have come between.
//! * DELETE leaves a tombstone, so that a slot keeps its key: that rules out the races of open addressing.
//! * Values of more than about 60 KiB are lists of parts, installed by one CAS.
//!
//! Invariant: a buffer that an install made unreachable is retired before anything else is awaited.

mod large;
pub mod layout;
pub mod many;
pub mod service;

use super::{Item, Kv, KvError, VALUE_MAX, Version, check_key};
use crate::ready::{run_until_ready, run_until_ready_or_dropped};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{DEADLINE, ServiceId};
use farside_remote::mutant::Mutant;
use farside_remote::op::ListId;
use farside_remote::{
    Addr, BoundedPtr, ChainBuf, Fabric, FabricError, NodeId, Reply, Status, allocate, cas_from, read,
    read_as, write,
};
use layout::{HEADER_SIZE, ITEM_MAX, ItemHeader, ItemView, Kind, Slot, Table, UNCONDITIONAL};
use quick_cache::unsync::Cache;
use std::cell::Cell;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The kind of store that the catalog knows this by.
pub const KIND: &str = "prism-kv";

/// Scratch: the slot's new word, address first.
const TMP: Addr = Addr::scratch(0);
const TMP_BOUND_AND_TAG: Addr = Addr::scratch(8);

/// A client of one PRISM-KV store. One operation at a time; use several for several tasks.
pub struct PrismKv<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    table: Table,
    slots: Option<Cache<Box<[u8]>, Cached>>,
    chain: ChainBuf,
    reply: Reply,
    /// A large value, put together.
    value: Vec<u8>,
    /// The chain that was to install an item may have run, and nobody knows.
    installing: Cell<bool>,
}

/// Where a key's slot was, and what it held.
#[derive(Clone, Copy)]
struct Cached {
    index: u64,
    generation: u32,
}

/// What a probe found: the slot that the key has or may have, as it was at one instant.
#[derive(Clone)]
struct Found {
    index: u64,
    slot: Slot,
    /// Nothing if the slot is empty.
    kind: Option<Kind>,
    unconditional: bool,
}

/// What came of an attempt to install an item.
enum Installed {
    /// The slot holds it; this is what it held before.
    Yes { before: BoundedPtr },
    /// The slot was no longer as it was found. Nothing is changed.
    No,
    /// No buffer was to be had. Nothing is changed.
    NoBuffer,
}

/// Where a client has the value that it has read, until its next operation.
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    /// In its reply; nothing if the value was of several parts, and was put together.
    at: Option<usize>,
    version: Version,
}

/// Why a conditional put stored nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The version that the key has instead, if it has a value.
    pub version: Option<Version>,
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// There is none of that name, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<PrismKv<F>, KvError> {
        let store = fetch_store(&fabric, node, name).await?;
        let table = Table::new(&store.parameters, store.extent()).map_err(KvError::Gone)?;
        Ok(PrismKv {
            fabric,
            node,
            store,
            table,
            slots: None,
            chain: ChainBuf::new(),
            reply: Reply::new(),
            value: Vec::new(),
            installing: Cell::new(false),
        })
    }

    /// Remembers where up to `keys` keys have their slots, so that they are put in one round trip.
    pub fn with_slot_cache(mut self, keys: usize) -> PrismKv<F> {
        self.slots = (keys > 0).then(|| Cache::new(keys));
        self
    }

    /// The store as the catalog has it.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Its table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The fabric underneath.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// The value of `key`. One round trip per probe.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.fetch(key).await?;
        Ok(fetched.map(|fetched| self.item(fetched)))
    }

    /// As [`PrismKv::get`], of which [`PrismKv::item`] is the other half: for whoever tries again after an error, and
    /// must not hold this client borrowed.
    ///
    /// # Errors
    /// As [`PrismKv::get`].
    #[inline]
    pub async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        let mut waits_since = None;
        loop {
            match self.seek(key).await? {
                Sought::Absent => return Ok(None),
                Sought::Value { at, version } => return Ok(Some(Fetched { at: Some(at), version })),
                // Boxed, so that every other GET has a small future.
                Sought::Large { index } => match Box::pin(self.read_large(key, index)).await? {
                    large::Read::Whole(version) => return Ok(Some(Fetched { at: None, version })),
                    large::Read::Changed => {}
                },
                Sought::Moved => Box::pin(self.refetch(&mut waits_since)).await?,
            }
        }
    }

    /// What the last operation, a [`PrismKv::fetch`] that answered this, has read.
    #[inline]
    pub fn item(&self, fetched: Fetched) -> Item<'_> {
        let Fetched { at, version } = fetched;
        let value = at.map_or(&self.value[..], |at| self.reply.output(0).get(at..).unwrap_or_default());
        Item { value, version }
    }

    /// Gives `key` a value. Two round trips, or one where the slot is cached.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    pub async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        check_put(key, value)?;
        if is_large(key, value) {
            return self.put_large(key, value).await;
        }
        if let Some(cached) = self.cached(key)
            && (self.put_cached(key, value, cached).await? || Mutant::KvCachedPutYields.is_on())
        {
            return Ok(());
        }
        let item = NewItem { kind: Kind::Value, flags: UNCONDITIONAL, key, value, value_len: value.len() };
        self.install_blindly(&item).await.map(drop)
    }

    /// Takes the value of `key` away; answers whether it had one. Two round trips.
    ///
    /// # Errors
    /// [`KvError`], which says whether it may have been taken away.
    pub async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        check_key(key)?;
        // A delete that loses always looks again: it answers what it saw, so it cannot be said to have come before
        // the winner, as another one may be said to have.
        loop {
            let found = self.find(key).await?;
            if !found.kind.is_some_and(Kind::is_present) {
                return Ok(false);
            }
            let item = NewItem { kind: Kind::Tombstone, flags: 0, key, value: &[], value_len: 0 };
            if self.install(&found, &item, Buffer::for_tombstone(&item, &found)).await? {
                return Ok(true);
            }
        }
    }

    /// Gives `key` a value if it has none; answers whether it did.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored.
    pub async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, KvError> {
        Ok(self.put_if(key, value, None).await?.is_ok())
    }

    /// Gives `key` another value if it still has the version that a `get` answered; answers the new version.
    ///
    /// # Errors
    /// [`KvError`], which says whether the value may have been stored. A [`Conflict`] stored nothing.
    pub async fn compare_and_put(
        &mut self,
        key: &[u8],
        expected: Version,
        value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        self.put_if(key, value, Some(expected)).await
    }

    /// Puts if the key has this version, or no value if that is what is expected.
    async fn put_if(
        &mut self,
        key: &[u8],
        value: &[u8],
        expected: Option<Version>,
    ) -> Result<Result<Version, Conflict>, KvError> {
        check_put(key, value)?;
        if is_large(key, value) {
            return self.put_large_if(key, value, expected).await;
        }
        let item = NewItem { kind: Kind::Value, flags: 0, key, value, value_len: value.len() };
        self.install_if(&item, expected).await
    }

    /// Installs an item if the key has this version, or no value if that is what is expected.
    async fn install_if(
        &mut self,
        item: &NewItem<'_>,
        expected: Option<Version>,
    ) -> Result<Result<Version, Conflict>, KvError> {
        loop {
            let found = self.find(item.key).await?;
            let present = found.kind.is_some_and(Kind::is_present);
            let version = present.then(|| Version(found.slot.generation()));
            if version != expected {
                return Ok(Err(Conflict { version }));
            }
            if self.install(&found, item, Buffer::for_put(item)?).await? {
                return Ok(Ok(Version(found.slot.next_generation())));
            }
        }
    }

    // Reading.

    /// Reads the item of `key` into the reply, probing from its first slot on.
    #[inline]
    async fn seek(&mut self, key: &[u8]) -> Result<Sought, KvError> {
        for index in self.table.probe(key) {
            let mut chain = self.chain.begin(self.table.extent.key);
            let item = chain.also(read(self.table.slot_at(index), READ_MAX).indirect().bounded());
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
            let bytes = self.reply.get(item).map_err(KvError::Refused)?;
            if bytes.is_empty() {
                return Ok(Sought::Absent);
            }
            let item = ItemView::decode(bytes)?;
            if item.kind == Kind::Moved {
                return Ok(Sought::Moved);
            }
            if !item.is_of(key) {
                continue;
            }
            if let Some(slots) = &mut self.slots {
                match item.kind {
                    // To replace a large value, its parts must be known.
                    Kind::Large => drop(slots.remove(key)),
                    _ => {
                        remember_slot(slots, key, Cached { index, generation: item.header.generation.get() })
                    }
                }
            }
            return Ok(match item.kind {
                Kind::Value => {
                    let at = bytes.len() - item.value()?.len();
                    Sought::Value { at, version: item.version() }
                }
                Kind::Large => Sought::Large { index },
                Kind::Tombstone | Kind::Moved => Sought::Absent,
            });
        }
        Ok(Sought::Absent)
    }

    /// Finds the slot that `key` has, or the empty one that it would get: slot and key from one snapshot, since
    /// both follow the one copy of the slot that the chain made in scratch.
    async fn find(&mut self, key: &[u8]) -> Result<Found, KvError> {
        let mut waits_since = None;
        'table: loop {
            for index in self.table.probe(key) {
                let mut chain = self.chain.begin(self.table.extent.key);
                chain.also(read(self.table.slot_at(index), layout::SLOT_SIZE as u32).redirect(TMP));
                let slot = chain.then(read_as::<BoundedPtr>(TMP));
                let at = if Mutant::KvTwoSnapshots.is_on() { self.table.slot_at(index) } else { TMP };
                let item = chain.then(read(at, (HEADER_SIZE + key.len()) as u32).indirect().bounded());
                self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_look)?;
                let slot = Slot(*self.reply.get(slot).map_err(KvError::Refused)?);
                if slot.is_frozen() {
                    self.refetch(&mut waits_since).await?;
                    continue 'table;
                }
                let bytes = self.reply.get(item).map_err(KvError::Refused)?;
                if slot.is_empty() {
                    return Ok(Found { index, slot, kind: None, unconditional: false });
                }
                let item = ItemView::decode(bytes)?;
                if item.is_of(key) || Mutant::KvSlotReuse.is_on() && item.kind == Kind::Tombstone {
                    let unconditional = item.is_unconditional();
                    return Ok(Found { index, slot, kind: Some(item.kind), unconditional });
                }
            }
            return Err(KvError::TableFull);
        }
    }

    // Writing.

    /// Installs an item whatever its key has. False if that counts as done although another's item is in the slot.
    #[inline]
    async fn install_blindly(&mut self, item: &NewItem<'_>) -> Result<bool, KvError> {
        let mut lost_to: Option<Found> = None;
        loop {
            let found = self.find(item.key).await?;
            if lost_to.take().is_some_and(|before| won_without_looking(&before, &found)) {
                return Ok(false); // It counts as stored just before the put that won.
            }
            if self.install(&found, item, Buffer::for_put(item)?).await? {
                return Ok(true);
            }
            lost_to = Some(found);
        }
    }

    /// Installs an item in the slot that was found, if the slot is still so, and retires what that made garbage.
    async fn install(&mut self, found: &Found, item: &NewItem<'_>, buffer: Buffer) -> Result<bool, KvError> {
        let before = if found.kind == Some(Kind::Large) { self.parts_of(found.slot).await? } else { None };
        let mut installed =
            self.swing(found, item, buffer.list, buffer.reserve, buffer.instead.is_none()).await?;
        if let (Installed::NoBuffer, Some(list)) = (&installed, buffer.instead) {
            installed = self.swing(found, item, list, true, true).await?;
        }
        match installed {
            Installed::Yes { before: slot } => {
                for part in before.iter().flatten() {
                    self.retire(Addr::new(part.at.get()));
                }
                if !slot.ptr.is_null() {
                    self.retire(slot.ptr);
                }
                self.remember(item, found.index, found.slot.next_generation());
                Ok(true)
            }
            Installed::No => Ok(false),
            Installed::NoBuffer => Err(KvError::OutOfMemory),
        }
    }

    /// The second round trip of PUT: allocate, write and CAS (PRISM, section 6.1).
    async fn swing(
        &mut self,
        found: &Found,
        item: &NewItem<'_>,
        list: ListId,
        reserve: bool,
        patient: bool,
    ) -> Result<Installed, KvError> {
        let generation = found.slot.next_generation();
        let header = item.header(generation);
        let bound_and_tag = item.bound_and_tag(generation);
        let mut chain = self.chain.begin(self.table.extent.key);
        chain.also(write(TMP_BOUND_AND_TAG, bound_and_tag.as_bytes()));
        let fill = allocate(list, [header.as_bytes(), item.key, item.value]);
        chain.then(if reserve { fill.from_reserve() } else { fill }.redirect(TMP));
        let swung = chain.then(cas_from(self.table.slot_at(found.index), &found.slot.0, TMP));
        let fresh = chain.also(read_as::<Addr>(TMP));
        let ready = if patient {
            let (reply, installing) = (&mut self.reply, &self.installing);
            let ready = run_until_ready_or_dropped(&self.fabric, self.node, &chain, reply, installing).await;
            ready.map_err(KvError::of_install)?
        } else {
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_install)?;
            self.reply.last_status() != Status::NotReady
        };
        if !ready {
            return Ok(Installed::NoBuffer);
        }
        match self.reply.status(swung) {
            Status::Ok => Ok(Installed::Yes { before: found.slot.0 }),
            Status::CasFailed => {
                let fresh = *self.reply.get(fresh).map_err(KvError::Refused)?;
                if !Mutant::KvLoserKeepsBuffer.is_on() {
                    self.retire(fresh);
                }
                Ok(Installed::No)
            }
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    /// A put to a slot that this client remembers, in one round trip; false if the slot holds another generation by
    /// now. That says nothing about when it changed, so the put must look for itself then.
    async fn put_cached(&mut self, key: &[u8], value: &[u8], cached: Cached) -> Result<bool, KvError> {
        let item = NewItem { kind: Kind::Value, flags: UNCONDITIONAL, key, value, value_len: value.len() };
        let generation = layout::next_generation(cached.generation);
        let header = item.header(generation);
        let bound_and_tag = item.bound_and_tag(generation);
        let expected = BoundedPtr { tag: cached.generation.into(), ..BoundedPtr::default() };
        let list = Buffer::for_put(&item)?.list;
        let mut chain = self.chain.begin(self.table.extent.key);
        chain.also(write(TMP_BOUND_AND_TAG, bound_and_tag.as_bytes()));
        chain.then(allocate(list, [header.as_bytes(), item.key, item.value]).redirect(TMP));
        let slot_at = self.table.slot_at(cached.index);
        let swung = chain.then(cas_from(slot_at, &expected, TMP).masked(&TAG_ONLY, &WHOLE));
        let fresh = chain.also(read_as::<Addr>(TMP));
        let ready = run_until_ready(&self.fabric, self.node, &chain, &mut self.reply).await;
        if !ready.map_err(KvError::of_install)? {
            return Err(KvError::OutOfMemory);
        }
        match self.reply.status(swung) {
            Status::Ok => {
                let before = self.reply.get(swung).map_err(KvError::Refused)?.ptr;
                self.retire(before);
                self.remember(&item, cached.index, generation);
                Ok(true)
            }
            Status::CasFailed => {
                self.retire(*self.reply.get(fresh).map_err(KvError::Refused)?);
                if let Some(slots) = &mut self.slots {
                    slots.remove(key);
                }
                Ok(false)
            }
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    fn retire(&self, buffer: Addr) {
        self.fabric.retire(self.node, self.table.extent.key, buffer);
    }

    // What this client remembers.

    fn cached(&mut self, key: &[u8]) -> Option<Cached> {
        self.slots.as_ref()?.get(key).copied()
    }

    /// Only small values are remembered: to replace a large one, its parts must be known.
    fn remember(&mut self, item: &NewItem<'_>, index: u64, generation: u32) {
        if let Some(slots) = &mut self.slots {
            match item.kind {
                Kind::Value => remember_slot(slots, item.key, Cached { index, generation }),
                _ => drop(slots.remove(item.key)),
            }
        }
    }

    /// Fetches the catalog again, since the table has moved. `waits_since` is when an operation first had to: a node
    /// that never has the new table must not keep it for ever.
    #[cold]
    async fn refetch(&mut self, waits_since: &mut Option<Duration>) -> Result<(), KvError> {
        const PAUSE: Duration = Duration::from_millis(1);
        let now = self.fabric.now();
        if now.saturating_sub(*waits_since.get_or_insert(now)) >= DEADLINE {
            return Err(KvError::Damaged("a slot of a table that was moved, while no other takes its place"));
        }
        let store = fetch_store(&self.fabric, self.node, &self.store.name).await?;
        let table = Table::new(&store.parameters, store.extent()).map_err(KvError::Gone)?;
        if table.spec.epoch == self.table.spec.epoch {
            self.fabric.sleep(PAUSE).await; // The rebuild has not published its table yet.
        }
        if let Some(slots) = &mut self.slots {
            slots.clear();
        }
        (self.store, self.table) = (store, table);
        Ok(())
    }
}

/// A key that is known already keeps its entry, so that only a new one allocates.
fn remember_slot(slots: &mut Cache<Box<[u8]>, Cached>, key: &[u8], cached: Cached) {
    if let Some(mut known) = slots.get_mut(key) {
        *known = cached;
        return;
    }
    slots.insert(key.into(), cached);
}

/// What reading a key came to; the item itself is in the reply.
enum Sought {
    Absent,
    /// The value is the reply's from `at` on.
    Value {
        at: usize,
        version: Version,
    },
    Large {
        index: u64,
    },
    Moved,
}

/// As much of an item as one reply holds.
const READ_MAX: u32 = 64 * 1024 - 64;
const _: () = assert!(READ_MAX as usize >= ITEM_MAX);

const WHOLE: BoundedPtr = BoundedPtr { ptr: Addr::new(u64::MAX), bound: U32_MAX, tag: U32_MAX };
const TAG_ONLY: BoundedPtr =
    BoundedPtr { ptr: Addr::new(0), bound: zerocopy::little_endian::U32::ZERO, tag: U32_MAX };
const U32_MAX: zerocopy::little_endian::U32 = zerocopy::little_endian::U32::from_bytes([0xff; 4]);

/// An item that is to be installed.
struct NewItem<'a> {
    kind: Kind,
    flags: u8,
    key: &'a [u8],
    /// What follows the key: the value, or the list of its parts.
    value: &'a [u8],
    value_len: usize,
}

impl<'a> NewItem<'a> {
    fn large(key: &'a [u8], parts: &'a [layout::Part], value_len: usize, flags: u8) -> NewItem<'a> {
        NewItem { kind: Kind::Large, flags, key, value: parts.as_bytes(), value_len }
    }

    fn header(&self, generation: u32) -> ItemHeader {
        ItemHeader {
            generation: generation.into(),
            key_len: (self.key.len() as u16).into(),
            kind: self.kind as u8,
            flags: self.flags,
            value_len: (self.value_len as u32).into(),
            reserved: 0.into(),
        }
    }

    /// The second half of the slot that is to point to it.
    fn bound_and_tag(&self, generation: u32) -> [[u8; 4]; 2] {
        [(self.len() as u32).to_le_bytes(), generation.to_le_bytes()]
    }

    fn len(&self) -> usize {
        HEADER_SIZE + self.key.len() + self.value.len()
    }
}

/// Where an item's buffer comes from.
struct Buffer {
    list: ListId,
    reserve: bool,
    /// The list to try if there is nothing on the first: that of the item which the new one replaces, for a
    /// tombstone gives back at least as much as it takes.
    instead: Option<ListId>,
}

impl Buffer {
    fn for_put(item: &NewItem<'_>) -> Result<Buffer, KvError> {
        let class = Class::for_len(item.len()).ok_or(KvError::ValueLength(item.value_len))?;
        Ok(Buffer { list: class.list(), reserve: false, instead: None })
    }

    fn for_tombstone(item: &NewItem<'_>, replaced: &Found) -> Buffer {
        let class = |len: usize| Class::for_len(len).expect("an item that exists fits a buffer").list();
        let instead = class((replaced.slot.0.bound.get() as usize).clamp(item.len(), ITEM_MAX));
        Buffer { list: class(item.len()), reserve: true, instead: Some(instead) }
    }
}

/// Whether the install that beat one which had found `before` directly followed it and did not look at it. Then the
/// one that lost can be said to have come between the two.
fn won_without_looking(before: &Found, now: &Found) -> bool {
    Mutant::KvYieldsToAnyone.is_on()
        || before.kind.is_some()
            && now.index == before.index
            && now.unconditional
            && now.slot.generation() == before.slot.next_generation()
}

fn is_large(key: &[u8], value: &[u8]) -> bool {
    HEADER_SIZE + key.len() + value.len() > ITEM_MAX
}

fn check_put(key: &[u8], value: &[u8]) -> Result<(), KvError> {
    check_key(key)?;
    if value.len() > VALUE_MAX { Err(KvError::ValueLength(value.len())) } else { Ok(()) }
}

async fn fetch_store<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<Store, KvError> {
    let request = serde_json::to_vec(&Ask::OpenStore { name: name.to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await.map_err(|error| match error {
        FabricError::Refused(reason) => KvError::Gone(reason),
        other => KvError::of_look(other),
    })?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Store(store)) if store.kind == KIND => Ok(store),
        Ok(Answer::Store(store)) => {
            Err(KvError::Gone(format!("store '{name}' is a {}, not a {KIND}: name another", store.kind)))
        }
        _ => Err(KvError::Gone(format!("the node's answer about store '{name}' is not understood"))),
    }
}

impl<F: Fabric + Clock> Kv for PrismKv<F> {
    fn get(&mut self, key: &[u8]) -> impl Future<Output = Result<Option<Item<'_>>, KvError>> {
        PrismKv::get(self, key)
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<(), KvError>> {
        PrismKv::put(self, key, value)
    }

    fn delete(&mut self, key: &[u8]) -> impl Future<Output = Result<bool, KvError>> {
        PrismKv::delete(self, key)
    }
}
