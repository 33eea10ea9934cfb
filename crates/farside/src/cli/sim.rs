//! `sim`: runs a system in the simulator, with one seed or with a range of seeds.
//!
//! Invariant: the report of a run that is not good includes the command that replays the run.

use super::{Done, Failure, files, progress};
use clap::builder::{PossibleValuesParser, TypedValueParser};
#[cfg(farside_mutants)]
use farside_remote::mutant::Mutant;
use farside_sim::fault::Fault;
use farside_systems::latch::Scheme;
use farside_systems::registry;
use farside_trial::events::Lines;
use farside_trial::flight::{Matrix, Phases, can_strike};
use farside_trial::judge::{Judged, Verdict, judge, judge_recorded, replay};
use farside_trial::{Carrier, Counts, Setup, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

/// Test a system in the simulator: many clients, injected faults, and a check of the clients' histories.
#[derive(clap::Args)]
#[command(
    after_help = "Omitted settings are drawn from the seed. The same flags and seed give the same run, to the byte, \
on every machine.\n\nExit codes: 0 all runs are good, 1 a run is wrong or undecided, 2 any other error."
)]
pub(super) struct Sim {
    /// System to test
    #[arg(long, value_name = "NAME", default_value = registry::default_kv().kind, value_parser = systems())]
    system: System,
    /// Run this seed, and report its details
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run the seeds from A to B, both included, and report the totals [default: 1..100]
    #[arg(long, value_name = "A..B", value_parser = seeds)]
    seeds: Option<Seeds>,
    /// Number of nodes, 1 to 8; each has its own store, which every client uses. Of a replicated store: number of
    /// replicas, 1, 3 or 5 [default: 1, or drawn for a replicated store]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    nodes: Option<u32>,
    /// Number of clients, 1 to 32
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32))]
    clients: Option<u32>,
    /// Number of keys, which all clients share, 1 to 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    keys: Option<u64>,
    /// Total number of operations of all clients, 1 to 5000; the simulated node's memory and time allow no more
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=5_000))]
    operations: Option<u32>,
    /// How clients reach the node: direct (their own CPUs), datagrams (may be lost), connections (may break) or verbs
    /// (the node's NIC executes READs, WRITEs and atomics; connections may break)
    #[arg(long, value_name = "NAME", value_parser = carriers())]
    carrier: Option<Carrier>,
    /// Scheme by which clients synchronize, for the systems latch and btree: pessimistic basic, speculative,
    /// overlapped, async or unlatch (the first four also with -rw, for a reader/writer latch), or optimistic v2, crc or
    /// versions (each also with -footer, for a WRITE that releases the latch)
    #[arg(long, value_name = "NAME", hide_possible_values = true, value_parser = schemes())]
    scheme: Option<Scheme>,
    /// Faults to inject: all, none, or a comma-separated list of loss, duplicate, reorder, delay, reset, partition,
    /// one-way, client-death, client-pause, node-pause, node-restart, node-loss, clock-skew, clock-jump, exhaustion,
    /// revocation, disk-full, sync-failure and machine-crash; each seed draws some of them
    #[arg(long, value_name = "NAMES", default_value = "all", value_parser = faults)]
    faults: Faults,
    /// Check the histories: for systems with keys, that every key is linearizable; the default
    #[arg(long, overrides_with = "no_check")]
    check: bool,
    /// Do not check the histories; a run is then judged by its own errors alone
    #[arg(long, overrides_with = "check")]
    no_check: bool,
    /// Write the clients' requests and responses to this file, as JSON lines (docs/sim-histories.md)
    #[arg(long, value_name = "FILE", requires = "seed")]
    history: Option<PathBuf>,
    /// Write the events of every packet to this file, as JSON lines (docs/sim-events.md)
    #[arg(long, value_name = "FILE", requires = "seed")]
    events: Option<PathBuf>,
    /// Draw the operations that show a violation in this file, if there is one
    #[arg(long, value_name = "FILE.svg", requires = "seed")]
    picture: Option<PathBuf>,
    /// Print one JSON object a line, for each seed
    #[arg(long)]
    json: bool,
    /// Run this mutant: a deliberately broken variant of the system
    #[cfg(farside_mutants)]
    #[arg(long, value_name = "NAME", hide = true, value_parser = mutant)]
    mutant: Option<Mutant>,
    /// List the mutants, each with its system
    #[cfg(farside_mutants)]
    #[arg(long, hide = true)]
    list_mutants: bool,
    /// Replay the kills of this file for the system's mutants, one `MUTANT SEED` a line
    #[cfg(farside_mutants)]
    #[arg(long, value_name = "FILE", hide = true)]
    replay_kills: Option<PathBuf>,
}

