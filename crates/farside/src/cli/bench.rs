//! `bench`: measures a system under a workload, or the floor under it.

mod blocks;
mod compare;
mod floor;
mod latch;
mod peers;
mod rpc;
mod session;
mod txn;

use super::{Done, Failure, duration, files, parse_bytes, value_size, warn_of_unused};
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
pub(super) use compare::Compare;
use farside_bench::index::NameKind;
use farside_bench::report::{
    LatencyUs, LoadReport, Spread, YcsbReport, load_text, operations_table, ycsb_table, ycsb_text,
};
use farside_bench::workload::{Chosen, Distribution, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_systems::index::{Indexing, Rung};
use farside_systems::registry::{self, Registered, default_kv};
use farside_systems::system::{Family, Sizing};
pub(super) use floor::{Floor, check_mismatches};
pub(super) use session::{Dropping, NodeProcess, Rounds, Session, SessionConfig, TURN, TemporaryStore, far};
use session::{Keys, Log, Measured, Ordered, Phases, SAMPLED, Subject};
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
    /// Read and write blocks on several replicas
    Blocks(Box<blocks::Blocks>),
    /// Read and change objects under one-sided latches
    Latch(Box<latch::Latch>),
    /// Update several records by transactions (YCSB-T)
    Txn(Box<txn::Txn>),
    /// Send batches of FaSST's calls to nodes that answer at once
    Rpc(Box<rpc::Rpc>),
    /// Measure the same reads and overwrites without a system: the machine's limit
    Floor(floor::Floor),
    /// Compare Farside with Redis, memcached and LMDB on this machine, under the same workload
    Compare(Box<compare::Compare>),
    /// Compare transactions with those of Redis (WATCH, MULTI, EXEC) on this machine
    CompareTxn(Box<compare::CompareTxn>),
    /// Server process of a floor that sends messages; started by 'bench floor'
    #[command(hide = true)]
    FloorServer(floor::FloorServer),
    /// Wrapper that runs a rival's server and exits with 'bench compare', which starts it
    #[command(hide = true)]
    RivalServer(compare::RivalServer),
}

/// A system that `bench` can measure.
pub(super) type System = &'static Registered;

