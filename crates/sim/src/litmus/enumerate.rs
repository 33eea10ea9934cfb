//! Enumerates all outcomes that the axioms allow. The search tries every total order of a program's events that agrees
//! with their partial order, except for two reductions:
//!
//! - Two orders of the same events that led to the same memory and the same results have the same continuations. So the
//!   search continues from such a point only once.
//! - If no remaining event can conflict with an event, the search puts this event next and tries no other. All orders
//!   that differ only in the place of this event have the same outcome.
//!
//! Invariant: the result is exact. Each outcome in it has an order, and the outcome of each order is in it.

use std::collections::{BTreeSet, HashSet};

use super::axioms::{Axiom, PROMISES, Verb};
use super::program::{LINE_WORDS, Op, Outcome, Program, Step};

impl Program {
    /// Returns all outcomes of the program that the contract allows. With `relaxed`, the lines of one WRITE may land
    /// in any order.
    pub fn allowed(&self, relaxed: bool) -> BTreeSet<Outcome> {
        self.allowed_within(relaxed, usize::MAX).expect("the search is unbounded")
    }

    /// Returns the outcomes as [`Program::allowed`] does, or `None` if the search exceeds `points_max` points.
    pub(super) fn allowed_within(&self, relaxed: bool, points_max: usize) -> Option<BTreeSet<Outcome>> {
        let events = Events::of(self, relaxed);
        let mut search =
            Search { events: &events, points: HashSet::new(), points_max, ends: BTreeSet::new() };
        let memory: Vec<u64> = events.cells.iter().map(|cell| self.memory()[cell.at]).collect();
        search.explore(Point { done: 0, memory, answers: vec![0; events.answers] })?;
        Some(search.ends.iter().map(|end| events.outcome(self, end)).collect())
    }
}

/// Adjacent words of a line that no verb tells apart: each verb accesses all of them or none.
struct Cell {
    at: usize,
    words: usize,
}

/// Effect of an event. Indices identify cells and results.
enum Effect {
    /// Copies cells to results: a list of pairs of a cell and a result.
    Fetch(Vec<(usize, usize)>),
    /// Stores values in cells: a list of pairs of a cell and a value.
    Land(Vec<(usize, u64)>),
    /// Copies the word of an atomic to the atomic's result.
    AtomicFetch { cell: usize, answer: usize },
    /// Stores an atomic's new value in its word.
    WriteBack { cell: usize, answer: usize },
}

struct Event {
    effect: Effect,
    /// Index of the event's verb in the list of all verbs.
    step: usize,
    /// Bitmask of the events that precede this event.
    after: u64,
    /// Bitmask of the events with which this event does not commute.
    conflicts: u64,
}

struct Events<'a> {
    steps: Vec<(usize, &'a Step)>,
    cells: Vec<Cell>,
    all: Vec<Event>,
    /// Number of results: one for each cell of a READ and one for each atomic.
    answers: usize,
    /// For each verb, the parts of its result: each part's cell and index in the results.
    answer_of: Vec<Vec<(usize, usize)>>,
}

