//! Systems in the simulator: a seed gives the same run everywhere, and no seed finds a violation.

mod digests;
pub(crate) mod seeds;
use farside_trial::{Carrier, Setup, System};

/// A line of a file of runs.
struct Run<'a> {
    setup: Setup,
    seed: u64,
    /// Text of the line after the seed.
    rest: &'a str,
}

/// Parses the runs of a file. A line is `system carrier seed REST`, or `system:nodes carrier seed REST`; a line that
/// starts with `#` is a comment.
fn runs(text: &str) -> impl Iterator<Item = Run<'_>> {
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let &[system, carrier, seed, rest] = &words[..] else { panic!("'{line}' is not a run") };
        let (system, nodes) =
            system.split_once(':').map_or((system, None), |(system, of)| (system, Some(of)));
        let mut setup = Setup::of(System::named(system).expect("a system"));
        setup.nodes = nodes.map(|nodes| nodes.parse().expect("a number of nodes"));
        setup.carrier = Carrier::named(carrier);
        assert!(setup.carrier.is_some() || carrier == "any", "'{carrier}' is neither a carrier nor 'any'");
        Run { setup, seed: seed.parse().expect("a seed"), rest }
    })
}
