//! Fuzz targets for input from people and other tools: histories as JSON lines, and litmus programs as text.
//!
//! Properties: no input causes a panic. Accepted input can be written, and the written form reads back as the same
//! value.

#[path = "../../../remote/tests/support/fuzz.rs"]
mod driver;

use driver::{Change, Executions, budget, change};
use farside_sim::history::lines;
use farside_sim::history::register::{Ask, History, Outcome, Value, Version};
use farside_sim::linearizable::{Limits, check};
use farside_sim::litmus::{Program, programs};
use farside_sim::random::Random;

/// Writes a history with every kind of line.
fn written(seed: u64) -> Vec<u8> {
    let random = Random::new(seed);
    let mut history = History::new();
    let mut open = Vec::new();
    for at in 0..12 {
        let (value, version) = (Value { tag: random.below(3), len: 8 }, Version(random.below(4)));
        let (ask, outcome) = match random.below(8) {
            0 => (Ask::Get, Outcome::Found(value, Some(version))),
            1 => (Ask::Get, Outcome::Absent),
            2 => (Ask::Put(value), Outcome::Done(None)),
            3 => (Ask::Delete, Outcome::Done(None)),
            4 => (Ask::Delete, Outcome::Absent),
            5 => (Ask::PutIfAbsent(value), Outcome::Conflict(Some(version))),
            6 => (Ask::CompareAndPut { expected: version, value }, Outcome::Unknown),
            _ => (Ask::CompareAndPut { expected: version, value }, Outcome::Failed),
        };
        open.push((history.call(at as u32 % 3, random.below(2), ask, at), outcome));
        if random.one_in(2) {
            let (id, outcome) = open.swap_remove(random.below(open.len() as u64) as usize);
            history.returned(id, outcome, at);
        }
    }
    let mut text = Vec::new();
    lines::write(&history, &mut text).expect("writing to a Vec cannot fail");
    text
}

/// Reads a history, writes it, reads it back, and checks it. Returns false if the input is rejected.
fn is_sound(text: &[u8]) -> bool {
    let Ok(history) = lines::read::<Ask>(text) else { return false };
    let mut again = Vec::new();
    lines::write(&history, &mut again).expect("writing to a Vec cannot fail");
    let back: History = lines::read(&again[..]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((back.digest(), &back), (history.digest(), &history));
    check(&history, Limits { steps_max: 1_000, ..Limits::default() });
    true
}

#[test]
fn fuzz_history_lines() {
    let executions = Executions::of("history lines");
    bolero::check!().with_type::<(u8, Vec<Change>)>().with_test_time(budget()).for_each(|(seed, changes)| {
        executions.one_more();
        let mut text = written(u64::from(*seed));
        assert!(is_sound(&text), "a written history is accepted");
        change(&mut text, changes);
        is_sound(&text);
    });
}

#[test]
fn fuzz_litmus_programs() {
    let executions = Executions::of("litmus programs");
    let seeds: Vec<String> = programs().iter().step_by(20).map(Program::to_string).collect();
    bolero::check!().with_type::<(u8, Vec<Change>)>().with_test_time(budget()).for_each(|(seed, changes)| {
        executions.one_more();
        let mut text = seeds[usize::from(*seed) % seeds.len()].clone().into_bytes();
        change(&mut text, changes);
        let text = String::from_utf8_lossy(&text);
        let Ok(program) = text.parse::<Program>() else { return };
        let again = program.to_string();
        assert_eq!(again.parse::<Program>().map(|program| program.to_string()), Ok(again));
    });
}
