//! An engine's RDMA connections to all its clients.
//!
//! A client connects over TCP, and both sides describe their queue pairs to each other ([`super::setup`]). The TCP
//! connection is in the table of [`Connections`], which reports when the client's process has ended. Frames are SENDs.
//! All pairs of an engine share one receive queue and one completion queue.
//!
//! Invariant: a completion counts for the connection that had the queue pair's number when it was fetched, and all
//! completions of a pair are fetched before another pair can get its number.
//! Invariant: a connection whose peer does not receive is closed before it holds more than [`OUTBOX_MAX`] bytes.

use super::buffers::{Buffers, Pool, Sender};
use super::error::VerbsError;
use super::grants::Grants;
use super::line::{INLINE, RECEIVE};
use super::resources::{
    COMPLETIONS_AT_ONCE, Channel, Completions, Domain, NewPair, Pair, SharedReceives, Way,
};
use super::setup::{
    Abilities, Choice, Description, FRAME_MAX, Here, Message, PORT, SIZE, first_packet, refusal,
};
use super::sys::{IbvWc, is};
use crate::connections::{Connected, Connection, Connections, Ended};
use crate::session::carrier::{Arrival, Broken, Dropped, Port};
use crate::together::bind_together;
use rustix::event::epoll;
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of bytes of frames that wait for one client in memory that is not registered.
const OUTBOX_MAX: usize = 4 << 20;
/// Number of receive buffers, which all clients share.
const RECEIVES: u32 = 256;
/// Number of send buffers, which all clients share.
const POOL: usize = 256;
/// Number of frames in flight to one client.
const SENDS: u32 = 16;
/// Size of the completion queue, if the device has no lower limit.
const COMPLETIONS: u32 = 16 * 1024;
/// Number of polls without a frame between two looks at the TCP connections.
const POLLS_PER_LOOK: u32 = 64;
/// Maximum number of connections accepted between two calls of `epoll_wait`.
const ACCEPTS_PER_POLL: u32 = 4;
/// Pause in accepting connections after the system ran out of descriptors.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// Where and how a node listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsAddress {
    /// The device, its identifier and the size of packets.
    pub choice: Choice,
    /// Port for the set-up over TCP; 0 for any port.
    pub port: u16,
    /// IP address for the set-up over TCP; `None` for the device's own, or if it has none, for all addresses of this
    /// machine.
    pub address: Option<IpAddr>,
    /// Whether the NIC executes the atomics of all regions, and engines execute none.
    pub nic_atomics: bool,
}

impl VerbsAddress {
    /// Parses the part of a url after `verbs://`: `DEVICE[:PORT][?gid=INDEX&mtu=BYTES&host=IP]`.
    ///
    /// # Errors
    /// The reason why it is invalid.
    pub fn parse(text: &str) -> Result<VerbsAddress, String> {
        let (place, query) = text.split_once('?').unwrap_or((text, ""));
        let (mut address, mut rest) = (None, Vec::new());
        for part in query.split('&') {
            match part.strip_prefix("host=") {
                Some(host) => {
                    address = Some(host.parse().map_err(|_| format!("'{host}' is no IP address"))?);
                }
                None => rest.push(part),
            }
        }
        let mut choice = Choice::parse(&rest.join("&"))?;
        let (device, port) = match place.trim_end_matches('/').split_once(':') {
            Some((device, port)) => (device, port.parse().map_err(|_| format!("'{port}' is no port"))?),
            None => (place.trim_end_matches('/'), PORT),
        };
        if device.is_empty() || choice.device.is_some() {
            return Err("it names no device".to_owned());
        }
        choice.device = Some(device.to_owned());
        Ok(VerbsAddress { choice, port, address, nic_atomics: false })
    }

    /// Whether clients of other machines can connect.
    pub fn is_open(&self) -> bool {
        self.address.is_none_or(|address| !address.is_loopback())
    }
}

/// Prints the url that clients use, once the address is known; before, the one that the node listens at.
impl std::fmt::Display for VerbsAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.address, &self.choice.device) {
            (Some(address), _) => write!(f, "verbs://{}", SocketAddr::new(address, self.port)),
            (None, Some(device)) => write!(f, "verbs://{device}:{}", self.port),
            (None, None) => write!(f, "verbs://:{}", self.port),
        }
    }
}

