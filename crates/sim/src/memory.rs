//! A node's memory, and code that runs on it access by access, interleaved with the accesses of other tasks.
//!
//! Code that uses [`Memory`] runs until its next access has to wait. The access is then made in one or more pieces,
//! each at a different instant. After that the code runs again from the start, and its earlier accesses return the
//! recorded results.
//!
//! So a read can be torn, and a process can be stopped or killed between any two accesses, and between any two pieces
//! of an access.
//!
//! Invariant: a replayed run makes exactly the recorded accesses, or it panics: the code must be a function of its
//! arguments and of the results of its accesses.

use crate::random::Random;
use crate::world::{MICROS, Nanos, World};
use farside_node::NodeMemory;
use farside_remote::arena::{Arena, Geometry, SEGMENT_SIZE};
use farside_remote::memory::WIDE_ALIGN;
use farside_remote::{Key, Memory, Rights, Width};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// Number of bytes that PCIe moves at one instant, a cache line.
pub const LINE: u64 = 64;
/// Number of bytes that a CPU copies at one instant.
const UNIT: u64 = 16;
/// Minimum allocation of a memory in bytes. The C library maps allocations of this size, so that pages which are never
/// touched take no time to zero.
const MAPPED: usize = 33 << 20;

/// The bytes of a node's memory. Each method acts at one instant.
pub struct Bytes {
    geometry: Geometry,
    bytes: RefCell<Vec<u8>>,
}

impl Bytes {
    /// Creates a memory of zeros.
    ///
    /// # Panics
    /// If [`Geometry::of`] does not support this size.
    pub fn new(size: u64) -> Bytes {
        let geometry = Geometry::of(size).expect("the size is one that a node supports");
        let mut bytes = vec![0; MAPPED.max(size as usize)];
        bytes.truncate(size as usize);
        Bytes { geometry, bytes: RefCell::new(bytes) }
    }

    /// Layout of the node's memory.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Copies the bytes at address `at` to `out`.
    #[inline]
    pub fn peek(&self, at: u64, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes.borrow()[range(at, out.len())]);
    }

    /// Stores `bytes` at address `at`.
    #[inline]
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        self.bytes.borrow_mut()[range(at, bytes.len())].copy_from_slice(bytes);
    }

    /// Loads the word of this width at address `at`.
    #[inline]
    pub fn load(&self, at: u64, width: Width) -> u128 {
        let mut word = [0; 16];
        self.peek(at, &mut word[..width as usize]);
        u128::from_le_bytes(word)
    }

    /// Stores `new` if the word at address `at` equals `old`; otherwise returns the present word as the error.
    #[inline]
    pub fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<(), u128> {
        let now = self.load(at, width);
        if now != old {
            return Err(now);
        }
        self.poke(at, &new.to_le_bytes()[..width as usize]);
        Ok(())
    }

    /// Fills the segment with this number with zeros.
    pub fn discard(&self, segment: u32) {
        const ZEROS: [u8; 4096] = [0; 4096];
        let at = self.geometry.segment_at(segment);
        let bytes = &mut self.bytes.borrow_mut()[range(at, SEGMENT_SIZE as usize)];
        // A page of zeros may be one that was never touched: to write it would make it resident.
        let pages = bytes.chunks_exact_mut(ZEROS.len()).filter(|page| page[..] != ZEROS);
        pages.for_each(|page| page.fill(0));
    }
}

#[inline]
fn range(at: u64, len: usize) -> Range<usize> {
    at as usize..at as usize + len
}

/// Delays of accesses, and how accesses are split into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Usual delay, in nanoseconds, of a late access or of a piece; 0 if all accesses of a run happen at one instant.
    pub usual_ns: Nanos,
    /// One in this many accesses is late.
    pub late_one_in: u64,
    /// One in this many late accesses is much later, as if its thread was preempted or stopped.
    pub stalled_one_in: u64,
    /// Whether the pieces of a write may land in any order.
    pub relaxed: bool,
    /// Whether a CPU copies the bytes, rather than PCIe. A CPU copies pieces of a line or less, PCIe copies pieces of
    /// a line.
    pub by_cpu: bool,
}

