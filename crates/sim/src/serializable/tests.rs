//! Tests of the checker of transactions: seeded histories of each anomaly, small histories that are compared with a
//! search through all orders, and workloads on stores with known guarantees.

use super::facts::Facts;
use super::workload::Workload;
use super::{Kind, Report, Transactions, Versions, shrink};
use crate::checker::Checker as _;
use crate::history::Moment;
use crate::history::transaction::{Ask, History, Operation, Outcome, Seen, Step};
use crate::random::Random;
use std::collections::BTreeMap;

const BY_TIMESTAMP: Transactions = Transactions { versions: Versions::OfTransactions, real_time: false };
const STRICT: Transactions = Transactions { real_time: true, ..BY_TIMESTAMP };

type Did = (Step, Seen);

fn found(key: u64, tag: u64, version: u64) -> Did {
    (Step::Read(key), Seen::Value { tag, version, amount: 0 })
}

fn absent(key: u64, version: u64) -> Did {
    (Step::Read(key), Seen::Absent { version })
}

fn list(key: u64, tags: &[u64]) -> Did {
    (Step::Read(key), Seen::List(tags.to_vec()))
}

fn wrote(key: u64, tag: u64, version: u64) -> Did {
    (Step::Write { key, tag }, Seen::Wrote { version, amount: 0 })
}

fn deleted(key: u64, version: u64) -> Did {
    (Step::Delete(key), Seen::Wrote { version, amount: 0 })
}

fn appended(key: u64, tag: u64) -> Did {
    (Step::Append { key, tag }, Seen::Appended)
}

/// A committed transaction, from the event of its call to that of its return.
fn committed(span: [u64; 2], did: &[Did]) -> Operation {
    let (steps, seen) = did.iter().cloned().unzip();
    let [called, returned] = span.map(|index| Moment { index, ns: 10 * index });
    let (ask, outcome) = (Ask(steps), Outcome::Committed(seen));
    Operation { client: called.index as u32, key: 0, ask, called, returned: Some(returned), outcome }
}

fn aborted(span: [u64; 2], did: &[Did]) -> Operation {
    Operation { outcome: Outcome::Failed, ..committed(span, did) }
}

/// A transaction without a return.
fn unknown(called: u64, did: &[Did]) -> Operation {
    Operation { outcome: Outcome::Unknown, returned: None, ..committed([called, called], did) }
}

/// All transactions at the same time.
fn together(did: &[&[Did]]) -> Vec<Operation> {
    let count = did.len() as u64;
    did.iter().zip(0..).map(|(did, at)| committed([at, count + at], did)).collect()
}

/// One transaction after the other.
fn in_turn(did: &[&[Did]]) -> Vec<Operation> {
    did.iter().zip(0..).map(|(did, at)| committed([2 * at, 2 * at + 1], did)).collect()
}

#[track_caller]
fn good(checker: Transactions, operations: &[Operation]) {
    assert_eq!(checker.report(operations), Report::default());
}

/// Checks that the first anomaly is of this kind, and that its window shows it on its own.
#[track_caller]
fn bad(checker: Transactions, operations: &[Operation], kind: Kind) -> String {
    let report = checker.report(operations);
    assert_eq!(report.undecided, [""; 0]);
    let first = report.anomalies.first().expect("an anomaly");
    assert_eq!(first.kind, kind, "{report:?}");
    let (_, window) = shrink::window(&checker, operations);
    let of_window = checker.report(&window.operations);
    assert_eq!(of_window.anomalies.first().map(|anomaly| anomaly.kind), Some(kind), "{window:?}");
    assert!(window.offender < window.operations.len() && window.of == operations.len());
    first.to_string()
}

#[test]
fn histories_of_one_serial_order_are_good() {
    good(STRICT, &[]);
    let registers: [&[Did]; 5] = [
        &[absent(1, 0), wrote(1, 10, 5), wrote(2, 20, 5)],
        &[found(1, 10, 5), wrote(1, 11, 7), found(1, 11, 7)],
        &[found(2, 20, 5), found(1, 11, 7), deleted(2, 8)],
        &[absent(2, 8), absent(2, 8)],
        &[absent(2, 9), wrote(2, 21, 10)],
    ];
    good(STRICT, &in_turn(&registers));
    good(BY_TIMESTAMP, &together(&registers));
    let lists: [&[Did]; 4] = [
        &[list(1, &[]), appended(1, 10), appended(1, 11), list(1, &[10, 11])],
        &[list(1, &[10, 11]), appended(2, 20)],
        &[appended(1, 12), list(1, &[10, 11, 12])],
        &[list(2, &[20]), list(1, &[10, 11, 12])],
    ];
    good(STRICT, &in_turn(&lists));
    good(BY_TIMESTAMP, &together(&lists));
}

