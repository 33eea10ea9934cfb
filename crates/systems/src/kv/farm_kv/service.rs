//! Work of the memory node's CPU for a FaRM-KV store: all puts and deletes, and the gets of clients that read torn
//! bytes too often.
//!
//! Only the service changes the table, one call at a time. A put of a key that is present writes the key's slot. A put
//! of another key takes the first of these:
//! 1. a vacant slot of the key's neighbourhood;
//! 2. the slot of a key that is *displaced*: a bucket near the home has a vacant slot, and each bucket between has a
//!    key whose home it is. These keys move to the buckets after them, the last one first (hopscotch hashing);
//! 3. a vacant slot of the home bucket's chain, or of a block that is added to the chain.
//!
//! A delete empties the slot. A block without keys leaves its chain and is spare.
//!
//! Each move is a change of its own, with a new joint version. So a node that fails leaves no key in two places.

use super::layout::{CHAIN_MAX, Content, Slot, SlotHeader, Start, Table, TableSpec, slot_of};
use super::{KIND, mutants};
use crate::kv::Version;
use crate::kv::called::{Carried, OneByOne, Operations, Outcome, version_of};
use crate::kv::inplace::{Change, Header, State, decode, raised};
use crate::kv::places;
use farside_remote::Memory;
use farside_remote::service::{Extent, Kind, Plan, Service};
use zerocopy::IntoBytes;

/// Node-side half of FaRM-KV.
pub struct FarmKvKind;

impl<M: Memory> Kind<M> for FarmKvKind {
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
        Ok(Box::new(OneByOne::new(FarmKvService { table: Table::new(parameters, table)? })))
    }
}

/// The service: calls change buckets in place.
struct FarmKvService {
    table: Table,
}

/// A bucket or block, as the service has read it.
struct Object {
    at: u64,
    header: Header,
    content: Vec<u8>,
}

/// The objects in which a key may lie: its home bucket, the bucket after it, and the blocks of the chain.
struct Path {
    objects: Vec<Object>,
    /// Indices of the blocks, `objects[2..]`.
    blocks: Vec<u64>,
    /// Object and slot of the key, if it is present.
    found: Option<(usize, usize)>,
}

/// Error: an object or pointer is damaged, or was not written by a service.
struct Damaged;

/// Result of a call that finds damage.
const DAMAGED: (Outcome, Version) = (Outcome::Damaged, Version(0));

/// Result of reading objects, which memory may delay.
type Read<T, M> = Result<Result<T, Damaged>, <M as Memory>::Wait>;

/// Number of buckets after a key's neighbourhood of which one must have a vacant slot for a displacement.
const DISTANCE: u64 = 8;

impl Operations for FarmKvService {
    const KIND: &'static str = KIND;

    fn repair<M: Memory>(&self, memory: &M) -> Result<(), M::Wait> {
        if mutants::UNREPAIRED.is_on() { Ok(()) } else { self.table.intents().repair(memory) }
    }

    fn get<M: Memory>(&self, memory: &M, key: &[u8], value: &mut Vec<u8>) -> Carried<M> {
        let Ok(path) = self.path(memory, key)? else { return Ok(DAMAGED) };
        let Some(slot) = path.slot(key) else { return Ok((Outcome::Absent, Version(0))) };
        value.extend_from_slice(slot.value);
        Ok((Outcome::Done, slot.version))
    }

    fn put<M: Memory>(&self, memory: &M, key: &[u8], value: &[u8], _: &mut Vec<u8>) -> Carried<M> {
        if key.len() + value.len() > self.table.spec.pair as usize {
            return Ok((Outcome::TableFull, Version(0)));
        }
        let mut state = self.table.intents().state(memory)?;
        let Ok(mut path) = self.path(memory, key)? else { return Ok(DAMAGED) };
        if path.found.is_none() && path.vacant(0..2).is_none() {
            match self.displace(memory, &mut state, self.table.home(key))? {
                Ok(false) => {}
                Ok(true) => match self.path(memory, key)? {
                    Ok(moved) => path = moved,
                    Err(Damaged) => return Ok(DAMAGED),
                },
                Err(Damaged) => return Ok(DAMAGED),
            }
        }
        state.installs = raised(state.installs);
        let version = version_of(state.installs.get());
        let slot = slot_of(version, key, value);
        let mut change = Change::default();
        let place = path.found.or_else(|| path.vacant(0..path.objects.len()));
        if let Some((index, at)) = place {
            let object = &path.objects[index];
            self.write(&mut change, object, object.start(), Some((at, &slot)));
        } else {
            if path.blocks.len() >= CHAIN_MAX {
                return Ok((Outcome::TableFull, Version(0)));
            }
            let (block, mut object) = match self.take_block(memory, &mut state)? {
                Ok(Some(taken)) => taken,
                Ok(None) => return Ok((Outcome::TableFull, Version(0))),
                Err(Damaged) => return Ok(DAMAGED),
            };
            object.renew();
            self.write(&mut change, &object, Start::default(), Some((0, &slot)));
            let last = path.objects.get(1 + path.blocks.len()).filter(|_| !path.blocks.is_empty());
            let last = last.unwrap_or(&path.objects[0]);
            let start = last.start().followed_by(block, object.incarnation());
            self.write(&mut change, last, start, None);
        }
        self.table.intents().carry_out(memory, &mut state, &change)?;
        Ok((Outcome::Done, version))
    }

