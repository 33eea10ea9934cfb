//! A client's ring connection to one engine of a node.

use super::end::{Buffer, End};
use super::shared::{Mapped, Memory, Side};
use super::{FRAME_MAX, Greeting, MAGIC, OUTBOX_MAX, VERSION};
use crate::memory::MappingError;
use crate::session::carrier::{Broken, Datagrams, Line};
use crate::shm::frame::{self, Hello};
use crate::shm::peer::peer;
use crate::shm::{ConnectError, GREETING_WAIT, dial, has_greeting, is_stopped};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

/// A client's end of a ring connection.
pub struct RingLine {
    shared: Mapped,
    state: RefCell<State>,
}

struct State {
    end: End,
    buffer: Buffer,
    /// Whether the engine has hung up. Frames that it wrote before can still be read.
    has_ended: bool,
}

impl RingLine {
    /// Connects to an engine of the node that listens at `path`. Waits at most about 1 s.
    ///
    /// # Errors
    /// [`ConnectError`] says why there is no connection; the socket is closed.
    pub fn connect(path: &Path) -> Result<RingLine, ConnectError> {
        let io = |doing| move |errno: Errno| ConnectError::Io(doing, path.to_owned(), errno.into());
        let foreign = |what: String| ConnectError::Foreign(path.to_owned(), what);
        let deadline = Instant::now() + GREETING_WAIT;
        let socket = dial(path, deadline).map_err(|error| match error {
            ConnectError::Absent(path) => ConnectError::NoRing(path),
            error => error,
        })?;
        let peer = peer(&socket).map_err(io("identify the node at"))?;
        if peer.user != rustix::process::geteuid().as_raw() {
            return Err(ConnectError::OtherUser(path.to_owned(), peer.user));
        }
        let hello = Hello { magic: MAGIC.into(), version: VERSION };
        match frame::send(socket.as_fd(), &serde_json::to_vec(&hello).expect("plain data"), &[], &[]) {
            // A node may refuse before it receives the hello. The reason it sent can be read below.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(errno) => return Err(io("send the hello to the node at")(errno)),
        }
        if !has_greeting(&socket, deadline) {
            return Err(match peer.pid.map(|pid| pid.as_raw_nonzero().get() as u32) {
                Some(pid) if is_stopped(pid) => ConnectError::Stopped(pid),
                Some(pid) => ConnectError::Silent(pid),
                None => io("receive from the node at")(Errno::TIMEDOUT),
            });
        }
        let (mut buffer, mut fds) = (Vec::new(), Vec::new());
        let greeting = match frame::receive(socket.as_fd(), &mut buffer, &mut fds, RecvFlags::DONTWAIT) {
            // The node refused without reading the hello, so the socket reports this error once, before the node's
            // reason.
            Err(Errno::CONNRESET) => {
                frame::receive(socket.as_fd(), &mut buffer, &mut fds, RecvFlags::DONTWAIT)
            }
            heard => heard,
        };
        let greeting = greeting.map_err(io("receive from the node at"))?;
        let greeting = greeting.ok_or_else(|| foreign("it hung up".into()))?;
        match serde_json::from_slice(greeting).map_err(|error| foreign(error.to_string()))? {
            Greeting::Welcome => {}
            Greeting::Refusal(reason) => return Err(ConnectError::Refused(reason)),
        }
        let Ok([memory]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(foreign("it sent no memory for the rings".into()));
        };
        let memory = Memory::map(&memory).map_err(|error| match error {
            MappingError::Foreign(what) => foreign(what),
            error => ConnectError::Memory(error),
        })?;
        let shared = Mapped { memory, socket };
        let state = State { end: End::new(Side::Client), buffer: Buffer::new(), has_ended: false };
        Ok(RingLine { shared, state: RefCell::new(state) })
    }
}

impl Datagrams for RingLine {
    fn send(&self, frame: &[u8]) -> Result<(), Broken> {
        Ok(self.state.borrow_mut().end.send(&self.shared, frame)?)
    }

    fn flush(&self) -> Result<(), Broken> {
        Ok(self.state.borrow_mut().end.flush(&self.shared)?)
    }

    fn receive(&self, take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let State { end, buffer, has_ended } = &mut *self.state.borrow_mut();
        if end.awake(&self.shared) {
            *has_ended |= !self.shared.is_connected();
        }
        // Frames are read after the check for a hang-up: a peer that hangs up has published all its frames before.
        let has_received = end.receive(&self.shared, buffer, take)?;
        if *has_ended && !has_received {
            return Err(Broken("the node has ended".into()));
        }
        Ok(has_received)
    }
}

impl Line for RingLine {
    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn inbound_bytes(&self) -> usize {
        OUTBOX_MAX / 2
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    fn may_sleep(&self) -> bool {
        let State { end, has_ended, .. } = &mut *self.state.borrow_mut();
        !*has_ended && end.may_sleep(&self.shared)
    }
}