#[test]
fn a_write_cycle_is_found() {
    let lists: [&[Did]; 3] = [
        &[appended(1, 10), appended(2, 20)],
        &[appended(1, 11), appended(2, 21)],
        &[list(1, &[10, 11]), list(2, &[21, 20])],
    ];
    bad(BY_TIMESTAMP, &together(&lists), Kind::WriteCycle);
    let by_key = Transactions { versions: Versions::OfKeys, ..BY_TIMESTAMP };
    let registers: [&[Did]; 2] = [&[wrote(1, 10, 1), wrote(2, 20, 2)], &[wrote(1, 11, 2), wrote(2, 21, 1)]];
    bad(by_key, &together(&registers), Kind::WriteCycle);
    bad(BY_TIMESTAMP, &together(&registers), Kind::Versions);
    let interleaved: [&[Did]; 3] =
        [&[appended(1, 10), appended(1, 11)], &[appended(1, 12)], &[list(1, &[10, 12, 11])]];
    let report = BY_TIMESTAMP.report(&together(&interleaved));
    assert!(report.anomalies.iter().any(|anomaly| anomaly.kind == Kind::WriteCycle), "{report:?}");
}

#[test]
fn a_read_of_an_aborted_write_is_found() {
    let write = [wrote(1, 10, 1)];
    let read = committed([2, 3], &[found(1, 10, 1)]);
    bad(BY_TIMESTAMP, &[aborted([0, 1], &write), read.clone()], Kind::AbortedRead);
    // A transaction of unknown outcome that was read is committed.
    good(STRICT, &[unknown(0, &write), read]);
    let read = committed([2, 3], &[list(1, &[10])]);
    bad(BY_TIMESTAMP, &[aborted([0, 1], &[appended(1, 10)]), read.clone()], Kind::AbortedRead);
    good(STRICT, &[unknown(0, &[appended(1, 10)]), read]);
}

#[test]
fn a_read_of_an_intermediate_write_is_found() {
    let registers: [&[Did]; 2] = [&[wrote(1, 10, 1), wrote(1, 11, 1)], &[found(1, 10, 1)]];
    bad(BY_TIMESTAMP, &in_turn(&registers), Kind::IntermediateRead);
    let removed: [&[Did]; 2] = [&[wrote(1, 10, 1), deleted(1, 1)], &[found(1, 10, 1)]];
    bad(BY_TIMESTAMP, &in_turn(&removed), Kind::IntermediateRead);
    let lists: [&[Did]; 3] = [&[appended(1, 10), appended(1, 11)], &[list(1, &[10])], &[list(1, &[10, 11])]];
    bad(BY_TIMESTAMP, &in_turn(&lists), Kind::IntermediateRead);
}

#[test]
fn circular_information_flow_is_found() {
    let registers: [&[Did]; 2] = [&[wrote(1, 10, 1), found(2, 20, 2)], &[wrote(2, 20, 2), found(1, 10, 1)]];
    bad(BY_TIMESTAMP, &together(&registers), Kind::CircularInformation);
    let lists: [&[Did]; 2] = [&[appended(1, 10), list(2, &[20])], &[appended(2, 20), list(1, &[10])]];
    bad(BY_TIMESTAMP, &together(&lists), Kind::CircularInformation);
}

