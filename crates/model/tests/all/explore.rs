//! The search itself: it visits every state once, finds the shortest schedule, and never calls a part of the states
//! good.

use farside_model::explore::{Explored, Finding, Model, Verdict, explore};

/// Two counters, each of which a step raises, up to `most`. The forbidden state is wrong.
struct Counters {
    most: u8,
    forbidden: [u8; 2],
    is_end: bool,
}

impl Model for Counters {
    type State = [u8; 2];
    type Step = usize;

    fn start(&self) -> [u8; 2] {
        [0, 0]
    }

    fn steps(&self, from: &[u8; 2], mut visit: impl FnMut(usize, &[u8; 2])) {
        for at in (0..2).filter(|at| from[*at] < self.most) {
            let mut after = *from;
            after[at] += 1;
            visit(at, &after);
        }
    }

    fn wrong(&self, state: &[u8; 2]) -> Option<String> {
        (*state == self.forbidden).then(|| "forbidden".to_owned())
    }

    fn wrong_at_end(&self, _: &[u8; 2]) -> Option<String> {
        self.is_end.then(|| "an end".to_owned())
    }

    fn words(&self, _: &[u8; 2], step: usize, after: &[u8; 2]) -> String {
        format!("{step} to {}", after[step])
    }
}

#[test]
fn every_state_is_visited_once() {
    let explored = explore(&Counters { most: 9, forbidden: [10, 0], is_end: false }, 1_000);
    assert_eq!(explored, Explored { states: 100, ends: 1, verdict: Verdict::Good });
}

#[test]
fn the_schedule_to_a_wrong_state_is_the_shortest() {
    let explored = explore(&Counters { most: 9, forbidden: [0, 2], is_end: false }, 1_000);
    let finding = Finding { what: "forbidden".into(), schedule: vec!["1 to 1".into(), "1 to 2".into()] };
    assert_eq!(explored.verdict, Verdict::Wrong(finding));
}

#[test]
fn a_wrong_end_is_reported_before_a_wrong_state() {
    let explored = explore(&Counters { most: 1, forbidden: [0, 1], is_end: true }, 1_000);
    let Verdict::Wrong(finding) = explored.verdict else { panic!("{explored:?}") };
    assert_eq!((finding.what.as_str(), finding.schedule.len()), ("an end", 2));
}

#[test]
fn a_part_of_the_states_is_never_good() {
    let counters = |forbidden| Counters { most: 9, forbidden, is_end: false };
    assert_eq!(explore(&counters([10, 0]), 50).verdict, Verdict::Undecided);
    assert!(matches!(explore(&counters([1, 0]), 50).verdict, Verdict::Wrong(_)));
}
