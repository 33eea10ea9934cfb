//! `bench compare`: compares Farside with Redis, memcached and LMDB on this machine, under the same workload.
//!
//! A *contender* is Farside over one fabric, or a rival. All contenders have the same records, operations, connections
//! and operations in flight. In every round, each contender has one *turn*: an interval in which it runs alone. So
//! other load on the machine affects all contenders alike. In a turn, clients connect, warm up, and count.
//!
//! Invariant: a wrong value or a failed operation ends the comparison, so all reported operations were correct.
//! Invariant: a rival's requests are sent in the number of batches with which it is fastest.

mod cores;
mod lanes;
mod output;
mod servers;
mod transactions;

use super::session::SessionConfig;
use super::{Done, FabricArg, Failure, Session, fewer, seconds};
use crate::cli::files::Folder;
use crate::cli::machine::Machine;
use crate::cli::{check_available, progress, value_size, warn_of_unused};
use clap::ValueEnum;
use cores::Cores;
use farside::config;
use farside_bench::compare::memcached::Memcached;
use farside_bench::compare::redis::{Get, OfBenchmark};
use farside_bench::compare::rows::{self, CompareReport};
use farside_bench::compare::{self, Address, Client, Dialect, Waiting};
use farside_bench::kv::{Run, Thread};
use farside_bench::report::{LatencyUs, Spread};
use farside_bench::workload::{Distribution, Workload};
use farside_systems::registry::default_kv;
use farside_systems::system::Sizing;
use lanes::{Contender, Lane};
pub(super) use servers::RivalServer;
use servers::{Server, memcached_table};
use std::time::Duration;
pub(super) use transactions::CompareTxn;

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(in crate::cli) struct Compare {
    /// Rivals to compare with [default: all that are installed]
    #[arg(long, value_enum, value_name = "NAME,...", value_delimiter = ',')]
    rivals: Option<Vec<Rival>>,
    /// Fabrics of Farside to measure
    #[arg(
        long,
        value_enum,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "udp,tcp,ring,shm"
    )]
    fabrics: Vec<FabricArg>,
    /// a, b, c, or a YCSB property file; repeat the flag to measure several
    #[arg(long = "workload", value_name = "a|b|c|PATH", default_values = ["c", "a"])]
    workloads: Vec<String>,
    /// Distribution of keys, such as uniform or zipfian
    #[arg(long, value_name = "NAME", default_value = "uniform")]
    distribution: String,
    /// Records in each store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 28))]
    records: u64,
    /// Items that the tables of Farside and memcached are sized for; larger tables have fewer collisions [default:
    /// twice the records]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    items: Option<u64>,
    /// Bytes per value, 1 to 60000
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// Client threads, each with one connection
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Operations in flight per connection; one at a time is measured as well
    #[arg(long, value_name = "K", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,
    /// Rounds; each contender has one turn in every round
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measured seconds of a turn, after its warm-up
    #[arg(long, value_name = "S", default_value_t = 0.25)]
    seconds: f64,
    /// Print one JSON object a line instead of tables
    #[arg(long)]
    json: bool,
    /// Measures contenders with a server under the first placement only.
    #[arg(skip)]
    is_brief: bool,
}

/// Outcome of a comparison with rivals.
#[derive(Default)]
pub(in crate::cli) struct Comparison {
    pub(in crate::cli) reports: Vec<CompareReport>,
    /// Names of the compared systems, each with its release.
    pub(in crate::cli) versions: Vec<String>,
    /// Skipped rivals, each with the reason and the remedy.
    pub(in crate::cli) skipped: Vec<String>,
    /// Description of the cores of servers and clients, and of the distance between them.
    pub(in crate::cli) cores: String,
    /// Time in which a cache line moves from the server's core to the client's, in nanoseconds.
    distance_ns: Option<Spread>,
    /// Number of records that `redis-benchmark` requested; `None` if it did not run.
    benchmarked: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rival {
    /// redis-server, found on PATH
    Redis,
    /// memcached, found on PATH
    Memcached,
    /// LMDB, built in
    Lmdb,
}

/// The longest value that all rivals accept and all fabrics carry, in bytes.
const VALUE_MAX: u32 = 60_000;
/// Maximum number of records that `redis-benchmark` requests.
const BENCHMARKED_MAX: u64 = 100_000;
/// Maximum number of bytes that a rival needs for a record besides its value.
const BESIDES_VALUE: u64 = 160;
/// Maximum number of bytes that a rival needs without any record.
const BESIDES_RECORDS: u64 = 128 << 20;

impl Compare {
    pub(super) fn run(self) -> Done {
        // All workloads are checked before the first one is measured, which takes minutes.
        let workloads = self.workloads.iter().map(|named| self.workload(named));
        let workloads = workloads.collect::<Result<Vec<_>, Failure>>()?;
        workloads.iter().try_for_each(|workload| self.measure_and_print(workload))
    }

