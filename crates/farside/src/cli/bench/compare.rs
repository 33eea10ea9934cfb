//! `bench compare`: Farside beside Redis, memcached and LMDB, on this machine and under one workload.
//!
//! Everyone has the same records, operations, number of connections and operations under way, and its turn in every
//! round, so that whatever else the machine does strikes all alike. In a turn clients connect, warm up, and count.
//!
//! Invariant: a value that is wrong, or an operation that fails, ends the comparison: what is told was done right.
//! Invariant: of what a rival can do in several ways (batches, their number) the best is measured.

mod cores;
mod lanes;
mod servers;
mod telling;

use super::session::Asked;
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
use farside_systems::registry::usual;
use farside_systems::system::Sizing;
use lanes::{Lane, Who};
pub(super) use servers::RivalServer;
use servers::{Server, memcached_table};
use std::time::Duration;

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)] // So that one is refused by what it is for.
pub(in crate::cli) struct Compare {
    /// Beside whom [default: all that are here]
    #[arg(long, value_enum, value_name = "NAME,...", value_delimiter = ',')]
    rivals: Option<Vec<Rival>>,
    /// What carries Farside's requests
    #[arg(
        long,
        value_enum,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "udp,tcp,ring,shm"
    )]
    fabrics: Vec<FabricArg>,
    /// a, b, c, or a YCSB property file
    #[arg(long, value_name = "a|b|c|PATH", default_value = "c")]
    workload: String,
    /// Which keys are asked for: uniform, or as the workload says by 'zipfian' or another name
    #[arg(long, value_name = "NAME", default_value = "uniform")]
    distribution: String,
    /// Records in each store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 28))]
    records: u64,
    /// Items that the tables of Farside and memcached are made for: fewer keys share a slot in larger ones [default:
    /// twice the records]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    items: Option<u64>,
    /// Bytes of a value, 1 to 60000
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// Client threads, each with one connection
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Operations that each connection has under way, besides one at a time
    #[arg(long, value_name = "K", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=64))]
    depth: u32,
    /// How often everyone has its turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// How long a turn is, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 0.25)]
    seconds: f64,
    /// One JSON object a line in place of tables
    #[arg(long)]
    json: bool,
    /// Where there is a server, in one way alone: the first that there is.
    #[arg(skip)]
    is_short: bool,
}

/// What a comparison came to.
#[derive(Default)]
pub(in crate::cli) struct Compared {
    pub(in crate::cli) reports: Vec<CompareReport>,
    /// Who took part, each with its release.
    pub(in crate::cli) versions: Vec<String>,
    /// Who did not, and what to do about it.
    pub(in crate::cli) left_out: Vec<String>,
    /// Where servers and clients ran, and how far apart.
    pub(in crate::cli) cores: String,
    /// What a cache line took from one of these cores to the other, in nanoseconds.
    distance_ns: Option<Spread>,
    /// For how many records `redis-benchmark` asked.
    benchmarked: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rival {
    /// redis-server, of PATH
    Redis,
    /// memcached, of PATH
    Memcached,
    /// LMDB, which is built in
    Lmdb,
}

/// The longest value that all of them take, and that all of ours carry.
const VALUE_MAX: u32 = 60_000;
/// Records that `redis-benchmark` asks for at most.
const BENCHMARKED_MAX: u64 = 100_000;
/// What a rival needs for a record besides its value, at the most, and what it needs anyway.
const BESIDES_VALUE: u64 = 160;
const BESIDES_RECORDS: u64 = 128 << 20;

impl Compare {
    pub(super) fn run(self) -> Done {
        let mut machine = Machine::here();
        let compared = self.compared()?;
        machine.ended();
        if self.json {
            for report in &compared.reports {
                let mut object = serde_json::to_value(report)?;
                object["turn_seconds"] = self.seconds.into();
                object["table_items"] = self.items().into();
                object["distance_ns"] = serde_json::to_value(compared.distance_ns)?;
                object["machine"] = serde_json::to_value(&machine)?;
                tell!("{object}");
            }
            return Ok(());
        }
        tell!("Workload {}; values of {} bytes.", self.workload()?, self.value_size);
        tell!(
            "{} client thread{} with a connection each; {} round{} of {} s each; {}.",
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.rounds,
            if self.rounds == 1 { "" } else { "s" },
            self.seconds,
            compared.cores
        );
        tell!("{}.", compared.versions.join("; "));
        tell!("{}.", machine.told());
        telling::tell_tables(&compared.reports)?;
        let tables = telling::told_tables(&compared.reports, self.records, self.items());
        telling::tell_caveats(
            &compared.reports,
            compared.benchmarked,
            tables,
            Cores::of_this_process()?.count(),
        )
    }

