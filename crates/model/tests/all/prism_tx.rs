//! PRISM-TX: the decided rules hold in all worlds, each broken rule is found, and worlds reach what they are for.
//!
//! `cargo test -p farside-model broken -- --nocapture` prints the shortest schedule of each broken rule.

use farside_model::explore::{Model, Verdict, explore};
use farside_model::prism_tx::rules::{Lease, Rules};
use farside_model::prism_tx::variants;
use farside_model::prism_tx::world::{
    Outcome, Recovered, State, Step, World, each, lane, reads, successor, updates, writes,
};
use farside_model::prism_tx::worlds;

/// Largest number of states of a world in a test.
const STATES_MAX: u64 = 400_000;
/// Largest number of states of a world in a long test.
const SOAK_STATES_MAX: u64 = 60_000_000;

/// Explores worlds, and returns the number of states.
#[track_caller]
fn hold(worlds: Vec<World>, rules: Rules, states_max: u64) -> u64 {
    assert!(!worlds.is_empty());
    let (count, mut states) = (worlds.len(), 0);
    for world in worlds {
        let explored = explore(&world.with(rules), states_max);
        states += explored.states;
        match explored.verdict {
            Verdict::Good => assert!(explored.ends > 0, "no end: {world}"),
            Verdict::Undecided => panic!("more than {states_max} states: {world}"),
            Verdict::Wrong(finding) => {
                panic!("{world}: {}\n  {}", finding.what, finding.schedule.join("\n  "));
            }
        }
    }
    println!("worlds: {count}, states: {states}");
    states
}

#[test]
fn the_decided_rules_hold_for_two_clients() {
    let states = hold(worlds::pairs(1), Rules::DECIDED, STATES_MAX);
    assert!(states > 40_000, "{states}");
}

