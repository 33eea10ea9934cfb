//! A client's end of its only session: the slots, the credit, and all timers.
//!
//! Invariant: unacknowledged request fragments take at most the granted credit. Half-sent requests of several fragments
//! take at most the granted assembly space.
//! Invariant: a slot takes a new request only after two events: the owner has released the previous reply, and the
//! server has responded to the previous request or has confirmed that it will never run.
//! Invariant: each request is reported exactly once.
//! Invariant: buffers that an abandoned chain allocated or held are retired after its outcome is known, and never
//! before.

use super::packet::{
    self, Datagram, ENTRY, Entries, Entry, EntryKind, Foreign, HEADER, HelloBytes, Kind, LastBytes, Message,
    PREFIX, PacketError, RETIRED, VERSION, WelcomeBytes, all, chunk, extent, footprint, fragments,
};
use super::rtt::{RTO_MAX, Rtt};
use super::server::last;
use super::{
    BODY_BYTES_MAX, Buffer, Counters, DATAGRAM_MAX, DATAGRAM_MIN, FRAGMENTS_MAX, KEPT_BYTES_MAX,
    MESSAGE_BYTES_MAX, PINGS, Pool, TOKEN_BYTES_MAX, WINDOW_MAX, answer, first, ones,
};
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, ChainView, Reply, Status};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::time::Duration;
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, IntoBytes};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    /// The slot's request waits for a response.
    Pending,
    /// The request has a response, which the owner has not released.
    Answered,
    /// The request was abandoned, and the server has not confirmed that.
    Draining,
}

struct Slot {
    phase: Phase,
    /// Number of the slot's last request that the server may know.
    number: u32,
    /// The request in this slot, while its owner waits or holds the response.
    request: Option<SlotRef>,
    kind: EntryKind,
    message: Buffer,
    /// Buffers that the chain publishes if the op with the index `published_by` succeeds.
    held: Vec<Addr>,
    published_by: usize,
    /// Number of fragments of the request.
    count: usize,
    sent: u64,
    acked: u64,
    /// Bitmap of the request's fragments to retransmit.
    resend: u64,
    /// Whether the request has several fragments, is partly sent, and is counted in `Client::assembling`.
    assembling: bool,
    /// Bitmap of the reply's fragments that this end will request from the server.
    want: u64,
    /// Whether to send a CANCEL for the slot's request.
    cancel: bool,
    /// For round-trip samples: the time at which a fragment was last sent for the first time (`sent_at`), the index of
    /// that fragment (`latest`), and the set of fragments that were retransmitted (`resent`).
    sent_at: Duration,
    latest: usize,
    resent: u64,
    /// Sequence number of the datagram in which each fragment was last sent.
    sent_in: [u32; FRAGMENTS_MAX],
    /// Time of the last transmission, if there was a retransmission: for the current number (`again_at`), and for the
    /// previous number (`before_again_at`).
    again_at: Duration,
    before_again_at: Duration,
    /// Timeout for any response from the server: its length (`wait`), and the time at which it ends (`due`).
    wait: Duration,
    due: Duration,
    deadline: Duration,
    /// The reply without its execution prefix.
    reply: Buffer,
    execution: u64,
    reply_count: usize,
    reply_size: usize,
    reply_got: u64,
    /// Bitmap of the reply's fragments that should be in flight.
    asked: u64,
    /// Bitmaps: all fragments of the reply that were ever requested (`asked_ever`), and those that the last HAVE, sent
    /// at `asked_at`, was the first to request (`asked_first`).
    asked_ever: u64,
    asked_first: u64,
    asked_at: Duration,
    /// Bitmaps: the fragments of the reply that have arrived since all missing ones were last requested (`came`), and
    /// the fragments requested since then because later ones had overtaken them (`asked_overtaken`).
    came: u64,
    asked_overtaken: u64,
}