#[test]
fn a_lost_update_is_found() {
    let registers: [&[Did]; 3] =
        [&[wrote(1, 10, 1)], &[found(1, 10, 1), wrote(1, 11, 2)], &[found(1, 10, 1), wrote(1, 12, 3)]];
    let told = bad(BY_TIMESTAMP, &together(&registers), Kind::LostUpdate);
    assert_eq!(
        told,
        "G-single (lost update): client 2 at 20 ns read key 1 before client 1 at 10 ns wrote it; client 2 at 20 ns \
         wrote key 1 after client 1 at 10 ns"
    );
    let lists: [&[Did]; 3] =
        [&[list(1, &[]), appended(1, 10)], &[list(1, &[]), appended(1, 11)], &[list(1, &[10, 11])]];
    bad(BY_TIMESTAMP, &together(&lists), Kind::LostUpdate);
    // The write of an aborted transaction has raised the version, and a committed write was skipped: the next update
    // read the value before it.
    let skipped: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[absent(1, 0), wrote(1, 12, 3)]];
    bad(BY_TIMESTAMP, &together(&skipped), Kind::LostUpdate);
}

#[test]
fn read_skew_is_found() {
    let registers: [&[Did]; 2] = [&[wrote(1, 10, 1), wrote(2, 20, 1)], &[found(1, 10, 1), absent(2, 0)]];
    bad(BY_TIMESTAMP, &in_turn(&registers), Kind::ReadSkew);
    // Half of a commit whose client has died.
    let half = vec![unknown(0, registers[0]), committed([1, 2], registers[1])];
    bad(BY_TIMESTAMP, &half, Kind::ReadSkew);
    let by_key = Transactions { versions: Versions::OfKeys, ..BY_TIMESTAMP };
    good(by_key, &half);
    let lists: [&[Did]; 2] = [&[appended(1, 10), appended(2, 20)], &[list(1, &[10]), list(2, &[])]];
    bad(BY_TIMESTAMP, &in_turn(&lists), Kind::ReadSkew);
    bad(by_key, &[unknown(0, lists[0]), committed([1, 2], lists[1])], Kind::ReadSkew);
}

#[test]
fn write_skew_is_found() {
    let registers: [&[Did]; 2] = [&[absent(1, 0), wrote(2, 20, 1)], &[absent(2, 0), wrote(1, 10, 2)]];
    bad(BY_TIMESTAMP, &together(&registers), Kind::WriteSkew);
    let deletes: [&[Did]; 4] = [
        &[wrote(1, 10, 1), wrote(2, 20, 1)],
        &[found(1, 10, 1), deleted(2, 2)],
        &[found(2, 20, 1), deleted(1, 3)],
        &[absent(1, 3), absent(2, 2)],
    ];
    bad(BY_TIMESTAMP, &together(&deletes), Kind::WriteSkew);
    let lists: [&[Did]; 2] = [&[list(1, &[]), appended(2, 20)], &[list(2, &[]), appended(1, 10)]];
    bad(BY_TIMESTAMP, &together(&lists), Kind::WriteSkew);
}

#[test]
fn longer_anti_dependency_cycles_are_found() {
    let fork: [&[Did]; 4] = [
        &[wrote(1, 10, 1)],
        &[wrote(2, 20, 2)],
        &[found(1, 10, 1), absent(2, 0)],
        &[absent(1, 0), found(2, 20, 2)],
    ];
    bad(BY_TIMESTAMP, &together(&fork), Kind::LongFork);
    let three: [&[Did]; 3] = [
        &[absent(1, 0), wrote(2, 20, 1)],
        &[absent(2, 0), wrote(3, 30, 2)],
        &[absent(3, 0), wrote(1, 10, 3)],
    ];
    bad(BY_TIMESTAMP, &together(&three), Kind::AntiDependencyCycle);
}

#[test]
fn reads_that_nothing_explains_are_found() {
    let bad_one = |did: &[Did], kind| bad(BY_TIMESTAMP, &[committed([0, 1], did)], kind);
    bad_one(&[found(1, 10, 1)], Kind::Garbage);
    bad_one(&[list(1, &[10])], Kind::Garbage);
    bad_one(&[wrote(1, 10, 1), absent(1, 0)], Kind::Internal);
    bad_one(&[deleted(1, 1), found(1, 10, 1)], Kind::Internal);
    bad_one(&[appended(1, 10), list(1, &[])], Kind::Internal);
    bad_one(&[list(1, &[]), appended(1, 10), list(1, &[10, 10])], Kind::Internal);
    let changed: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[absent(1, 0), found(1, 10, 1)]];
    bad(BY_TIMESTAMP, &together(&changed), Kind::Internal);
    let other: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[found(1, 10, 2)]];
    bad(BY_TIMESTAMP, &together(&other), Kind::Versions);
    let same: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[wrote(1, 11, 1)]];
    bad(BY_TIMESTAMP, &together(&same), Kind::Versions);
    let orders: [&[Did]; 4] =
        [&[appended(1, 10)], &[appended(1, 11)], &[list(1, &[10, 11])], &[list(1, &[11])]];
    bad(BY_TIMESTAMP, &together(&orders), Kind::IncompatibleOrder);
    let twice: [&[Did]; 2] = [&[appended(1, 10)], &[list(1, &[10, 10])]];
    bad(BY_TIMESTAMP, &together(&twice), Kind::IncompatibleOrder);
    let partly: [&[Did]; 3] =
        [&[appended(1, 10), appended(1, 11)], &[appended(1, 12)], &[list(1, &[10, 12])]];
    bad(BY_TIMESTAMP, &together(&partly), Kind::IncompatibleOrder);
}

