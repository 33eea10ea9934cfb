//! `bench latch`: reads and changes of objects under one-sided latches.

use super::session::{Measured, Objects, SessionConfig};
use super::{ExistingNode, FabricArg, Measure, check, show};
use crate::cli::{Done, Failure, value_size};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_predict::{Bed, Load, Variant};
use farside_sim::hardware::{INPUTS, Platform, Testbed};
use farside_systems::latch::{self, LEN_MAX, Latching, Placement, Scheme};
use farside_systems::registry::named;
use serde::Serialize;
use std::time::Duration;

/// Read and change objects under one-sided latches.
#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(super) struct Latch {
    /// Scheme by which clients synchronize. 'versions' and 'versions-footer' need whole cache lines, which no software
    /// fabric has: use them with --predict
    #[arg(long, value_name = "NAME", value_parser = schemes(), default_value = "v2")]
    scheme: Scheme,
    /// Fabric to the node that the command starts [default: shm; with --pool, the URL decides]
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// Number of objects; all are changed once before the measurement
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    objects: u64,
    /// Length of an object's content: a multiple of 8, at most 32KiB
    #[arg(long, value_name = "BYTES", default_value = "256", value_parser = size)]
    size: u32,
    /// Bytes between two objects: 8 spreads latches over the lock slots of a NIC; between optimistic objects, it is a
    /// whole cache line
    #[arg(long, value_name = "0|8", default_value = "0", value_parser = padding)]
    padding: Placement,
    /// Share of operations that are reads, from 0 to 1; the others change an object
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = super::blocks::share)]
    reads: f64,
    /// Zipf coefficient of the objects: 0 for a uniform distribution, else 0.001 to 10
    #[arg(long, value_name = "THETA", default_value = "0", value_parser = zipf)]
    zipf: Distribution,
    /// Operations in flight, over all threads, in place of --tasks
    #[arg(long, value_name = "N", conflicts_with = "tasks")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    workers: Option<u32>,
    /// Give the clients leases of this length: if a client dies with a latch, others fence it and recover the latch.
    /// For schemes whose latch has one holder. Each change then writes twice the bytes
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    lease_ms: Option<u64>,
    #[command(flatten)]
    measure: Measure,
    #[command(flatten)]
    existing: ExistingNode,
    /// Predict the throughput on the machines of the paper, in place of measuring a fabric: a ConnectX-5 node, and the
    /// workers on four machines. --operations is the number of simulated operations [default: 20000]
    #[arg(long, conflicts_with_all = [
        "fabric", "seconds", "warm_up", "repeats", "target", "idle_ms", "sample_every", "hdr_log", "interval", "delay",
        "pool", "lease_ms",
    ])]
    predict: bool,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// Returns the clap parser for the name of a scheme.
fn schemes() -> impl TypedValueParser<Value = Scheme> {
    PossibleValuesParser::new(Scheme::ALL.map(|(name, _)| name))
        .map(|name| Scheme::named(&name).expect("clap accepts only the listed names"))
}

/// Parses, for clap, the length of an object.
fn size(text: &str) -> Result<u32, String> {
    let size = value_size(text).ok().filter(|size| *size <= LEN_MAX && size.is_multiple_of(8));
    size.ok_or_else(|| {
        format!("objects of '{text}' bytes are not possible: give a multiple of 8, at most 32KiB")
    })
}

/// Parses, for clap, the padding between objects.
fn padding(text: &str) -> Result<Placement, String> {
    match text {
        "0" => Ok(Placement::Inline),
        "8" => Ok(Placement::Padded),
        _ => Err(format!("'{text}' bytes of padding are not possible: give 0 or 8")),
    }
}

/// Parses, for clap, a Zipf coefficient.
pub(super) fn zipf(text: &str) -> Result<Distribution, String> {
    let most = Distribution::THETA_MAX;
    let theta = text.parse().ok().filter(|theta| *theta == 0.0 || (0.001..=most).contains(theta));
    match theta {
        None => Err(format!("'{text}' is not a Zipf coefficient: give 0, or 0.001 to {most}")),
        Some(0.0) => Ok(Distribution::Uniform),
        Some(theta) => Ok(Distribution::Zipf { theta }),
    }
}

/// Number of simulated operations of a prediction, unless `--operations` gives another.
const PREDICTED: u64 = 20_000;