    fn measure_and_print(&self, workload: &Workload) -> Done {
        let mut machine = Machine::current();
        let comparison = self.measure(workload)?;
        machine.record_end_load();
        if self.json {
            for report in &comparison.reports {
                let mut object = serde_json::to_value(report)?;
                object["turn_seconds"] = self.seconds.into();
                object["table_items"] = self.items().into();
                object["distance_ns"] = serde_json::to_value(comparison.distance_ns)?;
                object["machine"] = serde_json::to_value(&machine)?;
                print_line!("{object}");
            }
            return Ok(());
        }
        print_line!("Workload {workload}; values of {} bytes.", self.value_size);
        print_line!(
            "{} client thread{} with a connection each; {} round{} of {} s each; {}.",
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.rounds,
            if self.rounds == 1 { "" } else { "s" },
            self.seconds,
            comparison.cores
        );
        print_line!("{}.", comparison.versions.join("; "));
        print_line!("{}.", machine.description());
        output::print_tables(&comparison.reports)?;
        let tables = output::table_sizes(&comparison.reports, self.records, self.items());
        output::print_notes(
            &comparison.reports,
            comparison.benchmarked,
            tables,
            Cores::of_this_process()?.count(),
        )
    }

    /// Compares Farside with all installed rivals:
    /// - One client thread reads uniformly distributed keys, with one operation in flight and with 64.
    /// - A server has its own core if the machine has two. The client polls.
    /// - Rivals that are missing, or for which there is not enough memory, are skipped.
    pub(in crate::cli) fn brief(
        records: u64,
        value_size: u32,
        rounds: u32,
        turn: Duration,
    ) -> Result<Comparison, Failure> {
        let compare = Compare {
            rivals: None,
            fabrics: vec![FabricArg::Udp, FabricArg::Tcp, FabricArg::Ring, FabricArg::Shm],
            workloads: vec![],
            distribution: "uniform".into(),
            records,
            items: None,
            value_size,
            threads: 1,
            depth: 64,
            rounds,
            seconds: turn.as_secs_f64(),
            json: false,
            is_brief: true,
        };
        let found = compare.find()?;
        let skipped = match compare.check_memory(&found) {
            _ if found.is_empty() => found.skipped,
            Err(Failure::Error(reason)) => vec![format!("the rivals: {reason}")],
            _ => return compare.measure(&compare.workload("c")?),
        };
        Ok(Comparison { skipped, ..Comparison::default() })
    }

    fn measure(&self, workload: &Workload) -> Result<Comparison, Failure> {
        let turn = seconds(self.seconds)?;
        if self.value_size > VALUE_MAX {
            return Err(Failure::Error(format!(
                "--value-size {}: give at most {VALUE_MAX}, which every contender carries in one response",
                self.value_size
            )));
        }
        if self.fabrics.contains(&FabricArg::Local) {
            return Err(Failure::Error(
                "--fabrics local runs the node in this process, without a server to compare: name udp, tcp, ring or shm"
                    .into(),
            ));
        }
        let config = self.config(workload);
        config.check_items()?;
        let cores = Cores::of_this_process()?;
        let found = self.find()?;
        if found.is_empty() {
            return Err(Failure::Error(
                "no rival is available: install redis-server and memcached, for example with 'apt-get install \
                 redis-server memcached'"
                    .into(),
            ));
        }
        self.check_memory(&found)?;
        warn_of_unused(workload);
        found.skipped.iter().for_each(|reported| note!("farside: {reported}; skipped"));
        note!("workload {workload}; values of {} bytes", self.value_size);
        let folder = Folder::make("compare").map_err(Failure::Error)?;
        let skipped = found.skipped.clone();
        let contenders = self.start(config, found, &folder)?;
        let mut lanes = self.lanes(&contenders, &cores);
        let run = contenders.run();
        let threads_max = lanes.iter().map(|lane| lane.way.threads).max().unwrap_or(0);
        let mut threads: Vec<Thread> = (0..threads_max).map(|thread| run.thread(thread)).collect();
        let runner = lanes::TurnRunner { contenders: &contenders, cores: &cores, length: turn };
        note!("finding the fastest number of batches for each rival ...");
        for lane in &mut lanes {
            runner.choose_shape(lane, &mut threads)?;
        }
        let bar = progress("measuring in turn", u64::from(self.rounds) * lanes.len() as u64, false);
        let mut distances_ns = Vec::new();
        for _ in 0..self.rounds {
            for lane in &mut lanes {
                distances_ns.extend(cores.distance_ns()?);
                runner.take_turn(lane, &mut threads)?;
                bar.inc(1);
            }
            lanes::rate_round(&mut lanes);
        }
        bar.finish_and_clear();
        let distance_ns = Spread::of(&distances_ns);
        let distance_text = distance_ns.as_ref().map(cores::describe_distance);
        Ok(Comparison {
            reports: lanes.iter().map(|lane| self.report(workload, &contenders, lane)).collect(),
            versions: Contender::versions(&contenders),
            skipped,
            cores: [Some(cores.description()), distance_text]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join("; "),
            distance_ns,
            benchmarked: contenders.benchmark.as_ref().map(|(_, records)| *records),
        })
    }

