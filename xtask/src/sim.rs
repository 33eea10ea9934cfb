//! `cargo xtask sim`: runs systems in the simulator with many seeds, in one process per core by default.
//!
//! The processes run `farside sim --json`, which prints each seed's verdict on a line. They are built with all
//! assertions enabled, since a failed assertion is a finding too.
//!
//! Invariant: if a process exits or hangs while it runs a seed, that is a finding of this seed, and the other seeds
//! still run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cargo::{cargo, succeeds};
use crate::mutants;

/// The seeds that run by default.
const SEEDS: RangeInclusive<u64> = 1..=1000;
/// Minimum number of seeds in a run that fails if a fault has never struck.
const SEEDS_FOR_ALL_FAULTS: u64 = 1000;
/// Maximum time that a process may take for one seed. The longest known seed takes a few seconds.
const SILENCE: Duration = Duration::from_secs(120);
/// File of the digests that `cargo test` compares with.
const DIGESTS: &str = "crates/farside/tests/all/sim/digests.txt";
/// Folder with one file per system, which lists the seeds that kill the system's mutants.
const KILLS: &str = "crates/trial/kills";

/// The parsed command line of `cargo xtask sim`.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    mode: Mode,
    seeds: RangeInclusive<u64>,
    jobs: usize,
    /// Whether to save the seeds that expose mutants (broken variants).
    writes_kills: bool,
    /// Flags passed on to `farside sim`, unchanged.
    rest: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// Runs seeds and expects the verdict of each to be good.
    Seeds,
    /// Searches for a seed that exposes each mutant (broken variant).
    Mutants,
    /// Replays the saved seeds and expects each mutant to be exposed by its seed.
    Kills,
    /// Recomputes the digests that the tests compare with.
    Digests,
}

/// Parses the command line of `cargo xtask sim`. The error message names the remedy.
pub(crate) fn parse(arguments: &[String]) -> Result<Options, String> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options =
        Options { mode: Mode::Seeds, seeds: SEEDS, jobs, writes_kills: false, rest: Vec::new() };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--mutants" => options.mode = Mode::Mutants,
            "--kills" => options.mode = Mode::Kills,
            "--write-kills" => (options.mode, options.writes_kills) = (Mode::Mutants, true),
            "--digests" => options.mode = Mode::Digests,
            "--seeds" => options.seeds = arguments.next().and_then(|text| seeds(text)).ok_or(WHICH_SEEDS)?,
            "--jobs" => {
                let jobs = arguments.next().and_then(|text| text.parse().ok());
                options.jobs = jobs.filter(|jobs| (1..=1024).contains(jobs)).ok_or(HOW_MANY_JOBS)?;
            }
            flag if flag.starts_with("--seeds=") || flag.starts_with("--jobs=") => {
                return Err(format!("invalid flag: write `{}`, with a blank", flag.replacen('=', " ", 1)));
            }
            _ => options.rest.push(argument.clone()),
        }
    }
    Ok(options)
}

impl Options {
    /// The system given by `--system`, if any.
    fn system(&self) -> Option<&str> {
        let named = self.rest.iter().position(|flag| flag == "--system");
        let joined = self.rest.iter().find_map(|flag| flag.strip_prefix("--system="));
        joined.or_else(|| self.rest.get(named? + 1).map(String::as_str))
    }
}

const WHICH_SEEDS: &str =
    "invalid seeds; write `--seeds 1..1000` for the seeds from 1 to 1000, both included";
const HOW_MANY_JOBS: &str = "invalid number of jobs; write `--jobs 4` for 4 concurrent processes (1 to 1024)";

fn seeds(text: &str) -> Option<RangeInclusive<u64>> {
    let (first, last) = text.split_once("..")?;
    let seeds = first.parse().ok()?..=last.parse().ok()?;
    (!seeds.is_empty()).then_some(seeds)
}

/// Maximum length in characters of the printed reason why a mutant was killed.
const WHY_CHARS_MAX: usize = 80;

/// Runs the parsed command. Returns whether it succeeded.
pub(crate) fn run(root: &Path, options: &Options) -> bool {
    let with_mutants = matches!(options.mode, Mode::Mutants | Mode::Kills);
    let Some(binary) = built(root, with_mutants) else { return false };
    match options.mode {
        Mode::Seeds => try_seeds(&binary, options),
        Mode::Mutants => find_mutants(root, &binary, options),
        Mode::Kills => replay_kills(root, &binary, options.jobs, options.system()),
        Mode::Digests => refresh_digests(root, &binary, options),
    }
}

