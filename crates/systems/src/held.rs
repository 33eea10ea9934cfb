//! A client's lease, which the client renews until it gives it back or gives it up.
//!
//! Invariant: a client that has given up has no lease any more, also if a renewal was in flight. So the lease expires,
//! and other clients settle what this one has left.

use crate::holder::beside_renewals;
use crate::lease::{ClientId, Lease, LeaseError};
use farside_remote::clock::Clock;
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// A lease and its renewals.
pub(crate) struct Held {
    id: ClientId,
    /// `None` if the client has given it back or up, and while a renewal is in flight.
    lease: RefCell<Option<Lease>>,
    /// Whether a renewal is in flight. It has the lease.
    is_renewing: Cell<bool>,
    is_given_up: Cell<bool>,
}

impl Held {
    /// Begins to hold a lease.
    pub(crate) fn new(lease: Lease) -> Held {
        Held {
            id: lease.id(),
            lease: RefCell::new(Some(lease)),
            is_renewing: Cell::new(false),
            is_given_up: Cell::new(false),
        }
    }

    /// The leased id.
    pub(crate) fn id(&self) -> ClientId {
        self.id
    }

    /// Whether the client has lost its lease, or has given it up.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Renews the lease no more, so that other clients fence this one and settle what it has left.
    pub(crate) fn give_up(&self) {
        self.is_given_up.set(true);
        self.lease.take();
    }

    /// Returns the lease, to be given back. Returns `None` if the client has given it up.
    pub(crate) fn take(&self) -> Option<Lease> {
        self.lease.take()
    }

    /// Runs a future to its end. Meanwhile, renews the lease again and again, after pauses of `period`. Calls `lost` if
    /// the lease is lost.
    pub(crate) async fn renewing<T>(
        &self,
        future: impl Future<Output = T>,
        (clock, period): (&impl Clock, Duration),
        mut renew: impl AsyncFnMut(&mut Lease) -> Result<(), LeaseError>,
        lost: impl Fn(),
    ) -> T {
        let give_up = || {
            self.give_up();
            lost();
        };
        let renewals = async {
            loop {
                clock.sleep(period).await;
                let Some(mut lease) = self.lease.take() else { return };
                self.is_renewing.set(true);
                match renew(&mut lease).await {
                    Err(LeaseError::Lost | LeaseError::Refused(_) | LeaseError::Exhausted) => give_up(),
                    Err(LeaseError::Fabric(error)) if error.is_fenced() => give_up(),
                    // The client may have given up while the renewal was in flight.
                    _ if self.is_given_up.get() => {}
                    _ => _ = self.lease.replace(Some(lease)),
                }
                self.is_renewing.set(false);
                if self.is_given_up.get() {
                    return;
                }
            }
        };
        beside_renewals(future, renewals, &self.is_renewing).await
    }
}
