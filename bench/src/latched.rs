//! Reads and changes of objects under one-sided latches: the latch benchmark of *Synchronization* (SIGMOD 2023).
//!
//! Each object is a counter. An update adds one to it. All words of an object follow from its number and its count.
//!
//! Invariant: all bytes of every object that is read are checked, also of those that an update reads under the latch.
//! Bytes of two updates are a violation. After the run, the counts of all objects together must be the number of
//! updates that were done, so no update was lost.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farside_remote::fabric::Ran;
use farside_remote::{Fabric, clock::Clock};
use farside_systems::latch::{LatchError, Latched};

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::kv::{Drawn, Records, Source};
use crate::workload::{Operation, Random, Workload};

/// A run on a store of latched objects.
pub type Run = driver::Run<LatchWork>;

/// A workload on a store of latched objects. Its records are the objects, numbered from 0.
pub struct LatchWork {
    workload: Workload,
    len: usize,
    records: Arc<Records>,
    added: Arc<Added>,
}

/// Numbers of updates, of all tasks that have ended.
#[derive(Debug, Default)]
struct Added {
    /// Number of updates that were done.
    done: AtomicU64,
    /// Number of updates with an unknown outcome: they may have been done, or not.
    unknown: AtomicU64,
}

/// Parameters of a run on a store of latched objects.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workload that the clients run: reads and updates.
    pub workload: Workload,
    /// Length of an object's content in bytes, a multiple of 8.
    pub len: usize,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Number of operations for each sampled latency, at least 1.
    pub sampled: u64,
    /// Seed of all random draws.
    pub seed: u64,
}

impl Plan {
    /// Creates the run of this plan.
    ///
    /// # Errors
    /// The number of tasks is 0.
    ///
    /// # Panics
    /// If the workload has other operations than reads and updates.
    pub fn run(self) -> Result<Run, String> {
        let Plan { workload, len, tasks, sampled, seed } = self;
        let share = |operation| workload.mix.share(operation);
        let others = share(Operation::Insert) + share(Operation::Scan) + share(Operation::ReadModifyWrite);
        assert!(others == 0.0, "objects are read and updated");
        let records = Arc::new(Records::new(workload.records));
        Run::new(LatchWork { workload, len, records, added: Arc::default() }, tasks, sampled, seed)
    }
}

/// State of a task: a buffer for an object, and the numbers of its updates.
pub struct Task {
    bytes: Vec<u8>,
    done: u64,
    unknown: u64,
    all: Arc<Added>,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.all.done.fetch_add(self.done, Ordering::Relaxed);
        self.all.unknown.fetch_add(self.unknown, Ordering::Relaxed);
    }
}

impl Work for LatchWork {
    const KINDS: &'static [&'static str] = &Operation::NAMES;
    const TIMES_STALLS: bool = true;
    type Drawn = Drawn;
    type Source = Source;
    type Task = Task;
    type Trouble = LatchTrouble;

    fn source(&self, random: Random) -> Source {
        Source::new(&self.workload, random, Arc::clone(&self.records))
    }

    #[inline]
    fn draw(source: &mut Source) -> Drawn {
        source.draw()
    }

    #[inline]
    fn kind(drawn: Drawn) -> usize {
        drawn.operation as usize
    }

    fn task(&self, _number: u32) -> Task {
        Task { bytes: vec![0; self.len], done: 0, unknown: 0, all: Arc::clone(&self.added) }
    }

    fn records(&self) -> u64 {
        self.workload.records
    }
}

impl<F: Fabric + Clock + 'static> Perform<Latched<F>> for LatchWork {
    async fn load(&self, latched: &mut Latched<F>, object: u64, task: &mut Task) -> Result<(), LatchTrouble> {
        update(latched, object, task).await
    }

    #[inline]
    async fn perform(
        &self,
        latched: &mut Latched<F>,
        drawn: Drawn,
        task: &mut Task,
    ) -> Result<(), LatchTrouble> {
        match drawn.operation {
            Operation::Update => update(latched, drawn.key, task).await,
            _ => {
                latched.read(drawn.key, &mut task.bytes).await?;
                count_of(drawn.key, &task.bytes).map(drop)
            }
        }
    }
}

async fn update<F: Fabric + Clock + 'static>(
    latched: &mut Latched<F>,
    object: u64,
    task: &mut Task,
) -> Result<(), LatchTrouble> {
    let body = async |content: &mut [u8]| {
        let count = count_of(object, content)?;
        fill(object, count + 1, content);
        Ok(())
    };
    match latched.with_exclusive(object, body).await {
        Ok(Ok(())) => {
            task.done += 1;
            Ok(())
        }
        Ok(Err(torn)) => Err(torn),
        Err(error) => {
            task.unknown += u64::from(error.ran() != Ran::No);
            Err(error.into())
        }
    }
}

