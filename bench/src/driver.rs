//! Drives a key-value store through a workload: closed loop, so many tasks a thread, each with one operation under
//! way.
//!
//! Invariant: keys and operations are drawn before the clock runs, and every value read is looked at: at the least
//! its first and last bytes, with verification all of them and its place in time.
//! Invariant: the key of a task's next operation depends on what the last one read, so that no processor can
//! overlap two operations that a program could not.

use crate::report::Latencies;
use crate::verify::{self, Watermarks};
use crate::workload::{self, Operation, Workload};
use farside_systems::kv::{Kv, KvError};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What all clients of a run share.
pub struct Run {
    workload: Workload,
    value_size: usize,
    watermarks: Option<Watermarks>,
    /// The highest key number there is.
    newest: AtomicU64,
    stop: AtomicBool,
    seed: u64,
}

/// What one thread's tasks share: the operations that they are to do, drawn in advance.
pub struct Thread {
    drawn: Vec<Drawn>,
    next: Cell<usize>,
    tally: RefCell<Tally>,
}

#[derive(Clone, Copy)]
struct Drawn {
    key: u64,
    operation: Operation,
}

/// What came of it.
#[derive(Default)]
pub struct Tally {
    /// Operations done.
    pub operations: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Values that nobody may ever read.
    pub violations: u64,
    /// The first few of either, in words.
    pub told: Vec<String>,
    /// Of one operation in 64.
    pub latencies: Latencies,
}

impl Tally {
    /// Adds those of another thread.
    pub fn merge(&mut self, other: Tally) {
        self.operations += other.operations;
        self.errors += other.errors;
        self.violations += other.violations;
        self.latencies.merge(&other.latencies);
        self.told.extend(other.told);
        self.told.truncate(TOLD_MAX);
    }
}

/// So much of what went wrong is told: a session that ends tells it for each of its tasks.
const TOLD_MAX: usize = 64;
/// One latency is taken in so many operations.
const SAMPLED: u64 = 64;
/// Operations drawn for each thread; they are gone through again and again.
const DRAWN: usize = 1 << 20;
const _: () = assert!(DRAWN.is_power_of_two());

impl Run {
    /// A run of `workload` with values of `value_size` bytes by `writers` tasks in all.
    ///
    /// # Errors
    /// The workload scans, or the values are too small to be verified, or the records too few.
    pub fn new(
        workload: Workload,
        value_size: usize,
        writers: u32,
        verify: bool,
        seed: u64,
    ) -> Result<Run, String> {
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
        let writers =
            std::num::NonZeroU32::new(writers).ok_or("no task would do anything: give one at least")?;
        if verify && u64::from(writers.get()) > workload.records {
            return Err(format!(
                "{writers} tasks cannot be verified on {} records, of which each task needs one that it alone \
                 writes: give more --records, or fewer --tasks or --threads",
                workload.records
            ));
        }
        let newest = AtomicU64::new(workload.records.saturating_sub(1));
        let watermarks = verify.then(|| Watermarks::new(workload.records, writers));
        Ok(Run { workload, value_size, watermarks, newest, stop: AtomicBool::new(false), seed })
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
        let (chooser, keys) = (self.workload.chooser(), self.workload.keys());
        let (mut chooser, mut keys) = (chooser, keys);
        let newest = self.newest.load(Ordering::Relaxed);
        let drawn = (0..DRAWN)
            .map(|_| Drawn { operation: chooser.next(&mut random), key: keys.next(newest, &mut random) });
        Thread { drawn: drawn.collect(), next: Cell::new(0), tally: RefCell::default() }
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
        mut progress: impl FnMut(u64),
    ) -> Result<(), String> {
        const STEP: u64 = 1000;
        let mut value = vec![0; self.value_size];
        let mut done = 0;
        for key in (task..self.workload.records).step_by(tasks as usize) {
            self.write(kv, key, &mut value).await.map_err(|trouble| trouble.to_string())?;
            done += 1;
            if done % STEP == 0 {
                progress(STEP);
            }
        }
        progress(done % STEP);
        Ok(())
    }

