//! Runs the simulator with as many seeds as every change can afford, and with all seeds that once found a bug.

use crate::sim::runs;
use farside_sim::fault::Fault;
use farside_trial::flight::{Matrix, Phases, can_strike};
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System};

/// Seeds to run for each pair of a system and a carrier.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=60;

/// Asserts that all seeds of a system over one carrier are good, and that every possible fault strikes. Returns the
/// system's phases, and how often each fault struck within each phase.
#[track_caller]
fn over(system: System, carrier: Carrier) -> (&'static Phases, Matrix) {
    let setup = Setup { carrier: Some(carrier), ..Setup::of(system) };
    let (mut phases, mut within) = (None, Matrix::default());
    let mut struck = [0; Fault::ALL.len()];
    let mut operations = 0;
    for seed in SEEDS {
        let judged = judge(&setup, seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}");
        let report = judged.report.expect("a good run has a report");
        Fault::ALL.iter().for_each(|fault| struck[*fault as usize] += report.struck.of(*fault));
        within.add(&report.matrix);
        phases = Some(report.phases);
        operations += report.record.operations();
    }
    let possible = Fault::ALL.into_iter().filter(|fault| carrier.can_have(*fault));
    let never: Vec<&str> = possible.filter(|fault| struck[*fault as usize] == 0).map(Fault::name).collect();
    assert!(never.is_empty(), "{} over {}: these never struck: {never:?}", system.name(), carrier.name());
    println!("{} over {}: {operations} operations", system.name(), carrier.name());
    (phases.expect("there are seeds"), within)
}

#[test]
fn all_seeds_are_good_and_every_fault_strikes_in_every_phase() {
    let of = |system: System| system.carriers().into_iter().map(move |carrier| (system, carrier));
    let runs: Vec<_> = System::all().flat_map(of).collect();
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> =
            runs.iter().map(|(system, carrier)| scope.spawn(|| over(*system, *carrier))).collect();
        threads.into_iter().map(|thread| thread.join().expect("its seeds are good")).collect::<Vec<_>>()
    });
    let mut empty = Vec::new();
    let mut outcomes = outcomes.into_iter();
    for system in System::all() {
        let carriers = system.carriers();
        let of_carriers: Vec<_> = outcomes.by_ref().take(carriers.len()).collect();
        let mut within = Matrix::default();
        of_carriers.iter().for_each(|(_, matrix)| within.add(matrix));
        let (phases, _) = of_carriers[0];
        for fault in Fault::ALL {
            for (at, phase) in phases.all.iter().enumerate() {
                if can_strike(fault, phase, &carriers) && within.of(fault, at) == 0 {
                    empty.push(format!("{}: {} within {}", system.name(), fault.name(), phase.name));
                }
            }
        }
    }
    assert!(empty.is_empty(), "these faults never struck, so these phases are untested: {empty:#?}");
}

#[test]
fn seeds_that_once_found_a_bug_are_good() {
    let mut kept = 0;
    for run in runs(include_str!("regressions.txt")) {
        let judged = judge(&run.setup, run.seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}\n  it once found: {}", run.rest);
        kept += 1;
    }
    assert!(kept > 0, "regressions.txt has no seed");
}
