//! Fetching ahead: what the chains of one client core will touch is on its way before they run.
//!
//! A chain that has company posts what it will touch and lets the other tasks have their turn. When the turn ends, the
//! pointers that were posted in it are fetched in one tight pass, and the first line of everything that is pointed to
//! in another: page walks overlap only where few instructions lie between them. The rest of each stretch is asked for
//! when the chain a little before its own runs, so that memory works while chains do.
//!
//! Slower, all measured with 16 tasks: fetching for each task when its turn comes (1.6 times), every line in the
//! second pass (1.1 times), every further line in a third (1.2 times).
//! Invariant: a hint is an address and nothing more. Whether its chain still exists is of no matter.

use crate::memory::{Mapping, Stretch};
use farside_remote::ChainView;
use farside_remote::run::Hint;
use std::cell::RefCell;

/// Hints kept until the turn ends; if there are more, or if nobody says that it ended, they are fetched at once.
const HINTS_MAX: usize = 256;
/// How many stretches lie between the one whose rest is asked for and those that the running chain touches.
const LEAD: usize = 2;

/// What the chains of one endpoint are about to touch.
pub(crate) struct Ahead {
    /// Of the chains that run in the next turn, with the region of each one's key.
    posted: RefCell<Vec<(Hint, u32)>>,
    /// Of the chains that run in this one: what is on its way, but for the lines after the first from `rest_from` on.
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

    /// Has what the chain will touch fetched when the turn ends; answers how many hints there were. Let the other tasks
    /// run then, and go on by [`Ahead::proceed`].
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

    /// A chain that posted so many hints runs now.
    #[inline(always)]
    pub(crate) fn proceed(&self, mapping: &Mapping, hints: usize) {
        self.coming.borrow_mut().fetch_rest(mapping, hints);
    }

    /// Everybody has posted what there is in this turn.
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
            // One for every hint, if only an empty one: they are counted off as chains run.
            let stretch = stretch.unwrap_or_default();
            mapping.prefetch_line(stretch.at);
            self.stretches.push(stretch);
        }
        self.rest_from = 0;
        self.fetch_rest(mapping, LEAD);
    }

    /// Asks for the rest of that many stretches.
    #[inline(always)]
    fn fetch_rest(&mut self, mapping: &Mapping, count: usize) {
        for stretch in self.stretches.iter().skip(self.rest_from).take(count) {
            mapping.prefetch_rest(stretch);
        }
        self.rest_from += count;
    }
}
