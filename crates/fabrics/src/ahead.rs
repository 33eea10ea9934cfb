//! Prefetching: loads the memory that the chains of one client core will touch before they run.
//!
//! A chain that shares its core with other tasks posts the memory it will touch, then lets the other tasks take their
//! turn. When the turn ends, the pointers posted in it are prefetched in one tight pass. A second pass prefetches the
//! first line of each pointee. Page walks overlap only if few instructions separate them. The remaining lines of each
//! stretch are prefetched while a chain slightly earlier in the queue runs, so that memory accesses overlap with
//! execution.
//!
//! Slower variants, all measured with 16 tasks: prefetching for each task at the start of its own turn (1.6 times),
//! every line in the second pass (1.1 times), and every further line in a third pass (1.2 times).
//!
//! Invariant: a hint is an address and nothing more. It stays valid even if its chain no longer exists.

use crate::memory::{Mapping, Stretch};
use farside_remote::ChainView;
use farside_remote::run::Hint;
use std::cell::RefCell;

/// Maximum number of hints kept until the turn ends. When it is reached, the kept hints are prefetched at once.
const HINTS_MAX: usize = 256;
/// Prefetch distance: when a chain starts to run, the remaining lines of the stretches `LEAD` places after its own are
/// prefetched.
const LEAD: usize = 2;

/// The memory that the chains of one endpoint are about to touch.
pub(crate) struct Ahead {
    /// Hints of the chains that run in the next turn, each with the region of its chain's key.
    posted: RefCell<Vec<(Hint, u32)>>,
    /// Stretches of the chains that run in this turn. They are being loaded, except the lines after the first from
    /// stretch `rest_from` on.
    coming: RefCell<Coming>,
}

struct Coming {
    stretches: Vec<Stretch>,
    rest_from: usize,
}

impl Ahead {
    pub(crate) fn new() -> Ahead {
        Ahead {
            posted: RefCell::new(Vec::with_capacity(HINTS_MAX)),
            coming: RefCell::new(Coming { stretches: Vec::with_capacity(HINTS_MAX), rest_from: 0 }),
        }
    }

    /// Queues the memory that the chain will touch for prefetching at the end of the turn. Returns the number of hints.
    /// The caller then lets the other tasks run and continues with [`Ahead::proceed`].
    #[inline(always)]
    pub(crate) fn post(&self, mapping: &Mapping, chain: ChainView<'_>) -> usize {
        let mut posted = self.posted.borrow_mut();
        let mut hints = 0;
        farside_remote::hints(chain, |hint| {
            if posted.len() == HINTS_MAX {
                self.coming.borrow_mut().fetch(mapping, &mut posted);
            }
            posted.push((hint, chain.key().region()));
            hints += 1;
        });
        hints
    }

    /// Called when a chain that posted `hints` hints starts to run.
    #[inline(always)]
    pub(crate) fn proceed(&self, mapping: &Mapping, hints: usize) {
        self.coming.borrow_mut().fetch_rest(mapping, hints);
    }

    /// Called when all chains of this turn have posted their hints.
    #[inline]
    pub(crate) fn end_turn(&self, mapping: &Mapping) {
        let mut posted = self.posted.borrow_mut();
        if !posted.is_empty() {
            self.coming.borrow_mut().fetch(mapping, &mut posted);
        }
    }
}

impl Coming {
    #[inline(never)]
    fn fetch(&mut self, mapping: &Mapping, posted: &mut Vec<(Hint, u32)>) {
        for (hint, _) in &*posted {
            if let Hint::Pointee { at, .. } = *hint {
                mapping.prefetch_line(at);
            }
        }
        self.stretches.clear();
        for (hint, region) in posted.drain(..) {
            let stretch = match hint {
                Hint::Pointee { at, len, bounded } => mapping.guess_pointee(at, len, bounded),
                Hint::Buffer { class, len } => mapping.guess_buffer(region, class, len),
                Hint::Bytes { at, len } => Some(Stretch { at, len }).filter(|stretch| mapping.has(stretch)),
            };
            // One stretch per hint, even if empty: stretches are counted off as chains run.
            let stretch = stretch.unwrap_or_default();
            mapping.prefetch_line(stretch.at);
            self.stretches.push(stretch);
        }
        self.rest_from = 0;
        self.fetch_rest(mapping, LEAD);
    }

    /// Prefetches the remaining lines of the next `count` stretches.
    #[inline(always)]
    fn fetch_rest(&mut self, mapping: &Mapping, count: usize) {
        for stretch in self.stretches.iter().skip(self.rest_from).take(count) {
            mapping.prefetch_rest(stretch);
        }
        self.rest_from += count;
    }
}
