//! A service of Pilaf, FaRM-KV or the cached index that makes its memory accesses one at a time, so that a reader can
//! run between any two accesses. The tests cover every point at which a reader can see a put or a delete half done.
//!
//! Invariant: the test runs in a single thread, so a failure is reproducible.

use super::Home;
use super::intercept::{Intercept, Then};
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::Mapping;
use farside_remote::arena::Geometry;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::service::{Call, Context, Records, Service};
use farside_remote::{Key, Memory, Rights, Width};
use farside_systems::kv::called::{Op, Request};
use farside_systems::kv::pilaf::KIND;
use farside_systems::kv::{AnyKv, Kv};
use farside_systems::registry::all_kinds;
use farside_systems::system::Options;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// A node's memory that performs a limited number of accesses, and then returns *wait*.
struct Metered<'a> {
    memory: &'a Mapping,
    /// Results of the accesses of the current call, which a replay returns again.
    log: RefCell<Vec<Box<dyn Any>>>,
    next: Cell<usize>,
    allowed: Cell<usize>,
}

impl Metered<'_> {
    fn answer<T: Clone + 'static>(
        &self,
        perform: impl FnOnce(&Mapping) -> Result<T, Infallible>,
    ) -> Result<T, ()> {
        let next = self.next.get();
        let mut log = self.log.borrow_mut();
        if next == log.len() {
            self.allowed.set(self.allowed.get().checked_sub(1).ok_or(())?);
            let Ok(answer) = perform(self.memory);
            log.push(Box::new(answer));
        }
        self.next.set(next + 1);
        Ok(log[next].downcast_ref::<T>().expect("a replayed call makes the same accesses").clone())
    }
}

