//! The shm clients of a node: their sockets, their processes, and their outstanding requests.
//!
//! Invariant: a session ends only when its client says so or the client's process has exited. A client that only closes
//! its socket may still run chains on the memory that it has mapped. Exception: a client that never read its welcome
//! never received the memory, so its session ends when it hangs up.
//! Invariant: a client whose rings the node does not poll rings the node's bell when it writes to them, since the node
//! has requested this in the rings.

use super::Options;
use crate::node::Ticket;
use farside_fabrics::memory::{Mapping, MappingError};
use farside_fabrics::shm::calls::{Calls, Inbox, Rings, Said};
use farside_fabrics::shm::frame::{self, FrameHeader, Greeting, Hello};
use farside_fabrics::shm::peer::peer;
use farside_fabrics::shm::{NAME_MAX, is_stopped};
use farside_fabrics::socket::{ListenError, Listener};
use farside_fabrics::timer::timespec;
use farside_remote::arena::session::SessionId;
use farside_remote::control::Answer;
use farside_remote::fabric::{CALL_BYTES_MAX, ServiceId};
use rustix::event::{EventfdFlags, epoll};
use rustix::net::RecvFlags;
use rustix::process::{PidfdFlags, Signal};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reason why a node could not be started. A failed start leaves nothing behind.
#[derive(Debug)]
pub enum BindError {
    /// Another node serves at this path. Its pid, if known.
    Served(PathBuf, Option<u32>),
    /// The path exists and is not a node's socket.
    InTheWay(PathBuf),
    /// The path is too long for a unix socket.
    Name(PathBuf),
    /// The system refused an action on the socket: the action, the path, and the system's error.
    Socket(&'static str, PathBuf, std::io::Error),
    /// The system refused another resource: the action, and the system's error.
    System(&'static str, std::io::Error),
    /// The system refused to listen at the admin server's address: the address, and the system's error.
    Admin(std::net::SocketAddr, std::io::Error),
    /// The system refused to listen at an engines' url: the url, and the system's error.
    Listen(String, std::io::Error),
    /// An engine could not be started, for this reason.
    Engine(String),
    /// The admin server at this address would be open to the network without a token.
    NoToken(std::net::SocketAddr),
    /// Engines at this url would be open to the network without tokens.
    NoTokens(String),
    /// Clients of the memory's old node are still alive. Their pids.
    OldClients(Vec<u32>),
    /// This process itself is a client of the memory's old node.
    OwnClients,
    /// The memory's contents cannot be served, for this reason.
    TakeOver(String),
    /// The logs in this folder cannot be used, for this reason.
    Log(PathBuf, String),
}

impl std::fmt::Display for BindError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BindError::Served(path, pid) => write!(
                f,
                "a node{} serves at {} already: use it, stop it, or serve elsewhere by --socket",
                pid.map_or_else(String::new, |pid| format!(", pid {pid},")),
                path.display()
            ),
            BindError::InTheWay(path) => write!(
                f,
                "{} exists and is not a node's socket: remove it, or serve elsewhere by --socket",
                path.display()
            ),
            BindError::Name(path) => write!(
                f,
                "invalid socket path {}: it has {} bytes and at most {NAME_MAX} are allowed; give a shorter --socket",
                path.display(),
                path.as_os_str().len()
            ),
            BindError::Socket(doing, path, error) => {
                write!(f, "could not {doing} {}: {error}; serve elsewhere by --socket", path.display())
            }
            BindError::Admin(address, error) => {
                write!(f, "could not serve HTTP at {address}: {error}; choose another address with --admin")
            }
            BindError::Listen(url, error) => {
                write!(f, "could not listen at {url}: {error}; choose another address with --listen")
            }
            BindError::Engine(reason) => write!(f, "could not start an engine: {reason}"),
            BindError::NoToken(address) => write!(
                f,
                "{address} is open to other machines: give a token with --admin-token-file, or a loopback address \
                 such as 127.0.0.1:7400"
            ),
            BindError::NoTokens(url) => write!(
                f,
                "{url} is open to other machines: restrict access with --tokens ('farside token new' creates one), or \
                 listen at a loopback address such as 127.0.0.1:7460"
            ),
            BindError::OldClients(pids) => write!(
                f,
                "process {} was a client of the node that served this memory before, and may still write to it: have \
                 it drop its clients of that node, or end it, or serve with --evict to have it killed",
                pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
            ),
            BindError::OwnClients => f.write_str(
                "this process is a client of the node that served this memory before, and may still write to it: drop \
                 its clients of that node first",
            ),
            BindError::Log(folder, reason) => {
                write!(f, "the stores of --log-dir {} cannot be served: {reason}", folder.display())
            }
            BindError::TakeOver(reason) => write!(f, "the memory's stores cannot be served: {reason}"),
            BindError::System(doing, error) => write!(f, "could not {doing}: {error}"),
        }
    }
}

