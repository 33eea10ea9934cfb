//! The command line: its commands, their shared options, and the exit codes.
//!
//! Exit codes:
//! - 0: done.
//! - 1: the key is absent, a condition is not met, a simulated run is not good, or a protocol is broken.
//! - 2: any other failure. The reason and the remedy are on standard error.
//! - 3: a transaction may or may not have been committed.
//! - 141: the reader of standard output, such as `head`, has closed the pipe. Nothing is printed. A shell reports the
//!   same code for a process that SIGPIPE killed.

/// Prints a line to standard output. Returns `Failure::ClosedPipe` from the caller if the reader has closed the pipe.
macro_rules! print_line {
    ($($text:tt)*) => {{
        use std::io::Write;
        $crate::cli::written(writeln!(std::io::stdout(), $($text)*))?
    }};
}

/// Prints a line to standard error. Ignores a failed write.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _unread = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod bench;
mod child;
mod completions;
mod demo;
#[cfg(feature = "verbs")]
mod devices;
mod doctor;
mod figure;
mod files;
mod heal;
mod index;
mod info;
mod jsonl;
mod kv;
mod machine;
mod man;
mod node;
mod perf;
mod shell;
mod signals;
mod sim;
mod store;
mod tear;
mod terminal;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod tsv;
mod txn;
mod volume;
mod whatif;

use clap::{Parser, Subcommand};
use farside::config::{File, Settings, VARIABLES, parse_bytes, unknown_variables};
use farside_bench::workload::Workload;
use farside_remote::arena::Geometry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

/// Far memory that programs share: mutable, and accessed without involving the remote CPU.
#[derive(Parser)]
#[command(name = "farside", version, propagate_version = true, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
--pool and --store select the node and the store. The defaults are FARSIDE_POOL and FARSIDE_STORE, then 'pool' and \
'store' in the settings file. FARSIDE_CONFIG names the settings file; its default is ~/.config/farside/config.toml. \
If the node requires a token, --token-file, FARSIDE_TOKEN_FILE or 'token_file' names the file that holds it. For a \
node at tls://, --tls-ca, FARSIDE_TLS_CA or 'tls_ca' names the file of certificates to trust. 'farside info --config' \
shows all settings and their origins.

Exit codes: 0: done. 1: the store has no such key, the key has another version than the one given, or a simulated run \
is not known to be good. 2: any other failure; the reason and the remedy are on standard error. 3: a transaction may \
or may not have been committed. 'doctor' exits with 2 if something of this release does not work. An interrupted \
command exits with 128 + the signal number. A node that is stopped by a signal exits with 0.";

#[derive(Subcommand)]
enum Command {
    /// Start a memory node at the default socket, with a store 'default', and print commands to try next
    Up(node::Up),
    /// Start a memory node
    Serve(node::Serve),
    /// Create, list, rebuild and drop stores
    Store(store::Store),
    /// Create, list, read, write, check and drop volumes: arrays of bytes on several nodes
    Volume(volume::Volume),
    /// Complete creations and drops of stores that dead clients left unfinished, and repair stores
    Heal(heal::Heal),
    /// Create tokens, which grant clients rights to stores
    Token(token::Token),
    /// Create certificates, with which clients verify that they reach the right node
    #[cfg(feature = "tls")]
    Tls(tls::Tls),
    /// Put, get and delete keys; load and dump files
    Kv(kv::Kv),
    /// Put, get, delete and scan keys in order; load and dump files
    Index(index::Index),
    /// Run transactions: get, put and delete keys, several of them together
    Txn(txn::Txn),
    /// Run commands on a store (put, get, cas, scan, stat ...): at a prompt, from the arguments, or from a pipe
    Shell(shell::Shell),
    /// Measure a system, or the physical floor under it
    Bench(bench::Bench),
    /// Measure the latency or the rate of single reads, writes, atomics, chains and calls, as perftest does
    Perf(Box<perf::Perf>),
    /// Test a system in the simulator: many clients, injected faults, and a check of every response
    Sim(Box<sim::Sim>),
    /// Search a protocol for torn and stale reads: its layout and its steps as verbs, in a TOML file
    Tear(tear::Tear),
    /// Predict a figure of a paper, and compare it with the published one
    Figure(figure::Figure),
    /// Predict the performance of a system on other machines
    Whatif(whatif::WhatIf),
    /// Show a node, or the settings of this program and their origins
    Info(info::Info),
    /// Check which fabrics work on this machine, which of its settings stand in the way, and how to fix them
    Doctor(doctor::Doctor),
    /// Start a node, fill it, read from it while its process is stopped, and compare it with the floor
    Demo(demo::Demo),
    /// Print the completion script of a shell
    Completions(completions::Completions),
    /// Print a page of the manual, or write all pages to a folder
    Man(man::Man),
}

