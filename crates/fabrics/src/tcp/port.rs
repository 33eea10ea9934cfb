//! An engine's TCP or TLS connections.
//!
//! Invariant: an idle connection holds no buffer.
//! Invariant: a connection whose peer does not read is closed before it holds more than [`OUTBOX_MAX`] bytes.

use super::{End, FRAME_MAX, LENGTH, Plain, READ_MAX, Wire};
use crate::connections::{Connecting, Connection, Connections, Ended, NEWCOMERS_PER_POLL};
use crate::together::bind_together;
use socket2::{Domain, Protocol, SockAddr, Type};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Maximum number of bytes that are kept for a peer until it reads them.
pub(super) const OUTBOX_MAX: usize = 4 << 20;
/// Length of the listener's backlog.
const BACKLOG: i32 = 1024;
/// Maximum number of connections accepted between two calls of `epoll_wait`.
const ACCEPTS_PER_POLL: u32 = 16;
/// Pause in accepting connections after the system ran out of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// An engine's port for TCP connections.
pub type TcpPort = StreamPort<Plain>;

/// An engine's port for stream connections, with frames in the form of the wire `W`.
pub struct StreamPort<W> {
    listener: TcpListener,
    connections: Connections<Client<W>>,
    /// Function that creates the wire of a new connection.
    wire: Box<dyn Fn() -> W + Send>,
    /// End of the pause in accepting, if the system has run out of descriptors.
    full_until: Option<Instant>,
    buffer: Box<[u8]>,
}

pub(crate) struct Client<W> {
    stream: TcpStream,
    wire: W,
}

impl TcpPort {
    /// Creates `engines` ports at one address, one per engine. The system distributes connections among the ports.
    ///
    /// # Errors
    /// The system's error: the address is not of this machine, or is in use.
    pub fn bind(address: SocketAddr, engines: usize) -> std::io::Result<Vec<TcpPort>> {
        StreamPort::bind_with(address, engines, Plain::default)
    }
}

impl<W: Wire> StreamPort<W> {
    /// Binds ports like [`TcpPort::bind`], but calls `wire` for the wire of each connection.
    pub(super) fn bind_with(
        address: SocketAddr,
        engines: usize,
        wire: impl Fn() -> W + Clone + Send + 'static,
    ) -> std::io::Result<Vec<StreamPort<W>>> {
        let listeners = bind_together(address, engines, listen, TcpListener::local_addr)?;
        let port = |listener| {
            Ok(StreamPort {
                connections: Connections::new(&listener)?,
                listener,
                wire: Box::new(wire.clone()),
                full_until: None,
                buffer: vec![0; READ_MAX].into(),
            })
        };
        listeners.into_iter().map(port).collect()
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system's error: the address cannot be queried.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Adds a connection. Returns true if the connection begins with a handshake.
    fn admit(&mut self, stream: TcpStream, peer: IpAddr) -> std::io::Result<bool> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let client = Client { stream, wire: (self.wire)() };
        let is_newcomer = !client.is_admitted();
        self.connections.enter(client, Some(peer)).map_err(|(_, errno)| errno)?;
        Ok(is_newcomer)
    }
}

impl<W: Wire> Connecting for StreamPort<W> {
    type Client = Client<W>;

    const FRAME_MAX: usize = FRAME_MAX;

    fn connections(&self) -> &Connections<Client<W>> {
        &self.connections
    }

    fn parts(&mut self) -> (&mut Connections<Client<W>>, &mut Box<[u8]>) {
        (&mut self.connections, &mut self.buffer)
    }

    /// Accepts waiting connections, but only a few at a time, so that a crowd does not delay the existing ones. If
    /// connections begin with a handshake, accepts only as many as are read at a time. The others stay in the backlog.
    fn accept(&mut self) {
        let mut newcomers = 0;
        for _ in 0..ACCEPTS_PER_POLL {
            if newcomers == NEWCOMERS_PER_POLL {
                return;
            }
            match self.listener.accept() {
                // A connection that cannot be added is closed.
                Ok((stream, peer)) => newcomers += u32::from(self.admit(stream, peer.ip()).unwrap_or(false)),
                Err(error) => {
                    use rustix::io::Errno;
                    let errno = Errno::from_io_error(&error);
                    if matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) {
                        self.full_until = Some(Instant::now() + FULL_PAUSE);
                        self.connections.listen(&self.listener, false);
                    }
                    return;
                }
            }
        }
    }

    fn resume(&mut self) {
        if self.full_until.is_some_and(|until| Instant::now() >= until) {
            self.full_until = None;
            self.connections.listen(&self.listener, true);
        }
    }

    // After the system ran out of descriptors, nothing reports that one is free: accepting resumes after a pause.
    fn resumes_in(&self) -> Option<Duration> {
        self.full_until.map(|until| until.saturating_duration_since(Instant::now()))
    }
}

impl<W> AsFd for Client<W> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl From<End> for Ended {
    fn from(_: End) -> Ended {
        Ended
    }
}

impl<W: Wire> Connection for Client<W> {
    type Common = Box<[u8]>;

    const ACTIVE_MIN: usize = 0;
    const ACTIVE_MAX: usize = 4;
    const POLLS_PER_EPOLL: u32 = 64;

    fn is_admitted(&self) -> bool {
        self.wire.is_ready()
    }

    fn read(&mut self, buffer: &mut Box<[u8]>, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        Ok(self.wire.receive(&self.stream, buffer, take)?)
    }

    fn may_rest(&mut self) -> bool {
        let may_rest = !self.wire.has_frame();
        if may_rest {
            self.wire.rest();
        }
        may_rest
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), Ended> {
        self.wire.push(frame);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Ended> {
        self.wire.flush(&self.stream)?;
        if self.wire.unwritten() > OUTBOX_MAX { Err(Ended) } else { Ok(()) }
    }

    fn has_sent_all(&self) -> bool {
        self.wire.unwritten() == 0
    }

    fn wants_out(&self) -> bool {
        !self.has_sent_all()
    }
}

/// Listens at the address, alone or beside other sockets of this process.
pub(crate) fn listen(address: SocketAddr, is_shared: bool) -> std::io::Result<TcpListener> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?; // Connections of an earlier node may linger.
    socket.set_reuse_port(is_shared)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

const _: () = assert!(OUTBOX_MAX >= 16 * (FRAME_MAX + LENGTH), "a peer that reads stays below the limit");
