//! A protocol on the memory of this machine, which two processes share as clients of `shm` do: one writes, one reads.
//!
//! A CPU copies 16 bytes at a time, not a cache line, and the steps of an operation take place in their order. So what
//! is whole for a NIC may be torn here, and the other way round. A run that has seen nothing proves nothing.
//!
//! Invariant: what is torn or stale is told by the numbers of [`farside_trial::tear::truth`], modulo 256. A read during
//! which more writes than that were created counts as not judged.

use farside_fabrics::memory::{Mapping, MappingError, Pages};
use farside_remote::{Memory, Width};
use farside_sim::nic::Verb;
use farside_trial::tear::truth::Seen;
use farside_trial::tear::{Attempt, Far, Posting, Protocol};
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Size of the memory in bytes.
const MEMORY: u64 = 8 << 20;
/// Address of the object.
const AT: u64 = 4 << 20;
/// Number of values that a byte tells apart.
const NUMBERS: u64 = 256;
/// Words by which the processes agree, before the object: number of the last write that was created, of the last that
/// has completed, whether the writer must end, and how often it has started again.
const CREATED: u64 = AT - 4_096;
const COMPLETED: u64 = CREATED + 64;
const ENDS: u64 = COMPLETED + 64;
const AGAIN: u64 = ENDS + 64;
/// The clock is read once in this many operations.
const BATCH: u32 = 256;

/// Memory with an object.
pub(super) struct Real {
    mapping: Mapping,
}

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Sightings {
    /// Number of writes that were created.
    pub(super) writes: u64,
    /// Attempts of the writer that started again.
    pub(super) writes_again: u64,
    /// Reads that were accepted.
    pub(super) accepted: u64,
    /// Attempts of the reader that started again.
    pub(super) again: u64,
    /// Accepted reads whose value was torn.
    pub(super) torn: u64,
    /// Accepted reads whose value was older than the last write that had completed before.
    pub(super) stale: u64,
    /// Accepted reads that were whole, and took too long to tell whether they were stale.
    pub(super) unjudged: u64,
    /// The first torn or stale value, as a sentence.
    pub(super) first: Option<String>,
}

impl Real {
    /// Creates a memory with the object of a protocol.
    ///
    /// # Errors
    /// The system has no memory, or the CPU lacks an instruction.
    pub(super) fn create<P: Protocol>(protocol: &P) -> Result<Real, MappingError> {
        let mapping = Mapping::create(MEMORY, Pages::Small)?;
        let Ok(()) = mapping.write(AT, &protocol.shape().start);
        Ok(Real { mapping })
    }

    /// Maps the memory that another process has created, by its descriptor.
    ///
    /// # Errors
    /// The descriptor is not that of such a memory.
    pub(super) fn attach(fd: OwnedFd) -> Result<Real, MappingError> {
        Ok(Real { mapping: Mapping::attach(fd)? })
    }

