//! The fabric within one host: the client's CPU runs the chain on the node's memory, mapped by a descriptor that the
//! node sends over a Unix socket. The fabric is one-sided: chains run even while the node's process is stopped.
//!
//! Trust: all shm clients of a node are one trust domain, of one user. Keys catch mistakes here, not attackers.
//!
//! Liveness: a node is dead when its process has ended, as its pidfd or the socket's hang-up shows. A node that does
//! not respond does not count as dead. One watcher thread per connection detects the death, sets a flag that every
//! chain checks, and wakes the callers that wait for responses.
//!
//! Calls and their responses travel through rings (`calls`). A waiting caller polls the rings for a short while, then
//! sleeps until the watcher wakes it.
//!
//! Invariant: while no caller polls, the node rings the watcher's bell for the next response.

pub mod calls;
pub mod frame;
pub mod peer;

use crate::direct::{Control, Direct};
use crate::memory::{Mapping, MappingError};
use crate::runner::Runs;
use crate::timer::timespec;
use calls::{Calls, Fault, Inbox, Rings, Said};
use farside_remote::arena::SESSIONS_MAX;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::owner;
use farside_remote::fabric::{CALL_BYTES_MAX, ServiceId};
use farside_remote::{FabricError, NodeId};
use frame::{FrameHeader, Greeting, Hello};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum length of a Unix socket's path, in bytes.
pub const NAME_MAX: usize = 107;
/// Time limit for the node's greeting.
pub(crate) const GREETING_WAIT: Duration = Duration::from_millis(800);

/// Reason why there is no connection. No request was sent to the node.
#[derive(Debug)]
pub enum ConnectError {
    /// No node listens at the path.
    Absent(PathBuf),
    /// No engine serves rings at the path.
    NoRing(PathBuf),
    /// The path is not a valid socket name.
    Name(PathBuf),
    /// A node of another user listens at the path. The number is that user's id.
    OtherUser(PathBuf, u32),
    /// The node at the path is in a pid namespace that this process does not see.
    Unseen(PathBuf),
    /// The node's backlog of new connections is full.
    Crowded(PathBuf),
    /// The node's process is stopped. The number is its process id.
    Stopped(u32),
    /// The node's process runs but does not respond. The number is its process id.
    Silent(u32),
    /// The node refused the session; the text gives the reason.
    Refused(String),
    /// The peer at the path speaks another protocol; the text says what was wrong.
    Foreign(PathBuf, String),
    /// A system call failed: the attempted operation, the path, and the system's error.
    Io(&'static str, PathBuf, std::io::Error),
    /// The node's memory cannot be mapped.
    Memory(MappingError),
}

impl std::fmt::Display for ConnectError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ConnectError::Absent(path) => write!(
                f,
                "no node serves at {}: start one with 'farside up', or name another with --pool shm:PATH",
                path.display()
            ),
            ConnectError::NoRing(path) => write!(
                f,
                "no node serves rings at {}: start one with 'farside serve --listen ring:PATH', or name another with \
                 --pool",
                path.display()
            ),
            ConnectError::Name(path) => write!(
                f,
                "invalid socket path {}: it has {} bytes, and at most {NAME_MAX} are allowed; use a \
                 shorter path",
                path.display(),
                path.as_os_str().len()
            ),
            ConnectError::OtherUser(path, user) => write!(
                f,
                "the node at {} belongs to user {user}, and memory is only shared between one user's programs: \
                 start a node of your own, or run as that user",
                path.display()
            ),
            ConnectError::Unseen(path) => write!(
                f,
                "the node at {} is in a pid namespace that this process does not see, so that its end would go \
                 unnoticed: run both in the same pid namespace",
                path.display()
            ),
            ConnectError::Crowded(path) => write!(
                f,
                "the node at {} accepts no more clients now: it is stopped, or too many are connecting; check its \
                 process, then try again",
                path.display()
            ),
            ConnectError::Stopped(pid) => {
                write!(f, "node pid {pid} is stopped: continue it with 'kill -CONT {pid}'")
            }
            ConnectError::Silent(pid) => write!(
                f,
                "node pid {pid} did not answer within {} ms: check whether it is overloaded, then try again",
                GREETING_WAIT.as_millis()
            ),
            ConnectError::Refused(reason) => write!(f, "the node refuses: {reason}"),
            ConnectError::Foreign(path, what) => {
                write!(
                    f,
                    "the process at {} is not a node that this program knows ({what}): name another with \
                     --pool shm:PATH, or use the same release on both sides",
                    path.display()
                )
            }
            ConnectError::Io(doing, path, error) => {
                let remedy = match error.kind() {
                    std::io::ErrorKind::PermissionDenied => "; run as the node's user",
                    _ => "",
                };
                write!(f, "could not {doing} {}: {error}{remedy}", path.display())
            }
            ConnectError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConnectError {}

/// Opens a session with the node that listens at `path`. Waits at most about 1 s.
///
/// # Errors
/// [`ConnectError`] says why there is no session; no socket stays open.
pub fn connect(path: &Path, node: NodeId) -> Result<Direct, ConnectError> {
    connect_on(path, node, |memory| memory)
}

/// Like [`connect`], but the endpoint runs chains on the memory as wrapped by `wrap`.
///
/// # Errors
/// [`ConnectError`] says why there is no session; no socket stays open.
pub fn connect_on<M: Runs>(
    path: &Path,
    node: NodeId,
    wrap: impl FnOnce(Arc<Mapping>) -> M,
) -> Result<Direct<M>, ConnectError> {
    let io = |doing| move |errno: rustix::io::Errno| ConnectError::Io(doing, path.to_owned(), errno.into());
    let deadline = Instant::now() + GREETING_WAIT;
    let socket = dial(path, deadline)?;
    let peer = peer::peer(&socket).map_err(io("identify the node at"))?;
    if peer.user != rustix::process::geteuid().as_raw() {
        return Err(ConnectError::OtherUser(path.to_owned(), peer.user));
    }
    let pid = peer.pid.ok_or_else(|| ConnectError::Unseen(path.to_owned()))?;
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Err(ConnectError::Absent(path.to_owned())), // It has just exited.
        pidfd => pidfd.map_err(io("watch the node at"))?,
    };
    let hello = Hello { magic: frame::MAGIC.into(), version: frame::VERSION };
    let hello = serde_json::to_vec(&hello).expect("plain data");
    match frame::send(socket.as_fd(), &hello, &[], &[]) {
        Ok(()) => {}
        // A node may refuse before it receives the hello. The reason it sent can be read below.
        Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {}
        Err(errno) => return Err(io("send the hello to the node at")(errno)),
    }

