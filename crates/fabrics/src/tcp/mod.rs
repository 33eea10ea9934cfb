//! Sessions over TCP: a client has one connection, to one of the node's engines.
//!
//! Each datagram of a session becomes one frame: `| bytes u32 |`, then that number of bytes. A connection delivers each
//! frame once and in order, until it breaks and the session ends. So nothing is retransmitted, and frames have no
//! checksum. All frames of one round of the client core are written in one system call. Frames travel through the
//! stream in the clear ([`Plain`]) or over TLS ([`tls`]).

mod line;
mod port;
#[cfg(feature = "tls")]
pub mod tls;

pub use line::{StreamLine, TcpLine};
#[cfg(feature = "verbs")]
pub(crate) use port::listen;
pub use port::{StreamPort, TcpPort};

use crate::session::DATAGRAM_MAX;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

/// Maximum size of a frame in bytes. Larger frames are slower, because one side idles while the other handles the whole
/// frame.
const FRAME_MAX: usize = 24 * 1024;
/// Size in bytes of the length field before each frame.
const LENGTH: usize = 4;
/// Maximum number of bytes read by one system call.
const READ_MAX: usize = 128 * 1024;

/// Why a connection is unusable.
#[derive(Debug)]
pub enum End {
    /// The peer has closed the connection.
    HungUp,
    /// The peer speaks another protocol.
    Foreign,
    /// The peer speaks TLS, and this side does not.
    Encrypted,
    /// TLS failed, with this error.
    #[cfg(feature = "tls")]
    Tls(rustls::Error),
    /// The system's error.
    System(std::io::Error),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::HungUp => f.write_str("the node has hung up"),
            End::Foreign => f.write_str("the peer is not a farside node"),
            End::Encrypted => f.write_str("the peer speaks TLS: use tls:// in place of tcp://"),
            #[cfg(feature = "tls")]
            End::Tls(error) => write!(f, "TLS failed: {error}"),
            End::System(error) => error.fmt(f),
        }
    }
}

/// One side's conversion between frames and the bytes of a stream.
pub trait Wire: Send {
    /// Whether the connection may carry frames. False during a handshake.
    fn is_ready(&self) -> bool;

    /// Queues a frame for sending.
    fn push(&mut self, frame: &[u8]);

    /// Writes queued frames until the stream accepts no more.
    ///
    /// # Errors
    /// The connection is unusable.
    fn flush(&mut self, stream: &TcpStream) -> Result<(), End>;

    /// Number of queued bytes that the stream has not yet accepted.
    fn unwritten(&self) -> usize;

    /// Whether a received frame waits in memory. Epoll does not report such a frame.
    fn has_frame(&self) -> bool {
        false
    }

    /// Called when the connection has been idle for a while, to free buffers that are empty.
    fn rest(&mut self);

    /// Passes the next frame, or the next few, to `take`; reads from the stream at most once. `buffer` has 128 KiB.
    /// Returns false if nothing was received.
    ///
    /// # Errors
    /// The connection is unusable. Frames received before were passed on.
    fn receive(
        &mut self,
        stream: &TcpStream,
        buffer: &mut [u8],
        take: impl FnMut(&[u8]),
    ) -> Result<bool, End>;
}

/// A wire without encryption: frames pass through the stream in the clear.
#[derive(Default)]
pub struct Plain {
    inbox: Inbox,
    outbox: Outbox,
}

impl Wire for Plain {
    fn is_ready(&self) -> bool {
        true
    }

    fn push(&mut self, frame: &[u8]) {
        put_frame(&mut self.outbox.bytes, frame);
    }

    fn flush(&mut self, stream: &TcpStream) -> Result<(), End> {
        self.outbox.flush(stream)
    }

    fn unwritten(&self) -> usize {
        self.outbox.len()
    }

    fn has_frame(&self) -> bool {
        self.inbox.has_frame
    }

    fn rest(&mut self) {
        self.outbox.rest();
    }

    fn receive(
        &mut self,
        stream: &TcpStream,
        buffer: &mut [u8],
        take: impl FnMut(&[u8]),
    ) -> Result<bool, End> {
        self.inbox.receive(stream, buffer, take)
    }
}

/// Bytes queued to be written to the stream.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// Number of bytes already written.
    sent: usize,
}

impl Outbox {
    /// Appends the bytes that `write` produces into a space of at least `len` bytes. `write` returns the number of
    /// bytes produced. If the space is too small, `write` returns the required size as an error.
    #[cfg(feature = "tls")]
    fn extend(&mut self, len: usize, mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>) {
        let before = self.bytes.len();
        self.bytes.resize(before + len, 0);
        let written = write(&mut self.bytes[before..]).or_else(|len| {
            self.bytes.resize(before + len, 0);
            write(&mut self.bytes[before..])
        });
        self.bytes.truncate(before + written.expect("the space requested is enough"));
    }

