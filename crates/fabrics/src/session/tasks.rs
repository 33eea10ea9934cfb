//! A session that the tasks of one thread share, as a fabric: tasks make requests, a line carries them, and the outcomes
//! wake the tasks.
//!
//! This module knows no descriptor, no thread and no clock of the system: it gets a line ([`Datagrams`]) and a clock.
//! [`super::endpoint`] runs it over real lines, and the simulator runs it in virtual time.
//!
//! Invariant: a request is cancelled when its future is dropped. Its slot takes another request only after the node has
//! confirmed the cancellation or responded.
//! Invariant: after the session has ended nothing is sent, and every caller gets an error that says what it may assume.

use super::carrier::{Arrivals, Broken, Datagrams};
use super::client::{Ask, Client, Event, Fate, Granted, Lost, SlotRef};
use super::{BODY_BYTES_MAX, WINDOW_MAX, answer};
use farside_remote::arena::session::Counters;
use farside_remote::chain::PIECES_MAX;
use farside_remote::clock::{Clock, within};
use farside_remote::fabric::{CALL_BYTES_MAX, DEADLINE, FENCED, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply, Status};
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Maximum number of polls, after the line broke, for datagrams that had arrived before.
const LAST_POLLS: u32 = 16;
/// If an endpoint was not driven for this long, it polls for datagrams before it sends new requests.
const AWAY: Duration = Duration::from_secs(1);
/// Maximum number of buffers retired by one request.
const RETIRED_MAX: usize = 256;

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

pub(super) struct State {
    pub(super) client: Client,
    /// The node's grants, once the session is open.
    granted: Option<Granted>,
    /// Failed requests that were not yet reported to their tasks. Other requests may be in the same slots already.
    failed: Vec<(SlotRef, Fate)>,
    /// Wakers of tasks that wait for a slot.
    slot_waiters: Vec<Waker>,
    /// Regions and addresses of the buffers to be retired.
    retired: Vec<(u32, Addr)>,
    /// Reason for which the session has ended; `None` while it is open.
    pub(super) over: Option<String>,
    counters: Counters,
    out: Vec<u8>,
    pub(super) now: Duration,
    /// Set when something has arrived since the last round ended, so that `now` is current.
    pub(super) has_time: bool,
}

/// State of a session that a task can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// The session is open, or has ended.
    Opened,
    /// The session has ended.
    Ended,
    /// No request is outstanding and all retires were sent, or the session has ended.
    Settled,
}

/// A task that waits for a state of the session.
struct Watcher {
    id: u64,
    awaited: Awaited,
    waker: Waker,
}

/// Forgets a watcher when its future is dropped.
struct Forget<'a> {
    watchers: &'a RefCell<Vec<Watcher>>,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.watchers.borrow_mut().retain(|watcher| watcher.id != self.id);
    }
}

/// Tasks to wake: slots whose tasks wait for a response, and tasks that wait for a free slot.
#[derive(Default)]
#[must_use]
struct Woken {
    slots: u64,
    slot_waiters: Vec<Waker>,
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

    /// Waits until the session is open.
    ///
    /// # Errors
    /// The session has ended before it was open.
    pub async fn opened(&self) -> Result<(), FabricError> {
        self.watch(Awaited::Opened).await;
        self.check_open()
    }

    /// Waits until the session has ended. Returns the error of a request whose outcome is unknown.
    pub async fn ended(&self) -> FabricError {
        self.watch(Awaited::Ended).await;
        self.over(self.state.borrow().over.as_deref().unwrap_or_default(), Ran::Unknown)
    }

