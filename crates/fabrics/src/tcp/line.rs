//! A client's TCP or TLS connection to one engine of a node.

use super::{End, FRAME_MAX, Plain, READ_MAX, Wire};
use crate::session::carrier::{Broken, Datagrams, Line};
use rustix::event::epoll;
use std::cell::RefCell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Time limit for connecting.
pub(super) const CONNECT_WAIT: Duration = Duration::from_millis(900);

/// A client's end of a TCP connection.
pub type TcpLine = StreamLine<Plain>;

/// A client's end of a stream connection, with frames in the form of the wire `W`.
pub struct StreamLine<W> {
    stream: TcpStream,
    /// An epoll instance that watches the stream for the events needed now.
    poll: OwnedFd,
    state: RefCell<State<W>>,
}

struct State<W> {
    wire: W,
    buffer: Box<[u8]>,
    /// Whether epoll reports when the socket accepts more bytes.
    wants_out: bool,
}

impl TcpLine {
    /// Connects to the node at `node`. Waits at most about 1 s.
    ///
    /// # Errors
    /// The system's error: no listener, no route, or no free descriptor.
    pub fn connect(node: SocketAddr) -> std::io::Result<TcpLine> {
        StreamLine::over(dial(node)?, Plain::default())
    }
}

/// Opens a connection to `node`. Waits at most about 1 s.
pub(super) fn dial(node: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&node, CONNECT_WAIT)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

impl<W: Wire> StreamLine<W> {
    pub(super) fn over(stream: TcpStream, wire: W) -> std::io::Result<StreamLine<W>> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &stream, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let buffer = vec![0; READ_MAX].into();
        let state = State { wire, buffer, wants_out: false };
        Ok(StreamLine { stream, poll, state: RefCell::new(state) })
    }
}

impl<W: Wire> Datagrams for StreamLine<W> {
    fn send(&self, frame: &[u8]) -> Result<(), Broken> {
        self.state.borrow_mut().wire.push(frame);
        Ok(())
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(self.state.borrow_mut().wire.flush(&self.stream)?)
    }

    fn receive(&self, take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let State { wire, buffer, .. } = &mut *self.state.borrow_mut();
        Ok(wire.receive(&self.stream, buffer, take)?)
    }
}

impl<W: Wire> Line for StreamLine<W> {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn inbound_bytes(&self) -> usize {
        super::port::OUTBOX_MAX / 2
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let is_written = state.wire.flush(&self.stream).is_ok() && state.wire.unwritten() == 0;
        if is_written == state.wants_out {
            state.wants_out = !is_written;
            let out = if is_written { epoll::EventFlags::empty() } else { epoll::EventFlags::OUT };
            let events = epoll::EventFlags::IN | out;
            let _watched_as_before =
                epoll::modify(&self.poll, &self.stream, epoll::EventData::new_u64(0), events);
        }
        !state.wire.has_frame()
    }
}

impl From<End> for Broken {
    fn from(end: End) -> Broken {
        Broken(end.to_string())
    }
}
