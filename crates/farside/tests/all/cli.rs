//! The command line as strangers and scripts use it: what it prints, what it refuses, and how it ends.

#[path = "cli/admin.rs"]
mod admin;
#[path = "cli/comparison.rs"]
mod comparison;
#[path = "cli/demo.rs"]
mod demo;
#[path = "cli/doctor.rs"]
mod doctor;
#[path = "cli/figures.rs"]
mod figures;
#[path = "cli/files.rs"]
mod files;
#[path = "cli/keys.rs"]
mod keys;
#[path = "cli/manual.rs"]
mod manual;
#[path = "cli/measurements.rs"]
mod measurements;
#[path = "cli/nodes.rs"]
mod nodes;
#[path = "cli/perf.rs"]
mod perf;
#[path = "cli/refusals.rs"]
mod refusals;
#[path = "cli/settings.rs"]
mod settings;
#[path = "cli/shell.rs"]
mod shell;
#[path = "cli/simulation.rs"]
mod simulation;
#[path = "cli/stores.rs"]
mod stores;
mod support;
#[path = "cli/terminal.rs"]
mod terminal;
#[path = "cli/tls.rs"]
mod tls;
#[path = "cli/tokens.rs"]
mod tokens;
#[path = "cli/watch.rs"]
mod watch;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes of which any two places differ soon.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}
