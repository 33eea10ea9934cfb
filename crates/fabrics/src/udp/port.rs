//! The engine's end of UDP: one socket for all clients.

use super::seal::node::{Arrived, Find, Node as Seal};
use super::seal::{self, OVERHEAD};
use super::{LOOPBACK_MAX, PLACE, Socket, random};
use crate::session::carrier::{Arrival, Broken, Dropped, Outsider, Port};
use crate::together::bind_together;
use socket2::{Domain, Protocol, SockAddr, Type};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// The address of a port's client, and the number of its sealed connection, or 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UdpAddress {
    at: SocketAddr,
    connection: u32,
}

/// An engine's UDP socket, which carries the datagrams of all its clients.
pub struct UdpPort {
    socket: Socket,
    buffer: Box<[u8]>,
    seal: Option<Seal>,
    began: Instant,
}

impl UdpPort {
    /// Creates `engines` ports at one address, one per engine. The system distributes clients among the ports.
    ///
    /// # Errors
    /// The system's error: the address is not of this machine, or is in use.
    pub fn bind(address: SocketAddr, engines: usize) -> std::io::Result<Vec<UdpPort>> {
        let port = |udp| {
            let (socket, buffer) = (Socket::new(udp)?, vec![0; PLACE].into());
            Ok(UdpPort { socket, buffer, seal: None, began: Instant::now() })
        };
        bind_together(address, engines, socket, UdpSocket::local_addr)?.into_iter().map(port).collect()
    }

    /// Returns this port restricted to datagrams sealed with a secret. `find` returns the secret with a given name.
    #[must_use]
    pub fn sealed_by(self, find: Box<Find>) -> UdpPort {
        UdpPort { seal: Some(Seal::new(find, Box::new(random))), ..self }
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The system's error: the address cannot be queried.
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
    type Address = UdpAddress;

    const IS_RELIABLE: bool = false;

    fn datagram_max(&self) -> usize {
        LOOPBACK_MAX - if self.seal.is_some() { OVERHEAD } else { 0 }
    }

    fn source(address: UdpAddress) -> Option<IpAddr> {
        Some(address.at.ip())
    }

    fn receive(&mut self, mut take: impl FnMut(UdpAddress, Arrival<'_>)) -> Result<bool, Broken> {
        let UdpPort { socket, buffer, seal, .. } = self;
        let received = match seal {
            None => socket.receive(buffer, |at, bytes| {
                let arrival = match seal::greeting_nonce(bytes) {
                    Some(nonce) => Arrival::Outsider(nonce, Outsider::Sealed),
                    None => Arrival::Datagram(bytes),
                };
                take(UdpAddress { at, connection: 0 }, arrival);
            }),
            Some(seal) => socket.receive(buffer, |at, bytes| match seal.open(at, bytes) {
                Arrived::Datagram(connection, datagram) => {
                    take(UdpAddress { at, connection }, Arrival::Datagram(datagram));
                }
                Arrived::Outsider(nonce, why) => {
                    take(UdpAddress { at, connection: 0 }, Arrival::Outsider(nonce, why));
                }
                Arrived::Nothing => {}
            }),
        };
        // An error is ignored: it concerns one lost datagram, which is retransmitted, or one client that has left.
        Ok(received.unwrap_or(false))
    }

    fn send(&mut self, to: UdpAddress, datagram: &[u8]) {
        let UdpPort { socket, seal, .. } = self;
        let _lost_is_asked_for_again = match seal {
            Some(seal) if to.connection != 0 => {
                let Some(more) = seal.overhead(to.connection) else { return };
                let len = datagram.len() + more;
                socket.write(Some(to.at), len, |out| seal.seal(to.connection, datagram, out))
            }
            _ => socket.send(Some(to.at), datagram),
        };
    }

    fn flush(&mut self) {
        let _lost_is_asked_for_again = self.socket.flush();
    }

    fn connections(&self) -> usize {
        self.seal.as_ref().map_or(0, Seal::connections)
    }

    fn hang_up(&mut self, _address: UdpAddress) {}

    fn close_without_session(&mut self, known: impl Iterator<Item = UdpAddress>) {
        if let Some(seal) = &mut self.seal {
            seal.forget_strangers(self.began.elapsed(), known.map(|address| address.connection));
        }
    }

    fn dropped(&self) -> Dropped {
        self.seal.as_ref().map_or(Dropped::default(), Seal::dropped)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.udp.as_fd()
    }
}
