//! Tests of the checker of registers, by histories with a known verdict and by a brute-force search through all
//! orders. The search shares no code with the checker.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::operations::{DONE, NEVER, Row, cas, found, found_at, history, put, value};
use farside_sim::history::Ask as _;
use farside_sim::history::register::{Ask, History, Operation, Outcome, Value, Version};
use farside_sim::linearizable::{Limits, Report, Undecided, Verdict, check, check_key, explain};
use farside_sim::random::Random;

fn is_good(rows: &[Row]) -> bool {
    let history = history(rows);
    let report = check(&history, Limits::default());
    assert_eq!(report.undecided, []);
    assert_eq!(
        report.is_linearizable(),
        brute::is_linearizable(history.operations()),
        "the checkers differ: {rows:?}"
    );
    report.is_linearizable()
}

#[test]
fn a_read_may_come_before_or_after_a_concurrent_write() {
    for seen in [Outcome::Absent, found(1)] {
        assert!(is_good(&[(0, 1, 4, put(1), DONE), (1, 2, 3, Ask::Get, seen)]));
    }
}

#[test]
fn a_stale_read_is_found() {
    let rows = [(0, 1, 2, put(1), DONE), (0, 3, 4, put(2), DONE), (1, 5, 6, Ask::Get, found(1))];
    assert!(!is_good(&rows));
}

#[test]
fn reads_that_go_back_are_found() {
    let write = (0, 1, 9, put(1), DONE);
    assert!(is_good(&[write, (1, 2, 3, Ask::Get, Outcome::Absent), (1, 4, 5, Ask::Get, found(1))]));
    assert!(!is_good(&[write, (1, 2, 3, Ask::Get, found(1)), (2, 4, 5, Ask::Get, Outcome::Absent)]));
}

#[test]
fn a_lost_update_is_found() {
    let read = (0, 1, 2, put(1), Outcome::Done(Some(Version(1))));
    let first = (0, 3, 6, cas(1, 2), Outcome::Done(Some(Version(2))));
    let second = |outcome| (1, 4, 5, cas(1, 3), outcome);
    assert!(
        !is_good(&[read, first, second(Outcome::Done(Some(Version(3))))]),
        "both expected the same version"
    );
    assert!(!is_good(&[read, first, second(DONE)]));
    assert!(is_good(&[read, first, second(Outcome::Conflict(Some(Version(2))))]));
    let (both, one) = (Ask::PutIfAbsent(value(1)), Ask::PutIfAbsent(value(2)));
    assert!(!is_good(&[(0, 1, 3, both, DONE), (1, 2, 4, one, DONE)]));
    assert!(is_good(&[(0, 1, 3, both, DONE), (1, 2, 4, one, Outcome::Conflict(None))]));
}

#[test]
fn a_value_that_comes_back_after_its_delete_is_found() {
    let start = [(0, 1, 2, put(1), DONE), (0, 3, 4, Ask::Delete, DONE)];
    assert!(is_good(&[start[0], start[1], (1, 5, 6, Ask::Get, Outcome::Absent)]));
    assert!(!is_good(&[start[0], start[1], (1, 5, 6, Ask::Get, found(1))]));
    assert!(!is_good(&[start[0], start[1], (1, 5, 6, Ask::Delete, DONE)]), "one value is deleted once");
    assert!(is_good(&[start[0], start[1], (1, 5, 6, Ask::Delete, Outcome::Absent)]));
}

#[test]
fn a_wrong_answer_about_presence_is_found() {
    let present = Outcome::Present;
    let contains = |at, outcome| (1, at, at + 1, Ask::Contains, outcome);
    let stored = (0, 1, 2, put(1), DONE);
    assert!(is_good(&[contains(0, Outcome::Absent)]) && !is_good(&[contains(0, present)]));
    assert!(is_good(&[stored, contains(3, present)]) && !is_good(&[stored, contains(3, Outcome::Absent)]));
    let deleted = (0, 5, 6, Ask::Delete, DONE);
    assert!(is_good(&[stored, contains(3, present), deleted, contains(7, Outcome::Absent)]));
    assert!(!is_good(&[stored, contains(3, present), deleted, contains(7, present)]));
    // The put of unknown outcome is the only one that explains the answer, and a later answer shows its effect again.
    let unknown = (0, 1, NEVER, put(1), Outcome::Unknown);
    assert!(is_good(&[unknown, contains(3, Outcome::Absent), contains(5, present)]));
    assert!(!is_good(&[unknown, contains(3, present), contains(5, Outcome::Absent)]));
}

