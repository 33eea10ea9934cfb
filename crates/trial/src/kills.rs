//! Killing seeds. Each system has a file with one killing seed for each of its mutants: a seed whose trial exposes the
//! mutant and that the correct code passes.
//!
//! Each line is `MUTANT SEED`; lines that begin with `#` are comments. A change that alters the order of a trial's
//! draws can make seeds useless: `cargo xtask sim --mutants --write-kills` searches for new ones.

/// Parses the lines of a kills file. Returns pairs of a mutant's name and a seed.
///
/// # Errors
/// Returns the first invalid line.
pub fn parse(text: &str) -> Result<Vec<(String, u64)>, String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let kill = |line: &str| {
        let (mutant, seed) = line.split_once(' ')?;
        Some((mutant.to_owned(), seed.trim().parse().ok()?))
    };
    lines.map(|line| kill(line).ok_or(format!("invalid line '{line}': write `MUTANT SEED`"))).collect()
}

/// Replays a system's kills on this thread, each with its mutant, and each seed with the correct code. Returns for each
/// mutant's name the reason why the mutant was killed, or, as the error, the reason why the mutant's entry in `kills`
/// is wrong.
#[cfg(farside_mutants)]
pub fn replay(system: crate::System, kills: &[(String, u64)]) -> Vec<(String, Result<String, String>)> {
    use crate::judge::Verdict;
    use farside_remote::mutant::Mutant;
    use std::collections::BTreeMap;
    let mutants = system.mutants();
    let strangers = kills.iter().filter(|(name, _)| mutants.iter().all(|mutant| mutant.name() != name));
    // Mutants share seeds.
    let mut right = BTreeMap::new();
    let mut replayed: Vec<_> = strangers
        .map(|(name, _)| (name.clone(), Err(format!("unknown mutant of {}: remove its line", system.name()))))
        .collect();
    for mutant in mutants {
        let reported = match kills.iter().find(|(name, _)| name == mutant.name()) {
            None => Err("no seed listed: find one with `cargo xtask sim --mutants --write-kills`".to_owned()),
            Some((_, seed)) => {
                let setup = crate::Setup::of(system);
                Mutant::switch(Some(mutant));
                let broken = crate::judge::judge(&setup, *seed, true);
                Mutant::switch(None);
                let right = right.entry(*seed).or_insert_with(|| crate::judge::judge(&setup, *seed, true));
                // An undecided history does not kill a mutant.
                match (broken.verdict == Verdict::Violated, right.is_bad()) {
                    (true, false) => Ok(format!("seed {seed}: {}", broken.reasons[0])),
                    (false, _) => Err(format!("survives seed {seed}")),
                    (true, true) => Err(format!("the correct code fails, too: {right}")),
                }
            }
        };
        replayed.push((mutant.name().to_owned(), reported));
    }
    replayed
}