#[derive(Clone)]
pub(super) struct Seeds(RangeInclusive<u64>);

#[derive(Clone)]
pub(super) struct Faults(Vec<Fault>);

/// Returns the clap parser for the name of a system.
fn systems() -> impl TypedValueParser<Value = System> {
    PossibleValuesParser::new(System::all().map(System::name))
        .map(|name| System::named(&name).expect("clap accepts only the listed names"))
}

/// Returns the clap parser for the name of a scheme.
fn schemes() -> impl TypedValueParser<Value = Scheme> {
    PossibleValuesParser::new(Scheme::ALL.map(|(name, _)| name))
        .map(|name| Scheme::named(&name).expect("clap accepts only the listed names"))
}

/// Returns the clap parser for the name of a carrier.
fn carriers() -> impl TypedValueParser<Value = Carrier> {
    PossibleValuesParser::new(Carrier::ALL.map(Carrier::name))
        .map(|name| Carrier::named(&name).expect("clap accepts only the listed names"))
}

/// Parses, for clap, the name that a mutant has in the code.
#[cfg(farside_mutants)]
fn mutant(name: &str) -> Result<Mutant, String> {
    let mut all = System::all().flat_map(System::mutants);
    let named = all.find(|mutant| format!("{mutant:?}") == name);
    named.ok_or_else(|| format!("unknown mutant '{name}': --list-mutants lists all"))
}

/// Parses, for clap, a range of seeds such as `1..300`, which includes both ends.
pub(super) fn seeds(text: &str) -> Result<Seeds, String> {
    let number = |text: &str| text.parse::<u64>().ok();
    let ends = text.split_once("..").and_then(|(first, last)| number(first).zip(number(last)));
    match ends {
        Some((first, last)) if first <= last => Ok(Seeds(first..=last)),
        Some((first, last)) => Err(format!("the range {first}..{last} is empty: write {last}..{first}")),
        None => Err(format!(
            "'{text}' is not a range of seeds: write 1..300 for the seeds 1 to 300, both included"
        )),
    }
}

/// Parses, for clap, a list of faults. Sorts them in the order of [`Fault::ALL`], because the random draws depend on
/// the order.
pub(super) fn faults(text: &str) -> Result<Faults, String> {
    let chosen = match text {
        "all" => Fault::ALL.to_vec(),
        "none" => Vec::new(),
        names => {
            let named = |name: &str| Fault::named(name).ok_or_else(|| no_fault(name));
            let mut chosen = names.split(',').map(named).collect::<Result<Vec<_>, _>>()?;
            chosen.sort_unstable();
            chosen.dedup();
            chosen
        }
    };
    Ok(Faults(chosen))
}

fn no_fault(name: &str) -> String {
    let names = Fault::ALL.map(Fault::name).join(", ");
    format!("unknown fault '{name}': name all, none, or a comma-separated list of {names}")
}