#[test]
fn a_read_from_the_future_is_found() {
    assert!(!is_good(&[(1, 1, 2, Ask::Get, found(1)), (0, 3, 4, put(1), DONE)]));
    assert!(!is_good(&[(1, 1, 2, Ask::Get, found(7))]), "no client wrote it");
}

#[test]
fn a_put_of_unknown_fate_may_be_seen_until_its_return() {
    let over = (0, 1, 2, put(1), Outcome::Unknown);
    let dead = (0, 1, NEVER, put(1), Outcome::Unknown);
    for (unknown, may_come_later) in [(over, false), (dead, true)] {
        let other = (1, 3, 4, put(2), DONE);
        let late = [unknown, other, (1, 5, 6, Ask::Get, found(2)), (1, 7, 8, Ask::Get, found(1))];
        assert_eq!(is_good(&late), may_come_later);
        assert!(is_good(&[unknown, (1, 3, 4, Ask::Get, found(1)), (1, 5, 6, Ask::Get, found(1))]));
        assert_eq!(
            is_good(&[unknown, (1, 3, 4, Ask::Get, Outcome::Absent), (1, 5, 6, Ask::Get, found(1))]),
            may_come_later
        );
        assert!(is_good(&[unknown, other, (1, 5, 6, Ask::Get, found(2)), (1, 7, 8, Ask::Get, found(2))]));
        assert!(is_good(&[unknown, (1, 3, 4, Ask::Get, Outcome::Absent)]));
    }
}

#[test]
fn the_observed_effect_of_an_unknown_put_stays() {
    let unknown = (0, 1, NEVER, put(1), Outcome::Unknown);
    assert!(!is_good(&[unknown, (1, 3, 4, Ask::Get, found(1)), (1, 5, 6, Ask::Get, Outcome::Absent)]));
    let other = (2, 2, 3, put(2), DONE);
    let reads = |seen: [u64; 3]| {
        let read = |at: usize| (1, 4 + 2 * at as u64, 5 + 2 * at as u64, Ask::Get, found(seen[at]));
        is_good(&[unknown, other, read(0), read(1), read(2)])
    };
    assert!(reads([2, 1, 1]));
    assert!(!reads([2, 1, 2]));
    assert!(!reads([1, 2, 2]), "the other was done before the first read");
}

#[test]
fn two_unknown_operations_may_take_either_order() {
    let unknown = [(0, 1, NEVER, put(1), Outcome::Unknown), (1, 2, NEVER, Ask::Delete, Outcome::Unknown)];
    let reads = |seen: [Outcome; 3]| {
        let read = |at: usize| (2, 4 + 2 * at as u64, 5 + 2 * at as u64, Ask::Get, seen[at]);
        is_good(&[unknown[0], unknown[1], read(0), read(1), read(2)])
    };
    assert!(reads([found(1), found(1), Outcome::Absent]));
    assert!(reads([Outcome::Absent, found(1), Outcome::Absent]));
    assert!(!reads([found(1), Outcome::Absent, found(1)]), "each takes effect once");
}

#[test]
fn a_failed_operation_is_never_observed() {
    assert!(is_good(&[(0, 1, 2, put(1), Outcome::Failed), (1, 3, 4, Ask::Get, Outcome::Absent)]));
    assert!(!is_good(&[(0, 1, 2, put(1), Outcome::Failed), (1, 3, 4, Ask::Get, found(1))]));
}

#[test]
fn a_version_identifies_one_install() {
    let one = (0, 1, 2, put(1), DONE);
    let again = (0, 3, 4, put(1), DONE);
    let read = |from, version| (1, from, from + 1, Ask::Get, found_at(1, version));
    assert!(is_good(&[one, read(11, 5), read(13, 5)]));
    assert!(!is_good(&[one, read(11, 5), read(13, 6)]));
    let between = |version| {
        is_good(&[
            one,
            (1, 2 + 100, 103, Ask::Get, found_at(1, 5)),
            (0, 104, 105, put(1), DONE),
            read(106, version),
        ])
    };
    assert!(between(6));
    assert!(!between(5), "the same value, but a different install");
    assert!(is_good(&[one, again, read(11, 5), (2, 13, 14, cas(5, 3), DONE)]));
    assert!(!is_good(&[one, again, read(11, 5), (2, 13, 14, cas(5, 3), Outcome::Conflict(None))]));
}

