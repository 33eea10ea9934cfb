//! Timers of a client: deadlines, retransmission, PINGs, and the measurement of round trips.
//!
//! Invariant: the time during which this process was stopped counts against no request's deadline.

use super::super::packet::all;
use super::super::rtt::RTO_MAX;
use super::super::{PINGS, newer, ones};
use super::slot::{OVERTAKEN, Phase};
use super::{Client, Event, Fate, Lost, NEVER, Stage};
use std::time::Duration;

impl Client {
    /// Notices by a gap between two calls that this process was stopped. Then extends the deadlines of outstanding
    /// requests, so that their responses can still be received.
    #[inline]
    pub(super) fn notice_pause(&mut self, now: Duration) {
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
    pub(super) fn wake(&mut self, now: Duration) {
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

    /// Records the fragments that the server has, and measures the round trip. Returns true if any of these fragments
    /// was not acknowledged before.
    #[inline]
    pub(super) fn acknowledged(&mut self, now: Duration, index: usize, have: u64) -> bool {
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
            if newer(slot.sent_in[fragment], self.arrived) > 0 {
                self.arrived = slot.sent_in[fragment];
            }
        }
        news != 0
    }

    /// Restarts the timeout of a slot after a response from the server.
    pub(super) fn progress(&mut self, now: Duration, index: usize) {
        let slot = &mut self.slots[index];
        slot.wait = self.rtt.rto();
        slot.due = now.saturating_add(slot.wait);
        self.earliest = self.earliest.min(slot.due);
    }

    /// Handles a message that the server has sent before. The message responds to an unknown one of several
    /// transmissions. The round trip took at least the time since the last of these transmissions.
    pub(super) fn note_repeat(&mut self, now: Duration, index: usize) {
        self.counters.duplicates += 1;
        self.rtt.took_at_least(now.saturating_sub(self.slots[index].again_at));
    }

    /// Retransmits at once the fragments that count as lost, because at least [`OVERTAKEN`] later datagrams arrived
    /// first.
    pub(super) fn resend_overtaken(&mut self) {
        let is_overtaken = |sent_in, arrived| newer(arrived, sent_in) >= OVERTAKEN;
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
                } else if newer(self.oldest, sent_in) > 0 {
                    self.oldest = sent_in;
                }
            }
        }
    }
}