impl Sim {
    pub(super) fn run(self) -> Done {
        #[cfg(farside_mutants)]
        if self.list_mutants {
            for system in System::all() {
                for mutant in system.mutants() {
                    print_line!("{mutant:?} {}", system.name());
                }
            }
            return Ok(());
        }
        #[cfg(farside_mutants)]
        if let Some(path) = &self.replay_kills {
            return replay_kills(self.system, path);
        }
        #[cfg(farside_mutants)]
        Mutant::switch(self.mutant);
        let setup = self.setup()?;
        match self.seed {
            Some(seed) => self.run_one(&setup, seed),
            None => self.run_many(&setup),
        }
    }

    fn setup(&self) -> Result<Setup, Failure> {
        let Faults(faults) = &self.faults;
        if let Some(carrier) = self.carrier.filter(|carrier| !self.system.carriers().contains(carrier)) {
            return Err(Failure::Error(unfit_carrier(carrier, self.system)));
        }
        if let Some(carrier) = self.carrier.filter(|_| faults.len() < Fault::ALL.len()) {
            let impossible = faults.iter().copied().find(|fault| !carrier.can_have(*fault));
            impossible.map_or(Ok(()), |fault| Err(Failure::Error(impossible_fault(carrier, fault))))?;
        }
        if faults.len() < Fault::ALL.len() {
            let (phases, carriers) = (self.system.phases(), self.system.carriers());
            let can_have = |fault: Fault| phases.all.iter().any(|phase| can_strike(fault, phase, &carriers));
            if let Some(fault) = faults.iter().copied().find(|fault| !can_have(*fault)) {
                return Err(Failure::Error(format!(
                    "a trial of '{}' cannot have {}: omit it from --faults",
                    self.system.name(),
                    fault.name()
                )));
            }
        }
        if let (Some(nodes), Some(most)) = (self.nodes, self.system.replicas_max())
            && (nodes % 2 == 0 || nodes > most)
        {
            return Err(Failure::Error(impossible_replicas(self.system, nodes, most)));
        }
        if self.scheme.is_some() && self.system.schemes().is_empty() {
            return Err(Failure::Error(without_schemes(self.system)));
        }
        Ok(Setup {
            system: self.system,
            scheme: self.scheme,
            carrier: self.carrier,
            nodes: self.nodes,
            clients: self.clients,
            keys: self.keys,
            operations: self.operations,
            faults: faults.clone(),
        })
    }

    fn run_one(&self, setup: &Setup, seed: u64) -> Done {
        let paths: Vec<_> = [&self.history, &self.events, &self.picture].into_iter().flatten().collect();
        if let Some(path) =
            paths.iter().enumerate().find_map(|(at, path)| paths[..at].contains(path).then_some(path))
        {
            return Err(Failure::Error(format!(
                "two outputs go to {}, and one of them would be lost: give each a file of its own",
                path.display()
            )));
        }
        [&self.history, &self.events, &self.picture]
            .into_iter()
            .flatten()
            .try_for_each(|path| files::check_writable(path))?;
        let events = self.events.as_deref().map(EventFile::create).transpose()?;
        let judged = judge_recorded(setup, seed, !self.no_check, events.as_ref().map(EventFile::lines));
        events.map_or(Ok(()), |events| events.end(&judged))?;
        self.write_history(&judged)?;
        self.write_picture(&judged)?;
        if self.json {
            print_line!("{}", json(&judged));
        } else {
            print_line!("{}", report_text(&judged));
        }
        good(u64::from(judged.is_bad()), 1)
    }

