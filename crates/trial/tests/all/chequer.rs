//! Trials of Chequer's stores with logs: what each policy of a log promises is kept, and the faults of a log's disk and
//! machine strike.

use farside_sim::fault::Fault;
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Setup, System};

#[test]
fn a_log_loses_a_suffix_at_most_and_each_fault_of_its_disk_strikes() {
    play(1..=30);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_the_log_of_chequer() {
    play(1..=2000);
}

/// Runs these seeds with the faults of a log.
fn play(seeds: std::ops::RangeInclusive<u64>) {
    let faults =
        [Fault::NodeRestart, Fault::NodeLoss, Fault::DiskFull, Fault::SyncFailure, Fault::MachineCrash];
    let (mut struck, mut policies, mut taken_back) = ([0; 5], [0; 3], 0);
    for name in ["chequer", "chequer-message"] {
        let system = System::named(name).expect("it can be tried");
        let setup = Setup { faults: faults.to_vec(), ..Setup::of(system) };
        for seed in seeds.clone() {
            let judged = judge(&setup, seed, true);
            assert_eq!(judged.verdict, Verdict::Good, "{judged}");
            let report = judged.report.expect("a good run has a report");
            for (count, fault) in struck.iter_mut().zip(faults) {
                *count += report.struck.of(fault);
            }
            let log = report.options.iter().find(|option| option.name == "log").expect("an option");
            for (count, policy) in policies.iter_mut().zip(["each", "interval", "never"]) {
                *count += u64::from(log.words.contains(&format!("synced {policy}")));
            }
            taken_back += report.counts.taken_back;
        }
    }
    println!("faults {struck:?}, policies {policies:?}, {taken_back} losses of answered operations");
    assert!(struck.iter().chain(&policies).all(|&times| times > 5), "{struck:?}, {policies:?}");
    assert!(taken_back > 3, "{taken_back} losses of answered operations");
}
