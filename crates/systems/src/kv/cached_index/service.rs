//! Work of the memory node's CPU for a store with a cached index: all puts and deletes, and the gets of clients that
//! read torn bytes too often.
//!
//! Only the service changes the table, one call at a time. A put of a key that is present writes its item in place. A
//! put of another key takes a spare item, gives it the next incarnation, and writes the entry after the item. A delete
//! gives the item the next incarnation and empties the entry. So a client whose cache has the entry finds another
//! incarnation.

use super::layout::{BUCKET_ENTRIES, Bucket, CHAIN_MAX, Entry, Item, Start, Table, TableSpec};
use super::{KIND, mutants};
use crate::kv::Version;
use crate::kv::called::{Carried, OneByOne, Operations, Outcome, version_of};
use crate::kv::inplace::{Change, Header, START, State, decode, raised};
use crate::kv::places;
use farside_remote::Memory;
use farside_remote::service::{Extent, Kind, Plan, Service};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Node-side half of the store.
pub struct CachedIndexKind;

impl<M: Memory> Kind<M> for CachedIndexKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        places::plan::<TableSpec>(parameters, KIND, quota, entropy)
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(OneByOne::new(CachedIndexService { table: Table::new(parameters, table)? })))
    }
}

/// The service: calls change items in place.
struct CachedIndexService {
    table: Table,
}

/// An item, as the service has read it.
struct Located {
    item: u64,
    header: Header,
    content: Vec<u8>,
}

/// Result of a search for a key.
#[derive(Default)]
struct Found {
    /// The bucket and the entry of the key, and its item, if the key was found.
    at: Option<(u64, usize, Located)>,
    /// Bucket and index of the first entry without a key.
    vacant: Option<(u64, usize)>,
    /// Last bucket of the chain.
    last: u64,
    /// Number of buckets of the chain.
    len: usize,
}

/// Error: an item or link is damaged, or was not written by a service.
struct Damaged;

/// Result of reading the table, which memory may delay.
type Read<T, M> = Result<Result<T, Damaged>, <M as Memory>::Wait>;

/// Result of a call that finds damage.
const DAMAGED: (Outcome, Version) = (Outcome::Damaged, Version(0));
/// Result of a call that finds no space.
const FULL: (Outcome, Version) = (Outcome::TableFull, Version(0));

impl Operations for CachedIndexService {
    const KIND: &'static str = KIND;

    fn repair<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        if mutants::UNREPAIRED.is_on() { Ok(()) } else { self.table.intents().repair(memory) }
    }

    fn get<M: Memory>(&self, memory: &M, key: &[u8], value: &mut Vec<u8>) -> Carried<M> {
        let Ok(found) = self.find(memory, key)? else { return Ok(DAMAGED) };
        let Some((_, _, located)) = found.at else { return Ok((Outcome::Absent, Version(0))) };
        let Some(item) = Item::of(&located.content) else { return Ok(DAMAGED) };
        value.extend_from_slice(item.value);
        Ok((Outcome::Done, item.version))
    }

    fn put<M: Memory>(&self, memory: &M, key: &[u8], value: &[u8], _: &mut Vec<u8>) -> Carried<M> {
        if key.len() + value.len() > self.table.spec().pair as usize {
            return Ok(FULL);
        }
        let mut state = self.table.intents().state(memory)?;
        let Ok(found) = self.find(memory, key)? else { return Ok(DAMAGED) };
        state.installs = raised(state.installs);
        let version = version_of(state.installs.get());
        let (start, pair) = (Start::of(version, key, value), [key, value].concat());
        let mut change = Change::default();
        if let Some((_, _, located)) = &found.at {
            self.write(&mut change, located, located.header.tag, start, &pair);
        } else {
            let located = match self.take_item(memory, &mut state)? {
                Ok(Some(located)) => located,
                Ok(None) => return Ok(FULL),
                Err(Damaged) => return Ok(DAMAGED),
            };
            let incarnation = raised(located.header.tag);
            self.write(&mut change, &located, incarnation, start, &pair);
            let entry = self.table.entry(key, located.item, incarnation.get()).bytes();
            if let Some((bucket, index)) = found.vacant {
                change.word(self.table.entry_at(bucket, index), entry);
            } else {
                // The entry is complete before the extra bucket is in the chain.
                let extra = state.extra.get();
                let bucket = self.table.extra(extra).filter(|_| found.len < CHAIN_MAX);
                let Some(bucket) = bucket else { return Ok(FULL) };
                state.extra += 1;
                change.word(self.table.entry_at(bucket, 0), entry);
                change.word(self.table.entry_at(found.last, BUCKET_ENTRIES), Entry::link(extra).bytes());
            }
        }
        self.table.intents().carry_out(memory, &mut state, &change)?;
        Ok((Outcome::Done, version))
    }

    fn delete<M: Memory>(&self, memory: &M, key: &[u8], _: &mut Vec<u8>) -> Carried<M> {
        let mut state = self.table.intents().state(memory)?;
        let Ok(found) = self.find(memory, key)? else { return Ok(DAMAGED) };
        let Some((bucket, index, located)) = found.at else { return Ok((Outcome::Absent, Version(0))) };
        state.installs = raised(state.installs);
        let Ok((mut start, _)) = Start::read_from_prefix(&located.content) else { return Ok(DAMAGED) };
        start.next_spare = (state.spare.get() as u32).into();
        state.spare = (located.item + 1).into();
        let tag = located.header.tag;
        let incarnation = if mutants::INCARNATION_KEPT.is_on() { tag } else { raised(tag) };
        let mut change = Change::default();
        self.write(&mut change, &located, incarnation, start, &[]);
        change.word(self.table.entry_at(bucket, index), Entry::NONE.bytes());
        self.table.intents().carry_out(memory, &mut state, &change)?;
        Ok((Outcome::Done, version_of(state.installs.get())))
    }
}

