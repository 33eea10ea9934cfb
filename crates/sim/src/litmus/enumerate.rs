//! All outcomes that the axioms allow: every total order of a program's events that agrees with their partial order.
//!
//! Orders that have done the same events, to the same memory, with the same answers go on alike, so each such point is
//! gone on from once. An event that nothing still to come can conflict with is not tried against others: all orders
//! that differ in its place end alike.
//!
//! Invariant: the answer is exact: every outcome in it has an order, and every order its outcome in it.

use std::collections::{BTreeSet, HashSet};

use super::axioms::{Axiom, PROMISES, Verb};
use super::program::{LINE_WORDS, Op, Outcome, Program, Step};

impl Program {
    /// All outcomes that the contract allows; `relaxed`: where writes of one message may land in any order.
    pub fn allowed(&self, relaxed: bool) -> BTreeSet<Outcome> {
        self.allowed_within(relaxed, usize::MAX).expect("there is no bound")
    }

    /// As [`Program::allowed`], or nothing if more than so many points would have to be gone on from.
    pub(super) fn allowed_within(&self, relaxed: bool, points_max: usize) -> Option<BTreeSet<Outcome>> {
        let events = Events::of(self, relaxed);
        let mut search =
            Search { events: &events, points: HashSet::new(), points_max, ends: BTreeSet::new() };
        let memory: Vec<u64> = events.cells.iter().map(|cell| self.memory()[cell.at]).collect();
        search.goes_on(Point { done: 0, memory, answers: vec![0; events.answers] })?;
        Some(search.ends.iter().map(|end| events.outcome(self, end)).collect())
    }
}

/// Neighbouring words of a line that no verb tells apart.
struct Cell {
    at: usize,
    words: usize,
}

/// What an event does. Cells and answers are told by their numbers.
enum Does {
    /// Answers from cells.
    Fetch(Vec<(usize, usize)>),
    /// Values into cells.
    Land(Vec<(usize, u64)>),
    /// An atomic's word into its answer.
    AtomicFetch { cell: usize, answer: usize },
    /// What the atomic makes of its answer into its word.
    WriteBack { cell: usize, answer: usize },
}

struct Event {
    does: Does,
    /// The verb that it belongs to, among all.
    step: usize,
    /// Events that come before it, as bits.
    after: u64,
    /// Events that it must not change places with, if nothing orders them.
    conflicts: u64,
}

struct Events<'a> {
    steps: Vec<(usize, &'a Step)>,
    cells: Vec<Cell>,
    all: Vec<Event>,
    /// Places for answers: one for each cell of a READ, one for each atomic.
    answers: usize,
    /// Of each verb, the cell and the place of each part of its answer.
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
        assert!(events.all.len() <= 64, "a program's bounds keep it below 64 events");
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
            self.push(step, Does::AtomicFetch { cell, answer });
            self.push(step, Does::WriteBack { cell, answer });
            return;
        }
        for of_line in touched.chunk_by(|(line, _), (other, _)| line == other) {
            let does = if payload.is_empty() {
                Does::Fetch(of_line.iter().map(|&(_, cell)| (cell, self.new_answer(step, cell))).collect())
            } else {
                let value = |&(_, cell): &(usize, usize)| (cell, payload[self.cells[cell].at - words.start]);
                Does::Land(of_line.iter().map(value).collect())
            };
            self.push(step, does);
        }
    }

    fn new_answer(&mut self, step: usize, cell: usize) -> usize {
        self.answer_of[step].push((cell, self.answers));
        self.answers += 1;
        self.answers - 1
    }

    fn push(&mut self, step: usize, does: Does) {
        self.all.push(Event { does, step, after: 0, conflicts: 0 });
    }

    /// Adds what each axiom says to the partial order, then what follows from it.
    fn order(&mut self, relaxed: bool) {
        for promise in PROMISES.iter().filter(|promise| promise.also_relaxed || !relaxed) {
            for second in 0..self.all.len() {
                let firsts =
                    (0..self.all.len()).filter(|&first| self.is_before(promise.axiom, first, second));
                self.all[second].after |= firsts.fold(0, |bits, first| bits | 1 << first);
            }
        }
        // Events stand in the order of their posting, so one round from the first to the last is enough.
        for event in 0..self.all.len() {
            let firsts = bits(self.all[event].after).map(|first| self.all[first].after);
            self.all[event].after |= firsts.fold(0, |bits, more| bits | more);
        }
    }

    /// Whether an axiom by itself puts one event before another.
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
            // No order, but a rule for all orders: see `Search::may_be_next`.
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
            match &self.all[event].does {
                Does::Fetch(list) => list.iter().map(|&(cell, _)| cell).collect(),
                Does::Land(list) => list.iter().map(|&(cell, _)| cell).collect(),
                Does::AtomicFetch { cell, .. } | Does::WriteBack { cell, .. } => vec![*cell],
            }
        };
        // An atomic's fetch takes its slot, so it changes places with no other atomic of the word.
        let only_reads = |event: usize| matches!(self.all[event].does, Does::Fetch(_));
        !(only_reads(one) && only_reads(other)) && cells(one).iter().any(|cell| cells(other).contains(cell))
    }

    /// A run's end in words instead of cells.
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

