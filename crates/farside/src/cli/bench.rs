//! `bench`: a system under a workload, or the floor under it.

mod compare;
mod floor;
mod session;

use super::{Done, Failure, duration, files, value_size, warn_of_unused};
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
pub(super) use compare::Compare;
use farside_bench::report::{
    LatencyUs, LoadReport, Spread, YcsbReport, load_text, operations_table, ycsb_table, ycsb_text,
};
use farside_bench::workload::{Distribution, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_systems::registry::{self, Registered, usual};
use farside_systems::system::Family;
pub(super) use floor::{Floor, is_right};
pub(super) use session::{Asked, Lent, NodeProcess, Rounds, Session, TURN, far};
use session::{Log, Phases, SAMPLED};
use std::path::PathBuf;
use std::time::Duration;

/// Measure a system, or the physical floor under it.
#[derive(clap::Args)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Drive a system through a YCSB workload
    Ycsb(Box<Ycsb>),
    /// Do the same fetch by hand: what the machine allows
    Floor(floor::Floor),
    /// Put Farside beside Redis, memcached and LMDB, on this machine and under one workload
    Compare(Box<compare::Compare>),
    /// The other end of a floor that sends messages; 'bench floor' starts it
    #[command(hide = true)]
    FloorServer(floor::FloorServer),
    /// Another program that ends with this one; 'bench compare' starts it
    #[command(hide = true)]
    RivalServer(compare::RivalServer),
}

/// A system that can be measured.
pub(super) type System = &'static Registered;

/// For clap: a system by its name.
fn systems() -> impl TypedValueParser<Value = System> {
    let names =
        registry::family(Family::Kv).map(|system| PossibleValue::new(system.kind).help(system.summary));
    PossibleValuesParser::new(names).map(|kind| registry::named(&kind).expect("it is one of those listed"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum FabricArg {
    /// A node in this process
    Local,
    /// A node in a process of its own, by shared memory
    Shm,
    /// A node in a process of its own, whose engine is asked over UDP
    Udp,
    /// The same over TCP
    Tcp,
    /// The same over TLS
    #[cfg(feature = "tls")]
    Tls,
    /// The same by rings in shared memory
    Ring,
}

impl FabricArg {
    pub(super) fn name(self) -> &'static str {
        match self {
            FabricArg::Local => "local",
            FabricArg::Shm => "shm",
            FabricArg::Udp => "udp",
            FabricArg::Tcp => "tcp",
            #[cfg(feature = "tls")]
            FabricArg::Tls => "tls",
            FabricArg::Ring => "ring",
        }
    }
}

#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // So that one is refused by what it is for.
struct Ycsb {
    /// Which system
    #[arg(long, value_name = "SYSTEM", value_parser = systems(), default_value = usual().kind)]
    system: System,
    /// What carries the requests to the node that is started: shm if left out; of the node of --pool its url says it
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// a, b, c, d, f, or a YCSB property file
    #[arg(long, short = 'P', value_name = "a|b|c|d|f|PATH", default_value = "c")]
    workload: String,
    /// A property in place of the workload's own, as often as wanted: for example -p readproportion=0.9
    #[arg(long = "property", short = 'p', value_name = "NAME=VALUE")]
    properties: Vec<String>,
    /// Which keys are asked for, in place of what the workload says
    #[arg(long, value_name = "NAME")]
    distribution: Option<String>,
    /// Records in the store [default: 'recordcount' of a file of yours or of -p, or 1000000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    records: Option<u64>,
    /// Bytes of a value, 1 to 16MiB; some systems: under 60KiB [default: 'fieldcount' times 'fieldlength', or 512]
    #[arg(long, value_name = "BYTES", value_parser = value_size)]
    value_size: Option<u32>,
    /// Client threads
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Tasks per thread, each with one operation under way
    #[arg(long, value_name = "K", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// How long to measure, after a warm-up [default: 'maxexecutiontime', or until --operations are done, or 5]
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// How many operations to measure, if --seconds are not over before [default: 'operationcount', or no end]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    operations: Option<u64>,
    /// What comes before, and is not counted
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = warm_up)]
    warm_up: Duration,
    /// Measure so often, each with a warm-up; the rate told is the median, beside the least and the most
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// An open loop: so many operations a second are due, whether the store keeps up or not, and the latency of each
    /// begins when it was due [default: a closed loop, in which each task's next one begins when its last has ended]
    #[arg(long, value_name = "OPS", value_parser = target)]
    target: Option<f64>,
    /// Wait so long before each operation: what one costs after idleness, and what idleness costs
    #[arg(long, value_name = "MS", conflicts_with = "target")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=60_000))]
    idle_ms: Option<u64>,
    /// Time one operation in so many [default: all in an open loop, or of few --operations; else one in 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    sample_every: Option<u64>,
    /// Write the latencies of each interval to this file, as HdrHistogram's interval logs have them
    #[arg(long, value_name = "FILE")]
    hdr_log: Option<PathBuf>,
    /// How long such an interval is
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval, requires = "hdr_log")]
    interval: Duration,
    /// load: make the store of --store and load it, and leave it there; run: run on what was loaded so [default: both,
    /// on a store that goes with the run]
    #[arg(long, value_enum, requires = "pool", requires = "store")]
    phase: Option<Phase>,
    /// The store of --phase
    #[arg(long, value_name = "NAME", requires = "phase")]
    store: Option<String>,
    /// Keys whose slots each task remembers, at most 16777216; 0 for none, and for a system that remembers none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 24))]
    slot_cache: u32,
    /// Items that the store's table is made for, if more than there will be: fewer keys share a slot in a larger one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ITEMS_MAX))]
    items: Option<u64>,
    /// Give each key a slot of its own, as in the paper's runs
    #[arg(long)]
    collision_free: bool,
    /// Make values prove themselves, and hold every key to be one register: no value torn, none lost, none that comes
    /// back. Takes time and 16 bytes a record
    #[arg(long)]
    verify: bool,
    /// Put the node so far away, one way: what would this be worth over such a network? For example 20us
    #[arg(long, value_name = "TIME", value_parser = one_way)]
    delay: Option<Duration>,
    /// Let datagrams meet with faults, each with a probability: loss, duplicate, reorder (udp alone), delay, reset;
    /// wait=100us..2ms says how long a late one takes, and seed=N draws others. For example loss=0.02,reorder=0.02
    #[arg(long, value_name = "NAME=VALUE,...", value_parser = faults)]
    fault: Option<Faults>,
    #[command(flatten)]
    there: There,
    /// The result as one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// The result as YCSB prints it
    #[arg(long, conflicts_with = "json")]
    ycsb: bool,
}

