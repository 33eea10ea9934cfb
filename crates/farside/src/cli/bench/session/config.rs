//! Holds the plan of a measurement, and computes the size of the store that the measurement needs.

use super::super::{ExistingNode, FabricArg, System, fewer};
use super::COUNTED;
use super::pace::Step;
use crate::cli::{Done, Failure};
use farside_bench::index::NameKind;
use farside_bench::oltp::Benchmark as _;
use farside_bench::oltp::any::AnyBenchmark;
use farside_bench::workload::{Operation, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_remote::arena::Geometry;
use farside_systems::index::Rung;
use farside_systems::latch::Latching;
use farside_systems::registry::default_kv;
use farside_systems::rpc::echo::Asking;
use farside_systems::system::{Family, Footprint, Sizing, SizingError};
use farside_systems::txn::{Transacting, prism_tx};
use std::path::PathBuf;
use std::time::Duration;

/// Default duration of each thread's warm-up.
const WARM_UP: Duration = Duration::from_millis(500);
/// Maximum number of operations in the sample whose costs are counted.
const COUNTED_MAX: u64 = COUNTED + Step::MAX;
/// Default value of N if one operation in N is timed.
pub(in crate::cli) const SAMPLED: u64 = 64;

/// The plan of a measurement.
#[derive(Clone)]
pub(in crate::cli) struct SessionConfig {
    pub(in crate::cli) system: System,
    /// Fabric to the node that is started. For an existing node: the fabric that the node's URL must have, if any is
    /// given.
    pub(in crate::cli) fabric: Option<FabricArg>,
    /// The existing node to measure, if the user named one.
    pub(in crate::cli) existing: ExistingNode,
    /// Pause of each task before every operation.
    pub(in crate::cli) idle: Option<Duration>,
    pub(in crate::cli) workload: Workload,
    pub(in crate::cli) value_size: usize,
    /// Number of items that the store's table is sized for; by default the maximum number of records of the run.
    pub(in crate::cli) items: Option<u64>,
    pub(in crate::cli) threads: u32,
    pub(in crate::cli) tasks: u32,
    pub(in crate::cli) slot_cache: usize,
    /// Bytes in which each task caches values.
    pub(in crate::cli) value_cache: usize,
    /// Length of a value from which clients write it themselves, if not that of the store.
    pub(in crate::cli) put_threshold: Option<usize>,
    pub(in crate::cli) collision_free: bool,
    pub(in crate::cli) verify: bool,
    /// Whether each task keeps to the keys of one node.
    pub(in crate::cli) by_node: bool,
    /// Kind of the keys of an index. Other stores have numbers.
    pub(in crate::cli) names: NameKind,
    /// How many of its techniques a new index uses; if absent, all.
    pub(in crate::cli) rung: Option<Rung>,
    /// Number of replicas of a block store, each on a node of its own; `None` for stores of another family.
    pub(in crate::cli) replicas: Option<u32>,
    /// How clients synchronize, and where latches lie, in a store of latched objects.
    pub(in crate::cli) latching: Latching,
    /// Length of the leases of clients; only for latched objects, and only as an option.
    pub(in crate::cli) lease: Option<Duration>,
    /// Number of records of a transaction, and options of a transactional store.
    pub(in crate::cli) keys_per_transaction: usize,
    pub(in crate::cli) transacting: Transacting,
    /// Benchmark with tables of its own. Each of its units counts as a record.
    pub(in crate::cli) benchmark: Option<AnyBenchmark>,
    /// Number of nodes that answer calls, and the calls of an operation; `None` for stores of another family.
    pub(in crate::cli) calls: Option<(u32, Asking)>,
    /// Network delay to add to the real one.
    pub(in crate::cli) distance: Option<Distance>,
    pub(in crate::cli) faults: Option<Faults>,
    pub(in crate::cli) quiet: bool,
    /// One operation in this number is timed.
    pub(in crate::cli) sampled: u64,
    /// Rate of an open loop, in operations a second; `None` for a closed loop.
    pub(in crate::cli) target: Option<f64>,
    /// Maximum number of operations of a repeat.
    pub(in crate::cli) operations: Option<u64>,
    /// Maximum seconds of a repeat, from which the memory for inserted records is computed.
    pub(in crate::cli) seconds: f64,
    pub(in crate::cli) warm_up: Duration,
    pub(in crate::cli) repeats: u32,
    pub(in crate::cli) log: Option<Log>,
    pub(in crate::cli) phases: Phases,
    /// Seed of all random draws.
    pub(in crate::cli) seed: u64,
}

/// Seed of all random draws of a measurement, unless it has several processes.
pub(in crate::cli) const SEED: u64 = 42;

/// Log file of latencies, in intervals of length `every`.
#[derive(Clone)]
pub(in crate::cli) struct Log {
    pub(in crate::cli) path: PathBuf,
    pub(in crate::cli) every: Duration,
}

/// Phases of YCSB to run, and the name of their store.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::cli) enum Phases {
    /// Load a store that exists only for the run, and run on it.
    Both,
    /// Only create the store with this name, and load it.
    Load(String),
    /// Only run on the store with this name, which is already loaded.
    Run(String),
    /// Load the existing store with this name, run on it, and keep it.
    Within(String),
}

