//! The shm clients of a node: their sockets, their processes, and what each is waiting for.
//!
//! Invariant: a session ends when its client says so or its process has ended, and by nothing else: a client that
//! hangs up without a word may still be running chains on the memory that it has mapped.

use super::Options;
use crate::node::Ticket;
use farside_fabrics::memory::Mapping;
use farside_fabrics::shm::frame::{self, FrameHeader, Greeting, Hello};
use farside_fabrics::shm::{NAME_MAX, is_stopped};
use farside_remote::arena::session::SessionId;
use farside_remote::control::Answer;
use farside_remote::fabric::{CALL_BYTES_MAX, ServiceId};
use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::process::{PidfdFlags, Signal};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Why a node cannot be served. Nothing is left behind.
#[derive(Debug)]
pub enum BindError {
    /// Another node serves there, by this process if it is known.
    Served(PathBuf, Option<u32>),
    /// Something that is no node's socket is in the way.
    InTheWay(PathBuf),
    /// No socket can have that name.
    Name(PathBuf),
    /// The system refuses the socket.
    Socket(&'static str, PathBuf, std::io::Error),
    /// The system refuses something else.
    System(&'static str, std::io::Error),
    /// The system refuses the admin face.
    Admin(std::net::SocketAddr, std::io::Error),
    /// The admin face would be open to the network.
    NoToken(std::net::SocketAddr),
    /// Processes that were clients of the memory's old node are alive.
    OldClients(Vec<u32>),
    /// What the memory holds cannot be served.
    TakeOver(String),
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
                "{} exists and is no node's socket: remove it, or serve elsewhere by --socket",
                path.display()
            ),
            BindError::Name(path) => write!(
                f,
                "no socket can be called {}: its name has {} bytes and at most {NAME_MAX} are possible; give a \
                 shorter --socket",
                path.display(),
                path.as_os_str().len()
            ),
            BindError::Socket(doing, path, error) => {
                write!(f, "could not {doing} {}: {error}; serve elsewhere by --socket", path.display())
            }
            BindError::Admin(address, error) => {
                write!(f, "could not show the node at {address}: {error}; choose another address by --admin")
            }
            BindError::NoToken(address) => write!(
                f,
                "{address} is open to other machines: give a token by --admin-token-file, or an address of this \
                 machine alone, such as 127.0.0.1:7400"
            ),
            BindError::OldClients(pids) => write!(
                f,
                "process {} was a client of the node that served this memory before, and may still write to it: end \
                 it, or serve with --evict to have it killed",
                pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
            ),
            BindError::TakeOver(reason) => write!(f, "the memory's stores cannot be served: {reason}"),
            BindError::System(doing, error) => write!(f, "could not {doing}: {error}"),
        }
    }
}

impl std::error::Error for BindError {}

/// What a client did.
pub(super) enum Event {
    /// It wants a session.
    Greeted { pid: u32 },
    /// It calls a service.
    Asked { service: ServiceId, request: Vec<u8> },
    /// It runs no more chains.
    Ended { session: SessionId, said_so: bool },
}

/// What to do about it.
pub(super) enum Reaction {
    Welcome {
        session: SessionId,
        incarnation: u64,
        memory: Arc<Mapping>,
    },
    Refuse(String),
    /// The answer to this ticket is for that client.
    Wait(Ticket),
    Nothing,
}

/// All clients, and the socket at which new ones arrive.
pub(super) struct Clients {
    poll: OwnedFd,
    listener: Option<Listener>,
    bell: OwnedFd,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    /// Those who may not have said hello yet, the eldest first.
    newcomers: VecDeque<(Instant, u64)>,
    /// There was no descriptor for the last one who came.
    is_full: bool,
    waiting: BTreeMap<Ticket, (u64, FrameHeader)>,
    evict_stopped_after: Option<Duration>,
    /// Since when a process was seen stopped while memory waits for it.
    stopped: BTreeMap<u32, Instant>,
    buffer: Vec<u8>,
}

struct Client {
    /// Nothing once it has hung up.
    socket: Option<OwnedFd>,
    pidfd: OwnedFd,
    pid: u32,
    session: Option<SessionId>,
    /// Its questions that wait for an answer.
    asked: u32,
}

struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and number of the socket's file: another node's may come to stand at the same path.
    file: (u64, u64),
}

// What the poll answers: who, and which of its descriptors.
const BELL: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CLIENT: u64 = 1;

const fn socket_token(client: u64) -> u64 {
    client * 2
}

