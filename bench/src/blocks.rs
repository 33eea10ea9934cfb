//! Reads and writes of whole blocks, with YCSB's distributions.
//!
//! Invariant: every block that is read is checked. With verification, the check covers all bytes and the write's order
//! among the block's writes. Without, it covers the block's number, and whether its first and its last bytes are of the
//! same write.

use std::fmt;
use std::sync::Arc;

use farside_remote::fabric::Ran;
use farside_systems::blocks::{Blocks, BlocksError};

use crate::driver::{self, Fault, Perform, Trouble, Work};
use crate::kv::{Drawn, Records, Source};
use crate::verify::{self, Ledger, Written};
use crate::workload::{Lengths, Operation, Random, Workload};

/// A run on a block store.
pub type Run = driver::Run<BlockWork>;

/// A workload on a block store. Its records are the blocks, numbered from 0.
pub struct BlockWork {
    workload: Workload,
    block: usize,
    ledger: Option<Ledger>,
    records: Arc<Records>,
}

/// Parameters of a run on a block store.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Workload that the clients run: reads and updates.
    pub workload: Workload,
    /// Length of a block in bytes, at least 64.
    pub block: usize,
    /// Number of tasks of all threads together.
    pub tasks: u32,
    /// Whether blocks carry a checksum and a stamp, and every block is checked to behave as one register.
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
    /// The workload has other operations than reads and updates or values of several lengths, the blocks are too short,
    /// or the number of tasks is 0.
    pub fn run(self) -> Result<Run, String> {
        let Plan { workload, block, tasks, verify, sampled, seed } = self;
        let share = |operation| workload.mix.share(operation);
        if share(Operation::Insert) + share(Operation::Scan) + share(Operation::ReadModifyWrite) > 0.0 {
            return Err(format!("workload {} has other operations than reads and updates", workload.name));
        }
        if workload.lengths != Lengths::Constant {
            return Err(format!(
                "workload {} has values of several lengths, and all blocks are equally long: omit \
                 fieldlengthdistribution",
                workload.name
            ));
        }
        if block < 2 * MARK {
            return Err(format!("blocks of {block} bytes are too short: give --block 512 or more"));
        }
        let records = Arc::new(Records::new(workload.records));
        // The loader is a writer, too.
        let ledger = verify.then(|| Ledger::new(tasks + 1));
        Run::new(BlockWork { workload, block, ledger, records }, tasks, sampled, seed)
    }
}

impl Run {
    /// Reads the blocks `first`, `first + step`, `first + 2 * step`, … once, and checks them as the run's own reads.
    /// Counts errors and violations at `thread`.
    pub async fn read_back<B: Blocks>(
        &self,
        blocks: &mut B,
        thread: &driver::Thread<BlockWork>,
        first: u64,
        step: usize,
    ) {
        let work = self.work();
        let mut task = work.task(0);
        for block in (first..work.records()).step_by(step) {
            if let Err(trouble) = work.read(blocks, block, &mut task).await {
                thread.count_trouble(&trouble);
            }
        }
    }
}

/// State of a task: its number as a writer, the number of its writes, and a buffer for blocks.
pub struct Task {
    writer: u32,
    sequence: u64,
    bytes: Vec<u8>,
}

impl Work for BlockWork {
    const KINDS: &'static [&'static str] = &Operation::NAMES;
    const TIMES_STALLS: bool = true;
    type Drawn = Drawn;
    type Source = Source;
    type Task = Task;
    type Trouble = BlocksTrouble;

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

    fn task(&self, number: u32) -> Task {
        Task { writer: number, sequence: 0, bytes: vec![0; self.block] }
    }

    fn records(&self) -> u64 {
        self.workload.records
    }
}

impl<B: Blocks> Perform<B> for BlockWork {
    async fn load(&self, blocks: &mut B, record: u64, task: &mut Task) -> Result<(), BlocksTrouble> {
        self.write(blocks, record, task).await
    }

    #[inline]
    async fn perform(&self, blocks: &mut B, drawn: Drawn, task: &mut Task) -> Result<(), BlocksTrouble> {
        match drawn.operation {
            Operation::Update => self.write(blocks, drawn.key, task).await,
            _ => self.read(blocks, drawn.key, task).await,
        }
    }
}

impl BlockWork {
    async fn read<B: Blocks>(
        &self,
        blocks: &mut B,
        block: u64,
        task: &mut Task,
    ) -> Result<(), BlocksTrouble> {
        let bytes = &mut task.bytes[..];
        let Some(ledger) = &self.ledger else {
            blocks.read(block, bytes).await?;
            return if looks_right(block, bytes) { Ok(()) } else { Err(BlocksTrouble::Wrong(block)) };
        };
        let begun = ledger.begin_read(block);
        match blocks.read(block, bytes).await {
            // A block that was never written is zeros, as a key without a value is absent.
            Ok(()) => {
                Ok(ledger
                    .end_read(begun, Some(&*bytes).filter(|bytes| bytes.iter().any(|&byte| byte != 0)))?)
            }
            Err(error) => {
                ledger.fail_read(begun);
                Err(error.into())
            }
        }
    }