/// A node that is there, and what it takes to reach it.
#[derive(clap::Args, Clone, Default)]
pub(super) struct There {
    /// Use this node instead of starting one; the run makes a store of its own there, and drops it at the end
    #[arg(long, value_name = "URL")]
    pool: Option<String>,
    /// A file with an admin's token that may do all in every store, if the node of --pool asks for one [default:
    /// FARSIDE_TOKEN_FILE, the settings file, or none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    token_file: Option<String>,
    /// A file of certificates, for --pool tls:// alone [default: FARSIDE_TLS_CA, the settings file, or none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    tls_ca: Option<String>,
    /// Send udp:// packets to the node of --pool in the clear although there is a token, if it was started so
    #[arg(long, requires = "pool")]
    insecure_udp: bool,
}

/// One of YCSB's two phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Phase {
    /// Makes the store and puts the records
    Load,
    /// Runs on what was loaded
    Run,
}

/// So few operations are all timed.
const ALL_TIMED_BELOW: u64 = 100_000;
/// Most records of a store.
const RECORDS_MAX: u64 = 1 << 30;
/// And most items that a table can be asked for.
const ITEMS_MAX: u64 = 1 << 32;

/// For clap: operations a second.
fn target(text: &str) -> Result<f64, String> {
    let target = text.parse().ok().filter(|target| (0.01..=1e9).contains(target));
    target.ok_or_else(|| format!("'{text}' is no number of operations a second: give 0.01 to 1000000000"))
}

/// For clap: how long a warm-up is.
fn warm_up(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(3600);
    let warm_up = duration(text)?;
    if warm_up > MOST {
        return Err(format!("'{text}' is too long for a warm-up: give 1h at most"));
    }
    Ok(warm_up)
}

/// For clap: how long an interval of a log is.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < Duration::from_millis(1) {
        return Err(format!("'{text}' is too short for an interval: give 1ms at least"));
    }
    Ok(interval)
}

/// For clap: how long one way to the node takes.
fn one_way(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(1);
    let one_way = duration(text)?;
    if one_way > MOST {
        return Err(format!(
            "'{text}' one way is farther than any network: give {} s at most",
            MOST.as_secs()
        ));
    }
    Ok(one_way)
}

/// What to do where the memory that is wanted is not there.
const FEWER_RECORDS: &str = "ask for fewer --records or a smaller --value-size";

/// The same for whoever said how large the table is to be, if he did.
fn fewer(items: Option<u64>) -> &'static str {
    match items {
        Some(_) => "ask for fewer --items or --records, or a smaller --value-size",
        None => FEWER_RECORDS,
    }
}

