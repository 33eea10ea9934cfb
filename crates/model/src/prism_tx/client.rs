//! A client: it runs the transactions of its lanes, each lane one after the other.
//!
//! Invariant: a client decides once all checks of all shards have been answered.

use super::log;
use super::program::{Op, Program};
use super::recoverer;
use super::rules::{
    Clear, Clock, Failure, Prepare, Raise, RaisedKeys, Reuse, Success, Unknown, Version, WriteCheck,
};
use super::slot::{Raised, Timestamp};
use super::world::{self, KEYS, Outcome, SHARDS, Step, World};
use zerocopy::{Immutable, IntoBytes};

/// Phase of a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(u8)]
pub enum Phase {
    /// It reads.
    #[default]
    Execute,
    /// It checks its reads and writes.
    Prepare,
    /// It installs its writes.
    Commit,
    /// It settles the keys that it has prepared.
    Abort,
    /// The lane has no more transactions.
    Over,
}

/// State of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct State {
    /// Number of transactions that are over.
    pub finished: u8,
    /// Phase of the current transaction.
    pub phase: Phase,
    /// Stage of the phase.
    pub stage: u8,
    /// For each thread of the stage, the number of its ops that are over.
    pub over: [u8; SHARDS],
    /// "RC": for each key, the version that was read.
    pub versions: [Timestamp; KEYS],
    /// For each key, the PW that the transaction has replaced.
    pub replaced: [Timestamp; KEYS],
    /// Keys of which the transaction has raised PW, as bits.
    pub advanced: u8,
    /// Keys of which the checks have passed, as bits.
    pub passed: u8,
    /// 1 if a check has failed.
    pub failed: u8,
    /// Shards whose prepare has no response, as bits.
    pub unknown: u8,
    /// Shards to whose prepare the client has dropped the request, as bits.
    pub dropped: u8,
    /// For each shard, the number of ops of the dropped chain that are over.
    pub dropped_over: [u8; SHARDS],
    /// For each key, the smaller intent that a wait has seen.
    pub seen: [Timestamp; KEYS],
    /// For each shard, the number of a former transaction whose entry is still to be freed, or 0.
    pub to_free: [u8; SHARDS],
}

/// How a thread goes on after an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// With the next op.
    Op,
    /// Without this many ops.
    Skip(u8),
    /// It is over.
    End,
    /// The op must wait.
    Wait,
}

/// Begins the first transaction of a lane.
pub(super) fn start(world: &World, state: &mut world::State, lane: usize) {
    settle(world, state, lane);
}

/// Returns the number of a lane's current transaction.
pub(super) fn current(world: &World, state: &world::State, lane: usize) -> u8 {
    world.first_of[lane] + state.lanes[lane].finished
}

/// Returns the ops of a thread of the current stage.
fn thread<'a>(world: &'a World, state: &world::State, lane: usize, thread: usize) -> &'a [Op] {
    let of = &state.lanes[lane];
    let stage = usize::from(of.stage);
    if of.phase == Phase::Over {
        return &[];
    }
    let program = world.program(current(world, state, lane));
    match of.phase {
        Phase::Execute if thread == 0 => &program.execute,
        Phase::Execute | Phase::Over => &[],
        Phase::Prepare => program.prepare.get(stage).map_or(&[], |stage| &stage[thread]),
        Phase::Commit => program.commit.get(stage).map_or(&[], |stage| &stage[thread]),
        Phase::Abort => abort_of(world, of, program, thread),
    }
}

/// Returns the ops that settle a key in an abort.
fn abort_of<'a>(world: &World, of: &State, program: &'a Program, key: usize) -> &'a [Op] {
    let Some(shard) = world.shards.get(key) else { return &[] };
    let has = |bits: u8| bits >> key & 1 == 1;
    if of.unknown >> shard & 1 == 1 {
        return match world.rules.unknown {
            Unknown::RecoversItself => &program.abort_unknown[key],
            Unknown::Forgets => &[],
        };
    }
    match world.rules.raised_keys {
        _ if !has(of.advanced) || of.dropped >> shard & 1 == 1 => &[],
        RaisedKeys::Passed if !has(of.passed) => &[],
        RaisedKeys::Passed | RaisedKeys::Advanced => &program.abort[key],
    }
}