impl SessionConfig {
    /// Creates a plan with one client thread and 16 tasks, in a closed loop, on a new store.
    pub(in crate::cli) fn new(system: System, workload: Workload) -> SessionConfig {
        SessionConfig {
            system,
            fabric: None,
            existing: ExistingNode::default(),
            idle: None,
            workload,
            value_size: 512,
            items: None,
            threads: 1,
            tasks: 16,
            slot_cache: 0,
            value_cache: 0,
            put_threshold: None,
            collision_free: false,
            verify: false,
            by_node: false,
            names: NameKind::Numbers,
            rung: None,
            replicas: None,
            latching: Latching::NONE,
            lease: None,
            keys_per_transaction: 1,
            transacting: Transacting::NONE,
            benchmark: None,
            calls: None,
            distance: None,
            faults: None,
            quiet: false,
            sampled: SAMPLED,
            target: None,
            operations: None,
            seconds: 5.0,
            warm_up: WARM_UP,
            repeats: 1,
            log: None,
            phases: Phases::Both,
            seed: SEED,
        }
    }

    /// Returns the number of nodes to start.
    pub(super) fn nodes(&self) -> u32 {
        self.replicas.or(self.calls.map(|(nodes, _)| nodes)).unwrap_or(1)
    }

    /// Returns the number of items that the store's table is sized for.
    pub(super) fn items(&self) -> u64 {
        self.items.unwrap_or_else(|| self.records_max())
    }

    /// Returns the size of the store and of its items.
    pub(super) fn sizing(&self) -> Sizing {
        Sizing {
            items: Some(self.items()),
            key_len: self.names.len_max(),
            value_len: self.value_size,
            collision_free: self.collision_free,
            latching: self.latching,
            lease: self.lease,
            transacting: self.transacting,
            ..Sizing::default()
        }
    }

    /// Returns the memory that the store needs for its table and for each item.
    pub(super) fn footprint(&self) -> Result<Footprint, SizingError> {
        (self.system.footprint)(&self.sizing())
    }

