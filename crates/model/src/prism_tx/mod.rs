//! PRISM-TX: execution, prepare, commit and abort of a few transactions, the death of clients, and recovery.
//!
//! - [`rules`]: the rules, and the ways to break them.
//! - [`slot`] and [`log`]: the memory of a shard. Each function is one atomic op.
//! - [`world`]: which transactions run, over which keys, and who dies. Also the state.
//! - [`program`]: the ops of each phase, in the order of their chains.
//! - [`client`] and [`recoverer`]: what an op does for its caller.
//! - [`judge`]: what must hold.
//! - [`words`]: schedules as sentences.
//! - [`worlds`]: sets of worlds. [`variants`]: each broken rule, with a world that shows it.
//!
//! A step is one op. A chain is not atomic: anything may happen between two of its ops, and its client may be cut off
//! there. Chains to different shards run in parallel.
//!
//! A client dies by being fenced. A recoverer may fence it at a shard at any time, and the client goes on at the other
//! shards until they are fenced as well. So a client that is suspected wrongly is covered, and so is a client that
//! stops: it takes no step any more. Recovery runs beside live transactions.
//!
//! Not modelled: time, lost memory, values that are torn, and the allocation of buffers.

pub mod client;
pub mod judge;
pub mod log;
pub mod program;
pub mod recoverer;
pub mod rules;
pub mod slot;
pub mod variants;
pub mod words;
pub mod world;
pub mod worlds;
