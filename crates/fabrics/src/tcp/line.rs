//! A client's connection to one node.

use super::{End, FRAME_MAX, Inbox, Outbox, READ_MAX};
use crate::session::carrier::{Broken, Line};
use rustix::event::epoll;
use std::cell::RefCell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// How long a connection may take to be made.
const CONNECT_WAIT: Duration = Duration::from_millis(900);

/// A client's end of TCP.
pub struct TcpLine {
    stream: TcpStream,
    /// Watches the stream, for what the moment asks for.
    poll: OwnedFd,
    state: RefCell<State>,
}

struct State {
    inbox: Inbox,
    outbox: Outbox,
    buffer: Box<[u8]>,
    /// Whether the poll tells when more can be written.
    wants_out: bool,
}

impl TcpLine {
    /// Connects to the node at `node`. Waits about a second at most.
    ///
    /// # Errors
    /// The system's: nobody listens there, there is no way there, or no room for one more socket.
    pub fn connect(node: SocketAddr) -> std::io::Result<TcpLine> {
        let stream = TcpStream::connect_timeout(&node, CONNECT_WAIT)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &stream, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        let buffer = vec![0; READ_MAX].into();
        let state = State { inbox: Inbox::default(), outbox: Outbox::default(), buffer, wants_out: false };
        Ok(TcpLine { stream, poll, state: RefCell::new(state) })
    }
}

impl Line for TcpLine {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn inbound_bytes(&self) -> usize {
        super::port::OUTBOX_MAX / 2
    }

    fn send(&self, frame: &[u8]) -> Result<(), Broken> {
        self.state.borrow_mut().outbox.push(frame);
        Ok(())
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(self.state.borrow_mut().outbox.flush(&self.stream)?)
    }

    fn receive(&self, take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let State { inbox, buffer, .. } = &mut *self.state.borrow_mut();
        Ok(inbox.receive(&self.stream, buffer, take)?)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let is_written = state.outbox.flush(&self.stream).is_ok() && state.outbox.len() == 0;
        if is_written == state.wants_out {
            state.wants_out = !is_written;
            let out = if is_written { epoll::EventFlags::empty() } else { epoll::EventFlags::OUT };
            let events = epoll::EventFlags::IN | out;
            let _watched_as_before =
                epoll::modify(&self.poll, &self.stream, epoll::EventData::new_u64(0), events);
        }
        true
    }
}

impl From<End> for Broken {
    fn from(end: End) -> Broken {
        Broken(end.to_string())
    }
}
