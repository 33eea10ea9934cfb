//! Replay window: the set of counters received so far. Counters far below the highest one count as received.
//!
//! The set is a ring of bitmap words, as in RFC 6479: a higher counter clears whole words, and no bits are shifted.
//!
//! Invariant: a counter is new at most once.

/// Number of counters per word.
const WORD: u64 = u64::BITS as u64;
/// Number of words, one of which is being filled.
const WORDS: usize = 32;
/// Maximum distance of an acceptable counter below the highest one. Up to this many later datagrams may overtake a
/// datagram.
pub(super) const REACH: u64 = (WORDS as u64 - 1) * WORD;

#[derive(Default)]
pub(super) struct Window {
    /// One more than the highest received counter.
    next: u64,
    came: [u64; WORDS],
}

impl Window {
    pub(super) fn is_new(&self, counter: u64) -> bool {
        // The maximum counter is never accepted, so that `next` cannot overflow.
        if counter >= self.next {
            return counter != u64::MAX;
        }
        self.next - counter <= REACH && self.came[place(counter)] & bit(counter) == 0
    }

    /// Records a counter for which [`Window::is_new`] returned true.
    pub(super) fn note(&mut self, counter: u64) {
        if counter >= self.next {
            // From here on, the words that the ring has passed stand for newer counters, so they are cleared.
            let words = (counter / WORD).saturating_sub(self.last() / WORD).min(WORDS as u64);
            for word in 0..words {
                self.came[(counter / WORD - word) as usize % WORDS] = 0;
            }
            self.next = counter + 1;
        }
        self.came[place(counter)] |= bit(counter);
    }

    fn last(&self) -> u64 {
        self.next.saturating_sub(1)
    }
}

fn place(counter: u64) -> usize {
    (counter / WORD) as usize % WORDS
}

fn bit(counter: u64) -> u64 {
    1 << (counter % WORD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::draws::Draws;
    use std::collections::BTreeSet;

    /// Replay window in the simplest form, as a reference.
    #[derive(Default)]
    struct Plain {
        next: u64,
        came: BTreeSet<u64>,
    }

    impl Plain {
        fn take(&mut self, counter: u64) -> bool {
            let is_new = counter != u64::MAX && counter + REACH >= self.next && self.came.insert(counter);
            if is_new {
                self.next = self.next.max(counter + 1);
            }
            is_new
        }
    }

    fn take(window: &mut Window, counter: u64) -> bool {
        let is_new = window.is_new(counter);
        if is_new {
            window.note(counter);
        }
        is_new
    }

    #[test]
    fn a_counter_is_new_once_in_any_order() {
        for seed in 1..=64_u64 {
            let (mut window, mut plain) = (Window::default(), Plain::default());
            let mut draws = Draws(seed);
            let mut highest = 0_u64;
            let mut old = 0;
            for step in 0..4000 {
                let state = draws.next();
                let near = state >> 32;
                let counter = match state % 16 {
                    0 => highest.saturating_sub(near % (2 * REACH)),
                    1 => highest + near % (2 * REACH),
                    2 => highest + WORD * (near % (2 * WORDS as u64)),
                    3..=9 => highest.saturating_sub(near % 200),
                    _ => highest + near % 3,
                };
                highest = highest.max(counter);
                let is_new = plain.take(counter);
                old += u64::from(!is_new);
                assert_eq!(take(&mut window, counter), is_new, "seed {seed}, step {step}: {counter}");
            }
            assert!(old > 100, "seed {seed} tried only {old} old counters");
        }
    }

    #[test]
    fn a_counter_too_far_behind_and_the_last_one_are_never_new() {
        let mut window = Window::default();
        assert!(take(&mut window, REACH));
        assert!(!window.is_new(0) && take(&mut window, 1) && !window.is_new(1));
        assert!(take(&mut window, u64::MAX - 1) && !window.is_new(u64::MAX) && !window.is_new(u64::MAX - 1));
        assert!(take(&mut window, u64::MAX - REACH) && !window.is_new(u64::MAX - REACH - 1));
    }
}
