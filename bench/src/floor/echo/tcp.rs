//! A TCP stream on loopback, without Nagle's delay. A message is one write and, usually, one read.
//!
//! Invariant: one read returns at most the records of one message. So two messages that arrive together still get two
//! replies.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use super::client::ClientEnd;
use super::message::{ECHO, FETCH, Reply, read_replies, read_requests, write_requests, write_trailers};
use super::server::{ItemSource, ServerEnd, Turn};
use super::udp::{POLLS_PER_YIELD, is_not_yet, no_channel};
use super::{ANSWER_TIMEOUT, Echo, Poller, REQUEST_SIZE, no_answer};

/// Client's end of a TCP stream.
pub(super) struct Near {
    stream: Stream,
    blocking: bool,
    op: u32,
    reply_size: usize,
    item_size: usize,
    requests: Vec<u8>,
}

/// Server's end of a TCP stream.
pub(super) struct Far {
    stream: Stream,
    reply_size: usize,
    item_size: usize,
    replies: Vec<u8>,
}

/// A socket, and a buffer with the bytes that were read but not yet used.
struct Stream {
    socket: TcpStream,
    bytes: Vec<u8>,
    record_size: usize,
    len: usize,
}

/// Outcome of polling a stream for whole records.
enum Polled {
    Nothing,
    Ended,
    /// The buffer has whole records of this many bytes.
    Records(usize),
}

/// Opens both sockets of a connection.
pub(super) fn open(echo: &Echo) -> io::Result<(Near, OwnedFd)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let far = loop {
        let (far, from) = listener.accept()?;
        // Ignore other processes that connect to this port.
        if from == near.local_addr()? {
            break far;
        }
    };
    let near = Near {
        stream: Stream::new(near, echo, echo.reply_size())?,
        blocking: echo.blocking,
        op: if echo.bare { ECHO } else { FETCH },
        reply_size: echo.reply_size(),
        item_size: echo.item_size(),
        requests: vec![0; echo.tasks_per_message() * REQUEST_SIZE],
    };
    near.stream.socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok((near, far.into()))
}

impl ClientEnd for Near {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn send(&mut self, first: u64, numbers: &[u64]) -> io::Result<()> {
        self.stream.write(write_requests(&mut self.requests, first, numbers, self.op))
    }

    #[inline(always)]
    fn take(&mut self, _next: u64, each: impl FnMut(Reply<'_>)) -> io::Result<usize> {
        match self.stream.read()? {
            Polled::Records(len) => {
                let count = read_replies(&self.stream.bytes[..len], self.reply_size, self.item_size, each);
                self.stream.consume(len);
                Ok(count)
            }
            Polled::Ended => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has exited")),
            Polled::Nothing if self.blocking => Err(no_answer()),
            Polled::Nothing => Ok(0),
        }
    }
}

impl Far {
    pub(super) fn new(echo: &Echo, far: OwnedFd) -> io::Result<Self> {
        let socket = TcpStream::from(far);
        socket.peer_addr().map_err(no_channel)?;
        Ok(Self {
            stream: Stream::new(socket, echo, REQUEST_SIZE)?,
            reply_size: echo.reply_size(),
            item_size: echo.item_size(),
            replies: vec![0; echo.tasks_per_message() * echo.reply_size()],
        })
    }
}

impl ServerEnd for Far {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn turn(&mut self, source: &ItemSource) -> io::Result<Turn> {
        let len = match self.stream.read()? {
            Polled::Nothing => return Ok(Turn::Nothing),
            Polled::Ended => return Ok(Turn::Closed),
            Polled::Records(len) => len,
        };
        let requests = read_requests(&self.stream.bytes[..len], source.op())?;
        self.stream.consume(len);
        let replies = &mut self.replies[..requests.numbers().len() * self.reply_size];
        let items = replies.chunks_exact_mut(self.reply_size).map(|reply| &mut reply[..self.item_size]);
        let found = source.answer(requests.numbers(), items);
        write_trailers(replies, self.reply_size, requests.first, found);
        self.stream.write(replies)?;
        Ok(Turn::Answered)
    }
}

impl Stream {
    /// Creates a stream that reads records of `record_size` bytes, at most one message at a time.
    fn new(socket: TcpStream, echo: &Echo, record_size: usize) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(!echo.blocking)?;
        Ok(Self { socket, bytes: vec![0; echo.tasks_per_message() * record_size], record_size, len: 0 })
    }

    /// Reads until the buffer has a whole record; a non-blocking socket may return earlier.
    #[inline(always)]
    fn read(&mut self) -> io::Result<Polled> {
        loop {
            match self.socket.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Ok(Polled::Ended),
                Ok(len) => self.len += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Polled::Nothing),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.len >= self.record_size {
                return Ok(Polled::Records(self.len - self.len % self.record_size));
            }
        }
    }

    /// Removes the first `len` bytes from the buffer.
    #[inline(always)]
    fn consume(&mut self, len: usize) {
        self.bytes.copy_within(len..self.len, 0);
        self.len -= len;
    }

    #[inline(always)]
    fn write(&mut self, mut message: &[u8]) -> io::Result<()> {
        let mut poller = Poller::new(POLLS_PER_YIELD, Some(ANSWER_TIMEOUT));
        while !message.is_empty() {
            match self.socket.write(message) {
                Ok(len) => message = &message[len..],
                Err(error) if is_not_yet(&error) => poller.wait()?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
