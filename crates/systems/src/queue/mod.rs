//! Queues: values that go in at one end and come out at the other, each once.
//!
//! [`ring_queue`] is a bounded ring. [`Queue`] is what every queue here offers.

pub mod ring_queue;

use crate::registry::AnyQueue;
use crate::store::StoreError;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};

/// The operations of a queue. Each is linearizable, as those of [`crate::kv::Kv`] are.
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Queue {
    /// The kind of the store.
    fn kind(&self) -> &'static str;

    /// Puts a value behind all others; answers false if the queue is full.
    ///
    /// # Errors
    /// [`QueueError`], which says whether the value may have been put.
    async fn put(&mut self, value: &[u8]) -> Result<bool, QueueError>;

    /// Takes the value before all others, if the queue has any.
    ///
    /// # Errors
    /// [`QueueError`], which says whether a value may have been taken, which is lost then.
    async fn take(&mut self) -> Result<Option<&[u8]>, QueueError>;
}

impl<F: Fabric + Clock> Queue for AnyQueue<F> {
    fn kind(&self) -> &'static str {
        with_queue!(self, queue => queue.kind())
    }

    async fn put(&mut self, value: &[u8]) -> Result<bool, QueueError> {
        with_queue!(self, queue => queue.put(value).await)
    }

    async fn take(&mut self) -> Result<Option<&[u8]>, QueueError> {
        with_queue!(self, queue => queue.take().await)
    }
}

/// Why an operation has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueError {
    /// The store cannot be opened.
    Store(StoreError),
    /// A value has at most `max` bytes. Nothing was asked of anyone.
    Length {
        /// Bytes of this one.
        len: usize,
        /// The most that a value has.
        max: usize,
    },
    /// No buffer was free for a tenth of a second. Nothing was put.
    OutOfMemory,
    /// A chain was refused.
    Refused(Status),
    /// What was read is not what clients write.
    Damaged(&'static str),
    /// The fabric has no answer.
    Fabric(FabricError),
}

impl QueueError {
    /// What may be assumed of an operation that failed so.
    pub fn ran(&self) -> Ran {
        match self {
            QueueError::Fabric(error) => error.ran(),
            _ => Ran::No,
        }
    }
}

impl From<StoreError> for QueueError {
    fn from(error: StoreError) -> QueueError {
        QueueError::Store(error)
    }
}

impl std::fmt::Display for QueueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            QueueError::Store(error) => error.fmt(f),
            QueueError::Length { len, max } => {
                write!(f, "the value has {len} bytes, and at most {max} are possible: split it")
            }
            QueueError::OutOfMemory => f.write_str(
                "the store is out of memory and nothing was put: take values, or make a larger store",
            ),
            QueueError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): open the store anew")
            }
            QueueError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            QueueError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for QueueError {}
