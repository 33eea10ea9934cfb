//! Stores on nodes that others started: made for a measurement, dropped after it.
//!
//! Invariant: the store is dropped exactly once, however the process ends short of a kill; what can't be dropped is
//! told, with the command that does it.

use crate::cli::{Failure, human_bytes, signals};
use farside::{NewStore, Pool};
use farside_node::catalog::Division;
use farside_remote::arena::SEGMENT_SIZE;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A store on a node that outlives this process. It is dropped at the end, also where a signal brings that about.
pub(in crate::cli) struct Lent(Arc<Held>);

struct Held {
    pool: Pool,
    name: String,
    /// Whether there is something to drop. Locked for as long as the store is being made or dropped.
    is_there: Mutex<bool>,
}

impl Lent {
    /// The `remedy` is what else may be done where the node has no memory for it.
    pub(in crate::cli) fn make(pool: &Pool, new: &NewStore, remedy: &str) -> Result<Lent, Failure> {
        let held = Held { pool: pool.clone(), name: new.name.clone(), is_there: Mutex::new(false) };
        let held = Arc::new(held);
        let mut is_there = held.lock();
        let ending = signal_hook::iterator::Signals::new(signals::ending())?;
        let watched = Arc::clone(&held);
        std::thread::Builder::new().name("farside-signals".into()).spawn(move || watched.watch(ending))?;
        pool.create_store(new).map_err(|error| {
            // Where the node does not tell, the error that there is says more.
            let free = pool.info().map_or(u64::MAX, |info| info.unassigned_bytes);
            if free < new.quota + Division::reserve_of(new.quota / SEGMENT_SIZE) * SEGMENT_SIZE {
                Failure::Told(format!(
                    "the run needs a store of {} and the node has {} that no store has: drop one there, or serve with \
                     more --memory or a smaller --quota for --store; or {remedy}",
                    human_bytes(new.quota),
                    human_bytes(free)
                ))
            } else {
                error.into()
            }
        })?;
        *is_there = true;
        drop(is_there);
        Ok(Lent(held))
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_there.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread's: waits for a signal that ends this process, and drops the store before it does.
    fn watch(self: Arc<Held>, mut ending: signal_hook::iterator::Signals) {
        let mut heard = ending.forever();
        let Some(first) = heard.next() else { return };
        let dropping = Arc::clone(&self);
        std::thread::spawn(move || {
            // Held to the end: whatever fails for want of the store is not worth telling.
            let mut is_there = dropping.lock();
            dropping.end(&mut is_there);
            signals::end_by(first);
        });
        if let Some(second) = heard.next() {
            self.tell_left("it was not waited for"); // Whoever insists does not wait for the node.
            signals::end_by(second);
        }
    }

    fn end(&self, is_there: &mut bool) {
        if std::mem::take(is_there)
            && let Err(error) = self.pool.drop_store(&self.name)
        {
            self.tell_left(&error.to_string());
        }
    }

    fn tell_left(&self, reason: &str) {
        note!(
            "farside: the store '{name}' may be left behind ({reason}); 'farside store drop {name} --pool {pool}', \
             with the same token if there was one, drops it",
            name = self.name,
            pool = self.pool.url()
        );
    }
}

impl Lent {
    /// It stays, after all.
    pub(super) fn keep(&self) {
        *self.0.lock() = false;
    }
}

/// A node that was there gets its memory back; one that was started for this ends with it.
impl Drop for Lent {
    fn drop(&mut self) {
        self.0.end(&mut self.0.lock());
    }
}
