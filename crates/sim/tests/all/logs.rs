//! Logs of simulated nodes: what was acknowledged survives a crash of the machine, whatever the disk loses of what was
//! not synced. The simulator also finds a service that installs a value before its record is stored.

#[allow(dead_code, reason = "tests of the node use more of it")]
#[path = "../../../node/tests/support/ledger.rs"]
mod ledger;

use farside_node::log::pairing::{Believed, Paired, PairedState, Pairing, believed};
use farside_node::log::{
    Appended, Disk, Log, LogOptions, Next, Op, RecoverError, SyncPolicy, find, folder_of, recover,
};
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::service::{Records, address};
use farside_remote::{Fabric, FabricError, Key, NodeId};
use farside_sim::clock::ProcessClock;
use farside_sim::disk::SimDisk;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::network::{Network, Wire};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::random::Random;
use farside_sim::world::{MICROS, MILLIS, SECONDS, World};
use ledger::{Ledger, words};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

// The state machine alone.

fn store() -> Store {
    Store {
        name: "s".into(),
        kind: "ledger".into(),
        parameters: String::new(),
        quota: 4 << 20,
        incarnation: 7,
        region: 1,
        secret: 5,
        table_at: 0,
        table_len: 1 << 20,
        wide: false,
        created: 0,
        id: 9,
        former: None,
        membership: None,
    }
}

fn one(record: u64) -> Records {
    let mut records = Records::default();
    records.append(&record.to_le_bytes());
    records
}

/// Performs the writer's operations until it waits, at this time.
fn write_all(log: &mut Log, disk: &mut SimDisk, now: Duration) {
    while let Next::Do(op) = log.next(now) {
        let done = op.perform(disk);
        log.done(done);
    }
}

fn records_in(disk: &mut SimDisk, options: LogOptions) -> (Log, Vec<u64>) {
    try_records_in(disk, options).expect("the log is valid")
}

fn try_records_in(disk: &mut SimDisk, options: LogOptions) -> Result<(Log, Vec<u64>), RecoverError> {
    let found = find(disk).expect("the disk has a valid log");
    assert_eq!(found.len(), 1);
    let mut records = Vec::new();
    let recovered = recover(disk, &found[0], options, |record| {
        records.extend(words(record));
        Ok(())
    });
    Ok((recovered?.log, records))
}

const AT: Duration = Duration::from_secs(100);

#[test]
fn a_full_disk_fails_the_writers_that_wait_and_loses_nothing_that_counts() {
    for sync in [SyncPolicy::Each, SyncPolicy::Interval] {
        let options = LogOptions { sync, ..LogOptions::default() };
        let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
        let stored = log.append(&one(1)).expect("accepted");
        write_all(&mut log, &mut disk, AT);
        disk.set_full(true);
        let second = log.append(&one(2)).expect("the log does not know yet that the disk is full");
        write_all(&mut log, &mut disk, AT);
        assert!(disk.counts().full > 0);
        let third = log.append(&one(3));
        match sync {
            SyncPolicy::Each => {
                assert_eq!((stored, second), (Appended::At(1), Appended::At(2)));
                assert_eq!(log.outcome(1), Some(Ok(())));
                let refusal = log.outcome(2).expect("settled").expect_err("not stored");
                assert!(refusal.contains("nothing was done") && refusal.contains("free space"), "{refusal}");
                let refusal = third.expect_err("the call of the second record has not ended");
                assert!(refusal.contains("nothing was done") && refusal.contains("free space"), "{refusal}");
                log.note_end(2);
                log.append(&one(3)).expect("it is tried");
                write_all(&mut log, &mut disk, AT);
                assert!(log.outcome(3).expect("settled").is_err());
                log.note_end(3);
            }
            _ => {
                assert_eq!((stored, second), (Appended::Stored, Appended::Stored));
                let refusal = third.expect_err("the disk is full");
                assert!(refusal.contains("nothing was done") && refusal.contains("free space"), "{refusal}");
            }
        }
        disk.set_full(false);
        write_all(&mut log, &mut disk, AT + Duration::from_secs(1));
        log.append(&one(4)).expect("the disk has space again");
        write_all(&mut log, &mut disk, AT + Duration::from_secs(1));
        let expected: &[u64] = if sync == SyncPolicy::Each { &[1, 4] } else { &[1, 2, 4] };
        assert_eq!(records_in(&mut disk, options).1, expected, "{sync:?}");
        if sync == SyncPolicy::Each {
            disk.set_full(true);
            // The disk takes the first of two records of one write.
            (5..7).for_each(|record| assert!(log.append(&one(record)).is_ok()));
            write_all(&mut log, &mut disk, AT + Duration::from_secs(1));
            assert_eq!(records_in(&mut disk, options).1, [1, 4], "what failed does not come back");
            assert_eq!(log.take_notes().len(), 3, "it failed, went on, and failed");
            continue;
        }
        let notes = log.take_notes();
        assert_eq!(notes.len(), 2, "one when it failed, one when it went on: {notes:?}");
    }
}

