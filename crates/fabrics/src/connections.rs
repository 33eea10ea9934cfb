//! The connections of one engine's port: who they are, who is looked at, who writes, who has ended.
//!
//! Those who were just active are looked at without any call of the system. Who has been quiet for a while rests, and
//! costs nothing until the poll tells of it: that is asked now and then while the engine is busy, and at once when it
//! sleeps. To let somebody in may take a while: it is done for one at a time, and while others are active it has a part
//! of the time alone, so that a crowd of newcomers leaves them the rest. Where too many stand there and are not let in,
//! the one who has stood longest makes room.
//!
//! Invariant: a connection that is not active has asked the poll to tell of it.
//! Invariant: an address names one connection for ever; who comes to its place has another.
//! Invariant: who has no session a while after it came is hung up on, whatever it has said.

use crate::session::carrier::{Arrival, Broken, Dropped, Port};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a connection may have no session.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// A look of which something came takes as long as so many others.
const BUSY_LOOK: u32 = 8;
/// Looks without a word after which a connection is active no more.
const ACTIVE_LOOKS: u32 = 1024;
/// Of those who were not let in yet, so many are heard between two questions to the poll.
pub(crate) const NEWCOMERS_PER_POLL: u32 = 1;
/// While others are active, newcomers are not heard again before so many times as long as that took.
const NEWCOMERS_PAUSE: u32 = 3;
/// The listener's place in the poll.
const LISTENER: u64 = u64::MAX;

/// A connection: its place and how many were there before, and where its other end is, if not on this machine alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connected {
    place: u32,
    generation: u32,
    pub(crate) peer: Option<IpAddr>,
}

/// A connection carries nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended;

/// One client's connection.
pub(crate) trait Connection: AsFd {
    /// What all connections of a port use, each in its turn.
    type Common;

    /// So few are looked at however quiet they are: that costs less than the poll.
    const ACTIVE_MIN: usize;
    /// So many are looked at, of others the poll tells: that costs less than looking.
    const ACTIVE_MAX: usize;
    /// Looks between two questions to the poll, as far as nothing came of them.
    const LOOKS_PER_POLL: u32;
    /// So many may be there who were not let in.
    const NEWCOMERS_MAX: usize = 1024;

    /// Whether frames may come. Until then it is heard a few times at a time, and only when the poll tells of it.
    fn is_admitted(&self) -> bool {
        true
    }

    /// Hands on what has arrived: the next frame, or the next few. False if nothing has.
    fn read(&mut self, common: &mut Self::Common, take: impl FnMut(&[u8])) -> Result<bool, Ended>;

    /// As [`Connection::read`], where the poll has told that something happened.
    fn hear(&mut self, common: &mut Self::Common, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        self.read(common, take)
    }

    /// Takes a frame to be sent.
    fn send(&mut self, frame: &[u8]) -> Result<(), Ended>;

    /// Sends what was taken, as far as that goes.
    fn flush(&mut self) -> Result<(), Ended>;

    /// Whether all that was taken has left.
    fn has_sent_all(&self) -> bool;

    /// Whether the poll is to tell when more can be sent.
    fn wants_out(&self) -> bool {
        false
    }

    /// Asks that the poll tells of what arrives. False if something has arrived already.
    fn may_rest(&mut self) -> bool {
        true
    }
}

/// What came of looking at all connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Looked {
    pub(crate) has_received: bool,
    /// Somebody waits at the listener.
    pub(crate) is_called: bool,
}

/// A port whose clients each have a connection: what is its own beside the table of them.
pub(crate) trait Connecting: Send {
    /// One client's connection.
    type Client: Connection<Common: Send> + Send;

    /// The most bytes of a frame.
    const FRAME_MAX: usize;

    /// The table.
    fn connections(&self) -> &Connections<Self::Client>;

    /// The table, and what its connections share.
    fn parts(&mut self) -> (&mut Connections<Self::Client>, &mut <Self::Client as Connection>::Common);

    /// Lets in those who wait at the listener, or some of them.
    fn accept(&mut self);

    /// Listens again if it stopped for lack of descriptors and the pause is over.
    fn resume(&mut self) {}