    let mut buffer = Vec::new();
    let mut fds = Vec::new();
    wait_for_greeting(&socket, pid, deadline)?;
    let greeting = match frame::receive(socket.as_fd(), &mut buffer, &mut fds, RecvFlags::empty()) {
        // The node refused without reading the hello, so the socket reports this error once, before the node's reason.
        Err(rustix::io::Errno::CONNRESET) => {
            frame::receive(socket.as_fd(), &mut buffer, &mut fds, RecvFlags::DONTWAIT)
        }
        heard => heard,
    };
    let greeting = greeting.map_err(io("receive from the node at"))?;
    let foreign = |what: String| ConnectError::Foreign(path.to_owned(), what);
    let greeting = greeting.ok_or_else(|| foreign("it hung up".into()))?;
    let greeting = serde_json::from_slice(greeting).map_err(|error| foreign(error.to_string()))?;
    let (session, incarnation) = match greeting {
        Greeting::Refusal(reason) => return Err(ConnectError::Refused(reason)),
        Greeting::Welcome { slot, number, incarnation } => (SessionId { slot, number }, incarnation),
    };
    let (line, memory) = Line::join(socket, fds).map_err(|error| match error {
        MappingError::Foreign(what) => foreign(what),
        error => ConnectError::Memory(error),
    })?;
    if session.slot >= SESSIONS_MAX || matches!(session.number, owner::NONE | owner::NODE) {
        return Err(foreign(format!("it offers a session {session:?}")));
    }
    let memory = mapped(memory, incarnation).map_err(|error| match error {
        MappingError::Size(size) => foreign(format!("it sent a memory of {size} bytes")),
        error => ConnectError::Memory(error),
    })?;
    let died = Arc::new(AtomicBool::new(false));
    let control = Session::start(line, session, pidfd, node, Arc::clone(&memory), Arc::clone(&died))
        .map_err(|error| ConnectError::Io("watch the node at", path.to_owned(), error))?;
    Ok(Direct::new(wrap(memory), Box::new(control), died, node, session))
}

