//! Fuzz targets for input from people and other tools: histories as JSON lines, litmus programs as text, and files of
//! logs.
//!
//! Properties: no input causes a panic. Accepted input can be written, and the written form reads back as the same
//! value.

#[path = "../../../remote/tests/support/fuzz.rs"]
mod driver;

use driver::{Change, Executions, budget, change};
use farside_node::log::format::{Head, Part, Source, put_frame, put_head, read};
use farside_sim::history::lines;
use farside_sim::history::register::{Ask, History, Outcome, Value, Version};
use farside_sim::linearizable::{Limits, check};
use farside_sim::litmus::{Program, programs};
use farside_sim::random::Random;
use std::borrow::Cow;

/// Writes a history with every kind of line.
fn written(seed: u64) -> Vec<u8> {
    let random = Random::new(seed);
    let mut history = History::new();
    let mut open = Vec::new();
    for at in 0..12 {
        let (value, version) = (Value { tag: random.below(3), len: 8 }, Version(random.below(4)));
        let (ask, outcome) = match random.below(9) {
            7 => (Ask::Contains, if random.one_in(2) { Outcome::Present } else { Outcome::Absent }),
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

#[test]
fn fuzz_logs() {
    let executions = Executions::of("logs");
    bolero::check!().with_type::<(u8, Vec<Change>)>().with_test_time(budget()).for_each(|(seed, changes)| {
        executions.one_more();
        let (mut bytes, count) = written_log(u64::from(*seed));
        assert_eq!(records_of(&bytes), Some(count), "a written log is read");
        change(&mut bytes, changes);
        assert!(records_of(&bytes).is_none_or(|read| read <= count), "no record is made up");
    });
}

/// Writes a file of a log, and returns it with the number of its records.
fn written_log(seed: u64) -> (Vec<u8>, u64) {
    let random = Random::new(seed);
    let (mut bytes, salt, count) = (Vec::new(), random.bits(), random.below(12));
    let store = serde_json::json!({
        "name": "s", "kind": "k", "parameters": "", "quota": 1, "incarnation": 1, "region": 1, "secret": 0,
        "table_at": 0, "table_len": 1, "wide": false, "created": 0, "id": 1
    });
    let store = Cow::Owned(serde_json::from_value(store).expect("a store"));
    let first = 1 + random.below(3);
    put_head(&mut bytes, salt, &Head { part: Part::Log, generation: 1, first, store });
    for sequence in first..first + count {
        let record = vec![sequence as u8; 1 + random.below(40) as usize];
        put_frame(&mut bytes, salt, sequence, random.below(sequence), &record);
    }
    (bytes, count)
}

/// Reads a file of a log, whatever it contains. Returns the number of its records, if it has a head.
fn records_of(bytes: &[u8]) -> Option<u64> {
    struct Bytes<'a>(&'a [u8]);
    impl Source for Bytes<'_> {
        fn read_at(&self, at: u64, out: &mut [u8]) -> std::io::Result<usize> {
            let rest = self.0.get(at as usize..).unwrap_or_default();
            let len = rest.len().min(out.len());
            out[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        }
    }
    let mut records = 0;
    let contents = read(&Bytes(bytes), |_, _| {
        records += 1;
        Ok::<_, std::io::Error>(())
    });
    contents.expect("memory has no errors").map(|contents| {
        assert!(contents.len <= bytes.len() as u64, "the valid part lies within the file");
        records
    })
}
