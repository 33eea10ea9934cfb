//! The checker of queues passes correct histories and finds wrong ones.

use super::*;
use crate::random::Random;
use crate::search::{Span, is_explained};
use std::collections::VecDeque;

const NEVER: u64 = u64::MAX;

fn value(tag: u64) -> Value {
    Value { tag, len: 8 }
}

/// One operation: `(time of the call, time of the return, ask, outcome)`. All times of a history are different.
type Row = (u64, u64, Ask, Outcome);

fn put(tag: u64, from: u64, to: u64) -> Row {
    (from, to, Ask::Put(value(tag)), if to == NEVER { Outcome::Unknown } else { Outcome::Done })
}

fn take(tag: u64, from: u64, to: u64) -> Row {
    (from, to, Ask::Take, Outcome::Taken(value(tag)))
}

fn history(rows: &[Row]) -> History {
    let mut events: Vec<(u64, usize, bool)> =
        rows.iter().enumerate().map(|(at, row)| (row.0, at, false)).collect();
    events
        .extend(rows.iter().enumerate().filter(|(_, row)| row.1 != NEVER).map(|(at, row)| (row.1, at, true)));
    events.sort_unstable();
    let mut history = History::new();
    let mut ids = vec![None; rows.len()];
    for (ns, at, is_return) in events {
        match ids[at] {
            Some(id) if is_return => history.returned(id, rows[at].3, ns),
            _ => ids[at] = Some(history.call(at as u32, 0, rows[at].2, ns)),
        }
    }
    history
}

fn said(capacity: u64, rows: &[Row]) -> Option<String> {
    let checked = Fifo { capacity }.check(&history(rows));
    assert_eq!(checked.violated.is_empty(), checked.window.is_none());
    checked.violated.first().cloned()
}

/// Returns a correct history. Its operations take effect one after the other; each is called before its effect and
/// returns after it. Some operations get an unknown fate, and some of these still have a return.
fn right(random: &Random, capacity: u64, operations: u64) -> Vec<Row> {
    let mut queue = VecDeque::new();
    (0..operations)
        .map(|at| {
            let (ask, outcome) = if random.one_in(2) {
                let has_room = (queue.len() as u64) < capacity;
                has_room.then(|| queue.push_back(value(at)));
                (Ask::Put(value(at)), if has_room { Outcome::Done } else { Outcome::Full })
            } else {
                (Ask::Take, queue.pop_front().map_or(Outcome::Empty, Outcome::Taken))
            };
            let effect = 1_000 + at * 100;
            let (from, to) = (effect - random.below(4) * 100 - at, effect + random.below(4) * 100 + at + 1);
            match random.below(12) {
                0 => (from, NEVER, ask, Outcome::Unknown),
                1 => (from, to, ask, Outcome::Unknown),
                _ => (from, to, ask, outcome),
            }
        })
        .collect()
}

/// Whether, for some choice of which operations of unknown fate took effect, some order explains all outcomes.
fn is_queue(capacity: u64, rows: &[Row]) -> bool {
    let of_unknown: Vec<usize> = (0..rows.len()).filter(|at| rows[*at].3 == Outcome::Unknown).collect();
    (0..1_u32 << of_unknown.len()).any(|without| {
        let is_left_out =
            |at| of_unknown.iter().position(|of| *of == at).is_some_and(|nth| without >> nth & 1 == 1);
        let rows: Vec<Row> = (0..rows.len()).filter(|at| !is_left_out(*at)).map(|at| rows[at]).collect();
        let spans: Vec<Span> = rows.iter().map(|row| Span { called: row.0, returned: Some(row.1) }).collect();
        is_explained(&spans, VecDeque::new(), |queue, at| {
            let (mut queue, is_full) = (queue.clone(), queue.len() as u64 >= capacity);
            let is_so = match (rows[at].2, rows[at].3) {
                (Ask::Put(_), Outcome::Full) => is_full,
                (Ask::Put(value), _) => {
                    queue.push_back(value);
                    !is_full
                }
                (Ask::Take, Outcome::Taken(value)) => queue.pop_front() == Some(value),
                (Ask::Take, Outcome::Empty) => queue.is_empty(),
                (Ask::Take, _) => queue.pop_front().is_some(),
            };
            is_so.then_some(queue)
        })
    })
}

/// Corrupts a history: swaps the outcomes of two operations, or changes one.
fn spoil(random: &Random, rows: &mut [Row]) {
    let any = |random: &Random| random.below(rows.len() as u64) as usize;
    let (one, other) = (any(random), any(random));
    match (rows[one].2, rows[other].2) {
        (Ask::Take, Ask::Take) => (rows[one].3, rows[other].3) = (rows[other].3, rows[one].3),
        (Ask::Put(_), _) if rows[one].3 == Outcome::Done => rows[one].3 = Outcome::Full,
        (Ask::Put(_), _) => rows[one].3 = Outcome::Done,
        _ => rows[one].3 = Outcome::Empty,
    }
    // An operation without a return has no outcome.
    rows.iter_mut().filter(|row| row.1 == NEVER).for_each(|row| row.3 = Outcome::Unknown);
}

