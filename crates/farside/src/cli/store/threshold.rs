//! `store create --put-threshold`: the length of a value from which clients write it themselves, given or measured.
//!
//! Chequer's paper saw the two modes of a put break even between 512 B and 2 KiB, depending on the machine.

use crate::cli::{Failure, human_bytes, parse_bytes};
use farside::local::Client;
use farside::{NewStore, Pool};
use farside_systems::kv::chequer::request::PART_MAX;
use std::time::{Duration, Instant};

/// The option's value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Threshold {
    /// Measure where writing becomes faster.
    Auto,
    /// This length in bytes.
    Bytes(u32),
}

/// Lengths of values that are measured.
const LENGTHS: [usize; 9] = [128, 256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10];
/// Number of rounds, in each of which both modes are measured, in turn.
const ROUNDS: usize = 15;
/// Largest number of puts of each mode in a round. It is less on a slow node, for example one whose log is synced for
/// each put.
const PUTS: u32 = 30;
/// Time in which a round of one mode ends, but for its last put.
const ROUND: Duration = Duration::from_millis(10);

/// Parses, for clap, a length in bytes or `auto`.
pub(super) fn parsed(text: &str) -> Result<Threshold, String> {
    if text == "auto" {
        return Ok(Threshold::Auto);
    }
    let bytes = parse_bytes(text).map_err(|error| format!("{error}; or give 'auto'"))?;
    let most = farside_systems::kv::chequer::layout::VALUE_MAX as u64 + 1;
    match u32::try_from(bytes) {
        Ok(small) if bytes <= most => Ok(Threshold::Bytes(small)),
        _ => Err(format!("'{text}' is more than the longest value, {}", human_bytes(most - 1))),
    }
}

/// Measures, in a small store of its own, from which length on a put is faster if the client writes the value. Reports
/// what it found. If that is so for no measured length, returns a length that no value has which one call can carry.
///
/// # Errors
/// The small store cannot be created, or a put failed.
pub(super) fn measure(pool: &Pool, new: &NewStore) -> Result<u32, Failure> {
    let name = format!("put-threshold-{}", std::process::id());
    let small = NewStore { name: name.clone(), quota: 4 << 20, items: Some(64), ..new.clone() };
    pool.create_store(&small).map_err(|error| {
        Failure::Error(format!("'--put-threshold auto' needs a store of 4 MiB for its measurement: {error}"))
    })?;
    let measured = measured(pool, &name);
    let dropped = pool.drop_store(&name);
    let times = measured?;
    dropped?;
    for (len, [call, write]) in &times {
        print_line!(
            "{:>8}: a put takes {:>8.1} us by one call, {:>8.1} us if the client writes the value",
            human_bytes(*len as u64),
            call.as_secs_f64() * 1e6,
            write.as_secs_f64() * 1e6
        );
    }
    let slower = times.iter().rposition(|(_, [call, write])| write >= call);
    let first = slower.map_or(0, |place| place + 1);
    match times.get(first) {
        Some((len, _)) => {
            print_line!("clients write values of {} and more", human_bytes(*len as u64));
            Ok(*len as u32)
        }
        None => {
            print_line!("clients write only values that one call cannot carry");
            Ok(PART_MAX as u32 + 1)
        }
    }
}

/// Returns the median time of a put of each length: by one call, and written by the client.
fn measured(pool: &Pool, store: &str) -> Result<Vec<(usize, [Duration; 2])>, Failure> {
    let mut clients = [usize::MAX, 0]
        .map(|threshold| Client::open(pool, store).map(|client| client.with_put_threshold(threshold)));
    let mut times = Vec::new();
    for len in LENGTHS {
        let value = vec![0x5a; len];
        let mut rounds = [const { Vec::new() }; 2];
        for _ in 0..ROUNDS {
            for (client, rounds) in clients.iter_mut().zip(&mut rounds) {
                let client = client.as_mut().map_err(|error| Failure::Error(error.to_string()))?;
                let begun = Instant::now();
                let mut puts = 0;
                while puts == 0 || puts < PUTS && begun.elapsed() < ROUND {
                    client.put(b"put-threshold", &value)?;
                    puts += 1;
                }
                rounds.push(begun.elapsed() / puts);
            }
        }
        times.push((
            len,
            rounds.map(|mut round: Vec<Duration>| {
                round.sort_unstable();
                round[ROUNDS / 2]
            }),
        ));
    }
    Ok(times)
}
