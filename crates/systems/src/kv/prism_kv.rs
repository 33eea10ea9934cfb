//! PRISM-KV: a hash table of pointers to items, read and changed without the node's CPU (PRISM, section 6).
//!
//! GET takes one round trip per probe: an indirect READ of the slot's item.
//!
//! PUT takes two round trips:
//! 1. Probe: find the key's slot.
//! 2. Allocate a new item and swing the slot's pointer to it, if the slot is unchanged since the probe.
//!
//! If the client has cached the slot, PUT skips the probe and takes one round trip.
//!
//! Differs from the paper ([`layout`] describes the bytes):
//! * The slot's tag is a generation that grows with every install. So a CAS never succeeds on a slot that changed and
//!   changed back, and `get` can return a [`Version`] for conditional puts.
//! * In the paper, a PUT whose CAS fails counts as done just before the PUT that won. Here it does so only under two
//!   conditions. First, the winner's install directly followed the install that the losing PUT had found. Second, the
//!   winner did not depend on the old value. A conditional put or a delete depends on the old value: it has read that
//!   value, so no other PUT can have taken effect in between.
//! * DELETE leaves a tombstone, so a slot keeps its key and no other key can take the slot. This rules out the races of
//!   open addressing.
//! * Values of more than about 60 KiB are lists of parts, installed by one CAS.
//! * A crowded table is rebuilt while it is in use (`rebuild`, decision 0017). The rebuild *leaves* the former table
//!   slot by slot: it marks each slot as MOVED or CLOSED. During a rebuild, a client looks for a key in the former
//!   table first. If the key's path in that table was left, the client continues in the next table. The same rule
//!   applies if several tables are being left.
//! * Clients do not report buffers for reclamation. The chain that installs retires the replaced item, or the new item
//!   if its CAS fails (decision 0023). So PUT needs no trailing READ of the new item's address, and a cancelled
//!   operation leaks nothing.
//!
//! Invariant: only the chain that installs retires the buffers that its install made unreachable. If it is unknown
//! whether that chain ran, the client does not retire those buffers.
//! Invariant: no client writes a key into the next table before the key's place in the former table was left.

mod large;
pub mod layout;
pub mod many;
pub mod mutants;
mod rebuild;
pub mod service;
mod system;

use super::{Conflict, Cursor, Fetched, Item, Kv, KvError, VALUE_MAX, Version, check_key};
use crate::ready::{once, run_until_ready};
use crate::store::{self, StoreError};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{DEADLINE, ServiceId};
use farside_remote::op::ListId;
use farside_remote::{
    Addr, BoundedPtr, Chain, ChainBuf, Fabric, FabricError, NodeId, Out, Reply, Status, allocate, cas_from,
    read, read_as, retire, write,
};
use layout::{HEADER_SIZE, ITEM_MAX, ItemHeader, ItemView, Kind, PROBES_MAX, Slot, Table, UNCONDITIONAL};
use quick_cache::unsync::Cache;
use service::PrismKvKind;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Kind of the store in the catalog.
pub const KIND: &str = "prism-kv";

/// Scratch address of the slot's new word, which starts with the item's address.
const TMP: Addr = Addr::scratch(0);
const TMP_BOUND_AND_TAG: Addr = Addr::scratch(8);

/// Client of one PRISM-KV store. It runs one operation at a time: give each task its own client.
pub struct PrismKv<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    table: Table,
    /// Former tables, which the rebuild is leaving, oldest first. Empty unless the store is being rebuilt.
    formers: Vec<Table>,
    slots: Option<Cache<Box<[u8]>, Cached>>,
    chain: ChainBuf,
    reply: Reply,
    /// The large value that was read last, assembled from its parts.
    value: Vec<u8>,
    waits: Waits,
}

/// Limits on the time that one operation waits for a rebuild. A node whose catalog never becomes usable, or changes at
/// every request, must not block the operation for ever.
#[derive(Clone, Copy, Default)]
struct Waits {
    /// Time of the operation's first wait, if it has waited.
    since: Option<Duration>,
    /// Number of times that the operation fetched the catalog.
    catalogs: u32,
}

/// Maximum number of catalog fetches in one operation. Each rebuild that an operation meets takes three fetches.
const CATALOGS_MAX: u32 = 10_000;

