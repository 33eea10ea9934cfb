//! One end of a connection, whose messages and frames are made by hand.

use crate::support::PATIENCE;
use crate::support::raw_ring::{self, Ring, Side};
use rustix::event::PollFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

pub(crate) const HELLO: &[u8] = br#"{"magic":"farside-shm","version":2}"#;
/// The node itself.
pub(crate) const NODE: u32 = 0;
/// Words of the socket.
pub(crate) const LOOK: u8 = 0;
pub(crate) const BYE: u8 = 2;
pub(crate) const ANSWERED: u32 = 0;
pub(crate) const REFUSED: u32 = 1;
pub(crate) const HEADER: usize = 16;
/// The most bytes of a request.
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

/// One end of a connection. Hangs up, without a word, when dropped.
pub(crate) struct Peer {
    pub(crate) socket: OwnedFd,
    /// There once it was welcomed, or has welcomed.
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

    /// Connects and says hello as a client should.
    #[track_caller]
    pub(crate) fn greeted(path: &Path) -> Peer {
        let mut peer = Peer::connect(path);
        peer.send(HELLO).expect("it listens");
        peer.is_welcomed();
        peer
    }

    /// Opens the rings that come with its welcome; the node's memory, which comes with them.
    #[track_caller]
    pub(crate) fn is_welcomed(&mut self) -> (Vec<u8>, OwnedFd) {
        let (welcome, fds) = self.receive().expect("a welcome");
        assert!(welcome.starts_with(br#"{"Welcome""#), "{}", welcome.escape_ascii());
        let [memory, rings] = <[OwnedFd; 2]>::try_from(fds).expect("the memory and the rings come with it");
        self.has_rings(rings, Side::Client);
        (welcome, memory)
    }

    fn has_rings(&mut self, rings: OwnedFd, side: Side) {
        self.ring = Some(Ring::new(self.socket.try_clone().expect("a descriptor"), rings, side));
    }

    /// Welcomes a client as a node does, with that memory and rings.
    #[track_caller]
    pub(crate) fn welcomes(&mut self, welcome: &[u8], memory: &OwnedFd) {
        let rings = raw_ring::sealed(raw_ring::SIZE);
        self.send_with(welcome, &[memory.as_fd(), rings.as_fd()]).expect("it listens");
        self.has_rings(rings, Side::Engine);
    }

    #[track_caller]
    pub(crate) fn ring(&self) -> &Ring {
        self.ring.as_ref().expect("it was welcomed")
    }

    /// Sends a message by the socket.
    pub(crate) fn send(&self, message: &[u8]) -> rustix::io::Result<()> {
        self.send_with(message, &[])
    }

    pub(crate) fn send_with(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        self.wait(PollFlags::OUT);
        raw_ring::try_send(&self.socket, message, fds)
    }

    /// The next message of the socket; nothing if the other end has hung up.
    #[track_caller]
    pub(crate) fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        raw_ring::receive(&self.socket)
    }

    #[track_caller]
    pub(crate) fn wait(&self, for_what: PollFlags) {
        raw_ring::wait(&self.socket, for_what);
    }

    /// Writes a frame. False if the other end has hung up.
    #[track_caller]
    pub(crate) fn say(&self, frame: &[u8]) -> bool {
        self.ring().send(frame)
    }

    /// The next frame; nothing if the other end has hung up.
    #[track_caller]
    pub(crate) fn hear(&self) -> Option<Vec<u8>> {
        let heard = self.ring().receive(PATIENCE);
        assert!(heard.is_some() || self.ring().hangs_up_within(Duration::ZERO), "the other end does nothing");
        heard
    }

    /// Asks; the status and the body of the answer.
    #[track_caller]
    pub(crate) fn ask(&self, id: u64, service: u32, request: &[u8]) -> (u32, String) {
        assert!(self.say(&call(id, service, request)), "it was hung up on");
        let frame = self.hear().expect("an answer");
        assert!(frame.len() >= HEADER);
        assert!(frame.len() <= HEADER + REQUEST_MAX, "an answer is a frame too: {}", frame.len());
        assert_eq!((u64_at(&frame, 0), u32_at(&frame, 8)), (id, service), "it answers what was asked");
        (u32_at(&frame, 12), String::from_utf8(frame[HEADER..].to_vec()).expect("text"))
    }

    #[track_caller]
    pub(crate) fn bye(&self) {
        self.send(&[BYE]).expect("it listens");
        assert!(self.ring().hangs_up_within(PATIENCE), "who said bye is hung up on");
    }
}
