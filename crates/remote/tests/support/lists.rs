//! Several clients that take and give buffers under a scheduler, which may switch clients before every access. The
//! first client may die before its n-th access, or be stopped there until all others are done.
//!
//! Invariant: at the end every buffer is free once, never used, or owned by the dead client; none is lost.

use super::{Bytes, assign, free_list, grant, open, take};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::{Empty, Supply};
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::{Stage, State};
use farside_remote::arena::{Arena, Geometry};
use farside_remote::{Key, Memory, Rights, Width};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::{Condvar, Mutex};
use shuttle::{Config, MaxSteps, Runner};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const REGION: u32 = 1;
/// Class numbers whose segments hold 15 and 18 buffers.
const LARGE: u8 = 40;
const MEDIUM: u8 = 39;
const AUDITOR: u32 = 1000;

/// Fate of the first client. Accesses are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Lives,
    /// The client's process dies before the access with this number.
    Dies(u64),
    /// The client is stopped before the access with this number, until all other clients are done.
    Stops(u64),
}

/// The error of every access of a process that is dead.
#[derive(Debug)]
pub(crate) struct Died;

/// The memory that all clients share, and the test's ledger of the buffers that they hold.
struct Shared {
    bytes: Bytes,
    /// A scheduling point: the scheduler may switch clients whenever this value is accessed.
    steps: shuttle::sync::atomic::AtomicU64,
    others_are_done: (Mutex<bool>, Condvar),
    /// Session number of the client that holds each buffer, by the buffer's address.
    held: std::sync::Mutex<BTreeMap<u64, u32>>,
    /// Number of schedules in which the first client met its fate.
    struck: Arc<AtomicU64>,
}

/// One client of the shared memory.
struct Client {
    shared: Arc<Shared>,
    session: SessionId,
    fate: Fate,
    made: Cell<u64>,
}

