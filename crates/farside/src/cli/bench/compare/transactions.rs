//! `bench compare-txn`: compares transactions of Farside with those of Redis on this machine: YCSB-T.
//!
//! All contenders have the same records, transactions in flight and checks. In every round, each has one turn, in which
//! it runs alone, and a turn begins with a warm-up. Servers run on the first core, and clients on the last.
//!
//! Invariant: after the last round, the counters of each contender's records add up to the number of its updates.

use super::super::session::{Measured, SessionConfig, Transactions};
use super::super::{FabricArg, seconds};
use super::cores::{Cores, describe_distance};
use super::servers::Server;
use crate::cli::files::Folder;
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, progress};
use farside::config;
use farside_bench::compare::redis_txn::Client;
use farside_bench::driver::Work as _;
use farside_bench::report::Spread;
use farside_bench::txn::{KEYS_MAX, Plan, Run, TxnWork};
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload, random};
use farside_systems::registry::named;
use farside_systems::txn::{Transacting, prism_tx};
use serde_json::json;
use std::time::{Duration, Instant};

/// Warm-up of a turn, unless the turn is shorter.
const WARM_UP: Duration = Duration::from_millis(100);
const SEED: u64 = 7;

/// Compare transactions with those of Redis (WATCH, MULTI, EXEC) on this machine
///
/// Each transaction reads its records, adds one to the counter of each, and writes them. If another transaction is in
/// the way, it is tried again. A client thread has the same number of transactions in flight on every contender, on as
/// many connections with Redis.
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(in crate::cli::bench) struct CompareTxn {
    /// Fabrics of Farside to measure
    #[arg(long, value_enum, value_name = "NAME,...", value_delimiter = ',', default_value = "udp,shm")]
    fabrics: Vec<FabricArg>,
    /// Number of records of a transaction
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=KEYS_MAX as u64))]
    keys: u64,
    /// Zipf coefficient of the records: 0 for a uniform distribution, else 0.001 to 10
    #[arg(long, value_name = "THETA", default_value = "0", value_parser = super::super::latch::zipf)]
    zipf: Distribution,
    /// Records in each store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 28))]
    records: u64,
    /// Bytes per value: a multiple of 8, at most 32KiB
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = super::super::txn::size)]
    value_size: u32,
    /// Transactions in flight, of one client thread
    #[arg(long, value_name = "K", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// Rounds; each contender has one turn in every round
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measured seconds of a turn, after its warm-up
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

/// Rates of a contender: transactions a second in each round, and multiples of Redis's rate in the same round.
struct Rates {
    name: String,
    rates: Vec<f64>,
    ratios: Vec<f64>,
    /// Fraction of the attempts that met another transaction.
    abort_rate: f64,
}

