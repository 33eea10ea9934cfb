//! Entries that a client receives: acknowledgements, and fragments of replies.

use super::super::packet::{Entry, EntryKind, PREFIX, all, extent};
use super::super::{first, newer};
use super::slot::Phase;
use super::{Client, Event, Fate};
use std::time::Duration;

impl Client {
    #[inline]
    pub(super) fn entry(&mut self, now: Duration, entry: &Entry<'_>) {
        let Some(slot) = self.slots.get_mut(entry.slot) else {
            self.counters.refused += 1;
            return;
        };
        let is_known = entry.number == slot.number && slot.sent != 0;
        match (entry.kind, slot.phase) {
            (EntryKind::Have | EntryKind::Reply, Phase::Pending | Phase::Draining) if is_known => {}
            (EntryKind::Have | EntryKind::Reply, _) if newer(entry.number, slot.number) <= 0 => {
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
