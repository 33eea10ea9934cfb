//! A second implementation of chains, written from the specification: simple and slow. It shares only the enum of
//! statuses with the crate.
//!
//! If several refusals apply, the specification does not say which one is returned. This model checks in this order:
//! the target (the pointer's alignment, the right to it, null, the right to the pointee), then the source, then the
//! output's address.

use super::PAGE;
use farside_remote::Status;
use farside_remote::arena::header;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const SEGMENT: u64 = 1 << 20;
const REPLY_BYTES: usize = 65536;
const SCRATCH_BIT: u64 = 1 << 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum Verb {
    #[default]
    Read,
    Write,
    Allocate,
    Cas,
    FetchAdd,
    Retire,
}

impl Verb {
    pub(crate) const ALL: [Verb; 6] =
        [Verb::Read, Verb::Write, Verb::Allocate, Verb::Cas, Verb::FetchAdd, Verb::Retire];
}

/// A right of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    Read,
    Write,
    Atomic,
    Allocate,
}

impl Right {
    pub(crate) const ALL: [Right; 4] = [Right::Read, Right::Write, Right::Atomic, Right::Allocate];

    /// Returns all sets of rights.
    pub(crate) fn sets() -> Vec<Vec<Right>> {
        let set =
            |bits: u32| (0..4).filter(move |bit| bits >> bit & 1 != 0).map(|bit| Right::ALL[bit as usize]);
        (0..16).map(|bits| set(bits).collect()).collect()
    }
}

/// One op, before it is encoded.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpSpec {
    pub(crate) verb: Verb,
    pub(crate) conditional: bool,
    pub(crate) indirect: bool,
    pub(crate) bounded: bool,
    /// Address of the target, or of the pointer to the target; for ALLOCATE the number of the free list.
    pub(crate) at: u64,
    /// Length of a READ, or of a WRITE with a source, in bytes. Any other op's length is that of `data`.
    pub(crate) len: u32,
    /// Data of a WRITE or an ALLOCATE; the swap operand of a CAS; the addend; the addresses of a RETIRE.
    pub(crate) data: Vec<u8>,
    pub(crate) source: Option<u64>,
    pub(crate) redirect: Option<u64>,
    /// The comparison `target OP compare`: 0 to 5 are EQ, NE, LT, LE, GT, GE.
    pub(crate) mode: u8,
    pub(crate) width: usize,
    pub(crate) compare: Option<Vec<u8>>,
    pub(crate) masks: Option<(Vec<u8>, Vec<u8>)>,
    /// Offset of the pointer in the word of a reclaiming CAS, in bytes. `None` for any other op.
    pub(crate) reclaims: Option<usize>,
    pub(crate) from_reserve: bool,
    /// Whether the op waits for earlier READs and atomics. Without effect here: ops run in order.
    pub(crate) fenced: bool,
    /// Offsets at which the builder cuts the data of an ALLOCATE into three parts.
    pub(crate) cuts: [usize; 2],
}

impl OpSpec {
    pub(crate) fn len(&self) -> u64 {
        match (self.verb, self.source) {
            (Verb::Read, _) | (Verb::Write, Some(_)) => u64::from(self.len),
            _ => self.data.len() as u64,
        }
    }
}

/// Size of the buffers of a class in bytes: four classes per doubling, from 64 bytes to 64 KiB.
pub(crate) fn class_size(class: u64) -> u64 {
    (64 << (class / 4)) * (4 + class % 4) / 4
}

/// Number of buffers of `size` bytes that fit into a segment after their states, and the offset of the first buffer.
pub(crate) fn pile_of(size: u64) -> (u64, u64) {
    let states = |count: u64| (16 * count).next_multiple_of(64);
    let count = (0..).take_while(|&count| states(count) + count * size <= SEGMENT).last().expect("0 fits");
    (count, states(count))
}

/// Reason why a buffer was retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// A reclaiming CAS swapped, and its word had pointed to the buffer.
    Unlinked,
    /// A reclaiming CAS did not swap, and the chain had allocated the buffer.
    Unpublished,
    /// A RETIRE op named the buffer.
    Listed,
}