#[test]
fn the_decided_rules_hold_if_both_clients_die() {
    hold(worlds::two_victims(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_decided_rules_hold_when_entries_are_reused() {
    hold(worlds::reuse(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_decided_rules_hold_when_ids_are_taken_over() {
    hold(worlds::successors(1), Rules::DECIDED, STATES_MAX);
    hold(worlds::successors(2), Rules::DECIDED, STATES_MAX);
    hold(worlds::successors_beside(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_decided_rules_hold_for_clients_with_two_transactions_at_once() {
    hold(worlds::two_lanes(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_decided_rules_hold_when_sessions_break() {
    hold(worlds::breaking(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_decided_rules_hold_for_three_keys_at_three_shards() {
    hold(worlds::three_shards(), Rules::DECIDED, STATES_MAX);
    hold(worlds::three_shards_reuse(), Rules::DECIDED, STATES_MAX);
}

#[test]
fn the_alternatives_hold_that_are_right() {
    for (name, rules) in variants::right() {
        print!("{name}: ");
        hold([worlds::pairs(1), worlds::reuse(), worlds::successors(2)].concat(), rules, STATES_MAX);
    }
}

#[test]
fn each_broken_rule_is_found_where_the_decided_one_holds() {
    for variant in variants::broken() {
        let explored = explore(&variant.world, STATES_MAX);
        let Verdict::Wrong(finding) = explored.verdict else {
            panic!("{}: {:?} in {}", variant.name, explored.verdict, variant.world);
        };
        println!("{}\n  world: {}\n  finding: {}", variant.name, variant.world, finding.what);
        finding.schedule.iter().zip(1..).for_each(|(step, number)| println!("  {number:>3}. {step}"));
        assert!(finding.what.contains(variant.finds), "{}: {}", variant.name, finding.what);
        hold(vec![variant.world.clone()], Rules::DECIDED, STATES_MAX);
    }
}

/// A late recoverer that does not look for a new holder may install a value of the new holder, under the timestamp of
/// the old one. Then T3 commits with a value that T2 never committed, although no two verdicts differ.
#[test]
fn a_late_recoverer_may_install_a_foreign_value() {
    let lanes = vec![lane(0, [writes("ab")]), successor(1, 0, [writes("c")]), lane(2, [updates("c")])];
    let world =
        |lease| World::new(Rules { lease, ..Rules::DECIDED }, &[0, 1, 0], lanes.clone()).recovering(&[0, 0]);
    let is_dirty = |state: &State| {
        let outcomes = [2, 3].map(|number| state.record(number).outcome);
        let verdicts_differ = state.record(1).verdict == Recovered::Both;
        outcomes == [Outcome::Aborted, Outcome::Reported]
            && state.record(3).read[2] == 2 + 1
            && !verdicts_differ
    };
    assert!(reaches(&world(Lease::Unconfirmed), is_dirty).is_some());
    assert!(reaches(&world(Lease::ConfirmedAfterLog), is_dirty).is_none());
}

/// A world in which an end, or a state, is wrong if it has a property. So a finding is a schedule to such a state.
struct Reaches<'a, P>(&'a World, P);

impl<P: Fn(&State) -> bool> Model for Reaches<'_, P> {
    type State = State;
    type Step = Step;

    fn start(&self) -> State {
        self.0.start()
    }

    fn steps(&self, from: &State, visit: impl FnMut(Step, &State)) {
        self.0.steps(from, visit);
    }

    fn wrong(&self, state: &State) -> Option<String> {
        self.1(state).then(|| "reached".to_owned())
    }

    fn wrong_at_end(&self, _: &State) -> Option<String> {
        None
    }

    fn words(&self, before: &State, step: Step, after: &State) -> String {
        self.0.words(before, step, after)
    }
}

/// Returns the shortest schedule to a state with a property, if there is one.
fn reaches(world: &World, property: impl Fn(&State) -> bool) -> Option<Vec<String>> {
    match explore(&Reaches(world, property), STATES_MAX).verdict {
        Verdict::Wrong(finding) => Some(finding.schedule),
        Verdict::Good => None,
        Verdict::Undecided => panic!("more than {STATES_MAX} states: {world}"),
    }
}

#[test]
fn worlds_reach_what_they_are_for() {
    let outcomes = |state: &State| [1, 2].map(|number| state.record(number).outcome);
    let new = |shards: &[usize], lanes| World::new(Rules::DECIDED, shards, lanes);
    let two = new(&[0, 1], each([updates("ab").at(1), updates("ab").at(2)]));
    assert!(reaches(&two, |state| outcomes(state) == [Outcome::Reported; 2]).is_some());
    assert!(reaches(&two, |state| outcomes(state) == [Outcome::Aborted; 2]).is_some());

    let dying = two.clone().recovering(&[0]);
    let verdict = |state: &State| state.record(1).verdict;
    let cut = |state: &State| outcomes(state)[0] == Outcome::Decided && state.is_fenced(0, 1);
    assert!(reaches(&dying, |state| verdict(state) == Recovered::Committed && cut(state)).is_some());
    assert!(reaches(&dying, |state| verdict(state) == Recovered::Aborted && cut(state)).is_some());
    let goes_on = |state: &State| state.is_fenced(0, 0) && !state.is_fenced(0, 1);
    assert!(reaches(&dying, |state| goes_on(state) && outcomes(state)[0] == Outcome::Aborted).is_some());
    assert!(reaches(&dying, |state| verdict(state) == Recovered::Both).is_none());

    let next = new(&[0], vec![lane(0, [writes("a")]), successor(1, 0, [updates("a")])]).recovering(&[0, 0]);
    let late = |state: &State| outcomes(state)[1] == Outcome::Reported && state.recoverers[1].ts.clock() == 1;
    assert!(reaches(&next, late).is_some());

    let broken = new(&[0], each([writes("a").at(1), reads("a").at(2)])).breaking(1);
    let both = |state: &State| state.broken == 1 && outcomes(state) == [Outcome::Reported; 2];
    assert!(reaches(&broken, both).is_some());
}

#[test]
fn a_schedule_is_in_plain_words() {
    let world = World::new(Rules::DECIDED, &[0], each([updates("a")])).recovering(&[0]);
    let recovered = |state: &State| {
        state.record(1).verdict == Recovered::Committed
            && state.log[0][0].state == farside_model::prism_tx::log::State::Done
    };
    let schedule = reaches(&world, recovered).expect("a recoverer commits it");
    let expected = [
        "T1 of client A reads key a (PW 0, PR 0, C 0)",
        "T1 of client A writes the body of its intent at shard 0",
        "T1 of client A sets its entry at shard 0 to 1A ACTIVE",
        "T1 of client A checks its read of key a for 1A (PW 0, PR 0, C 0): passes",
        "T1 of client A raises PW of key a to 1A (PW 0, PR 1A, C 0): the check passes; all checks have passed: the \
         transaction commits",
        "T1 of client A sets its entry at shard 0 to 1A DECIDED",
        "recoverer 1 of client A fences the client and reads the log at shard 0: 1A DECIDED; verdict on 1A: commit",
        "recoverer 1 of client A, for 1A installs the value of key a again, with C 1A (PW 1A, PR 1A, C 0)",
        "recoverer 1 of client A, for 1A closes the entry at shard 0: from DECIDED to DONE; the recovery is over",
    ];
    assert_eq!(schedule, expected);
}

/// Explores a set, and prints its size.
fn soak(name: &str, worlds: Vec<World>, rules: Rules) {
    print!("{name}: ");
    hold(worlds, rules, SOAK_STATES_MAX);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_the_decided_rules_hold_in_large_worlds() {
    soak("two clients, two recoverers", worlds::pairs(2), Rules::DECIDED);
    soak("two clients that write at both shards", worlds::wide_pairs(1), Rules::DECIDED);
    soak("three clients", worlds::triples(1), Rules::DECIDED);
    soak("three clients, two recoverers", worlds::triples(2), Rules::DECIDED);
    soak("four clients", worlds::four(), Rules::DECIDED);
    soak("three clients, two of them at both shards", worlds::wide_triples(), Rules::DECIDED);
    soak("two kinds of trouble", worlds::mixed(), Rules::DECIDED);
    soak("three clients at three shards", worlds::three_shards_ring(), Rules::DECIDED);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_the_right_alternatives_hold_in_large_worlds() {
    let sets = || {
        [worlds::pairs(2), worlds::triples(1), worlds::two_lanes(), worlds::successors(2), worlds::breaking()]
    };
    for (name, rules) in variants::right() {
        sets().into_iter().for_each(|set| soak(name, set, rules));
    }
}
