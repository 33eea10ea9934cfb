//! A node's memory, and how code runs on it access by access, among everybody else's accesses.
//!
//! Code that asks [`Memory`] is run until it asks for an access whose time has not come; the access is made, a piece
//! at a time, each piece at its own instant; then the code is run again from the start, and what it asked before is
//! answered from the record. That is where torn reads come from, and a process can be stopped or killed between any
//! two accesses, or any two pieces of one.
//!
//! Invariant: a replayed run asks exactly what was asked before, or it panics: code that looks at anything but its
//! arguments and the answers is no function of memory.

use crate::random::Random;
use crate::world::{MICROS, Nanos, World};
use farside_node::NodeMemory;
use farside_remote::arena::{Arena, Geometry, SEGMENT_SIZE};
use farside_remote::memory::WIDE_ALIGN;
use farside_remote::{Key, Memory, Rights, Width};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

/// Bytes that PCIe moves at one instant.
pub const LINE: u64 = 64;
/// Bytes that a CPU copies at one instant.
const UNIT: u64 = 16;
/// So large an allocation the C library maps, and its zeros take time only where somebody looks.
const MAPPED: usize = 33 << 20;

/// The bytes of a node's memory. What is asked of it happens at one instant.
pub struct Bytes {
    geometry: Geometry,
    bytes: RefCell<Vec<u8>>,
}

impl Bytes {
    /// All zeros.
    ///
    /// # Panics
    /// If [`Geometry::of`] knows no memory of that size.
    pub fn new(size: u64) -> Bytes {
        let geometry = Geometry::of(size).expect("a size that a node's memory can have");
        let mut bytes = vec![0; MAPPED.max(size as usize)];
        bytes.truncate(size as usize);
        Bytes { geometry, bytes: RefCell::new(bytes) }
    }

    /// Where things are.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Copies what is at `at`.
    #[inline]
    pub fn peek(&self, at: u64, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes.borrow()[range(at, out.len())]);
    }

    /// Puts these bytes at `at`.
    #[inline]
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        self.bytes.borrow_mut()[range(at, bytes.len())].copy_from_slice(bytes);
    }

    /// The word at `at`.
    #[inline]
    pub fn load(&self, at: u64, width: Width) -> u128 {
        let mut word = [0; 16];
        self.peek(at, &mut word[..width as usize]);
        u128::from_le_bytes(word)
    }

    /// Stores `new` if the word at `at` is `old`, else answers what it is.
    #[inline]
    pub fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<(), u128> {
        let now = self.load(at, width);
        if now != old {
            return Err(now);
        }
        self.poke(at, &new.to_le_bytes()[..width as usize]);
        Ok(())
    }

    /// Makes a segment all zeros.
    pub fn discard(&self, segment: u32) {
        let at = self.geometry.segment_at(segment);
        self.bytes.borrow_mut()[range(at, SEGMENT_SIZE as usize)].fill(0);
    }
}

#[inline]
fn range(at: u64, len: usize) -> Range<usize> {
    at as usize..at as usize + len
}

/// When accesses are made, and in what pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// How long an access, or the next piece of one, usually takes to come; 0 if all of a run's happen at one instant.
    pub usual_ns: Nanos,
    /// One access in so many does not come at once.
    pub late_one_in: u64,
    /// Of those, one in so many comes much later: whoever makes it was preempted, or stopped.
    pub stalled_one_in: u64,
    /// The pieces of a write may come in any order, too.
    pub relaxed: bool,
    /// Whether memory is copied by a CPU, in pieces of a line or less, or by PCIe, in lines.
    pub by_cpu: bool,
}

impl Pace {
    /// Everything at one instant.
    pub const AT_ONCE: Pace =
        Pace { usual_ns: 0, late_one_in: 0, stalled_one_in: 0, relaxed: false, by_cpu: true };
    /// A CPU whose accesses come one after the other, and stand still now and then.
    pub const CPU: Pace =
        Pace { usual_ns: 60, late_one_in: 3, stalled_one_in: 400, relaxed: false, by_cpu: true };

    /// How long an access takes to come that does not come at once.
    fn wait(&self, random: &Random) -> Nanos {
        if random.one_in(self.stalled_one_in) {
            return MICROS << random.below(13);
        }
        random.heavy(self.usual_ns)
    }
}

/// An access that is still to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Copy these bytes.
    Read {
        /// From here.
        at: u64,
        /// So many.
        len: usize,
    },
    /// Put these bytes there.
    Write {
        /// Where.
        at: u64,
        /// What.
        bytes: Vec<u8>,
    },
    /// Load a word.
    Load(u64, Width),
    /// Exchange a word.
    Exchange {
        /// Where.
        at: u64,
        /// How wide.
        width: Width,
        /// From this.
        old: u128,
        /// To that.
        new: u128,
    },
    /// Exchange a word of 24 or 32 bytes.
    ExchangeWide {
        /// Where.
        at: u64,
        /// From this.
        old: Vec<u8>,
        /// To that.
        new: Vec<u8>,
    },
    /// Make a segment all zeros.
    Discard(u32),
}

