//! FaSST's remote procedure calls (Kalia et al., OSDI'16, section 4): batches of requests to several nodes, one packet
//! for each node. `docs/papers/fasst.md` has more.
//!
//! - A *task* adds requests to a [`Batch`], and sends it. Requests to one node share a packet. The task goes on once
//!   the responses of all packets have arrived, or have failed.
//! - A node runs a [`Handler`] for each request: a function for its type, which never waits.
//! - A packet names its task, its batch and the epoch of its coordinator.
//!
//! Packets are calls of a session, so fabrics do the rest: they put the packets that several tasks send to one engine
//! in a turn into one datagram (doorbell batching), they limit the packets in flight by credits (the size of receive
//! queues), and their executor polls and wakes the tasks (master and worker coroutines).
//!
//! Differs from the paper (4.3): a session repeats lost packets, and a node carries out each packet at most once. The
//! paper's network loses next to nothing, so that a process without a response for 1 s kills itself. On other networks
//! that would happen all the time. Here a batch ends with an error for each packet without a response within the
//! fabric's deadline. The error states whether its requests may have run.
//!
//! Invariant: a task has at most one packet in flight to each destination: [`Batch::send`] borrows the batch.
//! Invariant: a response counts only if it names the task and the batch that it answers.

mod batch;
mod handlers;
pub mod mutants;
mod packet;

pub use batch::{Batch, Destination, Response};
pub use handlers::{Handled, Handler, Handlers, REFUSED, STALE};
pub use packet::{ENTRIES_MAX, FIRST_TYPE, Header, PACKET_MAX};
pub(super) use packet::{HEADER_SIZE, entry_size};
