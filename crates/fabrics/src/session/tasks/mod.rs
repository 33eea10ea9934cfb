//! A session that the tasks of one thread share, as a fabric: tasks make requests, a line carries them, and the
//! outcomes wake the tasks.
//!
//! This module knows no descriptor, no thread and no clock of the system: it gets a line ([`Datagrams`]) and a clock.
//! [`super::endpoint`] runs it over real lines. This file moves datagrams and wakes tasks, `request` has the tasks'
//! requests, `watch` waits for states of the session, and `state` has what they share.
//!
//! Invariant: a request is cancelled when its future is dropped. Its slot takes another request only after the node has
//! confirmed the cancellation or responded.
//! Invariant: after the session has ended nothing is sent, and every caller gets an error that says what it may assume.

mod request;
mod state;
mod watch;

use super::carrier::{Arrivals, Broken, Datagrams};
use super::client::{Client, Granted};
use super::{WINDOW_MAX, ones};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, Ran};
use farside_remote::{FabricError, NodeId};
use state::{RETIRED_MAX, State, Woken};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::task::{Poll, Waker};
use std::time::Duration;
use watch::Watcher;

/// Maximum number of polls, after the line broke, for datagrams that had arrived before.
const LAST_POLLS: u32 = 16;

/// A session that the tasks of one thread share. Tasks make requests of it, and it wakes them when the outcomes are
/// known. It reads the clock and uses the line that it was given, and nothing else of the system.
pub struct TaskSession<L: Datagrams, C: Clock> {
    pub(super) line: L,
    clock: C,
    node: NodeId,
    pub(super) state: RefCell<State>,
    pub(super) patience: Cell<Duration>,
    /// For each slot, the waker of the task that waits for the response, or waited last. A waker is kept until the slot
    /// is reused, even if its task has ended, so that a task that sends again need not clone its waker. The wakers are
    /// not in `state`, so that a woken task may use the endpoint at once.
    waiting: [Cell<Option<Waker>>; WINDOW_MAX],
    /// Tasks that wait for a state of the session itself, and how many have waited so far.
    watchers: RefCell<Vec<Watcher>>,
    watches: Cell<u64>,
    /// The waker of [`TaskSession::drive`], unless it was woken since it ran last.
    driver: Cell<Option<Waker>>,
    /// Whether [`TaskSession::drive`] runs the session.
    is_driven: Cell<bool>,
}

impl<L: Datagrams, C: Clock> TaskSession<L, C> {
    /// Creates the session of a client that has sent its hello, or is about to. `granted` has the node's grants if the
    /// session is open.
    pub fn new(
        line: L,
        clock: C,
        node: NodeId,
        client: Client,
        granted: Option<Granted>,
    ) -> TaskSession<L, C> {
        let state = State {
            client,
            granted,
            failed: Vec::new(),
            slot_waiters: Vec::new(),
            retired: Vec::with_capacity(RETIRED_MAX),
            over: None,
            counters: Counters::default(),
            out: Vec::new(),
            now: clock.now(),
            has_time: false,
        };
        TaskSession {
            line,
            clock,
            node,
            state: RefCell::new(state),
            patience: Cell::new(DEADLINE),
            waiting: [const { Cell::new(None) }; WINDOW_MAX],
            watchers: RefCell::default(),
            watches: Cell::default(),
            driver: Cell::default(),
            is_driven: Cell::new(false),
        }
    }

    /// The line that carries the session's datagrams.
    pub fn line(&self) -> &L {
        &self.line
    }

    /// The clock that the session reads.
    pub fn clock(&self) -> &C {
        &self.clock
    }

    /// Returns the node's grants, once the session is open.
    pub fn granted(&self) -> Option<Granted> {
        self.state.borrow().granted
    }

    /// Returns the counters of this session.
    pub fn counters(&self) -> Counters {
        self.state.borrow().counters
    }

    /// Whether the session has ended, so that all further requests fail.
    pub fn is_over(&self) -> bool {
        self.state.borrow().over.is_some()
    }

    /// Checks that the session has not ended.
    ///
    /// # Errors
    /// The session has ended: no further request runs.
    pub fn check_open(&self) -> Result<(), FabricError> {
        match &self.state.borrow().over {
            Some(reason) => Err(self.over(reason, Ran::No)),
            None => Ok(()),
        }
    }

    /// Ends the session: from now on the client sends nothing but one BYE, which the next transmission contains. Does
    /// nothing and returns false if the session is over, if requests are outstanding, or if the node must scan for
    /// buffers of the session, which it does not after a BYE.
    pub fn leave(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let has_all = state.retired.is_empty() && !state.client.owes();
        if state.over.is_some() || state.client.is_waiting() || !has_all {
            return false;
        }
        state.client.close();
        drop(state);
        self.wake_driver();
        true
    }

    /// Ends the session without a word to the node, for a client that has waited for the node in vain.
    pub fn give_up(&self) {
        let mut state = self.state.borrow_mut();
        state.client.close();
        state.over.get_or_insert_with(|| "it has not answered in time".to_owned());
        let woken = state.handle_events();
        drop(state);
        self.wake(woken);
    }

