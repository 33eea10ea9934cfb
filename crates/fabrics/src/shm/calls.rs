//! One side of a session's calls, which are frames in a pair of rings, with a socket as the bell.
//!
//! The rings are those of [`crate::ring`], with frames large enough for a call.
//!
//! Invariant: whatever the other side writes, it can make only its own calls fail.
//! Invariant: no function of this module blocks. Frames that do not fit in the ring wait in the sender, up to a bound.
//! Invariant: once [`Calls::rests`] has returned true, the other side rings for the next frame.

use super::frame::{FRAME_MAX, FrameHeader};
use crate::memory::MappingError;
pub use crate::ring::end::Fault;
use crate::ring::end::{Buffer, End, LONGEST};
use crate::ring::shared::{Mapped, Memory, Side, make};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use zerocopy::IntoBytes;

const _: () = assert!(FRAME_MAX <= LONGEST);

/// Maximum number of frames passed on before the lock is released to other threads.
const FRAMES_AT_A_TIME: usize = 16;

/// The shared memory of a session's two rings, one per direction.
pub struct Rings(Memory);

impl Rings {
    /// Creates the rings, and the descriptor by which the other side maps them.
    ///
    /// # Errors
    /// The system is out of memory or descriptors.
    pub fn make() -> Result<(Rings, OwnedFd), MappingError> {
        let fd = make()?;
        Ok((Rings(Memory::map(&fd)?), fd))
    }

    /// Maps the rings of `fd`, which the other side has created.
    ///
    /// # Errors
    /// The descriptor is not one of rings, the rings could be truncated while in use, or the system has no address
    /// space.
    pub(super) fn open(fd: &OwnedFd) -> Result<Rings, MappingError> {
        Memory::map(fd).map(Rings)
    }
}

/// The private copy of a received frame, which is parsed in place of the shared bytes.
pub struct Inbox(Buffer);

impl Inbox {
    /// Creates an inbox for frames of up to [`FRAME_MAX`] bytes.
    #[expect(clippy::new_without_default, reason = "an inbox is large")]
    pub fn new() -> Inbox {
        Inbox(Buffer::of(FRAME_MAX))
    }
}

/// The meaning of a message on the socket, by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// There may be new frames in the rings, so the receiver polls them.
    Look,
    /// A client needs memory, or has retired many buffers.
    Wanted,
    /// A client's last message: it runs no more chains.
    Bye,
    /// The other side has closed its socket without reading all messages.
    ClosedPipe,
    /// The other side has hung up.
    HungUp,
}

/// One side of a session's calls. Threads may share it: a lock lets them use it one at a time.
pub struct Calls {
    shared: Mapped,
    end: Mutex<End>,
}

impl Calls {
    /// Creates a client's side.
    pub(super) fn of_client(socket: OwnedFd, rings: Rings) -> Calls {
        Calls { shared: Mapped { memory: rings.0, socket }, end: Mutex::new(End::new(Side::Client)) }
    }

    /// Creates a node's side.
    pub fn of_node(socket: OwnedFd, rings: Rings) -> Calls {
        Calls { shared: Mapped { memory: rings.0, socket }, end: Mutex::new(End::new(Side::Engine)) }
    }

    /// Sends a frame to the other side, and rings the bell if the other side sleeps.
    ///
    /// # Errors
    /// [`Fault`] says why the rings are unusable; the frame was not sent.
    pub fn send(&self, header: FrameHeader, body: &[u8]) -> Result<(), Fault> {
        let frame = [header.as_bytes(), body].concat();
        let mut end = self.end();
        end.send(&self.shared, &frame)?;
        end.flush(&self.shared)
    }

    /// Passes received frames to `take`, at most 16 per call, so that other threads can use the rings in between.
    /// Returns false if there were no frames.
    ///
    /// # Errors
    /// [`Fault::Foreign`]: the other side has written invalid data. The earlier frames were passed on.
    pub fn receive(&self, inbox: &mut Inbox, mut take: impl FnMut(&[u8])) -> Result<bool, Fault> {
        let mut end = self.end();
        end.awake(&self.shared);
        for count in 0..FRAMES_AT_A_TIME {
            if !end.receive(&self.shared, &mut inbox.0, &mut take)? {
                return Ok(count > 0);
            }
        }
        Ok(true)
    }

