//! Measures a loaded store, on a node that the session starts or on an existing node.

mod config;
mod node;
mod outcome;
mod pace;
mod rounds;
mod subject;
mod temporary;

pub(in crate::cli) use config::{Log, Phases, SAMPLED, SessionConfig};
pub(in crate::cli) use node::NodeProcess;
pub(in crate::cli) use rounds::{Rounds, TURN};
pub(in crate::cli) use subject::{Audited, Calls, Keys, Objects, Ordered, Replicas, Subject, Transactions};
pub(in crate::cli) use temporary::{Dropping, TemporaryStore};

use super::FabricArg;
use crate::cli::{Failure, check_available, files, progress};
use config::quota;
use farside::Pool;
use farside::parts::{AnyKv, Endpoint};
use farside_bench::driver::{Interval, Run, Tally, Work};
use farside_bench::kv::{self, Counted};
use farside_bench::oltp::any::AnyBenchmark;
use farside_bench::oltp::{Kind, Oltp};
use farside_bench::report::{
    self, IntervalLog, Latencies, LatencyUs, LoadReport, V2DeflateSerializer, YcsbReport,
};
use farside_bench::workload::Workload;
use farside_fabrics::executor::{Core, Turns, block_on};
use farside_fabrics::layer::count::Count;
use farside_fabrics::layer::delay::{Delay, Distance};
use farside_fabrics::layer::fault::Strikes;
use farside_fabrics::memory::Mapping;
use farside_remote::arena::session::Counters;
use farside_systems::kv::{Kv, KvError};
use farside_systems::registry;
use farside_systems::system::{Family, Options};
use farside_systems::with_kv;
use node::reach;
use outcome::{NodesDone, Outcome, Sampled, difference};
use pace::{Pace, Start, Step};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A loaded key-value store, and how to measure it.
pub(in crate::cli) type Session = Measured<Keys>;

/// A loaded store of any family, and how to measure it.
pub(in crate::cli) struct Measured<S: Subject> {
    config: SessionConfig,
    store: String,
    pool: Pool,
    /// Urls of the nodes that hold the store, if each task keeps to one of them.
    members: Vec<String>,
    run: Run<S::Work>,
    load: Option<LoadReport>,
    /// The store on an existing node, which is dropped at the end; `None` if the node ends with this session.
    temporary: Option<TemporaryStore>,
    /// The node's memory, if this process maps it. The mapping is kept between clients, so that its pages are faulted
    /// in only once, as in a program that stays connected.
    _memory: Option<Arc<Mapping>>,
    /// The nodes that were started for this session, shared with the other sessions on them.
    nodes: Vec<Arc<NodeProcess>>,
    /// Costs of a sample of operations. They are counted only once, because they do not depend on the number of
    /// operations in flight.
    sampled: OnceLock<Sampled>,
}

/// Returns the memory of a node that holds a store with this quota.
fn memory_of(quota: u64) -> u64 {
    (quota + (quota >> 5) + (64 << 20)).next_multiple_of(2 << 20)
}

/// Returns the memory of a node that holds the store of a plan.
///
/// # Errors
/// No store can be that large.
pub(in crate::cli) fn memory_for(config: &SessionConfig) -> Result<u64, Failure> {
    quota(config).map(memory_of)
}

/// Checks that this machine has the memory of this many nodes, each of which holds the store of a plan.
///
/// # Errors
/// It has not, or no store can be that large.
pub(in crate::cli) fn check_memory_of(nodes: u32, config: &SessionConfig) -> Result<(), Failure> {
    check_available(memory_for(config)? * u64::from(nodes), &config.remedy())
}

/// Number of tasks per thread while the store is loaded.
const LOADERS: u32 = 64;
/// Number of operations in the sample whose round trips are counted.
const COUNTED: u64 = 20_000;
/// Maximum time that counting the costs of [`COUNTED`] operations may take.
const COUNT_MAX: Duration = Duration::from_millis(500);

impl<S: Subject> Measured<S> {
    /// Starts a node unless the plan names one, creates a store there, and loads the store.
    pub(in crate::cli) fn start(config: SessionConfig) -> Result<Measured<S>, Failure> {
        let mut sessions = Measured::start_all(vec![config])?;
        Ok(sessions.pop().expect("there is one session for each plan"))
    }

