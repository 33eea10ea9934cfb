//! The messages between a node and an shm client. First a hello, with descriptors, passes over a Unix socket. Then
//! calls and responses pass through rings, with the socket as the bell.
//!
//! Each message of the SEQPACKET socket, and each frame of a ring, arrives whole, never split or joined.
//!
//! ```text
//! hello   client: JSON Hello          node: JSON Welcome with two descriptors (memory, rings), or JSON Refusal
//! call    | id u64 | service u32 | 0 u32 | request |                                        in the client's ring
//! answer  | id u64 | service u32 | status u32 | response, or the reason for a refusal |     in the node's ring
//! word    one byte over the socket, from either side: 0 = there are new frames in the rings
//!         from a client only: 1 = it needs memory, or has retired many buffers; 2 = its session runs no more chains
//! ```

use farside_remote::fabric::CALL_BYTES_MAX;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Name that identifies this protocol in a hello.
pub const MAGIC: &str = "farside-shm";
/// Version of the protocol. Incremented whenever old and new are incompatible.
pub const VERSION: u32 = 2;
/// Maximum size of a frame in bytes.
pub const FRAME_MAX: usize = CALL_BYTES_MAX + size_of::<FrameHeader>();

/// The first message of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Identifies the protocol: [`MAGIC`].
    pub magic: String,
    /// The client's version of the protocol: [`VERSION`].
    pub version: u32,
}

/// The first message of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Greeting {
    /// The session is open; the descriptors of memory and rings come with this message.
    Welcome {
        /// Index of the session's slot in the node's memory.
        slot: u32,
        /// Number of the session, which owns the buffers that its chains allocate.
        number: u32,
        /// Incarnation of the node's memory.
        incarnation: u64,
    },
    /// The node rejects the session; the text gives the reason.
    Refusal(String),
}

/// Header of a call and of its response.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// Number of the call. Its response has the same number.
    pub id: U64,
    /// Identifier of the service called.
    pub service: U32,
    /// Status of a response: [`ANSWERED`] or [`REFUSED`]. It is 0 in a call.
    pub status: U32,
}

/// Status of a response: the service's response follows.
pub const ANSWERED: u32 = 0;
/// Status of a response: the call was refused, and the reason follows as text.
pub const REFUSED: u32 = 1;

/// Sends one message, given in two parts. Never waits: if the peer does not read, the error is `AGAIN`.
///
/// # Errors
/// The system's error; the message was not sent.
pub fn send(
    socket: BorrowedFd<'_>,
    header: &[u8],
    body: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let pushed = ancillary.push(SendAncillaryMessage::ScmRights(fds));
        assert!(pushed, "a frame carries at most two descriptors");
    }
    let pieces = [IoSlice::new(header), IoSlice::new(body)];
    rustix::net::sendmsg(socket, &pieces, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)
}

/// Receives one message with up to two descriptors. Returns `None` if the peer has hung up.
///
/// # Errors
/// The system's error; `MSGSIZE` if the message is too long.
pub fn receive<'b>(
    socket: BorrowedFd<'_>,
    buffer: &'b mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> rustix::io::Result<Option<&'b [u8]>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    buffer.resize(FRAME_MAX, 0);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::TRUNC) {
        return Err(rustix::io::Errno::MSGSIZE);
    }
    Ok((received.bytes > 0).then(|| &buffer[..received.bytes]))
}

/// Splits a call or a response into header and body. Returns `None` if the frame is shorter than a header.
pub fn parse(frame: &[u8]) -> Option<(&FrameHeader, &[u8])> {
    FrameHeader::ref_from_prefix(frame).ok()
}

/// Rings a bell: wakes a thread that polls this eventfd edge-triggered. The eventfd's count is never read.
pub fn ring(bell: &impl AsFd) {
    // Fails only if the count is at its maximum, which no session lives long enough to reach unless the peer is
    // malicious.
    let _rings_already = rustix::io::write(bell, &1u64.to_ne_bytes());
}
