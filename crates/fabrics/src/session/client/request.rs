//! Requests: taking one into a slot, cancelling it, handing out its response, and freeing the slot.

use super::super::packet::{EntryKind, PREFIX, RETIRED, all, extent, footprint, fragments};
use super::super::{BODY_BYTES_MAX, KEPT_BYTES_MAX, MESSAGE_BYTES_MAX, answer, ones};
use super::slot::Phase;
use super::{Ask, Client, Fate, NEVER, SlotRef, Stage};
use farside_remote::{Addr, ChainView, Reply, Status};
use std::time::Duration;

impl Client {
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

    /// Records the buffers of an abandoned chain that must be retired. If the chain did not run, these are all buffers
    /// that it holds. If the chain ran, these are the buffers that it has allocated or held and not published,
    /// according to the reply in the slot. Not called for a reply of several fragments: a scan finds the buffers after
    /// this session has ended.
    #[cold]
    pub(super) fn settle(&mut self, index: usize, has_run: bool) {
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
    pub(super) fn drop_request(&mut self, index: usize) -> Fate {
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
    pub(super) fn set_free(&mut self, index: usize) {
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
    pub(super) fn acknowledge(&mut self, index: usize, have: u64) -> u64 {
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
}
