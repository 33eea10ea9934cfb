//! The state that a session's tasks share, and what an event of the client changes in it.

use super::super::client::{Client, Event, Fate, Granted, Lost, SlotRef};
use farside_remote::Addr;
use farside_remote::arena::session::Counters;
use farside_remote::fabric::FENCED;
use std::task::Waker;
use std::time::Duration;

/// Maximum number of buffers retired by one request.
pub(super) const RETIRED_MAX: usize = 256;

pub(in crate::session) struct State {
    pub(in crate::session) client: Client,
    /// The node's grants, once the session is open.
    pub(super) granted: Option<Granted>,
    /// Failed requests that were not yet reported to their tasks. Other requests may be in the same slots already.
    pub(super) failed: Vec<(SlotRef, Fate)>,
    /// Wakers of tasks that wait for a slot.
    pub(super) slot_waiters: Vec<Waker>,
    /// Regions and addresses of the buffers to be retired.
    pub(super) retired: Vec<(u32, Addr)>,
    /// Reason for which the session has ended; `None` while it is open.
    pub(in crate::session) over: Option<String>,
    pub(super) counters: Counters,
    pub(super) out: Vec<u8>,
    pub(in crate::session) now: Duration,
    /// Set when something has arrived since the last round ended, so that `now` is current.
    pub(in crate::session) has_time: bool,
}

/// Tasks to wake: slots whose tasks wait for a response, and tasks that wait for a free slot.
#[derive(Default)]
#[must_use]
pub(super) struct Woken {
    pub(super) slots: u64,
    pub(super) slot_waiters: Vec<Waker>,
}

impl State {
    /// Handles the client's events. Returns the tasks to wake.
    #[inline]
    pub(super) fn handle_events(&mut self) -> Woken {
        let mut slots = self.client.take_answered();
        while let Some(event) = self.client.next_event() {
            let request = match event {
                Event::Answered { request, .. } => request,
                Event::Failed { request, fate } => {
                    self.failed.push((request, fate));
                    request
                }
                Event::Lost(lost) => {
                    self.over.get_or_insert(
                        match lost {
                            Lost::Silent => "it did not respond for too long",
                            Lost::Gone => "it has ended the session, or has restarted",
                            Lost::Fenced => FENCED,
                        }
                        .to_owned(),
                    );
                    continue;
                }
                Event::Refused(reason) => {
                    self.over.get_or_insert(reason);
                    continue;
                }
                Event::Open(granted) => {
                    self.granted = Some(granted);
                    continue;
                }
            };
            slots |= 1 << request.slot();
        }
        Woken { slots, slot_waiters: self.slot_waiters() }
    }

    /// Removes and returns the fate of a failed request.
    #[inline]
    pub(super) fn take_failed(&mut self, request: SlotRef) -> Option<Fate> {
        let place = self.failed.iter().position(|(failed, _)| *failed == request)?;
        Some(self.failed.swap_remove(place).1)
    }

    /// Returns the tasks that wait for a slot, if one is free; a slot may become free long after its request was
    /// dropped. The caller wakes all of these tasks, since the first may have been cancelled.
    #[inline]
    pub(super) fn slot_waiters(&mut self) -> Vec<Waker> {
        if self.slot_waiters.is_empty() {
            return Vec::new();
        }
        self.send_retired(); // Comes first: the tasks could otherwise take every free slot.
        let has_slot = self.over.is_some() || self.client.has_room();
        if has_slot { std::mem::take(&mut self.slot_waiters) } else { Vec::new() }
    }

    /// Retires the buffers of dropped futures in one request, if a slot is free.
    pub(super) fn send_retired(&mut self) {
        self.client.take_unpublished(&mut self.retired);
        while !self.retired.is_empty() {
            let count = self.retired.len().min(RETIRED_MAX);
            if !self.client.retire(self.now, &self.retired[..count]) {
                return;
            }
            self.retired.drain(..count);
        }
    }
}
