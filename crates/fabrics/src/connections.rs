//! The connections of one engine's port: which ones exist, which ones are polled, which ones have data to send, and
//! which ones have closed.
//!
//! A connection is in one of three states:
//! - *Active*: the connection has received data recently. The port polls it without a system call.
//! - *Resting*: the connection has been quiet for a while, and costs nothing until epoll reports it. The port calls
//!   `epoll_wait` at intervals while the engine is busy, and at once before the port sleeps.
//! - *Newcomer*: the connection is not yet admitted. Admission may take long (a TLS handshake, for instance), so
//!   newcomers are read one at a time. While other connections are active, newcomers get only a share of the time, so
//!   that a crowd of newcomers does not delay the others. If too many newcomers wait, the oldest is closed.
//!
//! Invariant: a connection that is not active is armed in epoll.
//! Invariant: an address never names two connections: the next connection in the same place gets another address.
//! Invariant: a connection without a session [`HELLO_WAIT`] after it was accepted is closed, whatever it has sent.

use crate::session::carrier::{Arrival, Broken, Dropped, Port};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a connection may exist without a session.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// Number that a poll which received data adds towards [`Connection::POLLS_PER_EPOLL`]. Other polls add 1.
const BUSY_POLL: u32 = 8;
/// Number of polls without a frame after which a connection is no longer active.
const QUIET_POLLS_MAX: u32 = 1024;
/// Number of unadmitted connections that are read between two calls of `epoll_wait`.
pub(crate) const NEWCOMERS_PER_POLL: u32 = 1;
/// Pause before the next newcomer is read while other connections are active, as a multiple of the time that reading
/// the last newcomer took.
const NEWCOMERS_PAUSE: u32 = 3;
/// Event data that identifies the listener in epoll's reports.
const LISTENER: u64 = u64::MAX;

/// The address of a connection: its place in the table, the number of earlier connections in that place, and the peer's
/// IP address if the peer may be on another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connected {
    place: u32,
    generation: u32,
    pub(crate) peer: Option<IpAddr>,
}

/// Error: the connection is closed and carries nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended;

/// One client's connection, as a port polls it. Each carrier with connections implements this trait.
pub(crate) trait Connection: AsFd {
    /// State that the connections of a port share, such as buffers. One connection uses it at a time.
    type Common;

    /// Number of connections that stay active even if they are quiet, since polling so few costs less than
    /// `epoll_wait`.
    const ACTIVE_MIN: usize;
    /// Maximum number of active connections. Above it, quiet ones rest at once, since `epoll_wait` costs less than
    /// polling.
    const ACTIVE_MAX: usize;
    /// Number of polls between two calls of `epoll_wait`, while nothing is received.
    const POLLS_PER_EPOLL: u32;
    /// Maximum number of connections that wait for admission.
    const NEWCOMERS_MAX: usize = 1024;

    /// Whether the connection may carry frames. Until this is true, the connection is read a few times at most, and
    /// only when epoll reports it.
    fn is_admitted(&self) -> bool {
        true
    }

    /// Reads once, and passes the next frame, or the next few, to `take`. Returns false if nothing was received.
    fn read(&mut self, common: &mut Self::Common, take: impl FnMut(&[u8])) -> Result<bool, Ended>;

    /// Reads like [`Connection::read`], but is called after epoll has reported an event of this connection.
    fn handle_event(&mut self, common: &mut Self::Common, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        self.read(common, take)
    }

    /// Queues a frame for sending.
    fn send(&mut self, frame: &[u8]) -> Result<(), Ended>;

    /// Writes queued frames until the socket accepts no more.
    fn flush(&mut self) -> Result<(), Ended>;

    /// Whether all queued frames are written.
    fn has_sent_all(&self) -> bool;

    /// Whether epoll should report when the socket accepts more bytes.
    fn wants_out(&self) -> bool {
        false
    }

    /// Makes epoll report the next arrival on this connection. Returns false if something has already arrived.
    fn may_rest(&mut self) -> bool {
        true
    }
}

/// Outcome of polling all connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Polled {
    pub(crate) has_received: bool,
    /// Whether a client waits at the listener to be accepted.
    pub(crate) has_waiting_client: bool,
}

