//! Histories are the same for the same run, and survive being written down.

use farside_sim::history::lines;
use farside_sim::history::register::{Ask, History, Outcome, Value, Version};

fn value(tag: u64) -> Value {
    Value { tag, len: 64 }
}

/// One operation of each kind, with each outcome that it can have, and one that never returns.
fn everything() -> History {
    let mut history = History::new();
    let version = Some(Version(7));
    let cas = Ask::CompareAndPut { expected: Version(u64::MAX), value: value(u64::MAX) };
    let outcomes = [
        (Ask::Get, vec![Outcome::Found(value(3), version), Outcome::Found(value(3), None), Outcome::Absent]),
        (Ask::Put(value(1)), vec![Outcome::Done(None), Outcome::Done(version)]),
        (Ask::Delete, vec![Outcome::Done(None), Outcome::Absent]),
        (
            Ask::PutIfAbsent(value(2)),
            vec![Outcome::Done(version), Outcome::Conflict(version), Outcome::Conflict(None)],
        ),
        (
            cas,
            vec![
                Outcome::Done(version),
                Outcome::Conflict(version),
                Outcome::Conflict(None),
                Outcome::Absent,
            ],
        ),
    ];
    let mut ns = 0;
    for (ask, outcomes) in outcomes {
        for outcome in outcomes.into_iter().chain([Outcome::Failed, Outcome::Unknown]) {
            let other = history.call(9, 4, Ask::Get, ns);
            let id = history.call(3, 5, ask, ns);
            history.returned(id, outcome, ns + 10);
            history.returned(other, Outcome::Absent, ns + 10);
            ns += 20;
        }
    }
    history.call(3, 5, Ask::Delete, ns);
    history
}

fn written(history: &History) -> String {
    let mut out = Vec::new();
    lines::write(history, &mut out).expect("a Vec takes everything");
    String::from_utf8(out).expect("JSON is text")
}

#[test]
fn a_digest_is_the_same_in_every_build() {
    assert_eq!(History::new().digest(), 0);
    // If this moves, digests that people noted down no longer compare: say so in the changelog.
    assert_eq!(everything().digest(), 0xf56b_59e2_779b_e5f5, "{:#x}", everything().digest());
}

#[test]
fn a_digest_sees_every_field() {
    let base = |client, key, ask, called, outcome, returned| {
        let mut history = History::new();
        let id = history.call(client, key, ask, called);
        history.returned(id, outcome, returned);
        history.digest()
    };
    let put = Ask::Put(value(1));
    let mut digests = vec![
        base(0, 0, put, 0, Outcome::Unknown, 5),
        base(1, 0, put, 0, Outcome::Unknown, 5),
        base(0, 1, put, 0, Outcome::Unknown, 5),
        base(0, 0, Ask::Put(value(2)), 0, Outcome::Unknown, 5),
        base(0, 0, Ask::Put(Value { tag: 1, len: 65 }), 0, Outcome::Unknown, 5),
        base(0, 0, Ask::PutIfAbsent(value(1)), 0, Outcome::Unknown, 5),
        base(0, 0, put, 1, Outcome::Unknown, 5),
        base(0, 0, put, 0, Outcome::Unknown, 6),
        base(0, 0, put, 0, Outcome::Failed, 5),
        base(0, 0, put, 0, Outcome::Done(None), 5),
        base(0, 0, put, 0, Outcome::Done(Some(Version(0))), 5),
        base(0, 0, put, 0, Outcome::Done(Some(Version(1))), 5),
    ];
    let mut pending = History::new();
    pending.call(0, 0, put, 0);
    digests.push(pending.digest());
    let all = digests.len();
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), all);
}

#[test]
fn what_is_written_is_read_back() {
    let history = everything();
    let text = written(&history);
    assert_eq!(text.lines().count() as u64, history.events());
    let again: History = lines::read(text.as_bytes()).unwrap();
    assert_eq!(again, history);
    assert_eq!(written(&again), text);
}

#[test]
fn lines_look_as_documented() {
    let mut history = History::new();
    let write = history.call(0, 3, Ask::Put(value(17)), 100);
    let read = history.call(1, 3, Ask::Get, 120);
    history.returned(read, Outcome::Found(value(17), Some(Version(2))), 260);
    history.returned(write, Outcome::Unknown, 900);
    let cas = history.call(0, 3, Ask::CompareAndPut { expected: Version(2), value: value(18) }, 910);
    history.returned(cas, Outcome::Conflict(Some(Version(4))), 990);
    let document = include_str!("../../../../docs/sim-histories.md");
    let sample: String =
        document.lines().filter(|line| line.starts_with('{')).map(|line| format!("{line}\n")).collect();
    assert_eq!(written(&history), sample);
}

