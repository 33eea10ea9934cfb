//! A client's end of its only session: the slots, the credit, and all timers.
//!
//! A slot's request passes through the modules in this order: `request` takes it, `send` puts it into datagrams,
//! `receive` opens the datagrams of the server, `reply` assembles the response, and `request` hands it out. `timer`
//! retransmits what was lost and abandons what takes too long. `slot` has the state that these modules share.
//!
//! Invariant: unacknowledged request fragments take at most the granted credit. Half-sent requests of several fragments
//! take at most the granted assembly space.
//! Invariant: a slot takes a new request only after two events: the owner has released the previous reply, and the
//! server has responded to the previous request or has confirmed that it will never run.
//! Invariant: each request is reported exactly once.
//! Invariant: buffers that an abandoned chain allocated or held are retired after its outcome is known, and never
//! before.

mod receive;
mod reply;
mod request;
mod send;
mod slot;
mod timer;

use super::packet::{EntryKind, chunk};
use super::rtt::Rtt;
use super::{Counters, DATAGRAM_MAX, DATAGRAM_MIN, PINGS, Pool, TOKEN_BYTES_MAX, WINDOW_MAX, ones};
use farside_remote::Addr;
use farside_remote::fabric::ServiceId;
use slot::{Phase, Slot};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;

/// A client's identity, limits and requirements.
#[derive(Clone, Debug)]
pub struct Config {
    /// Number that identifies the client in all its incarnations.
    pub identity: u128,
    /// Number of this incarnation, higher than all earlier ones. An incarnation has one session.
    pub incarnation: u64,
    /// 64 random bits that distinguish responses to the HELLO from forgeries.
    pub nonce: u64,
    /// Features that the node must have.
    pub features: u64,
    /// Maximum size of a datagram in bytes.
    pub datagram: usize,
    /// Whether the carrier never loses, duplicates, reorders or damages datagrams.
    pub is_reliable: bool,
    /// Maximum number of reply bytes that may be in flight to this client.
    pub inbound_bytes: usize,
    /// Token that the client presents to the node.
    pub token: Vec<u8>,
    /// Time limit of a request.
    pub deadline: Duration,
    /// Silence period: the session is lost if the node does not respond for this long.
    pub silence: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            identity: 0,
            incarnation: 0,
            nonce: 0,
            features: 0,
            datagram: 8 * 1024,
            is_reliable: false,
            inbound_bytes: 1 << 20,
            token: Vec::new(),
            deadline: farside_remote::fabric::DEADLINE,
            silence: Duration::from_secs(5),
        }
    }
}

/// Limits and features that the server grants to the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Identifies this run of the node's process; different after a restart of the node.
    pub node: u64,
    /// Features of the node.
    pub features: u64,
    /// Maximum number of concurrent requests.
    pub window: usize,
    /// Maximum size of a datagram in bytes.
    pub datagram: usize,
    /// Maximum number of request bytes in flight.
    pub credit: usize,
    /// Maximum number of bytes of requests that have several fragments and are only partly sent.
    pub assembly: usize,
    /// Number of fragments of a reply that the server sends before the client asks for more by a HAVE.
    pub eager: usize,
}

/// Kind of a request: a chain or a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A request to run a chain.
    Chain,
    /// A call to this service.
    Call(ServiceId),
}

/// Identifier of a request, unique within this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRef(NonZeroU64);

impl SlotRef {
    /// Creates the identifier of request number `count` (from 1) in this slot. One word, since it is copied often.
    #[inline]
    fn new(count: u64, slot: usize) -> SlotRef {
        let word = count * WINDOW_MAX as u64 + slot as u64;
        SlotRef(NonZeroU64::new(word).expect("requests are counted from 1"))
    }

    /// Returns the slot that carries the request.
    #[inline]
    pub fn slot(self) -> usize {
        self.0.get() as usize % WINDOW_MAX
    }
}

/// Fate of a request that got no response: whether the request ran, as far as the client knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The request did not run, and never will.
    DidNotRun,
    /// The request ran; its result is lost.
    DidRun,
    /// The request may have run, or may still run.
    Unknown,
}

