//! Runs the turns of a comparison's lanes. A *lane* is a contender under one setup. Its *turn* is the interval of a
//! round in which it runs.
//!
//! Invariant: during a turn, no other contender has an operation in flight. Client and server run on the cores that the
//! lane's [`Way`] names.

use super::cores::Cores;
use super::servers::{Server, command};
use super::{Contenders, FabricArg};
use crate::cli::Failure;
use farside::Pool;
use farside_bench::compare::benchmark;
use farside_bench::compare::memcached::Memcached;
use farside_bench::compare::redis::{Get, MGet, OfBenchmark};
use farside_bench::compare::rows::{self, Measured, Way};
use farside_bench::compare::{Address, Client, Dialect, Shape, Waiting};
use farside_bench::driver::Tally;
use farside_bench::kv::Thread;
use farside_bench::report::{Latencies, cpu_time_of, own_cpu_time};
use farside_fabrics::executor::Core;
use farside_fabrics::spin;
use farside_systems::with_kv;
use std::process::Stdio;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A contender of the comparison, which has one row in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Redis { mget: bool, unix: bool },
    Memcached,
    Lmdb,
    Farside(FabricArg),
    RedisBenchmark,
}

/// A contender under one setup, with its measurements.
pub(super) struct Lane {
    pub(super) contender: Contender,
    pub(super) way: Way,
    shape: Shape,
    pub(super) measured: Measured,
}

/// Runs the turns of lanes.
pub(super) struct TurnRunner<'c> {
    pub(super) contenders: &'c Contenders,
    pub(super) cores: &'c Cores,
    /// Length of a turn, after its warm-up.
    pub(super) length: Duration,
}

/// Duration of a turn's warm-up. It is at most the length of the turn.
const WARM_UP: Duration = Duration::from_millis(30);
/// Length of a trial turn that tests a number of batches. It is at most the length of a turn.
const TRIAL: Duration = Duration::from_millis(50);
/// Number of trial turns for each number of batches.
const TRIALS: u32 = 3;
/// Maximum number of retries of a turn in which no operation completed. Each retry is twice as long as the previous
/// one.
const PROLONGED_MAX: u32 = 10;
/// Number of requests of `redis-benchmark` for each second of a turn, within the bounds below.
const REQUESTS_PER_SECOND: f64 = 800_000.0;
const REQUESTS_MIN: u64 = 10_000;
const REQUESTS_MAX: u64 = 200_000;
/// Maximum duration of a run of `redis-benchmark`.
const BENCHMARK_MAX: Duration = Duration::from_secs(60);

impl Contender {
    pub(super) fn name(self) -> String {
        match self {
            Contender::Redis { mget, unix } => {
                let [mget, unix] =
                    [(mget, " mget"), (unix, " unix")].map(|(is, word)| if is { word } else { "" });
                format!("redis{mget}{unix}")
            }
            Contender::Memcached => "memcached".into(),
            Contender::Lmdb => "lmdb".into(),
            Contender::Farside(fabric) => format!("farside {}", fabric.name()),
            Contender::RedisBenchmark => "redis-benchmark".into(),
        }
    }