    /// Starts a session like [`Session::start`]. The node also serves the fabrics `also`, for [`Session::pool_over`].
    pub(in crate::cli) fn start_serving(
        config: SessionConfig,
        also: &[FabricArg],
    ) -> Result<Measured<S>, Failure> {
        let mut sessions = Measured::start_all_serving(vec![config], also)?;
        Ok(sessions.pop().expect("there is one session for each plan"))
    }

    /// Starts one node for all plans unless they name a node. Creates and loads a store for each plan. The plans may
    /// differ only in the system and its workload.
    pub(in crate::cli) fn start_all(all: Vec<SessionConfig>) -> Result<Vec<Measured<S>>, Failure> {
        Measured::start_all_serving(all, &[])
    }

    fn start_all_serving(all: Vec<SessionConfig>, also: &[FabricArg]) -> Result<Vec<Measured<S>>, Failure> {
        let quotas = all.iter().map(quota).collect::<Result<Vec<u64>, Failure>>()?;
        let quota: u64 = quotas.iter().sum();
        let memory = memory_of(quota);
        let first = all.first().expect("there is at least one plan");
        if first.existing.pool.is_none() {
            check_available(memory * u64::from(first.nodes()), &first.remedy())?;
        }
        let runs = all.iter().map(S::planned).collect::<Result<Vec<Run<S::Work>>, Failure>>()?;
        let (pool, nodes) = reach(first, memory, also)?;
        let sessions = all.into_iter().zip(runs).zip(quotas);
        sessions
            .map(|((config, run), quota)| Measured::on(&pool, nodes.clone(), config, run, quota))
            .collect()
    }

    /// Opens a session on a loaded store, whose nodes others have started. The plan's phase names the store.
    ///
    /// # Errors
    /// The store is not as the plan expects.
    pub(in crate::cli) fn within(pool: &Pool, config: SessionConfig) -> Result<Measured<S>, Failure> {
        let run = S::planned(&config)?;
        Measured::on(pool, Vec::new(), config, run, 0)
    }

    /// Name of the store.
    pub(in crate::cli) fn store(&self) -> &str {
        &self.store
    }

    fn on(
        pool: &Pool,
        nodes: Vec<Arc<NodeProcess>>,
        config: SessionConfig,
        run: Run<S::Work>,
        quota: u64,
    ) -> Result<Measured<S>, Failure> {
        let store = match &config.phases {
            Phases::Both => format!("{}-{}-{}", S::COMMAND, config.system.kind, std::process::id()),
            Phases::Load(name) | Phases::Run(name) | Phases::Within(name) => name.clone(),
        };
        let temporary = match (&config.existing.pool, &config.phases) {
            (_, Phases::Run(_)) => {
                S::check_is_loaded(pool, &config, &store)?;
                None
            }
            (_, Phases::Within(_)) => None,
            (Some(_), _) => {
                let remedy = format!("{}; or omit --pool, to start a node for the run", config.remedy());
                let create = || S::create(pool, &config, &store, quota);
                Some(TemporaryStore::make(pool, (&store, quota), S::DROPPING, create, &remedy)?)
            }
            (None, _) => {
                S::create(pool, &config, &store, quota)?;
                None
            }
        };
        // Faults are injected only from here on, so that none hits the creation of the store.
        let pool = match &config.faults {
            Some(faults) => pool.clone().with_faults(faults.clone())?,
            None => pool.clone(),
        };
        let members = if config.by_node { members_for(&pool, &config, &store)? } else { Vec::new() };
        let memory = pool.endpoint_over_all()?.memory().map(Arc::clone);
        let sampled = OnceLock::new();
        let mut session = Measured {
            config,
            store,
            pool,
            members,
            run,
            load: None,
            temporary,
            _memory: memory,
            nodes,
            sampled,
        };
        session.load = match session.config.phases {
            Phases::Run(_) => None,
            Phases::Both | Phases::Load(_) | Phases::Within(_) => Some(session.load()?),
        };
        if let (Phases::Load(_), Some(temporary)) = (&session.config.phases, &session.temporary) {
            temporary.keep();
        }
        Ok(session)
    }
}

impl Session {
    /// Returns a session for the same store over `fabric`, under another workload. `workload` must have the same number
    /// of records, and insert none.
    ///
    /// # Errors
    /// The node does not serve that fabric, or is gone.
    pub(in crate::cli) fn over(&self, fabric: FabricArg, workload: Workload) -> Result<Session, Failure> {
        let pool = match self.nodes.is_empty() {
            true => self.pool.clone(),
            false => self.pool_over(fabric)?,
        };
        let config = SessionConfig { fabric: Some(fabric), workload, ..self.config.clone() };
        self.with_config(config, pool, OnceLock::new())
    }

