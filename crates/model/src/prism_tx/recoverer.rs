//! A recoverer of a client: it fences the client at every shard, reads the client's entries there, and then commits or
//! aborts each transaction that it has found. Recoverers need no lock, and may die.
//!
//! Invariant: a recoverer gives no verdict before it has fenced the client and read its log at all shards.

use super::client::Next;
use super::log::{self, Entry};
use super::program::Op;
use super::rules::{BackOut, Close, ClosedBy, FoundEntries, Lease, Log, Order, Redo, Scan, Verdict};
use super::slot::Timestamp;
use super::world::{self, LANES_RECOVERED, Recovered, SHARDS, Step, World};
use zerocopy::{Immutable, IntoBytes};

/// Phase of a recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(u8)]
pub enum Phase {
    /// It fences the client and reads its log.
    #[default]
    Reading,
    /// It confirms that its client still holds the lease of its id.
    Confirming,
    /// It installs or raises C for one transaction.
    Settling,
    /// It closes the entries of this transaction.
    Closing,
    /// The client is recovered.
    Over,
    /// The recoverer is dead.
    Dead,
}

/// State of a recoverer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct State {
    /// Phase of the recovery.
    pub phase: Phase,
    /// Timestamp of the transaction that is being settled.
    pub ts: Timestamp,
    /// 1 if it is being committed.
    pub commits: u8,
    /// For each thread, the number of its ops that are over.
    pub over: [u8; SHARDS],
    /// For each thread, the smaller intent that a wait has seen.
    pub seen: [Timestamp; SHARDS],
    /// The entries found, by lane of the client and by shard.
    pub found: [[Entry; SHARDS]; LANES_RECOVERED],
}

impl State {
    /// Returns the entry found at a shard of the transaction that is being settled.
    fn entry(&self, shard: usize) -> Option<&Entry> {
        self.found.iter().map(|of_lane| &of_lane[shard]).find(|entry| is_of(entry, self.ts))
    }
}

fn is_of(entry: &Entry, ts: Timestamp) -> bool {
    entry.state != log::State::Free && entry.ts == ts
}

/// The ops of the first phase, by shard.
const TOGETHER: [[Op; 1]; SHARDS] =
    [[Op::FenceAndReadLog(0)], [Op::FenceAndReadLog(1)], [Op::FenceAndReadLog(2)]];
const FENCE_FIRST: [[Op; 2]; SHARDS] =
    [[Op::Fence(0), Op::ReadLog(0)], [Op::Fence(1), Op::ReadLog(1)], [Op::Fence(2), Op::ReadLog(2)]];
const FENCE_LAST: [[Op; 2]; SHARDS] =
    [[Op::ReadLog(0), Op::Fence(0)], [Op::ReadLog(1), Op::Fence(1)], [Op::ReadLog(2), Op::Fence(2)]];
const CLOSE: [[Op; 1]; SHARDS] = [[Op::Close(0)], [Op::Close(1)], [Op::Close(2)]];

/// Begins a recovery.
pub(super) fn start(world: &World, state: &mut world::State, number: usize) {
    if world.rules.lease == Lease::ConfirmedBeforeLog {
        state.recoverers[number].phase = Phase::Confirming;
    }
    settle(world, state, number);
}

/// Returns the ops of a thread of the current phase.
fn thread<'a>(world: &'a World, of: &State, client: usize, thread: usize) -> &'a [Op] {
    match of.phase {
        Phase::Reading if !world.shards.contains(&thread) => &[],
        Phase::Reading => match world.rules.log {
            Log::BeforeFence => &FENCE_LAST[thread],
            Log::AfterFence if is_alone(world, client) => &TOGETHER[thread],
            Log::AfterFence => &FENCE_FIRST[thread],
        },
        Phase::Confirming if thread == 0 => &[Op::ConfirmLease],
        Phase::Settling if of.commits == 1 => {
            of.entry(thread).map_or(&[], |entry| &world.program(entry.body).redo[thread])
        }
        Phase::Settling => {
            let found = world.shards.get(thread).and_then(|shard| of.entry(*shard));
            found.map_or(&[], |entry| &world.program(entry.body).back_out[thread])
        }
        Phase::Closing if of.entry(thread).is_some() => &CLOSE[thread],
        Phase::Confirming | Phase::Closing | Phase::Over | Phase::Dead => &[],
    }
}

