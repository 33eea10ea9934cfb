//! A writer that replaces an item, a reader that follows the pointer to the item, and a node that frees old items. A
//! scheduler may switch between these three before every access. Buffers are poisoned before they go onto a free list.
//!
//! If the store permits it, the writer takes old items itself, and poisons them when it has taken them.
//!
//! Invariant: a reader sees both halves of one version of an item, and never poison.

use super::Slots;
use farside_node::{Node, NodeMemory, Progress};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::session::{SessionId, epoch_at, turn_at};
use farside_remote::arena::state::Stage;
use farside_remote::arena::{Arena, Geometry, SEGMENT_SIZE, header};
use farside_remote::control::{Answer, Ask, NodeInfo, Store};
use farside_remote::{By, Key, Memory, Rights, Width};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The moment at which the reader announces its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Announces {
    /// The reader announces its turn before its first access, as required.
    First,
    /// The reader announces its turn once it has the pointer, as with a missing fence.
    Late,
}

/// Totals of the scenario's runs over all schedules.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) schedules: u64,
    pub(crate) followed: AtomicU64,
    /// Number of old items that the node freed while the others ran.
    pub(crate) freed: AtomicU64,
    /// Number of old items that the writer took itself.
    pub(crate) retaken: AtomicU64,
}

const LARGE: u8 = 40;
const POISON: u64 = 0xdddd_dddd_dddd_dddd;
const ROUNDS: u64 = 3;
/// Number of items that the writer writes if it takes the old ones itself: an item waits for some of its turns.
const ROUNDS_WITH_REUSE: u64 = 7;
/// Offset of the second half of an item in its buffer, in bytes.
const SECOND_HALF: u64 = 4096;

/// A memory in which every access is a scheduling point.
struct Stepped {
    geometry: Geometry,
    bytes: Mutex<Vec<u8>>,
    steps: shuttle::sync::atomic::AtomicU64,
    poisoned: AtomicU64,
    retaken: AtomicU64,
}

impl Stepped {
    fn new() -> Stepped {
        let size = Geometry::SIZE_MIN;
        let geometry = Geometry::of(size).expect("a legal size");
        let bytes = Mutex::new(vec![0; size as usize]);
        Stepped {
            geometry,
            bytes,
            steps: Default::default(),
            poisoned: AtomicU64::new(0),
            retaken: AtomicU64::new(0),
        }
    }

    fn step(&self) -> MutexGuard<'_, Vec<u8>> {
        self.steps.fetch_add(1, Ordering::SeqCst);
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Poisons a buffer that is being put onto a free list, at the moment when the list's head is about to name it.
    fn look_at(&self, bytes: &mut [u8], at: u64, new: u128) {
        let is_head = at < self.geometry.segment_at(0) && at % 4096 >= 128 && at.is_multiple_of(64);
        if is_head && at < 4096 * 257 && new as u64 & 0xf == 2 {
            self.poison(bytes, new as u64 & ((1 << 48) - 1) & !0xf);
        }
    }

    fn poison(&self, bytes: &mut [u8], first: u64) {
        for half in [first, first + SECOND_HALF] {
            bytes[range(half, 8)].copy_from_slice(&POISON.to_le_bytes());
        }
        self.poisoned.fetch_add(1, Ordering::Relaxed);
    }
}

fn range(at: u64, len: usize) -> std::ops::Range<usize> {
    at as usize..at as usize + len
}

impl Memory for Stepped {
    type Wait = Infallible;

    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        Arena::of(self).admits(key)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Infallible> {
        let len = out.len();
        out.copy_from_slice(&self.step()[range(at, len)]);
        Ok(())
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Infallible> {
        self.step()[range(at, bytes.len())].copy_from_slice(bytes);
        Ok(())
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        let mut word = [0; 16];
        let len = width.bytes() as usize;
        word[..len].copy_from_slice(&self.step()[range(at, len)]);
        Ok(u128::from_le_bytes(word))
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        let mut bytes = self.step();
        let len = width.bytes() as usize;
        let mut now = [0; 16];
        now[..len].copy_from_slice(&bytes[range(at, len)]);
        if u128::from_le_bytes(now) != old {
            return Ok(Err(u128::from_le_bytes(now)));
        }
        self.look_at(&mut bytes, at, new);
        bytes[range(at, len)].copy_from_slice(&new.to_le_bytes()[..len]);
        Ok(Ok(()))
    }
}

impl NodeMemory for Stepped {
    fn discard(&self, index: u32) -> Result<(), Infallible> {
        let at = self.geometry.segment_at(index);
        self.step()[range(at, SEGMENT_SIZE as usize)].fill(0);
        Ok(())
    }
}

struct Client {
    memory: Arc<Stepped>,
    store: Store,
    id: SessionId,
}

impl Client {
    /// Publishes a turn. If it is odd, first the epoch.
    fn set_turn(&self, turn: u64) {
        if turn % 2 == 1 {
            let epoch = self.word(header::EPOCH_AT);
            let Ok(()) = self.memory.write(epoch_at(self.id.slot), &epoch.to_le_bytes());
        }
        let Ok(()) = self.memory.write(turn_at(self.id.slot), &turn.to_le_bytes());
    }

    fn word(&self, at: u64) -> u64 {
        let Ok(word) = self.memory.load(at, Width::W8);
        word as u64
    }