/// Returns a connected SEQPACKET socket.
pub(crate) fn dial(path: &Path, deadline: Instant) -> Result<OwnedFd, ConnectError> {
    let io = |doing| move |errno: rustix::io::Errno| ConnectError::Io(doing, path.to_owned(), errno.into());
    let address = SocketAddrUnix::new(path).map_err(|errno| match errno {
        rustix::io::Errno::NAMETOOLONG => ConnectError::Name(path.to_owned()),
        errno => io("use the name of")(errno),
    })?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(io("make a socket for"))?;
    loop {
        use rustix::io::Errno;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED) => {
                return Err(ConnectError::Absent(path.to_owned()));
            }
            Err(Errno::PROTOTYPE) => {
                return Err(ConnectError::Foreign(path.to_owned(), "a socket of another type".into()));
            }
            // The backlog is full: a process listens but does not accept.
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            Err(Errno::AGAIN) => return Err(ConnectError::Crowded(path.to_owned())),
            Err(errno) => return Err(io("connect to")(errno)),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(io("use a socket for"))?;
    Ok(socket)
}

fn wait_for_greeting(socket: &OwnedFd, pid: Pid, deadline: Instant) -> Result<(), ConnectError> {
    if has_greeting(socket, deadline) {
        return Ok(());
    }
    let pid = pid.as_raw_nonzero().get() as u32;
    Err(if is_stopped(pid) { ConnectError::Stopped(pid) } else { ConnectError::Silent(pid) })
}

/// Waits for a message from the node. Returns false if none arrives by the deadline.
pub(crate) fn has_greeting(socket: &OwnedFd, deadline: Instant) -> bool {
    while Instant::now() < deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        // A failure is most likely an interruption; the deadline ends the retries.
        if poll(&mut fds, Some(&timespec(left))).is_ok_and(|ready| ready > 0) {
            return true;
        }
    }
    false
}

/// Whether a process is stopped by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    // The format is "pid (name) state ...". The name may contain anything, so the state is searched after the last
    // parenthesis. The file of a process that has ended cannot be read; that process counts as not stopped.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| matches!(rest.trim_start().as_bytes().first(), Some(b'T' | b't')))
}

/// Identity of a mapped memory: device, inode, incarnation. Device and inode distinguish copies of one memory file,
/// which have the same incarnation. An inode may be reused, but not while a mapping holds its file.
type Identity = (u64, u64, u64);

/// The memories that this process has mapped as a client.
static MAPPED: Mutex<Vec<(Identity, Weak<Mapping>)>> = Mutex::new(Vec::new());

/// Returns the one mapping that all connections of this process to one node share, so that each page is faulted in
/// once.
fn mapped(fd: OwnedFd, incarnation: u64) -> Result<Arc<Mapping>, MappingError> {
    let identity = identity(fd.as_fd(), incarnation)?;
    let mut all = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(_, mapping)| mapping.strong_count() > 0);
    let known = all.iter().find(|(of, _)| *of == identity).and_then(|(_, mapping)| mapping.upgrade());
    if let Some(mapping) = known {
        return Ok(mapping);
    }
    let mapping = Arc::new(Mapping::attach(fd)?);
    if mapping.incarnation() != incarnation {
        return Err(MappingError::Foreign("the node sent another memory than it named: restart it".into()));
    }
    all.push((identity, Arc::downgrade(&mapping)));
    Ok(mapping)
}

fn identity(memory: BorrowedFd<'_>, incarnation: u64) -> Result<Identity, MappingError> {
    let looked = rustix::fs::fstat(memory);
    let stat = looked
        .map_err(|errno| MappingError::Io { doing: "inspect the node's memory", source: errno.into() })?;
    Ok((stat.st_dev, stat.st_ino, incarnation))
}

/// Whether some client in this process has mapped this memory, and so may be running a chain on it.
pub fn is_mapped(memory: &Mapping) -> bool {
    // If the identity is unknown, assume that a client has it mapped.
    let Ok(identity) = identity(memory.fd(), memory.incarnation()) else { return true };
    let all = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().any(|(of, mapping)| *of == identity && mapping.strong_count() > 0)
}

/// The channel of a session's calls. Its drop sends a message that tells the node that the session runs no more chains.
/// Without this message the node must keep the session until this process ends.
struct Line {
    calls: Calls,
    /// Id of the process that opened the session.
    pid: u32,
}

impl Line {
    /// Opens the rings that came with a welcome. Also returns the descriptor of the node's memory, which came with the
    /// same message.
    fn join(socket: OwnedFd, fds: Vec<OwnedFd>) -> Result<(Line, OwnedFd), MappingError> {
        let opened = match <[OwnedFd; 2]>::try_from(fds) {
            Ok([memory, rings]) => Rings::open(&rings).map(|rings| (memory, rings)),
            Err(_) => Err(MappingError::Foreign("it sent no memory, or no rings".into())),
        };
        match opened {
            Ok((memory, rings)) => {
                Ok((Line { calls: Calls::of_client(socket, rings), pid: std::process::id() }, memory))
            }
            Err(error) => {
                calls::say(&socket, Said::Bye);
                Err(error)
            }
        }
    }

