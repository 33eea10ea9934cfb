//! YCSB on an ordered index: reads, updates, inserts and scans.
//!
//! Invariant: every value that is read is checked, as in [`crate::kv`].
//! Invariant: every scan is checked. Its keys ascend from the first one on, and no record is missing that existed when
//! the scan began. With verification, each value was current during the scan.

mod names;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use farside_remote::fabric::Ran;
use farside_systems::index::{Index, IndexError};

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::kv::{self, Records, fill, looks_right};
use crate::verify::{self, Begun, Ledger, Written};
use crate::workload::{self, LengthChooser, Lengths, Operation, Random, UniformLong, Workload};
pub use names::{NameKind, Names};

/// A run of YCSB on an index.
pub type Run = driver::Run<IndexWork>;

/// A workload on an index.
pub struct IndexWork {
    workload: Workload,
    value_size: usize,
    lengths: LengthChooser,
    seed: u64,
    names: Names,
    ledger: Option<Ledger>,
    records: Arc<Records>,
}

/// Parameters of a run of YCSB on an index.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workload that the clients run.
    pub workload: Workload,
    /// Length of a value in bytes, of the longest if lengths vary.
    pub value_size: usize,
    /// Kind of the keys. They are ordered if the workload has scans, so that a scan knows which records to expect.
    pub kind: NameKind,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Whether values carry a checksum and a stamp, and every key is checked to behave as one register.
    pub verify: bool,
    /// Number of operations for each sampled latency, at least 1.
    pub sampled: u64,
    /// Seed of all random draws.
    pub seed: u64,
}

impl Plan {
    /// Creates the run of this plan.
    ///
    /// # Errors
    /// The values are too small to be verified, the shortest value is longer than the longest, or the number of tasks
    /// is 0.
    pub fn run(self) -> Result<Run, String> {
        let Plan { workload, value_size, kind, tasks, verify, sampled, seed } = self;
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
        let names = Names { kind, is_ordered: workload.mix.share(Operation::Scan) > 0.0 };
        let records = Arc::new(Records::new(workload.records));
        // The loader is a writer, too.
        let ledger = verify.then(|| Ledger::new(tasks + 1));
        let lengths = workload.lengths.chooser(value_size);
        let work = IndexWork { workload, value_size, lengths, seed, names, ledger, records };
        Run::new(work, tasks, sampled, seed)
    }
}

/// An operation to perform.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    of: kv::Drawn,
    /// Number of records of a scan.
    len: u32,
}

/// Source from which one thread draws its operations.
pub struct Source {
    operations: kv::Source,
    lengths: UniformLong,
    random: Random,
}

/// State of a task: its number as a writer, its buffers, and the source of the lengths of its values.
pub struct Task {
    writer: u32,
    key: Vec<u8>,
    value: Vec<u8>,
    lengths: LengthChooser,
    random: Random,
    /// Reads in flight of the records that a scan may return, by their distance from the first.
    begun: Vec<Option<Begun>>,
}

impl Work for IndexWork {
    const KINDS: &'static [&'static str] = &Operation::NAMES;
    type Drawn = Drawn;
    type Source = Source;
    type Task = Task;
    type Trouble = IndexTrouble;

    fn source(&self, random: Random) -> Source {
        let mut seeds = random.clone();
        let random = workload::random(rand_core::Rng::next_u64(&mut seeds));
        let operations = kv::Source::new(&self.workload, seeds, Arc::clone(&self.records));
        Source { operations, lengths: UniformLong::new(1, self.workload.scan_max), random }
    }

    fn is_drawn_live(&self) -> bool {
        self.workload.mix.share(Operation::Insert) > 0.0
    }

    #[inline]
    fn draw(source: &mut Source) -> Drawn {
        let of = source.operations.draw();
        let is_scan = of.operation == Operation::Scan;
        Drawn { of, len: if is_scan { source.lengths.next(&mut source.random) as u32 } else { 0 } }
    }

    #[inline]
    fn kind(drawn: Drawn) -> usize {
        drawn.of.operation as usize
    }

    fn task(&self, number: u32) -> Task {
        Task {
            writer: number,
            key: Vec::new(),
            value: vec![0; self.value_size],
            lengths: self.lengths.clone(),
            random: workload::random(self.seed ^ (u64::from(number) + 1) << 32),
            begun: Vec::new(),
        }
    }

    fn records(&self) -> u64 {
        self.workload.records
    }
}