impl CompareTxn {
    pub(in crate::cli::bench) fn run(self) -> Done {
        let turn = seconds(self.seconds)?;
        if self.fabrics.contains(&FabricArg::Local) {
            return Err(Failure::Error(
                "--fabrics local runs the node in this process, without a server to compare: name udp, tcp, ring or shm"
                    .into(),
            ));
        }
        let program = config::program("redis-server").ok_or_else(|| {
            Failure::Error(
                "redis-server is not on PATH: install it, for example with 'apt-get install redis-server'"
                    .into(),
            )
        })?;
        let (mut machine, cores) = (Machine::current(), Cores::of_this_process()?);
        let folder = Folder::make("compare-txn").map_err(Failure::Error)?;
        let server = Server::redis(&program, &folder)?;
        let run = self.plan()?;
        let mut source = run.work().source(random(SEED));
        let mut redis =
            Client::connect(&server.address, self.tasks, self.value_size as usize).map_err(of_redis)?;
        note!("loading {} records into redis and farside ...", self.records);
        redis.load(self.records).map_err(of_redis)?;
        let sessions = self
            .fabrics
            .iter()
            .map(|fabric| Measured::<Transactions<TxnWork>>::start(self.config(*fabric, turn)?));
        let sessions = sessions.collect::<Result<Vec<_>, Failure>>()?;
        let names = std::iter::once(format!("redis {}", server.version))
            .chain(self.fabrics.iter().map(|fabric| format!("farside {}", fabric.name())));
        let of = |name| Rates { name, rates: Vec::new(), ratios: Vec::new(), abort_rate: 0.0 };
        let mut all: Vec<Rates> = names.map(of).collect();
        let bar = progress("measuring in turn", u64::from(self.rounds) * all.len() as u64, self.json);
        let (mut distances_ns, mut commits, mut attempts) = (Vec::new(), 0, 0);
        for _ in 0..self.rounds {
            distances_ns.extend(cores.distance_ns()?);
            cores.take_server(server.pid())?;
            // A thread of its own, whose core is not that of the nodes and servers.
            let turned = std::thread::scope(|scope| {
                let client = scope.spawn(|| {
                    cores.take_client(None, 1)?;
                    let warm_up = WARM_UP.min(turn);
                    let began = Instant::now();
                    redis.work(&mut source, || began.elapsed() < warm_up).map_err(of_redis)?;
                    let began = Instant::now();
                    let done = redis.work(&mut source, || began.elapsed() < turn).map_err(of_redis)?;
                    Ok::<_, Failure>((done, began.elapsed().as_secs_f64()))
                });
                client.join().expect("a client reports its errors")
            });
            let (done, took) = turned?;
            if done.commits == 0 {
                return Err(of_redis("no transaction completed in a turn: give more --seconds".into()));
            }
            let redis_rate = done.commits as f64 / took;
            (commits, attempts) = (commits + done.commits, attempts + done.attempts);
            all[0].add(redis_rate, redis_rate, 1.0 - commits as f64 / attempts.max(1) as f64);
            bar.inc(1);
            for (session, of) in sessions.iter().zip(&mut all[1..]) {
                let pid = session.node_pid();
                pid.map_or(Ok(()), |pid| cores.take_server(pid))?;
                cores.take_client(None, 1)?;
                let report = session.measure(turn);
                cores.release()?;
                let report = report?;
                if report.errors > 0 {
                    return Err(Failure::Error(format!(
                        "{}: {} transactions failed",
                        of.name, report.errors
                    )));
                }
                of.add(report.ops_per_s, redis_rate, session.abort_rate());
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let (sum, expected) = redis.sums(self.records).map_err(of_redis)?;
        if sum != expected {
            return Err(of_redis(format!(
                "the records have counted {sum} updates, and {expected} were done"
            )));
        }
        sessions.iter().try_for_each(Measured::<Transactions<TxnWork>>::check_total)?;
        machine.record_end_load();
        self.print(&all, &machine, &distances_ns, &cores)
    }

    fn print(&self, all: &[Rates], machine: &Machine, distances_ns: &[f64], cores: &Cores) -> Done {
        let distance_ns = Spread::of(distances_ns);
        if !self.json {
            print_line!(
                "Transactions of {} of {} records ({}), values of {} bytes; {} in flight; {} rounds of {} s.",
                self.keys,
                self.records,
                self.zipf,
                self.value_size,
                self.tasks,
                self.rounds,
                self.seconds
            );
            let distance = distance_ns.as_ref().map(describe_distance);
            print_line!("{}; {}.", cores.description(), distance.unwrap_or_else(|| "one core".into()));
            print_line!("{}.", machine.description());
            print_line!("{:<16}{:>14}  {:<28}{:>8}", "", "transactions/s", "times redis (range)", "aborts");
        }
        for Rates { name, rates, ratios, abort_rate } in all {
            let (rate, ratio) = (Spread::of(rates), Spread::of(ratios));
            let (Some(rate), Some(ratio)) = (rate, ratio) else { continue };
            if self.json {
                let object = json!({
                    "contender": name, "keys": self.keys, "records": self.records, "value_size": self.value_size,
                    "tasks": self.tasks, "rounds": self.rounds, "turn_seconds": self.seconds,
                    "ops_per_s": rate, "times_redis": ratio, "abort_rate": abort_rate,
                    "distance_ns": distance_ns, "machine": machine,
                });
                print_line!("{object}");
            } else {
                let times = format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.min, ratio.max);
                print_line!("{name:<16}{:>14.0}  {times:<28}{:>6.2} %", rate.median, 100.0 * abort_rate);
            }
        }
        Ok(())
    }

    fn workload(&self) -> Workload {
        let mix = Mix::new([0.0, 1.0, 0.0, 0.0, 0.0]);
        Workload {
            name: "ycsb-t".into(),
            records: self.records,
            operations: 0,
            mix: mix.expect("one of the shares is not 0"),
            distribution: self.zipf,
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        }
    }

    /// Returns the run from which Redis's transactions are drawn.
    fn plan(&self) -> Result<Run, Failure> {
        let (workload, len, keys) = (self.workload(), self.value_size as usize, self.keys as usize);
        Plan { workload, len, keys, tasks: self.tasks, sampled: 64, seed: SEED }.run().map_err(Failure::Error)
    }

    fn config(&self, fabric: FabricArg, turn: Duration) -> Result<SessionConfig, Failure> {
        let system = named(prism_tx::KIND).expect("it is registered");
        let lanes = u16::try_from(self.tasks).unwrap_or(u16::MAX).max(16);
        Ok(SessionConfig {
            fabric: Some(fabric),
            value_size: self.value_size as usize,
            keys_per_transaction: self.keys as usize,
            transacting: Transacting { lanes: Some(lanes), ..Transacting::NONE },
            tasks: self.tasks,
            quiet: true,
            warm_up: WARM_UP.min(turn),
            seconds: self.seconds,
            ..SessionConfig::new(system, self.workload())
        })
    }
}

impl Rates {
    fn add(&mut self, rate: f64, redis: f64, abort_rate: f64) {
        self.rates.push(rate);
        self.ratios.push(rate / redis);
        self.abort_rate = abort_rate;
    }
}

fn of_redis(reason: String) -> Failure {
    Failure::Error(format!("redis: {reason}"))
}