    /// Asks the other side to ring for the next frame. Returns false if a frame has already arrived.
    pub fn rests(&self) -> bool {
        self.end().may_sleep(&self.shared)
    }

    /// Reads the next message of the socket, if there is one.
    pub fn hear(&self) -> Option<Said> {
        let mut byte = [0; 1];
        Some(match rustix::net::recv(&self.shared.socket, &mut byte, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) if byte[0] == Said::Wanted as u8 => Said::Wanted,
            Ok((_, 1..)) if byte[0] == Said::Bye as u8 => Said::Bye,
            Ok((_, 1..)) => Said::Look,
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Err(Errno::CONNRESET) => Said::ClosedPipe,
            Ok((_, 0)) | Err(_) => Said::HungUp,
        })
    }

    /// Sends a message over the socket.
    pub(super) fn say(&self, said: Said) {
        say(&self.shared.socket, said);
    }

    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Calls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }
}

pub(super) fn say(socket: &OwnedFd, said: Said) {
    // Sending fails if the socket is full or the other side is gone. In both cases no message is needed: enough are
    // queued to wake the other side, or there is nobody to wake.
    let _awake_already = rustix::net::send(socket, &[said as u8], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn pair() -> (Calls, Calls) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("two sockets");
        let (rings, fd) = Rings::make().expect("memory");
        let client = Calls::of_client(theirs.into(), Rings::open(&fd).expect("rings of the right size"));
        (client, Calls::of_node(ours.into(), rings))
    }

    fn header(id: u64) -> FrameHeader {
        FrameHeader { id: id.into(), service: 0.into(), status: 0.into() }
    }

    #[test]
    fn the_longest_calls_pass_while_many_are_in_flight() {
        let (client, node) = pair();
        let mut inbox = Inbox::new();
        let body = |id: u64| vec![id as u8; FRAME_MAX - size_of::<FrameHeader>() - id as usize % 3];
        assert!(client.rests() && node.rests());
        (0..40).for_each(|id| client.send(header(id), &body(id)).expect("the frame fits"));
        let mut under_way = VecDeque::new();
        let mut answered = 0;
        while answered < 40 {
            let asked = node.receive(&mut inbox, |frame| under_way.push_back(frame.to_vec()));
            asked.expect("a valid peer");
            while let Some(frame) = under_way.pop_front() {
                let (header, body) = super::super::frame::parse(&frame).expect("a call");
                node.send(*header, body).expect("the frame fits");
            }
            let heard = client.receive(&mut inbox, |frame| {
                let (header, bytes) = super::super::frame::parse(frame).expect("a response");
                assert_eq!((header.id.get(), bytes), (answered, &body(answered)[..]));
                answered += 1;
            });
            heard.expect("a valid peer");
        }
        assert!(client.rests() && node.rests());
    }

    #[test]
    fn a_resting_side_is_rung_once_per_wish() {
        let (client, node) = pair();
        let mut inbox = Inbox::new();
        assert!(node.rests());
        (0..3).for_each(|id| client.send(header(id), b"").expect("the frame fits"));
        assert_eq!([node.hear(), node.hear()], [Some(Said::Look), None]);
        let mut heard = 0;
        assert_eq!(node.receive(&mut inbox, |_| heard += 1), Ok(true));
        assert_eq!((heard, node.receive(&mut inbox, |_| heard += 1), node.rests()), (3, Ok(false), true));
        client.say(Said::Wanted);
        client.say(Said::Bye);
        drop(client);
        let said = [node.hear(), node.hear(), node.hear()];
        assert_eq!(said, [Some(Said::Wanted), Some(Said::Bye), Some(Said::HungUp)]);
    }

    #[test]
    fn unread_frames_are_bounded() {
        let (client, _node) = pair();
        let sent = (0..1000).find(|&id| client.send(header(id), &[1; 50_000]).is_err());
        assert!(sent.is_some_and(|sent| (80..100).contains(&sent)), "{sent:?}");
        assert_eq!(client.send(header(0), &[1; 50_000]), Err(Fault::ClosedPipe));
    }
}