#[test]
fn events_of_the_same_nanosecond_keep_their_order() {
    let mut history = History::new();
    let write = history.call(0, 0, put(1), 5);
    history.returned(write, DONE, 5);
    let read = history.call(1, 0, Ask::Get, 5);
    history.returned(read, Outcome::Absent, 5);
    assert!(
        !check(&history, Limits::default()).is_linearizable(),
        "all in one nanosecond, but one after the other"
    );
}

#[test]
fn keys_are_checked_separately() {
    let mut history = History::new();
    for key in 0..3 {
        let write = history.call(0, key, put(1), key);
        history.returned(write, DONE, key);
        let read = history.call(0, key, Ask::Get, key);
        history.returned(read, if key == 1 { Outcome::Absent } else { found(1) }, key);
    }
    let report = check(&history, Limits::default());
    assert_eq!((report.keys, report.operations, &report.violated[..]), (3, 6, &[1][..]));
    assert!(report.to_string().ends_with("not linearizable: keys [1]"), "{report}");
    assert_eq!(
        check(&history, Limits::default()),
        report,
        "the same input gives the same report, including its steps"
    );
}

#[test]
fn an_undecided_history_does_not_pass() {
    // Puts of unknown fate, each of a value that another put has, too, and a read of a value that no operation puts.
    // The search must try every order.
    let put_of = |at: u32| (at, u64::from(at), NEVER, put(u64::from(at) % 12), Outcome::Unknown);
    let mut rows: Vec<Row> = (0..24).map(put_of).collect();
    rows.extend((0..24).map(|at| (30, 100 + at * 2, 101 + at * 2, Ask::Get, found(at * 5 % 12))));
    rows.push((30, 200, 201, Ask::Get, found(99)));
    let history = history(&rows);
    let limits = Limits { steps_max: 10_000, ..Limits::default() };
    let report = check(&history, limits);
    assert_eq!(report, check(&history, limits));
    assert_eq!(report.undecided, [(0, Undecided::TooHard(10_000))]);
    assert!(!report.is_linearizable());
    assert!(report.to_string().contains("stopped after 10000 steps"), "{report}");
    assert_eq!(explain(&history, 0, limits), None, "no violation is known");

    let limits = Limits { operations_max: 10, ..Limits::default() };
    assert_eq!(check(&history, limits).undecided, [(0, Undecided::TooLong(49))]);
}