impl Memory for Metered<'_> {
    type Wait = ();

    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn admits(&self, key: Key) -> Result<Rights, ()> {
        self.answer(|memory| memory.admits(key))
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, ()> {
        self.answer(|memory| memory.reach(region, at, len))
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), ()> {
        let mut copy = vec![0; out.len()];
        let bytes = self.answer(|memory| memory.read(at, &mut copy).map(|()| copy))?;
        out.copy_from_slice(&bytes);
        Ok(())
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), ()> {
        self.answer(|memory| memory.write(at, bytes))
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, ()> {
        self.answer(|memory| memory.load(at, width))
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, ()> {
        self.answer(|memory| memory.exchange(at, width, old, new))
    }
}

/// A service with a queue of calls, which makes one access at a time.
pub(crate) struct Stepped<'a> {
    memory: Metered<'a>,
    service: Box<dyn Service<Metered<'a>> + 'a>,
    calls: VecDeque<Vec<u8>>,
}

impl<'a> Stepped<'a> {
    pub(crate) fn new(memory: &'a Mapping, store: &Store) -> Stepped<'a> {
        let log = RefCell::default();
        let memory = Metered { memory, log, next: Cell::new(0), allowed: Cell::new(0) };
        let kind = all_kinds().into_iter().find(|kind| kind.name() == store.kind).expect("a kind");
        let service = kind.serve(&store.parameters, store.extent()).expect("parameters from the catalog");
        Stepped { memory, service, calls: VecDeque::new() }
    }

    pub(crate) fn ask(&mut self, op: Op, key: &[u8], value: &[u8]) {
        let mut request = Vec::new();
        Request { op, key, value }.encode(&mut request);
        self.calls.push_back(request);
    }

    /// Lets the service make up to `accesses` further accesses. Returns the number of accesses that the service made.
    pub(crate) fn step(&mut self, accesses: usize) -> usize {
        self.memory.allowed.set(accesses);
        while let Some(request) = self.calls.front() {
            self.memory.next.set(0);
            let call = Call { rights: Rights::ALL, session: None, request };
            let (memory, scratch, log) = (&self.memory, &mut Vec::new(), &mut Records::default());
            let context = Context { memory, now: Duration::ZERO, random: Draws(0), scratch, log };
            match self.service.call(context, call, &mut Vec::new()) {
                Err(()) => break,
                Ok(answered) => answered.expect("a valid request"),
            }
            self.memory.log.borrow_mut().clear();
            self.calls.pop_front();
        }
        accesses - self.memory.allowed.get()
    }
}

/// Runs a call that fails after `accesses` accesses. Returns the number of accesses that the call made.
pub(crate) fn interrupted(
    memory: &Mapping,
    store: &Store,
    (op, key, value): (Op, &[u8], &[u8]),
    accesses: usize,
) -> usize {
    let mut service = Stepped::new(memory, store);
    service.ask(op, key, value);
    service.step(accesses)
}

/// Number of accesses that lets all calls of a scenario run to their end.
pub(crate) const ALL: usize = usize::MAX;

/// Change of a key while a GET reads the key. Afterwards, another key's item takes the freed buffer or place, except
/// after [`Story::Dropped`].
#[derive(Clone, Copy, Debug)]
enum Story {
    Inserted,
    Replaced,
    Deleted,
    Dropped,
    /// Deleted, and put again after another key.
    Renewed,
}

const OLD: &[u8] = &[1; 80];
const NEW: &[u8] = &[2; 80];

/// Reads a key at every point of every scenario. Before each chain of the reader, the service makes the number of
/// accesses in the schedule. After the schedule, the service makes all remaining accesses, and the key is read once
/// more. `begin` runs after the service was created.
///
/// # Errors
/// A GET returned a wrong result, or called the service.
pub(crate) fn play(begin: impl FnOnce()) -> Result<(), String> {
    play_on(KIND, r#"{"items": 20000}"#, begin)
}

/// As [`play`], on a store of this kind.
pub(crate) fn play_on(kind: &str, parameters: &str, begin: impl FnOnce()) -> Result<(), String> {
    let home = Home::new(32);
    let store = home.create_of(kind, "s", 24, parameters);
    let service = RefCell::new(Stepped::new(home.host.memory(), &store));
    let paces = RefCell::new(VecDeque::new());
    let fabric = Intercept::new(home.endpoint());
    fabric.before_each(|| {
        service.borrow_mut().step(paces.borrow_mut().pop_front().unwrap_or(ALL));
        Then::Runs
    });
    let mut kv = block_on((), AnyKv::open(&fabric, 1, "s", &Options::default())).expect("the store exists");
    begin();
    let mut keys = 0u32;
    for story in [Story::Inserted, Story::Replaced, Story::Deleted, Story::Dropped, Story::Renewed] {
        let tell = |key: &[u8]| {
            let mut service = service.borrow_mut();
            if !matches!(story, Story::Inserted) {
                service.ask(Op::Put, key, OLD);
                service.step(ALL);
            }
            match story {
                Story::Deleted | Story::Dropped | Story::Renewed => service.ask(Op::Delete, key, b""),
                _ => service.ask(Op::Put, key, NEW),
            }
            if !matches!(story, Story::Dropped) {
                service.ask(Op::Put, &[key, b"'s other"].concat(), &[3; 72]);
            }
            if matches!(story, Story::Renewed) {
                service.ask(Op::Put, key, NEW);
            }
        };
        tell(b"first");
        let accesses = service.borrow_mut().step(ALL);
        // The service continues between the two READs (`goes_on`), or pauses for three READs in a row (`rests`).
        let goes_on = (0..=accesses).flat_map(|one| (0..=accesses - one).map(move |two| vec![one, two]));
        let rests = (0..=accesses).map(|one| vec![one, 0, 0, 0]);
        for schedule in goes_on.chain(rests) {
            keys += 1;
            let key = keys.to_le_bytes();
            tell(&key);
            if keys.is_multiple_of(2) {
                // The client may keep where the key lies.
                *paces.borrow_mut() = [0; 2].into();
                _ = block_on((), kv.get(&key)).map(drop);
            }
            *paces.borrow_mut() = schedule.clone().into();
            fabric.inner().take();
            let got = block_on((), kv.get(&key)).map(|item| item.map(|item| item.value));
            let is_right = match (&got, story) {
                (Ok(Some(value)), Story::Replaced | Story::Renewed) => [OLD, NEW].contains(value),
                (Ok(Some(value)), Story::Inserted) => *value == NEW,
                (Ok(Some(value)), Story::Deleted | Story::Dropped) => *value == OLD,
                (Ok(None), story) => !matches!(story, Story::Replaced),
                (Err(_), _) => false,
            };
            let calls = fabric.inner().take().calls;
            if !is_right || calls > 0 {
                return Err(format!("{story:?}, by {schedule:?}: {got:?}, with {calls} calls"));
            }
            service.borrow_mut().step(ALL);
            let got = block_on((), kv.get(&key)).map(|item| item.map(|item| item.value));
            let last = (!matches!(story, Story::Deleted | Story::Dropped)).then_some(NEW);
            if got != Ok(last) {
                return Err(format!("after {story:?}, by {schedule:?}: {got:?}"));
            }
        }
    }
    Ok(())
}
