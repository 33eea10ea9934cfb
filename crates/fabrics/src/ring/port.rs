//! An engine's connections: who is let in, and how each is told and heard.
//!
//! Invariant: a connection that is not active has the engine's wish in its memory, or its bell in the poll.
//! Invariant: no descriptor of a client's is used, and of its socket nothing but what it says and that it hangs up.

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

/// Connections of one engine, each with some memory.
const CONNECTIONS_MAX: usize = 1024;
/// How long nobody is let in where not even the spare descriptor helps.
const FULL_PAUSE: Duration = Duration::from_millis(2);

/// An engine's end of all its rings.
pub struct RingPort {
    listener: Arc<Listener>,
    connections: Connections<Client>,
    /// Let go when there is no other descriptor for one who comes, so that it can be told so.
    spare: Option<OwnedFd>,
    common: Common,
}

/// Where frames, and what newcomers say, are read into.
pub(crate) struct Common {
    buffer: Buffer,
    greeting: Vec<u8>,
}

pub(crate) enum Client {
    /// It has not said hello.
    New(OwnedFd),
    Admitted(Box<Admitted>),
    /// It was not let in, and is ended at once.
    Refused,
}

pub(crate) struct Admitted {
    shared: Mapped,
    end: End,
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
        Ok(RingPort {
            connections: Connections::new(&*listener)?,
            listener,
            spare: Some(spare()?),
            common: Common { buffer: Buffer::new(), greeting: Vec::new() },
        })
    }

    /// Whether somebody who came may stay.
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

    /// Lets one in; whoever is left, another engine may have.
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
                    // It stays in line, so that the poll would answer at once, for ever.
                    Err(_) => std::thread::sleep(FULL_PAUSE),
                }
                self.spare = spare().ok(); // If there is none, who comes next waits in line, untold.
            }
            Err(_) => {} // Another engine has let it in, or it is gone already.
        }
    }
}

impl Client {
    /// Answers the hello of one who has come.
    fn greet(&mut self, greeting: &mut Vec<u8>) -> Result<(), Ended> {
        let Client::New(socket) = self else { return Ok(()) };
        let mut uninvited = Vec::new(); // Descriptors that a client sends are closed unseen.
        let welcomed = match frame::receive(socket.as_fd(), greeting, &mut uninvited, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Ok(Some(hello)) => {
                check(hello).and_then(|()| welcome(socket)).map_err(|reason| refuse(socket, &reason))
            }
            Ok(None) | Err(_) => Err(()), // It is gone.
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
            Client::Refused => unreachable!("who was refused is there no more"),
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
    const LOOKS_PER_POLL: u32 = 256;

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

    fn hear(&mut self, common: &mut Common, take: impl FnMut(&[u8])) -> Result<bool, Ended> {
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
