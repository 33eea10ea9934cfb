//! What the radix trees of this family, SMART and ART, have in common: leaves, slots, memory, sessions and the cache.
//!
//! - `layout`: the bytes. `read`: READs of slots and leaves. `drafts`: the new leaves and nodes of an operation.
//! - `cache`: copies of inner nodes at the client. `together`: lookups of concurrent gets in it. `scan`: keys in order.
//! - `units`: memory, and when it may be used again. `sweep`: memory that dead clients have left behind. `session`: the
//!   locks of dead clients.
//! - `stat`: the shape of the tree. `sizing`: the memory that it takes. `store`: parameters, and the node-side half.
//! - `audit`: what must not be left behind.
//! - `counters`: numbers of events. `mutants`: broken variants.
//!
//! How a walk goes down the tree, and how nodes and leaves are changed, is the matter of each system.

pub(in crate::index) mod audit;
pub(in crate::index) mod cache;
pub(in crate::index) mod counters;
pub(in crate::index) mod drafts;
pub(in crate::index) mod layout;
#[cfg(test)]
mod layout_tests;
pub(in crate::index) mod mutants;
mod order;
pub(in crate::index) mod read;
pub(in crate::index) mod scan;
pub(in crate::index) mod session;
mod sizing;
pub(in crate::index) mod stat;
pub(in crate::index) mod store;
mod sweep;
pub(in crate::index) mod together;
pub(in crate::index) mod units;

use crate::index::place::Damaged;
use cache::Cache;
use counters::Counters;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use session::Session;
use std::cell::RefCell;
use together::Together;
use units::Units;

/// A client's side of a tree, which its operations share.
pub(in crate::index) struct Tree<F> {
    pub(in crate::index) session: Session<F>,
    pub(in crate::index) units: Units,
    pub(in crate::index) cache: RefCell<Cache>,
    pub(in crate::index) together: Together,
    pub(in crate::index) counts: Counters,
}

impl<F> Tree<F> {
    /// Creates a tree whose cache has room for this number of bytes.
    pub(in crate::index) fn new(session: Session<F>, cache: usize) -> Tree<F> {
        Tree {
            units: Units::default(),
            cache: RefCell::new(Cache::new(session.layout.root(), cache)),
            together: Together::default(),
            counts: Counters::default(),
            session,
        }
    }
}

impl<F: Fabric + Clock> Tree<F> {
    /// Waits until the units that this client has unlinked are free, for at most the length of a lease. Others are
    /// freed by `heal`.
    pub(in crate::index) async fn drain(&self) {
        let (lane, lease) = (self.session.spare_lane(), self.session.layout.spec.lease());
        let until = self.session.fabric.now() + lease;
        while self.units.waiting() > 0 && self.session.fabric.now() < until && !self.session.is_given_up() {
            let _else_nothing_is_sent = self.session.fetch_keys().await;
            let _a_later_step_goes_on = self.units.step(&self.session, lane, &self.counts).await;
            self.session.fabric.sleep(lease / 16).await;
        }
    }
}