    /// Returns a session for the same store with `tasks` operations in flight. `tasks` must not exceed the number for
    /// which the store was created.
    ///
    /// # Errors
    /// The node is gone.
    pub(in crate::cli) fn with_tasks(&self, tasks: u32) -> Result<Session, Failure> {
        let config = SessionConfig { tasks, ..self.config.clone() };
        self.with_config(config, self.pool.clone(), self.sampled.clone())
    }

    fn with_config(
        &self,
        config: SessionConfig,
        pool: Pool,
        sampled: OnceLock<Sampled>,
    ) -> Result<Session, Failure> {
        let memory = pool.endpoint_over_all()?.memory().map(Arc::clone);
        Ok(Session {
            run: Keys::planned(&config)?,
            config,
            store: self.store.clone(),
            pool,
            members: self.members.clone(),
            load: self.load,
            temporary: None,
            _memory: memory,
            nodes: self.nodes.clone(),
            sampled,
        })
    }

    /// Connects to the started node over `fabric`.
    ///
    /// # Errors
    /// No node was started, or the node does not serve that fabric, or the node is gone.
    pub(in crate::cli) fn pool_over(&self, fabric: FabricArg) -> Result<Pool, Failure> {
        let node = self.nodes.first().ok_or_else(|| Failure::Error("no node was started".into()))?;
        node.pool(fabric)
    }

    /// Returns the state that all clients of the session share.
    pub(in crate::cli) fn run(&self) -> &kv::Run {
        &self.run
    }
}

impl<S: Subject> Measured<S> {
    /// Returns the number of nodes.
    pub(in crate::cli) fn nodes(&self) -> u64 {
        self.pool.nodes().len() as u64
    }

    /// Returns the process id of the node that was started for this session.
    pub(in crate::cli) fn node_pid(&self) -> Option<u32> {
        self.nodes.first().map(|node| node.pid())
    }

    /// Returns the numbers of injected faults, or `None` if no faults were requested.
    pub(in crate::cli) fn strikes(&self) -> Option<Strikes> {
        self.pool.strikes()
    }

    fn load(&self) -> Result<LoadReport, Failure> {
        let began = Instant::now();
        let bar = progress("loading records", self.config.workload.records, self.config.quiet);
        let threads = self.config.threads;
        let tasks = u64::from(threads * LOADERS);
        let (reported, bars) = mpsc::channel();
        let latencies = std::thread::scope(|scope| {
            let loaders: Vec<_> = (0..threads)
                .map(|thread| {
                    let reported = reported.clone();
                    scope.spawn(move || self.load_thread(thread, tasks, &reported))
                })
                .collect();
            drop(reported);
            bars.iter().for_each(|count| bar.inc(count));
            loaders.into_iter().try_fold(Latencies::new(), |mut all, loader| {
                all.merge(&loader.join().expect("a loader reports its errors")?);
                Ok::<_, Failure>(all)
            })
        })?;
        bar.finish_and_clear();
        let (records, seconds) = (self.config.workload.records, began.elapsed().as_secs_f64());
        let latency_us = LatencyUs::from(&latencies);
        Ok(LoadReport { records, seconds, ops_per_s: records as f64 / seconds, latency_us })
    }

    fn load_thread(
        &self,
        thread: u32,
        tasks: u64,
        reported: &mpsc::Sender<u64>,
    ) -> Result<Latencies, Failure> {
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        let failed = std::cell::RefCell::new(None);
        let latencies = std::cell::RefCell::new(Latencies::new());
        let mut core = Core::new(&endpoint);
        let clients = S::clients(self, &endpoint, LOADERS)?;
        let mut keepers = Some(S::keepers(&clients)).filter(|keepers| !keepers.is_empty());
        for (task, mut client) in (0..).zip(clients) {
            let first = u64::from(thread * LOADERS + task);
            let (failed, latencies) = (&failed, &latencies);
            // The first task keeps the clients of all.
            let mut keepers = keepers.take();
            core.spawn(async move {
                let tell = |count, took: &Latencies| {
                    latencies.borrow_mut().merge(took);
                    // The receiver is gone if another thread's load has failed.
                    reported.send(count).unwrap_or(());
                };
                let load = async {
                    S::load(&self.run, &mut client, first, tasks, tell).await?;
                    S::settle(&mut client).await.map_err(|trouble| trouble.to_string())
                };
                let loaded = match &mut keepers {
                    None => load.await,
                    Some(keepers) => keepers.beside(load).await,
                };
                drop(client);
                if let Some(keepers) = keepers {
                    keepers.end().await;
                }
                if let Err(reason) = loaded {
                    failed.borrow_mut().get_or_insert(reason);
                }
            });
        }
        core.run();
        drop(core);
        failed.into_inner().map_or(Ok(latencies.into_inner()), |reason| Err(Failure::Error(reason)))
    }
}

