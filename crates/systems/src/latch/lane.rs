//! Lanes: the steps of operations, which go on when their callers have gone, and the buffers of their requests.
//!
//! Each client has two lanes, which its operations use in turn. A lane carries out one step at a time: it takes a
//! latch, or sends the requests that end the operation. The steps of a lane are one future that belongs to the lane
//! ("owned posting"). The operation's caller polls this future. If the caller drops the operation, the client's task
//! ([`Latched::keeper`](super::Latched::keeper)) polls it on, until the latch is released.
//!
//! Unlike with [`crate::owned`], no step passes from one task to another as long as its caller stays, because a step is
//! hardly more than a round trip.
//!
//! The NIC may send a request again until it has completed, so a request's buffers must stay as they are until then
//! (section 2.3, "d"). So an operation that does not await its last requests leaves its lane to them. The next
//! operation uses the other lane, and the one after it waits for the first one's requests.
//!
//! Invariant: the buffers of a request are used by nothing else until the request has completed.
//! Invariant: once a lane may have taken a latch, a step that releases it follows: the caller's, or the lane's own. A
//! recovery takes and releases latches within one step.

use super::layout::Object;
use super::leased::LaneNumber;
use super::{Buffers, Client, Hold, Last, LatchError};
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Part of an operation that a lane carries out.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// Takes the latch, and reads the object's image into the lane's buffers.
    Take(Object, Hold),
    /// Ends an operation that holds the latch.
    End(Object, Last),
    /// Waits a while for the holder of a latch with this word, and recovers the holder's latches if it is dead.
    Await(Object, u64),
    /// Recovers all dead clients.
    Heal,
}

#[derive(Default)]
enum State {
    /// No step is in progress.
    #[default]
    Idle,
    Asked(Step),
    Running,
    Ended(Result<(), LatchError>),
}

/// All steps of a lane.
type Steps = Pin<Box<dyn Future<Output = Infallible>>>;

pub(super) struct Lane {
    own: Rc<Own>,
    /// Created with the first step.
    steps: RefCell<Option<Steps>>,
    /// Waker of an operation that waits until no step is in progress.
    waiter: RefCell<Option<Waker>>,
    /// Number of the lane among those of its client, in a store with leases; `None` within if there was none.
    number: Option<Option<LaneNumber>>,
}

/// What a lane and its steps share.
#[derive(Default)]
struct Own {
    state: Cell<State>,
    /// The latch that the lane has taken.
    held: Cell<Option<(Object, Hold)>>,
    /// Whether the caller of the step has gone.
    is_abandoned: Cell<bool>,
    /// Whether the last requests of the step were sent.
    is_posted: Cell<bool>,
    buffers: RefCell<Buffers>,
}

impl Lane {
    pub(super) fn new(number: Option<Option<LaneNumber>>) -> Rc<Lane> {
        Rc::new(Lane { own: Rc::default(), steps: RefCell::default(), waiter: RefCell::default(), number })
    }

    /// Number of the lane among those of its client; 0 in a store without leases.
    ///
    /// # Errors
    /// Other handles have all lanes.
    pub(super) fn number(&self) -> Result<u16, LatchError> {
        match &self.number {
            None => Ok(0),
            Some(number) => number.as_ref().map(|lane| lane.number).ok_or(LatchError::NoLane),
        }
    }

    /// The buffers, which hold an object's image after [`Step::Take`].
    pub(super) fn buffers(&self) -> &RefCell<Buffers> {
        &self.own.buffers
    }

