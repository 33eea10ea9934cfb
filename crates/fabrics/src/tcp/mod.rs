//! Sessions over TCP: a client has one connection, to one of the node's engines.
//!
//! What a datagram is elsewhere is here a frame, `| bytes u32 |` and so many bytes. A connection carries each frame
//! once and in order, or it breaks, and with it the session: so nothing is sent twice and no frame has a check of its
//! own. What leaves in one turn leaves in one write. Frames go through the stream as they are ([`Plain`]), or by
//! [`tls`].

mod line;
mod port;
#[cfg(feature = "tls")]
pub mod tls;

pub use line::{StreamLine, TcpLine};
pub use port::{StreamPort, TcpPort};

use crate::session::DATAGRAM_MAX;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

/// The most bytes of a frame. Larger ones are slower: neither side has anything to do while the other works on all
/// of it.
const FRAME_MAX: usize = 24 * 1024;
/// Bytes before each frame.
const LENGTH: usize = 4;
/// Bytes that are read at once.
const READ_MAX: usize = 128 * 1024;

/// Why a connection carries nothing more.
#[derive(Debug)]
pub enum End {
    /// The other side has hung up.
    HungUp,
    /// The other side speaks something else.
    Foreign,
    /// The other side speaks TLS, and this one does not.
    Encrypted,
    /// TLS failed, for the reason that it contains.
    #[cfg(feature = "tls")]
    Tls(rustls::Error),
    /// The system's reason.
    System(std::io::Error),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::HungUp => f.write_str("the node has hung up"),
            End::Foreign => f.write_str("what serves there is no node"),
            End::Encrypted => {
                f.write_str("what serves there speaks TLS: name it by tls:// in place of tcp://")
            }
            #[cfg(feature = "tls")]
            End::Tls(error) => write!(f, "TLS failed: {error}"),
            End::System(error) => error.fmt(f),
        }
    }
}

/// How frames become bytes of a stream, and bytes frames again, at one side of a connection.
pub trait Wire: Send {
    /// Whether frames may come. Until then both sides agree how.
    fn is_ready(&self) -> bool;

    /// Takes a frame to be sent.
    fn push(&mut self, frame: &[u8]);

    /// Writes what was taken, as far as that goes.
    ///
    /// # Errors
    /// Nothing more will be carried.
    fn flush(&mut self, stream: &TcpStream) -> Result<(), End>;

    /// Bytes that could be written if there were room.
    fn unwritten(&self) -> usize;

    /// Whether a frame waits to be handed on, of which no poll tells.
    fn has_frame(&self) -> bool {
        false
    }

    /// Nothing has come for a while: gives back what it holds nothing in.
    fn rest(&mut self);

    /// Hands on the next frame, or the next few; reads for that once at most. `buffer` has 128 KiB. False if nothing
    /// came.
    ///
    /// # Errors
    /// Nothing more will be carried. What had arrived before was handed on.
    fn receive(
        &mut self,
        stream: &TcpStream,
        buffer: &mut [u8],
        take: impl FnMut(&[u8]),
    ) -> Result<bool, End>;
}

/// Frames as they are.
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

/// Bytes on their way out of one side of a connection.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// Of them that were written.
    sent: usize,
}

impl Outbox {
    /// Has `write` add something, given room for `len` bytes: how many it was, or else for how many there must be.
    #[cfg(feature = "tls")]
    fn extend(&mut self, len: usize, mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>) {
        let before = self.bytes.len();
        self.bytes.resize(before + len, 0);
        let written = write(&mut self.bytes[before..]).or_else(|len| {
            self.bytes.resize(before + len, 0);
            write(&mut self.bytes[before..])
        });
        self.bytes.truncate(before + written.expect("it has the room that it asked for"));
    }

    fn rest(&mut self) {
        if self.bytes.is_empty() {
            self.bytes.shrink_to(0);
        }
    }

    /// Bytes that were not written yet.
    fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Writes as much as goes.
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
        // What one burst needed is not kept for ever.
        self.bytes.shrink_to(READ_MAX);
        Ok(())
    }
}

fn put_frame(bytes: &mut Vec<u8>, frame: &[u8]) {
    bytes.extend_from_slice(&(frame.len() as u32).to_le_bytes());
    bytes.extend_from_slice(frame);
}

/// Bytes that arrived and were not handed on.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    /// Of them that were handed on since.
    done_with: usize,
    /// Whether a frame is whole among the others.
    has_frame: bool,
}

