//! What is to be measured, and the store that this takes.

use super::super::{FabricArg, System, There, fewer};
use super::COUNTED;
use super::pace::Step;
use crate::cli::{Done, Failure};
use farside_bench::kv::{Plan, Run};
use farside_bench::workload::{Operation, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_remote::arena::Geometry;
use farside_systems::registry::usual;
use farside_systems::system::{Footprint, Misfit, Sizing};
use std::path::PathBuf;
use std::time::Duration;

/// How long each thread runs before it is measured, if nobody says.
const WARM_UP: Duration = Duration::from_millis(500);
/// So many operations at the most are counted one by one, to tell what they cost.
const COUNTED_MAX: u64 = COUNTED + Step::MAX;
/// One latency is taken in so many operations, if nobody says.
pub(in crate::cli) const SAMPLED: u64 = 64;

/// Bytes of a key.
const KEY_SIZE: usize = 8;

/// What is to be measured.
#[derive(Clone)]
pub(in crate::cli) struct Asked {
    pub(in crate::cli) system: System,
    /// Of the node that is started for it; of one that is named, what it is reached by, if that was said.
    pub(in crate::cli) fabric: Option<FabricArg>,
    /// The node that is named, if one is.
    pub(in crate::cli) there: There,
    /// How long each task waits before each operation, if it does.
    pub(in crate::cli) idle: Option<Duration>,
    pub(in crate::cli) workload: Workload,
    pub(in crate::cli) value_size: usize,
    /// Items that the store's table is made for, if that was said; as many as there can come to be, if not.
    pub(in crate::cli) items: Option<u64>,
    pub(in crate::cli) threads: u32,
    pub(in crate::cli) tasks: u32,
    pub(in crate::cli) slot_cache: usize,
    pub(in crate::cli) collision_free: bool,
    pub(in crate::cli) verify: bool,
    /// How far away the node is to be, besides what is there.
    pub(in crate::cli) distance: Option<Distance>,
    pub(in crate::cli) faults: Option<Faults>,
    pub(in crate::cli) quiet: bool,
    /// One latency is taken in so many operations.
    pub(in crate::cli) sampled: u64,
    /// Operations a second that are due, in place of a closed loop.
    pub(in crate::cli) target: Option<f64>,
    /// Operations after which a repeat is over, if not before.
    pub(in crate::cli) operations: Option<u64>,
    /// Seconds that a repeat takes, if it is not over before: for how much memory it needs.
    pub(in crate::cli) seconds: f64,
    pub(in crate::cli) warm_up: Duration,
    pub(in crate::cli) repeats: u32,
    pub(in crate::cli) log: Option<Log>,
    pub(in crate::cli) phases: Phases,
}

/// Latencies by intervals of time, in a file.
#[derive(Clone)]
pub(in crate::cli) struct Log {
    pub(in crate::cli) path: PathBuf,
    pub(in crate::cli) every: Duration,
}

/// What of YCSB's two phases is to be done, on which store.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::cli) enum Phases {
    /// Both, on a store that is made for it and goes with it.
    Both,
    /// Makes this store and loads it.
    Load(String),
    /// Runs on this store, which was loaded before.
    Run(String),
}

impl Asked {
    /// One client thread that reads and writes a store of its own in a closed loop.
    pub(in crate::cli) fn new(system: System, workload: Workload) -> Asked {
        Asked {
            system,
            fabric: None,
            there: There::default(),
            idle: None,
            workload,
            value_size: 512,
            items: None,
            threads: 1,
            tasks: 16,
            slot_cache: 0,
            collision_free: false,
            verify: false,
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
        }
    }

    /// Items that the store's table is made for.
    pub(super) fn items(&self) -> u64 {
        self.items.unwrap_or_else(|| self.records_max())
    }

    /// The memory that the store takes.
    pub(super) fn footprint(&self) -> Result<Footprint, Misfit> {
        let (items, value_len) = (Some(self.items()), self.value_size);
        let sizing = Sizing { items, key_len: KEY_SIZE, value_len, collision_free: self.collision_free };
        (self.system.footprint)(&sizing)
    }