    /// Checks that the table has space for all records that the run may create. A smaller table would grow or become
    /// full during the measurement.
    ///
    /// # Errors
    /// The table is too small.
    pub(in crate::cli) fn check_items(&self) -> Done {
        let (records, needed) = (self.workload.records, self.records_max());
        let contents = match needed - records {
            0 => format!("{records} records"),
            inserts => format!("{records} records and up to {inserts} inserts of the run"),
        };
        match self.items {
            Some(items) if items < needed => Err(Failure::Error(format!(
                "--items {items} is too small for {contents}: give at least {needed}, or omit --items"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the maximum number of records in the store after the run.
    fn records_max(&self) -> u64 {
        let rows = self.benchmark.as_ref().map_or(1, |benchmark| benchmark.rows_of_unit());
        self.workload.records.saturating_mul(rows).saturating_add(self.inserts_max())
    }

    /// Returns the maximum number of records that the run inserts, including its sample and its warm-ups. If neither a
    /// target rate nor a number of operations limits the run, the speed of the cores does.
    fn inserts_max(&self) -> u64 {
        /// Maximum operations a second of one core: 1.5 times the rate that was measured with 5 % inserts.
        const OPS_PER_S_MAX: f64 = 6e6;
        /// Maximum time between the starts of two threads' measurements, in seconds. The earlier thread inserts records
        /// meanwhile.
        const LATE_S: f64 = 0.004;
        let share = self.workload.mix.share(Operation::Insert);
        if share == 0.0 {
            return 0;
        }
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let tasks = f64::from(self.threads * self.tasks);
        let can = OPS_PER_S_MAX * f64::from(self.threads.min(cores));
        let busy = self.target.unwrap_or(can).min(can);
        // Tasks pause only after the warm-up.
        let idle = self.idle.map_or(busy, |idle| busy.min(tasks / idle.as_secs_f64()));
        let requested = self.operations.map_or(f64::INFINITY, |operations| operations as f64);
        let measured = requested.min(idle * (self.seconds + LATE_S * f64::from(self.threads - 1)));
        let each = busy * self.warm_up.as_secs_f64() + measured + tasks;
        let expected = share * (each * f64::from(self.repeats) + COUNTED_MAX as f64);
        // Operations are drawn at random. In practice, their number never exceeds the mean by four standard deviations.
        (expected + 4.0 * expected.sqrt() + 16.0) as u64
    }

    /// Returns the remedy for the error that there is not enough memory for the run.
    pub(super) fn remedy(&self) -> String {
        let fewer = match self.system.family {
            Family::Blocks => "give fewer --blocks or a smaller --block",
            Family::Latched => "give fewer --objects or a smaller --size",
            _ => fewer(self.items),
        };
        let inserts = self.inserts_max();
        // A few inserts are not the reason for a lack of memory.
        if inserts <= self.workload.records.max(COUNTED_MAX) {
            return fewer.into();
        }
        format!(
            "{fewer}; or, since the run may insert up to {inserts} records, lower --operations, --target, --seconds, \
             --warm-up or --repeats"
        )
    }
}

/// Returns the quota of a store in bytes: for its table, its items, and the buffers that overwrites have retired and
/// the grace period has not yet freed. Returns 0 if the store exists.
///
/// # Errors
/// The system does not support values of that size, or no store can be that large.
pub(super) fn quota(config: &SessionConfig) -> Result<u64, Failure> {
    const SLACK: u64 = 96 << 20;
    if matches!(config.phases, Phases::Run(_) | Phases::Within(_)) {
        return Ok(0);
    }
    let records = config.records_max();
    let no_room = || {
        Failure::Error(format!(
            "the run may need {records} records, which is more than any node can hold: {}",
            config.remedy()
        ))
    };
    let Footprint { table_bytes, item_bytes, .. } = config.footprint().map_err(|misfit| match misfit {
        SizingError::Items => no_room(),
        SizingError::Value(max) => Failure::Error(format!(
            "a value of {} has at most {max} bytes: give a smaller --value-size, or --system {}",
            config.system.title,
            if config.system.family == Family::Txn { prism_tx::KIND } else { default_kv().kind }
        )),
        SizingError::Writes(max) => Failure::Error(format!(
            "a transaction of {} writes at most {max} bytes, and one of this run may write {}: give fewer --keys or a \
             smaller --value-size",
            config.system.title,
            config.transacting.writes_max.unwrap_or_default()
        )),
    })?;
    let items = u128::from(records) * u128::from(item_bytes);
    let on_the_way = (u64::from(config.threads * config.tasks) * item_bytes * 1024).min(1 << 30);
    let bytes = u128::from(table_bytes) + items + items / 16 + u128::from(on_the_way + SLACK);
    if bytes > Geometry::SIZE_MAX.into() {
        return Err(no_room());
    }
    Ok((bytes as u64).next_multiple_of(1 << 20))
}
