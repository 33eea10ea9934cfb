//! Scans: the keys from a given one on, in order.
//!
//! A scan keeps the slots that may lead to further keys in the order of their paths, and reads the nodes and leaves of
//! the first of them with each wave. A node is replaced by its slots, in the order of their bytes; a leaf is visited
//! when no slot is left before it. A torn leaf is read again.
//!
//! Every slot is read during the scan, also those of cached nodes: the cache only tells which nodes to read with the
//! first wave. So a key that is present throughout is not missed: as `walk` says, whatever node or leaf a slot has is
//! on the way to all keys that are below the slot at that time.
//!
//! Differs from the artifact: it takes the slots of cached nodes as they are, and skips what is not cached if anything
//! is; and it returns torn leaves.
//!
//! Invariant: visited keys ascend.
//! Invariant: a scan reads a limited number of times, which is more than an undamaged tree needs.

use super::layout::{
    Far, Leaf, NodeType, NodeView, Pointer, Slot, UNIT, View, leaf_of, pointer_of, slot_at, value_of,
};
use super::session::refused;
use super::walk::{At, LeafAt, Met};
use super::{Client, Damaged, mutants};
use crate::index::IndexError;
use crate::members::all;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, read};
use std::collections::BTreeMap;
use std::time::Duration;

/// Number of READs of one wave.
const READS_MAX: usize = 64;
/// Number of READs, and of bytes that they return, of one chain.
const READS_PER_CHAIN: usize = 48;
const BYTES_PER_CHAIN: u64 = 48 << 10;
/// Number of times that a torn leaf is read before its lock is of interest.
const TORN_MAX: u32 = 16;
const PAUSE: Duration = Duration::from_micros(2);

/// Part of the frontier of a scan.
enum Item {
    /// A slot whose node or leaf has not been read.
    Slot(Pending),
    Leaf(Found),
}

/// A leaf.
struct Found {
    path: Vec<u8>,
    /// The value, unless it lies apart and was not read.
    value: Vec<u8>,
    apart: Option<Pointer>,
}

struct Pending {
    at: At,
    /// The bytes of the path that lead to the slot.
    path: Vec<u8>,
    /// Type up to which the node's slots are read, if it is larger than in the slot.
    kind: NodeType,
    /// Whether the slot itself is read next.
    is_stale: bool,
    torn: u32,
}

/// One READ of a wave.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) at: Far,
    pub(super) len: u64,
}

/// Progress of a scan.
pub(super) struct Progress {
    pub(super) visited: usize,
    /// Path of the last visited key.
    pub(super) last: Option<Vec<u8>>,
}