impl<I: Index> Perform<I> for IndexWork {
    async fn load(&self, index: &mut I, record: u64, task: &mut Task) -> Result<(), IndexTrouble> {
        self.write(index, record, task).await
    }

    #[inline]
    async fn perform(&self, index: &mut I, drawn: Drawn, task: &mut Task) -> Result<(), IndexTrouble> {
        let kv::Drawn { key: record, operation } = drawn.of;
        match operation {
            Operation::Read => self.read(index, record, task).await,
            Operation::Update => self.write(index, record, task).await,
            Operation::Insert => {
                let record = self.records.begin();
                let inserted = self.write(index, record, task).await;
                self.records.end(record, inserted.is_ok());
                inserted
            }
            Operation::Scan => self.scan(index, record, drawn.len, task).await,
            Operation::ReadModifyWrite => {
                self.read(index, record, task).await?;
                self.write(index, record, task).await
            }
        }
    }
}

impl IndexWork {
    /// Keys of the records.
    pub fn names(&self) -> Names {
        self.names
    }

    async fn read<I: Index>(&self, index: &mut I, record: u64, task: &mut Task) -> Result<(), IndexTrouble> {
        self.names.write(record, &mut task.key);
        let Some(ledger) = &self.ledger else {
            let value = index.get(&task.key).await?;
            let is_right = match value {
                Some(value) => self.looks_right(record, value),
                None => self.records.may_be_absent(record),
            };
            return if is_right { Ok(()) } else { Err(IndexTrouble::Wrong(record)) };
        };
        let begun = ledger.begin_read(record);
        match index.get(&task.key).await {
            Ok(value) => Ok(ledger.end_read(begun, value)?),
            Err(error) => {
                ledger.fail_read(begun);
                Err(error.into())
            }
        }
    }

    async fn write<I: Index>(&self, index: &mut I, record: u64, task: &mut Task) -> Result<(), IndexTrouble> {
        let Task { writer, key, value, lengths, random, .. } = task;
        self.names.write(record, key);
        let value = &mut value[..lengths.next(random)];
        let Some(ledger) = &self.ledger else {
            fill(record, value);
            return Ok(index.put(key, value).await?);
        };
        let (begun, stamp) = ledger.begin_write(record, *writer);
        verify::encode(record, stamp.writer, stamp.sequence, value).expect("the size was checked");
        let put = index.put(key, value).await;
        let written = match put.as_ref().map_err(IndexError::ran) {
            Ok(()) | Err(Ran::Yes) => Written::Yes,
            Err(Ran::No) => Written::No,
            Err(Ran::Unknown) => Written::Unknown,
        };
        let judged = ledger.end_write(begun, stamp, written);
        put?;
        Ok(judged?)
    }

    /// Reads `len` records from one on, and checks their order, their values, and that none is missing.
    async fn scan<I: Index>(
        &self,
        index: &mut I,
        first: u64,
        len: u32,
        task: &mut Task,
    ) -> Result<(), IndexTrouble> {
        let Task { key, begun, .. } = task;
        self.names.write(first, key);
        begun.clear();
        if let Some(ledger) = &self.ledger {
            begun.extend((first..first + u64::from(len)).map(|record| Some(ledger.begin_read(record))));
        }
        // All of them were inserted before the scan began.
        let until = (self.records.newest() + 1).min(first + u64::from(len));
        let check = RefCell::new(Check { work: self, begun, first, expected: first, until, trouble: None });
        let visit = |key: &[u8], value: &[u8]| check.borrow_mut().visit(key, value);
        let scanned = index.scan(key, len as usize, visit).await;
        let check = check.into_inner();
        match scanned {
            Ok(visited) => check.end(visited < len as usize),
            Err(error) => {
                check.abandon();
                Err(error.into())
            }
        }
    }

    /// Whether a value is one that [`IndexWork::write`] writes without a ledger.
    #[inline]
    fn looks_right(&self, record: u64, value: &[u8]) -> bool {
        let shortest = self.workload.lengths.shortest(self.value_size);
        (shortest..=self.value_size).contains(&value.len()) && looks_right(record, value.len(), value)
    }
}

/// Check of the records that a scan visits.
struct Check<'a> {
    work: &'a IndexWork,
    begun: &'a mut Vec<Option<Begun>>,
    /// First record of the scan.
    first: u64,
    /// Lowest record that the scan may visit next.
    expected: u64,
    /// Record before which none may be missing.
    until: u64,
    trouble: Option<IndexTrouble>,
}

