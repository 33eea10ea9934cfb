//! Makes a schedule shorter while it shows the same kind of finding.
//!
//! Invariant: the result runs to the same kind of finding, and no single step of this module makes it smaller, unless
//! the tries are used up.

use super::schedule::{Actor, Bench, Plan, Ran, UNIT, What};
use super::truth::Kind;
use super::{Protocol, story};
use farside_sim::world::Nanos;
use serde::Serialize;
use std::rc::Rc;

/// Maximum number of runs.
const TRIES_MAX: usize = 4_000;

/// How large a schedule is. Sizes are compared field by field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Size {
    /// Number of operations.
    pub operations: usize,
    /// Number of writes that were created.
    pub writes: usize,
    /// Number of events.
    pub events: usize,
    /// Number of late steps and pauses.
    pub late: usize,
    /// Sum of all lateness and pauses, in nanoseconds.
    pub sum_ns: Nanos,
}

fn size(plan: &Plan, ran: &Ran) -> Size {
    let times = || {
        let pauses = plan.actors.iter().flat_map(|actor| actor.operations.iter().map(|one| one.pause));
        pauses.chain(ran.late.iter().flatten().copied()).filter(|&ns| ns > 0)
    };
    Size {
        operations: plan.actors.iter().map(|actor| actor.operations.len()).sum(),
        writes: ran.events.iter().filter(|event| matches!(event.what, What::Creates { .. })).count(),
        events: story::shown(ran).len(),
        late: times().count(),
        sum_ns: times().sum(),
    }
}

struct Shrinking<'a, P> {
    bench: &'a Bench,
    protocol: &'a Rc<P>,
    kind: Kind,
    plan: Plan,
    ran: Ran,
    size: Size,
    tries: usize,
}

/// Shrinks a plan whose run has a finding. Returns the smallest plan found and its run with events, and the sizes of
/// both plans.
///
/// # Panics
/// If the run has no finding.
pub fn shrink<P: Protocol + 'static>(
    bench: &Bench,
    protocol: &Rc<P>,
    plan: &Plan,
    ran: &Ran,
) -> (Plan, Ran, [Size; 2]) {
    let (_, finding) = ran.finding.as_ref().expect("the run has a finding");
    let mut plan = plan.clone();
    fix(&mut plan, ran);
    let again = bench.run(protocol, &plan, None, true);
    assert!(again.finding == ran.finding, "the same plan gives the same run");
    let first = size(&plan, &again);
    let mut shrinking =
        Shrinking { bench, protocol, kind: finding.kind, plan, ran: again, size: first, tries: 0 };
    while shrinking.round() {}
    (shrinking.plan, shrinking.ran, [first, shrinking.size])
}

/// Fixes the late steps of a plan as they were in its run.
fn fix(plan: &mut Plan, ran: &Ran) {
    for (actor, late) in plan.actors.iter_mut().zip(&ran.late) {
        actor.late.clone_from(late);
        let used = late.iter().rposition(|&ns| ns > 0).map_or(0, |last| last + 1);
        actor.late.truncate(used);
    }
}

impl<P: Protocol + 'static> Shrinking<'_, P> {
    /// Tries a plan, and keeps it if it is smaller. Returns whether it was kept.
    fn keeps(&mut self, change: impl FnOnce(&mut Plan)) -> bool {
        if self.tries == TRIES_MAX {
            return false;
        }
        let mut plan = self.plan.clone();
        change(&mut plan);
        if plan == self.plan {
            return false;
        }
        self.tries += 1;
        let ran = self.bench.run(self.protocol, &plan, None, true);
        if ran.finding.as_ref().is_none_or(|(_, finding)| finding.kind != self.kind) {
            return false;
        }
        fix(&mut plan, &ran);
        let size = size(&plan, &ran);
        if size >= self.size {
            return false;
        }
        (self.plan, self.ran, self.size) = (plan, ran, size);
        true
    }

    /// Tries every change once. Returns whether one was kept.
    fn round(&mut self) -> bool {
        let before = self.size;
        self.drop_actors();
        self.drop_operations();
        self.earlier();
        for actor in 0..self.plan.actors.len() {
            self.zero(actor);
            self.shift(actor);
            self.lower(actor);
            self.join(actor);
            self.pauses(actor);
        }
        self.size < before
    }

    fn drop_actors(&mut self) {
        for actor in (0..self.plan.actors.len()).rev() {
            self.keeps(|plan| drop(plan.actors.remove(actor)));
        }
    }