/// A segment that is divided into buffers of one class.
#[derive(Clone, Debug)]
pub(crate) struct Pile {
    pub(crate) region: u32,
    pub(crate) class: u64,
    pub(crate) base: u64,
    pub(crate) first: u64,
    pub(crate) size: u64,
    pub(crate) count: u64,
    /// Number of the segment's buffers that were ever taken.
    pub(crate) used: u64,
}

/// A model of a node: its memory and its bookkeeping.
#[derive(Clone, Default)]
pub(crate) struct Model {
    pub(crate) bytes: Vec<u8>,
    pub(crate) touched: BTreeSet<u64>,
    pub(crate) book: Book,
}

/// A model of a node's bookkeeping: keys, tables and buffers.
#[derive(Clone, Default)]
pub(crate) struct Book {
    pub(crate) secrets: BTreeMap<u32, u64>,
    /// Rights of the regions' keys.
    pub(crate) rights: Vec<Right>,
    /// Whether the regions have words of 24 and 32 bytes.
    pub(crate) wide: bool,
    /// Tables as whole extents: region, address of the first byte, address of the end.
    pub(crate) tables: Vec<(u32, u64, u64)>,
    pub(crate) piles: Vec<Pile>,
    /// The free buffers of each region and class. The last one is the next to be taken.
    pub(crate) free: BTreeMap<(u32, u64), Vec<u64>>,
    pub(crate) live: BTreeSet<u64>,
    /// The retired buffers with the reason, in order of retirement.
    pub(crate) retired: Vec<(u64, Why)>,
    /// Index of the current pile of each region, class and supply.
    fresh: BTreeMap<(u32, u64, bool), usize>,
    /// Addresses of the granted segments of each region and supply. The last one is the next to be taken.
    pub(crate) granted: BTreeMap<(u32, bool), Vec<u64>>,
}

type Key = (u32, u64);
/// A place that may be accessed: whether the place is in scratch, and its offset.
type Place = (bool, u64);
type Refusal = Status;

impl Book {
    fn permits(&self, (region, secret): Key, right: Right) -> bool {
        secret != 0 && self.secrets.get(&region) == Some(&secret) && self.rights.contains(&right)
    }

    /// The end of the buffer or extent that contains `at`, if the key has the right to it.
    fn end_of(&self, key: Key, at: u64, right: Right) -> Option<u64> {
        if !self.permits(key, right) {
            return None;
        }
        for &(region, start, end) in &self.tables {
            if region == key.0 && start <= at && at < end {
                return Some(end);
            }
        }
        for pile in &self.piles {
            let end = pile.first + pile.count * pile.size;
            if pile.region == key.0 && pile.first <= at && at < end {
                return Some(pile.first + ((at - pile.first) / pile.size + 1) * pile.size);
            }
        }
        None
    }

    /// Takes a buffer from the free list; if that is empty, a fresh buffer of the current segment; else a buffer of a
    /// granted segment. Segments of the quota come first.
    pub(crate) fn take(&mut self, region: u32, class: u64, from_reserve: bool) -> Option<u64> {
        let at = self.free.entry((region, class)).or_default().pop();
        let at = at.or_else(|| {
            let supplies: &[bool] = if from_reserve { &[false, true] } else { &[false] };
            supplies.iter().find_map(|&reserve| self.take_fresh(region, class, reserve)).or_else(|| {
                let from = supplies.iter().find(|&&reserve| {
                    self.granted.get(&(region, reserve)).is_some_and(|segments| !segments.is_empty())
                })?;
                let base = self.granted.get_mut(&(region, *from)).and_then(Vec::pop)?;
                let size = class_size(class);
                let (count, states) = pile_of(size);
                self.fresh.insert((region, class, *from), self.piles.len());
                self.piles.push(Pile { region, class, base, first: base + states, size, count, used: 0 });
                self.take_fresh(region, class, *from)
            })
        })?;
        self.live.insert(at);
        Some(at)
    }

    fn take_fresh(&mut self, region: u32, class: u64, reserve: bool) -> Option<u64> {
        let pile = &mut self.piles[*self.fresh.get(&(region, class, reserve))?];
        if pile.used == pile.count {
            return None;
        }
        pile.used += 1;
        Some(pile.first + (pile.used - 1) * pile.size)
    }

