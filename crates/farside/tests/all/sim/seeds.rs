//! As many seeds as every change can wait for, and those that have found something once.

use crate::sim::runs;
use farside_sim::fault::Fault;
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};

/// Of each system over each carrier.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=60;

/// Nothing is wrong, nothing undecided, and every fault that can be there has struck.
#[track_caller]
fn nothing_is_found(carrier: Carrier) {
    for system in System::all() {
        let setup = Setup { carrier: Some(carrier), ..Setup::of(system) };
        let mut struck = [0; Fault::ALL.len()];
        let mut operations = 0;
        for seed in SEEDS {
            let judged = judge(&setup, seed, true);
            assert_eq!(judged.verdict, Verdict::Good, "{judged}");
            let report = judged.report.expect("a good run has a report");
            Fault::ALL.iter().for_each(|fault| struck[*fault as usize] += report.struck.of(*fault));
            operations += report.record.operations();
        }
        let possible = Fault::ALL.into_iter().filter(|fault| carrier.can_have(*fault));
        let never: Vec<&str> =
            possible.filter(|fault| struck[*fault as usize] == 0).map(Fault::name).collect();
        assert!(never.is_empty(), "{} over {}: these never struck: {never:?}", system.name(), carrier.name());
        println!("{} over {}: {operations} operations", system.name(), carrier.name());
    }
}

#[test]
fn whoever_maps_the_memory_sees_one_register_a_key() {
    nothing_is_found(Carrier::Direct);
}

#[test]
fn over_datagrams_each_key_is_one_register() {
    nothing_is_found(Carrier::Datagrams);
}

#[test]
fn over_connections_each_key_is_one_register() {
    nothing_is_found(Carrier::Connections);
}

#[test]
fn what_was_found_once_is_not_found_again() {
    let mut kept = 0;
    for run in runs(include_str!("regressions.txt")) {
        let judged = judge(&run.setup, run.seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}\n  it once found: {}", run.rest);
        kept += 1;
    }
    assert!(kept > 0, "no seed is kept");
}