    /// Everyone who is here beside Farside, one client thread that reads uniformly, one at a time and 64 at once; where
    /// there is a server it has a core of its own, if there are two, and the client looks for answers. Whoever is
    /// not here, or for whom there is no memory, is left out.
    pub(in crate::cli) fn in_short(
        records: u64,
        value_size: u32,
        rounds: u32,
        turn: Duration,
    ) -> Result<Compared, Failure> {
        let compare = Compare {
            rivals: None,
            fabrics: vec![FabricArg::Udp, FabricArg::Tcp, FabricArg::Ring, FabricArg::Shm],
            workload: "c".into(),
            distribution: "uniform".into(),
            records,
            items: None,
            value_size,
            threads: 1,
            depth: 64,
            rounds,
            seconds: turn.as_secs_f64(),
            json: false,
            is_short: true,
        };
        let found = compare.find()?;
        let left_out = match compare.check_memory(&found) {
            _ if found.is_nobody() => found.left_out,
            Err(Failure::Told(reason)) => vec![format!("the rivals: {reason}")],
            _ => return compare.compared(),
        };
        Ok(Compared { left_out, ..Compared::default() })
    }

    fn compared(&self) -> Result<Compared, Failure> {
        let turn = seconds(self.seconds)?;
        if self.value_size > VALUE_MAX {
            return Err(Failure::Told(format!(
                "--value-size {}: give {VALUE_MAX} at most, which every contender carries in one answer",
                self.value_size
            )));
        }
        if self.fabrics.contains(&FabricArg::Local) {
            return Err(Failure::Told(
                "--fabrics local has its node in this process, and is nobody's server: name udp, tcp, ring or shm"
                    .into(),
            ));
        }
        let workload = self.workload()?;
        compare::check(&workload).map_err(Failure::Told)?;
        let asked = self.asked(&workload);
        asked.check_items()?;
        let cores = Cores::of_this_process()?;
        let found = self.find()?;
        if found.is_nobody() {
            return Err(Failure::Told(
                "there is nobody to compare with: install redis-server and memcached, as by 'apt-get install \
                 redis-server memcached'"
                    .into(),
            ));
        }
        self.check_memory(&found)?;
        warn_of_unused(&workload);
        found.left_out.iter().for_each(|told| note!("farside: {told}; it is left out"));
        note!("workload {workload}; values of {} bytes", self.value_size);
        let folder = Folder::make("compare").map_err(Failure::Told)?;
        let left_out = found.left_out.clone();
        let contenders = self.start(asked, found, &folder)?;
        let mut lanes = self.lanes(&contenders, &cores);
        let run = contenders.run();
        let threads_max = lanes.iter().map(|lane| lane.way.threads).max().unwrap_or(0);
        let mut threads: Vec<Thread> = (0..threads_max).map(|thread| run.thread(thread)).collect();
        let field = lanes::Field { contenders: &contenders, cores: &cores, length: turn };
        note!("looking in which batches the rivals do best ...");
        for lane in &mut lanes {
            field.choose_shape(lane, &mut threads)?;
        }
        let bar = progress("measuring in turn", u64::from(self.rounds) * lanes.len() as u64, false);
        let mut distances_ns = Vec::new();
        for _ in 0..self.rounds {
            for lane in &mut lanes {
                distances_ns.extend(cores.distance_ns()?);
                field.take_turn(lane, &mut threads)?;
                bar.inc(1);
            }
            lanes::rate_round(&mut lanes);
        }
        bar.finish_and_clear();
        let distance_ns = Spread::of(&distances_ns);
        let told_distance = distance_ns.as_ref().map(cores::told_distance);
        Ok(Compared {
            reports: lanes.iter().map(|lane| self.report(&workload, &contenders, lane)).collect(),
            versions: Who::versions(&contenders),
            left_out,
            cores: [Some(cores.told()), told_distance].into_iter().flatten().collect::<Vec<_>>().join("; "),
            distance_ns,
            benchmarked: contenders.benchmark.as_ref().map(|(_, records)| *records),
        })
    }

    /// Items that the tables are made for, so that none grows while it is measured: if nobody says, twice the records,
    /// since nobody makes a table that is full from the beginning.
    fn items(&self) -> u64 {
        self.items.unwrap_or(2 * self.records)
    }

