//! The commands: what can be typed, and what becomes of an error.
//!
//! Exit codes: 0 done, 1 the key is absent, a condition is not met or a simulated run is not good, 2 anything else; the
//! reason and the remedy are on standard error. Where whoever read standard output has gone, as `head` does, a command
//! ends quietly with 141, as the shell would have it.

/// A line on standard output; ends the command where nobody reads it.
macro_rules! tell {
    ($($text:tt)*) => {{
        use std::io::Write;
        $crate::cli::written(writeln!(std::io::stdout(), $($text)*))?
    }};
}

/// A line on standard error, if anybody reads it.
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
mod doctor;
mod figure;
mod files;
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
mod terminal;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod tsv;
mod whatif;

use clap::{Parser, Subcommand};
use farside::config::{File, Settings, VARIABLES, parse_bytes, unknown_variables};
use farside_bench::workload::Workload;
use farside_remote::arena::Geometry;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

/// Far memory that programs share: mutable, and reached without waking the far CPU.
#[derive(Parser)]
#[command(name = "farside", version, propagate_version = true, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Which node and which store is told by --pool and --store, else by FARSIDE_POOL and FARSIDE_STORE, else by 'pool' and \
'store' in the file that FARSIDE_CONFIG names or in ~/.config/farside/config.toml; 'farside info --config' shows it. \
Where a node asks for a token, the file that holds it is told likewise: --token-file, FARSIDE_TOKEN_FILE, \
'token_file'. So are the certificates that a node at tls:// is known by: --tls-ca, FARSIDE_TLS_CA, 'tls_ca'.

Exit codes: 0 done, 1 the store has no such key, or another version of it than was asked for, or a simulated run is \
not known to be good, 2 anything else, of which the reason and the remedy are on standard error; so ends 'doctor' \
where something of this release does not work. What a signal breaks off ends with 128 more than its number, a node \
that is told to end so with 0.";

#[derive(Subcommand)]
enum Command {
    /// Start a memory node with a store 'default' where clients look for it, and show what to try next
    Up(node::Up),
    /// Start a memory node
    Serve(node::Serve),
    /// Make, list and drop stores
    Store(store::Store),
    /// Make tokens, by which a node knows who may do what
    Token(token::Token),
    /// Make certificates, by which clients know that a node is the one that they mean
    #[cfg(feature = "tls")]
    Tls(tls::Tls),
    /// Put, get and delete keys; load and dump files
    Kv(kv::Kv),
    /// Type commands at a store: put, get, cas, scan, stat ...; or one as arguments, or many by a pipe
    Shell(shell::Shell),
    /// Measure a system, or the physical floor under it
    Bench(bench::Bench),
    /// Time reads, writes, atomics, chains and calls one by one, or count how many there are a second, as perftest does
    Perf(Box<perf::Perf>),
    /// Try a system in the simulator: many clients, whatever can go wrong, and a check of what they saw
    Sim(Box<sim::Sim>),
    /// Predict a paper's figure, and hold it to what was published
    Figure(figure::Figure),
    /// Predict what a system would do on other machines
    Whatif(whatif::WhatIf),
    /// Show a node, or where this program's settings come from
    Info(info::Info),
    /// Tell which fabrics work here, what of this machine stands in the way, and what to do about it
    Doctor(doctor::Doctor),
    /// Start a node, fill it, read it while the node's process is stopped, and hold it to the floor
    Demo(demo::Demo),
    /// Write what a shell is to propose for half-typed commands
    Completions(completions::Completions),
    /// Write the manual: one page, or all of them into a folder
    Man(man::Man),
}

/// Which node a command is about.
#[derive(clap::Args, Clone, Debug)]
struct Target {
    /// The node's url, such as shm:PATH [default: FARSIDE_POOL, the settings file, or where 'farside up' serves]
    #[arg(long, value_name = "URL", global = true)]
    pool: Option<String>,
    /// A file with the token that the node is shown, if it asks for one [default: FARSIDE_TOKEN_FILE, the settings
    /// file, or none]
    #[arg(long, value_name = "PATH", global = true)]
    token_file: Option<String>,
    /// A file of certificates in PEM, for tls:// alone: the node's own, or of those who sign such [default:
    /// FARSIDE_TLS_CA, the settings file, or none]
    #[arg(long, value_name = "PATH", global = true)]
    tls_ca: Option<String>,
    /// Send udp:// packets in the clear although there is a token, to a node that was started so: whoever sees them can
    /// read them, the token included, and forge them
    #[arg(long, global = true)]
    insecure_udp: bool,
}

impl Target {
    fn settings(&self, store: Option<&str>) -> Result<Settings, Failure> {
        let Target { pool, token_file, tls_ca, insecure_udp } = self.clone();
        let settings = Settings::resolve(File { pool, store: store.map(str::to_owned), token_file, tls_ca });
        Ok(Settings { insecure_udp, ..settings.map_err(Failure::Told)? })
    }

    fn connect(&self) -> Result<farside::Pool, Failure> {
        connect(&self.settings(None)?)
    }
}

