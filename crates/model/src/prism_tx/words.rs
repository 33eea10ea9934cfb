//! Schedules as sentences.
//!
//! Transactions are T1, T2 and so on; clients, keys and shards are letters and numbers. A timestamp is a clock and the
//! id of a client: `2B`.

use super::log;
use super::program::Op;
use super::slot::Timestamp;
use super::world::{Outcome, State, Step, World};
use super::{client, recoverer};

/// Name of a key.
pub(super) fn key_name(key: usize) -> char {
    char::from(b'a' + key as u8)
}

/// Name of a transaction.
pub(super) fn number_name(number: u8) -> String {
    format!("T{number}")
}

/// Letter of a client.
pub(super) fn letter(client: usize) -> char {
    char::from(b'A' + client as u8)
}

fn client_name(client: usize) -> String {
    format!("client {}", letter(client))
}

/// Name of a lane's current transaction, and of its client.
pub(super) fn lane_name(world: &World, state: &State, lane: usize) -> String {
    let number = client::current(world, state, lane);
    let last = world.first_of[lane] + world.lanes[lane].transactions.len() as u8 - 1;
    format!("{} of {}", number_name(number.min(last)), client_name(world.lanes[lane].client))
}

fn ts_name(ts: Timestamp) -> String {
    match ts == Timestamp::default() {
        true => "0".to_owned(),
        false => format!("{}{}", ts.clock(), letter(ts.id())),
    }
}

fn state_name(state: log::State) -> &'static str {
    match state {
        log::State::Free => "free",
        log::State::Active => "ACTIVE",
        log::State::Decided => "DECIDED",
        log::State::Done => "DONE",
    }
}

/// Describes a step in a sentence.
pub(super) fn words(world: &World, before: &State, step: Step, after: &State) -> String {
    match step {
        Step::Lane(lane, op) => {
            let who = lane_name(world, before, lane);
            let number = client::current(world, before, lane);
            let entry = world.entry_of[lane];
            let ts = before.record(number).ts;
            let then = match (before.record(number).outcome, after.record(number).outcome) {
                (same, now) if same == now => "",
                (_, Outcome::Aborted) => "; the transaction aborts",
                (_, Outcome::Decided) => "; all checks have passed: the transaction commits",
                (_, Outcome::Reported) => "; the client reports success",
                (_, Outcome::Open) => "",
            };
            format!("{who} {}{then}", op_words(before, op, after, ts, entry, Some((lane, number))))
        }
        Step::Breaks(lane, shard) => {
            let who = lane_name(world, before, lane);
            format!(
                "{who} gets no response from shard {shard}: its session broke after the next op of the chain"
            )
        }
        Step::Drops(lane) => {
            let who = lane_name(world, before, lane);
            format!("{who} aborts, and drops its requests without a response")
        }
        Step::Clears(lane, shard) => {
            let who = client_name(world.lanes[lane].client);
            let number = number_name(before.lanes[lane].to_free[shard]);
            let is_freed = before.log[world.entry_of[lane]][shard] != after.log[world.entry_of[lane]][shard];
            let how = if is_freed { "frees the entry" } else { "finds another word in the entry" };
            format!("{who}, done with {number}, {how} at shard {shard}")
        }
        Step::Recoverer(number, op) => {
            let of = &before.recoverers[number];
            let client = world.recovered[number];
            let lane = world.lanes_of(client).next().unwrap_or(0);
            let who = format!("recoverer {} of {}", number + 1, client_name(client));
            let next = &after.recoverers[number];
            let is_verdict = next.ts != of.ts && next.phase != recoverer::Phase::Over;
            let then = match (is_verdict, next.commits) {
                (false, _) if next.phase == recoverer::Phase::Over => "; the recovery is over".to_owned(),
                (false, _) => String::new(),
                (true, 0) => format!("; verdict on {}: abort", ts_name(next.ts)),
                (true, _) => format!("; verdict on {}: commit", ts_name(next.ts)),
            };
            let words = op_words(before, op, after, of.ts, world.entry_of[lane], None);
            let of = if of.ts == Timestamp::default() {
                String::new()
            } else {
                format!(", for {}", ts_name(of.ts))
            };
            format!("{who}{of} {words}{then}")
        }
        Step::Dies(number) => format!("recoverer {} dies", number + 1),
    }
}