/// Returns the clap parser for the name of a system of these families.
fn systems(families: &[Family]) -> impl TypedValueParser<Value = System> {
    let names = families
        .iter()
        .flat_map(|family| registry::family(*family))
        .filter(|system| !system.for_tests)
        .map(|system| PossibleValue::new(system.kind).help(system.summary));
    PossibleValuesParser::new(names)
        .map(|kind| registry::named(&kind).expect("clap accepts only the listed names"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum FabricArg {
    /// A node in this process
    Local,
    /// A node in its own process, reached through shared memory
    Shm,
    /// A node in its own process, whose engine is reached over UDP
    Udp,
    /// The same over TCP
    Tcp,
    /// The same over TLS
    #[cfg(feature = "tls")]
    Tls,
    /// The same through rings in shared memory
    Ring,
    /// The same over RDMA, by the first RDMA device of this machine
    #[cfg(feature = "verbs")]
    Verbs,
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
            #[cfg(feature = "verbs")]
            FabricArg::Verbs => "verbs",
        }
    }
}

#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
struct Ycsb {
    /// System to measure
    #[arg(long, value_name = "SYSTEM", value_parser = systems(&[Family::Kv, Family::Index]))]
    #[arg(default_value = default_kv().kind)]
    system: System,
    /// Fabric to the node that the command starts [default: shm; with --pool, the URL decides]
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// a, b, c, d, e, f, or a YCSB property file; e, and other scans, only with an index
    #[arg(long, short = 'P', value_name = "a|b|c|d|e|f|PATH", default_value = "c")]
    workload: String,
    /// Override a property of the workload; repeatable. Example: -p readproportion=0.9
    #[arg(long = "property", short = 'p', value_name = "NAME=VALUE")]
    properties: Vec<String>,
    /// Distribution of keys, in place of the workload's
    #[arg(long, value_name = "NAME")]
    distribution: Option<String>,
    /// Records in the store [default: 'recordcount' of your file or of -p, else 1000000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    records: Option<u64>,
    /// Bytes per value, 1 to 16MiB; some systems need less than 60KiB [default: 'fieldcount' times 'fieldlength', else
    /// 512]
    #[arg(long, value_name = "BYTES", value_parser = value_size)]
    value_size: Option<u32>,
    /// Keys of an index: numbers of 8 bytes, or strings like e-mail addresses with the host first. Without scans, they
    /// are scattered; with scans, their order is that of the records [default: numbers]
    #[arg(long, value_enum)]
    keys: Option<KeysArg>,
    /// How many of its techniques the index uses: those of all rungs up to this one. Shows what each brings [default:
    /// write-combining, the last one]
    #[arg(long, value_enum)]
    rung: Option<RungArg>,
    #[command(flatten)]
    measure: Measure,
    /// load: create the store of --store, load it and keep it; run: run on a store loaded that way [default: both, on a
    /// store that is dropped after the run]
    #[arg(long, value_enum, requires = "pool", requires = "store")]
    phase: Option<Phase>,
    /// The store of --phase
    #[arg(long, value_name = "NAME", requires = "phase")]
    store: Option<String>,
    /// Entries of each task's slot cache, at most 16777216; 0 turns it off; no effect on systems without a slot cache
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 24))]
    slot_cache: u32,
    /// Bytes in which each task caches values; 0 turns it off; no effect on systems without a value cache
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    value_cache: u64,
    /// Length of a value from which clients write it themselves [default: that of the system, 1KiB]; no effect on
    /// systems without such a length
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    put_threshold: Option<u64>,
    /// Items that the store's table is sized for, if more than the run needs; a larger table has fewer collisions
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=ITEMS_MAX))]
    items: Option<u64>,
    /// Give each key its own slot, as in the paper's runs
    #[arg(long)]
    collision_free: bool,
    /// Write self-checking values and check that each key is linearizable: no value torn, lost, or seen again after
    /// a newer one. Takes time and 16 bytes per record
    #[arg(long)]
    verify: bool,
    /// Let each task use the keys of one node of --pool, so that no task waits for another node, and report each node's
    /// operations and errors: what the death of a node costs the others
    #[arg(long, requires = "pool", conflicts_with = "target")]
    by_node: bool,
    /// Inject network faults, each with a probability: loss, duplicate, reorder (udp only), delay, reset.
    /// wait=100us..2ms sets the delay of a late datagram, and seed=N the random seed. Example: loss=0.02,reorder=0.02
    #[arg(long, value_name = "NAME=VALUE,...", value_parser = faults)]
    fault: Option<Faults>,
    #[command(flatten)]
    existing: ExistingNode,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// Print the result in YCSB's format
    #[arg(long, conflicts_with = "json")]
    ycsb: bool,
}

/// Kind of the keys of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KeysArg {
    /// Numbers of 8 bytes
    Numbers,
    /// Strings of 22 bytes with long common prefixes: com.kobomaru.mail@tapi
    Emails,
}

/// Rung of the ladder from a plain radix tree to SMART.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RungArg {
    /// A radix tree whose writers lock nodes; an update writes a new leaf
    Art,
    /// Inner nodes are changed without locks
    LockFree,
    /// An update writes the old leaf, under a lock that a request of its own frees
    InPlace,
    /// The WRITE of an update frees the lock
    EmbeddedLock,
    /// Concurrent gets of a key share a READ
    ReadDelegation,
    /// Concurrent puts of a key share a WRITE
    WriteCombining,
}

impl RungArg {
    fn rung(self) -> Rung {
        match self {
            RungArg::Art => Rung::Art,
            RungArg::LockFree => Rung::LockFree,
            RungArg::InPlace => Rung::InPlace,
            RungArg::EmbeddedLock => Rung::EmbeddedLock,
            RungArg::ReadDelegation => Rung::ReadDelegation,
            RungArg::WriteCombining => Rung::WriteCombining,
        }
    }
}