/// Builds `farside` in the `sim` profile and returns its path.
fn built(root: &Path, with_mutants: bool) -> Option<PathBuf> {
    let mut build = cargo(root, &["build", "--profile", "sim", "--package", "farside", "--locked"]);
    if with_mutants {
        mutants::compile_in(&mut build);
    }
    if !succeeds(build) {
        return None;
    }
    let metadata =
        cargo(root, &["metadata", "--no-deps", "--format-version", "1", "--locked"]).output().ok()?;
    let metadata: Value = serde_json::from_slice(&metadata.stdout).ok()?;
    Some(Path::new(metadata["target_directory"].as_str()?).join("sim/farside"))
}

/// Splits the seeds into ranges, each for one process. The ranges are short enough to keep all jobs busy until the end.
fn slices(seeds: &RangeInclusive<u64>, jobs: usize) -> impl Iterator<Item = RangeInclusive<u64>> + Send {
    let (first, last) = (*seeds.start(), *seeds.end());
    let size = ((last - first) / (jobs as u64 * 8)).clamp(1, 200);
    let slice = move |start: u64| start..=start.saturating_add(size - 1).min(last);
    std::iter::successors(Some(slice(first)), move |before| {
        before.end().checked_add(1).filter(|next| *next <= last).map(slice)
    })
}

fn try_seeds(binary: &Path, options: &Options) -> bool {
    let totals = Mutex::new(Totals::new(&options.seeds));
    let refused = in_parallel(options.jobs, slices(&options.seeds, options.jobs), |mut seeds| {
        loop {
            let mut command = Command::new(binary);
            command.arg("sim").args(&options.rest);
            let end = follow(command, &seeds, |line| {
                locked(&totals).add(line);
                true
            });
            match end {
                End::Done => return Ok(()),
                End::Refused(reason) => return Err(reason),
                End::Died { seed, why } => {
                    let rest: String = options.rest.iter().map(|flag| format!(" {flag}")).collect();
                    let replay = format!("farside sim{rest} --seed {seed}");
                    locked(&totals).add_bad(seed, &why, &replay);
                    match seed.checked_add(1).filter(|next| next <= seeds.end()) {
                        Some(next) => seeds = next..=*seeds.end(),
                        None => return Ok(()),
                    }
                }
            }
        }
    });
    if let Err(reason) = refused {
        println!("sim: {reason}");
        return false;
    }
    let totals = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
    let is_whole =
        totals.done >= SEEDS_FOR_ALL_FAULTS && !options.rest.iter().any(|flag| flag.starts_with("--faults"));
    totals.print(is_whole)
}

/// Sums over all seeds that have run, and the bad seeds.
struct Totals {
    of: u64,
    done: u64,
    operations: u64,
    events: u64,
    struck: BTreeMap<String, u64>,
    within: PhaseCounts,
    /// For each bad seed, the reason and the command that replays the seed.
    bad: BTreeMap<u64, (String, String)>,
    /// Whether some seed's history was not checked.
    is_unchecked: bool,
    /// The checked property, as `farside sim` names it.
    property: String,
    since: Instant,
    printed_at: Option<Instant>,
}

impl Totals {
    fn new(seeds: &RangeInclusive<u64>) -> Totals {
        Totals {
            of: (seeds.end() - seeds.start()).saturating_add(1),
            done: 0,
            operations: 0,
            events: 0,
            struck: BTreeMap::new(),
            within: PhaseCounts::default(),
            bad: BTreeMap::new(),
            is_unchecked: false,
            property: String::new(),
            since: Instant::now(),
            printed_at: None,
        }
    }

    fn add(&mut self, line: &Value) {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        self.operations += number(&line["operations"]);
        self.events += number(&line["events"]);
        for (fault, times) in line["struck"].as_object().into_iter().flatten() {
            *self.struck.entry(fault.clone()).or_default() += number(times);
        }
        self.within.add(&line["within"]);
        self.is_unchecked |= line["verdict"] == "not checked";
        if let Some(property) = line["property"].as_str() {
            self.property = property.to_owned();
        }
        if is_bad(line) {
            self.add_bad(
                number(&line["seed"]),
                &reasons_of(line),
                line["replay"].as_str().unwrap_or_default(),
            );
        } else {
            self.count_seed();
        }
    }

