//! What must hold: in every state, and when no step is possible any more.
//!
//! Invariant: transactions are serializable in the order of their timestamps. One choice of outcomes explains
//! everything: reported success is a commit, a recoverer's verdict is the outcome, and all reads of committed
//! transactions and the final values are those of the serial execution.

use super::client;
use super::recoverer;
use super::rules::{Version, WriteCheck};
use super::slot::{Raised, Timestamp};
use super::words::{key_name, lane_name, number_name};
use super::world::{Outcome, Recovered, State, World};

/// Returns what is wrong with a state.
pub(super) fn wrong(world: &World, state: &State) -> Option<String> {
    let is_wrong = |key: &usize| state.slots[*key].committed > state.slots[*key].write_prepared;
    let key = (0..world.shards.len()).find(is_wrong)?;
    Some(format!("key {} has C > PW", key_name(key)))
}

/// Returns what is wrong with a state in which no step is possible.
pub(super) fn wrong_at_end(world: &World, state: &State) -> Option<String> {
    blocked(world, state)
        .or_else(|| unsettled(world, state))
        .or_else(|| left_over(world, state))
        .or_else(|| unexplained(world, state))
        .or_else(|| unusable(world, state))
}

/// A client or a recoverer that waits for ever.
fn blocked(world: &World, state: &State) -> Option<String> {
    let is_blocked = |lane: &usize| {
        !world.is_victim(world.lanes[*lane].client) && state.lanes[*lane].phase != client::Phase::Over
    };
    if let Some(lane) = (0..world.lanes.len()).find(is_blocked) {
        let phase = format!("{:?}", state.lanes[lane].phase).to_lowercase();
        return Some(format!("{} waits for ever, in its phase {phase}", lane_name(world, state, lane)));
    }
    let is_blocked = |number: &usize| {
        !matches!(state.recoverers[*number].phase, recoverer::Phase::Over | recoverer::Phase::Dead)
    };
    let number = (0..world.recovered.len()).find(is_blocked)?;
    Some(format!("recoverer {} waits for ever", number + 1))
}

/// A key with PW != C: no transaction that reads it can commit any more.
fn unsettled(world: &World, state: &State) -> Option<String> {
    let key = (0..world.shards.len()).find(|key| !state.slots[*key].is_settled())?;
    Some(format!("key {} is left with PW != C: no transaction that reads it commits any more", key_name(key)))
}

/// An entry that is still ACTIVE or DECIDED.
fn left_over(world: &World, state: &State) -> Option<String> {
    let shards = state.log[..world.lanes.len()].iter().flat_map(|of_lane| of_lane.iter().enumerate());
    let (shard, entry) = shards.into_iter().find(|(_, entry)| entry.is_unsettled())?;
    Some(format!("an intent of {} is left in the log of shard {shard}", number_name(entry.body)))
}

/// No outcome of the undecided transactions explains what was reported, read and stored.
fn unexplained(world: &World, state: &State) -> Option<String> {
    let numbers: Vec<u8> = (1..=world.transactions.len() as u8).collect();
    let mut free = Vec::new();
    let mut committed = 0_u32;
    for &number in &numbers {
        let record = state.record(number);
        let known = match record.outcome {
            _ if world.transaction(number).is_single_reads || record.ts == Timestamp::default() => {
                Some(false)
            }
            Outcome::Reported => Some(true),
            Outcome::Aborted => Some(false),
            Outcome::Open | Outcome::Decided => None,
        };
        let said = match record.verdict {
            Recovered::No => None,
            Recovered::Committed => Some(true),
            Recovered::Aborted => Some(false),
            Recovered::Both => return Some(format!("recoverers of {} do not agree", number_name(number))),
        };
        if let (Some(known), Some(said)) = (known, said)
            && known != said
        {
            let [client, recoverer] = [known, said].map(|is| if is { "committed" } else { "aborted" });
            let of = number_name(number);
            return Some(format!("{of} has {client} for its client, and {recoverer} for its recoverer"));
        }
        match known.or(said) {
            Some(is_committed) => committed |= u32::from(is_committed) << number,
            None => free.push(number),
        }
    }
    let mut first = None;
    for choice in 0..1_u32 << free.len() {
        let chosen = free.iter().enumerate().map(|(bit, number)| (choice >> bit & 1) << number).sum::<u32>();
        for is_reversed in [false, true] {
            match not_serial(world, state, committed | chosen, is_reversed) {
                None => return None,
                Some(what) => first = first.or(Some(what)),
            }
        }
    }
    first
}

