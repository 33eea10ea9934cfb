//! The broken rules, each with a world that shows the error, and alternatives that are right.

use super::rules::{
    BackOut, Clear, Clock, Close, ClosedBy, Decided, Failure, FoundEntries, Ids, Install, Intent, Lease, Log,
    Order, Prepare, Raise, RaisedKeys, Redo, Reuse, Rules, Scan, Snapshot, Success, Unknown, Verdict,
    Version, WriteCheck,
};
use super::world::{World, each, lane, reads, successor, updates, writes};

/// Rules of which one is broken.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The broken rule, in words.
    pub name: &'static str,
    /// The world in which the error shows, with the broken rules.
    pub world: World,
    /// Words of the expected finding.
    pub finds: &'static str,
}

/// The decided rules.
const D: Rules = Rules::DECIDED;

const LOST: &str = "key a ends with the initial value, not with the value of T1";
const STUCK: &str = "is left with PW != C";
const HALF: &str = "key b ends with the value of T1, not with the initial value";
const DISAGREE: &str = "do not agree";

/// Returns all broken rules.
pub fn broken() -> Vec<Variant> {
    [aborts(), checks(), commits(), entries(), verdicts(), recoverers_abort()].concat()
}

/// Returns alternatives to the decided rules that are right.
pub fn right() -> Vec<(&'static str, Rules)> {
    vec![
        ("prepare in two rounds", Rules { prepare: Prepare::ReadsFirst, ..D }),
        ("execution reads the slot, then the value", Rules { snapshot: Snapshot::SlotFirst, ..D }),
        (
            "a recoverer closes a shard as soon as that shard is redone",
            Rules { close: Close::DonePerShard, ..D },
        ),
        (
            "a recoverer reads body and word of other entries in this order",
            Rules { scan: Scan::BodyFirst, ..D },
        ),
        (
            "a recoverer takes all entries of the id, if the lease is confirmed",
            Rules { found: FoundEntries::OfId, ..D },
        ),
    ]
}

fn variant(name: &'static str, rules: Rules, world: World, finds: &'static str) -> Variant {
    Variant { name, world: world.with(rules), finds }
}

/// T1 writes a blindly. T2 writes a and b, and aborts because of T3.
fn blind_writes() -> World {
    World::new(D, &[0, 1], each([writes("a").at(1), writes("ab").at(2), updates("b").at(3)]))
}

/// Two transactions of which each reads what the other writes.
fn write_skew() -> World {
    World::new(D, &[0, 1], each([reads("a").and_writes("b").at(1), reads("b").and_writes("a").at(2)]))
}

/// Two clients that write, or update, one key. The first one dies.
fn one_key(transaction: fn(&str) -> super::world::Transaction, clocks: [u8; 2]) -> World {
    World::new(D, &[0], each(clocks.map(|clock| transaction("a").at(clock)))).recovering(&[0])
}

/// T1 writes keys at two shards, and its client dies.
fn two_shards() -> World {
    World::new(D, &[0, 1], each([writes("ab").at(1), writes("a").at(2)])).recovering(&[0])
}

fn aborts() -> Vec<Variant> {
    let equal = World::new(D, &[0, 0], each([writes("ab").at(1), updates("ab").at(2)])).recovering(&[0]);
    vec![
        variant(
            "the published abort: C is raised at once, for keys that passed",
            Rules::PUBLISHED,
            blind_writes(),
            LOST,
        ),
        variant("an abort raises C at once", Rules { raise: Raise::AtOnce, ..D }, blind_writes(), LOST),
        variant(
            "an abort raises C only for keys that passed",
            Rules { raised_keys: RaisedKeys::Passed, ..D },
            write_skew(),
            STUCK,
        ),
        variant(
            "an abort raises C only from the PW that it has replaced",
            Rules { raise: Raise::OrderedIfEqual, ..D },
            equal,
            STUCK,
        ),
        variant("an abort does not raise C", Rules { raise: Raise::Never, ..D }, write_skew(), STUCK),
        variant(
            "an abort drops the requests of its prepare",
            Rules { failure: Failure::DropsRequests, ..D },
            World::new(D, &[0, 1], each([writes("ab").at(1), writes("b").at(2)])),
            STUCK,
        ),
        variant(
            "a prepare without a response is taken as one that never ran",
            Rules { unknown: Unknown::Forgets, ..D },
            World::new(D, &[0], each([writes("a")])).breaking(1),
            STUCK,
        ),
    ]
}

