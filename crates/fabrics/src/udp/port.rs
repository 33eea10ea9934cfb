//! An engine's socket.

use super::{LOOPBACK_MAX, PLACE, Socket};
use crate::session::carrier::{Arrival, Broken, Port};
use socket2::{Domain, Protocol, SockAddr, Type};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

/// An engine's end of UDP.
pub struct UdpPort {
    socket: Socket,
    buffer: Box<[u8]>,
}

impl UdpPort {
    /// Ports for so many engines, all at one address, among which the system deals out clients.
    ///
    /// # Errors
    /// The system's: the address is none of this machine's, or another has it.
    pub fn bind(address: SocketAddr, engines: usize) -> std::io::Result<Vec<UdpPort>> {
        // Sockets that share a port do so with any other of this user, a second node's too: so first alone.
        let alone = socket(address, false)?;
        let address = alone.local_addr()?;
        drop(alone);
        (0..engines)
            .map(|_| {
                let udp = socket(address, true)?;
                Ok(UdpPort { socket: Socket::new(udp)?, buffer: vec![0; PLACE].into() })
            })
            .collect()
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.socket.udp.local_addr()
    }
}

fn socket(address: SocketAddr, is_shared: bool) -> std::io::Result<UdpSocket> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(is_shared)?;
    socket.bind(&SockAddr::from(address))?;
    Ok(socket.into())
}

impl Port for UdpPort {
    type Address = SocketAddr;

    const IS_RELIABLE: bool = false;

    fn datagram_max(&self) -> usize {
        LOOPBACK_MAX
    }

    fn source(address: SocketAddr) -> Option<IpAddr> {
        Some(address.ip())
    }

    fn receive(&mut self, mut take: impl FnMut(SocketAddr, Arrival<'_>)) -> Result<bool, Broken> {
        let received =
            self.socket.receive(&mut self.buffer, |from, datagram| take(from, Arrival::Datagram(datagram)));
        // An error tells of one datagram, or of somebody who has gone: whoever misses something asks again.
        Ok(received.unwrap_or(false))
    }

    fn send(&mut self, to: SocketAddr, datagram: &[u8]) {
        let _lost_is_asked_for_again = self.socket.send(Some(to), datagram);
    }

    fn flush(&mut self) {
        let _lost_is_asked_for_again = self.socket.flush();
    }

    fn connections(&self) -> usize {
        0
    }

    fn hang_up(&mut self, _address: SocketAddr) {}

    fn hang_up_on_strangers(&mut self, _known: impl Iterator<Item = SocketAddr>) {}

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.udp.as_fd()
    }
}