/// The checker finds every wrong history of an unbounded queue without unknown fates, and most of the other wrong
/// histories. It never reports a correct history.
#[test]
fn a_history_is_wrong_only_if_no_order_explains_it() {
    let random = Random::new(7);
    // Counts of wrong histories and of those found, each split by whether all must be found.
    let (mut wrong, mut found) = ([0; 2], [0; 2]);
    let (mut full, mut put, mut take) = (0, 0, 0);
    for _ in 0..30_000 {
        let capacity = [1, 2, 3, u64::MAX][random.below(4) as usize];
        let mut rows = right(&random, capacity, 9);
        (0..random.below(3)).for_each(|_| spoil(&random, &mut rows));
        let said = said(capacity, &rows);
        let has = |outcome| rows.iter().any(|row| row.3 == outcome);
        if is_queue(capacity, &rows) {
            assert_eq!(said, None, "{capacity} {rows:#?}");
            let unknown =
                |is_put| rows.iter().any(|row| row.3 == Outcome::Unknown && (row.2 != Ask::Take) == is_put);
            full += u64::from(has(Outcome::Full));
            put += u64::from(unknown(true));
            take += u64::from(unknown(false));
            continue;
        }
        let must = capacity == u64::MAX && !has(Outcome::Unknown);
        assert!(!must || said.is_some(), "{rows:#?}");
        wrong[usize::from(must)] += 1;
        found[usize::from(must)] += u64::from(said.is_some());
    }
    assert!(full > 1_000 && put > 1_000 && take > 1_000, "{full} {put} {take}");
    assert!(wrong[1] > 500 && 20 * found[0] > 19 * wrong[0], "{found:?} of {wrong:?}");
}

#[test]
fn each_kind_of_violation_is_found() {
    let empty = |from, to| (from, to, Ask::Take, Outcome::Empty);
    let unknown = |from| (from, NEVER, Ask::Take, Outcome::Unknown);
    let full = |tag, from, to| (from, to, Ask::Put(value(tag)), Outcome::Full);
    let wrong: [(&str, &[Row]); 11] = [
        ("no client has put", &[take(1, 0, 10)]),
        ("before it was put", &[take(1, 0, 10), put(1, 20, 30)]),
        ("taken twice", &[put(1, 0, 10), take(1, 20, 30), take(1, 25, 40)]),
        (
            "before one that was put earlier",
            &[put(1, 0, 10), put(2, 11, 20), take(2, 21, 30), take(1, 31, 40)],
        ),
        ("is still there", &[put(1, 0, 10), put(2, 11, 20), take(2, 21, 30)]),
        // One take of unknown fate explains one of the two missing values.
        ("is still there", &[put(1, 0, 1), put(2, 2, 3), put(3, 4, 5), unknown(6), take(3, 7, 8)]),
        ("found empty", &[put(1, 0, 10), put(2, 11, 12), empty(15, 30), take(1, 16, 20)]),
        // One take of unknown fate has emptied a queue of one value, not of two.
        ("found empty", &[put(1, 0, 1), put(2, 2, 3), unknown(4), empty(5, 6)]),
        // Another client has observed the effect of the first put.
        ("found empty", &[(0, 1, Ask::Put(value(1)), Outcome::Unknown), empty(5, 6), take(1, 7, 8)]),
        ("found full", &[put(1, 0, 1), put(2, 2, 3), full(3, 4, 6), take(1, 7, 8)]),
        ("more values", &[put(1, 0, 1), put(2, 2, 3), put(3, 4, 5), unknown(6), put(4, 7, 8), put(5, 9, 10)]),
    ];
    for (what, rows) in wrong {
        let said = said(3, rows).unwrap_or_else(|| panic!("no violation found in {rows:#?}"));
        assert!(said.contains(what), "{said}");
    }
    let settled = (0, 10, Ask::Put(value(1)), Outcome::Unknown);
    let right: [&[Row]; 7] = [
        &[settled, put(2, 11, 20), take(2, 21, 30)],
        &[put(1, 0, 10), put(2, 5, 20), take(2, 21, 30), take(1, 31, 40)],
        &[put(1, 0, 1), put(2, 2, 3), unknown(6), take(2, 7, 8)],
        &[put(1, 0, 10), empty(15, 30), take(1, 16, 20)],
        &[put(1, 0, NEVER), take(1, 20, 30), empty(40, 50)],
        &[put(1, 0, 1), put(2, 2, 3), put(3, 4, 9), full(4, 5, 8), take(1, 7, 10)],
        &[put(1, 0, 1), put(2, 2, 3), unknown(4), unknown(5), empty(6, 7)],
    ];
    right.into_iter().for_each(|rows| assert_eq!(said(3, rows), None, "{rows:#?}"));
}

/// The test swaps the outcomes of two takes. The checker finds most of these violations: it cannot find them if the
/// takes or their puts overlap.
#[test]
fn a_window_shows_the_operations_that_matter() {
    let random = Random::new(9);
    let mut found = 0;
    for _ in 0..2_000 {
        let mut rows = right(&random, u64::MAX, 14);
        let takes: Vec<usize> =
            (0..rows.len()).filter(|at| matches!(rows[*at].3, Outcome::Taken(_))).collect();
        let [first, .., last] = takes[..] else { continue };
        let swapped = (rows[first].3, rows[last].3);
        (rows[last].3, rows[first].3) = swapped;
        let checked = Fifo { capacity: u64::MAX }.check(&history(&rows));
        let Some(window) = checked.window else { continue };
        found += 1;
        let shown: Vec<Operation> = window.operations;
        assert!(shown.len() <= 4 && window.offender < shown.len(), "{shown:#?}");
    }
    assert!(found > 500, "{found}");
}