impl Inbox {
    /// Hands on the next frame: so that it is answered while the other side makes use of the answers to the one before.
    /// Reads once if none is whole. `buffer` has [`READ_MAX`] bytes. False if nothing came.
    fn receive(
        &mut self,
        stream: impl Read,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<bool, End> {
        if self.has_frame {
            let bytes = &self.bytes[self.done_with..];
            let (frame, rest) = next_frame(bytes)?.expect("it was whole");
            take(frame);
            self.done_with += bytes.len() - rest.len();
            self.has_frame = next_frame(rest)?.is_some();
            if !self.has_frame {
                // Only the beginning of a frame is kept for long.
                self.bytes.drain(..self.done_with);
                self.done_with = 0;
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

    /// Reads once, behind what was kept; how many bytes that makes in `buffer`. Nothing if nothing came.
    fn read(&self, mut stream: impl Read, buffer: &mut [u8]) -> Result<Option<usize>, End> {
        let held = self.bytes.len() - self.done_with;
        buffer[..held].copy_from_slice(&self.bytes[self.done_with..]);
        match stream.read(&mut buffer[held..]) {
            Ok(0) => Err(End::HungUp),
            Ok(len) => Ok(Some(held + len)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(End::System(error)),
        }
    }

    /// Hands on the frames that are whole with these bytes.
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

    /// Keeps what is to be looked at with what comes next, in place of what was kept.
    fn keep(&mut self, rest: &[u8]) {
        self.bytes.clear();
        self.done_with = 0;
        if rest.is_empty() {
            self.bytes.shrink_to(0); // Ten thousand idle connections hold nothing.
        } else {
            self.bytes.extend_from_slice(rest);
        }
    }
}

/// Hands on the frames that are whole in `bytes`; the rest.
#[cfg(feature = "tls")]
fn split(mut bytes: &[u8], mut take: impl FnMut(&[u8])) -> Result<&[u8], End> {
    while let Some((frame, after)) = next_frame(bytes)? {
        take(frame);
        bytes = after;
    }
    Ok(bytes)
}

/// A frame, and the bytes behind it.
type FrameAndRest<'a> = (&'a [u8], &'a [u8]);

/// The first frame of `bytes`, if that is whole.
#[inline]
fn next_frame(bytes: &[u8]) -> Result<Option<FrameAndRest<'_>>, End> {
    let Some((size, after)) = bytes.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let len = u32::from_le_bytes(*size) as usize;
    if len > DATAGRAM_MAX {
        return Err(if size[..3] == ALERT { End::Encrypted } else { End::Foreign });
    }
    Ok(after.split_at_checked(len))
}

/// How an alert of TLS begins, with which one who speaks it answers anything else. No frame is as long as it says.
const ALERT: [u8; 3] = [21, 3, 3];
const _: () = assert!(u32::from_le_bytes([21, 3, 3, 0]) as usize > DATAGRAM_MAX);

const _: () =
    assert!(READ_MAX >= 2 * (DATAGRAM_MAX + LENGTH), "a frame's beginning leaves room to read its rest");

#[cfg(test)]
#[path = "../../../remote/tests/support/fuzz.rs"]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::fuzz::{self, Change, Executions};
    use super::*;

    /// Hands out a few bytes at a time, then would block.
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
    fn frames_arrive_whole_however_the_bytes_are_cut() {
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
        let received = inbox.receive(&bytes[..], &mut vec![0; READ_MAX], |_| panic!("it is no frame"));
        assert!(matches!(received, Err(End::Foreign)));
    }

    #[test]
    fn who_answers_by_an_alert_of_tls_is_told_from_others() {
        let mut inbox = Inbox::default();
        let alert = [21, 3, 3, 0, 2, 2, 10];
        let received = inbox.receive(&alert[..], &mut vec![0; READ_MAX], |_| panic!("it is no frame"));
        assert!(matches!(received, Err(End::Encrypted)));
    }

    /// Frames whose bytes were changed, however they are cut: each that is handed on is no longer than a frame.
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
                let kept = inbox.bytes.len() - inbox.done_with;
                assert!(taken + kept <= len && inbox.bytes.len() <= READ_MAX);
                assert!(inbox.has_frame || inbox.bytes.len() < DATAGRAM_MAX + LENGTH);
            }
        });
    }
}
