//! The engine's end of all its sessions: reassembles requests, runs them, and keeps the replies.
//!
//! A server has only one timer, which ends silent sessions. A server does not retransmit: a client asks for data that
//! it misses.
//!
//! Invariant: a slot's number only grows, by one. The request with the slot's number runs when it is complete, and
//! never again.
//! Invariant: a slot begins the next number only after the server has answered the current one.
//! Invariant: half-received requests of a session take at most [`Config::assembly_bytes`]; a session keeps one reply
//! per slot.

use super::packet::{
    self, Datagram, Entries, Entry, EntryKind, Foreign, HEADER, HelloBytes, Kind, LastBytes, Message, PREFIX,
    PacketError, RETIRED, VERSION, WelcomeBytes, all, chunk, extent, footprint, fragments,
};
use super::{
    BODY_BYTES_MAX, Buffer, Counters, DATAGRAM_MAX, DATAGRAM_MIN, KEPT_BYTES_MAX, MESSAGE_BYTES_MAX, Pool,
    REASON_BYTES_MAX, TOKEN_BYTES_MAX, WINDOW_MAX, first, newer, ones,
};
use crate::mutants;
use farside_remote::Addr;
use farside_remote::fabric::ServiceId;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::time::Duration;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Address of a peer of the carrier.
pub trait Address: Copy + Eq + Debug {}
impl<T: Copy + Eq + Debug> Address for T {}

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
    /// The host has chosen this session in [`Server::end_where`].
    Revoked,
    /// The host has chosen this session in [`Server::end_where`], since another client has fenced its client.
    Fenced,
}

/// A client's request for a session.
#[derive(Clone, Copy, Debug)]
pub struct Hello<'a> {
    /// Number that identifies the client in all its incarnations.
    pub identity: u128,
    /// Number of the client's incarnation. It ends the session of any lower incarnation of this client.
    pub incarnation: u64,
    /// The features that the client requires, all of which this node has.
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
pub struct Retired<'a>(&'a [u8]);

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
    session: u32,
    slot: u8,
    number: u32,
}

/// State of a request after [`Host::run`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request has run; the reply is written.
    Done,
    /// The host will pass the response to [`Server::answer`] later.
    Later,
}

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

struct Session<A, S> {
    number: u32,
    address: A,
    secret: u64,
    identity: u128,
    incarnation: u64,
    /// The HELLO's body without its trailing zeros.
    hello: Box<[u8]>,
    host: S,
    datagram: usize,
    chunk: usize,
    /// Number of fragments of a reply that are sent before the client asks for more by a HAVE entry.
    eager: usize,
    heard: Duration,
    executions: u64,
    /// Size in bytes of the requests that are half received.
    assembling: usize,
    is_dirty: bool,
    pong: bool,
    /// Whether a chain's reply exceeded a slot's own buffer; if so, further replies are likely to do the same.
    has_long_replies: bool,
    /// Bitmap of the slots for which to send a HAVE entry.
    send_have: u64,
    /// Bitmap of the slots with reply fragments to send.
    send_reply: u64,
    slots: Box<[Slot]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Some fragments of the request have arrived, but not all.
    Receiving,
    /// The request is running; the response follows later.
    Executing,
    /// The request was answered, or will never run; or the slot has had no request.
    Done,
    /// The client has the whole response, so the server has freed it.
    Acknowledged,
}

struct Slot {
    number: u32,
    state: State,
    kind: EntryKind,
    size: usize,
    got: u64,
    message: Buffer,
    /// Execution number of the slot's request within the session; 0 if it has not run.
    execution: u64,
    reply: Buffer,
    /// Bitmap of the reply's fragments to send.
    send: u64,
}

/// The record of an ended session.
struct Tombstone {
    number: u32,
    secret: u64,
    identity: u128,
    incarnation: u64,
    slots: Box<[LastBytes]>,
    is_fenced: bool,
}