    fn delete<M: Memory>(&self, memory: &M, key: &[u8], _: &mut Vec<u8>) -> Carried<M> {
        let mut state = self.table.intents().state(memory)?;
        let Ok(mut path) = self.path(memory, key)? else { return Ok(DAMAGED) };
        let Some((index, at)) = path.found else { return Ok((Outcome::Absent, Version(0))) };
        state.installs = raised(state.installs);
        let mut change = Change::default();
        let empty = SlotHeader::empty();
        let is_last = path.objects[index].content().is_some_and(|of| of.slots().flatten().count() == 1);
        if index >= 2 && is_last {
            // The block leaves the chain before it is spare.
            let before = &path.objects[if index == 2 { 0 } else { index - 1 }];
            let next = path.objects[index].start();
            let start = Start { next: next.next, next_incarnation: next.next_incarnation, ..before.start() };
            self.write(&mut change, before, start, None);
            let spare = (state.spare.get() as u32).into();
            state.spare = (path.blocks[index - 2] + 1).into();
            let block = &mut path.objects[index];
            block.renew();
            let start = Start { next: spare, ..Start::default() };
            self.write(&mut change, block, start, Some((at, empty.as_bytes())));
        } else {
            let object = &path.objects[index];
            self.write(&mut change, object, object.start(), Some((at, empty.as_bytes())));
        }
        self.table.intents().carry_out(memory, &mut state, &change)?;
        Ok((Outcome::Done, version_of(state.installs.get())))
    }
}

impl FarmKvService {
    /// Makes a slot of the bucket after `home` vacant, if displacements can. Returns whether they could.
    fn displace<M: Memory>(&self, memory: &M, state: &mut State, home: u64) -> Read<bool, M> {
        // Keys whose homes are these buckets move to the buckets after them.
        let mut movers = Vec::new();
        let last = (home + 1 + DISTANCE).min(self.table.spec.buckets);
        for bucket in home + 1..=last {
            let Ok(object) = self.load(memory, self.table.bucket_at(bucket))? else {
                return Ok(Err(Damaged));
            };
            let Some(content) = object.content() else { return Ok(Err(Damaged)) };
            if content.vacant().is_some() {
                for bucket in movers.into_iter().rev() {
                    if self.move_on(memory, state, bucket)?.is_err() {
                        return Ok(Err(Damaged));
                    }
                }
                return Ok(Ok(true));
            }
            if self.native(content, bucket).is_none() {
                break;
            }
            movers.push(bucket);
        }
        Ok(Ok(false))
    }

    /// Moves a key whose home is this bucket to the next one, which has a vacant slot.
    fn move_on<M: Memory>(&self, memory: &M, state: &mut State, bucket: u64) -> Read<(), M> {
        let Ok(from) = self.load(memory, self.table.bucket_at(bucket))? else { return Ok(Err(Damaged)) };
        let Ok(to) = self.load(memory, self.table.bucket_at(bucket + 1))? else { return Ok(Err(Damaged)) };
        let native = from.content().and_then(|content| self.native(content, bucket));
        let vacant = to.content().and_then(Content::vacant);
        let (Some((at, key)), Some(vacant)) = (native, vacant) else { return Ok(Err(Damaged)) };
        let slot = slot_of(key.version, key.key, key.value);
        let moves = from.start().own.get().wrapping_add(u32::from(!mutants::MOVED_SILENTLY.is_on())).into();
        let mut change = Change::default();
        self.write(&mut change, &to, Start { former: moves, ..to.start() }, Some((vacant, &slot)));
        let empty = SlotHeader::empty();
        self.write(&mut change, &from, Start { own: moves, ..from.start() }, Some((at, empty.as_bytes())));
        self.table.intents().carry_out(memory, state, &change)?;
        Ok(Ok(()))
    }

