//! Time, as it is handed in. Protocols sleep and wait by it, so that a simulator's time is as good as ours.

use std::rc::Rc;
use std::time::Duration;

/// A source of time. Instants are durations since some fixed moment, the same for all users of one clock.
pub trait Clock {
    /// The time now. Never goes back.
    fn now(&self) -> Duration;

    /// Completes no earlier than `duration` from now.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()>;
}

/// A reference, of whatever kind, to a clock is that clock.
macro_rules! clock_by_reference {
    ($reference:ty) => {
        impl<C: Clock + ?Sized> Clock for $reference {
            fn now(&self) -> Duration {
                (**self).now()
            }
            fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
                (**self).sleep(duration)
            }
        }
    };
}

clock_by_reference!(&C);
clock_by_reference!(Rc<C>);
