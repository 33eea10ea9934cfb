//! The command line as people and scripts use it: its output, its refusals and its exit codes.

mod admin;
mod comparison;
mod demo;
mod doctor;
mod etcd;
mod figures;
mod files;
mod heal;
mod indexes;
mod keys;
mod manual;
mod measurements;
mod nodes;
mod perf;
mod refusals;
mod settings;
mod shell;
mod simulation;
mod stores;
mod tear;
mod terminal;
mod tls;
mod tokens;
mod transactions;
mod volumes;
mod watch;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Returns pseudo-random bytes, so that a test notices if bytes of a value are shifted or swapped.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}