/// A port that has one connection per client. Implemented per carrier; [`Connections`] holds the common part.
pub(crate) trait Connecting: Send {
    /// Type of one client's connection.
    type Client: Connection<Common: Send> + Send;

    /// Maximum size of a frame in bytes.
    const FRAME_MAX: usize;

    /// Returns the table of connections.
    fn connections(&self) -> &Connections<Self::Client>;

    /// Returns the table of connections, and the state that the connections share.
    fn parts(&mut self) -> (&mut Connections<Self::Client>, &mut <Self::Client as Connection>::Common);

    /// Accepts all or some of the clients that wait at the listener.
    fn accept(&mut self);

    /// Resumes accepting clients if accepting was paused for lack of descriptors and the pause is over.
    fn resume(&mut self) {}

    /// Time until the pause in accepting is over; `None` if there is no pause.
    fn resumes_in(&self) -> Option<Duration> {
        None
    }
}

impl<P: Connecting> Port for P {
    type Address = Connected;

    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        P::FRAME_MAX
    }

    fn source(address: Connected) -> Option<IpAddr> {
        address.peer
    }

    fn receive(&mut self, take: impl FnMut(Connected, Arrival<'_>)) -> Result<bool, Broken> {
        self.resume();
        let (connections, common) = self.parts();
        let polled = connections.receive(common, take);
        if polled.has_waiting_client {
            self.accept();
        }
        Ok(polled.has_received || polled.has_waiting_client)
    }

    fn send(&mut self, to: Connected, frame: &[u8]) {
        self.parts().0.send(to, frame);
    }

    fn flush(&mut self) {
        self.parts().0.flush();
    }

    fn dropped(&self) -> Dropped {
        Dropped::default() // A connection drops no frames: it closes.
    }

    fn connections(&self) -> usize {
        Connecting::connections(self).len()
    }

    fn hang_up(&mut self, address: Connected) {
        self.parts().0.hang_up(address);
    }

    fn close_without_session(&mut self, known: impl Iterator<Item = Connected>) {
        self.parts().0.close_without_session(known, Instant::now());
    }

    fn fd(&self) -> BorrowedFd<'_> {
        Connecting::connections(self).fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.parts().0.may_sleep()
    }

    fn sleep_max(&self) -> Option<Duration> {
        self.resumes_in()
    }
}

/// All connections of a port.
pub(crate) struct Connections<C> {
    poll: OwnedFd,
    places: Vec<Place<C>>,
    vacant: Vec<u32>,
    /// Connections that were not admitted when they were accepted, oldest first.
    newcomers: VecDeque<Connected>,
    /// Time before which no newcomer is read, if other connections are active.
    newcomers_at: Option<Instant>,
    /// Active connections, each with the number of polls since its last frame.
    active: Vec<(u32, u32)>,
    polls_since_epoll: u32,
    /// Connections with frames queued since the last flush.
    writing: Vec<u32>,
    /// Closed connections that were not yet reported to the engine.
    ended: VecDeque<Connected>,
    /// Number of calls of `close_without_session` so far. Each call stores it in the connections with a session.
    sweeps: u32,
}

struct Place<C> {
    generation: u32,
    tenant: Option<Tenant<C>>,
}

struct Tenant<C> {
    connection: C,
    peer: Option<IpAddr>,
    since: Instant,
    /// Value of `sweeps` when the connection last had a session.
    known_in: u32,
    is_active: bool,
    is_writing: bool,
    /// Whether epoll reports when the socket accepts more bytes.
    wants_out: bool,
    /// Whether the connection closes when all queued frames are written.
    is_leaving: bool,
}