    fn drop_operations(&mut self) {
        for actor in 0..self.plan.actors.len() {
            for operation in (0..self.plan.actors[actor].operations.len()).rev() {
                let begun = &self.ran.begun[actor];
                let steps = self.plan.actors[actor].late.len();
                let at = |place: usize| begun.get(place).copied().unwrap_or(steps).min(steps);
                let (from, to) = (at(operation), at(operation + 1).max(at(operation)));
                let drop = |plan: &mut Plan| {
                    let actor = &mut plan.actors[actor];
                    actor.late.drain(from..to);
                    actor.operations.remove(operation).pause
                };
                if self.keeps(|plan| _ = drop(plan)) {
                    continue;
                }
                // The next operation begins when it did before.
                let begins = self.begins(actor);
                if let (Some(this), Some(next)) = (begins.get(operation), begins.get(operation + 1)) {
                    let between = next - this;
                    self.keeps(|plan| {
                        let pause = drop(plan);
                        plan.actors[actor].operations[operation].pause = pause + between;
                    });
                }
            }
        }
    }

    /// Returns the times at which a client's operations began.
    fn begins(&self, actor: usize) -> Vec<Nanos> {
        let begins = self.ran.events.iter();
        let begins = begins.filter(|event| event.actor == actor && matches!(event.what, What::Begins { .. }));
        begins.map(|event| event.time).collect()
    }

    /// Lets all clients begin earlier by the same time.
    fn earlier(&mut self) {
        let first = self.plan.actors.iter().filter_map(|actor| actor.operations.first());
        let least = first.map(|operation| operation.pause).min().unwrap_or(0);
        self.keeps(|plan| plan.actors.iter_mut().for_each(|actor| begin_earlier(actor, least)));
    }

    /// Makes a step not late, and lets the other clients begin earlier by that time.
    fn shift(&mut self, actor: usize) {
        let mut place = 0;
        while let Some(&ns) = self.plan.actors[actor].late.get(place) {
            self.keeps(|plan| {
                plan.actors[actor].late[place] = 0;
                let others = plan.actors.iter_mut().enumerate().filter(|(other, _)| *other != actor);
                others.for_each(|(_, other)| begin_earlier(other, ns));
            });
            place += 1;
        }
    }

    /// Makes late steps not late: all, halves, and so on.
    fn zero(&mut self, actor: usize) {
        let mut chunk = self.plan.actors[actor].late.len();
        while chunk > 0 {
            let mut from = 0;
            while from < self.plan.actors[actor].late.len() {
                self.keeps(|plan| {
                    let late = &mut plan.actors[actor].late;
                    let to = (from + chunk).min(late.len());
                    late[from..to].fill(0);
                });
                from += chunk;
            }
            chunk /= 2;
        }
    }

    fn lower(&mut self, actor: usize) {
        let mut place = 0;
        while let Some(&ns) = self.plan.actors[actor].late.get(place) {
            for lower in lower(ns) {
                if self.keeps(|plan| plan.actors[actor].late[place] = lower) {
                    break;
                }
            }
            place += 1;
        }
    }

    /// Makes a step as late as the one before or after it, so that adjacent lines are accessed together.
    fn join(&mut self, actor: usize) {
        let mut place = 1;
        while place < self.plan.actors[actor].late.len() {
            for (to, from) in [(place, place - 1), (place - 1, place)] {
                self.keeps(|plan| {
                    let late = &mut plan.actors[actor].late;
                    // A step that was kept may have shortened the list.
                    if let (Some(&ns), Some(late)) = (late.get(from).copied().as_ref(), late.get_mut(to)) {
                        *late = ns;
                    }
                });
            }
            place += 1;
        }
    }

    fn pauses(&mut self, actor: usize) {
        for operation in 0..self.plan.actors[actor].operations.len() {
            let ns = self.plan.actors[actor].operations[operation].pause;
            for lower in lower(ns) {
                if self.keeps(|plan| plan.actors[actor].operations[operation].pause = lower) {
                    break;
                }
            }
        }
    }
}

/// Lets a client begin earlier.
fn begin_earlier(actor: &mut Actor, ns: Nanos) {
    if let Some(first) = actor.operations.first_mut() {
        first.pause = first.pause.saturating_sub(ns);
    }
}

/// Lower times to try, the lowest first.
fn lower(ns: Nanos) -> impl Iterator<Item = Nanos> {
    let all = [0, 5 * UNIT, ns / 4 / UNIT * UNIT, ns / 2 / UNIT * UNIT, ns.saturating_sub(UNIT)];
    all.into_iter().filter(move |&lower| lower < ns)
}
