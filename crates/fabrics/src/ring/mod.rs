//! Sessions over rings in shared memory with the node's engine on this host, for tenants that do not trust each other.
//!
//! A client connects to the engine's Unix socket and sends a hello. The engine creates a memory of [`SIZE`] bytes for
//! this connection only and sends its descriptor. The memory holds frames in transit, and no store's data: one ring per
//! direction, each with one writer and one reader. So a client can harm only its own session.
//!
//! ```text
//! hello    client: JSON Hello          node: JSON Welcome with the memory's descriptor, or JSON Refusal
//! bell     one byte, either way: poll the rings
//! memory   | tail | head | tail | head | wish | wish |, each a u64 on lines of its own | ring | ring |
//! frame    | bytes u32 | bytes | zeros |, a multiple of 16 bytes at a multiple of 16; it may wrap around
//! ```
//!
//! In each direction, `tail` counts all bytes written and `head` all bytes read. Before a side sleeps, it sets its wish
//! to be woken. The other side clears the wish and rings the bell: it sends a byte over the socket. An eventfd would be
//! unsafe as a bell: its flags are shared by all processes that have it, so a client could make it block, and with it
//! the engine. A hang-up of the socket reports that the other process has ended, even to a side that sleeps.
//!
//! Invariants:
//! - Whatever the other side writes, and whenever, it can only lose its own session. Its counters are checked against
//!   their previous values, and bytes are copied out once before they are parsed.
//! - The memory's size is sealed, so that reading it never faults.
//! - No frame is lost: frames that do not fit in the ring wait in the sender, and a peer that frees no space is treated
//!   as dead.

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

/// Maximum size of a frame in bytes.
const FRAME_MAX: usize = 24 * 1024;
/// Size of one ring in bytes.
const RING: u64 = 256 * 1024;
/// Maximum number of bytes that wait in the sender for space in the ring.
const OUTBOX_MAX: usize = 4 << 20;

/// Identifies this protocol.
const MAGIC: &str = "farside-ring";
/// Version of the protocol. Incremented whenever old and new are incompatible.
const VERSION: u32 = 1;

/// The node's response to a [`Hello`].
#[derive(Serialize, Deserialize)]
enum Greeting {
    /// Accepted; the memory's descriptor comes with this message.
    Welcome,
    /// Rejected, with the reason.
    Refusal(String),
}

/// Checks that a hello is valid.
///
/// # Errors
/// It is not; the error is the message for the client.
fn check(hello: &[u8]) -> Result<(), String> {
    let hello: Hello = serde_json::from_slice(hello)
        .map_err(|_| "the greeting is not understood: connect with a farside client".to_owned())?;
    if hello.magic != MAGIC || hello.version != VERSION {
        // A client may send any length.
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
