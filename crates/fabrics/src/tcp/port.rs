//! An engine's connections.
//!
//! Invariant: a connection that is idle holds no buffer. One whose peer does not read is closed before it holds more
//! than [`OUTBOX_MAX`], and one that gets no session soon is closed as well.

use super::{FRAME_MAX, Inbox, LENGTH, Outbox, READ_MAX};
use crate::session::carrier::{Arrival, Broken, Port};
use rustix::event::{Timespec, epoll};
use socket2::{Domain, Protocol, SockAddr, Type};
use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The most bytes that wait for a peer to read them.
pub(super) const OUTBOX_MAX: usize = 4 << 20;
/// How long a connection may have no session.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Connections that were just active are read from without asking the poll, as long as they are so few.
const ACTIVE_MAX: usize = 4;
/// Looks at those between two questions to the poll.
const LOOKS_PER_POLL: u32 = 16;
/// Looks without a word after which a connection is active no more.
const ACTIVE_LOOKS: u32 = 1024;
/// How long nobody is let in where the system has no descriptor left.
const FULL_PAUSE: Duration = Duration::from_millis(100);
/// The listener's place in the poll.
const LISTENER: u64 = u64::MAX;

/// A connection: its place and how many were there before, and where its other end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connected {
    place: u32,
    generation: u32,
    peer: IpAddr,
}

/// An engine's end of TCP.
pub struct TcpPort {
    listener: TcpListener,
    poll: OwnedFd,
    connections: Vec<(u32, Option<Connection>)>,
    vacant: Vec<u32>,
    /// Those that were just active.
    active: Vec<(u32, u32)>,
    looks: u32,
    /// Those with something to write, each once.
    writing: Vec<u32>,
    /// Whose end the engine has not heard of.
    ended: VecDeque<Connected>,
    /// Whether the poll tells of new ones; it does not while there is no room.
    listens: bool,
    full_until: Option<Instant>,
    buffer: Box<[u8]>,
}

struct Connection {
    stream: TcpStream,
    peer: IpAddr,
    inbox: Inbox,
    outbox: Outbox,
    is_writing: bool,
    /// Whether the poll tells when more can be written.
    wants_out: bool,
    /// To be closed when all is written.
    is_leaving: bool,
    since: Instant,
}

impl TcpPort {
    /// Ports for so many engines, all at one address, among which the system deals out connections.
    ///
    /// # Errors
    /// The system's: the address is none of this machine's, or another has it.
    pub fn bind(address: SocketAddr, engines: usize) -> std::io::Result<Vec<TcpPort>> {
        // Sockets that share a port do so with any other of this user, a second node's too: so first alone.
        let alone = listen(address, false)?;
        let address = alone.local_addr()?;
        drop(alone);
        (0..engines).map(|_| TcpPort::new(listen(address, true)?)).collect()
    }

    fn new(listener: TcpListener) -> std::io::Result<TcpPort> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(TcpPort {
            listener,
            poll,
            connections: Vec::new(),
            vacant: Vec::new(),
            active: Vec::new(),
            looks: 0,
            writing: Vec::new(),
            ended: VecDeque::new(),
            listens: true,
            full_until: None,
            buffer: vec![0; READ_MAX].into(),
        })
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        self.connections.len() - self.vacant.len()
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    // It may be gone already.
                    let _gone = self.admit(stream, peer.ip());
                }
                Err(error) => {
                    use rustix::io::Errno;
                    let errno = Errno::from_io_error(&error);
                    if matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) {
                        self.full_until = Some(Instant::now() + FULL_PAUSE);
                        self.listen(false);
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, peer: IpAddr) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let place = self.vacant.pop().unwrap_or(self.connections.len() as u32);
        if place as usize == self.connections.len() {
            self.connections.push((0, None));
        }
        let added = epoll::add(&self.poll, &stream, data(place), epoll::EventFlags::IN);
        if let Err(errno) = added {
            self.vacant.push(place);
            return Err(errno.into());
        }
        self.connections[place as usize].1 = Some(Connection {
            stream,
            peer,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            is_writing: false,
            wants_out: false,
            is_leaving: false,
            since: Instant::now(),
        });
        Ok(())
    }

    /// Whether the poll tells of new connections.
    fn listen(&mut self, listens: bool) {
        if self.listens != listens {
            self.listens = listens;
            let events = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
            let _told_as_before =
                epoll::modify(&self.poll, &self.listener, epoll::EventData::new_u64(LISTENER), events);
        }
    }

    /// Reads from a connection. False if nothing came.
    fn read(&mut self, place: u32, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let (generation, Some(connection)) = &mut self.connections[place as usize] else { return false };
        let address = Connected { place, generation: *generation, peer: connection.peer };
        let frames = |frame: &[u8]| take(address, Arrival::Datagram(frame));
        match connection.inbox.receive(&connection.stream, &mut self.buffer, frames) {
            Ok(has_received) => has_received,
            Err(_) => {
                self.end(place);
                true
            }
        }
    }

    fn end(&mut self, place: u32) {
        let (generation, connection) = &mut self.connections[place as usize];
        if let Some(Connection { peer, .. }) = connection.take() {
            // Closing takes it out of the poll: nobody else has its descriptor.
            self.ended.push_back(Connected { place, generation: *generation, peer });
            *generation = generation.wrapping_add(1);
            self.vacant.push(place);
            self.active.retain(|&(active, _)| active != place);
        }
    }

    fn write(&mut self, place: u32) {
        let (_, Some(connection)) = &mut self.connections[place as usize] else { return };
        connection.is_writing = false;
        let is_broken = connection.outbox.flush(&connection.stream).is_err();
        let left = connection.outbox.len();
        if is_broken || left > OUTBOX_MAX || left == 0 && connection.is_leaving {
            return self.end(place);
        }
        let wants_out = left > 0;
        if wants_out != connection.wants_out {
            connection.wants_out = wants_out;
            let out = if wants_out { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let events = epoll::EventFlags::IN | out;
            let _told_as_before = epoll::modify(&self.poll, &connection.stream, data(place), events);
        }
    }

    /// Asks the poll what has happened.
    fn poll(&mut self, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        if self.full_until.is_some_and(|until| Instant::now() >= until) {
            self.full_until = None;
            self.listen(true);
        }
        let mut events = Vec::with_capacity(64);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&now)).is_err() {
            return false; // Interrupted: the caller comes again.
        }
        let mut has_received = false;
        for event in events {
            let place = match event.data.u64() {
                LISTENER => {
                    self.accept();
                    has_received = true;
                    continue;
                }
                place => place as u32,
            };
            let flags = event.flags;
            if flags.contains(epoll::EventFlags::OUT) {
                self.write(place);
            }
            if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                has_received |= self.read(place, take);
                let is_known = self.active.iter().any(|&(active, _)| active == place);
                let is_there = self.connections[place as usize].1.is_some();
                if is_there && !is_known && self.active.len() < ACTIVE_MAX {
                    self.active.push((place, 0));
                }
            }
        }
        has_received
    }
}