/// Visits all steps of a lane.
pub(super) fn steps(
    world: &World,
    from: &world::State,
    lane: usize,
    visit: &mut impl FnMut(Step, &world::State),
) {
    let client = world.lanes[lane].client;
    for shard in 0..SHARDS {
        if from.lanes[lane].to_free[shard] != 0 && !from.is_fenced(client, shard) {
            let mut after = *from;
            free(world, &mut after, lane, shard);
            visit(Step::Clears(lane, shard), &after);
        }
    }
    if world.rules.failure == Failure::DropsRequests {
        drops(world, from, lane, visit);
        runs_dropped(world, from, lane, visit);
    }
    for number in 0..SHARDS {
        let ops = thread(world, from, lane, number);
        let over = from.lanes[lane].over[number];
        let Some(&op) = ops.get(usize::from(over)) else { continue };
        if op.shard(world).is_some_and(|shard| from.is_fenced(client, shard)) {
            continue;
        }
        let mut after = *from;
        let left = ops.len() as u8 - over;
        let steps = match perform(world, &mut after, lane, number, op) {
            Next::Op => 1,
            Next::Skip(count) => (1 + count).min(left),
            Next::End => left,
            Next::Wait => continue,
        };
        after.lanes[lane].over[number] = over + steps;
        let is_chain = matches!(from.lanes[lane].phase, Phase::Prepare | Phase::Commit);
        if is_chain && from.broken < world.breaks {
            let mut broken = after;
            breaks(world, &mut broken, lane, number);
            visit(Step::Breaks(lane, number), &broken);
        }
        settle(world, &mut after, lane);
        visit(Step::Lane(lane, op), &after);
    }
}

/// Broken: after a failed check, aborts without the responses of other shards.
fn drops(world: &World, from: &world::State, lane: usize, visit: &mut impl FnMut(Step, &world::State)) {
    let of = &from.lanes[lane];
    let is_left = |shard: &usize| usize::from(of.over[*shard]) < thread(world, from, lane, *shard).len();
    let left: u8 = (0..SHARDS).filter(is_left).map(|shard| 1 << shard).sum();
    if of.phase != Phase::Prepare || of.failed == 0 || left == 0 {
        return;
    }
    let mut after = *from;
    (after.lanes[lane].dropped, after.lanes[lane].dropped_over) = (left, of.over);
    after.record_mut(current(world, from, lane)).outcome = Outcome::Aborted;
    go_on(&mut after, lane, Phase::Abort, 0);
    settle(world, &mut after, lane);
    visit(Step::Drops(lane), &after);
}

/// Runs an op of a chain whose request was dropped.
fn runs_dropped(
    world: &World,
    from: &world::State,
    lane: usize,
    visit: &mut impl FnMut(Step, &world::State),
) {
    for shard in (0..SHARDS).filter(|shard| from.lanes[lane].dropped >> shard & 1 == 1) {
        let over = from.lanes[lane].dropped_over[shard];
        let ops = &world.program(current(world, from, lane)).prepare[0][shard];
        let Some(&op) = ops.get(usize::from(over)) else { continue };
        let mut after = *from;
        let steps = match perform(world, &mut after, lane, shard, op) {
            Next::Skip(count) => 1 + count,
            _ => 1,
        };
        after.lanes[lane].dropped_over[shard] = over + steps;
        settle(world, &mut after, lane);
        visit(Step::Lane(lane, op), &after);
    }
}

/// Whether all dropped chains of the current transaction have run.
fn is_dropped_over(world: &World, state: &world::State, lane: usize) -> bool {
    let of = &state.lanes[lane];
    let chains = |shard: usize| world.program(current(world, state, lane)).prepare[0][shard].len();
    (0..SHARDS)
        .all(|shard| of.dropped >> shard & 1 == 0 || usize::from(of.dropped_over[shard]) >= chains(shard))
}

