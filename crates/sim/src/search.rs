//! Search for an order of operations that explains all outcomes: Wing and Gong (1993), with the cache of visited states
//! of Lowe, "Testing for linearizability" (2016).
//!
//! Invariant: an operation precedes another in the order if it returned before the other was called.
//!
//! Invariant: the search explores each pair of a set of ordered operations and a resulting state once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use foldhash::fast::FixedState;

/// Indices of the events of an operation's call and return. The operation takes effect between these events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) called: u64,
    pub(crate) returned: u64,
}

/// Returns whether some order of the operations explains all outcomes.
///
/// `step` returns the state after an operation, or `None` if the operation cannot have had its outcome in that state.
pub(crate) fn is_explained<S: Clone + Eq + Hash>(
    spans: &[Span],
    start: S,
    mut step: impl FnMut(&S, usize) -> Option<S>,
) -> bool {
    let mut events: Vec<Event> = Vec::with_capacity(2 * spans.len());
    for (operation, span) in spans.iter().enumerate() {
        events.push(Event { at: span.called, is_return: false, operation });
        events.push(Event { at: span.returned, is_return: true, operation });
    }
    events.sort_by_key(|event| (event.at, event.is_return));
    let mut places = vec![[0; 2]; spans.len()];
    for (place, event) in events.iter().enumerate() {
        places[event.operation][usize::from(event.is_return)] = place;
    }

    let mut left = Left::new(events.len());
    let mut ordered = vec![0_u64; spans.len().div_ceil(64)];
    let mut visited = Visited::default();
    let mut stack: Vec<(usize, S)> = Vec::new();
    let mut state = start;
    let mut place = left.first();
    while let Some(&Event { is_return, operation, .. }) = events.get(place) {
        if is_return {
            // Every operation that was called before this return has been tried as the next one, so the search steps
            // back.
            let Some((last, before)) = stack.pop() else { return false };
            state = before;
            flip(&mut ordered, last);
            let [call, return_] = places[last];
            left.put_back(return_);
            left.put_back(call);
            place = left.after(call);
            continue;
        }
        let next = step(&state, operation).filter(|next| {
            flip(&mut ordered, operation);
            let is_new = visited.insert(&ordered, next);
            flip(&mut ordered, operation);
            is_new
        });
        match next {
            None => place = left.after(place),
            Some(next) => {
                flip(&mut ordered, operation);
                stack.push((operation, std::mem::replace(&mut state, next)));
                let [call, return_] = places[operation];
                left.take(call);
                left.take(return_);
                place = left.first();
            }
        }
    }
    true
}

struct Event {
    at: u64,
    is_return: bool,
    operation: usize,
}

fn flip(set: &mut [u64], at: usize) {
    set[at / 64] ^= 1 << (at % 64);
}

/// Doubly linked list of the events that are not ordered yet. The index after the last event is the list's end.
struct Left {
    after: Vec<usize>,
    before: Vec<usize>,
}

impl Left {
    fn new(events: usize) -> Left {
        let after = (0..=events).map(|place| if place == events { 0 } else { place + 1 }).collect();
        let before = (0..=events).map(|place| if place == 0 { events } else { place - 1 }).collect();
        Left { after, before }
    }

    fn first(&self) -> usize {
        *self.after.last().expect("the end is a place")
    }

    fn after(&self, place: usize) -> usize {
        self.after[place]
    }

    fn take(&mut self, place: usize) {
        let (before, after) = (self.before[place], self.after[place]);
        self.after[before] = after;
        self.before[after] = before;
    }

    /// Puts an event back in the list. Events must be put back in the reverse order of [`Left::take`].
    fn put_back(&mut self, place: usize) {
        let (before, after) = (self.before[place], self.after[place]);
        self.after[before] = place;
        self.before[after] = place;
    }
}

/// The visited pairs of a set of ordered operations and a resulting state. The map's key is the pair's hash.
struct Visited<S>(HashMap<u64, Alike<S>, FixedState>);

/// Pairs of a set of ordered operations and a state that have the same hash.
type Alike<S> = Vec<(Box<[u64]>, S)>;

impl<S> Default for Visited<S> {
    fn default() -> Visited<S> {
        Visited(HashMap::with_hasher(FixedState::default()))
    }
}

impl<S: Clone + Eq + Hash> Visited<S> {
    /// Inserts a pair. Returns whether it was absent.
    fn insert(&mut self, ordered: &[u64], state: &S) -> bool {
        let hash = self.0.hasher().hash_one((ordered, state));
        let alike = self.0.entry(hash).or_default();
        let is_new = !alike.iter().any(|(other, of)| **other == *ordered && of == state);
        if is_new {
            alike.push((ordered.into(), state.clone()));
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operation on a register with the initial value 0: a write of a value, or a read that returned it.
    #[derive(Clone, Copy)]
    enum Op {
        Write(u8),
        Read(u8),
    }
    use Op::{Read, Write};

    fn is_register(operations: &[(u64, u64, Op)]) -> bool {
        let spans: Vec<Span> =
            operations.iter().map(|&(called, returned, _)| Span { called, returned }).collect();
        is_explained(&spans, 0, |&now, operation| match operations[operation].2 {
            Write(value) => Some(value),
            Read(value) => (value == now).then_some(now),
        })
    }

    #[test]
    fn overlapping_operations_may_take_either_order() {
        assert!(is_register(&[]));
        assert!(is_register(&[(0, 3, Write(1)), (1, 2, Read(0))]));
        assert!(is_register(&[(0, 3, Write(1)), (1, 2, Read(1))]));
        // The first choice, by the order of calls, is wrong for the last read.
        assert!(is_register(&[(0, 4, Write(1)), (1, 3, Write(2)), (5, 6, Read(1)), (7, 8, Read(1))]));
    }

    #[test]
    fn an_operation_follows_those_that_returned_before_its_call() {
        assert!(!is_register(&[(0, 1, Write(1)), (2, 3, Read(0))]));
        assert!(!is_register(&[(0, 9, Write(1)), (1, 2, Read(1)), (3, 4, Read(0))]));
        assert!(!is_register(&[(0, 4, Write(1)), (1, 3, Write(2)), (5, 6, Read(1)), (7, 8, Read(2))]));
    }

    #[test]
    fn a_set_of_operations_is_continued_once_from_each_state() {
        // Ten overlapping writes have 10! orders, but only 10 * 2^9 pairs of a set and its last write.
        let mut operations: Vec<(u64, u64, Op)> = (0..10).map(|n| (n, 100, Write(n as u8))).collect();
        operations.push((101, 102, Read(99)));
        let spans: Vec<Span> =
            operations.iter().map(|&(called, returned, _)| Span { called, returned }).collect();
        let mut steps = 0;
        let found = is_explained(&spans, 0_u8, |&now, operation| {
            steps += 1;
            match operations[operation].2 {
                Write(value) => Some(value),
                Read(value) => (value == now).then_some(now),
            }
        });
        assert!(!found);
        let (sets_and_lasts, tries_each) = (10 * (1 << 9) + 1, 11);
        assert!(steps <= sets_and_lasts * tries_each, "{steps}");
    }
}
