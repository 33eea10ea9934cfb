//! A client's UDP socket, connected to one node.

use super::seal::client::Client as Seal;
use super::seal::{GREETING, OVERHEAD, Shared};
use super::{HEADERS, LOOPBACK_MAX, PLACE, Socket, random};
use crate::session::DATAGRAM_MIN;
use crate::session::carrier::{Broken, Datagrams, Line};
use std::cell::RefCell;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// A client's UDP socket, which carries one session's datagrams, sealed or in the clear.
pub struct UdpLine {
    /// A duplicate of the descriptor in `socket`, so that it can be lent while `end` is borrowed.
    udp: UdpSocket,
    end: RefCell<End>,
    node: SocketAddr,
    /// Maximum size of a datagram, including the overhead of a seal.
    datagram_max: usize,
    overhead: usize,
}

struct End {
    socket: Socket,
    buffer: Box<[u8]>,
    seal: Option<Seal>,
    /// Id of the process that owns the seal. A forked child has copies of the seal's keys and counters, and must not
    /// seal with them.
    pid: u32,
}

impl UdpLine {
    /// Creates a line to the node at the address `node`. Datagrams are sealed with `shared`, or sent in the clear if
    /// `shared` is absent. Sends nothing.
    ///
    /// # Errors
    /// The system's error: no route, or no free descriptor.
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

    /// Decides whether an error ends the line. Most errors only mean that a datagram was lost, which is then
    /// retransmitted.
    fn judge(&self, error: std::io::Error) -> Result<(), Broken> {
        match error.kind() {
            // For a loopback address, only this machine can report the error. For other addresses, anyone could forge
            // the report.
            ErrorKind::ConnectionRefused if self.node.ip().is_loopback() => {
                Err(Broken(format!("no node serves at udp://{}", self.node)))
            }
            _ if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
                Err(Broken(format!(
                    "datagrams of {} bytes do not reach {}: raise the MTU of the path, or use tcp://",
                    self.datagram_max, self.node
                )))
            }
            _ => Ok(()),
        }
    }
}

impl Datagrams for UdpLine {
    fn send(&self, datagram: &[u8]) -> Result<(), Broken> {
        let End { socket, seal, pid, .. } = &mut *self.end.borrow_mut();
        if seal.is_some() && *pid != std::process::id() {
            return Err(Broken(
                "this session belongs to the parent of this forked process: connect again".into(),
            ));
        }
        let to = Some(self.node).filter(|node| !node.ip().is_loopback());
        let sent = match seal {
            None => socket.send(to, datagram),
            Some(seal) => {
                if seal.needs_greeting(datagram) {
                    let _or_the_next = socket.write(to, GREETING, |out| seal.seal_in_greeting(datagram, out));
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
}

impl Line for UdpLine {
    const IS_RELIABLE: bool = false;

    fn datagram_max(&self) -> usize {
        self.datagram_max - self.overhead
    }

    fn inbound_bytes(&self) -> usize {
        // Half of the buffer is counted: the system's overhead takes the other half.
        self.end.borrow().socket.inbound_bytes() / 2
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }
}
