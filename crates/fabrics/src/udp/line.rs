//! A client's socket, connected to one node.

use super::seal::client::Client as Seal;
use super::seal::{GREETING, OVERHEAD, Shared};
use super::{HEADERS, LOOPBACK_MAX, PLACE, Socket, random};
use crate::session::DATAGRAM_MIN;
use crate::session::carrier::{Broken, Line};
use std::cell::RefCell;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// A client's end of UDP.
pub struct UdpLine {
    /// As the one that `socket` has: so that its descriptor can be lent while that is in use.
    udp: UdpSocket,
    end: RefCell<End>,
    node: SocketAddr,
    /// With what a seal adds.
    datagram_max: usize,
    overhead: usize,
}

struct End {
    socket: Socket,
    buffer: Box<[u8]>,
    seal: Option<Seal>,
    /// Whose the seal is: a child that was forked has its keys and its counters too, and must not seal by them.
    pid: u32,
}

impl UdpLine {
    /// A line to the node at `node`, sealed by what is shared with it, or in the clear. Nothing is sent yet.
    ///
    /// # Errors
    /// The system's: there is no way there, or no room for one more socket.
    pub fn connect(node: SocketAddr, shared: Option<Shared>) -> std::io::Result<UdpLine> {
        let any: SocketAddr = match node {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let udp = UdpSocket::bind(any)?;
        udp.connect(node)?;
        let overhead = if shared.is_some() { OVERHEAD } else { 0 };
        let datagram_max = if node.ip().is_loopback() {
            LOOPBACK_MAX
        } else {
            let frame = match node {
                SocketAddr::V4(_) => rustix::net::sockopt::ip_mtu(&udp)?,
                SocketAddr::V6(_) => rustix::net::sockopt::ipv6_mtu(&udp)?,
            };
            (frame as usize).saturating_sub(HEADERS).clamp(DATAGRAM_MIN + overhead, LOOPBACK_MAX)
        };
        let seal = shared.map(|shared| Seal::new(shared, random));
        let end = End {
            socket: Socket::new(udp.try_clone()?)?,
            buffer: vec![0; PLACE].into(),
            seal,
            pid: std::process::id(),
        };
        Ok(UdpLine { udp, end: RefCell::new(end), node, datagram_max, overhead })
    }

    /// What an error says about the line. Most tell of datagrams that are lost, which are asked for again.
    fn judge(&self, error: std::io::Error) -> Result<(), Broken> {
        match error.kind() {
            // Only this machine itself can say so of a loopback address; of others anyone could.
            ErrorKind::ConnectionRefused if self.node.ip().is_loopback() => {
                Err(Broken(format!("no node serves at udp://{}", self.node)))
            }
            _ if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
                Err(Broken(format!(
                    "datagrams of {} bytes do not get to {}: raise the frame size on the way there, or use tcp://",
                    self.datagram_max, self.node
                )))
            }
            _ => Ok(()),
        }
    }
}

impl Line for UdpLine {
    const IS_RELIABLE: bool = false;

    fn datagram_max(&self) -> usize {
        self.datagram_max - self.overhead
    }

    fn inbound_bytes(&self) -> usize {
        // Half of it is for the system's own bookkeeping.
        self.end.borrow().socket.inbound_bytes() / 2
    }

    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        let End { socket, seal, pid, .. } = &mut *self.end.borrow_mut();
        if seal.is_some() && *pid != std::process::id() {
            return Err(Broken(
                "this session is of the process that this one was forked from: connect anew".into(),
            ));
        }
        let to = Some(self.node).filter(|node| !node.ip().is_loopback());
        let sent = match seal {
            None => socket.send(to, datagram),
            Some(seal) => {
                if seal.asks_anew(datagram) {
                    let _or_the_next = socket.write(to, GREETING, |out| seal.ask_anew(datagram, out));
                }
                socket.write(to, seal.sealed_len(datagram), |out| seal.seal(datagram, out))
            }
        };
        sent.or_else(|error| self.judge(error))
    }

    fn flush(&self) -> Result<(), Broken> {
        let sent = self.end.borrow_mut().socket.flush();
        sent.or_else(|error| self.judge(error))
    }

    fn receive(&self, mut take: impl FnMut(&[u8])) -> Result<bool, Broken> {
        let End { socket, buffer, seal, .. } = &mut *self.end.borrow_mut();
        let received = match seal {
            None => socket.receive(buffer, |_, datagram| take(datagram)),
            Some(seal) => socket.receive(buffer, |_, bytes| {
                if let Some(datagram) = seal.open(bytes) {
                    take(datagram);
                }
            }),
        };
        received.or_else(|error| self.judge(error).map(|()| false))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }
}