/// States of a slot's last request in a tombstone.
pub(super) mod last {
    /// The request did not run, and never will.
    pub(crate) const NO: u32 = 0;
    /// Flag: the request ran.
    pub(crate) const RAN: u32 = 1;
    /// The request was running when the session ended.
    pub(crate) const RUNNING: u32 = 2;
}

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

    /// Handles a received datagram, and runs the requests that it completes.
    ///
    /// # Errors
    /// The datagram had no effect, for the returned reason, which may be logged. The counters include it.
    pub fn receive(&mut self, now: Duration, from: A, bytes: &[u8], host: &mut H) -> Result<(), PacketError> {
        self.counters.datagrams_in += 1;
        let result = self.take_in(now, from, bytes, host);
        match result {
            Ok(()) | Err(PacketError::Session(_)) => {}
            Err(PacketError::Secret) => self.counters.bad_secrets += 1,
            Err(_) => self.counters.malformed += 1,
        }
        result
    }

    fn take_in(&mut self, now: Duration, from: A, bytes: &[u8], host: &mut H) -> Result<(), PacketError> {
        let datagram = match Datagram::decode(bytes, self.config.is_reliable) {
            Err(PacketError::Version(version)) => {
                self.refuse_version(from, bytes);
                return Err(PacketError::Version(version));
            }
            datagram => datagram?,
        };
        match datagram.kind {
            Kind::Hello => return self.hello(now, from, &datagram, bytes.len(), host),
            Kind::Data | Kind::Ping | Kind::Bye => {}
            kind => return Err(PacketError::Kind(kind as u8)),
        }
        let Some(index) = self.index_of(datagram.session) else {
            return self.gone(from, &datagram);
        };
        let session = self.sessions[index].as_mut().expect("the index was just found");
        if !packet::same(session.secret, datagram.secret) {
            return Err(PacketError::Secret);
        }
        if session.address != from {
            self.counters.refused += 1;
            return Ok(());
        }
        match datagram.kind {
            Kind::Data => {
                let chains = &mut self.chains;
                let (mut begins, mut count) = (0_u64, 0);
                let entries = Entries::validate(datagram.body, session.chunk, |at, entry| {
                    count += 1;
                    if session.begins_chain(entry) {
                        begins |= 1 << entry.slot;
                        chains[entry.slot] = (at, at + entry.payload.len());
                    }
                })?;
                self.counters.entries_in += u64::from(count);
                session.heard = now;
                let mut session = self.sessions[index].take().expect("the index was just found");
                // A single chain would not profit from prefetching.
                if begins.count_ones() > 1 {
                    for slot in ones(begins) {
                        let (from, to) = self.chains[slot];
                        host.expect(&mut session.host, Request::Chain(&datagram.body[from..to]));
                    }
                    host.ready();
                }
                let has_others = begins.count_ones() != count;
                if has_others || self.pool.lent > self.config.lent_bytes {
                    for entry in entries {
                        self.entry(&mut session, &entry, host);
                    }
                } else {
                    for slot in ones(begins) {
                        self.begin(&mut session, slot);
                        let (from, to) = self.chains[slot];
                        self.run(&mut session, slot, EntryKind::Chain, &datagram.body[from..to], host);
                    }
                }
                self.sessions[index] = Some(session);
            }
            _ if !datagram.body.is_empty() => return Err(PacketError::Length),
            Kind::Ping => {
                session.heard = now;
                session.pong = true;
            }
            _ => {
                self.end(index, End::Said, host);
                return Ok(());
            }
        }
        self.mark_dirty(index);
        Ok(())
    }

    /// Answers a request whose outcome was [`Outcome::Later`]. Returns false if the client no longer waits for the
    /// answer.
    ///
    /// # Panics
    /// If the answer is longer than [`BODY_BYTES_MAX`].
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

    /// Ends sessions that were silent for too long. Call it several times per silence period.
    pub fn expire(&mut self, now: Duration, host: &mut H) {
        for index in 0..self.sessions.len() {
            let Some(session) = &mut self.sessions[index] else { continue };
            if now.saturating_sub(session.heard) >= self.config.silence {
                self.end(index, End::Silent, host);
            }
        }
    }

    /// Ends the sessions of this address, whose carrier is closed. Nothing more is sent there.
    pub fn hang_up(&mut self, address: A, host: &mut H) {
        self.outside.retain(|(to, _)| *to != address);
        for index in 0..self.sessions.len() {
            if self.sessions[index].as_ref().is_some_and(|session| session.address == address) {
                self.end(index, End::Broken, host);
            }
        }
    }

    /// Ends the sessions for which `is_chosen` returns true, such as those of a revoked token, for the reason `end`.
    /// `is_chosen` may change the host's data of the sessions that stay.
    pub fn end_where(&mut self, host: &mut H, end: End, mut is_chosen: impl FnMut(&mut H::Session) -> bool) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].as_mut().is_some_and(|session| is_chosen(&mut session.host)) {
                self.end(index, end, host);
            }
        }
    }

    fn hello(
        &mut self,
        now: Duration,
        from: A,
        datagram: &Datagram<'_>,
        len: usize,
        host: &mut H,
    ) -> Result<(), PacketError> {
        if len < DATAGRAM_MIN {
            return Err(PacketError::Length);
        }
        let (fixed, rest) = HelloBytes::ref_from_prefix(datagram.body).map_err(|_| PacketError::Length)?;
        let token = rest.get(..fixed.token.get() as usize).ok_or(PacketError::Length)?;
        let asked = fixed.datagram.get() as usize;
        if token.len() > TOKEN_BYTES_MAX {
            return Err(PacketError::Field("token"));
        }
        if !(DATAGRAM_MIN..=DATAGRAM_MAX).contains(&asked) {
            return Err(PacketError::Field("limit of datagrams"));
        }
        let hello = Hello {
            identity: fixed.identity.get(),
            incarnation: fixed.incarnation.get(),
            features: fixed.features.get(),
            token,
        };
        let nonce = datagram.secret;
        let said = &datagram.body[..size_of::<HelloBytes>() + token.len()];
        let old = self.by_identity.get(&hello.identity).copied();
        if let Some(session) = old.and_then(|index| self.sessions[index].as_ref())
            && session.incarnation == hello.incarnation
        {
            if session.address == from && packet::same_bytes(&session.hello, said) {
                self.counters.duplicates += 1;
                let welcome = self.welcome(session, nonce);
                self.send_outside(from, welcome);
            } else {
                self.refuse(
                    from,
                    nonce,
                    "this incarnation of the client has a session; say hello with a higher one",
                );
            }
            return Ok(());
        }
        let live = old.and_then(|index| self.sessions[index].as_ref()).map(|session| session.incarnation);
        let ended = self.tombstones.iter().filter(|tombstone| tombstone.identity == hello.identity);
        if let Some(latest) = ended.map(|tombstone| tombstone.incarnation).chain(live).max()
            && latest >= hello.incarnation
        {
            let reason = format!(
                "incarnation {} of the client is over: this node has seen {latest}; say hello with a higher one",
                hello.incarnation
            );
            self.refuse(from, nonce, &reason);
            return Ok(());
        }
        if hello.features & !self.config.features != 0 {
            let reason = format!(
                "the client asks for features {:#x}, this node has {:#x}; use a node and a client of one release",
                hello.features, self.config.features
            );
            self.refuse(from, nonce, &reason);
            return Ok(());
        }
        let is_full = self.sessions() == self.config.sessions_max;
        if is_full && old.is_none() {
            self.expire(now, host);
            if self.sessions() == self.config.sessions_max {
                let reason =
                    format!("this node has {} sessions and grants no more", self.config.sessions_max);
                self.refuse(from, nonce, &reason);
                return Ok(());
            }
        }
        let opened = match host.open(&hello) {
            Ok(opened) => opened,
            Err(reason) => {
                self.refuse(from, nonce, &reason);
                return Ok(());
            }
        };
        // The old session ends before the response to the new one is sent, so none of its chains runs after the client
        // has received that response.
        if let Some(index) = old.filter(|_| !mutants::OLD_SESSION_LIVES.is_on()) {
            self.end(index, End::Replaced, host);
        }
        let secret = host.secret();
        let index = self.vacant(host);
        let generation = self.generations[index].wrapping_add(1);
        self.generations[index] = generation;
        let datagram = asked.min(self.config.datagram).min(self.config.credit());
        let chunk = chunk(datagram);
        let inbound = fixed.inbound.get() as usize;
        let session = Box::new(Session {
            number: u32::from(generation) << 16 | index as u32,
            address: from,
            secret,
            identity: hello.identity,
            incarnation: hello.incarnation,
            hello: said.into(),
            host: opened,
            datagram,
            chunk,
            eager: (inbound / self.config.window / datagram).clamp(1, 64),
            heard: now,
            executions: 0,
            assembling: 0,
            is_dirty: false,
            pong: false,
            has_long_replies: false,
            send_have: 0,
            send_reply: 0,
            slots: (0..self.config.window).map(|_| Slot::new()).collect(),
        });
        let welcome = self.welcome(&session, nonce);
        self.by_identity.insert(session.identity, index);
        self.sessions[index] = Some(session);
        self.counters.opened += 1;
        self.send_outside(from, welcome);
        Ok(())
    }

    /// Returns the index of a free place. Adds a place if all are taken.
    fn vacant(&mut self, host: &mut H) -> usize {
        if let Some(index) = self.sessions.iter().position(Option::is_none) {
            return index;
        }
        self.sessions.push(None);
        // The value is random, so that a session of an earlier run of the node is not mistaken for one of this run.
        self.generations.push(host.secret() as u16);
        self.sessions.len() - 1
    }

    fn welcome(&self, session: &Session<A, H::Session>, nonce: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        packet::begin(&mut bytes, Kind::Welcome, 0, nonce);
        let welcome = WelcomeBytes {
            secret: U64::new(session.secret),
            node: U64::new(self.config.node),
            features: U64::new(self.config.features),
            session: U32::new(session.number),
            datagram: U32::new(session.datagram as u32),
            credit: U32::new(self.config.credit() as u32),
            assembly: U32::new(self.config.assembly_bytes as u32),
            silence_ms: U32::new(u32::try_from(self.config.silence.as_millis()).unwrap_or(u32::MAX)),
            window: self.config.window as u8,
            eager: session.eager as u8,
            reserved: U16::ZERO,
        };
        bytes.extend_from_slice(welcome.as_bytes());
        bytes
    }

    /// Refuses a session to the client whose HELLO has this nonce.
    pub fn refuse(&mut self, to: A, nonce: u64, reason: &str) {
        self.counters.refused += 1;
        let mut bytes = Vec::new();
        packet::begin(&mut bytes, Kind::Refused, 0, nonce);
        // The limit may cut a character in two; the client decodes the text leniently.
        bytes.extend_from_slice(&reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)]);
        self.send_outside(to, bytes);
    }

    fn refuse_version(&mut self, to: A, bytes: &[u8]) {
        // Only a datagram of the size of a HELLO is answered, so that the response is never longer than the datagram.
        if let Some(foreign) = Foreign::decode(bytes)
            && foreign.kind == Kind::Hello as u8
            && bytes.len() >= DATAGRAM_MIN
        {
            let reason = format!(
                "the client speaks version {} of datagram sessions, this node speaks {VERSION}; use a node and a \
                 client of one release",
                foreign.version
            );
            self.refuse(to, foreign.secret, &reason);
        }
    }

    /// Sends GONE to a peer that has no session. If the ended session is remembered, the GONE also says which requests
    /// have run.
    fn gone(&mut self, to: A, datagram: &Datagram<'_>) -> Result<(), PacketError> {
        let tombstone = self.tombstones.iter().find(|tombstone| tombstone.number == datagram.session);
        let (slots, is_fenced): (&[LastBytes], bool) = match tombstone {
            Some(tombstone) if !packet::same(tombstone.secret, datagram.secret) => {
                return Err(PacketError::Secret);
            }
            Some(tombstone) => (&tombstone.slots, tombstone.is_fenced),
            // A peer that has not proved that it knows the secret gets no more bytes than it sent.
            None => (&[], false),
        };
        // The response contains the secret that the sender used, which proves to the sender that the response is no
        // forgery.
        let bytes = gone_bytes(datagram.session, datagram.secret, slots, is_fenced);
        self.send_outside(to, bytes);
        Err(PacketError::Session(datagram.session))
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

    fn end(&mut self, index: usize, end: End, host: &mut H) {
        let mut session = self.sessions[index].take().expect("a session to end");
        self.by_identity.remove(&session.identity);
        self.counters.ended += 1;
        self.dirty.retain(|&dirty| usize::from(dirty) != index);
        for slot in &mut session.slots {
            self.pool.free(&mut slot.message);
            self.pool.free(&mut slot.reply);
        }
        let slots: Box<[LastBytes]> = session.slots.iter().map(Slot::last).collect();
        // The client does not expect this end. It learns of it from this GONE or, if the GONE is lost, in response to
        // its next datagram.
        let is_fenced = end == End::Fenced;
        if matches!(end, End::Silent | End::Replaced | End::Revoked | End::Fenced) {
            let bytes = gone_bytes(session.number, session.secret, &slots, is_fenced);
            self.send_outside(session.address, bytes);
        }
        if self.tombstones.len() == self.config.tombstones_max {
            self.tombstones.pop_front();
        }
        if self.config.tombstones_max > 0 {
            self.tombstones.push_back(Tombstone {
                number: session.number,
                secret: session.secret,
                identity: session.identity,
                incarnation: session.incarnation,
                slots,
                is_fenced,
            });
        }
        host.close(session.host, end);
    }

    fn entry(&mut self, session: &mut Session<A, H::Session>, entry: &Entry<'_>, host: &mut H) {
        let is_greedy = self.pool.lent > self.config.lent_bytes && session.keeps_long_reply(entry.slot);
        let Some(slot) = session.slots.get_mut(entry.slot) else {
            self.counters.refused += 1;
            return;
        };
        let step = newer(entry.number, slot.number);
        let bit = 1 << entry.slot;
        if step < 0 {
            self.counters.stale += 1;
            return;
        }
        let is_idle = matches!(slot.state, State::Done | State::Acknowledged);
        if step > 1 || step == 1 && !is_idle {
            self.counters.refused += 1;
            return;
        }
        match (entry.kind, step) {
            (EntryKind::Chain | EntryKind::Call, 1) if is_greedy => {
                // The session keeps too much. The client is told that the request did not run, and need not wait.
                self.counters.refused += 1;
                slot.begin(entry.number, &mut self.pool);
                slot.void(&mut self.pool);
                session.send_have &= !bit;
                session.send_first(entry.slot);
            }
            (EntryKind::Chain | EntryKind::Call | EntryKind::Retire, 1) => {
                if entry.count > 1 && session.assembling + entry.size > self.config.assembly_bytes {
                    self.counters.refused += 1;
                    return;
                }
                self.begin(session, entry.slot);
                if entry.is_whole() {
                    self.run(session, entry.slot, entry.kind, entry.payload, host);
                } else {
                    let slot = &mut session.slots[entry.slot];
                    slot.state = State::Receiving;
                    slot.kind = entry.kind;
                    slot.size = entry.size;
                    slot.got = 0;
                    session.assembling += entry.size;
                    self.pool.fill(&mut slot.message, entry.size);
                    slot.message.resize(entry.size, 0);
                    self.fragment(session, entry, host);
                }
            }
            (EntryKind::Chain | EntryKind::Call | EntryKind::Retire, _) => match slot.state {
                State::Receiving => self.fragment(session, entry, host),
                State::Executing => {
                    self.counters.duplicates += 1;
                    session.send_have |= bit;
                }
                State::Done | State::Acknowledged
                    if mutants::DUPLICATE_RUNS_AGAIN.is_on() && entry.is_whole() =>
                {
                    self.run(session, entry.slot, entry.kind, entry.payload, host);
                }
                State::Done => {
                    self.counters.duplicates += 1;
                    session.send_first(entry.slot);
                }
                State::Acknowledged => self.counters.duplicates += 1,
            },
            (EntryKind::Cancel, _) => {
                match slot.state {
                    State::Executing => {
                        session.send_have |= bit;
                        return;
                    }
                    State::Receiving => {
                        session.assembling -= slot.size;
                        slot.void(&mut self.pool);
                    }
                    State::Done | State::Acknowledged if step == 1 => {
                        slot.begin(entry.number, &mut self.pool);
                        slot.void(&mut self.pool);
                    }
                    State::Done | State::Acknowledged => self.counters.duplicates += 1,
                }
                session.send_have &= !bit;
                session.send_first(entry.slot);
            }
            (EntryKind::Have, 0) => match slot.state {
                State::Receiving | State::Executing => session.send_have |= bit,
                State::Done => {
                    let count = fragments(PREFIX + slot.reply.len(), session.chunk);
                    let have = entry.have();
                    if have.have.get() == all(count) {
                        slot.state = State::Acknowledged;
                        slot.send = 0;
                        session.send_reply &= !bit;
                        self.pool.free(&mut slot.reply);
                    } else {
                        slot.send |= have.want.get() & all(count);
                        session.send_reply |= if slot.send == 0 { 0 } else { bit };
                    }
                }
                State::Acknowledged => self.counters.duplicates += 1,
            },
            (EntryKind::Have | EntryKind::Reply, _) => {
                self.counters.refused += 1;
            }
        }
    }

    /// Begins the slot's next request.
    #[inline]
    fn begin(&mut self, session: &mut Session<A, H::Session>, index: usize) {
        let slot = &mut session.slots[index];
        slot.begin(slot.number.wrapping_add(1), &mut self.pool);
        session.send_reply &= !(1 << index);
        session.send_have &= !(1 << index);
    }

    /// Handles one fragment of a request that has several.
    fn fragment(&mut self, session: &mut Session<A, H::Session>, entry: &Entry<'_>, host: &mut H) {
        let slot = &mut session.slots[entry.slot];
        if slot.kind != entry.kind || slot.size != entry.size {
            self.counters.refused += 1;
            return;
        }
        session.send_have |= 1 << entry.slot;
        if slot.got & 1 << entry.index != 0 {
            self.counters.duplicates += 1;
            return;
        }
        slot.got |= 1 << entry.index;
        let (at, len) = extent(entry.size, session.chunk, entry.index);
        slot.message[at..at + len].copy_from_slice(entry.payload);
        if slot.got == all(entry.count) {
            session.assembling -= slot.size;
            session.send_have &= !(1 << entry.slot);
            let message = std::mem::take(&mut slot.message);
            self.run(session, entry.slot, entry.kind, &message, host);
            let slot = &mut session.slots[entry.slot];
            slot.message = message;
            self.pool.free(&mut slot.message);
        }
    }

    #[inline]
    fn run(
        &mut self,
        session: &mut Session<A, H::Session>,
        index: usize,
        kind: EntryKind,
        message: &[u8],
        host: &mut H,
    ) {
        let request = match kind {
            EntryKind::Chain => Request::Chain(message),
            EntryKind::Call => {
                let (service, body) = message.split_at(PREFIX);
                let service = u32::from_le_bytes(service[..4].try_into().expect("a service has 4 bytes"));
                Request::Call(ServiceId(service), body)
            }
            EntryKind::Retire => Request::Retire(Retired(message)),
            kind => panic!("an entry of {kind:?} is not a request"),
        };
        let slot = &mut session.slots[index];
        let at = RequestRef { session: session.number, slot: index as u8, number: slot.number };
        session.executions += 1;
        slot.execution = session.executions;
        self.counters.executed += 1;
        let is_in_place = kind == EntryKind::Chain && !session.has_long_replies;
        let mut reply = std::mem::take(if is_in_place { &mut slot.reply.own } else { &mut self.reply });
        let outcome = host.run(&mut session.host, at, request, &mut reply);
        if is_in_place && reply.capacity() <= KEPT_BYTES_MAX {
            slot.reply.own = reply;
        } else {
            session.has_long_replies |= is_in_place;
            self.pool.fill(&mut slot.reply, reply.len());
            slot.reply.extend_from_slice(&reply);
            reply.clear();
            if reply.capacity() > self.reply.capacity() {
                self.reply = reply;
            }
        }
        match outcome {
            Outcome::Done => session.done(index),
            Outcome::Later => {
                self.pool.free(&mut slot.reply);
                slot.state = State::Executing;
                // A HAVE tells the client that the request has arrived, so that it need not retransmit however long the
                // request runs.
                session.send_have |= 1 << index;
            }
        }
    }
}