    /// Whether the table has room for all that can come to be: one that has not would grow while it is measured, or be
    /// full.
    ///
    /// # Errors
    /// It has not.
    pub(in crate::cli) fn check_items(&self) -> Done {
        let (records, needed) = (self.workload.records, self.records_max());
        let who = match needed - records {
            0 => format!("{records} records"),
            inserts => format!("{records} records and up to {inserts} that the run may insert"),
        };
        match self.items {
            Some(items) if items < needed => Err(Failure::Told(format!(
                "--items {items} leaves no room for {who}: give {needed} at least, or leave it out"
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn planned(&self) -> Result<Run, Failure> {
        let plan = Plan {
            workload: self.workload.clone(),
            value_size: self.value_size,
            tasks: self.threads * self.tasks,
            verify: self.verify,
            sampled: self.sampled,
            seed: 42,
        };
        plan.run().map_err(Failure::Told)
    }

    /// Records that there are at the most once the run is over.
    fn records_max(&self) -> u64 {
        self.workload.records.saturating_add(self.inserts_max())
    }

    /// Records that the run adds at the most, by what is sampled and its warm-ups, too. Where nobody says how much it
    /// does, that is as much as the cores can.
    fn inserts_max(&self) -> u64 {
        /// Of one core; half as many again as were seen where one operation in twenty inserts.
        const OPS_PER_S_MAX: f64 = 6e6;
        /// How much later than the one before a thread may begin to be measured, while those before go on.
        const LATE_S: f64 = 0.004;
        let share = self.workload.mix.share(Operation::Insert);
        if share == 0.0 {
            return 0;
        }
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let tasks = f64::from(self.threads * self.tasks);
        let can = OPS_PER_S_MAX * f64::from(self.threads.min(cores));
        let busy = self.target.unwrap_or(can).min(can);
        // Whoever idles does so once it is warm.
        let idle = self.idle.map_or(busy, |idle| busy.min(tasks / idle.as_secs_f64()));
        let asked = self.operations.map_or(f64::INFINITY, |operations| operations as f64);
        let measured = asked.min(idle * (self.seconds + LATE_S * f64::from(self.threads - 1)));
        let each = busy * self.warm_up.as_secs_f64() + measured + tasks;
        let expected = share * (each * f64::from(self.repeats) + COUNTED_MAX as f64);
        // Operations are drawn: more than four deviations above what is expected, nobody ever sees.
        (expected + 4.0 * expected.sqrt() + 16.0) as u64
    }

    /// What to do where there is no memory for it.
    pub(super) fn remedy(&self) -> String {
        let fewer = fewer(self.items);
        let inserts = self.inserts_max();
        // Where there are few, it is not by them that there is no memory.
        if inserts <= self.workload.records.max(COUNTED_MAX) {
            return fewer.into();
        }
        format!(
            "{fewer}; or, as the run may insert up to {inserts} more, for less of --operations, --target, --seconds, \
             --warm-up or --repeats"
        )
    }
}

/// Bytes for a table and the items, with room for what is on its way back while they are overwritten. None for a run
/// on a store that is there.
///
/// # Errors
/// The system has no items of that size, or no store is so large.
pub(super) fn quota(asked: &Asked) -> Result<u64, Failure> {
    const SLACK: u64 = 96 << 20;
    if matches!(asked.phases, Phases::Run(_)) {
        return Ok(0);
    }
    let records = asked.records_max();
    let no_room = || {
        Failure::Told(format!(
            "no node has room for the {records} records that there can come to be: {}",
            asked.remedy()
        ))
    };
    let Footprint { table_bytes, item_bytes, .. } = asked.footprint().map_err(|misfit| match misfit {
        Misfit::Items => no_room(),
        Misfit::Value(max) => Failure::Told(format!(
            "a value of {} has at most {max} bytes here: give a smaller --value-size, or --system {}",
            asked.system.title,
            usual().kind
        )),
    })?;
    let items = u128::from(records) * u128::from(item_bytes);
    let on_the_way = (u64::from(asked.threads * asked.tasks) * item_bytes * 1024).min(1 << 30);
    let bytes = u128::from(table_bytes) + items + items / 16 + u128::from(on_the_way + SLACK);
    if bytes > Geometry::SIZE_MAX.into() {
        return Err(no_room());
    }
    Ok((bytes as u64).next_multiple_of(1 << 20))
}