#[test]
fn a_log_is_synced_an_interval_after_a_record_was_written() {
    let sync_interval = Duration::from_millis(10);
    let options = LogOptions { sync: SyncPolicy::Interval, sync_interval, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    for round in 0..3 {
        let at = AT + round * Duration::from_secs(1);
        assert_eq!(log.append(&one(1)), Ok(Appended::Stored));
        write_all(&mut log, &mut disk, at);
        let before = disk.counts().syncs;
        write_all(&mut log, &mut disk, at + sync_interval - Duration::from_nanos(1));
        assert_eq!(disk.counts().syncs, before, "round {round}: it is too early");
        write_all(&mut log, &mut disk, at + sync_interval);
        assert_eq!(disk.counts().syncs, before + 1, "round {round}");
    }
}

#[test]
fn a_memory_is_believed_only_if_the_machine_has_not_crashed_since() {
    let pairing = Pairing { number: 7, former: None, whole_from: 0, incarnation: 1 };
    let memory = Paired { number: 7, state: PairedState::Kept };
    assert_eq!(believed(&pairing, true, Some(&memory), true), Ok(Believed::Memory));
    assert_eq!(believed(&pairing, true, Some(&memory), false), Ok(Believed::Log));
}

/// A record may depend on those before it: a delete that finds a value which is being put answers that it existed.
#[test]
fn a_record_that_was_appended_while_an_earlier_one_failed_fails_too() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    write_all(&mut log, &mut disk, AT);
    log.append(&one(1)).expect("accepted");
    let Next::Do(write) = log.next(AT) else { panic!("the log writes the record") };
    disk.set_full(true);
    let failed = write.perform(&mut disk);
    log.append(&one(2)).expect("the log does not know yet");
    log.done(failed);
    disk.set_full(false);
    write_all(&mut log, &mut disk, AT);
    for position in [1, 2] {
        assert!(log.outcome(position).expect("settled").is_err(), "{position}");
    }
    for ended in [1, 2] {
        log.append(&one(3)).expect_err("a call that failed has not ended");
        log.note_end(ended);
    }
    log.append(&one(3)).expect("both have ended");
    write_all(&mut log, &mut disk, AT);
    assert_eq!(log.outcome(3), Some(Ok(())));
    assert_eq!(records_in(&mut disk, options).1, [3]);
}

/// A full disk takes the first records of a write. Until they are durably cut off, a restart may replay them.
#[test]
fn a_record_whose_writer_was_told_that_it_failed_is_never_replayed() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut replayed, mut failed, mut uncut) = (0, 0, 0);
    for (steps, seed) in (0..4).flat_map(|steps| (0..16).map(move |seed| (steps, seed))) {
        let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
        log.append(&one(1)).expect("accepted");
        write_all(&mut log, &mut disk, AT);
        (2..10).for_each(|record| assert!(log.append(&one(record)).is_ok()));
        let Next::Do(write) = log.next(AT) else { panic!("the log writes the records") };
        disk.set_full(true);
        let done = write.perform(&mut disk);
        log.done(done);
        // Cuts and syncs need no space.
        for _ in 0..steps {
            if let Next::Do(op) = log.next(AT) {
                let done = op.perform(&mut disk);
                log.done(done);
            }
        }
        let is_failed = log.outcome(2).is_some_and(|outcome| outcome.is_err());
        disk.crash(&Random::new(seed));
        let records = records_in(&mut disk, options).1;
        assert!(records.starts_with(&[1]), "{steps} steps, seed {seed}: {records:?}");
        let is_replayed = records.contains(&2);
        assert!(!is_failed || !is_replayed, "a record that failed comes back: {steps} steps, seed {seed}");
        (replayed, failed) = (replayed + u64::from(is_replayed), failed + u64::from(is_failed));
        uncut += disk.counts().uncut;
    }
    let seen = [replayed, failed, uncut];
    assert!(seen.iter().all(|&times| times > 3), "replayed, failed, uncut: {seen:?}");
}