    fn rest(&mut self) {
        if self.bytes.is_empty() {
            self.bytes.shrink_to(0);
        }
    }

    /// Number of bytes not yet written.
    fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Writes bytes until none are left or the stream accepts no more.
    fn flush(&mut self, mut stream: impl Write) -> Result<(), End> {
        while self.len() > 0 {
            match stream.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(End::HungUp),
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(End::System(error)),
            }
        }
        self.sent = 0;
        self.bytes.clear();
        // After a burst, frees the memory that only the burst needed.
        self.bytes.shrink_to(READ_MAX);
        Ok(())
    }
}

fn put_frame(bytes: &mut Vec<u8>, frame: &[u8]) {
    bytes.extend_from_slice(&(frame.len() as u32).to_le_bytes());
    bytes.extend_from_slice(frame);
}

/// Bytes received but not yet passed on as frames.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    /// Number of bytes already passed on.
    consumed: usize,
    /// Whether the bytes not yet passed on contain a complete frame.
    has_frame: bool,
}

impl Inbox {
    /// Passes on the next frame only, so that the response to it leaves while the peer handles the response to the
    /// previous frame. Reads once if no frame is complete. `buffer` has [`READ_MAX`] bytes. Returns false if nothing
    /// was received.
    fn receive(
        &mut self,
        stream: impl Read,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<bool, End> {
        if self.has_frame {
            let bytes = &self.bytes[self.consumed..];
            let (frame, rest) = next_frame(bytes)?.expect("a complete frame");
            take(frame);
            self.consumed += bytes.len() - rest.len();
            self.has_frame = next_frame(rest)?.is_some();
            if !self.has_frame {
                // Complete frames were passed on, so that only an incomplete one may stay for long.
                self.bytes.drain(..self.consumed);
                self.consumed = 0;
                self.bytes.shrink_to(0);
            }
            return Ok(true);
        }
        let Some(len) = self.read(stream, buffer)? else { return Ok(false) };
        let mut rest = &buffer[..len];
        if let Some((frame, after)) = next_frame(rest)? {
            take(frame);
            rest = after;
        }
        self.has_frame = next_frame(rest)?.is_some();
        self.keep(rest);
        Ok(true)
    }

    /// Copies the bytes kept before to `buffer`, and reads once after them. Returns the total number of bytes in
    /// `buffer`, or `None` if nothing was received.
    fn read(&self, mut stream: impl Read, buffer: &mut [u8]) -> Result<Option<usize>, End> {
        let held = self.bytes.len() - self.consumed;
        buffer[..held].copy_from_slice(&self.bytes[self.consumed..]);
        match stream.read(&mut buffer[held..]) {
            Ok(0) => Err(End::HungUp),
            Ok(len) => Ok(Some(held + len)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(End::System(error)),
        }
    }

    /// Adds received `bytes`, and passes all frames that are now complete to `take`.
    #[cfg(feature = "tls")]
    fn feed(&mut self, bytes: &[u8], take: impl FnMut(&[u8])) -> Result<(), End> {
        if self.bytes.is_empty() {
            self.keep(split(bytes, take)?);
            return Ok(());
        }
        self.bytes.extend_from_slice(bytes);
        let rest = split(&self.bytes, take)?.len();
        self.bytes.drain(..self.bytes.len() - rest);
        if rest == 0 {
            self.keep(&[]);
        }
        Ok(())
    }

    /// Keeps the bytes `rest` for the next read, in place of those kept before.
    fn keep(&mut self, rest: &[u8]) {
        self.bytes.clear();
        self.consumed = 0;
        if rest.is_empty() {
            self.bytes.shrink_to(0); // 10,000 idle connections must hold no memory.
        } else {
            self.bytes.extend_from_slice(rest);
        }
    }
}

/// Passes the complete frames in `bytes` to `take`; returns the remaining bytes.
#[cfg(feature = "tls")]
fn split(mut bytes: &[u8], mut take: impl FnMut(&[u8])) -> Result<&[u8], End> {
    while let Some((frame, after)) = next_frame(bytes)? {
        take(frame);
        bytes = after;
    }
    Ok(bytes)
}

/// A frame, and the bytes that follow it.
type FrameAndRest<'a> = (&'a [u8], &'a [u8]);

/// Returns the first frame of `bytes` and the bytes after it, or `None` if the frame is incomplete.
#[inline]
fn next_frame(bytes: &[u8]) -> Result<Option<FrameAndRest<'_>>, End> {
    let Some((size, after)) = bytes.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let len = u32::from_le_bytes(*size) as usize;
    if len > DATAGRAM_MAX {
        return Err(if size[..3] == ALERT { End::Encrypted } else { End::Foreign });
    }
    Ok(after.split_at_checked(len))
}

/// First bytes of a TLS alert, which a TLS peer sends to a peer of another protocol. Read as a frame's length, they
/// exceed the maximum.
const ALERT: [u8; 3] = [21, 3, 3];
const _: () = assert!(u32::from_le_bytes([21, 3, 3, 0]) as usize > DATAGRAM_MAX);

const _: () =
    assert!(READ_MAX >= 2 * (DATAGRAM_MAX + LENGTH), "an incomplete frame leaves space for the rest");

#[cfg(test)]
#[path = "../../../remote/tests/support/fuzz.rs"]
pub(crate) mod fuzz;

#[cfg(test)]
mod tests {
    use super::fuzz::{self, Change, Executions};
    use super::*;

