//! Scans: the keys from a given one on, in order.
//!
//! A scan keeps the slots that may lead to further keys in the order of their paths (the *frontier*), and reads the
//! nodes and leaves of the first of them with each wave: as many as can be expected to have the keys that are wanted. A
//! node is replaced by its slots, in the order of their bytes; a leaf is visited when no slot is left before it. A torn
//! leaf is read again.
//!
//! A scan begins with a cached node on its path, below which the wanted keys can be expected, or with the root slot.
//! All keys whose paths begin as those of the node's slots are below the node, as long as it is linked: no node is put
//! between a node and its slots. A switched node is linked for ever. A cached copied node counts only if its first word
//! says that it was linked when the scan read it. If the keys are not enough, the scan goes on behind these paths in
//! the same way.
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

use super::cache::OnPath;
use super::layout::{
    Far, Growth, Header, Layout, Leaf, LeafView, NodeType, NodeView, Pointer, Slot, UNIT, View, leaf_of,
    pointer_of, slot_at, value_of,
};
use super::read::{LeafAt, Met};
use super::session::refused;
use super::{Damaged, Tree, mutants};
use crate::index::IndexError;
use crate::members::all;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, Status, read};
use std::rc::Rc;
use std::time::Duration;

/// Number of READs of one wave.
const READS_MAX: usize = 144;
/// Number of READs, and of bytes that they return, of one chain.
const READS_PER_CHAIN: usize = 60;
const BYTES_PER_CHAIN: u64 = 48 << 10;
/// Number of times that a torn leaf is read before its lock is of interest.
const TORN_MAX: u32 = 16;
const PAUSE: Duration = Duration::from_micros(2);
/// Number of slots of the largest node whose slots are sorted by comparisons.
const COMPARED_MAX: usize = 16;

/// Buffers of a scan.
#[derive(Default)]
pub(in crate::index) struct Scanning {
    /// The items that were not visited yet, from the last to the first.
    frontier: Vec<Item>,
    /// The beginning of the frontier, which is being read.
    wave: Vec<Item>,
    /// The items that replace the wave.
    next: Vec<Item>,
    /// The leaves that are visited next, if values may lie apart and must be read first.
    due: Vec<Found>,
    wanted: Vec<Wanted>,
    reads: Reads,
    /// Buffers for the slots of nodes.
    spare: Spare,
}

impl Scanning {
    /// Empties the frontier, and keeps its buffers.
    fn recycle(&mut self) {
        self.due.clear();
        let slots = self.frontier.drain(..).filter_map(|item| match item {
            Item::Rest(rest) => Some(rest.slots),
            _ => None,
        });
        self.spare.extend(slots);
    }
}

/// Buffers for the slots of nodes.
type Spare = Vec<Vec<(u16, Slot)>>;

/// Part of the frontier.
enum Item {
    /// A slot whose node or leaf has not been read.
    Slot(Pending),
    /// The further slots of a node that was read.
    Rest(Rest),
    /// A leaf behind slots whose nodes or leaves have not been read.
    Leaf(Found),
}

/// A leaf that was read.
struct Found {
    path: Vec<u8>,
    /// The value, unless it lies apart and was not read.
    value: Vec<u8>,
    apart: Option<Pointer>,
}

struct Pending {
    /// Location of the slot; `None` if the scan has begun with the slot's node.
    slot_at: Option<Far>,
    slot: Slot,
    /// The decoded slot.
    view: View,
    path: SlotPath,
    /// Type up to which the node's slots are read, if it is larger than in the slot.
    kind: NodeType,
    /// Whether the slot itself is read next.
    is_stale: bool,
    torn: u32,
}

/// The bytes of paths that lead to a slot.
struct SlotPath {
    /// Those in front of the slot's own, which all slots of a node share.
    shared: Rc<[u8]>,
    /// The slot's partial byte, unless it is the first slot of a scan.
    byte: Option<u8>,
}