impl std::error::Error for BindError {}

impl From<ListenError> for BindError {
    fn from(error: ListenError) -> BindError {
        match error {
            ListenError::Served(path, pid) => BindError::Served(path, pid),
            ListenError::InTheWay(path) => BindError::InTheWay(path),
            ListenError::Name(path) => BindError::Name(path),
            ListenError::System(doing, path, error) => BindError::Socket(doing, path, error),
        }
    }
}

/// An event that the host must handle for a client.
pub(super) enum Event {
    /// The client requests a session.
    Greeted { pid: u32 },
    /// The client calls a service.
    Asked { session: SessionId, service: ServiceId, request: Vec<u8> },
    /// The client runs no more chains.
    Ended { session: SessionId, is_clean: bool },
    /// The client has hung up, and no longer waits for these responses.
    Left { tickets: BTreeSet<Ticket> },
}

/// The host's reaction to an event.
pub(super) enum Reaction {
    Welcome {
        session: SessionId,
        incarnation: u64,
        memory: Arc<Mapping>,
    },
    Refuse(String),
    /// The response of the called service, or its refusal.
    Answer(Result<Vec<u8>, String>),
    /// The client waits for the node's response to this ticket.
    Wait(Ticket),
    Nothing,
}

/// All shm clients, and the socket at which new clients connect.
pub(super) struct Clients {
    poll: OwnedFd,
    listener: Option<Listener>,
    /// Spare descriptor. If no other descriptor is free, it is closed so that a client can be accepted and refused.
    spare: Option<OwnedFd>,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    /// Numbers of the clients that may not have sent a hello yet, with their times of arrival, the oldest first.
    newcomers: VecDeque<(Instant, u64)>,
    /// Whether the last new client was not admitted for lack of resources.
    is_full: bool,
    waiting: BTreeMap<Ticket, (u64, FrameHeader)>,
    evict_stopped_after: Option<Duration>,
    /// Pids of stopped processes that reclamation waits for, with the time when the node first saw each one stopped.
    stopped: BTreeMap<u32, Instant>,
    /// Numbers of the clients that had unread requests at the last poll.
    eager: Vec<u64>,
    greeting: Vec<u8>,
    inbox: Inbox,
}

struct Client {
    /// The connection; `None` once the client has hung up.
    line: Option<Line>,
    pidfd: OwnedFd,
    pid: u32,
    session: Option<Session>,
    /// Number of outstanding requests.
    asked: u32,
}

/// The connection to a client.
enum Line {
    /// A connection over which the client has not sent a hello yet.
    New(OwnedFd),
    Welcomed(Calls),
}

struct Session {
    id: SessionId,
    /// Whether the client has sent a message after its welcome, so that it may have mapped the memory.
    has_spoken: bool,
}

// An epoll token consists of a client's number and an index that shows which of its descriptors is ready. No client has
// number 0.
const TOKENS: u64 = 2;
const SOCKET: u64 = 0;
const PIDFD: u64 = 1;
const LISTENER: u64 = 0;
/// Index of this process's own eventfd, in a token with number 0.
const OWN_BELL: u64 = 1;

const fn token(client: u64, descriptor: u64) -> epoll::EventData {
    epoll::EventData::new_u64(client * TOKENS + descriptor)
}

/// Maximum number of messages read from one client's socket before other clients are served; requests in rings do not
/// count. The number exceeds the capacity of a socket, so the client's last message is always read.
const WORDS_AT_A_TIME: usize = 512;
/// Maximum time for a client to send a hello.
const HELLO_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of outstanding requests of one client.
const ASKED_MAX: u32 = 256;
/// Events to wait for at the eventfd. Edge-triggered: epoll reports each write, so the eventfd's counter need not be
/// read.
const BELL_EVENTS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);
/// Maximum size of a refusal's reason in bytes. A limit is needed because a reason may contain parts of the request.
const REASON_MAX: usize = 4096;
/// Pause before the next accept if closing the spare descriptor does not help either.
const FULL_PAUSE: Duration = Duration::from_millis(2);

