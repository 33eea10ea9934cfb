//! Runs the demo's measurements, and holds their results.
//!
//! Invariant: a run and the floor that it is compared with have the same workload, the same numbers of records and
//! operations in flight, values of the same size, and one client thread each.

use crate::cli::bench::{Compare, FabricArg, Floor as Echo, Session, SessionConfig, check_mismatches};
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure};
use farside_bench::compare::rows::CompareReport;
use farside_bench::floor::{self, Floor, HugePages, Layout};
use farside_bench::report::{FloorReport, YcsbReport};
use farside_bench::workload::{Distribution, Workload};
use farside_systems::registry::default_kv;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Settings of the demo.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Settings {
    pub(super) records: u64,
    pub(super) value_size: u32,
    /// Duration of each measurement.
    pub(super) each: Duration,
}

/// All results of the demo.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Results {
    pub(super) settings: Settings,
    pub(super) machine: Machine,
    pub(super) stopped: Stopped,
    /// Reports of the floors. The floor of `shm` is also that of `local`.
    pub(super) floors: Vec<FloorReport>,
    pub(super) runs: Vec<YcsbReport>,
    /// Reports of the comparison with rivals; empty if no rival is installed.
    pub(super) compared: Vec<CompareReport>,
    /// The names of the compared systems, each with its release.
    pub(super) versions: Vec<String>,
    /// Skipped rivals, each with the reason and the remedy.
    pub(super) skipped: Vec<String>,
    /// Description of the cores on which servers and clients ran in the comparison.
    pub(super) cores: String,
}

/// Results of a client that reads before, during and after a stop of the node's process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Stopped {
    pub(super) fabric: String,
    pub(super) tasks: u32,
    pub(super) pid: i32,
    /// For each interval: its end, in seconds since the start, and the number of values read per second.
    pub(super) intervals: Vec<(f64, f64)>,
    /// Time at which the node was stopped, in seconds since the start.
    pub(super) stopped_at_s: f64,
    /// Time at which the node was continued, in seconds since the start.
    pub(super) continued_at_s: f64,
    /// Values read per second before, during and after the stop: this field and the next two.
    pub(super) before_ops_per_s: f64,
    pub(super) while_ops_per_s: f64,
    pub(super) after_ops_per_s: f64,
}

/// Numbers of operations in flight with which reads are measured.
pub(super) const DEPTHS: [u32; 4] = [1, 4, 16, 64];
/// Number of operations in flight for the mixed workload, and for the client that reads while the node is stopped.
pub(super) const MIDDLE: u32 = 16;
/// Numbers of operations in flight for the floor of reads of a fabric that sends messages. There are only two, because
/// each starts and loads a new server.
pub(super) const ENDS: [u32; 2] = [1, 64];
/// Number of intervals before the stop, during it, and after it.
const INTERVALS: u32 = 20;
/// Maximum duration of a client's warm-up.
const WARM_UP: Duration = Duration::from_millis(200);
/// Number of rounds in the comparison with rivals.
pub(super) const ROUNDS: u32 = 5;

/// Returns the fabrics to a node in another process, in the order of the output.
fn fabrics() -> Vec<FabricArg> {
    vec![
        FabricArg::Shm,
        FabricArg::Ring,
        FabricArg::Udp,
        FabricArg::Tcp,
        #[cfg(feature = "tls")]
        FabricArg::Tls,
    ]
}

impl Settings {
    /// Measures everything except the rivals.
    pub(super) fn measure(self) -> Result<Results, Failure> {
        let machine = Machine::current();
        note!("The floor: the same reads and overwrites, in the same kind of table, without a system ...");
        let mut floors = self.floors()?;
        let mut runs = Vec::new();
        let session = Session::start(self.config(FabricArg::Local)?)?;
        self.run(FabricArg::Local, &session, &mut runs)?;
        drop(session);

        let [first, others @ ..] = &fabrics()[..] else { unreachable!("there are several fabrics") };
        let session = Session::start_serving(self.config(*first)?, others)?;
        self.run(*first, &session, &mut runs)?;
        let stopped = self.stop_the_node(&session.with_tasks(MIDDLE)?)?;
        for &fabric in others {
            let reads = ENDS.map(|tasks| (floor::Workload::C, tasks));
            for (workload, tasks) in reads.into_iter().chain([(floor::Workload::A, MIDDLE)]) {
                let Settings { records, value_size, each } = self;
                let floor = Echo::measure_messages(fabric, workload, records, value_size, tasks, each)?;
                floors.extend(floor);
            }
            self.run(fabric, &session, &mut runs)?;
        }
        Ok(Results {
            settings: self,
            machine,
            stopped,
            floors,
            runs,
            compared: Vec::new(),
            versions: Vec::new(),
            skipped: Vec::new(),
            cores: String::new(),
        })
    }