impl SlotPath {
    fn depth(&self) -> usize {
        self.shared.len() + usize::from(self.byte.is_some())
    }

    fn leads_to(&self, path: &[u8]) -> bool {
        let rest = path.strip_prefix(&*self.shared);
        rest.is_some_and(|rest| self.byte.is_none_or(|byte| rest.first() == Some(&byte)))
    }
}

/// Slots of a node.
struct Rest {
    node: Far,
    shared: Rc<[u8]>,
    /// The slots with their indexes, from the largest byte to the smallest.
    slots: Vec<(u16, Slot)>,
}

impl Rest {
    /// Takes the slot with the smallest byte.
    fn pop(&mut self, layout: &Layout) -> Result<Option<Pending>, Damaged> {
        let Some((index, slot)) = self.slots.pop() else { return Ok(None) };
        let path = SlotPath { shared: Rc::clone(&self.shared), byte: Some(slot.partial()) };
        Pending::new(layout, Some(slot_at(self.node, index.into())), slot, path).map(Some)
    }
}

/// Result of a READ of a slot's leaf, of its node, or of the slot itself.
enum Below<'a> {
    /// No keys.
    Nothing,
    /// The slot must be read again, or its node or leaf.
    Again(Pending),
    Torn(Pending),
    Met(Met),
    Slots(Rest),
    /// A leaf, with the pointer to its value if that lies apart.
    Leaf(LeafView<'a>, Option<Pointer>),
}

/// One READ of a wave.
#[derive(Clone, Copy)]
pub(in crate::index) struct Wanted {
    pub(in crate::index) at: Far,
    pub(in crate::index) len: u64,
}

/// Progress of a scan.
#[derive(Default)]
pub(in crate::index) struct Progress {
    pub(in crate::index) visited: usize,
    /// Path of the last visited key; empty if no key was visited.
    last: Vec<u8>,
}

/// The keys that a scan visits, and its progress.
struct Visits<'a, V> {
    from: &'a [u8],
    limit: usize,
    progress: &'a mut Progress,
    visit: V,
}

impl<V: FnMut(&[u8], &[u8])> Visits<'_, V> {
    fn are_over(&self) -> bool {
        self.progress.visited >= self.limit
    }

    /// Whether a key was not visited, is not below the first one, and is not one too many.
    fn is_wanted(&self, (path, key): (&[u8], &[u8])) -> bool {
        let progress = &*self.progress;
        progress.visited < self.limit && *progress.last < *path && key >= self.from
    }

    /// Visits a key if it is wanted.
    fn visit(&mut self, (path, key): (&[u8], &[u8]), value: &[u8]) {
        if self.is_wanted((path, key)) {
            let progress = &mut *self.progress;
            (self.visit)(key, value);
            progress.visited += 1;
            progress.last.clear();
            progress.last.extend_from_slice(path);
        }
    }
}

