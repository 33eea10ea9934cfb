//! Sherman in the simulator, by the harness of [`crate::support::index_sim`]: tiny nodes, clients that die, dropped
//! futures.

#[cfg(farside_mutants)]
use crate::support::index_sim::is_found;
use crate::support::index_sim::{Kind, Plan, run, run_all, seeds};
use farside_remote::draws::Draws;
use farside_sim::world::{MICROS, MILLIS};
use farside_systems::index::Keys;
use farside_systems::index::sherman::KIND;

/// Stores with the versions of the paper: 4 bits for each line of 64 bytes. Only verbs read such lines as a whole. Few
/// locks, so that nodes share them.
const PAPER_NUMBERS: &str = r#"{"keys":"numbers","key_max":8,"value_max":150,"span":4,"line":64,"version_bits":8,
    "locks":3,"ids":6,"lanes":4,"lease_us":1000,"redo":true}"#;
const PAPER_STRINGS: &str = r#"{"keys":"strings","key_max":128,"value_max":150,"span":5,"line":64,"version_bits":8,
    "locks":3,"ids":6,"lanes":4,"lease_us":1000,"redo":true}"#;

/// The plan of a seed.
fn plan_of(seed: u64) -> Plan {
    let plan = Plan::of(KIND, seed);
    let mut draws = Draws(seed ^ 0x1234_5678);
    let has_paper_form = plan.nodes == 1 && plan.fabric == Kind::Verbs;
    let parameters = match plan.keys {
        Keys::Numbers => PAPER_NUMBERS,
        Keys::Strings => PAPER_STRINGS,
    };
    Plan {
        parameters: has_paper_form.then_some(parameters),
        chunk: draws.pick(&[1, 1, 2 << 10, 4 << 10]),
        ..plan
    }
}

#[test]
fn every_key_of_sherman_is_a_register_whatever_happens_to_clients() {
    run_all(seeds(60), plan_of);
}

/// Stores whose leases are longer than many round trips over a slow link.
const FAR_WIDE: &str = r#"{"keys":"numbers","key_max":8,"value_max":150,"span":4,"line":16,"version_bits":16,
    "locks":64,"ids":6,"lanes":4,"lease_us":4000000,"redo":true}"#;
const FAR_LINES: &str = r#"{"keys":"numbers","key_max":8,"value_max":150,"span":4,"line":64,"version_bits":8,
    "locks":64,"ids":6,"lanes":4,"lease_us":100000,"redo":true}"#;

/// Each READ takes so long that versions may have wrapped.
#[test]
fn a_store_over_a_slow_link_is_read_under_its_locks() {
    for (fabric, parameters, delay_ns) in
        [(Kind::Session, FAR_WIDE, 5 * MILLIS), (Kind::Verbs, FAR_LINES, 100 * MICROS)]
    {
        for seed in 0..4 {
            let plan = Plan {
                parameters: Some(parameters),
                nodes: 1,
                fabric,
                keys: Keys::Numbers,
                count: 60,
                operations: 30,
                deaths: false,
                drops: false,
                scans: 10,
                delay_ns,
                ..Plan::of(KIND, seed)
            };
            let events = run(seed, plan).unwrap_or_else(|failure| panic!("{failure}"));
            let count = |name: &str| events.get(name).copied().unwrap_or(0);
            // A few may wait for a lock longer than the harness's patience, which is about sixty round trips.
            assert!(count("busy") <= 3, "{fabric:?}, seed {seed}: {}", count("busy"));
            // A client repeats late READs only until it knows that all are late.
            assert!(count("locked reads") > count("late reads"), "{fabric:?}");
        }
    }
}

/// Number of seeds in which a mutant must fail.
#[cfg(farside_mutants)]
const HUNT: u64 = 2500;

#[cfg(farside_mutants)]
#[test]
fn the_trial_finds_broken_variants_of_sherman() {
    use farside_remote::mutant::Mutant;
    use farside_systems::index::sherman::mutants::{
        HANDED_OVER_EARLY, PUBLISHED_VERSIONS, TORN_ENTRY_ABSENT,
    };
    use farside_systems::{lease, redo};
    let mutants = [
        PUBLISHED_VERSIONS,
        TORN_ENTRY_ABSENT,
        HANDED_OVER_EARLY,
        lease::mutants::TAKEN_UNFENCED,
        redo::mutants::RECORD_AFTER_OBJECT,
    ];
    let alive: Vec<Mutant> =
        mutants.into_iter().filter(|mutant| !is_found(*mutant, seeds(HUNT), plan_of)).collect();
    assert!(alive.is_empty(), "these mutants live: {alive:?}");
}