/// A checkpoint has the effects of records that are being written. If the write fails, the records must not come back
/// with the checkpoint.
#[test]
fn what_failed_does_not_come_back_with_a_checkpoint() {
    let options = LogOptions { sync: SyncPolicy::Each, checkpoint_min: 1, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    log.append(&one(1)).expect("accepted");
    write_all(&mut log, &mut disk, AT);
    assert!(!log.wants_checkpoint(), "the next generation comes first");
    write_all(&mut log, &mut disk, AT);
    assert!(log.wants_checkpoint());
    log.append(&one(2)).expect("accepted");
    log.collect(&one(2), true);
    disk.set_full(true);
    while let Next::Do(op) = log.next(AT) {
        // The log's own file gets no space, that of the checkpoint does.
        disk.set_full(!op.concerns_node());
        let done = op.perform(&mut disk);
        log.done(done);
    }
    disk.set_full(false);
    assert!(log.outcome(2).expect("settled").is_err());
    log.note_end(2);
    log.append(&one(3)).expect("the disk has space again");
    for _ in 0..3 {
        write_all(&mut log, &mut disk, AT);
        if log.wants_checkpoint() {
            log.collect(&one(3), true);
        }
    }
    assert!(!records_in(&mut disk, options).1.contains(&2), "the record that failed");
}

#[test]
fn a_failed_sync_stops_the_log_until_a_restart() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    log.append(&one(1)).expect("accepted");
    write_all(&mut log, &mut disk, AT);
    disk.set_fails_to_sync(true);
    log.append(&one(2)).expect("accepted");
    write_all(&mut log, &mut disk, AT);
    let reason = log.outcome(2).expect("settled").expect_err("nobody knows");
    assert!(reason.contains("is unknown"), "{reason}");
    assert_eq!(FabricError::Refused(reason).ran(), Ran::Unknown, "a restart may replay the record");
    let refusal = log.append(&one(3)).expect_err("the log is broken");
    assert!(refusal.contains("restarted") && refusal.contains("nothing was done"), "{refusal}");
    assert_eq!(FabricError::Refused(refusal).ran(), Ran::No);
}

/// The operating system reports a lost write to one sync only, which may be the checkpoint's.
#[test]
fn a_sync_of_the_log_that_fails_for_a_checkpoint_stops_the_log_too() {
    for steps in [0, 1] {
        let options = LogOptions { sync: SyncPolicy::Interval, checkpoint_min: 1, ..LogOptions::default() };
        let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
        log.append(&one(1)).expect("accepted");
        write_all(&mut log, &mut disk, AT);
        assert!(!log.wants_checkpoint(), "the next generation comes first");
        if steps == 1 {
            write_all(&mut log, &mut disk, AT);
            log.append(&one(2)).expect("accepted");
            assert!(log.wants_checkpoint());
            log.collect(&one(2), true);
        }
        let file = format!("{}/log.{:08}", folder_of(&store()), 1 + steps);
        while let Next::Do(op) = log.next(AT) {
            let is_of_log = op == Op::Sync(file.clone());
            disk.set_fails_to_sync(is_of_log);
            let done = op.perform(&mut disk);
            log.done(done);
            if is_of_log {
                break;
            }
        }
        disk.set_fails_to_sync(false);
        let refusal = log.append(&one(3)).expect_err("the log is broken");
        assert!(refusal.contains("restarted"), "{refusal}");
        assert_eq!(log.file_to_sync(), None, "nothing counts on a later sync");
    }
}

#[test]
fn a_checkpoint_that_the_log_needs_is_tried_until_it_takes_effect() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    log.want_checkpoint();
    write_all(&mut log, &mut disk, AT);
    let mut at = AT;
    for attempt in 0..4 {
        assert!(!log.wants_checkpoint(), "the next generation comes first");
        disk.set_full(attempt < 3);
        write_all(&mut log, &mut disk, at);
        if attempt < 3 {
            assert!(!log.wants_checkpoint() && log.next(at) != Next::Wait(None), "the writer comes back");
            let Next::Wait(Some(next)) = log.next(at) else { panic!("it waits for the next attempt") };
            assert!(next > at, "it pauses");
            at = next;
            disk.set_full(false);
            write_all(&mut log, &mut disk, at);
        }
    }
    assert!(log.wants_checkpoint());
    log.collect(&one(1), true);
    write_all(&mut log, &mut disk, at);
    assert_eq!(log.take_notes().len(), 1, "the failure is reported once");
    assert_eq!(records_in(&mut disk, options).1, [1]);
    assert!(!log.wants_checkpoint() && log.next(at) == Next::Wait(None));
}