impl Session {
    /// Opens a connection to the node for the calling thread.
    pub(in crate::cli) fn endpoint(&self) -> Result<Endpoint, Failure> {
        Ok(self.pool.endpoint_over_all()?)
    }

    /// Opens a client of the store.
    pub(in crate::cli) fn kv<F>(&self, fabric: &Rc<F>) -> Result<AnyKv<Rc<F>>, KvError>
    where
        F: farside_remote::Fabric + farside_remote::clock::Clock + Turns,
    {
        let SessionConfig { slot_cache, value_cache, put_threshold, .. } = self.config;
        let options = Options { slot_cache, value_cache, put_threshold, ..Options::default() };
        Ok(block_on(
            fabric,
            AnyKv::open(Rc::clone(fabric), self.pool.nodes().len() as u32, &self.store, &options),
        )?)
    }
}

impl<S: Subject> Measured<S> {
    /// Returns the report of the load phase, or `None` if this session did not load the store.
    pub(in crate::cli) fn loaded(&self) -> Option<LoadReport> {
        self.load
    }

    /// Runs the workload for `duration` after a warm-up, once for each repeat, and returns the report.
    pub(in crate::cli) fn measure(&self, duration: Duration) -> Result<YcsbReport, Failure> {
        let sampled = match self.sampled.get() {
            Some(sampled) => sampled,
            None => {
                let sampled = self.sample()?;
                self.sampled.get_or_init(|| sampled)
            }
        };
        let ended = match &self.config.log {
            None => self.repeat(duration, None)?,
            Some(log) => self.repeat_logged(duration, log)?,
        };
        Ok(self.report(ended, sampled))
    }