#[test]
fn the_order_in_time_counts_only_if_it_is_asked_for() {
    let stale: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[absent(1, 0)]];
    good(BY_TIMESTAMP, &in_turn(&stale));
    let told = bad(STRICT, &in_turn(&stale), Kind::ReadSkew);
    assert_eq!(
        told,
        "G-single (read skew), in real time: client 2 at 20 ns read key 1 before client 0 at 0 ns wrote it; client 2 \
         at 20 ns was called after client 0 at 0 ns had returned"
    );
    good(STRICT, &together(&stale));
    let back: [&[Did]; 2] = [&[wrote(1, 10, 2)], &[wrote(1, 11, 1)]];
    good(BY_TIMESTAMP, &in_turn(&back));
    bad(STRICT, &in_turn(&back), Kind::WriteCycle);
    // A transaction of unknown outcome is not before anything in time, but it is after what had returned.
    good(STRICT, &[unknown(0, stale[0]), committed([1, 2], stale[1]), committed([3, 4], &[found(1, 10, 1)])]);
    let late = [committed([0, 1], &[found(1, 10, 1)]), unknown(2, stale[0])];
    good(BY_TIMESTAMP, &late);
    bad(STRICT, &late, Kind::CircularInformation);
}

#[test]
fn a_history_with_ambiguous_tags_is_undecided() {
    let twice: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[wrote(1, 10, 2)]];
    assert_eq!(BY_TIMESTAMP.report(&together(&twice)).undecided.len(), 1);
    let both: [&[Did]; 2] = [&[wrote(1, 10, 1)], &[appended(1, 11)]];
    assert_eq!(BY_TIMESTAMP.report(&together(&both)).undecided.len(), 1);
}

#[test]
fn a_window_has_the_cycle_alone() {
    let mut operations: Vec<Operation> = (0..50)
        .map(|at| {
            committed([2 * at, 2 * at + 1], &[wrote(9, 1_000 + at, 100 + at), wrote(7, 2_000 + at, 100 + at)])
        })
        .collect();
    let skew: [&[Did]; 2] =
        [&[absent(1, 0), found(9, 1_049, 149), wrote(2, 20, 201)], &[absent(2, 0), wrote(1, 10, 202)]];
    operations.extend([committed([100, 110], skew[0]), committed([101, 111], skew[1])]);
    operations.extend((0..50).map(|at| committed([200 + 2 * at, 201 + 2 * at], &[found(9, 1_049, 149)])));
    let (_, window) = shrink::window(&BY_TIMESTAMP, &operations);
    let asks: Vec<String> = window.operations.iter().map(|of| of.ask.to_string()).collect();
    assert_eq!(asks, ["read 1, write 2 #20", "read 2, write 1 #10"]);
    assert_eq!((window.offender, window.of), (1, 102));
    let drawn = crate::picture::text(&window);
    assert!(drawn.contains("G2-item (write skew)") && drawn.contains("2 of 102 operations shown"), "{drawn}");
}

mod brute {
    //! Judges a small history by trying all orders. Shares no code with the checker.

    use super::*;

    /// State of a key in a serial execution.
    #[derive(Clone, PartialEq)]
    enum Now {
        Register(Option<u64>, u64),
        List(Vec<u64>),
    }

    type State = BTreeMap<u64, Now>;

