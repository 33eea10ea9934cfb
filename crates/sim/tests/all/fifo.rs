//! The checker of queues passes what a queue does, and finds what it does not.

use crate::support::draws::Draws;
use farside_sim::checker::Checker;
use farside_sim::fifo::Fifo;
use farside_sim::history::queue::{Ask, History, Operation, Outcome};
use farside_sim::history::register::Value;
use std::collections::VecDeque;

const NEVER: u64 = u64::MAX;

fn value(tag: u64) -> Value {
    Value { tag, len: 8 }
}

/// `(from, to, ask, outcome)`, all times different.
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

fn said(rows: &[Row]) -> Option<String> {
    let checked = Fifo.check(&history(rows));
    assert_eq!(checked.violated.is_empty(), checked.window.is_none());
    checked.violated.first().cloned()
}

/// A right history: operations take effect one after the other, and begin earlier and end later; some are forgotten.
fn right(draws: &mut Draws) -> Vec<Row> {
    let mut queue = VecDeque::new();
    (0..14)
        .map(|at| {
            let (ask, outcome) = if draws.once_in(2) {
                queue.push_back(value(at));
                (Ask::Put(value(at)), Outcome::Done)
            } else {
                (Ask::Take, queue.pop_front().map_or(Outcome::Empty, Outcome::Taken))
            };
            let effect = 1_000 + at * 100;
            let (from, to) = (effect - draws.below(4) * 100 - at, effect + draws.below(4) * 100 + at + 1);
            if draws.once_in(6) { (from, NEVER, ask, Outcome::Unknown) } else { (from, to, ask, outcome) }
        })
        .collect()
}

#[test]
fn what_a_queue_does_is_right_whatever_is_forgotten() {
    let mut draws = Draws(7);
    for _ in 0..20_000 {
        let rows = right(&mut draws);
        assert_eq!(said(&rows), None, "{rows:#?}");
    }
}

#[test]
fn each_way_not_to_be_a_queue_is_found() {
    let empty = |from, to| (from, to, Ask::Take, Outcome::Empty);
    let unknown = |from| (from, NEVER, Ask::Take, Outcome::Unknown);
    let wrong: [(&str, &[Row]); 7] = [
        ("nobody has put", &[take(1, 0, 10)]),
        ("before it was put", &[take(1, 0, 10), put(1, 20, 30)]),
        ("taken twice", &[put(1, 0, 10), take(1, 20, 30), take(1, 25, 40)]),
        (
            "before one that was put earlier",
            &[put(1, 0, 10), put(2, 11, 20), take(2, 21, 30), take(1, 31, 40)],
        ),
        ("is still there", &[put(1, 0, 10), put(2, 11, 20), take(2, 21, 30)]),
        // One take of unknown fate explains one of the two that are missing.
        ("is still there", &[put(1, 0, 1), put(2, 2, 3), put(3, 4, 5), unknown(6), take(3, 7, 8)]),
        ("found empty", &[put(1, 0, 10), put(2, 11, 12), empty(15, 30), take(1, 16, 20)]),
    ];
    for (what, rows) in wrong {
        let said = said(rows).unwrap_or_else(|| panic!("nothing is said of {rows:#?}"));
        assert!(said.contains(what), "{said}");
    }
    let settled = (0, 10, Ask::Put(value(1)), Outcome::Unknown);
    let right: [&[Row]; 5] = [
        &[settled, put(2, 11, 20), take(2, 21, 30)],
        &[put(1, 0, 10), put(2, 5, 20), take(2, 21, 30), take(1, 31, 40)],
        &[put(1, 0, 1), put(2, 2, 3), unknown(6), take(2, 7, 8)],
        &[put(1, 0, 10), empty(15, 30), take(1, 16, 20)],
        &[put(1, 0, NEVER), take(1, 20, 30), empty(40, 50)],
    ];
    right.into_iter().for_each(|rows| assert_eq!(said(rows), None, "{rows:#?}"));
}

/// Swaps what two takes have answered: mostly that is seen, unless they overlap or their puts do.
#[test]
fn a_window_shows_the_operations_that_matter() {
    let mut draws = Draws(9);
    let mut found = 0;
    for _ in 0..2_000 {
        let mut rows = right(&mut draws);
        let takes: Vec<usize> =
            (0..rows.len()).filter(|at| matches!(rows[*at].3, Outcome::Taken(_))).collect();
        let [first, .., last] = takes[..] else { continue };
        let swapped = (rows[first].3, rows[last].3);
        (rows[last].3, rows[first].3) = swapped;
        let checked = Fifo.check(&history(&rows));
        let Some(window) = checked.window else { continue };
        found += 1;
        let shown: Vec<Operation> = window.operations;
        assert!(shown.len() <= 4 && window.offender < shown.len(), "{shown:#?}");
    }
    assert!(found > 500, "{found}");
}