    /// Returns the outcome of each repeat, like [`repeat`](Session::repeat), while a thread writes the latencies to the
    /// log.
    fn repeat_logged(&self, duration: Duration, log: &Log) -> Result<Vec<Outcome>, Failure> {
        let unwritable = |error: io::Error| files::unwritable(&log.path, &error);
        // The file is line-buffered, so that an interrupted run keeps the lines written so far.
        let mut file = io::LineWriter::new(std::fs::File::create(&log.path).map_err(unwritable)?);
        let (sender, intervals) = mpsc::channel();
        let cut = Cut { since: Instant::now(), every: log.every, to: sender };
        let reported = format!("[farside bench {}, workload {}]", S::COMMAND, self.config.workload);
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let mut serializer = V2DeflateSerializer::new();
                let began = std::time::SystemTime::now();
                let mut log = IntervalLog::begin(
                    &mut file,
                    &mut serializer,
                    began,
                    log.every,
                    S::Work::KINDS,
                    &reported,
                )?;
                intervals.iter().try_for_each(|interval| log.add(interval))?;
                log.end()?;
                file.flush()
            });
            let ended = self.repeat(duration, Some(&cut));
            drop(cut);
            writer.join().expect("a writer reports its errors").map_err(unwritable)?;
            ended
        })
    }

    /// Runs the workload once for each repeat, and returns the outcomes.
    fn repeat(&self, duration: Duration, cut: Option<&Cut>) -> Result<Vec<Outcome>, Failure> {
        (0..self.config.repeats).map(|_| self.measure_once(duration, cut)).collect()
    }

    fn measure_once(&self, duration: Duration, cut: Option<&Cut>) -> Result<Outcome, Failure> {
        self.run.resume();
        let (sender, events) = mpsc::channel();
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..self.config.threads)
                .map(|thread| {
                    let (sender, cut) = (sender.clone(), cut.cloned());
                    scope.spawn(move || {
                        let ended = self.client(thread, &sender, cut);
                        sender.send(()).unwrap_or(()); // So that `conduct` does not wait for a client that failed.
                        ended
                    })
                })
                .collect();
            drop(sender);
            let by_node = self.conduct(&events, duration, clients.len());
            let mut ended = Outcome { by_node: vec![by_node], ..Outcome::default() };
            for client in clients {
                ended.add(client.join().expect("a client reports its errors")?);
            }
            Ok(ended)
        })
    }

    /// Waits until every client has warmed up, and lets the clients run for `duration`, or until all have ended. Then
    /// stops the run. Returns the operations of each node's tasks, if each task keeps to one
    /// node.
    fn conduct(&self, events: &mpsc::Receiver<()>, duration: Duration, clients: usize) -> NodesDone {
        const TICK: Duration = Duration::from_millis(100);
        // An error means that all clients have ended; each client returns its own error.
        (0..clients).for_each(|_| events.recv().unwrap_or(()));
        let quiet = self.config.quiet || !io::stderr().is_terminal() || self.config.operations.is_some();
        let bar = progress("measuring, tenths of seconds", (duration.as_secs_f64() * 10.0) as u64, quiet);
        let (since, until) = (Instant::now(), Instant::now() + duration);
        let before = S::counted(self.run.work(), self.members.len());
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match events.recv_timeout(left.min(TICK)) {
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) if left <= TICK => break,
                _ => bar.set_position((since.elapsed().as_secs_f64() * 10.0) as u64),
            }
        }
        bar.finish_and_clear();
        let after = S::counted(self.run.work(), self.members.len());
        let seconds = since.elapsed().as_secs_f64();
        self.run.stop();
        let less = |(now, before): (&Counted, &Counted)| Counted {
            done: now.done - before.done,
            errors: now.errors - before.errors,
        };
        NodesDone { counted: after.iter().zip(&before).map(less).collect(), seconds }
    }

    fn client(&self, thread: u32, warm: &mpsc::Sender<()>, cut: Option<Cut>) -> Result<Outcome, Failure> {
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        match self.config.distance {
            None => self.client_over(&endpoint, &endpoint, thread, warm, cut),
            Some(distance) => {
                let distance = Distance { seed: thread.into(), ..distance };
                let far = Rc::new(far(&endpoint, distance));
                self.client_over(&far, &endpoint, thread, warm, cut)
            }
        }
    }

    /// Runs one client thread: warms up, then counts operations until the end. `fabric` is a layer that sends its
    /// requests through `endpoint`, or that endpoint itself.
    fn client_over<F>(
        &self,
        fabric: &Rc<F>,
        endpoint: &Endpoint,
        thread: u32,
        warm: &mpsc::Sender<()>,
        cut: Option<Cut>,
    ) -> Result<Outcome, Failure>
    where
        F: farside_remote::Fabric + farside_remote::clock::Clock + Turns + 'static,
    {
        let drawn = self.run.thread(thread);
        let clients = S::clients(self, fabric, self.config.tasks)?;
        let mut keepers = Some(S::keepers(&clients)).filter(|keepers| !keepers.is_empty());
        let events = RefCell::new(BTreeMap::new());
        let mut core = Core::new(fabric);
        let snapshot = || Snapshot {
            at: Instant::now(),
            node_cpu: node_cpu(self),
            own_cpu: own_cpu(),
            counters: endpoint.counters(),
        };
        let (begun, ended, open) = (Cell::new(None), Cell::new(None), Cell::new(self.config.tasks));
        let start =
            Start { began: Instant::now(), cold: Cell::new(self.config.tasks), warm: Cell::new(None) };
        let pace = Pace::of(&self.config, self.pool.nodes().len());
        for (task, mut client) in (0u32..).zip(clients) {
            let (drawn, cut, start, events) = (&drawn, &cut, &start, &events);
            let (snapshot, begun, ended, open) = (&snapshot, &begun, &ended, &open);
            let mut keepers = keepers.take();
            core.spawn(async move {
                let writer = thread * self.config.tasks + task;
                let warmed_up = || {
                    drawn.end_warm_up();
                    drawn.limit(self.operations_of(thread));
                    if let Some(Cut { since, every, to }) = cut.clone() {
                        drawn.cut(since, every, to);
                    }
                    begun.set(Some(snapshot()));
                    warm.send(()).unwrap_or(()); // The conductor outlives its clients.
                };
                let warmed_up = (task == 0).then_some(warmed_up);
                let run = async {
                    S::pace(pace, &self.run, &mut client, drawn, writer, start, warmed_up).await;
                    // What follows is no operation: a client may wait until others no longer use what it has retired.
                    open.update(|open| open - 1);
                    if open.get() == 0 {
                        ended.set(Some(snapshot()));
                    }
                    if let Err(trouble) = S::settle(&mut client).await {
                        _ = drawn.count_trouble(&trouble);
                    }
                };
                match &mut keepers {
                    None => run.await,
                    Some(keepers) => keepers.beside(run).await,
                }
                {
                    // If all are handles of one client, the task that ends last has the numbers of all.
                    let mut events = events.borrow_mut();
                    if !S::HAS_OWN_CLIENTS {
                        events.clear();
                    }
                    let own = S::events(&client).into_iter();
                    own.for_each(|(name, count)| *events.entry(name).or_default() += count);
                }
                drop(client);
                if let Some(keepers) = keepers {
                    keepers.end().await;
                }
            });
        }
        core.run();
        drop(core);
        let begun = begun.take().expect("the first task sets its mark, even if the run is over by then");
        let ended = ended.take().expect("all tasks have ended");
        Ok(Outcome {
            seconds: ended.at.duration_since(begun.at).as_secs_f64(),
            tally: drawn.take_tally(),
            counters: difference(ended.counters, begun.counters),
            own_cpu: ended.own_cpu.saturating_sub(begun.own_cpu),
            node_cpu: ended.node_cpu.zip(begun.node_cpu).map(|(now, before)| now.saturating_sub(before)),
            operations_per_s: 0.0,
            by_node: Vec::new(),
            events: events.into_inner(),
        })
    }

    /// Returns the maximum number of operations of a thread after its warm-up: its share of the session's operations.
    fn operations_of(&self, thread: u32) -> u64 {
        let share = |operations: u64| {
            let (threads, thread) = (u64::from(self.config.threads), u64::from(thread));
            operations / threads + u64::from(thread < operations % threads)
        };
        self.config.operations.map_or(u64::MAX, share)
    }
}