impl Client {
    fn step(&self) -> Result<(), Died> {
        let now = self.made.replace(self.made.get() + 1);
        match self.fate {
            Fate::Dies(at) if now >= at => {
                self.shared.struck.fetch_add(u64::from(now == at), Ordering::Relaxed);
                return Err(Died);
            }
            Fate::Stops(at) if now == at => {
                self.shared.struck.fetch_add(1, Ordering::Relaxed);
                let (done, changed) = &self.shared.others_are_done;
                let mut done = done.lock().expect("no thread panics while holding it");
                while !*done {
                    done = changed.wait(done).expect("no thread panics while holding it");
                }
            }
            _ => {}
        }
        self.shared.steps.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn take(&self, class: u8) -> Result<Option<u64>, Died> {
        let class = Class::get(class).expect("a class");
        match Arena::of(self).take(REGION, class, Supply::Quota, self.session.number)? {
            Ok(at) => {
                let before = self.held().insert(at, self.session.number);
                assert_eq!(before, None, "{at:#x} is held by two");
                Ok(Some(at))
            }
            Err(Empty::NotReady) => Ok(None),
            Err(Empty::Damaged) => panic!("a list is damaged"),
        }
    }

    fn give(&self, at: u64) -> Result<(), Died> {
        self.let_go(at);
        let arena = Arena::of(self);
        let (region, buffer) = arena.buffer_at(at)?.expect("a taken address is a buffer");
        arena.give(region, &buffer)
    }

    fn retire(&self, at: u64) -> Result<(), Died> {
        self.let_go(at);
        assert!(Arena::of(self).retire(self.session, REGION, at)?, "a held buffer can be retired");
        Ok(())
    }

    /// Frees a session's retired buffers as the node does, without a grace period, which no test here needs.
    fn repost(&self, slot: u32) -> Result<(), Died> {
        let arena = Arena::of(self);
        let mut next = arena.take_retired(slot)?;
        while next != 0 {
            let (region, buffer) = arena.buffer_at(next)?.expect("a retired address is a buffer");
            let state = arena.state(&buffer)?;
            assert_eq!(state.stage, Stage::Retired);
            next = state.next;
            arena.give(region, &buffer)?;
        }
        Ok(())
    }

    fn let_go(&self, at: u64) {
        assert_eq!(self.held().remove(&at), Some(self.session.number), "{at:#x} has another owner");
    }

    fn held(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u32>> {
        self.shared.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn completed<T>(answer: Result<T, std::convert::Infallible>) -> Result<T, Died> {
    let Ok(answer) = answer;
    Ok(answer)
}

impl Memory for Client {
    type Wait = Died;

    fn geometry(&self) -> Geometry {
        self.shared.bytes.geometry()
    }
    fn admits(&self, key: Key) -> Result<Rights, Died> {
        Arena::of(self).admits(key)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Died> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Died> {
        self.step()?;
        completed(self.shared.bytes.read(at, out))
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Died> {
        self.step()?;
        completed(self.shared.bytes.write(at, bytes))
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Died> {
        self.step()?;
        completed(self.shared.bytes.load(at, width))
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Died> {
        self.step()?;
        completed(self.shared.bytes.exchange(at, width, old, new))
    }
}

/// The steps of one client, as a function.
type Script = fn(&Client) -> Result<(), Died>;

/// A situation in which clients contend.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Number of segments granted in addition to the first, which is of the large class.
    granted: u32,
    /// Number of segments that a script grants: 1 or 0.
    granted_later: u32,
    /// Number of buffers on the free list of the large class at the start.
    free: usize,
    /// Number of never-used buffers in the large class's segment.
    unused: u32,
    /// The clients' scripts. The fate strikes the client of the first script.
    scripts: &'static [Script],
}

pub(crate) const SCENARIOS: [Scenario; 6] = [CHURN, REUSE, GROWTH, GRANTING, RETIREMENT, MARKING];

const EMPTY: Scenario = Scenario { name: "", granted: 0, granted_later: 0, free: 0, unused: 0, scripts: &[] };

/// Clients take and give buffers of a short list.
const CHURN: Scenario = Scenario {
    name: "churn",
    free: 2,
    unused: 1,
    scripts: &[take_and_give, take_and_give, take_and_give],
    ..EMPTY
};

/// The same buffer returns to the head of the list, and its successor does not: the ABA case of a plain stack.
const REUSE: Scenario =
    Scenario { name: "reuse", free: 3, scripts: &[take_and_give, keep_the_second], ..EMPTY };

/// The lists are empty; buffers come from segments that run out, and two classes compete for the next segment.
const GROWTH: Scenario =
    Scenario { name: "growth", granted: 2, unused: 1, scripts: &[grow, grow, grow_medium], ..EMPTY };

/// The node grants a segment while two classes take the segments that are granted already.
const GRANTING: Scenario = Scenario {
    name: "granting",
    granted: 2,
    granted_later: 1,
    unused: 1,
    scripts: &[grow, grow_medium, grant_another],
    ..EMPTY
};

/// Clients retire buffers; the node takes and frees them.
const RETIREMENT: Scenario = Scenario {
    name: "retirement",
    free: 3,
    scripts: &[take_and_retire, take_and_retire, repost_now_and_then],
    ..EMPTY
};

/// A scan marks live buffers as suspect while they are freed.
const MARKING: Scenario =
    Scenario { name: "marking", free: 2, scripts: &[take_and_give, take_and_give, mark_suspects], ..EMPTY };

fn take_and_give(client: &Client) -> Result<(), Died> {
    for _ in 0..2 {
        if let Some(at) = client.take(LARGE)? {
            client.give(at)?;
        }
    }
    Ok(())
}

fn keep_the_second(client: &Client) -> Result<(), Died> {
    let (first, second) = (client.take(LARGE)?, client.take(LARGE)?);
    if let Some(first) = first {
        client.give(first)?;
    }
    if let Some(again) = client.take(LARGE)? {
        client.give(again)?;
    }
    // The client keeps the second buffer; the audit finds that buffer in the ledger.
    let _ = second;
    Ok(())
}

fn grow_class(client: &Client, class: u8) -> Result<(), Died> {
    let mut taken = Vec::new();
    for _ in 0..2 {
        taken.extend(client.take(class)?);
    }
    assert_eq!(taken.len(), 2, "there is enough for all");
    taken.into_iter().try_for_each(|at| client.give(at))
}

fn grow(client: &Client) -> Result<(), Died> {
    grow_class(client, LARGE)
}

fn grow_medium(client: &Client) -> Result<(), Died> {
    grow_class(client, MEDIUM)
}

fn grant_another(client: &Client) -> Result<(), Died> {
    let arena = Arena::of(client);
    let old = arena.segment(3)?;
    assert!(arena.assign(3, old, REGION, Use::Granted)?, "the node alone assigns segments");
    arena.grant(REGION, Supply::Quota, 3)
}

fn take_and_retire(client: &Client) -> Result<(), Died> {
    for _ in 0..2 {
        if let Some(at) = client.take(LARGE)? {
            client.retire(at)?;
        }
    }
    Ok(())
}

fn repost_now_and_then(client: &Client) -> Result<(), Died> {
    for slot in [0, 1, 0, 1] {
        client.repost(slot)?;
    }
    Ok(())
}

fn mark_suspects(client: &Client) -> Result<(), Died> {
    let arena = Arena::of(client);
    for _ in 0..2 {
        for ordinal in 13..15 {
            let Some((buffer, state)) = arena.buffer_state(0, ordinal)? else { continue };
            if state.stage == Stage::Live {
                arena.exchange_state(&buffer, state, State { suspect: true, ..state })?;
            }
        }
    }
    Ok(())
}

impl Scenario {
    /// Runs the scenario once, within a scheduler.
    fn play(self, fate: Fate, struck: &Arc<AtomicU64>) {
        let bytes = self.furnish();
        let shared = Arc::new(Shared {
            held: std::sync::Mutex::default(),
            steps: Default::default(),
            others_are_done: (Mutex::new(false), Condvar::new()),
            struck: struck.clone(),
            bytes,
        });
        // Buffers that were taken during the setup stay taken.
        let kept: BTreeSet<u64> = self.states(&shared.bytes).into_keys().collect();
        let threads: Vec<_> = (self.scripts.iter().zip(0..))
            .map(|(&script, slot)| {
                let fate = if slot == 0 { fate } else { Fate::Lives };
                let session = SessionId { slot, number: slot + 1 };
                let client = Client { shared: shared.clone(), session, fate, made: Cell::new(0) };
                shuttle::thread::spawn(move || script(&client).is_err())
            })
            .collect();
        let mut threads = threads.into_iter();
        let first = threads.next().expect("there is a first");
        for thread in threads {
            assert!(!thread.join().expect("a client panicked"), "only the first client may die");
        }
        let (done, changed) = &shared.others_are_done;
        *done.lock().expect("no thread panics while holding it") = true;
        changed.notify_all();
        let died = first.join().expect("a client panicked");
        self.audit(&shared, &kept, died.then_some(1));
    }

    fn furnish(self) -> Bytes {
        let bytes = Bytes::new(8 << 20);
        open(&bytes, REGION);
        let large = Class::get(LARGE).expect("a class");
        grant(&bytes, 0, REGION, Supply::Quota);
        let taken: Vec<u64> = (0..large.count - self.unused)
            .map(|_| take(&bytes, REGION, large, Supply::Quota, AUDITOR))
            .collect();
        taken[taken.len() - self.free..].iter().for_each(|&at| super::give(&bytes, at));
        for index in 1..=self.granted {
            grant(&bytes, index, REGION, Supply::Quota);
        }
        assign(&bytes, 5, REGION, Use::Table);
        for slot in 0..3 {
            let Ok(()) = Arena::of(&bytes).open_session(SessionId { slot, number: slot + 1 }, 1, 1);
        }
        bytes
    }

    /// Checks the memory after all clients have finished: the node frees the retired buffers, then every buffer must be
    /// accounted for.
    fn audit(self, shared: &Arc<Shared>, kept: &BTreeSet<u64>, dead: Option<u32>) {
        let session = SessionId { slot: 9, number: AUDITOR };
        let node = Client { shared: shared.clone(), session, fate: Fate::Lives, made: Cell::new(0) };
        (0..3).for_each(|slot| node.repost(slot).expect("the node lives"));
        let bytes = &shared.bytes;
        let held: BTreeMap<u64, u32> = node.held().clone();

        let mut free = BTreeSet::new();
        for class in [LARGE, MEDIUM] {
            let class = Class::get(class).expect("a class");
            let Ok(()) = Arena::of(bytes).settle(REGION, class);
            for at in free_list(bytes, REGION, class) {
                assert!(free.insert(at), "{at:#x} is on a list twice");
            }
        }
        let live = self.states(bytes);
        for (&at, state) in &live {
            if state.stage == Stage::Free {
                assert!(free.remove(&at), "{at:#x} is free, but on no list");
                continue;
            }
            assert!(!free.contains(&at), "{at:#x} is on the free list as {state:?}");
            let known =
                kept.contains(&at) || held.get(&at) == Some(&state.owner) || dead == Some(state.owner);
            assert!(known, "{at:#x} is lost as {state:?}");
        }
        assert!(free.is_empty(), "every buffer on a list is free");
        for at in held.keys() {
            assert!(
                live.get(at).is_some_and(|state| state.stage == Stage::Live),
                "{at:#x} is held and not live"
            );
        }

        let of_the_dead = live.values().filter(|state| dead == Some(state.owner)).count();
        assert!(of_the_dead <= 2, "the dead client held at most two buffers, and owns {of_the_dead}");

        // No buffer is lost: all buffers that no client holds can be taken, segment by segment.
        let in_hands = live.values().filter(|state| state.stage != Stage::Free).count();
        let mut drained = BTreeSet::new();
        for class in [LARGE, MEDIUM] {
            while let Some(at) = node.take(class).expect("the node lives") {
                assert!(drained.insert(at), "{at:#x} was taken twice");
            }
        }
        let arena = Arena::of(bytes);
        let all: u32 = (0..=self.granted + self.granted_later)
            .map(|index| {
                let Ok(segment) = arena.segment(index);
                let Use::Buffers(class) = segment.usage else { panic!("segment {index} was lost") };
                Class::get(class).expect("a class").count
            })
            .sum();
        assert_eq!(drained.len() + in_hands, all as usize, "buffers were lost");
    }

    /// The states of all buffers that were ever taken.
    fn states(self, bytes: &Bytes) -> BTreeMap<u64, State> {
        let arena = Arena::of(bytes);
        let mut states = BTreeMap::new();
        for index in 0..=self.granted + self.granted_later {
            for ordinal in 0..18 {
                let Ok(found) = arena.buffer_state(index, ordinal);
                states.extend(found.map(|(buffer, state)| (buffer.at, state)));
            }
        }
        states.retain(|_, state| state.stage != Stage::Unused);
        states
    }

    /// Plays under `iterations` random schedules, and under as many with a few priority changes. Returns the number of
    /// schedules in which the fate struck.
    pub(crate) fn explore(self, fate: Fate, seed: u64, iterations: usize) -> u64 {
        let struck = Arc::new(AtomicU64::new(0));
        let mut config = Config::new();
        config.max_steps = MaxSteps::FailAfter(50_000);
        config.silence_warnings = true;
        let play = |struck: Arc<AtomicU64>| move || self.play(fate, &struck);
        let random = RandomScheduler::new_from_seed(seed, iterations);
        Runner::new(random, config.clone()).run(play(struck.clone()));
        let priorities = PctScheduler::new_from_seed(seed, 4, iterations);
        Runner::new(priorities, config).run(play(struck.clone()));
        struck.load(Ordering::Relaxed)
    }

    /// Explores with the fate at every access of the first client. Returns the number of accesses, and the number of
    /// schedules in which the fate struck.
    pub(crate) fn explore_all(self, fate: fn(u64) -> Fate, seed: u64, iterations: usize) -> (u64, u64) {
        let mut total = 0;
        for at in 0.. {
            let struck = self.explore(fate(at), seed ^ at, iterations);
            if struck == 0 {
                return (at, total);
            }
            total += struck;
        }
        unreachable!("a script ends")
    }
}
