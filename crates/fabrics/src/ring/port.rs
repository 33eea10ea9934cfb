//! An engine's connections.
//!
//! Those who were just active are looked at without any call of the system. Of many, whoever has been quiet for a while
//! is asked to ring, as if the engine slept, and costs nothing until then: the poll tells, now and then while the
//! engine is busy, and at once when it sleeps.
//!
//! Invariant: a connection that is not active has the engine's wish in its memory, or its bell in the poll.
//! Invariant: no descriptor of a client's is used, and of its socket nothing but what it says and that it hangs up.

use super::end::{Buffer, End};
use super::shared::{Mapped, Memory, Side, make};
use super::{FRAME_MAX, Greeting, check};
use crate::session::carrier::{Arrival, Broken, Port};
use crate::shm::frame;
use crate::shm::peer::peer;
use crate::socket::{ListenError, Listener};
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::{HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections of one engine, each with some memory.
const CONNECTIONS_MAX: usize = 1024;
/// How long a connection may have no session.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// Looks between two questions to the poll.
const LOOKS_PER_POLL: u32 = 32;
/// Looks without a word after which a connection is active no more.
const ACTIVE_LOOKS: u32 = 1024;
/// So few are looked at however quiet they are: that costs less than a bell.
const ACTIVE_MIN: usize = 4;
/// How long nobody is let in where not even the spare descriptor helps.
const FULL_PAUSE: Duration = Duration::from_millis(2);
/// The listener's place in the poll.
const LISTENER: u64 = u64::MAX;

/// A connection: its place and how many were there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connected {
    place: u32,
    generation: u32,
}

/// An engine's end of all its rings.
pub struct RingPort {
    listener: Arc<Listener>,
    poll: OwnedFd,
    connections: Vec<(u32, Option<Connection>)>,
    vacant: Vec<u32>,
    /// Those who were just active, and looks at each since its last word.
    active: Vec<(u32, u32)>,
    looks: u32,
    /// Those to whom something was sent, each once.
    writing: Vec<u32>,
    /// Whose end the engine has not heard of.
    ended: VecDeque<Connected>,
    /// Let go when there is no other descriptor for one who comes, so that it can be told so.
    spare: Option<OwnedFd>,
    buffer: Buffer,
    greeting: Vec<u8>,
}

struct Connection {
    stage: Stage,
    since: Instant,
}

enum Stage {
    /// It has not said hello.
    New(OwnedFd),
    Admitted(Box<Client>),
}

struct Client {
    shared: Mapped,
    end: End,
    is_active: bool,
    is_writing: bool,
    /// To be let go when all is written.
    is_leaving: bool,
}

impl RingPort {
    /// Ports for so many engines at the socket `path`, among which clients go to whichever lets them in first.
    ///
    /// # Errors
    /// Nobody can be served there; nothing is left behind.
    pub fn bind(path: &Path, engines: usize) -> Result<Vec<RingPort>, ListenError> {
        let listener = Arc::new(Listener::bind(path)?);
        let refused = |errno: Errno| ListenError::System("watch", path.to_owned(), errno.into());
        (0..engines).map(|_| RingPort::new(Arc::clone(&listener)).map_err(refused)).collect()
    }