impl CachedIndexService {
    /// Takes an item that no key has, if there is one.
    fn take_item<M: Memory>(&self, memory: &M, state: &mut State) -> Read<Option<Located>, M> {
        let (spare, used) = (state.spare.get(), state.used.get());
        let item = if spare > 0 { spare - 1 } else { used };
        if item >= self.table.spec().items {
            return Ok(if spare > 0 { Err(Damaged) } else { Ok(None) });
        }
        let Ok(located) = self.load(memory, item)? else { return Ok(Err(Damaged)) };
        if spare > 0 {
            let Ok((start, _)) = Start::read_from_prefix(&located.content) else { return Ok(Err(Damaged)) };
            state.spare = u64::from(start.next_spare.get()).into();
        } else {
            state.used += 1;
        }
        Ok(Ok(Some(located)))
    }

    /// Searches for a key in its chain.
    fn find<M: Memory>(&self, memory: &M, key: &[u8]) -> Read<Found, M> {
        let mut found = Found { last: self.table.home(key), ..Found::default() };
        loop {
            let mut bucket = Bucket::new_zeroed();
            memory.read(self.table.bucket_at(found.last), bucket.as_mut_bytes())?;
            found.len += 1;
            for (index, entry) in bucket.entries.iter().enumerate() {
                if *entry == Entry::NONE {
                    found.vacant.get_or_insert((found.last, index));
                }
                let Some(item) = self.table.item_of(key, entry) else { continue };
                let Ok(located) = self.load(memory, item)? else { return Ok(Err(Damaged)) };
                let is_of = Item::of(&located.content).is_some_and(|of| of.key == key);
                if is_of && located.header.tag == entry.incarnation {
                    found.at = Some((found.last, index, located));
                    return Ok(Ok(found));
                }
            }
            let Some(extra) = bucket.next() else { return Ok(Ok(found)) };
            match self.table.extra(extra) {
                Some(next) if found.len < CHAIN_MAX => found.last = next,
                _ => return Ok(Err(Damaged)),
            }
        }
    }

    fn load<M: Memory>(&self, memory: &M, item: u64) -> Read<Located, M> {
        let mut bytes = vec![0; self.table.spec().item_len() as usize];
        memory.read(self.table.item_at(item), &mut bytes)?;
        let mut content = Vec::new();
        let header = decode(&bytes, self.table.spec().content_len(), &mut content, true);
        Ok(header.map(|header| Located { item, header, content }).ok_or(Damaged))
    }

    /// Adds the write of an item to a change.
    fn write(&self, change: &mut Change, located: &Located, incarnation: U64, start: Start, pair: &[u8]) {
        let header = Header { tag: incarnation, ..located.header.raised() };
        change.object(self.table.item_at(located.item), header, start.bytes(), (START, pair));
    }
}