impl<F: Fabric + Clock> Client<F> {
    /// Visits keys that are not below `from`, and are above the last one of `progress`, until `limit` are visited or
    /// none is left.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(super) async fn scan(
        &self,
        from: &[u8],
        limit: usize,
        progress: &mut Progress,
        visit: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<Result<(), Met>, IndexError> {
        let layout = &self.session.layout;
        let mut known = BTreeMap::new();
        let start = progress.last.clone().unwrap_or_else(|| from.to_vec());
        let root = self.read_first(&start, &mut known).await?;
        let at = At { slot_at: layout.root(), slot: root, depth: 0, is_fresh: true };
        let mut frontier = vec![Item::Slot(Pending::new(at, Vec::new()))];
        let bytes: u64 = layout.members.iter().map(|member| member.extent.len).sum();
        let mut reads_left = 1024 + 8 * bytes / UNIT;
        loop {
            self.expand_known(&mut frontier, &start, &mut known)?;
            let done = frontier.iter().take_while(|item| matches!(item, Item::Leaf(_))).count();
            let mut next: Vec<Found> = Vec::new();
            for item in frontier.drain(..done) {
                let Item::Leaf(found) = item else { continue };
                let last = next.last().map(|found| &found.path).or(progress.last.as_ref());
                let is_next = last.is_none_or(|last| *last < found.path);
                if is_next && layout.spec.key_of(&found.path) >= from && next.len() < limit - progress.visited
                {
                    next.push(found);
                }
            }
            self.read_values(&mut next).await?;
            for Found { path, value, .. } in next {
                visit(layout.spec.key_of(&path), &value);
                progress.visited += 1;
                progress.last = Some(path);
            }
            if frontier.is_empty() || progress.visited == limit {
                return Ok(Ok(()));
            }
            let wanted = self.next_wave(&frontier, limit - progress.visited)?;
            reads_left = reads_left.saturating_sub(wanted.len() as u64);
            if reads_left == 0 {
                return Err(Damaged("a tree with more nodes than the store has room for").into());
            }
            let reads: Vec<Wanted> = wanted.iter().map(|(_, wanted)| *wanted).collect();
            let mut outputs = self.read_many(&reads).await?;
            let mut is_torn = false;
            // From the last one on, so that the numbers of the others stay as they are.
            for ((index, _), bytes) in wanted.into_iter().rev().zip(outputs.drain(..).rev()) {
                let Item::Slot(mut pending) = frontier.remove(index) else { continue };
                let mut items = Vec::new();
                let before = pending.torn;
                if let Some(met) = self.resolve(&mut pending, &start, &bytes, &mut items)? {
                    return Ok(Err(met));
                }
                is_torn |= pending.torn > before;
                if items.is_empty() && pending.is_left() {
                    items.push(Item::Slot(pending));
                }
                frontier.splice(index..index, items);
            }
            if is_torn {
                self.counters.scan_retries.add();
                self.session.fabric.sleep(PAUSE).await;
            }
        }
    }

    /// Reads the root slot, and the nodes that the cache has on the way to `start`.
    async fn read_first(&self, start: &[u8], known: &mut BTreeMap<Far, Vec<u8>>) -> Result<Slot, IndexError> {
        let nodes = self.cache.borrow().nodes_on(start);
        let mut wanted = vec![Wanted { at: self.session.layout.root(), len: 8 }];
        for (at, slots) in &nodes {
            wanted.push(Wanted { at: *at, len: 16 + 8 * *slots as u64 });
        }
        let mut outputs = self.read_many(&wanted).await?;
        for ((at, _), bytes) in nodes.into_iter().rev().zip(outputs.drain(1..).rev()) {
            known.insert(at, bytes);
        }
        let root = outputs.pop().unwrap_or_default();
        Ok(Slot(u64::from_le_bytes(root.try_into().map_err(|_| Damaged("a short READ"))?)))
    }

    /// Replaces slots at the start of the frontier whose nodes were read with the first wave.
    fn expand_known(
        &self,
        frontier: &mut Vec<Item>,
        start: &[u8],
        known: &mut BTreeMap<Far, Vec<u8>>,
    ) -> Result<(), IndexError> {
        let mut index = 0;
        while let Some(item) = frontier.get(index) {
            let node = match item {
                Item::Slot(pending) if !pending.is_stale => {
                    match self.session.layout.view(pending.at.slot)? {
                        View::Node { at, .. } => Some(at),
                        _ => None,
                    }
                }
                _ => None,
            };
            let bytes = node.and_then(|node| match mutants::UNCACHED_GAP_SKIPPED.is_on() {
                true => self.cached_bytes(node, known),
                false => known.remove(&node),
            });
            let Some(bytes) = bytes else {
                index += 1;
                if known.is_empty() || index > READS_MAX {
                    break;
                }
                continue;
            };
            let Item::Slot(mut pending) = frontier.remove(index) else { continue };
            let mut items = Vec::new();
            self.resolve(&mut pending, start, &bytes, &mut items)?;
            let is_resolved = !items.is_empty() || !pending.is_left();
            if !is_resolved {
                items.push(Item::Slot(pending));
            }
            frontier.splice(index..index, items);
            index += usize::from(!is_resolved);
        }
        Ok(())
    }

