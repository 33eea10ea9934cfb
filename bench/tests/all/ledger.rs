//! Tests of the ledger: on small histories with a known verdict, and on thousands of random histories. The random
//! histories are also judged by the simulator's checker, a search that shares no code with the ledger.

use std::sync::{Barrier, Mutex};

use farside_bench::verify::{Begun, Ledger, Stamp, Violation, Written, encode};
use farside_bench::workload::random;
use farside_sim::history::register::{Ask, History, Outcome, Value};
use farside_sim::linearizable::{Limits, check};
use rand_core::Rng;

const KEY: u64 = 7;
const SIZE: usize = 64;

fn bytes(stamp: Stamp) -> Vec<u8> {
    let mut value = vec![0; SIZE];
    encode(KEY, stamp.writer, stamp.sequence, &mut value).expect("a value long enough");
    value
}

/// A ledger on which a test runs operations on one key.
struct Story(Ledger);

impl Story {
    fn new() -> Story {
        Story(Ledger::new(4))
    }

    fn begin_write(&self, writer: u32) -> (Begun, Stamp) {
        self.0.begin_write(KEY, writer)
    }

    fn write(&self, writer: u32) -> Stamp {
        let (begun, stamp) = self.begin_write(writer);
        self.0.end_write(begun, stamp, Written::Yes).expect("a write that ran is not a violation");
        stamp
    }

    fn end_read(&self, begun: Begun, stamp: Option<Stamp>) -> Result<(), Violation> {
        self.0.end_read(begun, stamp.map(bytes).as_deref())
    }

    fn read(&self, stamp: Option<Stamp>) -> Result<(), Violation> {
        self.end_read(self.0.begin_read(KEY), stamp)
    }
}

#[test]
fn a_read_during_a_write_may_return_the_new_or_the_old_value() {
    let story = Story::new();
    let old = story.write(0);
    let (begun, new) = story.begin_write(1);
    assert_eq!(story.read(Some(old)), Ok(()));
    assert_eq!(story.read(Some(new)), Ok(()));
    let went_back = Violation::WentBack { key: KEY, read: old, newer: Some(new) };
    assert_eq!(
        story.read(Some(old)),
        Err(went_back),
        "after a read of the new value, no read may return the old one"
    );
    assert_eq!(story.0.end_write(begun, new, Written::Yes), Ok(()));
    assert_eq!(story.read(Some(new)), Ok(()));
}

#[test]
fn a_stale_read_is_detected_however_long_ago_its_value_was_replaced() {
    let story = Story::new();
    let old = story.write(0);
    let began_before = story.0.begin_read(KEY);
    let new = story.write(0);
    assert!(matches!(story.read(Some(old)), Err(Violation::WentBack { read, .. }) if read == old));
    assert_eq!(
        story.end_read(began_before, Some(old)),
        Ok(()),
        "this read started while the value was present"
    );
    let newer = [(); 100].map(|()| story.write(1)).last().copied();
    for stale in [old, new] {
        assert_eq!(story.read(Some(stale)), Err(Violation::WentBack { key: KEY, read: stale, newer }));
    }
}

#[test]
fn a_lost_update_is_detected_by_the_next_read() {
    let story = Story::new();
    let old = story.write(0);
    let lost = story.write(1);
    let violation = Violation::WentBack { key: KEY, read: old, newer: Some(lost) };
    assert_eq!(story.read(Some(old)), Err(violation));
}

#[test]
fn either_of_two_concurrent_writes_may_be_last_but_not_both() {
    let story = Story::new();
    let (one_begun, one) = story.begin_write(0);
    let (two_begun, two) = story.begin_write(1);
    story.0.end_write(one_begun, one, Written::Yes).expect("the write ran");
    story.0.end_write(two_begun, two, Written::Yes).expect("the write ran");
    assert_eq!(story.read(Some(one)), Ok(()));
    assert!(matches!(story.read(Some(two)), Err(Violation::WentBack { .. })));
    assert_eq!(story.read(Some(one)), Ok(()), "a violation does not change the ledger");
}