    /// What is asked of Farside.
    fn asked(&self, workload: &Workload) -> Asked {
        Asked {
            fabric: Some(FabricArg::Shm),
            value_size: self.value_size as usize,
            items: Some(self.items()),
            threads: self.threads,
            tasks: self.depth,
            ..Asked::new(usual(), workload.clone())
        }
    }

    fn workload(&self) -> Result<Workload, Failure> {
        let mut workload = Workload::resolve(&self.workload)?;
        workload.records = self.records;
        workload.distribution = Distribution::named(&self.distribution).ok_or_else(|| {
            Failure::Told(format!(
                "there is no distribution '{}': name one of {}",
                self.distribution,
                Distribution::NAMES
            ))
        })?;
        Ok(workload)
    }
}

/// Bytes of our table for so many items.
fn our_table(items: u64) -> u64 {
    let footprint = (usual().footprint)(&Sizing { items: Some(items), ..Sizing::default() });
    footprint.expect("fewer can be asked for than the largest table has room for").table_bytes
}

/// Rivals that take part.
struct Found {
    redis: Option<std::path::PathBuf>,
    memcached: Option<std::path::PathBuf>,
    lmdb: bool,
    /// Who does not, and what to do about it.
    left_out: Vec<String>,
}

impl Found {
    fn is_nobody(&self) -> bool {
        self.redis.is_none() && self.memcached.is_none() && !self.lmdb
    }
}

/// All who take part, with their records loaded.
struct Contenders {
    session: Session,
    pools: Vec<(FabricArg, farside::Pool)>,
    redis: Option<Server>,
    memcached: Option<Server>,
    #[cfg(feature = "lmdb")]
    lmdb: Option<compare::lmdb::Lmdb>,
    /// `redis-benchmark`, and for how many records it was made ready.
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
    /// Who is here, of those who were named, or of all.
    fn find(&self) -> Result<Found, Failure> {
        let is_named = |rival| self.rivals.as_ref().is_some_and(|named| named.contains(&rival));
        let is_wanted = |rival| self.rivals.is_none() || is_named(rival);
        let mut left_out = Vec::new();
        let mut server = |rival, program: &str, package: &str| {
            let found = is_wanted(rival).then(|| config::program(program)).flatten();
            if found.is_none() && is_wanted(rival) {
                let told = format!("{program} is not on PATH: install it, as by 'apt-get install {package}'");
                match is_named(rival) {
                    true => return Err(Failure::Told(format!("{told}, or leave it out by --rivals"))),
                    false => left_out.push(told),
                }
            }
            Ok(found)
        };
        let redis = server(Rival::Redis, "redis-server", "redis-server")?;
        let memcached = server(Rival::Memcached, "memcached", "memcached")?;
        let is_built_in = cfg!(feature = "lmdb");
        if is_wanted(Rival::Lmdb) && !is_built_in {
            let told = "this farside was built without LMDB: build it with the feature 'lmdb', which is on by default";
            match is_named(Rival::Lmdb) {
                true => return Err(Failure::Told(format!("{told}, or leave it out by --rivals"))),
                false => left_out.push(told.into()),
            }
        }
        Ok(Found { redis, memcached, lmdb: is_wanted(Rival::Lmdb) && is_built_in, left_out })
    }

    /// Bytes that a rival has for its records.
    fn rival_bytes(&self) -> u64 {
        // Whatever divides memory into classes leaves up to a quarter of it unused.
        self.records * (u64::from(self.value_size) * 5 / 4 + BESIDES_VALUE) + BESIDES_RECORDS
    }

    fn check_memory(&self, found: &Found) -> Done {
        let rivals = [found.redis.is_some(), found.memcached.is_some(), found.lmdb];
        let rivals = rivals.into_iter().filter(|&is_here| is_here).count() as u64;
        let tables =
            our_table(self.items()) + found.memcached.as_ref().map_or(0, |_| memcached_table(self.items()));
        check_available((rivals + 1) * self.rival_bytes() + tables, fewer(self.items))
    }