/// Does one op.
fn perform(world: &World, state: &mut world::State, lane: usize, thread: usize, op: Op) -> Next {
    match op {
        Op::Begin if world.may_begin(state, world.lanes[lane].client) => Next::Op,
        Op::Begin => Next::Wait,
        Op::Read(key) => read(world, state, lane, key),
        Op::ReadSlot(key) => read_slot(world, state, lane, key),
        Op::ReadValue(key) => read_value(world, state, lane, key),
        Op::ReadSettled(key) => read_settled(world, state, lane, key),
        Op::WriteBody(shard) => write_body(world, state, lane, shard),
        Op::Activate(shard) => set_entry(world, state, lane, shard, log::State::Active),
        Op::CheckRead(key) => check_read(world, state, lane, key),
        Op::CheckWrite(key) | Op::RaiseWrite(key) => check_write(world, state, lane, key),
        Op::CheckReaders(key) => check_readers(world, state, lane, key),
        Op::Decide(shard) => set_entry(world, state, lane, shard, log::State::Decided),
        Op::Install(key) => install(world, state, lane, key),
        Op::InstallVersion(key) => install_version(world, state, lane, key),
        Op::InstallValue(key) => install_value(world, state, lane, key),
        Op::Free(shard) => free_at_once(world, state, lane, shard),
        Op::AwaitReplaced(key) => await_replaced(state, lane, key),
        Op::Raise(key) => raise(world, state, lane, key),
        Op::FindOwn(key) => find_own(world, state, lane, key),
        _ => {
            let ts = state.record(current(world, state, lane)).ts;
            let mut seen = state.lanes[lane].seen[thread];
            let next = recoverer::back_out(world, state, ts, op, &mut seen);
            state.lanes[lane].seen[thread] = seen;
            next
        }
    }
}

/// Takes slot and value by one chain: RC is the slot's C.
fn read(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    read_slot(world, state, lane, key);
    read_value(world, state, lane, key)
}

fn read_slot(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    if world.rules.version == Version::OfSlot {
        state.lanes[lane].versions[key] = state.slots[key].committed;
    }
    Next::Op
}

fn read_value(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let value = state.slots[key].value;
    let number = current(world, state, lane);
    state.record_mut(number).read[key] = value + 1;
    if world.rules.version == Version::OfBuffer {
        let version = if value == 0 { Timestamp::default() } else { state.record(value).ts };
        state.lanes[lane].versions[key] = version;
    }
    Next::Op
}

/// A read-only transaction on one key: no prepare, but it waits while PW != C.
fn read_settled(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    match state.slots[key].is_settled() {
        true => read(world, state, lane, key),
        false => Next::Wait,
    }
}

/// Writes the body of the intent, once the entry is free.
fn write_body(world: &World, state: &mut world::State, lane: usize, shard: usize) -> Next {
    if world.rules.reuse == Reuse::AfterClear && state.lanes[lane].to_free[shard] != 0 {
        return Next::Wait;
    }
    state.log[world.entry_of[lane]][shard].body = current(world, state, lane);
    Next::Op
}

/// Sets timestamp and state of the entry: one atomic word.
fn set_entry(world: &World, state: &mut world::State, lane: usize, shard: usize, to: log::State) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    state.log[world.entry_of[lane]][shard].set(ts, to);
    Next::Op
}

/// Read validation. A failed check of a key that the transaction also writes skips the key's write check, which is
/// conditional on it.
fn check_read(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let number = current(world, state, lane);
    let also_writes = world.transaction(number).writes.contains(&key);
    let (ts, version) = (state.record(number).ts, state.lanes[lane].versions[key]);
    if state.slots[key].check_read(version, ts, also_writes) {
        return Next::Op;
    }
    state.lanes[lane].failed = 1;
    let is_together = world.rules.prepare == Prepare::Together;
    match world.rules.write_check {
        _ if !also_writes || !is_together => Next::Op,
        WriteCheck::BeforeRaise => Next::Skip(2),
        WriteCheck::AfterRaise | WriteCheck::Strictly => Next::Skip(1),
    }
}

