//! First-in, first-out queues of values. Each value is taken once.
//!
//! [`ring_queue`] is a bounded ring. Every queue implements [`Queue`].

pub mod ring_queue;

use crate::registry::AnyQueue;
use crate::store::StoreError;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, Status};

/// Operations of a queue. Each operation is linearizable, like those of [`crate::kv::Kv`].
#[allow(async_fn_in_trait, reason = "an endpoint belongs to one thread: no Send bound is wanted")]
pub trait Queue {
    /// Returns the kind of the store.
    fn kind(&self) -> &'static str;

    /// Appends a value. Returns false if the queue is full.
    ///
    /// # Errors
    /// [`QueueError`]; [`QueueError::ran`] states whether the value may have been appended.
    async fn put(&mut self, value: &[u8]) -> Result<bool, QueueError>;

    /// Removes and returns the oldest value, if the queue has one.
    ///
    /// # Errors
    /// [`QueueError`]; [`QueueError::ran`] states whether a value may have been removed. Such a value is lost.
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

/// Error of a queue operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueError {
    /// The store cannot be opened.
    Store(StoreError),
    /// The value is longer than `max` bytes. No request was sent.
    Length {
        /// Length of the value in bytes.
        len: usize,
        /// Maximum length of a value in bytes.
        max: usize,
    },
    /// No buffer was free for 100 ms. Nothing was put.
    OutOfMemory,
    /// The node refused a chain with this status.
    Refused(Status),
    /// The bytes read are not bytes that a client writes; the text states the fault. A peer with write access has
    /// damaged the store.
    Damaged(&'static str),
    /// The fabric returned no response.
    Fabric(FabricError),
}

impl QueueError {
    /// States whether an operation with this error may have been carried out.
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
                "the store is out of memory and nothing was put: take values, or create a larger store",
            ),
            QueueError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): open the store again")
            }
            QueueError::Damaged(what) => {
                write!(f, "the store is damaged ({what}): someone who holds its key has overwritten it")
            }
            QueueError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for QueueError {}