impl Session {
    /// Reads over one connection until [`Session::stop_reading`]. Adds the number of completed reads to `count`
    /// meanwhile.
    pub(in crate::cli) fn read_until_stopped(&self, count: &AtomicU64) -> Result<(), Failure> {
        const STEP: u64 = 256;
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        let drawn = self.run.thread(0);
        let mut core = Core::new(&endpoint);
        self.run.resume();
        for task in 0..self.config.tasks {
            let mut kv = self.kv(&endpoint)?;
            let drawn = &drawn;
            core.spawn(async move {
                let mut is_connected = true;
                while is_connected && !self.run.is_stopped() {
                    is_connected = with_kv!(&mut kv, kv => self.run.task(kv, drawn, task, STEP).await);
                    count.fetch_add(STEP, Ordering::Relaxed);
                }
            });
        }
        core.run();
        drop(core);
        match drawn.take_tally().failures.first() {
            Some(wrong) => Err(Failure::Error(format!("a read failed: {wrong}"))),
            None => Ok(()),
        }
    }

    pub(in crate::cli) fn stop_reading(&self) {
        self.run.stop();
    }
}

impl<S: Subject> Measured<S> {
    /// Runs a sample of operations, and counts their costs: round trips, bytes and probes.
    fn sample(&self) -> Result<Sampled, Failure> {
        let counted = Rc::new(Count::new(self.pool.endpoint_over_all()?));
        let drawn = self.run.thread(u32::MAX);
        let mut clients = S::clients(self, &counted, 1)?;
        let mut keepers = S::keepers(&clients);
        let mut client = clients.pop().expect("it was opened");
        counted.take();
        let (began, mut step, mut operations) = (Instant::now(), Step::default(), 0);
        let mut is_connected = true;
        while is_connected && (operations == 0 || operations < COUNTED && began.elapsed() < COUNT_MAX) {
            let so_many = step.next();
            let performed = S::perform(&self.run, &mut client, &drawn, 0, so_many);
            is_connected = block_on(counted.inner(), keepers.beside(performed));
            operations += so_many;
        }
        let all = counted.take();
        let settled = block_on(counted.inner(), keepers.beside(S::settle(&mut client)));
        settled.map_err(|trouble| Failure::Error(trouble.to_string()))?;
        drop(client);
        block_on(counted.inner(), keepers.end());
        let probes = S::probes(self, &counted)?;
        Ok(Sampled { costs: all, operations: operations as f64, probes })
    }
}