const fn pidfd_token(client: u64) -> u64 {
    client * 2 + 1
}

const BACKLOG: i32 = 128;
/// Frames read from one client before the others have their turn.
const FRAMES_AT_A_TIME: usize = 16;
/// How long a client may take to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(1);
/// Questions of one client that may wait for an answer.
const ASKED_MAX: u32 = 256;
/// The most bytes of a reason for refusing: what was asked may be in it.
const REASON_MAX: usize = 4096;
/// How long nobody is let in once there was no descriptor for the last one.
const FULL_PAUSE: Duration = Duration::from_millis(2);

impl Clients {
    pub(super) fn new(bell: &OwnedFd, options: Options) -> Result<Clients, BindError> {
        let system = |doing| move |errno: rustix::io::Errno| BindError::System(doing, errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("make a poll"))?;
        let bell = bell.try_clone().map_err(|error| BindError::System("share the bell", error))?;
        epoll::add(&poll, &bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)
            .map_err(system("watch the bell"))?;
        let listener = options.socket.map(listen).transpose()?;
        if let Some(Listener { socket, .. }) = &listener {
            epoll::add(&poll, socket, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)
                .map_err(system("watch the socket"))?;
        }
        Ok(Clients {
            poll,
            listener,
            bell,
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            newcomers: VecDeque::new(),
            is_full: false,
            waiting: BTreeMap::new(),
            evict_stopped_after: options.evict_stopped_after,
            stopped: BTreeMap::new(),
            buffer: Vec::new(),
        })
    }

