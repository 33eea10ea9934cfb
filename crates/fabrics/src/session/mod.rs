//! Requests and responses over datagrams that may be lost, duplicated, delayed and reordered: both ends, without
//! sockets.
//!
//! [`client`] is one incarnation of a client and its only session with one engine. [`server`] is an engine with all its
//! sessions. [`packet`] defines the bytes between them, and [`rtt`] estimates the retransmission timeout. The owner of
//! the socket passes in received datagrams and the time, and sends the datagrams that it gets back. [`carrier`] is the
//! interface of such a socket. [`tasks`] makes a fabric of a client and its line, and [`endpoint`] adds the system's
//! clock and descriptors.
//!
//! A session has up to 64 slots. A slot carries one request at a time. Each request of a slot gets the next higher
//! number, and the server never runs a number twice, so a request runs at most once. Requests and replies are split
//! into fragments, and everything sent to one peer shares datagrams. Only the client has retransmission timers. Over a
//! carrier that does not lose, duplicate or reorder (a ring in shared memory, a stream with length-prefixed frames), it
//! has none.
//!
//! A chain retires the buffers that it makes unreachable. A client retires only buffers that chains of its session have
//! allocated and never published, in two cases: the chain's future was dropped, or the chain was abandoned before its
//! response came.
//!
//! Invariants:
//! - A slot's number runs at most once, and never after its session has ended or the request was cancelled.
//! - Received bytes never cause a panic, and a session's memory is bounded, whatever its peer sends.
//! - A datagram has an effect only if all of it is well-formed and it contains the session's secret.
//! - A request needs no allocation if a request of its size occurred before.

pub mod answer;
pub mod carrier;
pub mod client;
pub mod endpoint;
pub mod packet;
pub mod rtt;
pub mod server;
pub mod tasks;

use farside_remote::wire::CHAIN_BYTES_MAX;

/// Maximum number of slots per session: one per bit of a bitmap word.
pub const WINDOW_MAX: usize = 64;
/// Maximum number of fragments per message: one per bit of a bitmap word.
pub const FRAGMENTS_MAX: usize = 64;
/// Maximum size of a request or a reply in bytes, including the session's prefix.
pub const MESSAGE_BYTES_MAX: usize = CHAIN_BYTES_MAX + 64;
/// Maximum size of the body of a request or a reply in bytes.
pub const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX - packet::PREFIX;
/// Minimum datagram limit. A HELLO has this size, and no response to it is longer, so that a forged source address
/// gains no amplification.
pub const DATAGRAM_MIN: usize = 1200;
/// Maximum datagram limit: the capacity of UDP over IPv4.
pub const DATAGRAM_MAX: usize = 65507;
/// Maximum size of the token in a HELLO.
pub const TOKEN_BYTES_MAX: usize = 512;
/// Maximum size of the reason in a REFUSED.
const REASON_BYTES_MAX: usize = 512;
/// Maximum size of the buffer that a slot owns. Larger buffers come from a pool that all slots share.
const KEPT_BYTES_MAX: usize = 4096;
/// Number of PINGs that a client sends during the silence period.
const PINGS: u32 = 5;

/// A slot's buffer: the slot's own if that is large enough, else one lent from the pool.
#[derive(Default)]
struct Buffer {
    own: Vec<u8>,
    lent: Option<Vec<u8>>,
}

impl Buffer {
    /// Number of bytes that the slot's own buffer and the lent one occupy.
    fn capacity(&self) -> usize {
        self.own.capacity() + self.lent.as_ref().map_or(0, Vec::capacity)
    }
}

impl std::ops::Deref for Buffer {
    type Target = Vec<u8>;

    #[inline]
    fn deref(&self) -> &Vec<u8> {
        self.lent.as_ref().unwrap_or(&self.own)
    }
}

impl std::ops::DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut Vec<u8> {
        self.lent.as_mut().unwrap_or(&mut self.own)
    }
}

/// Pool of buffers for large messages, in four sizes: 8, 16 and 32 KiB, and the maximum message. The sizes are fixed,
/// so that a buffer can be reused for every message that needs its size.
#[derive(Default)]
struct Pool {
    buffers: [Vec<Vec<u8>>; 4],
    /// Total size in bytes of the message buffers that request slots hold now.
    lent: usize,
}