    /// Retires the buffer at `at`, if it is a live buffer of the region.
    fn retire(&mut self, why: Why, region: u32, at: u64) {
        let is_regions = |pile: &Pile| pile.region == region && pile.base <= at && at < pile.base + SEGMENT;
        if self.piles.iter().any(is_regions) && self.live.remove(&at) {
            self.retired.push((at, why));
        }
    }

    pub(crate) fn give(&mut self, at: u64) {
        assert!(self.live.remove(&at), "{at:#x} is not live");
        let pile =
            self.piles.iter().find(|pile| pile.base <= at && at < pile.base + SEGMENT).expect("a buffer's");
        self.free.entry((pile.region, pile.class)).or_default().push(at);
    }
}

impl Model {
    pub(crate) fn poke(&mut self, at: u64, bytes: &[u8]) {
        for (i, &byte) in bytes.iter().enumerate() {
            self.bytes[at as usize + i] = byte;
            self.touched.insert((at + i as u64) / PAGE);
        }
    }

    /// Runs a chain. Returns each op's status and output. The model needs no session.
    pub(crate) fn run(&mut self, key: Key, specs: &[OpSpec]) -> Vec<(Status, Vec<u8>)> {
        let mut reserved = Vec::new();
        for spec in specs.iter().filter(|spec| spec.verb == Verb::Allocate) {
            if self.refuses_list(key, spec).is_some() {
                reserved.push(None);
                continue;
            }
            match self.book.take(key.0, spec.at, spec.from_reserve) {
                Some(at) => reserved.push(Some(at)),
                None => {
                    reserved.into_iter().flatten().for_each(|at| self.book.give(at));
                    self.bytes[header::NEEDED_AT as usize] = 1;
                    self.touched.insert(header::NEEDED_AT / PAGE);
                    return vec![(Status::NotReady, Vec::new()); specs.len()];
                }
            }
        }
        let mut chain = Running {
            node: self,
            key,
            scratch: [0; 32],
            room: REPLY_BYTES.saturating_sub(8 * specs.len()),
            reserved: reserved.into(),
            unused: Vec::new(),
            undecided: Vec::new(),
        };
        let mut answers = Vec::new();
        let mut before = Status::Ok;
        let mut aborted = false;
        for spec in specs {
            let answer = if aborted || spec.conditional && before != Status::Ok {
                if spec.verb == Verb::Allocate {
                    let unused = chain.reserved.pop_front().expect("one for every ALLOCATE");
                    chain.unused.extend(unused);
                }
                (if aborted { Status::Aborted } else { Status::Skipped }, Vec::new())
            } else {
                chain.perform(spec).unwrap_or_else(|refusal| (refusal, Vec::new()))
            };
            if spec.reclaims.is_some() {
                // If the CAS swapped, it has published the allocated buffers. Otherwise no later op will publish them,
                // so they are retired.
                for at in std::mem::take(&mut chain.undecided) {
                    if answer.0 != Status::Ok {
                        chain.node.book.retire(Why::Unpublished, key.0, at);
                    }
                }
            }
            before = answer.0;
            aborted |= matches!(before, Status::Access | Status::Invalid);
            chain.room -= answer.1.len();
            answers.push(answer);
        }
        // A buffer that the chain itself has retired, by RETIRE or through a swapped word, is not freed again.
        let unused = std::mem::take(&mut chain.unused);
        unused
            .into_iter()
            .filter(|at| self.book.live.contains(at))
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|at| self.book.give(at));
        answers
    }

    fn refuses_list(&self, key: Key, spec: &OpSpec) -> Option<Refusal> {
        if !self.book.permits(key, Right::Allocate) {
            return Some(Status::Access);
        }
        if spec.at > 40 || spec.len() > class_size(spec.at) {
            return Some(Status::Invalid);
        }
        None
    }
}

struct Running<'a> {
    node: &'a mut Model,
    key: Key,
    scratch: [u8; 32],
    room: usize,
    reserved: std::collections::VecDeque<Option<u64>>,
    unused: Vec<u64>,
    /// Buffers that the chain has allocated, and that no reclaiming CAS has published or retired yet.
    undecided: Vec<u64>,
}