    /// Returns the number of items that the tables are sized for, so that no table grows during the measurement. The
    /// default is twice the records, because a real table is not full from the start.
    fn items(&self) -> u64 {
        self.items.unwrap_or(2 * self.records)
    }

    /// Returns the plan for the measurement of Farside.
    fn config(&self, workload: &Workload) -> SessionConfig {
        SessionConfig {
            fabric: Some(FabricArg::Shm),
            value_size: self.value_size as usize,
            items: Some(self.items()),
            threads: self.threads,
            tasks: self.depth,
            ..SessionConfig::new(default_kv(), workload.clone())
        }
    }

    /// Returns the workload that is called `name`, with this comparison's records and distribution.
    fn workload(&self, name: &str) -> Result<Workload, Failure> {
        let mut workload = Workload::resolve(name)?;
        workload.records = self.records;
        workload.distribution = Distribution::named(&self.distribution).ok_or_else(|| {
            Failure::Error(format!(
                "unknown distribution '{}': name one of {}",
                self.distribution,
                Distribution::NAMES
            ))
        })?;
        compare::check(&workload).map_err(Failure::Error)?;
        Ok(workload)
    }
}

/// Returns the size in bytes of Farside's table for `items` items.
fn our_table(items: u64) -> u64 {
    let footprint = (default_kv().footprint)(&Sizing { items: Some(items), ..Sizing::default() });
    footprint.expect("--items is at most what the largest table holds").table_bytes
}

/// Rivals to measure, with the paths of their programs.
struct Found {
    redis: Option<std::path::PathBuf>,
    memcached: Option<std::path::PathBuf>,
    lmdb: bool,
    /// Skipped rivals, each with the reason and the remedy.
    skipped: Vec<String>,
}

impl Found {
    fn is_empty(&self) -> bool {
        self.redis.is_none() && self.memcached.is_none() && !self.lmdb
    }
}

/// All contenders, with their records loaded.
struct Contenders {
    session: Session,
    pools: Vec<(FabricArg, farside::Pool)>,
    redis: Option<Server>,
    memcached: Option<Server>,
    #[cfg(feature = "lmdb")]
    lmdb: Option<compare::lmdb::Lmdb>,
    /// Path of `redis-benchmark`, and the number of records that were loaded for it.
    benchmark: Option<(std::path::PathBuf, u64)>,
}

impl Contenders {
    fn run(&self) -> &Run {
        self.session.run()
    }

