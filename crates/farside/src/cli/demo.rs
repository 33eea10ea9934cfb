//! `demo`: what Farside is, in under two minutes.
//!
//! Invariant: every figure is measured here and now, on a node in a process of its own unless the line says
//! `local`; nothing is quoted.

use super::bench::{Asked, FabricArg, Session, System};
use super::{Done, Failure, value_size};
use farside_bench::floor::{Floor, HugePages, Layout, Measured};
use farside_bench::report::{Table, YcsbReport};
use farside_bench::workload::{Distribution, Workload};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Start a node, fill it, read it while the node's process is stopped, and hold it to the floor.
#[derive(clap::Args)]
pub(super) struct Demo {
    /// Records in the store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1000..=1 << 26))]
    records: u64,
    /// Bytes of a value, 32 to 60000
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// How long each measurement takes
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
}

/// Operations under way at once, where latencies are hidden behind one another.
const TASKS: u32 = 16;

impl Demo {
    pub(super) fn run(self) -> Done {
        if !(0.1..=60.0).contains(&self.seconds) {
            return Err(Failure::Told(format!("--seconds {}: give 0.1 to 60", self.seconds)));
        }
        if !(32..=60_000).contains(&self.value_size) {
            return Err(Failure::Told(format!("--value-size {}: give 32 to 60000", self.value_size)));
        }
        let began = Instant::now();
        let each = Duration::from_secs_f64(self.seconds);
        say(&format!(
            "A store of {} records of {} bytes, uniformly read; one client thread.",
            self.records, self.value_size
        ));
        say("The floor: the same fetch, through the same kind of table, done by hand ...");
        let (floor_alone, floor_overlapped) = self.floor(each)?;

        let mut rows = Vec::new();
        for fabric in [FabricArg::Local, FabricArg::Shm] {
            for (workload, tasks, floor) in
                [("c", 1, &floor_alone), ("c", TASKS, &floor_overlapped), ("a", TASKS, &floor_overlapped)]
            {
                say(&format!("{}, workload {workload}, {tasks} at once ...", described(fabric)));
                let session = Session::start(self.asked(fabric, workload, tasks)?)?;
                let report = session.measure(each)?;
                if workload == "c" && tasks == TASKS && fabric == FabricArg::Shm {
                    self.stop_the_node(&session, each)?;
                }
                drop(session);
                rows.push(row(&report, tasks, floor));
            }
        }
        tell!();
        let mut table = Table::new([
            "fabric",
            "workload",
            "at once",
            "ops/s",
            "p50 us",
            "p99 us",
            "round trips",
            "of the floor's rate",
        ]);
        rows.push(floor_row("by hand", 1, &floor_alone));
        rows.push(floor_row("by hand", TASKS, &floor_overlapped));
        rows.into_iter().for_each(|row| table.push(row));
        tell!("{table}");
        tell!(
            "Workload c reads; a reads half the time and overwrites the other half, and is held to the reads' floor."
        );
        tell!("Done in {:.0} s. Next: 'farside up', and what it suggests.", began.elapsed().as_secs_f64());
        Ok(())
    }

    fn asked(&self, fabric: FabricArg, workload: &str, tasks: u32) -> Result<Asked, Failure> {
        let mut workload = Workload::resolve(workload)?;
        (workload.records, workload.distribution) = (self.records, Distribution::Uniform);
        Ok(Asked {
            fabric: Some(fabric),
            value_size: self.value_size as usize,
            tasks,
            ..Asked::new(System::PrismKv, workload)
        })
    }

    fn floor(&self, each: Duration) -> Result<(Measured, Measured), Failure> {
        let layout = Layout {
            records: self.records,
            value_size: self.value_size,
            collision_free: false,
            huge_pages: HugePages::IfAvailable,
            seed: 1,
        };
        let floor = Floor::build(layout)?;
        Ok((floor.measure(1, each)?, floor.measure(TASKS as usize, each)?))
    }

    /// Stops the node's process while a client reads, and lets it go on.
    fn stop_the_node(&self, session: &Session, each: Duration) -> Done {
        let pid = session.node_pid().and_then(|pid| Pid::from_raw(pid as i32));
        let pid = pid.ok_or_else(|| Failure::Told("the node that was started is gone".into()))?;
        let read = AtomicU64::new(0);
        let rates = std::thread::scope(|scope| {
            let reader = scope.spawn(|| session.read_until_stopped(&read));
            let rate = || {
                let (since, before) = (Instant::now(), read.load(Ordering::Relaxed));
                std::thread::sleep(each);
                (read.load(Ordering::Relaxed) - before) as f64 / since.elapsed().as_secs_f64()
            };
            while read.load(Ordering::Relaxed) == 0 && !reader.is_finished() {
                std::thread::sleep(Duration::from_millis(10)); // It has yet to connect.
            }
            std::thread::sleep(Duration::from_millis(500)); // Until it is warm.
            let rates = || -> rustix::io::Result<_> {
                let before = rate();
                kill_process(pid, Signal::STOP)?;
                let during = rate();
                kill_process(pid, Signal::CONT)?;
                Ok([before, during, rate()])
            };
            let rates = rates();
            session.stop_reading(); // Also if the node is gone, or else the reader would not end.
            reader.join().expect("a reader reports its errors")?;
            Ok::<_, Failure>(rates?)
        })?;
        let [before, during, after] = rates.map(|rate| rate / 1e6);
        tell!("The node is process {}. A connected client reads", pid.as_raw_nonzero());
        tell!("  before 'kill -STOP' {before:>6.2} million values a second");
        tell!("  while it is stopped {during:>6.2} million values a second");
        tell!("  after 'kill -CONT'  {after:>6.2} million values a second");
        if during == 0.0 {
            return Err(Failure::Told("the client did not go on reading while the node was stopped".into()));
        }
        Ok(())
    }
}

fn say(text: &str) {
    note!("{text}");
}

fn described(fabric: FabricArg) -> &'static str {
    match fabric {
        FabricArg::Local => "local: a node in this process",
        FabricArg::Shm => "shm: a node in a process of its own",
        FabricArg::Udp => "udp: a node in a process of its own, asked over UDP",
        FabricArg::Tcp => "tcp: a node in a process of its own, asked over TCP",
        #[cfg(feature = "tls")]
        FabricArg::Tls => "tls: a node in a process of its own, asked over TLS",
        FabricArg::Ring => "ring: a node in a process of its own, asked by rings in shared memory",
    }
}

fn row(report: &YcsbReport, tasks: u32, floor: &Measured) -> Vec<String> {
    vec![
        report.fabric.clone(),
        report.workload.clone(),
        tasks.to_string(),
        format!("{:.0}", report.ops_per_s),
        format!("{:.2}", report.latency_us.p50),
        format!("{:.2}", report.latency_us.p99),
        format!("{:.2}", report.per_op.round_trips),
        format!("{:.2}", report.ops_per_s / floor.ops_per_s),
    ]
}

fn floor_row(name: &str, tasks: u32, floor: &Measured) -> Vec<String> {
    let [rate, p50] = [format!("{:.0}", floor.ops_per_s), format!("{:.2}", floor.rtt_us_p50)];
    vec![name.into(), "c".into(), tasks.to_string(), rate, p50, "-".into(), "-".into(), "1.00".into()]
}
