//! What is to be measured, and the store that this takes.

use super::super::{FabricArg, System};
use crate::cli::Failure;
use farside_bench::driver::{Plan, Run};
use farside_bench::workload::{Operation, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_remote::arena::class::Class;
use farside_systems::kv::pilaf::layout as pilaf;
use farside_systems::kv::prism_kv::layout as prism_kv;
use farside_systems::kv::prism_kv::layout::{HEADER_SIZE, ITEM_MAX, PART_MAX, SLOT_SIZE};
use std::path::PathBuf;
use std::time::Duration;

/// How long each thread runs before it is measured, if nobody says.
const WARM_UP: Duration = Duration::from_millis(500);
/// One latency is taken in so many operations, if nobody says.
pub(in crate::cli) const SAMPLED: u64 = 64;

/// What is to be measured.
#[derive(Clone)]
pub(in crate::cli) struct Asked {
    pub(in crate::cli) system: System,
    /// Of the node that is started for it; of one that is named, what it is reached by, if that was said.
    pub(in crate::cli) fabric: Option<FabricArg>,
    pub(in crate::cli) pool: Option<String>,
    pub(in crate::cli) token_file: Option<String>,
    pub(in crate::cli) tls_ca: Option<String>,
    pub(in crate::cli) insecure_udp: bool,
    /// How long each task waits before each operation, if it does.
    pub(in crate::cli) idle: Option<Duration>,
    pub(in crate::cli) workload: Workload,
    pub(in crate::cli) value_size: usize,
    /// Items that the store's table is made for, if not as many as there will be.
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
            pool: None,
            token_file: None,
            tls_ca: None,
            insecure_udp: false,
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
        self.items.unwrap_or_else(|| self.workload.records + self.inserts_expected())
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
        Run::new(plan).map_err(Failure::Told)
    }

    /// Records that the run is going to add, so that there is room for them: as many as there can be, if nobody says.
    pub(super) fn inserts_expected(&self) -> u64 {
        const OPS_PER_S_MAX: f64 = 4e6;
        let share = self.workload.mix.share(Operation::Insert);
        let operations = match (self.operations, self.target) {
            (Some(operations), _) => operations as f64,
            (None, target) => target.unwrap_or(OPS_PER_S_MAX) * (self.seconds + self.warm_up.as_secs_f64()),
        };
        (operations * share * f64::from(self.repeats)) as u64
    }
}

/// Slots of the table for so many items.
pub(super) fn slots(system: System, items: u64) -> u64 {
    let slots = match system {
        System::PrismKv => prism_kv::slots_for(items),
        System::Pilaf => pilaf::slots_for(items),
    };
    slots.expect("fewer items can be asked for than the largest table has room for")
}

/// Bytes for a table and the items, with room for what is on its way back while they are overwritten.
///
/// # Errors
/// The system has no items of that size.
pub(super) fn quota(asked: &Asked) -> Result<u64, Failure> {
    const KEY_SIZE: usize = 8;
    const STATE_SIZE: u64 = 16;
    const SLACK: u64 = 96 << 20;
    let records = asked.workload.records + asked.inserts_expected();
    let (system, tasks) = (asked.system, asked.threads * asked.tasks);
    let item = HEADER_SIZE + KEY_SIZE + asked.value_size;
    const _: () = assert!(HEADER_SIZE == pilaf::HEADER_SIZE && ITEM_MAX == pilaf::ITEM_MAX);
    if system == System::Pilaf && item > ITEM_MAX {
        return Err(Failure::Told(format!(
            "a value of Pilaf has at most {} bytes here: give a smaller --value-size, or --system prism-kv",
            pilaf::PAIR_MAX - KEY_SIZE
        )));
    }
    let whole = (item / PART_MAX) as u64;
    let size_of = |len: usize| {
        let class = Class::for_len(len).expect("a buffer holds any item of one piece, and any part");
        u64::from(class.size) + STATE_SIZE
    };
    let each = if item <= ITEM_MAX {
        size_of(item)
    } else {
        whole * size_of(PART_MAX) + size_of(item % PART_MAX) + size_of(ITEM_MAX / 8)
    };
    let table = slots(system, asked.items())
        * match system {
            System::PrismKv => SLOT_SIZE,
            System::Pilaf => pilaf::ENTRY_SIZE,
        };
    let items = records * each;
    let on_the_way = u64::from(tasks) * each * 1024;
    Ok((table + items + items / 16 + on_the_way.min(1 << 30) + SLACK).next_multiple_of(1 << 20))
}