impl Pace {
    /// Pace at which all accesses of a run happen at one instant.
    pub const AT_ONCE: Pace =
        Pace { usual_ns: 0, late_one_in: 0, stalled_one_in: 0, relaxed: false, by_cpu: true };
    /// Pace of a CPU that makes one access after the other and sometimes stalls.
    pub const CPU: Pace =
        Pace { usual_ns: 60, late_one_in: 3, stalled_one_in: 400, relaxed: false, by_cpu: true };

    /// Draws the delay of a late access, in nanoseconds.
    fn wait(&self, random: &Random) -> Nanos {
        if random.one_in(self.stalled_one_in) {
            return MICROS << random.below(13);
        }
        random.heavy(self.usual_ns)
    }
}

/// Access to memory that has to wait and is still to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads `len` bytes at `at`.
    Read {
        /// Address of the first byte.
        at: u64,
        /// Number of bytes to read.
        len: usize,
    },
    /// Writes `bytes` at `at`.
    Write {
        /// Address of the first byte.
        at: u64,
        /// The bytes to write.
        bytes: Vec<u8>,
    },
    /// Loads the word of this width at this address.
    Load(u64, Width),
    /// Stores `new` if the word at `at` equals `old`.
    Exchange {
        /// Address of the word.
        at: u64,
        /// Width of the word.
        width: Width,
        /// Value that the word must have.
        old: u128,
        /// Value to store in the word.
        new: u128,
    },
    /// Compares and exchanges a word of 24 or 32 bytes.
    ExchangeWide {
        /// Address of the word.
        at: u64,
        /// Value that the word must have.
        old: Vec<u8>,
        /// Value to store in the word.
        new: Vec<u8>,
    },
    /// Fills the segment with this number with zeros.
    Discard(u32),
}

/// Summary of an access, which suffices to check that a replay makes the same access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AccessId {
    kind: u8,
    at: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug)]
enum AccessResult {
    /// Offset, in the record's buffer, of the bytes that were read.
    Bytes(usize),
    Done,
    Word(u128),
    Exchanged(Result<(), u128>),
    /// Whether the word was exchanged, and the offset of the old word in the record's buffer.
    ExchangedWide(bool, usize),
}

/// Accesses of one run, with their results.
#[derive(Default)]
struct Record {
    answers: Vec<(AccessId, AccessResult)>,
    bytes: Vec<u8>,
}

/// Numbers of accesses, of torn reads, and of cut writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of accesses made.
    pub accesses: u64,
    /// Number of torn reads: reads of which a byte changed after the read had begun and before this byte was copied.
    pub torn_reads: u64,
    /// Number of cut writes: writes of which a part took effect, and the rest never did, because a process died or lost
    /// its right in between.
    pub cut_writes: u64,
}

impl Seen {
    /// Returns the sums of two nodes' numbers.
    #[must_use]
    pub fn plus(self, other: Seen) -> Seen {
        Seen {
            accesses: self.accesses + other.accesses,
            torn_reads: self.torn_reads + other.torn_reads,
            cut_writes: self.cut_writes + other.cut_writes,
        }
    }
}

/// A write in progress. If it is dropped after its first piece and before its last, it is counted as cut.
struct Writing<'a> {
    seen: &'a Cell<Seen>,
    is_cut: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if self.is_cut {
            let seen = self.seen.get();
            self.seen.set(Seen { cut_writes: seen.cut_writes + 1, ..seen });
        }
    }
}

/// Memory on which code runs access by access. Only one run may be in progress at a time.
pub struct Replay {
    bytes: Rc<Bytes>,
    world: World,
    pace: Cell<Pace>,
    record: RefCell<Record>,
    next: Cell<usize>,
    /// Reused buffer for the pieces of an access.
    pieces: Cell<Vec<Range<usize>>>,
    /// Whether words of 24 and 32 bytes can be exchanged.
    is_wide: bool,
    seen: Rc<Cell<Seen>>,
    /// Bytes that runs have read. A read that is run again counts again.
    bytes_read: Cell<u64>,
}