    fn add_bad(&mut self, seed: u64, why: &str, replay: &str) {
        self.bad.insert(seed, (why.to_owned(), replay.replacen("farside", "cargo run --profile sim --", 1)));
        self.count_seed();
    }

    /// Adds one to the number of finished seeds. Prints the progress: in place on a terminal, else on a new line every
    /// 10 s.
    fn count_seed(&mut self) {
        self.done += 1;
        let is_terminal = std::io::stderr().is_terminal();
        let pause = Duration::from_millis(if is_terminal { 100 } else { 10_000 });
        if self.printed_at.unwrap_or(self.since).elapsed() < pause {
            return;
        }
        self.printed_at = Some(Instant::now());
        let end = if is_terminal { "\r" } else { "\n" };
        eprint!("   {} of {} seeds, {} not good{end}", self.done, self.of, self.bad.len());
    }

    /// Prints the outcome of all seeds. Returns whether the run has passed.
    fn print(&self, all_faults_must_strike: bool) -> bool {
        let Totals { done, operations, events, struck, bad, since, .. } = self;
        println!(
            "sim: {done} seeds in {:.1} s: {operations} operations, {events} events",
            since.elapsed().as_secs_f64()
        );
        let listed = |names: Vec<String>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let times =
            struck.iter().filter(|(_, times)| **times > 0).map(|(name, times)| format!("{name} {times}"));
        println!("   faults that struck: {}", listed(times.collect()));
        let never: Vec<String> =
            struck.iter().filter(|(_, times)| **times == 0).map(|(name, _)| name.clone()).collect();
        let empty = self.within.empty();
        let is_missing = all_faults_must_strike && !(never.is_empty() && empty.is_empty());
        println!("   faults that never did: {}", listed(never));
        print!("{}", self.within);
        if !empty.is_empty() {
            println!("   never struck within these phases: {}", listed(empty));
        }
        for (seed, (why, replay)) in bad {
            println!("seed {seed} is not good: {why}");
            println!("   replay: {replay}");
        }
        match (bad.len(), is_missing) {
            (0, false) if self.is_unchecked => {
                println!("sim: no violations found, and no history was checked")
            }
            (0, false) => println!("sim: good: {}", self.property),
            (0, true) => {
                println!(
                    "sim: FAILED: some faults never struck, or never within a phase; see the lists above"
                )
            }
            (bad, _) => println!("sim: FAILED: {bad} of {done} seeds are not good"),
        }
        bad.is_empty() && !is_missing
    }
}

/// Number of times that each fault has struck within each phase of a protocol.
#[derive(Default)]
struct PhaseCounts {
    phases: Vec<String>,
    /// The phases of each fault in order: how often the fault struck in each, or `None` for a phase in which it cannot
    /// strike.
    struck: Vec<(String, Vec<Option<u64>>)>,
}

impl PhaseCounts {
    fn add(&mut self, table: &Value) {
        let words = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let rows = table["struck"].as_array().into_iter().flatten();
        for (at, row) in rows.enumerate() {
            let times: Vec<Option<u64>> =
                row["times"].as_array().into_iter().flatten().map(Value::as_u64).collect();
            match self.struck.get_mut(at) {
                Some((_, sums)) => sums.iter_mut().zip(times).for_each(|(sum, more)| {
                    *sum = sum.map(|sum| sum + more.unwrap_or(0));
                }),
                None => self.struck.push((words(&row["fault"]), times)),
            }
        }
        if self.phases.is_empty() {
            self.phases = table["phases"].as_array().into_iter().flatten().map(words).collect();
        }
    }

    /// Returns the pairs of a fault and a phase where the fault can strike and never did.
    fn empty(&self) -> Vec<String> {
        let cells = self.struck.iter().flat_map(|(fault, times)| {
            self.phases.iter().zip(times).map(move |(phase, times)| (fault, phase, times))
        });
        let empty = cells.filter(|(.., times)| **times == Some(0));
        empty.map(|(fault, phase, _)| format!("{fault} within {phase}")).collect()
    }
}