/// Options that select a node and how to connect to it.
#[derive(clap::Args, Clone, Debug)]
struct Target {
    /// URL of the node, such as shm:PATH; several nodes: URL,URL (a comma in a path: %2C), @FILE.toml or
    /// etcd://HOST:PORT/PREFIX [default: FARSIDE_POOL, the settings file, or the node of 'farside up']
    #[arg(long, value_name = "URL", global = true)]
    pool: Option<String>,
    /// File that holds this client's token, if the node requires one [default: FARSIDE_TOKEN_FILE, the settings file,
    /// or none]
    #[arg(long, value_name = "PATH", global = true)]
    token_file: Option<String>,
    /// PEM file of certificates to trust, for tls:// only: the node's own, or those of its issuers [default:
    /// FARSIDE_TLS_CA, the settings file, or none]
    #[arg(long, value_name = "PATH", global = true)]
    tls_ca: Option<String>,
    /// Send udp:// packets in the clear even with a token, to a node that was started with this flag too: anyone who
    /// sees the packets can read them, the token included, and forge them
    #[arg(long, global = true)]
    insecure_udp: bool,
}

impl Target {
    fn settings(&self, store: Option<&str>) -> Result<Settings, Failure> {
        let Target { pool, token_file, tls_ca, insecure_udp } = self.clone();
        let settings = Settings::resolve(File { pool, store: store.map(str::to_owned), token_file, tls_ca });
        Ok(Settings { insecure_udp, ..settings.map_err(Failure::Error)? })
    }

    fn connect(&self) -> Result<farside::Pool, Failure> {
        connect(&self.settings(None)?)
    }
}

/// Connects to the node that the settings select.
///
/// # Errors
/// The node cannot be reached, or its URL is `local:`, because such a node would run in this process and end with it.
fn connect(settings: &Settings) -> Result<farside::Pool, Failure> {
    let url = &settings.pool.value;
    if url.starts_with("local:") {
        return Err(Failure::Error(format!(
            "a node at '{url}' would run in this command's process and end with it: start one with 'farside up', and \
             name it with --pool shm:PATH"
        )));
    }
    let token = settings.token().map_err(Failure::Error)?;
    let tls_ca = settings.tls_ca().map_err(Failure::Error)?;
    let insecure_udp = settings.insecure_udp;
    Ok(farside::connect_with(url, &farside::Options { token, tls_ca, insecure_udp })?)
}

/// Options that select a store on a node.
#[derive(clap::Args, Clone, Debug)]
struct StoreTarget {
    #[command(flatten)]
    node: Target,
    /// Name of the store [default: FARSIDE_STORE, the settings file, or 'default']
    #[arg(long, value_name = "NAME", global = true)]
    store: Option<String>,
}

impl StoreTarget {
    fn settings(&self) -> Result<Settings, Failure> {
        self.node.settings(self.store.as_deref())
    }

    fn connect(&self) -> Result<(farside::Pool, String), Failure> {
        let settings = self.settings()?;
        Ok((connect(&settings)?, settings.store.value))
    }
}

/// Reason why a command does not succeed. Determines the exit code.
#[derive(Debug)]
enum Failure {
    /// The store has no such key.
    Absent,
    /// The condition of a conditional put is not met, or a simulated run is not known to be good. Holds the reason, for
    /// the error message.
    NotGood(String),
    /// A transaction may or may not have been committed. Holds the reason and the remedy.
    Unknown(String),
    /// The reader of standard output has closed the pipe.
    ClosedPipe,
    /// Any other failure. Holds the reason and the remedy.
    Error(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Error(error.to_string())
    }
}

type Done = Result<(), Failure>;

/// Converts the error of a write to standard output into a `Failure`.
fn written(result: io::Result<()>) -> Done {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::Error(format!(
            "could not write to standard output: {error}; free some space, or redirect the output"
        )),
    })
}

pub(crate) fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_max_level(tracing::Level::INFO)
        .log_internal_errors(false) // Otherwise the logger panics if standard error is closed.
        .init();
    allow_descriptors();
    for name in unknown_variables() {
        note!("farside: warning: unknown variable {name}; did you mean one of {}?", VARIABLES.join(", "));
    }
    let done = match Cli::parse().command {
        Command::Up(up) => up.run(),
        Command::Serve(serve) => serve.run(),
        Command::Store(store) => store.run(),
        Command::Volume(volume) => volume.run(),
        Command::Heal(heal) => heal.run(),
        Command::Token(token) => token.run(),
        #[cfg(feature = "tls")]
        Command::Tls(tls) => tls.run(),
        Command::Kv(kv) => kv.run(),
        Command::Index(index) => index.run(),
        Command::Txn(txn) => txn.run(),
        Command::Shell(shell) => shell.run(),
        Command::Bench(bench) => bench.run(),
        Command::Perf(perf) => perf.run(),
        Command::Sim(sim) => sim.run(),
        Command::Tear(tear) => tear.run(),
        Command::Figure(figure) => figure.run(),
        Command::Whatif(whatif) => whatif.run(),
        Command::Info(info) => info.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Demo(demo) => demo.run(),
        Command::Completions(completions) => completions.run(),
        Command::Man(man) => man.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Absent) => {
            note!("farside: absent: the store has no such key");
            ExitCode::from(1)
        }
        Err(Failure::NotGood(reason)) => {
            note!("farside: {reason}");
            ExitCode::from(1)
        }
        Err(Failure::Unknown(reason)) => {
            note!("farside: {reason}");
            ExitCode::from(3)
        }
        Err(Failure::ClosedPipe) => ExitCode::from(141),
        Err(Failure::Error(reason)) => {
            note!("farside: {reason}");
            ExitCode::from(2)
        }
    }
}