impl Clients {
    pub(super) fn new(bell: &OwnedFd, options: Options) -> Result<Clients, BindError> {
        let system = |doing| move |errno: rustix::io::Errno| BindError::System(doing, errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create an epoll"))?;
        epoll::add(&poll, bell, token(0, OWN_BELL), BELL_EVENTS).map_err(system("watch the eventfd"))?;
        let spare = new_bell().map_err(system("reserve a descriptor"))?;
        let listener = options.socket.as_deref().map(Listener::bind).transpose()?;
        if let Some(listener) = &listener {
            epoll::add(&poll, listener, token(0, LISTENER), epoll::EventFlags::IN)
                .map_err(system("watch the socket"))?;
        }
        Ok(Clients {
            poll,
            listener,
            spare: Some(spare),
            clients: BTreeMap::new(),
            next_client: 0,
            newcomers: VecDeque::new(),
            is_full: false,
            waiting: BTreeMap::new(),
            evict_stopped_after: options.evict_stopped_after,
            stopped: BTreeMap::new(),
            eager: Vec::new(),
            greeting: Vec::new(),
            inbox: Inbox::new(),
        })
    }

    /// Waits at most `wait` for events, and passes them to `react`. Returns true if the eventfd was rung, or a client
    /// wants memory.
    pub(super) fn wait(&mut self, wait: Duration, mut react: impl FnMut(Event) -> Reaction) -> bool {
        let timeout = timespec(if self.eager.is_empty() { wait } else { Duration::ZERO });
        let mut events = Vec::with_capacity(64);
        let waited = epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout));
        if waited.is_err() {
            return false; // Interrupted: the caller calls again.
        }
        let mut rung = false;
        for event in events {
            let (client, descriptor) = (event.data.u64() / TOKENS, event.data.u64() % TOKENS);
            match (client, descriptor) {
                (0, OWN_BELL) => rung = true,
                (0, _) => self.accept(),
                (_, SOCKET) => rung |= self.on_socket(client, &mut react),
                _ => self.on_exit(client, &mut react),
            }
        }
        for id in std::mem::take(&mut self.eager) {
            self.read(id, &mut react);
        }
        self.send_off_silent(&mut react);
        rung
    }

    /// Hangs up on clients that have not sent a hello in time.
    fn send_off_silent(&mut self, react: &mut impl FnMut(Event) -> Reaction) {
        while let Some(&(since, id)) = self.newcomers.front()
            && since.elapsed() >= HELLO_WAIT
        {
            self.newcomers.pop_front();
            if self.clients.get(&id).is_some_and(|client| client.session.is_none()) {
                self.hang_up(id, react);
            }
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok(socket) => match self.admit(&socket) {
                Ok((pid, pidfd)) => {
                    self.is_full = false;
                    let id = self.next_client;
                    let line = Some(Line::New(socket));
                    self.clients.insert(id, Client { line, pidfd, pid, session: None, asked: 0 });
                    self.newcomers.push_back((Instant::now(), id));
                }
                Err(NotAdmitted::Gone) => {}
                Err(NotAdmitted::Refused(reason)) => refuse(&socket, &reason),
                Err(NotAdmitted::Full(errno)) => {
                    self.note_full(errno);
                    refuse(&socket, &out_of_resources(errno));
                }
            },
            Err(errno) if is_out_of_resources(errno) => {
                drop(self.spare.take());
                match listener.accept() {
                    Ok(socket) => refuse(&socket, &out_of_resources(errno)),
                    // The client stays in the queue, and epoll would return at once again and again.
                    Err(_) => std::thread::sleep(FULL_PAUSE),
                }
                self.spare = new_bell().ok(); // Without one, the next client waits in the queue, without a refusal.
                self.note_full(errno);
            }
            Err(_) => {} // The client has hung up already.
        }
    }

    /// Identifies a new client, and watches it.
    fn admit(&mut self, socket: &OwnedFd) -> Result<(u32, OwnedFd), NotAdmitted> {
        let peer = peer(socket)?;
        if peer.user != rustix::process::geteuid().as_raw() {
            return Err(NotAdmitted::Refused(
                "this node serves the user that started it: run your client as that user".into(),
            ));
        }
        let Some(pid) = peer.pid else {
            return Err(NotAdmitted::Refused(
                "your process is in a pid namespace that this node does not see, and so could not learn of its end: \
                 run both in the same pid namespace"
                    .into(),
            ));
        };
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        self.next_client += 1;
        let id = self.next_client;
        epoll::add(&self.poll, socket, token(id, SOCKET), epoll::EventFlags::IN)?;
        epoll::add(&self.poll, &pidfd, token(id, PIDFD), epoll::EventFlags::IN)?;
        Ok((pid.as_raw_nonzero().get() as u32, pidfd))
    }

    /// Logs that a client was not admitted. Logs this only once until a client is admitted again.
    fn note_full(&mut self, errno: rustix::io::Errno) {
        if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(
                "no further client is admitted for now ({errno}): raise 'ulimit -n', or end a client"
            );
        }
    }

    /// Reads a client's socket. Returns true if the client wants memory.
    fn on_socket(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) -> bool {
        let mut wants_memory = false;
        for _ in 0..WORDS_AT_A_TIME {
            let Some(client) = self.clients.get_mut(&id) else { return false };
            let calls = match &client.line {
                Some(Line::Welcomed(calls)) => calls,
                Some(Line::New(_)) => {
                    self.on_greeting(id, react);
                    return false;
                }
                None => return false,
            };
            let Some(said) = calls.hear() else { break };
            if said == Said::ClosedPipe {
                self.end_unwelcomed(id, react);
                continue;
            }
            if said == Said::HungUp {
                // Read the client's last requests, although it no longer waits for most of the responses.
                self.read(id, react);
                self.hang_up(id, react);
                return wants_memory;
            }
            if let Some(session) = &mut client.session {
                session.has_spoken = true;
            }
            if said == Said::Bye {
                self.read(id, react);
                self.end(id, true, react);
                self.hang_up(id, react);
                return wants_memory;
            }
            wants_memory |= said == Said::Wanted;
        }
        self.read(id, react);
        wants_memory
    }

    /// Reads and handles a client's requests.
    fn read(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        let Some(Line::Welcomed(calls)) = self.clients.get(&id).and_then(|client| client.line.as_ref())
        else {
            return;
        };
        let mut asked = Vec::new();
        let received = calls.receive(&mut self.inbox, |frame| asked.push(frame.to_vec()));
        for frame in asked {
            self.on_call(id, &frame, react);
        }
        // The rings contain data that no correct client writes: hang up.
        if received.is_err() {
            return self.hang_up(id, react);
        }
        self.rest(id);
    }

    /// Makes sure that the client rings the bell from now on, or that it is polled again soon.
    fn rest(&mut self, id: u64) {
        if let Some(Line::Welcomed(calls)) = self.clients.get(&id).and_then(|client| client.line.as_ref())
            && !calls.rests()
            && !self.eager.contains(&id)
        {
            self.eager.push(id);
        }
    }

    /// Ends the session of a client that runs no more chains.
    fn end(&mut self, id: u64, is_clean: bool, react: &mut impl FnMut(Event) -> Reaction) {
        if let Some(session) = self.clients.get_mut(&id).and_then(|client| client.session.take()) {
            react(Event::Ended { session: session.id, is_clean });
        }
    }

    /// Handles a client that hung up with unread messages. If the welcome is the only message sent to the client, the
    /// welcome is unread: the client never had the memory, so its session ends.
    fn end_unwelcomed(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        let session = self.clients.get(&id).and_then(|client| client.session.as_ref());
        if session.is_some_and(|session| !session.has_spoken) {
            self.end(id, true, react);
        }
    }

    /// Handles a new client's hello.
    fn on_greeting(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(Line::New(socket)) = &client.line else { return };
        let mut uninvited = Vec::new(); // Descriptors that a client sends are closed unused.
        let greeted =
            match frame::receive(socket.as_fd(), &mut self.greeting, &mut uninvited, RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Ok(Some(hello)) => greet(hello).map_err(NotAdmitted::Refused),
                Ok(None) | Err(_) => Err(NotAdmitted::Gone),
            };
        match greeted.and_then(|()| welcome(client.pid, socket, react)) {
            Ok((id, rings)) => {
                client.session = Some(Session { id, has_spoken: false });
                if let Some(Line::New(socket)) = client.line.take() {
                    client.line = Some(Line::Welcomed(Calls::of_node(socket, rings)));
                }
            }
            Err(refused) => {
                match refused {
                    NotAdmitted::Gone => {}
                    NotAdmitted::Refused(reason) => refuse(socket, &reason),
                    NotAdmitted::Full(errno) => {
                        refuse(socket, &out_of_resources(errno));
                        self.note_full(errno);
                    }
                }
                return self.hang_up(id, react);
            }
        }
        self.rest(id);
    }

    fn on_call(&mut self, id: u64, frame: &[u8], react: &mut impl FnMut(Event) -> Reaction) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(Line::Welcomed(calls)) = &client.line else { return };
        // Only a client whose session has ended unwelcomed, and that no correct client is, has none.
        let Some(session) = &mut client.session else { return self.hang_up(id, react) };
        session.has_spoken = true;
        let session = session.id;
        let Some((header, request)) = frame::parse(frame) else { return self.hang_up(id, react) };
        if client.asked >= ASKED_MAX {
            let reason = format!("{ASKED_MAX} requests of this client are outstanding: wait for a response");
            return answer(calls, *header, Err(reason));
        }
        let service = ServiceId(header.service.get());
        match react(Event::Asked { session, service, request: request.to_vec() }) {
            Reaction::Wait(ticket) => {
                client.asked += 1;
                self.waiting.insert(ticket, (id, *header));
            }
            Reaction::Answer(answered) => answer(calls, *header, answered),
            Reaction::Refuse(reason) => answer(calls, *header, Err(reason)),
            Reaction::Welcome { .. } | Reaction::Nothing => unreachable!("a request gets a response"),
        }
    }

    /// Closes the connection to a client. A client without a session is removed now, any other client when its process
    /// exits. Outstanding responses to the client are dropped.
    fn hang_up(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.line = None;
        if std::mem::take(&mut client.asked) > 0 {
            let of_it = self.waiting.iter().filter(|(_, (client, _))| *client == id);
            let tickets: BTreeSet<Ticket> = of_it.map(|(&ticket, _)| ticket).collect();
            self.waiting.retain(|ticket, _| !tickets.contains(ticket));
            react(Event::Left { tickets });
        }
        if client.session.is_none() {
            self.clients.remove(&id);
        }
    }

    fn on_exit(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        // Its last messages may still be unread.
        self.on_socket(id, react);
        self.hang_up(id, react);
        if let Some(client) = self.clients.get(&id)
            && client.session.is_some()
        {
            tracing::info!(
                pid = client.pid,
                "a client exited without ending its session; a scan will look for its buffers"
            );
            self.end(id, false, react);
        }
        self.clients.remove(&id);
    }

    /// Sends a response to the client that waits for it.
    pub(super) fn answer(&mut self, ticket: Ticket, answered: Result<Answer, String>) {
        self.answer_call(ticket, answered.map(|answer| serde_json::to_vec(&answer).expect("plain data")));
    }

    /// Sends the response of a store's service to the client that waits for it.
    pub(super) fn answer_call(&mut self, ticket: Ticket, answered: Result<Vec<u8>, String>) {
        if let Some((id, header)) = self.waiting.remove(&ticket)
            && let Some(client) = self.clients.get_mut(&id)
            && let Some(Line::Welcomed(calls)) = &client.line
        {
            client.asked -= 1;
            answer(calls, header, answered);
            self.rest(id);
        }
    }

    /// Returns the processes in `delaying` that are stopped; `delaying` lists those that delay reclamation. Logs each
    /// stopped process once, and kills those stopped for longer than allowed.
    pub(super) fn watch_stopped(&mut self, delaying: &[u32]) -> Vec<u32> {
        let now = Instant::now();
        let stopped: Vec<u32> = delaying.iter().copied().filter(|&pid| is_stopped(pid)).collect();
        self.stopped.retain(|pid, _| stopped.contains(pid));
        for &pid in &stopped {
            let since = *self.stopped.entry(pid).or_insert_with(|| {
                tracing::warn!(
                    pid,
                    "a client is stopped during an operation: newly retired buffers are not reused until it continues"
                );
                now
            });
            if self.evict_stopped_after.is_some_and(|allowed| now - since >= allowed) {
                self.evict(pid);
            }
        }
        stopped
    }

    fn evict(&self, pid: u32) {
        if let Some(client) = self.clients.values().find(|client| client.pid == pid) {
            tracing::warn!(pid, "killing a client that was stopped for too long");
            // The session ends only when the pidfd reports the process's exit.
            let _gone_already = rustix::process::pidfd_send_signal(&client.pidfd, Signal::KILL);
        }
    }

    /// Closes the socket and all connections.
    pub(super) fn close(&mut self) {
        self.listener = None;
        self.clients.clear();
    }
}

