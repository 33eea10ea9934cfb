//! Drives a key-value store through a workload: so many tasks a thread, each with one operation under way, in a closed
//! loop, or by a schedule.
//!
//! Invariant: keys and operations are drawn before the clock runs, but where records are added, on which what is drawn
//! depends; and every value read is looked at: at the least its first and last bytes, with verification all of them
//! and its place in time.
//! Invariant: the key of a task's next operation depends on what the last one read, so that no processor can
//! overlap two operations that a program could not.
//! Invariant: by a schedule, an operation's latency begins when it was due, however late it was begun: what waited
//! because the store stood still is counted (Tene's "coordinated omission").

mod records;
mod tally;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use farside_remote::FabricError;
use farside_remote::fabric::Ran;
use farside_systems::kv::{Kv, KvError};

use crate::report::Latencies;
use crate::verify::{self, Ledger, Written};
use crate::workload::{self, Chooser, KeyChooser, Operation, Random, Workload};
use records::Records;
use tally::Intervals;
pub use tally::{ByOperation, Interval, Tally};

/// What all clients of a run share.
pub struct Run {
    pub(crate) workload: Workload,
    value_size: usize,
    ledger: Option<Ledger>,
    /// The writer of what is loaded.
    loader: u32,
    records: Arc<Records>,
    stop: AtomicBool,
    seed: u64,
    sampled: u64,
}

/// What is to be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What clients do.
    pub workload: Workload,
    /// Bytes of a value.
    pub value_size: usize,
    /// Tasks of all threads.
    pub tasks: u32,
    /// Whether every value proves itself, and every key is held to be one register.
    pub verify: bool,
    /// One latency is taken in so many operations, at least 1.
    pub sampled: u64,
    /// Of all that is drawn.
    pub seed: u64,
}

/// What one thread's tasks share: the operations that they are to do.
pub struct Thread {
    draws: Draws,
    /// How many more are to be counted.
    left: Cell<u64>,
    /// How many have begun and not ended.
    under_way: Cell<u64>,
    tally: RefCell<Tally>,
    intervals: RefCell<Option<Intervals>>,
}

enum Draws {
    /// Drawn in advance; they are gone through again and again.
    Ahead { drawn: Vec<Drawn>, next: Cell<usize> },
    /// Drawn one by one, since it depends on the newest record.
    Live(RefCell<Live>),
}

struct Live {
    chooser: Chooser,
    keys: KeyChooser,
    random: Random,
    records: Arc<Records>,
}

#[derive(Clone, Copy)]
pub(crate) struct Drawn {
    pub(crate) key: u64,
    pub(crate) operation: Operation,
}

/// When a task's operations are due: one, and then the next after so long, each at its time however late the last was.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// When the first is due.
    pub first: Instant,
    /// From each to the next.
    pub every: Duration,
}

/// Operations drawn for each thread.
const DRAWN: usize = 1 << 20;
const _: () = assert!(DRAWN.is_power_of_two());

impl Run {
    /// A run as planned.
    ///
    /// # Errors
    /// The workload scans, or the values are too small to be verified, or there are no tasks.
    pub fn new(plan: Plan) -> Result<Run, String> {
        let Plan { workload, value_size, tasks, verify, sampled, seed } = plan;
        if workload.mix.share(Operation::Scan) > 0.0 {
            return Err(format!(
                "workload {} scans, and no system here can: choose a, b, c, d or f",
                workload.name
            ));
        }
        if verify && value_size < verify::VALUE_SIZE_MIN {
            return Err(format!(
                "values of {value_size} bytes cannot be verified: give --value-size {} at least",
                verify::VALUE_SIZE_MIN
            ));
        }
        if tasks == 0 {
            return Err("no task would do anything: give one at least".into());
        }
        let records = Arc::new(Records::new(workload.records));
        let ledger = verify.then(|| Ledger::new(tasks + 1));
        let stop = AtomicBool::new(false);
        let sampled = sampled.max(1);
        Ok(Run { workload, value_size, ledger, loader: tasks, records, stop, seed, sampled })
    }

