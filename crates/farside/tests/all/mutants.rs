//! Mutants of protocols, sessions and the node. The simulator must find each mutant, with the workload and faults that
//! the correct code passes.

use crate::support;
use crate::support::driven::{Driven, drive, plain};
use farside_remote::mutant::Mutant;
use farside_systems::kv::pilaf::mutants::{ENTRY_UNCHECKED, ITEM_UNCHECKED, READS_KEEP_ORDER, SIZE_TRUSTED};
use farside_systems::kv::prism_kv::mutants::CACHED_PUT_YIELDS;
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Carrier, Setup, System, kills};

/// Replays each mutant with a seed that has killed it before. `cargo xtask sim --mutants` searches for other seeds.
#[test]
fn the_simulator_finds_every_mutant_by_its_seed() {
    let replayed = std::thread::scope(|scope| {
        let threads: Vec<_> = System::all().map(|system| scope.spawn(move || replay(system))).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("a trial's panics are caught"))
            .collect::<Vec<_>>()
    });
    let mut alive = Vec::new();
    for (mutant, outcome) in replayed {
        match outcome {
            Ok(why) => println!("{mutant}: killed by {why}"),
            Err(why) => alive.push(format!("{mutant}: {why}")),
        }
    }
    assert!(alive.is_empty(), "{alive:#?}");
}

fn replay(system: System) -> Vec<(String, Result<String, String>)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../trial/kills");
    let file = format!("{folder}/{}.txt", system.name());
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    kills::replay(system, &kills::parse(&text).expect("lines `MUTANT SEED`"))
}

/// A NIC exposes each mutant of Pilaf, also those whose listed seeds use other carriers.
#[test]
fn a_nic_exposes_every_mutant_of_pilaf() {
    let kills = [(ENTRY_UNCHECKED, 4), (ITEM_UNCHECKED, 1), (SIZE_TRUSTED, 4), (READS_KEEP_ORDER, 34)];
    let system = System::named("pilaf").expect("a system");
    assert!(system.mutants().iter().all(|mutant| kills.iter().any(|(killed, _)| killed == mutant)));
    let setup = Setup { carrier: Some(Carrier::Verbs), ..Setup::of(system) };
    for (mutant, seed) in kills {
        Mutant::switch(Some(mutant));
        let broken = judge(&setup, seed, true);
        Mutant::switch(None);
        assert_eq!(broken.verdict, Verdict::Violated, "{mutant:?} survives seed {seed} over verbs");
        println!("{mutant:?}: killed by seed {seed}: {}", broken.reasons[0]);
        let right = judge(&setup, seed, true);
        assert!(!right.is_bad(), "{right}");
    }
}

/// The simulator reports and draws a violation, and prints a command that replays the violation.
#[test]
fn a_violation_is_reported_and_its_replay_reproduces_it() {
    let mutant = "KvNoGeneration";
    let many = support::farside(["sim", "--mutant", mutant, "--seeds", "1..5"]);
    assert_eq!(many.code, Some(1), "{}", many.err);
    assert!(many.err.contains("runs are not good"), "{}", many.err);
    let replays = many.text().lines().filter_map(|line| line.trim().strip_prefix("replay: farside "));
    let folder = tempfile::tempdir().expect("a folder");
    let picture = folder.path().join("picture.svg");
    let mut drawn = 0;
    for replay in replays.take(3) {
        let flags = replay.split(' ').chain(["--picture", picture.to_str().expect("UTF-8")]);
        let again = support::farside(flags);
        assert_eq!(again.code, Some(1), "{}", again.err);
        assert!(again.text().contains(&format!("replay: farside {replay}")), "{}", again.text());
        if again.text().contains("not linearizable") {
            let svg = std::fs::read_to_string(&picture).expect("the command wrote the file");
            assert!(svg.starts_with("<svg") && svg.contains("offender"), "{svg}");
            drawn += 1;
        }
    }
    assert!(drawn > 0, "nothing was drawn: {}", many.text());
}

/// The checks of `bench ycsb --verify` find mutants of real protocols, which two threads run in the node's process.
#[test]
fn verification_finds_mutants_without_a_simulator() {
    for (mutant, system, slot_cache, name) in
        [(CACHED_PUT_YIELDS, "prism-kv", 1000, "went back"), (ITEM_UNCHECKED, "pilaf", 0, "went missing")]
    {
        let driven = Driven { system, workload: "a", records: 100, each: 500, slot_cache };
        let right = drive(driven, &plain, &|| {});
        assert_eq!((right.errors, right.violations), (0, 0), "{:?}", right.failures);
        let broken = drive(driven, &plain, &|| Mutant::switch(Some(mutant)));
        println!("{mutant:?}: {} violations, such as {:?}", broken.violations, broken.failures.first());
        assert!(
            broken.failures.iter().any(|reported| reported.contains(name)),
            "{mutant:?} lives: {:?}",
            broken.failures
        );
    }
}

#[test]
fn the_correct_code_passes_the_same_seeds() {
    let setup = Setup::of(System::named("prism-kv").expect("a system"));
    for seed in 1..=10 {
        let judged = judge(&setup, seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}");
    }
}
