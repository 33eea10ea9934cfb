//! The result of an operation that a client's thread runs: a future for any executor, or a blocking wait.

use crate::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// An operation in flight. Block on it with [`Pending::wait`], or `.await` it under any executor.
///
/// The operation starts when it is submitted, not when it is awaited. Dropping a `Pending` does not cancel the
/// operation: it runs, and its result is lost.
#[must_use = "the operation runs, but only waiting for it tells whether it succeeded"]
pub struct Pending<T> {
    shared: Arc<Shared<T>>,
}

/// The client thread's end of a [`Pending`]. Dropping it unfulfilled completes the operation with [`Error::Closed`].
pub(super) struct Promise<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    inner: Mutex<Inner<T>>,
    done: Condvar,
}

struct Inner<T> {
    result: Option<Result<T, Error>>,
    waker: Option<Waker>,
}

pub(super) fn promise<T>() -> (Promise<T>, Pending<T>) {
    let inner = Mutex::new(Inner { result: None, waker: None });
    let shared = Arc::new(Shared { inner, done: Condvar::new() });
    (Promise { shared: Arc::clone(&shared) }, Pending { shared })
}

impl<T> Shared<T> {
    fn inner(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Promise<T> {
    pub(super) fn fulfil(self, result: Result<T, Error>) {
        self.set(result);
    }

    fn set(&self, result: Result<T, Error>) {
        let mut inner = self.shared.inner();
        inner.result.get_or_insert(result);
        let waker = inner.waker.take();
        drop(inner);
        self.shared.done.notify_one();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        // No effect after `fulfil`: either the result is still set, or its only receiver has taken it.
        self.set(Err(Error::Closed));
    }
}

impl<T> Pending<T> {
    /// Blocks this thread until the operation completes.
    ///
    /// # Errors
    /// The operation's error; [`Error::ran`] tells whether the operation was carried out.
    pub fn wait(self) -> Result<T, Error> {
        let mut inner = self.shared.inner();
        loop {
            match inner.result.take() {
                Some(result) => return result,
                None => inner = self.shared.done.wait(inner).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut inner = self.shared.inner();
        match inner.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                inner.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