#[test]
fn a_queue_that_outgrows_the_disk_refuses_more() {
    let mut log = Log::new(store(), LogOptions::default(), 3);
    let mut records = Records::default();
    records.append(&vec![7; 1 << 20]);
    let refusal = (0..64).find_map(|_| log.append(&records).err()).expect("the queue is bounded");
    assert!(refusal.contains("behind") && refusal.contains("retry later"), "{refusal}");
}

#[test]
fn a_failure_whose_outcome_is_forgotten_is_not_taken_for_a_success() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    write_all(&mut log, &mut disk, AT);
    let mut appended = 0;
    for _ in 0..1500 {
        for is_full in [true, false] {
            disk.set_full(is_full);
            log.append(&one(appended)).expect("accepted");
            appended += 1;
            write_all(&mut log, &mut disk, AT);
            log.note_end(appended);
        }
    }
    let reason = |position| log.outcome(position).expect("settled").expect_err("it failed");
    assert!(reason(1).contains("forgotten") && reason(appended - 1).contains("nothing was done"));
    let ran = |position| FabricError::Refused(reason(position)).ran();
    assert_eq!((ran(1), ran(appended - 1)), (Ran::Unknown, Ran::No));
    assert_eq!(log.outcome(appended), Some(Ok(())));
}

#[test]
fn a_crash_at_any_moment_keeps_the_records_that_were_settled_in_their_order() {
    let (mut lost, mut torn, mut checkpoints, mut refused) = (0, 0, 0, 0);
    for seed in 0..600 {
        let random = Random::new(seed);
        let sync = [SyncPolicy::Each, SyncPolicy::Interval, SyncPolicy::Never][random.below(3) as usize];
        let options = LogOptions { sync, checkpoint_min: 400, ..LogOptions::default() };
        let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, random.bits()));
        let (mut appended, mut settled, mut now) = (0, 0, AT);
        for life in 0..3 {
            for _ in 0..random.below(120) {
                match random.below(3) {
                    0 => {
                        appended += 1;
                        log.append(&one(appended)).expect("the disk has space");
                    }
                    1 if log.wants_checkpoint() => {
                        // The state after all records so far is the last of them.
                        log.collect(&one(appended), true);
                        checkpoints += 1;
                    }
                    _ => {
                        now += Duration::from_millis(random.below(400));
                        if let Next::Do(op) = log.next(now) {
                            let done = op.perform(&mut disk);
                            log.done(done);
                        }
                    }
                }
            }
            if sync == SyncPolicy::Each {
                // Each append has a position; positions begin anew with each process.
                settled = settled.max(appended - unsettled(&log));
            }
            disk.crash(&random);
            lost += disk.counts().lost;
            torn += disk.counts().torn;
            if find(&mut disk).expect("a crash damages no log").is_empty() {
                assert!(settled == 0 && life == 0, "seed {seed}: a log with records is there");
                break;
            }
            let (next, records) = match try_records_in(&mut disk, options) {
                Ok(read) => read,
                // Nobody knows what was on the disk, so the operator decides.
                Err(RecoverError::Damaged(..)) if sync == SyncPolicy::Never => {
                    refused += 1;
                    break;
                }
                Err(error) => panic!("seed {seed}, {sync:?}: {error}"),
            };
            log = next;
            // The first record may be a checkpoint, which may have the effects of records that follow it.
            let last = records.iter().max().copied().unwrap_or(0);
            assert!((settled..=appended).contains(&last), "seed {seed}: {last} of {settled}..={appended}");
            let of_log = if records.is_sorted() { &records[..] } else { &records[1..] };
            assert!(of_log.windows(2).all(|pair| pair[1] <= pair[0] + 1), "seed {seed}: {records:?}");
            let first = of_log.first().is_none_or(|&first| first <= records[0] + 1);
            assert!(first, "seed {seed}: records after the checkpoint are missing: {records:?}");
            assert!(of_log.last().is_none_or(|&end| end == last), "seed {seed}: {records:?}");
            appended = last;
        }
    }
    let seen = [lost, torn, checkpoints, refused];
    assert!(seen.iter().all(|&times| times > 3), "lost, torn, checkpoints, refused: {seen:?}");
}