impl Check<'_> {
    fn visit(&mut self, key: &[u8], value: &[u8]) {
        if let Err(trouble) = self.judge(key, value) {
            self.trouble.get_or_insert(trouble);
        }
    }

    fn judge(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexTrouble> {
        let Some(record) = self.work.names.record(key) else {
            return Err(IndexTrouble::Unknown(key.into()));
        };
        if record < self.expected {
            return Err(IndexTrouble::Order { record, expected: self.expected });
        }
        let missing = self.expected;
        self.expected = record + 1;
        let Some(ledger) = &self.work.ledger else {
            if record > missing && missing < self.until && !self.may_lack() {
                return Err(IndexTrouble::Missing(missing));
            }
            return if self.work.looks_right(record, value) {
                Ok(())
            } else {
                Err(IndexTrouble::Wrong(record))
            };
        };
        for skipped in missing..record.min(self.first + self.begun.len() as u64) {
            if let Some(begun) = self.begun[(skipped - self.first) as usize].take() {
                ledger.end_read(begun, None)?;
            }
        }
        match self.begun.get_mut((record - self.first) as usize).and_then(Option::take) {
            Some(begun) => ledger.end_read(begun, Some(value))?,
            // It was inserted while the scan ran, so that no read of it was begun.
            None => drop(verify::check(record, value)?),
        }
        Ok(())
    }

    /// Ends a scan that visited as many records as it was to, or that has come to the end of the index.
    fn end(mut self, is_at_end: bool) -> Result<(), IndexTrouble> {
        if is_at_end && self.trouble.is_none() {
            self.trouble = self.judge_end().err();
        }
        let trouble = self.trouble.take();
        self.abandon();
        trouble.map_or(Ok(()), Err)
    }

    fn judge_end(&mut self) -> Result<(), IndexTrouble> {
        if let Some(ledger) = &self.work.ledger {
            for begun in self.begun.iter_mut().filter_map(Option::take) {
                ledger.end_read(begun, None)?;
            }
        } else if self.expected < self.until && !self.may_lack() {
            return Err(IndexTrouble::Missing(self.expected));
        }
        Ok(())
    }

    /// Ends the reads of the records that the scan did not reach.
    fn abandon(self) {
        let Some(ledger) = &self.work.ledger else { return };
        self.begun.drain(..).flatten().for_each(|begun| ledger.fail_read(begun));
    }

    /// Whether the scan may lack a record that counts as inserted.
    fn may_lack(&self) -> bool {
        self.work.records.have_failed()
    }
}

/// Error or violation of an operation on an index.
#[derive(Debug)]
pub enum IndexTrouble {
    /// The operation failed with this error.
    Failed(IndexError),
    /// A value that was read contradicts the ledger.
    Violated(verify::Violation),
    /// The record with this number has a wrong value, or none.
    Wrong(u64),
    /// A scan did not visit the record with this number, which existed.
    Missing(u64),
    /// A scan visited a record twice, or below an earlier one or its first key.
    Order {
        /// Number of the record.
        record: u64,
        /// Lowest number that was possible.
        expected: u64,
    },
    /// A scan visited a key that no record has.
    Unknown(Box<[u8]>),
}

impl Trouble for IndexTrouble {
    fn fault(&self) -> Fault {
        match self {
            IndexTrouble::Failed(IndexError::Fabric(error)) => Fault::of(error),
            IndexTrouble::Failed(IndexError::Lost | IndexError::NotKept { .. }) => Fault::Disconnected,
            IndexTrouble::Failed(_) => Fault::Failed,
            _ => Fault::Violated,
        }
    }
}

impl fmt::Display for IndexTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IndexTrouble::Failed(error) => error.fmt(f),
            IndexTrouble::Violated(violation) => violation.fmt(f),
            IndexTrouble::Wrong(record) => write!(f, "record {record} has a wrong value, or none"),
            IndexTrouble::Missing(record) => write!(f, "a scan has not visited record {record}"),
            IndexTrouble::Order { record, expected } => {
                write!(f, "a scan visited record {record} out of order: {expected} or a later one was next")
            }
            IndexTrouble::Unknown(key) => {
                write!(f, "a scan visited '{}', which is no key of a record", key.escape_ascii())
            }
        }
    }
}

impl From<IndexError> for IndexTrouble {
    fn from(error: IndexError) -> IndexTrouble {
        IndexTrouble::Failed(error)
    }
}

impl From<verify::Violation> for IndexTrouble {
    fn from(violation: verify::Violation) -> IndexTrouble {
        IndexTrouble::Violated(violation)
    }
}

#[cfg(test)]
mod tests;
