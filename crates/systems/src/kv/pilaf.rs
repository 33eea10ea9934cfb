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
use super::client::{Client, Look, LookUp, Reads};
use super::{Fetched, KvError};
use crate::store::{self, StoreError};
use farside_remote::clock::Clock;
use farside_remote::{Addr, Fabric, NodeId, read, read_as};
use layout::{Entry, EntryState, ItemView, Table, crc};
use service::PilafKind;

/// Kind of the store in the catalog.
pub const KIND: &str = "pilaf";

const DAMAGED: &str = "an entry or item that no service wrote";

/// Client of one Pilaf store. It runs one operation at a time: give each task its own client.
pub type Pilaf<F> = Client<F, Table>;

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
}

impl LookUp for Table {
    const KIND: &'static str = KIND;
    const DAMAGED: &'static str = DAMAGED;
    type Table = Table;

    fn table(&self) -> &Table {
        self
    }

    /// Takes two round trips per probe.
    async fn look_up<F: Fabric + Clock>(
        &mut self,
        reads: &mut Reads<F>,
        key: &[u8],
        _attempt: u32,
    ) -> Result<Look, KvError> {
        for slot in self.probe(key) {
            match self.read_slot(reads, key, slot).await? {
                SlotRead::Value(fetched) => return Ok(Look::Found(fetched)),
                SlotRead::Never => return Ok(Look::Absent),
                SlotRead::Other => {}
                SlotRead::Torn => return Ok(Look::Torn),
            }
        }
        Ok(Look::Absent)
    }
}

impl Table {
    /// READs the slot's entry, then the item to which the entry points. Starts again from the entry if the entry or
    /// the item is torn.
    async fn read_slot<F: Fabric + Clock>(
        &self,
        reads: &mut Reads<F>,
        key: &[u8],
        slot: u64,
    ) -> Result<SlotRead, KvError> {
        let mut refused: Option<Entry> = None;
        for _ in 0..ATTEMPTS_MAX {
            let entry: Entry = reads.read_one(self.entry_at(slot)).await?;
            let trusts = mutants::ENTRY_UNCHECKED.is_on() || mutants::SIZE_TRUSTED.is_on();
            let (at, len) = match if trusts { entry.claims() } else { entry.decode() } {
                EntryState::Never => return Ok(SlotRead::Never),
                EntryState::Deleted => return Ok(SlotRead::Other),
                EntryState::Torn => continue,
                EntryState::Nonsense => return Err(KvError::Damaged(DAMAGED)),
                EntryState::Item { at, len } => (at, len),
            };
            let mut chain = reads.chain.begin(self.extent.key);
            let item = chain.also(read(Addr::new(at), len));
            let entry_at = Addr::new(self.entry_at(slot));
            let again = mutants::READS_KEEP_ORDER.is_on().then(|| chain.also(read_as::<Entry>(entry_at)));
            reads.fabric.run(reads.node, &chain, &mut reads.reply).await.map_err(KvError::of_read)?;
            let bytes = match reads.reply.get(item) {
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
                Some(again) => reads.reply.get(again) == Ok(&entry),
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
}