    /// Returns a slot of a bucket whose key has this bucket as its home, with its index.
    fn native<'a>(&self, content: Content<'a>, bucket: u64) -> Option<(usize, Slot<'a>)> {
        let is_native = |slot: &Slot<'_>| self.table.home(slot.key) == bucket;
        content.slots().enumerate().find_map(|(at, slot)| Some((at, slot.filter(is_native)?)))
    }

    /// Takes a block that is in no chain, if there is one.
    fn take_block<M: Memory>(&self, memory: &M, state: &mut State) -> Read<Option<(u64, Object)>, M> {
        let blocks = self.table.spec.blocks;
        let (spare, used) = (state.spare.get(), state.used.get());
        let block = if spare > 0 { spare - 1 } else { used };
        if block >= blocks {
            return Ok(if spare > 0 { Err(Damaged) } else { Ok(None) });
        }
        let Ok(object) = self.load(memory, self.table.block_at(block))? else { return Ok(Err(Damaged)) };
        if spare > 0 {
            state.spare = u64::from(object.start().next.get()).into();
        } else {
            state.used += 1;
        }
        Ok(Ok(Some((block, object))))
    }

    /// Reads the objects in which a key may lie, up to the one that has the key.
    fn path<M: Memory>(&self, memory: &M, key: &[u8]) -> Read<Path, M> {
        let home = self.table.home(key);
        let mut path = Path { objects: Vec::new(), blocks: Vec::new(), found: None };
        let mut start = Start::default();
        for bucket in [home, home + 1] {
            let Ok(object) = self.load(memory, self.table.bucket_at(bucket))? else {
                return Ok(Err(Damaged));
            };
            if bucket == home {
                start = object.start();
            }
            path.add(object, key);
        }
        while path.found.is_none() {
            let Some(block) = start.next.get().checked_sub(1).map(u64::from) else { break };
            if block >= self.table.spec.blocks || path.blocks.len() > CHAIN_MAX {
                return Ok(Err(Damaged));
            }
            let Ok(object) = self.load(memory, self.table.block_at(block))? else { return Ok(Err(Damaged)) };
            if object.incarnation() != start.next_incarnation.get() {
                return Ok(Err(Damaged));
            }
            start = object.start();
            path.blocks.push(block);
            path.add(object, key);
        }
        Ok(Ok(path))
    }

    fn load<M: Memory>(&self, memory: &M, at: u64) -> Read<Object, M> {
        let mut bytes = vec![0; self.table.spec.bucket_len() as usize];
        memory.read(at, &mut bytes)?;
        let mut content = Vec::new();
        let header = decode(&bytes, self.table.spec.content_len(), &mut content, true);
        Ok(header.map(|header| Object { at, header, content }).ok_or(Damaged))
    }

    /// Adds the write of an object to a change: these first bytes, and these bytes at the start of a slot.
    fn write(&self, change: &mut Change, object: &Object, start: Start, slot: Option<(usize, &[u8])>) {
        let patch = slot.map_or((0, &[][..]), |(at, bytes)| (self.table.spec.slot_at(at), bytes));
        change.object(object.at, object.header.raised(), start.bytes(), patch);
    }
}

impl Object {
    fn content(&self) -> Option<Content<'_>> {
        Content::of(&self.content)
    }

    fn start(&self) -> Start {
        self.content().map_or(Start::default(), |content| content.start)
    }

    fn incarnation(&self) -> u32 {
        self.header.tag.get() as u32
    }

    /// Gives a block that enters or leaves a chain its next incarnation.
    fn renew(&mut self) {
        self.header.tag = u64::from(self.incarnation().wrapping_add(1)).into();
    }
}

impl Path {
    fn add(&mut self, object: Object, key: &[u8]) {
        if self.found.is_none() {
            let found = object.content().and_then(|content| content.find(key));
            self.found = found.map(|(slot, _)| (self.objects.len(), slot));
        }
        self.objects.push(object);
    }

    fn slot(&self, key: &[u8]) -> Option<Slot<'_>> {
        let (index, _) = self.found?;
        Some(self.objects[index].content()?.find(key)?.1)
    }

    /// Returns a vacant slot in one of these objects, with the index of the object.
    fn vacant(&self, mut of: std::ops::Range<usize>) -> Option<(usize, usize)> {
        of.find_map(|index| Some((index, self.objects[index].content()?.vacant()?)))
    }
}

impl Start {
    /// The first bytes of an object after which this block was added to a chain.
    fn followed_by(self, block: u64, incarnation: u32) -> Start {
        Start { next: (block as u32 + 1).into(), next_incarnation: incarnation.into(), ..self }
    }
}
