//! Sessions over TCP: a client has one connection, to one of the node's engines.
//!
//! What a datagram is elsewhere is here a frame, `| bytes u32 |` and so many bytes. A connection carries each frame
//! once and in order, or it breaks, and with it the session: so nothing is sent twice and no frame has a check of its
//! own. What leaves in one turn leaves in one write.

mod line;
mod port;

pub use line::TcpLine;
pub use port::TcpPort;

use crate::session::DATAGRAM_MAX;
use std::io::{ErrorKind, Read, Write};

/// The most bytes of a frame. Larger ones are slower: neither side has anything to do while the other works on all
/// of it.
const FRAME_MAX: usize = 16 * 1024;
/// Bytes before each frame.
const LENGTH: usize = 4;
/// Bytes that are read at once.
const READ_MAX: usize = 128 * 1024;

/// Why a connection carries nothing more.
#[derive(Debug)]
enum End {
    /// The other side has hung up.
    HungUp,
    /// The other side speaks something else.
    Foreign,
    /// The system's reason.
    System(std::io::Error),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::HungUp => f.write_str("the node has hung up"),
            End::Foreign => f.write_str("what serves there is no node"),
            End::System(error) => error.fmt(f),
        }
    }
}

/// Frames on their way out of one side of a connection.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// Of them that were written.
    sent: usize,
}

impl Outbox {
    fn push(&mut self, frame: &[u8]) {
        self.bytes.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(frame);
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

/// The beginning of a frame whose rest has not arrived.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// Reads once and hands on the frames that are whole then. `buffer` has [`READ_MAX`] bytes. False if nothing came.
    fn receive(
        &mut self,
        mut stream: impl Read,
        buffer: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<bool, End> {
        let held = self.bytes.len();
        buffer[..held].copy_from_slice(&self.bytes);
        let len = match stream.read(&mut buffer[held..]) {
            Ok(0) => return Err(End::HungUp),
            Ok(len) => held + len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(error) => return Err(End::System(error)),
        };
        self.bytes.clear();
        let mut rest = &buffer[..len];
        while let Some((size, after)) = rest.split_first_chunk::<LENGTH>() {
            let size = u32::from_le_bytes(*size) as usize;
            if size > DATAGRAM_MAX {
                return Err(End::Foreign);
            }
            let Some((frame, after)) = after.split_at_checked(size) else { break };
            take(frame);
            rest = after;
        }
        if rest.is_empty() {
            self.bytes.shrink_to(0); // Ten thousand idle connections hold nothing.
        } else {
            self.bytes.extend_from_slice(rest);
        }
        Ok(true)
    }
}

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
        frames.iter().for_each(|frame| outbox.push(frame));
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

    /// Frames whose bytes were changed, however they are cut: each that is handed on is no longer than a frame.
    #[test]
    fn fuzz_frames() {
        let executions = Executions::of("frames of a stream");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(sizes, step, changes): (Vec<u16>, u16, Vec<Change>)| {
            executions.one_more();
            let mut outbox = Outbox::default();
            sizes.iter().for_each(|&size| outbox.push(&vec![7; size.into()]));
            let mut bytes = outbox.bytes;
            fuzz::change(&mut bytes, &changes);
            let (len, mut taken) = (bytes.len(), 0);
            let (mut drip, mut inbox) = (Drip(&bytes, 1 + usize::from(step)), Inbox::default());
            let mut buffer = vec![0; READ_MAX];
            let take = |frame: &[u8], taken: &mut usize| {
                assert!(frame.len() <= DATAGRAM_MAX);
                *taken += LENGTH + frame.len();
            };
            while let Ok(true) = inbox.receive(&mut drip, &mut buffer, |frame| take(frame, &mut taken)) {
                assert!(taken + inbox.bytes.len() <= len && inbox.bytes.len() < DATAGRAM_MAX + LENGTH);
            }
        });
    }
}