impl Running<'_> {
    fn perform(&mut self, spec: &OpSpec) -> Result<(Status, Vec<u8>), Refusal> {
        match spec.verb {
            Verb::Read => {
                let (from, len) = self.target(spec, Right::Read)?;
                match spec.redirect {
                    Some(to) => {
                        let to = self.all_of(to, len, Right::Write)?;
                        let bytes = self.get(from, len);
                        self.put(to, &bytes);
                        Ok((Status::Ok, Vec::new()))
                    }
                    None if len as usize > self.room => Err(Status::TooLong),
                    None => Ok((Status::Ok, self.get(from, len))),
                }
            }
            Verb::Write => {
                let (to, len) = self.target(spec, Right::Write)?;
                let bytes = match spec.source {
                    Some(source) => {
                        let source = self.all_of(source, len, Right::Read)?;
                        self.get(source, len)
                    }
                    None => spec.data[..len as usize].to_vec(),
                };
                self.put(to, &bytes);
                Ok((Status::Ok, Vec::new()))
            }
            Verb::Allocate => {
                let buffer = self.reserved.pop_front().expect("one for every ALLOCATE");
                let output = match self.node.refuses_list(self.key, spec) {
                    Some(refusal) => Err(refusal),
                    None => self.place_of_word(spec, 8),
                };
                let output = match output {
                    Ok(output) => output,
                    Err(refusal) => {
                        self.unused.extend(buffer);
                        return Err(refusal);
                    }
                };
                let buffer = buffer.expect("the list was valid when the buffer was reserved, too");
                self.undecided.push(buffer);
                self.put((false, buffer), &spec.data);
                Ok((Status::Ok, self.emit(output, &buffer.to_le_bytes())))
            }
            Verb::Cas => self.compare_and_swap(spec),
            Verb::FetchAdd => {
                let at = self.word_at(spec.at, 8, Right::Atomic)?;
                let output = self.place_of_word(spec, 8)?;
                let old = self.get(at, 8);
                let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
                self.put(at, &number(&old).wrapping_add(number(&spec.data)).to_le_bytes());
                Ok((Status::Ok, self.emit(output, &old)))
            }
            Verb::Retire => {
                if !self.node.book.permits(self.key, Right::Allocate) {
                    return Err(Status::Access);
                }
                for at in spec.data.chunks(8) {
                    let at = u64::from_le_bytes(at.try_into().expect("eight bytes"));
                    self.node.book.retire(Why::Listed, self.key.0, at);
                }
                Ok((Status::Ok, Vec::new()))
            }
        }
    }

    fn compare_and_swap(&mut self, spec: &OpSpec) -> Result<(Status, Vec<u8>), Refusal> {
        let width = spec.width as u64;
        // A reclaiming CAS also requires the right ALLOCATE, checked at the word itself.
        let may_retire = spec.reclaims.is_none() || self.node.book.permits(self.key, Right::Allocate);
        let word_at = |chain: &Self, at: u64| match chain.word_at(at, width, Right::Atomic) {
            Ok((false, _)) if !may_retire => Err(Status::Access),
            found => found,
        };
        let at = if spec.indirect {
            let pointer = self.word_at(spec.at, 8, Right::Read)?;
            let pointer = self.pointer_at(pointer);
            if pointer == 0 {
                return Err(Status::NullPointer);
            }
            word_at(self, pointer)?
        } else {
            word_at(self, spec.at)?
        };
        let (in_scratch, _) = at;
        if width > 16 && (in_scratch || !self.node.book.wide) {
            return Err(Status::Invalid);
        }
        // Scratch is private: no buffer becomes unreachable there.
        if spec.reclaims.is_some() && in_scratch {
            return Err(Status::Invalid);
        }
        let source = match spec.source {
            Some(source) => Some(self.word_at(source, width, Right::Read)?),
            None => None,
        };
        let output = self.place_of_word(spec, width)?;

        let swap = match source {
            Some(source) => self.get(source, width),
            None => spec.data.clone(),
        };
        let compare = spec.compare.clone().unwrap_or_else(|| swap.clone());
        let ones = || vec![0xff; spec.width];
        let (compare_mask, swap_mask) = spec.masks.clone().unwrap_or_else(|| (ones(), ones()));
        let old = self.get(at, width);
        let masked = |bytes: &[u8]| -> Vec<u8> {
            bytes.iter().zip(&compare_mask).map(|(byte, mask)| byte & mask).collect()
        };
        // The byte at the lowest address is the most significant: this is the order of byte strings.
        let (left, right) = (masked(&old), masked(&compare));
        let holds = match spec.mode {
            0 => left == right,
            1 => left != right,
            2 => left < right,
            3 => left <= right,
            4 => left > right,
            5 => left >= right,
            _ => unreachable!("there are six modes"),
        };
        if holds {
            let new: Vec<u8> =
                (0..spec.width).map(|i| (old[i] & !swap_mask[i]) | (swap[i] & swap_mask[i])).collect();
            self.put(at, &new);
            if let Some(offset) = spec.reclaims {
                let pointer = |word: &[u8]| {
                    u64::from_le_bytes(word[offset..offset + 8].try_into().expect("eight bytes"))
                };
                if pointer(&old) != pointer(&new) {
                    self.node.book.retire(Why::Unlinked, self.key.0, pointer(&old));
                }
            }
        }
        let status = if holds { Status::Ok } else { Status::CasFailed };
        Ok((status, self.emit(output, &old)))
    }

    /// The target of a READ or WRITE, and its length in bytes.
    fn target(&self, spec: &OpSpec, right: Right) -> Result<(Place, u64), Refusal> {
        if !spec.indirect {
            return Ok((self.all_of(spec.at, spec.len(), right)?, spec.len()));
        }
        let pointer_at = self.word_at(spec.at, if spec.bounded { 16 } else { 8 }, Right::Read)?;
        let pointer = self.pointer_at(pointer_at);
        let mut len = spec.len();
        if spec.bounded {
            let bound = self.get((pointer_at.0, pointer_at.1 + 8), 4);
            len = len.min(u64::from(u32::from_le_bytes(bound.try_into().expect("four bytes"))));
        }
        if len == 0 {
            return Ok(((true, 0), 0));
        }
        if pointer == 0 {
            return Err(Status::NullPointer);
        }
        let (place, end) = self.end_of(pointer, right).ok_or(Status::Access)?;
        Ok((place, len.min(end - place.1)))
    }

    fn pointer_at(&self, at: Place) -> u64 {
        u64::from_le_bytes(self.get(at, 8).try_into().expect("eight bytes"))
    }

    /// The place of an address, and the end of the range that is accessible there.
    fn end_of(&self, at: u64, right: Right) -> Option<(Place, u64)> {
        if at & SCRATCH_BIT == 0 {
            return Some(((false, at), self.node.book.end_of(self.key, at, right)?));
        }
        let offset = at & !SCRATCH_BIT;
        (offset < 32).then_some(((true, offset), 32))
    }

    fn all_of(&self, at: u64, len: u64, right: Right) -> Result<Place, Refusal> {
        if len == 0 {
            return Ok((true, 0));
        }
        let (place, end) = self.end_of(at, right).ok_or(Status::Access)?;
        if end - place.1 < len { Err(Status::Access) } else { Ok(place) }
    }

    fn word_at(&self, at: u64, width: u64, right: Right) -> Result<Place, Refusal> {
        if !at.is_multiple_of(width.next_power_of_two()) {
            return Err(Status::Invalid);
        }
        self.all_of(at, width, right)
    }

    fn place_of_word(&self, spec: &OpSpec, width: u64) -> Result<Option<Place>, Refusal> {
        match spec.redirect {
            Some(to) => Ok(Some(self.all_of(to, width, Right::Write)?)),
            None if width as usize > self.room => Err(Status::TooLong),
            None => Ok(None),
        }
    }

    fn emit(&mut self, to: Option<Place>, bytes: &[u8]) -> Vec<u8> {
        match to {
            Some(to) => {
                self.put(to, bytes);
                Vec::new()
            }
            None => bytes.to_vec(),
        }
    }

    fn get(&self, (scratch, at): Place, len: u64) -> Vec<u8> {
        let from = if scratch { &self.scratch[..] } else { &self.node.bytes[..] };
        (at..at + len).map(|i| from[i as usize]).collect()
    }

    fn put(&mut self, (scratch, at): Place, bytes: &[u8]) {
        if scratch {
            for (i, &byte) in bytes.iter().enumerate() {
                self.scratch[at as usize + i] = byte;
            }
        } else {
            self.node.poke(at, bytes);
        }
    }
}