    /// Returns the duration of a client's warm-up.
    pub(super) fn warm_up(self) -> Duration {
        WARM_UP.min(self.each)
    }

    /// Returns the time for which a round of the comparison measures each contender.
    pub(super) fn turn(self) -> Duration {
        self.each.mul_f64(0.3)
    }

    fn workload(self, name: &str) -> Result<Workload, Failure> {
        let mut workload = Workload::resolve(name)?;
        (workload.records, workload.distribution) = (self.records, Distribution::Uniform);
        Ok(workload)
    }

    fn config(self, fabric: FabricArg) -> Result<SessionConfig, Failure> {
        Ok(SessionConfig {
            fabric: Some(fabric),
            value_size: self.value_size as usize,
            tasks: DEPTHS[DEPTHS.len() - 1],
            warm_up: self.warm_up(),
            ..SessionConfig::new(default_kv(), self.workload("c")?)
        })
    }

    /// Measures the floors of fabrics that access memory without messages.
    fn floors(self) -> Result<Vec<FloorReport>, Failure> {
        let layout = Layout {
            records: self.records,
            value_size: self.value_size,
            spares: MIDDLE * floor::Workload::A.spares(),
            collision_free: false,
            huge_pages: HugePages::IfAvailable,
            seed: 1,
        };
        let mut floor = Floor::build(layout)?;
        let at = |(workload, tasks): (floor::Workload, u32)| {
            let measured = floor.measure(workload, tasks as usize, self.each)?;
            check_mismatches(measured.mismatches)?;
            Ok::<_, Failure>(FloorReport::new("shm", workload, tasks as usize, &measured))
        };
        let reads = DEPTHS.map(|tasks| (floor::Workload::C, tasks));
        let reports: Vec<_> =
            reads.into_iter().chain([(floor::Workload::A, MIDDLE)]).map(at).collect::<Result<_, _>>()?;
        floor.check()?;
        Ok(reports)
    }

    /// Measures reads at every depth, and a mix with 50 % writes at one depth.
    fn run(self, fabric: FabricArg, session: &Session, runs: &mut Vec<YcsbReport>) -> Done {
        note!("{} ...", described(fabric));
        let reading = session.over(fabric, self.workload("c")?)?;
        for tasks in DEPTHS {
            runs.push(self.checked(&reading.with_tasks(tasks)?)?);
        }
        let mixed = session.over(fabric, self.workload("a")?)?;
        runs.push(self.checked(&mixed.with_tasks(MIDDLE)?)?);
        Ok(())
    }

    fn checked(self, session: &Session) -> Result<YcsbReport, Failure> {
        let report = session.measure(self.each)?;
        match (report.errors, report.violations) {
            (0, 0) => Ok(report),
            (errors, violations) => Err(Failure::Error(format!(
                "over {} {errors} operations failed and {violations} returned a value that was never written: discard \
                 these figures",
                report.fabric
            ))),
        }
    }

    /// Stops the node's process while a client reads, and continues the process later.
    fn stop_the_node(self, session: &Session) -> Result<Stopped, Failure> {
        note!("shm: the node's process is stopped while a client reads ...");
        let pid = session.node_pid().and_then(|pid| Pid::from_raw(pid as i32));
        let pid = pid.ok_or_else(|| {
            Failure::Error("the node has exited: its output above may have the reason".into())
        })?;
        let read = AtomicU64::new(0);
        let stopped = std::thread::scope(|scope| {
            let reader = scope.spawn(|| session.read_until_stopped(&read));
            while read.load(Ordering::Relaxed) == 0 && !reader.is_finished() {
                std::thread::sleep(Duration::from_millis(10)); // The reader is not connected yet.
            }
            std::thread::sleep(self.warm_up());
            let stopped = self.watch(pid, &read);
            session.stop_reading(); // Even if `watch` failed: otherwise the reader would not end.
            reader.join().expect("a reader reports its errors")?;
            Ok::<_, Failure>(stopped?)
        })?;
        if stopped.while_ops_per_s == 0.0 {
            return Err(Failure::Error("the client read no value while the node was stopped".into()));
        }
        Ok(stopped)
    }

