//! Sessions over rings in shared memory, between clients and an engine of the node on the same host. The clients need
//! not trust each other.
//!
//! A client connects to the engine's Unix socket and sends a hello. The engine creates a memory of [`SIZE`] bytes for
//! this connection alone, and sends its descriptor. The memory holds only frames in transit, no store's data. It has
//! one ring per direction, each with one writer and one reader. So a client can harm only its own session.
//!
//! ```text
//! hello    client: JSON Hello          node: JSON Welcome with the memory's descriptor, or JSON Refusal
//! bell     one byte, either way: poll the rings
//! memory   | tail | head | tail | head | wish | wish |, each a u64 on lines of its own | ring | ring |
//! frame    | bytes u32 | bytes | zeros |, a multiple of 16 bytes at a multiple of 16; it may wrap around
//! ```
//!
//! In each direction, `tail` counts all bytes written and `head` all bytes read. Before a side sleeps, it sets its wish
//! to be woken. The other side clears the wish and rings the bell, which means that it sends a byte over the socket. A
//! hang-up of the socket wakes even a side that sleeps, and reports that the other process has ended.
//!
//! An eventfd would be unsafe as a bell. All processes that have an eventfd share its flags, so a client could make it
//! block, and the engine would block with it.
//!
//! Invariants:
//! - Whatever the other side writes, and at any time, only its own session can be lost. The counters that it writes are
//!   checked against their previous values, and bytes are copied out once before they are parsed.
//! - The memory's size is sealed, so that reading it never faults.
//! - No frame is lost: frames that do not fit in the ring wait in the sender. If so many wait that the sender's space
//!   is full, the connection ends as if the peer were dead.

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

/// Name that identifies this protocol in a hello.
const MAGIC: &str = "farside-ring";
/// Version of the protocol. Incremented whenever old and new are incompatible.
const VERSION: u32 = 1;

/// The node's response to a [`Hello`].
#[derive(Serialize, Deserialize)]
enum Greeting {
    /// The engine accepts the client; the memory's descriptor comes with this message.
    Welcome,
    /// The engine rejects the client; the text gives the reason.
    Refusal(String),
}

/// Checks that a hello is valid.
///
/// # Errors
/// The hello is invalid; the error is the message for the client.
fn check(hello: &[u8]) -> Result<(), String> {
    let hello: Hello = serde_json::from_slice(hello)
        .map_err(|_| "the greeting is not understood: connect with a farside client".to_owned())?;
    if hello.magic != MAGIC || hello.version != VERSION {
        // The quoted text is cut, since a client may send any length.
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
