//! The result of an operation that a client's thread carries out: awaited under any executor, or waited for.

use crate::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// An operation under way. Dropping it does not call the operation back.
#[must_use = "the operation runs, but whether it succeeded is known only by waiting for it"]
pub struct Pending<T> {
    shared: Arc<Shared<T>>,
}

/// The other end: whoever drops it unfulfilled has ended.
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
        // Without effect once it is fulfilled: a pending result that was taken is waited for by nobody.
        self.set(Err(Error::Closed));
    }
}

impl<T> Pending<T> {
    /// Blocks this thread until the operation is done.
    ///
    /// # Errors
    /// The operation's.
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