impl Measured<Replicas> {
    /// Reads all blocks once, by a new client, and checks them. Returns the tally of these reads.
    ///
    /// # Errors
    /// The store cannot be opened.
    pub(in crate::cli) fn read_back(&self) -> Result<Tally, Failure> {
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        let drawn = self.run.thread(0);
        let clients = Replicas::clients(self, &endpoint, LOADERS)?;
        let mut keepers = Some(Replicas::keepers(&clients)).filter(|keepers| !keepers.is_empty());
        let mut core = Core::new(&endpoint);
        for (task, mut client) in (0u64..).zip(clients) {
            let drawn = &drawn;
            let mut keepers = keepers.take();
            core.spawn(async move {
                let read = self.run.read_back(&mut client, drawn, task, LOADERS as usize);
                match &mut keepers {
                    None => read.await,
                    Some(keepers) => keepers.beside(read).await,
                }
                drop(client);
                if let Some(keepers) = keepers {
                    keepers.end().await;
                }
            });
        }
        core.run();
        drop(core);
        Ok(drawn.take_tally())
    }
}

impl Measured<Objects> {
    /// Reads all objects once, by new clients, and compares their counts with the number of updates.
    ///
    /// # Errors
    /// An object cannot be read, or the counts are wrong.
    pub(in crate::cli) fn check_sum(&self) -> Result<(), Failure> {
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        let (sum, failed) = (Cell::new(0), std::cell::RefCell::new(None));
        let clients = Objects::clients(self, &endpoint, LOADERS)?;
        let mut core = Core::new(&endpoint);
        for (task, mut client) in (0u64..).zip(clients) {
            let (sum, failed) = (&sum, &failed);
            core.spawn(async move {
                match self.run.sum(&mut client, task, LOADERS as usize).await {
                    Ok(counts) => sum.set(sum.get() + counts),
                    Err(trouble) => _ = failed.borrow_mut().get_or_insert(trouble),
                }
            });
        }
        core.run();
        drop(core);
        let checked = failed.into_inner().map_or(Ok(()), Err).and_then(|()| self.run.check_sum(sum.get()));
        checked.map_err(|trouble| Failure::Error(format!("after the run, {trouble}")))
    }
}

impl<W: Audited> Measured<Transactions<W>> {
    /// Reads all records once, by a new client, and compares their total with what the run has done.
    ///
    /// # Errors
    /// A record cannot be read, or the total is wrong.
    pub(in crate::cli) fn check_total(&self) -> Result<(), Failure> {
        let endpoint = Rc::new(self.pool.endpoint_over_all()?);
        let (total, failed) = (Cell::new(0), RefCell::new(None));
        let clients = Transactions::<W>::clients(self, &endpoint, LOADERS)?;
        let mut keepers = Some(Transactions::<W>::keepers(&clients));
        let mut core = Core::new(&endpoint);
        for (task, mut client) in (0u64..).zip(clients) {
            let (total, failed) = (&total, &failed);
            let mut keepers = keepers.take();
            core.spawn(async move {
                let reading = self.run.work().audit(&mut client, task, LOADERS as usize);
                let read = match &mut keepers {
                    None => reading.await,
                    Some(keepers) => keepers.beside(reading).await,
                };
                match read {
                    Ok(part) => total.set(total.get() + part),
                    Err(trouble) => _ = failed.borrow_mut().get_or_insert(trouble),
                }
                drop(client);
                if let Some(keepers) = keepers {
                    keepers.end().await;
                }
            });
        }
        core.run();
        drop(core);
        let read = failed.into_inner().map_or(Ok(()), Err);
        let checked = read.and_then(|()| self.run.work().check_total(total.get()));
        checked.map_err(|trouble| Failure::Error(format!("after the run, {trouble}")))
    }

    /// Fraction of the attempts of transactions so far that met another one.
    pub(in crate::cli) fn abort_rate(&self) -> f64 {
        self.run.work().abort_rate()
    }
}

impl Measured<Transactions<Oltp<AnyBenchmark>>> {
    /// Numbers of transactions so far of each kind.
    pub(in crate::cli) fn kinds(&self) -> Vec<(&'static str, Kind)> {
        self.run.kinds()
    }
}

/// Division of latencies into intervals of length `every` from `since` on, and the channel to which each interval is
/// sent.
#[derive(Clone)]
struct Cut {
    since: Instant,
    every: Duration,
    to: mpsc::Sender<Interval>,
}

