//! One end of a connection, whose frames are made by hand.

use crate::support::PATIENCE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

pub(crate) const HELLO: &[u8] = br#"{"magic":"farside-shm","version":1}"#;
/// The node itself.
pub(crate) const NODE: u32 = 0;
pub(crate) const BYE: u32 = u32::MAX;
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
pub(crate) struct Peer(pub(crate) OwnedFd);

impl Peer {
    pub(crate) fn socket() -> OwnedFd {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a socket")
    }

    #[track_caller]
    pub(crate) fn connect(path: &Path) -> Peer {
        let socket = Peer::socket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("a name")).expect("somebody serves");
        Peer(socket)
    }

    /// Connects and says hello as a client should.
    #[track_caller]
    pub(crate) fn greeted(path: &Path) -> Peer {
        let peer = Peer::connect(path);
        peer.send(HELLO).expect("it listens");
        let (welcome, fds) = peer.receive().expect("a welcome");
        assert!(welcome.starts_with(br#"{"Welcome""#), "{}", welcome.escape_ascii());
        assert_eq!(fds.len(), 2, "the memory and the bell come with it");
        peer
    }

    pub(crate) fn send(&self, frame: &[u8]) -> rustix::io::Result<()> {
        self.send_with(frame, &[])
    }

    pub(crate) fn send_with(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        self.wait(PollFlags::OUT);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.0, &[IoSlice::new(frame)], &mut ancillary, flags).map(drop)
    }

    /// The next frame; nothing if the other end has hung up.
    #[track_caller]
    pub(crate) fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        self.wait(PollFlags::IN);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut frame = vec![0; 256 << 10];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received =
            match rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut frame)], &mut ancillary, flags) {
                Err(Errno::CONNRESET) => return None,
                received => received.expect("a frame"),
            };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        frame.truncate(received.bytes);
        (received.bytes > 0).then_some((frame, fds))
    }

    #[track_caller]
    pub(crate) fn wait(&self, for_what: PollFlags) {
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.0, for_what)], Some(&timeout)).expect("a poll");
        assert!(ready > 0, "the other end does nothing");
    }

    /// Asks; the status and the body of the answer.
    #[track_caller]
    pub(crate) fn ask(&self, id: u64, service: u32, request: &[u8]) -> (u32, String) {
        self.send(&call(id, service, request)).expect("it reads");
        let (frame, fds) = self.receive().expect("an answer");
        assert!(frame.len() >= HEADER && fds.is_empty());
        assert!(frame.len() <= HEADER + REQUEST_MAX, "an answer is a frame too: {}", frame.len());
        assert_eq!((u64_at(&frame, 0), u32_at(&frame, 8)), (id, service), "it answers what was asked");
        (u32_at(&frame, 12), String::from_utf8(frame[HEADER..].to_vec()).expect("text"))
    }

    #[track_caller]
    pub(crate) fn bye(&self) {
        self.send(&call(0, BYE, b"")).expect("it listens");
        assert!(self.receive().is_none(), "who said bye is hung up on");
    }
}
