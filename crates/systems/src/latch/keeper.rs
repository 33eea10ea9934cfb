//! The task of a client: it goes on with the lanes whose callers have gone.
//!
//! Invariant: one task of a client runs at a time. When it ends, or is dropped, one of those that wait for it runs.
//! Invariant: a lane without a caller belongs to the client until its steps have ended, or no task is left.

use super::lane::Lane;
use super::{Client, LatchError};
use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// What the client's task has to do.
#[derive(Default)]
pub(super) struct Kept {
    /// Lanes whose callers have gone.
    lanes: Vec<Rc<Lane>>,
    /// Whether a task runs. The other tasks of the client wait for its end.
    has_task: bool,
    /// Wakers of the task that runs, and of those that wait for its end.
    task: Option<Waker>,
    waiting: Vec<Waker>,
    /// The first error for which no caller has waited.
    pub(super) unheard: Option<LatchError>,
}

/// A task of the client. When the last one ends, lanes are left to nobody.
pub(super) struct Keeping<F> {
    pub(super) client: Rc<Client<F>>,
    /// Whether this is the task that runs.
    is_running: Cell<bool>,
}

impl<F> Keeping<F> {
    pub(super) fn new(client: &Rc<Client<F>>) -> Keeping<F> {
        client.keepers.set(client.keepers.get() + 1);
        Keeping { client: Rc::clone(client), is_running: Cell::new(false) }
    }

    /// Waits until no other task of the client runs. From then on, this one does.
    pub(super) async fn turn(&self) {
        poll_fn(|cx| {
            let mut kept = self.client.kept.borrow_mut();
            if kept.has_task {
                if !kept.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                    kept.waiting.push(cx.waker().clone());
                }
                return Poll::Pending;
            }
            kept.has_task = true;
            self.is_running.set(true);
            Poll::Ready(())
        })
        .await;
    }
}

impl<F> Drop for Keeping<F> {
    fn drop(&mut self) {
        let client = &self.client;
        client.keepers.set(client.keepers.get() - 1);
        if !client.kept.borrow().lanes.is_empty() {
            client.note_left();
        }
        let mut kept = client.kept.borrow_mut();
        if self.is_running.get() {
            (kept.has_task, kept.task) = (false, None);
            kept.waiting.drain(..).for_each(Waker::wake);
        }
        let left = (client.keepers.get() == 0).then(|| std::mem::take(&mut *kept));
        drop(kept);
        drop(left);
    }
}

impl<F> Client<F> {
    /// Leaves the steps of a lane to the client's task, if there is one. It may run later.
    pub(super) fn adopt(&self, lane: &Rc<Lane>) {
        let mut kept = self.kept.borrow_mut();
        if self.keepers.get() > 0 && !kept.lanes.iter().any(|kept| Rc::ptr_eq(kept, lane)) {
            kept.lanes.push(Rc::clone(lane));
        }
        drop(kept);
        self.wake_keeper();
    }

    pub(super) fn wake_keeper(&self) {
        self.kept.borrow().task.iter().for_each(Waker::wake_by_ref);
    }

    /// Polls the lanes whose callers have gone.
    pub(super) fn poll_kept(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut lanes = std::mem::take(&mut self.kept.borrow_mut().lanes);
        lanes.retain(|lane| lane.poll_abandoned(cx).is_pending());
        let mut kept = self.kept.borrow_mut();
        kept.task = Some(cx.waker().clone());
        lanes.append(&mut kept.lanes);
        kept.lanes = lanes;
        if self.handles.get() == 0 && kept.lanes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}
