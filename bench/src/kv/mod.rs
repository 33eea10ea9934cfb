//! YCSB on a key-value store: draws operations, performs the operations and verifies their results.
//!
//! Invariant: every value that is read is checked. With verification, the check covers all bytes of the value and the
//! value's order among the key's values. Without verification, the check covers the length and the first and last
//! bytes. If lengths vary, every length that the workload draws is right.

mod parts;
mod records;

use std::fmt;
use std::sync::Arc;

use farside_remote::fabric::Ran;
use farside_systems::kv::{Kv, KvError};

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::verify::{self, Ledger, Written};
use crate::workload::{self, Chooser, KeyChooser, LengthChooser, Lengths, Operation, Random, Workload};
pub use parts::Counted;
use parts::Parts;
pub(crate) use records::Records;

/// A run of YCSB.
pub type Run = driver::Run<Ycsb>;
/// One thread of a run of YCSB.
pub type Thread = driver::Thread<Ycsb>;

/// A workload on a store.
pub struct Ycsb {
    pub(crate) workload: Workload,
    /// Length of the longest value in bytes.
    pub(crate) value_size: usize,
    lengths: LengthChooser,
    /// Seed of the lengths of values.
    seed: u64,
    ledger: Option<Ledger>,
    records: Arc<Records>,
    /// If each task keeps to the keys of one node.
    parts: Option<Parts>,
}

/// Parameters of a run of YCSB.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workload that the clients run.
    pub workload: Workload,
    /// Length of a value in bytes, of the longest if lengths vary.
    pub value_size: usize,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Whether values carry a checksum and a stamp, and every key is checked to behave as one register.
    pub verify: bool,
    /// Whether each task keeps to the keys of one node, so that it waits for no other. Task `t` uses node `t` modulo
    /// their number.
    pub by_node: bool,
    /// Number of operations for each sampled latency, at least 1.
    pub sampled: u64,
    /// Seed of all random draws.
    pub seed: u64,
}

impl Plan {
    /// Creates the run of this plan.
    ///
    /// # Errors
    /// The workload has scans, the values are too small to be verified, the shortest value is longer than the longest,
    /// or the number of tasks is 0.
    pub fn run(self) -> Result<Run, String> {
        let Plan { workload, value_size, tasks, verify, by_node, sampled, seed } = self;
        if workload.mix.share(Operation::Scan) > 0.0 {
            return Err(format!(
                "workload {} has scans, which a key-value store does not support: choose a, b, c, d or f, or an index \
                 such as --system smart",
                workload.name
            ));
        }
        let shortest = workload.lengths.shortest(value_size);
        if shortest > value_size {
            return Err(format!(
                "workload {} has values of at least {shortest} bytes, and the longest has {value_size}: give a smaller \
                 minfieldlength or a larger --value-size",
                workload.name
            ));
        }
        if verify && shortest < verify::VALUE_SIZE_MIN {
            return Err(format!(
                "values of {shortest} bytes cannot be verified: give {} {} or more",
                if workload.lengths == Lengths::Constant { "--value-size" } else { "a minfieldlength of" },
                verify::VALUE_SIZE_MIN
            ));
        }
        if by_node && workload.mix.share(Operation::Insert) > 0.0 {
            return Err(format!(
                "workload {} has inserts, whose keys lie on any node: choose a, b, c or f, or omit --by-node",
                workload.name
            ));
        }
        let parts = by_node.then(|| Parts::new(tasks, workload.records));
        let records = Arc::new(Records::new(workload.records));
        // The loader is a writer, too.
        let ledger = verify.then(|| Ledger::new(tasks + 1));
        let lengths = workload.lengths.chooser(value_size);
        let work = Ycsb { workload, value_size, lengths, seed, ledger, records, parts };
        Run::new(work, tasks, sampled, seed)
    }
}

/// An operation to perform on a record.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    pub(crate) key: u64,
    pub(crate) operation: Operation,
}

/// Source from which one thread draws its operations.
pub struct Source {
    chooser: Chooser,
    keys: KeyChooser,
    random: Random,
    records: Arc<Records>,
}

impl Source {
    /// Creates the source of one thread's operations on these records.
    pub(crate) fn new(workload: &Workload, random: Random, records: Arc<Records>) -> Source {
        Source { chooser: workload.chooser(), keys: workload.keys(), random, records }
    }

    #[inline]
    pub(crate) fn draw(&mut self) -> Drawn {
        let Source { chooser, keys, random, records } = self;
        Drawn { operation: chooser.next(random), key: keys.next(records.newest(), random) }
    }
}

/// State of a task: its number as a writer, a buffer for values, and the source of their lengths.
pub struct Task {
    writer: u32,
    value: Vec<u8>,
    lengths: LengthChooser,
    random: Random,
}

impl Work for Ycsb {
    const KINDS: &'static [&'static str] = &Operation::NAMES;
    type Drawn = Drawn;
    type Source = Source;
    type Task = Task;
    type Trouble = KvTrouble;

    fn source(&self, random: Random) -> Source {
        Source::new(&self.workload, random, Arc::clone(&self.records))
    }

    /// Operations of a workload with inserts are drawn live, because the newest record is known only when an operation
    /// starts.
    fn is_drawn_live(&self) -> bool {
        self.workload.mix.share(Operation::Insert) > 0.0
    }

    #[inline]
    fn draw(source: &mut Source) -> Drawn {
        source.draw()
    }

    #[inline]
    fn kind(drawn: Drawn) -> usize {
        drawn.operation as usize
    }

    fn task(&self, number: u32) -> Task {
        let random = workload::random(self.seed ^ (u64::from(number) + 1) << 32);
        Task { writer: number, value: vec![0; self.value_size], lengths: self.lengths.clone(), random }
    }

    fn records(&self) -> u64 {
        self.workload.records
    }

    #[inline]
    fn ended(&self, task: &mut Task, has_succeeded: bool) {
        if let Some(parts) = &self.parts {
            parts.count(task.writer, has_succeeded);
        }
    }
}