/// The node of those settings, which is not one that this command would take along when it ends.
fn connect(settings: &Settings) -> Result<farside::Pool, Failure> {
    let url = &settings.pool.value;
    if url.starts_with("local:") {
        return Err(Failure::Told(format!(
            "a node at '{url}' would be in this command's process, and end with it: start one with 'farside up', and \
             name it by --pool shm:PATH"
        )));
    }
    let token = settings.token().map_err(Failure::Told)?;
    let tls_ca = settings.tls_ca().map_err(Failure::Told)?;
    let insecure_udp = settings.insecure_udp;
    Ok(farside::connect_with(url, &farside::Options { token, tls_ca, insecure_udp })?)
}

/// Which store on which node a command is about.
#[derive(clap::Args, Clone, Debug)]
struct StoreTarget {
    #[command(flatten)]
    node: Target,
    /// The store [default: FARSIDE_STORE, the settings file, or 'default']
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

/// How a command ends that does not succeed.
#[derive(Debug)]
enum Failure {
    /// There is no such key.
    Absent,
    /// A conditional put has found something else, or a simulated run is not known to be good; and why.
    NotGood(String),
    /// Whoever read standard output has gone.
    Unread,
    /// What is wrong and what to do.
    Told(String),
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Told(error.to_string())
    }
}

type Done = Result<(), Failure>;

/// What became of something for standard output.
fn written(result: io::Result<()>) -> Done {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::Unread,
        _ => Failure::Told(format!(
            "could not write to standard output: {error}; make room, or send it elsewhere"
        )),
    })
}

pub(crate) fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_max_level(tracing::Level::INFO)
        .log_internal_errors(false) // Telling that nobody reads the log, where nobody does, is a panic.
        .init();
    allow_descriptors();
    for name in unknown_variables() {
        note!(
            "farside: warning: the variable {name} means nothing; did you mean one of {}?",
            VARIABLES.join(", ")
        );
    }
    let done = match Cli::parse().command {
        Command::Up(up) => up.run(),
        Command::Serve(serve) => serve.run(),
        Command::Store(store) => store.run(),
        Command::Token(token) => token.run(),
        #[cfg(feature = "tls")]
        Command::Tls(tls) => tls.run(),
        Command::Kv(kv) => kv.run(),
        Command::Shell(shell) => shell.run(),
        Command::Bench(bench) => bench.run(),
        Command::Perf(perf) => perf.run(),
        Command::Sim(sim) => sim.run(),
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
        Err(Failure::Unread) => ExitCode::from(141),
        Err(Failure::Told(reason)) => {
            note!("farside: {reason}");
            ExitCode::from(2)
        }
    }
}

/// Every connection takes descriptors at both ends: lets this process have as many as the system allows it.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // Where they are too few even so, whoever misses one says it.
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Memory is taken as it is written to: what is too much for this machine would be noticed only when it is spent, and
/// then the system ends whichever process it likes.
fn check_available(bytes: u64, remedy: &str) -> Done {
    match available_memory() {
        Some(available) if bytes > available => Err(Failure::Told(format!(
            "{} of memory are needed and this machine has {} available: {remedy}",
            human_bytes(bytes),
            human_bytes(available)
        ))),
        _ => Ok(()),
    }
}

/// Bytes that processes of this machine may yet take, if the system tells.
fn available_memory() -> Option<u64> {
    machine::available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// For clap: a number of bytes that a node can lend.
fn memory(text: &str) -> Result<u64, String> {
    parse_bytes(text)
        .ok()
        .filter(|&bytes| Geometry::of(bytes).is_some())
        .ok_or_else(|| format!("a node cannot lend '{text}': give a multiple of 1 MiB from 8MiB to 1TiB"))
}

/// For clap: a number of bytes that a value of a benchmark can have.
fn value_size(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    let fits = u32::try_from(bytes).ok().filter(|bytes| (1..=farside::VALUE_MAX as u32).contains(bytes));
    fits.ok_or_else(|| format!("no value has '{text}': give 1 to 16MiB"))
}

/// For clap: a number of bytes that a store can have.
fn quota(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("a store needs some: give it 64MiB or so".into()),
        bytes if bytes % (1 << 20) != 0 => Err(format!("'{text}' is no multiple of 1 MiB: give 64MiB or so")),
        bytes => Ok(bytes),
    }
}

/// For clap: a length of time, such as `500ms`, `10s` or `2m`; a number alone is seconds.
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
        format!("'{text}' is no length of time: write it like 500ms, 10s or 2m; a number alone is seconds")
    })
}

/// Warns of what a workload's file says and nobody heeds.
fn warn_of_unused(workload: &Workload) {
    for unused in &workload.unused {
        note!("farside: {}:{}: property '{}' has no effect", workload.name, unused.line, unused.key);
    }
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
        // Nobody who looks at a bar reads fractions.
        let _always_there = write!(out, "{}/s", HumanCount(state.per_sec() as u64));
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
    fn fuzz_lengths_of_time() {
        let executions = Executions::of("lengths of time");
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