    pub(super) fn is_serializable(checker: Transactions, operations: &[Operation]) -> bool {
        let read: Vec<(u64, u64, Option<u64>)> = operations.iter().flat_map(tags_read).collect();
        let of_tag = |operation: &Operation| -> Option<Option<u64>> {
            let written = operation.ask.0.iter().filter_map(|step| match *step {
                Step::Write { key, tag } | Step::Append { key, tag } => Some((key, tag)),
                Step::Read(_) | Step::Delete(_) => None,
            });
            let mut shown = written
                .filter_map(|(key, tag)| read.iter().find(|of| (of.0, of.1) == (key, tag)).map(|of| of.2));
            shown.next()
        };
        let mut committed = Vec::new();
        for operation in operations {
            match operation.outcome {
                Outcome::Committed(_) => committed.push((operation, None)),
                Outcome::Unknown => committed.extend(of_tag(operation).map(|version| (operation, version))),
                Outcome::Failed => {}
            }
        }
        let mut deletes: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (operation, shown) in &committed {
            for (at, step) in operation.ask.0.iter().enumerate() {
                let last = operation
                    .ask
                    .0
                    .iter()
                    .rposition(|of| of.key() == step.key() && !matches!(of, Step::Read(_)));
                if matches!(step, Step::Delete(_)) && last == Some(at) {
                    deletes.entry(step.key()).or_default().push(version_of(operation, *shown, at));
                }
            }
        }
        extend(checker, &committed, &deletes, &mut vec![false; committed.len()], &State::new())
    }

    /// Version of the newest delete that a read of an absent key may have seen; 0 if there is none.
    fn newest_delete(deletes: &BTreeMap<u64, Vec<u64>>, key: u64, at: u64) -> u64 {
        deletes.get(&key).into_iter().flatten().copied().filter(|version| *version <= at).max().unwrap_or(0)
    }

    /// Version that a step wrote.
    fn version_of(operation: &Operation, shown: Option<u64>, at: usize) -> u64 {
        match &operation.outcome {
            Outcome::Committed(seen) => match seen[at] {
                Seen::Wrote { version, .. } => version,
                _ => 0,
            },
            _ => shown.unwrap_or(0),
        }
    }

    fn tags_read(operation: &Operation) -> Vec<(u64, u64, Option<u64>)> {
        let Outcome::Committed(seen) = &operation.outcome else { return Vec::new() };
        let of = |(step, seen): (&Step, &Seen)| match seen {
            Seen::Value { tag, version, .. } => vec![(step.key(), *tag, Some(*version))],
            Seen::List(tags) => tags.iter().map(|tag| (step.key(), *tag, None)).collect(),
            _ => Vec::new(),
        };
        operation.ask.0.iter().zip(seen).flat_map(of).collect()
    }

    /// Whether the transactions that are not placed can follow in some order.
    fn extend(
        checker: Transactions,
        operations: &[(&Operation, Option<u64>)],
        deletes: &BTreeMap<u64, Vec<u64>>,
        is_placed: &mut Vec<bool>,
        state: &State,
    ) -> bool {
        let left: Vec<usize> = (0..operations.len()).filter(|at| !is_placed[*at]).collect();
        if left.is_empty() {
            return true;
        }
        for &at in &left {
            let called = operations[at].0.called.index;
            let is_late = |other: &usize| {
                let of = operations[*other].0;
                let is_known = matches!(of.outcome, Outcome::Committed(_));
                is_known && of.returned.is_some_and(|returned| returned.index < called)
            };
            if checker.real_time && left.iter().any(is_late) {
                continue;
            }
            let Some(after) = execute(operations[at].0, operations[at].1, deletes, state) else { continue };
            is_placed[at] = true;
            let is_good = extend(checker, operations, deletes, is_placed, &after);
            is_placed[at] = false;
            if is_good {
                return true;
            }
        }
        false
    }

