//! Block stores: arrays of blocks of one size, which are read and written whole.
//!
//! [`prism_rs`] is PRISM-RS, which keeps every block on several nodes. Every block store implements [`Blocks`]. A block
//! that was never written is all zeros.
//!
//! A *volume* is striped over one or more block stores; [`stripe`] states which.

pub mod abd_lock;
pub mod prism_rs;
pub mod stripe;
pub mod tag;

use crate::members;
use crate::registry::AnyBlocks;
use crate::store::StoreError;
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};
use std::future::ready;
use std::pin::Pin;
use std::time::Duration;
pub use stripe::Stripe;

/// Length of the shortest block, in bytes. The length of a block is a multiple of it.
pub const BLOCK_MIN: usize = 512;
/// Length of the longest block, in bytes.
pub const BLOCK_MAX: usize = 32 << 10;

/// Operations of a block store. Each operation is linearizable: it takes effect at one instant between its call and its
/// return. If an operation fails and [`BlocksError::ran`] returns [`Ran::Unknown`], or if its future is dropped, the
/// operation may take effect at one later instant, or never.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Blocks {
    /// Returns the kind of the store.
    fn kind(&self) -> &'static str;

    /// Length of each block in bytes, a multiple of [`BLOCK_MIN`].
    fn block_len(&self) -> usize;

    /// Number of blocks. The blocks have the numbers from 0 to this number, without it.
    fn blocks(&self) -> u64;

    /// Reads a block into `into`, which has exactly the length of a block.
    ///
    /// # Errors
    /// [`BlocksError`]; no block was changed, and the contents of `into` are unspecified.
    async fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), BlocksError>;

    /// Writes a whole block. `bytes` has exactly the length of a block.
    ///
    /// # Errors
    /// [`BlocksError`]; [`BlocksError::ran`] states whether the block may have been written.
    async fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), BlocksError>;

    /// Returns the client's own task, which all handles of the client share. The program spawns it once, beside the
    /// tasks that use the client, on the same core. It returns after the last handle was dropped. A system whose
    /// operations hold nothing between two requests has nothing to do there.
    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        Box::pin(ready(()))
    }

    /// Returns the use of the store's writer ids. `None` if the system does not count them.
    ///
    /// # Errors
    /// [`BlocksError`]; nothing was changed.
    async fn writer_ids(&mut self) -> Result<Option<WriterIds>, BlocksError> {
        Ok(None)
    }

    /// Compares a block's copies, and brings those that are behind up to date, by the means of the system's own writes.
    /// Never undoes a write, and may complete one that was not completed.
    ///
    /// # Errors
    /// [`BlocksError`]; some of the copies may have been brought up to date. The default implementation is that of a
    /// system that cannot compare copies.
    async fn scrub(&mut self, _block: u64) -> Result<Scrubbed, BlocksError> {
        Err(BlocksError::Store(StoreError::Gone(format!(
            "a store of kind {} cannot be scrubbed: use a store of another kind",
            self.kind()
        ))))
    }
}

/// Use of a store's writer ids. A client claims one at its first write, and none is ever free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterIds {
    /// Number of ids that were claimed, or lost in claims that failed.
    pub claimed: u32,
    /// Number of all ids.
    pub of: u32,
}

impl WriterIds {
    /// Whether at least 90 % of the ids were claimed.
    pub fn are_scarce(self) -> bool {
        u64::from(self.claimed) * 10 >= u64::from(self.of) * 9
    }
}

/// What [`Blocks::scrub`] found and did, by the index of the replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Replicas that lacked the newest write. They have it now, or a newer one.
    pub behind: Vec<u32>,
    /// Replicas that claim to have the newest write, but hold other bytes than the first replica with that claim. No
    /// write repairs them, since none is newer.
    pub damaged: Vec<u32>,
    /// Replicas that did not answer, or have lost their memory. They were not compared.
    pub silent: Vec<u32>,
}

impl<F: Fabric + Clock> AnyBlocks<F> {
    /// Opens the block store called `name`, of any kind, in a pool of `nodes` nodes.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn open_in(
        fabric: F,
        nodes: u32,
        name: &str,
        options: &Options,
    ) -> Result<AnyBlocks<F>, StoreError> {
        let members = members::open(&fabric, nodes, name).await?;
        AnyBlocks::of(fabric, &members, options).await
    }

    /// Creates the same client for another task. Both share what identifies a client in the store.
    pub fn another(&self) -> AnyBlocks<F>
    where
        F: Clone,
    {
        with_blocks!(self, store -> store.another())
    }
}

impl<F: Fabric + Clock> Blocks for AnyBlocks<F> {
    fn kind(&self) -> &'static str {
        with_blocks!(self, store => store.kind())
    }

    fn block_len(&self) -> usize {
        with_blocks!(self, store => store.block_len())
    }

    fn blocks(&self) -> u64 {
        with_blocks!(self, store => store.blocks())
    }

    async fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), BlocksError> {
        with_blocks!(self, store => store.read(block, into).await)
    }

    async fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), BlocksError> {
        with_blocks!(self, store => store.write(block, bytes).await)
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        with_blocks!(self, store => store.keeper())
    }

    async fn writer_ids(&mut self) -> Result<Option<WriterIds>, BlocksError> {
        with_blocks!(self, store => store.writer_ids().await)
    }

    async fn scrub(&mut self, block: u64) -> Result<Scrubbed, BlocksError> {
        with_blocks!(self, store => store.scrub(block).await)
    }
}