    /// Carries out a step, and waits for its end.
    pub(super) async fn carry_out<F: Fabric + Clock + 'static>(
        &self,
        client: &Rc<Client<F>>,
        step: Step,
    ) -> Result<(), LatchError> {
        self.number()?;
        self.ask(client, step);
        poll_fn(|cx| self.poll(cx)).await
    }

    /// Begins a step whose requests are all sent at once, and does not wait for its end. Waits until they are sent: if
    /// the client's own CPU runs its chains, that is once they have run.
    pub(super) async fn post<F: Fabric + Clock + 'static>(&self, client: &Rc<Client<F>>, step: Step) {
        self.ask(client, step);
        let sent = poll_fn(|cx| match self.poll(cx) {
            Poll::Pending if !self.own.is_posted.get() => Poll::Pending,
            polled => Poll::Ready(polled),
        });
        if let Poll::Ready(Err(error)) = sent.await {
            // The operation that uses the lane next reports it.
            self.own.state.set(State::Ended(Err(error)));
        }
    }

    /// Waits until no step is in progress.
    ///
    /// # Errors
    /// The error of a step that was not awaited.
    pub(super) async fn settle(&self) -> Result<(), LatchError> {
        poll_fn(|cx| {
            let state = self.own.state.take();
            if let State::Idle = state {
                return Poll::Ready(Ok(()));
            }
            self.own.state.set(state);
            match self.poll(cx) {
                // Nobody waits for the outcome of a step whose caller has gone.
                Poll::Ready(settled) => {
                    Poll::Ready(if self.own.is_abandoned.take() { Ok(()) } else { settled })
                }
                Poll::Pending => {
                    // The client's task may be the next one that polls the step.
                    self.waiter.replace(Some(cx.waker().clone()));
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Runs a future of another lane, and lets the step of this lane go on meanwhile, which nobody awaits. Otherwise
    /// its response would keep a slot of the session.
    pub(super) async fn beside<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|cx| {
            self.advance(cx);
            future.as_mut().poll(cx)
        })
        .await
    }

    /// Polls the step in progress, if any. Keeps its error for the operation that uses the lane next.
    fn advance(&self, cx: &mut Context<'_>) {
        let state = self.own.state.take();
        let is_running = matches!(state, State::Running);
        self.own.state.set(state);
        if is_running
            && let Poll::Ready(outcome) = self.poll(cx)
            && !self.own.is_abandoned.take()
            && outcome.is_err()
        {
            self.own.state.set(State::Ended(outcome));
        }
    }

    /// Returns the error of a step that was not awaited, if the step has ended.
    pub(super) fn take_error(&self) -> Option<LatchError> {
        match self.own.state.take() {
            State::Ended(outcome) => outcome.err(),
            state => {
                self.own.state.set(state);
                None
            }
        }
    }

    /// Gives up the step in progress, because its caller has gone: the lane releases the latch that it holds or is
    /// about to take. An operation that has begun to write the object is completed. Returns whether something remains
    /// to be done.
    pub(super) fn abandon(&self) -> bool {
        let state = match (self.own.state.take(), self.own.held.get()) {
            (State::Idle, Some((object, hold))) => State::Asked(Step::End(object, Last::Release(hold))),
            (State::Running, _) => State::Running,
            (State::Asked(step @ Step::End(..)), _) => State::Asked(step),
            (State::Idle | State::Asked(_) | State::Ended(_), _) => State::Idle,
        };
        let is_left = !matches!(state, State::Idle);
        self.own.is_abandoned.set(is_left);
        self.own.state.set(state);
        is_left
    }

    /// Polls what remains of the steps of callers that have gone.
    pub(super) fn poll_abandoned(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.own.is_abandoned.get() {
            return Poll::Ready(()); // A later operation of the client has waited for it.
        }
        self.poll(cx).map(|_nobody_waits_for_it| {
            self.own.is_abandoned.set(false);
            self.waiter.take().into_iter().for_each(Waker::wake);
        })
    }

    fn ask<F: Fabric + Clock + 'static>(&self, client: &Rc<Client<F>>, step: Step) {
        self.own.state.set(State::Asked(step));
        self.steps.borrow_mut().get_or_insert_with(|| {
            let (client, own) = (Rc::clone(client), Rc::clone(&self.own));
            let lane = self.number().unwrap_or_default();
            Box::pin(async move { own.run(&client, lane).await })
        });
    }

    /// Polls the step in progress.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), LatchError>> {
        if let Some(steps) = &mut *self.steps.borrow_mut() {
            let Poll::Pending = steps.as_mut().poll(cx);
        }
        match self.own.state.take() {
            State::Ended(outcome) => Poll::Ready(outcome),
            state => {
                self.own.state.set(state);
                Poll::Pending
            }
        }
    }
}

impl Own {
    /// Carries out the steps of a lane.
    async fn run<F: Fabric + Clock + 'static>(&self, client: &Client<F>, lane: u16) -> Infallible {
        loop {
            // Whoever asks for a step then polls this future, so that no waker is needed.
            let step = poll_fn(|_| match self.state.take() {
                State::Asked(step) => Poll::Ready(step),
                state => {
                    self.state.set(state);
                    Poll::Pending
                }
            })
            .await;
            self.state.set(State::Running);
            self.is_posted.set(false);
            let mut buffers = self.buffers.take();
            let outcome = self.carry_out(client, (step, lane), &mut buffers).await;
            self.buffers.replace(buffers);
            if let Err(error) = &outcome
                && self.is_abandoned.get()
            {
                client.note_unheard(error);
            }
            self.state.set(State::Ended(outcome));
        }
    }

    async fn carry_out<F: Fabric + Clock + 'static>(
        &self,
        client: &Client<F>,
        (step, lane): (Step, u16),
        buffers: &mut Buffers,
    ) -> Result<(), LatchError> {
        match step {
            Step::Take(object, hold) => {
                client.take_latch(&object, hold, buffers, (lane, || self.is_abandoned.get())).await?;
                if self.is_abandoned.get() {
                    return client.send(Last::Release(hold), &object, buffers, &self.is_posted).await;
                }
                self.held.set(Some((object, hold)));
                Ok(())
            }
            Step::End(object, last) => {
                self.held.set(None);
                client.send(last, &object, buffers, &self.is_posted).await
            }
            Step::Await(object, latch) => client.wait_for_holder(lane, &object, latch).await,
            Step::Heal => client.heal(lane).await,
        }
    }
}
