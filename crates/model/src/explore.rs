//! Breadth-first search of all states of a model, with the shortest schedule to a state that is wrong.
//!
//! Invariant: an exploration that was stopped early is never called good.
//!
//! Invariant: a visited state is known by a 64-bit hash of its bytes. An exploration of n states misses a state with a
//! probability of about n² / 2^65, which is 10^-7 for two million states.

use foldhash::quality::FixedState;
use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher};
use zerocopy::{Immutable, IntoBytes};

/// A model: states, and the steps between them.
pub trait Model {
    /// State of the model. Equal states have equal bytes.
    type State: Copy + IntoBytes + Immutable;
    /// A step, as the model names it.
    type Step: Copy;

    /// Returns the first state.
    fn start(&self) -> Self::State;

    /// Calls `visit` with each possible step and the state after it, always in the same order.
    fn steps(&self, from: &Self::State, visit: impl FnMut(Self::Step, &Self::State));

    /// Returns what is wrong with a state, if anything.
    fn wrong(&self, state: &Self::State) -> Option<String>;

    /// Returns what is wrong with a state in which no step is possible, if anything.
    fn wrong_at_end(&self, state: &Self::State) -> Option<String>;

    /// Describes a step in a sentence.
    fn words(&self, before: &Self::State, step: Self::Step, after: &Self::State) -> String;
}

/// Result of an exploration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explored {
    /// Number of visited states.
    pub states: u64,
    /// Number of visited states in which no step is possible.
    pub ends: u64,
    /// The verdict.
    pub verdict: Verdict,
}

/// Verdict on a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No state is wrong.
    Good,
    /// Some state is wrong.
    Wrong(Finding),
    /// The search was stopped at its limit, before it had found a wrong state or visited all states.
    Undecided,
}

/// A state that is wrong, and the shortest schedule that leads to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong.
    pub what: String,
    /// The steps from the start, one sentence for each.
    pub schedule: Vec<String>,
}

/// Visits all states of a model, until an end is wrong. Stops before it has visited more than `states_max` states.
///
/// A wrong end is a better explanation than a wrong state on the way to it. So a wrong state is reported only if no end
/// is wrong.
pub fn explore<M: Model>(model: &M, states_max: u64) -> Explored {
    let mut search =
        Search { model, hasher: FixedState::default(), visited: HashSet::default(), tree: Vec::new() };
    let mut wrong: Option<(String, u32)> = None;
    let mut ends = 0;
    let start = model.start();
    search.visit(&start, None);
    let mut states = vec![(start, 0_u32)];
    while !states.is_empty() {
        let mut next = Vec::new();
        for (state, number) in &states {
            let mut count = 0_u8;
            model.steps(state, |_, after| {
                if let Some(new) = search.visit(after, Some((*number, count))) {
                    next.push((*after, new));
                    if wrong.is_none() {
                        wrong = model.wrong(after).map(|what| (what, new));
                    }
                }
                count += 1;
            });
            if count == 0 {
                ends += 1;
                if let Some(what) = model.wrong_at_end(state) {
                    return search.end(ends, Some((what, *number)));
                }
            }
        }
        if search.tree.len() as u64 > states_max {
            let mut explored = search.end(ends, wrong);
            if explored.verdict == Verdict::Good {
                explored.verdict = Verdict::Undecided;
            }
            return explored;
        }
        states = next;
    }
    search.end(ends, wrong)
}

struct Search<'a, M> {
    model: &'a M,
    hasher: FixedState,
    visited: HashSet<u64, foldhash::fast::FixedState>,
    /// For each visited state but the first: the number of the state before it, and the index of the step between them.
    tree: Vec<(u32, u8)>,
}

impl<M: Model> Search<'_, M> {
    /// Marks a state as visited. Returns its number if it is new.
    fn visit(&mut self, state: &M::State, from: Option<(u32, u8)>) -> Option<u32> {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(state.as_bytes());
        if !self.visited.insert(hasher.finish()) {
            return None;
        }
        let number = u32::try_from(self.tree.len()).expect("fewer than 2^32 states fit into memory");
        self.tree.push(from.unwrap_or((0, 0)));
        Some(number)
    }

    fn end(&self, ends: u64, wrong: Option<(String, u32)>) -> Explored {
        let verdict = match wrong {
            None => Verdict::Good,
            Some((what, number)) => Verdict::Wrong(Finding { what, schedule: self.schedule(number) }),
        };
        Explored { states: self.tree.len() as u64, ends, verdict }
    }

    /// Describes the steps from the start to a state, by taking them again.
    fn schedule(&self, mut number: u32) -> Vec<String> {
        let mut path = Vec::new();
        while number != 0 {
            let (before, step) = self.tree[number as usize];
            path.push(step);
            number = before;
        }
        let mut state = self.model.start();
        let mut schedule = Vec::new();
        for taken in path.into_iter().rev() {
            let (mut count, mut after) = (0, None);
            self.model.steps(&state, |step, to| {
                if count == taken {
                    after = Some((step, *to));
                }
                count += 1;
            });
            let (step, to) = after.expect("a model has the same steps each time");
            schedule.push(self.model.words(&state, step, &to));
            state = to;
        }
        schedule
    }
}