/// Describes an op. `of` is the lane and the number of the transaction of a client.
fn op_words(
    before: &State,
    op: Op,
    after: &State,
    ts: Timestamp,
    entry: usize,
    of: Option<(usize, u8)>,
) -> String {
    let at = ts_name(ts);
    let has_failed = of.is_some_and(|(lane, _)| {
        before.lanes[lane].failed < after.lanes[lane].failed
            || of.is_some_and(|(_, number)| {
                before.record(number).outcome != Outcome::Aborted
                    && after.record(number).outcome == Outcome::Aborted
            }) && before.lanes[lane].failed == 0
    });
    let slot = |key: usize| {
        let slot = before.slots[key];
        let [write, read, committed] = [slot.write_prepared, slot.read_prepared, slot.committed].map(ts_name);
        format!("PW {write}, PR {read}, C {committed}")
    };
    let has_raised = |key: usize| before.slots[key] != after.slots[key];
    match op {
        Op::Begin => "begins, with the id of its predecessor".to_owned(),
        Op::Read(key) | Op::ReadSettled(key) => format!("reads key {} ({})", key_name(key), slot(key)),
        Op::ReadSlot(key) => format!("reads the slot of key {} ({})", key_name(key), slot(key)),
        Op::ReadValue(key) => format!("reads the value of key {}", key_name(key)),
        Op::WriteBody(shard) => format!("writes the body of its intent at shard {shard}"),
        Op::Activate(shard) => format!("sets its entry at shard {shard} to {at} ACTIVE"),
        Op::CheckRead(key) => {
            let result = if has_failed { "fails" } else { "passes" };
            format!("checks its read of key {} for {at} ({}): {result}", key_name(key), slot(key))
        }
        Op::CheckWrite(key) | Op::RaiseWrite(key) => {
            let raised = if has_raised(key) { "raises" } else { "cannot raise" };
            let result = if has_failed { "the check fails" } else { "the check passes" };
            format!("{raised} PW of key {} to {at} ({}): {result}", key_name(key), slot(key))
        }
        Op::CheckReaders(key) => format!("checks PR of key {} for {at} ({})", key_name(key), slot(key)),
        Op::Decide(shard) => format!("sets its entry at shard {shard} to {at} DECIDED"),
        Op::Install(key) => match has_raised(key) {
            true => format!("installs its value of key {} with C {at} ({})", key_name(key), slot(key)),
            false => format!("skips its install of key {} with C {at} ({})", key_name(key), slot(key)),
        },
        Op::InstallVersion(key) => format!("sets C of key {} to {at}, without the value", key_name(key)),
        Op::InstallValue(key) => format!("sets the value of key {}, without C", key_name(key)),
        Op::AwaitReplaced(key) => {
            format!("finds that the PW which it replaced in key {} is settled ({})", key_name(key), slot(key))
        }
        Op::Raise(key) | Op::BackOut(key) => match has_raised(key) {
            true => format!("raises C of key {} to {at} ({})", key_name(key), slot(key)),
            false => format!("leaves C of key {} ({})", key_name(key), slot(key)),
        },
        Op::Free(shard) => format!("frees its entry at shard {shard}"),
        Op::FindOwn(key) => format!("looks for its own intent at the shard of key {}", key_name(key)),
        Op::Fence(shard) => format!("fences the client at shard {shard}"),
        Op::ReadLog(shard) | Op::FenceAndReadLog(shard) => {
            let found = before.log[entry][shard];
            let word = match found.state {
                log::State::Free => "nothing".to_owned(),
                state => format!("{} {}", ts_name(found.ts), state_name(state)),
            };
            let fences = if matches!(op, Op::ReadLog(_)) { "" } else { "fences the client and " };
            format!("{fences}reads the log at shard {shard}: {word}")
        }
        Op::ConfirmLease => "reads the lease of the client's id".to_owned(),
        Op::Look(key) => format!("reads the slot of key {} ({})", key_name(key), slot(key)),
        Op::Await(key, _) | Op::AwaitWord(key, _) | Op::AwaitBody(key, _) => {
            format!("reads another entry: no smaller intent for key {} is open there", key_name(key))
        }
        Op::Redo(key) => match has_raised(key) {
            true => format!("installs the value of key {} again, with C {at} ({})", key_name(key), slot(key)),
            false => format!("finds C of key {} as high as {at} ({})", key_name(key), slot(key)),
        },
        Op::Close(shard) => {
            let [was, is] = [before, after].map(|state| state_name(state.log[entry][shard].state));
            format!("closes the entry at shard {shard}: from {was} to {is}")
        }
    }
}
