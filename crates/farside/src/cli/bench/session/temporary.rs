//! Creates temporary stores on existing nodes for a measurement, and drops them after it.
//!
//! Invariant: a temporary store is dropped exactly once, however the process ends, except by SIGKILL. If the drop
//! fails, the command that drops the store by hand is printed.

use crate::cli::{Failure, human_bytes, signals};
use farside::Pool;
use farside_node::catalog::Division;
use farside_remote::arena::SEGMENT_SIZE;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A store on a node that outlives this process. The store is dropped at the end, also if a signal ends the process.
pub(in crate::cli) struct TemporaryStore(Arc<Held>);

/// How a store is dropped.
#[derive(Clone, Copy)]
pub(in crate::cli) struct Dropping {
    drop: fn(&Pool, &str) -> Result<(), farside::Error>,
    /// Command that drops the store by hand.
    by_hand: &'static str,
}

impl Dropping {
    /// Drops a store that is no volume.
    pub(in crate::cli) const STORE: Dropping =
        Dropping { drop: |pool, name| pool.drop_store(name).map(drop), by_hand: "farside store drop" };
    /// Drops a volume.
    pub(in crate::cli) const VOLUME: Dropping =
        Dropping { drop: |pool, name| pool.drop_volume(name).map(drop), by_hand: "farside volume drop" };
}

struct Held {
    pool: Pool,
    name: String,
    dropping: Dropping,
    /// Whether the store exists. The lock is held while the store is created or dropped.
    exists: Mutex<bool>,
}

impl TemporaryStore {
    /// Creates a store with this name and this memory on each node by calling `create`. If the node has not enough
    /// memory, the error message contains `remedy` as an alternative.
    pub(in crate::cli) fn make(
        pool: &Pool,
        (name, quota): (&str, u64),
        dropping: Dropping,
        create: impl FnOnce() -> Result<(), farside::Error>,
        remedy: &str,
    ) -> Result<TemporaryStore, Failure> {
        let (pool, name, exists) = (pool.clone(), name.to_owned(), Mutex::new(false));
        let held = Held { pool, name, dropping, exists };
        let held = Arc::new(held);
        let mut exists = held.lock();
        let ending = signal_hook::iterator::Signals::new(signals::ending())?;
        let watched = Arc::clone(&held);
        std::thread::Builder::new().name("farside-signals".into()).spawn(move || watched.watch(ending))?;
        let pool = &held.pool;
        create().map_err(|error| {
            // If the node does not respond, the original error is reported, because it says more.
            let free = pool.info().map_or(u64::MAX, |info| info.unassigned_bytes);
            if free < quota + Division::reserve_of(quota / SEGMENT_SIZE) * SEGMENT_SIZE {
                Failure::Error(format!(
                    "the run needs a store of {} and the node has {} unassigned: drop a store there, or serve with \
                     more --memory or a smaller --quota for --store; or {remedy}",
                    human_bytes(quota),
                    human_bytes(free)
                ))
            } else {
                error.into()
            }
        })?;
        *exists = true;
        drop(exists);
        Ok(TemporaryStore(held))
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.exists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a signal that ends this process, and drops the store before the process ends. Runs in its own thread.
    fn watch(self: Arc<Held>, mut ending: signal_hook::iterator::Signals) {
        let mut heard = ending.forever();
        let Some(first) = heard.next() else { return };
        let dropping = Arc::clone(&self);
        std::thread::spawn(move || {
            // The lock is held until the process ends. So no other thread reports errors that the missing store causes.
            let mut exists = dropping.lock();
            dropping.end(&mut exists);
            signals::end_by(first);
        });
        if let Some(second) = heard.next() {
            self.note_left("interrupted before the node confirmed the drop"); // A second signal does not wait.
            signals::end_by(second);
        }
    }

    fn end(&self, exists: &mut bool) {
        if std::mem::take(exists)
            && let Err(error) = (self.dropping.drop)(&self.pool, &self.name)
        {
            self.note_left(&error.to_string());
        }
    }

    fn note_left(&self, reason: &str) {
        note!(
            "farside: store '{name}' may still exist ({reason}); drop it with \
             '{drop} {name} --pool {pool}', with the same token if the node requires one",
            drop = self.dropping.by_hand,
            name = self.name,
            pool = self.pool.url()
        );
    }
}

impl TemporaryStore {
    /// Keeps the store when this value is dropped.
    pub(super) fn keep(&self) {
        *self.0.lock() = false;
    }
}

/// Drops the store, so that the node's memory is free again.
impl Drop for TemporaryStore {
    fn drop(&mut self) {
        self.0.end(&mut self.0.lock());
    }
}
