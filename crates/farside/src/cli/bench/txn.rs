//! `bench txn`: transactions that update several records: YCSB-T, TATP, SmallBank and an object store.

use super::peers;
use super::session::{Audited, Measured, SessionConfig, Transactions};
use super::{ExistingNode, FabricArg, INDEX_THREADS_MAX, Measure, RECORDS_MAX, System, check, show, systems};
use crate::cli::{Done, Failure, value_size};
use clap::ValueEnum;
use farside_bench::oltp::any::AnyBenchmark;
use farside_bench::oltp::objects::{self, Objects};
use farside_bench::oltp::smallbank::SmallBank;
use farside_bench::oltp::tatp::Tatp;
use farside_bench::oltp::{Benchmark as _, Kind, Oltp};
use farside_bench::report::{KindReport, YcsbReport, mix_table};
use farside_bench::txn::{KEYS_MAX, TxnWork};
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_systems::system::Family;
use farside_systems::txn::{Prepare, Transacting, prism_tx};
use std::collections::BTreeMap;
use std::time::Duration;

/// Measure transactions that update several records (YCSB-T, TATP, SmallBank)
///
/// If another transaction is in the way of one, it is tried again after a pause. A latency is the time until the
/// transaction has committed. A transaction of 'tatp' or 'smallbank' that does not find its rows, or whose condition
/// does not hold, commits without a write and counts as done: the share of those that succeed is shown.
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
    /// Number of records of a transaction: at most 4 with ycsb-t, and 32 with objects [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=objects::KEYS_MAX as u64))]
    keys: Option<u64>,
    /// Probability that a transaction of 'objects' writes a record that it has read, 0 to 1 [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    write_share: Option<f64>,
    /// Zipf coefficient of the records: 0 for a uniform distribution, else 0.001 to 10; not with tatp and smallbank
    /// [default: 0]
    #[arg(long, value_name = "THETA", value_parser = super::latch::zipf)]
    zipf: Option<Distribution>,
    /// Number of records, of subscribers with tatp, or of accounts with smallbank; all are written before the
    /// measurement [default: 1000000; with tatp and smallbank 100000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=RECORDS_MAX))]
    records: Option<u64>,
    /// Bytes per value, at most 32KiB: a multiple of 8 with ycsb-t, or 8 or more with objects [default: 512; with
    /// objects 100]
    #[arg(long, value_name = "BYTES", value_parser = any_size)]
    value_size: Option<u32>,
    /// Rounds in which a transaction is validated: together (one), or paper (all reads, then all writes); only for
    /// prism-tx [default: together]
    #[arg(long, value_enum)]
    prepare: Option<PrepareArg>,
    /// Give each key its own slot, as in the paper's runs; not with tatp and smallbank
    #[arg(long)]
    collision_free: bool,
    #[command(flatten)]
    measure: Measure,
    /// Read all records at the end, and check that no update was lost: the counters of ycsb-t must add up, and each
    /// object, account of smallbank and subscriber of tatp must be what the committed transactions have made of it
    #[arg(long)]
    verify: bool,
    /// Run this many processes, each with a memory node and the clients: each holds a part of the records, and reaches
    /// it without a packet; over udp or tcp, with --target for all together [default: one node, and the clients in this
    /// process]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=PEERS_MAX))]
    peers: Option<u32>,
    /// This process is the one of them with this number.
    #[arg(long, hide = true, requires = "peers")]
    as_peer: Option<u32>,
    #[command(flatten)]
    existing: ExistingNode,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WorkloadArg {
    /// Read each record of a transaction, add one to its counter, and write it
    YcsbT,
    /// TATP: short transactions on subscribers of a telephone network, four of five only read
    Tatp,
    /// SmallBank: transfers, deposits and checks; 9 of 10 use 4 % of the accounts
    Smallbank,
    /// Read the records of a transaction, and write a share of them
    Objects,
}

impl WorkloadArg {
    fn name(self) -> &'static str {
        match self {
            WorkloadArg::YcsbT => "ycsb-t",
            WorkloadArg::Tatp => "tatp",
            WorkloadArg::Smallbank => "smallbank",
            WorkloadArg::Objects => "objects",
        }
    }

    /// Whether keys and values are those of the workload's tables.
    fn has_tables(self) -> bool {
        matches!(self, WorkloadArg::Tatp | WorkloadArg::Smallbank)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PrepareArg {
    /// One round
    Together,
    /// Two rounds, as in the paper
    Paper,
}

/// Parses, for clap, a probability.
fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is no share: give 0 to 1"))
}

/// Parses, for clap, the length of a value that need not be a multiple of 8.
fn any_size(text: &str) -> Result<u32, String> {
    let size = value_size(text).ok().filter(|size| (1..=SIZE_MAX).contains(size));
    size.ok_or_else(|| format!("values of '{text}' bytes are not possible: give 1 to 32KiB"))
}

/// Largest number of peers.
const PEERS_MAX: i64 = 8;
/// Longest value in bytes.
const SIZE_MAX: u32 = 32 << 10;