impl Latch {
    pub(super) fn run(self) -> Done {
        if self.predict {
            return self.predict();
        }
        if self.existing.has_pool() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Error("--fabric local runs the node in this process: omit --pool".into()));
        }
        if self.lease_ms.is_some() && self.scheme.has_shared_mode() {
            return Err(Failure::Error(format!(
                "leases are for latches with one holder, and the scheme {} has a latch of several: omit --lease-ms, \
                 or give a scheme without '-rw'",
                self.scheme
            )));
        }
        self.measure.check_log()?;
        let config = self.config()?;
        let duration = Duration::from_secs_f64(config.seconds);
        let SessionConfig { workload, threads, tasks, value_size, .. } = &config;
        note!(
            "scheme {}; {} objects of {value_size} bytes; {}; {}; {threads} threads of {tasks} tasks",
            self.scheme,
            workload.records,
            workload.mix,
            workload.distribution
        );
        let session = Measured::<Objects>::start(config)?;
        let report = self.measure.report_and(session, duration, |session, report| {
            note!("reading all objects back ...");
            session.check_sum()?;
            report.read_back = Some(report.records);
            report.scheme = Some(self.scheme.name().to_owned());
            Ok(())
        })?;
        match self.json {
            true => print_line!("{}", serde_json::to_string(&report)?),
            false => {
                show(&report)?;
                print_line!("scheme {}; no update was lost", self.scheme);
            }
        }
        check(report.errors, report.violations)
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        let mix = Mix::new([self.reads, 1.0 - self.reads, 0.0, 0.0, 0.0]);
        let (operations, seconds) = self.measure.limits(&Chosen::default());
        let workload = Workload {
            name: "latch".into(),
            records: self.objects,
            operations: operations.unwrap_or(0),
            mix: mix.expect("one of both shares is not 0"),
            distribution: self.zipf,
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        };
        let system = named(latch::KIND).expect("it is in the registry");
        Ok(SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size: self.size as usize,
            latching: self.latching(),
            lease: self.lease_ms.map(Duration::from_millis),
            tasks: self.tasks()?,
            ..self.measure.config(system, workload, operations, seconds)?
        })
    }

    fn latching(&self) -> Latching {
        Latching { scheme: Some(self.scheme), placement: self.padding }
    }

    /// Number of tasks of each thread.
    ///
    /// # Errors
    /// The workers are not divisible by the threads, or too many for them.
    fn tasks(&self) -> Result<u32, Failure> {
        const TASKS_MAX: u32 = 64;
        let (threads, Some(workers)) = (self.measure.threads, self.workers) else {
            return Ok(self.measure.tasks);
        };
        if workers > threads * TASKS_MAX {
            return Err(Failure::Error(format!(
                "a thread has at most {TASKS_MAX} workers: give --threads {} for {workers} workers",
                workers.div_ceil(TASKS_MAX)
            )));
        }
        if !workers.is_multiple_of(threads) {
            return Err(Failure::Error(format!(
                "{workers} workers cannot be divided evenly among {threads} threads: give --workers {}",
                workers.next_multiple_of(threads)
            )));
        }
        Ok(workers / threads)
    }

    /// Predicts the throughput by the model of the figures.
    fn predict(&self) -> Done {
        let Latch { scheme, objects, size, reads, .. } = *self;
        let skew = match self.zipf {
            Distribution::Zipf { theta } => theta,
            _ => 0.0,
        };
        let load = Load {
            system: latch::KIND,
            variant: Variant { latching: self.latching(), ..Variant::OURS },
            platform: Platform::Rdma,
            testbed: Testbed::SYNCHRONIZATION,
            inputs: INPUTS,
            reads,
            keys: 1,
            value_len: size as usize,
            lengths: Lengths::Constant,
            skew,
            records: Some(objects),
            cached: 0,
        };
        let workers = self.workers.unwrap_or(self.measure.threads * self.measure.tasks);
        let operations = self.measure.operations.unwrap_or(PREDICTED);
        let measured = Bed::new(load, 1).and_then(|bed| bed.measure(workers, operations));
        let measured = measured.map_err(Failure::Error)?;
        let prediction = Prediction {
            system: latch::KIND,
            scheme: scheme.name(),
            fabric: "model",
            workload: "latch",
            distribution: self.zipf.label(),
            records: objects,
            value_size: size,
            tasks: workers,
            ops_per_s: measured.ops_per_s,
            mean_us: measured.mean_us,
            round_trips: measured.round_trips,
            bytes_in: measured.bytes_in,
            bytes_out: measured.bytes_out,
        };
        if self.json {
            print_line!("{}", serde_json::to_string(&prediction)?);
            return Ok(());
        }
        let Prediction { ops_per_s, mean_us, round_trips, bytes_in, bytes_out, .. } = prediction;
        print_line!(
            "scheme {scheme}, {workers} workers, predicted: {ops_per_s:.0} operations a second of {mean_us:.2} us; \
             {round_trips:.2} requests, {bytes_in:.0} bytes in and {bytes_out:.0} bytes out for each"
        );
        Ok(())
    }
}

/// A predicted measurement. Fields that [`farside_bench::report::YcsbReport`] has mean the same.
#[derive(Serialize)]
struct Prediction {
    system: &'static str,
    scheme: &'static str,
    /// `model`, since no fabric carries the requests.
    fabric: &'static str,
    workload: &'static str,
    distribution: String,
    records: u64,
    value_size: u32,
    /// Number of workers, each with one operation in flight.
    tasks: u32,
    ops_per_s: f64,
    /// Mean latency of an operation in microseconds.
    mean_us: f64,
    /// Mean number of requests of an operation. Requests that are sent together count as one.
    round_trips: f64,
    /// Mean number of bytes that an operation sends to the node, with packet headers.
    bytes_in: f64,
    /// Mean number of bytes that an operation receives from the node, with packet headers.
    bytes_out: f64,
}
