//! Tests of the verification of values: it reports nothing on real stores, and it finds and names every flaw that a
//! test plants between a store and a task.

use crate::support::driven::{Client, Driven, GetResult, Interposer, drive, plain};
use farside_bench::driver::Tally;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const DRIVEN: Driven<'static> =
    Driven { system: "prism-kv", workload: "a", records: 500, each: 500, slot_cache: 0 };

#[test]
fn verification_reports_nothing_on_real_stores() {
    for (system, workload, slot_cache) in [
        ("prism-kv", "a", 0),
        ("prism-kv", "a", 1000),
        ("prism-kv", "b", 0),
        ("prism-kv", "c", 0),
        ("prism-kv", "d", 0),
        ("prism-kv", "f", 0),
        ("pilaf", "a", 0),
        ("pilaf", "d", 0),
        ("pilaf", "f", 0),
    ] {
        let tally = drive(Driven { system, workload, slot_cache, ..DRIVEN }, &plain, &|| {});
        let reported = tally.failures.join("\n");
        assert_eq!((tally.errors, tally.violations), (0, 0), "{system}, workload {workload}: {reported}");
        assert_eq!(tally.operations(), 64 * DRIVEN.each, "{system}, workload {workload}");
    }
}

/// A flaw between a store and a task, which strikes one in [`ONCE_IN`] operations.
#[derive(Clone, Copy, Debug)]
enum Flaw {
    /// A read returns the previous value.
    StaleRead,
    /// A put is acknowledged and not carried out.
    LostUpdate,
    /// A read returns the first 256 bytes of the value, followed by the remaining bytes of the previous value.
    TornValue,
    /// A read returns another key's value.
    OtherKey,
    /// A read returns no value.
    Missing,
}

struct PlantedFlaw {
    flaw: Flaw,
    operations: AtomicU64,
    /// The last two values put under each key.
    values: Mutex<HashMap<Vec<u8>, [Vec<u8>; 2]>>,
}

/// A flaw strikes one in this many operations.
const ONCE_IN: u64 = 501;

impl PlantedFlaw {
    fn strikes(&self) -> bool {
        self.operations.fetch_add(1, Ordering::Relaxed) % ONCE_IN == ONCE_IN - 1
    }
}

impl Interposer for PlantedFlaw {
    fn puts(&self, key: &[u8], value: &[u8]) -> bool {
        let is_lost = matches!(self.flaw, Flaw::LostUpdate) && self.strikes();
        if !is_lost {
            let mut values = self.values.lock().expect("no holder of the lock panics");
            let last = values.entry(key.to_vec()).or_default();
            last.swap(0, 1);
            last[1] = value.to_vec();
        }
        !is_lost
    }

    fn got(&self, key: &[u8], value: &[u8]) -> GetResult {
        if matches!(self.flaw, Flaw::LostUpdate) || !self.strikes() {
            return GetResult::Unchanged;
        }
        let values = self.values.lock().expect("no holder of the lock panics");
        let before = values.get(key).map(|[before, _]| before).filter(|before| !before.is_empty());
        let other = match self.flaw {
            Flaw::Missing => return GetResult::Nothing,
            Flaw::LostUpdate => None,
            Flaw::StaleRead => before.cloned(),
            Flaw::TornValue => before.map(|before| [&value[..256], &before[256..]].concat()),
            Flaw::OtherKey => {
                values.iter().find(|(other, _)| *other != key).map(|(_, [_, last])| last.clone())
            }
        };
        other.map_or(GetResult::Unchanged, GetResult::Other)
    }
}

fn with(flaw: Flaw, system: &str) -> Tally {
    let planted = PlantedFlaw { flaw, operations: AtomicU64::new(0), values: Mutex::default() };
    let planted = &planted;
    drive(Driven { system, ..DRIVEN }, &|kv| Client::Interposed(Box::new(kv), planted), &|| {})
}

#[test]
fn every_planted_flaw_is_found_and_named() {
    for (flaw, name) in [
        (Flaw::StaleRead, "went back: to value"),
        (Flaw::LostUpdate, "went back: to value"),
        (Flaw::TornValue, "a torn value"),
        (Flaw::OtherKey, "the value of key"),
        (Flaw::Missing, "went missing"),
    ] {
        for system in ["prism-kv", "pilaf"] {
            let tally = with(flaw, system);
            println!(
                "{flaw:?} in {system}: {} violations, such as {:?}",
                tally.violations,
                tally.failures.first()
            );
            assert!(tally.violations > 0, "{flaw:?} in {system} is not found");
            assert!(
                tally.failures.iter().any(|reported| reported.contains(name)),
                "{flaw:?}: {:?}",
                tally.failures
            );
            assert_eq!(tally.errors, 0, "{flaw:?} in {system}: {:?}", tally.failures);
        }
    }
}