/// An engine's port for RDMA connections.
pub struct VerbsPort {
    listener: TcpListener,
    // Dropped before `common`: the pairs before the buffers that they use.
    connections: Connections<Client>,
    common: Common,
    /// An epoll instance that reports both the TCP connections and completions.
    poll: OwnedFd,
    is_armed: bool,
    polls: u32,
    /// Connections with frames to send.
    writing: Vec<Connected>,
    /// Connections that close when all their frames have arrived.
    leaving: Vec<Connected>,
    /// End of the pause in accepting, if the system has run out of descriptors.
    full_until: Option<Instant>,
}

/// State that the connections of a port share.
pub(crate) struct Common {
    // Dropped in this order: receive queue before buffers.
    receives: Arc<SharedReceives>,
    received: Buffers,
    pool: Pool,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
    domain: Arc<Domain>,
    here: Arc<Here>,
    abilities: Abilities,
    clients_max: usize,
    clients: usize,
    /// Number of each admitted client, by the number of its queue pair.
    numbers: BTreeMap<u32, u64>,
    /// Connection of each admitted client, by its number.
    known: BTreeMap<u64, Connected>,
    /// Number of clients admitted so far.
    admitted: u64,
    /// Completions that were fetched before a new pair was created.
    early: VecDeque<(u64, IbvWc)>,
    is_broken: bool,
}

pub(crate) struct Client {
    stream: TcpStream,
    hello: Vec<u8>,
    admitted: Option<Admitted>,
}

struct Admitted {
    number: u64,
    pair: Pair,
    sender: Sender,
}

impl VerbsPort {
    /// Creates `engines` ports at one address, one per engine. The system distributes connections among the ports.
    ///
    /// # Errors
    /// [`VerbsError`] says why the address cannot be served.
    pub fn bind(at: &VerbsAddress, engines: usize) -> Result<Vec<VerbsPort>, VerbsError> {
        let here = Arc::new(Here::open(&at.choice, None)?);
        if at.nic_atomics && !here.has_atomics() {
            return Err(VerbsError::NoAtomics(here.device.name.clone()));
        }
        let abilities = Abilities {
            nic_atomics: at.nic_atomics,
            whole_lines: here.device.capabilities().contains(farside_remote::Capabilities::WHOLE_LINES),
        };
        let address = at.address.or(here.address).unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let address = SocketAddr::new(address, at.port);
        let listen = |address, is_shared| crate::tcp::listen(address, is_shared);
        let listeners = bind_together(address, engines, listen, TcpListener::local_addr);
        let listeners =
            listeners.map_err(|error| VerbsError::Create("listen for the set-up of connections", error))?;
        listeners.into_iter().map(|listener| VerbsPort::new(listener, &here, abilities)).collect()
    }