#[test]
fn a_client_is_another_process_after_an_unknown_outcome_and_for_a_second_operation_at_a_time() {
    let mut history = History::new();
    let lost = history.call(1, 0, Ask::Delete, 0);
    history.returned(lost, Outcome::Unknown, 1);
    let read = history.call(1, 0, Ask::Get, 2);
    let beside = history.call(1, 0, Ask::Get, 3);
    history.returned(read, Outcome::Absent, 4);
    history.returned(beside, Outcome::Absent, 5);
    history.call(1, 0, Ask::Get, 6);
    let text = written(&history);
    let processes: Vec<&str> = text
        .lines()
        .map(|line| line.split("\"process\":").nth(1).and_then(|rest| rest.split(',').next()).unwrap())
        .collect();
    assert_eq!(processes, ["1", "1", "3", "5", "3", "5", "3"]);
    assert_eq!(lines::read::<Ask>(text.as_bytes()).unwrap(), history);
}

#[test]
fn what_others_write_is_read_too() {
    let text = r#"{"process":4,"type":"invoke","f":"write","value":5,"key":1,"time":10,"index":0,"node":"n1"}

{"process":4,"type":"ok","f":"write","value":5,"key":1,"time":20,"index":1}"#;
    let history: History = lines::read(text.as_bytes()).unwrap();
    let operation = history.operations()[0];
    assert_eq!((operation.client, operation.outcome), (4, Outcome::Done(None)));
}

#[test]
fn bad_lines_are_refused_with_their_number_and_a_remedy() {
    let call = r#"{"index":0,"type":"invoke","process":0,"f":"write","key":1,"value":5,"len":1,"time":10}"#;
    let info = answer(call, r#""type":"info","f":"write","key":1,"value":5,"time":11"#);
    let refusals = [
        (
            "{",
            "line 1: EOF while parsing an object at line 1 column 1: give it the fields that docs/sim-histories.md",
        ),
        (
            &call.replace("\"index\":0", "\"index\":4"),
            "line 1: its index is 4, where 0 is next: keep all events",
        ),
        (&call.replace("write", "append"), "line 1: unknown variant `append`"),
        (
            &call.replace(":5", ":null"),
            "line 1: its value is no number: name the value by a number below 2^64",
        ),
        (
            &call.replace("write", "cas"),
            "line 1: a cas without the version that it expects: add \"expected\"",
        ),
        (&call.replace("\"process\":0", "\"process\":4294967296"), "line 1: process 4294967296 is too great"),
        (&call.replace("invoke", "ok"), "line 1: process 0 is answered, and has asked nothing"),
        (
            &[call, &call.replace("\"index\":0", "\"index\":1")].join("\n"),
            "line 2: process 0 asks, and its call of index 0",
        ),
        (
            &answer(call, r#""type":"ok","f":"read","key":1,"value":5,"time":11"#),
            "line 2: an answer for key 1, Read",
        ),
        (
            &answer(call, r#""type":"ok","f":"write","key":2,"value":5,"time":11"#),
            "line 2: an answer for key 2, Write",
        ),
        (
            &answer(call, r#""type":"ok","f":"write","key":1,"value":5,"time":9"#),
            "line 2: its time is 9 ns, after an event of 10 ns",
        ),
        (
            &answer(call, r#""type":"fail","f":"write","key":1,"value":5,"error":"conflict","time":11"#),
            "line 2: 'put 5' cannot be answered by 'conflict': see docs/sim-histories.md",
        ),
        (
            &answer(call, r#""type":"info","f":"write","key":1,"value":5,"error":"absent","time":11"#),
            "line 2: an error on what did not fail: leave",
        ),
        (
            &answer(
                &call.replace("write", "delete"),
                r#""type":"ok","f":"delete","key":1,"value":5,"time":11"#,
            ),
            "line 2: a delete's answer is neither true nor false: give",
        ),
        (
            &format!("{info}\n{}", info.lines().last().unwrap().replace("\"index\":1", "\"index\":2")),
            "line 3: process 0 is answered twice",
        ),
        (&" ".repeat(70_000), "line 1: more than 65536 bytes without an end of line"),
    ];
    for (text, expected) in refusals {
        let said = lines::read::<Ask>(text.as_bytes()).unwrap_err().to_string();
        assert!(said.starts_with(expected), "{said}\nexpected: {expected}");
    }
}

fn answer(call: &str, rest: &str) -> String {
    format!("{call}\n{{\"index\":1,\"process\":0,{rest}}}")
}

#[test]
#[should_panic(expected = "an operation returns once")]
fn an_operation_returns_once() {
    let mut history = History::new();
    let id = history.call(0, 0, Ask::Get, 0);
    history.returned(id, Outcome::Absent, 1);
    history.returned(id, Outcome::Absent, 2);
}

#[test]
#[should_panic(expected = "no Get is answered by Done(None)")]
fn an_answer_fits_its_question() {
    let mut history = History::new();
    let id = history.call(0, 0, Ask::Get, 0);
    history.returned(id, Outcome::Done(None), 1);
}