impl Bench {
    pub(super) fn run(self) -> Done {
        match self.what {
            What::Ycsb(ycsb) => ycsb.run(),
            What::Floor(floor) => floor.run(),
            What::FloorServer(server) => server.run(),
            What::Compare(compare) => compare.run(),
            What::RivalServer(server) => server.run(),
        }
    }
}

impl Ycsb {
    fn run(self) -> Done {
        let asked = self.asked()?;
        let duration = Duration::from_secs_f64(asked.seconds);
        if let Some(path) = &self.hdr_log {
            files::can_be_written(path)?;
        }
        note!("workload {}", asked.workload);
        note!("{}", how(&asked));
        let phases = asked.phases.clone();
        let session = Session::start(asked)?;
        if let Phases::Load(store) = phases {
            return self.tell_load(&store, session.loaded().expect("it was loaded just now"));
        }
        note!("warming up, then measuring {} ...", self.how_long(duration));
        let report = session.measure(duration)?;
        if let Some(strikes) = session.strikes() {
            note!("faults: {strikes}");
        }
        drop(session);
        if let Some(target) = report.target_ops_per_s.filter(|target| report.ops_per_s < 0.95 * target) {
            note!(
                "farside: {:.0} operations a second were done of the {target} that were due: this store or this client \
                 cannot do more, or stood still; the latencies tell how late each was",
                report.ops_per_s
            );
        }
        if (report.ops_per_s, report.errors) == (0.0, 0) {
            return Err(Failure::Told(
                "no operation came to its end while it was measured: give more --seconds".into(),
            ));
        }
        self.tell(&report)?;
        match (report.errors, report.violations) {
            (0, 0) => Ok(()),
            (errors, violations) => {
                Err(Failure::Told(format!("{errors} operations failed, {violations} values were wrong")))
            }
        }
    }

    fn asked(&self) -> Result<Asked, Failure> {
        let mut workload = Workload::resolve_with(&self.workload, &self.properties)?;
        let chosen = workload.chosen;
        workload.records = self.records.or(chosen.records).unwrap_or(1_000_000);
        if workload.records > RECORDS_MAX {
            return Err(Failure::Told(format!(
                "{} records are more than a store can have: give --records, at most {RECORDS_MAX}",
                workload.records
            )));
        }
        if self.items.is_some() && self.phase == Some(Phase::Run) {
            return Err(Failure::Told(
                "--items is for a table that is made: give it with --phase load, or give the store another by \
                 'farside store rebuild'"
                    .into(),
            ));
        }
        if let Some(name) = &self.distribution {
            workload.distribution = Distribution::named(name).ok_or_else(|| {
                Failure::Told(format!(
                    "there is no distribution '{name}': name one of {}",
                    Distribution::NAMES
                ))
            })?;
        }
        warn_of_unused(&workload);
        if self.there.pool.is_some() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Told(
                "--fabric local has its node in this process: leave --pool out".into(),
            ));
        }
        if self.verify && self.phase == Some(Phase::Run) {
            return Err(Failure::Told(
                "--verify must know what was loaded: leave --phase and --store out, so that both are done in one run"
                    .into(),
            ));
        }
        // Who says how much to do, says how long it may take only by saying so, too.
        let operations = self.operations.or(chosen.operations.filter(|_| self.seconds.is_none()));
        workload.operations = operations.unwrap_or(0);
        let seconds_max = if operations.is_some() { SECONDS_MAX } else { 5.0 };
        let seconds = self.seconds.or(chosen.seconds.map(|seconds| seconds as f64)).unwrap_or(seconds_max);
        let value_size = match (self.value_size, chosen.value_size) {
            (Some(bytes), _) => bytes,
            (None, Some(bytes)) => value_size(&bytes.to_string()).map_err(|reason| {
                Failure::Told(format!("fieldcount times fieldlength: {reason}; or give --value-size"))
            })?,
            (None, None) => 512,
        };
        let asked = Asked {
            fabric: self.fabric,
            there: self.there.clone(),
            idle: self.idle_ms.map(Duration::from_millis),
            value_size: value_size as usize,
            items: self.items,
            threads: self.threads,
            tasks: self.tasks,
            slot_cache: self.slot_cache as usize,
            collision_free: self.collision_free,
            verify: self.verify,
            distance: self.delay.map(|one_way| Distance { one_way, ..Distance::default() }),
            faults: self.fault.clone(),
            sampled: self.sample_every.unwrap_or(match operations {
                Some(operations) if operations < ALL_TIMED_BELOW => 1,
                _ => SAMPLED,
            }),
            target: self.target,
            operations,
            seconds: checked_seconds(seconds)?,
            warm_up: self.warm_up,
            repeats: self.repeats,
            log: self.hdr_log.clone().map(|path| Log { path, every: self.interval }),
            phases: match self.phase.zip(self.store.clone()) {
                None => Phases::Both,
                Some((Phase::Load, store)) => Phases::Load(store),
                Some((Phase::Run, store)) => Phases::Run(store),
            },
            ..Asked::new(self.system, workload)
        };
        asked.check_items()?;
        Ok(asked)
    }

    fn how_long(&self, duration: Duration) -> String {
        let times = if self.repeats > 1 { format!(", {} times", self.repeats) } else { String::new() };
        match duration.as_secs_f64() {
            SECONDS_MAX => format!("until all is done{times}"),
            seconds => format!("for {seconds} s{times}"),
        }
    }

    fn tell_load(&self, store: &str, load: LoadReport) -> Done {
        if self.json {
            tell!("{}", serde_json::to_string(&load)?);
        } else if self.ycsb {
            tell!("{}", load_text(&load).trim_end());
        } else {
            let LoadReport { records, seconds, ops_per_s, latency_us: LatencyUs { p50, p99, .. } } = load;
            tell!(
                "{records} records put into store '{store}' in {seconds:.1} s, {ops_per_s:.0} a second; \
                   p50 {p50:.2} us, p99 {p99:.2} us"
            );
        }
        Ok(())
    }

    fn tell(&self, report: &YcsbReport) -> Done {
        if self.json {
            tell!("{}", serde_json::to_string(&report)?);
            return Ok(());
        }
        if self.ycsb {
            tell!("{}", ycsb_text(report).trim_end());
            return Ok(());
        }
        tell!("{}", ycsb_table(std::slice::from_ref(report)));
        tell!("{}", operations_table(report).to_string().trim_end());
        let rates = &report.repeats_ops_per_s;
        if let Some(Spread { median, min, max }) = Spread::of(rates).filter(|_| rates.len() > 1) {
            tell!(
                "ops/s is the median of {} repeats, from {min:.0} to {max:.0}: {:.1} % apart",
                rates.len(),
                100.0 * (max - min) / median
            );
        }
        Ok(())
    }
}