/// How long and how fast to measure, by any family of systems.
#[derive(clap::Args, Clone)]
struct Measure {
    /// Client threads
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Tasks per thread, each with one operation in flight
    #[arg(long, value_name = "K", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// Measured seconds, after the warm-up [default: 'maxexecutiontime' of a workload, else until --operations are
    /// done, else 5]
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Operations to measure; stops earlier after --seconds [default: 'operationcount' of a workload, else no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    operations: Option<u64>,
    /// Warm-up before each measurement, not counted
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = warm_up)]
    warm_up: Duration,
    /// Number of measurements, each with a warm-up; reports the median rate, the minimum and the maximum
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Open loop: start this many operations a second, even if the store does not keep up; each latency starts when the
    /// operation is due [default: closed loop, in which a task starts an operation when its previous one has ended]
    #[arg(long, value_name = "OPS", value_parser = target)]
    target: Option<f64>,
    /// Pause of each task before every operation: measures the cost of an operation after idle time, and of idling
    #[arg(long, value_name = "MS", conflicts_with = "target")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=60_000))]
    idle_ms: Option<u64>,
    /// Time one operation in N [default: 1 in an open loop or with few --operations; else 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    sample_every: Option<u64>,
    /// Write the latencies of each interval to this file, as an HdrHistogram interval log
    #[arg(long, value_name = "FILE")]
    hdr_log: Option<PathBuf>,
    /// Length of an interval of --hdr-log
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval, requires = "hdr_log")]
    interval: Duration,
    /// Added one-way delay to the node: shows the effect of a network. Example: 20us
    #[arg(long, value_name = "TIME", value_parser = one_way)]
    delay: Option<Duration>,
}

/// An existing node, and how to reach it.
#[derive(clap::Args, Clone, Default)]
pub(super) struct ExistingNode {
    /// Use this node instead of starting one; the run creates its own store there, and drops it at the end
    #[arg(long, value_name = "URL")]
    pool: Option<String>,
    /// File with an admin token that has all rights in every store, if the node of --pool requires a token [default:
    /// FARSIDE_TOKEN_FILE, else the settings file, else none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    token_file: Option<String>,
    /// File of certificates to verify the node; only for --pool tls:// [default: FARSIDE_TLS_CA, else the settings
    /// file, else none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    tls_ca: Option<String>,
    /// Send udp:// packets to the node of --pool unencrypted despite the token; the node must be started with the same
    /// flag
    #[arg(long, requires = "pool")]
    insecure_udp: bool,
}

impl ExistingNode {
    fn has_pool(&self) -> bool {
        self.pool.is_some()
    }
}

/// A phase of YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Phase {
    /// Create the store and put the records
    Load,
    /// Run on a loaded store
    Run,
}

/// If a run has fewer operations than this number, every operation is timed.
const ALL_TIMED_BELOW: u64 = 100_000;
/// Maximum number of threads with an index. Some ids are left for clients that have ended and whose leases run.
const INDEX_THREADS_MAX: u32 = 60;
/// Maximum number of records of a store.
const RECORDS_MAX: u64 = 1 << 30;
/// Maximum of `--items`.
const ITEMS_MAX: u64 = 1 << 32;

/// Parses, for clap, a rate in operations a second.
fn target(text: &str) -> Result<f64, String> {
    let target = text.parse().ok().filter(|target| (0.01..=1e9).contains(target));
    target.ok_or_else(|| format!("'{text}' is not a number of operations a second: give 0.01 to 1000000000"))
}

/// Parses, for clap, the duration of a warm-up.
fn warm_up(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(3600);
    let warm_up = duration(text)?;
    if warm_up > MOST {
        return Err(format!("'{text}' is too long for a warm-up: give at most 1h"));
    }
    Ok(warm_up)
}

/// Parses, for clap, the length of a log's intervals.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < Duration::from_millis(1) {
        return Err(format!("'{text}' is too short for an interval: give at least 1ms"));
    }
    Ok(interval)
}

/// Parses, for clap, the one-way delay to add to the way to the node.
fn one_way(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(1);
    let one_way = duration(text)?;
    if one_way > MOST {
        return Err(format!(
            "'{text}' is longer than the one-way delay of any network: give at most {} s",
            MOST.as_secs()
        ));
    }
    Ok(one_way)
}

/// Remedy in the error message if the machine has not enough memory.
const FEWER_RECORDS: &str = "give fewer --records or a smaller --value-size";

/// Returns the remedy for a lack of memory. It mentions `--items` if the user gave that flag.
fn fewer(items: Option<u64>) -> &'static str {
    match items {
        Some(_) => "give fewer --items or --records, or a smaller --value-size",
        None => FEWER_RECORDS,
    }
}

