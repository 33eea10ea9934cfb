//! One end of a `shm` connection. Tests build its messages and frames by hand.

use crate::support::PATIENCE;
use crate::support::raw_ring::{self, Ring, Side};
use rustix::event::PollFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

pub(crate) const HELLO: &[u8] = br#"{"magic":"farside-shm","version":2}"#;
/// Number of the node's own service.
pub(crate) const NODE: u32 = 0;
/// One-byte message of the socket that asks the other end to poll the ring.
pub(crate) const LOOK: u8 = 0;
/// One-byte message of the socket that ends the connection.
pub(crate) const BYE: u8 = 2;
pub(crate) const ANSWERED: u32 = 0;
pub(crate) const REFUSED: u32 = 1;
pub(crate) const HEADER: usize = 16;
/// Maximum number of bytes of a request.
pub(crate) const REQUEST_MAX: usize = 60 << 10;

pub(crate) fn call(id: u64, service: u32, request: &[u8]) -> Vec<u8> {
    let header = [&id.to_le_bytes()[..], &service.to_le_bytes(), &0u32.to_le_bytes()].concat();
    [&header, request].concat()
}

pub(crate) fn answer(id: u64, service: u32, status: u32, body: &[u8]) -> Vec<u8> {
    let mut frame = call(id, service, body);
    frame[12..16].copy_from_slice(&status.to_le_bytes());
    frame
}

pub(crate) fn u32_at(frame: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"))
}

pub(crate) fn u64_at(frame: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(frame[at..at + 8].try_into().expect("eight bytes"))
}

/// One end of a connection. Dropping it hangs up without a BYE.
pub(crate) struct Peer {
    pub(crate) socket: OwnedFd,
    /// Rings of the connection. Present after the welcome, at either end.
    ring: Option<Ring>,
}

impl Peer {
    pub(crate) fn over(socket: OwnedFd) -> Peer {
        Peer { socket, ring: None }
    }

    #[track_caller]
    pub(crate) fn connect(path: &Path) -> Peer {
        Peer::over(raw_ring::dial(path))
    }

    /// Connects and completes the greeting as a client.
    #[track_caller]
    pub(crate) fn greeted(path: &Path) -> Peer {
        let mut peer = Peer::connect(path);
        peer.send(HELLO).expect("the node listens");
        peer.is_welcomed();
        peer
    }

    /// Receives the welcome and maps the rings that it carries. Returns the welcome and the node's memory.
    #[track_caller]
    pub(crate) fn is_welcomed(&mut self) -> (Vec<u8>, OwnedFd) {
        let (welcome, fds) = self.receive().expect("a welcome");
        assert!(welcome.starts_with(br#"{"Welcome""#), "{}", welcome.escape_ascii());
        let [memory, rings] =
            <[OwnedFd; 2]>::try_from(fds).expect("the welcome carries the memory and the rings");
        self.has_rings(rings, Side::Client);
        (welcome, memory)
    }

    fn has_rings(&mut self, rings: OwnedFd, side: Side) {
        self.ring = Some(Ring::new(self.socket.try_clone().expect("a descriptor"), rings, side));
    }

    /// Welcomes a client as a node does, with this memory and new rings.
    #[track_caller]
    pub(crate) fn welcomes(&mut self, welcome: &[u8], memory: &OwnedFd) {
        let rings = raw_ring::sealed(raw_ring::SIZE);
        self.send_with(welcome, &[memory.as_fd(), rings.as_fd()]).expect("the client listens");
        self.has_rings(rings, Side::Engine);
    }

    #[track_caller]
    pub(crate) fn ring(&self) -> &Ring {
        self.ring.as_ref().expect("a welcomed peer")
    }

    /// Sends a message over the socket.
    pub(crate) fn send(&self, message: &[u8]) -> rustix::io::Result<()> {
        self.send_with(message, &[])
    }

    pub(crate) fn send_with(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        self.wait(PollFlags::OUT);
        raw_ring::try_send(&self.socket, message, fds)
    }

    /// Waits for the next message of the socket; `None` if the other end has hung up.
    #[track_caller]
    pub(crate) fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        raw_ring::receive(&self.socket)
    }

    #[track_caller]
    pub(crate) fn wait(&self, for_what: PollFlags) {
        raw_ring::wait(&self.socket, for_what);
    }

    /// Writes a frame. Returns false if the other end has hung up.
    #[track_caller]
    pub(crate) fn say(&self, frame: &[u8]) -> bool {
        self.ring().send(frame)
    }

    /// Waits for the next frame; `None` if the other end has hung up.
    #[track_caller]
    pub(crate) fn hear(&self) -> Option<Vec<u8>> {
        let heard = self.ring().receive(PATIENCE);
        assert!(heard.is_some() || self.ring().hangs_up_within(Duration::ZERO), "the other end does nothing");
        heard
    }

    /// Calls a service; returns the status and the body of the response.
    #[track_caller]
    pub(crate) fn ask(&self, id: u64, service: u32, request: &[u8]) -> (u32, String) {
        assert!(self.say(&call(id, service, request)), "the node hung up");
        let frame = self.hear().expect("an answer");
        assert!(frame.len() >= HEADER);
        assert!(frame.len() <= HEADER + REQUEST_MAX, "a response fits into a frame: {}", frame.len());
        assert_eq!((u64_at(&frame, 0), u32_at(&frame, 8)), (id, service), "the response is to this call");
        (u32_at(&frame, 12), String::from_utf8(frame[HEADER..].to_vec()).expect("text"))
    }

    #[track_caller]
    pub(crate) fn bye(&self) {
        self.send(&[BYE]).expect("the node listens");
        assert!(self.ring().hangs_up_within(PATIENCE), "the node hangs up after a BYE");
    }
}