/// Error of an operation on a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlocksError {
    /// The store has no block with this number. No request was sent.
    NoSuchBlock {
        /// Number of the block.
        block: u64,
        /// Number of blocks of the store.
        blocks: u64,
    },
    /// The caller's buffer is not as long as a block. No request was sent.
    Length {
        /// Length of the buffer in bytes.
        len: usize,
        /// Length of a block in bytes.
        block: usize,
    },
    /// No buffer was free for 100 ms. Nothing was written.
    OutOfMemory,
    /// The node refused a chain with this status.
    Refused(Status),
    /// The bytes read are not bytes that a client writes; the text states the fault. A peer with write access has
    /// damaged the store.
    Damaged(&'static str),
    /// All writer ids of the store were claimed. Nothing was written.
    NoWriterId(u32),
    /// Too few replicas carried out a phase of the operation.
    NoMajority {
        /// Number of replicas that carried it out.
        answered: usize,
        /// Number of replicas that had to.
        needed: usize,
        /// Whether the block may have been written.
        ran: Ran,
        /// Error of one of the other replicas.
        reason: Box<BlocksError>,
    },
    /// One client has held locks of the block all the time, so it has probably died. Nothing was written.
    Locked {
        /// Number of the block.
        block: u64,
        /// Id of the client that holds the locks.
        client: u32,
        /// For how long the locks were seen in the hands of this client.
        waited: Duration,
    },
    /// Other clients have held locks of the block at each attempt. Nothing was written.
    Busy {
        /// Number of the block.
        block: u64,
        /// Time spent on all attempts.
        waited: Duration,
    },
    /// The client's own task ([`Blocks::keeper`]) does not run.
    NotKept {
        /// Whether the block may have been written.
        ran: Ran,
    },
    /// The store cannot be opened, or a replica has lost its memory.
    Store(StoreError),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl BlocksError {
    /// States whether a write with this error may have been carried out.
    pub fn ran(&self) -> Ran {
        match self {
            BlocksError::Fabric(error) => error.ran(),
            BlocksError::NoMajority { ran, .. } | BlocksError::NotKept { ran } => *ran,
            // A refused chain may have run its first ops. But a store's chains install last, so a refused one installed
            // nothing.
            _ => Ran::No,
        }
    }
}

impl From<StoreError> for BlocksError {
    fn from(error: StoreError) -> BlocksError {
        match error {
            StoreError::Fabric(error) => BlocksError::Fabric(error),
            other => BlocksError::Store(other),
        }
    }
}

impl From<FabricError> for BlocksError {
    fn from(error: FabricError) -> BlocksError {
        BlocksError::Fabric(error)
    }
}

impl std::fmt::Display for BlocksError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BlocksError::NoSuchBlock { block, blocks } => {
                write!(f, "there is no block {block}: give a number below {blocks}, the number of blocks of the store")
            }
            BlocksError::Length { len, block } => {
                write!(f, "the buffer has {len} bytes, and a block has {block}: read and write whole blocks")
            }
            BlocksError::OutOfMemory => f.write_str(
                "the block store is out of memory and nothing was written: create a store with a larger --quota, or \
                 check whether a stopped process delays reclamation",
            ),
            BlocksError::Refused(status) => {
                write!(
                    f,
                    "the node refused access to a block ({status}): the store may have been dropped; open it anew"
                )
            }
            BlocksError::Damaged(what) => {
                write!(
                    f,
                    "the block store is damaged ({what}): someone who holds its key has overwritten it: copy what can \
                     be read to another store, and drop this one"
                )
            }
            BlocksError::NoWriterId(ids) => write!(
                f,
                "all {ids} writer ids of the block store were claimed, and nothing was written: create another store, \
                 and copy the blocks to it; let a process that restarts often keep one client open"
            ),
            BlocksError::NoMajority { answered, needed, ran, reason } => {
                let so = what_ran(*ran);
                write!(
                    f,
                    "{answered} replicas answered, and {needed} must: {so}; check the nodes, then retry; one of the \
                     others failed: {reason}"
                )
            }
            BlocksError::Locked { block, client, waited } => write!(
                f,
                "client {client} has held the locks of block {block} for {waited:?}, and nothing was written: if the \
                 client still runs, wait until it has released them; if it has died, its blocks stay locked: copy the \
                 others to a new store with --leases"
            ),
            BlocksError::Busy { block, waited } => write!(
                f,
                "other clients held the locks of block {block} at each attempt for {waited:?}, and nothing was \
                 written: retry, with fewer clients that use this block"
            ),
            BlocksError::NotKept { ran } => {
                write!(f, "the task of the client does not run, and {}: spawn its keeper", what_ran(*ran))
            }
            BlocksError::Store(error) => error.fmt(f),
            BlocksError::Fabric(error) => error.fmt(f),
        }
    }
}

fn what_ran(ran: Ran) -> &'static str {
    match ran {
        Ran::No => "nothing was written",
        _ => "the block may or may not have been written",
    }
}

impl std::error::Error for BlocksError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BlocksError::NoMajority { reason, .. } => Some(&**reason),
            BlocksError::Store(error) => Some(error),
            BlocksError::Fabric(error) => Some(error),
            _ => None,
        }
    }
}

/// # Errors
/// The store has no such block, or the caller's buffer is not as long as a block.
pub(crate) fn check_access(store: &impl Blocks, block: u64, len: usize) -> Result<(), BlocksError> {
    check_number(store, block)?;
    if len != store.block_len() {
        return Err(BlocksError::Length { len, block: store.block_len() });
    }
    Ok(())
}

/// # Errors
/// The store has no such block.
pub(crate) fn check_number(store: &impl Blocks, block: u64) -> Result<(), BlocksError> {
    match block < store.blocks() {
        true => Ok(()),
        false => Err(BlocksError::NoSuchBlock { block, blocks: store.blocks() }),
    }
}