impl Bench {
    pub(super) fn run(self) -> Done {
        match self.what {
            What::Ycsb(ycsb) => ycsb.run(),
            What::Blocks(blocks) => blocks.run(),
            What::Latch(latch) => latch.run(),
            What::Txn(txn) => txn.run(),
            What::Rpc(rpc) => rpc.run(),
            What::Floor(floor) => floor.run(),
            What::FloorServer(server) => server.run(),
            What::Compare(compare) => compare.run(),
            What::CompareTxn(compare) => compare.run(),
            What::RivalServer(server) => server.run(),
        }
    }
}

impl Ycsb {
    fn run(self) -> Done {
        let config = self.config()?;
        let duration = Duration::from_secs_f64(config.seconds);
        self.measure.check_log()?;
        note!("workload {}", config.workload);
        note!("{}", how(&config));
        match self.system.family {
            Family::Index => self.run_on::<Ordered>(config, duration),
            _ => self.run_on::<Keys>(config, duration),
        }
    }

    fn run_on<S: Subject>(self, config: SessionConfig, duration: Duration) -> Done {
        let phases = config.phases.clone();
        let session = Measured::<S>::start(config)?;
        if let Phases::Load(store) = phases {
            return self.tell_load(&store, session.loaded().expect("the load phase has run"));
        }
        let report = self.measure.report(session, duration)?;
        self.tell(&report)?;
        check(report.errors, report.violations)
    }

    /// # Errors
    /// A flag was given that the family of the system does not have.
    fn check_family(&self) -> Done {
        if self.system.family != Family::Index {
            let flags = [("--keys", self.keys.is_some()), ("--rung", self.rung.is_some())];
            return match flags.into_iter().find(|(_, is_given)| *is_given) {
                Some((flag, _)) => Err(Failure::Error(format!(
                    "{} stores have no {flag}: leave it out, or give --system {}",
                    self.system.kind,
                    registry::names(Family::Index)
                ))),
                None => Ok(()),
            };
        }
        if self.rung.is_some() && self.phase == Some(Phase::Run) {
            return Err(Failure::Error(
                "--rung is chosen when a store is created: give it with --phase load, and leave it out of --phase run"
                    .into(),
            ));
        }
        let art = Indexing { rung: Some(Rung::Art), ..Indexing::NONE };
        let parameters = |indexing| (self.system.parameters)(&Sizing { indexing, ..Sizing::default() });
        let has_rungs = parameters(art) != parameters(Indexing::NONE);
        let flags = [
            ("--rung", self.rung.is_some() && !has_rungs),
            ("--items", self.items.is_some()),
            ("--collision-free", self.collision_free),
            ("--by-node", self.by_node),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::Error(format!(
                "{} stores have no {flag}: leave it out, or give another --system",
                self.system.kind
            )));
        }
        if self.measure.threads > INDEX_THREADS_MAX {
            return Err(Failure::Error(format!(
                "an index has ids for 64 clients, and each thread is one: give at most {INDEX_THREADS_MAX} --threads"
            )));
        }
        Ok(())
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        self.check_family()?;
        let mut workload = Workload::resolve_with(&self.workload, &self.properties)?;
        let chosen = workload.chosen;
        workload.records = self.records.or(chosen.records).unwrap_or(1_000_000);
        if workload.records > RECORDS_MAX {
            return Err(Failure::Error(format!(
                "a store cannot hold {} records: give --records, at most {RECORDS_MAX}",
                workload.records
            )));
        }
        if self.items.is_some() && self.phase == Some(Phase::Run) {
            return Err(Failure::Error(
                "--items is the size of a new table: give it with --phase load, or resize the table with \
                 'farside store rebuild'"
                    .into(),
            ));
        }
        if let Some(name) = &self.distribution {
            workload.distribution = Distribution::named(name).ok_or_else(|| {
                Failure::Error(format!("unknown distribution '{name}': name one of {}", Distribution::NAMES))
            })?;
        }
        warn_of_unused(&workload);
        if self.existing.pool.is_some() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Error("--fabric local runs the node in this process: omit --pool".into()));
        }
        if self.verify && self.phase == Some(Phase::Run) {
            return Err(Failure::Error(
                "--verify needs the records that this run loads: omit --phase and --store, so that one run does both"
                    .into(),
            ));
        }
        let (operations, seconds) = self.measure.limits(&chosen);
        workload.operations = operations.unwrap_or(0);
        let value_size = match (self.value_size, chosen.value_size) {
            (Some(bytes), _) => bytes,
            (None, Some(bytes)) => value_size(&bytes.to_string()).map_err(|reason| {
                Failure::Error(format!("fieldcount times fieldlength: {reason}; or give --value-size"))
            })?,
            (None, None) => 512,
        };
        let config = SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size: value_size as usize,
            items: self.items,
            slot_cache: self.slot_cache as usize,
            value_cache: self.value_cache as usize,
            put_threshold: self.put_threshold.map(|bytes| bytes as usize),
            collision_free: self.collision_free,
            verify: self.verify,
            by_node: self.by_node,
            names: match self.keys {
                Some(KeysArg::Emails) => NameKind::Emails,
                Some(KeysArg::Numbers) | None => NameKind::Numbers,
            },
            rung: self.rung.map(RungArg::rung),
            faults: self.fault.clone(),
            phases: match self.phase.zip(self.store.clone()) {
                None => Phases::Both,
                Some((Phase::Load, store)) => Phases::Load(store),
                Some((Phase::Run, store)) => Phases::Run(store),
            },
            ..self.measure.config(self.system, workload, operations, seconds)?
        };
        config.check_items()?;
        Ok(config)
    }

    fn tell_load(&self, store: &str, load: LoadReport) -> Done {
        if self.json {
            print_line!("{}", serde_json::to_string(&load)?);
        } else if self.ycsb {
            print_line!("{}", load_text(&load).trim_end());
        } else {
            let LoadReport { records, seconds, ops_per_s, latency_us: LatencyUs { p50, p99, .. } } = load;
            print_line!(
                "{records} records put into store '{store}' in {seconds:.1} s, {ops_per_s:.0} a second; \
                   p50 {p50:.2} us, p99 {p99:.2} us"
            );
        }
        Ok(())
    }

    fn tell(&self, report: &YcsbReport) -> Done {
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?);
            return Ok(());
        }
        if self.ycsb {
            print_line!("{}", ycsb_text(report).trim_end());
            return Ok(());
        }
        show(report)
    }
}

