//! Trials of replicated blocks whose members are replaced, over a fixed range of seeds, with three and with five
//! replicas.

use farside_sim::fault::Fault;
use farside_trial::flight::{Matrix, can_strike};
use farside_trial::judge::judge;
use farside_trial::{Setup, System};

/// Seeds of every run of the test, for each number of replicas.
const SEEDS: u64 = 25;
/// Seeds of five replicas: with fewer, no connection was reset while a writer id was claimed.
const SEEDS_OF_FIVE: u64 = 36;
/// Seeds of the long test.
const SOAK_SEEDS: u64 = 10_000;
/// At most one in this many trials may have a history that the checker cannot decide, because of many operations
/// without a known outcome.
const UNDECIDED_ONE_IN: u64 = 1_000;

/// Runs trials of a system with this number of replicas, and checks each of them. Returns how often each fault struck.
pub(crate) fn play(system: &str, replicas: u32, seeds: std::ops::RangeInclusive<u64>) -> Matrix {
    let system = System::named(system).expect("replicated blocks can be tried");
    let setup = Setup { nodes: Some(replicas), ..Setup::of(system) };
    let (count, mut wrong, mut undecided) = (seeds.end() - seeds.start() + 1, Vec::new(), 0);
    let (mut matrix, mut given_up, mut unknown, mut done) = (Matrix::default(), 0, 0, 0);
    let mut replacements = Vec::new();
    for seed in seeds {
        let judged = judge(&setup, seed, true);
        let is_violated = judged.report.as_ref().is_none_or(|report| report.violation.is_some());
        if judged.is_bad() {
            match judged.reasons.iter().all(|reason| reason.contains("undecided")) && !is_violated {
                true => undecided += 1,
                false => wrong.push(judged.to_string()),
            }
        }
        let Some(report) = judged.report else { continue };
        matrix.add(&report.matrix);
        given_up += report.counts.given_up;
        unknown += report.counts.unknown;
        replacements.push(report.counts.replacements);
        done += report.record.operations() as u64;
    }
    println!(
        "{replicas} replicas: {done} operations, {given_up} dropped, {unknown} of unknown outcome, {} replacements, \
         {matrix:?}",
        replacements.iter().sum::<u64>()
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(undecided <= count / UNDECIDED_ONE_IN, "{undecided} of {count} trials are undecided");
    assert!(given_up > 0 && done > 50 * count, "{given_up}, {done}");
    let several = replacements.iter().filter(|replacements| **replacements > 1).count() as u64;
    assert!(
        system.name() != "prism-rs" || several > count / 5,
        "several members were replaced in {several} of {count} trials only"
    );
    matrix
}

/// Index of the first phase of recoverers of PRISM-RS.
const LOOK: usize = 8;

/// Asserts that every fault has struck within every phase of a system that `is_meant`. Strikes within phases of
/// recoverers count only if a client was in the midst of an operation.
pub(crate) fn check_struck(system: &str, matrix: &Matrix, is_meant: impl Fn(usize) -> bool) {
    let system = System::named(system).expect("replicated blocks can be tried");
    let carriers = system.carriers();
    let phases = || system.phases().all.iter().enumerate().filter(|(at, _)| is_meant(*at));
    let cells = Fault::ALL.into_iter().flat_map(|fault| phases().map(move |at| (fault, at)));
    let empty = cells
        .filter(|(fault, (at, phase))| can_strike(*fault, phase, &carriers) && matrix.of(*fault, *at) == 0);
    let empty: Vec<String> =
        empty.map(|(fault, (_, phase))| format!("{} within {}", fault.name(), phase.name)).collect();
    assert!(empty.is_empty(), "these faults never struck within these phases: {empty:?}");
}

/// Asserts that every fault has struck recoverers, and that faults have struck within every phase of theirs. Few trials
/// do not have every fault within every phase.
fn check_struck_recoverers(matrix: &Matrix) {
    let system = System::named("prism-rs").expect("replicated blocks can be tried");
    let (all, carriers) = (system.phases().all, system.carriers());
    assert_eq!(all[LOOK].name, "look");
    let steps = LOOK + 1..all.len();
    for fault in Fault::ALL.into_iter().filter(|fault| can_strike(*fault, &all[LOOK], &carriers)) {
        let struck: u64 = steps.clone().map(|phase| matrix.of(fault, phase)).sum();
        assert!(struck > 0, "{} never struck a recoverer in the midst of a step", fault.name());
    }
    for phase in steps {
        let faults = Fault::ALL.into_iter().filter(|fault| *fault != Fault::ClockSkew);
        let struck = faults.filter(|fault| matrix.of(*fault, phase) > 0).count();
        assert!(struck > 2, "only {struck} faults struck within {}", all[phase].name);
    }
}

#[test]
fn every_block_is_linearizable_and_a_minority_stops_nobody() {
    let mut matrix = play("prism-rs", 3, 1..=SEEDS);
    matrix.add(&play("prism-rs", 5, 1..=SEEDS_OF_FIVE));
    check_struck("prism-rs", &matrix, |phase| phase < LOOK);
    check_struck_recoverers(&matrix);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_replicated_blocks() {
    check_struck("prism-rs", &play("prism-rs", 3, 1..=SOAK_SEEDS), |_| true);
    check_struck("prism-rs", &play("prism-rs", 5, 1..=SOAK_SEEDS), |_| true);
}
