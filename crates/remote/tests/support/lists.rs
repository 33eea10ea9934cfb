//! Several clients that take and give buffers under a scheduler, which may switch clients before every access. The
//! first client may die before its n-th access, or be stopped there until all others are done.
//!
//! Invariant: at the end every buffer is free once, never used, or owned by the dead client; none is lost.
//! Invariant: a client takes a buffer that it retired only when the turns have ended that were in progress when the
//! client let the buffer go.
//! Invariant: at the end of a client's turn, each buffer on its lists is RETIRED, owned by the client and on one list.

use super::{Bytes, assign, free_list, grant, open, take};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::{Empty, Supply};
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::{SessionId, epoch_at, turn_at};
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::arena::{Arena, Geometry, header};
use farside_remote::{By, Key, Memory, Rights, Width};
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
    /// Whether clients take the buffers that they retired.
    reuses: bool,
    reuse: std::sync::Mutex<Reuse>,
    figures: Arc<Figures>,
}

/// The test's ledger of turns and of retired buffers.
#[derive(Default)]
struct Reuse {
    /// The clients' turns, by slot.
    turns: [u64; 3],
    /// The slots and turns that were in progress when a client let a buffer go, by the buffer's address.
    let_go: BTreeMap<u64, Vec<(usize, u64)>>,
    /// Whether the node has ended reuse.
    is_over: bool,
    /// The buffers that the node has taken and not freed.
    taken_over: Vec<u64>,
}

/// Totals of a scenario's runs over all schedules.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Number of schedules in which the first client met its fate.
    pub(crate) struck: AtomicU64,
    /// Number of times that a client took a buffer which it had retired.
    pub(crate) reused: AtomicU64,
}

/// Slots of sessions, each with a turn.
type Turns = Vec<(u32, u64)>;

/// One client of the shared memory.
struct Client {
    shared: Arc<Shared>,
    session: SessionId,
    fate: Fate,
    made: Cell<u64>,
}

impl Client {
    fn new(shared: &Arc<Shared>, session: SessionId, fate: Fate) -> Client {
        Client { shared: Arc::clone(shared), session, fate, made: Cell::new(0) }
    }