    /// Bytes of a value.
    pub fn value_size(&self) -> usize {
        self.value_size
    }

    /// Every task ends after the operation that it is at.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether tasks are to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// The tasks may begin anew.
    pub fn resume(&self) {
        self.stop.store(false, Ordering::Relaxed);
    }

    /// Draws what thread number `thread` is to do.
    pub fn thread(&self, thread: u32) -> Thread {
        let mut random =
            workload::random(self.seed ^ (u64::from(thread) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (mut chooser, mut keys) = (self.workload.chooser(), self.workload.keys());
        let draws = if self.workload.mix.share(Operation::Insert) > 0.0 {
            Draws::Live(RefCell::new(Live { chooser, keys, random, records: Arc::clone(&self.records) }))
        } else {
            let newest = self.records.newest();
            let drawn = (0..DRAWN)
                .map(|_| Drawn { operation: chooser.next(&mut random), key: keys.next(newest, &mut random) });
            Draws::Ahead { drawn: drawn.collect(), next: Cell::new(0) }
        };
        Thread {
            draws,
            left: Cell::new(u64::MAX),
            under_way: Cell::new(0),
            tally: RefCell::default(),
            intervals: RefCell::default(),
        }
    }

    /// Puts the records `task`, `task + tasks`, `task + 2 * tasks`, … and tells how many after every thousand.
    ///
    /// # Errors
    /// A put's, in words.
    pub async fn load<K: Kv>(
        &self,
        kv: &mut K,
        task: u64,
        tasks: u64,
        mut progress: impl FnMut(u64, &Latencies),
    ) -> Result<(), String> {
        const STEP: u64 = 1000;
        let mut value = vec![0; self.value_size];
        let mut latencies = Latencies::new();
        let mut done = 0;
        for key in (task..self.workload.records).step_by(tasks as usize) {
            let since = Instant::now();
            self.write(kv, self.loader, key, &mut value).await.map_err(|trouble| trouble.to_string())?;
            latencies.record(since.elapsed());
            done += 1;
            if done % STEP == 0 {
                progress(STEP, &latencies);
                latencies.clear();
            }
        }
        progress(done % STEP, &latencies);
        Ok(())
    }

    /// Does operations until [`Run::stop`], or `limit` of them, or until the thread has done all that it may. False if
    /// it ended before that, because nothing more will come of this connection.
    pub async fn task<K: Kv>(&self, kv: &mut K, thread: &Thread, writer: u32, limit: u64) -> bool {
        let mut value = vec![0; self.value_size];
        let mut done = 0;
        let mut doubt = 0;
        while done < limit && !self.stop.load(Ordering::Relaxed) && thread.may_begin() {
            let drawn = thread.draw(doubt);
            let since = (done % self.sampled == 0).then(Instant::now);
            let result = self.operation(kv, drawn, writer, &mut value).await;
            let judged = thread.judge(drawn, result);
            thread.count(drawn.operation, since);
            match judged {
                Judged::Right => doubt = 0,
                Judged::Wrong => doubt = 1,
                Judged::Over => return false,
            }
            done += 1;
        }
        true
    }

    /// As [`task`](Run::task), one operation after the other as they are due; `wait` returns at that time, and says
    /// whether it goes on.
    pub async fn scheduled<K: Kv>(
        &self,
        kv: &mut K,
        thread: &Thread,
        writer: u32,
        schedule: Schedule,
        wait: impl AsyncFn(Instant) -> bool,
    ) {
        let mut value = vec![0; self.value_size];
        let mut due = schedule.first;
        while !self.stop.load(Ordering::Relaxed) && thread.may_begin() {
            if !wait(due).await || self.stop.load(Ordering::Relaxed) {
                thread.under_way.set(thread.under_way.get() - 1);
                break;
            }
            let drawn = thread.draw(0);
            let begun = Instant::now();
            let result = self.operation(kv, drawn, writer, &mut value).await;
            let judged = thread.judge(drawn, result);
            // Also one that failed: whoever asked has waited for it.
            thread.count(drawn.operation, Some(due));
            thread.tally.borrow_mut().service.record(drawn.operation, begun.elapsed());
            if judged == Judged::Over {
                break;
            }
            due += schedule.every;
        }
    }

    /// Whether what was read is wrong.
    #[inline]
    async fn operation<K: Kv>(
        &self,
        kv: &mut K,
        drawn: Drawn,
        writer: u32,
        value: &mut [u8],
    ) -> Result<bool, Trouble> {
        match drawn.operation {
            Operation::Update => self.write(kv, writer, drawn.key, value).await.map(|()| false),
            // One place for both, so that a read is polled without a detour.
            read @ (Operation::Read | Operation::ReadModifyWrite) => {
                let wrong = self.read(kv, drawn.key).await?;
                if read == Operation::ReadModifyWrite {
                    self.write(kv, writer, drawn.key, value).await?;
                }
                Ok(wrong)
            }
            Operation::Insert => {
                let key = self.records.begin();
                let inserted = self.write(kv, writer, key, value).await;
                self.records.end(key);
                inserted.map(|()| false)
            }
            Operation::Scan => unreachable!("workloads that scan are refused"),
        }
    }

    #[inline]
    async fn read<K: Kv>(&self, kv: &mut K, key: u64) -> Result<bool, Trouble> {
        let Some(ledger) = &self.ledger else {
            let item = kv.get(&workload::key(key)).await?;
            return Ok(!item.is_some_and(|item| looks_right(key, self.value_size, item.value)));
        };
        let begun = ledger.begin_read(key);
        match kv.get(&workload::key(key)).await {
            Ok(item) => ledger.end_read(begun, item.map(|item| item.value))?,
            Err(error) => {
                ledger.fail_read(begun);
                return Err(error.into());
            }
        }
        Ok(false)
    }

    async fn write<K: Kv>(&self, kv: &mut K, writer: u32, key: u64, value: &mut [u8]) -> Result<(), Trouble> {
        let Some(ledger) = &self.ledger else {
            fill(key, value);
            return Ok(kv.put(&workload::key(key), value).await?);
        };
        let (begun, stamp) = ledger.begin_write(key, writer);
        verify::encode(key, stamp.writer, stamp.sequence, value).expect("the size was checked");
        let put = kv.put(&workload::key(key), value).await;
        let written = match put.as_ref().map_err(KvError::ran) {
            Ok(()) | Err(Ran::Yes) => Written::Yes,
            Err(Ran::No) => Written::No,
            Err(Ran::Unknown) => Written::Unknown,
        };
        let judged = ledger.end_write(begun, stamp, written);
        put?;
        Ok(judged?)
    }
}

enum Trouble {
    Failed(KvError),
    Violated(verify::Violation),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Failed(error) => error.fmt(f),
            Trouble::Violated(violation) => violation.fmt(f),
        }
    }
}