/// Whether a client has one recoverer. Then nobody acts between its fence and its read of the log, and nobody else
/// releases the lease: these ops are not steps of their own.
fn is_alone(world: &World, client: usize) -> bool {
    world.recovered.iter().filter(|of| **of == client).count() == 1
}

/// Visits all steps of a recoverer.
pub(super) fn steps(
    world: &World,
    from: &world::State,
    number: usize,
    visit: &mut impl FnMut(Step, &world::State),
) {
    let (of, client) = (&from.recoverers[number], world.recovered[number]);
    if matches!(of.phase, Phase::Over | Phase::Dead) || !world.may_begin(from, client) {
        return;
    }
    for at in 0..SHARDS {
        let ops = thread(world, of, client, at);
        let over = of.over[at];
        let Some(&op) = ops.get(usize::from(over)) else { continue };
        let mut after = *from;
        let left = ops.len() as u8 - over;
        let steps = match perform(world, &mut after, number, at, op) {
            Next::Op => 1,
            Next::Skip(count) => (1 + count).min(left),
            Next::End => left,
            Next::Wait => continue,
        };
        after.recoverers[number].over[at] = over + steps;
        settle(world, &mut after, number);
        visit(Step::Recoverer(number, op), &after);
    }
    if world.recovered[..number].contains(&client) {
        let mut after = *from;
        after.recoverers[number] = State { phase: Phase::Dead, ..State::default() };
        visit(Step::Dies(number), &after);
    }
}

/// Does one op.
fn perform(world: &World, state: &mut world::State, number: usize, thread: usize, op: Op) -> Next {
    match op {
        Op::Fence(shard) => fence(world, state, number, shard),
        Op::ReadLog(shard) => read_log(world, state, number, shard),
        Op::FenceAndReadLog(shard) => {
            fence(world, state, number, shard);
            read_log(world, state, number, shard)
        }
        Op::ConfirmLease => confirm_lease(world, state, number),
        Op::Redo(key) => redo(world, state, number, key),
        Op::Close(shard) => close(world, state, number, shard),
        _ => {
            let of = state.recoverers[number];
            let mut seen = of.seen[thread];
            let next = back_out(world, state, of.ts, op, &mut seen);
            state.recoverers[number].seen[thread] = seen;
            next
        }
    }
}

/// Fences the client at a shard. From now on, none of its ops runs there.
fn fence(world: &World, state: &mut world::State, number: usize, shard: usize) -> Next {
    state.fenced[world.recovered[number]] |= 1 << shard;
    Next::Op
}

/// Gives up if another recoverer has released the lease of the client's id: the client is recovered.
fn confirm_lease(world: &World, state: &mut world::State, number: usize) -> Next {
    let client = world.recovered[number];
    let is_over =
        |other: &usize| world.recovered[*other] == client && state.recoverers[*other].phase == Phase::Over;
    if (0..world.recovered.len()).any(|other| is_over(&other)) {
        state.recoverers[number] = State { phase: Phase::Over, ..State::default() };
        return Next::End;
    }
    Next::Op
}

/// Reads the client's entries at a shard. Entries of the id's next holder are not the client's: their timestamps are
/// above the client's reservation.
fn read_log(world: &World, state: &mut world::State, number: usize, shard: usize) -> Next {
    let client = world.recovered[number];
    for (at, lane) in world.lanes_of(client).enumerate() {
        let mut entry = state.log[world.entry_of[lane]][shard];
        let is_free = entry.state == log::State::Free;
        let is_foreign = !is_free && transaction_of(world, state, entry.ts, client).is_none();
        if is_free || is_foreign && world.rules.found == FoundEntries::OfClient {
            continue;
        }
        let is_value_seen = (0..world.shards.len())
            .any(|key| world.shards[key] == shard && state.slots[key].value == entry.body);
        if world.rules.verdict == Verdict::FromSlots && is_value_seen {
            entry.state = log::State::Decided;
        }
        state.recoverers[number].found[at][shard] = entry;
    }
    Next::Op
}