impl Measure {
    fn check_log(&self) -> Done {
        self.hdr_log.as_deref().map_or(Ok(()), files::check_writable)
    }

    fn has_log(&self) -> bool {
        self.hdr_log.is_some()
    }

    /// Number of operations of a repeat, and its maximum length in seconds. If the number of operations is given, only
    /// an explicit `--seconds` limits the time.
    fn limits(&self, chosen: &Chosen) -> (Option<u64>, f64) {
        let operations = self.operations.or(chosen.operations.filter(|_| self.seconds.is_none()));
        let seconds_max = if operations.is_some() { SECONDS_MAX } else { 5.0 };
        let seconds = self.seconds.or(chosen.seconds.map(|seconds| seconds as f64)).unwrap_or(seconds_max);
        (operations, seconds)
    }

    /// Returns a plan with these settings.
    fn config(
        &self,
        system: System,
        workload: Workload,
        operations: Option<u64>,
        seconds: f64,
    ) -> Result<SessionConfig, Failure> {
        Ok(SessionConfig {
            idle: self.idle_ms.map(Duration::from_millis),
            threads: self.threads,
            tasks: self.tasks,
            distance: self.delay.map(|one_way| Distance { one_way, ..Distance::default() }),
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
            ..SessionConfig::new(system, workload)
        })
    }

    /// Measures, and tells the user what happens meanwhile.
    ///
    /// # Errors
    /// No operation completed.
    fn report<S: Subject>(&self, session: Measured<S>, duration: Duration) -> Result<YcsbReport, Failure> {
        self.report_and(session, duration, |_, _| Ok(()))
    }

    /// Measures like [`Measure::report`], then calls `after`, which may add to the report.
    ///
    /// # Errors
    /// No operation completed, or those of `after`.
    fn report_and<S: Subject>(
        &self,
        session: Measured<S>,
        duration: Duration,
        after: impl FnOnce(&Measured<S>, &mut YcsbReport) -> Done,
    ) -> Result<YcsbReport, Failure> {
        note!("warming up, then measuring {} ...", self.how_long(duration));
        let mut report = session.measure(duration)?;
        after(&session, &mut report)?;
        if let Some(strikes) = session.strikes() {
            note!("faults: {strikes}");
        }
        drop(session);
        if let Some(target) = report.target_ops_per_s.filter(|target| report.ops_per_s < 0.95 * target) {
            note!(
                "farside: {:.0} of {target} operations a second were done: the store or the client is too slow, or \
                 stalled; the latencies include the time that each operation waited",
                report.ops_per_s
            );
        }
        if (report.ops_per_s, report.errors) == (0.0, 0) {
            return Err(nothing_done());
        }
        Ok(report)
    }