    /// Replaces the item in the slot and retires the old item, in one turn.
    fn replace(&self, round: u64) {
        let arena = Arena::of(&*self.memory);
        self.set_turn(2 * round + 1);
        let class = Class::get(LARGE).expect("a class");
        let Ok(retaken) = arena.reuse(By::itself(self.id), self.store.region, class);
        let new = retaken.unwrap_or_else(|| {
            let Ok(taken) = arena.take(self.store.region, class, Supply::Quota, self.id.number);
            taken.expect("there is a buffer")
        });
        if retaken.is_some() {
            // No other thread has run since the buffer was taken.
            let mut bytes = self.memory.bytes.lock().unwrap_or_else(PoisonError::into_inner);
            self.memory.poison(&mut bytes, new);
            self.memory.retaken.fetch_add(1, Ordering::Relaxed);
        }
        for half in [new, new + SECOND_HALF] {
            let Ok(()) = self.memory.write(half, &(round + 1).to_le_bytes());
        }
        let old = self.word(self.store.table_at);
        let Ok(swapped) = self.memory.exchange(self.store.table_at, Width::W8, old.into(), new.into());
        assert_eq!(swapped, Ok(()), "there is one writer");
        if old != 0 {
            let Ok(retired) = arena.retire(self.id, self.store.region, old);
            assert!(retired.is_some());
        }
        self.set_turn(2 * round + 2);
    }

    /// Follows the slot's pointer repeatedly, each time in a separate turn. Returns the number of times.
    fn follow(&self, announces: Announces) -> u64 {
        for round in 0..ROUNDS {
            if announces == Announces::First {
                self.set_turn(2 * round + 1);
            }
            let at = self.word(self.store.table_at);
            if announces == Announces::Late {
                self.set_turn(2 * round + 1);
            }
            let (first, second) = (self.word(at), self.word(at + SECOND_HALF));
            assert!(first != POISON && second != POISON, "a pointer led into a free buffer");
            assert_eq!(first, second, "a pointer led into two versions of a buffer");
            self.set_turn(2 * round + 2);
        }
        ROUNDS
    }
}

/// Runs the scenario under one schedule.
fn play(announces: Announces, reuses: bool, figures: &Figures) {
    let memory = Arc::new(Stepped::new());
    let kind = Slots { reuses, ..Slots::default() };
    let mut node = Node::new(&*memory, vec![Box::new(kind)], NodeInfo::default());
    let (name, kind, parameters) = ("s".into(), "slots".into(), "1".into());
    // Sessions keep nothing while a store has no granted segment left.
    let quota = if reuses { 3 << 20 } else { 2 << 20 };
    node.ask(Ask::CreateStore { name, kind, parameters, quota }, [7, 7]);
    while node.step(&*memory) == Ok(Progress::Made) {}
    let Some((_, Ok(Answer::Store(store)))) = node.answer() else { panic!("asked for a store") };
    let mut client = || {
        let Ok(id) = node.open_session(&*memory, 1, 1);
        Client { memory: Arc::clone(&memory), store: store.clone(), id: id.expect("a session is free") }
    };
    let (writer, reader) = (client(), client());
    let (writers, rounds) = (writer.id, if reuses { ROUNDS_WITH_REUSE } else { ROUNDS });
    if reuses {
        node.poll_shared();
        while node.step(&*memory) == Ok(Progress::Made) {}
    }
    writer.replace(0);
    let others_are_done = Arc::new(shuttle::sync::atomic::AtomicBool::new(false));
    let (seen, done) = (Arc::clone(&memory), Arc::clone(&others_are_done));
    let writing = shuttle::thread::spawn(move || (1..=rounds).for_each(|round| writer.replace(round)));
    let reading = shuttle::thread::spawn(move || reader.follow(announces));
    let tending = shuttle::thread::spawn(move || {
        while !done.load(Ordering::SeqCst) {
            node.poll_shared();
            while node.step(&*memory) == Ok(Progress::Made) {}
            shuttle::thread::yield_now();
        }
        (node, memory)
    });
    writing.join().expect("the writer succeeds");
    let followed = reading.join().expect("the reader succeeds");
    others_are_done.store(true, Ordering::SeqCst);
    let (mut node, memory) = tending.join().expect("the node succeeds");
    figures.followed.fetch_add(followed, Ordering::Relaxed);
    let (poisoned, retaken) = (seen.poisoned.load(Ordering::Relaxed), seen.retaken.load(Ordering::Relaxed));
    figures.freed.fetch_add(poisoned - retaken, Ordering::Relaxed);
    figures.retaken.fetch_add(retaken, Ordering::Relaxed);
    // At the end, without the writer, all replaced items are free.
    node.end_session(writers, true);
    node.poll_shared();
    while node.step(&*memory) == Ok(Progress::Made) {}
    let arena = Arena::of(&*memory);
    let mut stages = Vec::new();
    for index in 0..memory.geometry.segments() {
        for ordinal in 0..15 {
            let Ok(found) = arena.buffer_state(index, ordinal);
            stages.extend(found.map(|(_, state)| state.stage));
        }
    }
    let live = stages.iter().filter(|&&stage| stage == Stage::Live).count();
    let free = stages.iter().filter(|&&stage| stage == Stage::Free).count();
    assert_eq!((live, live + free), (1, stages.len()), "{stages:?}");
}

/// Runs the scenario under `iterations` random schedules, and under as many with a few priority changes.
pub(crate) fn explore(announces: Announces, reuses: bool, seed: u64, iterations: usize) -> Figures {
    let figures = Arc::new(Figures::default());
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(100_000);
    config.silence_warnings = true;
    let story = |figures: Arc<Figures>| move || play(announces, reuses, &figures);
    let random = RandomScheduler::new_from_seed(seed, iterations);
    Runner::new(random, config.clone()).run(story(figures.clone()));
    let priorities = PctScheduler::new_from_seed(seed, 3, iterations);
    Runner::new(priorities, config).run(story(figures.clone()));
    let figures = Arc::into_inner(figures).expect("all runs have finished");
    Figures { schedules: 2 * iterations as u64, ..figures }
}