impl std::fmt::Display for PhaseCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "   {:14}", "within")?;
        self.phases.iter().try_for_each(|phase| write!(f, " {phase:>9}"))?;
        for (fault, times) in &self.struck {
            write!(f, "\n     {fault:12}")?;
            for times in times {
                write!(f, " {:>9}", times.map_or("-".to_owned(), |times| times.to_string()))?;
            }
        }
        writeln!(f)
    }
}

fn is_bad(line: &Value) -> bool {
    !matches!(line["verdict"].as_str(), Some("good" | "not checked"))
}

fn reasons_of(line: &Value) -> String {
    let reasons = line["reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut reported = reasons.collect::<Vec<_>>().join("; ");
    if let Some(window) = line["window"].as_str() {
        reported = format!("{reported}\n{}", window.trim_end());
    }
    reported
}

/// Runs each mutant with seeds that the correct code passes, until a seed exposes the mutant.
fn find_mutants(root: &Path, binary: &Path, options: &Options) -> bool {
    let mutants = match mutants_of(binary, options.system()) {
        Ok(mutants) => mutants,
        Err(reason) => {
            println!("sim: {reason}");
            return false;
        }
    };
    let (alive, kills) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    let of = mutants.len();
    // Each mutant's command names its own system, so a `--system` among the flags is removed.
    let rest = without_system(&options.rest);
    let refused = in_parallel(options.jobs, mutants.clone(), |(mutant, system)| {
        let mut command = Command::new(binary);
        command.args(["sim", "--mutant", &mutant, "--system", &system]).args(&rest);
        let since = Instant::now();
        let mut killed = None;
        let end = follow(command, &options.seeds, |line| {
            if is_bad(line) {
                killed = Some((line["seed"].as_u64().unwrap_or(0), reasons_of(line)));
            }
            killed.is_none()
        });
        match end {
            End::Refused(reason) => return Err(reason),
            End::Died { seed, why } => killed = Some((seed, why)),
            End::Done => {}
        }
        let seconds = since.elapsed().as_secs_f64();
        if let Some((seed, _)) = killed
            && let Some(why) = wrong_without_mutant(binary, &system, seed, &rest)?
        {
            return Err(format!(
                "seed {seed} of {system} is bad even without {mutant}, so it proves nothing: {why}"
            ));
        }
        match killed {
            Some((seed, why)) => {
                locked(&kills).insert((mutant.clone(), system.clone()), seed);
                let why: String =
                    why.lines().next().unwrap_or_default().chars().take(WHY_CHARS_MAX).collect();
                let seeds = seed - options.seeds.start() + 1;
                println!(
                    "   {mutant} of {system}: killed by seed {seed}, after {seeds} seeds, {seconds:.1} s: {why}"
                );
            }
            None => {
                let (first, last) = (options.seeds.start(), options.seeds.end());
                println!("   {mutant} of {system}: LIVES after the seeds {first}..{last}, {seconds:.1} s");
                locked(&alive).push(mutant);
            }
        }
        Ok(())
    });
    if let Err(reason) = refused {
        println!("sim: {reason}");
        return false;
    }
    let alive = alive.into_inner().unwrap_or_else(PoisonError::into_inner);
    let killed = of - alive.len();
    let kills = kills.into_inner().unwrap_or_else(PoisonError::into_inner);
    if options.writes_kills
        && let Err(error) = write_kills(root, &mutants, &kills)
    {
        println!("sim: {KILLS}: {error}");
        return false;
    }
    if alive.is_empty() {
        println!("sim: {killed} of {of} mutants were killed");
    } else {
        println!("sim: FAILED: {killed} of {of} mutants were killed; alive: {}", alive.join(", "));
    }
    alive.is_empty()
}

/// Returns the mutants of `system`, or of all systems if `None`. Each item is a mutant's name and its system's name.
fn mutants_of(binary: &Path, system: Option<&str>) -> Result<Vec<(String, String)>, String> {
    let output = Command::new(binary).args(["sim", "--list-mutants"]).output();
    let output = output.map_err(|error| format!("cannot run {}: {error}", binary.display()))?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let pairs = listed.lines().filter_map(|line| line.split_once(' '));
    let wanted = pairs.filter(|(_, of)| system.is_none_or(|system| system == *of));
    let mutants: Vec<(String, String)> = wanted.map(|(a, b)| (a.into(), b.into())).collect();
    if mutants.is_empty() {
        return Err(format!("{} lists no broken variants; check --system", binary.display()));
    }
    Ok(mutants)
}

fn without_system(flags: &[String]) -> Vec<String> {
    let mut flags = flags.iter();
    let mut rest = Vec::new();
    while let Some(flag) = flags.next() {
        match flag.as_str() {
            "--system" => drop(flags.next()),
            joined if joined.starts_with("--system=") => {}
            _ => rest.push(flag.clone()),
        }
    }
    rest
}

/// Writes one file for each system, which lists its mutants in order, each with the seed that exposes it.
fn write_kills(
    root: &Path,
    mutants: &[(String, String)],
    kills: &BTreeMap<(String, String), u64>,
) -> std::io::Result<()> {
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for of @ (mutant, system) in mutants {
        let lines = files.entry(system).or_insert_with(|| {
            format!("# For each broken variant of {system}, a seed that exposes it: `cargo xtask sim --write-kills`.\n")
        });
        if let Some(seed) = kills.get(of) {
            *lines += &format!("{mutant} {seed}\n");
        }
    }
    std::fs::create_dir_all(root.join(KILLS))?;
    files.iter().try_for_each(|(system, lines)| {
        std::fs::write(root.join(KILLS).join(system).with_extension("txt"), lines)
    })
}

/// Replays each system's killing seeds, with the mutant and without. Returns whether every mutant is killed.
pub(crate) fn replay_kills(root: &Path, binary: &Path, jobs: usize, system: Option<&str>) -> bool {
    let mut systems = match mutants_of(binary, system) {
        Ok(mutants) => mutants.into_iter().map(|(_, system)| system).collect::<Vec<_>>(),
        Err(reason) => {
            println!("sim: {reason}");
            return false;
        }
    };
    systems.dedup();
    let bad = Mutex::new(0);
    let refused = in_parallel(jobs, systems, |system| {
        let file = root.join(KILLS).join(&system).with_extension("txt");
        let output = Command::new(binary)
            .args(["sim", "--system", &system, "--replay-kills"])
            .arg(&file)
            .output()
            .map_err(|error| format!("cannot run {}: {error}", binary.display()))?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        if !output.status.success() {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            *locked(&bad) += 1;
        }
        Ok(())
    });
    let bad = bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    match (refused, bad) {
        (Err(reason), _) => println!("sim: {reason}"),
        (Ok(()), 0) => {
            println!("sim: every broken variant is killed by its seed");
            return true;
        }
        (Ok(()), bad) => println!("sim: FAILED: {bad} systems have broken variants that live; see {KILLS}"),
    }
    false
}

/// Runs the correct code with the seed. Returns the reasons for a bad verdict, or `None` if the verdict is good.
fn wrong_without_mutant(
    binary: &Path,
    system: &str,
    seed: u64,
    rest: &[String],
) -> Result<Option<String>, String> {
    let mut command = Command::new(binary);
    command.args(["sim", "--system", system]).args(rest);
    let mut wrong = None;
    match follow(command, &(seed..=seed), |line| {
        wrong = is_bad(line).then(|| reasons_of(line));
        true
    }) {
        End::Refused(reason) => Err(reason),
        End::Died { why, .. } => Ok(Some(why)),
        End::Done => Ok(wrong),
    }
}

/// Recomputes the digests that the tests compare with, and writes each digest as the last word of its line.
fn refresh_digests(root: &Path, binary: &Path, options: &Options) -> bool {
    if !options.rest.is_empty() {
        println!("sim: unsupported flags: {}; the runs are listed in {DIGESTS}", options.rest.join(" "));
        return false;
    }
    let path = root.join(DIGESTS);
    let fresh = std::fs::read_to_string(&path).map_err(|error| error.to_string()).and_then(|text| {
        let lines: Result<Vec<String>, String> = text.lines().map(|line| with_digest(binary, line)).collect();
        let fresh = lines?.join("\n") + "\n";
        let changed = text.lines().zip(fresh.lines()).filter(|(old, new)| old != new).count();
        std::fs::write(&path, fresh).map_err(|error| error.to_string()).map(|()| changed)
    });
    match fresh {
        Ok(changed) => println!("sim: {changed} digests of {DIGESTS} have changed"),
        Err(ref error) => println!("sim: {DIGESTS}: {error}"),
    }
    fresh.is_ok()
}

/// Takes a line `system carrier seed digest` and repeats its run. Returns the line with the run's present digest.
fn with_digest(binary: &Path, line: &str) -> Result<String, String> {
    if line.starts_with('#') || line.is_empty() {
        return Ok(line.to_owned());
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    let &[system, carrier, seed, ..] = &words[..] else {
        return Err(format!("invalid line '{line}': write a system, a carrier and a seed"));
    };
    let flags = ["sim", "--json", "--system", system, "--carrier", carrier, "--seed", seed];
    let output = Command::new(binary).args(flags).output().map_err(|error| error.to_string())?;
    let result: Value = serde_json::from_slice(&output.stdout)
        .map_err(|_| String::from_utf8_lossy(&output.stderr).trim().to_owned())?;
    if is_bad(&result) {
        return Err(format!("{line}: {}", reasons_of(&result)));
    }
    let digest = result["digest"].as_str().ok_or("a run without a digest")?;
    Ok(format!("{system} {carrier} {seed} {digest}"))
}

/// Processes the items in order on `jobs` threads. After the first error, no further item is started.
fn in_parallel<T: Send>(
    jobs: usize,
    items: impl IntoIterator<Item = T, IntoIter: Send>,
    work: impl Fn(T) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let items = Mutex::new(items.into_iter());
    let refused = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while locked(&refused).is_none() {
                    let Some(item) = locked(&items).next() else { return };
                    if let Err(reason) = work(item) {
                        locked(&refused).get_or_insert(reason);
                    }
                }
            });
        }
    });
    refused.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Outcome of one `farside sim` process.