    fn new(listener: Arc<Listener>) -> rustix::io::Result<RingPort> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&poll, &*listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(RingPort {
            listener,
            poll,
            connections: Vec::new(),
            vacant: Vec::new(),
            active: Vec::new(),
            looks: 0,
            writing: Vec::new(),
            ended: VecDeque::new(),
            spare: Some(spare()?),
            buffer: Buffer::new(),
            greeting: Vec::new(),
        })
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        self.connections.len() - self.vacant.len()
    }

    /// Lets one in; whoever is left, another engine may have.
    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(socket) => {
                if let Err(reason) = self.admit(&socket) {
                    return refuse(&socket, &reason);
                }
                let place = self.vacant.pop().unwrap_or(self.connections.len() as u32);
                if place as usize == self.connections.len() {
                    self.connections.push((0, None));
                }
                if let Err(errno) = epoll::add(&self.poll, &socket, data(place), epoll::EventFlags::IN) {
                    self.vacant.push(place);
                    return refuse(&socket, &no_room(errno));
                }
                self.connections[place as usize].1 =
                    Some(Connection { stage: Stage::New(socket), since: Instant::now() });
            }
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                drop(self.spare.take());
                match self.listener.accept() {
                    Ok(socket) => refuse(&socket, &no_room(errno)),
                    // It stays in line, so that the poll would answer at once, for ever.
                    Err(_) => std::thread::sleep(FULL_PAUSE),
                }
                self.spare = spare().ok(); // If there is none, who comes next waits in line, untold.
            }
            Err(_) => {} // Another engine has let it in, or it is gone already.
        }
    }

    /// Whether somebody who came may stay.
    fn admit(&self, socket: &OwnedFd) -> Result<(), String> {
        let peer = peer(socket).map_err(no_room)?;
        if peer.user != rustix::process::geteuid().as_raw() {
            return Err("this node serves the user that started it: run your client as that user".into());
        }
        if self.connections() >= CONNECTIONS_MAX {
            return Err(format!(
                "this engine has {CONNECTIONS_MAX} clients, the most there can be: end another first"
            ));
        }
        Ok(())
    }

    /// Answers the hello of one who has come.
    fn greet(&mut self, place: u32) {
        let (generation, connection) = &mut self.connections[place as usize];
        let Some(Connection { stage: Stage::New(socket), since }) = connection else { return };
        let mut uninvited = Vec::new(); // Descriptors that a client sends are closed unseen.
        let answered =
            match frame::receive(socket.as_fd(), &mut self.greeting, &mut uninvited, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok(Some(hello)) => {
                    check(hello).and_then(|()| welcome(socket)).map_err(|reason| refuse(socket, &reason))
                }
                Ok(None) | Err(_) => Err(()), // It is gone.
            };
        let since = *since;
        let before = connection.take();
        if let (Ok(memory), Some(Connection { stage: Stage::New(socket), .. })) = (answered, before) {
            let client = Client {
                shared: Mapped { memory, socket },
                end: End::new(Side::Engine),
                is_active: true,
                is_writing: false,
                is_leaving: false,
            };
            *connection = Some(Connection { stage: Stage::Admitted(Box::new(client)), since });
            self.active.push((place, 0));
        } else {
            *generation = generation.wrapping_add(1);
            self.vacant.push(place);
        }
    }

    fn client(&mut self, place: u32) -> Option<(Connected, &mut Client)> {
        match self.connections.get_mut(place as usize)? {
            (generation, Some(Connection { stage: Stage::Admitted(client), .. })) => {
                Some((Connected { place, generation: *generation }, client))
            }
            _ => None,
        }
    }

    /// The client that `address` names, unless another has its place by now.
    fn named(&mut self, address: Connected) -> Option<&mut Client> {
        self.client(address.place).filter(|(now, _)| *now == address).map(|(_, client)| client)
    }

    /// Hears what a socket has to say. False if nothing came of it.
    fn hear(&mut self, place: u32, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let Some((_, client)) = self.client(place) else {
            self.greet(place);
            return true;
        };
        let is_connected = client.shared.is_connected();
        if !std::mem::replace(&mut client.is_active, true) {
            self.active.push((place, 0));
        }
        // After that: whoever hangs up has published all that it wrote.
        let has_received = self.read(place, take);
        if !is_connected {
            self.end(place);
        }
        has_received || !is_connected
    }

    /// Reads what a client has published. False if nothing came.
    fn read(&mut self, place: u32, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let (generation, connection) = &mut self.connections[place as usize];
        let Some(Connection { stage: Stage::Admitted(client), .. }) = connection else { return false };
        let address = Connected { place, generation: *generation };
        let Client { shared, end, is_leaving, .. } = &mut **client;
        end.awake(shared);
        let received = end.receive(shared, &mut self.buffer, |frame| take(address, Arrival::Datagram(frame)));
        if received.is_err() || *is_leaving && end.has_sent_all() {
            self.end(place);
            return true;
        }
        received == Ok(true)
    }

    /// Asks a client that has been quiet to ring. False if it is quiet no more.
    fn rests(&mut self, place: u32) -> bool {
        let Some((_, client)) = self.client(place) else { return true };
        let rests = client.end.may_sleep(&client.shared);
        client.is_active = !rests;
        rests
    }

    fn end(&mut self, place: u32) {
        let (generation, connection) = &mut self.connections[place as usize];
        if connection.take().is_some() {
            // Closing takes it out of the poll: nobody else has its descriptor.
            self.ended.push_back(Connected { place, generation: *generation });
            *generation = generation.wrapping_add(1);
            self.vacant.push(place);
            self.active.retain(|&(active, _)| active != place);
        }
    }

    fn write(&mut self, place: u32) {
        let Some((_, client)) = self.client(place) else { return };
        client.is_writing = false;
        let flushed = client.end.flush(&client.shared);
        if flushed.is_err() || client.is_leaving && client.end.has_sent_all() {
            self.end(place);
        }
    }

    /// Asks the poll what has happened.
    fn poll(&mut self, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        let mut events = [const { MaybeUninit::uninit() }; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.poll, &mut events, Some(&now)) else {
            return false; // Interrupted: the caller comes again.
        };
        let mut has_received = false;
        for event in events {
            has_received |= match event.data.u64() {
                LISTENER => {
                    self.accept();
                    true
                }
                place => self.hear(place as u32, take),
            };
        }
        has_received
    }
}