    fn has_lmdb(&self) -> bool {
        #[cfg(feature = "lmdb")]
        return self.lmdb.is_some();
        #[cfg(not(feature = "lmdb"))]
        false
    }
}

impl Compare {
    /// Finds the rivals that the user named, or else all installed ones. A missing rival is an error only if the user
    /// named it.
    fn find(&self) -> Result<Found, Failure> {
        let is_named = |rival| self.rivals.as_ref().is_some_and(|named| named.contains(&rival));
        let is_wanted = |rival| self.rivals.is_none() || is_named(rival);
        let mut skipped = Vec::new();
        let mut server = |rival, program: &str, package: &str| {
            let found = is_wanted(rival).then(|| config::program(program)).flatten();
            if found.is_none() && is_wanted(rival) {
                let reported = format!(
                    "{program} is not on PATH: install it, for example with 'apt-get install {package}'"
                );
                match is_named(rival) {
                    true => return Err(Failure::Error(format!("{reported}, or omit it from --rivals"))),
                    false => skipped.push(reported),
                }
            }
            Ok(found)
        };
        let redis = server(Rival::Redis, "redis-server", "redis-server")?;
        let memcached = server(Rival::Memcached, "memcached", "memcached")?;
        let is_built_in = cfg!(feature = "lmdb");
        if is_wanted(Rival::Lmdb) && !is_built_in {
            let reported = "this farside was built without LMDB: build it with the feature 'lmdb', a default";
            match is_named(Rival::Lmdb) {
                true => return Err(Failure::Error(format!("{reported}, or omit it from --rivals"))),
                false => skipped.push(reported.into()),
            }
        }
        Ok(Found { redis, memcached, lmdb: is_wanted(Rival::Lmdb) && is_built_in, skipped })
    }

    /// Returns the bytes of memory that a rival needs for its records.
    fn rival_bytes(&self) -> u64 {
        // An allocator with size classes may leave a quarter of each value's buffer unused.
        self.records * (u64::from(self.value_size) * 5 / 4 + BESIDES_VALUE) + BESIDES_RECORDS
    }

    fn check_memory(&self, found: &Found) -> Done {
        let rivals = [found.redis.is_some(), found.memcached.is_some(), found.lmdb];
        let rivals = rivals.into_iter().filter(|&is_here| is_here).count() as u64;
        let tables =
            our_table(self.items()) + found.memcached.as_ref().map_or(0, |_| memcached_table(self.items()));
        check_available((rivals + 1) * self.rival_bytes() + tables, fewer(self.items))
    }

    /// Starts all contenders and loads their records.
    fn start(&self, config: SessionConfig, found: Found, folder: &Folder) -> Result<Contenders, Failure> {
        note!(
            "farside: a node, reached over {}",
            self.fabrics.iter().map(|f| f.name()).collect::<Vec<_>>().join(", ")
        );
        let mut by: Vec<FabricArg> = Vec::new();
        for &fabric in self.fabrics.iter().filter(|&&fabric| fabric != FabricArg::Shm) {
            if !by.contains(&fabric) {
                by.push(fabric);
            }
        }
        let reads_only = config.workload.mix.share(farside_bench::workload::Operation::Read) == 1.0;
        let session = Session::start_serving(config, &by)?;
        by.extend(self.fabrics.contains(&FabricArg::Shm).then_some(FabricArg::Shm));
        let pools = by.into_iter().map(|fabric| Ok((fabric, session.pool_over(fabric)?)));
        let pools = pools.collect::<Result<Vec<_>, Failure>>()?;
        let redis = match &found.redis {
            Some(program) => {
                note!("redis: {}", program.display());
                let server = Server::redis(program, folder)?;
                self.load::<Get>(&server.address, "redis", self.records)?;
                Some(server)
            }
            None => None,
        };
        let memcached = match &found.memcached {
            Some(program) => {
                note!("memcached: {}", program.display());
                let server = Server::memcached(program, folder, self.rival_bytes(), self.items())?;
                self.load::<Memcached>(&server.address, "memcached", self.records)?;
                Some(server)
            }
            None => None,
        };
        let benchmark = match (&redis, config::program("redis-benchmark")) {
            (Some(server), Some(program)) if reads_only && !self.is_brief => {
                let records = self.records.min(BENCHMARKED_MAX);
                self.load::<OfBenchmark>(&server.address, "redis", records)?;
                Some((program, records))
            }
            _ => None,
        };
        #[cfg(feature = "lmdb")]
        let lmdb = match found.lmdb {
            true => {
                note!("lmdb: built in");
                let made = compare::lmdb::Lmdb::create(&folder.path().join("lmdb"), session.run().work());
                let lmdb = made.map_err(Failure::Error)?;
                let bar = progress("loading records", self.records, false);
                lmdb.load(session.run().work(), |count| bar.inc(count))
                    .map_err(|reason| Failure::Error(format!("lmdb: {reason}")))?;
                bar.finish_and_clear();
                Some(lmdb)
            }
            false => None,
        };
        Ok(Contenders {
            session,
            pools,
            redis,
            memcached,
            #[cfg(feature = "lmdb")]
            lmdb,
            benchmark,
        })
    }

