//! Tests of the checker of counters: single histories, and a comparison with a search for an order.

use super::*;
use crate::random::Random;
use crate::search::{Span, is_explained};

/// Writes a history. Each event is a call of operation `n`, or its return with an outcome.
#[derive(Clone, Copy)]
enum Event {
    Call(Ask),
    Return(usize, Outcome),
}
use Event::{Call, Return};

fn history(events: &[Event]) -> History {
    let mut history = History::new();
    let mut ids = Vec::new();
    for (ns, event) in events.iter().enumerate() {
        match *event {
            Call(ask) => ids.push(history.call(ids.len() as u32, 1, ask, ns as u64)),
            Return(operation, outcome) => history.returned(ids[operation], outcome, ns as u64),
        }
    }
    history
}

fn found(count: u64, tag: u64) -> Outcome {
    Outcome::Found(Value { count, tag })
}

#[track_caller]
fn violation(events: &[Event]) -> String {
    let checked = Counters.check(&history(events));
    let window = checked.window.expect("a violation has a window");
    assert!(window.offender < window.operations.len() && checked.undecided.is_empty());
    checked.violated.concat()
}

#[track_caller]
fn good(events: &[Event]) {
    assert_eq!(Counters.check(&history(events)), Checked::default());
}

#[test]
fn additions_and_reads_in_their_order_are_good() {
    good(&[]);
    good(&[
        Call(Ask::Add(7)),
        Return(0, found(0, 0)),
        Call(Ask::Read),
        Return(1, found(1, 7)),
        Call(Ask::Add(9)),
        Return(2, found(1, 7)),
    ]);
}

#[test]
fn an_unknown_addition_counts_once_or_not_at_all_and_at_any_time() {
    let add = [Call(Ask::Add(7)), Call(Ask::Add(8))];
    let then = |events: &[Event]| [&add[..], events].concat();
    good(&then(&[Call(Ask::Read), Return(2, found(0, 0)), Call(Ask::Read), Return(3, found(2, 7))]));
    // The addition 8 filled the first position, although nobody has seen its tag.
    good(&then(&[Return(0, found(1, 8)), Call(Ask::Read), Return(2, found(2, 7))]));
    good(&then(&[Call(Ask::Add(9)), Return(2, found(2, 8)), Call(Ask::Read), Return(3, found(3, 9))]));
    let twice = then(&[Return(0, found(0, 0)), Call(Ask::Read), Return(2, found(2, 7))]);
    assert!(violation(&twice).contains("an addition was carried out twice"));
    let none = then(&[Return(1, Outcome::Failed), Call(Ask::Read), Return(2, found(2, 7))]);
    assert!(violation(&none).contains("higher than the number of additions"));
    let late = [Call(Ask::Read), Return(0, found(1, 7)), Call(Ask::Add(7))];
    assert!(violation(&late).contains("after it was replaced"));
    let late = [Call(Ask::Add(7)), Call(Ask::Read), Return(1, found(2, 7)), Call(Ask::Add(8))];
    assert!(violation(&late).contains("before any addition that can have left it"));
}

#[test]
fn lost_additions_and_old_values_are_found() {
    let add = [Call(Ask::Add(7)), Return(0, found(0, 0)), Call(Ask::Add(8))];
    let then = |events: &[Event]| [&add[..], events].concat();
    assert!(violation(&then(&[Return(1, found(0, 0))])).contains("left the same count"));
    assert!(violation(&then(&[Call(Ask::Read), Return(2, found(0, 0))])).contains("after it was replaced"));
    assert!(violation(&then(&[Call(Ask::Read), Return(2, found(1, 5))])).contains("no addition has left"));
    assert!(violation(&then(&[Call(Ask::Read), Return(2, found(1, 0))])).contains("without a tag"));
    let failed = then(&[Return(1, Outcome::Failed), Call(Ask::Read), Return(2, found(2, 8))]);
    assert!(violation(&failed).contains("no addition has left"));
}

/// Whether some order of the operations explains all outcomes, by a search over all sets of unknown additions that were
/// carried out.
fn is_explained_by_search(operations: &[Operation]) -> bool {
    let is_unknown =
        |operation: &Operation| operation.outcome == Outcome::Unknown && !operation_is_read(operation);
    let unknown: Vec<usize> = (0..operations.len()).filter(|&at| is_unknown(&operations[at])).collect();
    (0..1u32 << unknown.len()).any(|ran| {
        let has_run = |at: usize| match unknown.iter().position(|&unknown| unknown == at) {
            Some(bit) => ran >> bit & 1 == 1,
            None => matches!(operations[at].outcome, Outcome::Found(_)),
        };
        let ran: Vec<&Operation> =
            (0..operations.len()).filter(|&at| has_run(at)).map(|at| &operations[at]).collect();
        let spans: Vec<Span> =
            ran.iter().map(|of| Span { called: of.called.index, returned: Some(end_of(of)) }).collect();
        is_explained(&spans, Value::default(), |&now, at| {
            let is_right = ran[at].outcome == Outcome::Unknown || ran[at].outcome == Outcome::Found(now);
            let next = match ran[at].ask {
                Ask::Add(tag) => Value { count: now.count + 1, tag },
                Ask::Read => now,
            };
            is_right.then_some(next)
        })
    })
}

fn operation_is_read(operation: &Operation) -> bool {
    operation.ask == Ask::Read
}

/// Draws a history of a correct counter, in which some outcomes are then changed.
fn drawn(random: &Random) -> History {
    let mut events = Vec::new();
    let (mut now, mut open) = (Value::default(), Vec::new());
    let mut calls = 0;
    while calls < 8 || !open.is_empty() && !random.one_in(8) {
        if calls < 8 && (open.is_empty() || random.one_in(2)) {
            let ask = if random.one_in(3) { Ask::Read } else { Ask::Add(calls as u64 + 1) };
            events.push(Call(ask));
            open.push((calls, ask, None));
            calls += 1;
            continue;
        }
        let at = random.below(open.len() as u64) as usize;
        let (operation, ask, found) = open[at];
        match found {
            // The operation takes effect.
            None => {
                open[at].2 = Some(now);
                if let Ask::Add(tag) = ask {
                    now = Value { count: now.count + 1, tag };
                }
            }
            Some(_) if random.one_in(6) => _ = open.swap_remove(at),
            Some(mut value) => {
                open.swap_remove(at);
                if random.one_in(20) {
                    value.count = (value.count + random.below(3)).saturating_sub(1);
                }
                if random.one_in(20) {
                    value.tag = random.below(calls as u64 + 1);
                }
                let outcome = if random.one_in(30) { Outcome::Failed } else { Outcome::Found(value) };
                events.push(Return(operation, outcome));
            }
        }
    }
    history(&events)
}

#[test]
fn the_checker_agrees_with_a_search_for_an_order() {
    let random = Random::new(1);
    let mut seen = [0; 2];
    for _ in 0..3000 {
        let history = drawn(&random);
        let expected = is_explained_by_search(history.operations());
        let checked = Counters.check(&history);
        assert_eq!(checked.violated.is_empty(), expected, "{checked:?}: {:#?}", history.operations());
        seen[usize::from(expected)] += 1;
    }
    assert!(seen.iter().all(|&count| count > 500), "{seen:?}");
}