fn checks() -> Vec<Variant> {
    let two = || one_key(updates, [1, 2]);
    vec![
        variant(
            "the version of a read is that of the buffer",
            Rules { version: Version::OfBuffer, ..D },
            write_skew(),
            "cannot update key",
        ),
        variant(
            "execution reads the value, then the slot",
            Rules { snapshot: Snapshot::ValueFirst, ..D },
            two(),
            "committed and read the initial value of a",
        ),
        variant(
            "the check of a write wants TS > PR",
            Rules { write_check: WriteCheck::Strictly, ..D },
            World::new(D, &[0], each([updates("a")])),
            "cannot update key a",
        ),
        variant(
            "PR is checked before PW is raised",
            Rules { write_check: WriteCheck::BeforeRaise, ..D },
            World::new(D, &[0], each([writes("a").at(1), reads("a").at(2)])),
            "T2 committed and read the initial value of a",
        ),
        variant(
            "the clock is not above the id's reservation",
            Rules { clock: Clock::Local, ..D },
            World::new(D, &[0, 1], vec![lane(0, [writes("a")]), successor(1, 0, [writes("ab")])])
                .recovering(&[0, 1]),
            "key a ends with the value of T1",
        ),
        variant(
            "an id is taken over at once",
            Rules { ids: Ids::AtOnce, clock: Clock::Local, ..D },
            World::new(D, &[0], vec![lane(0, [writes("a")]), successor(1, 0, [writes("a")])])
                .recovering(&[0]),
            STUCK,
        ),
    ]
}

fn commits() -> Vec<Variant> {
    let read = || World::new(D, &[0], each([writes("a").at(1), updates("a").at(2)]));
    vec![
        variant(
            "C is installed before the address",
            Rules { install: Install::VersionFirst, ..D },
            read(),
            "committed and read the initial value of a",
        ),
        variant(
            "the address is installed before C",
            Rules { install: Install::ValueFirst, ..D },
            one_key(writes, [1, 2]),
            "key a ends with the value of T1, not with the value of T2",
        ),
        variant(
            "success is reported before the installs",
            Rules { success: Success::AtDecision, ..D },
            one_key(writes, [1, 2]),
            "has committed for its client, and aborted for its recoverer",
        ),
        variant(
            "DECIDED is written at the first shard only, beside the installs",
            Rules { decided: Decided::AtHomeBesideInstalls, ..D },
            two_shards(),
            HALF,
        ),
        variant(
            "DECIDED is written at the first shard only, and cleared in any order",
            Rules { decided: Decided::AtHomeFirst, ..D },
            two_shards(),
            "has committed for its client, and aborted for its recoverer",
        ),
        variant(
            "DECIDED is written after the installs",
            Rules { decided: Decided::AfterInstalls, ..D },
            two_shards(),
            HALF,
        ),
    ]
}

fn entries() -> Vec<Variant> {
    let reused = |next: &str| {
        let lanes = vec![lane(0, [writes("a").at(1), writes(next).at(2)])];
        World::new(D, &[0, 0], lanes).recovering(&[0])
    };
    vec![
        variant(
            "the intent comes after PW",
            Rules { intent: Intent::AfterWrites, ..D },
            one_key(writes, [2, 1]),
            STUCK,
        ),
        variant(
            "a client clears each shard as soon as that shard is finished",
            Rules { clear: Clear::PerShard, ..D },
            two_shards(),
            HALF,
        ),
        variant(
            "a client clears its entries before it raises C",
            Rules { clear: Clear::BeforeRaise, ..D },
            World::new(D, &[0, 0], each([writes("ab").at(1), updates("ab").at(2)])).recovering(&[0]),
            "T2 of client B waits for ever",
        ),
        variant(
            "the next intent is written before the entry is cleared",
            Rules { reuse: Reuse::BeforeClearByCas, ..D },
            reused("b"),
            STUCK,
        ),
        variant(
            "an unawaited clear overtakes the next intent",
            Rules { reuse: Reuse::BeforeClearByWrite, ..D },
            reused("a"),
            STUCK,
        ),
    ]
}

