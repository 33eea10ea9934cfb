//! An engine's connections.
//!
//! Invariant: a connection that is idle holds no buffer. One whose peer does not read is closed before it holds more
//! than [`OUTBOX_MAX`].

use super::{End, FRAME_MAX, LENGTH, Plain, READ_MAX, Wire};
use crate::connections::{Connecting, Connection, Connections, Ended, NEWCOMERS_PER_POLL};
use socket2::{Domain, Protocol, SockAddr, Type};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// The most bytes that wait for a peer to read them.
pub(super) const OUTBOX_MAX: usize = 4 << 20;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Of those, so many are accepted between two questions to the poll.
const ACCEPTS_PER_POLL: u32 = 16;
/// How long nobody is let in where the system has no descriptor left.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// An engine's end of TCP.
pub type TcpPort = StreamPort<Plain>;

/// An engine's end of streams.
pub struct StreamPort<W> {
    listener: TcpListener,
    connections: Connections<Client<W>>,
    /// The wire of one who comes.
    wire: Box<dyn Fn() -> W + Send>,
    /// Until when the poll does not tell of new ones, as there is no room.
    full_until: Option<Instant>,
    buffer: Box<[u8]>,
}

pub(crate) struct Client<W> {
    stream: TcpStream,
    wire: W,
}

impl TcpPort {
    /// Ports for so many engines, all at one address, among which the system deals out connections.
    ///
    /// # Errors
    /// The system's: the address is none of this machine's, or another has it.
    pub fn bind(address: SocketAddr, engines: usize) -> std::io::Result<Vec<TcpPort>> {
        StreamPort::bind_with(address, engines, Plain::default)
    }
}

impl<W: Wire> StreamPort<W> {
    /// As [`TcpPort::bind`], for connections each with such a wire.
    pub(super) fn bind_with(
        address: SocketAddr,
        engines: usize,
        wire: impl Fn() -> W + Clone + Send + 'static,
    ) -> std::io::Result<Vec<StreamPort<W>>> {
        // Sockets that share a port do so with any other of this user, a second node's too: so first alone.
        let alone = listen(address, false)?;
        let address = alone.local_addr()?;
        drop(alone);
        let port = |listener| {
            Ok(StreamPort {
                connections: Connections::new(&listener)?,
                listener,
                wire: Box::new(wire.clone()),
                full_until: None,
                buffer: vec![0; READ_MAX].into(),
            })
        };
        (0..engines).map(|_| port(listen(address, true)?)).collect()
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Takes one in. True if both sides have yet to agree how to speak.
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

    /// Lets in who waits: no more than a few at a time, so that a crowd keeps nobody from being served; and where that
    /// takes a while, no more than are heard at a time. The others wait in line.
    fn accept(&mut self) {
        let mut newcomers = 0;
        for _ in 0..ACCEPTS_PER_POLL {
            if newcomers == NEWCOMERS_PER_POLL {
                return;
            }
            match self.listener.accept() {
                // It may be gone already.
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

    // Where there is no descriptor left, it is time that makes room.
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
    const LOOKS_PER_POLL: u32 = 64;

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

fn listen(address: SocketAddr, is_shared: bool) -> std::io::Result<TcpListener> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?; // Connections of a node that has ended may linger.
    socket.set_reuse_port(is_shared)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

const _: () =
    assert!(OUTBOX_MAX >= 16 * (FRAME_MAX + LENGTH), "a peer that reads is not taken for one that does not");