    /// A stream that returns a few bytes per read, then `WouldBlock`.
    struct Drip<'a>(&'a [u8], usize);

    impl Read for Drip<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            if self.0.is_empty() {
                return Err(ErrorKind::WouldBlock.into());
            }
            let (now, later) = self.0.split_at(self.1.min(self.0.len()));
            out[..now.len()].copy_from_slice(now);
            self.0 = later;
            Ok(now.len())
        }
    }

    #[test]
    fn frames_arrive_complete_however_reads_split_them() {
        let frames: [&[u8]; 4] = [b"one", b"", &[7; 5000], b"last"];
        let mut outbox = Outbox::default();
        frames.iter().for_each(|frame| put_frame(&mut outbox.bytes, frame));
        let mut bytes = Vec::new();
        outbox.flush(&mut bytes).expect("a Vec takes all");
        let mut buffer = vec![0; READ_MAX];
        for step in [1, 2, 3, 5, 7, 64, 4096, 100_000] {
            let (mut drip, mut inbox, mut got) = (Drip(&bytes, step), Inbox::default(), Vec::new());
            while inbox.receive(&mut drip, &mut buffer, |frame| got.push(frame.to_vec())).expect("frames") {}
            assert_eq!(got, frames, "{step} bytes at a time");
            assert_eq!(inbox.bytes.capacity(), 0);
        }
    }

    #[test]
    fn a_frame_beyond_the_limit_is_foreign() {
        let bytes = (DATAGRAM_MAX as u32 + 1).to_le_bytes();
        let mut inbox = Inbox::default();
        let received = inbox.receive(&bytes[..], &mut vec![0; READ_MAX], |_| panic!("not a frame"));
        assert!(matches!(received, Err(End::Foreign)));
    }

    #[test]
    fn a_peer_that_sends_a_tls_alert_is_recognized() {
        let mut inbox = Inbox::default();
        let alert = [21, 3, 3, 0, 2, 2, 10];
        let received = inbox.receive(&alert[..], &mut vec![0; READ_MAX], |_| panic!("not a frame"));
        assert!(matches!(received, Err(End::Encrypted)));
    }

    /// Passes on mutated frames in pieces of any size, and checks that no frame exceeds the limit.
    #[test]
    fn fuzz_frames() {
        let executions = Executions::of("frames of a stream");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(sizes, step, changes): (Vec<u16>, u16, Vec<Change>)| {
            executions.one_more();
            let mut bytes = Vec::new();
            sizes.iter().for_each(|&size| put_frame(&mut bytes, &vec![7; size.into()]));
            fuzz::change(&mut bytes, &changes);
            let (len, mut taken) = (bytes.len(), 0);
            let (mut drip, mut inbox) = (Drip(&bytes, 1 + usize::from(step)), Inbox::default());
            let mut buffer = vec![0; READ_MAX];
            let take = |frame: &[u8], taken: &mut usize| {
                assert!(frame.len() <= DATAGRAM_MAX);
                *taken += LENGTH + frame.len();
            };
            while let Ok(true) = inbox.receive(&mut drip, &mut buffer, |frame| take(frame, &mut taken)) {
                let kept = inbox.bytes.len() - inbox.consumed;
                assert!(taken + kept <= len && inbox.bytes.len() <= READ_MAX);
                assert!(inbox.has_frame || inbox.bytes.len() < DATAGRAM_MAX + LENGTH);
            }
        });
    }
}