/// Cached address of a key's slot, and cached generation of the slot.
#[derive(Clone, Copy)]
struct Cached {
    at: Addr,
    generation: u32,
}

/// One of the tables of a store that is being rebuilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Epoch {
    /// The table with this index among the tables that are being left.
    Former(usize),
    /// The newest table; the only one, unless the store is being rebuilt.
    Current,
}

/// Result of a probe: the slot that the key has or would get, as it was at one instant.
#[derive(Clone)]
struct Found {
    at: Addr,
    slot: Slot,
    /// Generation of the next install in this slot.
    next_generation: u32,
    /// Kind of the slot's item; `None` if the slot is empty.
    kind: Option<Kind>,
    unconditional: bool,
}

/// Outcome of an attempt to install an item.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Installed {
    /// The slot points to the item. The chain retired the replaced item.
    Yes,
    /// The slot did not hold the expected word, or the store's key has changed. Nothing was changed.
    No,
    /// No buffer was free, and nothing was changed.
    NoBuffer,
}

/// Slot, expected word and other parameters of one install.
struct Swing<'a> {
    at: Addr,
    /// Word that the CAS expects in the slot. The CAS compares the whole word, or the tag alone.
    expected: &'a BoundedPtr,
    is_tag_alone: bool,
    /// Generation of the new item.
    generation: u32,
    /// Parts of the replaced item, if that item is large.
    old_parts: &'a [Addr],
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<PrismKv<F>, StoreError> {
        store::open::<PrismKvKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    fn of(fabric: F, node: NodeId, store: Store) -> Result<PrismKv<F>, StoreError> {
        let (table, formers) = tables_of(&store)?;
        Ok(PrismKv {
            fabric,
            node,
            store,
            table,
            formers,
            slots: None,
            chain: ChainBuf::new(),
            reply: Reply::new(),
            value: Vec::new(),
            waits: Waits::default(),
        })
    }

    /// Makes the client cache the slots of up to `keys` keys. A PUT of a cached key takes one round trip.
    pub fn with_slot_cache(mut self, keys: usize) -> PrismKv<F> {
        self.slots = (keys > 0).then(|| Cache::new(keys));
        self
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the table; during a rebuild, the newest one.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }
}

