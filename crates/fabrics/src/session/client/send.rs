//! Datagrams that a client sends: HELLO, entries of its slots, PING and BYE.
//!
//! Invariant: what does not fit into a datagram, or lacks credit, is sent by a later call.

use super::super::packet::{self, EntryKind, HEADER, HelloBytes, Kind, Message, all, extent, footprint};
use super::super::rtt::RTO_MAX;
use super::super::{DATAGRAM_MIN, ones};
use super::slot::Phase;
use super::{Client, NEVER, Stage};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64, U128};

/// Minimum limit on the requests in one datagram. The limit is half of the requests in flight, but not less than this.
const SHARE_MIN: usize = 8;

impl Client {
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
}

/// Why a slot has stopped adding to the datagram; [`Stop::Done`] if it has nothing left to send.
enum Stop {
    Done,
    /// The datagram is full.
    Full,
    /// The slot lacks credit.
    NoCredit,
}