/// Draws a history of a simple register, with overlapping operations.
fn drawn(seed: u64) -> Vec<Row> {
    let random = Random::new(seed);
    let (clients, count) = (2 + random.below(2), 3 + random.below(5));
    let (mut state, mut version): (Option<(u64, u64)>, u64) = (None, 0);
    let mut rows: Vec<Row> = Vec::new();
    // The operations, in the order of their effects. Each one begins a little before its effect and ends a little after
    // it, but begins after its client's previous operation.
    let mut free = vec![0; clients as usize];
    for at in 0..count {
        let client = random.below(clients);
        let effect = 1_000 + at * 40;
        let from = (effect - random.below(90)).max(free[client as usize] + 1);
        let from = from.min(effect) / 16 * 16 + at * 2 % 16;
        let to = (effect + random.below(90)) / 16 * 16 + (at * 2 + 1) % 16;
        let tells = random.one_in(2);
        let version_of = |version: u64| tells.then_some(Version(version));
        let tag = random.below(3);
        let (ask, outcome) = match random.below(8) {
            7 => (Ask::Contains, if state.is_some() { Outcome::Present } else { Outcome::Absent }),
            0..3 => match state {
                Some((tag, version)) => (Ask::Get, Outcome::Found(value(tag), version_of(version))),
                None => (Ask::Get, Outcome::Absent),
            },
            3 => {
                version += 1;
                state = Some((tag, version));
                (put(tag), Outcome::Done(version_of(version)))
            }
            4 => (Ask::Delete, if state.take().is_some() { DONE } else { Outcome::Absent }),
            5 => match state {
                Some((_, version)) => (Ask::PutIfAbsent(value(tag)), Outcome::Conflict(version_of(version))),
                None => {
                    version += 1;
                    state = Some((tag, version));
                    (Ask::PutIfAbsent(value(tag)), Outcome::Done(version_of(version)))
                }
            },
            _ => {
                let expected = version.saturating_sub(random.below(2));
                let ask = cas(expected, tag);
                match state {
                    None => (ask, if tells { Outcome::Absent } else { Outcome::Conflict(None) }),
                    Some((_, now)) if now != expected => (ask, Outcome::Conflict(version_of(now))),
                    Some(_) => {
                        version += 1;
                        state = Some((tag, version));
                        (ask, Outcome::Done(version_of(version)))
                    }
                }
            }
        };
        let (to, outcome) = match random.below(16) {
            0 => (NEVER, Outcome::Unknown),
            1 => (to, Outcome::Unknown),
            2 if !matches!(outcome, Outcome::Done(_)) => (to, Outcome::Failed),
            _ => (to, outcome),
        };
        free[client as usize] = if to == NEVER { from + 1 } else { to };
        rows.push((client as u32, from, to.max(from + 1), ask, outcome));
    }
    // Most histories are then corrupted in up to three places.
    for _ in 0..random.below(4) {
        let (at, other) = (random.below(count) as usize, random.below(count) as usize);
        let outcome = match random.below(4) {
            0 => found(random.below(3)),
            1 => found_at(random.below(3), random.below(4)),
            2 => Outcome::Absent,
            _ => rows[other].4,
        };
        if rows[at].3.can_have(&outcome) && rows[at].2 != NEVER {
            rows[at].4 = outcome;
        }
    }
    rows
}

#[test]
fn the_checker_agrees_with_a_search_through_all_orders() {
    let (mut good, mut bad, mut unknown) = (0, 0, 0);
    for seed in 0..21_000 {
        let history = history(&drawn(seed));
        let (verdict, _) = check_key(history.operations(), Limits::default());
        let expected = brute::is_linearizable(history.operations());
        let text =
            || history.operations().iter().map(|operation| format!("{operation:?}\n")).collect::<String>();
        assert_eq!(verdict == Verdict::Linearizable, expected, "seed {seed}: {verdict:?}\n{}", text());
        if expected {
            good += 1
        } else {
            bad += 1
        }
        unknown +=
            u32::from(history.operations().iter().any(|operation| operation.outcome == Outcome::Unknown));
    }
    println!("{good} good, {bad} bad; {unknown} with operations of unknown fate");
    assert!(good > 5_000 && bad > 5_000 && unknown > 5_000);
}

#[test]
fn a_shrunk_violation_is_small_and_still_wrong() {
    let (mut explained, mut sizes, mut of) = (0, 0, 0);
    for seed in 0..3_000 {
        let history = history(&drawn(seed));
        let Some(violation) = explain(&history, 0, Limits::default()) else { continue };
        let operations = &violation.operations;
        assert!(!brute::is_linearizable(operations), "seed {seed}: {violation:?}");
        let mut pardoned = operations.clone();
        (pardoned[violation.offender].outcome, pardoned[violation.offender].returned) =
            (Outcome::Unknown, None);
        assert!(
            brute::is_linearizable(&pardoned),
            "seed {seed}: without the offender's outcome, the history is not correct"
        );
        for outcome in &violation.instead {
            let mut other = operations.clone();
            other[violation.offender].outcome = *outcome;
            assert!(brute::is_linearizable(&other), "seed {seed}: {outcome} is reported as possible");
        }
        explained += 1;
        sizes += operations.len();
        of += violation.of;
    }
    println!("{explained} explained, by {sizes} operations of {of}");
    assert!(explained > 500 && sizes * 3 < of * 2);
}

#[test]
fn a_long_history_is_shrunk_to_the_relevant_operations() {
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..100 {
        let start = 10 + round * 10;
        rows.push((0, start, start + 4, put(round), DONE));
        rows.push((
            1,
            start + 1,
            start + 5,
            Ask::Get,
            if round == 0 { Outcome::Absent } else { found(round - 1) },
        ));
        rows.push((2, start + 6, start + 7, Ask::Get, found(round)));
    }
    rows[3 * 70 + 2].4 = found(68);
    let violation = explain(&history(&rows), 0, Limits::default()).expect("round 70 is stale");
    let shown: Vec<String> = violation.operations.iter().map(Operation::to_string).collect();
    assert_eq!(shown, ["put 68 -> done", "put 69 -> done", "get -> 68"]);
    assert_eq!((violation.offender, violation.of), (2, 300));
    assert_eq!(violation.instead, [found(69)]);
}