/// Returns how reads and final values differ from the serial execution of these transactions by timestamps. Equal
/// timestamps, which only broken rules give, may have either order.
fn not_serial(world: &World, state: &State, committed: u32, is_reversed: bool) -> Option<String> {
    let mut order: Vec<u8> =
        (1..=world.transactions.len() as u8).filter(|number| committed >> number & 1 == 1).collect();
    if is_reversed {
        order.reverse();
    }
    order.sort_by_key(|number| state.record(*number).ts);
    let mut values = [0_u8; super::world::KEYS];
    for &number in &order {
        for &key in &world.transaction(number).reads {
            let read = state.record(number).read[key] - 1;
            if read != values[key] {
                let [read, expected] = [read, values[key]].map(value_name);
                let (of, key) = (number_name(number), key_name(key));
                return Some(format!(
                    "{of} committed and read {read} of {key}; by timestamps, it reads {expected}"
                ));
            }
        }
        world.transaction(number).writes.iter().for_each(|key| values[*key] = number);
    }
    for (key, expected) in values.iter().enumerate().take(world.shards.len()) {
        let value = state.slots[key].value;
        if value != *expected {
            let [value, expected] = [value, *expected].map(value_name);
            return Some(format!("key {} ends with {value}, not with {expected}", key_name(key)));
        }
    }
    half_seen(world, state, &order)
}

/// Single reads of one client must not see a part of a commit, and then not another part of it.
fn half_seen(world: &World, state: &State, order: &[u8]) -> Option<String> {
    let is_single = |number: &u8| world.transaction(*number).is_single_reads;
    let place =
        |value: u8| if value == 0 { Some(0) } else { Some(order.iter().position(|of| *of == value)? + 1) };
    for number in (1..=world.transactions.len() as u8).filter(is_single) {
        let keys = &world.transaction(number).reads;
        let values: Vec<u8> =
            keys.iter().map_while(|key| state.record(number).read[*key].checked_sub(1)).collect();
        let places: Option<Vec<usize>> = values.iter().map(|value| place(*value)).collect();
        let Some(places) = places else {
            return Some(format!("{} read a value that was never committed", number_name(number)));
        };
        for (later, earlier) in
            (0..places.len()).flat_map(|later| (0..later).map(move |earlier| (later, earlier)))
        {
            let is_half = |at: usize, of: u8| {
                let writes = &world.transaction(of).writes;
                places[later] <= at
                    && at < places[earlier]
                    && writes.contains(&keys[later])
                    && writes.contains(&keys[earlier])
            };
            if let Some(&of) = order.iter().enumerate().find(|(at, of)| is_half(*at, **of)).map(|(_, of)| of)
            {
                return Some(format!("{} saw half of {}", number_name(number), number_name(of)));
            }
        }
    }
    None
}

fn value_name(value: u8) -> String {
    if value == 0 { "the initial value".to_owned() } else { format!("the value of {}", number_name(value)) }
}

/// A key that a transaction which runs alone now cannot read and write.
fn unusable(world: &World, state: &State) -> Option<String> {
    let highest = state.history.iter().map(|record| record.ts).max().unwrap_or_default();
    let ts = Timestamp::new(highest.clock() + 1, 0);
    let fails = |key: &usize| {
        let mut slot = state.slots[*key];
        let version = match world.rules.version {
            Version::OfSlot => slot.committed,
            Version::OfBuffer if slot.value == 0 => Timestamp::default(),
            Version::OfBuffer => state.record(slot.value).ts,
        };
        let reads = slot.check_read(version, ts, true);
        let is_strict = world.rules.write_check == WriteCheck::Strictly;
        let is_read = is_strict && slot.read_prepared >= ts;
        !reads || is_read || !matches!(slot.check_write(ts), Raised::Yes { passed: true, .. })
    };
    let key = (0..world.shards.len()).find(fails)?;
    Some(format!("a transaction that runs alone at the end cannot update key {}", key_name(key)))
}