    /// Descriptor by which another process maps the memory.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.mapping.fd()
    }

    /// Whether the writer has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.load(CREATED) > 0
    }

    fn load(&self, at: u64) -> u64 {
        let Ok(word) = self.mapping.load(at, Width::W8);
        word as u64
    }

    /// Stores a word that this process alone changes.
    fn store(&self, at: u64, word: u64) {
        let Ok(mut old) = self.mapping.load(at, Width::W8);
        while let Ok(Err(now)) = self.mapping.exchange(at, Width::W8, old, word.into()) {
            old = now;
        }
    }

    /// Writes until the reader ends, at most for this time.
    pub(super) fn write<P: Protocol>(&self, protocol: &P, at_most: Duration) {
        let (since, kinds) = (Instant::now(), protocol.kinds().len());
        let (mut operations, mut again) = (0, 0);
        let mut ends = Ends::default();
        let mut far = OnMemory::of(self, protocol);
        while !ends.now(|| self.load(ENDS) > 0 || since.elapsed() > at_most) {
            far.begin();
            match finish(protocol.write(&far, operations % kinds)) {
                Attempt::Done => {
                    operations += 1;
                    self.store(COMPLETED, self.load(CREATED));
                }
                Attempt::Again => {
                    again += 1;
                    self.store(AGAIN, again);
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Reads for a time, then lets the writer end. Returns what was seen.
    pub(super) fn read<P: Protocol>(&self, protocol: &P, time: Duration) -> Sightings {
        let (since, data) = (Instant::now(), &protocol.shape().data);
        let mut sightings = Sightings::default();
        let mut ends = Ends::default();
        let mut far = OnMemory::of(self, protocol);
        let mut completed = self.load(COMPLETED);
        while !ends.now(|| since.elapsed() >= time) {
            far.begin();
            if finish(protocol.read(&far)) == Attempt::Again {
                sightings.again += 1;
                std::thread::yield_now();
                continue;
            }
            sightings.accepted += 1;
            let created = self.load(CREATED);
            let wrong = match far.seen.borrow().whole(data) {
                Err(pieces) => {
                    sightings.torn += 1;
                    Some(format!("a torn value was accepted: {pieces}, modulo {NUMBERS}"))
                }
                Ok(_) if created - completed >= NUMBERS => {
                    sightings.unjudged += 1;
                    None
                }
                Ok(Some(number)) if u64::from(number.wrapping_sub(completed as u8)) > created - completed => {
                    sightings.stale += 1;
                    Some(format!(
                        "a stale value was accepted: that of write {number}, modulo {NUMBERS}, after write {completed} \
                         had completed"
                    ))
                }
                Ok(_) => None,
            };
            sightings.first = sightings.first.take().or(wrong);
            completed = self.load(COMPLETED);
        }
        self.store(ENDS, 1);
        Sightings { writes: self.load(CREATED), writes_again: self.load(AGAIN), ..sightings }
    }
}

/// Asks only now and then whether it is time to end.
#[derive(Default)]
struct Ends {
    count: u32,
}

impl Ends {
    fn now(&mut self, is_time: impl FnOnce() -> bool) -> bool {
        self.count = (self.count + 1) % BATCH;
        self.count == 0 && is_time()
    }
}

/// Completes an operation, which never waits on real memory.
fn finish<T>(operation: impl Future<Output = T>) -> T {
    match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("real memory completes each access at once"),
    }
}

/// A client's access to the object in real memory.
struct OnMemory<'a> {
    real: &'a Real,
    data: &'a [std::ops::Range<usize>],
    seen: RefCell<Seen>,
    created: Cell<u64>,
}

impl<'a> OnMemory<'a> {
    fn of<P: Protocol>(real: &'a Real, protocol: &'a P) -> OnMemory<'a> {
        let shape = protocol.shape();
        let seen = RefCell::new(Seen::nothing(shape.start.len()));
        OnMemory { real, data: &shape.data, seen, created: Cell::new(real.load(CREATED)) }
    }

    fn begin(&mut self) {
        self.seen.get_mut().clear();
    }

    fn run(&self, verb: Verb) -> Vec<u8> {
        let memory = &self.real.mapping;
        let change = |at: u64, new: &dyn Fn(u64) -> Option<u64>| {
            let Ok(mut old) = memory.load(at, Width::W8);
            loop {
                let Some(new) = new(old as u64) else { return old as u64 };
                let Ok(exchanged) = memory.exchange(at, Width::W8, old, new.into());
                match exchanged {
                    Ok(()) => return old as u64,
                    Err(now) => old = now,
                }
            }
        };
        match verb {
            Verb::Read { at, len } => {
                let mut bytes = vec![0; len];
                let Ok(()) = memory.read(AT + at, &mut bytes);
                self.seen.borrow_mut().add(at as usize, &bytes);
                bytes
            }
            Verb::Write { at, bytes } => {
                let Ok(()) = memory.write(AT + at, &bytes);
                Vec::new()
            }
            Verb::Cas { at, compare, swap, masks: [compared, swapped] } => {
                let new = |old: u64| {
                    (old & compared == compare & compared).then_some(old & !swapped | swap & swapped)
                };
                change(AT + at, &new).to_le_bytes().to_vec()
            }
            Verb::FetchAdd { at, add } => {
                change(AT + at, &|old| Some(old.wrapping_add(add))).to_le_bytes().to_vec()
            }
        }
    }
}

impl Far for OnMemory<'_> {
    fn post(&self, verbs: Vec<Posting>) -> impl Future<Output = Vec<Vec<u8>>> {
        std::future::ready(verbs.into_iter().map(|posting| self.run(posting.verb)).collect())
    }

    fn update(&self, image: &mut [u8]) {
        let number = self.created.get() + 1;
        self.created.set(number);
        self.real.store(CREATED, number);
        self.data.iter().for_each(|range| image[range.clone()].fill(number as u8));
    }
}