/// Cuts the lines where any verb, or a piece of what it writes, or a value in the beginning ends. Words that no verb
/// touches are left out.
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

/// How far an order has come.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Point {
    done: u64,
    memory: Vec<u64>,
    answers: Vec<u64>,
}

struct Search<'a> {
    events: &'a Events<'a>,
    /// Only asked whether it has a point, so that its order shows nowhere.
    points: HashSet<Point>,
    points_max: usize,
    ends: BTreeSet<Point>,
}

impl Search<'_> {
    /// Goes on from a point in every way; nothing if there were too many points.
    fn goes_on(&mut self, point: Point) -> Option<()> {
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
            self.goes_on(self.done(&point, event))?;
        }
        Some(())
    }

    fn may_be_next(&self, point: &Point, event: usize) -> bool {
        let Event { does, after, step, .. } = &self.events.all[event];
        let is_done = |event: usize| point.done & (1 << event) != 0;
        if is_done(event) || after & !point.done != 0 {
            return false;
        }
        let Does::AtomicFetch { cell, .. } = does else { return true };
        // `Axiom::Exclusive`: no other atomic has fetched this word and not written it back.
        let mut pairs = self.events.all.iter().enumerate();
        !pairs.any(|(other, atomic)| match &atomic.does {
            Does::AtomicFetch { cell: word, .. } => {
                word == cell && atomic.step != *step && is_done(other) && !is_done(other + 1)
            }
            _ => false,
        })
    }

    /// Nothing that is still to come, and not only after it, touches what it touches.
    fn is_free_of_conflict(&self, point: &Point, event: usize) -> bool {
        let is_later = |other: usize| self.events.all[other].after & (1 << event) != 0;
        bits(self.events.all[event].conflicts & !point.done).all(is_later)
    }

    fn done(&self, point: &Point, event: usize) -> Point {
        let mut point = point.clone();
        point.done |= 1 << event;
        let Event { does, step, .. } = &self.events.all[event];
        match does {
            Does::Fetch(parts) => {
                parts.iter().for_each(|&(cell, answer)| point.answers[answer] = point.memory[cell])
            }
            Does::Land(parts) => parts.iter().for_each(|&(cell, value)| point.memory[cell] = value),
            Does::AtomicFetch { cell, answer } => {
                point.answers[*answer] = point.memory[*cell];
                if let Op::Cas { compare, .. } = self.events.steps[*step].1.op
                    && compare != point.memory[*cell]
                {
                    point.done |= 1 << (event + 1);
                }
            }
            Does::WriteBack { cell, answer } => {
                point.memory[*cell] = match self.events.steps[*step].1.op {
                    Op::Cas { swap, .. } => swap,
                    Op::Faa { add, .. } => point.answers[*answer].wrapping_add(add),
                    Op::Read { .. } | Op::Write { .. } => panic!("only atomics write back"),
                };
            }
        }
        point
    }
}