impl<K: Kv> Perform<K> for Ycsb {
    async fn load(&self, kv: &mut K, record: u64, task: &mut Task) -> Result<(), KvTrouble> {
        self.write(kv, record, task).await
    }

    #[inline]
    async fn perform(&self, kv: &mut K, drawn: Drawn, task: &mut Task) -> Result<(), KvTrouble> {
        let key = match &self.parts {
            None => drawn.key,
            Some(parts) => parts.key(kv, drawn.key, task.writer),
        };
        match drawn.operation {
            Operation::Update => self.write(kv, key, task).await,
            // One arm for both, so that a read is polled without an extra state.
            read @ (Operation::Read | Operation::ReadModifyWrite) => {
                let wrong = self.read(kv, key).await?;
                if read == Operation::ReadModifyWrite {
                    self.write(kv, key, task).await?;
                }
                if wrong { Err(KvTrouble::Wrong(key)) } else { Ok(()) }
            }
            Operation::Insert => {
                let key = self.records.begin();
                let inserted = self.write(kv, key, task).await;
                self.records.end(key, inserted.is_ok());
                inserted
            }
            Operation::Scan => unreachable!("workloads with scans are refused"),
        }
    }
}

impl Ycsb {
    /// Returns the length of a value in bytes, of the longest if lengths vary.
    pub fn value_size(&self) -> usize {
        self.value_size
    }

    /// Returns the operations of the tasks of each of `shards` nodes since the start of the run. Empty unless each task
    /// keeps to one node.
    pub fn counted(&self, shards: usize) -> Vec<Counted> {
        self.parts.as_ref().filter(|_| shards > 0).map_or_else(Vec::new, |parts| parts.counted(shards))
    }

    /// Reads a key. Returns whether the value is wrong.
    #[inline]
    async fn read<K: Kv>(&self, kv: &mut K, key: u64) -> Result<bool, KvTrouble> {
        let Some(ledger) = &self.ledger else {
            let item = kv.get(&workload::key(key)).await?;
            return Ok(match item {
                Some(item) => !self.looks_right(key, item.value),
                None => !self.records.may_be_absent(key),
            });
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

    /// Whether a value is one that [`Ycsb::write`] writes without a ledger.
    #[inline]
    fn looks_right(&self, key: u64, value: &[u8]) -> bool {
        let shortest = self.workload.lengths.shortest(self.value_size);
        (shortest..=self.value_size).contains(&value.len()) && looks_right(key, value.len(), value)
    }

    async fn write<K: Kv>(&self, kv: &mut K, key: u64, task: &mut Task) -> Result<(), KvTrouble> {
        let Task { writer, value, lengths, random } = task;
        let value = &mut value[..lengths.next(random)];
        let Some(ledger) = &self.ledger else {
            fill(key, value);
            return Ok(kv.put(&workload::key(key), value).await?);
        };
        let (begun, stamp) = ledger.begin_write(key, *writer);
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

/// Error or violation of an operation on a record.
#[derive(Debug)]
pub enum KvTrouble {
    /// The operation failed with this error.
    Failed(KvError),
    /// The value that was read contradicts the ledger.
    Violated(verify::Violation),
    /// The key with this number has a wrong value, or none.
    Wrong(u64),
}

impl Trouble for KvTrouble {
    fn fault(&self) -> Fault {
        match self {
            KvTrouble::Failed(KvError::Fabric(error)) => Fault::of(error),
            KvTrouble::Failed(_) => Fault::Failed,
            KvTrouble::Violated(_) | KvTrouble::Wrong(_) => Fault::Violated,
        }
    }
}

impl fmt::Display for KvTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvTrouble::Failed(error) => error.fmt(f),
            KvTrouble::Violated(violation) => violation.fmt(f),
            KvTrouble::Wrong(key) => write!(f, "key {key} has a wrong value"),
        }
    }
}

impl From<KvError> for KvTrouble {
    fn from(error: KvError) -> KvTrouble {
        KvTrouble::Failed(error)
    }
}

impl From<verify::Violation> for KvTrouble {
    fn from(violation: verify::Violation) -> KvTrouble {
        KvTrouble::Violated(violation)
    }
}

/// Fills a value with bytes that [`looks_right`] accepts.
pub(crate) fn fill(key: u64, value: &mut [u8]) {
    value.fill(key as u8);
    let head = value.len().min(8);
    value[..head].copy_from_slice(&key.to_be_bytes()[..head]);
}

/// Whether a value's length, first bytes and last byte are as [`fill`] writes them.
#[inline]
pub(crate) fn looks_right(key: u64, size: usize, value: &[u8]) -> bool {
    let key = key.to_be_bytes();
    value.len() == size
        && match value.first_chunk() {
            Some(head) => *head == key && (size == 8 || value[size - 1] == key[7]),
            None => *value == key[..size],
        }
}
