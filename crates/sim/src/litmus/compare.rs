//! Runs litmus programs on a machine and checks that it reaches only allowed outcomes.

use std::collections::BTreeSet;
use std::fmt;

use super::program::{Outcome, Program};

/// Number of seeds with which each program runs.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// Minimum number of seeds. A minimum is needed because a forbidden outcome may be rarer than all allowed
    /// outcomes.
    pub at_least: u64,
    /// Maximum number of seeds, for a program with an allowed outcome that no seed has reached yet.
    pub at_most: u64,
}

/// Result of running a program on a machine: the allowed outcomes that the machine has not reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Number of seeds with which the program ran.
    pub seeds: u64,
    /// Number of allowed outcomes of the program.
    pub allowed: usize,
    /// Allowed outcomes that no seed reached.
    pub unreached: BTreeSet<Outcome>,
}

/// A run with a forbidden outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// Name of the program's shape.
    pub name: String,
    /// Text of the program.
    pub program: String,
    /// Text of the forbidden outcome.
    pub outcome: String,
    /// Seed of the run with the forbidden outcome.
    pub seed: u64,
    /// Number of allowed outcomes of the program.
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

/// Runs a program with seeds from 0 until all allowed outcomes are reached, within the bounds of `seeds`.
///
/// # Errors
/// Returns [`Forbidden`] at the first forbidden outcome.
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

/// Result of comparing many programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of programs that ran.
    pub programs: usize,
    /// Number of seeds of all programs in total.
    pub seeds: u64,
    /// Number of allowed outcomes of all programs in total.
    pub allowed: usize,
    /// Each allowed outcome that no seed reached: the text of its program and the text of the outcome.
    pub unreached: Vec<(String, String)>,
}

/// Runs [`compare()`] for each program, and adds up the results.
///
/// # Errors
/// Returns [`Forbidden`] at the first forbidden outcome.
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