impl<F: Fabric + Clock> Kv for PrismKv<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        self.read_item::<false>(key).await
    }

    #[inline]
    async fn get(&mut self, key: &[u8]) -> Result<Option<Item<'_>>, KvError> {
        let fetched = self.read_item::<true>(key).await?;
        Ok(fetched.map(|fetched| self.item(fetched)))
    }

    #[inline]
    fn item(&self, fetched: Fetched) -> Item<'_> {
        let Fetched { at, version } = fetched;
        let value = at.map_or(&self.value[..], |at| self.reply.output(0).get(at..).unwrap_or_default());
        Item { value, version }
    }

    /// Takes two round trips, or one if the slot is cached.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        check_put(key, value)?;
        self.waits = Waits::default();
        if is_large(key, value) {
            return self.put_large(key, value).await;
        }
        if let Some(cached) = self.cached(key)
            && (self.put_cached(key, value, cached).await? || mutants::CACHED_PUT_YIELDS.is_on())
        {
            return Ok(());
        }
        let item = NewItem::small(Kind::Value, UNCONDITIONAL, key, value);
        self.install_blindly(&item).await.map(drop)
    }

    /// Takes two round trips.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        check_key(key)?;
        self.waits = Waits::default();
        // A delete whose CAS fails always probes again. Unlike a PUT, it cannot count as done just before the winner,
        // because it returns whether the key had a value.
        loop {
            // `None` means that the key has no slot, so it has no value to delete.
            let found = self.find_if_any(key).await?;
            let Some(found) = found.filter(|found| found.kind.is_some_and(Kind::is_present)) else {
                return Ok(false);
            };
            let item = NewItem::small(Kind::Tombstone, 0, key, &[]);
            if self.install(&found, &item, Buffer::for_tombstone(&item, &found)).await? {
                return Ok(true);
            }
        }
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, KvError> {
        Ok(self.put_if(key, value, None).await?.is_ok())
    }

    async fn compare_and_put(
        &mut self,
        key: &[u8],
        expected: Version,
        value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        self.put_if(key, value, Some(expected)).await
    }

    fn get_many(
        &mut self,
        keys: &[&[u8]],
        visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> impl Future<Output = Result<(), KvError>> {
        self.get_group(keys, visit)
    }

    fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> impl Future<Output = Result<(), KvError>> {
        self.put_groups(items)
    }

    fn first(&self) -> Result<Cursor, KvError> {
        Ok(Cursor::default())
    }

    fn next(
        &mut self,
        cursor: &mut Cursor,
        visit: impl FnMut(&[u8], Item<'_>),
    ) -> impl Future<Output = Result<bool, KvError>> {
        self.visit_next(cursor, visit)
    }
}

impl<F: Fabric + Clock> PrismKv<F> {
    /// Stores a value if the key has the `expected` version or, if `expected` is `None`, if the key has no value.
    async fn put_if(
        &mut self,
        key: &[u8],
        value: &[u8],
        expected: Option<Version>,
    ) -> Result<Result<Version, Conflict>, KvError> {
        check_put(key, value)?;
        self.waits = Waits::default();
        if is_large(key, value) {
            return self.put_large_if(key, value, expected).await;
        }
        let item = NewItem::small(Kind::Value, 0, key, value);
        self.install_if(&item, expected).await
    }

    /// Installs an item if the key has the `expected` version or, if `expected` is `None`, if the key has no value.
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
                return Ok(Ok(Version(found.next_generation)));
            }
        }
    }

    // Reading.

    /// Reads the item of `key`, for [`Kv::get`] or for [`Kv::fetch`]. Takes one round trip per probe. Each instance of
    /// this function has one caller, so the compiler inlines the whole GET.
    #[inline]
    async fn read_item<const IS_GET: bool>(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        self.waits = Waits::default();
        loop {
            match self.look_up::<IS_GET>(key).await {
                Ok(Lookup::Absent) => return Ok(None),
                Ok(Lookup::Value { at, version }) => return Ok(Some(Fetched { at: Some(at), version })),
                // Boxed, to keep the future of every other GET small.
                Ok(Lookup::Large { at }) => match Box::pin(self.read_large(key, at)).await? {
                    large::Read::Whole(version) => return Ok(Some(Fetched { at: None, version })),
                    large::Read::Changed => {}
                },
                Ok(Lookup::Left) => Box::pin(self.refetch()).await?,
                Err(KvError::Refused(Status::Access)) => Box::pin(self.fetch_key()).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads the item of `key` into the reply. Searches the former tables first, oldest first.
    #[inline]
    async fn look_up<const IS_GET: bool>(&mut self, key: &[u8]) -> Result<Lookup, KvError> {
        if !self.formers.is_empty() {
            // Boxed, because it runs only during a rebuild.
            match Box::pin(self.look_up_in_formers(key)).await? {
                Lookup::Left => {}
                lookup => return Ok(lookup),
            }
        }
        self.look_up_in::<true, IS_GET>(0, key).await
    }

    async fn look_up_in_formers(&mut self, key: &[u8]) -> Result<Lookup, KvError> {
        for former in 0..self.formers.len() {
            match self.look_up_in::<false, false>(former, key).await? {
                Lookup::Left => {}
                lookup => return Ok(lookup),
            }
        }
        Ok(Lookup::Left)
    }

    /// Reads the item of `key` in one table into the reply, probing from the key's first slot. The table is the current
    /// one, or the former one with index `former`. For the current table this function has one caller, so the compiler
    /// inlines the whole GET into that caller.
    #[inline]
    async fn look_up_in<const IS_CURRENT: bool, const IS_GET: bool>(
        &mut self,
        former: usize,
        key: &[u8],
    ) -> Result<Lookup, KvError> {
        let epoch = if IS_CURRENT { Epoch::Current } else { Epoch::Former(former) };
        for index in self.table_of(epoch).probe(key) {
            let at = self.table_of(epoch).slot_at(index);
            let mut chain = self.chain.begin(self.table.extent.key);
            let item = chain.also(read(at, READ_MAX).indirect().bounded());
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
            let bytes = self.reply.get(item).map_err(KvError::Refused)?;
            if bytes.is_empty() {
                return Ok(Lookup::Absent);
            }
            let item = ItemView::decode(bytes)?;
            match item.kind {
                Kind::Closed => return Ok(Lookup::Left),
                // A moved slot does not show which key it had. If it was another key's, `key` may lie further along the
                // path of this former table.
                Kind::Moved if !IS_CURRENT => continue,
                Kind::Moved => return Ok(Lookup::Left),
                _ if !item.is_of(key) => continue,
                _ => {}
            }
            if let Some(slots) = &mut self.slots {
                match item.kind {
                    // The slot is not cached: a PUT that replaces a large value must read the list of its parts.
                    Kind::Large => drop(slots.remove(key)),
                    _ => remember_slot(slots, key, Cached { at, generation: item.header.generation.get() }),
                }
            }
            return Ok(match item.kind {
                Kind::Value => {
                    let at = bytes.len() - item.value()?.len();
                    Lookup::Value { at, version: item.version() }
                }
                Kind::Large => Lookup::Large { at },
                Kind::Tombstone | Kind::Moved | Kind::Closed => Lookup::Absent,
            });
        }
        Ok(Lookup::Absent)
    }

    /// Returns the number of slots, from the start of its path in a table, that a new key may take. During a rebuild
    /// there are fewer, because the keys that are being moved need slots in the next table, too. If keys are being
    /// moved out of two tables, the second was too small for the keys of the first; then no table after the second
    /// takes new keys.
    fn new_key_probes(&self, epoch: Epoch) -> u64 {
        match (self.formers.len(), epoch) {
            (0, _) | (1 | 2, Epoch::Former(_)) => PROBES_MAX,
            (1, Epoch::Current) => PROBES_MAX / 4,
            _ => 0,
        }
    }

    fn table_of(&self, epoch: Epoch) -> &Table {
        match epoch {
            Epoch::Former(former) => &self.formers[former],
            Epoch::Current => &self.table,
        }
    }

    /// Finds the slot that `key` has, or the empty slot that the key would get. If there is neither, this function
    /// requests a larger table, waits, and probes again.
    async fn find(&mut self, key: &[u8]) -> Result<Found, KvError> {
        loop {
            if let Some(found) = self.find_if_any(key).await? {
                return Ok(found);
            }
            Box::pin(self.grow()).await?;
        }
    }

    /// Finds the key's slot as [`PrismKv::find`] does, but returns `None` if the key has no slot and no slot is free
    /// for it.
    async fn find_if_any(&mut self, key: &[u8]) -> Result<Option<Found>, KvError> {
        loop {
            let mut place = Ok(Place::Left);
            for former in 0..self.formers.len() {
                if let Ok(Place::Left) = place {
                    place = Box::pin(self.find_in(Epoch::Former(former), key)).await;
                }
            }
            if let Ok(Place::Left) = place {
                place = self.find_in(Epoch::Current, key).await;
            }
            match place {
                Ok(Place::Found(found)) => return Ok(Some(found)),
                Ok(Place::Left) => Box::pin(self.refetch()).await?,
                Ok(Place::Frozen) => self.pause().await?,
                Ok(Place::Full) => return Ok(None),
                Err(KvError::Refused(Status::Access)) => Box::pin(self.fetch_key()).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// The first round trip of PUT: probes one table for the slot of `key`.
    async fn find_in(&mut self, epoch: Epoch, key: &[u8]) -> Result<Place, KvError> {
        let path = self.table_of(epoch).probe(key);
        for (step, index) in (0..).zip(path) {
            let at = self.table_of(epoch).slot_at(index);
            let mut chain = self.chain.begin(self.table.extent.key);
            let probe = add_probe(&mut chain, at, key);
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
            match decode_probe(&self.reply, self.table_of(epoch), at, probe, key)? {
                Probed::Empty(found) => {
                    let mutant = mutants::WRITE_BEFORE_MOVED;
                    return Ok(if epoch != Epoch::Current && mutant.is_on() {
                        Place::Left
                    } else if index == self.table_of(epoch).end() || step >= self.new_key_probes(epoch) {
                        Place::Full
                    } else {
                        Place::Found(found)
                    });
                }
                Probed::Own(found) => return Ok(Place::Found(found)),
                Probed::Frozen => return Ok(Place::Frozen),
                Probed::Moved if epoch != Epoch::Current => {}
                Probed::Moved | Probed::Closed => return Ok(Place::Left),
                Probed::Other => {}
            }
        }
        Ok(Place::Full)
    }

    // Writing.

    /// Installs an item, whatever value its key has. Returns false if the item was not installed: the put then counts
    /// as done just before another put, whose item is in the slot.
    #[inline]
    async fn install_blindly(&mut self, item: &NewItem<'_>) -> Result<bool, KvError> {
        let mut lost_to: Option<Found> = None;
        loop {
            let found = self.find(item.key).await?;
            if lost_to.take().is_some_and(|before| counts_as_done_before(&before, &found)) {
                return Ok(false);
            }
            if self.install(&found, item, Buffer::for_put(item)?).await? {
                return Ok(true);
            }
            lost_to = Some(found);
        }
    }

    /// Installs an item in the slot that a probe has found. Returns false if the slot has changed since the probe.
    async fn install(&mut self, found: &Found, item: &NewItem<'_>, buffer: Buffer) -> Result<bool, KvError> {
        let old_parts = match found.kind {
            Some(Kind::Large) => self.parts_of(found.slot).await?,
            _ => Vec::new(),
        };
        let swing = Swing {
            at: found.at,
            expected: &found.slot.0,
            is_tag_alone: false,
            generation: found.next_generation,
            old_parts: &old_parts,
        };
        let mut installed =
            self.swing(&swing, item, buffer.list, buffer.reserve, buffer.fallback.is_none()).await?;
        if let (Installed::NoBuffer, Some(list)) = (installed, buffer.fallback) {
            installed = self.swing(&swing, item, list, true, true).await?;
        }
        match installed {
            Installed::Yes => {
                self.remember(item, found.at, found.next_generation);
                Ok(true)
            }
            Installed::No => Ok(false),
            Installed::NoBuffer => Err(KvError::OutOfMemory),
        }
    }

    /// Runs the second round trip of PUT: allocate, write and CAS. This round trip is the only one if the slot is
    /// cached.
    async fn swing(
        &mut self,
        swing: &Swing<'_>,
        item: &NewItem<'_>,
        list: ListId,
        reserve: bool,
        patient: bool,
    ) -> Result<Installed, KvError> {
        let header = item.header(swing.generation);
        let bound_and_tag = item.bound_and_tag(swing.generation);
        let mut chain = self.chain.begin(self.table.extent.key);
        let swung = add_swing(&mut chain, swing, item, &header, &bound_and_tag, list, reserve);
        if let Some(parts) = item.parts {
            chain.holds(&parts.at, swung, &parts.is_posted);
        }
        let (fabric, reply) = (&self.fabric, &mut self.reply);
        let ready = match patient {
            true => run_until_ready(fabric, self.node, &chain, reply).await,
            false => once(fabric, self.node, &chain, reply).await,
        };
        if !ready.map_err(KvError::of_install)? {
            return Ok(Installed::NoBuffer);
        }
        match self.reply.status(swung) {
            Status::Ok => Ok(Installed::Yes),
            Status::CasFailed => Ok(Installed::No),
            // The ALLOCATE was refused before any change. The store's key may have changed.
            Status::Aborted if self.reply.verdict() == Status::Access => {
                Box::pin(self.fetch_key()).await?;
                Ok(Installed::No)
            }
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    /// Puts a value to a cached slot, in one round trip. Returns false if the slot's generation has changed. The
    /// change may be older than this put, so the put cannot count as done, and the caller must probe.
    async fn put_cached(&mut self, key: &[u8], value: &[u8], cached: Cached) -> Result<bool, KvError> {
        let item = NewItem::small(Kind::Value, UNCONDITIONAL, key, value);
        let swing = Swing {
            at: cached.at,
            expected: &BoundedPtr { tag: cached.generation.into(), ..BoundedPtr::default() },
            is_tag_alone: true,
            generation: layout::next_generation(cached.generation),
            old_parts: &[],
        };
        match self.swing(&swing, &item, Buffer::for_put(&item)?.list, false, true).await? {
            Installed::Yes => {
                self.remember(&item, cached.at, swing.generation);
                Ok(true)
            }
            Installed::No => {
                if let Some(slots) = &mut self.slots {
                    slots.remove(key);
                }
                Ok(false)
            }
            Installed::NoBuffer => Err(KvError::OutOfMemory),
        }
    }

    // Cache of slots.

    fn cached(&mut self, key: &[u8]) -> Option<Cached> {
        self.slots.as_ref()?.get(key).copied()
    }

    /// Caches the slot of a new small value. The slot of any other item is not cached: for example, a PUT that replaces
    /// a large value must read the list of its parts.
    fn remember(&mut self, item: &NewItem<'_>, at: Addr, generation: u32) {
        if let Some(slots) = &mut self.slots {
            match item.kind {
                Kind::Value => remember_slot(slots, item.key, Cached { at, generation }),
                _ => drop(slots.remove(item.key)),
            }
        }
    }

    // Waiting for rebuilds.

    /// Fetches the catalog after a table was left. Pauses if the catalog has not changed.
    #[cold]
    async fn refetch(&mut self) -> Result<(), KvError> {
        let known = (self.table.spec.epoch, self.formers.len());
        self.fetch_catalog().await?;
        if (self.table.spec.epoch, self.formers.len()) == known {
            self.pause().await?;
        }
        Ok(())
    }

    /// Waits for the node to make progress.
    ///
    /// # Errors
    /// [`KvError::NotMoved`] if the operation has waited for [`DEADLINE`].
    #[cold]
    async fn pause(&mut self) -> Result<(), KvError> {
        const PAUSE: Duration = Duration::from_micros(200);
        if self.has_waited() {
            return Err(KvError::NotMoved);
        }
        self.fabric.sleep(PAUSE).await;
        Ok(())
    }

    fn has_waited(&mut self) -> bool {
        let now = self.fabric.now();
        now.saturating_sub(*self.waits.since.get_or_insert(now)) >= DEADLINE
    }

    /// Fetches the store's new key after the node refused the old one. Every rebuild changes the key.
    ///
    /// # Errors
    /// The catalog still has the refused key.
    #[cold]
    async fn fetch_key(&mut self) -> Result<(), KvError> {
        let refused = self.table.extent.key;
        self.fetch_catalog().await?;
        if self.table.extent.key == refused { Err(KvError::Refused(Status::Access)) } else { Ok(()) }
    }

    /// Requests a larger table, because the current table has no slot for a new key. Returns when the client should
    /// probe again.
    #[cold]
    async fn grow(&mut self) -> Result<(), KvError> {
        if self.has_waited() {
            let reason = "the node is still building a larger one: try again";
            return Err(KvError::TableFull(reason.into()));
        }
        let grow = Ask::GrowStore { name: self.store.name.clone() };
        match ask(&self.fabric, self.node, &grow).await {
            Ok(_) | Err(FabricError::Deadline { .. }) => {}
            Err(FabricError::Refused(reason)) => {
                // The refusal concerns the node's current table, which may already be newer than this client's.
                let met = (self.table.spec.epoch, self.table.extent.key);
                self.fetch_catalog().await?;
                let is_of_another = (self.table.spec.epoch, self.table.extent.key) != met;
                return if is_of_another { Ok(()) } else { Err(KvError::TableFull(reason)) };
            }
            Err(other) => return Err(KvError::of_read(other)),
        }
        // Pause: a rebuild takes time, and after a rebuild the node waits for this session's turn to end.
        self.pause().await?;
        self.fetch_catalog().await
    }

    async fn fetch_catalog(&mut self) -> Result<(), KvError> {
        self.waits.catalogs += 1;
        if self.waits.catalogs > CATALOGS_MAX {
            return Err(KvError::NotMoved);
        }
        let store = store::fetch_of(&self.fabric, self.node, &self.store.name, KIND).await?;
        if store.id != self.store.id {
            return Err(StoreError::another(&store).into());
        }
        let (table, formers) = tables_of(&store)?;
        if let Some(slots) = &mut self.slots {
            slots.clear();
        }
        (self.store, self.table, self.formers) = (store, table, formers);
        Ok(())
    }
}

/// Adds the ops of an install: allocate, write and CAS (PRISM, section 6.1).
///
/// Differs from the paper: the CAS op reclaims the replaced item, or the new item if the CAS fails. So the chain has no
/// READ of the new buffer's address.
fn add_swing<'a>(
    chain: &mut Chain<'a>,
    swing: &Swing<'a>,
    item: &NewItem<'a>,
    header: &'a ItemHeader,
    bound_and_tag: &'a [[u8; 4]; 2],
    list: ListId,
    reserve: bool,
) -> Out<BoundedPtr> {
    chain.also(write(TMP_BOUND_AND_TAG, bound_and_tag.as_bytes()));
    let fill = allocate(list, [header.as_bytes(), item.key, item.value]);
    chain.then(if reserve { fill.from_reserve() } else { fill }.redirect(TMP));
    let cas = cas_from(swing.at, swing.expected, TMP).reclaiming(POINTER_AT);
    let swung = chain.then(if swing.is_tag_alone { cas.masked(&TAG_ONLY, &WHOLE) } else { cas });
    if !swing.old_parts.is_empty() {
        chain.then(retire(swing.old_parts));
    }
    swung
}

/// Offset in bytes of the pointer in a slot.
const POINTER_AT: u32 = std::mem::offset_of!(BoundedPtr, ptr) as u32;

/// Returns the tables in the catalog: the newest table, and the tables that are being left.
fn tables_of(store: &Store) -> Result<(Table, Vec<Table>), StoreError> {
    let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
    let formers = store.formers().into_iter().map(|(parameters, extent)| Table::new(parameters, extent));
    Ok((table, formers.collect::<Result<_, _>>().map_err(StoreError::Gone)?))
}

/// Caches a slot. Updates the entry of a cached key in place, so only a new key allocates.
fn remember_slot(slots: &mut Cache<Box<[u8]>, Cached>, key: &[u8], cached: Cached) {
    if let Some(mut known) = slots.get_mut(key) {
        *known = cached;
        return;
    }
    slots.insert(key.into(), cached);
}

/// Outcome of reading a key in one or more tables. The item is in the reply.
enum Lookup {
    Absent,
    /// The value starts at offset `at` of the reply's output.
    Value {
        at: usize,
        version: Version,
    },
    Large {
        at: Addr,
    },
    /// The key's path in this table was left. Only another table can have the key.
    Left,
}

/// Outcome of a probe for the slot in which a key can be installed.
enum Place {
    Found(Found),
    /// The key's path in this table was left. The key must be installed in another table.
    Left,
    /// The key's slot is frozen: a rebuild is moving it.
    Frozen,
    /// No slot is free: all slots on the path belong to other keys, or are reserved for keys that are being moved.
    Full,
}

/// Content of one slot on a key's path.
enum Probed {
    /// The slot never had a key.
    Empty(Found),
    /// The slot has an item of this key.
    Own(Found),
    /// The key's own item, which is being moved.
    Frozen,
    /// The slot's item belongs to another key.
    Other,
    /// The slot's key was moved to the next table.
    Moved,
    /// The slot never had a key and will never have one.
    Closed,
}

/// Adds the ops of a probe: READ the slot, then READ the header and key of its item.
///
/// Both results belong to one snapshot, because the chain copies the slot to scratch memory once and reads through that
/// copy.
#[inline]
fn add_probe(chain: &mut Chain<'_>, at: Addr, key: &[u8]) -> (Out<BoundedPtr>, Out<[u8]>) {
    chain.also(read(at, layout::SLOT_SIZE as u32).redirect(TMP));
    let slot = chain.then(read_as::<BoundedPtr>(TMP));
    let item = chain.then(read(TMP, (HEADER_SIZE + key.len()) as u32).indirect().bounded());
    (if mutants::TWO_SNAPSHOTS.is_on() { chain.then(read_as(at)) } else { slot }, item)
}

/// Decodes the results of [`add_probe`] for the slot at the address `at`.
#[inline]
fn decode_probe(
    reply: &Reply,
    table: &Table,
    at: Addr,
    (slot, item): (Out<BoundedPtr>, Out<[u8]>),
    key: &[u8],
) -> Result<Probed, KvError> {
    let refused = |_| KvError::Refused(reply.verdict());
    let slot = Slot(*reply.get(slot).map_err(refused)?);
    let bytes = reply.get(item).map_err(refused)?;
    let next_generation = table.next_generation(slot);
    let found = Found { at, slot, next_generation, kind: None, unconditional: false };
    if slot.is_empty() {
        return Ok(Probed::Empty(found));
    }
    let item = ItemView::decode(bytes)?;
    Ok(match item.kind {
        Kind::Closed => Probed::Closed,
        Kind::Moved => Probed::Moved,
        kind if item.is_of(key) || mutants::SLOT_REUSE.is_on() && kind == Kind::Tombstone => {
            if slot.is_frozen() && !mutants::FROZEN_IS_COMPARED.is_on() {
                return Ok(Probed::Frozen);
            }
            Probed::Own(Found { kind: Some(kind), unconditional: item.is_unconditional(), ..found })
        }
        _ => Probed::Other,
    })
}

/// Maximum number of bytes of an item that one READ returns. A reply with these bytes and its other fields fits into
/// 64 KiB.
const READ_MAX: u32 = 64 * 1024 - 64;
const _: () = assert!(READ_MAX as usize >= ITEM_MAX);

const WHOLE: BoundedPtr = BoundedPtr { ptr: Addr::new(u64::MAX), bound: U32_MAX, tag: U32_MAX };
const TAG_ONLY: BoundedPtr =
    BoundedPtr { ptr: Addr::new(0), bound: zerocopy::little_endian::U32::ZERO, tag: U32_MAX };
const U32_MAX: zerocopy::little_endian::U32 = zerocopy::little_endian::U32::from_bytes([0xff; 4]);

/// An item to install.
struct NewItem<'a> {
    kind: Kind,
    flags: u8,
    key: &'a [u8],
    /// Bytes after the key: the value, or the list of its parts.
    value: &'a [u8],
    value_len: usize,
    /// Parts of a large value, which the install makes reachable; `None` for other items.
    parts: Option<&'a large::Parts>,
}

impl<'a> NewItem<'a> {
    fn small(kind: Kind, flags: u8, key: &'a [u8], value: &'a [u8]) -> NewItem<'a> {
        NewItem { kind, flags, key, value, value_len: value.len(), parts: None }
    }

    fn large(key: &'a [u8], parts: &'a large::Parts, value_len: usize, flags: u8) -> NewItem<'a> {
        let (kind, value) = (Kind::Large, parts.list.as_bytes());
        NewItem { kind, flags, key, value, value_len, parts: Some(parts) }
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

    /// Encodes the second half of the slot's new word: the item's length and the tag.
    fn bound_and_tag(&self, generation: u32) -> [[u8; 4]; 2] {
        [(self.len() as u32).to_le_bytes(), generation.to_le_bytes()]
    }

    fn len(&self) -> usize {
        HEADER_SIZE + self.key.len() + self.value.len()
    }
}

/// Free lists from which an item's buffer is allocated.
struct Buffer {
    list: ListId,
    reserve: bool,
    /// Free list to use if `list` is empty. Only a tombstone has such a list: the list for the size of the item that
    /// the delete replaces. The delete then frees at least as large a buffer as it takes.
    fallback: Option<ListId>,
}

impl Buffer {
    fn for_put(item: &NewItem<'_>) -> Result<Buffer, KvError> {
        let class = Class::for_len(item.len()).ok_or(KvError::ValueLength(item.value_len))?;
        Ok(Buffer { list: class.list(), reserve: false, fallback: None })
    }

    fn for_tombstone(item: &NewItem<'_>, replaced: &Found) -> Buffer {
        let class = |len: usize| Class::for_len(len).expect("an item that exists fits a buffer").list();
        let fallback = class((replaced.slot.0.bound.get() as usize).clamp(item.len(), ITEM_MAX));
        Buffer { list: class(item.len()), reserve: true, fallback: Some(fallback) }
    }
}

/// Whether a put that probed `before` and whose CAS failed counts as done just before the install in `now`.
///
/// The put counts as done if that install directly followed `before` and did not depend on the old value.
fn counts_as_done_before(before: &Found, now: &Found) -> bool {
    mutants::YIELDS_TO_ANYONE.is_on()
        || before.kind.is_some()
            && now.at == before.at
            && now.unconditional
            && now.slot.generation() == before.next_generation
}

fn is_large(key: &[u8], value: &[u8]) -> bool {
    HEADER_SIZE + key.len() + value.len() > ITEM_MAX
}

fn check_put(key: &[u8], value: &[u8]) -> Result<(), KvError> {
    check_key(key)?;
    if value.len() > VALUE_MAX { Err(KvError::ValueLength(value.len())) } else { Ok(()) }
}

/// Sends a request to the node. Returns `None` if the response cannot be parsed.
async fn ask<F: Fabric>(fabric: &F, node: NodeId, ask: &Ask) -> Result<Option<Answer>, FabricError> {
    let request = serde_json::to_vec(ask).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await?;
    Ok(serde_json::from_slice(&answer).ok())
}
