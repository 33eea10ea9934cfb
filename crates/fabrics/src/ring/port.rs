//! An engine's ring connections: admission, and the exchange of frames with each client.
//!
//! Invariant: a connection that is not active wakes the engine: the engine's wish is set in the connection's memory, or
//! epoll will report a bell.
//! Invariant: no descriptor that a client sends is used, only the bytes and the hang-up of the client's socket.

use super::end::{Buffer, End, Fault};
use super::shared::{Mapped, Memory, Side, make};
use super::{FRAME_MAX, Greeting, check};
use crate::connections::{Connecting, Connection, Connections, Ended};
use crate::shm::frame;
use crate::shm::peer::peer;
use crate::socket::{ListenError, Listener};
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of connections per engine, since each takes memory.
const CONNECTIONS_MAX: usize = 1024;
/// Pause in accepting clients, if closing the spare descriptor did not free one that `accept` can use.
const FULL_PAUSE: Duration = Duration::from_millis(2);

/// An engine's end of all its rings.
pub struct RingPort {
    listener: Arc<Listener>,
    connections: Connections<Client>,
    /// A descriptor kept in reserve. When the process has no other free descriptor, this one is closed, so that the
    /// next client can still be accepted and refused with a reason.
    spare: Option<OwnedFd>,
    common: Common,
}

/// Buffers for frames and for hellos, which all connections share.
pub(crate) struct Common {
    buffer: Buffer,
    greeting: Vec<u8>,
}

pub(crate) enum Client {
    /// A client that has not yet sent a hello.
    New(OwnedFd),
    Admitted(Box<Admitted>),
    /// A client that the engine has refused; its connection closes at once.
    Refused,
}

pub(crate) struct Admitted {
    shared: Mapped,
    end: End,
}

impl RingPort {
    /// Creates ports for `engines` engines at the socket `path`. A client is served by the engine that accepts it
    /// first.
    ///
    /// # Errors
    /// The socket cannot be created; no file is left behind.
    pub fn bind(path: &Path, engines: usize) -> Result<Vec<RingPort>, ListenError> {
        let listener = Arc::new(Listener::bind(path)?);
        let refused = |errno: Errno| ListenError::System("watch", path.to_owned(), errno.into());
        (0..engines).map(|_| RingPort::new(Arc::clone(&listener)).map_err(refused)).collect()
    }

    fn new(listener: Arc<Listener>) -> rustix::io::Result<RingPort> {
        Ok(RingPort {
            connections: Connections::new(&*listener)?,
            listener,
            spare: Some(spare()?),
            common: Common { buffer: Buffer::new(), greeting: Vec::new() },
        })
    }

    /// Checks whether a new client may stay; if not, returns the reason.
    fn admit(&self, socket: &OwnedFd) -> Result<(), String> {
        let peer = peer(socket).map_err(no_room)?;
        if peer.user != rustix::process::geteuid().as_raw() {
            return Err("this node serves the user that started it: run your client as that user".into());
        }
        if self.connections.len() >= CONNECTIONS_MAX {
            return Err(format!(
                "this engine has {CONNECTIONS_MAX} clients, the most there can be: end another first"
            ));
        }
        Ok(())
    }
}

impl Connecting for RingPort {
    type Client = Client;

    const FRAME_MAX: usize = FRAME_MAX;

    fn connections(&self) -> &Connections<Client> {
        &self.connections
    }

    fn parts(&mut self) -> (&mut Connections<Client>, &mut Common) {
        (&mut self.connections, &mut self.common)
    }

    /// Accepts one client; another engine may accept the next.
    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(socket) => {
                if let Err(reason) = self.admit(&socket) {
                    return refuse(&socket, &reason);
                }
                if let Err((Client::New(socket), errno)) = self.connections.enter(Client::New(socket), None) {
                    refuse(&socket, &no_room(errno));
                }
            }
            Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                drop(self.spare.take());
                match self.listener.accept() {
                    Ok(socket) => refuse(&socket, &no_room(errno)),
                    // The client stays in the backlog, and epoll would report it again at once, hence the pause.
                    Err(_) => std::thread::sleep(FULL_PAUSE),
                }
                self.spare = spare().ok(); // Without one, the next clients wait in the backlog without a reason.
            }
            Err(_) => {} // Another engine has accepted it, or it has hung up.
        }
    }
}

impl Client {
    /// Handles the hello of a new client.
    fn greet(&mut self, greeting: &mut Vec<u8>) -> Result<(), Ended> {
        let Client::New(socket) = self else { return Ok(()) };
        let mut uninvited = Vec::new(); // Descriptors from a client are closed unused.
        let welcomed = match frame::receive(socket.as_fd(), greeting, &mut uninvited, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Ok(Some(hello)) => {
                check(hello).and_then(|()| welcome(socket)).map_err(|reason| refuse(socket, &reason))
            }
            Ok(None) | Err(_) => Err(()), // It has hung up.
        };
        if let (Ok(memory), Client::New(socket)) = (welcomed, std::mem::replace(self, Client::Refused)) {
            let shared = Mapped { memory, socket };
            *self = Client::Admitted(Box::new(Admitted { shared, end: End::new(Side::Engine) }));
            return Ok(());
        }
        Err(Ended)
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Client::New(socket) => socket.as_fd(),
            Client::Admitted(client) => client.shared.as_fd(),
            Client::Refused => unreachable!("a refused client is closed at once"),
        }
    }
}

impl From<Fault> for Ended {
    fn from(_: Fault) -> Ended {
        Ended
    }
}

impl Connection for Client {
    type Common = Common;

    const ACTIVE_MIN: usize = 4;
    const ACTIVE_MAX: usize = usize::MAX;
    const POLLS_PER_EPOLL: u32 = 256;

    fn is_admitted(&self) -> bool {
        matches!(self, Client::Admitted(_))
    }

    #[inline]
    fn read(&mut self, common: &mut Common, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        let Client::Admitted(client) = self else { return Ok(false) };
        let Admitted { shared, end } = &mut **client;
        end.awake(shared);
        Ok(end.receive(shared, &mut common.buffer, take)?)
    }

    fn handle_event(&mut self, common: &mut Common, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
        let is_connected = match self {
            Client::Admitted(client) => client.shared.is_connected(),
            _ => return self.greet(&mut common.greeting).map(|()| true),
        };
        if let (false, Client::Admitted(client)) = (is_connected, &mut *self) {
            let Admitted { shared, end } = &mut **client;
            end.receive_last(shared, &mut common.buffer, take)?;
            return Err(Ended);
        }
        self.read(common, take)
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), Ended> {
        let Client::Admitted(client) = self else { return Ok(()) };
        Ok(client.end.send(&client.shared, frame)?)
    }

    fn flush(&mut self) -> Result<(), Ended> {
        let Client::Admitted(client) = self else { return Ok(()) };
        Ok(client.end.flush(&client.shared)?)
    }

    fn has_sent_all(&self) -> bool {
        let Client::Admitted(client) = self else { return true };
        client.end.has_sent_all()
    }

    fn may_rest(&mut self) -> bool {
        let Client::Admitted(client) = self else { return true };
        client.end.may_sleep(&client.shared)
    }
}

/// Creates the memory of a connection and sends it to the client.
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
    // If sending fails, the client does not read, and gets no reason.
    let _unheard = frame::send(socket.as_fd(), &refusal, &[], &[]);
}

fn no_room(errno: Errno) -> String {
    format!("the node has no room for one more client ({errno}): end another first, or raise its 'ulimit -n'")
}

fn spare() -> rustix::io::Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
}
