//! Trials of guarded objects, over a fixed range of seeds: clients stop for longer than all timeouts, and dead clients
//! are fenced and recovered.

use farside_sim::fault::Fault;
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Setup, System};

/// Seeds of every run of the test.
const SEEDS: u64 = 40;

#[test]
fn clients_that_stop_for_longer_than_all_timeouts_are_fenced_and_do_no_harm() {
    let setup = Setup::of(System::named("guarded").expect("guarded objects can be tried"));
    let (mut with_long_pauses, mut fences, mut redone) = (0, 0, 0);
    for seed in 1..=SEEDS {
        let judged = judge(&setup, seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}");
        let report = judged.report.expect("a good run has a report");
        with_long_pauses += u64::from(report.counts.long_pauses > 0);
        let phase = |name| report.phases.all.iter().position(|phase| phase.name == name).expect("a phase");
        let within =
            |name| Fault::ALL.into_iter().map(|fault| report.matrix.of(fault, phase(name))).sum::<u64>();
        fences += within("fence");
        redone += within("redo");
    }
    println!(
        "{with_long_pauses} of {SEEDS} seeds with long pauses; struck: {fences} fences, {redone} redo chains"
    );
    assert!(
        with_long_pauses * 20 >= SEEDS,
        "fewer than 5 % of the seeds had a long pause: {with_long_pauses}"
    );
    assert!(fences > 0 && redone > 0, "{fences}, {redone}");
}