    fn step(&self) -> Result<(), Died> {
        let now = self.made.replace(self.made.get() + 1);
        match self.fate {
            Fate::Dies(at) if now >= at => {
                self.shared.figures.struck.fetch_add(u64::from(now == at), Ordering::Relaxed);
                return Err(Died);
            }
            Fate::Stops(at) if now == at => {
                self.shared.figures.struck.fetch_add(1, Ordering::Relaxed);
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
        if self.shared.reuses
            && let Some(at) = Arena::of(self).reuse(By::itself(self.session), REGION, class)?
        {
            self.note_reused(at);
            return Ok(Some(at));
        }
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
        let joined = Arena::of(self).retire(self.session, REGION, at)?;
        let is_expected = match joined {
            Some(list) => list == Retirees::Node || self.shared.reuses && list == Retirees::Gathering,
            None => false,
        };
        assert!(is_expected, "a held buffer can be retired: {joined:?}");
        Ok(())
    }

    fn note_reused(&self, at: u64) {
        let before = self.held().insert(at, self.session.number);
        assert_eq!(before, None, "{at:#x} is held by two");
        let mut ledger = self.ledger();
        assert!(!ledger.is_over, "{at:#x} is reused after the end of reuse");
        let during = ledger.let_go.remove(&at).expect("a client has let it go");
        let is_reached = during.iter().any(|&(slot, turn)| ledger.turns[slot] == turn);
        assert!(!is_reached, "{at:#x} is reused while a chain may reach it: {during:?}");
        self.shared.figures.reused.fetch_add(1, Ordering::Relaxed);
    }

    /// Performs `what` in a turn of the client.
    fn in_turn(&self, what: impl FnOnce(&Client) -> Result<(), Died>) -> Result<(), Died> {
        let slot = self.session.slot;
        let turn = self.ledger().turns[slot as usize] + 1;
        let epoch = self.load(header::EPOCH_AT, Width::W8)? as u64;
        self.write(epoch_at(slot), &epoch.to_le_bytes())?;
        self.write(turn_at(slot), &turn.to_le_bytes())?; // All accesses here have one order, so no fence is needed.
        self.ledger().turns[slot as usize] = turn;
        what(self)?;
        self.check_lists();
        self.write(turn_at(slot), &(turn + 1).to_le_bytes())?;
        self.ledger().turns[slot as usize] = turn + 1;
        Ok(())
    }

    /// Checks the buffers on the client's lists. No other client runs in the meantime.
    fn check_lists(&self) {
        let (bytes, mut listed) = (&self.shared.bytes, BTreeSet::new());
        for list in Retirees::ALL {
            let mut next = first_of(bytes, self.session.slot, list);
            while next != 0 {
                let Ok(Some((_, buffer))) = Arena::of(bytes).buffer_at(next) else {
                    panic!("{next:#x} is no buffer")
                };
                let Ok(state) = Arena::of(bytes).state(&buffer);
                let is_own = (state.stage, state.owner) == (Stage::Retired, self.session.number);
                assert!(is_own, "{next:#x} is on {list:?} as {state:?}");
                assert!(listed.insert(next), "{next:#x} is on two lists");
                next = state.next;
            }
        }
    }

    /// Takes the buffers of lists of a session as the node does, in this order.
    fn take_over(&self, slot: u32, lists: &[Retirees]) -> Result<(), Died> {
        let arena = Arena::of(self);
        for &list in lists {
            let mut next = arena.take_retired(slot, list)?;
            while next != 0 {
                let (_, buffer) = arena.buffer_at(next)?.expect("a retired address is a buffer");
                let state = arena.state(&buffer)?;
                if state.owner == owner::NODE {
                    break; // The session was moving the buffers from the list before.
                }
                assert_eq!((state.stage, state.owner), (Stage::Retired, slot + 1), "{list:?}");
                let is_taken = arena.exchange_state(&buffer, state, State { owner: owner::NODE, ..state })?;
                assert!(is_taken, "no other process changes the state of a retired buffer");
                self.ledger().taken_over.push(next);
                next = state.next;
            }
        }
        Ok(())
    }

    /// The turns of the sessions that are in one.
    fn turns(&self) -> Result<Turns, Died> {
        let mut turns = Vec::new();
        for slot in 0..2 {
            turns.push((slot, Arena::of(self).turn(slot)?));
        }
        turns.retain(|(_, turn)| turn % 2 == 1);
        Ok(turns)
    }

    fn have_ended(&self, turns: &[(u32, u64)]) -> Result<bool, Died> {
        for &(slot, turn) in turns {
            if Arena::of(self).turn(slot)? == turn {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Frees these buffers, which the node has taken.
    fn free(&self, taken: Vec<u64>) -> Result<(), Died> {
        let arena = Arena::of(self);
        for at in taken {
            let (region, buffer) = arena.buffer_at(at)?.expect("a retired address is a buffer");
            arena.give(region, &buffer)?;
        }
        Ok(())
    }

    /// Frees a session's retired buffers as the node does, without a grace period, which no test here needs.
    fn repost(&self, slot: u32) -> Result<(), Died> {
        let arena = Arena::of(self);
        let mut next = arena.take_retired(slot, Retirees::Node)?;
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
        let mut ledger = self.ledger();
        let turns = ledger.turns.into_iter().enumerate().filter(|(_, turn)| turn % 2 == 1).collect();
        ledger.let_go.insert(at, turns);
    }

    fn ledger(&self) -> std::sync::MutexGuard<'_, Reuse> {
        self.shared.reuse.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn held(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u32>> {
        self.shared.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The first buffer on a session's list; 0 if the list is empty.
fn first_of(bytes: &Bytes, slot: u32, list: Retirees) -> u64 {
    let head = bytes.peek(head_at(slot, list), 8);
    u64::from_le_bytes(head.try_into().expect("eight bytes")) & ((1 << 48) - 1)
}

/// Address of the head of one of a session's lists of retired buffers.
pub(crate) const fn head_at(slot: u32, list: Retirees) -> u64 {
    turn_at(slot) + 64 + 16 * list as u64
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
    /// Whether sessions reuse the buffers that they retire.
    pub(crate) reuses: bool,
    /// Maximum number of buffers that the first client holds.
    holds: usize,
    /// The clients' scripts. The fate strikes the client of the first script.
    scripts: &'static [Script],
}

pub(crate) const SCENARIOS: [Scenario; 9] =
    [CHURN, REUSE, GROWTH, GRANTING, RETIREMENT, MARKING, RETAKING, RECALLING, CROWDING];

const EMPTY: Scenario = Scenario {
    name: "",
    granted: 0,
    granted_later: 0,
    free: 0,
    unused: 0,
    reuses: false,
    holds: 2,
    scripts: &[],
};

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

/// Clients take the buffers that they retired, while the node takes the lists of these buffers.
const RETAKING: Scenario = Scenario {
    name: "retaking",
    free: 8,
    unused: 2,
    reuses: true,
    scripts: &[replace_in_turns, replace_in_turns, take_all_lists],
    ..EMPTY
};

/// Clients take the buffers that they retired, while the node ends and begins reuse.
const RECALLING: Scenario = Scenario {
    name: "recalling",
    free: 8,
    unused: 2,
    reuses: true,
    scripts: &[replace_in_turns, replace_in_turns, end_and_begin_reuse],
    ..EMPTY
};

/// A client retires more buffers than it keeps, and wants others than it has kept.
const CROWDING: Scenario = Scenario {
    name: "crowding",
    granted: 1,
    free: 13,
    unused: 2,
    reuses: true,
    holds: 12,
    scripts: &[crowd, replace_in_turns, take_all_lists],
    ..EMPTY
};

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

/// Replaces the buffer that the client holds, again and again: enough turns that what it retires in the first ones is
/// past its grace.
fn replace_in_turns(client: &Client) -> Result<(), Died> {
    let mut held = None;
    for _ in 0..6 {
        client.in_turn(|client| {
            let new = client.take(LARGE)?;
            if let Some(old) = std::mem::replace(&mut held, new) {
                client.retire(old)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn crowd(client: &Client) -> Result<(), Died> {
    let mut held = Vec::new();
    client.in_turn(|client| {
        for _ in 0..11 {
            held.extend(client.take(LARGE)?);
        }
        Ok(())
    })?;
    let mut medium = None;
    for round in 0..7 {
        client.in_turn(|client| {
            // A client that has no room for more keeps no buffers of a class that it does not want.
            if round % 2 == 1 {
                medium = match medium {
                    None => client.take(MEDIUM)?,
                    Some(_) => medium,
                };
            } else if let Some(at) = client.take(LARGE)? {
                held.push(at);
            }
            for _ in 0..if round < 5 { 3 } else { 0 } {
                if let Some(at) = held.pop() {
                    client.retire(at)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Takes all lists in turn, and frees their buffers once no session moves them any more.
fn take_all_lists(client: &Client) -> Result<(), Died> {
    let mut waiting: Option<(Vec<u64>, Turns)> = None;
    for _ in 0..3 {
        for slot in 0..2 {
            client.take_over(slot, &Retirees::ALL)?;
        }
        if let Some((taken, turns)) = waiting.take() {
            if client.have_ended(&turns)? {
                client.free(taken)?;
            } else {
                waiting = Some((taken, turns));
            }
        }
        if waiting.is_none() {
            let taken = std::mem::take(&mut client.ledger().taken_over);
            waiting = Some((taken, client.turns()?));
        }
    }
    client.ledger().taken_over.extend(waiting.map_or(Vec::new(), |(taken, _)| taken));
    Ok(())
}

fn end_and_begin_reuse(client: &Client) -> Result<(), Died> {
    let arena = Arena::of(client);
    for _ in 0..2 {
        arena.set_reuse(REGION, false)?;
        let turns = client.turns()?;
        for _ in 0..8 {
            client.take_over(0, &[Retirees::Node])?;
            if client.have_ended(&turns)? {
                client.ledger().is_over = true;
                break;
            }
        }
        client.take_over(1, &[Retirees::Node])?;
        client.ledger().is_over = false;
        arena.set_reuse(REGION, true)?;
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
    fn play(self, fate: Fate, figures: &Arc<Figures>) {
        let bytes = self.furnish();
        let shared = Arc::new(Shared {
            held: std::sync::Mutex::default(),
            steps: Default::default(),
            others_are_done: (Mutex::new(false), Condvar::new()),
            reuses: self.reuses,
            reuse: std::sync::Mutex::default(),
            figures: figures.clone(),
            bytes,
        });
        // Buffers that were taken during the setup stay taken.
        let mut kept = self.states(&shared.bytes);
        kept.retain(|_, state| state.stage == Stage::Live);
        let kept: BTreeSet<u64> = kept.into_keys().collect();
        let threads: Vec<_> = (self.scripts.iter().zip(0..))
            .map(|(&script, slot)| {
                let fate = if slot == 0 { fate } else { Fate::Lives };
                let session = SessionId { slot, number: slot + 1 };
                let client = Client::new(&shared, session, fate);
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
            let Ok(()) = Arena::of(&bytes).count_slot(slot);
        }
        let Ok(()) = Arena::of(&bytes).set_reuse(REGION, self.reuses);
        bytes
    }

    /// Checks the memory after all clients have finished: the node frees the retired buffers, then every buffer must be
    /// accounted for.
    fn audit(self, shared: &Arc<Shared>, kept: &BTreeSet<u64>, dead: Option<u32>) {
        let session = SessionId { slot: 9, number: AUDITOR };
        let node = Client::new(shared, session, Fate::Lives);
        (0..3).for_each(|slot| node.take_over(slot, &Retirees::ALL).expect("the node lives"));
        let taken = std::mem::take(&mut node.ledger().taken_over);
        node.free(taken).expect("the node lives");
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
            assert!(matches!(state.stage, Stage::Live | Stage::Retired), "{at:#x} is {state:?}");
        }
        assert!(free.is_empty(), "every buffer on a list is free");
        for at in held.keys() {
            assert!(
                live.get(at).is_some_and(|state| state.stage == Stage::Live),
                "{at:#x} is held and not live"
            );
        }

        let of_the_dead = live.values().filter(|state| dead == Some(state.owner)).count();
        let holds = self.holds;
        assert!(of_the_dead <= holds, "the dead client held at most {holds} buffers, and owns {of_the_dead}");

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

    /// Plays under `iterations` random schedules, and under as many with a few priority changes.
    pub(crate) fn explore(self, fate: Fate, seed: u64, iterations: usize) -> Figures {
        let figures = Arc::new(Figures::default());
        let mut config = Config::new();
        config.max_steps = MaxSteps::FailAfter(50_000);
        config.silence_warnings = true;
        let play = |figures: Arc<Figures>| move || self.play(fate, &figures);
        let random = RandomScheduler::new_from_seed(seed, iterations);
        Runner::new(random, config.clone()).run(play(figures.clone()));
        let priorities = PctScheduler::new_from_seed(seed, 4, iterations);
        Runner::new(priorities, config).run(play(figures.clone()));
        Arc::into_inner(figures).expect("all runs have finished")
    }

    /// Explores with the fate at every access of the first client. Returns the number of accesses, and the number of
    /// schedules in which the fate struck.
    pub(crate) fn explore_all(self, fate: fn(u64) -> Fate, seed: u64, iterations: usize) -> (u64, u64) {
        let mut total = 0;
        for at in 0.. {
            let struck = self.explore(fate(at), seed ^ at, iterations).struck.into_inner();
            if struck == 0 {
                return (at, total);
            }
            total += struck;
        }
        unreachable!("a script ends")
    }
}