/// Number of appends of this process that are not settled.
fn unsettled(log: &Log) -> u64 {
    log.outstanding()
}

#[test]
fn what_a_crash_leaves_is_cut_and_what_was_stored_and_is_damaged_is_refused() {
    let options = LogOptions { sync: SyncPolicy::Each, ..LogOptions::default() };
    let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, 3));
    for record in 1..=4 {
        log.append(&one(record)).expect("accepted");
        write_all(&mut log, &mut disk, AT);
    }
    let name = format!("{}/log.00000001", folder_of(&store()));
    let size = disk.size(&name).expect("the log's file");
    disk.damage(&name, size - 1);
    assert_eq!(records_in(&mut disk, options).1, [1, 2, 3], "the last record may be a torn one");
    disk.damage(&name, size - 2 * 36 - 1);
    let found = find(&mut disk).expect("the head is valid");
    let refused = recover(&mut disk, &found[0], options, |_| Ok(())).expect_err("record 2 was stored");
    let refused = refused.to_string();
    assert!(refused.contains("record 2") && refused.contains("truncate"), "{refused}");
    disk.damage(&name, 3);
    assert_eq!(find(&mut disk).expect("nothing was ever stored, as far as the head says").len(), 0);
    assert_eq!(disk.files(&folder_of(&store())).expect("a folder"), Vec::<String>::new());
}

/// Size of the record of a value of 1 MiB, with the longest key and a header.
const LONG: usize = (1 << 20) + 4096 + 64;

/// A record of this size, which differs from every other one in all its parts.
fn long(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(LONG / 8)
}

#[test]
fn long_records_survive_crashes_whole_and_in_order_or_not_at_all() {
    let options = LogOptions { sync: SyncPolicy::Each, checkpoint_min: 24 << 20, ..LogOptions::default() };
    let (mut lost, mut torn, mut refused, mut checkpoints) = (0, 0, 0, 0);
    for seed in 0..6 {
        let random = Random::new(seed);
        let (mut disk, mut log) = (SimDisk::default(), Log::new(store(), options, random.bits()));
        write_all(&mut log, &mut disk, AT);
        let (mut appended, mut settled) = (0, 0);
        for _ in 0..3 {
            for _ in 0..random.below(30) {
                if log.wants_checkpoint() {
                    let mut all = Records::default();
                    (1..=appended).for_each(|number| all.append(&long(number)));
                    log.collect(&all, true);
                    checkpoints += 1;
                }
                for _ in 0..random.below(18) {
                    let mut records = Records::default();
                    records.append(&long(appended + 1));
                    match log.append(&records) {
                        Ok(_) => appended += 1,
                        Err(reason) => {
                            assert!(reason.contains("behind"), "{reason}");
                            refused += 1;
                            break;
                        }
                    }
                }
                for _ in 0..random.below(3) {
                    if let Next::Do(op) = log.next(AT) {
                        let done = op.perform(&mut disk);
                        log.done(done);
                    }
                }
                if appended > 45 {
                    break;
                }
            }
            settled = settled.max(appended - unsettled(&log));
            disk.crash(&random);
            let found = find(&mut disk).expect("a crash damages no log");
            let mut records = BTreeMap::new();
            let recovered = recover(&mut disk, &found[0], options, |record| {
                let number = words(&record[..8])[0];
                assert!(record == long(number), "seed {seed}: record {number} is whole");
                assert!(records.len() as u64 + 1 >= number, "seed {seed}: record {number} comes in order");
                records.insert(number, ());
                Ok(())
            });
            log = recovered.unwrap_or_else(|error| panic!("seed {seed}: {error}")).log;
            let last = records.len() as u64;
            assert!((settled..=appended).contains(&last), "seed {seed}: {last} of {settled}..={appended}");
            (appended, settled) = (last, last);
        }
        lost += disk.counts().lost;
        torn += disk.counts().torn;
    }
    let seen = [lost, torn, refused, checkpoints];
    assert!(seen.iter().all(|&times| times > 0), "lost, torn, refused, checkpoints: {seen:?}");
}