#[derive(Debug, PartialEq)]
enum End {
    /// The process has reported all its seeds, or the caller has stopped it.
    Done,
    /// The process exited or hung before it had finished this seed.
    Died { seed: u64, why: String },
    /// The process rejected its command line, or could not be started.
    Refused(String),
}

/// Exit code with which `farside` rejects its command line.
const REFUSED: i32 = 2;

/// Runs a process over the seeds and passes each line of its output to `each`, until `each` returns false.
fn follow(mut command: Command, seeds: &RangeInclusive<u64>, mut each: impl FnMut(&Value) -> bool) -> End {
    command.args(["--json", "--seeds", &format!("{}..{}", seeds.start(), seeds.end())]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            return End::Refused(format!(
                "cannot start {}: {error}; no seed has run",
                command.get_program().display()
            ));
        }
    };
    let (lines, stderr) = read_output(&mut child);
    for seed in seeds.clone() {
        let line = lines.recv_timeout(SILENCE);
        let Some(value) = line.as_ref().ok().and_then(|line| serde_json::from_str::<Value>(line).ok()) else {
            let is_silent = line == Err(mpsc::RecvTimeoutError::Timeout);
            return died_within(seed, is_silent, child, stderr);
        };
        if !each(&value) {
            let _ended_already = child.kill();
            break;
        }
    }
    let _reaped = child.wait();
    End::Done
}