    pub(super) fn version(self, contenders: &Contenders) -> String {
        let of = |server: &Option<Server>| {
            server.as_ref().map_or_else(String::new, |server| server.version.clone())
        };
        match self {
            Contender::Redis { .. } | Contender::RedisBenchmark => of(&contenders.redis),
            Contender::Memcached => of(&contenders.memcached),
            #[cfg(feature = "lmdb")]
            Contender::Lmdb => farside_bench::compare::lmdb::VERSION.into(),
            #[cfg(not(feature = "lmdb"))]
            Contender::Lmdb => String::new(),
            Contender::Farside(_) => env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// Returns the names of the compared systems, each with its release.
    pub(super) fn versions(contenders: &Contenders) -> Vec<String> {
        let named = |name: &str, contender: Contender| format!("{name} {}", contender.version(contenders));
        let redis = Contender::Redis { mget: false, unix: false };
        let mut versions = vec![named("Farside", Contender::Farside(FabricArg::Shm))];
        versions.extend(contenders.redis.is_some().then(|| named("Redis", redis)));
        versions.extend(contenders.memcached.is_some().then(|| named("memcached", Contender::Memcached)));
        versions.extend(contenders.has_lmdb().then(|| named("LMDB", Contender::Lmdb)));
        versions
    }

    /// Whether this contender is a rival whose rate other contenders are divided by.
    fn is_measure(self) -> bool {
        matches!(self, Contender::Redis { .. } | Contender::Memcached)
    }

    fn is_of_one_host(self) -> bool {
        matches!(
            self,
            Contender::Redis { unix: true, .. }
                | Contender::Lmdb
                | Contender::Farside(FabricArg::Shm | FabricArg::Ring)
        )
    }
}

impl Lane {
    pub(super) fn new(contender: Contender, way: Way) -> Lane {
        Lane { contender, way, shape: Shape { depth: way.depth, batches: 1 }, measured: Measured::default() }
    }

    /// Returns the number of batches into which the operations in flight are divided, or `None` if this program does
    /// not divide them.
    pub(super) fn batches(&self) -> Option<u32> {
        self.contender.is_measure().then_some(self.shape.batches)
    }

    fn waiting(&self) -> Option<rows::Client> {
        self.way.served.map(|(_, client)| client)
    }
}

/// Divides each lane's rate in the last round by the rate of the better comparable rival, and records the ratio.
pub(super) fn rate_round(lanes: &mut [Lane]) {
    let rivals: Vec<(Contender, Way, f64)> = lanes
        .iter()
        .filter(|lane| lane.contender.is_measure())
        .filter_map(|lane| Some((lane.contender, lane.way, *lane.measured.rates.last()?)))
        .collect();
    for lane in lanes.iter_mut().filter(|lane| lane.contender != Contender::RedisBenchmark) {
        let is_comparable = |(contender, way, _): &&(Contender, Way, f64)| {
            way.depth * way.threads == lane.way.depth * lane.way.threads
                && (lane.way.served.is_none() || *way == lane.way)
                && (lane.contender.is_of_one_host() || !contender.is_of_one_host())
        };
        let best = rivals.iter().filter(is_comparable).map(|(_, _, rate)| *rate).max_by(f64::total_cmp);
        if let (Some(best), Some(rate)) = (best, lane.measured.rates.last()) {
            lane.measured.ratios.push(rate / best);
        }
    }
}

/// Measurements of one turn.
struct Turn {
    rate: f64,
    operations: u64,
    latencies: Latencies,
    client_cpu: Duration,
    server_cpu: Option<Duration>,
}

impl TurnRunner<'_> {
    /// Finds the number of batches with which a rival is fastest, and sets it in the rival's lane.
    pub(super) fn choose_shape(&self, lane: &mut Lane, threads: &mut [Thread]) -> Result<(), Failure> {
        if lane.batches().is_none() || lane.way.depth == 1 {
            return Ok(());
        }
        let mut tried: Vec<(u32, f64)> =
            [1, 2, 4].into_iter().filter(|&batches| batches <= lane.way.depth).map(|b| (b, 0.0)).collect();
        for _ in 0..TRIALS {
            for (batches, sum) in &mut tried {
                lane.shape.batches = *batches;
                *sum += self.turn(lane, threads, TRIAL.min(self.length))?.rate;
            }
        }
        let best = tried.into_iter().max_by(|(_, one), (_, other)| one.total_cmp(other));
        lane.shape.batches = best.expect("one batch is always possible").0;
        Ok(())
    }

    /// Runs one turn of a lane, and adds the measurements to the lane.
    pub(super) fn take_turn(&self, lane: &mut Lane, threads: &mut [Thread]) -> Result<(), Failure> {
        if lane.contender == Contender::RedisBenchmark {
            let said = self.benchmark(lane)?;
            lane.measured.rates.push(said.ops_per_s);
            return Ok(());
        }
        let turn = self.turn_with_work(lane, threads)?;
        let measured = &mut lane.measured;
        measured.rates.push(turn.rate);
        measured.operations += turn.operations;
        measured.latencies.merge(&turn.latencies);
        measured.client_cpu += turn.client_cpu;
        measured.server_cpu = turn.server_cpu.map(|cpu| cpu + measured.server_cpu.unwrap_or_default());
        Ok(())
    }

    /// Runs a turn, and repeats it with twice the length until at least one operation completes. On a busy machine,
    /// clients may have to wait for a whole short turn. The rate would then be 0, from which no ratio can be computed.
    fn turn_with_work(&self, lane: &Lane, threads: &mut [Thread]) -> Result<Turn, Failure> {
        let mut length = self.length;
        for _ in 0..=PROLONGED_MAX {
            let turn = self.turn(lane, threads, length)?;
            if turn.operations > 0 {
                return Ok(turn);
            }
            length *= 2;
        }
        let (name, length) = (lane.contender.name(), length.as_secs_f64() / 2.0);
        Err(Failure::Error(format!(
            "{name}: no operation completed in {length} seconds: the machine is too busy for a comparison; stop other \
             programs, or give longer turns with --seconds"
        )))
    }

    fn turn(&self, lane: &Lane, threads: &mut [Thread], length: Duration) -> Result<Turn, Failure> {
        let server = self.server_pid(lane);
        if let Some(pid) = server {
            self.cores.take_server(pid)?;
        }
        let run = self.contenders.run();
        run.resume();
        let server_cpu = || server.map(cpu_time_of).transpose();
        let (sender, warm) = mpsc::channel();
        let reported = |reason: String| Failure::Error(format!("{}: {reason}", lane.contender.name()));
        std::thread::scope(|scope| {
            let clients: Vec<_> = threads[..lane.way.threads as usize]
                .iter_mut()
                .map(|thread| {
                    let sender = sender.clone();
                    scope.spawn(move || {
                        let ended = self.client(lane, thread, &sender);
                        sender.send(()).unwrap_or(()); // So that the turn does not wait for a client that failed.
                        ended.map(|seconds| (thread.take_tally(), seconds))
                    })
                })
                .collect();
            drop(sender);
            clients.iter().for_each(|_| warm.recv().unwrap_or(()));
            let before = (own_cpu_time()?, server_cpu()?);
            let until = Instant::now() + length;
            while warm.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
            run.stop();
            let after = (own_cpu_time()?, server_cpu()?);
            let (mut rate, mut tally) = (0.0, Tally::default());
            for client in clients {
                let (its, seconds) = client.join().expect("a client reports its errors").map_err(reported)?;
                rate += its.operations() as f64 / seconds;
                tally.merge(its);
            }
            if let Some(wrong) = tally.failures.first() {
                return Err(reported(wrong.clone()));
            }
            Ok(Turn {
                rate,
                operations: tally.operations(),
                latencies: tally.latencies.all(),
                client_cpu: after.0.saturating_sub(before.0),
                server_cpu: after.1.zip(before.1).map(|(after, before)| after.saturating_sub(before)),
            })
        })
    }

    fn server_pid(&self, lane: &Lane) -> Option<u32> {
        let of = |server: &Option<Server>| server.as_ref().map(Server::pid);
        match lane.contender {
            Contender::Redis { .. } | Contender::RedisBenchmark => of(&self.contenders.redis),
            Contender::Memcached => of(&self.contenders.memcached),
            Contender::Farside(FabricArg::Shm) | Contender::Lmdb => None,
            Contender::Farside(_) => self.contenders.session.node_pid(),
        }
    }

    /// Runs a client thread's turn. Returns how long the thread counted operations, in seconds.
    fn client(&self, lane: &Lane, thread: &Thread, warm: &mpsc::Sender<()>) -> Result<f64, String> {
        let cores = lane.way.served.map(|(cores, _)| cores);
        self.cores
            .take_client(cores, lane.way.threads)
            .map_err(|_| "cannot move the client to its core".to_owned())?;
        let redis = |unix: bool| {
            let server = self.contenders.redis.as_ref().expect("a Redis lane has a server");
            match unix {
                true => server.socket.as_ref().expect("the server was started with a unix socket"),
                false => &server.address,
            }
        };
        match lane.contender {
            Contender::Redis { mget: false, unix } => self.rival::<Get>(lane, redis(unix), thread, warm),
            Contender::Redis { mget: true, unix } => self.rival::<MGet>(lane, redis(unix), thread, warm),
            Contender::Memcached => {
                let server = self.contenders.memcached.as_ref().expect("a memcached lane has a server");
                self.rival::<Memcached>(lane, &server.address, thread, warm)
            }
            Contender::Lmdb => self.lmdb(lane, thread, warm),
            Contender::Farside(fabric) => {
                let found = self.contenders.pools.iter().find(|(by, _)| *by == fabric);
                self.farside(lane, &found.expect("a Farside lane has a pool").1, thread, warm)
            }
            Contender::RedisBenchmark => unreachable!("it runs in its own process"),
        }
    }

    fn rival<D: Dialect>(
        &self,
        lane: &Lane,
        address: &Address,
        thread: &Thread,
        warm: &mpsc::Sender<()>,
    ) -> Result<f64, String> {
        let waiting = match lane.waiting() {
            Some(rows::Client::Looks) => Waiting::Awake,
            _ => Waiting::Asleep,
        };
        let run = self.contenders.run();
        let client = Client::<D>::connect(address, waiting, run.work().value_size());
        let mut client = client.map_err(|error| error.to_string())?;
        let (began, warm_up) = (Instant::now(), WARM_UP.min(self.length));
        client.work(thread, lane.shape, || began.elapsed() < warm_up)?;
        let since = counts_from_here(thread, warm);
        client.work(thread, lane.shape, || !run.is_stopped())?;
        Ok(since.elapsed().as_secs_f64())
    }

    #[cfg(feature = "lmdb")]
    fn lmdb(&self, lane: &Lane, thread: &Thread, warm: &mpsc::Sender<()>) -> Result<f64, String> {
        let lmdb = self.contenders.lmdb.as_ref().expect("an LMDB lane has a database");
        let run = self.contenders.run();
        let (began, warm_up) = (Instant::now(), WARM_UP.min(self.length));
        lmdb.work(run.work(), thread, lane.way.depth, || began.elapsed() < warm_up)?;
        let since = counts_from_here(thread, warm);
        lmdb.work(run.work(), thread, lane.way.depth, || !run.is_stopped())?;
        Ok(since.elapsed().as_secs_f64())
    }

    #[cfg(not(feature = "lmdb"))]
    fn lmdb(&self, _: &Lane, _: &Thread, _: &mpsc::Sender<()>) -> Result<f64, String> {
        unreachable!("without the feature no lane is LMDB's")
    }

    fn farside(
        &self,
        lane: &Lane,
        pool: &Pool,
        thread: &Thread,
        warm: &mpsc::Sender<()>,
    ) -> Result<f64, String> {
        let (session, run) = (&self.contenders.session, self.contenders.run());
        let endpoint = Rc::new(pool.endpoint_here().map_err(|error| error.to_string())?);
        endpoint.set_waiting(match lane.waiting() {
            Some(rows::Client::Looks) => spin::Waiting::Awake,
            _ => spin::Waiting::Asleep,
        });
        let kvs = (0..lane.way.depth).map(|_| session.kv(&endpoint)).collect::<Result<Vec<_>, _>>();
        let mut kvs = kvs.map_err(|error| error.to_string())?;
        let mut core = Core::new(&endpoint);
        let mark = std::cell::Cell::new(None);
        for (task, kv) in (0u32..).zip(&mut kvs) {
            let (mark, thread) = (&mark, thread);
            core.spawn(async move {
                with_kv!(kv, kv => {
                    let mut is_connected = true;
                    if task == 0 {
                        // All tasks work during the warm-up. `counts_from_here` then discards the operations counted so
                        // far.
                        let (began, warm_up) = (Instant::now(), WARM_UP.min(self.length));
                        while is_connected && began.elapsed() < warm_up && !run.is_stopped() {
                            is_connected = run.task(kv, thread, task, 1).await;
                        }
                        mark.set(Some(counts_from_here(thread, warm)));
                    }
                    if is_connected {
                        run.task(kv, thread, task, u64::MAX).await;
                    }
                });
            });
        }
        core.run();
        drop(core);
        let since = mark.get().expect("the first task sets its mark, even if the run is over by then");
        Ok(since.elapsed().as_secs_f64())
    }

    /// Runs `redis-benchmark`, and returns its parsed output.
    fn benchmark(&self, lane: &Lane) -> Result<benchmark::Said, Failure> {
        let (program, records) =
            self.contenders.benchmark.as_ref().expect("its lane exists only with the program");
        let server = self.contenders.redis.as_ref().expect("its lane exists only with the server");
        let Address::Tcp(address) = &server.address else { unreachable!("the server's address is TCP") };
        self.cores.take_server(server.pid())?;
        self.cores.take_client(lane.way.served.map(|(cores, _)| cores), lane.way.threads)?;
        let requests = (REQUESTS_PER_SECOND * self.length.as_secs_f64()) as u64;
        let requests = requests.clamp(REQUESTS_MIN, REQUESTS_MAX).to_string();
        let started = command(program)?
            .args(["-h", "127.0.0.1", "-t", "get", "--csv", "-p", &address.port().to_string()])
            .args(["-P", &lane.way.depth.to_string(), "-c", &lane.way.threads.to_string()])
            .args(["-d", &self.contenders.run().work().value_size().to_string(), "-r", &records.to_string()])
            .args(["-n", &requests, "--dbnum", OfBenchmark::DATABASE])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        self.cores.release()?;
        let mut child = started?;
        let deadline = Instant::now() + BENCHMARK_MAX;
        // The output fits into the pipe's buffer, so the child never blocks on it.
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                let _gone = child.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        benchmark::parse(&said, "GET").map_err(|reason| Failure::Error(format!("redis-benchmark: {reason}")))
    }
}

/// Discards the counts of the warm-up, signals that the warm-up has ended, and returns the current time.
fn counts_from_here(thread: &Thread, warm: &mpsc::Sender<()>) -> Instant {
    thread.end_warm_up();
    warm.send(()).unwrap_or(()); // The turn outlives its clients.
    Instant::now()
}
