//! Broken variants of protocols, sessions and node: the simulator must find each, with the workload and faults that
//! the right code passes.

use crate::support;
use crate::support::driven::{Driven, drive, plain};
use farside_fabrics::mutants::OLD_SESSION_LIVES;
use farside_remote::mutant::Mutant;
use farside_systems::kv::pilaf::mutants::{ENTRY_UNCHECKED, ITEM_UNCHECKED};
use farside_systems::kv::prism_kv::mutants::{CACHED_PUT_YIELDS, FROZEN_IS_COMPARED};
use farside_trial::judge::{Verdict, judge};
use farside_trial::{Setup, System};
use std::sync::Mutex;

/// A variant is dead once one of so many seeds is not good.
const SEEDS: u64 = 120;

/// Those that take more seeds than every change can wait for, and are left to `cargo xtask sim --mutants`.
const LATER: [(Mutant, &str); 3] = [
    (FROZEN_IS_COMPARED, "the node must stand still within three exchanges, and a put come then"),
    (ENTRY_UNCHECKED, "a get must come within an entry that is written, of a larger item than before"),
    (OLD_SESSION_LIVES, "a chain must come late, and change what the next session of that client reads"),
];

#[test]
fn the_simulator_finds_every_broken_variant() {
    for (mutant, why) in LATER {
        println!("{mutant:?}: left to `cargo xtask sim --mutants`, for {why}");
    }
    let is_later = |mutant: &Mutant| LATER.iter().any(|(later, _)| later == mutant);
    let all: Vec<(System, Mutant)> = System::all()
        .flat_map(|system| system.mutants().into_iter().map(move |mutant| (system, mutant)))
        .filter(|(_, mutant)| !is_later(mutant))
        .collect();
    let (left, alive) = (Mutex::new(all.iter()), Mutex::new(Vec::new()));
    let next = || left.lock().expect("nobody panics with it").next();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(system, mutant)) = next() {
                    if !is_found(system, mutant) {
                        alive.lock().expect("nobody panics with it").push(mutant);
                    }
                }
            });
        }
    });
    let alive = alive.into_inner().expect("nobody panicked with it");
    println!("{} of {} mutants were killed", all.len() - alive.len(), all.len());
    assert!(alive.is_empty(), "these live: {alive:?}");
}

/// Whether one of the seeds shows it. It is wrong on this thread alone.
fn is_found(system: System, mutant: Mutant) -> bool {
    Mutant::switch(Some(mutant));
    let setup = Setup::of(system);
    let killed = (1..=SEEDS).map(|seed| judge(&setup, seed, true)).find(|judged| judged.is_bad());
    Mutant::switch(None);
    if let Some(judged) = &killed {
        let (system, seed) = (system.name(), judged.seed);
        println!("{mutant:?}: killed by seed {seed} of {system}, for {}", judged.reasons[0]);
    }
    killed.is_some()
}

/// What is wrong is told, drawn, and run again by the command that was printed.
#[test]
fn a_violation_is_shown_and_its_replay_shows_it_again() {
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
            let svg = std::fs::read_to_string(&picture).expect("it was written");
            assert!(svg.starts_with("<svg") && svg.contains("offender"), "{svg}");
            drawn += 1;
        }
    }
    assert!(drawn > 0, "nothing was drawn: {}", many.text());
}

/// What `bench ycsb --verify` looks for, in protocols that really run, by two threads of a node's own process.
#[test]
fn verification_finds_broken_variants_without_a_simulator() {
    for (mutant, system, slot_cache, name) in
        [(CACHED_PUT_YIELDS, "prism-kv", 1000, "went back"), (ITEM_UNCHECKED, "pilaf", 0, "went missing")]
    {
        let driven = Driven { system, workload: "a", records: 100, each: 4000, slot_cache };
        let right = drive(driven, &plain, &|| {});
        assert_eq!((right.errors, right.violations), (0, 0), "{:?}", right.told);
        let broken = drive(driven, &plain, &|| Mutant::switch(Some(mutant)));
        println!("{mutant:?}: {} violations, such as {:?}", broken.violations, broken.told.first());
        assert!(broken.told.iter().any(|told| told.contains(name)), "{mutant:?} lives: {:?}", broken.told);
    }
}

#[test]
fn the_right_code_passes_the_same_seeds() {
    let setup = Setup::of(System::named("prism-kv").expect("it can be tried"));
    for seed in 1..=10 {
        let judged = judge(&setup, seed, true);
        assert_eq!(judged.verdict, Verdict::Good, "{judged}");
    }
}