/// Minimum limit on the requests in one datagram. The limit is half of the requests in flight, but not less than this.
const SHARE_MIN: usize = 8;
const NEVER: Duration = Duration::MAX;
/// A fragment counts as lost if a datagram sent this many datagrams later is acknowledged (RFC 9002, 6.1.1).
const OVERTAKEN: i32 = 3;

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

    /// Submits a request, whose bytes are the concatenated parts. Returns `None` if no slot is free: retry after the
    /// next event or release. Unless the request is cancelled, exactly one event or [`Client::take_answered`] reports
    /// it.
    ///
    /// # Panics
    /// If the request is longer than [`BODY_BYTES_MAX`].
    pub fn submit(&mut self, now: Duration, ask: Ask, parts: &[&[u8]]) -> Option<SlotRef> {
        self.submit_within(now, self.config.deadline, ask, parts)
    }

    /// Submits a request like [`Client::submit`], but with a time limit for this request in place of the configured
    /// one.
    ///
    /// # Panics
    /// If the request is longer than [`BODY_BYTES_MAX`].
    #[inline]
    pub fn submit_within(
        &mut self,
        now: Duration,
        patience: Duration,
        ask: Ask,
        parts: &[&[u8]],
    ) -> Option<SlotRef> {
        match ask {
            Ask::Chain => self.begin(now, patience, EntryKind::Chain, None, parts),
            Ask::Call(service) => {
                let prefix = u64::from(service.0).to_le_bytes();
                self.begin(now, patience, EntryKind::Call, Some(prefix), parts)
            }
        }
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

    /// Submits a request to retire these buffers (with their regions), which chains of this session have allocated and
    /// never published. Returns false if no slot is free or no session is open: retry after the next event or release.
    /// No event reports the request; it has no time limit. If the session ends before the node has retired the buffers,
    /// a scan of the node finds them.
    ///
    /// # Panics
    /// If the buffers do not fit in a request.
    #[must_use]
    pub fn retire(&mut self, now: Duration, buffers: &[(u32, Addr)]) -> bool {
        let size = buffers.len() * RETIRED;
        assert!(
            size <= BODY_BYTES_MAX,
            "a request has at most {BODY_BYTES_MAX} bytes, and this one has {size}"
        );
        // No time limit: an abandoned retire could still run after this client has reported that it would not.
        let Some(request) = self.begin(now, NEVER, EntryKind::Retire, None, &[]) else { return false };
        let slot = &mut self.slots[request.slot()];
        self.pool.fill(&mut slot.message, size);
        for &(region, buffer) in buffers {
            for word in [region.into(), buffer.raw()] {
                slot.message.extend_from_slice(&word.to_le_bytes());
            }
        }
        slot.count = fragments(size, self.chunk);
        true
    }

    /// Records the buffers that a chain publishes if the op with the index `published_by` succeeds. If the chain is
    /// abandoned and that op does not succeed, the buffers must be retired: see [`Client::take_unpublished`].
    pub fn hold(&mut self, request: SlotRef, buffers: &[Addr], published_by: usize) {
        if let Some(slot) = self.slots.get_mut(request.slot()).filter(|slot| slot.request == Some(request)) {
            slot.held.extend_from_slice(buffers);
            slot.published_by = published_by;
        }
    }

    /// Whether the session may have allocated buffers that this end does not know. Such a session must not end with a
    /// BYE: after a BYE the node does not scan for the session's buffers.
    pub fn owes(&self) -> bool {
        self.owes
    }

    /// Appends to `to` the buffers that abandoned chains allocated and did not publish, once their outcome is known.
    /// The caller retires these buffers with [`Client::retire`].
    #[inline]
    pub fn take_unpublished(&mut self, to: &mut Vec<(u32, Addr)>) {
        if !self.unpublished.is_empty() {
            to.append(&mut self.unpublished);
        }
    }

    /// Cancels a request: no event reports it, and its reply is dropped. Returns what is known of its outcome, or
    /// `None` if the request was already reported as failed, released or cancelled.
    pub fn cancel(&mut self, request: SlotRef) -> Option<Fate> {
        let slot = self.slots.get(request.slot()).filter(|slot| slot.request == Some(request))?;
        match slot.phase {
            Phase::Pending => {
                if slot.sent == 0 {
                    self.settle(request.slot(), false);
                }
                Some(self.drop_request(request.slot()))
            }
            Phase::Answered => {
                self.settle(request.slot(), true);
                self.set_free(request.slot());
                Some(Fate::DidRun)
            }
            Phase::Free | Phase::Draining => None,
        }
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

    /// Returns the response to a request, from its event until its release, even after the session has ended.
    ///
    /// # Panics
    /// If there is no response, or it was released.
    #[inline]
    pub fn reply(&self, request: SlotRef) -> &[u8] {
        assert!(self.is_answered(request), "a reply exists from its event until its release");
        &self.slots[request.slot()].reply
    }

    /// Moves the response to a request into `bytes`, without a copy if the slot may keep the old buffer of `bytes`.
    /// Must be called at most once per request.
    ///
    /// # Panics
    /// If there is no response, or it was released.
    #[inline]
    pub fn take_reply(&mut self, request: SlotRef, bytes: &mut Vec<u8>) {
        assert!(self.is_answered(request), "a reply exists from its event until its release");
        let reply = &mut self.slots[request.slot()].reply;
        if reply.lent.is_none() && bytes.capacity() <= KEPT_BYTES_MAX {
            std::mem::swap(&mut reply.own, bytes);
        } else {
            bytes.clear();
            bytes.extend_from_slice(reply);
        }
    }

    /// Drops the response to a request, and frees its slot.
    ///
    /// # Panics
    /// If there is no response, or it was released.
    #[inline]
    pub fn release(&mut self, request: SlotRef) {
        assert!(self.is_answered(request), "a request is released once, after its response");
        self.empty(request.slot());
    }

    /// Whether the response to a request has arrived. True from its event, or slightly before, until its release.
    #[inline]
    pub fn is_answered(&self, request: SlotRef) -> bool {
        let slot = self.slots.get(request.slot());
        slot.is_some_and(|slot| slot.request == Some(request) && slot.phase == Phase::Answered)
    }

    /// Returns the time at which to call [`Client::transmit`] even if nothing arrives and nothing is submitted.
    pub fn next_timeout(&self) -> Option<Duration> {
        match self.stage {
            Stage::Greeting => Some(self.hello_due.min(self.hello_deadline)),
            Stage::Open => Some(self.earliest.min(self.ping_at)),
            Stage::Ended { .. } => None,
        }
    }

    /// Writes the next datagram into `out`. Returns false if there is nothing to send. Call it until it returns false,
    /// after all received datagrams were passed in, and whenever [`Client::next_timeout`] is due.
    pub fn transmit(&mut self, now: Duration, out: &mut Vec<u8>) -> bool {
        self.wake(now);
        let has_datagram = match self.stage {
            Stage::Greeting => now >= self.hello_due && self.transmit_hello(now, out),
            Stage::Open => self.transmit_entries(now, out) || self.transmit_ping(out),
            Stage::Ended { bye } => {
                self.stage = Stage::Ended { bye: false };
                packet::begin(out, Kind::Bye, self.session, self.secret);
                bye
            }
        };
        if has_datagram {
            if !self.config.is_reliable {
                packet::seal(out);
            }
            self.counters.datagrams_out += 1;
            self.sequence = self.sequence.wrapping_add(1);
        }
        has_datagram
    }

    /// Handles a received datagram.
    ///
    /// # Errors
    /// The datagram had no effect, for the returned reason, which may be logged. The counters include it.
    pub fn receive(&mut self, now: Duration, bytes: &[u8]) -> Result<(), PacketError> {
        self.counters.datagrams_in += 1;
        self.notice_pause(now);
        let result = self.take_in(now, bytes);
        match result {
            Ok(()) => {}
            Err(PacketError::Secret) => self.counters.bad_secrets += 1,
            Err(PacketError::Session(_)) => self.counters.stale += 1,
            Err(_) => self.counters.malformed += 1,
        }
        result
    }

    #[inline]
    fn begin(
        &mut self,
        now: Duration,
        patience: Duration,
        kind: EntryKind,
        prefix: Option<[u8; PREFIX]>,
        parts: &[&[u8]],
    ) -> Option<SlotRef> {
        if self.stage != Stage::Open || self.free == 0 {
            return None;
        }
        let size = parts.iter().fold(prefix.map_or(0, |prefix| prefix.len()), |size, part| size + part.len());
        assert!(
            size <= MESSAGE_BYTES_MAX,
            "a request has at most {BODY_BYTES_MAX} bytes, and this one has {size}"
        );
        self.notice_pause(now);
        let index = self.free.trailing_zeros() as usize;
        let bit = 1 << index;
        self.free &= !bit;
        self.pending |= bit;
        self.send |= bit;
        self.ack &= !bit;
        let slot = &mut self.slots[index];
        self.pool.fill(&mut slot.message, size);
        let message = &mut *slot.message;
        if let Some(prefix) = prefix {
            message.extend_from_slice(&prefix);
        }
        parts.iter().for_each(|part| message.extend_from_slice(part));
        slot.phase = Phase::Pending;
        slot.number = slot.number.wrapping_add(1);
        let request = SlotRef::new(self.requests, index);
        slot.request = Some(request);
        self.requests += 1;
        slot.kind = kind;
        slot.count = fragments(size, self.chunk);
        (slot.sent, slot.acked, slot.resend, slot.resent) = (0, 0, 0, 0);
        (slot.want, slot.cancel) = (0, false);
        (slot.before_again_at, slot.again_at) = (slot.again_at, NEVER);
        (slot.asked_ever, slot.asked_first) = (0, 0);
        slot.due = NEVER;
        slot.deadline = now.saturating_add(patience);
        self.earliest = self.earliest.min(slot.deadline);
        (slot.reply_count, slot.reply_size, slot.reply_got) = (0, 0, 0);
        Some(request)
    }

    /// Notices by a gap between two calls that this process was stopped. Then extends the deadlines of outstanding
    /// requests, so that their responses can still be received.
    #[inline]
    fn notice_pause(&mut self, now: Duration) {
        if now <= self.last_now {
            return;
        }
        if now > self.pause_from {
            self.make_up_for_pause(now);
        }
        self.last_now = now;
        self.pause_from = now.saturating_add(self.period * 2);
    }

    #[cold]
    fn make_up_for_pause(&mut self, now: Duration) {
        for index in ones(self.pending) {
            let slot = &mut self.slots[index];
            slot.deadline = slot.deadline.max(now + self.period);
        }
        self.hello_deadline = self.hello_deadline.max(now + self.period);
    }

    /// Handles the timers that are due.
    fn wake(&mut self, now: Duration) {
        self.notice_pause(now);
        match self.stage {
            Stage::Greeting if now >= self.hello_deadline => {
                self.stage = Stage::Ended { bye: false };
                self.events.push_back(Event::Lost(Lost::Silent));
            }
            Stage::Open => {
                if now >= self.earliest {
                    self.earliest = NEVER;
                    for index in ones(self.pending) {
                        self.wake_slot(now, index);
                    }
                }
                if now >= self.ping_at {
                    if self.pings >= PINGS - 1 {
                        self.lose(Lost::Silent, |_| Fate::Unknown);
                        return;
                    }
                    self.pings += 1;
                    self.ping = true;
                    self.ping_at = now + self.period;
                }
            }
            _ => {}
        }
    }

    fn wake_slot(&mut self, now: Duration, index: usize) {
        let slot = &mut self.slots[index];
        if slot.phase == Phase::Pending && now >= slot.deadline {
            let request = slot.request.expect("a pending request has an owner");
            let fate = self.drop_request(index);
            self.events.push_back(Event::Failed { request, fate });
            return;
        }
        if now >= slot.due {
            slot.wait = (slot.wait * 2).min(RTO_MAX);
            slot.due = NEVER;
            match slot.phase {
                Phase::Draining => slot.cancel = true,
                _ if slot.acked != all(slot.count) => slot.resend = slot.sent & !slot.acked,
                _ => slot.ask_for_missing(self.granted.eager),
            }
            self.send |= 1 << index;
        }
        self.earliest = self.earliest.min(slot.due);
        if slot.phase == Phase::Pending {
            self.earliest = self.earliest.min(slot.deadline);
        }
    }

    /// Records the buffers of an abandoned chain that must be retired. If the chain did not run, these are all buffers
    /// that it holds. If the chain ran, these are the buffers that it has allocated or held and not published,
    /// according to the reply in the slot. Not called for a reply of several fragments: a scan finds the buffers after
    /// this session has ended.
    #[cold]
    fn settle(&mut self, index: usize, has_run: bool) {
        let slot = &mut self.slots[index];
        let held = std::mem::take(&mut slot.held);
        let is_chain = slot.kind == EntryKind::Chain;
        let Some((chain, _)) = is_chain.then(|| ChainView::decode(&slot.message).ok()).flatten() else {
            return;
        };
        let region = chain.key().region();
        if !has_run {
            self.unpublished.extend(held.into_iter().map(|at| (region, at)));
            return;
        }
        let mut reply = Reply::new();
        if answer::refusal(&slot.reply).is_some() {
            self.unpublished.extend(held.into_iter().map(|at| (region, at)));
        } else if reply.decode(chain.len(), &slot.reply).is_ok() {
            self.unpublished.extend(chain.unpublished(&reply).map(|at| (region, at)));
            if reply.status_at(slot.published_by) != Some(Status::Ok) {
                self.unpublished.extend(held.into_iter().map(|at| (region, at)));
            }
        }
    }

    /// Abandons a pending request. Returns whether the request ran, as far as this end knows.
    fn drop_request(&mut self, index: usize) -> Fate {
        let slot = &mut self.slots[index];
        if slot.sent == 0 {
            // No fragment was sent, so the server does not know the number, and the next request reuses it.
            slot.number = slot.number.wrapping_sub(1);
            self.owes |= !slot.held.is_empty();
            self.set_free(index);
            return Fate::DidNotRun;
        }
        slot.phase = Phase::Draining;
        slot.request = None;
        slot.cancel = true;
        slot.due = NEVER;
        self.pool.free(&mut slot.reply);
        self.send |= 1 << index;
        Fate::Unknown
    }

    /// Frees a slot for another request. The bytes that the old request has in flight no longer count against the
    /// credit.
    #[inline]
    fn set_free(&mut self, index: usize) {
        self.acknowledge(index, u64::MAX);
        self.empty(index);
    }

    /// Like [`Client::set_free`], for a slot that has nothing in flight.
    #[inline]
    fn empty(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        debug_assert!(slot.sent & !slot.acked == 0 && !slot.assembling, "all that it sent is acknowledged");
        slot.phase = Phase::Free;
        slot.request = None;
        slot.held.clear();
        self.pool.free(&mut slot.message);
        self.pool.free(&mut slot.reply);
        let bit = 1 << index;
        self.free |= bit;
        self.pending &= !bit;
        self.send &= !bit;
        self.answered &= !bit;
    }

    /// Records that the server has these fragments of a request. Returns those that were not acknowledged before.
    #[inline]
    fn acknowledge(&mut self, index: usize, have: u64) -> u64 {
        let slot = &mut self.slots[index];
        let news = slot.sent & !slot.acked & have;
        slot.acked |= news;
        slot.resend &= !slot.acked;
        if slot.count == 1 {
            // A request of one fragment takes no assembly space, so only the credit is updated.
            self.outstanding -= news as usize * footprint(slot.message.len());
            return news;
        }
        for fragment in ones(news) {
            self.outstanding -= footprint(extent(slot.message.len(), self.chunk, fragment).1);
        }
        if slot.assembling && slot.acked == all(slot.count)
            || have == u64::MAX && slot.phase != Phase::Pending && slot.assembling
        {
            slot.assembling = false;
            self.assembling -= slot.message.len();
        }
        news
    }

    fn transmit_hello(&mut self, now: Duration, out: &mut Vec<u8>) -> bool {
        self.hello_due = now.saturating_add(self.hello_wait);
        self.hello_wait = self.hello_wait.saturating_mul(2).min(RTO_MAX);
        packet::begin(out, Kind::Hello, 0, self.config.nonce);
        let hello = HelloBytes {
            identity: U128::new(self.config.identity),
            incarnation: U64::new(self.config.incarnation),
            features: U64::new(self.config.features),
            datagram: U32::new(self.config.datagram as u32),
            inbound: U32::new(u32::try_from(self.config.inbound_bytes).unwrap_or(u32::MAX)),
            token: U32::new(self.config.token.len() as u32),
            reserved: U32::ZERO,
        };
        out.extend_from_slice(hello.as_bytes());
        out.extend_from_slice(&self.config.token);
        out.resize(DATAGRAM_MIN, 0);
        true
    }

    fn transmit_ping(&mut self, out: &mut Vec<u8>) -> bool {
        packet::begin(out, Kind::Ping, self.session, self.secret);
        std::mem::take(&mut self.ping)
    }

    fn transmit_entries(&mut self, now: Duration, out: &mut Vec<u8>) -> bool {
        if self.send | self.ack == 0 {
            return false;
        }
        packet::begin(out, Kind::Data, self.session, self.secret);
        for index in ones(self.ack) {
            if out.len() + footprint(16) > self.granted.datagram {
                return true;
            }
            let slot = &self.slots[index];
            packet::put_have(out, index, slot.number, all(slot.reply_count), 0);
            self.counters.entries_out += 1;
            self.ack &= !(1 << index);
        }
        // Transmission starts with the slot that has waited longest for credit. Later slots may not use the credit that
        // it lacks.
        let cursor = self.cursor;
        let turned = self.send.rotate_right(cursor as u32);
        let mut is_blocked = false;
        // A datagram carries at most half of the outstanding requests, so that client and node work at the same time.
        let share = (self.pending.count_ones() as usize).div_ceil(2).max(SHARE_MIN);
        let mut sharing = 0;
        for turn in ones(turned) {
            if sharing == share {
                break;
            }
            let index = (cursor + turn) % 64;
            let before = out.len();
            let stop = self.transmit_slot(now, index, is_blocked, out);
            sharing += usize::from(out.len() > before);
            if !self.config.is_reliable {
                self.earliest = self.earliest.min(self.slots[index].due);
            }
            match stop {
                Stop::Done => self.send &= !(1 << index),
                Stop::Full => {
                    if !is_blocked {
                        self.cursor = index;
                    }
                    break;
                }
                Stop::NoCredit => {
                    if !is_blocked {
                        self.cursor = index;
                    }
                    is_blocked = true;
                }
            }
        }
        out.len() > HEADER
    }

    #[inline]
    fn transmit_slot(&mut self, now: Duration, index: usize, is_blocked: bool, out: &mut Vec<u8>) -> Stop {
        let limit = self.granted.datagram;
        let slot = &mut self.slots[index];
        if slot.cancel || slot.want != 0 {
            if out.len() + footprint(16) > limit {
                return Stop::Full;
            }
            if slot.cancel {
                packet::put_empty(out, EntryKind::Cancel, index, slot.number);
                slot.resend = 0;
            } else {
                packet::put_have(out, index, slot.number, slot.reply_got, slot.want);
                slot.asked |= slot.want;
                slot.asked_first = slot.want & !slot.asked_ever;
                slot.asked_ever |= slot.want;
                slot.asked_at = now;
                self.counters.retransmissions += u64::from(slot.asked_first != slot.want);
            }
            self.counters.entries_out += 1;
            if slot.cancel || slot.asked_first != slot.want || slot.again_at != NEVER {
                slot.again_at = now;
            }
            (slot.cancel, slot.want) = (false, 0);
            slot.due = now.saturating_add(slot.wait);
        }
        if slot.phase == Phase::Pending {
            let message = Message {
                kind: slot.kind,
                slot: index,
                number: slot.number,
                prefix: None,
                body: &slot.message,
            };
            for fragment in ones(slot.resend) {
                if out.len() + footprint(extent(message.size(), self.chunk, fragment).1) > limit {
                    return Stop::Full;
                }
                message.put(out, self.chunk, fragment);
                self.counters.entries_out += 1;
                self.counters.retransmissions += 1;
                slot.resend &= !(1 << fragment);
                slot.resent |= 1 << fragment;
                slot.sent_in[fragment] = self.sequence;
                slot.again_at = now;
                slot.due = now.saturating_add(slot.wait);
            }
            for fragment in ones(all(slot.count) & !slot.sent) {
                let bytes = footprint(extent(message.size(), self.chunk, fragment).1);
                let has_assembly = slot.count == 1
                    || slot.assembling
                    || self.assembling + message.size() <= self.granted.assembly;
                if is_blocked || !has_assembly || self.outstanding + bytes > self.granted.credit {
                    return Stop::NoCredit;
                }
                if out.len() + bytes > limit {
                    return Stop::Full;
                }
                if slot.count > 1 && !slot.assembling {
                    slot.assembling = true;
                    self.assembling += message.size();
                }
                if slot.sent == 0 {
                    slot.wait = self.rtt.rto();
                }
                message.put(out, self.chunk, fragment);
                self.counters.entries_out += 1;
                self.outstanding += bytes;
                slot.sent |= 1 << fragment;
                if self.config.is_reliable {
                    continue; // Neither timed nor retransmitted.
                }
                slot.sent_in[fragment] = self.sequence;
                slot.sent_at = now;
                slot.latest = fragment;
                if slot.again_at != NEVER {
                    slot.again_at = now;
                }
                slot.due = now.saturating_add(slot.wait);
            }
        }
        Stop::Done
    }

    fn take_in(&mut self, now: Duration, bytes: &[u8]) -> Result<(), PacketError> {
        let datagram = match Datagram::decode(bytes, self.config.is_reliable) {
            Err(PacketError::Version(version)) => {
                self.other_version(bytes);
                return Err(PacketError::Version(version));
            }
            datagram => datagram?,
        };
        match datagram.kind {
            Kind::Welcome | Kind::Refused => {
                if !packet::same(datagram.secret, self.config.nonce) {
                    return Err(PacketError::Secret);
                }
                if self.stage != Stage::Greeting {
                    self.counters.duplicates += 1;
                    return Ok(());
                }
                if datagram.kind == Kind::Welcome {
                    return self.welcome(now, datagram.body);
                }
                self.refuse(String::from_utf8_lossy(datagram.body).into_owned());
                return Ok(());
            }
            Kind::Data | Kind::Pong | Kind::Gone => {}
            kind => return Err(PacketError::Kind(kind as u8)),
        }
        if self.stage != Stage::Open || datagram.session != self.session {
            return Err(PacketError::Session(datagram.session));
        }
        if !packet::same(datagram.secret, self.secret) {
            return Err(PacketError::Secret);
        }
        match datagram.kind {
            Kind::Gone => return self.gone(datagram.body),
            Kind::Data => {
                for entry in Entries::validate(datagram.body, self.chunk, |_, _| {})? {
                    self.counters.entries_in += 1;
                    self.entry(now, &entry);
                }
                self.resend_overtaken();
            }
            _ if !datagram.body.is_empty() => return Err(PacketError::Length),
            _ => {}
        }
        self.pings = 0;
        self.ping = false;
        self.ping_at = now + self.period;
        Ok(())
    }

    fn welcome(&mut self, now: Duration, body: &[u8]) -> Result<(), PacketError> {
        let welcome = WelcomeBytes::ref_from_bytes(body).map_err(|_| PacketError::Length)?;
        let granted = Granted {
            node: welcome.node.get(),
            features: welcome.features.get(),
            window: welcome.window.into(),
            datagram: welcome.datagram.get() as usize,
            credit: welcome.credit.get() as usize,
            assembly: welcome.assembly.get() as usize,
            eager: welcome.eager.into(),
        };
        if !(1..=WINDOW_MAX).contains(&granted.window) {
            return Err(PacketError::Field("window"));
        }
        if !(DATAGRAM_MIN..=self.config.datagram).contains(&granted.datagram) {
            return Err(PacketError::Field("limit of datagrams"));
        }
        if granted.credit < ENTRY + chunk(granted.datagram) || granted.assembly < MESSAGE_BYTES_MAX {
            return Err(PacketError::Field("credit"));
        }
        if !(1..=64).contains(&granted.eager) {
            return Err(PacketError::Field("share of a reply"));
        }
        if self.config.features & !granted.features != 0 {
            self.refuse(format!(
                "the client asks for features {:#x}, the node has {:#x}; use a node and a client of one release",
                self.config.features, granted.features
            ));
            return Ok(());
        }
        let silence = Duration::from_millis(welcome.silence_ms.get().into()).max(Duration::from_millis(10));
        self.period = self.config.silence.min(silence) / PINGS;
        self.ping_at = now + self.period;
        self.session = welcome.session.get();
        self.secret = welcome.secret.get();
        self.chunk = chunk(granted.datagram);
        self.slots = (0..granted.window).map(|_| Slot::new()).collect();
        self.free = all(granted.window);
        self.granted = granted;
        self.stage = Stage::Open;
        self.counters.opened += 1;
        self.events.push_back(Event::Open(granted));
        Ok(())
    }

    fn other_version(&mut self, bytes: &[u8]) {
        if let Some(foreign) = Foreign::decode(bytes)
            && self.stage == Stage::Greeting
            && foreign.kind == Kind::Refused as u8
            && packet::same(foreign.secret, self.config.nonce)
        {
            self.refuse(format!(
                "the node speaks version {} of datagram sessions, this client speaks {VERSION}; use a node and a \
                 client of one release",
                foreign.version
            ));
        }
    }

    fn refuse(&mut self, reason: String) {
        self.counters.refused += 1;
        self.stage = Stage::Ended { bye: false };
        self.events.push_back(Event::Refused(reason));
    }

    fn gone(&mut self, body: &[u8]) -> Result<(), PacketError> {
        if body.is_empty() {
            self.lose(Lost::Gone, |_| Fate::Unknown);
            return Ok(());
        }
        let (count, rest) = U32::ref_from_prefix(body).map_err(|_| PacketError::Length)?;
        let (fenced, slots) = U32::ref_from_prefix(rest).map_err(|_| PacketError::Length)?;
        let slots = <[LastBytes]>::ref_from_bytes(slots).map_err(|_| PacketError::Length)?;
        if count.get() as usize != slots.len() || slots.len() != self.granted.window {
            return Err(PacketError::Field("count of slots"));
        }
        let why = match fenced.get() {
            0 => Lost::Gone,
            1 => Lost::Fenced,
            _ => return Err(PacketError::Field("reason of the end")),
        };
        let numbers: Vec<u32> = self.slots.iter().map(|slot| slot.number).collect();
        self.lose(why, |index| {
            let known = slots[index].number.get();
            match slots[index].state.get() {
                last::RAN if known == numbers[index] => Fate::DidRun,
                last::NO if known == numbers[index] => Fate::DidNotRun,
                // The server has not seen this request, and will accept no further datagram of this session.
                last::NO | last::RAN if known.wrapping_add(1) == numbers[index] => Fate::DidNotRun,
                _ => Fate::Unknown,
            }
        });
        Ok(())
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

    #[inline]
    fn entry(&mut self, now: Duration, entry: &Entry<'_>) {
        let Some(slot) = self.slots.get_mut(entry.slot) else {
            self.counters.refused += 1;
            return;
        };
        let is_known = entry.number == slot.number && slot.sent != 0;
        match (entry.kind, slot.phase) {
            (EntryKind::Have | EntryKind::Reply, Phase::Pending | Phase::Draining) if is_known => {}
            (EntryKind::Have | EntryKind::Reply, _) if super::newer(entry.number, slot.number) <= 0 => {
                self.counters.stale += 1;
                match slot.number.wrapping_sub(entry.number) {
                    0 => self.rtt.took_at_least(now.saturating_sub(slot.again_at)),
                    1 => self.rtt.took_at_least(now.saturating_sub(slot.before_again_at)),
                    _ => {}
                }
                return;
            }
            _ => {
                self.counters.refused += 1;
                return;
            }
        }
        match (entry.kind, slot.phase) {
            (EntryKind::Reply, Phase::Draining) => self.drained(entry),
            (EntryKind::Reply, _) => self.fragment(now, entry),
            // The server says that the cancelled request is about to run or is running: still wait for the response.
            (_, Phase::Draining) => {}
            _ => {
                let have = entry.have().have.get();
                if self.acknowledged(now, entry.slot, have & all(self.slots[entry.slot].count)) {
                    self.progress(now, entry.slot);
                } else {
                    self.note_repeat(now, entry.slot);
                }
            }
        }
    }

    /// Handles the response to an abandoned request, which shows whether the request ran.
    #[cold]
    fn drained(&mut self, entry: &Entry<'_>) {
        let slot = &mut self.slots[entry.slot];
        if entry.is_whole() && slot.kind == EntryKind::Chain {
            slot.put_execution(entry.payload);
            let has_run = slot.execution != 0;
            self.pool.fill(&mut slot.reply, entry.size - PREFIX);
            slot.reply.extend_from_slice(&entry.payload[PREFIX..]);
            self.settle(entry.slot, has_run);
        } else if slot.kind == EntryKind::Chain {
            self.owes = true;
        }
        self.set_free(entry.slot);
    }

    /// Handles a message that the server has sent before. The message responds to an unknown one of several
    /// transmissions. The round trip took at least the time since the last of these transmissions.
    fn note_repeat(&mut self, now: Duration, index: usize) {
        self.counters.duplicates += 1;
        self.rtt.took_at_least(now.saturating_sub(self.slots[index].again_at));
    }

    /// Retransmits at once the fragments that count as lost, because at least [`OVERTAKEN`] later datagrams arrived
    /// first.
    fn resend_overtaken(&mut self) {
        let is_overtaken = |sent_in, arrived| super::newer(arrived, sent_in) >= OVERTAKEN;
        if self.config.is_reliable || !is_overtaken(self.oldest, self.arrived) {
            return;
        }
        self.oldest = self.sequence;
        for index in ones(self.pending) {
            let slot = &mut self.slots[index];
            if slot.phase == Phase::Draining {
                continue;
            }
            for fragment in ones(slot.sent & !slot.acked & !slot.resend) {
                let sent_in = slot.sent_in[fragment];
                if is_overtaken(sent_in, self.arrived) {
                    slot.resend |= 1 << fragment;
                    self.send |= 1 << index;
                } else if super::newer(self.oldest, sent_in) > 0 {
                    self.oldest = sent_in;
                }
            }
        }
    }

    /// Records the fragments that the server has, and measures the round trip. Returns true if any of these fragments
    /// was not acknowledged before.
    #[inline]
    fn acknowledged(&mut self, now: Duration, index: usize, have: u64) -> bool {
        let news = self.acknowledge(index, have);
        if self.config.is_reliable {
            return news != 0; // A reliable carrier needs no timeouts.
        }
        let slot = &self.slots[index];
        if news & !slot.resent & 1 << slot.latest != 0 {
            self.rtt.sample(now.saturating_sub(slot.sent_at));
        }
        // Retransmitted fragments are skipped, since it is unknown which of their transmissions arrived.
        for fragment in ones(news & !slot.resent) {
            if super::newer(slot.sent_in[fragment], self.arrived) > 0 {
                self.arrived = slot.sent_in[fragment];
            }
        }
        news != 0
    }

    /// Restarts the timeout of a slot after a response from the server.
    fn progress(&mut self, now: Duration, index: usize) {
        let slot = &mut self.slots[index];
        slot.wait = self.rtt.rto();
        slot.due = now.saturating_add(slot.wait);
        self.earliest = self.earliest.min(slot.due);
    }

    #[inline]
    fn fragment(&mut self, now: Duration, entry: &Entry<'_>) {
        let index = entry.slot;
        // A server replies only when it has the whole request. If parts of the request were never sent, this reply is
        // not the response to it.
        let slot = &mut self.slots[index];
        if slot.sent != all(slot.count) {
            self.counters.refused += 1;
            return;
        }
        if slot.reply_count == 0 {
            self.acknowledged(now, index, u64::MAX);
            let slot = &mut self.slots[index];
            (slot.want, slot.resend) = (0, 0);
            slot.reply_count = entry.count;
            slot.reply_size = entry.size;
            let body = entry.size - PREFIX;
            self.pool.fill(&mut slot.reply, body);
            if entry.is_whole() {
                slot.reply_got = 1;
                slot.put_execution(entry.payload);
                slot.reply.extend_from_slice(&entry.payload[PREFIX..]);
                return self.replied(index);
            }
            slot.asked = first(all(entry.count), self.granted.eager);
            slot.asked_ever |= slot.asked;
            slot.asked_first = 0;
            (slot.came, slot.asked_overtaken) = (0, 0);
            slot.reply.resize(body, 0);
        }
        let slot = &mut self.slots[index];
        if slot.reply_size != entry.size {
            self.counters.refused += 1;
            return;
        }
        let bit = 1 << entry.index;
        if slot.reply_got & bit != 0 {
            self.note_repeat(now, index);
            return;
        }
        slot.reply_got |= bit;
        slot.asked &= !bit;
        slot.want &= !bit;
        slot.came |= bit;
        if slot.asked_first & bit != 0 {
            slot.asked_first = 0;
            self.rtt.sample(now.saturating_sub(slot.asked_at));
        }
        let mut payload = entry.payload;
        let (mut at, _) = extent(entry.size, self.chunk, entry.index);
        if entry.index == 0 {
            slot.put_execution(payload);
            payload = &payload[PREFIX..];
        } else {
            at -= PREFIX;
        }
        slot.reply[at..at + payload.len()].copy_from_slice(payload);
        if slot.reply_got != all(slot.reply_count) {
            if slot.asked == 0 {
                slot.ask_for_missing(self.granted.eager);
            } else if !self.config.is_reliable {
                slot.ask_for_overtaken();
            }
            self.send |= u64::from(slot.want != 0) << index;
            self.progress(now, index);
            return;
        }
        self.replied(index);
    }

    /// Handles a request whose reply is complete.
    #[inline]
    fn replied(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let (kind, execution) = (slot.kind, slot.execution);
        let request = slot.request.expect("a pending request has an owner");
        if slot.reply_count > 1 {
            self.ack |= 1 << index;
        }
        if kind == EntryKind::Retire {
            // No owner waits for the outcome.
            self.set_free(index);
            return;
        }
        if execution == 0 {
            // Execution number 0: the request did not run. A correct server reports that only for cancelled requests.
            self.owes |= !slot.held.is_empty();
            self.set_free(index);
            self.events.push_back(Event::Failed { request, fate: Fate::DidNotRun });
            return;
        }
        slot.phase = Phase::Answered;
        self.pending &= !(1 << index);
        self.send &= !(1 << index);
        self.counters.executed += 1;
        self.answered |= 1 << index;
    }
}

/// Why a slot has stopped adding to the datagram; [`Stop::Done`] if it has nothing left to send.
enum Stop {
    Done,
    /// The datagram is full.
    Full,
    /// The slot lacks credit.
    NoCredit,
}

impl Slot {
    fn new() -> Slot {
        Slot {
            phase: Phase::Free,
            number: 0,
            request: None,
            kind: EntryKind::Chain,
            message: Buffer::default(),
            held: Vec::new(),
            published_by: 0,
            count: 0,
            sent: 0,
            acked: 0,
            resend: 0,
            assembling: false,
            want: 0,
            cancel: false,
            sent_at: Duration::ZERO,
            latest: 0,
            resent: 0,
            sent_in: [0; FRAGMENTS_MAX],
            again_at: NEVER,
            before_again_at: NEVER,
            wait: Duration::ZERO,
            due: NEVER,
            deadline: NEVER,
            reply: Buffer::default(),
            execution: 0,
            reply_count: 0,
            reply_size: 0,
            reply_got: 0,
            asked: 0,
            asked_ever: 0,
            asked_first: 0,
            asked_at: Duration::ZERO,
            came: 0,
            asked_overtaken: 0,
        }
    }

    /// Records the execution number, which is at the beginning of the reply's first fragment.
    #[inline]
    fn put_execution(&mut self, payload: &[u8]) {
        let execution = payload[..PREFIX].try_into().expect("the prefix has 8 bytes");
        self.execution = u64::from_le_bytes(execution);
    }

    fn ask_for_missing(&mut self, eager: usize) {
        // Before the first fragment the number of fragments is unknown.
        let missing = if self.reply_count == 0 { u64::MAX } else { all(self.reply_count) };
        self.want = first(missing & !self.reply_got, eager);
        (self.came, self.asked_overtaken) = (0, 0);
    }

    /// Requests the fragments of the reply that count as lost: the server sends fragments in order, and [`OVERTAKEN`]
    /// later ones have arrived. Requests each lost fragment once.
    fn ask_for_overtaken(&mut self) {
        let later = (1..OVERTAKEN).fold(self.came, |came, _| came & !highest(came));
        let lost = self.asked & highest(later).saturating_sub(1) & !self.asked_overtaken;
        self.want |= lost;
        self.asked_overtaken |= lost;
    }
}

/// Returns a bitmap of the highest set bit of `bits`; 0 if `bits` is 0.
fn highest(bits: u64) -> u64 {
    if bits == 0 { 0 } else { 1 << bits.ilog2() }
}
