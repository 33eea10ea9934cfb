//! Carriers of datagrams between a client and an engine: sockets, or rings in shared memory.
//!
//! A [`Line`] is the client's end. A [`Port`] is an engine's end of its connections to all clients. No function of
//! either blocks: the caller polls for a while, then sleeps until the descriptor is readable. [`Datagrams`] and
//! [`Arrivals`] are all that a session needs of a line, so a session needs no descriptor.
//!
//! Invariant: a datagram passed to `send` leaves at the next flush, or earlier, or is lost. A reliable carrier loses
//! datagrams only when it breaks.

use super::server::Address;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::Duration;

/// Error: the carrier is unusable. Contains the reason.
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

/// The datagrams of a client's session, whatever carries them. Belongs to one thread.
pub trait Datagrams {
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
}

/// Wakes the task that drives a session when datagrams may have arrived.
pub trait Arrivals {
    /// Wakes `waker` once, at the next arrival, or now if something has arrived already.
    fn arm(&self, waker: &Waker);

    /// Returns the maximum time to sleep even if nothing arrives; `None` if the carrier has no work to do at a certain
    /// time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}

/// The client's end of a carrier: its datagrams, its properties, and a descriptor to sleep on. Belongs to one thread.
pub trait Line: Datagrams {
    /// Whether every datagram arrives exactly once and in order.
    const IS_RELIABLE: bool;

    /// Maximum size of a datagram in bytes. Larger ones might be carried, but less efficiently.
    fn datagram_max(&self) -> usize;

    /// Number of received bytes that the carrier can buffer.
    fn inbound_bytes(&self) -> usize;

    /// Returns a descriptor. After [`Line::may_sleep`] the descriptor becomes readable when datagrams may have arrived.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Makes the descriptor readable on the next arrival. Returns false if something has already arrived.
    fn may_sleep(&self) -> bool {
        true
    }

    /// Returns the maximum time to sleep even if nothing arrives; `None` if the carrier has no work to do at a certain
    /// time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}

/// An event at an engine's port.
pub enum Arrival<'a> {
    /// A datagram has arrived.
    Datagram(&'a [u8]),
    /// The client's carrier has closed.
    HungUp,
    /// A greeting has arrived that the carrier rejects: the greeting's nonce, and the reason. The server should send a
    /// refusal with this nonce.
    Outsider(u64, Outsider),
}

/// Reason why a carrier rejects a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outsider {
    /// The greeting is sealed with an unknown secret, or was changed in transit.
    WrongSeal,
    /// The greeting is unsealed, but the port requires seals.
    Unsealed {
        /// Whether the greeting contains a token. The token was not checked.
        shows_token: bool,
    },
    /// The greeting is sealed, but the port accepts no seals.
    Sealed,
    /// The greeting is sealed in another version of the format.
    Version {
        /// The version of the client.
        theirs: u8,
        /// The version of this node.
        ours: u8,
    },
}

/// Numbers of datagrams that a port dropped because they did not provably come from a known client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Number of datagrams that were not sealed with the right key, or were changed in transit.
    pub forged: u64,
    /// Number of datagrams that had been received before.
    pub replayed: u64,
}

/// An engine's end of a carrier, for all its clients. Belongs to one thread at a time.
pub trait Port: Send {
    /// Address of a client's carrier.
    type Address: Address;

    /// Whether every datagram arrives exactly once and in order.
    const IS_RELIABLE: bool;

    /// Maximum size of a datagram in bytes. Larger ones might be carried, but less efficiently.
    fn datagram_max(&self) -> usize;

    /// Returns the IP address of the client's machine, or `None` if all clients are on this machine.
    fn source(_address: Self::Address) -> Option<IpAddr> {
        None
    }

    /// Passes received datagrams to `take`, at most one batch, without blocking. Returns false if there were none.
    ///
    /// # Errors
    /// The port is broken for all clients.
    fn receive(&mut self, take: impl FnMut(Self::Address, Arrival<'_>)) -> Result<bool, Broken>;

    /// Queues a datagram for sending. If the datagram cannot be sent, it is lost. On a reliable carrier, the loss
    /// closes the client's carrier, and [`Port::receive`] reports that.
    fn send(&mut self, to: Self::Address, datagram: &[u8]);

    /// Sends the queued datagrams.
    fn flush(&mut self);

    /// Returns the number of client carriers, including those without a session; 0 if the port keeps no carriers. While
    /// the number is not 0, the engine must wake now and then to call [`Port::close_without_session`].
    fn connections(&self) -> usize;

    /// Closes a client's carrier after its queued datagrams are sent.
    fn hang_up(&mut self, address: Self::Address);

    /// Closes client carriers that were accepted a few seconds ago or earlier and are not in `known`, the set of those
    /// with a session.
    fn close_without_session(&mut self, known: impl Iterator<Item = Self::Address>);

    /// Returns the numbers of datagrams dropped so far.
    fn dropped(&self) -> Dropped;

    /// Returns a descriptor. After [`Port::may_sleep`] the descriptor becomes readable when datagrams may have arrived.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Makes the descriptor readable on the next arrival. Returns false if something has already arrived.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Returns the maximum time to sleep even if nothing arrives; `None` if the carrier has no work to do at a certain
    /// time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}