/// The write of `third` ended before the read of `first` started, while the order of `second` is still open. So the
/// ledger must keep `first`.
#[test]
fn a_value_is_kept_while_only_it_determines_the_order_of_others() {
    let story = Story::new();
    let (first_begun, first) = story.begin_write(0);
    let (third_begun, third) = story.begin_write(2);
    story.0.end_write(first_begun, first, Written::Yes).expect("the write ran");
    let (second_begun, second) = story.begin_write(1);
    story.0.end_write(third_begun, third, Written::Yes).expect("the write ran");
    let read = story.0.begin_read(KEY);
    story.0.end_write(second_begun, second, Written::Yes).expect("the write ran");
    assert_eq!(story.end_read(read, Some(first)), Ok(()), "`second` may come after `first`");
    let violation = Violation::WentBack { key: KEY, read: third, newer: Some(first) };
    assert_eq!(story.read(Some(third)), Err(violation));
    assert_eq!(story.read(Some(second)), Ok(()));
}

#[test]
fn a_key_that_was_written_must_not_be_missing() {
    let story = Story::new();
    assert_eq!(story.read(None), Ok(()), "no value was written yet");
    story.write(0);
    assert_eq!(story.read(None), Err(Violation::Missing { key: KEY }));
}

#[test]
fn a_value_that_was_never_written_is_a_violation() {
    let story = Story::new();
    story.write(0);
    for (read, issued) in [
        (Stamp { writer: 0, sequence: 2 }, 1),
        (Stamp { writer: 1, sequence: 1 }, 0),
        (Stamp { writer: 99, sequence: 1 }, 0),
        (Stamp { writer: 0, sequence: 0 }, 1),
    ] {
        assert_eq!(story.read(Some(read)), Err(Violation::NeverWritten { key: KEY, read, issued }));
    }
    let begun = story.0.begin_read(KEY);
    assert_eq!(story.0.end_read(begun, Some(&[0; SIZE])), Err(Violation::Torn { key: KEY }));
    let begun = story.0.begin_read(KEY + 1);
    let of_another = bytes(Stamp { writer: 0, sequence: 1 });
    let violation = Violation::OtherKey { key: KEY + 1, found: KEY };
    assert_eq!(story.0.end_read(begun, Some(&of_another)), Err(violation));
}

#[test]
fn a_write_of_unknown_fate_may_be_seen_at_any_later_time() {
    let story = Story::new();
    let old = story.write(0);
    let (begun, unknown) = story.begin_write(1);
    story.0.end_write(begun, unknown, Written::Unknown).expect("an unknown outcome is not a violation");
    assert_eq!(story.read(Some(old)), Ok(()));
    let newer = story.write(0);
    assert_eq!(story.read(Some(newer)), Ok(()));
    assert_eq!(story.read(Some(unknown)), Ok(()));
    assert!(story.read(Some(newer)).is_err());
}

#[test]
fn a_write_that_did_not_run_must_not_be_seen() {
    let story = Story::new();
    let old = story.write(0);
    let (begun, unseen) = story.begin_write(1);
    assert_eq!(story.0.end_write(begun, unseen, Written::No), Ok(()));
    assert_eq!(story.read(Some(old)), Ok(()));
    assert!(story.read(Some(unseen)).is_err());
    let (begun, seen) = story.begin_write(1);
    assert_eq!(story.read(Some(seen)), Ok(()));
    let violation = Violation::NotRun { key: KEY, read: seen };
    assert_eq!(story.0.end_write(begun, seen, Written::No), Err(violation));
}

#[test]
fn a_failed_read_constrains_no_later_read() {
    let story = Story::new();
    let begun = story.0.begin_read(KEY);
    let stamp = story.write(0);
    story.0.fail_read(begun);
    assert_eq!(story.read(Some(stamp)), Ok(()));
}

/// An operation that is in flight in both checkers.
enum InFlight {
    Read(Begun),
    Write(Begun, Stamp),
}