/// Reason why a connecting process was not admitted.
enum NotAdmitted {
    /// The process has hung up.
    Gone,
    /// The node does not serve the process, for this reason.
    Refused(String),
    /// The node is out of resources: the system's error.
    Full(rustix::io::Errno),
}

impl From<rustix::io::Errno> for NotAdmitted {
    fn from(errno: rustix::io::Errno) -> NotAdmitted {
        match errno {
            rustix::io::Errno::SRCH => NotAdmitted::Gone,
            errno => NotAdmitted::Full(errno),
        }
    }
}

fn is_out_of_resources(errno: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

fn new_bell() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

impl From<MappingError> for NotAdmitted {
    fn from(error: MappingError) -> NotAdmitted {
        let errno = match &error {
            MappingError::Io { source, .. } => rustix::io::Errno::from_io_error(source),
            _ => None,
        };
        match errno {
            Some(errno) => NotAdmitted::Full(errno),
            None => {
                NotAdmitted::Refused(format!("the node could not create rings for another client: {error}"))
            }
        }
    }
}

/// Opens a session for a client in process `pid`, and sends it the memory and its own rings.
fn welcome(
    pid: u32,
    socket: &OwnedFd,
    react: &mut impl FnMut(Event) -> Reaction,
) -> Result<(SessionId, Rings), NotAdmitted> {
    let (rings, rings_fd) = Rings::make()?;
    let (session, incarnation, memory) = match react(Event::Greeted { pid }) {
        Reaction::Welcome { session, incarnation, memory } => (session, incarnation, memory),
        Reaction::Refuse(reason) => return Err(NotAdmitted::Refused(reason)),
        Reaction::Wait(_) | Reaction::Answer(_) | Reaction::Nothing => {
            unreachable!("a greeting is welcomed or refused")
        }
    };
    let SessionId { slot, number } = session;
    let greeting = Greeting::Welcome { slot, number, incarnation };
    let greeting = serde_json::to_vec(&greeting).expect("plain data");
    if frame::send(socket.as_fd(), &greeting, &[], &[memory.fd(), rings_fd.as_fd()]).is_err() {
        // The client never received the memory, so it runs no chains.
        react(Event::Ended { session, is_clean: true });
        return Err(NotAdmitted::Gone);
    }
    Ok((session, rings))
}

fn greet(bytes: &[u8]) -> Result<(), String> {
    let hello: Hello = serde_json::from_slice(bytes)
        .map_err(|_| "the greeting is not understood: connect with a farside client".to_owned())?;
    if hello.magic != frame::MAGIC || hello.version != frame::VERSION {
        return Err(format!(
            "the client speaks {} version {}, the node {} version {}: use the same release on both sides, and the \
             url that the node names",
            hello.magic.escape_debug(),
            hello.version,
            frame::MAGIC,
            frame::VERSION
        ));
    }
    Ok(())
}

fn refuse(socket: &OwnedFd, reason: &str) {
    let refusal = serde_json::to_vec(&Greeting::Refusal(cut(reason.to_owned()))).expect("plain data");
    // A client that does not read misses the reason.
    let _unheard = frame::send(socket.as_fd(), &refusal, &[], &[]);
}

fn answer(calls: &Calls, mut header: FrameHeader, answered: Result<Vec<u8>, String>) {
    let (status, body) = match answered {
        Ok(body) if body.len() <= CALL_BYTES_MAX => (frame::ANSWERED, body),
        Ok(body) => (
            frame::REFUSED,
            format!(
                "the response has {} bytes, and a call carries at most {CALL_BYTES_MAX}: request less",
                body.len()
            )
            .into_bytes(),
        ),
        Err(reason) => (frame::REFUSED, cut(reason).into_bytes()),
    };
    header.status = status.into();
    // A client that does not read its responses, or corrupts its rings, loses these responses and runs into its own
    // deadline.
    let _unread = calls.send(header, &body);
}

/// Truncates a reason, which may contain parts of the request, since a frame's size is limited.
fn cut(mut reason: String) -> String {
    if reason.len() > REASON_MAX {
        let end = (0..=REASON_MAX).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        reason.truncate(end);
        reason.push('…');
    }
    reason
}

fn out_of_resources(errno: rustix::io::Errno) -> String {
    format!("the node has no room for one more client ({errno}): end another first, or raise its 'ulimit -n'")
}