    /// Waits at most so long for something to happen, and tells what did. True if the bell rang.
    pub(super) fn wait(&mut self, wait: Duration, mut react: impl FnMut(Event) -> Reaction) -> bool {
        let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut events = Vec::with_capacity(64);
        let waited = epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout));
        if waited.is_err() {
            return false; // Interrupted: the caller comes again.
        }
        let mut rung = false;
        for event in events {
            match event.data.u64() {
                BELL => {
                    let mut count = [0; 8];
                    rung |= rustix::io::read(&self.bell, &mut count).is_ok();
                }
                LISTENER => self.accept(),
                token if token % 2 == 0 => self.on_socket(token / 2, &mut react),
                token => self.on_exit(token / 2, &mut react),
            }
        }
        self.send_off_silent();
        rung
    }

    /// Hangs up on those who came and said nothing.
    fn send_off_silent(&mut self) {
        while let Some(&(since, id)) = self.newcomers.front()
            && since.elapsed() >= HELLO_WAIT
        {
            self.newcomers.pop_front();
            if self.clients.get(&id).is_some_and(|client| client.session.is_none()) {
                self.hang_up(id);
            }
        }
    }

    fn accept(&mut self) {
        use rustix::io::Errno;
        let Some(Listener { socket: listener, .. }) = &self.listener else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                if !std::mem::replace(&mut self.is_full, true) {
                    tracing::warn!(
                        "nobody more is let in for now ({errno}): raise 'ulimit -n', or end a client"
                    );
                }
                // It stays in line, so that the poll would answer at once, for ever.
                return std::thread::sleep(FULL_PAUSE);
            }
            Err(_) => return, // It is gone already.
        };
        self.is_full = false;
        let admitted = sockopt::socket_peercred(&socket).and_then(|peer| {
            let pidfd = rustix::process::pidfd_open(peer.pid, PidfdFlags::empty())?;
            Ok((peer, pidfd))
        });
        let (peer, pidfd) = match admitted {
            Ok(admitted) => admitted,
            Err(Errno::SRCH) => return, // It is gone already.
            Err(errno) => return refuse(&socket, &no_room(errno)),
        };
        if peer.uid != rustix::process::geteuid() {
            refuse(&socket, "this node serves the user that started it: run your client as that user");
            return;
        }
        self.next_client += 1;
        let id = self.next_client;
        let watched = epoll::add(
            &self.poll,
            &socket,
            epoll::EventData::new_u64(socket_token(id)),
            epoll::EventFlags::IN,
        )
        .and_then(|()| {
            let data = epoll::EventData::new_u64(pidfd_token(id));
            epoll::add(&self.poll, &pidfd, data, epoll::EventFlags::IN)
        });
        if let Err(errno) = watched {
            return refuse(&socket, &no_room(errno));
        }
        let pid = peer.pid.as_raw_nonzero().get() as u32;
        self.clients.insert(id, Client { socket: Some(socket), pidfd, pid, session: None, asked: 0 });
        self.newcomers.push_back((Instant::now(), id));
    }

    fn on_socket(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        for _ in 0..FRAMES_AT_A_TIME {
            let Some(client) = self.clients.get_mut(&id) else { return };
            let Some(socket) = &client.socket else { return };
            let mut uninvited = Vec::new(); // Descriptors that a client sends are closed unseen.
            match frame::receive(socket.as_fd(), &mut self.buffer, &mut uninvited, RecvFlags::DONTWAIT) {
                Ok(Some(bytes)) => {
                    let bytes = bytes.to_vec();
                    self.on_frame(id, &bytes, react);
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Ok(None) | Err(_) => return self.hang_up(id),
            }
        }
    }

    fn on_frame(&mut self, id: u64, bytes: &[u8], react: &mut impl FnMut(Event) -> Reaction) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(socket) = &client.socket else { return };
        let Some(session) = client.session else {
            match greet(bytes).map(|()| react(Event::Greeted { pid: client.pid })) {
                Ok(Reaction::Welcome { session, incarnation, memory }) => {
                    let SessionId { slot, number } = session;
                    let welcome = Greeting::Welcome { slot, number, incarnation };
                    let welcome = serde_json::to_vec(&welcome).expect("plain data");
                    client.session = Some(session);
                    let fds = [memory.fd(), self.bell.as_fd()];
                    if frame::send(socket.as_fd(), &welcome, &[], &fds).is_err() {
                        self.hang_up(id);
                    }
                }
                Ok(Reaction::Refuse(reason)) | Err(reason) => {
                    refuse(socket, &reason);
                    self.hang_up(id);
                }
                Ok(Reaction::Wait(_) | Reaction::Nothing) => {
                    unreachable!("a greeting is welcomed or refused")
                }
            }
            return;
        };
        let Some((header, request)) = frame::parse(bytes) else { return self.hang_up(id) };
        let service = ServiceId(header.service.get());
        if service == frame::BYE {
            client.session = None;
            react(Event::Ended { session, said_so: true });
            return self.hang_up(id);
        }
        if client.asked >= ASKED_MAX {
            let reason = format!("{ASKED_MAX} questions of this client wait for an answer: wait for one");
            return answer(socket, *header, Err(reason));
        }
        match react(Event::Asked { service, request: request.to_vec() }) {
            Reaction::Wait(ticket) => {
                client.asked += 1;
                self.waiting.insert(ticket, (id, *header));
            }
            Reaction::Refuse(reason) => answer(socket, *header, Err(reason)),
            Reaction::Welcome { .. } | Reaction::Nothing => unreachable!("a question is answered"),
        }
    }

    /// A client that has no session left is forgotten; one that has is so when its process ends.
    fn hang_up(&mut self, id: u64) {
        self.waiting.retain(|_, (client, _)| *client != id);
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.socket = None;
        if client.session.is_none() {
            self.clients.remove(&id);
        }
    }

    fn on_exit(&mut self, id: u64, react: &mut impl FnMut(Event) -> Reaction) {
        // Its last words may still be in the socket.
        self.on_socket(id, react);
        self.hang_up(id);
        if let Some(client) = self.clients.remove(&id)
            && let Some(session) = client.session
        {
            tracing::info!(
                pid = client.pid,
                "a client ended without a word; what it held will be looked for"
            );
            react(Event::Ended { session, said_so: false });
        }
    }

    /// Sends an answer to whoever waits for it.
    pub(super) fn answer(&mut self, ticket: Ticket, answered: Result<Answer, String>) {
        if let Some((id, header)) = self.waiting.remove(&ticket)
            && let Some(client) = self.clients.get_mut(&id)
            && let Some(socket) = &client.socket
        {
            client.asked -= 1;
            answer(socket, header, answered.map(|answer| serde_json::to_vec(&answer).expect("plain data")));
        }
    }

    /// Given the processes that memory waits for: which of them are stopped. Says so once, and kills them once they
    /// have been for as long as was allowed.
    pub(super) fn watch_stopped(&mut self, delaying: &[u32]) -> Vec<u32> {
        let now = Instant::now();
        let stopped: Vec<u32> = delaying.iter().copied().filter(|&pid| is_stopped(pid)).collect();
        self.stopped.retain(|pid, _| stopped.contains(pid));
        for &pid in &stopped {
            let since = *self.stopped.entry(pid).or_insert_with(|| {
                tracing::warn!(pid, "a client is stopped in the middle of a turn: memory waits for it");
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
            // Its end is seen by its pidfd, and only then is anything of its touched.
            let _gone_already = rustix::process::pidfd_send_signal(&client.pidfd, Signal::KILL);
        }
    }

    /// Lets the socket go.
    pub(super) fn close(&mut self) {
        if let Some(listener) = self.listener.take()
            && file_of(&listener.path).is_ok_and(|file| file == listener.file)
        {
            let _removed_already = std::fs::remove_file(&listener.path);
        }
        self.clients.clear();
    }
}

fn greet(bytes: &[u8]) -> Result<(), String> {
    let hello: Hello = serde_json::from_slice(bytes)
        .map_err(|_| "the greeting is not understood: connect with a farside client".to_owned())?;
    if hello.magic != frame::MAGIC || hello.version != frame::VERSION {
        return Err(format!(
            "the client speaks {} version {}, the node {} version {}: use the same release on both sides",
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
    // Whoever does not listen does not learn why.
    let _unheard = frame::send(socket.as_fd(), &refusal, &[], &[]);
}

fn answer(socket: &OwnedFd, mut header: FrameHeader, answered: Result<Vec<u8>, String>) {
    let (status, body) = match answered {
        Ok(body) if body.len() <= CALL_BYTES_MAX => (frame::ANSWERED, body),
        Ok(body) => (
            frame::REFUSED,
            format!("the answer has {} bytes, a call carries {CALL_BYTES_MAX}: ask for less", body.len())
                .into_bytes(),
        ),
        Err(reason) => (frame::REFUSED, cut(reason).into_bytes()),
    };
    header.status = status.into();
    // A client that does not read its answers loses them, and its own deadline tells it.
    let _unread = frame::send(socket.as_fd(), header.as_bytes(), &body, &[]);
}

/// What was asked may be in a reason, and a frame holds only so much.
fn cut(mut reason: String) -> String {
    if reason.len() > REASON_MAX {
        let end = (0..=REASON_MAX).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        reason.truncate(end);
        reason.push('…');
    }
    reason
}

fn no_room(errno: rustix::io::Errno) -> String {
    format!("the node has no room for one more client ({errno}): end another first")
}

/// Makes the socket, in place of one that a dead node left behind.
fn listen(path: PathBuf) -> Result<Listener, BindError> {
    let refused = |doing, path: &Path| {
        let path = path.to_owned();
        move |errno: rustix::io::Errno| BindError::Socket(doing, path, errno.into())
    };
    let address = SocketAddrUnix::new(&path).map_err(|errno| match errno {
        rustix::io::Errno::NAMETOOLONG => BindError::Name(path.clone()),
        errno => refused("use the name", &path)(errno),
    })?;
    let _alone = lock_folder_of(&path);
    clear_stale(&path, &address)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(refused("make a socket for", &path))?;
    rustix::net::bind(&socket, &address).map_err(refused("bind", &path))?;
    let file = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| file_of(&path))
        .map_err(|error| BindError::Socket("protect", path.clone(), error))?;
    rustix::net::listen(&socket, BACKLOG).map_err(refused("listen at", &path))?;
    Ok(Listener { socket, path, file })
}

fn file_of(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Holds off other nodes that make a socket in the same folder, until it is dropped: two that found the same stale
/// one would each remove what they find. Who holds it for too long is not waited for.
fn lock_folder_of(path: &Path) -> Option<OwnedFd> {
    use rustix::fs::{FlockOperation, Mode, OFlags};
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    for _ in 0..100 {
        if rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(folder)
}

fn clear_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(BindError::InTheWay(path.to_owned()));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let system = |doing, error: std::io::Error| BindError::Socket(doing, path.to_owned(), error);
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|errno| system("make a socket for", errno.into()))?;
    use rustix::io::Errno;
    match rustix::net::connect(&probe, address) {
        Ok(()) => {
            let peer = sockopt::socket_peercred(&probe).ok();
            let pid = peer.map(|peer| peer.pid.as_raw_nonzero().get() as u32);
            Err(BindError::Served(path.to_owned(), pid))
        }
        // Its backlog is full.
        Err(Errno::AGAIN) => Err(BindError::Served(path.to_owned(), None)),
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(|error| system("remove the socket of a dead node at", error))
        }
        Err(Errno::NOENT) => Ok(()), // It was removed meanwhile.
        Err(Errno::PROTOTYPE) => Err(BindError::InTheWay(path.to_owned())),
        Err(errno) => Err(system("learn who serves at", errno.into())),
    }
}
