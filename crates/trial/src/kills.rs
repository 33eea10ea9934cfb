//! Killing seeds: for each broken variant of a system one seed that shows it, and that the right code passes.
//!
//! A file has a line `MUTANT SEED` for each of a system's mutants; lines that begin with `#` are comments. Changes of
//! what trials draw move the seeds: `cargo xtask sim --mutants --write-kills` hunts for others.

/// The lines of a file.
///
/// # Errors
/// The first line that is not understood.
pub fn parse(text: &str) -> Result<Vec<(String, u64)>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let kill = |line: &str| {
        let (mutant, seed) = line.split_once(' ')?;
        Some((mutant.to_owned(), seed.trim().parse().ok()?))
    };
    lines.map(|line| kill(line).ok_or(format!("'{line}' is no line `MUTANT SEED`"))).collect()
}

/// Replays a system's kills, each with its mutant and without, on this thread: for each mutant, why it is dead, or what
/// is wrong with its line.
#[cfg(farside_mutants)]
pub fn replay(system: crate::System, kills: &[(String, u64)]) -> Vec<(String, Result<String, String>)> {
    use crate::judge::Verdict;
    use farside_remote::mutant::Mutant;
    let mutants = system.mutants();
    let strangers = kills.iter().filter(|(name, _)| mutants.iter().all(|mutant| mutant.name() != name));
    let mut replayed: Vec<_> = strangers
        .map(|(name, _)| (name.clone(), Err(format!("{} has no such mutant", system.name()))))
        .collect();
    for mutant in mutants {
        let told = match kills.iter().find(|(name, _)| name == mutant.name()) {
            None => Err("no line: find a seed with `cargo xtask sim --mutants`".to_owned()),
            Some((_, seed)) => {
                let setup = crate::Setup::of(system);
                Mutant::switch(Some(mutant));
                let broken = crate::judge::judge(&setup, *seed, true);
                Mutant::switch(None);
                let right = crate::judge::judge(&setup, *seed, true);
                // An undecided history kills nothing.
                match (broken.verdict == Verdict::Violated, right.is_bad()) {
                    (true, false) => Ok(format!("seed {seed}: {}", broken.reasons[0])),
                    (false, _) => Err(format!("lives through seed {seed}")),
                    (true, true) => Err(format!("the right code fails, too: {right}")),
                }
            }
        };
        replayed.push((mutant.name().to_owned(), told));
    }
    replayed
}