impl From<KvError> for Trouble {
    fn from(error: KvError) -> Trouble {
        Trouble::Failed(error)
    }
}

impl From<verify::Violation> for Trouble {
    fn from(violation: verify::Violation) -> Trouble {
        Trouble::Violated(violation)
    }
}

#[derive(PartialEq)]
enum Judged {
    Right,
    Wrong,
    /// Nothing more will come of this connection.
    Over,
}

impl Thread {
    /// Only so many more operations are done, those that are under way among them.
    pub fn limit(&self, operations: u64) {
        self.left.set(operations);
    }

    /// Whether one more may begin.
    pub fn is_open(&self) -> bool {
        self.left.get() > 0
    }

    /// What the thread's tasks came to, and begins to count anew.
    pub fn take_tally(&self) -> Tally {
        drop(self.intervals.take()); // The last one is over.
        self.tally.take()
    }

    /// Forgets how much was done and how fast, but nothing that went wrong: what a warm-up ends with.
    pub fn forget_warm_up(&self) {
        let mut tally = self.tally.borrow_mut();
        (tally.done, tally.latencies, tally.service) = Default::default();
    }

    /// Sends the latencies of each interval from `since` on, once it is over.
    pub fn cut(&self, since: Instant, every: Duration, to: mpsc::Sender<Interval>) {
        *self.intervals.borrow_mut() = Some(Intervals::new(since, every, to));
    }