impl<C: Connection> Connections<C> {
    /// Creates an empty table whose epoll instance watches `listener`.
    ///
    /// # Errors
    /// The system cannot create another descriptor.
    pub(crate) fn new(listener: impl AsFd) -> rustix::io::Result<Connections<C>> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Connections {
            poll,
            places: Vec::new(),
            vacant: Vec::new(),
            newcomers: VecDeque::new(),
            newcomers_at: None,
            active: Vec::new(),
            polls_since_epoll: 0,
            writing: Vec::new(),
            ended: VecDeque::new(),
            sweeps: 0,
        })
    }

    /// Number of connections.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Adds a connection whose other end is at `peer`.
    ///
    /// # Errors
    /// The connection, and the reason why epoll cannot watch it.
    pub(crate) fn enter(&mut self, connection: C, peer: Option<IpAddr>) -> Result<(), (C, Errno)> {
        let place = self.vacant.last().copied().unwrap_or(self.places.len() as u32);
        if let Err(errno) = epoll::add(&self.poll, &connection, data(place), epoll::EventFlags::IN) {
            return Err((connection, errno));
        }
        if self.vacant.pop().is_none() {
            self.places.push(Place { generation: 0, tenant: None });
        }
        let is_admitted = connection.is_admitted();
        self.places[place as usize].tenant = Some(Tenant {
            connection,
            peer,
            since: Instant::now(),
            known_in: self.sweeps,
            is_active: false,
            is_writing: false,
            wants_out: false,
            is_leaving: false,
        });
        if !is_admitted {
            self.newcomers.push_back(Connected {
                place,
                generation: self.places[place as usize].generation,
                peer,
            });
            self.make_room();
        }
        Ok(())
    }

    /// Removes the oldest newcomer from the queue if too many wait, and closes it unless it was admitted meanwhile.
    fn make_room(&mut self) {
        if self.newcomers.len() > C::NEWCOMERS_MAX
            && let Some(oldest) = self.newcomers.pop_front()
            && let Some(tenant) = self.named(oldest)
            && !tenant.connection.is_admitted()
        {
            self.end(oldest.place);
        }
    }

    /// Enables or disables epoll's reports of clients waiting at the listener.
    pub(crate) fn listen(&self, listener: impl AsFd, listens: bool) {
        let events = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let _told_as_before =
            epoll::modify(&self.poll, listener, epoll::EventData::new_u64(LISTENER), events);
    }

    /// Polls the connections, and passes received frames and closed connections to `take`.
    pub(crate) fn receive(
        &mut self,
        common: &mut C::Common,
        mut take: impl FnMut(Connected, Arrival<'_>),
    ) -> Polled {
        let mut polled =
            Polled { has_received: self.poll_active(common, &mut take), has_waiting_client: false };
        self.polls_since_epoll += if polled.has_received { BUSY_POLL } else { 1 };
        if self.active.is_empty() || self.polls_since_epoll >= C::POLLS_PER_EPOLL {
            self.polls_since_epoll = 0;
            self.poll_events(common, &mut polled, &mut take);
        }
        while let Some(address) = self.ended.pop_front() {
            take(address, Arrival::HungUp);
            polled.has_received = true;
        }
        polled
    }

    /// Queues a frame for sending.
    pub(crate) fn send(&mut self, to: Connected, frame: &[u8]) {
        let Some(tenant) = self.named(to) else { return };
        if tenant.connection.send(frame).is_err() {
            return self.end(to.place);
        }
        if !std::mem::replace(&mut tenant.is_writing, true) {
            self.writing.push(to.place);
        }
    }

    /// Writes all queued frames.
    pub(crate) fn flush(&mut self) {
        while let Some(place) = self.writing.pop() {
            self.write(place);
        }
    }

    /// Closes a connection once its queued frames are written.
    pub(crate) fn hang_up(&mut self, address: Connected) {
        if let Some(tenant) = self.named(address) {
            tenant.is_leaving = true;
            self.write(address.place);
        }
    }

    /// Closes connections that were accepted at least [`HELLO_WAIT`] before `now` and are not in `known`.
    pub(crate) fn close_without_session(&mut self, known: impl Iterator<Item = Connected>, now: Instant) {
        self.sweeps = self.sweeps.wrapping_add(1);
        let sweep = self.sweeps;
        for address in known {
            if let Some(tenant) = self.named(address) {
                tenant.known_in = sweep;
            }
        }
        for place in 0..self.places.len() {
            if let Some(tenant) = &self.places[place].tenant
                && tenant.known_in != sweep
                && now.saturating_duration_since(tenant.since) >= HELLO_WAIT
            {
                self.end(place as u32);
            }
        }
    }

    /// Returns a descriptor that is readable when there is work to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// Makes the descriptor readable on the next arrival. Returns false if there is work to do already.
    pub(crate) fn may_sleep(&mut self) -> bool {
        self.polls_since_epoll = C::POLLS_PER_EPOLL; // So that the next poll asks epoll.
        // If one connection cannot rest, those already asked stay in the list of active ones, which is harmless.
        let rests = |&(place, _): &(u32, u32)| match &mut self.places[place as usize].tenant {
            Some(tenant) => tenant.connection.may_rest(),
            None => true,
        };
        self.ended.is_empty() && self.active.iter().all(rests)
    }

    /// Polls the active connections. Returns false if none received anything.
    fn poll_active(&mut self, common: &mut C::Common, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let mut has_received = false;
        let mut index = 0;
        while let Some(&(place, quiet_polls)) = self.active.get(index) {
            match self.read(place, false, common, take) {
                Ok(true) => {
                    has_received = true;
                    self.active[index].1 = 0;
                    index += 1;
                }
                Ok(false)
                    if (quiet_polls >= QUIET_POLLS_MAX || self.active.len() > C::ACTIVE_MAX)
                        && self.try_rest(place) =>
                {
                    self.active.swap_remove(index);
                }
                Ok(false) => {
                    self.active[index].1 = quiet_polls + 1;
                    index += 1;
                }
                Err(Ended) => has_received = true, // The next connection now has this `index`.
            }
        }
        has_received
    }

    /// Lets a quiet connection rest. Returns false if it stays active.
    fn try_rest(&mut self, place: u32) -> bool {
        if self.active.len() <= C::ACTIVE_MIN {
            return false;
        }
        let Some(tenant) = &mut self.places[place as usize].tenant else { return true };
        let rests = tenant.connection.may_rest();
        tenant.is_active = !rests;
        rests
    }

    /// Handles the events that epoll reports.
    fn poll_events(
        &mut self,
        common: &mut C::Common,
        polled: &mut Polled,
        take: &mut impl FnMut(Connected, Arrival<'_>),
    ) {
        let mut events = [const { MaybeUninit::uninit() }; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.poll, &mut events, Some(&now)) else {
            return; // Interrupted: the caller polls again.
        };
        self.newcomers_at = self.newcomers_at.filter(|&at| !self.active.is_empty() && Instant::now() < at);
        let mut room = if self.newcomers_at.is_none() { NEWCOMERS_PER_POLL } else { 0 };
        for event in events {
            let (at, flags) = (event.data.u64(), event.flags);
            if at == LISTENER {
                polled.has_waiting_client = room > 0;
                polled.has_received |= room == 0; // Epoll reports it again.
                continue;
            }
            let place = at as u32;
            let Some(tenant) = &self.places[place as usize].tenant else { continue };
            let since = (!tenant.connection.is_admitted()).then(Instant::now);
            if since.is_some() && room == 0 {
                polled.has_received = true; // Epoll reports it again.
                continue;
            }
            if flags.contains(epoll::EventFlags::OUT) {
                self.write(place);
            }
            if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                polled.has_received |= self.read(place, true, common, take) != Ok(false);
                self.watch(place);
                self.activate(place);
            }
            if let Some(since) = since {
                room -= 1;
                let now = Instant::now();
                self.newcomers_at = Some(now + (now - since) * NEWCOMERS_PAUSE);
            }
        }
    }

    /// Reads from a connection; `is_reported` if epoll has reported it.
    fn read(
        &mut self,
        place: u32,
        is_reported: bool,
        common: &mut C::Common,
        take: &mut impl FnMut(Connected, Arrival<'_>),
    ) -> Result<bool, Ended> {
        let Place { generation, tenant: Some(tenant) } = &mut self.places[place as usize] else {
            return Ok(false);
        };
        let address = Connected { place, generation: *generation, peer: tenant.peer };
        let Tenant { connection, is_leaving, .. } = tenant;
        let take = |frame: &[u8]| take(address, Arrival::Datagram(frame));
        let read =
            if is_reported { connection.handle_event(common, take) } else { connection.read(common, take) };
        if read.is_err() || *is_leaving && connection.has_sent_all() {
            self.end(place);
            return Err(Ended);
        }
        read
    }

    fn write(&mut self, place: u32) {
        let Some(tenant) = &mut self.places[place as usize].tenant else { return };
        tenant.is_writing = false;
        let flushed = tenant.connection.flush();
        if flushed.is_err() || tenant.is_leaving && tenant.connection.has_sent_all() {
            return self.end(place);
        }
        // If the socket is full and epoll does not report when it has space, the connection stays active: the next poll
        // writes again.
        let is_held_back = !tenant.connection.has_sent_all() && !tenant.connection.wants_out();
        self.watch(place);
        if is_held_back {
            self.activate(place);
        }
    }

    /// Updates the set of events that epoll reports for a connection.
    fn watch(&mut self, place: u32) {
        let Some(tenant) = &mut self.places[place as usize].tenant else { return };
        let wants_out = tenant.connection.wants_out();
        if std::mem::replace(&mut tenant.wants_out, wants_out) != wants_out {
            let out = if wants_out { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let events = epoll::EventFlags::IN | out;
            let _told_as_before = epoll::modify(&self.poll, &tenant.connection, data(place), events);
        }
    }

    /// Makes a connection active if few others are, and in any case if it holds received data, which epoll would not
    /// report.
    fn activate(&mut self, place: u32) {
        if let Some(tenant) = &mut self.places[place as usize].tenant
            && !tenant.is_active
            && tenant.connection.is_admitted()
            && (self.active.len() < C::ACTIVE_MAX || !tenant.connection.may_rest())
        {
            tenant.is_active = true;
            self.active.push((place, 0));
        }
    }

    /// Returns the connection with this address, unless it has closed.
    #[cfg(feature = "verbs")]
    pub(crate) fn get(&mut self, address: Connected) -> Option<&mut C> {
        self.named(address).map(|tenant| &mut tenant.connection)
    }

    /// Closes a connection. The next call of [`Connections::receive`] reports it.
    #[cfg(feature = "verbs")]
    pub(crate) fn close(&mut self, address: Connected) {
        if self.named(address).is_some() {
            self.end(address.place);
        }
    }

    /// Passes every connection to `look`, with its address.
    #[cfg(feature = "verbs")]
    pub(crate) fn each(&self, mut look: impl FnMut(Connected, &C)) {
        for (place, of) in (0..).zip(&self.places) {
            if let Some(Tenant { connection, peer, .. }) = &of.tenant {
                look(Connected { place, generation: of.generation, peer: *peer }, connection);
            }
        }
    }

    /// Returns the tenant with this address, unless its connection has closed.
    fn named(&mut self, address: Connected) -> Option<&mut Tenant<C>> {
        let place = self.places.get_mut(address.place as usize)?;
        if place.generation == address.generation { place.tenant.as_mut() } else { None }
    }

    fn end(&mut self, place: u32) {
        let Place { generation, tenant } = &mut self.places[place as usize];
        // Closing the descriptor removes it from epoll, since there is no duplicate of it.
        let Some(Tenant { peer, is_active, .. }) = tenant.take() else { return };
        self.ended.push_back(Connected { place, generation: *generation, peer });
        *generation = generation.wrapping_add(1);
        self.vacant.push(place);
        if is_active {
            self.active.retain(|&(active, _)| active != place);
        }
    }
}

fn data(place: u32) -> epoll::EventData {
    epoll::EventData::new_u64(place.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    /// A connection for tests: each frame is one byte, and the first frame is the hello.
    struct Bytes {
        stream: UnixStream,
        is_admitted: bool,
        out: Vec<u8>,
    }

    impl AsFd for Bytes {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.stream.as_fd()
        }
    }

    impl Connection for Bytes {
        /// Number of reads that all connections have made.
        type Common = u32;

        const ACTIVE_MIN: usize = 1;
        const ACTIVE_MAX: usize = 3;
        const POLLS_PER_EPOLL: u32 = 4;
        const NEWCOMERS_MAX: usize = 25;

        fn is_admitted(&self) -> bool {
            self.is_admitted
        }

        fn read(&mut self, reads: &mut u32, mut take: impl FnMut(&[u8])) -> Result<bool, Ended> {
            *reads += 1;
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(1) => take(&byte),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                _ => return Err(Ended),
            }
            Ok(true)
        }

        fn handle_event(&mut self, reads: &mut u32, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
            if std::mem::replace(&mut self.is_admitted, true) {
                return self.read(reads, take);
            }
            self.read(reads, |hello| assert_eq!(hello, b"h"))
        }

        fn send(&mut self, frame: &[u8]) -> Result<(), Ended> {
            self.out.extend_from_slice(frame);
            Ok(())
        }

        fn flush(&mut self) -> Result<(), Ended> {
            while !self.out.is_empty() {
                match self.stream.write(&self.out) {
                    Ok(len) => drop(self.out.drain(..len)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(_) => return Err(Ended),
                }
            }
            Ok(())
        }

        fn has_sent_all(&self) -> bool {
            self.out.is_empty()
        }

        fn wants_out(&self) -> bool {
            !self.has_sent_all()
        }
    }

    struct Rig {
        connections: Connections<Bytes>,
        /// Listener of the connections. Kept open, because epoll watches its descriptor.
        _listener: UnixListener,
        _folder: tempfile::TempDir,
        reads: u32,
    }

    /// Outcome of polls: the received bytes, and the closed connections.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Heard {
        said: Vec<(Connected, u8)>,
        gone: Vec<Connected>,
    }

    impl Rig {
        fn new() -> Rig {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let listener = UnixListener::bind(folder.path().join("socket")).expect("a listener");
            let connections = Connections::new(&listener).expect("an epoll instance");
            Rig { connections, _listener: listener, _folder: folder, reads: 0 }
        }

        /// Adds a new connection; returns the client's end.
        fn come(&mut self) -> UnixStream {
            let (theirs, stream) = UnixStream::pair().expect("sockets");
            stream.set_nonblocking(true).expect("a socket");
            let connection = Bytes { stream, is_admitted: false, out: Vec::new() };
            self.connections.enter(connection, None).map_err(|(_, errno)| errno).expect("epoll watches it");
            theirs
        }

        /// Adds a connection, which is admitted and then sends `word`.
        fn admitted(&mut self, word: u8) -> (UnixStream, Connected) {
            let mut theirs = self.come();
            theirs.write_all(&[b'h', word]).expect("the socket has space");
            let heard = self.poll_until(|heard| !heard.said.is_empty());
            let [(address, said)] = heard.said[..] else { panic!("expected one byte: {heard:?}") };
            assert_eq!(said, word);
            (theirs, address)
        }

        fn poll(&mut self, heard: &mut Heard) -> bool {
            let polled = self.connections.receive(&mut self.reads, |from, arrival| match arrival {
                Arrival::Datagram(said) => heard.said.push((from, said[0])),
                Arrival::HungUp => heard.gone.push(from),
                Arrival::Outsider(..) => panic!("a connected peer is not an outsider"),
            });
            assert!(!polled.has_waiting_client, "no client waits at the listener");
            polled.has_received
        }

        /// Polls until `is_enough`, for many intervals between two calls of `epoll_wait`.
        fn poll_until(&mut self, is_enough: impl Fn(&Heard) -> bool) -> Heard {
            let mut heard = Heard::default();
            for _ in 0..100 * Bytes::POLLS_PER_EPOLL {
                self.poll(&mut heard);
                if is_enough(&heard) {
                    return heard;
                }
            }
            panic!("too little was received: {heard:?}");
        }

        /// Polls over a few calls of `epoll_wait`.
        fn poll_a_few_times(&mut self) -> Heard {
            let mut heard = Heard::default();
            for _ in 0..4 * Bytes::POLLS_PER_EPOLL {
                self.poll(&mut heard);
            }
            heard
        }
    }

    #[test]
    fn an_address_is_invalid_once_another_connection_has_its_place() {
        let mut rig = Rig::new();
        let (first, was) = rig.admitted(1);
        drop(first);
        assert_eq!(rig.poll_until(|heard| !heard.gone.is_empty()).gone, [was]);
        let (mut second, is) = rig.admitted(2);
        assert_eq!(was.place, is.place, "a place is used again");
        assert_ne!(was, is);
        rig.connections.send(was, b"x");
        rig.connections.hang_up(was);
        rig.connections.send(is, b"y");
        rig.connections.flush();
        let mut byte = [0];
        second.read_exact(&mut byte).expect("a byte was sent");
        assert_eq!(&byte, b"y");
        assert_eq!((rig.poll_a_few_times(), rig.connections.len()), (Heard::default(), 1));
    }

    #[test]
    fn a_quiet_connection_rests_in_epoll_and_is_read_again() {
        let mut rig = Rig::new();
        let mut all: Vec<_> = (0..5).map(|word| rig.admitted(word)).collect();
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MAX);
        for _ in 0..=QUIET_POLLS_MAX + 1 {
            rig.poll_a_few_times();
        }
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MIN);
        let before = rig.reads;
        assert_eq!(rig.poll_a_few_times(), Heard::default());
        assert_eq!(
            rig.reads - before,
            4 * Bytes::POLLS_PER_EPOLL,
            "only the one active connection is polled"
        );
        for (theirs, address) in &mut all {
            theirs.write_all(b"?").expect("the socket has space");
            assert_eq!(rig.poll_until(|heard| !heard.said.is_empty()).said, [(*address, b'?')]);
        }
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MAX);
    }

    #[test]
    fn a_connection_without_a_session_is_closed_after_hello_wait() {
        let mut rig = Rig::new();
        let (_known, known) = rig.admitted(1);
        let (_over, over) = rig.admitted(2);
        let _silent = rig.come();
        let soon = Instant::now();
        rig.connections.close_without_session([known].into_iter(), soon);
        assert_eq!((rig.poll_a_few_times(), rig.connections.len()), (Heard::default(), 3));
        rig.connections.close_without_session([known, over].into_iter(), soon + HELLO_WAIT);
        assert_eq!(
            rig.poll_until(|heard| !heard.gone.is_empty()).gone.len(),
            1,
            "the silent connection is closed"
        );
        rig.connections.close_without_session([known].into_iter(), soon + HELLO_WAIT);
        assert_eq!(rig.poll_until(|heard| !heard.gone.is_empty()).gone, [over]);
        assert_eq!(rig.connections.len(), 1);
    }

    #[test]
    fn newcomers_are_admitted_a_few_at_a_time_and_finally_all() {
        let mut rig = Rig::new();
        let (mut guest, _) = rig.admitted(0);
        let mut crowd: Vec<_> = (0..20).map(|_| rig.come()).collect();
        crowd.iter_mut().for_each(|theirs| theirs.write_all(b"h").expect("the socket has space"));
        let admitted = |rig: &Rig| {
            let places = rig.connections.places.iter().flat_map(|place| &place.tenant);
            places.filter(|tenant| tenant.connection.is_admitted).count()
        };
        let (mut polls, mut before, mut heard) = (0, 1, Heard::default());
        while before < 21 {
            guest.write_all(b"!").expect("the socket has space");
            rig.poll(&mut heard);
            let now = admitted(&rig);
            assert!(now - before <= NEWCOMERS_PER_POLL as usize, "{} newcomers in one poll", now - before);
            polls += u32::from(now > before);
            before = now;
        }
        assert!(polls >= 20 / NEWCOMERS_PER_POLL, "{polls}");
        assert!(heard.said.len() >= 10, "an admitted connection is read meanwhile: {heard:?}");
    }

    #[test]
    fn the_oldest_of_too_many_newcomers_is_closed() {
        let mut rig = Rig::new();
        let (_guest, _) = rig.admitted(1);
        let mut silent: Vec<_> = (0..Bytes::NEWCOMERS_MAX).map(|_| rig.come()).collect();
        assert_eq!(rig.poll_a_few_times(), Heard::default(), "an admitted connection is not a newcomer");
        let _one_more = rig.come();
        assert_eq!(rig.poll_a_few_times().gone.len(), 1);
        let mut bytes = Vec::new();
        silent.remove(0).read_to_end(&mut bytes).expect("the connection was closed");
        assert_eq!(rig.connections.len(), 1 + Bytes::NEWCOMERS_MAX);
    }

    #[test]
    fn a_closing_connection_first_sends_its_queued_frames() {
        let mut rig = Rig::new();
        let (mut theirs, address) = rig.admitted(1);
        let much = vec![7; 4 << 20]; // More than a socket's buffer holds.
        rig.connections.send(address, &much);
        rig.connections.flush();
        rig.connections.hang_up(address);
        assert_eq!(rig.connections.len(), 1, "not all is written yet");
        let mut got = Vec::new();
        theirs.set_nonblocking(true).expect("a socket");
        let mut heard = Heard::default();
        while heard.gone.is_empty() {
            let _no_more_for_now = theirs.read_to_end(&mut got);
            rig.poll(&mut heard);
        }
        theirs.read_to_end(&mut got).expect("the connection was closed");
        assert_eq!((got.len(), rig.connections.len()), (much.len(), 0));
    }
}