/// Write validation: raises PW, and checks PR by what the same CAS has returned.
fn check_write(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    let read_prepared = state.slots[key].read_prepared;
    let raised = state.slots[key].check_write(ts);
    let of = &mut state.lanes[lane];
    match raised {
        Raised::No => of.failed = 1,
        Raised::Yes { from, passed } => {
            of.replaced[key] = from;
            of.advanced |= 1 << key;
            let has_passed = match world.rules.write_check {
                WriteCheck::AfterRaise => passed,
                WriteCheck::Strictly => ts > read_prepared,
                WriteCheck::BeforeRaise => true,
            };
            of.passed |= u8::from(has_passed) << key;
            of.failed |= u8::from(!has_passed);
        }
    }
    Next::Op
}

/// Broken: checks PR by an op of its own.
fn check_readers(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    if state.slots[key].read_prepared <= ts {
        return Next::Op;
    }
    state.lanes[lane].failed = 1;
    Next::Skip(1)
}

/// Installs a value. A skipped install still is a commit.
fn install(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let number = current(world, state, lane);
    let ts = state.record(number).ts;
    state.slots[key].install(ts, number);
    Next::Op
}

/// Broken: changes C, and the address by the next op. Skips that if C is newer.
fn install_version(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    if state.slots[key].committed >= ts {
        return Next::Skip(1);
    }
    state.slots[key].raise(ts);
    Next::Op
}

/// Broken: changes the address alone, unless C is newer.
fn install_value(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let number = current(world, state, lane);
    if state.slots[key].committed <= state.record(number).ts {
        state.slots[key].value = number;
    }
    Next::Op
}

/// Waits for C >= the PW that the transaction replaced. A wait points to a smaller timestamp, so waits make no cycle.
fn await_replaced(state: &world::State, lane: usize, key: usize) -> Next {
    match state.slots[key].committed >= state.lanes[lane].replaced[key] {
        true => Next::Op,
        false => Next::Wait,
    }
}

/// Raises C from whatever it is: C > the replaced PW tells only that all up to that PW is settled.
fn raise(world: &World, state: &mut world::State, lane: usize, key: usize) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    let is_equal = state.slots[key].committed == state.lanes[lane].replaced[key];
    if world.rules.raise != Raise::OrderedIfEqual || is_equal {
        state.slots[key].raise(ts);
    }
    Next::Op
}

/// After a prepare without a response: goes on only if the intent is in the log.
fn find_own(world: &World, state: &world::State, lane: usize, key: usize) -> Next {
    let entry = &state.log[world.entry_of[lane]][world.shards[key]];
    match entry.ts == state.record(current(world, state, lane)).ts {
        true => Next::Op,
        false => Next::End,
    }
}

/// Frees the entry of a former transaction, by CAS on its word.
fn free(world: &World, state: &mut world::State, lane: usize, shard: usize) {
    let number = std::mem::take(&mut state.lanes[lane].to_free[shard]);
    let ts = state.record(number).ts;
    let entry = &mut state.log[world.entry_of[lane]][shard];
    if entry.ts == ts || world.rules.reuse == Reuse::BeforeClearByWrite {
        entry.free();
    }
}

/// Broken: frees the entry of the current transaction although other shards are not finished.
fn free_at_once(world: &World, state: &mut world::State, lane: usize, shard: usize) -> Next {
    let ts = state.record(current(world, state, lane)).ts;
    let entry = &mut state.log[world.entry_of[lane]][shard];
    if entry.ts == ts {
        entry.free();
    }
    Next::Op
}

/// The session with a shard breaks: the rest of the chain does not run, and the client learns nothing of it. The client
/// opens a new session, so that nothing of the former one runs any more. It repeats a commit, and aborts a prepare.
fn breaks(world: &World, state: &mut world::State, lane: usize, shard: usize) {
    state.broken += 1;
    if state.lanes[lane].phase == Phase::Commit {
        state.lanes[lane].over[shard] = 0;
        return;
    }
    let ops = thread(world, state, lane, shard).len() as u8;
    let of = &mut state.lanes[lane];
    (of.over[shard], of.failed) = (ops, 1);
    of.unknown |= 1 << shard;
    for (key, _) in world.shards.iter().enumerate().filter(|(_, at)| **at == shard) {
        of.advanced &= !(1 << key);
        of.passed &= !(1 << key);
        of.replaced[key] = Timestamp::default();
    }
    settle(world, state, lane);
}

