//! What carries datagrams between a client and an engine: a socket, or rings in shared memory.
//!
//! A [`Line`] is the client's end, a [`Port`] an engine's, with all its clients. Neither waits: whoever uses it spins
//! for a while, then sleeps by its descriptor. Invariant: what was taken to be sent leaves by the next flush at the
//! latest, or is lost; a reliable carrier loses nothing but by breaking.

use super::server::Address;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The carrier will carry nothing more, for the reason that it contains.
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
    /// Whether every datagram arrives, once and in order.
    const IS_RELIABLE: bool;

    /// The most bytes of a datagram that it carries well.
    fn datagram_max(&self) -> usize;

    /// How many bytes it holds until they are looked at.
    fn inbound_bytes(&self) -> usize;

    /// Takes a datagram to be sent.
    ///
    /// # Errors
    /// Nothing more will be carried.
    fn send(&self, datagram: &[u8]) -> Result<(), Broken>;

    /// Sends what was taken.
    ///
    /// # Errors
    /// Nothing more will be carried.
    fn flush(&self) -> Result<(), Broken>;

    /// Hands on what has arrived, without waiting. False if nothing has.
    ///
    /// # Errors
    /// Nothing more will be carried. What had arrived before was handed on.
    fn receive(&self, take: impl FnMut(&[u8])) -> Result<bool, Broken>;

    /// Can be read from when something may have arrived, if [`Line::may_sleep`] was asked before.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Asks to be woken by the descriptor. False if something has arrived meanwhile.
    fn may_sleep(&self) -> bool {
        true
    }

    /// How long one may sleep at most although nothing arrives, where that matters: something waits for its time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}

/// What an engine's port has received.
pub enum Arrival<'a> {
    /// These bytes.
    Datagram(&'a [u8]),
    /// This client's carrier is gone.
    HungUp,
    /// A greeting that the carrier does not let through: to be refused, with this nonce.
    Outsider(u64, Outsider),
}

/// Why a carrier lets a greeting not through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outsider {
    /// It is sealed by nothing that is known here, or was changed on its way.
    WrongSeal,
    /// It came in the clear where all is sealed.
    Unsealed {
        /// Whether it shows a token, which was not looked at.
        shows_token: bool,
    },
    /// It is sealed where nothing is.
    Sealed,
    /// It is sealed in another way.
    Version {
        /// The client's.
        theirs: u8,
        /// This node's.
        ours: u8,
    },
}

/// What a port has dropped that nobody it knows has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Datagrams that were not sealed by whoever has the key, or were changed on their way.
    pub forged: u64,
    /// Datagrams that had come before.
    pub replayed: u64,
}

/// An engine's end, with all its clients. Belongs to one thread at a time.
pub trait Port: Send {
    /// Names a client's carrier.
    type Address: Address;

    /// Whether every datagram arrives, once and in order.
    const IS_RELIABLE: bool;

    /// The most bytes of a datagram that it carries well.
    fn datagram_max(&self) -> usize;

    /// The machine that this client is at, as far as the carrier can tell; nothing where all are at this one.
    fn source(_address: Self::Address) -> Option<IpAddr> {
        None
    }

    /// Hands on what has arrived, without waiting: not more than a batch. False if nothing has.
    ///
    /// # Errors
    /// Nothing more will be carried for anyone.
    fn receive(&mut self, take: impl FnMut(Self::Address, Arrival<'_>)) -> Result<bool, Broken>;

    /// Takes a datagram to be sent. What cannot be sent is lost, or, on a reliable carrier, ends it: then
    /// [`Port::receive`] will tell.
    fn send(&mut self, to: Self::Address, datagram: &[u8]);

    /// Sends what was taken.
    fn flush(&mut self);

    /// How many clients' carriers it holds, those without a session too: who says nothing for too long is to be let go
    /// of, so that time may bring something to do though nothing arrives. None where it holds none.
    fn connections(&self) -> usize;

    /// Lets go of a client, when all that was taken for it has left.
    fn hang_up(&mut self, address: Self::Address);

    /// Lets go of those who have been there for a while and are not among the known.
    fn hang_up_on_strangers(&mut self, known: impl Iterator<Item = Self::Address>);

    /// What it has dropped so far.
    fn dropped(&self) -> Dropped;

    /// Can be read from when something may have arrived, if [`Port::may_sleep`] was asked before.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Asks to be woken by the descriptor. False if something has arrived meanwhile.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// How long one may sleep at most although nothing arrives, where that matters: something waits for its time.
    fn sleep_max(&self) -> Option<Duration> {
        None
    }
}
