//! Waiting for a state of a session: open, ended, or without requests.
//!
//! Invariant: a watcher is known from the first poll of its future until the future is dropped.

use super::super::carrier::Datagrams;
use super::TaskSession;
use super::state::State;
use farside_remote::FabricError;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use std::cell::RefCell;
use std::task::{Poll, Waker};

/// State of a session that a task can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The session is open, or has ended.
    Opened,
    /// The session has ended.
    Ended,
    /// No request is outstanding and all retires were sent, or the session has ended.
    Settled,
}

/// A task that waits for a state of the session.
pub(super) struct Watcher {
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

impl<L: Datagrams, C: Clock> TaskSession<L, C> {
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
    pub(super) fn wake_watchers(&self) {
        let state = self.state.borrow();
        let woken: Vec<Watcher> =
            self.watchers.borrow_mut().extract_if(.., |watcher| state.is(watcher.awaited)).collect();
        drop(state);
        woken.into_iter().for_each(|watcher| watcher.waker.wake());
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
}