    /// How long until [`Connecting::resume`] has something to do.
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
        let looked = connections.receive(common, take);
        if looked.is_called {
            self.accept();
        }
        Ok(looked.has_received || looked.is_called)
    }

    fn send(&mut self, to: Connected, frame: &[u8]) {
        self.parts().0.send(to, frame);
    }

    fn flush(&mut self) {
        self.parts().0.flush();
    }

    fn dropped(&self) -> Dropped {
        Dropped::default() // A connection drops nothing: it ends.
    }

    fn connections(&self) -> usize {
        Connecting::connections(self).len()
    }

    fn hang_up(&mut self, address: Connected) {
        self.parts().0.hang_up(address);
    }

    fn hang_up_on_strangers(&mut self, known: impl Iterator<Item = Connected>) {
        self.parts().0.hang_up_on_strangers(known, Instant::now());
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
    /// Those who were not let in when they came, the oldest first.
    newcomers: VecDeque<Connected>,
    /// Before that, who is active is served alone.
    newcomers_at: Option<Instant>,
    /// Those who were just active, and looks at each since its last word.
    active: Vec<(u32, u32)>,
    looks: u32,
    /// Those to whom something was sent.
    writing: Vec<u32>,
    /// Whose end the engine has not heard of.
    ended: VecDeque<Connected>,
    /// Times that strangers were looked for.
    musters: u32,
}

struct Place<C> {
    generation: u32,
    tenant: Option<Tenant<C>>,
}

struct Tenant<C> {
    connection: C,
    peer: Option<IpAddr>,
    since: Instant,
    /// The muster at which it last had a session.
    known_at: u32,
    is_active: bool,
    is_writing: bool,
    /// Whether the poll tells when more can be sent.
    wants_out: bool,
    /// To be let go when all is sent.
    is_leaving: bool,
}