/// Returns a GONE datagram whose checksum is still missing.
fn gone_bytes(session: u32, secret: u64, slots: &[LastBytes], is_fenced: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    packet::begin(&mut bytes, Kind::Gone, session, secret);
    if !slots.is_empty() {
        bytes.extend_from_slice(&(slots.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&u32::from(is_fenced).to_le_bytes());
        bytes.extend_from_slice(slots.as_bytes());
    }
    bytes
}

impl<A: Address, S> Session<A, S> {
    /// Whether this entry will start a chain. Only reliable before the first entry of the datagram has run.
    #[inline]
    fn begins_chain(&self, entry: &Entry<'_>) -> bool {
        entry.kind == EntryKind::Chain
            && entry.is_whole()
            && self.slots.get(entry.slot).is_some_and(|slot| slot.begins_next(entry.number))
    }

    /// Whether a slot other than `besides` keeps a reply in a lent buffer.
    fn keeps_long_reply(&self, besides: usize) -> bool {
        let mut slots = self.slots.iter().enumerate();
        slots.any(|(index, slot)| index != besides && slot.reply.lent.is_some())
    }

    /// Marks a slot's reply as complete. The reply is kept until the slot's next request begins.
    #[inline(always)]
    fn done(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        assert!(
            slot.reply.len() <= BODY_BYTES_MAX,
            "a reply has at most {BODY_BYTES_MAX} bytes, and this one has {}",
            slot.reply.len()
        );
        slot.state = State::Done;
        self.send_have &= !(1 << index);
        self.send_first(index);
    }

    /// Sends those fragments of a reply that are sent before the client asks by a HAVE.
    #[inline(always)]
    fn send_first(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if slot.state == State::Done {
            let size = PREFIX + slot.reply.len();
            // Most replies have one fragment.
            slot.send |=
                if size <= self.chunk { 1 } else { first(all(fragments(size, self.chunk)), self.eager) };
            self.send_reply |= 1 << index;
        }
    }

    fn has_to_send(&self) -> bool {
        self.pong || self.send_have | self.send_reply != 0
    }

    fn transmit(&mut self, out: &mut Vec<u8>, counters: &mut Counters) -> bool {
        if self.send_have | self.send_reply == 0 {
            if !std::mem::take(&mut self.pong) {
                return false;
            }
            packet::begin(out, Kind::Pong, self.number, self.secret);
            return true;
        }
        // Any datagram proves that the server is alive, so no separate PONG is needed.
        self.pong = false;
        packet::begin(out, Kind::Data, self.number, self.secret);
        for index in ones(self.send_have) {
            if out.len() + footprint(16) > self.datagram {
                break;
            }
            let slot = &self.slots[index];
            let have = if slot.state == State::Receiving { slot.got } else { u64::MAX };
            packet::put_have(out, index, slot.number, have, 0);
            counters.entries_out += 1;
            self.send_have &= !(1 << index);
        }
        let enough = out.len() + self.even_share(out.len());
        for index in ones(self.send_reply) {
            if out.len() >= enough {
                break;
            }
            let slot = &mut self.slots[index];
            let message = Message {
                kind: EntryKind::Reply,
                slot: index,
                number: slot.number,
                prefix: Some(slot.execution.to_le_bytes()),
                body: &slot.reply,
            };
            for fragment in ones(slot.send) {
                if out.len() + footprint(extent(message.size(), self.chunk, fragment).1) > self.datagram {
                    break;
                }
                message.put(out, self.chunk, fragment);
                counters.entries_out += 1;
                slot.send &= !(1 << fragment);
            }
            if slot.send == 0 {
                self.send_reply &= !(1 << index);
            }
        }
        assert!(out.len() > HEADER, "a fragment fits in a datagram");
        true
    }

    /// Returns how many bytes of replies to put into a datagram of which `taken` bytes are in use, so that all
    /// datagrams carry about the same amount. Otherwise, with full datagrams and a small last one, client and engine
    /// would alternately wait for each other.
    #[inline]
    fn even_share(&self, taken: usize) -> usize {
        if self.send_reply == 0 {
            return 0; // Other entries may have filled the datagram.
        }
        let room = (self.datagram - taken).max(1);
        let bytes: usize =
            ones(self.send_reply).map(|index| self.slots[index].unsent_bytes(self.chunk)).sum();
        bytes.div_ceil(bytes.div_ceil(room).max(1))
    }
}

impl Slot {
    fn new() -> Slot {
        Slot {
            number: 0,
            state: State::Acknowledged,
            kind: EntryKind::Chain,
            size: 0,
            got: 0,
            message: Buffer::default(),
            execution: 0,
            reply: Buffer::default(),
            send: 0,
        }
    }

    #[inline]
    fn begins_next(&self, number: u32) -> bool {
        newer(number, self.number) == 1 && matches!(self.state, State::Done | State::Acknowledged)
    }

    /// Returns an upper bound of the bytes that the reply fragments still to be sent take in datagrams.
    #[inline]
    fn unsent_bytes(&self, chunk: usize) -> usize {
        self.send.count_ones() as usize * footprint(chunk.min(PREFIX + self.reply.len()))
    }

    /// Begins the slot's request with this number, and drops the reply to the previous one.
    #[inline]
    fn begin(&mut self, number: u32, pool: &mut Pool) {
        self.number = number;
        self.execution = 0;
        self.send = 0;
        pool.free(&mut self.reply);
    }

    /// Marks the slot's current request as one that will never run.
    fn void(&mut self, pool: &mut Pool) {
        pool.free(&mut self.message);
        self.state = State::Done;
        self.execution = 0;
    }

    fn last(&self) -> LastBytes {
        let state = match self.state {
            State::Executing => last::RUNNING,
            State::Done | State::Acknowledged if self.execution != 0 => last::RAN,
            _ => last::NO,
        };
        LastBytes { number: U32::new(self.number), state: U32::new(state) }
    }
}