/// What was asked, in brief: enough to see that a replay asks the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    kind: u8,
    at: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Bytes that were read, in the record's buffer.
    Bytes(usize),
    Done,
    Word(u128),
    Exchanged(Result<(), u128>),
    /// Whether it was, and where what was there is.
    ExchangedWide(bool, usize),
}

/// What was asked of a memory in one run, and answered.
#[derive(Default)]
struct Record {
    answers: Vec<(Asked, Answer)>,
    bytes: Vec<u8>,
}

/// How often what can happen to accesses has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Accesses that were made.
    pub accesses: u64,
    /// Between two pieces of a read the bytes that it had not read yet changed.
    pub torn_reads: u64,
}

/// A memory as code sees it that runs on it access by access. One run at a time.
pub struct Replay {
    bytes: Rc<Bytes>,
    world: World,
    pace: Cell<Pace>,
    record: RefCell<Record>,
    next: Cell<usize>,
    /// Room for the pieces of an access.
    pieces: Cell<Vec<Range<usize>>>,
    /// Regions whose words of 24 and 32 bytes can be exchanged.
    is_wide: bool,
    seen: Rc<Cell<Seen>>,
}

impl Replay {
    /// Runs on `bytes`.
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
        }
    }

    /// The same, where wide words can be exchanged.
    #[must_use]
    pub fn wide(self) -> Replay {
        Replay { is_wide: true, ..self }
    }

    /// Counted in `seen`, with others.
    #[must_use]
    pub fn seen_by(self, seen: &Rc<Cell<Seen>>) -> Replay {
        Replay { seen: Rc::clone(seen), ..self }
    }

    /// The memory itself.
    pub fn bytes(&self) -> &Rc<Bytes> {
        &self.bytes
    }

    /// Runs `code` to its end. It is run from the start as often as it takes.
    pub async fn run<R>(&self, mut code: impl FnMut(&Replay) -> Result<R, Access>) -> R {
        match self.run_up_to(&mut code) {
            Ok(done) => done,
            Err(access) => self.run_from(access, code).await,
        }
    }

    /// The first part of [`Replay::run`]: up to the first access whose time has not come, if there is one.
    ///
    /// # Errors
    /// The access, with which [`Replay::run_from`] goes on.
    #[inline]
    pub fn run_up_to<R>(&self, code: impl FnOnce(&Replay) -> Result<R, Access>) -> Result<R, Access> {
        self.begin();
        code(self)
    }

    /// The rest of [`Replay::run`].
    pub async fn run_from<R>(
        &self,
        mut access: Access,
        mut code: impl FnMut(&Replay) -> Result<R, Access>,
    ) -> R {
        loop {
            let answer = self.perform(&access).await;
            self.record.borrow_mut().answers.push((asked(&access), answer));
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

    /// Runs `code` at one instant.
    pub fn run_at_once<R>(&self, code: impl FnOnce(&Replay) -> Result<R, Access>) -> R {
        self.begin();
        let pace = self.pace.replace(Pace::AT_ONCE);
        let done = code(self);
        self.pace.set(pace);
        done.unwrap_or_else(|access| unreachable!("nothing waits when all is at once: {access:?}"))
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
            "a replayed run asked less than before"
        );
    }

    fn count(&self) {
        self.world.count_event();
        self.seen.set(Seen { accesses: self.seen.get().accesses + 1, ..self.seen.get() });
    }

    /// Whether the next access, which nobody has made, is made now.
    #[inline]
    fn is_now(&self) -> bool {
        let pace = self.pace.get();
        pace.usual_ns == 0 || !self.world.random().one_in(pace.late_one_in)
    }

    /// The answer to what is asked, if it is known or the access is made now; or else the access.
    #[inline]
    fn ask(&self, what: Asked, at_once: impl FnOnce(&mut Vec<u8>) -> Answer) -> Option<Answer> {
        let next = self.next.get();
        let mut record = self.record.borrow_mut();
        if let Some((asked, answer)) = record.answers.get(next) {
            assert_eq!(*asked, what, "a replayed run asked something else");
            self.next.set(next + 1);
            return Some(*answer);
        }
        if !self.is_now() {
            return None;
        }
        self.count();
        let answer = at_once(&mut record.bytes);
        record.answers.push((what, answer));
        self.next.set(next + 1);
        Some(answer)
    }

    /// Makes an access, when its time has come.
    async fn perform(&self, access: &Access) -> Answer {
        let pace = self.pace.get();
        self.world.sleep(pace.wait(self.world.random())).await;
        self.count();
        match access {
            Access::Read { at, len } => Answer::Bytes(self.read_in_pieces(*at, *len).await),
            Access::Write { at, bytes } => {
                let pieces = self.pieces(*at, bytes.len(), pace.relaxed);
                for (index, piece) in pieces.iter().enumerate() {
                    self.between_pieces(index).await;
                    self.bytes.poke(at + piece.start as u64, &bytes[piece.clone()]);
                }
                self.pieces.set(pieces);
                Answer::Done
            }
            Access::Load(at, width) => Answer::Word(self.bytes.load(*at, *width)),
            Access::Exchange { at, width, old, new } => {
                Answer::Exchanged(self.bytes.exchange(*at, *width, *old, *new))
            }
            Access::ExchangeWide { at, old, new } => {
                exchange_wide(&self.bytes, &mut self.record.borrow_mut().bytes, *at, old, new)
            }
            Access::Discard(segment) => {
                self.bytes.discard(*segment);
                Answer::Done
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
        // Beside it what it would have been at one instant: to know whether it was torn.
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

    /// The pieces of an access that are copied at one instant each, as ranges of its bytes, in the order in which they
    /// are.
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

fn asked(access: &Access) -> Asked {
    match *access {
        Access::Read { at, len } => Asked { kind: 0, at, len: len as u64 },
        Access::Write { at, ref bytes } => Asked { kind: 1, at, len: bytes.len() as u64 },
        Access::Load(at, width) => Asked { kind: 2, at, len: width.bytes() },
        Access::Exchange { at, width, .. } => Asked { kind: 3, at, len: width.bytes() },
        Access::ExchangeWide { at, ref old, .. } => Asked { kind: 4, at, len: old.len() as u64 },
        Access::Discard(segment) => Asked { kind: 5, at: segment.into(), len: 0 },
    }
}

fn exchange_wide(bytes: &Bytes, kept: &mut Vec<u8>, at: u64, old: &[u8], new: &[u8]) -> Answer {
    assert!(at.is_multiple_of(WIDE_ALIGN), "wide words are aligned");
    let start = kept.len();
    kept.resize(start + old.len(), 0);
    bytes.peek(at, &mut kept[start..]);
    let is_exchanged = kept[start..] == *old;
    if is_exchanged {
        bytes.poke(at, new);
    }
    Answer::ExchangedWide(is_exchanged, start)
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
        let what = Asked { kind: 0, at, len: out.len() as u64 };
        let read = |kept: &mut Vec<u8>| {
            let start = kept.len();
            kept.resize(start + out.len(), 0);
            self.bytes.peek(at, &mut kept[start..]);
            Answer::Bytes(start)
        };
        let Some(answer) = self.ask(what, read) else { return Err(Access::Read { at, len: out.len() }) };
        let Answer::Bytes(start) = answer else { unreachable!("a read is answered by bytes") };
        out.copy_from_slice(&self.record.borrow().bytes[start..start + out.len()]);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Access> {
        let what = Asked { kind: 1, at, len: bytes.len() as u64 };
        let write = |_: &mut Vec<u8>| {
            self.bytes.poke(at, bytes);
            Answer::Done
        };
        match self.ask(what, write) {
            Some(_) => Ok(()),
            None => Err(Access::Write { at, bytes: bytes.to_vec() }),
        }
    }

    fn load(&self, at: u64, width: Width) -> Result<u128, Access> {
        let what = Asked { kind: 2, at, len: width.bytes() };
        match self.ask(what, |_| Answer::Word(self.bytes.load(at, width))) {
            Some(Answer::Word(word)) => Ok(word),
            Some(_) => unreachable!("a load is answered by a word"),
            None => Err(Access::Load(at, width)),
        }
    }

    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Access> {
        let what = Asked { kind: 3, at, len: width.bytes() };
        match self.ask(what, |_| Answer::Exchanged(self.bytes.exchange(at, width, old, new))) {
            Some(Answer::Exchanged(exchanged)) => Ok(exchanged),
            Some(_) => unreachable!("an exchange is answered as one"),
            None => Err(Access::Exchange { at, width, old, new }),
        }
    }

    fn is_wide(&self) -> bool {
        self.is_wide
    }

    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, Access> {
        let what = Asked { kind: 4, at, len: old.len() as u64 };
        let exchange = |kept: &mut Vec<u8>| exchange_wide(&self.bytes, kept, at, old, new);
        match self.ask(what, exchange) {
            Some(Answer::ExchangedWide(is_exchanged, start)) => {
                old.copy_from_slice(&self.record.borrow().bytes[start..start + old.len()]);
                Ok(is_exchanged)
            }
            Some(_) => unreachable!("a wide exchange is answered as one"),
            None => Err(Access::ExchangeWide { at, old: old.to_vec(), new: new.to_vec() }),
        }
    }
}

impl NodeMemory for Replay {
    fn discard(&self, index: u32) -> Result<(), Access> {
        let discard = |_: &mut Vec<u8>| {
            self.bytes.discard(index);
            Answer::Done
        };
        match self.ask(Asked { kind: 5, at: index.into(), len: 0 }, discard) {
            Some(_) => Ok(()),
            None => Err(Access::Discard(index)),
        }
    }
}