/// Returns the number of the client's transaction with this timestamp. A timestamp is the client's if it lies between
/// the former reservation of the client's id and its own.
fn transaction_of(world: &World, state: &world::State, ts: Timestamp, client: usize) -> Option<u8> {
    let mut numbers = 1..=world.transactions.len() as u8;
    numbers.find(|number| world.client_of(*number) == client && state.record(*number).ts == ts)
}

/// Repeats an install: CAS(LT) on C. Another recoverer, or the client, may have done it.
fn redo(world: &World, state: &mut world::State, number: usize, key: usize) -> Next {
    let of = &state.recoverers[number];
    let body = of.entry(world.shards[key]).expect("a thread of this entry runs").body;
    let slot = &mut state.slots[key];
    match world.rules.redo {
        Redo::IfNewer => slot.install(of.ts, body),
        Redo::Always => {
            slot.raise(of.ts);
            slot.value = body;
        }
    }
    Next::Op
}

/// Does one op of an abort without the PW that the transaction has replaced: by a recoverer, or by a client that has
/// got no response to its prepare.
pub(super) fn back_out(
    world: &World,
    state: &mut world::State,
    ts: Timestamp,
    op: Op,
    seen: &mut Timestamp,
) -> Next {
    match op {
        Op::Look(key) => look(world, state, ts, key),
        Op::Await(key, entry) => match is_waiting(world, state, ts, key, entry) {
            true => Next::Wait,
            false => Next::Op,
        },
        Op::AwaitWord(key, entry) => await_word(world, state, ts, (key, entry), seen),
        Op::AwaitBody(key, entry) => await_body(world, state, (key, entry), seen),
        Op::BackOut(key) => {
            state.slots[key].raise(ts);
            Next::Op
        }
        _ => unreachable!("{op:?} is no op of an abort"),
    }
}

/// (i) Reads the slot. If PW < TS then the transaction has not prepared this key, and no reader or writer sees it. If
/// C >= TS then another recoverer has settled the key.
fn look(world: &World, state: &world::State, ts: Timestamp, key: usize) -> Next {
    let slot = &state.slots[key];
    let skips = match world.rules.back_out {
        BackOut::OnlyOwnPrepare => slot.write_prepared != ts,
        _ => slot.write_prepared < ts || slot.committed >= ts,
    };
    if skips { Next::End } else { Next::Op }
}

/// (ii) Whether an entry names the key, with a smaller timestamp, and its transaction is not settled here.
fn is_waiting(world: &World, state: &world::State, ts: Timestamp, key: usize, entry: usize) -> bool {
    let entry = &state.log[entry][world.shards[key]];
    entry.is_unsettled()
        && entry.ts < ts
        && entry.body != 0
        && world.transaction(entry.body).writes.contains(&key)
        && state.slots[key].committed < entry.ts
}

/// The first half of (ii) for an entry that is reused: reads the word.
fn await_word(
    world: &World,
    state: &world::State,
    ts: Timestamp,
    (key, entry): (usize, usize),
    seen: &mut Timestamp,
) -> Next {
    let word = &state.log[entry][world.shards[key]];
    let is_smaller = word.is_unsettled() && word.ts < ts;
    match world.rules.scan {
        Scan::WordFirst if is_smaller => *seen = word.ts,
        Scan::WordFirst => return Next::Skip(1),
        // The body has named the key.
        Scan::BodyFirst if is_smaller && state.slots[key].committed < word.ts => {
            return Next::Wait;
        }
        Scan::BodyFirst => {}
    }
    Next::Op
}

/// The second half of (ii): reads the body. If it names the key, waits until the word changes or C >= TS'.
fn await_body(
    world: &World,
    state: &world::State,
    (key, entry): (usize, usize),
    seen: &mut Timestamp,
) -> Next {
    let of = &state.log[entry][world.shards[key]];
    let names_key = of.body != 0 && world.transaction(of.body).writes.contains(&key);
    if world.rules.scan == Scan::BodyFirst {
        return if names_key { Next::Op } else { Next::Skip(1) };
    }
    if names_key && of.is_unsettled() && of.ts == *seen && state.slots[key].committed < *seen {
        return Next::Wait;
    }
    *seen = Timestamp::default();
    Next::Op
}

