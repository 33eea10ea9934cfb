//! Systems in the simulator: a seed gives the same run everywhere, and no seed finds a violation.

mod digests;
mod seeds;
use farside_trial::{Carrier, Setup, System};

/// A line of a file of runs.
struct Run<'a> {
    setup: Setup,
    seed: u64,
    /// Text of the line after the seed.
    rest: &'a str,
}

/// Parses the runs of a file. A line is `system carrier seed REST`; a line that starts with `#` is a comment.
fn runs(text: &str) -> impl Iterator<Item = Run<'_>> {
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let &[system, carrier, seed, rest] = &words[..] else { panic!("'{line}' is not a run") };
        let system = System::named(system).expect("a system");
        let mut setup = Setup::of(system);
        setup.carrier = Carrier::named(carrier);
        assert!(setup.carrier.is_some() || carrier == "any", "'{carrier}' is neither a carrier nor 'any'");
        Run { setup, seed: seed.parse().expect("a seed"), rest }
    })
}
