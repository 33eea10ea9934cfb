//! The family of ordered indexes, by other systems that stand in for an index: whole trials are good, the faults strike
//! within them, and broken systems are found.

use farside_sim::fault::Fault;
use farside_sim::random::Random;
use farside_systems::index::{Keys, STRING_MAX};
use farside_trial::index::{keys, stand_ins};
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};

/// Seeds of each system in every run of the tests.
const SEEDS: u64 = 40;

/// Asserts that the trials of a system are good, and that each of these faults strikes often. Returns the sums of the
/// counters.
fn trials_are_good(system: System, carriers: &[Carrier], struck: &[Fault]) -> Vec<(&'static str, u64)> {
    let mut strikes: Vec<u64> = struck.iter().map(|_| 0).collect();
    let (mut operations, mut scans, mut sums, mut bad) = (0, 0, Vec::new(), Vec::new());
    for seed in 0..SEEDS {
        let carrier = carriers[seed as usize % carriers.len()];
        let judged = judge(&Setup { carrier: Some(carrier), ..Setup::of(system) }, seed, true);
        if judged.verdict != Verdict::Good {
            bad.push(format!("{}: {judged}", carrier.name()));
        }
        let Some(report) = judged.report else { continue };
        let mut lines = Vec::new();
        report.record.write(&mut lines).expect("writing to a Vec cannot fail");
        let lines = String::from_utf8(lines).expect("JSON is text");
        scans += lines.lines().filter(|line| line.contains("\"ok\"") && line.contains("\"scan\"")).count();
        operations += report.record.operations();
        struck.iter().zip(&mut strikes).for_each(|(fault, count)| *count += report.struck.of(*fault));
        sums.resize(report.counters.len().max(sums.len()), ("", 0));
        let counted = report.counters.iter().zip(&mut sums);
        counted.for_each(|((name, count), sum)| *sum = (*name, sum.1 + count));
    }
    println!("{}: {operations} operations, {scans} scans, {struck:?}: {strikes:?}, {sums:?}", system.name());
    assert!(bad.is_empty(), "{} of {SEEDS}: {}", bad.len(), bad.join("\n\n"));
    // Otherwise the trials have tested nothing.
    assert!(operations > 3_000 && scans > 300, "{operations} operations, {scans} scans");
    assert!(strikes.iter().all(|count| *count > 10), "{struck:?}: {strikes:?}");
    sums
}

#[test]
fn trials_of_a_tree_on_classic_verbs_are_good() {
    let [tree, _] = stand_ins();
    let struck = [
        Fault::Delay,
        Fault::Reset,
        Fault::Partition,
        Fault::ClientDeath,
        Fault::ClientPause,
        Fault::NodePause,
        Fault::NodeRestart,
        Fault::NodeLoss,
        Fault::Revocation,
    ];
    trials_are_good(tree, &[Carrier::Verbs], &struck);
}

#[test]
fn trials_of_a_table_on_several_nodes_are_good() {
    let [_, table] = stand_ins();
    let struck = [
        Fault::Loss,
        Fault::Reset,
        Fault::OneWayPartition,
        Fault::ClientDeath,
        Fault::ClientPause,
        Fault::NodePause,
        Fault::NodeRestart,
        Fault::NodeLoss,
        Fault::Revocation,
        Fault::Exhaustion,
    ];
    let sums = trials_are_good(table, &[Carrier::Direct, Carrier::Datagrams, Carrier::Connections], &struck);
    assert!(matches!(sums[..], [("visited", visited)] if visited > 1_000), "{sums:?}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let digest = |system| judge(&Setup::of(system), 3, true).report.map(|report| report.record.digest());
    for system in stand_ins() {
        assert_eq!(digest(system), digest(system), "{}", system.name());
    }
}

#[cfg(farside_mutants)]
#[test]
fn the_mutants_of_the_tree_are_exposed_by_their_seeds() {
    let [tree, _] = stand_ins();
    let recorded = include_str!("../../kills/btree-index.txt");
    super::killed::by_their_seeds("btree-index.txt", recorded, &tree.mutants(), |seed| {
        let judged = judge(&Setup::of(tree), seed, true);
        if judged.verdict == Verdict::Violated { judged.reasons } else { Vec::new() }
    });
}

/// Number of leading bytes that two keys share.
fn shared(one: &[u8], other: &[u8]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[test]
fn keys_are_sorted_and_share_prefixes_of_every_length() {
    let mut lengths = [[0; 32]; 2];
    let mut prefixes = 0;
    for seed in 0..200 {
        for (at, kind) in [Keys::Numbers, Keys::Strings].into_iter().enumerate() {
            let count = [1, 9, 72, 300][seed as usize % 4];
            let drawn = keys::drawn(&Random::new(seed), kind, count);
            assert_eq!(drawn.len(), count);
            assert!(drawn.is_sorted_by(|one, next| one < next), "{drawn:x?}");
            assert!(drawn.iter().all(|key| kind.check(key).is_ok()), "{drawn:x?}");
            for pair in drawn.windows(2) {
                lengths[at][shared(&pair[0], &pair[1]).min(31)] += 1;
                prefixes += u32::from(pair[1].starts_with(&pair[0]));
            }
        }
    }
    assert!(lengths[0][..8].iter().all(|count| *count > 100), "numbers: {:?}", lengths[0]);
    assert!(lengths[1].iter().all(|count| *count > 10), "strings: {:?}", lengths[1]);
    assert!(prefixes > 1_000, "{prefixes} strings are prefixes of the next one");
}

#[test]
fn the_key_after_another_one_is_the_next_possible_one() {
    let number = |number: u64| number.to_be_bytes().to_vec();
    let of_number = |before| keys::after(Keys::Numbers, Some(&number(before)));
    assert_eq!(keys::after(Keys::Numbers, None), Some(number(0)));
    assert_eq!(of_number(0), Some(number(1)));
    assert_eq!(of_number(0x12ff), Some(number(0x1300)));
    assert_eq!(of_number(u64::MAX), None);
    let of_string = |before: &[u8]| keys::after(Keys::Strings, Some(before));
    assert_eq!(keys::after(Keys::Strings, None), Some(vec![1]));
    assert_eq!(of_string(b"ab"), Some(b"ab\x01".to_vec()));
    let mut longest = vec![b'a'; STRING_MAX];
    longest[STRING_MAX - 3..].fill(0xff);
    let next = [&longest[..STRING_MAX - 4], b"b"].concat();
    assert_eq!(of_string(&longest), Some(next));
    assert_eq!(of_string(&[0xff; STRING_MAX]), None);
}