/// Runs a random history of one key through both checkers. Returns whether each finds a violation.
fn both_verdicts(seed: u64) -> (bool, bool) {
    let mut random = random(seed);
    let mut below = |end: u64| random.next_u64() % end;
    let (operations, clients) = (4 + below(9), 2 + below(3));
    let story = Story::new();
    let mut history = History::new();
    let mut written: Vec<Option<Stamp>> = vec![None];
    let mut in_flight = Vec::new();
    let (mut begun, mut ns, mut violated) = (0, 0, false);
    let tag = |stamp: Stamp| Value { tag: u64::from(stamp.writer) << 32 | stamp.sequence, len: SIZE as u32 };
    while begun < operations || !in_flight.is_empty() {
        ns += 1;
        let is_free = (in_flight.len() as u64) < clients && begun < operations;
        if is_free && (in_flight.is_empty() || below(2) == 0) {
            begun += 1;
            let client = begun as u32;
            if below(5) < 3 {
                let id = history.call(client, KEY, Ask::Get, ns);
                in_flight.push((id, InFlight::Read(story.0.begin_read(KEY))));
            } else {
                let (begun, stamp) = story.begin_write(below(4) as u32);
                written.push(Some(stamp));
                let id = history.call(client, KEY, Ask::Put(tag(stamp)), ns);
                in_flight.push((id, InFlight::Write(begun, stamp)));
            }
            continue;
        }
        let (id, ended) = in_flight.swap_remove(below(in_flight.len() as u64) as usize);
        let judged = match ended {
            InFlight::Read(begun) => {
                // Mostly the newest values, otherwise almost no history would be linearizable.
                let back = below(3).min(below(4)).min(written.len() as u64 - 1) as usize;
                let stamp = written[written.len() - 1 - back];
                let found = stamp.map_or(Outcome::Absent, |stamp| Outcome::Found(tag(stamp), None));
                history.returned(id, found, ns);
                story.end_read(begun, stamp)
            }
            InFlight::Write(begun, stamp) => match below(12) {
                // An operation with an unknown outcome has no end in the history: it may still take effect.
                0 => story.0.end_write(begun, stamp, Written::Unknown),
                1 => {
                    history.returned(id, Outcome::Failed, ns);
                    story.0.end_write(begun, stamp, Written::No)
                }
                _ => {
                    history.returned(id, Outcome::Done(None), ns);
                    story.0.end_write(begun, stamp, Written::Yes)
                }
            },
        };
        violated |= judged.is_err();
        if violated {
            break;
        }
    }
    let report = check(&history, Limits::default());
    assert_eq!(report.undecided, [], "seed {seed}");
    (violated, !report.violated.is_empty())
}

#[test]
fn the_ledger_and_the_search_agree_on_every_random_history() {
    let (mut right, mut wrong) = (0, 0);
    for seed in 1..=60_000 {
        let (by_ledger, by_search) = both_verdicts(seed);
        assert_eq!(by_ledger, by_search, "seed {seed}: only one of ledger and search finds a violation");
        *if by_ledger { &mut wrong } else { &mut right } += 1;
    }
    println!("{right} histories were linearizable, {wrong} were not");
    assert!(right > 5_000 && wrong > 5_000, "too few of one kind: {right} linearizable, {wrong} not");
}

/// Threads read and write an atomic store as fast as they can. Every violation that the ledger finds is an error of
/// the ledger.
#[test]
fn an_atomic_store_has_no_violations_across_threads() {
    const KEYS: u64 = 4;
    const ROUNDS: u64 = 20_000;
    let ledger = Ledger::new(4);
    let store: Vec<Mutex<Option<Vec<u8>>>> = (0..KEYS).map(|_| Mutex::default()).collect();
    let start = Barrier::new(4);
    let (ledger, store, start) = (&ledger, &store, &start);
    std::thread::scope(|scope| {
        for writer in 0..4u32 {
            scope.spawn(move || {
                start.wait();
                let mut random = random(u64::from(writer));
                for _ in 0..ROUNDS {
                    let key = random.next_u64() % KEYS;
                    if random.next_u64().is_multiple_of(2) {
                        let begun = ledger.begin_read(key);
                        let read = store[key as usize].lock().expect("no panic").clone();
                        ledger.end_read(begun, read.as_deref()).expect("an atomic store");
                    } else {
                        let (begun, stamp) = ledger.begin_write(key, writer);
                        let mut value = vec![0; SIZE];
                        encode(key, stamp.writer, stamp.sequence, &mut value).expect("a value long enough");
                        *store[key as usize].lock().expect("no panic") = Some(value);
                        ledger.end_write(begun, stamp, Written::Yes).expect("an atomic store");
                    }
                }
            });
        }
    });
}
