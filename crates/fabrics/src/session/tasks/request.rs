//! Requests of tasks: each is submitted, waited for, and cancelled if its future is dropped.

use super::super::carrier::Datagrams;
use super::super::client::{Ask, Client, Fate, SlotRef};
use super::super::{BODY_BYTES_MAX, answer};
use super::TaskSession;
use super::state::{State, Woken};
use farside_remote::arena::session::Counters;
use farside_remote::chain::PIECES_MAX;
use farside_remote::clock::{Clock, within};
use farside_remote::fabric::{CALL_BYTES_MAX, DEADLINE, Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, NodeId, Reply, Status};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// If an endpoint was not driven for this long, it polls for datagrams before it sends new requests.
const AWAY: Duration = Duration::from_secs(1);

impl<L: Datagrams, C: Clock> TaskSession<L, C> {
    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node == self.node { Ok(()) } else { Err(FabricError::NoSuchNode(node)) }
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