/// Raises this process's limit on open file descriptors to the hard limit, because each connection needs several
/// descriptors at the client and at the node.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // If the limit is still too low, the call that runs out of descriptors reports it.
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Fails, with `remedy` in the error, if this machine has fewer than `bytes` bytes of memory available.
///
/// Without this check, a shortage would show only later: the system allocates pages on first write, and its OOM killer
/// then ends a process.
fn check_available(bytes: u64, remedy: &str) -> Done {
    match available_memory() {
        Some(available) if bytes > available => Err(Failure::Error(format!(
            "{} of memory are needed and this machine has {} available: {remedy}",
            human_bytes(bytes),
            human_bytes(available)
        ))),
        _ => Ok(()),
    }
}

/// Bytes of memory available to new processes, or `None` if the system does not report it.
fn available_memory() -> Option<u64> {
    machine::available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// Parses, for clap, the number of bytes that a node lends.
fn memory(text: &str) -> Result<u64, String> {
    parse_bytes(text)
        .ok()
        .filter(|&bytes| Geometry::of(bytes).is_some())
        .ok_or_else(|| format!("a node cannot lend '{text}': give a multiple of 1 MiB from 8MiB to 1TiB"))
}

/// Parses, for clap, the size in bytes of a benchmark's values.
fn value_size(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    let fits = u32::try_from(bytes).ok().filter(|bytes| (1..=farside::VALUE_MAX as u32).contains(bytes));
    fits.ok_or_else(|| format!("'{text}' is not a size of values: give 1 to 16777216 bytes (16MiB)"))
}

/// Parses, for clap, the quota of a store in bytes.
fn quota(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a store needs memory: give it 64MiB or so".into()),
        bytes if bytes % (1 << 20) != 0 => {
            Err(format!("'{text}' is not a multiple of 1 MiB: give 64MiB or so"))
        }
        bytes => Ok(bytes),
    }
}

/// Parses, for clap, a duration such as `500ms`, `10s` or `2m`; a number alone is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "us" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" | "" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let seconds = digits.parse::<f64>().ok().zip(unit).map(|(number, unit)| number * unit);
    seconds.filter(|seconds| (0.0..=1e9).contains(seconds)).map(Duration::from_secs_f64).ok_or_else(|| {
        format!("'{text}' is not a duration: write it like 500ms, 10s or 2m; a number alone is seconds")
    })
}

/// Warns of properties in a workload's file that have no effect.
fn warn_of_unused(workload: &Workload) {
    for unused in &workload.unused {
        note!("farside: {}:{}: property '{}' has no effect", workload.name, unused.line, unused.key);
    }
}

/// Formats a number of bytes with a binary unit, such as `1.5 MiB`.
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

/// Returns a progress bar on standard error, with the label `what`. If standard error is not a terminal, prints the
/// label once and hides the bar. If `quiet`, prints nothing.
fn progress(what: &'static str, total: u64, quiet: bool) -> indicatif::ProgressBar {
    use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
    if quiet {
        return ProgressBar::hidden();
    }
    if !io::stderr().is_terminal() {
        note!("{what} ...");
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{msg:>24} [{bar:40}] {human_pos}/{human_len} {rate} {eta}");
    let rate = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        // A whole number is precise enough for a progress bar.
        let _cannot_fail = write!(out, "{}/s", HumanCount(state.per_sec() as u64));
    };
    let style = style.expect("the template is well-formed").progress_chars("=> ").with_key("rate", rate);
    bar.with_style(style).with_message(what)
}

#[cfg(test)]
#[path = "../../../remote/tests/support/fuzz.rs"]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::fuzz::{self, Change, Executions};
    use super::*;

    #[test]
    fn fuzz_durations() {
        let executions = Executions::of("durations");
        let seeds = [
            "500ms",
            "10s",
            "2m",
            "1h",
            "1e9",
            "0.1",
            "-0",
            "inf",
            "NaN",
            "1e-400h",
            "1..300",
            "loss,one-way",
        ];
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let mut bytes = seeds[usize::from(seed) % seeds.len()].as_bytes().to_vec();
            fuzz::change(&mut bytes, &changes);
            let text = String::from_utf8_lossy(&bytes);
            match duration(&text) {
                Ok(time) => assert!(time <= Duration::from_secs(1_000_000_000)),
                Err(reason) => assert!(reason.contains("write it like")),
            }
            let _fits_or_not = (memory(&text), quota(&text), value_size(&text));
            let _fits_or_not = (perf::size(&text), perf::lasting(&text));
            let _known_or_not = (sim::seeds(&text).is_ok(), sim::faults(&text).is_ok());
        });
    }
}
