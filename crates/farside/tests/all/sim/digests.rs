//! A setup and a seed determine the history. The history is the same in this process and in the build that wrote
//! `digests.txt`. For the first run of each system over each carrier, it is also the same a second time in this process
//! and in another process.
//!
//! The standard library seeds each hash map differently, so a history that depended on a map's order would differ here.

use crate::sim::{Run, runs};
use crate::support;
use farside_trial::Carrier;
use farside_trial::judge::judge;
use std::collections::BTreeSet;

const DIGESTS: &str = include_str!("digests.txt");

/// Values that are equal in equal runs: the history's digest, the number of events, and the virtual time in ns.
type Trace = (String, u64, u64);

fn trace_here(run: &Run<'_>) -> Trace {
    let judged = judge(&run.setup, run.seed, true);
    let report = judged.report.as_ref().unwrap_or_else(|| panic!("{judged}"));
    (format!("{:016x}", report.record.digest()), report.events, report.lasted)
}

fn trace_elsewhere(run: &Run<'_>) -> Trace {
    let seed = run.seed.to_string();
    let carrier = run.setup.carrier.expect("each line names a carrier").name();
    let flags = ["sim", "--system", run.setup.system.name(), "--carrier", carrier, "--seed", &seed, "--json"];
    let line = support::farside(flags).done().json();
    let number = |field: &str| line[field].as_u64().expect("a number");
    (line["digest"].as_str().expect("a digest").to_owned(), number("events"), number("virtual_ns"))
}

#[test]
fn a_seed_gives_the_same_run_in_every_process_and_build() {
    for carrier in Carrier::ALL {
        assert!(runs(DIGESTS).any(|run| run.setup.carrier == Some(carrier)), "{carrier:?} has no digest");
    }
    let (mut others, mut repeated) = (Vec::new(), BTreeSet::new());
    for run in runs(DIGESTS) {
        let first = trace_here(&run);
        let named = format!("{:?} seed {}", run.setup.carrier, run.seed);
        if repeated.insert((run.setup.system.name(), run.setup.carrier.map(Carrier::name))) {
            assert_eq!(trace_here(&run), first, "{named}: the second time in this process");
            assert_eq!(trace_elsewhere(&run), first, "{named}: in another process");
        }
        if first.0 != run.rest {
            others.push(named);
        }
    }
    assert!(
        others.is_empty(),
        "histories differ from digests.txt: {others:?}; if this is intended, run: cargo xtask sim --digests"
    );
}
