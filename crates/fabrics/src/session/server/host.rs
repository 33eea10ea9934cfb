//! The interface between a server and the engine that runs its requests.

use super::super::packet::RETIRED;
use farside_remote::Addr;
use farside_remote::fabric::ServiceId;

/// Runs requests, and decides which clients may open a session.
pub trait Host {
    /// Data that the host keeps for each session.
    type Session;

    /// Returns 64 unpredictable bits.
    fn secret(&mut self) -> u64;

    /// Decides whether a client may open a session. If the client has an earlier session, the earlier one ends after
    /// this function returns and before the client receives the response.
    ///
    /// # Errors
    /// The client is refused. It receives the returned reason, truncated to 512 bytes.
    fn open(&mut self, hello: &Hello<'_>) -> Result<Self::Session, String>;

    /// Announces a request that will likely run soon, so that the host can prefetch its memory. Called for several
    /// chains of one validated datagram, before the first of them runs. The request's bytes are unvalidated input, like
    /// those of [`Host::run`].
    fn expect(&mut self, session: &mut Self::Session, request: Request<'_>) {
        let _ = (session, request);
    }

    /// Tells the host that [`Host::expect`] was called for all requests of a datagram, so that it can prefetch.
    fn ready(&mut self) {}

    /// Runs a request, and appends the response to `reply`, which is empty. The request's bytes are unvalidated input.
    fn run(
        &mut self,
        session: &mut Self::Session,
        at: RequestRef,
        request: Request<'_>,
        reply: &mut Vec<u8>,
    ) -> Outcome;

    /// Called when a session has ended. Unsent responses are dropped.
    fn close(&mut self, session: Self::Session, end: End);
}

/// Reason why a session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client has ended it with a BYE.
    Said,
    /// The client was silent for too long.
    Silent,
    /// A newer incarnation of the client has replaced this session.
    Replaced,
    /// The client's carrier broke.
    Broken,
    /// The host has chosen this session in [`Server::end_where`](super::Server::end_where).
    Revoked,
    /// The host has chosen this session in [`Server::end_where`](super::Server::end_where), since another client has
    /// fenced its client.
    Fenced,
}

/// A client's request for a session.
#[derive(Clone, Copy, Debug)]
pub struct Hello<'a> {
    /// Number that identifies the client in all its incarnations.
    pub identity: u128,
    /// Number of the client's incarnation. It ends the session of any lower incarnation of this client.
    pub incarnation: u64,
    /// The features that the client requires. This node has all of them.
    pub features: u64,
    /// Token that the client presents.
    pub token: &'a [u8],
}

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// Runs this chain.
    Chain(&'a [u8]),
    /// Calls this service, with these bytes as the request.
    Call(ServiceId, &'a [u8]),
    /// Retires these buffers.
    Retire(Retired<'a>),
}

/// Buffers that the session has allocated and never published, with their regions.
#[derive(Clone, Copy, Debug)]
pub struct Retired<'a>(pub(super) &'a [u8]);

impl Iterator for Retired<'_> {
    type Item = (u32, Addr);

    fn next(&mut self) -> Option<(u32, Addr)> {
        let (one, rest) = self.0.split_at_checked(RETIRED)?;
        self.0 = rest;
        let word = |at: usize| u64::from_le_bytes(one[at..at + 8].try_into().expect("a word has 8 bytes"));
        // The upper half of the first word is reserved and ignored.
        Some((word(0) as u32, Addr::new(word(8))))
    }
}

/// Identifies a request of a session whose response follows later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestRef {
    pub(super) session: u32,
    pub(super) slot: u8,
    pub(super) number: u32,
}

/// State of a request after [`Host::run`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request has run; the reply is written.
    Done,
    /// The host will pass the response to [`Server::answer`](super::Server::answer) later.
    Later,
}
