//! Requests that an operation sends and does not await, and the two sets of buffers that operations use in turn.
//!
//! The NIC may send a request again until it has completed, so a request's buffers must stay as they are until then
//! (section 2.3, "d"). The next operation uses the other set, and the one after it waits for the first one's requests.
//!
//! Invariant: the buffers of a request are used by nothing else until the request has completed.

use super::{Buffers, LatchError};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Requests in flight with their buffers, and their outcome.
type Request = Pin<Box<dyn Future<Output = (Buffers, Result<(), LatchError>)>>>;

/// Two sets of buffers.
#[derive(Default)]
pub(super) struct Sets {
    sets: [Set; 2],
    /// Index of the next operation's set.
    next: usize,
}

#[derive(Default)]
enum Set {
    Free(Buffers),
    InFlight(Request),
    #[default]
    Taken,
}

impl Sets {
    /// Takes the buffers of the next operation. Waits until the requests that use them have completed.
    ///
    /// # Errors
    /// The error of these requests, which an earlier operation has sent.
    pub(super) async fn take(&mut self) -> Result<Buffers, LatchError> {
        match std::mem::take(&mut self.sets[self.next]) {
            Set::Free(buffers) => Ok(buffers),
            // An operation was dropped.
            Set::Taken => Ok(Buffers::default()),
            Set::InFlight(request) => {
                let (buffers, outcome) = request.await;
                outcome.map(|()| buffers)
            }
        }
    }

    /// Gives back the buffers of an operation whose requests have completed.
    pub(super) fn put_back(&mut self, buffers: Buffers) {
        self.sets[self.next] = Set::Free(buffers);
    }

    /// Sends the last requests of an operation, with its buffers, and does not wait for them.
    pub(super) async fn post(&mut self, mut request: Request) {
        let sent = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await;
        let place = self.next;
        self.sets[place] = match sent {
            // An error is reported by the operation that takes the buffers.
            Poll::Ready((buffers, Ok(()))) => Set::Free(buffers),
            Poll::Ready(failed) => Set::InFlight(Box::pin(std::future::ready(failed))),
            Poll::Pending => Set::InFlight(request),
        };
        self.next = 1 - place;
    }

    /// Waits until all requests have completed.
    ///
    /// # Errors
    /// The error of the earliest request that failed.
    pub(super) async fn settle(&mut self) -> Result<(), LatchError> {
        let mut settled = Ok(());
        // The next operation's set has the older requests.
        for place in [self.next, 1 - self.next] {
            if let Set::InFlight(request) = &mut self.sets[place] {
                let (buffers, outcome) = request.as_mut().await;
                self.sets[place] = Set::Free(buffers);
                settled = settled.and(outcome);
            }
        }
        settled
    }
}
