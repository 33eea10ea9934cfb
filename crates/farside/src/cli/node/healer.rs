//! `serve --heal`: heals a pool's stores at an interval, by a thread of the node's process that runs as a client.
//!
//! Invariant: the node serves on, whatever the healer meets.

use crate::cli::heal::{Line, Rounds};
use crate::cli::{Failure, connect};
use farside::config::{File, Settings};
use std::time::Duration;

/// Starts the thread, which ends with the process.
///
/// # Errors
/// The pool is not named, or a setting is invalid.
pub(super) fn start(pool: Option<String>, every: Duration) -> Result<(), Failure> {
    let settings = Settings::resolve(File { pool, ..File::default() }).map_err(Failure::Error)?;
    if settings.pool.origin == "built in" {
        return Err(Failure::Error(
            "--heal needs the pool whose stores it heals: name all of its nodes with --pool, FARSIDE_POOL or 'pool' in \
             the settings file"
                .into(),
        ));
    }
    std::thread::Builder::new().name("heal".into()).spawn(move || run(&settings, every))?;
    Ok(())
}

fn run(settings: &Settings, every: Duration) {
    let mut rounds = Rounds::default();
    loop {
        // Connects anew for each round, since the list of nodes may have changed.
        let round = connect(settings).and_then(|pool| rounds.next(&pool, None, show).map(drop));
        if let Err(Failure::Error(reason)) = round {
            rounds.fail(&reason, |reason| tracing::warn!("heal: {reason}"));
        }
        std::thread::sleep(every);
    }
}

fn show(line: &Line) -> Result<(), Failure> {
    if line.is_problem {
        tracing::warn!("heal: {}", line.text);
    } else {
        tracing::info!("heal: {}", line.text);
    }
    Ok(())
}