/// Makes the memory of a connection, and hands it over.
fn welcome(socket: &OwnedFd) -> Result<Memory, String> {
    let made = make().and_then(|fd| Memory::map(&fd).map(|memory| (fd, memory)));
    let (fd, memory) =
        made.map_err(|error| format!("the node has no memory for one more client: {error}"))?;
    let greeting = serde_json::to_vec(&Greeting::Welcome).expect("plain data");
    frame::send(socket.as_fd(), &greeting, &[], &[fd.as_fd()]).map_err(no_room)?;
    Ok(memory)
}

fn refuse(socket: &OwnedFd, reason: &str) {
    let refusal = serde_json::to_vec(&Greeting::Refusal(reason.to_owned())).expect("plain data");
    // Whoever does not listen does not learn why.
    let _unheard = frame::send(socket.as_fd(), &refusal, &[], &[]);
}

fn no_room(errno: Errno) -> String {
    format!("the node has no room for one more client ({errno}): end another first, or raise its 'ulimit -n'")
}

fn spare() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
}

fn data(place: u32) -> epoll::EventData {
    epoll::EventData::new_u64(place.into())
}

impl Port for RingPort {
    type Address = Connected;

    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
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
            } else if looks >= ACTIVE_LOOKS && self.active.len() > ACTIVE_MIN && self.rests(place) {
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
        let Some(client) = self.named(to) else { return };
        if client.end.send(&client.shared, frame).is_err() {
            return self.end(to.place);
        }
        if !std::mem::replace(&mut client.is_writing, true) {
            self.writing.push(to.place);
        }
    }

    fn flush(&mut self) {
        while let Some(place) = self.writing.pop() {
            self.write(place);
        }
    }

    fn hang_up(&mut self, address: Connected) {
        if let Some(client) = self.named(address) {
            client.is_leaving = true;
            self.write(address.place);
        }
    }

    fn hang_up_on_strangers(&mut self, known: impl Iterator<Item = Connected>) {
        let known: HashSet<Connected> = known.collect();
        for place in 0..self.connections.len() as u32 {
            let (generation, connection) = &self.connections[place as usize];
            let Some(connection) = connection else { continue };
            let is_known = known.contains(&Connected { place, generation: *generation });
            if !is_known && connection.since.elapsed() >= HELLO_WAIT {
                self.end(place);
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.looks = LOOKS_PER_POLL; // What wakes it is in the poll.
        // A wish that was made before another had to be withdrawn is withdrawn when that client is looked at.
        let sleeps = |&(place, _): &(u32, u32)| match self.connections.get_mut(place as usize) {
            Some((_, Some(Connection { stage: Stage::Admitted(client), .. }))) => {
                client.end.may_sleep(&client.shared)
            }
            _ => true,
        };
        self.ended.is_empty() && self.active.iter().all(sleeps)
    }
}