/// Checks that a key-value store is loaded as the run expects.
fn check_is_loaded(pool: &Pool, config: &SessionConfig, store: &str) -> Result<(), Failure> {
    let mut opened = None;
    check_records(pool, config, store, |record| {
        let (endpoint, kv) = match &mut opened {
            Some(opened) => opened,
            none => {
                let endpoint = Rc::new(pool.endpoint_over_all()?);
                let options = Options::default();
                let kv = AnyKv::open(Rc::clone(&endpoint), endpoint.nodes(), store, &options);
                let kv = block_on(&endpoint, kv)?;
                none.insert((endpoint, kv))
            }
        };
        let item = block_on(&*endpoint, kv.get(&farside_bench::workload::key(record)))?;
        Ok(item.map(|item| item.value.len()))
    })
}

/// Checks that the store exists, and is one of the run's system.
fn check_kind(pool: &Pool, config: &SessionConfig, store: &str) -> Result<(), Failure> {
    let stores = pool.stores()?;
    let Some(found) = stores.iter().find(|found| found.name == store) else {
        return Err(Failure::Error(format!(
            "store '{store}' does not exist: load it first, with the same command and --phase load"
        )));
    };
    if found.kind != config.system.kind {
        let of = registry::named(&found.kind).map(|system| system.family);
        let remedy = match of {
            Some(Family::Kv | Family::Index) => format!("give --system {}", found.kind),
            _ => "name another store with --store".to_owned(),
        };
        return Err(Failure::Error(format!(
            "store '{store}' is a {}, not a {}: {remedy}",
            found.kind, config.system.kind
        )));
    }
    Ok(())
}

/// Checks that the store is loaded as the run expects: its first and its last record exist, with values of the right
/// length. `len` returns the length of a record's value.
fn check_records(
    pool: &Pool,
    config: &SessionConfig,
    store: &str,
    mut len: impl FnMut(u64) -> Result<Option<usize>, Failure>,
) -> Result<(), Failure> {
    check_kind(pool, config, store)?;
    let of_index = match config.system.family {
        Family::Index => {
            "with other --keys, or for a workload with scans and this one has none, or conversely, or "
        }
        _ => "",
    };
    for record in [0, config.workload.records - 1] {
        match len(record)? {
            Some(len) if len == config.value_size => {}
            Some(len) => {
                return Err(Failure::Error(format!(
                    "store '{store}' was loaded with values of {len} bytes: give --value-size {len}"
                )));
            }
            None => {
                return Err(Failure::Error(format!(
                    "store '{store}' has no record {record}: it was loaded with fewer --records, or {of_index}not \
                     completely, or not by --phase load; give the --records of the load, or drop the store and load it \
                     again"
                )));
            }
        }
    }
    Ok(())
}

/// Returns the urls of the nodes that hold the store.
///
/// # Errors
/// There are fewer tasks than nodes.
fn members_for(pool: &Pool, config: &SessionConfig, store: &str) -> Result<Vec<String>, Failure> {
    let members: Vec<String> = pool.members(store)?.iter().map(|node| node.url().to_owned()).collect();
    let tasks = (config.threads * config.tasks) as usize;
    if tasks < members.len() {
        return Err(Failure::Error(format!(
            "--by-node needs a task for each of the {} nodes of the store, and there are {tasks}: give more --tasks",
            members.len()
        )));
    }
    Ok(members)
}

/// What a measurement is counted from, or up to.
struct Snapshot {
    at: Instant,
    /// CPU times of the nodes and of this process; `None` as [`node_cpu`] has it.
    node_cpu: Option<Duration>,
    own_cpu: Duration,
    counters: Counters,
}

fn own_cpu() -> Duration {
    report::own_cpu_time().expect("Linux reports a process's own CPU time")
}

/// Returns the CPU time that the nodes have used. Returns `None` if a node runs in this process or is gone; the report
/// then omits the time.
fn node_cpu<S: Subject>(session: &Measured<S>) -> Option<Duration> {
    let of = |pid: u32| report::cpu_time_of(pid).ok();
    match (&session.nodes[..], session.pool.fabric()) {
        ([], "local") => None,
        ([], _) => session.pool.nodes().map(|node| of(node.info().ok()?.pid)).sum(),
        (started, _) => started.iter().map(|node| of(node.pid())).sum(),
    }
}

/// Wraps a session's endpoint in a layer that adds a network delay.
pub(in crate::cli) fn far(endpoint: &Rc<Endpoint>, distance: Distance) -> Delay<Rc<Endpoint>> {
    match endpoint.memory() {
        Some(_) => Delay::of_requests(Rc::clone(endpoint), distance),
        None => Delay::of_answers(Rc::clone(endpoint), distance),
    }
}