impl<C: Connection> Connections<C> {
    /// None yet, and a listener of which the poll tells.
    ///
    /// # Errors
    /// The system has no descriptor for the poll.
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
            looks: 0,
            writing: Vec::new(),
            ended: VecDeque::new(),
            musters: 0,
        })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Takes one in, whose other end is at `peer`.
    ///
    /// # Errors
    /// The connection, and why the system does not watch it.
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
            known_at: self.musters,
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

    /// Lets go of the oldest of too many newcomers, unless it was let in or has gone meanwhile.
    fn make_room(&mut self) {
        if self.newcomers.len() > C::NEWCOMERS_MAX
            && let Some(oldest) = self.newcomers.pop_front()
            && let Some(tenant) = self.named(oldest)
            && !tenant.connection.is_admitted()
        {
            self.end(oldest.place);
        }
    }

    /// Has the poll tell of those who wait at the listener, or not.
    pub(crate) fn listen(&self, listener: impl AsFd, listens: bool) {
        let events = if listens { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let _told_as_before =
            epoll::modify(&self.poll, listener, epoll::EventData::new_u64(LISTENER), events);
    }

    /// Hands on what has arrived, and who has ended.
    pub(crate) fn receive(
        &mut self,
        common: &mut C::Common,
        mut take: impl FnMut(Connected, Arrival<'_>),
    ) -> Looked {
        let mut looked = Looked { has_received: self.look(common, &mut take), is_called: false };
        self.looks += if looked.has_received { BUSY_LOOK } else { 1 };
        if self.active.is_empty() || self.looks >= C::LOOKS_PER_POLL {
            self.looks = 0;
            self.ask_poll(common, &mut looked, &mut take);
        }
        while let Some(address) = self.ended.pop_front() {
            take(address, Arrival::HungUp);
            looked.has_received = true;
        }
        looked
    }

    /// Takes a frame to be sent.
    pub(crate) fn send(&mut self, to: Connected, frame: &[u8]) {
        let Some(tenant) = self.named(to) else { return };
        if tenant.connection.send(frame).is_err() {
            return self.end(to.place);
        }
        if !std::mem::replace(&mut tenant.is_writing, true) {
            self.writing.push(to.place);
        }
    }

    /// Sends what was taken.
    pub(crate) fn flush(&mut self) {
        while let Some(place) = self.writing.pop() {
            self.write(place);
        }
    }

    /// Lets go of one when all that was taken for it has left.
    pub(crate) fn hang_up(&mut self, address: Connected) {
        if let Some(tenant) = self.named(address) {
            tenant.is_leaving = true;
            self.write(address.place);
        }
    }

    /// Lets go of those who came a while before `now` and are not among the known.
    pub(crate) fn hang_up_on_strangers(&mut self, known: impl Iterator<Item = Connected>, now: Instant) {
        self.musters = self.musters.wrapping_add(1);
        let muster = self.musters;
        for address in known {
            if let Some(tenant) = self.named(address) {
                tenant.known_at = muster;
            }
        }
        for place in 0..self.places.len() {
            if let Some(tenant) = &self.places[place].tenant
                && tenant.known_at != muster
                && now.saturating_duration_since(tenant.since) >= HELLO_WAIT
            {
                self.end(place as u32);
            }
        }
    }

    /// Can be read from when there is something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    /// Asks to be woken by the descriptor. False if there is something to do already.
    pub(crate) fn may_sleep(&mut self) -> bool {
        self.looks = C::LOOKS_PER_POLL; // What wakes it is in the poll.
        // Who has rested before another could not is active no less.
        let rests = |&(place, _): &(u32, u32)| match &mut self.places[place as usize].tenant {
            Some(tenant) => tenant.connection.may_rest(),
            None => true,
        };
        self.ended.is_empty() && self.active.iter().all(rests)
    }

    /// Looks at those who were just active. False if none has said anything.
    fn look(&mut self, common: &mut C::Common, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let mut has_received = false;
        let mut index = 0;
        while let Some(&(place, looks)) = self.active.get(index) {
            match self.read(place, false, common, take) {
                Ok(true) => {
                    has_received = true;
                    self.active[index].1 = 0;
                    index += 1;
                }
                Ok(false)
                    if (looks >= ACTIVE_LOOKS || self.active.len() > C::ACTIVE_MAX)
                        && self.may_be_left(place) =>
                {
                    self.active.swap_remove(index);
                }
                Ok(false) => {
                    self.active[index].1 = looks + 1;
                    index += 1;
                }
                Err(Ended) => has_received = true, // Another is at `index` now.
            }
        }
        has_received
    }

    /// Asks a connection that has been quiet to rest. False if it stays active.
    fn may_be_left(&mut self, place: u32) -> bool {
        if self.active.len() <= C::ACTIVE_MIN {
            return false;
        }
        let Some(tenant) = &mut self.places[place as usize].tenant else { return true };
        let rests = tenant.connection.may_rest();
        tenant.is_active = !rests;
        rests
    }

    /// Asks the poll what has happened.
    fn ask_poll(
        &mut self,
        common: &mut C::Common,
        looked: &mut Looked,
        take: &mut impl FnMut(Connected, Arrival<'_>),
    ) {
        let mut events = [const { MaybeUninit::uninit() }; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.poll, &mut events, Some(&now)) else {
            return; // Interrupted: the caller comes again.
        };
        self.newcomers_at = self.newcomers_at.filter(|&at| !self.active.is_empty() && Instant::now() < at);
        let mut room = if self.newcomers_at.is_none() { NEWCOMERS_PER_POLL } else { 0 };
        for event in events {
            let (at, flags) = (event.data.u64(), event.flags);
            if at == LISTENER {
                looked.is_called = room > 0;
                looked.has_received |= room == 0; // The poll tells of it again.
                continue;
            }
            let place = at as u32;
            let Some(tenant) = &self.places[place as usize].tenant else { continue };
            let since = (!tenant.connection.is_admitted()).then(Instant::now);
            if since.is_some() && room == 0 {
                looked.has_received = true; // Likewise.
                continue;
            }
            if flags.contains(epoll::EventFlags::OUT) {
                self.write(place);
            }
            if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                looked.has_received |= self.read(place, true, common, take) != Ok(false);
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

    /// Reads from a connection, of which the poll has told if `is_told`.
    fn read(
        &mut self,
        place: u32,
        is_told: bool,
        common: &mut C::Common,
        take: &mut impl FnMut(Connected, Arrival<'_>),
    ) -> Result<bool, Ended> {
        let Place { generation, tenant: Some(tenant) } = &mut self.places[place as usize] else {
            return Ok(false);
        };
        let address = Connected { place, generation: *generation, peer: tenant.peer };
        let Tenant { connection, is_leaving, .. } = tenant;
        let take = |frame: &[u8]| take(address, Arrival::Datagram(frame));
        let read = if is_told { connection.hear(common, take) } else { connection.read(common, take) };
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
        // What finds no room now, of which no poll tells, is tried again when it is looked at.
        let is_held_back = !tenant.connection.has_sent_all() && !tenant.connection.wants_out();
        self.watch(place);
        if is_held_back {
            self.activate(place);
        }
    }

    /// Has the poll tell what a connection is waiting for now.
    fn watch(&mut self, place: u32) {
        let Some(tenant) = &mut self.places[place as usize].tenant else { return };
        let wants_out = tenant.connection.wants_out();
        if std::mem::replace(&mut tenant.wants_out, wants_out) != wants_out {
            let out = if wants_out { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let events = epoll::EventFlags::IN | out;
            let _told_as_before = epoll::modify(&self.poll, &tenant.connection, data(place), events);
        }
    }

    /// Has it looked at, if few are; in any case if it holds what has arrived, of which the poll would not tell.
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

    /// The connection that `address` names, unless another has its place by now.
    fn named(&mut self, address: Connected) -> Option<&mut Tenant<C>> {
        let place = self.places.get_mut(address.place as usize)?;
        if place.generation == address.generation { place.tenant.as_mut() } else { None }
    }

    fn end(&mut self, place: u32) {
        let Place { generation, tenant } = &mut self.places[place as usize];
        // Closing takes it out of the poll: nobody else has its descriptor.
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

    /// A frame is a byte. The first one says hello.
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
        /// Times that anyone was read from.
        type Common = u32;

        const ACTIVE_MIN: usize = 1;
        const ACTIVE_MAX: usize = 3;
        const LOOKS_PER_POLL: u32 = 4;
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

        fn hear(&mut self, reads: &mut u32, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
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
        /// Kept, since the poll has its descriptor.
        _listener: UnixListener,
        _folder: tempfile::TempDir,
        reads: u32,
    }

    /// What came of a look: who said what, and who is gone.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Heard {
        said: Vec<(Connected, u8)>,
        gone: Vec<Connected>,
    }

    impl Rig {
        fn new() -> Rig {
            let folder = tempfile::tempdir().expect("a folder");
            let listener = UnixListener::bind(folder.path().join("socket")).expect("a socket");
            let connections = Connections::new(&listener).expect("a poll");
            Rig { connections, _listener: listener, _folder: folder, reads: 0 }
        }

        /// One who has come; the other end.
        fn come(&mut self) -> UnixStream {
            let (theirs, stream) = UnixStream::pair().expect("sockets");
            stream.set_nonblocking(true).expect("a socket");
            let connection = Bytes { stream, is_admitted: false, out: Vec::new() };
            self.connections.enter(connection, None).map_err(|(_, errno)| errno).expect("room");
            theirs
        }

        /// One who was let in, and has said `word` since.
        fn admitted(&mut self, word: u8) -> (UnixStream, Connected) {
            let mut theirs = self.come();
            theirs.write_all(&[b'h', word]).expect("it is read");
            let heard = self.look_until(|heard| !heard.said.is_empty());
            let [(address, said)] = heard.said[..] else { panic!("one was heard: {heard:?}") };
            assert_eq!(said, word);
            (theirs, address)
        }

        fn look(&mut self, heard: &mut Heard) -> bool {
            let looked = self.connections.receive(&mut self.reads, |from, arrival| match arrival {
                Arrival::Datagram(said) => heard.said.push((from, said[0])),
                Arrival::HungUp => heard.gone.push(from),
                Arrival::Outsider(..) => panic!("who is connected is no outsider"),
            });
            assert!(!looked.is_called, "nobody is at the listener");
            looked.has_received
        }

        /// Looks a few times, more than lie between two questions to the poll.
        fn look_until(&mut self, is_enough: impl Fn(&Heard) -> bool) -> Heard {
            let mut heard = Heard::default();
            for _ in 0..100 * Bytes::LOOKS_PER_POLL {
                self.look(&mut heard);
                if is_enough(&heard) {
                    return heard;
                }
            }
            panic!("this was all: {heard:?}");
        }

        /// What is heard however often one looks.
        fn look_around(&mut self) -> Heard {
            let mut heard = Heard::default();
            for _ in 0..4 * Bytes::LOOKS_PER_POLL {
                self.look(&mut heard);
            }
            heard
        }
    }

    #[test]
    fn an_address_names_nobody_once_another_has_its_place() {
        let mut rig = Rig::new();
        let (first, was) = rig.admitted(1);
        drop(first);
        assert_eq!(rig.look_until(|heard| !heard.gone.is_empty()).gone, [was]);
        let (mut second, is) = rig.admitted(2);
        assert_eq!(was.place, is.place, "a place is used again");
        assert_ne!(was, is);
        rig.connections.send(was, b"x");
        rig.connections.hang_up(was);
        rig.connections.send(is, b"y");
        rig.connections.flush();
        let mut byte = [0];
        second.read_exact(&mut byte).expect("it is there");
        assert_eq!(&byte, b"y");
        assert_eq!((rig.look_around(), rig.connections.len()), (Heard::default(), 1));
    }

    #[test]
    fn who_is_quiet_is_left_to_the_poll_and_heard_again() {
        let mut rig = Rig::new();
        let mut all: Vec<_> = (0..5).map(|word| rig.admitted(word)).collect();
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MAX);
        for _ in 0..=ACTIVE_LOOKS + 1 {
            rig.look_around();
        }
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MIN);
        let before = rig.reads;
        assert_eq!(rig.look_around(), Heard::default());
        assert_eq!(rig.reads - before, 4 * Bytes::LOOKS_PER_POLL, "one is looked at, and none besides");
        for (theirs, address) in &mut all {
            theirs.write_all(b"?").expect("it is read");
            assert_eq!(rig.look_until(|heard| !heard.said.is_empty()).said, [(*address, b'?')]);
        }
        assert_eq!(rig.connections.active.len(), Bytes::ACTIVE_MAX);
    }

    #[test]
    fn who_has_no_session_is_hung_up_on_after_a_while_and_no_sooner() {
        let mut rig = Rig::new();
        let (_known, known) = rig.admitted(1);
        let (_over, over) = rig.admitted(2);
        let _silent = rig.come();
        let soon = Instant::now();
        rig.connections.hang_up_on_strangers([known].into_iter(), soon);
        assert_eq!((rig.look_around(), rig.connections.len()), (Heard::default(), 3));
        rig.connections.hang_up_on_strangers([known, over].into_iter(), soon + HELLO_WAIT);
        assert_eq!(rig.look_until(|heard| !heard.gone.is_empty()).gone.len(), 1, "it never said a word");
        rig.connections.hang_up_on_strangers([known].into_iter(), soon + HELLO_WAIT);
        assert_eq!(rig.look_until(|heard| !heard.gone.is_empty()).gone, [over]);
        assert_eq!(rig.connections.len(), 1);
    }

    #[test]
    fn of_a_crowd_of_newcomers_a_few_are_heard_at_a_time_and_all_in_the_end() {
        let mut rig = Rig::new();
        let (mut guest, _) = rig.admitted(0);
        let mut crowd: Vec<_> = (0..20).map(|_| rig.come()).collect();
        crowd.iter_mut().for_each(|theirs| theirs.write_all(b"h").expect("it is read"));
        let admitted = |rig: &Rig| {
            let places = rig.connections.places.iter().flat_map(|place| &place.tenant);
            places.filter(|tenant| tenant.connection.is_admitted).count()
        };
        let (mut polls, mut before, mut heard) = (0, 1, Heard::default());
        while before < 21 {
            guest.write_all(b"!").expect("it is read");
            rig.look(&mut heard);
            let now = admitted(&rig);
            assert!(now - before <= NEWCOMERS_PER_POLL as usize, "{} at once", now - before);
            polls += u32::from(now > before);
            before = now;
        }
        assert!(polls >= 20 / NEWCOMERS_PER_POLL, "{polls}");
        assert!(heard.said.len() >= 10, "who was there was heard meanwhile: {heard:?}");
    }

    #[test]
    fn of_too_many_newcomers_the_oldest_makes_room() {
        let mut rig = Rig::new();
        let (_guest, _) = rig.admitted(1);
        let mut silent: Vec<_> = (0..Bytes::NEWCOMERS_MAX).map(|_| rig.come()).collect();
        assert_eq!(rig.look_around(), Heard::default(), "the guest is no newcomer");
        let _one_more = rig.come();
        assert_eq!(rig.look_around().gone.len(), 1);
        let mut bytes = Vec::new();
        silent.remove(0).read_to_end(&mut bytes).expect("it was hung up on");
        assert_eq!(rig.connections.len(), 1 + Bytes::NEWCOMERS_MAX);
    }

    #[test]
    fn who_is_let_go_of_gets_first_what_was_taken() {
        let mut rig = Rig::new();
        let (mut theirs, address) = rig.admitted(1);
        let much = vec![7; 4 << 20]; // More than a socket holds.
        rig.connections.send(address, &much);
        rig.connections.flush();
        rig.connections.hang_up(address);
        assert_eq!(rig.connections.len(), 1, "it has not got all");
        let mut got = Vec::new();
        theirs.set_nonblocking(true).expect("a socket");
        let mut heard = Heard::default();
        while heard.gone.is_empty() {
            let _no_more_for_now = theirs.read_to_end(&mut got);
            rig.look(&mut heard);
        }
        theirs.read_to_end(&mut got).expect("it was hung up on");
        assert_eq!((got.len(), rig.connections.len()), (much.len(), 0));
    }
}