/// Parses, for clap, the length of a value.
pub(super) fn size(text: &str) -> Result<u32, String> {
    let size = value_size(text).ok().filter(|size| *size <= SIZE_MAX && size.is_multiple_of(8));
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
        self.check_workload()?;
        self.measure.check_log()?;
        self.check_peers()?;
        let config = self.config()?;
        match self.workload {
            WorkloadArg::YcsbT => self.run_as::<TxnWork>(config, |_, _| ()),
            _ => self.run_as::<Oltp<AnyBenchmark>>(config, |session, report| {
                report.mix = mix(&session.kinds(), report);
                if self.workload == WorkloadArg::Tatp {
                    report.distribution = "nurand".into();
                }
            }),
        }
    }

    /// Runs transactions of this work. `complete` adds to the report.
    fn run_as<W: Audited>(
        &self,
        config: SessionConfig,
        complete: impl FnOnce(&Measured<Transactions<W>>, &mut YcsbReport),
    ) -> Done {
        match (self.peers, self.as_peer) {
            (Some(peers), None) => {
                note!("{peers} peers, each with {}", self.describe(&config));
                peers::run::<W>(peers, config, self.json)
            }
            (Some(peers), Some(number)) => peers::serve::<W>((number, peers), config, complete),
            (None, _) => self.measured(config, complete),
        }
    }

    /// # Errors
    /// A flag is not one of the workload.
    fn check_workload(&self) -> Done {
        let (workload, name) = (self.workload, self.workload.name());
        let refuse = |flag: &str| {
            Err(Failure::Error(format!("{name} has no {flag}: leave it out, or give another --workload")))
        };
        if workload.has_tables() {
            let given = [
                ("--keys", self.keys.is_some()),
                ("--zipf", self.zipf.is_some()),
                ("--value-size", self.value_size.is_some()),
                ("--collision-free", self.collision_free),
            ];
            if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                return refuse(flag);
            }
        }
        if workload != WorkloadArg::Objects && self.write_share.is_some() {
            return refuse("--write-share");
        }
        if workload == WorkloadArg::YcsbT {
            if self.keys.is_some_and(|keys| keys > KEYS_MAX as u64) {
                return Err(Failure::Error(format!(
                    "a transaction of ycsb-t has at most {KEYS_MAX} records: give fewer --keys, or --workload objects"
                )));
            }
            if let Some(len) = self.value_size.filter(|len| !len.is_multiple_of(8)) {
                return Err(Failure::Error(format!(
                    "values of ycsb-t have a multiple of 8 bytes, not {len}: give another --value-size, or --workload \
                     objects"
                )));
            }
        }
        Ok(())
    }

    /// # Errors
    /// A flag does not go with `--peers`.
    fn check_peers(&self) -> Done {
        let Some(peers) = self.peers else { return Ok(()) };
        // Peers with a number of operations each would end at different times.
        let refused = [
            ("--pool", self.existing.has_pool()),
            ("--verify", self.verify),
            ("--hdr-log", self.measure.has_log()),
            ("--operations", self.measure.operations.is_some()),
        ];
        if let Some((flag, _)) = refused.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::Error(format!("{flag} does not go with --peers: leave one of them out")));
        }
        if self.measure.threads > INDEX_THREADS_MAX / peers {
            return Err(Failure::Error(format!(
                "a transactional store has ids for 64 clients, and each thread of a peer is one: give at most {} \
                 --threads to {peers} peers",
                INDEX_THREADS_MAX / peers
            )));
        }
        match self.fabric {
            None | Some(FabricArg::Udp | FabricArg::Tcp) => Ok(()),
            Some(other) => Err(Failure::Error(format!(
                "peers do not reach each other over {}: give --fabric udp or tcp, or leave it out",
                other.name()
            ))),
        }
    }

    fn measured<W: Audited>(
        &self,
        config: SessionConfig,
        complete: impl FnOnce(&Measured<Transactions<W>>, &mut YcsbReport),
    ) -> Done {
        let duration = Duration::from_secs_f64(config.seconds);
        note!("{}", self.describe(&config));
        let session = Measured::<Transactions<W>>::start(config)?;
        let report = self.measure.report_and(session, duration, |session, report| {
            if self.verify {
                note!("reading all records back ...");
                session.check_total()?;
                report.read_back = Some(report.records);
            }
            report.abort_rate = Some(session.abort_rate());
            complete(session, report);
            Ok(())
        })?;
        match self.json {
            true => print_line!("{}", serde_json::to_string(&report)?),
            false => {
                show(&report)?;
                if !report.mix.is_empty() {
                    print_line!("{}", mix_table(&report.mix).to_string().trim_end());
                }
                let rate = 100.0 * report.abort_rate.unwrap_or_default();
                print_line!("{rate:.2} % of the attempts met another transaction and were repeated");
                if report.read_back.is_some() {
                    print_line!("{}: no update was lost", self.verified());
                }
            }
        }
        check(report.errors, report.violations)
    }

    fn describe(&self, config: &SessionConfig) -> String {
        let SessionConfig { workload, threads, tasks, value_size, keys_per_transaction, .. } = config;
        let records = workload.records;
        let what = match self.workload {
            WorkloadArg::YcsbT => format!(
                "transactions of {keys_per_transaction} records; {records} records of {value_size} bytes; {}",
                workload.distribution
            ),
            WorkloadArg::Objects => format!(
                "transactions of {keys_per_transaction} records, each written with probability {}; {records} records \
                 of {value_size} bytes; {}",
                self.write_share(),
                workload.distribution
            ),
            WorkloadArg::Tatp => format!("tatp with {records} subscribers"),
            WorkloadArg::Smallbank => format!("smallbank with {records} accounts"),
        };
        format!("{what}; {threads} threads of {tasks} tasks")
    }

    /// What the check after the run has found.
    fn verified(&self) -> &'static str {
        match self.workload {
            WorkloadArg::YcsbT => "the counters of all records add up",
            WorkloadArg::Tatp => "each subscriber has its changes and its call forwardings",
            WorkloadArg::Smallbank => "each account has its balance",
            WorkloadArg::Objects => "each object has counted its updates",
        }
    }

    fn write_share(&self) -> f64 {
        self.write_share.unwrap_or(0.5)
    }

    /// The benchmark with tables of its own; `None` for YCSB-T.
    fn benchmark(&self, records: u64, keys: u64) -> Result<Option<AnyBenchmark>, String> {
        Ok(Some(match self.workload {
            WorkloadArg::YcsbT => return Ok(None),
            WorkloadArg::Tatp => AnyBenchmark::Tatp(Tatp::new(records)?),
            WorkloadArg::Smallbank => AnyBenchmark::SmallBank(SmallBank::new(records)?),
            WorkloadArg::Objects => AnyBenchmark::Objects(Objects::new(objects::Plan {
                objects: records,
                len: self.value_size.unwrap_or(100) as usize,
                keys: keys as usize,
                write_share: self.write_share(),
                distribution: self.distribution(),
            })?),
        }))
    }

    fn distribution(&self) -> Distribution {
        match self.workload {
            WorkloadArg::Smallbank => Distribution::Hotspot {
                data_fraction: SmallBank::HOT_DATA,
                operation_fraction: SmallBank::HOT_SHARE,
            },
            _ => self.zipf.unwrap_or(Distribution::Uniform),
        }
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        let mix = Mix::new([0.0, 1.0, 0.0, 0.0, 0.0]);
        let (operations, seconds) = self.measure.limits(&Chosen::default());
        let records = self.records.unwrap_or(if self.workload.has_tables() { 100_000 } else { 1_000_000 });
        let keys = self.keys.unwrap_or(2);
        let benchmark = self.benchmark(records, keys).map_err(Failure::Error)?;
        let workload = Workload {
            name: self.workload.name().into(),
            records,
            operations: operations.unwrap_or(0),
            mix: mix.expect("one of the shares is not 0"),
            distribution: self.distribution(),
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
        let (rows, value_size) = match &benchmark {
            Some(benchmark) => (benchmark.writes_max(), benchmark.value_len()),
            None => (keys, self.value_size.unwrap_or(512) as usize),
        };
        let writes_max = writes_max(rows, value_size);
        let transacting = Transacting { lanes: Some(lanes), prepare, writes_max, ..Transacting::NONE };
        Ok(SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size,
            collision_free: self.collision_free,
            verify: self.verify,
            keys_per_transaction: if self.workload.has_tables() { 0 } else { keys as usize },
            benchmark,
            transacting,
            ..self.measure.config(self.system, workload, operations, seconds)?
        })
    }
}