    /// Sends, receives and handles timers: at `arrivals`, when a task has made a request, and when a timer is due. For
    /// `spin` after an arrival it polls for responses, without waiting for `arrivals`. Never completes.
    pub async fn drive(&self, arrivals: &impl Arrivals, spin: Duration) {
        let mut sleep: Option<(Duration, Pin<Box<_>>)> = None;
        let mut quiet_since = self.clock.now();
        self.is_driven.set(true);
        std::future::poll_fn(|cx| {
            drop(self.driver.replace(Some(cx.waker().clone())));
            let now = self.clock.now();
            self.state.borrow_mut().now = now;
            if self.poll_line() {
                quiet_since = now;
            }
            self.send();
            // Tasks may send requests much later, when `now` is outdated.
            self.state.borrow_mut().has_time = false;
            // Responses to the latest requests may arrive soon.
            if self.state.borrow().client.is_waiting() && now.saturating_sub(quiet_since) < spin {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            arrivals.arm(cx.waker());
            let wait = [self.timeout(now), arrivals.sleep_max()].into_iter().flatten().min();
            // A sleep that ends before the next timer is due stays: a dropped one would still wake this task, which
            // would sleep anew each time, so that the number of wake-ups would only grow.
            if let Some(due) = wait.map(|wait| now.saturating_add(wait))
                && sleep.as_ref().is_none_or(|(end, _)| *end > due || *end <= now)
            {
                sleep = Some((due, Box::pin(self.clock.sleep(due - now))));
            }
            if let Some((_, until)) = &mut sleep
                && until.as_mut().poll(cx).is_ready()
            {
                sleep = None;
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }

    /// Time that remains until a timer of the session is due.
    pub(super) fn timeout(&self, now: Duration) -> Option<Duration> {
        self.state.borrow().client.next_timeout().map(|at| at.saturating_sub(now))
    }

    /// Makes the driver send what is to be sent, if the session has one.
    #[inline]
    fn wake_driver(&self) {
        if self.is_driven.get()
            && let Some(driver) = self.driver.take()
        {
            driver.wake();
        }
    }

    fn over(&self, reason: &str, ran: Ran) -> FabricError {
        FabricError::Lost { node: self.node, ran, reason: reason.to_owned() }
    }

    /// Handles received datagrams, and wakes the tasks that wait for them. Returns false if there were none.
    #[inline]
    pub(super) fn poll_line(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let State { client, now, has_time, .. } = &mut *state;
        let mut is_first = true;
        let received = self.line.receive(|bytes| {
            if std::mem::take(&mut is_first) {
                *now = self.clock.now();
                *has_time = true;
            }
            let _refused_is_counted = client.receive(*now, bytes);
        });
        match received {
            Ok(false) => return false,
            Ok(true) => {}
            Err(Broken(reason)) => {
                state.client.close();
                state.over.get_or_insert(reason);
            }
        }
        let woken = state.handle_events();
        drop(state);
        self.wake(woken);
        true
    }

    /// Sends all pending datagrams.
    pub(super) fn send(&self) {
        let mut state = self.state.borrow_mut();
        state.send_retired();
        let State { client, now, out, over, .. } = &mut *state;
        let mut has_sent = false;
        let mut sent = Ok(());
        while sent.is_ok() && client.transmit(*now, out) {
            sent = self.line.send(out);
            has_sent = true;
        }
        if has_sent {
            sent = sent.and_then(|()| self.line.flush());
        }
        if let Err(Broken(reason)) = sent {
            // Datagrams that arrived before the line broke may report which requests ran.
            for _ in 0..LAST_POLLS {
                let received = self.line.receive(|bytes| {
                    let _refused_is_counted = client.receive(*now, bytes);
                });
                if received != Ok(true) {
                    break;
                }
            }
            client.close();
            over.get_or_insert(reason);
        }
        let woken = state.handle_events();
        drop(state);
        self.wake(woken);
    }

    #[inline]
    fn wake(&self, mut woken: Woken) {
        for index in ones(woken.slots) {
            let waiting = &self.waiting[index];
            if let Some(waker) = waiting.take() {
                waker.wake_by_ref();
                // A task that a wake-up polled at once may have stored another waker, which then stays.
                waiting.set(waiting.take().or(Some(waker)));
            }
        }
        if !woken.slot_waiters.is_empty() {
            woken.slot_waiters.drain(..).for_each(Waker::wake);
            let mut state = self.state.borrow_mut();
            if state.slot_waiters.is_empty() {
                state.slot_waiters = woken.slot_waiters; // Empty, but keeps its capacity.
            }
        }
        if !self.watchers.borrow().is_empty() {
            self.wake_watchers();
        }
    }
}

impl<L: Datagrams, C: Clock> Clock for TaskSession<L, C> {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock.sleep(duration)
    }
}