    /// Waits until no request is outstanding and the node has received all retires, or until the session has ended.
    pub async fn settled(&self) {
        self.watch(Awaited::Settled).await;
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

    /// Waits until the session is in a state.
    async fn watch(&self, awaited: Awaited) {
        let id = self.watches.replace(self.watches.get() + 1);
        let _forgotten_at_the_end = Forget { watchers: &self.watchers, id };
        std::future::poll_fn(|cx| {
            if self.state.borrow().is(awaited) {
                return Poll::Ready(());
            }
            let mut watchers = self.watchers.borrow_mut();
            watchers.retain(|watcher| watcher.id != id);
            watchers.push(Watcher { id, awaited, waker: cx.waker().clone() });
            Poll::Pending
        })
        .await;
    }

    /// Wakes the tasks that wait for the session's present state.
    #[cold]
    fn wake_watchers(&self) {
        let state = self.state.borrow();
        let woken: Vec<Watcher> =
            self.watchers.borrow_mut().extract_if(.., |watcher| state.is(watcher.awaited)).collect();
        drop(state);
        woken.into_iter().for_each(|watcher| watcher.waker.wake());
    }

    /// Sends, receives and handles timers: at `arrivals`, when a task has made a request, and when a timer is due. For
    /// `spin` after an arrival it polls for responses, without waiting for `arrivals`. Never completes.
    pub async fn drive(&self, arrivals: &impl Arrivals, spin: Duration) {
        let mut sleep = None;
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
            let waits = [self.timeout(now), arrivals.sleep_max()].into_iter().flatten().min();
            sleep = waits.map(|wait| Box::pin(self.clock.sleep(wait)));
            if let Some(sleep) = &mut sleep
                && sleep.as_mut().poll(cx).is_ready()
            {
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

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
    }

    fn over(&self, reason: &str, ran: Ran) -> FabricError {
        FabricError::Lost { node: self.node, ran, reason: reason.to_owned() }
    }

    /// Returns a future that waits for the response to a request.
    #[inline]
    fn answer(&self, request: SlotRef) -> InFlight<'_, L, C> {
        self.wake_driver();
        InFlight { session: self, request: Some(request) }
    }

    /// Passes a response to `look`, then releases its slot. `look` must not panic, whatever the peer has sent.
    #[inline]
    fn take<O>(&self, request: SlotRef, look: impl FnOnce(&mut Client, &mut Counters) -> O) -> O {
        let mut state = self.state.borrow_mut();
        let State { client, counters, .. } = &mut *state;
        let looked = look(client, counters);
        client.release(request);
        let retires_later = !state.retired.is_empty();
        if !state.slot_waiters.is_empty() {
            let slot_waiters = state.slot_waiters();
            drop(state);
            self.wake(Woken { slots: 0, slot_waiters });
        }
        if retires_later {
            self.wake_driver(); // The retires may have waited for the slot.
        }
        looked
    }

    /// Submits a chain, if a slot is free.
    #[inline]
    fn submit_chain(&self, chain: &ChainView<'_>) -> Option<SlotRef> {
        if let Some(pieces) = chain.two_pieces() {
            return self.submit_now(Ask::Chain, DEADLINE, &pieces);
        }
        let mut pieces = [&[][..]; PIECES_MAX];
        let count = chain.pieces().zip(&mut pieces).map(|(piece, place)| *place = piece).count();
        self.submit_now(Ask::Chain, DEADLINE, &pieces[..count])
    }

    /// Submits a request, if a slot is free.
    #[inline]
    fn submit_now(&self, ask: Ask, patience: Duration, parts: &[&[u8]]) -> Option<SlotRef> {
        let mut state = self.state.borrow_mut();
        if !state.has_time && (self.is_driven.get() || !state.client.is_waiting()) {
            // `now` was not updated since the endpoint was last idle. A driver that sleeps does not update it either.
            let last = std::mem::replace(&mut state.now, self.clock.now());
            if state.now.saturating_sub(last) > AWAY {
                // The node may have ended the session in the meantime, and reported that; then the request must not
                // run.
                drop(state);
                self.poll_line();
                state = self.state.borrow_mut();
            }
        }
        if state.over.is_some() {
            return None;
        }
        let now = state.now;
        state.client.submit_within(now, patience, ask, parts)
    }

    /// Submits a request once a slot is free.
    #[cold]
    async fn submit_later(
        &self,
        patience: Duration,
        ask: impl Fn() -> Option<SlotRef>,
    ) -> Result<SlotRef, FabricError> {
        let asked = std::future::poll_fn(|cx| match ask() {
            Some(request) => Poll::Ready(Ok(request)),
            None => {
                let mut state = self.state.borrow_mut();
                if let Some(reason) = &state.over {
                    return Poll::Ready(Err(self.over(reason, Ran::No)));
                }
                if !state.slot_waiters.iter().any(|known| known.will_wake(cx.waker())) {
                    state.slot_waiters.push(cx.waker().clone());
                }
                Poll::Pending
            }
        });
        within(&self.clock, patience, asked).await.unwrap_or_else(|| {
            Err(FabricError::Refused(format!(
                "node {} has not responded for {patience:?}, and this request was not sent: check whether the node is \
                 stopped or unreachable",
                self.node.0
            )))
        })
    }

    /// Returns the error for a request without a response. The error states whether the request may have run.
    #[cold]
    fn failed(&self, fate: Fate, patience: Duration) -> FabricError {
        let ran = match fate {
            Fate::DidNotRun => Ran::No,
            Fate::DidRun => Ran::Yes,
            Fate::Unknown => Ran::Unknown,
        };
        match &self.state.borrow().over {
            Some(reason) => self.over(reason, ran),
            None if ran == Ran::No => FabricError::Refused(format!(
                "node {} granted no space for this request within {patience:?}, and it was not sent: request less at \
                 a time",
                self.node.0
            )),
            None => FabricError::Deadline { node: self.node, waited: patience },
        }
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

    #[cold]
    fn cancel(&self, request: SlotRef) {
        let mut state = self.state.borrow_mut();
        let _nobody_asks = state.client.cancel(request).or_else(|| state.take_failed(request));
        let slot_waiters = state.slot_waiters();
        drop(state);
        self.wake(Woken { slots: 0, slot_waiters });
        self.wake_driver();
    }

    /// Registers `waker` to be woken when the outcome of a request is known.
    #[inline]
    fn wait_for(&self, request: SlotRef, waker: &Waker) {
        let waiting = &self.waiting[request.slot()];
        let known = waiting.take().filter(|known| known.will_wake(waker));
        waiting.set(Some(known.unwrap_or_else(|| waker.clone())));
    }

    #[inline]
    fn wake(&self, mut woken: Woken) {
        for index in super::ones(woken.slots) {
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

impl State {
    fn is(&self, awaited: Awaited) -> bool {
        self.over.is_some()
            || match awaited {
                Awaited::Opened => self.granted.is_some(),
                Awaited::Ended => false,
                Awaited::Settled => self.retired.is_empty() && !self.client.is_waiting(),
            }
    }

    /// Handles the client's events. Returns the tasks to wake.
    #[inline]
    fn handle_events(&mut self) -> Woken {
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
    fn take_failed(&mut self, request: SlotRef) -> Option<Fate> {
        let place = self.failed.iter().position(|(failed, _)| *failed == request)?;
        Some(self.failed.swap_remove(place).1)
    }

    /// Returns the tasks that wait for a slot, if one is free; a slot may become free long after its request was
    /// dropped. The caller wakes all of these tasks, since the first may have been cancelled.
    #[inline]
    fn slot_waiters(&mut self) -> Vec<Waker> {
        if self.slot_waiters.is_empty() {
            return Vec::new();
        }
        self.send_retired(); // Comes first: the tasks could otherwise take every free slot.
        let has_slot = self.over.is_some() || self.client.has_room();
        if has_slot { std::mem::take(&mut self.slot_waiters) } else { Vec::new() }
    }

    /// Retires the buffers of dropped futures in one request, if a slot is free.
    fn send_retired(&mut self) {
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

/// A request in flight; dropping it cancels the request.
struct InFlight<'a, L: Datagrams, C: Clock> {
    session: &'a TaskSession<L, C>,
    request: Option<SlotRef>,
}

impl<L: Datagrams, C: Clock> Future for InFlight<'_, L, C> {
    type Output = Result<SlotRef, Fate>;

    /// Completes when the outcome of the request is known. If the request failed, the client has forgotten the request
    /// before this future completes.
    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<SlotRef, Fate>> {
        let Some(request) = self.request else { unreachable!("polled after completion") };
        let mut state = self.session.state.borrow_mut();
        let outcome = if state.client.is_answered(request) {
            Ok(request)
        } else if let Some(fate) = state.take_failed(request) {
            Err(fate)
        } else {
            drop(state);
            self.session.wait_for(request, cx.waker());
            return Poll::Pending;
        };
        drop(state);
        self.request = None;
        Poll::Ready(outcome)
    }
}

impl<L: Datagrams, C: Clock> Drop for InFlight<'_, L, C> {
    #[inline]
    fn drop(&mut self) {
        if let Some(request) = self.request {
            self.session.cancel(request);
        }
    }
}

impl<L: Datagrams, C: Clock> Fabric for TaskSession<L, C> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        let view = chain.view();
        let request = match self.submit_chain(&view) {
            Some(request) => request,
            // Boxed, to keep the future of all other chains small.
            None => Box::pin(self.submit_later(DEADLINE, || self.submit_chain(&view))).await?,
        };
        if let Some(held) = chain.held() {
            self.state.borrow_mut().client.hold(request, held.buffers, held.published_by);
            chain.note_posted();
        }
        let request = self.answer(request).await.map_err(|fate| self.failed(fate, DEADLINE))?;
        let refusal = self.take(request, |client, counters| {
            let bytes = client.reply(request);
            counters.chains += 1;
            counters.ops += view.len() as u64;
            counters.atomics += view.atomics() as u64;
            counters.bytes_in += view.wire_len() as u64;
            counters.bytes_out += bytes.len() as u64;
            if let Some(reason) = answer::refusal(bytes) {
                counters.refused += 1;
                return Some(FabricError::Refused(reason));
            }
            if let Err(error) = reply.fill(view.len(), |own| client.take_reply(request, own)) {
                let reason = format!("its reply is malformed: {error}");
                return Some(FabricError::Lost { node, ran: Ran::Yes, reason });
            }
            match reply.last_status() {
                Status::Access | Status::Invalid | Status::Aborted => counters.refused += 1,
                Status::NotReady => counters.not_ready += 1,
                _ => {}
            }
            None
        });
        refusal.map_or(Ok(()), Err)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        response: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        const { assert!(CALL_BYTES_MAX <= BODY_BYTES_MAX) }
        self.check(node)?;
        if request.len() > CALL_BYTES_MAX {
            return Err(FabricError::Refused(format!(
                "a call carries at most {CALL_BYTES_MAX} bytes, this one has {}: ask for less at a time",
                request.len()
            )));
        }
        let patience = self.patience.get();
        let ask = || self.submit_now(Ask::Call(service), patience, &[request]);
        let request = match ask() {
            Some(request) => request,
            None => self.submit_later(patience, ask).await?,
        };
        let request = self.answer(request).await.map_err(|fate| self.failed(fate, patience))?;
        self.take(request, |client, _| {
            let bytes = client.reply(request);
            match answer::refusal(bytes) {
                Some(reason) => Err(FabricError::Refused(reason)),
                None => {
                    response.clear();
                    response.extend_from_slice(answer::body(bytes));
                    Ok(())
                }
            }
        })
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        let mut state = self.state.borrow_mut();
        if node == self.node && state.over.is_none() {
            state.retired.push((key.region(), buffer));
            state.counters.retired += 1;
            drop(state);
            self.wake_driver();
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::SOFTWARE
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        self.state.borrow().client.is_draining()
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