fn data(place: u32) -> epoll::EventData {
    epoll::EventData::new_u64(place.into())
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

impl Port for TcpPort {
    type Address = Connected;

    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn source(address: Connected) -> Option<IpAddr> {
        Some(address.peer)
    }

    fn receive(&mut self, mut take: impl FnMut(Connected, Arrival<'_>)) -> Result<bool, Broken> {
        let mut has_received = false;
        let mut index = 0;
        while let Some(&(place, looks)) = self.active.get(index) {
            if self.read(place, &mut take) {
                has_received = true;
                // It may have ended, and then another stands in its place.
                if let Some(active) = self.active.get_mut(index).filter(|active| active.0 == place) {
                    active.1 = 0;
                    index += 1;
                }
            } else if looks >= ACTIVE_LOOKS {
                self.active.swap_remove(index);
            } else {
                self.active[index].1 = looks + 1;
                index += 1;
            }
        }
        self.looks += 1;
        if self.active.is_empty() || self.looks >= LOOKS_PER_POLL {
            self.looks = 0;
            has_received |= self.poll(&mut take);
        }
        while let Some(address) = self.ended.pop_front() {
            take(address, Arrival::HungUp);
            has_received = true;
        }
        Ok(has_received)
    }

    fn send(&mut self, to: Connected, frame: &[u8]) {
        let Some((generation, Some(connection))) = self.connections.get_mut(to.place as usize) else {
            return;
        };
        if *generation != to.generation {
            return;
        }
        connection.outbox.push(frame);
        if !std::mem::replace(&mut connection.is_writing, true) {
            self.writing.push(to.place);
        }
    }

    fn flush(&mut self) {
        while let Some(place) = self.writing.pop() {
            self.write(place);
        }
    }

    fn hang_up(&mut self, address: Connected) {
        let Some((generation, Some(connection))) = self.connections.get_mut(address.place as usize) else {
            return;
        };
        if *generation == address.generation {
            connection.is_leaving = true;
            self.write(address.place);
        }
    }

    fn hang_up_on_strangers(&mut self, known: impl Iterator<Item = Connected>) {
        let known: HashSet<Connected> = known.collect();
        for place in 0..self.connections.len() as u32 {
            let (generation, connection) = &self.connections[place as usize];
            let Some(connection) = connection else { continue };
            let is_known =
                known.contains(&Connected { place, generation: *generation, peer: connection.peer });
            if !is_known && connection.since.elapsed() >= HELLO_WAIT {
                self.end(place);
            }
        }
    }

    fn has_strangers(&self) -> bool {
        // Where there is no descriptor left it is also time that makes room.
        self.connections() > 0 || self.full_until.is_some()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.looks = LOOKS_PER_POLL; // What wakes it is in the poll.
        self.ended.is_empty()
    }
}

const _: () =
    assert!(OUTBOX_MAX >= 16 * (FRAME_MAX + LENGTH), "a peer that reads is not taken for one that does not");
