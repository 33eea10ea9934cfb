//! A client's slot: the state of its request and of the reply.
//!
//! Invariant: an acknowledged fragment of a request was sent, and is never sent again.

use super::super::packet::{EntryKind, PREFIX, all};
use super::super::{Buffer, FRAGMENTS_MAX, first};
use super::{NEVER, SlotRef};
use farside_remote::Addr;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Free,
    /// The slot's request waits for a response.
    Pending,
    /// The request has a response, which the owner has not released.
    Answered,
    /// The request was abandoned, and the server has not confirmed that.
    Draining,
}

pub(super) struct Slot {
    pub(super) phase: Phase,
    /// Number of the slot's last request that the server may know.
    pub(super) number: u32,
    /// The request in this slot, while its owner waits or holds the response.
    pub(super) request: Option<SlotRef>,
    pub(super) kind: EntryKind,
    pub(super) message: Buffer,
    /// Buffers that the chain publishes if the op with the index `published_by` succeeds.
    pub(super) held: Vec<Addr>,
    pub(super) published_by: usize,
    /// Number of fragments of the request.
    pub(super) count: usize,
    pub(super) sent: u64,
    pub(super) acked: u64,
    /// Bitmap of the request's fragments to retransmit.
    pub(super) resend: u64,
    /// Whether the request has several fragments, is partly sent, and is counted in `Client::assembling`.
    pub(super) assembling: bool,
    /// Bitmap of the reply's fragments that this end will request from the server.
    pub(super) want: u64,
    /// Whether to send a CANCEL for the slot's request.
    pub(super) cancel: bool,
    /// For round-trip samples: the time at which a fragment was last sent for the first time (`sent_at`), the index of
    /// that fragment (`latest`), and the set of fragments that were retransmitted (`resent`).
    pub(super) sent_at: Duration,
    pub(super) latest: usize,
    pub(super) resent: u64,
    /// Sequence number of the datagram in which each fragment was last sent.
    pub(super) sent_in: [u32; FRAGMENTS_MAX],
    /// Time of the last transmission, if there was a retransmission: for the current number (`again_at`), and for the
    /// previous number (`before_again_at`).
    pub(super) again_at: Duration,
    pub(super) before_again_at: Duration,
    /// Timeout for any response from the server: its length (`wait`), and the time at which it ends (`due`).
    pub(super) wait: Duration,
    pub(super) due: Duration,
    pub(super) deadline: Duration,
    /// The reply without its execution prefix.
    pub(super) reply: Buffer,
    pub(super) execution: u64,
    pub(super) reply_count: usize,
    pub(super) reply_size: usize,
    pub(super) reply_got: u64,
    /// Bitmap of the reply's fragments that should be in flight.
    pub(super) asked: u64,
    /// Bitmaps: all fragments of the reply that were ever requested (`asked_ever`), and those that the last HAVE, sent
    /// at `asked_at`, was the first to request (`asked_first`).
    pub(super) asked_ever: u64,
    pub(super) asked_first: u64,
    pub(super) asked_at: Duration,
    /// Bitmaps: the fragments of the reply that have arrived since all missing ones were last requested (`came`), and
    /// the fragments requested since then because later ones had overtaken them (`asked_overtaken`).
    pub(super) came: u64,
    pub(super) asked_overtaken: u64,
}

/// A fragment counts as lost if a datagram sent this many datagrams later is acknowledged (RFC 9002, 6.1.1).
pub(super) const OVERTAKEN: i32 = 3;

impl Slot {
    pub(super) fn new() -> Slot {
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
    pub(super) fn put_execution(&mut self, payload: &[u8]) {
        let execution = payload[..PREFIX].try_into().expect("the prefix has 8 bytes");
        self.execution = u64::from_le_bytes(execution);
    }

    pub(super) fn ask_for_missing(&mut self, eager: usize) {
        // Before the first fragment the number of fragments is unknown.
        let missing = if self.reply_count == 0 { u64::MAX } else { all(self.reply_count) };
        self.want = first(missing & !self.reply_got, eager);
        (self.came, self.asked_overtaken) = (0, 0);
    }

    /// Requests the fragments of the reply that count as lost: the server sends fragments in order, and [`OVERTAKEN`]
    /// later ones have arrived. Requests each lost fragment once.
    pub(super) fn ask_for_overtaken(&mut self) {
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