/// Brute-force search through all orders. The search collects what the outcomes say about versions as equations
/// between installs, and checks these equations when an order is complete.
mod brute {
    use super::*;

    pub(super) fn is_linearizable(operations: &[Operation]) -> bool {
        Search { operations, done: vec![false; operations.len()], steps: Vec::new() }.goes_on(None, 0)
    }

    /// An ordered operation: the number of the install that it observed, the number of the install that it made, and
    /// whether it took effect.
    struct Step {
        at: usize,
        met: Option<usize>,
        made: Option<usize>,
        took_effect: bool,
    }

    struct Search<'a> {
        operations: &'a [Operation],
        done: Vec<bool>,
        steps: Vec<Step>,
    }

    impl Search<'_> {
        fn goes_on(&mut self, now: Option<(Value, usize)>, installs: usize) -> bool {
            let is_open =
                |operation: &Operation| matches!(operation.outcome, Outcome::Unknown | Outcome::Failed);
            if self.operations.iter().zip(&self.done).all(|(operation, done)| *done || is_open(operation)) {
                return self.versions_agree();
            }
            let ends = |at: &usize| match self.operations[*at].returned {
                Some(returned) if !is_open(&self.operations[*at]) => returned.index,
                _ => u64::MAX,
            };
            let left: Vec<usize> = (0..self.done.len()).filter(|&at| !self.done[at]).collect();
            let first_end = left.iter().map(ends).min().unwrap();
            for at in left {
                let Operation { ask, outcome, called, returned, .. } = self.operations[at];
                if outcome == Outcome::Failed || called.index > first_end {
                    continue;
                }
                let made = |value| Some((value, installs));
                let is_unknown = outcome == Outcome::Unknown;
                let is_over = |end: u64| {
                    self.operations
                        .iter()
                        .zip(&self.done)
                        .any(|(other, done)| *done && other.called.index > end)
                };
                if is_unknown && returned.is_some_and(|returned| is_over(returned.index)) {
                    continue;
                }
                let (next, took_effect) = match (ask, outcome) {
                    (Ask::Get, Outcome::Found(value, _)) if now.is_some_and(|(now, _)| now == value) => {
                        (now, false)
                    }
                    (_, Outcome::Absent) if now.is_none() => (now, false),
                    (Ask::Contains, Outcome::Present) if now.is_some() => (now, false),
                    (Ask::Put(value), Outcome::Done(_) | Outcome::Unknown) => (made(value), true),
                    (Ask::Delete, Outcome::Done(_)) if now.is_some() => (None, true),
                    (Ask::Delete, Outcome::Unknown) => (None, true),
                    (Ask::PutIfAbsent(value), Outcome::Done(_) | Outcome::Unknown) if now.is_none() => {
                        (made(value), true)
                    }
                    (Ask::PutIfAbsent(_), Outcome::Conflict(_)) if now.is_some() => (now, false),
                    (Ask::CompareAndPut { value, .. }, Outcome::Done(_) | Outcome::Unknown)
                        if now.is_some() =>
                    {
                        (made(value), true)
                    }
                    (Ask::CompareAndPut { .. }, Outcome::Conflict(version))
                        if now.is_some() || version.is_none() =>
                    {
                        (now, false)
                    }
                    _ => continue,
                };
                assert!(!is_unknown || took_effect, "an unknown operation without effect is not ordered");
                let is_new = next.is_some_and(|(_, install)| install == installs);
                let met = now.map(|(_, install)| install);
                self.steps.push(Step { at, met, made: is_new.then_some(installs), took_effect });
                self.done[at] = true;
                if self.goes_on(next, installs + usize::from(is_new)) {
                    return true;
                }
                self.done[at] = false;
                self.steps.pop();
            }
            false
        }

        fn versions_agree(&self) -> bool {
            let mut equal = BTreeSet::new();
            let mut unequal = Vec::new();
            for Step { at, met, made, took_effect } in &self.steps {
                let Operation { ask, outcome, .. } = self.operations[*at];
                if let (Ask::CompareAndPut { expected, .. }, Some(met)) = (ask, met) {
                    if *took_effect {
                        equal.insert((expected, *met));
                    } else {
                        unequal.push((expected, *met));
                    }
                }
                match outcome {
                    Outcome::Found(_, Some(version)) | Outcome::Conflict(Some(version)) => {
                        equal.insert((version, met.unwrap()));
                    }
                    Outcome::Done(Some(version)) => drop(equal.insert((version, made.unwrap()))),
                    _ => {}
                }
            }
            let by_version: BTreeMap<Version, usize> = equal.iter().copied().collect();
            let by_install: BTreeMap<usize, Version> =
                equal.iter().map(|&(version, install)| (install, version)).collect();
            by_version.len() == equal.len()
                && by_install.len() == equal.len()
                && unequal.iter().all(|(version, install)| by_version.get(version) != Some(install))
        }
    }
}