/// An event that the client reports to its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The session is open.
    Open(Granted),
    /// The session was refused, for this reason.
    Refused(String),
    /// A request has a response; [`Client::reply`] returns it until [`Client::release`].
    Answered {
        /// Request that was answered.
        request: SlotRef,
        /// Position of the request in the order in which the session's requests ran, from 1.
        execution: u64,
    },
    /// A request will get no response.
    Failed {
        /// Request that failed.
        request: SlotRef,
        /// Whether the request ran, if that is known.
        fate: Fate,
    },
    /// The session has ended. Every request was reported in an earlier event.
    Lost(Lost),
}

/// Reason why a session is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The node did not respond for too long.
    Silent,
    /// The node has ended the session, or has restarted and forgotten it.
    Gone,
    /// The node has ended the session, since another client has fenced this one.
    Fenced,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Greeting,
    Open,
    /// The session has ended. `bye`: whether a BYE must still be sent.
    Ended {
        bye: bool,
    },
}

const NEVER: Duration = Duration::MAX;

/// One incarnation of a client, with its session.
pub struct Client {
    config: Config,
    stage: Stage,
    granted: Granted,
    session: u32,
    secret: u64,
    chunk: usize,
    slots: Box<[Slot]>,
    free: u64,
    /// Bitmap of the slots with an outstanding request.
    pending: u64,
    /// Bitmap of the slots with something to send, once the credit suffices.
    send: u64,
    /// Bitmap of the slots for which to acknowledge a complete reply of several fragments, so that the server may free
    /// that reply.
    ack: u64,
    /// Bitmap of the slots whose response has arrived and was not yet reported.
    answered: u64,
    /// Slot at which the next datagram starts: the first slot that lacked credit for the previous datagram.
    cursor: usize,
    /// Number of bytes of fragments that were sent and not acknowledged.
    outstanding: usize,
    assembling: usize,
    /// Number of the next request, counted over all slots.
    requests: u64,
    /// Regions and addresses of buffers that abandoned chains allocated and did not publish.
    unpublished: Vec<(u32, Addr)>,
    /// Whether chains may have allocated buffers whose addresses this end does not know: the node must scan for them.
    owes: bool,
    events: VecDeque<Event>,
    rtt: Rtt,
    /// Sequence number of the next datagram (`sequence`), that of the latest datagram known to have arrived
    /// (`arrived`), and a lower bound for the datagrams of all fragments in flight (`oldest`).
    sequence: u32,
    arrived: u32,
    oldest: u32,
    /// Lower bound of the times at which the slots' timers expire.
    earliest: Duration,
    /// The latest time passed in (`last_now`). If the next time is after `pause_from`, this process must have been
    /// stopped in between.
    last_now: Duration,
    pause_from: Duration,
    hello_wait: Duration,
    hello_due: Duration,
    hello_deadline: Duration,
    /// Interval between PINGs: a fifth of the silence period.
    period: Duration,
    ping_at: Duration,
    pings: u32,
    ping: bool,
    pool: Pool,
    counters: Counters,
}

impl Client {
    /// Creates a client that is about to send its hello.
    ///
    /// # Panics
    /// If the configuration is inconsistent.
    pub fn new(now: Duration, config: Config) -> Client {
        assert!(config.token.len() <= TOKEN_BYTES_MAX, "a token has at most {TOKEN_BYTES_MAX} bytes");
        assert!(
            (DATAGRAM_MIN..=DATAGRAM_MAX).contains(&config.datagram),
            "a datagram has {DATAGRAM_MIN} to {DATAGRAM_MAX} bytes"
        );
        assert!(config.silence >= Duration::from_millis(10), "a silence period has at least 10 ms");
        let granted =
            Granted { node: 0, features: 0, window: 0, datagram: 0, credit: 0, assembly: 0, eager: 0 };
        let rtt = if config.is_reliable { Rtt::reliable() } else { Rtt::default() };
        Client {
            stage: Stage::Greeting,
            granted,
            session: 0,
            secret: 0,
            chunk: chunk(DATAGRAM_MIN),
            slots: Box::default(),
            free: 0,
            pending: 0,
            send: 0,
            ack: 0,
            answered: 0,
            cursor: 0,
            outstanding: 0,
            assembling: 0,
            requests: 1,
            unpublished: Vec::new(),
            owes: false,
            events: VecDeque::with_capacity(WINDOW_MAX + 2),
            earliest: NEVER,
            last_now: now,
            pause_from: now + config.silence / PINGS * 2,
            hello_wait: rtt.rto(),
            rtt,
            sequence: 0,
            arrived: 0,
            oldest: 0,
            hello_due: now,
            hello_deadline: now + config.silence,
            period: config.silence / PINGS,
            ping_at: NEVER,
            pings: 0,
            ping: false,
            pool: Pool::default(),
            counters: Counters::default(),
            config,
        }
    }