    /// Runs a transaction. Returns the state after it, or `None` if it cannot have seen this.
    fn execute(
        operation: &Operation,
        shown: Option<u64>,
        deletes: &BTreeMap<u64, Vec<u64>>,
        state: &State,
    ) -> Option<State> {
        let mut after = state.clone();
        let mut own_versions: Vec<u64> = Vec::new();
        let nothing = Vec::new();
        let seen = match &operation.outcome {
            Outcome::Committed(seen) => seen,
            _ => &nothing,
        };
        let mut written: BTreeMap<u64, u64> = BTreeMap::new();
        for (at, step) in operation.ask.0.iter().enumerate() {
            let key = step.key();
            let is_own = written.contains_key(&key);
            let version = version_of(operation, shown, at);
            match (step, seen.get(at)) {
                (Step::Write { tag, .. }, _) => {
                    written.insert(key, version);
                    after.insert(key, Now::Register(Some(*tag), version));
                }
                (Step::Delete(_), _) => {
                    written.insert(key, version);
                    after.insert(key, Now::Register(None, version));
                }
                (Step::Append { tag, .. }, _) => match after.entry(key).or_insert(Now::List(Vec::new())) {
                    Now::List(tags) => tags.push(*tag),
                    Now::Register(..) => return None,
                },
                (Step::Read(_), Some(seen)) => {
                    let is_right = match (seen, after.get(&key)) {
                        (Seen::Value { tag, version, .. }, Some(Now::Register(now, at))) => {
                            *now == Some(*tag) && (is_own || at == version)
                        }
                        (Seen::Absent { version }, Some(Now::Register(None, at))) => {
                            is_own || *at == newest_delete(deletes, key, *version)
                        }
                        (Seen::Absent { version }, None) => newest_delete(deletes, key, *version) == 0,
                        (Seen::List(tags), Some(Now::List(now))) => tags == now,
                        (Seen::List(tags), None) => tags.is_empty(),
                        _ => false,
                    };
                    if !is_right {
                        return None;
                    }
                }
                (Step::Read(_), None) => {}
            }
        }
        for (key, version) in written {
            own_versions.push(version);
            if let Some(Now::Register(_, before)) = state.get(&key)
                && *before >= version
            {
                return None;
            }
        }
        own_versions.windows(2).all(|pair| pair[0] == pair[1]).then_some(after)
    }
}

/// Draws a history of a correct store, whose transactions take effect at one instant each. Then some reads see another
/// state of their key, two transactions swap their times, and some outcomes are unknown.
fn drawn(random: &Random, lists: bool) -> Vec<Operation> {
    let workload = if lists { Workload::Lists { keys: 2 } } else { Workload::Registers { keys: 2 } };
    let (mut tag, mut version) = (0, 0);
    let mut states: BTreeMap<u64, Vec<Seen>> = BTreeMap::new();
    let first = if lists { Seen::List(Vec::new()) } else { Seen::Absent { version: 0 } };
    (0..2).for_each(|key| _ = states.insert(key, vec![first.clone()]));
    let wrong = [0, 2, 5][random.below(3) as usize];
    let mut operations = Vec::new();
    for at in 0..random.between(2, 5) {
        let ask = workload.draw(random, &mut tag);
        version += 1;
        let is_committed = !random.one_in(6);
        let mut now: BTreeMap<u64, Seen> =
            states.iter().map(|(key, of)| (*key, of[of.len() - 1].clone())).collect();
        let mut seen = Vec::new();
        for step in &ask.0 {
            let key = step.key();
            let mut did = now[&key].clone();
            match *step {
                Step::Read(_) => {}
                Step::Write { tag, .. } => {
                    now.insert(key, Seen::Value { tag, version, amount: 0 });
                    did = Seen::Wrote { version, amount: 0 };
                }
                Step::Delete(_) => {
                    now.insert(key, Seen::Absent { version });
                    did = Seen::Wrote { version, amount: 0 };
                }
                Step::Append { tag, .. } => {
                    if let Some(Seen::List(tags)) = now.get_mut(&key) {
                        tags.push(tag);
                    }
                    did = Seen::Appended;
                }
            }
            seen.push(did);
        }
        let outcome = if is_committed { Outcome::Committed(seen) } else { Outcome::Failed };
        if is_committed || random.one_in(4) {
            now.into_iter().for_each(|(key, of)| states.get_mut(&key).expect("a key").push(of));
        }
        let effect = 100 + 10 * at;
        let (called, returned) = (effect - random.below(25) * 2, effect + 1 + random.below(25) * 2);
        let [called, returned] = [called, returned].map(|index| Moment { index, ns: index });
        let is_unknown = random.one_in(6);
        operations.push(Operation {
            client: at as u32,
            key: 0,
            ask,
            called,
            returned: (!is_unknown).then_some(returned),
            outcome: if is_unknown { Outcome::Unknown } else { outcome },
        });
    }
    for operation in &mut operations {
        let Outcome::Committed(seen) = &mut operation.outcome else { continue };
        for (step, seen) in operation.ask.0.iter().zip(seen) {
            let of = &states[&step.key()];
            if matches!(step, Step::Read(_)) && random.one_in(wrong) {
                *seen = of[random.below(of.len() as u64) as usize].clone();
            }
        }
    }
    if random.one_in(3) {
        let [one, other] = [0, 1].map(|_| random.below(operations.len() as u64) as usize);
        let times = |operation: &Operation| (operation.called, operation.returned);
        let ([of_one, of_other], is_other) = ([one, other].map(|at| times(&operations[at])), one != other);
        let is_unknown = |at: usize| operations[at].outcome == Outcome::Unknown;
        if is_other && is_unknown(one) == is_unknown(other) {
            (operations[one].called, operations[one].returned) = of_other;
            (operations[other].called, operations[other].returned) = of_one;
        }
    }
    operations
}

