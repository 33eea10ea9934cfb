//! Tests of the driver with the work of a family that exists only in this file.

use super::*;
use std::fmt;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// Work of a log: it appends entries to a log and reads the log's end. Every seventh append fails.
struct Log;

#[derive(Clone, Copy)]
enum Entry {
    Append(u64),
    Tail,
}

struct LogTrouble(Fault);

impl fmt::Display for LogTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl Trouble for LogTrouble {
    fn fault(&self) -> Fault {
        self.0
    }
}

impl Work for Log {
    const KINDS: Kinds = &["append", "tail"];
    const TIMES_STALLS: bool = true;
    type Drawn = Entry;
    type Source = u64;
    type Task = u64;
    type Trouble = LogTrouble;

    fn source(&self, _: Random) -> u64 {
        0
    }

    fn draw(next: &mut u64) -> Entry {
        *next += 1;
        if next.is_multiple_of(4) { Entry::Tail } else { Entry::Append(*next) }
    }

    fn kind(drawn: Entry) -> usize {
        match drawn {
            Entry::Append(_) => 0,
            Entry::Tail => 1,
        }
    }

    /// Returns the state of a task: the last entry that the task appended.
    fn task(&self, _: u32) -> u64 {
        0
    }

    fn records(&self) -> u64 {
        10
    }
}

/// A log: its entries, and the number of entries at which it disconnects.
struct Entries {
    all: Vec<u64>,
    max: usize,
}

impl Perform<Entries> for Log {
    async fn load(&self, log: &mut Entries, record: u64, _: &mut u64) -> Result<(), LogTrouble> {
        log.all.push(record);
        Ok(())
    }

    async fn perform(&self, log: &mut Entries, drawn: Entry, last: &mut u64) -> Result<(), LogTrouble> {
        match drawn {
            _ if log.all.len() >= log.max => Err(LogTrouble(Fault::Disconnected)),
            Entry::Append(entry) if entry.is_multiple_of(7) => Err(LogTrouble(Fault::Failed)),
            Entry::Append(entry) => {
                log.all.push(entry);
                *last = entry;
                Ok(())
            }
            Entry::Tail if log.all.last() == Some(last) => Ok(()),
            Entry::Tail => Err(LogTrouble(Fault::Violated)),
        }
    }
}

fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("the future never waits"),
    }
}

fn run() -> Run<Log> {
    Run::new(Log, 1, 1, 1).expect("a run with 1 task")
}

#[test]
fn operations_are_counted_and_timed_by_kind() {
    let (run, mut log) = (run(), Entries { all: Vec::new(), max: usize::MAX });
    now(run.load(&mut log, 0, 1, |_, _| {})).expect("every record is loaded");
    assert_eq!(log.all, (0..10).collect::<Vec<_>>());
    let thread = run.thread(0);
    thread.limit(40);
    assert!(now(run.task(&mut log, &thread, 0, u64::MAX)), "the connection is not lost");
    let tally = thread.take_tally();
    assert_eq!((tally.kinds, &*tally.done), (Log::KINDS, &[30, 10][..]));
    assert_eq!([0, 1].map(|kind| tally.latencies.of(kind).expect("latencies").count()), [30, 10]);
    // A histogram's maximum is rounded.
    let slowest = tally.latencies.all().max_us();
    assert!(tally.longest_stall.as_secs_f64() * 1e6 > 0.99 * slowest, "a stall is as long as an operation");
    let next = thread.take_tally();
    assert_eq!((next.operations(), next.longest_stall), (0, Duration::ZERO), "the tally was reset");
}

#[test]
fn trouble_is_counted_by_its_fault_and_a_lost_connection_ends_a_task() {
    let (run, mut log) = (run(), Entries { all: Vec::new(), max: 8 });
    let thread = run.thread(0);
    log.all.push(0);
    let at_once = Schedule { first: Instant::now(), every: Duration::ZERO };
    now(run.scheduled(&mut log, &thread, 0, at_once, async |_| true));
    let mut all = Tally::default();
    all.merge(thread.take_tally());
    // 1, 2, 3, tail, 5, 6, 7 (fails), tail, 9, 10, and then the log disconnects.
    assert_eq!((all.errors, all.violations), (2, 0));
    assert_eq!(all.failures, ["Failed", "Disconnected"]);
    assert_eq!(all.service.all().count(), all.operations());
    let mut other = Entries { all: Vec::new(), max: usize::MAX };
    let thread = run.thread(0);
    for _ in 0..4 {
        now(run.task(&mut other, &thread, 0, 1)); // A new task each time, which has not appended anything.
    }
    assert_eq!(thread.take_tally().violations, 1);
}