    fn run_many(&self, setup: &Setup) -> Done {
        let Seeds(seeds) = self.seeds.clone().unwrap_or(Seeds(1..=100));
        let since = Instant::now();
        let of = (seeds.end() - seeds.start()).saturating_add(1);
        let bar = progress("seeds", of, self.json);
        let (mut totals, mut bad) = (Totals::default(), Vec::new());
        for seed in seeds {
            let judged = judge(setup, seed, !self.no_check);
            if self.json {
                print_line!("{}", json(&judged));
            }
            totals.add(&judged);
            if judged.is_bad() {
                if !self.json {
                    bar.suspend(|| note!("{judged}"));
                }
                bad.push(judged);
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        if !self.json {
            print_line!("{of} seeds of {} in {:.1} s", setup.system.name(), since.elapsed().as_secs_f64());
            print_line!("{}", totals.text(setup));
            for judged in &bad {
                let reason = judged.reasons.first().map_or("", String::as_str);
                let reason = reason.lines().next().unwrap_or_default();
                print_line!("seed {} is {}: {reason}", judged.seed, judged.verdict.name());
                print_line!("  replay: {}", replay(setup, judged.seed));
            }
            print_line!("{}", verdict_on_many(bad.len(), self.no_check, totals.property));
        }
        good(bad.len() as u64, of)
    }

    fn write_history(&self, judged: &Judged) -> Done {
        let (Some(path), Some(report)) = (&self.history, &judged.report) else {
            if self.history.is_some() {
                note!("farside: no history written: the run did not complete");
            }
            return Ok(());
        };
        let write = || {
            let mut out = io::BufWriter::new(std::fs::File::create(path)?);
            report.record.write(&mut out)?;
            out.flush()
        };
        write().map_err(|error| files::unwritable(path, &error))
    }

    fn write_picture(&self, judged: &Judged) -> Done {
        let (Some(path), Some(window)) = (&self.picture, &judged.window) else {
            if self.picture.is_some() {
                note!("farside: no picture written: no operation violated the checked property");
            }
            return Ok(());
        };
        files::write(path, &window.svg)
    }
}

/// Replays the kills listed in a file, and reports the mutants that are not killed.
#[cfg(farside_mutants)]
fn replay_kills(system: System, path: &Path) -> Done {
    let unread = |reason: String| Failure::Error(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| unread(error.to_string()))?;
    let kills = farside_trial::kills::parse(&text).map_err(unread)?;
    let mut alive = 0;
    for (mutant, reported) in farside_trial::kills::replay(system, &kills) {
        match reported {
            Ok(why) => print_line!("{mutant} killed by {why}"),
            Err(why) => {
                alive += 1;
                print_line!("{mutant}: {why}");
            }
        }
    }
    good(alive, kills.len() as u64)
}

/// File into which the events of a run are written.
struct EventFile<'a> {
    path: &'a Path,
    out: Rc<RefCell<io::BufWriter<std::fs::File>>>,
    error: Rc<Cell<Option<io::Error>>>,
}

impl EventFile<'_> {
    fn create(path: &Path) -> Result<EventFile<'_>, Failure> {
        let file = std::fs::File::create(path).map_err(|error| files::unwritable(path, &error))?;
        Ok(EventFile { path, out: Rc::new(RefCell::new(io::BufWriter::new(file))), error: Rc::default() })
    }

    fn lines(&self) -> Lines {
        let (out, failed) = (Rc::clone(&self.out), Rc::clone(&self.error));
        Box::new(move |line| {
            if let Err(error) = writeln!(out.borrow_mut(), "{line}") {
                failed.set(Some(error));
            }
        })
    }

    fn end(self, judged: &Judged) -> Done {
        if judged.report.as_ref().is_some_and(|report| report.drawn.carrier == Carrier::Direct) {
            note!(
                "farside: {} is empty: 'direct' sends no packets, since the clients' own CPUs run the chains; try \
                 --carrier datagrams or --carrier connections",
                self.path.display()
            );
        }
        let flushed = self.out.borrow_mut().flush();
        self.error.take().map_or(flushed, Err).map_err(|error| files::unwritable(self.path, &error))
    }
}

/// Returns the error message for a carrier that lacks a capability which the system needs.
fn unfit_carrier(carrier: Carrier, system: System) -> String {
    let others: Vec<&str> = system.carriers().into_iter().map(Carrier::name).collect();
    format!(
        "carrier '{}' lacks {}, which '{}' needs: use --carrier {}",
        carrier.name(),
        system.needs().without(carrier.capabilities()),
        system.name(),
        others.join(" or ")
    )
}

