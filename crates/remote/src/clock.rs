//! The interface to a clock, which the caller passes in. Protocols sleep and measure time only through this interface,
//! so that they also run on simulated time.

use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// A source of time. Instants are durations since a fixed moment, the same for all users of one clock.
pub trait Clock {
    /// The current time. It never decreases.
    fn now(&self) -> Duration;

    /// The time since the Unix epoch by the host's real-time clock. It may be wrong, and may jump forwards and back.
    fn wall(&self) -> Duration;

    /// Sleeps for at least `duration`.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()>;
}

/// Implements [`Clock`] for a kind of reference to a clock.
macro_rules! clock_by_reference {
    ($reference:ty) => {
        impl<C: Clock + ?Sized> Clock for $reference {
            fn now(&self) -> Duration {
                (**self).now()
            }
            fn wall(&self) -> Duration {
                (**self).wall()
            }
            fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
                (**self).sleep(duration)
            }
        }
    };
}

clock_by_reference!(&C);
clock_by_reference!(Rc<C>);

/// Returns the output of `future`, or `None` if the future takes longer than `duration` by `clock`.
pub async fn within<O>(clock: &impl Clock, duration: Duration, future: impl Future<Output = O>) -> Option<O> {
    let mut future = std::pin::pin!(future);
    let mut sleep = std::pin::pin!(clock.sleep(duration));
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sleep.as_mut().poll(cx).map(|()| None),
    })
    .await
}
