//! Search for an order of operations that explains all outcomes: Wing and Gong (1993), with the cache of visited states
//! of Lowe, "Testing for linearizability" (2016).
//!
//! Invariant: an operation precedes another in the order if it returned before the other was called.
//!
//! Invariant: an optional operation, which never returned, may be left out of the order. So the search first tries to
//! do without these operations, then with one, and so on. Of two equal states after the same other operations, it
//! continues only from the one with fewer of these: whatever can follow the state with more of them can follow that
//! one, too. Without this rule, the number of states doubles with each of them.
//!
//! Invariant: the search explores each pair of a set of ordered operations and a resulting state once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::rc::Rc;

use foldhash::fast::FixedState;

/// Indices of the events of an operation's call and return. The operation takes effect between these events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) called: u64,
    /// `None` if the operation may be left out of the order. Then it never returned.
    pub(crate) returned: Option<u64>,
}

impl Span {
    fn is_optional(&self) -> bool {
        self.returned.is_none()
    }
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
        if let Some(at) = span.returned {
            events.push(Event { at, is_return: true, operation });
        }
    }
    events.sort_by_key(|event| (event.at, event.is_return));
    let mut places = vec![[0; 2]; spans.len()];
    for (place, event) in events.iter().enumerate() {
        places[event.operation][usize::from(event.is_return)] = place;
    }

    let mut visited = Visited::default();
    let mut configurations = vec![(Ordered::none_of(spans), start)];
    while !configurations.is_empty() {
        // What follows from the configurations by one more optional operation.
        let mut next = Vec::new();
        for (mut ordered, mut state) in configurations {
            let mut left = Left::of(&events, &ordered);
            let mut stack: Vec<(usize, S)> = Vec::new();
            let mut place = left.first();
            loop {
                // The calls that are left at the end are of optional operations.
                let Some(&Event { is_return, operation, .. }) = events.get(place) else { return true };
                if !is_return {
                    let after = match spans[operation].is_optional() {
                        true => None,
                        false => visited.step(&mut ordered, operation, step(&state, operation)),
                    };
                    let Some(after) = after else {
                        place = left.after(place);
                        continue;
                    };
                    ordered.flip(operation);
                    stack.push((operation, std::mem::replace(&mut state, after)));
                    places[operation].into_iter().for_each(|place| left.take(place));
                    place = left.first();
                    continue;
                }
                // Every needed operation that was called before this return has been tried as the next one.
                let mut place_before = left.first();
                while place_before != place {
                    let operation = events[place_before].operation;
                    if spans[operation].is_optional()
                        && let Some(after) = visited.step(&mut ordered, operation, step(&state, operation))
                    {
                        let mut ordered = ordered.clone();
                        ordered.flip(operation);
                        next.push((ordered, after));
                    }
                    place_before = left.after(place_before);
                }
                let Some((last, before)) = stack.pop() else { break };
                state = before;
                ordered.flip(last);
                let [call, return_] = places[last];
                left.put_back(return_);
                left.put_back(call);
                place = left.after(call);
            }
        }
        configurations = next;
    }
    false
}

struct Event {
    at: u64,
    is_return: bool,
    operation: usize,
}

/// The operations that are ordered.
#[derive(Clone)]
struct Ordered {
    needed: Box<[u64]>,
    optional: Box<[u64]>,
    /// Whether each operation is optional, and its number in its set.
    numbers: Rc<[(bool, usize)]>,
}

impl Ordered {
    fn none_of(spans: &[Span]) -> Ordered {
        let mut counts = [0; 2];
        let number = |span: &Span| {
            let count = &mut counts[usize::from(span.is_optional())];
            *count += 1;
            (span.is_optional(), *count - 1)
        };
        let numbers = spans.iter().map(number).collect();
        let [needed, optional] = counts.map(|count: usize| vec![0; count.div_ceil(64)].into());
        Ordered { needed, optional, numbers }
    }

    fn contains(&self, operation: usize) -> bool {
        let (is_optional, number) = self.numbers[operation];
        let set = if is_optional { &self.optional } else { &self.needed };
        set[number / 64] >> (number % 64) & 1 == 1
    }

    fn flip(&mut self, operation: usize) {
        let (is_optional, number) = self.numbers[operation];
        let set = if is_optional { &mut self.optional } else { &mut self.needed };
        set[number / 64] ^= 1 << (number % 64);
    }
}

/// Doubly linked list of the events that are not ordered yet. The index after the last event is the list's end.
struct Left {
    after: Vec<usize>,
    before: Vec<usize>,
}

