//! `bench blocks`: reads and writes of whole blocks, each on several replicas.

use super::session::{Measured, Phases, Replicas, SessionConfig};
use super::{ExistingNode, FabricArg, Measure, System, check, show, systems};
use crate::cli::volume::block;
use crate::cli::{Done, Failure};
use farside_bench::workload::{Chosen, Distribution, Lengths, Mix, Workload};
use farside_systems::blocks::prism_rs;
use farside_systems::registry::named;
use farside_systems::system::Family;
use std::time::Duration;

/// Read and write blocks on several replicas.
#[derive(clap::Args, Clone)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(super) struct Blocks {
    /// System to measure
    #[arg(long, value_name = "SYSTEM", value_parser = systems(&[Family::Blocks]), default_value = prism_rs::KIND)]
    system: System,
    /// Fabric to the nodes that the command starts [default: shm; with --pool, the URLs decide]
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// Number of replicas of each block: 1, 3 or 5. The command starts as many nodes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = replicas)]
    replicas: u32,
    /// Length of a block: a multiple of 512, at most 32KiB
    #[arg(long, value_name = "BYTES", default_value = "4KiB", value_parser = block)]
    block: u32,
    /// Number of blocks; all are written before the measurement
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    blocks: u64,
    /// Share of operations that are reads, from 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.5, value_parser = share)]
    reads: f64,
    /// Distribution of the blocks: uniform, zipfian, zipfian:THETA (0.001 to 10), latest, hotspot or exponential
    #[arg(long, value_name = "NAME", default_value = "uniform", value_parser = distribution)]
    distribution: Distribution,
    #[command(flatten)]
    measure: Measure,
    /// Check all bytes of each block, and that each block is linearizable: no write torn, lost, or seen again after a
    /// newer one. Takes time and 16 bytes per block
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    existing: ExistingNode,
    /// Use this volume of --pool instead of creating one: overwrite all of its blocks, and keep it. With --verify, a
    /// new client reads and checks every block at the end
    #[arg(long, value_name = "NAME", requires = "pool")]
    #[arg(conflicts_with_all = ["block", "blocks", "replicas", "system"])]
    volume: Option<String>,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// Parses, for clap, the share of reads.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is not a share of operations: give 0 to 1"))
}

/// Parses, for clap, the number of replicas.
fn replicas(text: &str) -> Result<u32, String> {
    let replicas = text.parse().ok().filter(|replicas| [1, 3, 5].contains(replicas));
    replicas.ok_or_else(|| format!("'{text}' replicas are not possible: give 1, 3 or 5"))
}

/// Parses, for clap, a distribution.
fn distribution(text: &str) -> Result<Distribution, String> {
    Distribution::named(text).ok_or_else(|| {
        format!("unknown distribution '{text}': name one of {}, or zipfian:0.9", Distribution::NAMES)
    })
}

impl Blocks {
    pub(super) fn run(self) -> Done {
        if self.existing.has_pool() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Error("--fabric local runs the nodes in this process: omit --pool".into()));
        }
        self.measure.check_log()?;
        let config = self.config()?;
        let duration = Duration::from_secs_f64(config.seconds);
        let (is_kept, verify) = (self.volume.is_some(), self.verify);
        let SessionConfig { workload, threads, tasks, value_size, replicas, .. } = &config;
        note!(
            "{} of {value_size} bytes, {} replicas each; {}; {}; {threads} threads of {tasks} tasks",
            workload.records,
            replicas.expect("it is a store of blocks"),
            workload.mix,
            workload.distribution
        );
        let session = Measured::<Replicas>::start(config)?;
        let report = self.measure.report_and(session, duration, |session, report| {
            if is_kept && verify {
                note!("reading all blocks back ...");
                let tally = session.read_back()?;
                if let Some(first) = tally.failures.first() {
                    note!("farside: first failure of the blocks that were read back: {first}");
                }
                report.errors += tally.errors;
                report.violations += tally.violations;
                report.read_back = Some(report.records);
            }
            Ok(())
        })?;
        match self.json {
            true => print_line!("{}", serde_json::to_string(&report)?),
            false => {
                show(&report)?;
                if let Some(stall) = report.longest_stall_ms {
                    print_line!("longest stall of a task: {stall:.1} ms");
                }
                if let Some(blocks) = report.read_back {
                    print_line!("{blocks} blocks read back by a new client");
                }
            }
        }
        check(report.errors, report.violations)
    }

    fn config(&self) -> Result<SessionConfig, Failure> {
        let mix = Mix::new([self.reads, 1.0 - self.reads, 0.0, 0.0, 0.0]);
        let (operations, seconds) = self.measure.limits(&Chosen::default());
        let Store { system, block, blocks, replicas } = self.store()?;
        let workload = Workload {
            name: "blocks".into(),
            records: blocks,
            operations: operations.unwrap_or(0),
            mix: mix.expect("one of both shares is not 0"),
            distribution: self.distribution,
            scan_max: 1,
            lengths: Lengths::Constant,
            chosen: Chosen::default(),
            unused: Vec::new(),
        };
        Ok(SessionConfig {
            fabric: self.fabric,
            existing: self.existing.clone(),
            value_size: block as usize,
            replicas: Some(replicas),
            verify: self.verify,
            phases: self.volume.clone().map_or(Phases::Both, Phases::Within),
            ..self.measure.config(system, workload, operations, seconds)?
        })
    }

    /// Returns the shape of the store to measure: that of the volume, or what the flags say.
    fn store(&self) -> Result<Store, Failure> {
        let Some(name) = &self.volume else {
            let Blocks { system, block, blocks, replicas, .. } = *self;
            return Ok(Store { system, block, blocks, replicas });
        };
        let volume = self.existing.connect()?.volume_stat(name)?;
        let [group] = &volume.groups[..] else {
            return Err(Failure::Error(format!(
                "volume '{name}' has {} groups, and one store is measured: use a volume that was created with \
                 --groups 1",
                volume.groups.len()
            )));
        };
        let system = named(&volume.kind).expect("the volume was opened, so its kind is known");
        Ok(Store { system, block: volume.block, blocks: group.blocks, replicas: group.replicas.len() as u32 })
    }
}

/// Shape of the store to measure.
struct Store {
    system: System,
    block: u32,
    blocks: u64,
    replicas: u32,
}