    /// Whether this process is a forked child with a copy of the channel. The session and its thread belong to the
    /// parent.
    fn is_forked_copy(&self) -> bool {
        std::process::id() != self.pid
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.is_forked_copy() {
            self.calls.say(Said::Bye); // Failure is harmless: the node is gone.
        }
    }
}

/// The channel of one session, with the thread that reads it.
struct Session {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
    /// Whether the node was told, by polling, that it need not ring for its next response.
    has_polled: Cell<bool>,
}

struct Shared {
    line: Line,
    session: SessionId,
    pidfd: OwnedFd,
    /// Descriptor that becomes readable once the endpoint is dropped.
    closed: OwnedFd,
    node: NodeId,
    memory: Arc<Mapping>,
    died: Arc<AtomicBool>,
    next_id: AtomicU64,
    calls: Mutex<BTreeMap<u64, Call>>,
    /// Buffer for received frames, locked by the thread that polls for responses.
    inbox: Mutex<Inbox>,
}

/// Reason that callers get when the session ends because its rings hold invalid data.
const INVALID_RINGS: &str = "its rings hold data that no node of this release writes";
/// Maximum number of socket messages read at once.
const MESSAGES_AT_A_TIME: u32 = 16;

/// An outstanding call.
#[derive(Default)]
struct Call {
    answer: Option<Result<Vec<u8>, FabricError>>,
    /// Waker of the caller. It may run any code, so it is cloned, woken and dropped only while the calls are not
    /// locked.
    waker: Option<Waker>,
}

impl Session {
    fn start(
        line: Line,
        session: SessionId,
        pidfd: OwnedFd,
        node: NodeId,
        memory: Arc<Mapping>,
        died: Arc<AtomicBool>,
    ) -> std::io::Result<Session> {
        let closed = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let (next_id, calls, inbox) = (AtomicU64::new(1), Mutex::default(), Mutex::new(Inbox::new()));
        let shared =
            Arc::new(Shared { line, session, pidfd, closed, node, memory, died, next_id, calls, inbox });
        let watched = Arc::clone(&shared);
        let watcher =
            std::thread::Builder::new().name("farside-watch".into()).spawn(move || watched.watch())?;
        Ok(Session { shared, watcher: Some(watcher), has_polled: Cell::new(false) })
    }
}

impl Control for Session {
    fn call<'a>(
        &'a self,
        service: ServiceId,
        request: &'a [u8],
        answer: &'a mut Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), FabricError>> + 'a>> {
        Box::pin(async move {
            let bytes = Pending::send(&self.shared, service, request)?.await?;
            answer.clear();
            answer.extend_from_slice(&bytes);
            Ok(())
        })
    }

    fn ring(&self) {
        if self.shared.memory.is_to_ring_node() {
            self.shared.line.calls.say(Said::Wanted);
        }
    }

    fn is_waiting(&self) -> bool {
        self.shared.is_waiting()
    }

    fn poll(&self) -> bool {
        self.has_polled.set(true);
        self.shared.take_responses().unwrap_or_else(|_| {
            self.shared.node_died();
            true
        })
    }

    fn end_polling(&self) {
        if self.has_polled.replace(false) {
            self.shared.rest();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.shared.line.is_forked_copy() {
            return;
        }
        frame::ring(&self.shared.closed);
        if let Some(watcher) = self.watcher.take() {
            drop(watcher.join()); // A panic was reported when it happened.
        }
    }
}

/// A call in flight. Dropping it removes the call, so that a late response is discarded.
struct Pending<'a> {
    shared: &'a Shared,
    id: u64,
}

impl<'a> Pending<'a> {
    fn send(shared: &'a Shared, service: ServiceId, request: &[u8]) -> Result<Pending<'a>, FabricError> {
        if request.len() > CALL_BYTES_MAX {
            return Err(FabricError::Refused(format!(
                "a call carries at most {CALL_BYTES_MAX} bytes, this one has {}: ask for less at a time",
                request.len()
            )));
        }
        let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
        shared.calls().insert(id, Call::default());
        let pending = Pending { shared, id };
        let header = FrameHeader { id: id.into(), service: service.0.into(), status: 0.into() };
        match shared.line.calls.send(header, request) {
            Ok(()) => {
                shared.rest(); // Also asks to be rung for space, if a frame waits for it.
                Ok(pending)
            }
            Err(Fault::ClosedPipe) => Err(FabricError::Refused(format!(
                "node {} does not read its requests, and this one was not sent: check whether the node is stopped \
                 or overloaded, then retry",
                shared.node.0
            ))),
            Err(Fault::Foreign) => {
                Err(FabricError::Broken { node: shared.node, reason: INVALID_RINGS.to_owned() })
            }
        }
    }
}

impl Future for Pending<'_> {
    type Output = Result<Vec<u8>, FabricError>;

