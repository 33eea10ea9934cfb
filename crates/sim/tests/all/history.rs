//! Tests that histories are deterministic, and that a history which is written and read back stays the same.

use farside_sim::history::lines;
use farside_sim::history::register::{Ask, History, Outcome, Value, Version};

fn value(tag: u64) -> Value {
    Value { tag, len: 64 }
}

/// Returns a history with each kind of operation with each of its outcomes, and one operation that never returns.
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
        (Ask::Contains, vec![Outcome::Present, Outcome::Absent]),
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
    lines::write(history, &mut out).expect("writing to a Vec cannot fail");
    String::from_utf8(out).expect("JSON is text")
}

#[test]
fn a_digest_is_the_same_in_every_build() {
    assert_eq!(History::new().digest(), 0);
    // If this changes, saved digests no longer match: say so in the changelog.
    assert_eq!(everything().digest(), 0x39c3_cd86_e449_afa4, "{:#x}", everything().digest());
}

#[test]
fn a_digest_depends_on_every_field() {
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
fn a_written_history_is_read_back() {
    let history = everything();
    let text = written(&history);
    assert_eq!(text.lines().count() as u64, history.events());
    let again: History = lines::read(text.as_bytes()).unwrap();
    assert_eq!(again, history);
    assert_eq!(written(&again), text);
}

#[test]
fn lines_match_the_documented_format() {
    let mut history = History::new();
    let write = history.call(0, 3, Ask::Put(value(17)), 100);
    let read = history.call(1, 3, Ask::Get, 120);
    history.returned(read, Outcome::Found(value(17), Some(Version(2))), 260);
    history.returned(write, Outcome::Unknown, 900);
    let cas = history.call(0, 3, Ask::CompareAndPut { expected: Version(2), value: value(18) }, 910);
    history.returned(cas, Outcome::Conflict(Some(Version(4))), 990);
    let document = include_str!("../../../../docs/sim-histories.md");
    let sample: String =
        document.lines().filter(|line| line.starts_with("{\"")).map(|line| format!("{line}\n")).collect();
    assert_eq!(written(&history), sample);
}

#[test]
fn a_client_is_as_many_processes_as_it_needs() {
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
fn histories_of_other_tools_are_read() {
    let text = r#"{"process":4,"type":"invoke","f":"write","value":5,"key":1,"time":10,"index":0,"node":"n1"}

{"process":4,"type":"ok","f":"write","value":5,"key":1,"time":20,"index":1}"#;
    let history: History = lines::read(text.as_bytes()).unwrap();
    let operation = history.operations()[0];
    assert_eq!((operation.client, operation.outcome), (4, Outcome::Done(None)));
}

#[test]
fn invalid_lines_are_refused_with_number_and_remedy() {
    let call = r#"{"index":0,"type":"invoke","process":0,"f":"write","key":1,"value":5,"len":1,"time":10}"#;
    let info = answer(call, r#""type":"info","f":"write","key":1,"value":5,"time":11"#);
    let refusals = [
        (
            "{",
            "line 1: EOF while parsing an object at line 1 column 1: write the fields that docs/sim-histories.md",
        ),
        (
            &call.replace("\"index\":0", "\"index\":4"),
            "line 1: its index is 4, but the next index is 0: keep all events",
        ),
        (&call.replace("write", "append"), "line 1: unknown variant `append`"),
        (
            &call.replace(":5", ":null"),
            "line 1: its value is not a number: set \"value\" to a number below 2^64",
        ),
        (&call.replace("write", "cas"), "line 1: a cas without an expected version: add \"expected\""),
        (&call.replace("\"process\":0", "\"process\":4294967296"), "line 1: process 4294967296 is too large"),
        (&call.replace("invoke", "ok"), "line 1: process 0 returns, but has no call"),
        (
            &[call, &call.replace("\"index\":0", "\"index\":1")].join("\n"),
            "line 2: process 0 makes a call, but its call of index 0",
        ),
        (
            &answer(call, r#""type":"ok","f":"read","key":1,"value":5,"time":11"#),
            "line 2: a return for key 1, Read",
        ),
        (
            &answer(call, r#""type":"ok","f":"write","key":2,"value":5,"time":11"#),
            "line 2: a return for key 2, Write",
        ),
        (
            &answer(call, r#""type":"ok","f":"write","key":1,"value":5,"time":9"#),
            "line 2: its time is 9 ns, after an event of 10 ns",
        ),
        (
            &answer(call, r#""type":"fail","f":"write","key":1,"value":5,"error":"conflict","time":11"#),
            "line 2: 'put 5' cannot have the outcome 'conflict': see docs/sim-histories.md",
        ),
        (
            &answer(call, r#""type":"info","f":"write","key":1,"value":5,"error":"absent","time":11"#),
            "line 2: an error on a line whose type is not fail: remove",
        ),
        (
            &answer(
                &call.replace("write", "delete"),
                r#""type":"ok","f":"delete","key":1,"value":5,"time":11"#,
            ),
            "line 2: the value of a delete's return is neither true nor false: give",
        ),
        (
            &format!("{info}\n{}", info.lines().last().unwrap().replace("\"index\":1", "\"index\":2")),
            "line 3: process 0 returns twice",
        ),
        (&" ".repeat(70_000), "line 1: the line is longer than 65536 bytes"),
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
#[should_panic(expected = "Get cannot have the outcome Done(None)")]
fn an_outcome_fits_its_operation() {
    let mut history = History::new();
    let id = history.call(0, 0, Ask::Get, 0);
    history.returned(id, Outcome::Done(None), 1);
}

#[test]
fn a_scan_is_one_call_and_a_list_of_items() {
    use farside_sim::history::map;
    let mut history = map::History::new();
    let put = history.call(0, 7, map::Ask::Put(value(3)), 10);
    history.returned(put, map::Outcome::Done, 20);
    let scan = history.call(1, 5, map::Ask::Scan { keys: 4, limit: 2 }, 30);
    let items = vec![map::Item { distance: 2, value: value(3) }];
    history.returned(scan, map::Outcome::Scanned(items.clone()), 40);
    let mut out = Vec::new();
    lines::write(&history, &mut out).expect("writing to a Vec cannot fail");
    let written = String::from_utf8(out).expect("JSON is text");
    let scanned: Vec<&str> = written.lines().skip(2).collect();
    let line = |index: u64, kind: &str, value: &str, time: u64| {
        format!(
            r#"{{"index":{index},"type":"{kind}","process":1,"client":1,"f":"scan","key":5,"value":{value},"#,
        ) + &format!(r#""keys":4,"limit":2,"time":{time}}}"#)
    };
    assert_eq!(scanned, [line(2, "invoke", "null", 30), line(3, "ok", "[[2,3]]", 40)]);
    // The items count in the digest.
    let mut other = map::History::new();
    let put = other.call(0, 7, map::Ask::Put(value(3)), 10);
    other.returned(put, map::Outcome::Done, 20);
    let scan = other.call(1, 5, map::Ask::Scan { keys: 4, limit: 2 }, 30);
    let items = vec![map::Item { distance: 3, ..items[0] }];
    other.returned(scan, map::Outcome::Scanned(items), 40);
    assert_ne!(history.digest(), other.digest());
}
