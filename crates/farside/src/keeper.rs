//! Runs the task of a client of a store, such as [`Blocks::keeper`], beside the work that uses the client.
//!
//! A core has a limited number of tasks, and a program may use all of them. So the keeper is polled by the task of some
//! work, and not by a task of its own.

use crate::endpoint::Endpoint;
use farside_fabrics::executor::Core;
use farside_fabrics::timer;
use farside_systems::blocks::Blocks;
use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The tasks of some clients.
#[derive(Default)]
pub struct Keepers(Vec<Pin<Box<dyn Future<Output = ()>>>>);

impl Keepers {
    /// Creates the tasks of these clients. Other handles of the same clients are kept, too.
    pub fn of<'c, B: Blocks + 'static>(clients: impl IntoIterator<Item = &'c B>) -> Keepers {
        Keepers(clients.into_iter().map(|client| client.keeper()).collect())
    }

    /// Gathers tasks of clients.
    pub fn of_tasks(tasks: impl IntoIterator<Item = impl Future<Output = ()> + 'static>) -> Keepers {
        Keepers(tasks.into_iter().map(|task| Box::pin(task) as Pin<Box<dyn Future<Output = ()>>>).collect())
    }

    /// Runs `work`, and the clients' tasks meanwhile. They go on with the next work. The clients' tasks begin first,
    /// since the work may need them at once.
    pub async fn beside<O>(&mut self, work: impl Future<Output = O>) -> O {
        let (mut work, mut has_begun) = (pin!(work), false);
        poll_fn(|cx| {
            if !std::mem::replace(&mut has_begun, true) {
                let _more_to_do = self.poll(cx);
            }
            let polled = work.as_mut().poll(cx);
            let _more_to_do = self.poll(cx);
            polled
        })
        .await
    }

    /// Runs `tasks` on a core to their ends, and the clients' tasks meanwhile. If there are clients, at most
    /// 63 tasks are possible.
    pub(crate) fn run_beside<'a>(
        &'a mut self,
        endpoint: &'a Endpoint,
        tasks: impl ExactSizeIterator<Item = impl Future<Output = ()> + 'a>,
    ) {
        let (left, waiting) = (Cell::new(tasks.len()), Cell::new(None::<Waker>));
        let mut core = Core::new(endpoint);
        if !self.is_empty() {
            let all_ended = poll_fn(|cx| match left.get() {
                0 => Poll::Ready(()),
                _ => {
                    waiting.set(Some(cx.waker().clone()));
                    Poll::Pending
                }
            });
            core.spawn(self.beside(all_ended));
        }
        for task in tasks {
            let (left, waiting) = (&left, &waiting);
            core.spawn(async move {
                task.await;
                left.set(left.get() - 1);
                if left.get() == 0 {
                    waiting.take().into_iter().for_each(Waker::wake);
                }
            });
        }
        core.run();
    }

    /// Runs the clients' tasks to their ends, which come once no handle of the clients is left.
    pub async fn end(mut self) {
        poll_fn(|cx| self.poll(cx)).await;
    }

    /// Runs the clients' tasks to their ends like [`Keepers::end`], but at most for this time. What they leave then,
    /// other clients find as if this client had died.
    pub async fn end_within(mut self, limit: Duration) {
        let mut limit = pin!(timer::sleep(limit));
        poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => limit.as_mut().poll(cx),
        })
        .await;
    }

    /// Whether no client has anything to do.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.retain_mut(|keeper| keeper.as_mut().poll(cx).is_pending());
        if self.0.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    }
}
