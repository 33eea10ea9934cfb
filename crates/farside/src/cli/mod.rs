//! The commands: what can be typed, and what becomes of an error.
//!
//! Exit codes: 0 done, 1 the key is absent, 2 anything else; the reason and the remedy are on standard error.

mod bench;
mod demo;
mod info;
mod kv;
mod node;
mod store;
mod tsv;

use clap::{Parser, Subcommand};
use farside::config::{Settings, parse_bytes, unknown_variables};
use std::process::ExitCode;
use std::time::Duration;

/// Far memory that programs share: mutable, and reached without waking the far CPU.
#[derive(Parser)]
#[command(name = "farside", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a memory node with a store 'default' where clients look for it, and show what to try next
    Up(node::Up),
    /// Start a memory node
    Serve(node::Serve),
    /// Make, list and drop stores
    Store(store::Store),
    /// Put, get and delete keys; load and dump files
    Kv(kv::Kv),
    /// Measure a system, or the physical floor under it
    Bench(bench::Bench),
    /// Show a node, or where this program's settings come from
    Info(info::Info),
    /// Start a node, fill it, read it while the node's process is stopped, and hold it to the floor
    Demo(demo::Demo),
}

/// Which node and store a command is about.
#[derive(clap::Args, Clone, Debug)]
struct Target {
    /// The node's url, such as shm:PATH [default: FARSIDE_POOL, the settings file, or where 'farside up' serves]
    #[arg(long, value_name = "URL", global = true)]
    pool: Option<String>,
    /// The store [default: FARSIDE_STORE, the settings file, or 'default']
    #[arg(long, value_name = "NAME", global = true)]
    store: Option<String>,
}

impl Target {
    fn settings(&self) -> Result<Settings, Failure> {
        Settings::resolve(self.pool.as_deref(), self.store.as_deref()).map_err(Failure::Told)
    }

    fn connect(&self) -> Result<(farside::Pool, String), Failure> {
        let settings = self.settings()?;
        Ok((farside::connect(&settings.pool.value)?, settings.store.value))
    }
}

/// How a command ends that does not succeed.
#[derive(Debug)]
enum Failure {
    /// There is no such key.
    Absent,
    /// What is wrong and what to do.
    Told(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Told(error.to_string())
    }
}

type Done = Result<(), Failure>;

pub(crate) fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_max_level(tracing::Level::INFO)
        .init();
    for name in unknown_variables() {
        eprintln!(
            "farside: warning: the variable {name} means nothing; did you mean one of {:?}?",
            farside::config::VARIABLES
        );
    }
    let done = match Cli::parse().command {
        Command::Up(up) => up.run(),
        Command::Serve(serve) => serve.run(),
        Command::Store(store) => store.run(),
        Command::Kv(kv) => kv.run(),
        Command::Bench(bench) => bench.run(),
        Command::Info(info) => info.run(),
        Command::Demo(demo) => demo.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Absent) => {
            eprintln!("farside: absent: the store has no such key");
            ExitCode::from(1)
        }
        Err(Failure::Told(reason)) => {
            eprintln!("farside: {reason}");
            ExitCode::from(2)
        }
    }
}

/// For clap: a number of bytes.
fn bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text)
}

/// For clap: a length of time, such as `500ms`, `10s` or `2m`.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Some(1e-3),
        "s" | "" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let seconds = digits.parse::<f64>().ok().zip(unit).map(|(number, unit)| number * unit);
    seconds
        .filter(|seconds| (0.0..=1e9).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("'{text}' is no length of time: write it like 500ms, 10s or 2m"))
}

/// For people: bytes with a unit.
fn human_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut amount = bytes as f64;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < units.len() {
        amount /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{amount:.1} {}", units[unit]) }
}

/// A progress bar on a terminal; a line now and then elsewhere; nothing if `quiet`.
fn progress(what: &'static str, total: u64, quiet: bool) -> indicatif::ProgressBar {
    use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
    use std::io::IsTerminal;
    if quiet {
        return ProgressBar::hidden();
    }
    if !std::io::stderr().is_terminal() {
        eprintln!("{what} ...");
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{msg:>24} [{bar:40}] {human_pos}/{human_len} {per_sec} {eta}");
    bar.with_style(style.expect("the template is well-formed").progress_chars("=> ")).with_message(what)
}