impl Left {
    fn of(events: &[Event], ordered: &Ordered) -> Left {
        let end = events.len();
        let after = (0..=end).map(|place| if place == end { 0 } else { place + 1 }).collect();
        let before = (0..=end).map(|place| if place == 0 { end } else { place - 1 }).collect();
        let mut left = Left { after, before };
        let gone = events.iter().enumerate().filter(|(_, event)| ordered.contains(event.operation));
        gone.for_each(|(place, _)| left.take(place));
        left
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

/// The visited sets of ordered operations with their resulting states. The map's key is the hash of the state and of
/// the operations that are not optional.
struct Visited<S>(HashMap<u64, Vec<Alike<S>>, FixedState>);

/// A state after these needed operations, and each smallest set of optional ones with which it was reached.
struct Alike<S> {
    needed: Box<[u64]>,
    state: S,
    optional: Vec<Box<[u64]>>,
}

impl<S> Default for Visited<S> {
    fn default() -> Visited<S> {
        Visited(HashMap::with_hasher(FixedState::default()))
    }
}

impl<S: Clone + Eq + Hash> Visited<S> {
    /// Inserts the state after an operation, if the operation is possible. Returns the state if it is new.
    fn step(&mut self, ordered: &mut Ordered, operation: usize, after: Option<S>) -> Option<S> {
        let after = after?;
        ordered.flip(operation);
        let is_new = self.insert(ordered, &after);
        ordered.flip(operation);
        is_new.then_some(after)
    }

    /// Inserts a state. Returns whether it was absent, and was not reached with fewer optional operations.
    fn insert(&mut self, ordered: &Ordered, state: &S) -> bool {
        let Ordered { needed, optional, .. } = ordered;
        let hash = self.0.hasher().hash_one((needed, state));
        let alike = self.0.entry(hash).or_default();
        match alike.iter_mut().find(|alike| alike.needed == *needed && alike.state == *state) {
            None => {
                let (needed, state) = (needed.clone(), state.clone());
                alike.push(Alike { needed, state, optional: vec![optional.clone()] });
                true
            }
            Some(alike) if alike.optional.iter().any(|of| is_subset(of, optional)) => false,
            Some(alike) => {
                alike.optional.retain(|of| !is_subset(optional, of));
                alike.optional.push(optional.clone());
                true
            }
        }
    }
}

fn is_subset(one: &[u64], other: &[u64]) -> bool {
    one.iter().zip(other).all(|(one, other)| one & !other == 0)
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

    /// Operation without a return, in these tests.
    const NEVER: u64 = u64::MAX;

    fn spans(operations: &[(u64, u64, Op)]) -> Vec<Span> {
        let returned = |at: u64| (at != NEVER).then_some(at);
        operations.iter().map(|&(called, at, _)| Span { called, returned: returned(at) }).collect()
    }

    fn is_register(operations: &[(u64, u64, Op)]) -> bool {
        let spans = spans(operations);
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
        let spans = spans(&operations);
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

    #[test]
    fn an_operation_that_never_returned_may_be_left_out() {
        assert!(is_register(&[(0, NEVER, Write(1)), (1, 2, Read(0)), (3, 4, Read(1)), (5, 6, Read(1))]));
        assert!(is_register(&[(0, NEVER, Write(1)), (1, 2, Read(0))]));
        assert!(is_register(&[(0, NEVER, Read(9)), (1, 2, Read(0))]));
        assert!(!is_register(&[(0, NEVER, Write(1)), (1, 2, Read(1)), (3, 4, Read(0))]));
        assert!(!is_register(&[(1, 2, Read(1)), (3, NEVER, Write(1))]));
    }

    #[test]
    fn operations_that_never_returned_do_not_multiply_the_states() {
        // Thirty writes that may be left out, with values that nobody reads, make 2^30 sets.
        let mut operations: Vec<(u64, u64, Op)> = (0..30).map(|n| (n, NEVER, Write(n as u8 + 100))).collect();
        operations.extend((0..10).map(|n| (100 + n, 200, Write(n as u8))));
        operations.push((201, 202, Read(99)));
        let spans = spans(&operations);
        let mut steps = 0_u64;
        let found = is_explained(&spans, 0_u8, |&now, operation| {
            steps += 1;
            match operations[operation].2 {
                Write(value) => Some(value),
                Read(value) => (value == now).then_some(now),
            }
        });
        assert!(!found);
        // 2^10 sets of writes that returned. The last write is one of these, or of the thirty.
        assert!(steps < 3_000_000, "{steps}");
    }
}