    /// Bytes of a node with the slots that the cache has.
    fn cached_bytes(&self, node: Far, known: &BTreeMap<Far, Vec<u8>>) -> Option<Vec<u8>> {
        let mut bytes = known.get(&node)?.get(..16)?.to_vec();
        let cache = self.cache.borrow();
        cache.slots_of(node)?.iter().for_each(|slot| bytes.extend_from_slice(&slot.0.to_le_bytes()));
        Some(bytes)
    }

    /// Returns the READs of the next wave, with the numbers of their items.
    fn next_wave(&self, frontier: &[Item], left: usize) -> Result<Vec<(usize, Wanted)>, IndexError> {
        let mut wanted = Vec::new();
        for (index, item) in frontier.iter().take(left.saturating_add(1)).enumerate() {
            let Item::Slot(pending) = item else { continue };
            let read = if pending.is_stale {
                Wanted { at: pending.at.slot_at, len: 8 }
            } else {
                match self.session.layout.view(pending.at.slot)? {
                    View::Leaf { at, class, .. } => Wanted { at, len: class.size() },
                    View::Node { at, kind } => Wanted { at, len: kind.max(pending.kind).read_len().into() },
                    // Such a slot is in the frontier only if it is the root slot. There is nothing below it.
                    View::Null | View::Empty => Wanted { at: pending.at.slot_at, len: 8 },
                }
            };
            wanted.push((index, read));
            if wanted.len() == READS_MAX {
                break;
            }
        }
        Ok(wanted)
    }

    /// Takes in what a READ of a slot's leaf, of its node or of the slot itself has returned. Puts what is below the
    /// slot into `items`. If there is nothing, the slot is either still pending or done.
    fn resolve(
        &self,
        pending: &mut Pending,
        start: &[u8],
        bytes: &[u8],
        items: &mut Vec<Item>,
    ) -> Result<Option<Met>, IndexError> {
        let layout = &self.session.layout;
        if pending.is_stale {
            let word = bytes.try_into().map_err(|_| Damaged("a short READ"))?;
            pending.at.slot = Slot(u64::from_le_bytes(word));
            pending.is_stale = false;
            return Ok(None);
        }
        match layout.view(pending.at.slot)? {
            View::Null | View::Empty => pending.at.slot = Slot::NULL,
            View::Leaf { at, class, generation } => match leaf_of(&layout.spec, generation, bytes)? {
                Leaf::Torn(word) => {
                    pending.torn += 1;
                    if mutants::TORN_LEAF_EMITTED.is_on() {
                        let (path, value) = (path_of_torn(bytes), value_of(bytes).to_vec());
                        items.push(Item::Leaf(Found { path, value, apart: None }));
                    } else if pending.torn > TORN_MAX {
                        return Ok(Some(Met::Torn(LeafAt { at, class, generation }, word)));
                    }
                }
                Leaf::Reused => {
                    return Err(Damaged("a slot that points to a unit of another generation").into());
                }
                Leaf::Whole(leaf) if leaf.head.is_dead() => pending.at.slot = Slot::NULL,
                Leaf::Whole(leaf) if !leaf.path.starts_with(&pending.path) => {
                    return Err(Damaged("a leaf that is not on its path").into());
                }
                Leaf::Whole(leaf) => {
                    let (path, value) = (leaf.path.to_vec(), leaf.value.to_vec());
                    items.push(Item::Leaf(Found { path, value, apart: pointer_of(bytes) }));
                }
            },
            View::Node { at: node, .. } => {
                let view = NodeView::of(bytes)?;
                let header = view.header()?;
                let Some(prefix) = header.prefix_from(pending.at.depth) else {
                    // A path split has put another node in between since the slot was read.
                    pending.torn += 1;
                    pending.is_stale = true;
                    return Ok(None);
                };
                if bytes.len() < header.kind.read_len() as usize && !mutants::UNCACHED_GAP_SKIPPED.is_on() {
                    pending.kind = header.kind;
                    return Ok(None);
                }
                let mut path = pending.path.clone();
                path.extend_from_slice(prefix);
                let mut slots: Vec<(usize, Slot)> =
                    view.slots().take(header.kind.slots()).enumerate().collect();
                slots.retain(|(_, slot)| !slot.is_null() && *slot != Slot::empty(slot.partial()));
                slots.sort_by_key(|(_, slot)| slot.partial());
                for (index, slot) in slots {
                    let mut path = path.clone();
                    path.push(slot.partial());
                    // Neither a prefix of the start's path, nor above it: all keys below the slot are below the start.
                    if path.as_slice() < start && !start.starts_with(&path) {
                        continue;
                    }
                    if path.len() > layout.spec.path_max() {
                        return Err(Damaged("a path that is too long").into());
                    }
                    let depth = path.len();
                    let at = At { slot_at: slot_at(node, index), slot, depth, is_fresh: true };
                    items.push(Item::Slot(Pending::new(at, path)));
                }
                if items.is_empty() {
                    pending.at.slot = Slot::NULL;
                }
            }
        }
        Ok(None)
    }