/// Goes on to the next stage, phase or transaction while all threads are over.
fn settle(world: &World, state: &mut world::State, lane: usize) {
    while state.lanes[lane].phase != Phase::Over {
        let is_over = |number: usize| {
            usize::from(state.lanes[lane].over[number]) >= thread(world, state, lane, number).len()
        };
        if !(0..SHARDS).all(is_over) {
            return;
        }
        let number = current(world, state, lane);
        let program = world.program(number);
        let stage = usize::from(state.lanes[lane].stage) + 1;
        match state.lanes[lane].phase {
            Phase::Execute if world.transaction(number).is_single_reads => {
                state.record_mut(number).outcome = Outcome::Reported;
                finish(world, state, lane);
            }
            Phase::Execute => {
                state.record_mut(number).ts = timestamp(world, state, lane);
                go_on(state, lane, Phase::Prepare, 0);
            }
            Phase::Prepare if state.lanes[lane].failed == 1 => {
                state.record_mut(number).outcome = Outcome::Aborted;
                if world.rules.clear == Clear::BeforeRaise {
                    clear(world, state, lane);
                }
                go_on(state, lane, Phase::Abort, 0);
            }
            Phase::Prepare if stage < program.prepare.len() => go_on(state, lane, Phase::Prepare, stage),
            Phase::Prepare => {
                state.record_mut(number).outcome = match world.rules.success {
                    Success::AfterInstalls => Outcome::Decided,
                    Success::AtDecision => Outcome::Reported,
                };
                go_on(state, lane, Phase::Commit, 0);
            }
            Phase::Commit if stage < program.commit.len() => go_on(state, lane, Phase::Commit, stage),
            Phase::Commit => {
                state.record_mut(number).outcome = Outcome::Reported;
                finish(world, state, lane);
            }
            Phase::Abort if state.lanes[lane].dropped != 0 && !is_dropped_over(world, state, lane) => return,
            Phase::Abort => finish(world, state, lane),
            Phase::Over => return,
        }
    }
}

fn go_on(state: &mut world::State, lane: usize, phase: Phase, stage: usize) {
    let of = &mut state.lanes[lane];
    (of.phase, of.stage, of.over) = (phase, stage as u8, [0; SHARDS]);
}

/// Ends the current transaction. Its entries are freed off the path.
fn finish(world: &World, state: &mut world::State, lane: usize) {
    clear(world, state, lane);
    let of = state.lanes[lane];
    let finished = of.finished + 1;
    let is_last = usize::from(finished) == world.lanes[lane].transactions.len();
    let phase = if is_last { Phase::Over } else { Phase::Execute };
    state.lanes[lane] = State { finished, phase, to_free: of.to_free, ..State::default() };
}

/// Lets the client free all entries of the current transaction.
fn clear(world: &World, state: &mut world::State, lane: usize) {
    let number = current(world, state, lane);
    for &shard in &world.program(number).written {
        if state.log[world.entry_of[lane]][shard].ts == state.record(number).ts {
            state.lanes[lane].to_free[shard] = number;
        }
    }
}

/// Returns the timestamp of the current transaction: above all versions that it has read, and above all timestamps that
/// the id has had.
fn timestamp(world: &World, state: &world::State, lane: usize) -> Timestamp {
    let id = world.ids[world.lanes[lane].client];
    let number = current(world, state, lane);
    let local = world.transaction(number).clock;
    let versions = state.lanes[lane].versions.iter().filter(|version| **version != Timestamp::default());
    let above_versions = versions.map(|version| version.clock() + 1).max().unwrap_or(0);
    let given = state.history.iter().map(|record| record.ts);
    let given = given.filter(|ts| *ts != Timestamp::default() && ts.id() == id);
    let above_given = match world.rules.clock {
        Clock::AboveReservation => given.map(|ts| ts.clock() + 1).max().unwrap_or(0),
        Clock::Local => 0,
    };
    Timestamp::new(local.max(above_versions).max(above_given), id)
}
