//! The engine's end of all its sessions: reassembles requests, runs them, and keeps the replies.
//!
//! `host` is the interface of the engine that runs the requests. `greeting` opens sessions, `receive` opens their
//! datagrams, `request` assembles and runs their requests, `session` has a session's slots and writes its datagrams,
//! and `end` ends sessions.
//!
//! A server has only one timer, which ends silent sessions. A server does not retransmit: a client asks for data that
//! it misses.
//!
//! Invariant: a slot's number only grows, by one. The request with the slot's number runs when it is complete, and
//! never again.
//! Invariant: a slot begins the next number only after the server has answered the current one.
//! Invariant: half-received requests of a session take at most [`Config::assembly_bytes`]; a session keeps one reply
//! per slot.

mod end;
mod greeting;
mod host;
mod receive;
mod request;
mod session;

pub use host::{End, Hello, Host, Outcome, Request, RequestRef, Retired};

pub(super) use end::last;

use super::packet;
use super::{Counters, DATAGRAM_MAX, DATAGRAM_MIN, MESSAGE_BYTES_MAX, Pool, WINDOW_MAX};
use end::Tombstone;
use session::{Session, State};
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::time::Duration;

/// Address of a peer of the carrier.
pub trait Address: Copy + Eq + Debug {}
impl<T: Copy + Eq + Debug> Address for T {}

/// A server's limits and grants.
#[derive(Clone, Debug)]
pub struct Config {
    /// Random number that identifies this run of the node; different after every start.
    pub node: u64,
    /// Features of this node.
    pub features: u64,
    /// Maximum size of a datagram in bytes.
    pub datagram: usize,
    /// Whether the carriers never lose, duplicate, reorder or damage datagrams.
    pub is_reliable: bool,
    /// Number of slots per session.
    pub window: usize,
    /// Maximum number of sessions.
    pub sessions_max: usize,
    /// Maximum number of bytes, including headers, that may be in flight to this server over all sessions. For a
    /// socket, use half the size of its buffer, because the system's overhead takes the other half.
    pub inbound_bytes: usize,
    /// Maximum number of bytes of half-received requests per session.
    pub assembly_bytes: usize,
    /// Maximum size in bytes of the long requests and replies of all sessions together. Above this size, a session that
    /// keeps a long reply gets no further long reply until its client has acknowledged the first.
    pub lent_bytes: usize,
    /// A session ends when its client is silent for this long.
    pub silence: Duration,
    /// Maximum number of ended sessions that are remembered.
    pub tombstones_max: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            node: 0,
            features: 0,
            datagram: 8 * 1024,
            is_reliable: false,
            window: WINDOW_MAX,
            sessions_max: 64,
            inbound_bytes: 1 << 20,
            assembly_bytes: 4 * MESSAGE_BYTES_MAX,
            lent_bytes: 256 << 20,
            silence: Duration::from_secs(5),
            tombstones_max: 256,
        }
    }
}

impl Config {
    /// Returns the credit of each session: its maximum number of bytes in flight.
    pub fn credit(&self) -> usize {
        self.inbound_bytes / self.sessions_max
    }

    fn check(&self) {
        assert!((1..=WINDOW_MAX).contains(&self.window), "a window has 1 to {WINDOW_MAX} slots");
        assert!((1..=1 << 16).contains(&self.sessions_max), "a server has 1 to 65536 sessions");
        assert!(
            (DATAGRAM_MIN..=DATAGRAM_MAX).contains(&self.datagram),
            "a datagram has {DATAGRAM_MIN} to {DATAGRAM_MAX} bytes"
        );
        assert!(
            self.credit() >= DATAGRAM_MIN && u32::try_from(self.credit()).is_ok(),
            "every session needs credit for a datagram: use fewer sessions, or more inbound bytes"
        );
        assert!(
            self.assembly_bytes >= MESSAGE_BYTES_MAX && u32::try_from(self.assembly_bytes).is_ok(),
            "a session must be able to receive the largest request"
        );
        assert!(self.silence >= Duration::from_millis(10), "a silence period has at least 10 ms");
    }
}

/// All sessions of one engine.
pub struct Server<A: Address, H: Host> {
    config: Config,
    sessions: Vec<Place<A, H::Session>>,
    /// Index of each client's session, so that a HELLO need not be compared with all of them.
    by_identity: HashMap<u128, usize>,
    /// Upper half of the number of the next session at each index.
    generations: Vec<u16>,
    tombstones: VecDeque<Tombstone>,
    /// Sessions with something to send, without duplicates.
    dirty: VecDeque<u16>,
    /// Queued responses to peers that have no session.
    outside: VecDeque<(A, Vec<u8>)>,
    pool: Pool,
    /// Buffer for replies that are probably too long for a slot's own buffer.
    reply: Vec<u8>,
    /// For each slot, offset and length of its chain in the body of the current datagram.
    chains: Box<[(usize, usize); WINDOW_MAX]>,
    counters: Counters,
}

