//! `bench rpc`: batches of FaSST's calls to nodes that answer at once.

use super::session::{Calls, Measured, SessionConfig};
use super::{ExistingNode, FabricArg, Floor, Measure, check, show};
use crate::cli::{Done, Failure, value_size};
use farside_bench::floor::TASKS_MAX;
use farside_bench::report::{CallsReport, Spread};
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_systems::registry::named;
use farside_systems::rpc::echo::{self, Asking, LEN_MAX, LEN_MIN};
use farside_systems::rpc::fasst::ENTRIES_MAX;
use std::time::Duration;

/// Send batches of FaSST's calls to nodes that answer at once
///
/// Each task sends a batch of requests, each to a random node, and waits for all responses. The requests to one node
/// share a packet. An operation is a batch. With one node and one thread, the floor is measured, too: messages that are
/// written by hand, of a key to the node and of as many bytes back as a response has.
#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(super) struct Rpc {
    /// Fabric to the nodes that the command starts [default: shm; with --pool, the URLs decide]
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// Number of nodes that the command starts, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    #[arg(conflicts_with = "pool")]
    nodes: u32,
    /// Bytes of a request, 8 to 4032
    #[arg(long, value_name = "BYTES", default_value = "32", value_parser = size)]
    request: u32,
    /// Bytes of a response, 8 to 4032
    #[arg(long, value_name = "BYTES", default_value = "32", value_parser = size)]
    response: u32,
    /// Requests of a batch, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=ENTRIES_MAX as i64))]
    batch: u32,
    #[command(flatten)]
    measure: Measure,
    #[command(flatten)]
    existing: ExistingNode,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// Longest time for which the floor is measured. A run that ends by its number of operations has no time.
const FLOOR_MAX: Duration = Duration::from_secs(5);

/// Parses, for clap, the length of a request or a response.
fn size(text: &str) -> Result<u32, String> {
    let size = value_size(text).ok().filter(|size| (LEN_MIN..=LEN_MAX).contains(&(*size as usize)));
    size.ok_or_else(|| format!("'{text}' bytes are not possible: give {LEN_MIN} to {LEN_MAX}"))
}

impl Rpc {
    pub(super) fn run(self) -> Done {
        if self.existing.has_pool() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Error("--fabric local runs the nodes in this process: omit --pool".into()));
        }
        let asking = self.asking();
        let most = Asking::requests_max(asking.request_len, asking.response_len);
        if asking.requests > most {
            return Err(Failure::Error(format!(
                "{} requests or responses of these lengths do not fit into one packet: give at most --batch {most}, or \
                 a smaller --request and --response",
                asking.requests
            )));
        }
        self.measure.check_log()?;
        let config = self.config()?;
        let duration = Duration::from_secs_f64(config.seconds);
        let SessionConfig { threads, tasks, .. } = &config;
        note!(
            "batches of {} requests of {} bytes, with responses of {} bytes; {threads} threads of {tasks} tasks",
            self.batch,
            self.request,
            self.response
        );
        let session = Measured::<Calls>::start(config)?;
        let mut report = self.measure.report_and(session, duration, |session, report| {
            let rates: Vec<f64> =
                report.repeats_ops_per_s.iter().map(|rate| rate * f64::from(self.batch)).collect();
            report.load = None;
            report.calls = Some(CallsReport {
                nodes: session.nodes(),
                batch: self.batch.into(),
                request_bytes: self.request.into(),
                response_bytes: self.response.into(),
                requests_per_s: Spread::of(&rates).expect("there is at least one repeat").median,
                floor: None,
            });
            Ok(())
        })?;
        let calls = report.calls.as_mut().expect("it was just set");
        if let Some(fabric) = self.fabric
            && calls.nodes == 1
            && self.measure.threads == 1
            && self.measure.delay.is_none()
            && self.measure.target.is_none()
        {
            note!("measuring the floor ...");
            let in_flight = (self.measure.tasks * self.batch).min(TASKS_MAX as u32);
            calls.floor = Floor::measure_bare(fabric, self.response, in_flight, duration.min(FLOOR_MAX))?;
        }
        match self.json {
            true => print_line!("{}", serde_json::to_string(&report)?),
            false => {
                show(&report)?;
                let calls = report.calls.as_ref().expect("it was just set");
                print_line!("{:.0} requests a second", calls.requests_per_s);
                if let Some(floor) = &calls.floor {
                    print_line!(
                        "floor: {:.0} messages a second with {} in flight; {:.2} of it was reached",
                        floor.ops_per_s,
                        floor.tasks,
                        calls.requests_per_s / floor.ops_per_s
                    );
                }
            }
        }
        check(report.errors, report.violations)
    }

    fn asking(&self) -> Asking {
        Asking {
            requests: self.batch as usize,
            request_len: self.request as usize,
            response_len: self.response as usize,
        }
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        let (operations, seconds) = self.measure.limits(&Chosen::default());
        let workload = Workload {
            name: "rpc".into(),
            records: 0,
            operations: operations.unwrap_or(0),
            mix: Mix::new([1.0, 0.0, 0.0, 0.0, 0.0]).expect("a share is not 0"),
            distribution: Distribution::Uniform,
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        };
        let system = named(echo::KIND).expect("it is in the registry");
        Ok(SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size: self.response as usize,
            calls: Some((self.nodes, self.asking())),
            ..self.measure.config(system, workload, operations, seconds)?
        })
    }
}