/// Returns the lines of a process's standard output, and a handle that returns all of its standard error. Two threads
/// read them and exit with the process.
fn read_output(child: &mut Child) -> (mpsc::Receiver<String>, std::thread::JoinHandle<String>) {
    let output = BufReader::new(child.stdout.take().expect("the stream is piped"));
    let mut errors = child.stderr.take().expect("the stream is piped");
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let stderr = std::thread::spawn(move || {
        let mut stderr = Vec::new();
        let _ends_with_the_child = errors.read_to_end(&mut stderr);
        String::from_utf8_lossy(&stderr).trim().to_owned()
    });
    (lines, stderr)
}

fn died_within(seed: u64, is_silent: bool, mut child: Child, stderr: std::thread::JoinHandle<String>) -> End {
    if is_silent {
        let _ended_already = child.kill();
        let _reaped = child.wait();
        return End::Died {
            seed,
            why: format!("it takes longer than {} s; the process was killed", SILENCE.as_secs()),
        };
    }
    let status = child.wait();
    let stderr = stderr.join().expect("the reading thread does not panic");
    match status {
        Ok(status) if status.code() == Some(REFUSED) => End::Refused(stderr),
        Ok(status) => End::Died { seed, why: format!("the process exited: {status}: {stderr}") },
        Err(error) => End::Died { seed, why: format!("cannot wait for the process: {error}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Options, String> {
        parse(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn unknown_flags_are_passed_to_farside_sim() {
        let options = parse_line("--system prism-kv --seeds 5..9 --faults loss --jobs 3").expect("valid");
        assert_eq!((options.mode, options.seeds, options.jobs), (Mode::Seeds, 5..=9, 3));
        assert_eq!(options.rest, ["--system", "prism-kv", "--faults", "loss"]);
        assert_eq!(parse_line("--mutants").map(|options| options.mode), Ok(Mode::Mutants));
        assert_eq!(parse_line("--digests").map(|options| options.mode), Ok(Mode::Digests));
    }

    #[test]
    fn invalid_numbers_name_the_remedy() {
        for wrong in ["--seeds", "--seeds 7", "--seeds 9..7", "--seeds=1..7"] {
            assert!(parse_line(wrong).unwrap_err().contains("--seeds "), "{wrong}");
        }
        for wrong in ["--jobs", "--jobs 0", "--jobs many", "--jobs=2"] {
            assert!(parse_line(wrong).unwrap_err().contains("--jobs "), "{wrong}");
        }
    }

    #[test]
    fn slices_contain_every_seed_once() {
        for (seeds, jobs) in
            [(1..=1, 4), (1..=7, 2), (3..=1002, 3), (0..=100_000, 2), (u64::MAX - 9..=u64::MAX, 1)]
        {
            let all: Vec<u64> = slices(&seeds, jobs).flatten().collect();
            assert_eq!(all, seeds.collect::<Vec<_>>());
        }
        assert_eq!(slices(&(0..=u64::MAX), 1).nth(1), Some(200..=399), "slices are made one at a time");
    }

    /// A process that prints `lines` and then runs the shell command `then`.
    fn script(lines: &str, then: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("printf '{lines}'; {then}"), "sh"]);
        command
    }

    #[test]
    fn a_process_that_exits_within_a_seed_is_a_finding() {
        let good = r#"{"seed":1,"verdict":"good"}\n"#;
        let mut seeds_seen = Vec::new();
        let end = follow(script(good, "kill -ABRT $$"), &(1..=3), |line| {
            seeds_seen.push(line["seed"].as_u64());
            true
        });
        let End::Died { seed: 2, why } = end else { panic!("{end:?}") };
        assert!(why.contains("signal: 6"), "{why}");
        assert_eq!(seeds_seen, [Some(1)]);
        assert_eq!(follow(script(good, "exit 1"), &(1..=1), |_| true), End::Done);
        let refused = follow(script("", "echo no such flag >&2; exit 2"), &(1..=3), |_| true);
        assert_eq!(refused, End::Refused("no such flag".into()));
    }

    #[test]
    fn a_caller_can_stop_before_the_last_seed() {
        let lines = r#"{"seed":1,"verdict":"violated"}\n"#;
        assert_eq!(follow(script(lines, "exec sleep 1000"), &(1..=3), |line| !is_bad(line)), End::Done);
    }

    #[test]
    fn only_good_seeds_pass_and_faults_that_never_strike_fail() {
        let line = |verdict: &str, times: u64| {
            serde_json::json!({"seed": 7, "verdict": verdict, "reasons": ["key 3 is torn"], "operations": 9,
                "events": 90, "struck": {"loss": times}, "replay": "farside sim --seed 7"})
        };
        let totals = |verdict: &str, times| {
            let mut totals = Totals::new(&(7..=7));
            totals.add(&line(verdict, times));
            totals
        };
        assert!(totals("good", 1).print(true));
        assert!(!totals("good", 0).print(true));
        assert!(totals("good", 0).print(false));
        for verdict in ["violated", "undecided"] {
            let totals = totals(verdict, 1);
            assert!(!totals.print(false));
            let reported = ("key 3 is torn".to_owned(), "cargo run --profile sim -- sim --seed 7".to_owned());
            assert_eq!(totals.bad[&7], reported);
        }
    }
}
