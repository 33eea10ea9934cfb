//! Several sockets at one address, one per engine.
//!
//! Invariant: all of them have the same address, and nobody else used it when they were bound.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;

/// Maximum number of ports tried if the system chooses the port.
const TRIES: u32 = 64;

/// Binds `count` sockets to the address. If its port is 0, the system chooses one port for all of them. `bind` binds
/// one socket, alone or (if its second argument is true) beside others at the same address; `address_of` returns where
/// a socket is bound.
///
/// # Errors
/// The system's error: the address is not of this machine, or is in use.
pub(crate) fn bind_together<S>(
    address: SocketAddr,
    count: usize,
    bind: impl Fn(SocketAddr, bool) -> Result<S, Error>,
    address_of: impl Fn(&S) -> Result<SocketAddr, Error>,
) -> Result<Vec<S>, Error> {
    let mut tries = if address.port() == 0 { TRIES } else { 1 };
    loop {
        tries -= 1;
        // With shared use of a port, the system would also admit any other socket of this user, such as a second
        // node's. So a first, exclusive bind makes sure that nobody uses the port.
        let alone = bind(address, false)?;
        let chosen = address_of(&alone)?;
        drop(alone);
        match (0..count).map(|_| bind(chosen, true)).collect() {
            // Another process was given the port since.
            Err(error) if error.kind() == ErrorKind::AddrInUse && tries > 0 => {}
            bound => return bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::net::{Ipv4Addr, UdpSocket};

    /// Binds two sockets while somebody else takes the port between the exclusive and the shared bind, the given
    /// number of times. Returns the ports that were taken, and the outcome.
    fn bind_beside_a_thief(
        address: SocketAddr,
        thefts: usize,
    ) -> (Vec<UdpSocket>, Result<Vec<SocketAddr>, Error>) {
        let stolen = RefCell::new(Vec::new());
        let bound = bind_together(
            address,
            2,
            |address, is_shared| {
                if is_shared && stolen.borrow().len() < thefts {
                    stolen.borrow_mut().push(UdpSocket::bind(address)?);
                }
                let kind = socket2::Type::DGRAM;
                let socket = socket2::Socket::new(socket2::Domain::for_address(address), kind, None)?;
                socket.set_reuse_port(is_shared)?;
                socket.bind(&address.into())?;
                Ok(UdpSocket::from(socket))
            },
            UdpSocket::local_addr,
        );
        let bound = bound.and_then(|bound| bound.iter().map(UdpSocket::local_addr).collect());
        (stolen.into_inner(), bound)
    }

    #[test]
    fn another_port_is_chosen_if_the_first_is_taken_meanwhile() {
        let (stolen, bound) = bind_beside_a_thief((Ipv4Addr::LOCALHOST, 0).into(), 3);
        let bound = bound.expect("a fourth port is free");
        assert_eq!((stolen.len(), bound.len()), (3, 2));
        assert_eq!(bound[0], bound[1]);
        assert!(stolen.iter().all(|socket| socket.local_addr().expect("it is bound") != bound[0]));
    }

    #[test]
    fn a_port_that_the_caller_chose_is_in_use_if_it_is_taken_meanwhile() {
        let free = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
        let (stolen, bound) = bind_beside_a_thief(free.expect("a port"), 1);
        assert_eq!(stolen.len(), 1);
        assert_eq!(bound.expect_err("it is taken").kind(), ErrorKind::AddrInUse);
    }

    #[test]
    fn ports_that_are_always_taken_end_the_attempts() {
        let (stolen, bound) = bind_beside_a_thief((Ipv4Addr::LOCALHOST, 0).into(), usize::MAX);
        assert_eq!(stolen.len(), TRIES as usize);
        assert_eq!(bound.expect_err("all are taken").kind(), ErrorKind::AddrInUse);
    }
}