impl Pool {
    /// Maximum number of idle buffers per size.
    const BUFFERS_MAX: usize = 64;
    const SIZES: [usize; 4] = [8 << 10, 16 << 10, 32 << 10, MESSAGE_BYTES_MAX];

    /// Empties `buffer` and makes space in it for `len` bytes.
    #[inline]
    fn fill(&mut self, buffer: &mut Buffer, len: usize) {
        self.free(buffer);
        if len <= KEPT_BYTES_MAX {
            // Reserves exactly this size: growth by doubling could exceed what a slot may keep.
            if len > buffer.own.capacity() {
                buffer.own.reserve_exact(len.next_power_of_two());
            }
        } else if let Some(class) = Pool::SIZES.iter().position(|&size| size >= len) {
            let large = self.buffers[class].pop();
            let large = large.unwrap_or_else(|| Vec::with_capacity(Pool::SIZES[class]));
            self.lent += large.capacity();
            buffer.lent = Some(large);
        }
    }

    /// Clears `buffer`, and returns its lent part to the pool.
    #[inline]
    fn free(&mut self, buffer: &mut Buffer) {
        buffer.own.clear();
        if buffer.lent.is_some() {
            self.take_back(buffer);
        }
    }

    #[cold]
    fn take_back(&mut self, buffer: &mut Buffer) {
        let Some(mut large) = buffer.lent.take() else { return };
        self.lent -= large.capacity();
        if let Some(class) = Pool::SIZES.iter().rposition(|&size| size <= large.capacity())
            && self.buffers[class].len() < Pool::BUFFERS_MAX
        {
            large.clear();
            self.buffers[class].push(large);
        }
    }

    fn capacity(&self) -> usize {
        self.buffers.iter().flatten().map(Vec::capacity).sum()
    }
}

/// Iterates over the positions of the set bits of a bitmap.
#[inline]
fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(next)
    })
}

/// Returns a bitmap of the lowest `count` set bits of `bits`.
#[inline]
fn first(bits: u64, count: usize) -> u64 {
    if bits.count_ones() as usize <= count {
        return bits;
    }
    ones(bits).take(count).fold(0, |first, bit| first | 1 << bit)
}

/// Returns the distance from `known` to `number`: 0 if they are equal, positive if `number` is newer. Numbers may wrap
/// around.
#[inline]
fn newer(number: u32, known: u32) -> i32 {
    number.wrapping_sub(known).cast_signed()
}

/// Traffic counters of one end of a session, or of all sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of datagrams received.
    pub datagrams_in: u64,
    /// Number of datagrams sent.
    pub datagrams_out: u64,
    /// Number of entries in accepted datagrams.
    pub entries_in: u64,
    /// Number of entries in sent datagrams.
    pub entries_out: u64,
    /// Number of retransmitted fragments and repeated queries.
    pub retransmissions: u64,
    /// Number of entries whose content was already known.
    pub duplicates: u64,
    /// Entries for an older request of their slot.
    pub stale: u64,
    /// Number of datagrams with a wrong secret.
    pub bad_secrets: u64,
    /// Number of foreign or damaged datagrams.
    pub malformed: u64,
    /// Entries and datagrams that are well-formed but not allowed: beyond the window or the grants, with numbers from
    /// the future, or with inconsistent fragments.
    pub refused: u64,
    /// Number of requests that the server has run, or that the client has received responses to.
    pub executed: u64,
    /// Number of sessions opened.
    pub opened: u64,
    /// Number of sessions ended.
    pub ended: u64,
}

impl Counters {
    /// Adds the counters of another end.
    pub fn add(&mut self, other: &Counters) {
        self.datagrams_in += other.datagrams_in;
        self.datagrams_out += other.datagrams_out;
        self.entries_in += other.entries_in;
        self.entries_out += other.entries_out;
        self.retransmissions += other.retransmissions;
        self.duplicates += other.duplicates;
        self.stale += other.stale;
        self.bad_secrets += other.bad_secrets;
        self.malformed += other.malformed;
        self.refused += other.refused;
        self.executed += other.executed;
        self.opened += other.opened;
        self.ended += other.ended;
    }
}