#[test]
fn many_clients_on_one_key_are_decided() {
    for seed in 0..5 {
        let random = Random::new(seed);
        let mut history = History::new();
        let (mut now, mut installs) = (None, 0);
        let mut running = [None; 16];
        let mut lost = Vec::new();
        for ns in 0..6_000 {
            let client = random.below(16) as usize;
            running[client] = match running[client] {
                None => {
                    let ask = if random.one_in(2) { Ask::Get } else { put(ns) };
                    Some((history.call(client as u32, 0, ask, ns), ask, None))
                }
                // An operation abandoned by its client may take effect much later.
                Some((id, Ask::Put(value), None)) if random.one_in(50) => {
                    history.returned(id, Outcome::Unknown, ns);
                    lost.push(value);
                    let late = lost.swap_remove(random.below(lost.len() as u64) as usize);
                    if random.one_in(2) {
                        installs += 1;
                        now = Some((late, installs));
                    }
                    None
                }
                Some((id, ask, None)) => {
                    let outcome = match (ask, now) {
                        (Ask::Put(value), _) => {
                            installs += 1;
                            now = Some((value, installs));
                            DONE
                        }
                        (_, Some((value, install))) => Outcome::Found(value, Some(Version(install))),
                        (_, None) => Outcome::Absent,
                    };
                    Some((id, ask, Some(outcome)))
                }
                Some((id, _, Some(outcome))) => {
                    history.returned(id, outcome, ns);
                    None
                }
            };
        }
        let report = check(&history, Limits::default());
        assert!(report.is_linearizable() && report.steps < 20 * report.operations, "seed {seed}: {report}");
    }
}

#[test]
#[ignore = "takes 1 to 2 s for 400,000 operations; prints the checker's speed"]
fn soak_histories_of_four_clients_are_all_decided() {
    let mut operations = 0;
    let mut histories = Vec::new();
    for seed in 0..2_000 {
        let random = Random::new(seed);
        let mut history = History::new();
        let mut stores = [(0, 0); 5];
        let mut running = Vec::new();
        for at in 0..200 {
            // There are four clients. Each operation takes effect at its call and returns three calls later.
            if running.len() == 4 {
                let (id, outcome) = running.remove(random.below(4) as usize);
                history.returned(id, outcome, at * 10);
            }
            let key = random.below(5);
            let (tag, version) = &mut stores[key as usize];
            let (ask, outcome) = if random.one_in(2) {
                (*tag, *version) = (at + 1, *version + 1);
                (put(*tag), DONE)
            } else if *version == 0 {
                (Ask::Get, Outcome::Absent)
            } else {
                (Ask::Get, found_at(*tag, *version))
            };
            let outcome = if random.one_in(50) { Outcome::Unknown } else { outcome };
            running.push((history.call(at as u32 % 4, key, ask, at * 10 + 5), outcome));
        }
        operations += 200;
        histories.push(history);
    }
    let start = std::time::Instant::now();
    let mut total = Report::default();
    for history in &histories {
        let report = check(history, Limits::default());
        assert!(report.is_linearizable(), "{report}");
        total.steps += report.steps;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{:.0} operations/s, {} steps for {operations} operations",
        operations as f64 / seconds,
        total.steps
    );
}