impl<'a> Events<'a> {
    fn of(program: &'a Program, relaxed: bool) -> Events<'a> {
        let steps: Vec<(usize, &Step)> = program.steps().collect();
        let cells = cells(program, &steps);
        let mut events =
            Events { answer_of: vec![Vec::new(); steps.len()], steps, cells, all: Vec::new(), answers: 0 };
        for step in 0..events.steps.len() {
            events.add(step);
        }
        assert!(events.all.len() <= 64, "a program has at most 64 events");
        events.order(relaxed);
        events.find_conflicts();
        events
    }

    fn add(&mut self, step: usize) {
        let op = &self.steps[step].1.op;
        let words = op.at()..op.at() + op.words();
        let is_touched = |cell: &usize| words.contains(&self.cells[*cell].at);
        let touched: Vec<(usize, usize)> = (0..self.cells.len())
            .filter(is_touched)
            .map(|cell| (self.cells[cell].at / LINE_WORDS, cell))
            .collect();
        let payload = op.payload();
        if Verb::of(op) == Verb::Atomic {
            let (_, cell) = touched[0];
            let answer = self.new_answer(step, cell);
            self.push(step, Effect::AtomicFetch { cell, answer });
            self.push(step, Effect::WriteBack { cell, answer });
            return;
        }
        for of_line in touched.chunk_by(|(line, _), (other, _)| line == other) {
            let effect = if payload.is_empty() {
                Effect::Fetch(of_line.iter().map(|&(_, cell)| (cell, self.new_answer(step, cell))).collect())
            } else {
                let value = |&(_, cell): &(usize, usize)| (cell, payload[self.cells[cell].at - words.start]);
                Effect::Land(of_line.iter().map(value).collect())
            };
            self.push(step, effect);
        }
    }

    fn new_answer(&mut self, step: usize, cell: usize) -> usize {
        self.answer_of[step].push((cell, self.answers));
        self.answers += 1;
        self.answers - 1
    }

    fn push(&mut self, step: usize, effect: Effect) {
        self.all.push(Event { effect, step, after: 0, conflicts: 0 });
    }

    /// Adds the pairs of each axiom to the partial order, then adds all pairs that follow from these (transitive
    /// closure).
    fn order(&mut self, relaxed: bool) {
        for promise in PROMISES.iter().filter(|promise| promise.also_relaxed || !relaxed) {
            for second in 0..self.all.len() {
                let firsts =
                    (0..self.all.len()).filter(|&first| self.is_before(promise.axiom, first, second));
                self.all[second].after |= firsts.fold(0, |bits, first| bits | 1 << first);
            }
        }
        // Events are in posting order, so one pass from the first to the last is enough.
        for event in 0..self.all.len() {
            let firsts = bits(self.all[event].after).map(|first| self.all[first].after);
            self.all[event].after |= firsts.fold(0, |bits, more| bits | more);
        }
    }

    /// Whether this axiom alone orders the event `first` before the event `second`.
    fn is_before(&self, axiom: Axiom, first: usize, second: usize) -> bool {
        let (a, b) = (self.all[first].step, self.all[second].step);
        let verb = |step: usize| Verb::of(&self.steps[step].1.op);
        let is_posted_before = self.steps[a].0 == self.steps[b].0 && a < b;
        match axiom {
            Axiom::Before(one, other) => is_posted_before && (verb(a), verb(b)) == (one, other),
            Axiom::Ascending(one) => a == b && first < second && verb(a) == one,
            Axiom::FetchThenWriteBack => a == b && first < second && verb(a) == Verb::Atomic,
            Axiom::HeldUntilDone(start, verbs) => {
                let is_held = (a + 1..=b).any(|between| self.steps[between].1.start == start);
                is_posted_before && is_held && verbs.contains(&verb(a))
            }
            // This axiom is no order of two events, but a rule for total orders: see `Search::may_be_next`.
            Axiom::Exclusive => false,
        }
    }

    fn find_conflicts(&mut self) {
        for one in 0..self.all.len() {
            let others = (0..self.all.len()).filter(|&other| other != one && self.conflict(one, other));
            self.all[one].conflicts = others.fold(0, |bits, other| bits | 1 << other);
        }
    }

    fn conflict(&self, one: usize, other: usize) -> bool {
        let cells = |event: usize| -> Vec<usize> {
            match &self.all[event].effect {
                Effect::Fetch(list) => list.iter().map(|&(cell, _)| cell).collect(),
                Effect::Land(list) => list.iter().map(|&(cell, _)| cell).collect(),
                Effect::AtomicFetch { cell, .. } | Effect::WriteBack { cell, .. } => vec![*cell],
            }
        };
        // An atomic's fetch also takes a slot, so it does not commute with other atomics of the same word.
        let only_reads = |event: usize| matches!(self.all[event].effect, Effect::Fetch(_));
        !(only_reads(one) && only_reads(other)) && cells(one).iter().any(|cell| cells(other).contains(cell))
    }

    /// Converts the final state of a run, which is in cells, to an outcome in words.
    fn outcome(&self, program: &Program, end: &Point) -> Outcome {
        let answer = |step: usize| {
            let parts = self.answer_of[step].iter();
            parts
                .flat_map(|&(cell, at)| std::iter::repeat_n(end.answers[at], self.cells[cell].words))
                .collect()
        };
        let mut memory = program.memory();
        for (cell, &value) in self.cells.iter().zip(&end.memory) {
            memory[cell.at..cell.at + cell.words].fill(value);
        }
        Outcome { answers: (0..self.steps.len()).map(answer).collect(), memory }
    }
}

/// Splits lines into cells. The bounds of verbs, of written pieces and of initial values are the boundaries of cells.
/// Words that no verb touches are omitted.
fn cells(program: &Program, steps: &[(usize, &Step)]) -> Vec<Cell> {
    let memory = program.memory();
    let mut cuts: BTreeSet<usize> = (0..=memory.len()).step_by(LINE_WORDS).collect();
    cuts.extend((1..memory.len()).filter(|&at| memory[at] != memory[at - 1]));
    let mut touched = vec![false; memory.len()];
    for op in steps.iter().map(|(_, step)| &step.op) {
        cuts.extend([op.at(), op.at() + op.words()]);
        touched[op.at()..op.at() + op.words()].fill(true);
        if let Op::Write { at, pieces } = op {
            cuts.extend(pieces.iter().scan(*at, |next, piece| {
                *next += piece.words;
                Some(*next)
            }));
        }
    }
    let ends = cuts.iter().skip(1);
    let cells = cuts.iter().zip(ends).map(|(&at, &end)| Cell { at, words: end - at });
    cells.filter(|cell| touched[cell.at]).collect()
}

fn bits(set: u64) -> impl Iterator<Item = usize> {
    (0..64).filter(move |bit| set & (1 << bit) != 0)
}

/// State of a run after some of its events have happened.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Point {
    done: u64,
    memory: Vec<u64>,
    answers: Vec<u64>,
}

