//! Lookups in the cache that concurrent gets make together.
//!
//! A lookup follows pointers from node to node. If the tree is large, most of these loads miss the CPU's caches, and
//! each waits for the one before it. So lookups go down side by side, one node at a time, and their loads overlap: a
//! get notes its path, lets the other tasks run, and the first one that runs again looks up all noted paths.
//!
//! Invariant: a get takes the outcome for its own path, or looks it up itself. It holds its guard from before it notes
//! the path until it has used the outcome, as `cache` demands.

use super::cache::{Cache, Descent, Found};
use std::cell::{Cell, RefCell};

/// The lookups of a client.
#[derive(Default)]
pub(in crate::index) struct Together {
    batches: RefCell<[Batch; 2]>,
    /// Number of gets in progress.
    gets: Cell<usize>,
}

/// A get in progress.
pub(in crate::index) struct Running<'a>(&'a Cell<usize>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Number of lookups of the largest batch. Gets whose futures are dropped must not let a batch grow without limit.
const NOTED_MAX: usize = 256;

/// Lookups that are made together. The number of a batch that was never used is 0.
#[derive(Default)]
struct Batch {
    number: u64,
    /// Whether they were made.
    is_over: bool,
    /// The paths, one behind the other, and their ends.
    paths: Vec<u8>,
    ends: Vec<usize>,
    descents: Vec<Descent>,
}

/// Right to the outcome of a lookup.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct Ticket {
    number: u64,
    index: usize,
}

impl Together {
    /// Begins a get.
    pub(in crate::index) fn enter(&self) -> Running<'_> {
        self.gets.set(self.gets.get() + 1);
        Running(&self.gets)
    }

    /// Whether several gets are in progress.
    pub(in crate::index) fn are_several(&self) -> bool {
        self.gets.get() > 1
    }

    /// Notes a path to look up.
    pub(in crate::index) fn note(&self, path: &[u8]) -> Ticket {
        let mut batches = self.batches.borrow_mut();
        let [even, odd] = &mut *batches;
        let (newest, other) = if even.number > odd.number { (even, odd) } else { (odd, even) };
        let batch = match newest.is_over || newest.number == 0 || newest.ends.len() == NOTED_MAX {
            false => newest,
            true => {
                other.number = newest.number + 1;
                other.is_over = false;
                other.paths.clear();
                other.ends.clear();
                other.descents.clear();
                other
            }
        };
        batch.paths.extend_from_slice(path);
        batch.ends.push(batch.paths.len());
        Ticket { number: batch.number, index: batch.ends.len() - 1 }
    }

    /// Returns the outcome of a lookup, and makes all noted ones if they were not made yet. `epoch` is the client's
    /// current one. Returns an error if the outcome was kept for too long.
    pub(in crate::index) fn take(
        &self,
        ticket: Ticket,
        cache: &mut Cache,
        epoch: u64,
    ) -> Result<Option<Found>, Late> {
        let mut batches = self.batches.borrow_mut();
        let batch = batches.iter_mut().find(|batch| batch.number == ticket.number).ok_or(Late)?;
        if !std::mem::replace(&mut batch.is_over, true) {
            batch.look_up(cache, epoch);
        }
        Ok(batch.descents[ticket.index].found)
    }
}

/// Two later batches were begun before a get took its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Late;

impl Batch {
    fn look_up(&mut self, cache: &mut Cache, epoch: u64) {
        let Batch { paths, ends, descents, .. } = self;
        descents.resize(ends.len(), cache.descent());
        let mut is_left = true;
        while is_left {
            (is_left, _) =
                ends.iter().zip(&mut *descents).fold((false, 0), |(is_left, start), (&end, descent)| {
                    (cache.step(descent, &paths[start..end], epoch) | is_left, end)
                });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Far;
    use super::*;

    #[test]
    fn an_outcome_is_kept_until_the_batch_after_the_next_one_begins() {
        let (together, mut cache) = (Together::default(), Cache::new(Far::new(0, 64), 1 << 20));
        let first = together.note(b"a");
        assert_eq!(together.note(b"bc").number, first.number, "nothing was looked up yet");
        assert_eq!(together.take(first, &mut cache, 1), Ok(None));
        let second = together.note(b"d");
        assert!(second.number > first.number, "the first batch is over");
        assert_eq!(together.take(first, &mut cache, 1), Ok(None));
        assert_eq!(together.take(second, &mut cache, 1), Ok(None));
        together.note(b"e");
        assert_eq!(together.take(first, &mut cache, 1), Err(Late));
        assert_eq!(together.take(second, &mut cache, 1), Ok(None));
    }
}