    fn new(listener: TcpListener, here: &Arc<Here>, abilities: Abilities) -> Result<VerbsPort, VerbsError> {
        let refused = |errno: rustix::io::Errno| VerbsError::Create("watch connections", errno.into());
        let domain = Domain::new(&here.context)?;
        let channel = Channel::new(&here.context)?;
        let len = here.device.limits.max_cqe.min(COMPLETIONS);
        let completions = Completions::new(&channel, len)?;
        let receives = RECEIVES.min(here.device.limits.max_srq_wr);
        let shared = SharedReceives::new(&domain, receives)?;
        let received = Buffers::new(&domain, receives as usize, FRAME_MAX)?;
        for buffer in 0..receives {
            // SAFETY: the buffer was not posted yet, and is not used until its completion.
            unsafe { shared.post(RECEIVE | u64::from(buffer), received.piece(buffer, 0, FRAME_MAX)) }?;
        }
        let connections = Connections::new(&listener).map_err(refused)?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(refused)?;
        for (number, fd) in [(0, connections.fd()), (1, channel.as_fd())] {
            epoll::add(&poll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
                .map_err(refused)?;
        }
        let common = Common {
            receives: shared,
            received,
            pool: Pool::new(&domain, POOL, FRAME_MAX)?,
            completions,
            channel,
            domain,
            here: Arc::clone(here),
            abilities,
            clients_max: (len.saturating_sub(receives) / (SENDS + 1)) as usize,
            clients: 0,
            numbers: BTreeMap::new(),
            known: BTreeMap::new(),
            admitted: 0,
            early: VecDeque::new(),
            is_broken: false,
        };
        Ok(VerbsPort {
            listener,
            connections,
            common,
            poll,
            is_armed: true,
            polls: 0,
            writing: Vec::new(),
            leaving: Vec::new(),
            full_until: None,
        })
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system's error: the address cannot be queried.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Creates what gives clients of this port access to memory by the NIC; `None` if engines execute all chains.
    ///
    /// # Errors
    /// The device refuses.
    pub fn grants(&self) -> Result<Option<Grants>, VerbsError> {
        let Common { here, abilities, .. } = &self.common;
        abilities.has_lists().then(|| Grants::new(Arc::clone(here), *abilities)).transpose()
    }

    /// Accepts waiting connections, but only a few at a time, so that a crowd does not delay the existing ones.
    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_POLL {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() {
                        let client = Client { stream, hello: Vec::new(), admitted: None };
                        // A connection that cannot be added is closed.
                        let _added_or_closed = self.connections.enter(client, Some(peer.ip()));
                    }
                }
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

    /// Looks at the TCP connections: admits clients, and reports those that have closed.
    fn look(&mut self, take: &mut impl FnMut(Connected, Arrival<'_>)) -> bool {
        if self.full_until.is_some_and(|until| Instant::now() >= until) {
            self.full_until = None;
            self.connections.listen(&self.listener, true);
        }
        let known = &mut Vec::new();
        let polled = self.connections.receive(&mut self.common, |address, arrival| {
            if matches!(arrival, Arrival::HungUp) {
                known.push(address);
                take(address, arrival);
            }
        });
        for address in known {
            self.common.forget(*address);
        }
        if self.common.known.len() < self.common.clients {
            let common = &mut self.common;
            self.connections.each(|address, client| {
                if let Some(admitted) = &client.admitted {
                    common.known.insert(admitted.number, address);
                }
            });
            let Common { numbers, known, clients, .. } = &mut self.common;
            numbers.retain(|_, number| known.contains_key(number)); // Some may have closed at once.
            *clients = known.len();
        }
        if polled.has_waiting_client {
            self.accept();
        }
        polled.has_received || polled.has_waiting_client
    }

    /// Handles the completion of a request to or from the client with this number. Returns whether a frame arrived.
    fn complete(
        &mut self,
        number: Option<u64>,
        completion: &IbvWc,
        take: &mut impl FnMut(Connected, Arrival<'_>),
    ) -> Result<bool, VerbsError> {
        let address = number.and_then(|number| self.common.known.get(&number).copied());
        let common = &mut self.common;
        let is_receive = completion.wr_id & RECEIVE != 0;
        let is_good = completion.status == is::WC_SUCCESS;
        let mut has_frame = false;
        if is_receive {
            let buffer = (completion.wr_id & !RECEIVE) as u32;
            if let Some(address) = address
                && is_good
            {
                has_frame = true;
                // SAFETY: the receive has completed, so the device does not use the buffer until it is posted again.
                let frame =
                    unsafe { common.received.bytes(buffer, (completion.byte_len as usize).min(FRAME_MAX)) };
                take(address, Arrival::Datagram(frame));
            }
            // SAFETY: as above; the slice is gone.
            unsafe { common.receives.post(completion.wr_id, common.received.piece(buffer, 0, FRAME_MAX)) }?;
        }
        let Some(address) = address else { return Ok(has_frame) };
        if !is_good {
            self.connections.close(address);
            self.polls = POLLS_PER_LOOK; // So that the next poll reports it.
        } else if !is_receive
            && let Some(Client { admitted: Some(admitted), .. }) = self.connections.get(address)
        {
            admitted.sender.complete(&mut self.common.pool, completion.wr_id);
            self.writing.push(address); // Frames may have waited for space.
        }
        Ok(has_frame)
    }

    /// Sends the frames of a connection, as many as its pair accepts.
    fn write(&mut self, address: Connected) {
        let Some(Client { admitted: Some(admitted), .. }) = self.connections.get(address) else { return };
        let sent = admitted.sender.flush(&mut self.common.pool, &admitted.pair);
        if sent.is_err() || admitted.sender.overflow() > OUTBOX_MAX {
            self.connections.close(address);
            self.polls = POLLS_PER_LOOK;
        }
    }

    /// Closes the leaving connections whose frames have all arrived.
    fn close_leaving(&mut self) {
        let VerbsPort { connections, leaving, polls, .. } = self;
        leaving.retain(|&address| {
            let is_idle = match connections.get(address) {
                Some(Client { admitted: Some(admitted), .. }) => admitted.sender.is_idle(),
                _ => true,
            };
            if is_idle {
                connections.close(address);
                *polls = POLLS_PER_LOOK;
            }
            !is_idle
        });
    }
}

impl Common {
    /// Fetches all completions so far, each for the client that has the pair's number now.
    fn fetch_all(&mut self) {
        let mut found = [IbvWc::default(); COMPLETIONS_AT_ONCE];
        loop {
            match self.completions.poll(&mut found) {
                Ok(0) => return,
                Ok(count) => {
                    let numbers = &self.numbers;
                    let of = |wc: &IbvWc| (numbers.get(&wc.qp_num).copied().unwrap_or(0), *wc);
                    self.early.extend(found[..count].iter().map(of));
                }
                Err(_) => {
                    self.is_broken = true;
                    return;
                }
            }
        }
    }

    /// Forgets a client whose connection is closed.
    fn forget(&mut self, address: Connected) {
        let gone: Vec<u64> =
            self.known.iter().filter(|(_, of)| **of == address).map(|(number, _)| *number).collect();
        for number in gone {
            self.known.remove(&number);
            self.numbers.retain(|_, of| *of != number);
            self.clients -= 1;
        }
    }

    /// Connects a queue pair to the client's. Returns it with the node's description.
    fn admit(&mut self, theirs: &Description) -> Result<(Admitted, Description), String> {
        if self.clients >= self.clients_max {
            return Err(format!(
                "this engine has {} clients, the most that its RDMA device permits: end another first, or serve with \
                 more --engines",
                self.clients_max
            ));
        }
        self.fetch_all();
        let new = NewPair {
            sent: &self.completions,
            received: &self.completions,
            shared: Some(&self.receives),
            sends: SENDS,
            receives: 0,
            inline: INLINE,
        };
        let here = &self.here;
        let way = Way { mtu: here.way.mtu.min(theirs.mtu), ..here.way };
        let first = first_packet();
        let connect = || {
            let pair = Pair::new(&self.domain, &new)?;
            pair.begin(&way, 0)?;
            pair.connect(&way, first, 1, &theirs.end)?;
            Ok(pair)
        };
        let pair = connect().map_err(|error: VerbsError| format!("the node refuses: {error}"))?;
        let own = Description {
            end: here.end(pair.number(), first),
            mtu: way.mtu,
            frame: FRAME_MAX as u32,
            abilities: self.abilities,
        };
        self.admitted += 1;
        self.clients += 1;
        self.numbers.insert(pair.number(), self.admitted);
        Ok((Admitted { number: self.admitted, pair, sender: Sender::new(&self.pool, SENDS) }, own))
    }
}

impl Client {
    /// Receives the client's description, then connects a queue pair to its.
    fn greet(&mut self, common: &mut Common) -> Result<bool, Ended> {
        let mut bytes = [0; SIZE];
        let wanted = SIZE - self.hello.len();
        match (&self.stream).read(&mut bytes[..wanted]) {
            Ok(0) => return Err(Ended),
            Ok(count) => self.hello.extend_from_slice(&bytes[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(_) => return Err(Ended),
        }
        let Some(hello) = self.hello.first_chunk() else { return Ok(true) };
        let admitted = match Message::decode(hello) {
            Ok(Message::Hello(theirs)) => common.admit(&theirs),
            Ok(_) => Err("the node refuses: a client begins with a hello".to_owned()),
            Err(reason) => Err(format!("the node refuses: {reason}")),
        };
        match admitted {
            Ok((admitted, own)) => {
                self.admitted = Some(admitted);
                self.hello = Vec::new();
                // The socket's buffer is empty, so it takes the whole message.
                (&self.stream).write_all(&Message::Welcome(own).encode()).map(|()| true).map_err(|_| Ended)
            }
            Err(reason) => {
                // If the client does not read, it gets no reason.
                let _unheard = (&self.stream).write_all(&refusal(&reason));
                Err(Ended)
            }
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The TCP connection of a client. It carries no frames.
impl Connection for Client {
    type Common = Common;

    const ACTIVE_MIN: usize = 0;
    const ACTIVE_MAX: usize = 0;
    const POLLS_PER_EPOLL: u32 = 1;

    fn is_admitted(&self) -> bool {
        self.admitted.is_some()
    }

    fn read(&mut self, common: &mut Common, _take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        if self.admitted.is_none() {
            return self.greet(common);
        }
        match self.stream.peek(&mut [0]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            // The client has hung up. Or it sends something, which it does not after the set-up.
            _ => Err(Ended),
        }
    }

    fn send(&mut self, _frame: &[u8]) -> Result<(), Ended> {
        unreachable!("frames are sent by the queue pair")
    }

    fn flush(&mut self) -> Result<(), Ended> {
        Ok(())
    }

    fn has_sent_all(&self) -> bool {
        true
    }
}

impl Port for VerbsPort {
    type Address = Connected;

    const IS_RELIABLE: bool = true;

    fn datagram_max(&self) -> usize {
        FRAME_MAX
    }

    fn source(address: Connected) -> Option<IpAddr> {
        address.peer
    }

    fn receive(&mut self, mut take: impl FnMut(Connected, Arrival<'_>)) -> Result<bool, Broken> {
        let mut has_received = false;
        let early = std::mem::take(&mut self.common.early);
        for (number, completion) in &early {
            has_received |= self.complete(Some(*number), completion, &mut take)?;
        }
        let mut found = [IbvWc::default(); COMPLETIONS_AT_ONCE];
        let count = self.common.completions.poll(&mut found)?;
        for completion in &found[..count] {
            let number = self.common.numbers.get(&completion.qp_num).copied();
            has_received |= self.complete(number, completion, &mut take)?;
        }
        if self.common.is_broken {
            return Err(VerbsError::Lost("its completion queue is unusable").into());
        }
        if !self.writing.is_empty() {
            self.flush();
        }
        if !self.leaving.is_empty() {
            self.close_leaving();
        }
        self.polls += 1;
        if self.polls >= POLLS_PER_LOOK {
            self.polls = 0;
            if std::mem::take(&mut self.is_armed) {
                self.common.channel.take_events();
            }
            has_received |= self.look(&mut take);
        }
        Ok(has_received)
    }

    fn send(&mut self, to: Connected, frame: &[u8]) {
        if let Some(Client { admitted: Some(admitted), .. }) = self.connections.get(to) {
            admitted.sender.push(&mut self.common.pool, frame);
            if self.writing.last() != Some(&to) {
                self.writing.push(to);
            }
        }
    }

    fn flush(&mut self) {
        while let Some(address) = self.writing.pop() {
            self.write(address);
        }
    }

    fn connections(&self) -> usize {
        self.connections.len()
    }

    fn hang_up(&mut self, address: Connected) {
        self.write(address);
        self.leaving.push(address);
        self.close_leaving();
    }

    fn close_without_session(&mut self, known: impl Iterator<Item = Connected>) {
        self.connections.close_without_session(known, Instant::now());
        self.polls = POLLS_PER_LOOK;
    }

    fn dropped(&self) -> Dropped {
        Dropped::default() // A connection drops no frames: it closes.
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.poll.as_fd()
    }

    fn may_sleep(&mut self) -> bool {
        self.polls = POLLS_PER_LOOK; // So that the next poll asks epoll.
        self.is_armed = true;
        self.common.channel.take_events();
        if self.common.completions.arm().is_err() {
            return false; // The next poll reports why.
        }
        // A completion that came before the queue was armed is not reported.
        self.common.fetch_all();
        self.common.early.is_empty() && self.connections.may_sleep()
    }

    fn sleep_max(&self) -> Option<Duration> {
        self.full_until.map(|until| until.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_a_device_and_a_port() {
        let parsed = VerbsAddress::parse("rxe0:7470?gid=1&mtu=1024").expect("an address");
        let choice = Choice { device: Some("rxe0".into()), gid: Some(1), mtu: Some(1024) };
        assert_eq!(parsed, VerbsAddress { choice, port: 7470, address: None, nic_atomics: false });
        assert_eq!(parsed.to_string(), "verbs://rxe0:7470");
        assert_eq!(VerbsAddress::parse("mlx5_0").map(|at| at.port), Ok(PORT));
        let local = VerbsAddress::parse("rxe0:1?host=127.0.0.1&gid=1").expect("an address");
        assert_eq!(
            (local.address, local.is_open(), local.choice.gid),
            (Some(Ipv4Addr::LOCALHOST.into()), false, Some(1))
        );
        for wrong in ["", ":7460", "rxe0:x", "rxe0?gid", "rxe0?device=rxe1", "rxe0?host=rxe0"] {
            assert!(VerbsAddress::parse(wrong).is_err(), "{wrong}");
        }
        let bound = VerbsAddress { address: Some(Ipv4Addr::LOCALHOST.into()), ..parsed };
        assert_eq!((bound.to_string(), bound.is_open()), ("verbs://127.0.0.1:7470".into(), false));
    }
}