    fn load<D: Dialect>(&self, address: &Address, name: &str, records: u64) -> Done {
        let reported = |reason: String| Failure::Error(format!("{name}: {reason}"));
        let bar = progress("loading records", records, false);
        let client = Client::<D>::connect(address, Waiting::Asleep, self.value_size as usize);
        let mut client = client.map_err(|error| reported(error.to_string()))?;
        client.server_pid().map_err(reported)?; // Also selects the database.
        client.load(0..records, || bar.inc(1)).map_err(reported)?;
        bar.finish_and_clear();
        Ok(())
    }

    /// Returns the lanes, in the order in which they have their turns in a round.
    fn lanes(&self, contenders: &Contenders, cores: &Cores) -> Vec<Lane> {
        use rows::{Client, Cores, Way};
        let two = [(Cores::Two, Client::Looks), (Cores::Two, Client::Sleeps)];
        let served = two.into_iter().filter(|_| cores.count() > 1).chain([(Cores::One, Client::Sleeps)]);
        let mut lanes = Vec::new();
        for served in served.take(if self.is_brief { 1 } else { usize::MAX }) {
            for depth in self.depths() {
                let way = Way { depth, threads: self.threads, served: Some(served) };
                let mut add = |contender| lanes.push(Lane::new(contender, way));
                if contenders.redis.is_some() {
                    for unix in [false, true] {
                        add(Contender::Redis { mget: false, unix });
                        if depth > 1 {
                            add(Contender::Redis { mget: true, unix });
                        }
                    }
                    let is_its_way = depth > 1 && served.1 == Client::Sleeps;
                    let is_apart = served.0 == Cores::Two || cores.count() == 1;
                    if contenders.benchmark.is_some() && is_its_way && is_apart {
                        add(Contender::RedisBenchmark);
                    }
                }
                if contenders.memcached.is_some() {
                    add(Contender::Memcached);
                }
                for &(fabric, _) in contenders.pools.iter().filter(|(fabric, _)| *fabric != FabricArg::Shm) {
                    add(Contender::Farside(fabric));
                }
            }
        }
        for (depth, threads) in self.unserved(cores.count() as u32) {
            let way = Way { depth, threads, served: None };
            if contenders.has_lmdb() {
                lanes.push(Lane::new(Contender::Lmdb, way));
            }
            if contenders.pools.iter().any(|(fabric, _)| *fabric == FabricArg::Shm) {
                lanes.push(Lane::new(Contender::Farside(FabricArg::Shm), way));
            }
        }
        lanes
    }

    fn depths(&self) -> impl Iterator<Item = u32> + use<> {
        let depth = self.depth;
        [depth, 1].into_iter().take(if depth == 1 { 1 } else { 2 })
    }

    /// Returns the setups of contenders without a server, as pairs of operations in flight per thread and number of
    /// threads. These are the setups of contenders with a server, and one setup more on all cores, because no server
    /// needs a core.
    fn unserved(&self, cores: u32) -> Vec<(u32, u32)> {
        let shared = (self.threads == 1 && !self.is_brief && cores > 1 && self.depth >= cores)
            .then(|| (self.depth / cores, cores));
        shared.into_iter().chain(self.depths().map(|depth| (depth, self.threads))).collect()
    }

    fn report(&self, workload: &Workload, contenders: &Contenders, lane: &Lane) -> CompareReport {
        let (cores, client) = lane.way.served.unzip();
        let is_cross_check = lane.contender == Contender::RedisBenchmark;
        let measured = &lane.measured;
        CompareReport {
            contender: lane.contender.name(),
            version: lane.contender.version(contenders),
            workload: workload.name.clone(),
            distribution: workload.distribution.name().into(),
            records: match &contenders.benchmark {
                Some((_, records)) if is_cross_check => *records,
                _ => self.records,
            },
            value_size: self.value_size.into(),
            threads: lane.way.threads,
            depth: lane.way.depth,
            batches: lane.batches(),
            cores,
            client,
            rounds: self.rounds.into(),
            ops_per_s: Spread::of(&measured.rates).expect("there is at least one round"),
            latency_us: (measured.latencies.count() > 0).then(|| LatencyUs::from(&measured.latencies)),
            cpu_s_per_mop: measured.cpu_s_per_mop(),
            of_better_rival: Spread::of(&measured.ratios),
            is_cross_check,
        }
    }
}