/// Returns the error message for a scheme of a system that has none.
fn without_schemes(system: System) -> String {
    let others: Vec<&str> =
        System::all().filter(|system| !system.schemes().is_empty()).map(System::name).collect();
    format!("'{}' has no schemes: omit --scheme, or use --system {}", system.name(), others.join(" or "))
}

/// Returns the error message for a number of replicas that no store has.
fn impossible_replicas(system: System, nodes: u32, most: u32) -> String {
    format!(
        "a trial of {} has an odd number of replicas, at most {most}, and not {nodes}: use --nodes 3",
        system.name()
    )
}

/// Returns the error message for a fault that cannot occur over a carrier.
fn impossible_fault(carrier: Carrier, fault: Fault) -> String {
    let others = Carrier::ALL.into_iter().filter(|other| other.can_have(fault)).map(Carrier::name);
    format!(
        "carrier '{}' cannot have {}: omit it from --faults, or use --carrier {}",
        carrier.name(),
        fault.name(),
        others.collect::<Vec<_>>().join(" or ")
    )
}

fn good(bad: u64, of: u64) -> Done {
    match (bad, of) {
        (0, _) => Ok(()),
        (_, 1) => Err(Failure::NotGood("the run is not good".into())),
        (bad, of) => Err(Failure::NotGood(format!("{bad} of {of} runs are not good"))),
    }
}

fn verdict_on_many(bad: usize, is_unchecked: bool, property: Option<&str>) -> String {
    match (bad, is_unchecked) {
        (0, false) => good_because(property),
        (0, true) => "verdict  not checked: omit --no-check to have the histories checked".into(),
        (bad, _) => format!("verdict  {bad} seeds are not good"),
    }
}

/// Returns the verdict's text for good runs. `property` is the property that was checked; `None` if no run completed.
fn good_because(property: Option<&str>) -> String {
    format!("verdict  good: {}", property.unwrap_or("nothing was wrong"))
}

/// Formats the report of one run, for people.
fn report_text(judged: &Judged) -> String {
    let mut out = Vec::new();
    if let Some(report) = &judged.report {
        let drawn = &report.drawn;
        let options = report.options.iter().map(|option| option.words.clone());
        out.push(format!("{} seed {}", judged.setup.system.name(), judged.seed));
        out.push(format!(
            "drawn    {}; {} clients with {} operations at once, {} operations on {} keys",
            drawn.carrier.name(),
            drawn.clients,
            drawn.tasks,
            drawn.operations,
            drawn.keys
        ));
        out.push(format!("         a store of {} MiB; {}", drawn.quota_mib, listed(options)));
        let focus = drawn.focus.map_or("none", |phase| report.phases.all[phase].name);
        let dropped = match drawn.drop_one_in {
            0 => "none".to_owned(),
            one_in => format!("1 operation in {one_in}"),
        };
        out.push(format!("         faults strike within: {focus}; dropped: {dropped}"));
        let mut totals = Totals::default();
        totals.add(judged);
        out.push(totals.text(&Setup { faults: drawn.faults.clone(), ..judged.setup.clone() }));
        out.push(format!("digest   {:016x}", report.record.digest()));
    }
    out.push(match judged.verdict {
        Verdict::Good => good_because(judged.report.as_ref().map(|report| report.record.property())),
        Verdict::NotChecked => verdict_on_many(0, true, None),
        Verdict::Undecided | Verdict::Violated => judged.to_string(),
    });
    out.join("\n")
}

