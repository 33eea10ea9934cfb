//! What a node and an shm client tell each other: the hello with its descriptors, over a unix socket; then calls and
//! their answers, in rings of the two of them alone, for which the socket is the bell.
//!
//! One message of a SEQPACKET socket, or one frame of a ring, is whole: nothing is ever split or joined.
//!
//! ```text
//! hello   client: JSON Hello          node: JSON Welcome with two descriptors (memory, rings), or JSON Refusal
//! call    | id u64 | service u32 | 0 u32 | request |                                        in the client's ring
//! answer  | id u64 | service u32 | status u32 | answer, or the reason for refusing |        in the node's ring
//! word    one byte over the socket: 0 look at the rings; of a client also
//!         1 memory is wanted, or much was given back; 2 bye, its session runs no more chains
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

/// Says that both ends speak this protocol.
pub const MAGIC: &str = "farside-shm";
/// Of the protocol. Raised whenever old and new would misunderstand each other.
pub const VERSION: u32 = 2;
/// The most bytes of a frame.
pub const FRAME_MAX: usize = CALL_BYTES_MAX + size_of::<FrameHeader>();

/// The first frame of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: String,
    /// [`VERSION`].
    pub version: u32,
}

/// The first frame of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Greeting {
    /// The session is open; the memory and the rings come with it.
    Welcome {
        /// Of the session.
        slot: u32,
        /// Of the session.
        number: u32,
        /// Of the memory.
        incarnation: u64,
    },
    /// Why there is no session.
    Refusal(String),
}

/// What a call and its answer begin with.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    /// Tells answers apart.
    pub id: U64,
    /// Who is asked.
    pub service: U32,
    /// [`ANSWERED`] or [`REFUSED`]; 0 in a call.
    pub status: U32,
}

/// The answer follows.
pub const ANSWERED: u32 = 0;
/// The reason follows, as text.
pub const REFUSED: u32 = 1;

/// Sends one frame of two pieces. Never waits for a peer that does not read: then the error is `AGAIN`.
///
/// # Errors
/// The system's; the frame was not sent.
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

/// Receives one frame with up to two descriptors; nothing if the peer has hung up.
///
/// # Errors
/// The system's, or that the frame is longer than a frame can be.
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

/// Splits a call or an answer.
pub fn parse(frame: &[u8]) -> Option<(&FrameHeader, &[u8])> {
    FrameHeader::ref_from_prefix(frame).ok()
}

/// Rings a bell: whoever polls the descriptor for its edges wakes. Its count is never read.
pub fn ring(bell: &impl AsFd) {
    // The only failure is a count at its maximum, which takes longer than any session lasts, or one's own malice.
    let _rings_already = rustix::io::write(bell, &1u64.to_ne_bytes());
}