impl Replay {
    /// Creates a memory for runs on `bytes`.
    pub fn new(world: &World, bytes: &Rc<Bytes>, pace: Pace) -> Replay {
        Replay {
            bytes: Rc::clone(bytes),
            world: world.clone(),
            pace: Cell::new(pace),
            record: RefCell::default(),
            next: Cell::new(0),
            pieces: Cell::default(),
            is_wide: false,
            seen: Rc::default(),
            bytes_read: Cell::new(0),
        }
    }

    /// Number of bytes that runs have read. The bytes of a run that was replayed count several times.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.get()
    }

    /// Allows exchanges of words of 24 and 32 bytes.
    #[must_use]
    pub fn wide(self) -> Replay {
        Replay { is_wide: true, ..self }
    }

    /// Makes this memory count its accesses in `seen`, which other memories may share.
    #[must_use]
    pub fn seen_by(self, seen: &Rc<Cell<Seen>>) -> Replay {
        Replay { seen: Rc::clone(seen), ..self }
    }

    /// The bytes on which the runs act.
    pub fn bytes(&self) -> &Rc<Bytes> {
        &self.bytes
    }

    /// Runs `code` to completion, restarting it after each access that had to wait.
    pub async fn run<R>(&self, mut code: impl FnMut(&Replay) -> Result<R, Access>) -> R {
        match self.run_up_to(&mut code) {
            Ok(done) => done,
            Err(access) => self.run_from(access, code).await,
        }
    }

    /// First part of [`Replay::run`]: runs `code` up to the first access that has to wait.
    ///
    /// # Errors
    /// Returns that access, with which [`Replay::run_from`] continues.
    #[inline]
    pub fn run_up_to<R>(&self, code: impl FnOnce(&Replay) -> Result<R, Access>) -> Result<R, Access> {
        self.begin();
        code(self)
    }

    /// Second part of [`Replay::run`]: makes the access that had to wait, and runs `code` to completion.
    pub async fn run_from<R>(
        &self,
        mut access: Access,
        mut code: impl FnMut(&Replay) -> Result<R, Access>,
    ) -> R {
        loop {
            let answer = self.perform(&access).await;
            self.record.borrow_mut().answers.push((id_of(&access), answer));
            self.next.set(0);
            match code(self) {
                Ok(done) => {
                    self.check_end();
                    return done;
                }
                Err(next) => access = next,
            }
        }
    }

    /// Runs `code` at one instant: none of its accesses waits.
    pub fn run_at_once<R>(&self, code: impl FnOnce(&Replay) -> Result<R, Access>) -> R {
        self.begin();
        let pace = self.pace.replace(Pace::AT_ONCE);
        let done = code(self);
        self.pace.set(pace);
        done.unwrap_or_else(|access| unreachable!("no access waits when all are at one instant: {access:?}"))
    }

    #[inline]
    fn begin(&self) {
        let mut record = self.record.borrow_mut();
        record.answers.clear();
        record.bytes.clear();
        self.next.set(0);
    }

    fn check_end(&self) {
        assert_eq!(
            self.next.get(),
            self.record.borrow().answers.len(),
            "a replayed run made fewer accesses than before"
        );
    }

    fn count(&self) {
        self.world.count_event();
        self.seen.set(Seen { accesses: self.seen.get().accesses + 1, ..self.seen.get() });
    }

    /// Draws whether the next access without a recorded result is made immediately.
    #[inline]
    fn is_now(&self) -> bool {
        let pace = self.pace.get();
        pace.usual_ns == 0 || !self.world.random().one_in(pace.late_one_in)
    }

    /// Returns the access's result: the recorded one if the access was made before, else that of making it now. Returns
    /// `None` if the access has to wait.
    #[inline]
    fn try_access(
        &self,
        id: AccessId,
        at_once: impl FnOnce(&mut Vec<u8>) -> AccessResult,
    ) -> Option<AccessResult> {
        let next = self.next.get();
        let mut record = self.record.borrow_mut();
        if let Some((recorded, answer)) = record.answers.get(next) {
            assert_eq!(*recorded, id, "a replayed run made a different access");
            self.next.set(next + 1);
            return Some(*answer);
        }
        if !self.is_now() {
            return None;
        }
        self.count();
        let answer = at_once(&mut record.bytes);
        record.answers.push((id, answer));
        self.next.set(next + 1);
        Some(answer)
    }

    /// Makes an access, after the delay that the pace draws for it.
    async fn perform(&self, access: &Access) -> AccessResult {
        let pace = self.pace.get();
        self.world.sleep(pace.wait(self.world.random())).await;
        self.count();
        match access {
            Access::Read { at, len } => AccessResult::Bytes(self.read_in_pieces(*at, *len).await),
            Access::Write { at, bytes } => {
                let pieces = self.pieces(*at, bytes.len(), pace.relaxed);
                let mut writing = Writing { seen: &self.seen, is_cut: false };
                for (index, piece) in pieces.iter().enumerate() {
                    self.between_pieces(index).await;
                    self.bytes.poke(at + piece.start as u64, &bytes[piece.clone()]);
                    writing.is_cut = index + 1 < pieces.len();
                }
                self.pieces.set(pieces);
                AccessResult::Done
            }
            Access::Load(at, width) => AccessResult::Word(self.bytes.load(*at, *width)),
            Access::Exchange { at, width, old, new } => {
                AccessResult::Exchanged(self.bytes.exchange(*at, *width, *old, *new))
            }
            Access::ExchangeWide { at, old, new } => {
                exchange_wide(&self.bytes, &mut self.record.borrow_mut().bytes, *at, old, new)
            }
            Access::Discard(segment) => {
                self.bytes.discard(*segment);
                AccessResult::Done
            }
        }
    }

    async fn read_in_pieces(&self, at: u64, len: usize) -> usize {
        let start = {
            let bytes = &mut self.record.borrow_mut().bytes;
            let start = bytes.len();
            bytes.resize(start + len, 0);
            start
        };
        // Copies all bytes at one instant, too: a difference shows that the read is torn.
        let mut whole = vec![0; len];
        self.bytes.peek(at, &mut whole);
        let pieces = self.pieces(at, len, true);
        let mut is_torn = false;
        for (index, piece) in pieces.iter().enumerate() {
            self.between_pieces(index).await;
            let mut record = self.record.borrow_mut();
            let out = &mut record.bytes[start + piece.start..start + piece.end];
            self.bytes.peek(at + piece.start as u64, out);
            is_torn |= *out != whole[piece.clone()];
        }
        self.pieces.set(pieces);
        let seen = self.seen.get();
        self.seen.set(Seen { torn_reads: seen.torn_reads + u64::from(is_torn), ..seen });
        start
    }

    /// Splits an access into pieces, each of which is copied at one instant. Returns the pieces as ranges of the
    /// access's bytes, in the order in which they are copied.
    fn pieces(&self, at: u64, len: usize, in_any_order: bool) -> Vec<Range<usize>> {
        let random = self.world.random();
        let size = if self.pace.get().by_cpu && random.one_in(4) { UNIT } else { LINE };
        let mut pieces = self.pieces.take();
        pieces.clear();
        let mut from = 0;
        while from < len {
            let to = (from + (size - (at + from as u64) % size) as usize).min(len);
            pieces.push(from..to);
            from = to;
        }
        if in_any_order {
            random.shuffle(&mut pieces);
        }
        pieces
    }

    async fn between_pieces(&self, index: usize) {
        let pace = self.pace.get();
        if index > 0 && self.world.random().one_in(pace.late_one_in) {
            self.world.sleep(pace.wait(self.world.random())).await;
            self.world.count_event();
        }
    }
}