    /// Returns the traffic counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the number of unacknowledged request bytes in flight.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Returns the number of bytes kept for requests and replies. Lets tests check that this memory is bounded.
    pub fn kept_bytes(&self) -> usize {
        let slots: usize =
            self.slots.iter().map(|slot| slot.message.capacity() + slot.reply.capacity()).sum();
        slots + self.pool.capacity()
    }

    /// Whether a slot is free for a request.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.free != 0
    }

    /// Whether any request is outstanding.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        self.pending != 0
    }

    /// Whether the session may have allocated buffers that this end does not know. Such a session must not end with a
    /// BYE: after a BYE the node does not scan for the session's buffers.
    pub fn owes(&self) -> bool {
        self.owes
    }

    /// Whether the server may still run a request that was cancelled or has failed: it has not confirmed the contrary,
    /// or the session is over, so that nothing more is known.
    pub fn is_draining(&self) -> bool {
        self.stage != Stage::Open || self.slots.iter().any(|slot| slot.phase == Phase::Draining)
    }

    /// Ends the session: reports every outstanding request as failed, and tells the node by one BYE.
    pub fn close(&mut self) {
        if self.stage == Stage::Open {
            self.end(|_| Fate::Unknown);
            self.stage = Stage::Ended { bye: true };
        } else {
            self.stage = Stage::Ended { bye: false };
        }
    }

    /// Returns the bitmap of slots with responses that were not yet reported. No event will report these responses.
    #[inline]
    pub fn take_answered(&mut self) -> u64 {
        std::mem::take(&mut self.answered)
    }

    /// Returns the next event; responses come first.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        if self.answered != 0 {
            let index = self.answered.trailing_zeros() as usize;
            self.answered &= self.answered - 1;
            let Slot { request, execution, .. } = self.slots[index];
            let request = request.expect("an answered slot has a request");
            return Some(Event::Answered { request, execution });
        }
        self.events.pop_front()
    }

    /// Returns the time at which to call [`Client::transmit`] even if nothing arrives and nothing is submitted.
    pub fn next_timeout(&self) -> Option<Duration> {
        match self.stage {
            Stage::Greeting => Some(self.hello_due.min(self.hello_deadline)),
            Stage::Open => Some(self.earliest.min(self.ping_at)),
            Stage::Ended { .. } => None,
        }
    }

    fn lose(&mut self, why: Lost, fate: impl Fn(usize) -> Fate) {
        self.end(fate);
        self.stage = Stage::Ended { bye: false };
        self.events.push_back(Event::Lost(why));
    }

    /// Reports every pending request as failed, each with its `fate`.
    fn end(&mut self, fate: impl Fn(usize) -> Fate) {
        self.counters.ended += 1;
        for index in ones(self.pending) {
            let slot = &mut self.slots[index];
            if slot.phase == Phase::Pending && slot.kind != EntryKind::Retire {
                let request = slot.request.expect("a pending request has an owner");
                let fate = if slot.sent == 0 { Fate::DidNotRun } else { fate(index) };
                self.events.push_back(Event::Failed { request, fate });
            }
            slot.phase = Phase::Free;
            slot.request = None;
        }
        (self.free, self.pending, self.send, self.ack) = (0, 0, 0, 0);
    }
}