    /// Reads the values that lie apart. Their leaves were read during the scan.
    async fn read_values(&self, found: &mut [Found]) -> Result<(), IndexError> {
        for wave in found.chunks_mut(READS_MAX) {
            let mut wanted = Vec::new();
            for pointer in wave.iter().filter_map(|found| found.apart) {
                self.session.layout.class_of(&pointer)?;
                wanted.push(Wanted { at: pointer.at, len: pointer.len.into() });
            }
            if wanted.is_empty() {
                continue;
            }
            let mut values = self.read_many(&wanted).await?.into_iter();
            for found in wave {
                if let Some(pointer) = found.apart {
                    found.value = values.next().unwrap_or_default();
                    if !pointer.is_to(&found.value) {
                        return Err(Damaged("a value with a wrong checksum").into());
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs READs at once, in as few chains as possible. Returns their outputs, in order.
    pub(super) async fn read_many(&self, wanted: &[Wanted]) -> Result<Vec<Vec<u8>>, IndexError> {
        let layout = &self.session.layout;
        let mut lists: Vec<Vec<usize>> = Vec::new();
        for member in 0..layout.members.len() {
            let (mut list, mut bytes) = (Vec::new(), 0);
            for (index, read) in wanted.iter().enumerate().filter(|(_, read)| read.at.member() == member) {
                if list.len() == READS_PER_CHAIN || bytes + read.len > BYTES_PER_CHAIN {
                    lists.push(std::mem::take(&mut list));
                    bytes = 0;
                }
                list.push(index);
                bytes += read.len;
            }
            if !list.is_empty() {
                lists.push(list);
            }
        }
        let mut outputs = vec![Vec::new(); wanted.len()];
        let run = lists.iter().map(|list| async move {
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let table = &layout.members[wanted[list[0]].at.member()];
            let mut chain = buffer.begin(table.key());
            for index in list {
                let Wanted { at, len } = wanted[*index];
                chain.also(read(layout.addr(at, len)?, len as u32));
            }
            self.session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            match reply.verdict() {
                farside_remote::Status::Ok => Ok(reply),
                status => Err(refused(status)),
            }
        });
        for (list, reply) in lists.iter().zip(all(run).await) {
            let reply: Reply = reply?;
            for (output, index) in list.iter().enumerate() {
                outputs[*index] = reply.output(output).to_vec();
            }
        }
        Ok(outputs)
    }
}

impl Pending {
    fn new(at: At, path: Vec<u8>) -> Pending {
        Pending { at, path, kind: NodeType::SMALLEST, is_stale: false, torn: 0 }
    }

    /// Whether there may be keys below the slot.
    fn is_left(&self) -> bool {
        self.is_stale || !self.at.slot.is_null()
    }
}

/// The path in a torn leaf.
fn path_of_torn(leaf: &[u8]) -> Vec<u8> {
    let value = value_of(leaf).len();
    super::layout::path_and_value(leaf).map_or_else(Vec::new, |bytes| bytes[..bytes.len() - value].to_vec())
}
