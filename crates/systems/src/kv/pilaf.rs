//! Pilaf: a hash table that clients read with one-sided READs and change with calls (Mitchell, Geng, Li: ATC'13), as
//! the PRISM paper describes its baseline (section 6.1).
//!
//! GET takes two round trips per probe:
//! 1. READ the slot's entry and check the entry's CRC.
//! 2. READ the item to which the entry points and check the item's CRC.
//!
//! If a CRC is wrong, GET starts again *from the entry*, because the item may have moved.
//!
//! PUT and DELETE are one call each to the node's CPU ([`service`]).
//!
//! Differs from the papers (`docs/papers/pilaf.md` has the reasons):
//! * Collisions are resolved by linear probing. A delete marks its entry and never empties it.
//! * A GET that reads torn bytes [`ATTEMPTS_MAX`] times calls the service. So every GET ends, however often its key is
//!   put.
//! * An item carries the number of its install, so that `get` can return a [`Version`](super::Version).
//!
//! A GET is linearizable:
//! * If it finds a value: an entry with a valid CRC was written by the service and was in the slot at some instant
//!   during the READ. If the item's CRC is valid, too, the item is the one of that entry. So the key had this value at
//!   that instant, even if the buffer has been reused since.
//! * If it finds no value: a key that is present during the whole GET stays in its slot, and every slot before that one
//!   on the path has or had a key. The GET would have found such a key. So the key was absent at some instant during
//!   the GET.

pub mod layout;
pub mod mutants;
pub mod service;
mod system;

pub use super::called::ATTEMPTS_MAX;
use super::called::Calls;
use super::{Fetched, Item, Kv, KvError, check_key};
use crate::store::{self, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, read, read_as};
use layout::{Entry, EntryState, ItemView, PAIR_MAX, Table, crc};
use service::PilafKind;

/// Kind of the store in the catalog.
pub const KIND: &str = "pilaf";

/// Client of one Pilaf store. It runs one operation at a time: give each task its own client.
pub struct Pilaf<F> {
    fabric: F,
    node: NodeId,
    store: Store,
    table: Table,
    chain: ChainBuf,
    reply: Reply,
    calls: Calls,
}

/// Outcome of reading one slot on a key's probe path.
enum SlotRead {
    /// The slot has the key, with this value.
    Value(Fetched),
    /// The slot belongs to another key, or its key was deleted.
    Other,
    /// The slot never had a key.
    Never,
    /// All [`ATTEMPTS_MAX`] attempts read torn bytes.
    Torn,
}

impl<F: Fabric + Clock> Pilaf<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<Pilaf<F>, StoreError> {
        store::open::<PilafKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    fn of(fabric: F, node: NodeId, store: Store) -> Result<Pilaf<F>, StoreError> {
        let table = Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?;
        let calls = Calls::new(node, table.extent.key, PAIR_MAX, DAMAGED);
        Ok(Pilaf { fabric, node, store, table, chain: ChainBuf::new(), reply: Reply::new(), calls })
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }
}

impl<F: Fabric + Clock> Kv for Pilaf<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    /// Takes two round trips per probe.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        for slot in self.table.probe(key) {
            match self.read_slot(key, slot).await? {
                SlotRead::Value(fetched) => return Ok(Some(fetched)),
                SlotRead::Never => return Ok(None),
                SlotRead::Other => {}
                SlotRead::Torn => return self.calls.get(&self.fabric, key).await,
            }
        }
        Ok(None)
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let Fetched { at, version } = fetched;
        let value = match at {
            Some(at) => self.reply.output(0).get(at..).unwrap_or_default(),
            None => self.calls.value(),
        };
        Item { value, version }
    }

    /// Takes one call to the node's CPU.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.calls.put(&self.fabric, key, value).await
    }

    /// Takes one call to the node's CPU.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.calls.delete(&self.fabric, key).await
    }
}

impl<F: Fabric + Clock> Pilaf<F> {
    /// READs the slot's entry, then the item to which the entry points. Starts again from the entry if the entry or
    /// the item is torn.
    async fn read_slot(&mut self, key: &[u8], slot: u64) -> Result<SlotRead, KvError> {
        let mut refused: Option<Entry> = None;
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.read_entry(slot).await?;
            let trusts = mutants::ENTRY_UNCHECKED.is_on() || mutants::SIZE_TRUSTED.is_on();
            let (at, len) = match if trusts { entry.claims() } else { entry.decode() } {
                EntryState::Never => return Ok(SlotRead::Never),
                EntryState::Deleted => return Ok(SlotRead::Other),
                EntryState::Torn => continue,
                EntryState::Nonsense => return Err(KvError::Damaged(DAMAGED)),
                EntryState::Item { at, len } => (at, len),
            };
            let mut chain = self.chain.begin(self.table.extent.key);
            let item = chain.also(read(Addr::new(at), len));
            let entry_at = Addr::new(self.table.entry_at(slot));
            let again = mutants::READS_KEEP_ORDER.is_on().then(|| chain.also(read_as::<Entry>(entry_at)));
            self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
            let bytes = match self.reply.get(item) {
                Ok(bytes) => bytes,
                // The item's segment may hold buffers of another size now, but only if the entry has changed. So if the
                // READ for an unchanged entry is refused twice, the refusal is final.
                Err(_) if refused.replace(entry) != Some(entry) && !mutants::SIZE_TRUSTED.is_on() => {
                    continue;
                }
                Err(status) => return Err(KvError::Refused(status)),
            };
            if mutants::SIZE_TRUSTED.is_on() && !entry.is_sound() {
                continue;
            }
            let is_intact = match again {
                Some(again) => self.reply.get(again) == Ok(&entry),
                None => crc(bytes) == entry.crc_item.get() || mutants::ITEM_UNCHECKED.is_on(),
            };
            if !is_intact {
                continue; // The item was replaced, and its buffer was reused.
            }
            let item = ItemView::decode(bytes)?;
            if item.key != key {
                return Ok(SlotRead::Other);
            }
            let at = Some(bytes.len() - item.value.len());
            return Ok(SlotRead::Value(Fetched { at, version: item.version }));
        }
        Ok(SlotRead::Torn)
    }

    async fn read_entry(&mut self, slot: u64) -> Result<Entry, KvError> {
        let mut chain = self.chain.begin(self.table.extent.key);
        let entry = chain.also(read_as::<Entry>(Addr::new(self.table.entry_at(slot))));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        self.reply.get(entry).copied().map_err(KvError::Refused)
    }
}

const DAMAGED: &str = "an entry or item that no service wrote";