/// Closes the entries of a settled transaction at a shard.
fn close(world: &World, state: &mut world::State, number: usize, shard: usize) -> Next {
    let of = state.recoverers[number];
    for (at, lane) in world.lanes_of(world.recovered[number]).enumerate() {
        let found = of.found[at][shard];
        let entry = &mut state.log[world.entry_of[lane]][shard];
        if !is_of(&found, of.ts) {
            continue;
        }
        match (world.rules.closed_by, world.rules.close) {
            (ClosedBy::Write, _) => match found.state {
                log::State::Decided | log::State::Done => entry.set(of.ts, log::State::Done),
                log::State::Active | log::State::Free => entry.free(),
            },
            (_, Close::Done | Close::DonePerShard) => entry.close(of.ts),
            (_, Close::Erased | Close::ErasedPerShard) if entry.ts == of.ts => entry.free(),
            (_, Close::Erased | Close::ErasedPerShard) => {}
        }
    }
    Next::Op
}

/// Goes on to the next phase or transaction while all threads are over.
fn settle(world: &World, state: &mut world::State, number: usize) {
    let client = world.recovered[number];
    loop {
        let of = state.recoverers[number];
        let is_over = |at: usize| usize::from(of.over[at]) >= thread(world, &of, client, at).len();
        if matches!(of.phase, Phase::Over | Phase::Dead) || !(0..SHARDS).all(is_over) {
            return;
        }
        state.recoverers[number].over = [0; SHARDS];
        match of.phase {
            Phase::Reading if is_alone(world, client) => next_transaction(world, state, number),
            Phase::Reading if world.rules.lease == Lease::ConfirmedAfterLog => {
                state.recoverers[number].phase = Phase::Confirming;
            }
            Phase::Confirming if world.rules.lease == Lease::ConfirmedBeforeLog => {
                state.recoverers[number].phase = Phase::Reading;
            }
            Phase::Reading | Phase::Confirming => next_transaction(world, state, number),
            Phase::Settling => state.recoverers[number].phase = Phase::Closing,
            Phase::Closing | Phase::Over | Phase::Dead => {
                if of.commits == 0 {
                    tell(world, state, number, Recovered::Aborted);
                }
                next_transaction(world, state, number);
            }
        }
    }
}

/// Turns to the next transaction, by ascending timestamps. Its verdict: any DECIDED or DONE, commit; else abort.
fn next_transaction(world: &World, state: &mut world::State, number: usize) {
    let of = state.recoverers[number];
    let is_first = matches!(of.phase, Phase::Reading | Phase::Confirming);
    let found = of.found.iter().flatten().filter(|entry| entry.state != log::State::Free);
    let next = match world.rules.order {
        Order::Ascending => found.clone().map(|entry| entry.ts).filter(|ts| is_first || *ts > of.ts).min(),
        Order::Descending => found.clone().map(|entry| entry.ts).filter(|ts| is_first || *ts < of.ts).max(),
    };
    let Some(ts) = next else {
        state.recoverers[number] = State { phase: Phase::Over, ..State::default() };
        return;
    };
    let mut entries = found.filter(|entry| entry.ts == ts);
    let commits = entries.clone().any(|entry| matches!(entry.state, log::State::Decided | log::State::Done));
    // If all are DONE, another recoverer has settled this transaction.
    let is_done = entries.all(|entry| entry.state == log::State::Done);
    let phase = if is_done { Phase::Closing } else { Phase::Settling };
    state.recoverers[number] = State { phase, ts, commits: u8::from(commits), ..of };
    if commits {
        tell(world, state, number, Recovered::Committed);
    }
}

/// Records the verdict on a transaction.
fn tell(world: &World, state: &mut world::State, number: usize, verdict: Recovered) {
    let (ts, client) = (state.recoverers[number].ts, world.recovered[number]);
    let Some(transaction) = transaction_of(world, state, ts, client) else { return };
    let told = &mut state.record_mut(transaction).verdict;
    *told = match *told {
        Recovered::No => verdict,
        same if same == verdict => verdict,
        _ => Recovered::Both,
    };
}