    /// Starts everyone and loads the records.
    fn start(&self, asked: Asked, found: Found, folder: &Folder) -> Result<Contenders, Failure> {
        note!(
            "farside: a node, reached by {}",
            self.fabrics.iter().map(|f| f.name()).collect::<Vec<_>>().join(", ")
        );
        let mut by: Vec<FabricArg> = Vec::new();
        for &fabric in self.fabrics.iter().filter(|&&fabric| fabric != FabricArg::Shm) {
            if !by.contains(&fabric) {
                by.push(fabric);
            }
        }
        let reads_only = asked.workload.mix.share(farside_bench::workload::Operation::Read) == 1.0;
        let session = Session::start_also_by(asked, &by)?;
        by.extend(self.fabrics.contains(&FabricArg::Shm).then_some(FabricArg::Shm));
        let pools = by.into_iter().map(|fabric| Ok((fabric, session.pool_by(fabric)?)));
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
            (Some(server), Some(program)) if reads_only && !self.is_short => {
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
                let lmdb = made.map_err(Failure::Told)?;
                let bar = progress("loading records", self.records, false);
                lmdb.load(session.run().work(), |count| bar.inc(count))
                    .map_err(|reason| Failure::Told(format!("lmdb: {reason}")))?;
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
        let told = |reason: String| Failure::Told(format!("{name}: {reason}"));
        let bar = progress("loading records", records, false);
        let client = Client::<D>::connect(address, Waiting::Asleep, self.value_size as usize);
        let mut client = client.map_err(|error| told(error.to_string()))?;
        client.server_pid().map_err(told)?; // Also says in which database.
        client.load(0..records, || bar.inc(1)).map_err(told)?;
        bar.finish_and_clear();
        Ok(())
    }

    /// Who has a turn, in which order, and how.
    fn lanes(&self, contenders: &Contenders, cores: &Cores) -> Vec<Lane> {
        use rows::{Client, Cores, Way};
        let two = [(Cores::Two, Client::Looks), (Cores::Two, Client::Sleeps)];
        let served = two.into_iter().filter(|_| cores.count() > 1).chain([(Cores::One, Client::Sleeps)]);
        let mut lanes = Vec::new();
        for served in served.take(if self.is_short { 1 } else { usize::MAX }) {
            for depth in self.depths() {
                let way = Way { depth, threads: self.threads, served: Some(served) };
                let mut add = |who| lanes.push(Lane::new(who, way));
                if contenders.redis.is_some() {
                    for unix in [false, true] {
                        add(Who::Redis { mget: false, unix });
                        if depth > 1 {
                            add(Who::Redis { mget: true, unix });
                        }
                    }
                    let is_its_way = depth > 1 && served.1 == Client::Sleeps;
                    let is_apart = served.0 == Cores::Two || cores.count() == 1;
                    if contenders.benchmark.is_some() && is_its_way && is_apart {
                        add(Who::RedisBenchmark);
                    }
                }
                if contenders.memcached.is_some() {
                    add(Who::Memcached);
                }
                for &(fabric, _) in contenders.pools.iter().filter(|(fabric, _)| *fabric != FabricArg::Shm) {
                    add(Who::Farside(fabric));
                }
            }
        }
        for (depth, threads) in self.unserved(cores.count() as u32) {
            let way = Way { depth, threads, served: None };
            if contenders.has_lmdb() {
                lanes.push(Lane::new(Who::Lmdb, way));
            }
            if contenders.pools.iter().any(|(fabric, _)| *fabric == FabricArg::Shm) {
                lanes.push(Lane::new(Who::Farside(FabricArg::Shm), way));
            }
        }
        lanes
    }

    fn depths(&self) -> impl Iterator<Item = u32> + use<> {
        let depth = self.depth;
        [depth, 1].into_iter().take(if depth == 1 { 1 } else { 2 })
    }

    /// Operations under way of each thread, and threads, where there is no server: as elsewhere, and once more on all
    /// cores, for there is nobody else who needs one.
    fn unserved(&self, cores: u32) -> Vec<(u32, u32)> {
        let shared = (self.threads == 1 && !self.is_short && cores > 1 && self.depth >= cores)
            .then(|| (self.depth / cores, cores));
        shared.into_iter().chain(self.depths().map(|depth| (depth, self.threads))).collect()
    }

    fn report(&self, workload: &Workload, contenders: &Contenders, lane: &Lane) -> CompareReport {
        let (cores, client) = lane.way.served.unzip();
        let is_cross_check = lane.who == Who::RedisBenchmark;
        let measured = &lane.measured;
        CompareReport {
            contender: lane.who.name(),
            version: lane.who.version(contenders),
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
            ops_per_s: Spread::of(&measured.rates).expect("there was a round at least"),
            latency_us: (measured.latencies.count() > 0).then(|| LatencyUs::from(&measured.latencies)),
            cpu_s_per_mop: measured.cpu_s_per_mop(),
            of_better_rival: Spread::of(&measured.ratios),
            is_cross_check,
        }
    }
}