fn id_of(access: &Access) -> AccessId {
    match *access {
        Access::Read { at, len } => AccessId { kind: 0, at, len: len as u64 },
        Access::Write { at, ref bytes } => AccessId { kind: 1, at, len: bytes.len() as u64 },
        Access::Load(at, width) => AccessId { kind: 2, at, len: width.bytes() },
        Access::Exchange { at, width, .. } => AccessId { kind: 3, at, len: width.bytes() },
        Access::ExchangeWide { at, ref old, .. } => AccessId { kind: 4, at, len: old.len() as u64 },
        Access::Discard(segment) => AccessId { kind: 5, at: segment.into(), len: 0 },
    }
}

fn exchange_wide(bytes: &Bytes, kept: &mut Vec<u8>, at: u64, old: &[u8], new: &[u8]) -> AccessResult {
    assert!(at.is_multiple_of(WIDE_ALIGN), "wide words are aligned");
    let start = kept.len();
    kept.resize(start + old.len(), 0);
    bytes.peek(at, &mut kept[start..]);
    let is_exchanged = kept[start..] == *old;
    if is_exchanged {
        bytes.poke(at, new);
    }
    AccessResult::ExchangedWide(is_exchanged, start)
}

impl Memory for Replay {
    type Wait = Access;

    #[inline]
    fn geometry(&self) -> Geometry {
        self.bytes.geometry
    }