#[test]
fn the_checker_agrees_with_a_search_through_all_orders() {
    let random = Random::new(1);
    let mut counts: BTreeMap<(bool, bool), [u32; 2]> = BTreeMap::new();
    for round in 0..12_000 {
        let lists = round % 2 == 0;
        let operations = drawn(&random, lists);
        for checker in [BY_TIMESTAMP, STRICT] {
            let expected = brute::is_serializable(checker, &operations);
            let report = checker.report(&operations);
            assert_eq!(report.undecided, [""; 0]);
            assert_eq!(report.anomalies.is_empty(), expected, "round {round}: {report:?}: {operations:#?}");
            counts.entry((lists, checker.real_time)).or_default()[usize::from(expected)] += 1;
            if !expected {
                let (_, window) = shrink::window(&checker, &operations);
                assert!(
                    !checker.report(&window.operations).anomalies.is_empty(),
                    "{window:#?}: {operations:#?}"
                );
            }
        }
    }
    println!("wrong and right histories, by (lists, in real time): {counts:?}");
    assert!(counts.values().all(|of| of.iter().all(|count| *count > 500)), "{counts:?}");
    assert!(
        [false, true].iter().all(|lists| counts[&(*lists, true)][0] > counts[&(*lists, false)][0] + 20),
        "{counts:?}"
    );
}

/// Guarantee of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Guarantee {
    /// A transaction commits if nothing that it has read or writes has changed.
    Serializable,
    /// A transaction commits if nothing that it writes has changed: snapshot isolation.
    Snapshot,
    /// A transaction commits.
    Nothing,
}

/// Runs a workload on a store with versions. Each client reads all at its begin, and commits later.
fn run(workload: Workload, guarantee: Guarantee, seed: u64) -> History {
    let random = Random::new(seed);
    let mut history = History::new();
    let mut now: BTreeMap<u64, Seen> = BTreeMap::new();
    let mut open = Vec::new();
    let (mut tag, mut version) = (0, 0);
    let is_list = matches!(workload, Workload::Lists { .. });
    let first = if is_list { Seen::List(Vec::new()) } else { Seen::Absent { version: 0 } };
    let amount = |seen: &Seen| match seen {
        Seen::Value { amount, .. } => *amount,
        _ => workload.start(),
    };
    for ns in 0..400 {
        if open.len() < 4 && random.one_in(2) {
            let ask = workload.draw(&random, &mut tag);
            let id = history.call(open.len() as u32, 0, ask.clone(), ns);
            open.push((id, ask, now.clone()));
            continue;
        }
        if open.is_empty() {
            continue;
        }
        let (id, ask, snapshot) = open.swap_remove(random.below(open.len() as u64) as usize);
        let is_same = |step: &Step| snapshot.get(&step.key()) == now.get(&step.key());
        let may_commit = ask.0.iter().all(|step| match (guarantee, step) {
            (Guarantee::Serializable, _) => is_same(step),
            (Guarantee::Snapshot, Step::Read(_)) | (Guarantee::Nothing, _) => true,
            (Guarantee::Snapshot, _) => is_same(step),
        });
        let mut view = snapshot.clone();
        let mut read = Vec::new();
        for step in ask.0.iter().filter(|step| matches!(step, Step::Read(_))) {
            read.push(amount(snapshot.get(&step.key()).unwrap_or(&first)));
        }
        let Some(amounts) = workload.amounts(&ask, &read).filter(|_| may_commit) else {
            history.returned(id, Outcome::Failed, ns);
            continue;
        };
        version += 1;
        let mut amounts = amounts.into_iter();
        let mut seen = Vec::new();
        for step in &ask.0 {
            let key = step.key();
            let amount = if matches!(step, Step::Write { .. }) { amounts.next().unwrap_or(0) } else { 0 };
            let did = match *step {
                Step::Read(_) => view.get(&key).unwrap_or(&first).clone(),
                Step::Write { tag, .. } => {
                    view.insert(key, Seen::Value { tag, version, amount });
                    Seen::Wrote { version, amount }
                }
                Step::Delete(_) => {
                    view.insert(key, Seen::Absent { version });
                    Seen::Wrote { version, amount }
                }
                Step::Append { tag, .. } => {
                    for of in [&mut view, &mut now] {
                        if let Seen::List(tags) = of.entry(key).or_insert_with(|| first.clone()) {
                            tags.push(tag);
                        }
                    }
                    Seen::Appended
                }
            };
            if matches!(step, Step::Write { .. } | Step::Delete(_)) {
                now.insert(key, view[&key].clone());
            }
            seen.push(did);
        }
        history.returned(id, Outcome::Committed(seen), ns);
    }
    history
}