/// For each mutant of logs, at least one of the cases above must fail.
#[cfg(farside_mutants)]
#[test]
fn every_mutant_of_logs_is_killed() {
    use farside_remote::mutant::Mutant;
    use std::panic::catch_unwind;
    let cases: [(&str, fn()); 8] = [
        ("failed write", a_record_whose_writer_was_told_that_it_failed_is_never_replayed),
        ("appended meanwhile", a_record_that_was_appended_while_an_earlier_one_failed_fails_too),
        ("checkpoint", what_failed_does_not_come_back_with_a_checkpoint),
        ("full disk", a_full_disk_fails_the_writers_that_wait_and_loses_nothing_that_counts),
        ("crashes", a_crash_at_any_moment_keeps_the_records_that_were_settled_in_their_order),
        ("damage", what_a_crash_leaves_is_cut_and_what_was_stored_and_is_damaged_is_refused),
        ("interval", a_log_is_synced_an_interval_after_a_record_was_written),
        ("boot", a_memory_is_believed_only_if_the_machine_has_not_crashed_since),
    ];
    for &mutant in farside_node::log::mutants::ALL {
        Mutant::switch(Some(mutant));
        let killers: Vec<&str> =
            cases.iter().filter(|(_, case)| catch_unwind(case).is_err()).map(|&(name, _)| name).collect();
        Mutant::switch(None);
        println!("{mutant:?}: killed by {}", killers.join(", "));
        assert!(!killers.is_empty(), "{mutant:?} lives");
    }
}

// Nodes.

const NODE: NodeId = NodeId(0);
const CLIENTS: u64 = 3;
/// Number of keys that the clients use.
const KEYS: u64 = 3;

struct Home {
    world: World,
    network: Network,
    node: Node,
}

impl Home {
    fn new(seed: u64, kind: Ledger, sync: SyncPolicy) -> Home {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 500 }, &struck);
        let at = network.add_host();
        let log = Some(LogOptions { sync, checkpoint_min: 2000, ..LogOptions::default() });
        let options = Options { is_reliable: true, silence: 20 * MILLIS, log, ..Options::default() };
        let kinds: Kinds = Rc::new(move || vec![Box::new(kind) as Box<_>]);
        let node = Node::start(&world, &network, at, NODE, kinds, options);
        Home { world, network, node }
    }

    async fn create(&self) {
        let (name, kind, parameters) = ("s".to_owned(), "ledger".to_owned(), String::new());
        let created = self.node.answer(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }).await;
        assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
    }

    async fn connect(&self, client: u64, incarnation: u64) -> Option<(Rc<Endpoint>, Key)> {
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(client as u32));
        let identity = Identity { identity: client.into(), incarnation, silence: 20 * MILLIS };
        let (host, process) = (self.network.add_host(), self.world.start_process());
        let engine = client as u32 % self.node.options().engines;
        let endpoint = Endpoint::open(&self.node, engine, process, host, &clock, identity).await.ok()?;
        let ask = serde_json::to_vec(&Ask::OpenStore { name: "s".to_owned() }).expect("plain data");
        let mut answer = Vec::new();
        endpoint.call(NODE, ServiceId::NODE, &ask, &mut answer).await.ok()?;
        match serde_json::from_slice::<Answer>(&answer) {
            Ok(Answer::Store(store)) => Some((endpoint, store.extent().key)),
            other => panic!("{other:?}"),
        }
    }
}

/// The stamps and values that clients have seen, put or read, by key: a later crash must not take them back.
type Seen = Rc<RefCell<BTreeMap<u64, (u64, u64)>>>;