impl Run {
    /// Reads the objects `first`, `first + step`, `first + 2 * step`, … once. Returns the sum of their counts.
    ///
    /// # Errors
    /// An object cannot be read, or its bytes are of two updates.
    pub async fn sum<F: Fabric + Clock + 'static>(
        &self,
        latched: &mut Latched<F>,
        first: u64,
        step: usize,
    ) -> Result<u64, LatchTrouble> {
        let (mut sum, mut bytes) = (0, vec![0; self.work().len]);
        for object in (first..self.work().records()).step_by(step) {
            latched.read(object, &mut bytes).await?;
            sum += count_of(object, &bytes)?;
        }
        Ok(sum)
    }

    /// Compares the sum of the counts of all objects with the number of updates that were done. All tasks have ended.
    ///
    /// # Errors
    /// Updates were lost, or done twice.
    pub fn check_sum(&self, sum: u64) -> Result<(), LatchTrouble> {
        let Added { done, unknown } = &*self.work().added;
        let done = done.load(Ordering::Relaxed);
        let unknown = unknown.load(Ordering::Relaxed);
        if (done..=done + unknown).contains(&sum) {
            return Ok(());
        }
        Err(LatchTrouble::Sum { sum, done, unknown })
    }
}

/// Error or violation of an operation on an object.
#[derive(Debug)]
pub enum LatchTrouble {
    /// The operation failed with this error.
    Failed(LatchError),
    /// The object with this number has bytes of two updates, or of another object.
    Torn(u64),
    /// The counts of all objects differ from the number of updates.
    Sum {
        /// Sum of the counts of all objects.
        sum: u64,
        /// Number of updates that were done.
        done: u64,
        /// Number of updates with an unknown outcome: they may have been done, or not.
        unknown: u64,
    },
}

impl Trouble for LatchTrouble {
    fn fault(&self) -> Fault {
        match self {
            LatchTrouble::Failed(LatchError::Fabric(error)) => Fault::of(error),
            LatchTrouble::Failed(_) => Fault::Failed,
            LatchTrouble::Torn(_) | LatchTrouble::Sum { .. } => Fault::Violated,
        }
    }
}

impl fmt::Display for LatchTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LatchTrouble::Failed(error) => error.fmt(f),
            LatchTrouble::Torn(object) => write!(f, "object {object} has torn bytes"),
            LatchTrouble::Sum { sum, done, unknown } => write!(
                f,
                "the objects have counted {sum} updates, and {done} were done, with {unknown} more of unknown outcome"
            ),
        }
    }
}

impl From<LatchError> for LatchTrouble {
    fn from(error: LatchError) -> LatchTrouble {
        LatchTrouble::Failed(error)
    }
}

pub(crate) const WORD: usize = size_of::<u64>();

/// Returns the words of an object with this count: the count, then words that differ for each object and count.
fn words(object: u64, count: u64) -> impl Iterator<Item = u64> {
    let first = (object.rotate_left(40) ^ count).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::once(count).chain((1..).map(move |place: u64| first.wrapping_mul(place)))
}

/// Writes the words of an object with this count. The length is a multiple of 8.
pub(crate) fn fill(object: u64, count: u64, bytes: &mut [u8]) {
    for (place, word) in bytes.chunks_exact_mut(WORD).zip(words(object, count)) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

fn count_of(object: u64, bytes: &[u8]) -> Result<u64, LatchTrouble> {
    counted(object, bytes).ok_or(LatchTrouble::Torn(object))
}

/// Returns the count of an object, after a check of all its bytes; `None` if they are not those of one update of this
/// object. An object that was never written is zeros.
pub(crate) fn counted(object: u64, bytes: &[u8]) -> Option<u64> {
    let word = |place: &[u8]| u64::from_le_bytes(place.try_into().expect("a word has 8 bytes"));
    let count = bytes.first_chunk::<WORD>().map_or(0, |first| u64::from_le_bytes(*first));
    let is_whole = match count {
        0 => bytes.iter().all(|&byte| byte == 0),
        _ => bytes
            .chunks_exact(WORD)
            .zip(words(object, count))
            .all(|(place, expected)| word(place) == expected),
    };
    is_whole.then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_two_updates_or_of_another_object_are_torn() {
        let bytes = |object, count| {
            let mut bytes = vec![0; 64];
            fill(object, count, &mut bytes);
            bytes
        };
        let good = bytes(7, 3);
        assert_eq!(count_of(7, &good).ok(), Some(3));
        assert_eq!(count_of(7, &[0; 64]).ok(), Some(0));
        assert!(count_of(8, &good).is_err());
        for other in [bytes(7, 2), bytes(7, 4), bytes(8, 3), vec![0; 64]] {
            for place in (8..64).step_by(8) {
                let mixed =
                    [[&good[..place], &other[place..]].concat(), [&other[..place], &good[place..]].concat()];
                // Two objects with one count have the first word in common.
                for torn in mixed.iter().filter(|mixed| **mixed != good) {
                    assert!(count_of(7, torn).is_err(), "{place}: {torn:?}");
                }
            }
        }
    }

    #[test]
    fn a_lost_update_is_found_by_the_sum() {
        let workload = Workload::resolve_with("a", &[]).expect("a workload");
        let run = Plan { workload, len: 64, tasks: 1, sampled: 1, seed: 1 }.run().expect("a run");
        for (done, unknown) in [(5, 0), (2, 1)] {
            let mut task = run.work().task(0);
            (task.done, task.unknown) = (done, unknown);
        }
        let judged = [6, 7, 8, 9].map(|sum| run.check_sum(sum).is_ok());
        assert_eq!(judged, [false, true, true, false]);
    }
}