    fn poll(self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let waker = cx.waker().clone();
        let mut calls = self.shared.calls();
        if let Some(answer) = calls.get_mut(&self.id).and_then(|call| call.answer.take()) {
            return Poll::Ready(answer);
        }
        if self.shared.died.load(Ordering::Acquire) {
            // The call was sent, so it may have been carried out before the process ended.
            let reason = "the node's process has ended".to_owned();
            return Poll::Ready(Err(FabricError::Broken { node: self.shared.node, reason }));
        }
        let before = calls.get_mut(&self.id).and_then(|call| call.waker.replace(waker));
        drop(calls);
        drop(before);
        Poll::Pending
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut calls = self.shared.calls();
        let forgotten = calls.remove(&self.id);
        drop(calls);
        drop(forgotten);
    }
}

impl Drop for Shared {
    /// Makes the session's last access to the memory. This access must come before `Line` sends its last message, after
    /// which a live node gives the slot to another session. A dead node receives no message; the next node on its
    /// memory inspects the slot.
    fn drop(&mut self) {
        if !self.line.is_forked_copy() {
            let Ok(()) = self.memory.arena().leave_session(self.session);
        }
    }
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, BTreeMap<u64, Call>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_waiting(&self) -> bool {
        self.calls().values().any(|call| call.answer.is_none())
    }

    /// Runs the watcher thread: waits for responses, for the node's death, and for the endpoint's drop.
    fn watch(&self) {
        self.rest();
        loop {
            let watched: [BorrowedFd<'_>; 3] =
                [self.line.calls.as_fd(), self.pidfd.as_fd(), self.closed.as_fd()];
            let mut fds = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return self.node_died(), // Without a watch, the node's end would go unnoticed.
                Ok(_) => {}
            }
            let [socket, pidfd, closed] = fds.map(|fd| !fd.revents().is_empty());
            if closed {
                return;
            }
            if pidfd || (socket && !self.handle_messages()) {
                return self.node_died();
            }
        }
    }

    /// Reads messages from the socket, and passes responses to their callers. Returns false if the node has hung up.
    fn handle_messages(&self) -> bool {
        let mut is_connected = true;
        for _ in 0..MESSAGES_AT_A_TIME {
            match self.line.calls.hear() {
                None => break,
                Some(Said::HungUp) => {
                    is_connected = false;
                    break;
                }
                Some(_) => {}
            }
        }
        // Responses are taken after the check for a hang-up: a peer that hangs up has published all its frames before.
        let has_taken = self.take_responses();
        self.rest();
        is_connected && has_taken.is_ok()
    }

    /// Asks the node to ring for its next frames.
    fn rest(&self) {
        while !self.line.calls.rests() && self.take_responses().is_ok() {}
    }

    /// Passes the responses that have arrived to their callers. Returns false if none had arrived.
    fn take_responses(&self) -> Result<bool, Fault> {
        let mut answers = Vec::new();
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        let received = self.line.calls.receive(&mut inbox, |frame| {
            // A malformed frame is discarded. Its caller, if any, fails at its deadline.
            let Some((header, body)) = frame::parse(frame) else { return };
            let answer = match header.status.get() {
                frame::ANSWERED => Ok(body.to_vec()),
                _ => Err(FabricError::Refused(String::from_utf8_lossy(body).into_owned())),
            };
            answers.push((header.id.get(), answer));
        });
        drop(inbox);
        for (id, answer) in answers {
            let mut calls = self.calls();
            let waker = calls.get_mut(&id).and_then(|call| {
                call.answer = Some(answer);
                call.waker.take()
            });
            drop(calls);
            waker.into_iter().for_each(Waker::wake);
        }
        received
    }

    fn node_died(&self) {
        // Release: pairs with the Acquire when a call is polled. Chains need no order: they must only see the flag
        // soon.
        self.died.store(true, Ordering::Release);
        let wakers: Vec<Waker> = self.calls().values_mut().filter_map(|call| call.waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}