    fn how_long(&self, duration: Duration) -> String {
        let times = if self.repeats > 1 { format!(", {} times", self.repeats) } else { String::new() };
        match duration.as_secs_f64() {
            SECONDS_MAX => format!("until all operations are done{times}"),
            seconds => format!("for {seconds} s{times}"),
        }
    }
}

/// # Errors
/// Operations failed, or values were wrong.
fn check(errors: u64, violations: u64) -> Done {
    match (errors, violations) {
        (0, 0) => Ok(()),
        _ => Err(Failure::Error(format!("{errors} operations failed, {violations} values were wrong"))),
    }
}

fn nothing_done() -> Failure {
    Failure::Error("no operation completed during the measurement: give more --seconds".into())
}

/// Prints a report as tables.
fn show(report: &YcsbReport) -> Done {
    print_line!("{}", ycsb_table(std::slice::from_ref(report)));
    print_line!("{}", operations_table(report).to_string().trim_end());
    for (name, count) in &report.index {
        print_line!("{:<24}{count:>12}", name.replace('_', " "));
    }
    for (name, count) in &report.transactions {
        print_line!("{:<24}{count:>12}", name.replace('_', " "));
    }
    for node in &report.nodes {
        let rates: Vec<String> = node.repeats_ops_per_s.iter().map(|rate| format!("{rate:.0}")).collect();
        print_line!(
            "{}: {} operations done, {} failed; ops/s {}",
            node.url,
            node.operations,
            node.errors,
            rates.join(", ")
        );
    }
    let rates = &report.repeats_ops_per_s;
    if let Some(Spread { median, min, max }) = Spread::of(rates).filter(|_| rates.len() > 1) {
        print_line!(
            "ops/s is the median of {} repeats, from {min:.0} to {max:.0}: {:.1} % apart",
            rates.len(),
            100.0 * (max - min) / median
        );
    }
    Ok(())
}

/// Describes the settings in force besides the workload, for people.
fn how(config: &SessionConfig) -> String {
    let SessionConfig { value_size, threads, tasks, sampled, .. } = config;
    let plural = |count: u32| if count == 1 { "" } else { "s" };
    let pace = match (config.target, config.idle) {
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

/// Parses, for clap, a list of faults such as `loss=0.02,wait=1ms..5ms,seed=7`.
fn faults(text: &str) -> Result<Faults, String> {
    let mut faults = Faults::default();
    for part in text.split(',') {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| format!("'{part}' is not a fault: write it like loss=0.02"))?;
        let probability = match name {
            "loss" => &mut faults.loss,
            "duplicate" => &mut faults.duplicate,
            "reorder" => &mut faults.reorder,
            "delay" => &mut faults.delay,
            "reset" => &mut faults.reset,
            "seed" => {
                faults.seed =
                    value.parse().map_err(|_| format!("'{value}' is not a seed: give a whole number"))?;
                continue;
            }
            "wait" => {
                let (least, most) = value.split_once("..").unwrap_or((value, value));
                faults.wait = duration(least)?..=duration(most)?;
                continue;
            }
            _ => {
                return Err(format!(
                    "unknown fault '{name}': the faults are loss, duplicate, reorder, delay and reset; \
                     the settings are wait and seed"
                ));
            }
        };
        *probability =
            value.parse().map_err(|_| format!("'{value}' is not a probability of {name}: give 0 to 1"))?;
    }
    faults.check(false).map_err(|impossible| impossible.0)?;
    Ok(faults)
}

/// Maximum of `--seconds`. It also stands for "no limit".
const SECONDS_MAX: f64 = 1e6;

fn checked_seconds(seconds: f64) -> Result<f64, Failure> {
    if (0.01..=SECONDS_MAX).contains(&seconds) {
        Ok(seconds)
    } else {
        Err(Failure::Error(format!("--seconds {seconds}: give 0.01 to {SECONDS_MAX}")))
    }
}

fn seconds(seconds: f64) -> Result<Duration, Failure> {
    checked_seconds(seconds).map(Duration::from_secs_f64)
}