const WORKLOADS: [Workload; 4] = [
    Workload::Registers { keys: 3 },
    Workload::Lists { keys: 3 },
    Workload::Bank { accounts: 4 },
    Workload::Pairs { pairs: 2 },
];

#[test]
fn a_serializable_store_is_good_under_all_workloads() {
    for (seed, workload) in (0..20).flat_map(|seed| WORKLOADS.map(|workload| (seed, workload))) {
        let history = run(workload, Guarantee::Serializable, seed);
        assert!(history.operations().len() > 100);
        let checked = [STRICT.check(&history), workload.check(&history)];
        assert!(checked.iter().all(|of| of.violated.is_empty() && of.undecided.is_empty()), "{checked:?}");
    }
}

#[test]
fn weaker_stores_are_found_by_the_checker_and_by_the_invariants() {
    let skewed = |seed| run(WORKLOADS[3], Guarantee::Snapshot, seed);
    let histories: Vec<History> = (0..10).map(skewed).collect();
    for history in &histories {
        let report = BY_TIMESTAMP.report(history.operations());
        assert_eq!(report.anomalies.first().map(|anomaly| anomaly.kind), Some(Kind::WriteSkew));
    }
    assert!(histories.iter().filter(|history| !WORKLOADS[3].check(history).violated.is_empty()).count() > 5);
    for seed in 0..10 {
        let history = run(WORKLOADS[2], Guarantee::Nothing, seed);
        assert!(!BY_TIMESTAMP.check(&history).violated.is_empty());
        assert!(!WORKLOADS[2].check(&history).violated.is_empty());
        // A snapshot of all accounts is a snapshot, and transfers update what they read.
        let history = run(WORKLOADS[2], Guarantee::Snapshot, seed);
        assert_eq!(WORKLOADS[2].check(&history).violated, [""; 0]);
    }
    for workload in [WORKLOADS[0], WORKLOADS[1]] {
        let is_found =
            |seed| !BY_TIMESTAMP.check(&run(workload, Guarantee::Nothing, seed)).violated.is_empty();
        assert!((0..10).filter(|seed| is_found(*seed)).count() > 5, "{workload:?}");
    }
}

#[test]
fn the_graph_is_linear_in_the_history() {
    // Every transaction reads the whole list; most appends are never read.
    let reads = (0..2_000).map(|at| committed([2 * at, 2 * at + 1], &[list(1, &[]), appended(1, at)]));
    let operations: Vec<Operation> = reads.collect();
    let mut facts = Facts::of(&operations, Versions::OfTransactions);
    facts.add_real_time(&operations);
    assert!(facts.edges.len() < 10 * operations.len(), "{}", facts.edges.len());
    let report = STRICT.report(&operations);
    assert_eq!(report.anomalies.first().map(|anomaly| anomaly.kind), Some(Kind::LostUpdate));
}
