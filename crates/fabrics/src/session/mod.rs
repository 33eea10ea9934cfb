//! Requests and answers by datagrams that may be lost, doubled, delayed and overtaken: both ends, without sockets.
//!
//! [`client`] is one incarnation of a client and its one session with one engine; [`server`] is an engine and all its
//! sessions; [`packet`] has the bytes between them, [`rtt`] the time to wait. Whoever has the sockets hands in what
//! arrived and the time, and sends what comes out: [`carrier`] says what that is, [`endpoint`] makes a fabric of a
//! client and its line.
//!
//! A session has up to 64 slots. A slot carries one request at a time, under a number that grows by one; this is
//! what makes a request run at most once. Requests and replies are cut into fragments, and all that goes to one peer
//! shares datagrams. Only the client has timers for what was lost. Over a carrier that neither loses, doubles nor
//! reorders (a ring in shared memory, a stream with length frames) it has none.
//!
//! A chain retires the buffers that it makes unreachable. A client gives back only buffers that it has allocated and
//! never shown: those of a dropped future, and those of a chain whose answer was abandoned.
//!
//! What always holds:
//! - A number of a slot runs at most once, and never after the session has ended or the number was cancelled.
//! - What is received never panics, and a session's memory has a bound, whatever its peer sends.
//! - A datagram has an effect only if all of it is well-formed and it knows the session's secret.
//! - Nothing is allocated for a request of a size that was seen before.

pub mod answer;
pub mod carrier;
pub mod client;
pub mod endpoint;
pub mod packet;
pub mod rtt;
pub mod server;

use farside_remote::wire::CHAIN_BYTES_MAX;

/// The most slots of a session: a bitmap holds them.
pub const WINDOW_MAX: usize = 64;
/// The most fragments of a message: a bitmap holds them.
pub const FRAGMENTS_MAX: usize = 64;
/// The most bytes of a request or a reply, with the few that a session adds.
pub const MESSAGE_BYTES_MAX: usize = CHAIN_BYTES_MAX + 64;
/// The most bytes that a request or a reply may have of its own.
pub const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX - packet::PREFIX;
/// The least that a datagram's limit may be. A HELLO has that many, so that whoever forges its source gains nothing.
pub const DATAGRAM_MIN: usize = 1200;
/// The most that it may be: what UDP carries over IPv4.
pub const DATAGRAM_MAX: usize = 65507;
/// The most bytes of the token in a HELLO.
pub const TOKEN_BYTES_MAX: usize = 512;
/// The most bytes of the reason in a REFUSED.
const REASON_BYTES_MAX: usize = 512;
/// A slot keeps a buffer up to this; a larger one goes back to where all slots can take it.
const KEPT_BYTES_MAX: usize = 4096;
/// How often in its time of silence a client asks whether anyone is there.
const PINGS: u32 = 5;

/// A slot's buffer: its own while that is enough, else one that is lent.
#[derive(Default)]
struct Buffer {
    own: Vec<u8>,
    lent: Option<Vec<u8>>,
}

impl Buffer {
    /// Bytes that it keeps from others.
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

/// Buffers for large messages that are in no slot: 8, 16, 32 KiB, and the largest message, so that one that was
/// made for a size serves it ever after.
#[derive(Default)]
struct Pool {
    buffers: [Vec<Vec<u8>>; 4],
    /// Bytes of those that slots have at the moment.
    lent: usize,
}

impl Pool {
    /// At most this many of a size are kept.
    const BUFFERS_MAX: usize = 64;
    const SIZES: [usize; 4] = [8 << 10, 16 << 10, 32 << 10, MESSAGE_BYTES_MAX];

    /// Makes an empty buffer of which nothing is lent one that can hold `len` bytes.
    #[inline]
    fn fill(&mut self, buffer: &mut Buffer, len: usize) {
        self.free(buffer);
        if len <= KEPT_BYTES_MAX {
            // What it would grow to by itself may be more than a slot keeps.
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

    /// Forgets what `buffer` holds, and takes back what was lent.
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

/// The places of the ones in a bitmap.
#[inline]
fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(next)
    })
}

/// The first `count` ones of a bitmap.
#[inline]
fn first(bits: u64, count: usize) -> u64 {
    if bits.count_ones() as usize <= count {
        return bits;
    }
    ones(bits).take(count).fold(0, |first, bit| first | 1 << bit)
}

/// How `number` stands to the one that is known: 0 the same, positive newer. Numbers may wrap.
#[inline]
fn newer(number: u32, known: u32) -> i32 {
    number.wrapping_sub(known).cast_signed()
}

/// What has gone through one end of a session, or of all sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams that arrived.
    pub datagrams_in: u64,
    /// Datagrams that left.
    pub datagrams_out: u64,
    /// Entries in datagrams that were accepted.
    pub entries_in: u64,
    /// Entries in datagrams that left.
    pub entries_out: u64,
    /// Fragments that were sent again, and questions that were asked again.
    pub retransmissions: u64,
    /// Entries that said what was known.
    pub duplicates: u64,
    /// Entries of an older request of their slot.
    pub stale: u64,
    /// Datagrams with a wrong secret.
    pub bad_secrets: u64,
    /// Datagrams that are none of ours, or damaged.
    pub malformed: u64,
    /// Entries and datagrams that were well-formed and not allowed: beyond the window or what is granted, numbers
    /// from the future, fragments that disagree.
    pub refused: u64,
    /// Requests that ran (server) or were answered (client).
    pub executed: u64,
    /// Sessions that began.
    pub opened: u64,
    /// Sessions that ended.
    pub ended: u64,
}

impl Counters {
    /// Adds another end's.
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
