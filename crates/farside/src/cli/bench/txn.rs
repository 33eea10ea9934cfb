//! `bench txn`: transactions that update several records: YCSB-T.

use super::session::{Measured, SessionConfig, Transactions};
use super::{ExistingNode, FabricArg, INDEX_THREADS_MAX, Measure, RECORDS_MAX, System, check, show, systems};
use crate::cli::{Done, Failure, value_size};
use clap::ValueEnum;
use farside_bench::txn::KEYS_MAX;
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_systems::system::Family;
use farside_systems::txn::{Prepare, Transacting, prism_tx};
use std::time::Duration;

/// Update several records by transactions (YCSB-T)
///
/// Each transaction reads its records, adds one to the counter of each, and writes them. If another transaction is in
/// the way, it is tried again after a pause. A latency is the time until the transaction has committed.
#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(super) struct Txn {
    /// System to measure
    #[arg(long, value_name = "SYSTEM", value_parser = systems(&[Family::Txn]), default_value = prism_tx::KIND)]
    system: System,
    /// Fabric to the node that the command starts [default: shm; with --pool, the URL decides]
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// Transactions to run
    #[arg(long, value_enum, default_value = "ycsb-t")]
    workload: WorkloadArg,
    /// Number of records of a transaction
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=KEYS_MAX as u64))]
    keys: u64,
    /// Zipf coefficient of the records: 0 for a uniform distribution, else 0.001 to 10
    #[arg(long, value_name = "THETA", default_value = "0", value_parser = super::latch::zipf)]
    zipf: Distribution,
    /// Number of records; all are written before the measurement
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    records: u64,
    /// Bytes per value: a multiple of 8, at most 32KiB
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = size)]
    value_size: u32,
    /// Rounds in which a transaction is validated: together (one), or paper (all reads, then all writes); only for
    /// prism-tx [default: together]
    #[arg(long, value_enum)]
    prepare: Option<PrepareArg>,
    /// Give each key its own slot, as in the paper's runs
    #[arg(long)]
    collision_free: bool,
    #[command(flatten)]
    measure: Measure,
    /// Read all records at the end: their counters must add up to the number of updates, so none was lost
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    existing: ExistingNode,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WorkloadArg {
    /// Read and write each record of a transaction
    YcsbT,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PrepareArg {
    /// One round
    Together,
    /// Two rounds, as in the paper
    Paper,
}

/// Parses, for clap, the length of a value.
pub(super) fn size(text: &str) -> Result<u32, String> {
    const MOST: u32 = 32 << 10;
    let size = value_size(text).ok().filter(|size| *size <= MOST && size.is_multiple_of(8));
    size.ok_or_else(|| {
        format!("values of '{text}' bytes are not possible: give a multiple of 8, at most 32KiB")
    })
}

impl Txn {
    pub(super) fn run(self) -> Done {
        if self.existing.has_pool() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Error("--fabric local runs the node in this process: omit --pool".into()));
        }
        if self.measure.threads > INDEX_THREADS_MAX {
            return Err(Failure::Error(format!(
                "a transactional store has ids for 64 clients, and each thread is one: give at most \
                 {INDEX_THREADS_MAX} --threads"
            )));
        }
        if self.prepare.is_some() && self.system.kind != prism_tx::KIND {
            return Err(Failure::Error(format!(
                "{} stores have no --prepare: leave it out, or give another --system",
                self.system.kind
            )));
        }
        self.measure.check_log()?;
        let config = self.config()?;
        let duration = Duration::from_secs_f64(config.seconds);
        let SessionConfig { workload, threads, tasks, value_size, .. } = &config;
        note!(
            "transactions of {} records; {} records of {value_size} bytes; {}; {threads} threads of {tasks} tasks",
            self.keys,
            workload.records,
            workload.distribution
        );
        let session = Measured::<Transactions>::start(config)?;
        let report = self.measure.report_and(session, duration, |session, report| {
            if self.verify {
                note!("reading all records back ...");
                session.check_sum()?;
                report.read_back = Some(report.records);
            }
            report.abort_rate = Some(session.abort_rate());
            Ok(())
        })?;
        match self.json {
            true => print_line!("{}", serde_json::to_string(&report)?),
            false => {
                show(&report)?;
                let rate = 100.0 * report.abort_rate.unwrap_or_default();
                print_line!("{rate:.2} % of the attempts met another transaction and were repeated");
                if report.read_back.is_some() {
                    print_line!("the counters of all records add up: no update was lost");
                }
            }
        }
        check(&report)
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        let mix = Mix::new([0.0, 1.0, 0.0, 0.0, 0.0]);
        let (operations, seconds) = self.measure.limits(&Chosen::default());
        let workload = Workload {
            name: "ycsb-t".into(),
            records: self.records,
            operations: operations.unwrap_or(0),
            mix: mix.expect("one of the shares is not 0"),
            distribution: self.zipf,
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        };
        let prepare = self.prepare.map(|prepare| match prepare {
            PrepareArg::Together => Prepare::Together,
            PrepareArg::Paper => Prepare::Paper,
        });
        // Each task of a thread has a transaction in progress.
        let lanes = u16::try_from(self.measure.tasks).unwrap_or(u16::MAX).max(16);
        let transacting = Transacting { lanes: Some(lanes), prepare, ..Transacting::NONE };
        Ok(SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size: self.value_size as usize,
            collision_free: self.collision_free,
            verify: self.verify,
            keys_per_transaction: self.keys as usize,
            transacting,
            ..self.measure.config(self.system, workload, operations, seconds)?
        })
    }
}