    fn admits(&self, key: Key) -> Result<Rights, Access> {
        Arena::of(self).admits(key)
    }

    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Access> {
        Arena::of(self).reach(region, at, len)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Access> {
        let id = AccessId { kind: 0, at, len: out.len() as u64 };
        let read = |kept: &mut Vec<u8>| {
            let start = kept.len();
            kept.resize(start + out.len(), 0);
            self.bytes.peek(at, &mut kept[start..]);
            AccessResult::Bytes(start)
        };
        let Some(answer) = self.try_access(id, read) else { return Err(Access::Read { at, len: out.len() }) };
        let AccessResult::Bytes(start) = answer else { unreachable!("the result of a read is bytes") };
        out.copy_from_slice(&self.record.borrow().bytes[start..start + out.len()]);
        self.bytes_read.set(self.bytes_read.get() + out.len() as u64);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Access> {
        let id = AccessId { kind: 1, at, len: bytes.len() as u64 };
        let write = |_: &mut Vec<u8>| {
            self.bytes.poke(at, bytes);
            AccessResult::Done
        };
        match self.try_access(id, write) {
            Some(_) => Ok(()),
            None => Err(Access::Write { at, bytes: bytes.to_vec() }),
        }
    }

    fn load(&self, at: u64, width: Width) -> Result<u128, Access> {
        let id = AccessId { kind: 2, at, len: width.bytes() };
        match self.try_access(id, |_| AccessResult::Word(self.bytes.load(at, width))) {
            Some(AccessResult::Word(word)) => Ok(word),
            Some(_) => unreachable!("the result of a load is a word"),
            None => Err(Access::Load(at, width)),
        }
    }

    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Access> {
        let id = AccessId { kind: 3, at, len: width.bytes() };
        match self.try_access(id, |_| AccessResult::Exchanged(self.bytes.exchange(at, width, old, new))) {
            Some(AccessResult::Exchanged(exchanged)) => Ok(exchanged),
            Some(_) => unreachable!("the result of an exchange is an exchange's"),
            None => Err(Access::Exchange { at, width, old, new }),
        }
    }

    fn is_wide(&self) -> bool {
        self.is_wide
    }

    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, Access> {
        let id = AccessId { kind: 4, at, len: old.len() as u64 };
        let exchange = |kept: &mut Vec<u8>| exchange_wide(&self.bytes, kept, at, old, new);
        match self.try_access(id, exchange) {
            Some(AccessResult::ExchangedWide(is_exchanged, start)) => {
                old.copy_from_slice(&self.record.borrow().bytes[start..start + old.len()]);
                Ok(is_exchanged)
            }
            Some(_) => unreachable!("the result of a wide exchange is a wide exchange's"),
            None => Err(Access::ExchangeWide { at, old: old.to_vec(), new: new.to_vec() }),
        }
    }
}

impl NodeMemory for Replay {
    fn discard(&self, index: u32) -> Result<(), Access> {
        let discard = |_: &mut Vec<u8>| {
            self.bytes.discard(index);
            AccessResult::Done
        };
        match self.try_access(AccessId { kind: 5, at: index.into(), len: 0 }, discard) {
            Some(_) => Ok(()),
            None => Err(Access::Discard(index)),
        }
    }
}
