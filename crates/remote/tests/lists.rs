//! Free lists under every interleaving that a scheduler finds, with death and stoppage at every access.

mod support;

use support::lists::{Fate, SCENARIOS};

#[test]
fn no_buffer_is_ever_held_by_two_and_none_is_lost() {
    for scenario in SCENARIOS {
        scenario.explore(Fate::Lives, 1, 1500);
        println!("{}: 3000 schedules", scenario.name);
    }
}

#[test]
fn death_at_any_access_loses_no_buffer_but_those_of_the_dead() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Dies, 2, 40);
        println!("{}: died {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}

#[test]
fn one_who_was_stopped_anywhere_and_goes_on_much_later_does_no_harm() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Stops, 3, 40);
        println!("{}: stopped {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}