/// Clients put and read while the machine of the node crashes several times. Returns the first violation: a register
/// that went back behind what a client had seen before. Also returns how often a crash lost bytes, and how often a
/// process ended while it recovered the log.
fn crashes(seed: u64, kind: Ledger, sync: SyncPolicy) -> (Result<(), String>, [u64; 2]) {
    let home = Rc::new(Home::new(seed, kind, sync));
    let seen = Seen::default();
    let wrong = Rc::new(RefCell::new(Ok(())));
    let (theirs, seen_there, found) = (Rc::clone(&home), Rc::clone(&seen), Rc::clone(&wrong));
    let done = home.world.complete(60 * SECONDS, async move {
        theirs.create().await;
        for incarnation in 1..=4 {
            for client in 0..CLIENTS {
                let (home, seen, found) = (Rc::clone(&theirs), Rc::clone(&seen_there), Rc::clone(&found));
                let process = theirs.world.start_process();
                theirs.world.spawn(process, async move {
                    let Some((endpoint, key)) = home.connect(client, incarnation).await else { return };
                    let (mut request, mut answer) = (Vec::new(), Vec::new());
                    for number in 0.. {
                        let of = home.world.random().below(KEYS);
                        let ask = match home.world.random().one_in(2) {
                            true => ledger::Ask::Get(of),
                            false => ledger::Ask::Put(of, incarnation << 32 | client << 24 | number),
                        };
                        let before = seen.borrow().get(&of).copied().unwrap_or_default();
                        let service = address(key, &mut request);
                        ask.encode(&mut request);
                        if endpoint.call(NODE, service, &request, &mut answer).await.is_err() {
                            return;
                        }
                        let (stamp, value) = match (ask, &words(&answer)[..]) {
                            (ledger::Ask::Get(_), &[stamp, value]) => (stamp, value),
                            (ledger::Ask::Put(_, value), &[stamp]) => (stamp, value),
                            other => panic!("{other:?}"),
                        };
                        if matches!(ask, ledger::Ask::Get(_)) && (stamp, value) < before {
                            *found.borrow_mut() = Err(format!("key {of}: {stamp} after {before:?}"));
                        }
                        let mut seen = seen.borrow_mut();
                        let last = seen.entry(of).or_default();
                        *last = (*last).max((stamp, value));
                    }
                });
            }
            theirs.world.sleep(MILLIS + theirs.world.random().below(3 * MILLIS)).await;
            theirs.node.lose_memory();
            // Connections of the clients end with the node's process; they give up by themselves.
            theirs.world.sleep(80 * MILLIS).await;
            while !theirs.node.is_served() {
                theirs.world.sleep(MILLIS).await;
            }
        }
        let (endpoint, key) = theirs.connect(99, 1).await.expect("the last node serves the store");
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let last_seen = seen_there.borrow().clone();
        for (of, last) in last_seen {
            let service = address(key, &mut request);
            ledger::Ask::Get(of).encode(&mut request);
            endpoint.call(NODE, service, &request, &mut answer).await.expect("served");
            let found_words = words(&answer);
            if (found_words[0], found_words[1]) < last {
                *found.borrow_mut() = Err(format!("key {of}: {found_words:?} after {last:?} at the end"));
            }
        }
    });
    home.world.end();
    done.unwrap_or_else(|| panic!("seed {seed}: the run ends"));
    let counts = home.node.disk().borrow().counts();
    let wrong = wrong.borrow().clone();
    (wrong, [counts.lost + counts.torn, home.node.ended_starts()])
}

/// The node's only store has no memory left beside it, so the next one waits for its space.
#[test]
fn a_store_that_was_dropped_makes_room_although_no_store_is_left() {
    let home = Rc::new(Home::new(1, Ledger::default(), SyncPolicy::Each));
    let theirs = Rc::clone(&home);
    let done = home.world.complete(60 * SECONDS, async move {
        for _ in 0..5 {
            theirs.create().await;
            let dropped = theirs.node.answer(Ask::DropStore { name: "s".to_owned() }).await;
            assert!(matches!(dropped, Ok(Answer::Done)), "{dropped:?}");
        }
    });
    home.world.end();
    done.expect("each drop ends");
    assert_eq!(home.node.disk().borrow().names(), Vec::<String>::new(), "the logs are removed");
}

#[test]
fn nothing_that_a_client_saw_is_lost_with_the_memory_if_each_record_is_synced() {
    let [mut struck, mut ended] = [0, 0];
    for seed in 0..60 {
        let (result, [lost, starts]) = crashes(seed, Ledger::default(), SyncPolicy::Each);
        result.unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        (struck, ended) = (struck + lost, ended + starts);
    }
    assert!(struck > 10, "crashes lost unsynced bytes {struck} times");
    assert!(ended > 10, "{ended} starts ended in the middle");
}

#[test]
fn a_value_that_is_installed_before_its_record_is_stored_is_found() {
    let kind = Ledger { installs_early: true };
    let found = (0..60).find(|&seed| crashes(seed, kind, SyncPolicy::Each).0.is_err());
    assert!(found.is_some(), "a client reads a value that a crash takes back");
    println!("found by seed {found:?}");
}
