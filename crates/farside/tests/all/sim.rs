//! Systems in the simulator: the same seed is the same run everywhere, and no seed finds anything.

mod digests;
mod seeds;
use farside_trial::{Carrier, Setup, System};

/// A line of a file of runs.
struct Run<'a> {
    setup: Setup,
    seed: u64,
    /// What the line says beside that.
    rest: &'a str,
}

/// The runs of a file, whose lines are `system carrier seed` and something more. A `#` begins a comment.
fn runs(text: &str) -> impl Iterator<Item = Run<'_>> {
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let &[system, carrier, seed, rest] = &words[..] else { panic!("'{line}' is no run") };
        let system = System::named(system).expect("a system");
        let mut setup = Setup::of(system);
        setup.carrier = Carrier::named(carrier);
        assert!(setup.carrier.is_some() || carrier == "any", "'{carrier}' is no carrier, and not 'any'");
        Run { setup, seed: seed.parse().expect("a seed"), rest }
    })
}
