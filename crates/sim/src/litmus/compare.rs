//! Holds whatever runs litmus programs to what they may come to.

use std::collections::BTreeSet;
use std::fmt;

use super::program::{Outcome, Program};

/// How many seeds a program is run with.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// So many in any case: what is forbidden may be rarer than all that is allowed.
    pub at_least: u64,
    /// No more than so many, if something allowed is still missing.
    pub at_most: u64,
}

/// What came of a program, of what may come of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// How many seeds were run.
    pub seeds: u64,
    /// How many allowed outcomes there are.
    pub allowed: usize,
    /// Those that no seed came to.
    pub unreached: BTreeSet<Outcome>,
}

/// A run came to what is not allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// The shape that the program belongs to.
    pub name: String,
    /// The program's text.
    pub program: String,
    /// The outcome's text.
    pub outcome: String,
    /// The seed that was run.
    pub seed: u64,
    /// How many outcomes are allowed.
    pub allowed: usize,
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Forbidden { name, program, outcome, seed, allowed } = self;
        write!(
            f,
            "forbidden outcome of '{name}', by seed {seed}\n  {program}\n  {outcome}\n  ({allowed} are allowed)"
        )
    }
}

impl std::error::Error for Forbidden {}

/// Runs a program from seed 0 on until all that is allowed has come of it, within these bounds.
///
/// # Errors
/// [`Forbidden`], at once.
pub fn compare(
    program: &Program,
    relaxed: bool,
    seeds: Seeds,
    mut run: impl FnMut(&Program, u64) -> Outcome,
) -> Result<Coverage, Forbidden> {
    let allowed = program.allowed(relaxed);
    let mut unreached = allowed.clone();
    let mut seed = 0;
    while seed < seeds.at_least || seed < seeds.at_most && !unreached.is_empty() {
        let outcome = run(program, seed);
        if !allowed.contains(&outcome) {
            return Err(Forbidden {
                name: program.name().into(),
                program: program.to_string(),
                outcome: program.text_of(&outcome),
                seed,
                allowed: allowed.len(),
            });
        }
        unreached.remove(&outcome);
        seed += 1;
    }
    Ok(Coverage { seeds: seed, allowed: allowed.len(), unreached })
}

/// What came of many programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// How many programs were run.
    pub programs: usize,
    /// How many seeds in all.
    pub seeds: u64,
    /// How many allowed outcomes there are in all.
    pub allowed: usize,
    /// Text of each allowed outcome that was never reached, after its program's.
    pub unreached: Vec<(String, String)>,
}

/// [`compare()`] for each of these programs.
///
/// # Errors
/// [`Forbidden`], at once.
pub fn compare_all(
    programs: &[Program],
    relaxed: bool,
    seeds: Seeds,
    mut run: impl FnMut(&Program, u64) -> Outcome,
) -> Result<Summary, Forbidden> {
    let mut summary = Summary::default();
    for program in programs {
        let Coverage { seeds, allowed, unreached } = compare(program, relaxed, seeds, &mut run)?;
        summary.programs += 1;
        summary.seeds += seeds;
        summary.allowed += allowed;
        let texts = unreached.iter().map(|outcome| (program.to_string(), program.text_of(outcome)));
        summary.unreached.extend(texts);
    }
    Ok(summary)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { programs, seeds, allowed, unreached } = self;
        write!(
            f,
            "{programs} programs, {seeds} runs: {} of {allowed} allowed outcomes reached",
            allowed - unreached.len()
        )?;
        let mut before = "";
        for (program, outcome) in unreached {
            if program != before {
                write!(f, "\n  {program}")?;
                before = program;
            }
            write!(f, "\n    never {outcome}")?;
        }
        Ok(())
    }
}