    /// Does operations until [`Run::stop`], or `limit` of them.
    pub async fn task<K: Kv>(&self, kv: &mut K, thread: &Thread, writer: u32, limit: u64) {
        let mut value = vec![0; self.value_size];
        let mut done = 0;
        let mut doubt = 0;
        while done < limit && !self.stop.load(Ordering::Relaxed) {
            let place = (thread.next.get() + doubt) & (DRAWN - 1);
            thread.next.set(place + 1);
            let drawn = thread.drawn[place];
            let since = (done % SAMPLED == 0).then(Instant::now);
            match self.operation(kv, drawn, writer, &mut value).await {
                Ok(wrong) => {
                    doubt = usize::from(wrong);
                    if wrong {
                        thread.blame(
                            |tally| &mut tally.violations,
                            || format!("key {} has a wrong value", drawn.key),
                        );
                    }
                }
                Err(Trouble::Failed(error)) => {
                    thread.blame(|tally| &mut tally.errors, || error.to_string());
                    if matches!(error, KvError::Fabric(_)) {
                        break; // Nothing more will come of this connection.
                    }
                }
                Err(Trouble::Violated(violation)) => {
                    thread.blame(|tally| &mut tally.violations, || violation.to_string());
                }
            }
            thread.count(since);
            done += 1;
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
            Operation::Update => self.write(kv, self.own(writer, drawn.key), value).await.map(|()| false),
            // One place for both, so that a read is polled without a detour.
            read @ (Operation::Read | Operation::ReadModifyWrite) => {
                let modify = read == Operation::ReadModifyWrite;
                let key = if modify { self.own(writer, drawn.key) } else { drawn.key };
                let wrong = self.read(kv, key).await?;
                if modify {
                    self.write(kv, key, value).await?;
                }
                Ok(wrong)
            }
            Operation::Insert => {
                let key = self.newest.fetch_add(1, Ordering::Relaxed) + 1;
                let mut value = vec![0; self.value_size];
                fill(key, &mut value);
                kv.put(&workload::key(key), &value).await?;
                Ok(false)
            }
            Operation::Scan => unreachable!("workloads that scan are refused"),
        }
    }

    /// With verification, a key has one writer.
    fn own(&self, writer: u32, drawn: u64) -> u64 {
        self.watermarks.as_ref().map_or(drawn, |marks| {
            marks.owned_by(writer, drawn).expect("each writer has a record of its own")
        })
    }

    #[inline]
    async fn read<K: Kv>(&self, kv: &mut K, key: u64) -> Result<bool, Trouble> {
        let Some(marks) = &self.watermarks else {
            let item = kv.get(&workload::key(key)).await?;
            return Ok(!item.is_some_and(|item| looks_right(key, self.value_size, item.value)));
        };
        let newest = marks.newest(key)?;
        let item = kv.get(&workload::key(key)).await?;
        marks.judge(key, newest, item.map(|item| item.value))?;
        Ok(false)
    }

    async fn write<K: Kv>(&self, kv: &mut K, key: u64, value: &mut [u8]) -> Result<(), Trouble> {
        let Some(marks) = &self.watermarks else {
            fill(key, value);
            return Ok(kv.put(&workload::key(key), value).await?);
        };
        let sequence = marks.issue(key)?;
        verify::encode(key, marks.writer_of(key), sequence, value).expect("the size was checked");
        kv.put(&workload::key(key), value).await?;
        Ok(marks.acknowledge(key, sequence)?)
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

impl Thread {
    /// What the thread's tasks came to, and begins to count anew.
    pub fn take_tally(&self) -> Tally {
        self.tally.take()
    }

    /// Forgets how much was done and how fast, but nothing that went wrong: what a warm-up ends with.
    pub fn forget_warm_up(&self) {
        let mut tally = self.tally.borrow_mut();
        tally.operations = 0;
        tally.latencies = Latencies::default();
    }

    #[inline]
    fn count(&self, sampled_since: Option<Instant>) {
        let mut tally = self.tally.borrow_mut();
        tally.operations += 1;
        if let Some(since) = sampled_since {
            tally.latencies.record(since.elapsed());
        }
    }

    #[cold]
    fn blame(&self, count: impl Fn(&mut Tally) -> &mut u64, words: impl Fn() -> String) {
        let mut tally = self.tally.borrow_mut();
        *count(&mut tally) += 1;
        if tally.told.len() < TOLD_MAX {
            tally.told.push(words());
        }
    }
}

/// Fills a value that [`looks_right`] knows.
fn fill(key: u64, value: &mut [u8]) {
    value.fill(key as u8);
    let head = value.len().min(8);
    value[..head].copy_from_slice(&key.to_be_bytes()[..head]);
}

/// Whether a value's length and ends are as [`fill`] made them.
#[inline]
fn looks_right(key: u64, size: usize, value: &[u8]) -> bool {
    let key = key.to_be_bytes();
    value.len() == size
        && match value.first_chunk() {
            Some(head) => *head == key && (size == 8 || value[size - 1] == key[7]),
            None => *value == key[..size],
        }
}