/// Number of bytes that a transaction with this number of rows may write; `None` if every store allows it.
fn writes_max(rows: u64, value_len: usize) -> Option<u32> {
    /// Number of rows, and of bytes, that a transaction can write in any store.
    const ROWS: u64 = 4;
    const BYTES: u64 = 48 << 10;
    /// Bytes of a row beside its value: the key, and headers of the store.
    const BESIDE: u64 = 128;
    /// Every store has room for a write with the longest key.
    const LEAST: u64 = 2 << 10;
    let bytes = (rows * (value_len as u64 + BESIDE)).max(LEAST);
    // One row of any length is possible.
    let is_large = rows > ROWS || (rows > 1 && bytes > BYTES);
    is_large.then(|| u32::try_from(bytes).unwrap_or(u32::MAX))
}

/// Returns the report of each kind of transaction.
fn mix(kinds: &[(&'static str, Kind)], report: &YcsbReport) -> BTreeMap<String, KindReport> {
    let of = |(name, kind): &(&'static str, Kind)| {
        let count = report.operations.get(*name).map_or(0, |done| done.count);
        let done = KindReport {
            ops_per_s: count as f64 / report.seconds,
            commits: kind.commits,
            success_rate: kind.success_rate(),
            abort_rate: kind.tries.abort_rate(),
            errors: kind.errors,
        };
        ((*name).to_owned(), done)
    };
    kinds.iter().map(of).collect()
}