/// What is effective, beside the workload.
fn how(asked: &Asked) -> String {
    let Asked { value_size, threads, tasks, sampled, .. } = asked;
    let plural = |count: u32| if count == 1 { "" } else { "s" };
    let pace = match (asked.target, asked.idle) {
        (Some(target), _) => format!(
            "an open loop: {target} operations a second are due, and a latency begins when its operation was due"
        ),
        (None, Some(idle)) => format!("a closed loop, with {idle:?} before each operation"),
        (None, None) => format!("a closed loop; one operation in {sampled} is timed"),
    };
    format!(
        "values of {value_size} bytes; {threads} thread{} of {tasks} task{}; {pace}",
        plural(*threads),
        plural(*tasks)
    )
}

/// For clap: faults, such as `loss=0.02,wait=1ms..5ms,seed=7`.
fn faults(text: &str) -> Result<Faults, String> {
    let mut faults = Faults::default();
    for part in text.split(',') {
        let (name, value) =
            part.split_once('=').ok_or_else(|| format!("'{part}' is no fault: write it like loss=0.02"))?;
        let probability = match name {
            "loss" => &mut faults.loss,
            "duplicate" => &mut faults.duplicate,
            "reorder" => &mut faults.reorder,
            "delay" => &mut faults.delay,
            "reset" => &mut faults.reset,
            "seed" => {
                faults.seed =
                    value.parse().map_err(|_| format!("'{value}' is no seed: give a whole number"))?;
                continue;
            }
            "wait" => {
                let (least, most) = value.split_once("..").unwrap_or((value, value));
                faults.wait = duration(least)?..=duration(most)?;
                continue;
            }
            _ => {
                return Err(format!(
                    "there is no fault '{name}': name loss, duplicate, reorder, delay or reset, or wait or seed"
                ));
            }
        };
        *probability =
            value.parse().map_err(|_| format!("'{value}' is no probability of {name}: give 0 to 1"))?;
    }
    faults.check(false).map_err(|impossible| impossible.0)?;
    Ok(faults)
}

/// As good as no end: for so long nothing is measured.
const SECONDS_MAX: f64 = 1e6;

fn checked_seconds(seconds: f64) -> Result<f64, Failure> {
    if (0.01..=SECONDS_MAX).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(Failure::Told(format!("--seconds {seconds}: give 0.01 to {SECONDS_MAX}")))
    }
}

fn seconds(seconds: f64) -> Result<Duration, Failure> {
    checked_seconds(seconds).map(Duration::from_secs_f64)
}
