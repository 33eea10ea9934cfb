//! Mutants of the trials that judge themselves, without a history: each has a recorded seed that exposes it.

use farside_remote::mutant::Mutant;
use farside_trial::{judge, kills};

/// Seeds that are tried for a mutant without a recorded seed.
const HUNTED: u64 = 600;

/// Asserts that each mutant is exposed by its seed in `recorded`, the text of the file `kills/FILE`, and that the
/// correct code passes that seed. `run` runs the trial of a seed and returns the violations.
#[track_caller]
pub(crate) fn by_their_seeds<'a>(
    file: &str,
    recorded: &str,
    mutants: impl IntoIterator<Item = &'a Mutant>,
    run: impl Fn(u64) -> Vec<String>,
) {
    let recorded = kills::parse(recorded).expect("valid lines");
    let mut wrong = Vec::new();
    for &mutant in mutants {
        let seed = recorded.iter().find(|(name, _)| name == mutant.name()).map(|(_, seed)| *seed);
        let mut seeds = seed.map_or(0..HUNTED, |seed| seed..seed + 1);
        Mutant::switch(Some(mutant));
        // A panic may be the consequence of the mutant or of the trial's own code: it counts for nothing.
        let killed =
            seeds.find(|seed| judge::caught(|| run(*seed)).is_ok_and(|violated| !violated.is_empty()));
        Mutant::switch(None);
        match killed {
            None => wrong.push(format!("{mutant:?} survives")),
            Some(found) if Some(found) != seed => {
                wrong.push(format!("write '{mutant:?} {found}' to kills/{file}"));
            }
            Some(seed) if !run(seed).is_empty() => {
                wrong.push(format!("{mutant:?}: the correct code fails seed {seed}, too"));
            }
            Some(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