/// Totals over several runs.
#[derive(Default)]
struct Totals {
    operations: u64,
    events: u64,
    virtual_ns: u64,
    accesses: u64,
    torn_reads: u64,
    counts: Counts,
    struck: [u64; Fault::ALL.len()],
    phases: Option<&'static Phases>,
    property: Option<&'static str>,
    matrix: Matrix,
    /// Numbers of changes of the stores' structure, by their names.
    structure: BTreeMap<&'static str, u64>,
}

impl Totals {
    fn add(&mut self, judged: &Judged) {
        let Some(report) = &judged.report else { return };
        self.operations += report.record.operations() as u64;
        self.events += report.events;
        self.virtual_ns += report.lasted;
        self.accesses += report.seen.accesses;
        self.torn_reads += report.seen.torn_reads;
        let counts = &mut self.counts;
        counts.sessions += report.counts.sessions;
        counts.unknown += report.counts.unknown;
        counts.given_up += report.counts.given_up;
        counts.out_of_memory += report.counts.out_of_memory;
        counts.failed += report.counts.failed;
        counts.conflicts += report.counts.conflicts;
        counts.rebuilds += report.counts.rebuilds;
        for fault in Fault::ALL {
            self.struck[fault as usize] += report.struck.of(fault);
        }
        self.phases = Some(report.phases);
        self.property = Some(report.record.property());
        self.matrix.add(&report.matrix);
        for &(name, count) in &report.counters {
            *self.structure.entry(name).or_default() += count;
        }
    }

    fn text(&self, setup: &Setup) -> String {
        let Totals { operations, events, virtual_ns, accesses, torn_reads, counts, .. } = self;
        let Counts { sessions, unknown, given_up, out_of_memory, failed, conflicts, rebuilds, .. } = counts;
        let struck = possible(setup).filter(|fault| self.struck[*fault as usize] > 0);
        let struck = struck.map(|fault| format!("{} {}", fault.name(), self.struck[fault as usize]));
        let never = possible(setup).filter(|fault| self.struck[*fault as usize] == 0).map(Fault::name);
        format!(
            "ran      {operations} operations, {events} events, {:.3} ms of virtual time\n\
             seen     {accesses} accesses, {torn_reads} torn reads; {sessions} sessions, {unknown} unknown outcomes, \
             {given_up} given up, {failed} failed, {out_of_memory} out of memory, {conflicts} conflicts, \
             {rebuilds} rebuilds\n\
             {}faults   {}\n\
             never    {}{}",
            *virtual_ns as f64 / 1e6,
            self.changes(),
            listed(struck),
            listed(never.map(str::to_owned)),
            self.within_phases(setup)
        )
    }

    /// Formats how often the stores' structure has changed in which way; empty if the family does not count this.
    fn changes(&self) -> String {
        match self.structure.is_empty() {
            true => String::new(),
            false => {
                let counts = self.structure.iter().map(|(name, count)| format!("{name} {count}"));
                format!("changes  {}\n", listed(counts))
            }
        }
    }

    /// Formats how often each fault struck within each phase: one line per fault, one column per phase. `-` means that
    /// the fault cannot strike in that phase.
    fn within_phases(&self, setup: &Setup) -> String {
        let Some(Phases { all, .. }) = self.phases else { return String::new() };
        let mut out = format!("\n{:14}", "within");
        all.iter().for_each(|phase| out += &format!(" {:>9}", phase.name));
        for fault in possible(setup) {
            out += &format!("\n  {:12}", fault.name());
            for (at, phase) in all.iter().enumerate() {
                let times = self.matrix.of(fault, at).to_string();
                let reported = if can_strike(fault, phase, &setup.carriers()) { times.as_str() } else { "-" };
                out += &format!(" {reported:>9}");
            }
        }
        out
    }
}

/// Returns the requested faults that can strike within some phase of the system, over the carrier.
fn possible(setup: &Setup) -> impl Iterator<Item = Fault> + '_ {
    let (phases, carriers) = (setup.system.phases(), setup.carriers());
    let can = move |fault: &Fault| phases.all.iter().any(|phase| can_strike(*fault, phase, &carriers));
    setup.faults.iter().copied().filter(can)
}

