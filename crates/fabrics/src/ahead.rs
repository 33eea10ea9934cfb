//! Prefetching for one client core: loads the memory that chains will touch, before they run.
//!
//! Below, a *round* polls each ready task of the core once (see [`crate::executor`], whose names call a round a turn).
//!
//! 1. A chain whose core has other tasks posts hints of the memory that it will touch, then yields to those tasks.
//! 2. When the round ends, one tight pass prefetches the pointers that were posted during it. The pass is tight because
//!    page walks overlap only if few instructions separate them.
//! 3. A second pass prefetches the first line of each pointee.
//! 4. In the next round the chains run. While a chain runs, the core prefetches the remaining lines for a chain that
//!    runs slightly later, so that memory accesses overlap with execution.
//!
//! Three variants were measured with 16 tasks, and are slower:
//! - Prefetching for each task when that task runs took 1.6 times as long.
//! - Prefetching every line in the second pass took 1.1 times as long.
//! - Prefetching all further lines in a third pass took 1.2 times as long.
//!
//! Invariant: a hint contains only an address, so it stays valid even if its chain no longer exists.

use crate::memory::{Mapping, Stretch};
use farside_remote::ChainView;
use farside_remote::arena::Buffer;
use farside_remote::arena::class::Class;
use farside_remote::arena::session::SessionId;
use farside_remote::run::Hint;
use std::cell::RefCell;

/// Maximum number of hints kept until the round ends. When there are more, the kept hints are prefetched at once.
const HINTS_MAX: usize = 256;
/// Prefetch distance in stretches, of which each hint has one. When a chain starts to run, the remaining lines of the
/// stretches `LEAD` places after the chain's own are prefetched.
const LEAD: usize = 2;

/// Prefetcher of one endpoint: records the memory that the endpoint's chains are about to touch.
pub(crate) struct Ahead {
    /// Hints of the chains that run in the next round, each with the region of its chain's key.
    posted: RefCell<Vec<(Hint, u32)>>,
    /// Stretches of memory that the chains of this round will touch. The first line of each stretch was prefetched. The
    /// remaining lines were prefetched only for the stretches before `rest_from`.
    coming: RefCell<Coming>,
}

struct Coming {
    /// The session whose chains run: it reuses buffers that it has retired.
    session: SessionId,
    stretches: Vec<Stretch>,
    rest_from: usize,
}

impl Ahead {
    pub(crate) fn new(session: SessionId) -> Ahead {
        let stretches = Vec::with_capacity(HINTS_MAX);
        Ahead {
            posted: RefCell::new(Vec::with_capacity(HINTS_MAX)),
            coming: RefCell::new(Coming { session, stretches, rest_from: 0 }),
        }
    }

    /// Queues hints of the memory that the chain will touch, to be prefetched at the end of the round. Returns the
    /// number of hints. The caller then yields to the other tasks, and passes that number to [`Ahead::proceed`].
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

    /// Prefetches memory for later chains. Called when a chain that posted `hints` hints starts to run.
    #[inline(always)]
    pub(crate) fn proceed(&self, mapping: &Mapping, hints: usize) {
        self.coming.borrow_mut().fetch_rest(mapping, hints);
    }

    /// Prefetches the memory of the posted hints. Called at the end of a round, when all its chains have posted their
    /// hints.
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
            if let Hint::Pointee { at, .. } | Hint::Replaced { at } = *hint {
                mapping.prefetch_line(at);
            }
        }
        self.stretches.clear();
        let mut buffers = Buffers::default();
        for (hint, region) in posted.drain(..) {
            let stretch = match hint {
                Hint::Pointee { at, len, bounded } => mapping.guess_pointee(at, len, bounded),
                Hint::Buffer { class, len } => buffers.guess(mapping, self.session, region, class, len),
                Hint::Replaced { at } => {
                    mapping.prefetch_state_behind(at);
                    None
                }
                Hint::Bytes { at, len } => Some(Stretch { at, len }).filter(|stretch| mapping.has(stretch)),
            };
            // Each hint gets a stretch, even an empty one, because a chain that starts to run counts stretches by its
            // hints.
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

/// The buffers that the chains of one round will probably take, in their order.
#[derive(Default)]
struct Buffers {
    /// Region of the last buffer, and the buffer.
    last: Option<(u32, Buffer)>,
}

impl Buffers {
    #[inline(never)]
    fn guess(
        &mut self,
        mapping: &Mapping,
        session: SessionId,
        region: u32,
        class: u8,
        len: u32,
    ) -> Option<Stretch> {
        let class = Class::get(class)?;
        let before = self
            .last
            .filter(|(of, last)| *of == region && last.class.index == class.index)
            .map(|(_, last)| last);
        let buffer = mapping.guess_buffer(session, region, class, before)?;
        self.last = Some((region, buffer));
        Some(Stretch { at: buffer.at, len }).filter(|stretch| mapping.has(stretch))
    }
}