fn verdicts() -> Vec<Variant> {
    let two_recoverers = || two_shards().recovering(&[0, 0]);
    let taken_over = || {
        World::new(D, &[0, 1], vec![lane(0, [writes("ab")]), successor(1, 0, [writes("a")])])
            .recovering(&[0, 0])
    };
    vec![
        variant(
            "the verdict comes from the slots",
            Rules { decided: Decided::Never, verdict: Verdict::FromSlots, ..D },
            two_shards(),
            "has committed for its client, and aborted for its recoverer",
        ),
        variant(
            "the log is read before the fence",
            Rules { log: Log::BeforeFence, ..D },
            one_key(writes, [1, 2]),
            "an intent of T1 is left in the log",
        ),
        variant(
            "a late recoverer does not look whether the id has a new holder",
            Rules { lease: Lease::Unconfirmed, ..D },
            taken_over(),
            DISAGREE,
        ),
        variant(
            "a late recoverer looks for a new holder before it reads the log",
            Rules { lease: Lease::ConfirmedBeforeLog, ..D },
            taken_over(),
            DISAGREE,
        ),
        variant(
            "a late recoverer takes the next holder's entries as its client's",
            Rules { found: FoundEntries::OfId, lease: Lease::Unconfirmed, ..D },
            World::new(D, &[0], vec![lane(0, [writes("a")]), successor(1, 0, [writes("a")])])
                .recovering(&[0, 0]),
            "key a ends with the initial value, not with the value of T2",
        ),
        variant(
            "a recoverer erases DECIDED",
            Rules { close: Close::Erased, ..D },
            two_recoverers(),
            DISAGREE,
        ),
        variant(
            "a recoverer erases DECIDED, shard by shard",
            Rules { close: Close::ErasedPerShard, ..D },
            two_recoverers(),
            DISAGREE,
        ),
        variant(
            "a recoverer closes an entry by WRITE",
            Rules { closed_by: ClosedBy::Write, ..D },
            World::new(D, &[0], vec![lane(0, [writes("a")]), successor(1, 0, [writes("a")])])
                .recovering(&[0, 0, 1]),
            STUCK,
        ),
    ]
}

fn recoverers_abort() -> Vec<Variant> {
    let equal = || World::new(D, &[0, 0], each([writes("ab").at(1), updates("ab").at(2)])).recovering(&[0]);
    let lanes = || {
        let lanes =
            vec![lane(0, [writes("a").at(1)]), lane(0, [writes("a").at(3)]), lane(1, [writes("a").at(2)])];
        World::new(D, &[0], lanes).recovering(&[0, 1])
    };
    let back_out = |back_out| Rules { back_out, ..D };
    vec![
        variant(
            "a recoverer repeats installs also if C is newer",
            Rules { redo: Redo::Always, ..D },
            one_key(writes, [1, 2]),
            "key a ends with the value of T1, not with the value of T2",
        ),
        variant(
            "a recoverer raises C without waiting for smaller intents",
            back_out(BackOut::NoWait),
            one_key(writes, [2, 1]),
            "key a ends with the initial value, not with the value of T2",
        ),
        variant(
            "a recoverer raises C though PW < TS",
            back_out(BackOut::NoLook),
            one_key(updates, [2, 1]),
            STUCK,
        ),
        variant(
            "a recoverer raises C only if PW = TS",
            back_out(BackOut::OnlyOwnPrepare),
            equal(),
            "T2 of client B waits for ever",
        ),
        variant("a recoverer reads the log before the slot", back_out(BackOut::WaitFirst), lanes(), LOST),
        variant("a recoverer does not raise C", back_out(BackOut::Never), one_key(writes, [2, 1]), STUCK),
        variant(
            "a recoverer settles the larger timestamp first",
            Rules { order: Order::Descending, ..D },
            lanes(),
            "waits for ever",
        ),
    ]
}