/// A place for a session; `None` if the place is free.
type Place<A, S> = Option<Box<Session<A, S>>>;

/// Maximum number of queued responses to peers without a session, unless the carrier is reliable.
const OUTSIDE_MAX: usize = 64;

impl<A: Address, H: Host> Server<A, H> {
    /// Creates a server without sessions.
    ///
    /// # Panics
    /// If the configuration is inconsistent.
    pub fn new(config: Config) -> Server<A, H> {
        config.check();
        Server {
            sessions: Vec::new(),
            by_identity: HashMap::new(),
            generations: Vec::new(),
            tombstones: VecDeque::new(),
            dirty: VecDeque::new(),
            outside: VecDeque::new(),
            pool: Pool::default(),
            reply: Vec::new(),
            chains: Box::new([(0, 0); WINDOW_MAX]),
            counters: Counters::default(),
            config,
        }
    }

    /// Returns the traffic counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the number of sessions.
    pub fn sessions(&self) -> usize {
        self.sessions.iter().flatten().count()
    }

    /// Returns the number of bytes kept for sessions and for reuse. Lets tests check that this memory is bounded.
    pub fn kept_bytes(&self) -> usize {
        let slots = self.sessions.iter().flatten().flat_map(|session| session.slots.iter());
        let slots: usize = slots.map(|slot| slot.message.capacity() + slot.reply.capacity()).sum();
        let outside: usize = self.outside.iter().map(|(_, bytes)| bytes.capacity()).sum();
        slots + self.pool.capacity() + outside + self.reply.capacity()
    }

    /// Answers a request whose outcome was [`Outcome::Later`]. Returns false if the client no longer waits for the
    /// answer.
    ///
    /// # Panics
    /// If the answer is longer than [`BODY_BYTES_MAX`](super::BODY_BYTES_MAX).
    pub fn answer(&mut self, request: RequestRef, answer: &[u8]) -> bool {
        let Some(index) = self.index_of(request.session) else { return false };
        let session = self.sessions[index].as_mut().expect("the index was just found");
        let slot = &mut session.slots[usize::from(request.slot)];
        if slot.number != request.number || slot.state != State::Executing {
            return false;
        }
        self.pool.fill(&mut slot.reply, answer.len());
        slot.reply.extend_from_slice(answer);
        session.done(request.slot.into());
        self.mark_dirty(index);
        true
    }

    /// Iterates over the addresses of clients that have a session.
    pub fn addresses(&self) -> impl Iterator<Item = A> {
        self.sessions.iter().flatten().map(|session| session.address)
    }

    /// Returns the host's data of the session to which a request belongs, if that session is open.
    pub fn session_mut(&mut self, request: RequestRef) -> Option<&mut H::Session> {
        let index = self.index_of(request.session)?;
        self.sessions[index].as_mut().map(|session| &mut session.host)
    }

    /// Writes the next datagram into `out`, and returns its destination. Call it until it returns `None`, after all
    /// received datagrams were passed in, so that responses share datagrams.
    pub fn transmit(&mut self, out: &mut Vec<u8>) -> Option<A> {
        if let Some((address, bytes)) = self.outside.pop_front() {
            out.clear();
            out.extend_from_slice(&bytes);
            self.counters.datagrams_out += 1;
            return Some(address);
        }
        while let Some(index) = self.dirty.pop_front() {
            let Some(session) = &mut self.sessions[usize::from(index)] else { continue };
            session.is_dirty = false;
            if !session.transmit(out, &mut self.counters) {
                continue;
            }
            let address = session.address;
            if session.has_to_send() {
                self.mark_dirty(index.into());
            }
            self.seal(out);
            self.counters.datagrams_out += 1;
            return Some(address);
        }
        None
    }

    fn send_outside(&mut self, to: A, mut bytes: Vec<u8>) {
        // On a reliable carrier this response is never dropped, since the client does not retransmit. The queue stays
        // bounded, since there is at most one response per HELLO and session.
        if self.config.is_reliable || self.outside.len() < OUTSIDE_MAX {
            self.seal(&mut bytes);
            self.outside.push_back((to, bytes));
        }
    }

    fn seal(&self, out: &mut [u8]) {
        if !self.config.is_reliable {
            packet::seal(out);
        }
    }

    fn index_of(&self, number: u32) -> Option<usize> {
        let index = number as usize & 0xffff;
        let session = self.sessions.get(index)?.as_ref()?;
        (session.number == number).then_some(index)
    }

    fn mark_dirty(&mut self, index: usize) {
        let session = self.sessions[index].as_mut().expect("a session with something to send");
        if !session.is_dirty && session.has_to_send() {
            session.is_dirty = true;
            self.dirty.push_back(index as u16);
        }
    }
}
