//! Carriers of datagrams between a client and an engine: sockets, or rings in shared memory.
//!
//! A [`Line`] is the client's end. A [`Port`] is an engine's end, with all its clients. Neither blocks: its user polls
//! for a while, then sleeps on its descriptor.
//!
//! Invariant: a datagram passed to `send` leaves by the next flush at the latest, or is lost. A reliable carrier loses
//! datagrams only by breaking.

use super::server::Address;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The carrier carries nothing more, for the reason that this contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken(pub String);

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Broken {
        Broken(error.to_string())
    }
}

impl From<rustix::io::Errno> for Broken {
    fn from(errno: rustix::io::Errno) -> Broken {
        std::io::Error::from(errno).into()
    }
}

/// The client's end. Belongs to one thread.
pub trait Line {
    /// Whether every datagram arrives exactly once and in order.
    const IS_RELIABLE: bool;

    /// Maximum size of a datagram in bytes that is carried efficiently.
    fn datagram_max(&self) -> usize;

    /// Number of received bytes that it can buffer.
    fn inbound_bytes(&self) -> usize;

    /// Queues a datagram for sending.
    ///
    /// # Errors
    /// The carrier is broken.
    fn send(&self, datagram: &[u8]) -> Result<(), Broken>;

    /// Sends the queued datagrams.
    ///
    /// # Errors
    /// The carrier is broken.
    fn flush(&self) -> Result<(), Broken>;

    /// Passes received datagrams to `take`, without blocking. Returns false if there were none.
    ///
    /// # Errors
    /// The carrier is broken. Datagrams that had arrived before were passed on.
    fn receive(&self, take: impl FnMut(&[u8])) -> Result<bool, Broken>;

    /// A descriptor that is readable when datagrams may have arrived, if [`Line::may_sleep`] was called before.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Arms notifications through the descriptor. Returns false if something has already arrived.
    fn may_sleep(&self) -> bool {
        true
    }

    /// Maximum time to sleep even if nothing arrives, if the carrier has work to do at a certain time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}

/// An event at an engine's port.
pub enum Arrival<'a> {
    /// A datagram.
    Datagram(&'a [u8]),
    /// The client's carrier is closed.
    HungUp,
    /// A greeting that the carrier rejects. The server should refuse it with this nonce.
    Outsider(u64, Outsider),
}

/// Why a carrier rejects a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outsider {
    /// It is sealed with an unknown secret, or was changed in transit.
    WrongSeal,
    /// It is unsealed, but the port requires seals.
    Unsealed {
        /// Whether it contains a token, which was not checked.
        shows_token: bool,
    },
    /// It is sealed, but the port accepts no seals.
    Sealed,
    /// It is sealed in another version.
    Version {
        /// The client's version.
        theirs: u8,
        /// This node's version.
        ours: u8,
    },
}

/// Counts of datagrams dropped by a port because no known client has sent them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Datagrams that were not sealed with the right key, or were changed in transit.
    pub forged: u64,
    /// Datagrams received before.
    pub replayed: u64,
}

/// An engine's end, with all its clients. Belongs to one thread at a time.
pub trait Port: Send {
    /// Address of a client's carrier.
    type Address: Address;

    /// Whether every datagram arrives exactly once and in order.
    const IS_RELIABLE: bool;

    /// Maximum size of a datagram in bytes that is carried efficiently.
    fn datagram_max(&self) -> usize;

    /// IP address of the client's machine. `None` if all clients are on this machine.
    fn source(_address: Self::Address) -> Option<IpAddr> {
        None
    }

    /// Passes received datagrams to `take`, at most one batch, without blocking. Returns false if there were none.
    ///
    /// # Errors
    /// The port is broken for all clients.
    fn receive(&mut self, take: impl FnMut(Self::Address, Arrival<'_>)) -> Result<bool, Broken>;

    /// Queues a datagram for sending. If it cannot be sent it is lost; a reliable carrier ends then, and
    /// [`Port::receive`] reports that.
    fn send(&mut self, to: Self::Address, datagram: &[u8]);

    /// Sends the queued datagrams.
    fn flush(&mut self);

    /// Number of client carriers, including those without a session. While it is not 0, the engine must wake now and
    /// then to close silent ones; it is 0 if the port keeps no carriers.
    fn connections(&self) -> usize;

    /// Closes a client's carrier after its queued datagrams are sent.
    fn hang_up(&mut self, address: Self::Address);

    /// Closes carriers that have existed for a while and are not in `known`.
    fn close_without_session(&mut self, known: impl Iterator<Item = Self::Address>);

    /// Counts of datagrams dropped so far.
    fn dropped(&self) -> Dropped;

    /// A descriptor that is readable when datagrams may have arrived, if [`Port::may_sleep`] was called before.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Arms notifications through the descriptor. Returns false if something has already arrived.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Maximum time to sleep even if nothing arrives, if the carrier has work to do at a certain time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}