    fn watch(self, pid: Pid, read: &AtomicU64) -> rustix::io::Result<Stopped> {
        let began = Instant::now();
        let mut intervals = Vec::new();
        let mut rate = || {
            let so_far = || (Instant::now(), read.load(Ordering::Relaxed));
            let rate_since = |(since, before): (Instant, u64)| {
                let (now, read) = so_far();
                (read - before) as f64 / (now - since).as_secs_f64()
            };
            let first = so_far();
            for _ in 0..INTERVALS {
                let before = so_far();
                std::thread::sleep(self.each * 2 / INTERVALS);
                intervals.push((began.elapsed().as_secs_f64(), rate_since(before)));
            }
            rate_since(first)
        };
        let before_ops_per_s = rate();
        let stopped_at_s = began.elapsed().as_secs_f64();
        kill_process(pid, Signal::STOP)?;
        let while_ops_per_s = rate();
        let continued_at_s = began.elapsed().as_secs_f64();
        kill_process(pid, Signal::CONT)?;
        let after_ops_per_s = rate();
        Ok(Stopped {
            fabric: FabricArg::Shm.name().into(),
            tasks: MIDDLE,
            pid: pid.as_raw_nonzero().get(),
            intervals,
            stopped_at_s,
            continued_at_s,
            before_ops_per_s,
            while_ops_per_s,
            after_ops_per_s,
        })
    }
}

impl Results {
    /// Adds the comparison with rivals, if any is installed.
    pub(super) fn compare(&mut self) -> Done {
        let Settings { records, value_size, .. } = self.settings;
        let comparison = Compare::brief(records, value_size, ROUNDS, self.settings.turn());
        let comparison = comparison.map_err(|failure| match failure {
            Failure::Error(reason) => Failure::Error(format!(
                "comparison failed: {reason}; 'farside demo --no-rivals' skips the comparison"
            )),
            other => other,
        })?;
        (self.compared, self.versions) = (comparison.reports, comparison.versions);
        (self.skipped, self.cores) = (comparison.skipped, comparison.cores);
        Ok(())
    }

    /// Returns a run's rate divided by its floor's rate, or `None` if that floor was not measured.
    pub(super) fn of_floor(&self, run: &YcsbReport) -> Option<f64> {
        let fabric = floor_of(&run.fabric);
        let mut floors = self.floors.iter();
        let floor = floors.find(|floor| {
            (&*floor.fabric, &floor.workload, floor.tasks) == (fabric, &run.workload, run.tasks)
        })?;
        Some(run.ops_per_s / floor.ops_per_s)
    }

    /// Returns the read-only runs with `tasks` operations in flight.
    pub(super) fn reads_at(&self, tasks: u32) -> impl Iterator<Item = &YcsbReport> {
        self.runs.iter().filter(move |run| run.workload == "c" && run.tasks == u64::from(tasks))
    }

    /// Returns the names of the measured fabrics, in the order of the output.
    pub(super) fn fabrics(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.runs.iter().map(|run| &*run.fabric).collect();
        names.dedup();
        names
    }
}

/// Returns the fabric whose floor is the baseline for `fabric`. For `tls` it is `tcp`, because the floor's programs do
/// not encrypt.
fn floor_of(fabric: &str) -> &str {
    match fabric {
        "local" => "shm",
        "tls" => "tcp",
        other => other,
    }
}

fn described(fabric: FabricArg) -> &'static str {
    match fabric {
        FabricArg::Local => "local: a node in this process",
        FabricArg::Shm => "shm: a node in its own process",
        FabricArg::Udp => "udp: the same node, over UDP",
        FabricArg::Tcp => "tcp: the same node, over TCP",
        #[cfg(feature = "tls")]
        FabricArg::Tls => "tls: the same node, over TLS",
        FabricArg::Ring => "ring: the same node, through rings in shared memory",
        #[cfg(feature = "verbs")]
        FabricArg::Verbs => "verbs: the same node, over RDMA",
    }
}