fn listed(words: impl Iterator<Item = String>) -> String {
    let words: Vec<String> = words.collect();
    if words.is_empty() { "none".into() } else { words.join(", ") }
}

/// Returns the report of one run as JSON, for scripts.
fn json(judged: &Judged) -> serde_json::Value {
    let Judged { setup, seed, report, verdict, reasons, window } = judged;
    let strikes = |fault: Fault| report.as_ref().map_or(0, |report| report.struck.of(fault));
    let struck = possible(setup).map(|fault| (fault.name().to_owned(), strikes(fault).into()));
    let mut object = serde_json::json!({
        "system": setup.system.name(),
        "seed": seed,
        "verdict": verdict.name(),
        "reasons": reasons,
        "window": window.as_ref().map(|window| &window.text),
        "replay": replay(setup, *seed),
        "struck": struck.collect::<serde_json::Map<_, _>>(),
    });
    if let Some(report) = report {
        let (drawn, counts, seen) = (&report.drawn, report.counts, report.seen);
        object["drawn"] = serde_json::json!({
            "carrier": drawn.carrier.name(),
            "clients": drawn.clients,
            "tasks": drawn.tasks,
            "keys": drawn.keys,
            "operations": drawn.operations,
            "faults": drawn.faults.iter().map(|fault| fault.name()).collect::<Vec<_>>(),
            "nodes": drawn.nodes,
            "quota_bytes": drawn.quota_mib << 20,
            "focus": drawn.focus.map(|phase| report.phases.all[phase].name),
            "within_one_in": drawn.within_one_in,
            "drop_one_in": drawn.drop_one_in,
            "resident": drawn.resident,
            "mishap_one_in": drawn.mishap_one_in,
            "rebuild_one_in": drawn.rebuild_one_in,
            "scan_one_in": drawn.scan_one_in,
        });
        let drawn = object["drawn"].as_object_mut().expect("`drawn` is an object");
        drawn.extend(report.options.iter().map(|option| (option.name.to_owned(), option.value.clone())));
        object["within"] = within(setup, report.phases, &report.matrix);
        object["counts"] = serde_json::json!({
            "sessions": counts.sessions,
            "unknown": counts.unknown,
            "given_up": counts.given_up,
            "out_of_memory": counts.out_of_memory,
            "failed": counts.failed,
            "conflicts": counts.conflicts,
            "rebuilds": counts.rebuilds,
            "accesses": seen.accesses,
            "torn_reads": seen.torn_reads,
            "cut_writes": seen.cut_writes,
        });
        if !report.counters.is_empty() {
            let counts =
                report.counters.iter().map(|(name, count)| (name.replace(' ', "_"), (*count).into()));
            object["structure"] = counts.collect::<serde_json::Map<_, _>>().into();
        }
        object["property"] = report.record.property().into();
        object["operations"] = report.record.operations().into();
        object["events"] = report.events.into();
        object["virtual_ns"] = report.lasted.into();
        object["digest"] = format!("{:016x}", report.record.digest()).into();
    }
    object
}

/// Returns, as JSON, how often each fault struck within each phase. `null` means that the fault cannot strike in that
/// phase.
fn within(setup: &Setup, phases: &Phases, matrix: &Matrix) -> serde_json::Value {
    let names: Vec<&str> = phases.all.iter().map(|phase| phase.name).collect();
    let row = |fault: Fault| {
        let times = phases
            .all
            .iter()
            .enumerate()
            .map(|(at, phase)| can_strike(fault, phase, &setup.carriers()).then(|| matrix.of(fault, at)));
        serde_json::json!({ "fault": fault.name(), "times": times.collect::<Vec<_>>() })
    };
    serde_json::json!({ "phases": names, "struck": possible(setup).map(row).collect::<Vec<_>>() })
}