    /// What is to be done next. It depends on whether what was read last was wrong: 0 if not, else 1.
    #[inline]
    pub(crate) fn draw(&self, doubt: usize) -> Drawn {
        match &self.draws {
            Draws::Ahead { drawn, next } => {
                let place = (next.get() + doubt) & (DRAWN - 1);
                next.set(place + 1);
                drawn[place]
            }
            Draws::Live(live) => {
                let Live { chooser, keys, random, records } = &mut *live.borrow_mut();
                Drawn { operation: chooser.next(random), key: keys.next(records.newest(), random) }
            }
        }
    }

    /// Whether one more may begin; it counts as begun.
    #[inline]
    pub(crate) fn may_begin(&self) -> bool {
        let under_way = self.under_way.get();
        let may = under_way < self.left.get();
        self.under_way.set(under_way + u64::from(may));
        may
    }

    #[inline]
    fn judge(&self, drawn: Drawn, result: Result<bool, Trouble>) -> Judged {
        match result {
            Ok(false) => Judged::Right,
            Ok(true) => {
                self.blame(|tally| &mut tally.violations, || format!("key {} has a wrong value", drawn.key));
                Judged::Wrong
            }
            Err(Trouble::Failed(error)) => {
                self.blame(|tally| &mut tally.errors, || error.to_string());
                match error {
                    // Who answers late may answer the next one.
                    KvError::Fabric(FabricError::Deadline { .. } | FabricError::Refused(_)) => Judged::Right,
                    KvError::Fabric(_) => Judged::Over,
                    _ => Judged::Right,
                }
            }
            Err(Trouble::Violated(violation)) => {
                self.blame(|tally| &mut tally.violations, || violation.to_string());
                Judged::Right
            }
        }
    }

    /// One is done; it is to be remembered how long it took if it is known since when.
    #[inline]
    pub(crate) fn count(&self, operation: Operation, since: Option<Instant>) {
        self.under_way.set(self.under_way.get() - 1);
        let left = self.left.get();
        if left == 0 {
            return; // It had begun before it was said how many there are to be.
        }
        self.left.set(left - 1);
        let mut tally = self.tally.borrow_mut();
        tally.done[operation as usize] += 1;
        if let Some(since) = since {
            let now = Instant::now();
            let latency = now.saturating_duration_since(since);
            tally.latencies.record(operation, latency);
            if let Some(intervals) = &mut *self.intervals.borrow_mut() {
                intervals.record(operation, latency, now);
            }
        }
    }

    #[cold]
    pub(crate) fn blame(&self, count: impl Fn(&mut Tally) -> &mut u64, words: impl FnOnce() -> String) {
        let mut tally = self.tally.borrow_mut();
        *count(&mut tally) += 1;
        tally.tell(words);
    }
}

/// Fills a value that [`looks_right`] knows.
pub(crate) fn fill(key: u64, value: &mut [u8]) {
    value.fill(key as u8);
    let head = value.len().min(8);
    value[..head].copy_from_slice(&key.to_be_bytes()[..head]);
}

/// Whether a value's length and ends are as [`fill`] made them.
#[inline]
pub(crate) fn looks_right(key: u64, size: usize, value: &[u8]) -> bool {
    let key = key.to_be_bytes();
    value.len() == size
        && match value.first_chunk() {
            Some(head) => *head == key && (size == 8 || value[size - 1] == key[7]),
            None => *value == key[..size],
        }
}
