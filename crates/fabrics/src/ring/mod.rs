//! Sessions over rings in shared memory: the node's engine on this host, for tenants that do not trust each other.
//!
//! A client connects to the engine's unix socket and says hello; the engine makes a memory of [`SIZE`] bytes for the
//! two of them alone and hands over its descriptor. It holds no data of any store, only frames on their way: a ring
//! in each direction, with one writer and one reader. So a client can harm nothing but its own session.
//!
//! ```text
//! hello    client: JSON Hello          node: JSON Welcome with the memory's descriptor, or JSON Refusal
//! bell     one byte, either way: look at the rings
//! memory   | tail | head | tail | head | wish | wish |, each a u64 on lines of its own | ring | ring |
//! frame    | bytes u32 | bytes | zeros |, a multiple of 16 bytes at a multiple of 16; it may wrap around
//! ```
//!
//! Of each direction, `tail` counts the bytes that were ever written and `head` those that were read. Before a side
//! sleeps it wishes to be woken; whoever grants the wish takes it away, and rings by the socket. Not by an eventfd:
//! the flags of one belong to all who have it, so a client could make it block, and with it the engine that rings.
//! The socket's hang-up says that the other side's process has ended, also to one that sleeps.
//!
//! What always holds:
//! - Whatever the other side writes, and whenever, costs it its session at most: its counts are checked against what
//!   they were, and bytes are copied out once before anyone looks at them.
//! - The memory's size is sealed, so that reading it never fails.
//! - Nothing is lost: what finds no room waits here, and a peer that makes none is taken for dead.

pub(crate) mod end;
mod line;
mod port;
pub(crate) mod shared;
#[cfg(test)]
mod tests;

pub use crate::connections::Connected;
pub use line::RingLine;
pub use port::RingPort;
pub use shared::SIZE;

use crate::shm::frame::Hello;
use serde::{Deserialize, Serialize};

/// The most bytes of a frame.
const FRAME_MAX: usize = 24 * 1024;
/// Bytes of one ring.
const RING: u64 = 256 * 1024;
/// The most bytes that wait for room.
const OUTBOX_MAX: usize = 4 << 20;

/// Says that both ends speak this protocol.
const MAGIC: &str = "farside-ring";
/// Of the protocol. Raised whenever old and new would misunderstand each other.
const VERSION: u32 = 1;

/// The node's answer to a [`Hello`].
#[derive(Serialize, Deserialize)]
enum Greeting {
    /// The memory comes with it.
    Welcome,
    /// Why there is none.
    Refusal(String),
}

/// Whether a hello is one of ours.
///
/// # Errors
/// It is not: what to tell whoever sent it.
fn check(hello: &[u8]) -> Result<(), String> {
    let hello: Hello = serde_json::from_slice(hello)
        .map_err(|_| "the greeting is not understood: connect with a farside client".to_owned())?;
    if hello.magic != MAGIC || hello.version != VERSION {
        // What it calls itself may be long.
        let magic: String = hello.magic.chars().take(32).collect();
        return Err(format!(
            "the client speaks {} version {}, the node {MAGIC} version {VERSION}: use the same release on both sides, \
             and the url that the node names",
            magic.escape_debug(),
            hello.version,
        ));
    }
    Ok(())
}
