//! A TCP stream on loopback, without Nagle's delay. A message is one write and, usually, one read.
//!
//! Invariant: a turn takes at most as many records as a message has. So two messages that arrive together still get two
//! replies.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use super::client::ClientEnd;
use super::message::{
    Asked, Format, Reply, items, read_replies, read_requests, value_in, write_requests, write_trailers,
};
use super::server::{ItemSource, ServerEnd, Turn};
use super::udp::{POLLS_PER_YIELD, is_not_yet, no_channel};
use super::{ANSWER_TIMEOUT, Echo, Poller, no_answer};
use crate::floor::overwrite::Values;

/// Client's end of a TCP stream.
pub(super) struct Near {
    stream: Stream,
    format: Format,
    values: Values,
    tasks_per_message: usize,
    requests: Vec<u8>,
}

/// Server's end of a TCP stream.
pub(super) struct Far {
    stream: Stream,
    format: Format,
    tasks_per_message: usize,
    replies: Vec<u8>,
}

/// A socket, and a buffer with the bytes that were read but not yet used.
struct Stream {
    socket: TcpStream,
    blocking: bool,
    buffer: Vec<u8>,
    len: usize,
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
        stream: Stream::new(near, echo, echo.tasks_per_message() * echo.reply_size())?,
        format: echo.format(),
        values: echo.values(),
        tasks_per_message: echo.tasks_per_message(),
        requests: vec![0; echo.format().requests_size_max(echo.tasks_per_message())],
    };
    near.stream.socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok((near, far.into()))
}

impl ClientEnd for Near {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn send(&mut self, first: u64, count: usize, asked: &Asked) -> io::Result<()> {
        let requests = write_requests(&mut self.requests, &self.format, first, count, asked, &self.values);
        self.stream.write(requests)
    }

    #[inline(always)]
    fn take(
        &mut self,
        next: u64,
        in_flight: usize,
        asked: &Asked,
        each: impl FnMut(Reply<'_>),
    ) -> io::Result<usize> {
        let (format, kinds) = (&self.format, asked.kinds_from(next));
        let count_max = in_flight.min(self.tasks_per_message);
        let whole = |stream: &Stream| format.replies_in(stream.len, kinds, count_max);
        let mut count = whole(&self.stream);
        if self.stream.wants_more(count, count_max) {
            if !self.stream.read()? {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has exited"));
            }
            count = whole(&self.stream);
        }
        read_replies(self.stream.bytes(), format, kinds, count, each);
        self.stream.consume(format.reply_at(kinds, count));
        Ok(count)
    }
}

impl Far {
    pub(super) fn new(echo: &Echo, far: OwnedFd) -> io::Result<Self> {
        let socket = TcpStream::from(far);
        socket.peer_addr().map_err(no_channel)?;
        Ok(Self {
            stream: Stream::new(socket, echo, echo.format().requests_size_max(echo.tasks_per_message()))?,
            format: echo.format(),
            tasks_per_message: echo.tasks_per_message(),
            replies: vec![0; echo.tasks_per_message() * echo.reply_size()],
        })
    }
}

impl ServerEnd for Far {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn turn(&mut self, source: &mut ItemSource) -> io::Result<Turn> {
        let (format, count_max) = (&self.format, self.tasks_per_message);
        let mut requests = read_requests(self.stream.bytes(), format, count_max)?;
        if self.stream.wants_more(requests.numbers().len(), count_max) {
            if !self.stream.read()? {
                return Ok(Turn::Closed);
            }
            requests = read_requests(self.stream.bytes(), format, count_max)?;
        }
        let count = requests.numbers().len();
        if count == 0 {
            return Ok(Turn::Nothing);
        }
        let value = |index| value_in(self.stream.bytes(), format, &requests, index);
        let found = source.answer(&requests, value, items(&mut self.replies, format, &requests));
        write_trailers(&mut self.replies, format, &requests, found);
        self.stream.consume(format.request_at(requests.kinds, count));
        self.stream.write(&self.replies[..format.reply_at(requests.kinds, count)])?;
        Ok(Turn::Answered)
    }
}

impl Stream {
    /// Creates a stream whose messages have at most `size_max` bytes.
    fn new(socket: TcpStream, echo: &Echo, size_max: usize) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(!echo.blocking)?;
        Ok(Self { socket, blocking: echo.blocking, buffer: vec![0; size_max], len: 0 })
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Whether to read although the buffer has `count` whole records: a read may have ended within a message whose
    /// rest arrived with it. A read must not block then.
    #[inline(always)]
    fn wants_more(&self, count: usize, count_max: usize) -> bool {
        count == 0 || (count < count_max && !self.blocking)
    }

    /// Reads the bytes that have arrived; if the socket blocks, waits for them. Returns false if the peer has closed
    /// the stream.
    #[inline(always)]
    fn read(&mut self) -> io::Result<bool> {
        loop {
            match self.socket.read(&mut self.buffer[self.len..]) {
                Ok(0) => return Ok(false),
                Ok(len) => self.len += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if self.blocking => return Err(no_answer()),
                Err(_) => {}
            }
            return Ok(true);
        }
    }

    /// Removes the first `len` bytes from the buffer.
    #[inline(always)]
    fn consume(&mut self, len: usize) {
        self.buffer.copy_within(len..self.len, 0);
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
