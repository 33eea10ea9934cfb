//! Datagrams between two connected UDP sockets on loopback. Each message is one datagram.
//!
//! Invariant: all messages in flight fit the receivers' buffers, so loopback loses none.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::net::sockopt::{set_socket_recv_buffer_size, socket_recv_buffer_size};

use super::client::ClientEnd;
use super::message::{
    Asked, Format, Reply, items, no_request, read_replies, read_requests, value_in, write_requests,
    write_trailers,
};
use super::server::{ItemSource, ServerEnd, Turn};
use super::{ANSWER_TIMEOUT, Echo, Poller, TASKS_MAX, invalid, no_answer};
use crate::floor::overwrite::Values;

/// Number of polls before the poller yields the CPU. A poll is a system call, like a yield: 16 polls take a few
/// microseconds.
pub(super) const POLLS_PER_YIELD: u32 = 16;

/// Size in bytes that is requested for a socket's buffer if the default is too small. The system grants at most
/// `net.core.rmem_max`.
const BUFFER_SIZE_MAX: usize = 8 << 20;

/// Upper bound of the kernel's overhead for a datagram, in bytes. In addition, the datagram may take twice its own
/// size.
const DATAGRAM_OVERHEAD: usize = 4096;

/// Client's end of two connected sockets.
pub(super) struct Near {
    socket: UdpSocket,
    blocking: bool,
    format: Format,
    values: Values,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

/// Server's end of two connected sockets.
pub(super) struct Far {
    socket: UdpSocket,
    format: Format,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

/// Opens two sockets that are connected to each other.
pub(super) fn open(echo: &Echo) -> io::Result<(Near, OwnedFd)> {
    let near = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let far = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    near.connect(far.local_addr()?)?;
    far.connect(near.local_addr()?)?;
    for socket in [&near, &far] {
        make_room(socket, echo)?;
    }
    near.set_nonblocking(!echo.blocking)?;
    near.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let near = Near {
        socket: near,
        blocking: echo.blocking,
        format: echo.format(),
        values: echo.values(),
        requests: vec![0; echo.format().requests_size_max(echo.tasks_per_message())],
        replies: vec![0; echo.tasks_per_message() * echo.reply_size()],
    };
    Ok((near, far.into()))
}

/// Makes a socket's buffer large enough for all messages in flight.
fn make_room(socket: &UdpSocket, echo: &Echo) -> io::Result<()> {
    let per_message = echo.tasks_per_message();
    let messages = echo.tasks.div_ceil(per_message);
    let needed = messages * (2 * per_message * echo.reply_size() + DATAGRAM_OVERHEAD);
    if needed > socket_recv_buffer_size(socket)? {
        set_socket_recv_buffer_size(socket, BUFFER_SIZE_MAX)?;
    }
    let granted = socket_recv_buffer_size(socket)?;
    if needed > granted {
        return Err(invalid(format!(
            "replies in flight take up to {needed} bytes, but a socket's buffer has {granted}, so replies would be \
             lost: use fewer tasks or smaller values, or raise the limit: sysctl net.core.rmem_max={needed}"
        )));
    }
    Ok(())
}

impl ClientEnd for Near {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn send(&mut self, first: u64, count: usize, asked: &Asked) -> io::Result<()> {
        let requests = write_requests(&mut self.requests, &self.format, first, count, asked, &self.values);
        send(&self.socket, requests)
    }

    #[inline(always)]
    fn take(
        &mut self,
        next: u64,
        in_flight: usize,
        asked: &Asked,
        each: impl FnMut(Reply<'_>),
    ) -> io::Result<usize> {
        match receive(&self.socket, &mut self.replies)? {
            Some(len) => {
                let kinds = asked.kinds_from(next);
                let count = self.format.replies_in(len, kinds, in_flight);
                read_replies(&self.replies[..len], &self.format, kinds, count, each);
                Ok(count)
            }
            None if self.blocking => Err(no_answer()),
            None => Ok(0),
        }
    }
}

/// Dropping the client's end sends an empty datagram, which closes the channel.
impl Drop for Near {
    fn drop(&mut self) {
        let _gone_already = self.socket.send(&[]);
    }
}

impl Far {
    pub(super) fn new(echo: &Echo, far: OwnedFd) -> io::Result<Self> {
        let socket = UdpSocket::from(far);
        socket.peer_addr().map_err(no_channel)?;
        socket.set_nonblocking(!echo.blocking)?;
        Ok(Self {
            socket,
            format: echo.format(),
            requests: vec![0; echo.format().requests_size_max(echo.tasks_per_message())],
            replies: vec![0; echo.tasks_per_message() * echo.reply_size()],
        })
    }
}

impl ServerEnd for Far {
    const POLLS_PER_YIELD: u32 = POLLS_PER_YIELD;

    #[inline(always)]
    fn turn(&mut self, source: &mut ItemSource) -> io::Result<Turn> {
        let len = match receive(&self.socket, &mut self.requests)? {
            Some(0) => return Ok(Turn::Closed),
            Some(len) => len,
            None => return Ok(Turn::Nothing),
        };
        let (format, bytes) = (&self.format, &self.requests[..len]);
        let requests = read_requests(bytes, format, TASKS_MAX)?;
        let count = requests.numbers().len();
        if format.request_at(requests.kinds, count) != len {
            return Err(no_request(0, 0));
        }
        let value = |index| value_in(bytes, format, &requests, index);
        let found = source.answer(&requests, value, items(&mut self.replies, format, &requests));
        write_trailers(&mut self.replies, format, &requests, found);
        send(&self.socket, &self.replies[..format.reply_at(requests.kinds, count)])?;
        Ok(Turn::Answered)
    }
}

/// Receives a datagram into `out`. Returns the datagram's length in bytes, or `None` if none has arrived.
#[inline(always)]
fn receive(socket: &UdpSocket, out: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match socket.recv(out) {
            Ok(len) => return Ok(Some(len)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[inline(always)]
fn send(socket: &UdpSocket, datagram: &[u8]) -> io::Result<()> {
    let mut poller = Poller::new(POLLS_PER_YIELD, Some(ANSWER_TIMEOUT));
    loop {
        match socket.send(datagram) {
            Ok(_) => return Ok(()),
            Err(error) if is_not_yet(&error) => poller.wait()?,
            Err(error) => return Err(error),
        }
    }
}

/// Whether the operation must be retried: the buffer is full, or a signal interrupted it.
pub(super) fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

pub(super) fn no_channel(error: io::Error) -> io::Error {
    invalid(format!(
        "the descriptor is no channel of an echo ({error}): use the one that was created with the client's end"
    ))
}
