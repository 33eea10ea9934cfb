//! A session at the server: its slots, and the datagrams that it sends.
//!
//! Invariant: a reply is kept until the client has acknowledged it, or the slot's next request begins.

use super::super::packet::{
    self, Entry, EntryKind, HEADER, Kind, LastBytes, Message, PREFIX, all, extent, footprint, fragments,
};
use super::super::{BODY_BYTES_MAX, Buffer, Counters, Pool, first, newer, ones};
use super::{Address, last};
use std::time::Duration;
use zerocopy::little_endian::U32;

pub(super) struct Session<A, S> {
    pub(super) number: u32,
    pub(super) address: A,
    pub(super) secret: u64,
    pub(super) identity: u128,
    pub(super) incarnation: u64,
    /// The HELLO's body without its trailing zeros.
    pub(super) hello: Box<[u8]>,
    pub(super) host: S,
    pub(super) datagram: usize,
    pub(super) chunk: usize,
    /// Number of fragments of a reply that are sent before the client asks for more by a HAVE entry.
    pub(super) eager: usize,
    pub(super) heard: Duration,
    pub(super) executions: u64,
    /// Size in bytes of the requests that are half received.
    pub(super) assembling: usize,
    pub(super) is_dirty: bool,
    pub(super) pong: bool,
    /// Whether a chain's reply exceeded a slot's own buffer; if so, further replies are likely to do the same.
    pub(super) has_long_replies: bool,
    /// The same of the responses to calls.
    pub(super) has_long_responses: bool,
    /// Bitmap of the slots for which to send a HAVE entry.
    pub(super) send_have: u64,
    /// Bitmap of the slots with reply fragments to send.
    pub(super) send_reply: u64,
    pub(super) slots: Box<[Slot]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Some fragments of the request have arrived, but not all.
    Receiving,
    /// The request is running; the response follows later.
    Executing,
    /// The request was answered, or will never run; or the slot has had no request.
    Done,
    /// The client has the whole response, so the server has freed it.
    Acknowledged,
}

pub(super) struct Slot {
    pub(super) number: u32,
    pub(super) state: State,
    pub(super) kind: EntryKind,
    pub(super) size: usize,
    pub(super) got: u64,
    pub(super) message: Buffer,
    /// Execution number of the slot's request within the session; 0 if it has not run.
    pub(super) execution: u64,
    pub(super) reply: Buffer,
    /// Bitmap of the reply's fragments to send.
    pub(super) send: u64,
}

impl<A: Address, S> Session<A, S> {
    /// Whether this entry will start a chain. Only reliable before the first entry of the datagram has run.
    #[inline]
    pub(super) fn begins_chain(&self, entry: &Entry<'_>) -> bool {
        entry.kind == EntryKind::Chain
            && entry.is_whole()
            && self.slots.get(entry.slot).is_some_and(|slot| slot.begins_next(entry.number))
    }

    /// Whether a slot other than `besides` keeps a reply in a lent buffer.
    pub(super) fn keeps_long_reply(&self, besides: usize) -> bool {
        let mut slots = self.slots.iter().enumerate();
        slots.any(|(index, slot)| index != besides && slot.reply.lent.is_some())
    }

    /// Marks a slot's reply as complete. The reply is kept until the slot's next request begins.
    #[inline(always)]
    pub(super) fn done(&mut self, index: usize) {
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
    pub(super) fn send_first(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if slot.state == State::Done {
            let size = PREFIX + slot.reply.len();
            // Most replies have one fragment.
            slot.send |=
                if size <= self.chunk { 1 } else { first(all(fragments(size, self.chunk)), self.eager) };
            self.send_reply |= 1 << index;
        }
    }

    pub(super) fn has_to_send(&self) -> bool {
        self.pong || self.send_have | self.send_reply != 0
    }

    pub(super) fn transmit(&mut self, out: &mut Vec<u8>, counters: &mut Counters) -> bool {
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
    pub(super) fn new() -> Slot {
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
    pub(super) fn begin(&mut self, number: u32, pool: &mut Pool) {
        self.number = number;
        self.execution = 0;
        self.send = 0;
        pool.free(&mut self.reply);
    }

    /// Marks the slot's current request as one that will never run.
    pub(super) fn void(&mut self, pool: &mut Pool) {
        pool.free(&mut self.message);
        self.state = State::Done;
        self.execution = 0;
    }

    pub(super) fn last(&self) -> LastBytes {
        let state = match self.state {
            State::Executing => last::RUNNING,
            State::Done | State::Acknowledged if self.execution != 0 => last::RAN,
            _ => last::NO,
        };
        LastBytes { number: U32::new(self.number), state: U32::new(state) }
    }
}