struct Search<'a> {
    events: &'a Events<'a>,
    /// Points that have been explored. The set is used for lookups only, so its order has no influence on the result.
    points: HashSet<Point>,
    points_max: usize,
    ends: BTreeSet<Point>,
}

impl Search<'_> {
    /// Continues the search from a point with each event that may be next. Returns `None` if there are too many
    /// points.
    fn explore(&mut self, point: Point) -> Option<()> {
        let next: Vec<usize> =
            (0..self.events.all.len()).filter(|&event| self.may_be_next(&point, event)).collect();
        if next.is_empty() {
            self.ends.insert(point);
            return Some(());
        }
        if !self.points.insert(point.clone()) {
            return Some(());
        }
        if self.points.len() > self.points_max {
            return None;
        }
        let alone = next.iter().position(|&event| self.is_free_of_conflict(&point, event));
        for &event in alone.map_or(&next[..], |at| &next[at..=at]) {
            self.explore(self.done(&point, event))?;
        }
        Some(())
    }

    fn may_be_next(&self, point: &Point, event: usize) -> bool {
        let Event { effect, after, step, .. } = &self.events.all[event];
        let is_done = |event: usize| point.done & (1 << event) != 0;
        if is_done(event) || after & !point.done != 0 {
            return false;
        }
        let Effect::AtomicFetch { cell, .. } = effect else { return true };
        // `Axiom::Exclusive`: no other atomic may have fetched this word and not written it back yet.
        let mut pairs = self.events.all.iter().enumerate();
        !pairs.any(|(other, atomic)| match &atomic.effect {
            Effect::AtomicFetch { cell: word, .. } => {
                word == cell && atomic.step != *step && is_done(other) && !is_done(other + 1)
            }
            _ => false,
        })
    }

    /// Whether every remaining event that conflicts with this event is ordered after it.
    fn is_free_of_conflict(&self, point: &Point, event: usize) -> bool {
        let is_later = |other: usize| self.events.all[other].after & (1 << event) != 0;
        bits(self.events.all[event].conflicts & !point.done).all(is_later)
    }

    fn done(&self, point: &Point, event: usize) -> Point {
        let mut point = point.clone();
        point.done |= 1 << event;
        let Event { effect, step, .. } = &self.events.all[event];
        match effect {
            Effect::Fetch(parts) => {
                parts.iter().for_each(|&(cell, answer)| point.answers[answer] = point.memory[cell])
            }
            Effect::Land(parts) => parts.iter().for_each(|&(cell, value)| point.memory[cell] = value),
            Effect::AtomicFetch { cell, answer } => {
                point.answers[*answer] = point.memory[*cell];
                if self.events.steps[*step].1.op.written_back(point.memory[*cell]).is_none() {
                    point.done |= 1 << (event + 1);
                }
            }
            Effect::WriteBack { cell, answer } => {
                let new = self.events.steps[*step].1.op.written_back(point.answers[*answer]);
                point.memory[*cell] = new.expect("only atomics that succeeded write back");
            }
        }
        point
    }
}