    async fn write<B: Blocks>(
        &self,
        blocks: &mut B,
        block: u64,
        task: &mut Task,
    ) -> Result<(), BlocksTrouble> {
        let Task { writer, sequence, bytes } = task;
        let Some(ledger) = &self.ledger else {
            *sequence += 1;
            fill(block, *writer, *sequence, bytes);
            return Ok(blocks.write(block, bytes).await?);
        };
        let (begun, stamp) = ledger.begin_write(block, *writer);
        verify::encode(block, stamp.writer, stamp.sequence, bytes).expect("the length was checked");
        let wrote = blocks.write(block, bytes).await;
        let written = match wrote.as_ref().map_err(BlocksError::ran) {
            Ok(()) | Err(Ran::Yes) => Written::Yes,
            Err(Ran::No) => Written::No,
            Err(Ran::Unknown) => Written::Unknown,
        };
        let judged = ledger.end_write(begun, stamp, written);
        wrote?;
        Ok(judged?)
    }
}

/// Error or violation of an operation on a block.
#[derive(Debug)]
pub enum BlocksTrouble {
    /// The operation failed with this error.
    Failed(BlocksError),
    /// The block that was read contradicts the ledger.
    Violated(verify::Violation),
    /// The block with this number has bytes of two writes, or of another block.
    Wrong(u64),
}

impl Trouble for BlocksTrouble {
    fn fault(&self) -> Fault {
        match self {
            BlocksTrouble::Failed(BlocksError::Fabric(error)) => Fault::of(error),
            BlocksTrouble::Failed(_) => Fault::Failed,
            BlocksTrouble::Violated(_) | BlocksTrouble::Wrong(_) => Fault::Violated,
        }
    }
}

impl fmt::Display for BlocksTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlocksTrouble::Failed(error) => error.fmt(f),
            BlocksTrouble::Violated(violation) => violation.fmt(f),
            BlocksTrouble::Wrong(block) => write!(f, "block {block} has wrong bytes"),
        }
    }
}

impl From<BlocksError> for BlocksTrouble {
    fn from(error: BlocksError) -> BlocksTrouble {
        BlocksTrouble::Failed(error)
    }
}

impl From<verify::Violation> for BlocksTrouble {
    fn from(violation: verify::Violation) -> BlocksTrouble {
        BlocksTrouble::Violated(violation)
    }
}

/// Length in bytes of what identifies a write: | block u64 | sequence u64 | writer u32 | 0 u32 |, little-endian, at
/// both ends of a block.
const MARK: usize = 24;

fn fill(block: u64, writer: u32, sequence: u64, bytes: &mut [u8]) {
    let mut mark = [0; MARK];
    mark[..8].copy_from_slice(&block.to_le_bytes());
    mark[8..16].copy_from_slice(&sequence.to_le_bytes());
    mark[16..20].copy_from_slice(&writer.to_le_bytes());
    let end = bytes.len() - MARK;
    bytes[..MARK].copy_from_slice(&mark);
    bytes[end..].copy_from_slice(&mark);
}

/// Whether both ends of a block are as [`fill`] writes them for one write of this block.
fn looks_right(block: u64, bytes: &[u8]) -> bool {
    let (first, last) = (&bytes[..MARK], &bytes[bytes.len() - MARK..]);
    first == last && first[..8] == block.to_le_bytes() && first[8..16] != [0; 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_two_writes_or_of_another_block_look_wrong() {
        let bytes = |block, writer, sequence| {
            let mut bytes = vec![0; 512];
            fill(block, writer, sequence, &mut bytes);
            bytes
        };
        let good = bytes(7, 1, 2);
        assert!(looks_right(7, &good));
        assert!(!looks_right(8, &good));
        assert!(!looks_right(0, &[0; 512]), "the block was loaded");
        for other in [bytes(7, 1, 3), bytes(7, 2, 2), bytes(8, 1, 2), vec![0; 512]] {
            assert!(!looks_right(7, &[&good[..256], &other[256..]].concat()));
            assert!(!looks_right(7, &[&other[..256], &good[256..]].concat()));
        }
    }

    #[test]
    fn a_workload_of_other_operations_is_refused() {
        let plan = |properties: &[&str]| {
            let properties: Vec<String> = properties.iter().map(|&text| text.to_owned()).collect();
            let workload = Workload::resolve_with("a", &properties).expect("a workload");
            Plan { workload, block: 512, tasks: 1, verify: true, sampled: 1, seed: 1 }.run().map(drop)
        };
        assert_eq!(plan(&[]), Ok(()));
        assert!(plan(&["insertproportion=0.1"]).is_err());
        assert!(plan(&["readmodifywriteproportion=0.1"]).is_err());
    }
}