impl<F: Fabric + Clock> Tree<F> {
    /// Visits keys that are not below `from`, and are above the last one of `progress`, until `limit` are visited or
    /// none is left.
    ///
    /// # Errors
    /// [`IndexError`].
    pub(in crate::index) async fn scan(
        &self,
        own: &mut Scanning,
        (from, limit): (&[u8], usize),
        progress: &mut Progress,
        visit: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<Result<(), Met>, IndexError> {
        let mut start = if progress.visited > 0 { progress.last.clone() } else { from.to_vec() };
        let mut visits = Visits { from, limit, progress, visit };
        let bytes: u64 = self.session.layout.members.iter().map(|member| member.extent.len).sum();
        let mut reads_left = 1024 + 8 * bytes / UNIT;
        while !visits.are_over() {
            let covered = self.begin(own, &start, limit - visits.progress.visited).await?;
            while !visits.are_over() && !own.frontier.is_empty() {
                self.take_wave(own, limit - visits.progress.visited)?;
                reads_left = reads_left.saturating_sub(own.wanted.len() as u64);
                if reads_left == 0 {
                    return Err(Damaged("a tree with more nodes than the store has room for").into());
                }
                self.read_many(&own.wanted, &mut own.reads).await?;
                let is_torn = match self.replace_wave(own, &start, &mut visits)? {
                    Ok(is_torn) => is_torn,
                    Err(met) => return Ok(Err(met)),
                };
                self.visit_due(own, &mut visits).await?;
                if is_torn {
                    self.counts.scan_retries.add();
                    self.session.fabric.sleep(PAUSE).await;
                }
            }
            match after(covered) {
                Some(next) => start = next,
                None => break,
            }
        }
        Ok(Ok(()))
    }

    /// Begins a scan from the path `start` on: fills the frontier. Returns the first bytes of the paths that it covers.
    async fn begin(&self, own: &mut Scanning, start: &[u8], keys: usize) -> Result<Vec<u8>, IndexError> {
        own.recycle();
        own.wanted.clear();
        let layout = &self.session.layout;
        let mut nodes = self.cache.borrow().nodes_for(start, keys);
        while !self.read_cached(own, &nodes).await? {
            nodes = self.cache.borrow().nodes_for(start, keys);
        }
        let Some(first) = nodes.first() else {
            own.wanted.push(Wanted { at: layout.root(), len: 8 });
            self.read_many(&own.wanted, &mut own.reads).await?;
            let slot = slot_of(own.reads.output(0))?;
            let path = SlotPath { shared: Rc::default(), byte: None };
            own.frontier.push(Item::Slot(Pending::new(layout, Some(layout.root()), slot, path)?));
            return Ok(Vec::new());
        };
        let covered = start[..first.branch].to_vec();
        let path = SlotPath { shared: Rc::from(&*covered), byte: None };
        let slot = match layout.spec.nodes {
            Growth::Switched => layout.node_slot(0, first.node, NodeType::SMALLEST),
            Growth::Copied => first.slot,
        };
        let mut front = Pending::new(layout, None, slot, path)?;
        for (index, on_path) in nodes.iter().enumerate() {
            if !matches!(front.view, View::Node { at, .. } if at == on_path.node)
                || layout.spec.nodes == Growth::Copied && !front.slot.is_same_place(on_path.slot)
            {
                break;
            }
            let cached = self.cached_bytes(on_path.node, own.reads.output(index));
            let bytes = cached.as_deref().unwrap_or(own.reads.output(index));
            match self.below((front, None), start, bytes, &mut own.spare)? {
                Below::Slots(mut rest) => {
                    let first = rest.pop(layout)?;
                    own.frontier.push(Item::Rest(rest));
                    match first {
                        Some(first) => front = first,
                        None => return Ok(covered),
                    }
                }
                Below::Again(again) | Below::Torn(again) => {
                    front = again;
                    break;
                }
                _ => return Ok(covered),
            }
        }
        own.frontier.push(Item::Slot(front));
        Ok(covered)
    }

    /// Reads the nodes with which a scan begins. Returns false if one of them was replaced by a copy, and drops it from
    /// the cache.
    async fn read_cached(&self, own: &mut Scanning, nodes: &[OnPath]) -> Result<bool, IndexError> {
        own.wanted.clear();
        own.wanted.extend(nodes.iter().map(|on_path| {
            let OnPath { node, slots, .. } = *on_path;
            Wanted { at: node, len: 16 + 8 * slots as u64 }
        }));
        if nodes.is_empty() {
            return Ok(true);
        }
        self.read_many(&own.wanted, &mut own.reads).await?;
        for (index, on_path) in nodes.iter().enumerate() {
            let View::Node { kind, generation, .. } = self.session.layout.view(on_path.slot)? else {
                continue;
            };
            let view = NodeView::of(own.reads.output(index))?;
            if kind.is_copied() && (!view.is_of(generation) || view.is_frozen()) {
                self.cache.borrow_mut().forget_node(on_path.node);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The mutant's bytes of a node: the header that was read, with the slots that the cache has.
    fn cached_bytes(&self, node: Far, read: &[u8]) -> Option<Vec<u8>> {
        if !mutants::UNCACHED_GAP_SKIPPED.is_on() {
            return None;
        }
        let mut bytes = read.get(..16)?.to_vec();
        let cache = self.cache.borrow();
        cache.slots_of(node)?.for_each(|slot| bytes.extend_from_slice(&slot.0.to_le_bytes()));
        Some(bytes)
    }

    /// Moves the beginning of the frontier to the wave, until `keys` keys are to be expected below it.
    fn take_wave(&self, own: &mut Scanning, keys: usize) -> Result<(), IndexError> {
        let Scanning { frontier, wave, wanted, spare, .. } = own;
        wave.clear();
        wanted.clear();
        let mut expected = 0;
        while expected < keys && wanted.len() < READS_MAX {
            let pending = match frontier.last_mut() {
                Some(Item::Rest(rest)) => rest.pop(&self.session.layout)?,
                _ => match frontier.pop() {
                    Some(Item::Slot(pending)) => Some(pending),
                    Some(leaf) => {
                        expected += 1;
                        wave.push(leaf);
                        continue;
                    }
                    None => break,
                },
            };
            let Some(pending) = pending else {
                if let Some(Item::Rest(rest)) = frontier.pop() {
                    spare.push(rest.slots);
                }
                continue;
            };
            expected += pending.slot.expected();
            wanted.push(self.wanted(&pending)?);
            wave.push(Item::Slot(pending));
        }
        Ok(())
    }

    /// The READ that a slot needs next.
    fn wanted(&self, pending: &Pending) -> Result<Wanted, IndexError> {
        let of_slot = pending.slot_at.map(|at| Wanted { at, len: 8 });
        let of_slot = of_slot.ok_or(Damaged("a node at a wrong depth"));
        if pending.is_stale {
            return Ok(of_slot?);
        }
        Ok(match pending.view {
            View::Leaf { at, class, .. } => Wanted { at, len: class.size() },
            View::Node { at, kind, .. } => Wanted { at, len: kind.max(pending.kind).read_len().into() },
            // Such a slot is in the frontier only if it is the root slot. There is nothing below it.
            View::Null | View::Empty => of_slot?,
        })
    }

    /// Visits the leaves at the beginning of the wave, which was read, and puts what is left back into the frontier.
    /// Returns whether a leaf was torn.
    fn replace_wave(
        &self,
        own: &mut Scanning,
        start: &[u8],
        visits: &mut Visits<'_, impl FnMut(&[u8], &[u8])>,
    ) -> Result<Result<bool, Met>, IndexError> {
        let Scanning { frontier, wave, next, due, reads, spare, .. } = own;
        let spec = &self.session.layout.spec;
        let may_be_apart = spec.has_values_apart();
        next.clear();
        let (mut outputs, mut is_torn) = (0.., false);
        for item in wave.drain(..) {
            let below = match item {
                Item::Slot(pending) => {
                    let output = outputs.next().unwrap_or_default();
                    let slot_at = pending.slot_at;
                    self.below((pending, slot_at), start, reads.output(output), spare)?
                }
                Item::Leaf(found) if next.is_empty() => {
                    match may_be_apart {
                        true => due.push(found),
                        false => visits.visit((&found.path, spec.key_of(&found.path)), &found.value),
                    }
                    continue;
                }
                item => {
                    next.push(item);
                    continue;
                }
            };
            match below {
                Below::Nothing => {}
                Below::Again(pending) => next.push(Item::Slot(pending)),
                Below::Torn(pending) => {
                    is_torn = true;
                    next.push(Item::Slot(pending));
                }
                Below::Met(met) => return Ok(Err(met)),
                Below::Slots(rest) => next.push(Item::Rest(rest)),
                Below::Leaf(LeafView { path, value, .. }, _) if next.is_empty() && !may_be_apart => {
                    visits.visit((path, spec.key_of(path)), value);
                }
                Below::Leaf(LeafView { path, value, .. }, apart) => {
                    let found = Found { path: path.to_vec(), value: value.to_vec(), apart };
                    match next.is_empty() {
                        true => due.push(found),
                        false => next.push(Item::Leaf(found)),
                    }
                }
            }
        }
        frontier.extend(next.drain(..).rev());
        Ok(Ok(is_torn))
    }

    /// Visits the leaves that are due, after their values were read if they lie apart. The scan's guard keeps these
    /// values from being reused.
    async fn visit_due(
        &self,
        own: &mut Scanning,
        visits: &mut Visits<'_, impl FnMut(&[u8], &[u8])>,
    ) -> Result<(), IndexError> {
        let Scanning { due, wanted, reads, .. } = own;
        let layout = &self.session.layout;
        due.retain(|found| visits.is_wanted((&found.path, layout.spec.key_of(&found.path))));
        due.dedup_by(|later, found| later.path <= found.path);
        due.truncate(visits.limit - visits.progress.visited);
        for wave in due.chunks_mut(READS_MAX) {
            wanted.clear();
            for pointer in wave.iter().filter_map(|found| found.apart) {
                layout.class_of(&pointer)?;
                wanted.push(Wanted { at: pointer.at, len: pointer.len.into() });
            }
            if wanted.is_empty() {
                continue;
            }
            self.read_many(wanted, reads).await?;
            let apart = wave.iter_mut().filter_map(|found| found.apart.map(|pointer| (pointer, found)));
            for (index, (pointer, found)) in apart.enumerate() {
                reads.output(index).clone_into(&mut found.value);
                pointer.check(&found.value)?;
            }
        }
        for found in due.drain(..) {
            visits.visit((&found.path, layout.spec.key_of(&found.path)), &found.value);
        }
        Ok(())
    }

    /// Decodes the result of the READ that [`Tree::wanted`] returned. `cached_below` is the location of the slot
    /// below which a node is put into the cache.
    fn below<'a>(
        &self,
        (mut pending, cached_below): (Pending, Option<Far>),
        start: &[u8],
        bytes: &'a [u8],
        spare: &mut Spare,
    ) -> Result<Below<'a>, IndexError> {
        let layout = &self.session.layout;
        if pending.is_stale {
            pending.slot = slot_of(bytes)?;
            pending.view = layout.view(pending.slot)?;
            pending.is_stale = false;
            return Ok(if is_unused(pending.slot) { Below::Nothing } else { Below::Again(pending) });
        }
        match pending.view {
            View::Null | View::Empty => Ok(Below::Nothing),
            View::Leaf { at, class, generation } => match leaf_of(&layout.spec, generation, bytes)? {
                Leaf::Torn(_) if mutants::TORN_LEAF_EMITTED.is_on() => {
                    Ok(Below::Leaf(torn_leaf(bytes)?, None))
                }
                Leaf::Torn(word) => {
                    pending.torn += 1;
                    let leaf = LeafAt { at, class, generation };
                    Ok(if pending.torn > TORN_MAX {
                        Below::Met(Met::Torn(leaf, word))
                    } else {
                        Below::Torn(pending)
                    })
                }
                Leaf::Reused => Err(Damaged("a slot that points to a unit of another generation").into()),
                Leaf::Whole(leaf) if leaf.head.is_dead() => Ok(Below::Nothing),
                Leaf::Whole(leaf) if !pending.path.leads_to(leaf.path) => {
                    Err(Damaged("a leaf that is not on its path").into())
                }
                Leaf::Whole(leaf) => Ok(Below::Leaf(leaf, pointer_of(bytes))),
            },
            View::Node { at: node, kind, generation } => {
                let view = NodeView::of(bytes)?;
                let header = view.header()?;
                if kind.is_copied() && (!view.is_of(generation) || header.kind != kind) {
                    return Err(Damaged("a slot that points to a unit of another generation").into());
                }
                let Some(prefix) = header.prefix_from(pending.path.depth()) else {
                    // A path split has put another node in between since the slot was read.
                    pending.torn += 1;
                    pending.is_stale = true;
                    return Ok(Below::Torn(pending));
                };
                if bytes.len() < header.kind.read_len() as usize && !mutants::UNCACHED_GAP_SKIPPED.is_on() {
                    pending.kind = header.kind;
                    return Ok(Below::Again(pending));
                }
                let SlotPath { shared, byte } = &pending.path;
                let path: Rc<[u8]> = match (byte, prefix) {
                    (None, []) => Rc::clone(shared),
                    _ => [&**shared, byte.as_slice(), prefix].concat().into(),
                };
                if path.len() >= layout.spec.path_max() {
                    return Err(Damaged("a path that is too long").into());
                }
                if let Some(slot_at) = cached_below.filter(|_| start.starts_with(&path) && !view.is_frozen())
                {
                    let from = (slot_at, pending.slot, pending.path.depth());
                    self.cache_scanned(&path, from, (node, &header), bytes);
                }
                let Some(first) = first_byte(&path, start) else { return Ok(Below::Nothing) };
                let mut slots = spare.pop().unwrap_or_default();
                order(&view, &header, first, &mut slots);
                Ok(Below::Slots(Rest { node, shared: path, slots }))
            }
        }
    }

    /// Puts a node on the path of a scan's start into the cache, unless the cache has it.
    fn cache_scanned(
        &self,
        path: &[u8],
        from: (Far, Slot, usize),
        (node, header): (Far, &Header),
        bytes: &[u8],
    ) {
        let mut cache = self.cache.borrow_mut();
        if !cache.has(node) {
            cache.insert(path, from, (node, header), bytes, self.session.epochs.current());
        }
    }

    /// Runs READs at once, in as few chains as possible.
    pub(in crate::index) async fn read_many(
        &self,
        wanted: &[Wanted],
        reads: &mut Reads,
    ) -> Result<(), IndexError> {
        reads.assign(wanted);
        let Reads { chains, used, .. } = reads;
        let chains = &mut chains[..*used];
        if let [chain] = chains {
            return self.read_chain(wanted, chain).await;
        }
        let run = chains.iter_mut().map(|chain| self.read_chain(wanted, chain));
        all(run).await.into_iter().collect()
    }

    async fn read_chain(&self, wanted: &[Wanted], own: &mut ReadChain) -> Result<(), IndexError> {
        let layout = &self.session.layout;
        let table = &layout.members[own.member];
        let mut chain = own.buffer.begin(table.key());
        for index in &own.indexes {
            let Wanted { at, len } = wanted[*index];
            chain.also(read(layout.addr(at, len)?, len as u32));
        }
        self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(IndexError::of_read)?;
        match own.reply.verdict() {
            Status::Ok => Ok(()),
            status => Err(refused(status)),
        }
    }
}

/// READs that run at once, in chains, and their outputs.
#[derive(Default)]
pub(in crate::index) struct Reads {
    chains: Vec<ReadChain>,
    /// Number of chains in use.
    used: usize,
    /// Chain of each READ, and its index there.
    places: Vec<(usize, usize)>,
}

#[derive(Default)]
struct ReadChain {
    member: usize,
    bytes: u64,
    /// Indexes of its READs.
    indexes: Vec<usize>,
    buffer: ChainBuf,
    reply: Reply,
}

impl Reads {
    /// The bytes that a READ has returned.
    pub(in crate::index) fn output(&self, index: usize) -> &[u8] {
        let (chain, place) = self.places[index];
        self.chains[chain].reply.output(place)
    }

    /// Assigns READs to chains.
    fn assign(&mut self, wanted: &[Wanted]) {
        self.used = 0;
        self.places.clear();
        for (index, read) in wanted.iter().enumerate() {
            let has_room = |chain: &ReadChain| {
                chain.member == read.at.member()
                    && chain.indexes.len() < READS_PER_CHAIN
                    && chain.bytes + read.len <= BYTES_PER_CHAIN
            };
            let chain = match self.chains[..self.used].iter().rposition(has_room) {
                Some(chain) => chain,
                None => self.add_chain(read.at.member()),
            };
            let own = &mut self.chains[chain];
            self.places.push((chain, own.indexes.len()));
            own.indexes.push(index);
            own.bytes += read.len;
        }
    }

    fn add_chain(&mut self, member: usize) -> usize {
        if self.used == self.chains.len() {
            self.chains.push(ReadChain::default());
        }
        let own = &mut self.chains[self.used];
        (own.member, own.bytes) = (member, 0);
        own.indexes.clear();
        self.used += 1;
        self.used - 1
    }
}

impl Pending {
    fn new(layout: &Layout, slot_at: Option<Far>, slot: Slot, path: SlotPath) -> Result<Pending, Damaged> {
        let (view, kind) = (layout.view(slot)?, NodeType::SMALLEST);
        Ok(Pending { slot_at, slot, view, path, kind, is_stale: false, torn: 0 })
    }
}

/// The least path behind all paths that begin with these bytes, if there is one.
fn after(mut prefix: Vec<u8>) -> Option<Vec<u8>> {
    while let Some(last) = prefix.pop() {
        if last < u8::MAX {
            prefix.push(last + 1);
            return Some(prefix);
        }
    }
    None
}

/// The least byte that may follow `path` in a path that is not below `start`, if there is one.
fn first_byte(path: &[u8], start: &[u8]) -> Option<u8> {
    match start.strip_prefix(path) {
        Some(rest) => Some(rest.first().copied().unwrap_or(0)),
        None => (path > start).then_some(0),
    }
}

/// Finds the slots of a node that are in use, with their indexes, down to a byte, from the largest byte to the
/// smallest.
fn order(view: &NodeView<'_>, header: &Header, first: u8, slots: &mut Vec<(u16, Slot)>) {
    slots.clear();
    slots.reserve(header.kind.slots());
    let used = |slot: Slot| !is_unused(slot) && slot.partial() >= first;
    let all = (0..).zip(view.slots().take(header.kind.slots())).filter(|(_, slot)| used(*slot));
    if header.kind.slots() <= COMPARED_MAX {
        slots.extend(all);
        slots.sort_unstable_by_key(|(_, slot)| std::cmp::Reverse(slot.partial()));
        return;
    }
    let mut by_byte = [(0, Slot::NULL); 256];
    for (index, slot) in all {
        by_byte[usize::from(slot.partial())] = (index, slot);
    }
    slots.extend(by_byte.iter().rev().filter(|(_, slot)| !slot.is_null()));
}

/// Whether a slot leads to no key.
fn is_unused(slot: Slot) -> bool {
    slot.is_null() || slot == Slot::empty(slot.partial())
}

fn slot_of(bytes: &[u8]) -> Result<Slot, Damaged> {
    let word = bytes.try_into().map_err(|_| Damaged("a short READ"))?;
    Ok(Slot(u64::from_le_bytes(word)))
}

/// A torn leaf, as it was read.
fn torn_leaf(leaf: &[u8]) -> Result<LeafView<'_>, Damaged> {
    let torn = Damaged("a torn leaf that is too short");
    let (value, (rev_ptr, head)) = (value_of(leaf), super::layout::head_of(leaf).ok_or(torn)?);
    let path = super::layout::path_and_value(leaf).ok_or(torn)?;
    Ok(LeafView { head, rev_ptr, path: &path[..path.len() - value.len()], value })
}
